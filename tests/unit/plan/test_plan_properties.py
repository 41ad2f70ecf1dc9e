"""What a plan promises, whatever the options: prices that grow with the work, limits that arrive, keys that tell."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import H200

from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.cases import PlannedItem, groups_of, repeat_estimate_s, start_estimate_s
from pytest_slmserve.plan.planner import (
    USUAL_LOADS,
    Planner,
    check_there,
    engine_spec,
    gpus_cases,
    job_case,
    point_cases,
    replica_load,
    workload_spec,
)
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB, ClosedLoop, EngineSpec, OpenLoop, Request, Workload, WorkloadSpec
from pytest_slmserve.telemetry.host import Host

ENGINES = [EngineSpec("opt-1.3b", platform=name, kv_cache_bytes=64 * GIB) for name in ("cuda", "cpu")]


def workload(requests: int, prompt: int, output: int) -> Workload:
    return Workload(WorkloadSpec(), (Request((7,) * prompt, output),) * requests, "planted")


def job_s(spec: EngineSpec, requests: int, prompt: int, output: int, rate: float = float("inf")) -> float:
    return repeat_estimate_s(spec, workload(requests, prompt, output), OpenLoop(requests=requests, rate=rate))


def planner(**given: object) -> Planner:
    return Planner(read_options(given, {}, {}), "simulated", Host(Environment(platform="simulated"), "none"))


@pytest.mark.parametrize("spec", ENGINES, ids=lambda spec: spec.platform)
@settings(max_examples=25)
@given(st.integers(1, 300), st.integers(1, 500), st.integers(1, 300))
def test_more_work_is_never_cheaper(spec, requests, prompt, output):
    price = job_s(spec, requests, prompt, output)
    assert price < job_s(spec, 2 * requests, prompt, output)
    assert price < job_s(spec, requests, 2 * prompt, output)
    assert price < job_s(spec, requests, prompt, output + 1)


@pytest.mark.parametrize("model", ["opt-125m", "opt-1.3b", "opt-6.7b", "opt-13b", "qwen2.5-3b"])
def test_one_of_the_usual_loads_is_that_of_replicas_on_one_gpu(model):
    names = [case.id for case in gpus_cases(planner(), [model]) if case.id.endswith("-tp1")]
    loads = [int(name.split("-")[-2]) for name in names]
    assert replica_load(model) in loads and len(loads) == len(USUAL_LOADS) and loads == sorted(loads)


def test_prompts_cost_by_their_number_times_their_length():
    """On a CPU 1e-5 s for each token of a prompt, which neither a batch nor a step of the output changes."""
    cpu = ENGINES[1]
    assert job_s(cpu, 100, 400, 8) - job_s(cpu, 100, 200, 8) == pytest.approx(100 * 200 * 1e-5)
    steps_s = 8 * (2.5e-3 + 1.5e-4 * 100)
    assert job_s(cpu, 100, 400, 8) == pytest.approx(100 * 400 * 1e-5 + steps_s), "prompts and steps, nothing else"


def test_slow_arrivals_take_as_long_as_they_come_and_the_last_request():
    assert job_s(ENGINES[1], 10, 8, 8, rate=0.1) == pytest.approx(100 + 8 * (2.5e-3 + 1.5e-4 * 10))


def batched(batching: str, gpus: int = 1) -> EngineSpec:
    """An engine of Transformers on a CPU, of two requests at once."""
    options = read_options({"cpu": True, "tensor_parallel_size": str(gpus), "engine_arg": ["a=1"]}, {}, {})
    own = Planner(options, "cpu", Host(Environment(platform="cpu"), "none"))
    return job_case(own, "opt-tiny", 4, lengths=(8, 6), max_num_seqs=2, batching=batching).each[0]


@pytest.mark.parametrize(("batching", "steps"), [("none", 4 * 6), ("static", 2 * 6)])
def test_transformers_takes_each_batch_as_long_as_its_longest_output(batching, steps):
    spec = batched(batching, gpus=2)
    assert (spec.interface, spec.tensor_parallel_size) == ("transformers", 1)
    assert spec.extra == (("batching", batching), ("wait_s", 0.0)), "without arguments of vLLM"
    assert job_s(spec, 4, 8, 6) == pytest.approx(steps * 12e-3)


GIVEN = [
    ({"max_num_seqs": "17"}, "max_num_seqs", 17),
    ({"gpu_memory_utilization": "0.5"}, "gpu_memory_utilization", 0.5),
    ({"kv_cache_dtype": "fp8"}, "extra", (("kv_cache_dtype", "fp8"),)),
    ({"quantization": "fp8"}, "extra", (("quantization", "fp8"),)),
    ({"tensor_parallel_size": "2"}, "tensor_parallel_size", 2),
    ({"seed": "5"}, "seed", 5),
    ({"engine_arg": ["block_size=32"]}, "extra", (("block_size", 32),)),
    ({"env": ["VLLM_X=1"]}, "env", (("VLLM_X", "1"),)),
    ({"python": "/other/python"}, "python", "/other/python"),
]


@pytest.mark.parametrize(("asked", "name", "value"), GIVEN, ids=lambda x: str(x)[:30])
def test_what_is_typed_reaches_the_engine_and_makes_it_another(asked, name, value):
    usual, spec = (engine_spec(read_options(o, {}, {}), "cuda", "opt-1.3b", H200) for o in ({}, asked))
    assert getattr(spec, name) == value != getattr(usual, name)
    assert (spec.key != usual.key) is (name != "python"), "of an interpreter the versions count: its environment"


def test_a_smaller_share_of_the_memory_or_more_gpus_change_the_cache():
    def kv(**asked: object) -> int:
        return engine_spec(read_options(asked, {}, {}), "cuda", "opt-1.3b", H200).kv_cache_bytes

    assert kv(gpu_memory_utilization="0.5") < kv() < kv(tensor_parallel_size="2")
    assert kv(gpu_memory="80GiB") < kv()
    assert kv(engine_arg=["dtype=float32"]) < kv() == kv(engine_arg=["dtype=auto"]), "two bytes where nobody knows"


def test_lengths_reach_the_requests():
    spec = workload_spec(read_options({"input_len": "40", "output_len": "9", "seed": "3"}, {}, {}), "cuda")
    assert (spec.prompt_tokens, spec.output_tokens, spec.seed) == (40, 9, 3)


def test_a_grid_has_the_cases_of_a_smaller_one_and_no_key_twice():
    few, many = ({c.id: c.key for c in point_cases(planner(concurrency=n), {})} for n in ("1,4", "1,2,4,8"))
    assert few.items() < many.items() and len(set(many.values())) == len(many) == 2 * len(few)


def test_cases_have_one_key_if_they_measure_the_same_and_else_two():
    own = planner()
    facts = [{}, {"rate": 3}, {"requests": 5}, {"lengths": (8, 5)}, {"max_num_seqs": 3}, {"kv_requests": 2}]
    facts.append({"batching": "static"})

    def key(of: Planner, changed: dict[str, object]) -> str:
        return job_case(of, **{"model": "opt-125m", "requests": 4, "lengths": (8, 4), **changed}).key

    keys = [key(own, changed) for changed in facts]
    assert keys == [key(planner(), changed) for changed in facts]
    assert all(a != b for a, b in combinations(keys, 2))


def test_a_batch_of_transformers_waits_for_its_longest():
    spec = batched("static")
    uneven = Workload(WorkloadSpec(), tuple(Request((7,), n) for n in (1, 9, 4, 2)), "planted")
    assert repeat_estimate_s(spec, uneven, OpenLoop(requests=4)) == pytest.approx((9 + 4) * 12e-3)


def test_an_interpreter_of_its_own_is_looked_at_once(monkeypatch):
    looked, here = [], Environment(platform="cuda", vllm="0.30.0", git_commit="abc")
    other = Host(Environment(platform="cuda", vllm="0.31.0"), "none")
    monkeypatch.setattr("pytest_slmserve.plan.planner.probe", lambda *asked: looked.append(asked) or other)
    own = Planner(read_options({}, {}, {}), "cuda", Host(here, "none"))
    found = [own.environment(replace(ENGINES[0], python="/other/python")) for _ in range(2)]
    assert {(e.vllm, e.git_commit) for e in found} == {("0.31.0", "abc")} and len(looked) == 1
    assert own.environment(ENGINES[0]).vllm == "0.30.0" and len(looked) == 1


@pytest.mark.parametrize("pinned", [True, False])
def test_replicas_behind_urls_are_pinned_as_asked(pinned):
    options = read_options({"endpoint": "http://a:1,http://b:1", "models": "opt-125m"}, {}, {})
    own = Planner(options, "remote", Host(Environment(platform="remote"), "none"))
    found = own.replicas(["opt-125m"] * 2, pinned=pinned)
    assert found.pinned is pinned and [engine.url for engine in found.engines] == list(options.endpoint)


def test_processes_on_a_cpu_need_a_core_each():
    host = Host(Environment(platform="cpu", cores=2), "cpu")
    check_there(host, (0, 1))
    with pytest.raises(BadUsage, match="3 processes"):
        check_there(host, (0, 1, 2))


@pytest.mark.parametrize(("load_format", "own"), [("auto", True), ("dummy", False)])
def test_real_weights_have_their_own_tokenizer(monkeypatch, load_format, own):
    monkeypatch.setattr("pytest_slmserve.plan.planner.build_workload", lambda spec, known: spec)
    spec = planner(load_format=load_format, dataset="talks.json").workload("opt-125m")
    assert (spec.tokenizer != "") is own


def test_shorter_outputs_keep_prompts_and_one_token():
    for output, shorter in ((9, 2), (3, 1)):
        case = job_case(planner(), "opt-125m", requests=3, lengths=(5, output), shorter=4)
        assert [(len(r.prompt), r.output_tokens) for r in case.workloads[0].requests] == [(5, shorter)] * 3


def test_a_cache_for_more_requests_is_larger():
    cases = [job_case(planner(), "opt-125m", requests=9, lengths=(512, 256), kv_requests=n) for n in range(1, 9)]
    sizes = [case.each[0].kv_cache_bytes for case in cases]
    assert sizes == sorted(set(sizes))


def test_a_group_costs_its_start_and_its_cells_and_the_longest_is_first():
    engines = [replace(ENGINES[0], seed=i) for i in range(3)]
    cells = [PlannedItem("a", engine, s) for engine, s in zip(engines, (3.0, 9.0, 5.0), strict=True)]
    groups = groups_of([*cells, *(PlannedItem("b", engine, 1.0) for engine in engines)])
    assert [g.seconds - start_estimate_s(g.engine) for g in groups] == [10.0, 6.0, 4.0]


def test_a_closed_loop_of_a_longer_window_costs_as_much_more():
    five, nine = (ClosedLoop(4, window_s=s).duration_s(2.0) for s in (5.0, 9.0))
    assert nine - five == 4.0 and five == 1.5 * 2.0 + 5.0
