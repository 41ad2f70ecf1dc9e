"""The cases of each kind of test: their names, engines, requests and loads, and why one cannot be had."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from strategies import H200

from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.planner import (
    Planner,
    check_there,
    gpus_cases,
    job_case,
    job_cases,
    point_cases,
    replica_cases,
    replica_load,
)
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import kv_capacity
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB, ClosedLoop, ReplicaSpec
from pytest_slmserve.telemetry.host import Gpu, Host

GPUS = tuple(Gpu(f"GPU-{i}", "NVIDIA H200", 141 * GIB, "580", "13.0") for i in range(4))


def on_gpus(gpus: int = 4, **given: object) -> Planner:
    return Planner(read_options(given, {}, {}), "cuda", Host(H200, "GPU-0", gpus=GPUS[:gpus]))


def simulated(**given: object) -> Planner:
    return Planner(read_options(given, {}, {}), "simulated", Host(Environment(platform="simulated"), "none"))


def on_cpu(cores: int = 8, **given: object) -> Planner:
    return Planner(read_options({"cpu": True, **given}, {}, {}), "cpu", Host(Environment("cpu", cores=cores), "cpu"))


def behind(urls: str = "http://a:1/v1", **given: object) -> Planner:
    options = read_options({"endpoint": urls, "models": "opt-125m", **given}, {}, {})
    return Planner(options, "remote", Host(Environment(platform="remote"), "none"))


def told(cases: list[Case]) -> dict[str, str | None]:
    return {case.id: case.skip_reason for case in cases}


# Points


def test_points_are_those_of_the_sweeps_of_all_models():
    own = simulated(models="opt-125m,opt-1.3b", concurrency="2,8")
    cases = point_cases(own, {})
    assert list(told(cases)) == ["opt-125m-2", "opt-125m-8", "opt-1.3b-2", "opt-1.3b-8"]
    assert [case.model for case in cases] == ["opt-125m"] * 2 + ["opt-1.3b"] * 2
    assert [case.loads for case in cases] == [(ClosedLoop(n, window_s=5.0),) for n in (2, 8)] * 2
    assert len({case.engine for case in cases}) == 2, "one engine for each model"


def test_a_marker_gives_points_other_requests_and_another_ramp_up():
    own = simulated(models="opt-125m", concurrency="2")
    [planned] = point_cases(own, {"lengths": (40, 9)})
    assert {(len(r.prompt), r.output_tokens) for r in planned.workloads[0].requests} == {(40, 9)}
    [named] = point_cases(own, {"points": [("opt-125m", 3)], "ramp_up": "burst", "lengths": (8, 4)})
    assert (named.id, named.concurrency, named.loads[0].ramp_up) == ("opt-125m-3", 3, "burst")
    assert {(len(r.prompt), r.output_tokens) for r in named.workloads[0].requests} == {(8, 4)}
    assert named.engine == planned.engine and named.skip_reason is planned.skip_reason is None


def test_of_the_points_that_a_marker_names_those_of_the_chosen_models_are_taken():
    points = {"points": [("opt-125m", 4), ("opt-1.3b", 4), ("facebook/opt-125m", 8)]}
    assert list(told(point_cases(simulated(models="opt-125m"), points))) == ["opt-125m-4", "opt-125m-8"]
    assert len(point_cases(simulated(), points)) == 3


def test_a_point_that_cannot_be_had_says_why():
    room = kv_capacity(on_gpus().spec("opt-1.3b"), 768)
    points = [("opt-1.3b", room), ("opt-1.3b", room + 1), ("opt-1.3b", 4)]
    fits, full, small = point_cases(on_gpus(), {"points": points})
    assert fits.skip_reason is small.skip_reason is None
    assert (full.engines, full.skip_reason) == (None, f"the KV cache holds {room} requests of 768 tokens")
    [lacks] = point_cases(on_gpus(gpu_memory="2GiB"), {"points": [("opt-6.7b", 4)]})
    assert "no room for a KV cache" in lacks.skip_reason and lacks.engines is None
    with pytest.raises(BadUsage, match="requests of 2100 tokens do not fit"):
        point_cases(on_gpus(), {"points": [("opt-1.3b", 4)], "lengths": (2000, 100)})
    assert told(point_cases(behind(), {"points": [("opt-125m", 5000)]})) == {"opt-125m-5000": None}, "nobody knows"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ({"points": 7}, "points=7 is no list of points"),
        ({"points": ["opt-125m"]}, "'opt-125m' is no point"),
        ({"points": [("opt-125m", "8")]}, r"\('opt-125m', '8'\) is no point"),
        ({"points": [("opt-125m", 8, 1)]}, "is no point"),
        ({"points": [("opt-17b", 8)]}, "unknown model 'opt-17b'"),
        ({"points": [("opt-125m", 8)], "lengths": 5}, "lengths=5 is no pair"),
        ({"points": [("opt-125m", 8)], "lengths": (5, 5, 5)}, "is no pair"),
    ],
)
def test_wrong_words_of_points(words, problem):
    with pytest.raises(BadUsage, match=problem):
        point_cases(simulated(), words)


# Replicas


@pytest.mark.parametrize(
    ("model", "load"), [("opt-125m", 384), ("opt-1.3b", 192), ("opt-2.7b", 96), ("opt-13b", 12), ("qwen3-0.6b", 96)]
)
def test_replicas_share_a_load_that_two_three_and_four_divide(model, load):
    """3, 6, 12 ... up to the largest batch of the model in arXiv:2404.03353, table 1: 512, 256, 128 and 16."""
    assert replica_load(model) == load and load % 6 == 0


def test_one_engine_alone_and_each_number_of_replicas_by_each_way_of_sharing():
    own = simulated(models="opt-1.3b", replicas="2,3", sharing="time-slicing,mps")
    ids = ["x1", "x2-time-slicing", "x3-time-slicing", "x2-mps", "x3-mps"]
    cases = replica_cases(own)
    assert told(cases) == {f"opt-1.3b-192-{name}": None for name in ids}
    assert [len(case.each) for case in cases] == [1, 2, 3, 2, 3]
    assert [case.concurrency for case in cases] == [192] * 5, "as many requests in all"
    assert {load.concurrency for load in cases[2].loads} == {64}
    assert isinstance(cases[0].engines, ReplicaSpec) and cases[0].engine == cases[0].each[0]
    assert [case.engines.sharing for case in cases[1:]] == ["time-slicing"] * 2 + ["mps"] * 2


def test_replicas_under_loads_of_the_options():
    own = simulated(models="opt-1.3b", concurrency="8,9", sharing="time-slicing")
    uneven = "9 concurrent requests cannot be divided evenly among 2 replicas"
    expected = {f"opt-1.3b-{name}": None for name in ("8-x1", "9-x1", "8-x2-time-slicing")}
    assert told(replica_cases(own)) == {**expected, "opt-1.3b-9-x2-time-slicing": uneven}
    few = "1 concurrent requests cannot be divided evenly among 2 replicas"
    assert told(replica_cases(simulated(models="opt-1.3b", concurrency="1", sharing="mps"))) == {
        "opt-1.3b-1-x1": None,
        "opt-1.3b-1-x2-mps": few,
    }


def test_replicas_share_the_memory_of_one_engine():
    own = on_gpus(gpu_memory_utilization="0.9")
    shared, apart = own.replicas(["opt-1.3b"] * 3), own.replicas(["opt-1.3b"] * 3, "gpus")
    assert [engine.gpu_memory_utilization for engine in shared.engines] == pytest.approx([0.3] * 3)
    assert {engine.gpu_memory_utilization for engine in apart.engines} == {0.9}
    assert [engine.gpu for engine in shared.engines] == [0, 0, 0] and [e.gpu for e in apart.engines] == [0, 1, 2]
    wide = on_gpus(tensor_parallel_size="2").replicas(["opt-1.3b"] * 2, "gpus")
    assert [[*engine.gpus] for engine in wide.engines] == [[0, 1], [2, 3]]


def test_replicas_are_pinned_to_cores_on_a_cpu_and_else_if_asked():
    asked = (on_cpu(), on_gpus(), on_gpus(pin_cores=True))
    assert [own.replicas(["opt-125m"] * 2).pinned for own in asked] == [True, False, True]
    assert [own.replicas(["opt-125m"] * 2, pinned=False).pinned for own in asked] == [True, False, False]
    assert on_gpus().replicas(["opt-125m"] * 2, "mps", thread_percentage=40).thread_percentage == 40


def test_replicas_that_cannot_be_had_say_why():
    [alone, pair] = replica_cases(on_gpus(models="opt-13b", gpu_memory="40GiB", sharing="time-slicing"))
    assert alone.skip_reason is None and "no room for a KV cache" in pair.skip_reason
    largest = kv_capacity(on_gpus().replicas(["opt-1.3b"] * 2).engines[0], 768)
    own = on_gpus(models="opt-1.3b", concurrency=f"{2 * largest + 2}", sharing="time-slicing")
    alone, pair = replica_cases(own)
    assert pair.skip_reason.endswith(f"{largest} requests of 768 tokens in a replica")
    on_ray = replica_cases(on_gpus(gpu=True, models="opt-125m", ray="auto", sharing="mps"))[-1]
    assert on_ray.skip_reason == "whether a node of a cluster can share a GPU by mps is not known here"
    wide = replica_cases(on_gpus(models="opt-125m", tensor_parallel_size="2", sharing="time-slicing"))
    assert all("share" in case.skip_reason or "GPUs" in case.skip_reason for case in wide)


def test_replicas_behind_urls():
    two = replica_cases(behind("http://a:1/v1,http://b:1/v1"))
    assert told(two) == {"opt-125m-384-x1": None, "opt-125m-384-x2-urls": None}
    assert [engine.url for engine in two[1].each] == [f"http://{name}:1/v1/completions" for name in "ab"]
    assert two[0].engines.sharing == "urls"
    assert told(replica_cases(behind()))["opt-125m-384-x2-urls"] == "2 replicas need a URL each"
    three = behind("http://a:1/v1,http://b:1/v1,http://c:1/v1", models="qwen3-0.6b")
    assert replica_cases(three)[1].concurrency == 96


# Several GPUs


def test_each_model_on_one_two_and_four_gpus_and_as_replicas():
    cases = gpus_cases(on_gpus(), ["opt-1.3b"])
    wide = [f"opt-1.3b-{load}-tp{n}" for n in (1, 2, 4) for load in (1, 16, 64, 192)]
    apart = [f"opt-1.3b-{load}-replicas{n}" for n, loads in ((2, (64, 192)), (4, (192,))) for load in loads]
    assert told(cases) == dict.fromkeys([*wide, *apart]), "replicas where each gets 32 or more"
    assert [len(case.each[0].gpus) for case in cases[:12:4]] == [1, 2, 4]
    assert [case.concurrency for case in cases] == [1, 16, 64, 192] * 3 + [64, 192, 192]
    assert [len(case.each) for case in cases[12:]] == [2, 2, 4]


def test_several_gpus_as_the_options_say():
    own = on_gpus(tensor_parallel_size="1,2", concurrency="64")
    names = ["tp1", "tp2", "replicas2"]
    assert list(told(gpus_cases(own, ["opt-1.3b"]))) == [f"opt-1.3b-64-{name}" for name in names]
    assert gpus_cases(behind(), ["opt-125m"]) == []
    two = told(gpus_cases(on_gpus(gpus=2, concurrency="64"), ["opt-125m"]))
    assert two["opt-125m-64-tp4"] == "4 GPUs are asked for, and 2 GPUs are visible"
    assert two["opt-125m-64-tp2"] is None and "opt-125m-64-replicas4" not in two


def test_curves_on_several_gpus_are_no_sweeps():
    own = on_gpus(concurrency="4,8")
    series = {case.series for case in gpus_cases(own, ["opt-1.3b"])}
    assert len(series) == 3 and own.beside == series


def test_an_engine_without_room_for_the_largest_load_lets_the_others_wait_and_settles_later():
    own = on_gpus(gpu_memory="20GiB", concurrency="16,512", tensor_parallel_size="1,2")
    room = kv_capacity(own.spec("opt-2.7b", 1), 768)
    assert 16 < room < 256
    cases = gpus_cases(own, ["opt-2.7b"])
    assert {case.each[0].max_num_seqs for case in cases[:2]} == {room}
    assert {load.settle_lifetimes for case in cases[:2] for load in case.loads} == {math.ceil(512 / room)}
    enough = gpus_cases(on_gpus(concurrency="16,256", tensor_parallel_size="1"), ["opt-2.7b"])
    assert {case.each[0].max_num_seqs for case in enough} == {1024}
    assert {case.loads[0].settle_lifetimes for case in enough} == {1.0}


def test_gpus_that_are_not_there_or_not_alike():
    check_there(Host(H200, "GPU-0", gpus=GPUS), (0, 3))
    with pytest.raises(BadUsage, match="5 GPUs are asked for, and 4 GPUs are visible"):
        check_there(Host(H200, "GPU-0", gpus=GPUS), (4,))
    with pytest.raises(BadUsage, match="2 GPUs are asked for, and 1 GPU is visible"):
        check_there(Host(H200, "GPU-0", gpus=GPUS[:1]), (0, 1))
    other = (*GPUS[:1], replace(GPUS[1], name="NVIDIA L4"))
    with pytest.raises(BadUsage, match="GPUs of different kinds"):
        check_there(Host(H200, "GPU-0", gpus=other), (0, 1))
    check_there(Host(H200, "GPU-0"), (7,))  # of which nothing is known


def test_devices_of_an_engine_are_those_that_it_runs_on():
    assert on_gpus().devices(on_gpus().spec("opt-1.3b", 2)) == ("GPU-0", "GPU-1")
    assert simulated().devices(simulated().spec("opt-1.3b")) == ("none",)
    assert on_cpu().devices(on_cpu().spec("opt-tiny")) == ("cpu",)
    urls = behind("http://a:1/v1,http://b:1/v1")
    assert len(set(urls.devices(urls.replicas(["opt-125m"] * 2)))) == 2


# Jobs


def test_jobs_of_a_marker_are_those_of_the_mode_and_of_the_chosen_models():
    of_mode = {"gpu": [{"model": "opt-125m", "requests": 3}], "cpu": [{"model": "opt-tiny", "requests": 2}]}
    assert list(told(job_cases(simulated(), {"jobs": of_mode}))) == ["opt-125m-natural-3-at-once"]
    assert list(told(job_cases(on_cpu(), {"jobs": of_mode}))) == ["opt-tiny-natural-2-at-once"]
    both = [{"model": m, "requests": 3, "lengths": (8, 4)} for m in ("opt-125m", "opt-1.3b")]
    assert list(told(job_cases(simulated(models="opt-1.3b"), {"jobs": both}))) == ["opt-1.3b-4-3-at-once"]
    assert len(job_cases(simulated(), {"jobs": both})) == 2 and job_cases(simulated(), {"jobs": {}}) == []


@pytest.mark.parametrize(
    ("jobs", "problem"),
    [
        ({"tpu": []}, "jobs for 'tpu', which is no mode"),
        (7, "jobs=7 is no list of jobs"),
        ([7], "7 is no job"),
        ([{"model": "opt-125m"}], "is no job"),
        ([{"requests": 5}], "is no job"),
        ([{"model": "opt-125m", "requests": 5, "users": 3}], "a job has no users"),
        ([{"model": "opt-125m", "requests": 5, "batching": "clever"}], "a job has no batching 'clever'"),
    ],
)
def test_wrong_words_of_jobs(jobs, problem):
    with pytest.raises(BadUsage, match=problem):
        job_cases(simulated(), {"jobs": jobs})


def test_a_job_is_named_by_all_that_it_fixes():
    facts = {"lengths": (8, 4), "kv_requests": 2, "max_num_seqs": 3, "gpu_memory": "40GiB", "batching": "static"}
    case = job_case(simulated(), "opt-125m", 5, rate=2.5, **facts)
    assert case.id == "opt-125m-4-2.5-per-s-kv-for-2-most-3-in-40GiB-static" and case.skip_reason is None
    assert (case.model, case.loads[0].requests, case.loads[0].rate) == ("opt-125m", 5, 2.5)
    assert case.each[0].max_num_seqs == 3 and case.each[0].arguments["batching"] == "static"
    assert len(case.workloads[0].requests) == 5
    plain = job_case(simulated(), "opt-125m", 5)
    assert plain.each[0].max_num_seqs == 1024 and plain.loads[0].rate == math.inf
    assert len({r.output_tokens for r in plain.workloads[0].requests}) > 1, "natural lengths"


def test_a_dynamic_batch_waits_and_others_do_not():
    waits = [
        job_case(on_cpu(), "opt-tiny", 4, lengths=(8, 4), batching=way).each[0].arguments["wait_s"]
        for way in ("dynamic", "static", "none")
    ]
    assert waits == [0.1, 0.0, 0.0]


def test_a_cache_is_sized_for_requests_at_full_length():
    """12 tokens take one block of 16, of 36,864 bytes a token (12 layers, 768 wide, two bytes); one block is vLLM's."""
    spec = job_case(on_gpus(), "opt-125m", 9, lengths=(8, 4), kv_requests=5).each[0]
    assert spec.kv_cache_bytes == (5 + 1) * 16 * 36_864
    cpu = job_case(on_cpu(), "opt-tiny", 9, lengths=(8, 4), kv_requests=5).each[0]
    assert cpu.arguments["num_gpu_blocks_override"] == 6 and cpu.kv_cache_bytes == GIB
    batches = job_case(on_gpus(), "opt-125m", 9, lengths=(8, 4), kv_requests=5, batching="static").each[0]
    assert batches.kv_cache_bytes == on_gpus().spec("opt-125m").kv_cache_bytes, "vLLM's cache is not used"


def test_a_job_that_cannot_be_had_says_why():
    def why(own: Planner, **facts: object) -> str | None:
        case = job_case(own, **{"model": "opt-125m", "requests": 3, "lengths": (8, 4), **facts})
        assert (case.engines is None) is (case.skip_reason is not None)
        return case.skip_reason

    limits = "sets limits of its engine, and an endpoint has its own"
    for fixed in ({"max_num_seqs": 3}, {"kv_requests": 3}, {"gpu_memory": "9GiB"}):
        assert why(behind(), **fixed) == limits
    assert why(behind()) is None
    assert why(on_gpus(), lengths=(2000, 100)) == "requests of 2100 tokens do not fit its 2048 positions"
    assert "no room for a KV cache" in why(on_gpus(), model="opt-13b", gpu_memory="16GiB")
    assert "KV cache holds" in why(on_gpus(), kv_requests=10**7)
    with pytest.raises(BadUsage, match="unknown model"):
        why(on_gpus(), model="opt-17b")


# What cases are made of


def test_models_of_one_vocabulary_share_their_requests_and_a_job_has_its_own():
    own = simulated()
    assert own.workload("opt-125m") is own.workload("opt-1.3b") is own.workload("opt-125m")
    assert own.workload("opt-125m") is not own.workload("qwen3-0.6b")
    assert len(own.workload("opt-125m", requests=7).requests) == 7
    assert len(own.workload("opt-125m").requests) == 1024


def test_text_for_a_model_that_nobody_knows_needs_a_tokenizer():
    with pytest.raises(BadUsage, match="the text needs a tokenizer"):
        behind(models="theirs", dataset="talks.json").workload("theirs")
    assert behind(models="theirs").workload("theirs").longest == 512 + 256, "token ids need none"


def test_an_endpoint_serves_a_model_under_its_own_name():
    own = behind(models="org/theirs")
    spec = own.spec("theirs")
    assert (spec.model, spec.platform, spec.interface, spec.url) == (
        "org/theirs",
        "remote",
        "endpoint",
        "http://a:1/v1/completions",
    )
    with pytest.raises(BadUsage, match="no model was named"):
        _ = behind(models=None).models


def test_models_of_the_default_that_do_not_fit_are_left_out_with_a_note():
    own = on_gpus(gpu_memory="8GiB")
    assert own.models == ("opt-125m", "opt-1.3b")
    [note] = [note for note in own.notes if "is left out" in note]
    assert note.startswith("opt-2.7b is left out: ")
    assert own.swept("facebook/opt-125m") and not own.swept("opt-2.7b")


def test_a_sweep_is_made_once():
    own = simulated(concurrency="1,2")
    assert own.sweep("opt-125m") is own.sweep("opt-125m") and list(own.sweeps) == ["opt-125m"]


def test_a_load_is_as_the_options_and_a_marker_say():
    assert simulated(window="7").load(3) == ClosedLoop(3, window_s=7.0)
    assert simulated(ramp_up="burst").load(3).ramp_up == "burst"
    assert simulated(ramp_up="burst").load(3, {"ramp_up": "staggered"}).ramp_up == "staggered"
    assert on_gpus().load(3).window_s == 2.0 and simulated().load(3).window_s == 5.0
