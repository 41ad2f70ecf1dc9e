"""The table says of each claim what it compares and what to expect: the most specific row rules, in memory and from
a record; what a run planned and judged is told again from its archive, and what cannot be used is the archive's
fault."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import get_args

import pytest
from facts import tells
from hypothesis import given
from launches import pairs
from refusals import refused
from strategies import H200, curves, law, measurement, noisy_curve, planted_telemetry

from pytest_slmserve.analysis.claims import table as lookup
from pytest_slmserve.analysis.claims.table import (
    CLAIMS,
    ROWS,
    ClaimRow,
    judge_all,
    judge_row,
    row_for,
    rows_from,
    stored_curves,
    stored_gates,
)
from pytest_slmserve.analysis.metrics.gpu_figures import GPUS
from pytest_slmserve.analysis.points import by_series
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.errors import BadArchive, Sharing
from pytest_slmserve.schema.records import Environment, release
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

NAMES = list(CLAIMS)
PLATEAU = "throughput-plateau"
TABLE = (
    ClaimRow(PLATEAU),
    ClaimRow(PLATEAU, device="cuda", evidence="platform"),
    ClaimRow(PLATEAU, device="H200", evidence="family"),
    ClaimRow(PLATEAU, device="H200", ramp_up="burst", evidence="ramp_up"),
    ClaimRow(PLATEAU, device="H200", interface="server", evidence="interface"),
    ClaimRow(PLATEAU, device="H200", vllm=("0.26", "0.27"), evidence="release"),
    ClaimRow(PLATEAU, model="opt-13b", expected="fails", evidence="model"),
)


def test_the_table_says_of_each_claim_and_row_what_it_must():
    """Each states a sentence, tells its estimate, and has a row everywhere; no two rows are of one place."""
    for claim in CLAIMS.values():
        assert claim.statement.endswith(".") and claim.source
        assert not claim.compares or (claim.threshold in claim.parameters and re.search(r"{(|told|does)}", claim.words))
        for environment in (None, Environment(), H200, Environment(platform="cpu", vllm="0.32.0")):
            assert row_for(claim.name, "some-model", environment).expected == claim.expected
    for row in ROWS:
        assert row.claim in NAMES and row.evidence
        assert row.device in {"*", "cuda", "cpu", "simulated", *(gpu.family for gpu in GPUS)}
    places = [(row.claim, row.model, row.device, row.interface, row.ramp_up, row.vllm) for row in ROWS]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("sharing", get_args(Sharing))
def test_a_claim_on_sharing_stands_for_one_of_each_way(sharing):
    for name in ("replicas-pay", "replicas-keep-the-tail"):
        found = CLAIMS.get(f"{name}-{sharing}")
        assert (found is None) is (sharing == "urls")
        assert found is None or (found.parameters["sharing"] == sharing and "{" not in found.statement)


@pytest.mark.parametrize(
    ("where", "evidence"),
    [
        (("opt-1.3b", None), ""),
        (("opt-1.3b", Environment(platform="cpu")), ""),
        (("opt-1.3b", Environment(platform="cuda", gpu_name="NVIDIA L4")), "platform"),
        (("opt-1.3b", replace(H200, vllm="0.25.1")), "family"),
        (("opt-1.3b", replace(H200, vllm=None)), "family"),
        (("opt-1.3b", replace(H200, vllm="0.27.0")), "family"),
        (("opt-1.3b", replace(H200, vllm="0.26.0rc1+cu130")), "release"),
        (("facebook/opt-13b", H200), "model"),
        # A row of an interface or a ramp-up goes before one of a release, after one that names the device better.
        (("opt-1.3b", H200, "engine", "burst"), "ramp_up"),
        (("opt-1.3b", H200, "engine", "staggered"), "release"),
        (("opt-1.3b", H200, None, None), "release"),
        (("opt-1.3b", H200, "server", "burst"), "interface"),
        (("opt-1.3b", H200, "server", None), "interface"),
        (("opt-1.3b", Environment(platform="cuda"), "engine", "burst"), "platform"),
        (("opt-1.3b", Environment(platform="cuda"), "server", "burst"), "platform"),
    ],
)
def test_the_most_specific_row_rules(where, evidence):
    assert row_for(PLATEAU, *where, rows=TABLE).evidence == evidence
    assert row_for(PLATEAU, *where, rows=TABLE[::-1]).evidence == evidence


def test_a_range_without_an_end():
    rows = (ClaimRow(PLATEAU), ClaimRow(PLATEAU, vllm=("0.26", ""), evidence="new"))
    assert row_for(PLATEAU, "x", Environment(vllm="1.0"), rows=rows).evidence == "new"
    assert row_for(PLATEAU, "x", Environment(vllm="0.9.2"), rows=rows).evidence == ""


@pytest.mark.parametrize(
    ("version", "expected"), [("0.26.0", (0, 26, 0)), ("v0.20.2.dev1+gabc", (0, 20, 2)), ("1", (1,)), ("nightly", ())]
)
def test_release(version, expected):
    assert release(version) == expected


@pytest.mark.parametrize(("name", "hint"), [("flying", PLATEAU), ("throughput-platau", PLATEAU)])
def test_an_unknown_claim_is_named_with_the_nearest(name, hint):
    with refused(repr(name), hint=hint):
        row_for(name, "opt-1.3b")


def test_without_a_row_for_any_model_there_is_none():
    with refused(PLATEAU, "opt-1.3b"):
        row_for(PLATEAU, "opt-1.3b", rows=(ClaimRow(PLATEAU, model="opt-2.7b"),))


def test_the_expected_failures_fail_and_the_others_hold():
    for model in ("opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b"):
        row = row_for("table-1-batch-fits", model)
        verdict = judge_row(row, Curve(subject=model))
        assert verdict.state is State(row.expected)
        assert row.expected == "passes" or verdict.why.split()[0] == row.evidence.split()[0], "the arithmetic agrees"


def test_a_server_that_does_not_feed_its_engine_is_no_reason_to_expect_no_plateau():
    """On an H200 OPT-125M has none offline; through one front end it has."""
    assert row_for(PLATEAU, "opt-125m", H200, "engine", "staggered").expected == "fails"
    assert row_for(PLATEAU, "opt-125m", H200, "server", "staggered").expected == "passes"


@pytest.fixture(scope="module")
def three_loads():
    return curve_of("opt-1.3b", [measurement(c, law(c), model="facebook/opt-1.3b") for c in (1, 2, 4)])


@pytest.mark.parametrize("name", NAMES)
def test_all_verdicts_name_their_subject_alike_and_nothing_measured_is_never_green(name, three_loads):
    row = row_for(name, "facebook/opt-1.3b")
    assert judge_row(row, three_loads).subject == "opt-1.3b"
    if CLAIMS[name].of != "arithmetic":
        assert judge_row(row, Curve(subject="opt-1.3b")).state is State.INCONCLUSIVE


@pytest.mark.parametrize("name", NAMES[:3])
def test_claims_of_a_curve(name):
    curve = noisy_curve({2**i: law(2**i) for i in range(10)}, noise=0.003)
    verdict = judge_row(row_for(name, "opt-1.3b"), curve)
    assert verdict.claim == name and verdict.state is State.PASSES


def test_parameters_of_the_row_rule():
    curve = noisy_curve({2**i: law(2**i) for i in range(10)}, noise=0.003)
    strict = replace(row_for(PLATEAU, "opt-1.3b"), parameters={"tolerance": 0.01})
    assert judge_row(strict, curve).state is State.FAILS


def test_kv_blocks_of_the_worst_launch_count():
    made = [measurement(c, law(c), launch=f"launch-{c}") for c in (1, 2, 4)]
    row = row_for("kv-blocks-as-predicted", "opt-1.3b")
    assert judge_row(row, curve_of("opt-1.3b", made)).n == 3
    off = replace(made[1], resolved=replace(made[1].resolved, kv_blocks=1000))
    assert judge_row(row, curve_of("opt-1.3b", [made[0], off, made[2]])).state is State.FAILS
    dumb = replace(off, resolved=replace(off.resolved, kv_blocks=None))
    assert judge_row(row, curve_of("opt-1.3b", [made[0], dumb, made[2]])).state is State.INCONCLUSIVE


@given(curves())
def test_judging_is_total(curve):
    for name in NAMES:
        assert judge_row(row_for(name, curve.subject), curve).claim == name


def test_models_that_a_claim_reads():
    def reads(name, model):
        return lookup.models_read(lookup.claim_of(name), model)

    assert reads(PLATEAU, "opt-1.3b") == ("opt-1.3b",)
    assert reads("table-1-batch-fits", "opt-1.3b") == reads("table-1-request-size", "opt-1.3b") == ()
    assert reads("energy-per-token-grows-with-model", "facebook/opt-1.3b") == ("facebook/opt-1.3b", "opt-125m")
    assert reads("energy-per-token-grows-with-model", "opt-125m") == ("opt-125m",)


def test_rows_survive_a_record():
    stored = [{**json.loads(json.dumps(asdict(row))), "added_later": 1} for row in (*ROWS, *TABLE)]
    assert lookup.rows_from({"rows": stored}) == (*ROWS, *TABLE)


# From an archive


BATCHES = (64, 128, 256, 512)
STORED = {"rows": [asdict(row) for row in lookup.ROWS]}
EARLIER, LATER = "2025-12-31T00:00:00+00:00", "2026-06-01T00:00:00+00:00"  # than what `measurement` makes


def sweep(batches=BATCHES, repeats: int = 2, **facts: object):
    return [measurement(c, law(c) * (1 + 0.001 * i), repeat=i, **facts) for c in batches for i in range(repeats)]


(SERIES,) = by_series([measurement()])


def plan_of(concurrencies, cut=(), series: str = SERIES, **more: object):
    return {"sweeps": {series: {"model": "opt-1.3b", "concurrencies": list(concurrencies), "skipped": cut, **more}}}


PLAN = plan_of(BATCHES, [[1024, "too large"]])


def test_stored_rows_are_read_and_todays_fill_what_they_lack():
    mine = replace(lookup.ROWS[0], parameters={"tolerance": 0.5})
    rows = rows_from({"rows": [asdict(mine)]})
    assert lookup.row_for(mine.claim, "opt-1.3b", rows=rows).parameters == {"tolerance": 0.5}
    assert {row.claim for row in rows} == lookup.CLAIMS.keys()
    assert rows_from(STORED) == lookup.ROWS == rows_from({})


@pytest.mark.parametrize("rows", [5, [5], [{"model": "opt-1.3b"}], [{"claim": ["x"]}], [{"claim": "x", "vllm": 5}]])
def test_rows_that_are_none_are_the_archives_fault(rows):
    with refused("claims", kind=BadArchive):
        rows_from({"rows": rows})


def test_planned_and_cut_loads_come_from_the_session():
    (curve,) = stored_curves(sweep((64, 128)), [(EARLIER, PLAN)])
    assert curve.subject == "opt-1.3b" and [p.concurrency for p in curve.points] == [64, 128]
    assert curve.missing == (256, 512) and curve.cut == ((1024, "too large"),)


def test_an_adaptive_sweep_needs_no_more_than_it_measured():
    grid, plan = (1, *BATCHES), {"tolerance": 0.1}
    (whole,) = stored_curves(sweep((1, 128, 256, 512)), [(EARLIER, plan_of(grid, adaptive=plan))])
    assert whole.adaptive and whole.missing == () and whole.unneeded == (64,)
    (part,) = stored_curves(sweep((1, 512)), [(EARLIER, plan_of(grid, adaptive=plan))])
    assert part.missing == (256,) and part.unneeded == ()


def test_the_session_that_measured_last_has_the_word():
    smaller = plan_of((64, 128))
    between = "2026-01-01T00:00:00+00:00"
    assert stored_curves(sweep((64, 128)), [(EARLIER, PLAN), (between, smaller), (LATER, PLAN)])[0].missing == ()
    assert stored_curves(sweep((64, 128)), [(LATER, PLAN)])[0].missing == (), "no session had begun"
    assert stored_curves(sweep((64, 128)), [(EARLIER, {})])[0].missing == ()
    assert stored_curves(sweep((64, 128)), [(EARLIER, PLAN), (between, {})])[0].missing == (256, 512)


def test_a_plan_is_of_one_engine_and_workload_not_of_a_model():
    mine = [replace(m, spec=replace(m.spec, max_num_seqs=64)) for m in sweep((1, 2))]
    planned, other = stored_curves([*sweep((64, 128)), *mine], [(EARLIER, PLAN)])
    assert planned.missing == (256, 512) and planned.cut == ((1024, "too large"),)
    assert other.missing == other.cut == ()


def test_what_differs_in_more_than_its_concurrency_is_another_curve():
    together = [measurement(c, 50.0, load=ClosedLoop(c, ramp_up="burst")) for c in (1, 2)]
    other = sweep((64, 128), model="opt-2.7b")
    curves = stored_curves([*other, *sweep(), *together, measurement(load=OpenLoop(requests=4))], [])
    assert [(c.subject, len(c.points)) for c in curves] == [("opt-2.7b", 2), ("opt-1.3b", 4), ("opt-1.3b", 2)]


@pytest.mark.parametrize(
    "plan",
    [
        {"sweeps": 5},
        {"sweeps": {SERIES: 5}},
        plan_of(["x"]),
        plan_of((), cut=5),
        plan_of((), cut=[[1]]),
        plan_of((1,), adaptive=5),
        plan_of((1,), adaptive={"tolerance": "much"}),
    ],
)
def test_a_plan_that_is_none_is_the_archives_fault(plan):
    with refused("plan", kind=BadArchive):
        stored_curves(sweep(), [(EARLIER, plan)])


def test_every_claim_is_judged_of_every_curve_and_table_1_of_its_models():
    curves = stored_curves([*sweep(), *sweep(model="opt-2.7b")], [])
    judged = judge_all(curves, lookup.ROWS)
    subjects = [(v.claim, v.subject) for v, _ in judged]
    of_arithmetic = sum(len(claim.models) for claim in lookup.CLAIMS.values() if claim.of == "arithmetic")
    assert len(subjects) == 4 * 2 + 1 + of_arithmetic == len(set(subjects))  # one is of OPT-1.3B alone
    assert all(row.claim == v.claim for v, row in judged)
    states = {v.subject: v.state for v, _ in judged if v.claim == "throughput-plateau"}
    assert states == {"opt-1.3b": State.PASSES, "opt-2.7b": State.PASSES}
    assert {v.subject for v, row in judged if v.state is State.FAILS and row.expected == "fails"} == {
        "opt-1.3b",
        "opt-6.7b",
    }


def test_what_was_measured_beside_the_planned_sweeps_need_show_no_plateau():
    made = [*sweep(), *sweep(model="opt-2.7b")]
    planned, other = stored_curves(made, [(EARLIER, PLAN)])
    assert not planned.beside and other.beside
    of_other = {v.claim for v, _ in judge_all([planned, other], lookup.ROWS) if v.subject == "opt-2.7b"}
    assert of_other == {"kv-blocks-as-predicted", "table-1-batch-fits", "larger-models-cannot-hold-500"}
    assert not any(curve.beside for curve in stored_curves(made, [])), "no session said what it was for"


def test_models_are_compared_where_both_were_measured():
    telemetry = planted_telemetry(interval_s=0.05, until_s=6.0)
    small, large = (
        [replace(m, run=replace(m.run, telemetry=telemetry)) for m in made]
        for made in (
            [measurement(512, 4e4, model="opt-125m", repeat=i, steps=400) for i in range(2)],
            [measurement(256, 2e4, model="opt-1.3b", repeat=i, steps=400) for i in range(2)],
        )
    )
    name = "energy-per-token-grows-with-model"
    [verdict] = [v for v, _ in judge_all(stored_curves([*small, *large], []), lookup.ROWS) if v.claim == name]
    assert verdict.subject == "opt-1.3b" and verdict.value == pytest.approx(2.0, rel=0.01)
    assert [v for v, _ in judge_all(stored_curves(large, []), lookup.ROWS) if v.claim == name] == []


TOGETHER = [measurement(c, law(c), load=ClosedLoop(c, ramp_up="burst"), repeat=i) for c in BATCHES for i in (0, 1)]
SERVED = [replace(m, spec=replace(m.spec, interface="server")) for m in sweep()]


@pytest.mark.parametrize(("only", "others"), [({"ramp_up": "burst"}, TOGETHER), ({"interface": "server"}, SERVED)])
def test_a_row_of_one_way_to_load_rules_its_curves_only(only, others):
    """Verdicts on two curves of one model are told apart."""
    row = lookup.ClaimRow(PLATEAU, **only, parameters={"tolerance": 0.01}, expected="fails")
    judged = judge_all(stored_curves([*sweep(), *others], []), (*lookup.ROWS, row))
    assert [r.expected for v, r in judged if v.claim == PLATEAU] == ["passes", "fails"]
    subjects = [v.subject for v, _ in judged if v.claim == PLATEAU]
    assert all(tells(subject, "opt-1.3b") for subject in subjects) and subjects[0] != subjects[1]


def test_judging_again_by_another_bound_tells_what_its_run_expected():
    curves, strict = stored_curves(sweep(), []), ClaimRow(PLATEAU, parameters={"tolerance": 0.01}, expected="fails")
    rows = rows_from({"rows": [asdict(strict)]})
    verdict = next(v for v, _ in judge_all(curves, rows))
    told = next(v for v, _ in judge_all(curves, rows, lookup.ROWS))
    assert verdict.state is told.state is State.FAILS
    assert told.why.startswith(verdict.why) and tells(told.why.removeprefix(verdict.why), "passes")


def test_parameters_that_are_missing_are_the_archives_fault():
    with refused(PLATEAU, "tolerance", kind=BadArchive):
        judge_all(stored_curves(sweep(), []), (ClaimRow(PLATEAU),))


# Gates


TERMS = {"margin": 0.03, "alpha": 0.01, "beta": 0.05, "pairs": 12}


def again(measurements, *plans):
    return list(stored_gates(measurements, plans))


def test_the_terms_of_its_session_rule():
    """5 % worse: within the wider margin, and not within the usual one."""
    made = pairs(4, speed=1 / 1.05)
    [(usual, note)] = again(made, (EARLIER, {"gate": TERMS}), (LATER, {"gate": {**TERMS, "margin": 0.5}}))
    [(wide, _)] = again(made, (EARLIER, {"gate": {**TERMS, "margin": 0.2}}))
    assert (usual.outcome, wide.outcome, note) == (State.FAILS, State.PASSES, "")
    assert (usual.terms.margin, wide.terms.margin, wide.terms.pairs, wide.gate) == (0.03, 0.2, 12, "gate")


@pytest.mark.parametrize("plans", [(), ((EARLIER, {}),), ((EARLIER, {"sweeps": {}}),), ((LATER, {"gate": TERMS}),)])
def test_without_stored_terms_the_defaults_are_taken_and_told(plans):
    [(gated, note)] = again(pairs(4), *plans)
    assert gated.terms.margin == 0.03 and gated.outcome is State.PASSES and tells(note, "opt-1.3b", "3 %", 12)


def test_gates_of_one_archive_are_told_apart():
    other = [replace(m, paired=replace(m.paired, gate="other")) for m in pairs(4, speed=0.9)]
    assert [g.outcome for g, _ in again([*pairs(4), *other])] == [State.PASSES, State.FAILS]


@pytest.mark.parametrize(
    "stored", [{}, None, 3, {**TERMS, "margin": "wide"}, {**TERMS, "margin": 2.0}, {**TERMS, "pairs": 1}]
)
def test_terms_that_are_none_are_the_archives_fault(stored):
    with refused("gate", kind=BadArchive):
        again(pairs(4), (EARLIER, {"gate": stored}))


def test_what_is_in_no_gate_makes_none():
    assert again([replace(m, paired=None) for m in pairs(1)]) == []
