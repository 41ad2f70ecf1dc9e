"""What a marker, fixtures and options make of a test: its parameters, its engine, whether and when it runs; wrong words
are refused with what to type; and what its fixtures give it."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
from fake_items import FakeItem, items_for
from hypothesis import given
from hypothesis import strategies as st
from simulated_sessions import FEW_STEPS
from stepwise import CountedSource, Stepwise

from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.plugin import PLAN, items
from pytest_slmserve.plugin.items import ItemPlan, OwnEngine, PlannedCase, check_item, in_running_order, named_models
from pytest_slmserve.run.session import Sweeps
from pytest_slmserve.schema.errors import BadUsage, DoesNotFit
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.sensors import FOREIGN_PROCESSES, SM_ACTIVE
from pytest_slmserve.telemetry.host import IMAGINED_GPUS
from pytest_slmserve.telemetry.sampler import Sampler

MODEL = "opt-125m"
PLATEAU = "throughput-plateau"


@pytest.fixture
def opened(opened):
    return lambda **given: opened(**{"concurrency": "4,8", **FEW_STEPS, **given})


def names(found):
    return [item.name for item in found]


def reasons(found):
    return {item.name: item.why_skipped for item in found if item.why_skipped}


# Wrong words are refused, with what to type


def slm_claim():
    """A verdict."""


def drops_a_verdict(slm_claim):
    slm_claim()


def drops_that_of_a_curve(slm_sweep):
    if slm_sweep:
        slm_sweep(concurrency=[1, 2]).pareto_plateau()


def asserts_it(slm_claim):
    assert slm_claim()


@pytest.mark.parametrize(
    ("function", "fixtures", "name"),
    [
        (drops_a_verdict, "slm_claim slm_model", "slm_claim"),
        (drops_that_of_a_curve, "slm_sweep", "pareto_plateau"),
        (drops_a_verdict, "tmp_path", None),
        (asserts_it, "slm_claim slm_model", None),
        (print, "slm_claim slm_model", None),
    ],
)
def test_a_verdict_that_nothing_asserts_is_refused(function, fixtures, name):
    item = FakeItem("test_it", fixtures.split(), function=function)
    if name is None:
        assert check_item(item) is None
    else:
        with pytest.raises(BadUsage) as caught:
            check_item(item)
        assert f"{name}()" in caught.value.problem and caught.value.hint == f"assert {name}()"


OF_GPUS = "tensor_parallel_size=2"
WRONG = [
    ("slm_engine", {"modle": MODEL}, "modle", "model, "),
    ("slm_engine", {"model": MODEL, "pionts": []}, "pionts", "points"),
    ("slm_measure", {"model": [MODEL]}, "['opt-125m']", 'model="opt-125m"'),
    ("slm_measure", {"max_num_seqs": "64"}, "max_num_seqs", "max_num_seqs="),
    ("slm_measure", {"extra": [("a", 1)]}, "extra", "extra="),
    ("slm_measure", {"gpus": "two"}, "gpus='two'", "gpus=2"),
    ("slm_measure", {"gpus": 0}, "gpus=0", "gpus=2"),
    ("slm_measure", {"extra": (("tensor-parallel-size", 2),)}, "tensor-parallel-size", OF_GPUS),
    ("slm_measure", {"extra": ("tensor_parallel_size",)}, "extra=", 'extra=(("NAME", VALUE),)'),
    ("slm_measure", {"env": (("CUDA_VISIBLE_DEVICES", "1"),)}, "CUDA_VISIBLE_DEVICES", OF_GPUS),
    ("slm_measure", {"lengths": 64}, "lengths=64", "lengths=(512, 64)"),
    ("slm_measure", {"lengths": (3000, 64)}, "t.py::test_it", "--slm-input-len"),
    ("slm_measure", {"model": "gpt-5"}, "'gpt-5'", ""),
    ("slm_claim slm_model", {"claim": None}, "None", "one of"),
    ("slm_claim slm_model", {"claim": "flying"}, "'flying'", "one of"),
    ("slm_claim slm_model", {}, "test_it[opt-125m]", "claim="),
    ("slm_claim slm_model", {"claim": PLATEAU, "models": [None]}, "[None]", "models=["),
    ("slm_claim slm_model", {"claim": PLATEAU, "models": MODEL}, "'opt-125m'", "models=['opt-125m']"),
    ("slm_claim slm_model", {"claim": PLATEAU, "modles": [MODEL]}, "modles", "models"),
    ("slm_point", {"points": 64}, "points=64", "points="),
    ("slm_point", {"points": [(MODEL, "8")]}, "(", "points="),
    ("slm_point", {"points": [(MODEL, 8)], "max_num_seqs": 8}, "max_num_seqs", "--slm-engine-arg"),
    ("slm_point", {"points": [(MODEL, 8)], "needs": "tpu"}, "needs='tpu'", 'needs="gpu"'),
    ("slm_point", {"points": [(MODEL, 8)], "ramp_up": "late"}, "ramp_up='late'", "burst"),
    ("slm_gates", {"gate": "cuda"}, "gate='cuda'", "simulated"),
    ("slm_gate", {"model": MODEL}, "model=", "--slm-models"),
    ("slm_job_point", {"jobs": 64}, "jobs=64", "jobs="),
    ("slm_job_point", {"jobs": {"gpu": [{"model": MODEL, "request": 3}]}}, "request", "requests"),
    ("slm_job_point", {"jobs": [{"model": MODEL}]}, "opt-125m", "requests"),
    ("slm_job_point", {"jobs": {"gpus": []}}, "'gpus'", '"gpu"'),
    ("slm_job_point", {"points": [(MODEL, 4)]}, "slm_job_point", "jobs="),
    ("slm_job_point", {"jobs": [{"model": MODEL, "requests": 9, "gpu_memory": "much"}]}, "'much'", ""),
]


@pytest.mark.parametrize(("fixtures", "words", "fact", "hint"), WRONG, ids=lambda value: str(value)[:40])
def test_a_word_of_a_marker_that_says_nothing_is_refused(opened, fixtures, words, fact, hint):
    session = opened()
    with pytest.raises(BadUsage) as caught:
        in_running_order(session, items_for(session, fixtures, **words))
    assert fact in caught.value.problem and hint in caught.value.hint


def test_a_parameter_of_the_user_s_own_may_have_an_engine_of_its_own():
    slm = {"slm": pytest.mark.slm(max_num_seqs=8).mark}
    assert check_item(FakeItem("test_it", ["slm_engine"], slm, {"limit": 8}, function=print)) is None


def test_a_value_without_a_name_is_refused_with_its_name():
    item = FakeItem("test_it", ["slm_engine"], {"slm": pytest.mark.slm(MODEL).mark})
    with pytest.raises(BadUsage) as caught:
        check_item(item)
    assert "'opt-125m'" in caught.value.problem and "model='opt-125m'" in caught.value.hint


def test_whoever_overrides_the_engine_or_the_requests_answers_for_their_length(opened):
    session = opened()
    [item] = items_for(session, "slm_measure", lengths=(1000, 64), max_model_len=64)
    item._fixtureinfo.name2fixturedefs["sharegpt"] = [None, None]
    assert in_running_order(session, [item]) == [item]


# Parameters

REPLICAS = [f"{MODEL}-{load}-x{count}" for count in ("1", "2-mps") for load in (4, 8)]


@pytest.mark.parametrize(
    ("fixtures", "words", "given", "found"),
    [
        ("slm_point", {}, {}, ["opt-125m-4", "opt-125m-8"]),
        ("slm_point", {"points": [("opt-1.3b", 8), (MODEL, 2)]}, {}, ["opt-125m-2"]),
        ("slm_point", {"points": [("opt-1.3b", 8)]}, {}, ["-"]),
        ("slm_point", {"points": [("opt-1.3b", 8), (MODEL, 2)]}, {"models": None}, ["opt-1.3b-8", "opt-125m-2"]),
        ("slm_model slm_claim", {"claim": PLATEAU}, {"models": "opt-125m,opt-350m"}, ["opt-125m", "opt-350m"]),
        ("slm_model slm_claim", {"claim": PLATEAU, "models": ["opt-1.3b"]}, {}, ["-"]),
        ("slm_gate slm_gates", {}, {}, ["-"]),
        ("slm_gate slm_gates", {"gate": "cpu"}, {}, ["-"]),
        ("slm_gpus_point", {"models": ["opt-350m"]}, {}, ["-"]),
        ("slm_replica_point", {}, {"replicas": "2", "sharing": "mps"}, REPLICAS),
        ("slm_gpus_point", {}, {"tensor_parallel_size": "1,2"}, [f"{MODEL}-{n}-tp{x}" for x in (1, 2) for n in (4, 8)]),
    ],
)
def test_parameters_are_what_marker_and_options_say(opened, fixtures, words, given, found):
    made = items_for(opened(**given), fixtures, **words)
    assert names(made) == [f"test_it[{each}]" for each in found]
    assert bool(reasons(made)) == (found == ["-"] and "slm_gate" not in fixtures)


ENDPOINTS = ["throughput", "latency", "energy", "start", "kv-blocks", "memory"]


@pytest.mark.parametrize(
    ("words", "given", "endpoints"),
    [
        ({}, {"gate": True}, ENDPOINTS),
        ({}, {"gate": True, "load_format": "auto"}, ENDPOINTS),
        ({"gate": "simulated"}, {}, ENDPOINTS),
    ],
)
def test_a_gate_has_an_item_for_each_endpoint_of_each_model(opened, words, given, endpoints):
    found = items_for(opened(models="opt-125m,opt-350m", **given), "slm_gate slm_gates", **words)
    told = [*endpoints, *(["outputs"] if given.get("load_format") else [])]
    assert sorted(names(found)) == sorted(f"test_it[{m}-{each}]" for m in ("opt-125m", "opt-350m") for each in told)


def test_a_short_gate_decides_the_kv_blocks_of_the_first_model(opened):
    session = opened(models="opt-125m,opt-350m")
    session.platform = "cpu"
    assert names(items_for(session, "slm_gate slm_gates", gate="cpu")) == ["test_it[opt-125m-kv-blocks]"]


def test_points_are_shown_by_the_clock_of_the_engine(opened):
    [first, _] = items_for(opened(), "slm_point")
    marker = first.markers["benchmark"].kwargs
    before = marker["timer"]()
    marker["timer"].advance(2.5)
    assert (marker["group"], marker["timer"]() - before) == (MODEL, 2.5)
    assert "benchmark" not in items_for(opened(), "slm_replica_point")[0].markers


JOBS = [{"model": model, "requests": 9, "lengths": (16, 8)} for model in (MODEL, "opt-350m")]


@pytest.mark.parametrize("jobs", [JOBS, {"gpu": JOBS}])
def test_a_list_of_jobs_is_for_any_mode_and_for_the_models_that_were_chosen(opened, jobs):
    assert names(items_for(opened(), "slm_job_point", jobs=jobs)) == ["test_it[opt-125m-8-9-at-once]"]
    assert names(items_for(opened(models="opt-1.3b"), "slm_job_point", jobs=jobs)) == ["test_it[-]"]
    session = opened(models=None)
    both = ["test_it[opt-125m]", "test_it[opt-350m]"]
    assert names(items_for(session, "slm_model slm_claim", jobs=jobs, claim=PLATEAU)) == both
    assert names(items_for(session, "slm_model", jobs=jobs, models=["opt-350m"])) == ["test_it[opt-350m]"]


@pytest.mark.parametrize(
    ("fixtures", "words", "fact"),
    [
        ("slm_job_point", {"jobs": [{"model": MODEL, "requests": 9, "lengths": (2000, 64)}]}, "2064"),
        ("slm_job_point", {"jobs": [{**JOBS[0], "lengths": (1024, 1024), "kv_requests": 10**6}]}, "2048"),
        ("slm_job_point", {"jobs": [{**JOBS[0], "gpu_memory": "1000GiB"}]}, "1000.0 GiB"),
        ("slm_job_point", {"jobs": [{"model": "opt-2.7b", "requests": 9, "gpu_memory": "5GiB"}]}, "GiB"),
        ("slm_point", {"points": [(MODEL, 10**6)]}, "96 tokens"),
    ],
)
def test_what_does_not_fit_is_skipped_with_the_reason(opened, fixtures, words, fact):
    session = opened(models=None)
    found = in_running_order(session, items_for(session, fixtures, **words))
    assert [fact in why for why in reasons(found).values()] == [True] and found[0].stash[PLAN].skipped


def test_models_of_a_claim_that_can_be_judged_here(opened):
    def left(claim, *named, **given):
        return named_models(opened(concurrency=None, **{"models": None, **given}), claim, named)

    larger, table = "energy-per-token-grows-with-model", "table-1-batch-fits"
    assert left(larger, "opt-1.3b", "opt-13b") == ["opt-1.3b", "opt-13b"]
    assert left(larger, "opt-1.3b", "opt-2.7b", models="opt-125m,facebook/opt-1.3b") == ["opt-1.3b"]
    assert left(larger, "opt-1.3b", models="opt-1.3b") == [], "there is nothing to compare it with"
    assert left(table, "opt-1.3b", "opt-13b", models="opt-125m") == ["opt-1.3b", "opt-13b"], "arithmetic"
    assert left("decode-stays-memory-bound", "opt-13b", gpu_memory_utilization="0.1") == [], "its weights do not fit"
    assert left(None, "opt-13b", "opt-125m", models="opt-125m") == ["opt-125m"]


# Whether an item is part of the run, and whether it can be carried out


@pytest.mark.parametrize(
    ("arg", "path"),
    [
        ("pytest_slmserve.benchmarks", "benchmarks"),
        ("pytest_slmserve.benchmarks.test_gate", "benchmarks/test_gate.py"),
        ("pytest_slmserve.benchmarks.test_gate::test_no_worse", "benchmarks/test_gate.py::test_no_worse"),
        ("pytest_slmserve.quickstart", None),
        ("my.tests", None),
    ],
)
def test_shipped_tests_of_a_checkout_are_found_by_the_name_that_a_wheel_gives_them(tmp_path, monkeypatch, arg, path):
    monkeypatch.setattr(items, "PACKAGE", tmp_path / "pytest_slmserve")
    assert items.path_of(arg) == (f"{tmp_path}/{path}" if path else arg)
    (tmp_path / "pytest_slmserve" / "benchmarks").mkdir(parents=True)
    assert items.path_of(arg) == arg, "a wheel has the module"


def item_of(fixtures="slm_point", suite=None, path="t.py", args=(), **words):
    markers = {"slm": pytest.mark.slm(**words).mark} if words else {}
    return FakeItem("t", fixtures.split(), markers | ({"slm_suite": suite.mark} if suite else {}), path=path, args=args)


PAPERS = pytest.mark.slm_suite("papers")
SHIPPED = "benchmarks/test_pareto_plateau.py"


@pytest.mark.parametrize(
    ("item", "given", "named", "fact"),
    [
        (item_of("tmp_path"), {}, False, "without a path"),
        (item_of("tmp_path"), {}, True, None),
        (item_of(), {}, False, None),
        (item_of(), {"gate": True}, True, "gate"),
        (item_of("slm_gates"), {"gate": True}, True, None),
        (item_of(suite=PAPERS), {}, True, "--slm-suite papers"),
        (item_of(suite=PAPERS), {"suite": "papers"}, True, None),
        (item_of(suite=PAPERS), {"suite": "all"}, True, None),
        (item_of(suite=pytest.mark.slm_suite("core")), {}, True, None),
        (item_of(suite=PAPERS, args=["x/t.py::test_it"]), {}, True, None),
        (item_of(suite=PAPERS, args=["x.t"]), {}, True, None),
        (item_of(suite=PAPERS, args=["t.py"]), {"suite": "core"}, True, "--slm-suite"),
        (item_of("slm_claim", path=SHIPPED, claim=PLATEAU), {}, True, "--slm-strict"),
        (item_of("slm_claim", path=SHIPPED, claim=PLATEAU), {"strict": True}, True, None),
        (item_of("slm_claim", path=SHIPPED, claim="table-1-batch-fits"), {}, True, None),
        (item_of("slm_claim", claim=PLATEAU), {}, True, None),
    ],
)
def test_an_item_is_left_out_with_the_reason(opened, item, given, named, fact):
    why = items.left_out_reason(opened(**given), item, named)
    assert why is None if fact is None else fact in why


@pytest.mark.parametrize("names", [("everything",), (), ("core", "all")])
def test_a_suite_that_there_is_not_is_refused(opened, names):
    with pytest.raises(BadUsage) as caught:
        items.left_out_reason(opened(), item_of(suite=pytest.mark.slm_suite(*names)), True)
    assert "core or papers or all" in caught.value.hint


@pytest.mark.parametrize(("words", "out"), [({"needs": "gpu"}, True), ({"gpus": 2}, True), ({"gpus": 1}, False)])
def test_what_needs_a_gpu_is_left_out_on_a_cpu_and_simulated_elsewhere(opened, words, out):
    session = opened()
    assert items.left_out_reason(session, item_of(**words), False) is None
    session.platform = "cpu"
    assert (items.left_out_reason(session, item_of(**words), False) is not None) == out


@pytest.mark.parametrize(
    ("fixtures", "words", "given", "fact"),
    [
        ("slm_measure", {"gpus": 9}, {}, "9 GPUs"),
        ("slm_measure", {"gpus": len(IMAGINED_GPUS)}, {}, None),
        ("slm_measure", {}, {"ray": "auto"}, "slm_measure"),
        ("slm_point", {}, {"ray": "auto"}, None),
        ("slm_gates", {}, {}, "--slm-gate"),
        ("slm_gates", {"gate": "simulated"}, {}, None),
        ("slm_gates", {"gate": "simulated"}, {"ray": "local"}, "--slm-gate"),
        ("slm_alone", {}, {}, "--slm-ray local"),
        ("slm_alone", {}, {"ray": "local"}, None),
    ],
)
def test_an_item_that_this_mode_cannot_carry_out_is_skipped(opened, fixtures, words, given, fact):
    why = items.skip_reason(opened(**given), item_of(fixtures, **words))
    assert why is None if fact is None else fact in why


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ({"needs": "gpu"}, "--slm-gpu"),
        ({"needs": "own-engine"}, "--slm-cpu"),
        ({"max_num_seqs": 8, "model": MODEL}, "max_num_seqs"),
        ({"model": "opt-350m"}, "opt-350m"),
        ({"model": MODEL}, None),
    ],
)
def test_an_endpoint_skips_what_it_does_not_tell(opened, words, fact):
    session = opened()
    session.platform = "remote"
    why = items.skip_reason(session, item_of("slm_measure", **words))
    assert why is None if fact is None else fact in why


# The plan of an item, and the order


def test_each_engine_s_items_are_together_and_what_reads_several_comes_last(opened):
    session = opened(models="opt-125m,opt-1.3b")
    larger = {"claim": "energy-per-token-grows-with-model", "models": ["opt-1.3b"]}
    made = [
        *items_for(session, "slm_claim slm_model", "larger", **larger),
        *items_for(session, "slm_advice", "advice"),
        *items_for(session, "slm_measure", "mine", model="opt-1.3b"),
        *items_for(session, "slm_gates", "gate"),
        *items_for(session, "slm_point", "point"),
        *items_for(session, "slm_claim slm_model", "plateau", claim=PLATEAU),
        *items_for(session, "slm_measure", "limited", model=MODEL, max_num_seqs=8),
    ]
    assert names(in_running_order(session, made)) == [
        "mine",
        "point[opt-1.3b-4]",
        "point[opt-1.3b-8]",
        "plateau[opt-1.3b]",
        "point[opt-125m-4]",
        "point[opt-125m-8]",
        "advice",
        "plateau[opt-125m]",
        "limited",
        "larger[opt-1.3b]",
        "gate",
    ]


def test_readers_wait_where_cases_are_measured_again_alone(opened):
    session = opened(ray="local")
    made = [
        *items_for(session, "slm_advice", "advice"),
        *items_for(session, "slm_alone slm_model", "alone"),
        *items_for(session, "slm_point", "point"),
    ]
    order = [name.partition("[")[0] for name in names(in_running_order(session, made))]
    assert order == ["point", "point", "alone", "advice"]


def test_a_plan_says_what_an_item_measures_and_reads(opened):
    session = opened(models="opt-125m,opt-350m")

    def plan(fixtures, **words):
        return in_running_order(session, items_for(session, fixtures, **words))[0].stash[PLAN]

    first = session.planner.sweep(MODEL).cases[0]
    spec = session.planner.spec(MODEL)
    assert plan("slm_point") == ItemPlan("test_it[opt-125m-4]", case=first, engine=spec, swept=True, starts=True)
    named = plan("slm_point", points=[(MODEL, 4)])
    assert (named.case.key, named.swept) == (first.key, False)
    claim = plan("slm_claim slm_model", claim=PLATEAU)
    assert (claim.model, claim.claim.planned, claim.reads, claim.starts, claim.open) == (
        MODEL,
        True,
        True,
        False,
        False,
    )
    mine = plan("slm_measure", model="opt-350m", max_num_seqs=8)
    assert (mine.engine, mine.open, mine.starts, mine.case) == (
        replace(session.planner.spec("opt-350m"), max_num_seqs=8), True, True, None,
    )  # fmt: skip
    both = plan("slm_measure slm_advice")
    assert both.reads and both.starts and both.open
    assert not plan("slm_replicas").starts and plan("slm_replicas").open
    gate = plan("slm_gates slm_gate", gate="simulated")
    assert (gate.gate, gate.engine, gate.compares, gate.starts) == (MODEL, spec, True, True)
    elsewhere = plan("slm_claim slm_model", claim="table-1-batch-fits", models=["opt-13b"])
    assert elsewhere.engine is None and elsewhere.model == "opt-13b"


def test_the_marker_of_a_parameter_adds_its_words_to_those_of_the_test():
    item = item_of(model="opt-350m", max_num_seqs=4)
    item.own_markers = [pytest.mark.slm(max_num_seqs=8).mark, pytest.mark.skip(reason="x").mark]
    assert items.words_of(item) == {"model": "opt-350m", "max_num_seqs": 8}


def test_cases_are_those_of_all_items_once(opened):
    session = opened()
    made = [*items_for(session, "slm_point"), *items_for(session, "slm_point", points=[(MODEL, 4), (MODEL, 2)])]
    plans = items.plans_of([*in_running_order(session, made), FakeItem("plain", [])])
    assert [case.concurrency for case in items.cases_of_items(plans)] == [4, 8, 2] and plans[-1] == ItemPlan("plain")


def test_sweeps_have_the_loads_and_the_claims_of_their_items(opened):
    session = opened()
    made = [*items_for(session, "slm_point"), *items_for(session, "slm_point", points=[(MODEL, 2)])]
    made += items_for(session, "slm_claim slm_model", claim=PLATEAU)
    made += items_for(session, "slm_claim slm_model", claim=PLATEAU, ramp_up="burst")
    sweeps = items.planned_sweeps(session, items.plans_of(in_running_order(session, made)))
    assert sweeps.loads == {MODEL: [4, 8]} and [each.row.claim for each in sweeps.claims[MODEL]] == [PLATEAU]


# What a run resumes from


def measured_sweep(session):
    for case in session.planner.sweep(MODEL).cases:
        session.executor.measure(case)
    return session


def resumed(opened, **given):
    """What is said of an archive of two loads, twice each, by a run with these options."""
    measured_sweep(opened())
    session = opened(resume=True, **given)
    made = items_for(session, "slm_point") + items_for(session, "slm_measure", "own", max_num_seqs=8)
    return items.fits(session, items.plans_of(in_running_order(session, made)))


def test_what_is_resumed_is_told(opened):
    told = resumed(opened)
    assert "4 measurements for this run" in told and "own tests" not in told and "not valid" not in told
    session = opened(resume=True)
    limited = items_for(session, "slm_measure", "own")
    assert "4 of engines that its own tests use" in items.fits(
        session, items.plans_of(in_running_order(session, limited))
    )


def test_what_is_not_valid_is_told_and_not_resumed(opened):
    failing = [*FEW_STEPS["engine_arg"], "fail_at=8"]
    measured_sweep(opened(engine_arg=failing))
    session = opened(engine_arg=failing, resume=True)
    told = items.fits(session, items.plans_of(in_running_order(session, items_for(session, "slm_point"))))
    assert "2 measurements for this run" in told and "3 that are not valid" in told


def test_an_empty_archive_resumes_nothing(opened, tmp_path):
    opened().begin()
    session = opened(resume=True)
    assert "nothing is resumed" in items.fits(session, [])


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"window": "2"}, ["window_s 1.0 there", "2.0 here"]),
        ({"models": "opt-350m"}, ["opt-125m there", "opt-350m here"]),
        ({"output_len": "16"}, ["64/32 tokens there", "64/16 here"]),
        ({"seed": "3"}, ["seed 0", "3"]),
    ],
)
def test_an_archive_that_answers_nothing_is_told_with_what_differs(opened, tmp_path, given, facts):
    measured_sweep(opened())
    session = opened(resume=True, **given)
    plans = items.plans_of(in_running_order(session, items_for(session, "slm_point")))
    said = items.fits(session, plans)
    assert "nothing is resumed" in said and all(fact in said for fact in facts)
    session.options = session.options._replace(resume=str(tmp_path / "a.jsonl"))
    with pytest.raises(BadUsage) as caught:
        items.fits(session, plans)
    assert all(fact in caught.value.problem for fact in facts)


def test_what_differs_is_told_of_the_case_that_is_most_alike(opened):
    session = opened()
    cases = session.planner.sweep(MODEL).cases
    session.executor.measure(cases[0])
    stored = list(session.results.measurements())
    assert items.difference(stored, [cases[1]]).startswith("concurrency 4")
    assert items.difference(stored, cases) == ""
    alike = replace(cases[0], engines=replace(cases[0].engines, max_num_seqs=7, seed=1, max_model_len=99, dtype="a"))
    assert items.difference(stored, [alike]).endswith("; and 1 more")


# What fixtures give


def called(first, second=2, *, repeats=None, **load):
    return first, second, repeats, load


@given(st.integers(), st.integers(1, 9), st.sampled_from(["burst", "staggered"]))
def test_a_checked_call_gives_what_the_function_gives(first, repeats, ramp_up):
    call = items.checked("slm_measure", called, first)
    assert call(3, repeats=repeats, ramp_up=ramp_up) == (first, 3, repeats, {"ramp_up": ramp_up})


@pytest.mark.parametrize(
    ("values", "words", "fact", "hint"),
    [
        ((), {"repeat": 3}, "'repeat'", "repeats"),
        ((), {"zebra": 3}, "'zebra'", "second, repeats, window_s"),
        ((1, 2), {}, "slm_measure", "second"),
        ((), {"repeats": 0}, "repeats=0", "repeats=3"),
        ((), {"repeats": "2"}, "repeats='2'", "repeats=3"),
        ((), {"concurrency": 3}, "'concurrency'", ""),
    ],
)
def test_a_call_with_wrong_words_is_refused_with_the_right_ones(values, words, fact, hint):
    with pytest.raises(BadUsage) as caught:
        items.checked("slm_measure", called, 1)(*values, **words)
    assert fact in caught.value.problem and hint in caught.value.hint


def own(session, **changes):
    spec = replace(session.planner.spec(MODEL), **changes)
    return OwnEngine(session, spec, session.planner.workload(MODEL), {})


def test_a_point_of_a_test_has_its_figures_and_is_measured_once(opened):
    session = opened()
    point = own(session).measure(concurrency=16)
    assert point.valid and len(point.repeats) == 2
    assert abs(point.e2e_s - 16 / point.requests_per_s) < 0.02 * point.e2e_s, "Little's law"
    assert own(session).measure(16).records == point.records and len(session.results.repeats) == 1
    assert len(own(session).measure(16, repeats=3).records) == 3
    burst = own(session).measure(16, ramp_up="burst")
    assert burst.records != point.records


def test_a_sweep_of_a_test_goes_on_until_it_is_decided_unless_repeats_are_named(opened):
    session = opened(engine_arg=["t_inf=2000", "b_half=1", "noise=0.03"])
    curve = own(session).sweep([4, 8], repeats=1)
    assert [len(p.records) for p in curve.points] == [1, 1] and curve.subject == MODEL
    curve = own(session, max_num_seqs=32).sweep([8, 4, 16])
    assert [p.concurrency for p in curve.points] == [4, 8, 16]
    assert max(len(p.records) for p in curve.points) > 2 and curve.looks == session.looks
    measured = [m.load.concurrency for m in session.results.measurements()]
    assert measured[:2] == [4, 8]


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        (lambda engine: engine.sweep(64), "64"),
        (lambda engine: engine.sweep("64"), "'64'"),
        (lambda engine: engine.sweep([]), "[]"),
        (lambda engine: engine.measure(4, requests=9), "window"),
    ],
)
def test_a_load_that_says_nothing_is_refused(opened, call, fact):
    with pytest.raises(BadUsage) as caught:
        call(own(opened()))
    assert fact in caught.value.problem


def test_a_job_of_a_test_is_served_once(opened):
    session = opened()
    spec = session.planner.spec(MODEL)
    slow, fast = (items.own_job(session, spec, 20, rate, lengths=(16, 8)) for rate in (2, math.inf))
    assert slow.valid and slow.requests_per_s < fast.requests_per_s and slow.load.rate == 2
    assert {m.workload.mean_prompt_tokens for m in session.results.measurements()} == {16}
    assert items.own_job(session, spec, 20, lengths=(16, 8)).records == fast.records
    uneven = items.own_job(session, spec, 20, 2, lengths=(16, 8), burstiness=0.25, repeats=1)
    assert uneven.load.burstiness == 0.25 and uneven.records != slow.records and len(uneven.records) == 1


def test_engines_that_share_a_device_are_measured_together(opened):
    session = opened(models="opt-125m,opt-350m")
    two = items.shared_engines(session, sharing="mps", pinned=True)
    found = two.measure(8, repeats=1, ramp_up="burst")
    assert (found.count, found.loads, found.sharing, found.pinned, found.ramp_up) == (2, (4, 4), "mps", True, "burst")
    assert repr(two).startswith("2 replicas") and MODEL in repr(two)
    pair = items.shared_engines(session, models=["opt-125m", "opt-350m"]).measure(8, repeats=1)
    assert pair.model is None and pair.models == ("opt-125m", "opt-350m") and len(pair.each_tokens_per_s) == 2
    assert items.shared_engines(session, 4, sharing="gpus").measure(8, repeats=1).power_w > 1000
    for call, fact in ((lambda: items.shared_engines(session, 1), "1 replica"), (lambda: two.measure(7), "7")):
        with pytest.raises(BadUsage) as caught:
            call()
        assert fact in caught.value.problem


def test_a_planned_case_is_carried_out_and_shown(opened):
    session, shown = opened(), []
    case = session.planner.sweep(MODEL).cases[0]
    verdict = PlannedCase(session, case, shown.extend).measure()
    assert verdict.state is State.PASSES and (verdict.value, verdict.threshold) == (2, 2)
    assert shown == list(session.results.measurements()) and repr(PlannedCase(session, case)) == case.id


def test_a_case_that_is_not_needed_or_has_no_room_is_skipped(opened, monkeypatch):
    session = opened(sweep="adaptive", concurrency="1,2,4,8,16,32", engine_arg=["t_inf=2000", "b_half=0.2"])
    sweeps = Sweeps(session, {MODEL: [1, 2, 4, 8, 16, 32]}, {})
    sweeps.carry_out(MODEL)
    unneeded = session.verdicts.curve(MODEL).unneeded
    case = next(each for each in session.planner.sweep(MODEL).cases if each.concurrency in unneeded)
    with pytest.raises(pytest.skip.Exception):
        PlannedCase(session, case, sweeps=sweeps).measure()

    def refuses(case, repeats):
        raise DoesNotFit("no room", "less")

    monkeypatch.setattr(session.executor, "measure", refuses)
    with pytest.raises(pytest.skip.Exception, match="no room"):
        PlannedCase(session, case).measure()


# Sensors beside a block

HERE = Environment(platform="cuda", gpu_name="NVIDIA H200")


def planted(value=0.5, foreign=0.0, **how):
    return CountedSource(lambda number: {SM_ACTIVE: value, FOREIGN_PROCESSES: foreign}, **how)


def watched(readings=5, **how):
    sampler = Stepwise([planted(**how)], 0.1)
    with items.watching(sampler, HERE) as found:
        sampler.pass_by(readings)
    return found


def test_figures_are_of_the_block():
    found = watched()
    assert found.figures.sm_active == 0.5 == found.figures.sm_active_max
    assert found.seen.window_s == (0.0, pytest.approx(0.5)) and found.seen.began_s == 100.0
    assert found.telemetry.sources == ("planted",)
    assert found.telemetry.time_s == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_the_verdict_is_over_the_block_too():
    assert watched(20).health.state == "ok"
    assert watched(foreign=2.0).health.state == "invalid"
    assert any("planted failed after 2" in why for why in watched(fails_at=3).health.reasons)
    assert watched(0).figures.sm_active is None and watched(0).health.state == "unknown", "too short for a reading"


@pytest.mark.parametrize("name", ["seen", "telemetry", "figures", "health"])
def test_before_its_end_there_is_nothing(name):
    with items.watching(Stepwise([], 0.1), HERE) as found, pytest.raises(BadUsage):
        getattr(found, name)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_the_block_stops_the_thread_and_is_passed_on(error):
    with pytest.raises(error), items.watching(Sampler([planted()], 0.1), HERE) as found:
        assert "slm-telemetry" in {thread.name for thread in threading.enumerate()}
        raise error
    assert "slm-telemetry" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(BadUsage):
        _ = found.figures


def test_a_watch_within_another_asks_nobody_twice_and_has_its_own_rows():
    source = planted(0.9)
    sampler = Sampler([source], 0.1)
    with items.watching(sampler, HERE) as outer, items.watching(sampler, HERE) as inner:
        assert [thread.name for thread in threading.enumerate()].count("slm-telemetry") == 1
    assert source.asked >= len(outer.telemetry.time_s) >= len(inner.telemetry.time_s)
    assert inner.seen.window_s[1] <= outer.seen.window_s[1]
