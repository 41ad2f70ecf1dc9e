"""What a marker, fixtures and options make of a test: its parameters, its engine, whether and when it runs; wrong words
are refused with what to type; and what its fixtures give it."""

import math
import threading
from dataclasses import replace

import pytest
from fake_items import FakeItem, items_for
from hypothesis import given, strategies as st
from refusals import refused
from simulated_sessions import FEW_STEPS, MODEL
from stepwise import CountedSource, Stepwise

from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.plugin import PLAN, items
from pytest_slmserve.plugin.items import ItemPlan, OwnEngine, PlannedCase, in_running_order
from pytest_slmserve.run.session import Sweeps
from pytest_slmserve.schema.errors import DoesNotFit
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.sensors import FOREIGN_PROCESSES, SM_ACTIVE
from pytest_slmserve.telemetry.host import IMAGINED_GPUS
from pytest_slmserve.telemetry.sampler import Sampler

PLATEAU = "throughput-plateau"


@pytest.fixture
def opened(opened):
    """Opens sessions on a small sweep, which `on` says are those of another platform."""

    def small(on="simulated", **given):
        session = opened(**{"concurrency": "4,8", **FEW_STEPS, **given})
        session.platform = on
        return session

    return small


def names(found):
    return [item.name for item in found]


def ordered(session, *tests):
    """The items of these tests, each with its words, in running order: `("slm_measure", "mine", {"model": MODEL})`."""
    made = [item for fixtures, name, words in tests for item in items_for(session, fixtures, name, **words)]
    return in_running_order(session, made)


def plans(session, *tests):
    return items.plans_of(ordered(session, *tests))


POINTS = ("slm_point", "points", {})


# Wrong words are refused, with what to type


def test_unasserted_verdict_is_refused(opened):
    def drops_a_verdict(slm_claim):
        slm_claim()

    def drops_that_of_a_curve(slm_sweep):
        if slm_sweep:
            slm_sweep(concurrency=[1, 2]).pareto_plateau()

    def asserts_it(slm_claim):
        assert slm_claim()

    claim, dropped = ["slm_claim", "slm_model"], [(drops_a_verdict, ["tmp_path"]), (asserts_it, ["slm_claim"])]
    for function, fixtures, name in (
        (drops_a_verdict, claim, "slm_claim"), (drops_that_of_a_curve, ["slm_sweep"], "pareto_plateau"),
    ):  # fmt: skip
        with refused(f"{name}()", hint=f"assert {name}()"):
            items.check_item(FakeItem("test_it", fixtures, function=function))
    for function, fixtures in (*dropped, (print, claim)):
        assert items.check_item(FakeItem("test_it", fixtures, function=function)) is None
    with refused("'opt-125m'", hint="model='opt-125m'"):
        items.check_item(FakeItem("test_it", ["slm_engine"], {"slm": pytest.mark.slm(MODEL).mark}))
    slm = {"slm": pytest.mark.slm(max_num_seqs=8).mark}
    assert items.check_item(FakeItem("test_it", ["slm_engine"], slm, {"limit": 8}, function=print)) is None
    session = opened()
    [item] = items_for(session, "slm_measure", lengths=(1000, 64), max_model_len=64)
    item._fixtureinfo.name2fixturedefs["sharegpt"] = [None, None]
    assert in_running_order(session, [item]) == [item]


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
    ("slm_measure", {"lengths": (8, 4), "max_model_len": 8}, "t.py::test_it", "max_model_len=12"),
    ("slm_measure", {"model": "gpt-5"}, "'gpt-5'", ""),
    ("slm_claim slm_model", {"claim": None}, "None", "one of"),
    ("slm_claim slm_model", {"claim": "flying"}, "'flying'", "one of"),
    ("slm_claim slm_model", {}, "test_it[opt-125m]", "claim="),
    ("slm_claim slm_model", {"claim": PLATEAU, "models": [None]}, "[None]", "models=["),
    ("slm_claim slm_model", {"claim": PLATEAU, "models": MODEL}, "'opt-125m'", "models=['opt-125m']"),
    ("slm_claim slm_model", {"claim": PLATEAU, "modles": [MODEL]}, "modles", "models"),
    ("slm_point", {"points": [(MODEL, 8)], "max_num_seqs": 8}, "max_num_seqs", "--slm-engine-arg"),
    ("slm_point", {"points": [(MODEL, 8)], "needs": "tpu"}, "needs='tpu'", "needs='gpu'"),
    ("slm_point", {"points": [(MODEL, 8)], "ramp_up": "late"}, "ramp_up='late'", "burst"),
    *(
        ("slm_point", {"points": [(MODEL, 8)], "prefix_share": wrong}, "prefix_share", "0.5")
        for wrong in (1, -0.5, "0.5", (), (0.5, 1), True)
    ),
    *(("slm_point", {"points": [(MODEL, 8)], "turns": wrong}, f"{wrong}", "turns=4") for wrong in (1, 2.0, True)),
    *(
        ("slm_point", {"points": [(MODEL, 8)], **words}, "cached=", "(False, True)")
        for words in ({"cached": True}, {"turns": 4, "cached": 1}, {"turns": 4, "cached": ()})
    ),
    ("slm_job_point", {"jobs": [], "turns": 4}, "turns=4", "--slm-turns"),
    ("slm_measure", {"model": MODEL, "prefix_share": (0, 0.5)}, "(0, 0.5)", "prefix_share=0.5"),
    ("slm_measure", {"model": MODEL, "prefix_share": 0.5, "prefix_caching": False}, "0.5", "enable_prefix_caching="),
    ("slm_job_point", {"jobs": [], "prefix_share": 0.5}, "prefix_share=0.5", "slm_point"),
    *(
        ("slm_point", {"points": [(MODEL, 8)], "response_format": wrong}, f"response_format={each!r}", '"json"')
        for wrong, each in (("yaml", "yaml"), (("", "{"), "{"), ("[]", "[]"))
    ),
    *(
        ("slm_point", {"points": [(MODEL, 8)], "speculation": wrong}, "speculation=", "(False, True)")
        for wrong in ("ngram", 1, (), (False, 1))
    ),
    ("slm_measure", {"model": MODEL, "response_format": ("", "json")}, "('', 'json')", "json"),
    ("slm_measure", {"model": "bge-small-en-v1.5", "response_format": "json"}, "embed", "generates"),
    ("slm_job_point", {"jobs": [], "response_format": "json"}, "response_format='json'", "slm_response_format"),
    ("slm_measure", {"model": MODEL, "speculation": (False, True)}, "speculation=(False, True)", "True"),
    ("slm_job_point", {"jobs": [], "speculation": True}, "speculation=True", "--slm-engine-arg"),
    ("slm_point", {"points": [(MODEL, 8)], "lora": 16}, "lora=16", "lora=(16, 8)"),
    ("slm_point", {"points": [(MODEL, 8)], "lora": (16, 9)}, "rank 9", "8, 16, 32"),
    ("slm_gates", {"gate": "cuda"}, "gate='cuda'", "simulated"),
    ("slm_gate", {"model": MODEL}, "model=", "--slm-models"),
    ("slm_job_point", {"points": [(MODEL, 4)]}, "slm_job_point", "jobs="),
    ("slm_job_point", {"jobs": [{"model": MODEL, "requests": 9, "gpu_memory": "much"}]}, "'much'", ""),
]


@pytest.mark.parametrize(("fixtures", "words", "fact", "hint"), WRONG)
def test_wrong_marker_word_is_refused(opened, fixtures, words, fact, hint):
    with refused(fact, hint=hint):
        ordered(opened(), (fixtures, "test_it", words))


# Parameters

REPLICAS = [f"{MODEL}-{load}-x{count}" for count in ("1", "2-mps") for load in (4, 8)]
WIDE = [f"{MODEL}-{n}-tp{x}" for x in (1, 2) for n in (4, 8)]
TWO = ["opt-125m", "opt-350m"]
JOBS = [{"model": model, "requests": 9, "lengths": (16, 8)} for model in TWO]
ENDPOINTS = ["throughput", "latency", "energy", "start", "kv-blocks", "memory"]
GATED = [f"{model}-{each}" for model in TWO for each in ENDPOINTS]
AT_ONCE = [f"{model}-{each}" for model in TWO for each in (*ENDPOINTS, "busy", "busy-small")]
APART = {"gate": True, "gate_launches": "apart"}
DRAFTS = [f"{MODEL}-2-{which}" for which in ("plain", "speculative")]
ANY = {"models": None}
BOTH = {"models": "opt-125m,opt-350m"}
PARAMETERS = [
    ("slm_point", {}, {}, ["opt-125m-4", "opt-125m-8"]),
    ("slm_point", {"points": [("opt-1.3b", 8), (MODEL, 2)]}, {}, ["opt-125m-2"]),
    ("slm_point", {"points": [("opt-1.3b", 8)]}, {}, ["-"]),
    ("slm_point", {"points": [(MODEL, 2)], "speculation": (False, True)}, {}, DRAFTS),
    ("slm_point", {"points": [("opt-1.3b", 8), (MODEL, 2)]}, ANY, ["opt-1.3b-8", "opt-125m-2"]),
    ("slm_model slm_claim", {"claim": PLATEAU}, BOTH, TWO),
    ("slm_model slm_claim", {"claim": PLATEAU, "models": ["opt-1.3b"]}, {}, ["-"]),
    ("slm_gate slm_gates", {}, {}, ["-"]),
    ("slm_gate slm_gates", {"gate": "cpu"}, {}, ["-"]),
    ("slm_gate slm_gates", {"gate": "cpu"}, {"on": "cpu", **BOTH}, [f"{MODEL}-kv-blocks"]),  # a short one
    ("slm_gate slm_gates", {}, BOTH | APART, GATED),
    ("slm_gate slm_gates", {"gate": "simulated"}, BOTH, AT_ONCE),
    ("slm_gate slm_gates", {}, APART | {"gate_launches": "start"}, [GATED[4], f"{MODEL}-start", f"{MODEL}-start-cold"]),
    ("slm_gate slm_gates", {}, APART | {"load_format": "auto"}, [*GATED[:6], f"{MODEL}-outputs"]),
    ("slm_gpus_point", {"models": ["opt-350m"]}, {}, ["-"]),
    ("slm_replica_point", {}, {"replicas": "2", "sharing": "mps"}, REPLICAS),
    ("slm_gpus_point", {}, {"tensor_parallel_size": "1,2"}, WIDE),
    ("slm_job_point", {"jobs": JOBS}, {}, ["opt-125m-8-9-at-once"]),
    ("slm_job_point", {"jobs": {"gpu": JOBS}}, {"models": "opt-1.3b"}, ["-"]),
    ("slm_model slm_claim", {"jobs": {"gpu": JOBS}, "claim": PLATEAU}, ANY, TWO),
    ("slm_model", {"jobs": JOBS, "models": ["opt-350m"]}, ANY, ["opt-350m"]),
]  # fmt: skip


@pytest.mark.parametrize(("fixtures", "words", "given", "found"), PARAMETERS)
def test_marker_sets_test_parameters(opened, fixtures, words, given, found):
    made = items_for(opened(**given), fixtures, **words)
    assert sorted(names(made)) == sorted(f"test_it[{each}]" for each in found)
    skips = found is AT_ONCE or (found == ["-"] and "slm_gate" not in fixtures)
    assert any(item.why_skipped for item in made) == skips


def test_points_use_engine_clock(opened):
    [first, _] = items_for(opened(), "slm_point")
    marker = first.markers["benchmark"].kwargs
    before = marker["timer"]()
    marker["timer"].advance(2.5)
    assert marker["group"] == MODEL and marker["timer"]() - before == pytest.approx(2.5, abs=1e-6)
    assert "benchmark" not in items_for(opened(), "slm_replica_point")[0].markers

    def left(claim, *named, **given):
        return items.named_models(opened(concurrency=None, **{**ANY, **given}), claim, named)

    larger, table = "energy-per-token-grows-with-model", "table-1-batch-fits"
    assert left(larger, "opt-1.3b", "opt-13b") == ["opt-1.3b", "opt-13b"]
    assert left(larger, "opt-1.3b", "opt-2.7b", models="opt-125m,facebook/opt-1.3b") == ["opt-1.3b"]
    assert left(larger, "opt-1.3b", models="opt-1.3b") == [], "there is nothing to compare it with"
    assert left(table, "opt-1.3b", "opt-13b", models="opt-125m") == ["opt-1.3b", "opt-13b"], "arithmetic"
    assert left("decode-stays-memory-bound", "opt-13b", gpu_memory_utilization="0.1") == [], "its weights do not fit"
    assert left(None, "opt-13b", "opt-125m", models="opt-125m") == ["opt-125m"]
    for fixtures, words, fact in (
        ("slm_job_point", {"jobs": [{"model": "opt-2.7b", "requests": 9, "gpu_memory": "5GiB"}]}, "GiB"),
        ("slm_point", {"points": [(MODEL, 10**6)]}, "96 tokens"),
        ("slm_model slm_claim", {"claim": "kv-blocks-as-predicted", "models": ["lfm2-350m"]}, "KV blocks"),
    ):
        [item] = ordered(opened(**ANY), (fixtures, "test_it", words))
        assert fact in item.why_skipped and item.stash[PLAN].skipped, fixtures


# Whether an item is part of the run, and whether it can be carried out


def item_of(fixtures="slm_point", suite=None, path="t.py", args=(), **words):
    markers = {"slm": pytest.mark.slm(**words).mark} if words else {}
    markers |= {"slm_suite": pytest.mark.slm_suite(*suite.split()).mark} if suite is not None else {}
    return FakeItem("t", fixtures.split(), markers, path=path, args=args)


SHIPPED = "benchmarks/test_pareto_plateau.py"
LEFT_OUT = [
    (item_of("tmp_path"), {}, False, "without a path"),
    (item_of("tmp_path"), {}, True, None),
    (item_of(), {}, False, None),
    (item_of(), {"gate": True}, True, "gate"),
    (item_of("slm_gates"), {"gate": True}, True, None),
    (item_of(suite="papers"), {}, True, "--slm-suite papers"),
    (item_of(suite="papers"), {"suite": "papers"}, True, None),
    (item_of(suite="papers"), {"suite": "all"}, True, None),
    (item_of(suite="core"), {}, True, None),
    (item_of(suite="papers", args=["x/t.py::test_it"]), {}, True, None),
    (item_of(suite="papers", args=["x.t"]), {}, True, None),
    (item_of(suite="papers", args=["t.py"]), {"suite": "core"}, True, "--slm-suite"),
    (item_of("slm_claim", path=SHIPPED, claim=PLATEAU), {}, True, "slm_strict"),
    (item_of("slm_claim", path=SHIPPED, claim=PLATEAU), {"strict": True}, True, None),
    (item_of("slm_claim", path=SHIPPED, claim="table-1-batch-fits"), {}, True, None),
    (item_of("slm_claim", claim=PLATEAU), {}, True, None),
    *((item_of(needs="gpu"), {"on": on}, True, fact) for on, fact in (("cpu", "--slm-gpu"), ("simulated", None))),
    *((item_of(gpus=n), {"on": "cpu"}, True, fact) for n, fact in ((2, "--slm-gpu"), (1, None))),
]  # fmt: skip
# A platform, the fixtures and words of an item, and why it is left out there, or skipped.
ELSEWHERE = [
    ("simulated", "slm_measure", {"gpus": 9}, {}, "9 GPUs"),
    ("simulated", "slm_measure", {"gpus": len(IMAGINED_GPUS)}, {}, None),
    ("simulated", "slm_measure", {}, {"ray": "auto"}, "slm_measure"),
    ("simulated", "slm_point", {}, {"ray": "auto"}, None),
    ("simulated", "slm_gates", {}, {}, "--slm-gate"),
    ("simulated", "slm_gates", {"gate": "simulated"}, {}, None),
    ("simulated", "slm_gates", {"gate": "simulated"}, {"ray": "local"}, "--slm-gate"),
    ("simulated", "slm_alone", {}, {}, "--slm-ray local"),
    ("simulated", "slm_alone", {}, {"ray": "local"}, None),
    ("remote", "slm_measure", {"needs": "gpu"}, {}, "--slm-gpu"),
    ("remote", "slm_measure", {"needs": "own-engine"}, {}, "--slm-cpu"),
    ("remote", "slm_measure", {"max_num_seqs": 8, "model": MODEL}, {}, "max_num_seqs"),
    ("remote", "slm_measure", {"model": "opt-350m"}, {}, "opt-350m"),
    ("remote", "slm_measure", {"model": MODEL}, {}, None),
]  # fmt: skip


@pytest.mark.parametrize(("item", "given", "named", "fact"), LEFT_OUT)
def test_left_out_item_has_reason(opened, item, given, named, fact):
    why = items.left_out_reason(opened(**given), item, named)
    assert why is None if fact is None else fact in why


def test_shipped_tests_resolve_by_module(opened, tmp_path, monkeypatch):
    for suite in ("everything", "", "core all"):
        with refused("slm_suite(", hint="core or papers or all"):
            items.left_out_reason(opened(), item_of(suite=suite), True)
    monkeypatch.setattr(items, "PACKAGE", tmp_path / "pytest_slmserve")
    shipped = "pytest_slmserve.benchmarks"
    paths = {"": "", ".test_gate": "/test_gate.py", ".test_gate::test_no_worse": "/test_gate.py::test_no_worse"}
    found = {arg: items.path_of(f"{shipped}{arg}") for arg in paths}
    assert found == {arg: f"{tmp_path}/benchmarks{path}" for arg, path in paths.items()}
    for other in ("pytest_slmserve.quickstart", "my.tests"):
        assert items.path_of(other) == other
    (tmp_path / "pytest_slmserve" / "benchmarks").mkdir(parents=True)
    assert items.path_of(shipped) == shipped, "a wheel has the module"


@pytest.mark.parametrize(("platform", "fixtures", "words", "given", "fact"), ELSEWHERE)
def test_unsupported_item_is_skipped(opened, platform, fixtures, words, given, fact):
    why = items.skip_reason(opened(on=platform, **given), item_of(fixtures, **words))
    assert why is None if fact is None else fact in why


# The plan of an item, and the order


def test_items_are_grouped_by_engine(opened):
    larger = {"claim": "energy-per-token-grows-with-model", "models": ["opt-1.3b"]}
    found = ordered(
        opened(models="opt-125m,opt-1.3b"), ("slm_claim slm_model", "larger", larger), ("slm_advice", "advice", {}),
        ("slm_measure", "mine", {"model": "opt-1.3b"}), ("slm_gates", "gate", {}), ("slm_point", "point", {}),
        ("slm_claim slm_model", "plateau", {"claim": PLATEAU}),
        ("slm_measure", "limited", {"model": MODEL, "max_num_seqs": 8}),
    )  # fmt: skip
    assert names(found) == [
        "mine", "point[opt-1.3b-4]", "point[opt-1.3b-8]", "plateau[opt-1.3b]", "point[opt-125m-4]", "point[opt-125m-8]",
        "advice", "plateau[opt-125m]", "limited", "larger[opt-1.3b]", "gate",
    ]  # fmt: skip
    tests = ("slm_advice", "advice", {}), ("slm_alone slm_model", "alone", {}), ("slm_point", "point", {})
    order = [name.partition("[")[0] for name in names(ordered(opened(ray="local"), *tests))]
    assert order == ["point", "point", "alone", "advice"]


def test_item_plan_names_its_measurements(opened):
    session = opened(**BOTH)
    first, spec, other = session.planner.sweep(MODEL).cases[0], *map(session.planner.spec, TWO)

    def plan(fixtures, **words):
        return plans(session, (fixtures, "it", words))[0]

    claim = plan("slm_claim slm_model", claim=PLATEAU)
    assert claim == ItemPlan(f"it[{MODEL}]", engine=spec, model=MODEL, claim=claim.claim, reads=True)
    assert claim.claim.planned
    elsewhere = plan("slm_claim slm_model", claim="table-1-batch-fits", models=["opt-13b"])
    assert elsewhere == ItemPlan("it[opt-13b]", model="opt-13b", claim=elsewhere.claim, reads=True)
    point, named = plan("slm_point"), plan("slm_point", points=[(MODEL, 4)])
    assert point == ItemPlan("it[opt-125m-4]", case=first, engine=spec, swept=True, starts=True)
    assert (named.case.key, named.swept) == (first.key, False)
    limited = replace(other, max_num_seqs=8)
    mine = plan("slm_measure", model="opt-350m", max_num_seqs=8)
    assert mine == ItemPlan("it", engine=limited, starts=True, open=True)
    assert plan("slm_measure slm_advice") == ItemPlan("it", engine=spec, reads=True, starts=True, open=True)
    assert plan("slm_replicas") == ItemPlan("it", engine=spec, open=True)
    gate = ItemPlan(f"it[{MODEL}-throughput]", engine=spec, gate=MODEL, compares=True, starts=True)
    assert plan("slm_gates slm_gate", gate="simulated") == gate
    item = item_of(model="opt-350m", max_num_seqs=4)
    item.own_markers = [pytest.mark.slm(max_num_seqs=8).mark, pytest.mark.skip(reason="x").mark]
    assert items.words_of(item) == {"model": "opt-350m", "max_num_seqs": 8}, "a parameter's marker adds its words"
    session, claim = opened(), ("slm_claim slm_model", "claim", {"claim": PLATEAU})
    burst = ("slm_claim slm_model", "burst", {"claim": PLATEAU, "ramp_up": "burst"})
    found = plans(session, POINTS, ("slm_point", "named", {"points": [(MODEL, 4), (MODEL, 2)]}), claim, burst)
    assert [case.concurrency for case in items.cases_of_items(found)] == [4, 8, 2]
    sweeps = items.planned_sweeps(session, found)
    (series, swept), asked = next(iter(sweeps.cases.items())), [case.key for case in session.planner.sweep(MODEL).cases]
    assert {n: case.key for n, case in swept.items()} == dict(zip((4, 8), asked)) and len(sweeps.cases) == 1
    assert [each.row.claim for each in sweeps.claims[series]] == [PLATEAU]
    assert items.plans_of([FakeItem("plain", [])]) == [ItemPlan("plain")]


# What a run resumes from


def measured_sweep(session):
    for case in session.planner.sweep(MODEL).cases:
        session.executor.measure(case)


def test_resume_tells_reused_measurements(opened):
    opened().begin()
    assert "nothing is resumed" in items.fits(opened(resume=True), [])
    measured_sweep(opened())
    session = opened(resume=True)
    told = items.fits(session, plans(session, POINTS, ("slm_measure", "own", {"max_num_seqs": 8})))
    assert "4 measurements for this run" in told and "own tests" not in told and "not valid" not in told
    assert "4 of engines that its own tests use" in items.fits(session, plans(session, ("slm_measure", "own", {})))
    failing = [*FEW_STEPS["engine_arg"], "fail_at=8"]
    measured_sweep(opened(engine_arg=failing))
    session = opened(engine_arg=failing, resume=True)
    told = items.fits(session, plans(session, POINTS))
    assert "2 measurements for this run" in told and "3 that are not valid" in told
    session = opened()
    cases = session.planner.sweep(MODEL).cases
    session.executor.measure(cases[0])
    stored = list(session.results.measurements())
    assert items.difference(stored, [cases[1]]).startswith("concurrency 4") and items.difference(stored, cases) == ""
    alike = replace(cases[0], engines=replace(cases[0].engines, max_num_seqs=7, seed=1, max_model_len=99, dtype="a"))
    assert items.difference(stored, [alike]).endswith("; and 1 more")


@pytest.mark.parametrize(("given", "facts"), [
    ({"window": "2"}, ["window_s 1.0 there", "2.0 here"]),
    ({"models": "opt-350m"}, ["opt-125m there", "opt-350m here"]),
    ({"output_len": "16"}, ["64/32 tokens there", "64/16 here"]),
    ({"seed": "3"}, ["seed 0", "3"]),
    ({"gpu_memory_utilization": "0.5"}, ["gpu_memory_utilization 0.9 there, 0.5 here"]),
    ({"engine_arg": [*FEW_STEPS["engine_arg"], "power_w=1"]}, ["('power_w', 1)"]),
])  # fmt: skip
def test_unfit_archive_tells_difference(opened, tmp_path, given, facts):
    measured_sweep(opened())
    session = opened(resume=True, **given)
    asked = plans(session, POINTS)
    said = items.fits(session, asked)
    assert "nothing is resumed" in said and all(fact in said for fact in facts)
    session.options = session.options._replace(resume=str(tmp_path / "a.jsonl"))
    with refused(*facts):
        items.fits(session, asked)


# What fixtures give


def called(first, second=2, *, repeats=None, **load):
    return first, second, repeats, load


@given(st.integers(), st.integers(1, 9), st.sampled_from(["burst", "staggered"]))
def test_checked_call_returns_function_result(first, repeats, ramp_up):
    call = items.checked("slm_measure", called, first)
    assert call(3, repeats=repeats, ramp_up=ramp_up) == (first, 3, repeats, {"ramp_up": ramp_up})


@pytest.mark.parametrize(("values", "words", "fact", "hint"), [
    ((), {"repeat": 3}, "'repeat'", "repeats"),
    ((), {"zebra": 3}, "'zebra'", "second, repeats, window_s"),
    ((1, 2), {}, "slm_measure", "second"),
    ((), {"repeats": 0}, "repeats=0", "repeats=3"),
    ((), {"repeats": "2"}, "repeats='2'", "repeats=3"),
    ((), {"concurrency": 3}, "'concurrency'", ""),
])  # fmt: skip
def test_wrong_call_names_right_words(values, words, fact, hint):
    with refused(fact, hint=hint):
        items.checked("slm_measure", called, 1)(*values, **words)


def own(session, properties=None, **changes):
    spec = replace(session.planner.spec(MODEL), **changes)
    return OwnEngine(session, spec, session.planner.workload(MODEL), {}, [] if properties is None else properties)


def test_own_points_reach_junit(opened):
    session = opened()
    point = own(session).measure(concurrency=16)
    assert point.valid and len(point.repeats) == 2
    assert abs(point.e2e_s - 16 / point.requests_per_s) < 0.02 * point.e2e_s, "Little's law"
    assert own(session).measure(16).records == point.records and len(session.results.repeats) == 1
    assert len(own(session).measure(16, repeats=3).records) == 3
    assert own(session).measure(16, ramp_up="burst").records != point.records
    point = own(session, properties := []).measure(16)
    assert dict(properties) == {f"slm_{n} [concurrency 16]": getattr(point, n) for n in items.JUNIT}
    curve = own(session, properties).sweep([4, 16], repeats=2)
    kept, broken = point.meets("e2e:900s", share=0.9), curve.meets("ttft:0.001ms", at=4)
    assert [v for v, row in session.verdicts.judged if row is None] == [kept, broken]
    told = [text for name, text in properties if name.startswith("slm_slo ")]
    assert told == [f"passes: {kept.why}", f"fails: {broken.why}"]
    session = opened(engine_arg=["t_inf=2000", "b_half=1", "noise=0.03"])
    curve = own(session).sweep([4, 8], repeats=1)
    assert [len(p.records) for p in curve.points] == [1, 1] and curve.subject == MODEL
    curve = own(session, max_num_seqs=32).sweep([8, 4, 16])
    assert [p.concurrency for p in curve.points] == [4, 8, 16]
    assert max(len(p.records) for p in curve.points) > 2 and curve.looks == session.looks
    assert [m.load.concurrency for m in session.results.measurements()][:2] == [4, 8]
    engine = own(opened())
    for wrong, fact in ((64, "64"), ("64", "'64'"), ([], "[]")):
        with refused(fact):
            engine.sweep(wrong)
    with refused("window"):
        engine.measure(4, requests=9)


def test_own_jobs_are_served_once(opened):
    session = opened()
    spec = session.planner.spec(MODEL)
    slow, fast = (items.own_job(session, spec, {}, 20, rate, lengths=(16, 8)) for rate in (2, math.inf))
    assert slow.valid and slow.requests_per_s < fast.requests_per_s and slow.load.rate == 2
    assert {m.workload.mean_prompt_tokens for m in session.results.measurements()} == {16}
    assert items.own_job(session, spec, {}, 20, lengths=(16, 8)).records == fast.records
    uneven = items.own_job(session, spec, {}, 20, 2, lengths=(16, 8), burstiness=0.25, repeats=1)
    assert uneven.load.burstiness == 0.25 and uneven.records != slow.records and len(uneven.records) == 1
    words = {"lora": (2, 8), "model": MODEL}
    slotted = items.spec_from_marker(session, words)
    assert slotted.arguments["max_loras"] == 2
    found = items.own_job(session, slotted, words, 20, lengths=(16, 8))
    assert found.valid and found.slots == found.workload.spec.adapters.count == 2
    with refused("2 adapters", hint="--slm-lora 2x8"):
        items.own_job(session, spec, words, 20, lengths=(16, 8))
    session = opened(**BOTH)
    two = items.shared_engines(session, sharing="mps", pinned=True)
    found = two.measure(8, repeats=1, ramp_up="burst")
    assert (found.count, found.loads, found.sharing, found.pinned, found.ramp_up) == (2, (4, 4), "mps", True, "burst")
    assert repr(two).startswith("2 replicas") and MODEL in repr(two)
    pair = items.shared_engines(session, models=TWO).measure(8, repeats=1)
    assert pair.model is None and pair.models == (*TWO,) and len(pair.each_tokens_per_s) == 2
    assert items.shared_engines(session, 4, sharing="gpus").measure(8, repeats=1).power_w > 1000
    with refused("1 replica"):
        items.shared_engines(session, 1)
    with refused("7"):
        two.measure(7)


def test_planned_case_is_carried_out(opened, monkeypatch):
    session, shown = opened(), []
    case = session.planner.sweep(MODEL).cases[0]
    verdict = PlannedCase(session, case, shown.extend).measure()
    assert (verdict.state, verdict.value, verdict.threshold) == (State.PASSES, 2, 2)
    assert shown == list(session.results.measurements()) and repr(PlannedCase(session, case)) == case.id
    session = opened(sweep="adaptive", concurrency="1,2,4,8,16,32", engine_arg=["t_inf=2000", "b_half=0.2"])
    cases = session.planner.sweep(MODEL).cases
    sweeps = Sweeps(session, {cases[0].series: {case.concurrency: case for case in cases}}, {})
    sweeps.carry_out(cases[0].series)
    unneeded = session.verdicts.curve(MODEL).unneeded
    case = next(each for each in cases if each.concurrency in unneeded)
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


def test_watched_block_has_figures():
    found = watched()
    assert found.figures.sm_active == 0.5 == found.figures.sm_active_max
    assert found.seen.window_s == (0.0, pytest.approx(0.5)) and found.seen.began_s == 100.0
    assert found.telemetry.sources == ("planted",)
    assert found.telemetry.time_s == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert watched(20).health.state == "ok"
    assert watched(foreign=2.0).health.state == "invalid"
    assert any("planted failed after 2" in why for why in watched(fails_at=3).health.reasons)
    assert watched(0).figures.sm_active is None and watched(0).health.state == "unknown", "too short for a reading"
    source = planted(0.9)
    sampler = Sampler([source], 0.1)
    with items.watching(sampler, HERE) as outer, items.watching(sampler, HERE) as inner:
        assert [thread.name for thread in threading.enumerate()].count("slm-telemetry") == 1
    assert source.asked >= len(outer.telemetry.time_s) >= len(inner.telemetry.time_s)
    assert inner.seen.window_s[1] <= outer.seen.window_s[1]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_unfinished_block_has_no_figures(error):
    with pytest.raises(error), items.watching(Sampler([planted()], 0.1), HERE) as found:
        assert "slm-telemetry" in {thread.name for thread in threading.enumerate()}
        raise error
    assert "slm-telemetry" not in {thread.name for thread in threading.enumerate()}
    with refused("block"):
        _ = found.figures
    with items.watching(Stepwise([], 0.1), HERE) as found:
        for name in ("seen", "telemetry", "figures", "health"):
            with refused("block"):
                getattr(found, name)
