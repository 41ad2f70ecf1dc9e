"""Which nodes can measure, whether they are of one kind, and what an engine needs of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_slmserve.run.cluster import Need, Node, measuring, need_of, nodes_of, one_host
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB, EngineSpec, ReplicaSpec
from pytest_slmserve.telemetry.host import Gpu, Host

HEAD, NARROW, WIDE = Node("a", "head", 0, 4), Node("b", "narrow", 1, 16), Node("c", "wide", 4, 64)
MINE = Environment(pytest_slmserve="0.1.0", git_commit="mine")
H200 = Environment(platform="cuda", gpu_name="H200", driver="580", vllm="0.26.0", pytest_slmserve="0.1.0")
GPUS = tuple(Gpu(f"GPU-{i}", "H200", 141 * GIB, "580", "13.0") for i in range(8))


def row(name, alive=True, **resources):
    return {
        "NodeID": name * 8,
        "NodeName": name,
        "NodeManagerAddress": "10.0.0.1",
        "Alive": alive,
        "Resources": resources,
    }


def test_nodes_that_live_are_read_widest_first():
    rows = [row("a", CPU=4.0), row("b", CPU=16.0, GPU=2.0), row("c", alive=False)]
    assert nodes_of(rows) == [Node("b" * 8, "b (bbbbbbbb)", 2, 16), Node("a" * 8, "a (aaaaaaaa)", 0, 4)]


def test_a_resource_chooses_among_them():
    rows = [row("a", GPU=1.0, quiet=1.0), row("b", GPU=1.0), row("c", GPU=1.0, quiet=0.0)]
    assert [node.name[0] for node in nodes_of(rows, "quiet")] == ["a"]


def test_engines_of_gpus_are_measured_where_there_are_some():
    assert measuring([WIDE, NARROW, HEAD], "cuda") == [WIDE, NARROW]
    assert measuring([WIDE, HEAD], "simulated") == [WIDE]
    assert measuring([HEAD], "simulated") == [HEAD]
    assert measuring([WIDE, HEAD], "cpu") == [WIDE, HEAD]


def test_a_cluster_without_is_told():
    with pytest.raises(BadUsage, match="no node of this cluster offers a GPU .looked at 1"):
        measuring([HEAD], "cuda")
    with pytest.raises(BadUsage, match="offers a CPU"):
        measuring([replace(WIDE, cpus=0)], "cpu")


def test_an_engine_takes_its_gpus_and_one_cpu():
    on_two = EngineSpec("opt-13b", tensor_parallel_size=2)
    apart = ReplicaSpec(tuple(EngineSpec("opt-125m", gpu=i) for i in range(4)), "gpus")
    assert need_of(on_two, [WIDE, NARROW]) == Need(2, 1)
    assert need_of(apart, [WIDE, NARROW], "quiet") == Need(4, 1, "quiet")


def test_a_simulated_one_takes_gpus_where_there_are_any():
    simulated = EngineSpec("opt-125m", platform="simulated", tensor_parallel_size=2)
    assert need_of(simulated, [WIDE]) == Need(2, 1) and need_of(simulated, [HEAD]) == Need(0, 1)


def test_on_the_cpu_it_takes_a_whole_node():
    assert need_of(EngineSpec("opt-tiny", platform="cpu"), [HEAD, WIDE]) == Need(0, 4)


def test_more_than_any_node_has_is_refused():
    with pytest.raises(BadUsage, match="an engine takes 2 GPUs, and no node of this cluster has more than 1"):
        need_of(EngineSpec("opt-13b", tensor_parallel_size=2), [NARROW])


def test_gpus_of_two_nodes_do_not_add_up_and_a_node_without_cpus_for_tasks_will_do():
    assert not Need(2, 1).fits(NARROW)
    assert need_of(EngineSpec("opt-125m"), [replace(NARROW, cpus=0)]) == Need(1, 0)


def test_nodes_of_one_kind_are_one_host_with_the_gpus_of_the_widest():
    found = {NARROW: Host(H200, "GPU-0", (), GPUS[:1]), WIDE: Host(H200, "GPU-0", ("look twice",), GPUS)}
    host = one_host(found, MINE)
    assert host.gpus == GPUS[:4], "as many as Ray gives away"
    assert host.environment.git_commit == "mine" and host.environment.key == H200.key
    assert host.warnings == ("look twice",)


@pytest.mark.parametrize(
    ("fact", "other"), [("gpu_name", "H100"), ("driver", "570"), ("vllm", "0.25.0"), ("cpu", "another"), ("cores", 8)]
)
def test_nodes_of_different_kinds_are_refused_with_what_differs(fact, other):
    found = {NARROW: Host(H200, "x"), WIDE: Host(replace(H200, **{fact: other}), "y")}
    with pytest.raises(BadUsage, match=rf"of different kinds \({fact} .* on narrow, {other} on wide\)") as refused:
        one_host(found, MINE)
    assert "slm_ray_resource" in refused.value.hint


def test_so_is_another_release_of_ours():
    with pytest.raises(BadUsage, match="narrow has pytest-slmserve 0.0.9, and 0.1.0 asks"):
        one_host({NARROW: Host(replace(H200, pytest_slmserve="0.0.9"), "x")}, MINE)


def test_hosts_of_one_kind_do_not_differ():
    other = replace(H200, host="another", git_commit="y", python="3.12")
    assert one_host({NARROW: Host(H200, "x"), WIDE: Host(other, "y")}, MINE).environment.key == H200.key
