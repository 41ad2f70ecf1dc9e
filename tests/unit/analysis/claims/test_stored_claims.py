from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from launches import pairs
from strategies import law, measurement, planted_telemetry

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.claims.table import judge_all, rows_from, stored_curves, stored_gates
from pytest_slmserve.analysis.points import by_series
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.errors import BadArchive
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

BATCHES = (64, 128, 256, 512)
STORED = {"rows": [asdict(row) for row in table.ROWS]}
EARLIER, LATER = "2025-12-31T00:00:00+00:00", "2026-06-01T00:00:00+00:00"  # than what `measurement` makes


def sweep(batches=BATCHES, repeats: int = 2, **facts: object):
    return [measurement(c, law(c) * (1 + 0.001 * i), repeat=i, **facts) for c in batches for i in range(repeats)]


(SERIES,) = by_series([measurement()])


def plan_of(concurrencies, cut=(), series: str = SERIES, **more: object):
    return {"sweeps": {series: {"model": "opt-1.3b", "concurrencies": list(concurrencies), "skipped": cut, **more}}}


PLAN = plan_of(BATCHES, [[1024, "too large"]])


def test_stored_rows_are_read_and_todays_fill_what_they_lack():
    mine = replace(table.ROWS[0], parameters={"tolerance": 0.5})
    rows = rows_from({"rows": [asdict(mine)]})
    assert table.row_for(mine.claim, "opt-1.3b", rows=rows).parameters == {"tolerance": 0.5}
    assert {row.claim for row in rows} == table.CLAIMS.keys()
    assert rows_from(STORED) == table.ROWS == rows_from({})


@pytest.mark.parametrize("rows", [5, [5], [{"model": "opt-1.3b"}], [{"claim": ["x"]}], [{"claim": "x", "vllm": 5}]])
def test_rows_that_are_none_are_the_archives_fault(rows):
    with pytest.raises(BadArchive, match="the claims in the archive cannot be used"):
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
    with pytest.raises(BadArchive, match="the plan in the archive cannot be used"):
        stored_curves(sweep(), [(EARLIER, plan)])


def test_every_claim_is_judged_of_every_curve_and_table_1_of_its_models():
    curves = stored_curves([*sweep(), *sweep(model="opt-2.7b")], [])
    judged = judge_all(curves, table.ROWS)
    subjects = [(v.claim, v.subject) for v, _ in judged]
    of_arithmetic = sum(len(claim.models) for claim in table.CLAIMS.values() if claim.of == "arithmetic")
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
    of_other = {v.claim for v, _ in judge_all([planned, other], table.ROWS) if v.subject == "opt-2.7b"}
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
    [verdict] = [v for v, _ in judge_all(stored_curves([*small, *large], []), table.ROWS) if v.claim == name]
    assert verdict.subject == "opt-1.3b" and verdict.value == pytest.approx(2.0, rel=0.01)
    assert [v for v, _ in judge_all(stored_curves(large, []), table.ROWS) if v.claim == name] == []


def test_verdicts_on_two_curves_of_one_model_are_told_apart():
    judged = judge_all(stored_curves([*sweep(), *TOGETHER], []), table.ROWS)
    subjects = [v.subject for v, _ in judged if v.claim == "throughput-plateau"]
    assert subjects == ["opt-1.3b, ramp-up staggered", "opt-1.3b, ramp-up burst"]


TOGETHER = [measurement(c, law(c), load=ClosedLoop(c, ramp_up="burst"), repeat=i) for c in BATCHES for i in (0, 1)]
SERVED = [replace(m, spec=replace(m.spec, interface="server")) for m in sweep()]


@pytest.mark.parametrize(("only", "others"), [({"ramp_up": "burst"}, TOGETHER), ({"interface": "server"}, SERVED)])
def test_a_row_of_one_way_to_load_rules_its_curves_only(only, others):
    row = table.ClaimRow("throughput-plateau", **only, parameters={"tolerance": 0.01}, expected="fails")
    judged = judge_all(stored_curves([*sweep(), *others], []), (*table.ROWS, row))
    assert [r.expected for v, r in judged if v.claim == "throughput-plateau"] == ["passes", "fails"]


def test_judging_again_by_another_bound():
    curves = stored_curves(sweep(), [])
    strict = rows_from({"rows": [asdict(table.ClaimRow("throughput-plateau", parameters={"tolerance": 0.01}))]})
    assert next(v for v, _ in judge_all(curves, strict)).state is State.FAILS


def test_parameters_that_are_missing_are_the_archives_fault():
    with pytest.raises(BadArchive, match="parameters of throughput-plateau in the archive cannot be used .*tolerance"):
        judge_all(stored_curves(sweep(), []), (table.ClaimRow("throughput-plateau"),))


TERMS = {"margin": 0.03, "alpha": 0.01, "beta": 0.05, "pairs": 12}
EARLY, LATE = "2025-12-31T00:00:00+00:00", "2026-06-01T00:00:00+00:00"  # `launches` measures between them


def again(measurements, *plans):
    return list(stored_gates(measurements, plans))


def test_the_terms_of_its_session_rule():
    """5 % worse: within the wider margin, and not within the usual one."""
    made = pairs(4, speed=1 / 1.05)
    [(usual, note)] = again(made, (EARLY, {"gate": TERMS}))
    [(wide, _)] = again(made, (EARLY, {"gate": {**TERMS, "margin": 0.2}}))
    assert (usual.outcome, wide.outcome, note) == (State.FAILS, State.PASSES, "")
    assert (wide.terms.margin, wide.terms.pairs, wide.gate) == (0.2, 12, "gate")


def test_a_later_session_has_no_say():
    [(gated, _)] = again(pairs(4), (EARLY, {"gate": TERMS}), (LATE, {"gate": {**TERMS, "margin": 0.5}}))
    assert gated.terms.margin == 0.03


@pytest.mark.parametrize("plans", [(), ((EARLY, {}),), ((EARLY, {"sweeps": {}}),), ((LATE, {"gate": TERMS}),)])
def test_without_stored_terms_the_defaults_are_taken_and_said(plans):
    [(gated, note)] = again(pairs(4), *plans)
    assert gated.terms.margin == 0.03 and gated.outcome is State.PASSES
    assert note == "the terms of the gate of opt-1.3b were not stored: judged by a margin of 3 %, and 12 pairs at most"


def test_gates_of_one_archive_are_told_apart():
    other = [replace(m, paired=replace(m.paired, gate="other")) for m in pairs(4, speed=0.9)]
    assert [g.outcome for g, _ in again([*pairs(4), *other])] == [State.PASSES, State.FAILS]


@pytest.mark.parametrize(
    "stored", [{}, None, 3, {**TERMS, "margin": "wide"}, {**TERMS, "margin": 2.0}, {**TERMS, "pairs": 1}]
)
def test_terms_that_are_none_are_one_sentence(stored):
    with pytest.raises(BadArchive, match="the terms of the gate in the archive cannot be used"):
        again(pairs(4), (EARLY, {"gate": stored}))


def test_what_is_in_no_gate_makes_none():
    assert again([replace(m, paired=None) for m in pairs(1)]) == []
