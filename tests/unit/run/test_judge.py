"""What a run says of its measurements is what a report says of its archive; a question reads its own curve; advice and
a comparison with a stored baseline measure nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_sessions import MODEL, judged, point, records_of

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.claims.table import CLAIMS, applies
from pytest_slmserve.analysis.verdict import Inconclusive, State
from pytest_slmserve.archive.store import read
from pytest_slmserve.commands.report import judged_again
from pytest_slmserve.plan.planner import gpus_cases, job_cases
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.screen import tables
from pytest_slmserve.run.judge import NO_WORSE, WARNING, StoredBaseline
from pytest_slmserve.schema.errors import BadArchive, BadUsage
from pytest_slmserve.schema.specs import ClosedLoop

LOADS = (4, 16, 64, 128)
PLATEAU = "throughput-plateau"
FAST = {"input_len": "64", "output_len": "16", "window": "0.5", "engine_arg": ["t_inf=8000", "b_half=16"]}


@pytest.fixture
def opened(opened):
    """Opens sessions on one archive whose sweep has LOADS; options go by their names."""
    return lambda **given: opened(**{"concurrency": ",".join(map(str, LOADS)), **FAST, **given})


def sweep(session, only=LOADS):
    session.planner.sweep(MODEL)
    session.begin()
    for case in session.planner.sweep(MODEL).cases:
        if case.concurrency in only:
            session.executor.measure(case)
    return session


def judged_of(curve):
    """What a claim reads of a curve, but for the figures, which the archive rounds."""
    records = [point.records for point in curve.points]
    return curve.subject, records, curve.missing, curve.cut, curve.adaptive, curve.unneeded, curve.beside


def loads_of(curve):
    return [p.concurrency for p in curve.points]


# The run and its archive


@pytest.mark.parametrize("only", [LOADS, (4, 64, 128)])
def test_the_report_on_the_archive_says_what_the_run_said(opened, only):
    """Also where `-k` has deselected a point: it was planned, so the claim is inconclusive in both. An archive keeps
    whole microseconds, which a window of a second does not show."""
    session = sweep(opened(window="1"), only)
    for claim in CLAIMS.values():
        arithmetic = claim.of == "arithmetic"
        if arithmetic or applies(claim, session.verdicts.curve(MODEL)):
            for model in claim.models if arithmetic else (MODEL,):
                judged(session, claim.name, model)
    later = judged_again(read(session.options.records))
    live = Findings(curves=session.verdicts.curves(), judged=session.verdicts.judged)
    assert list(tables(live)) == list(tables(later)) and len(live.judged) > 5
    assert session.verdicts.curve(MODEL).missing == tuple(set(LOADS) - set(only))
    assert (judged(session, PLATEAU).state is State.INCONCLUSIVE) == (only != LOADS)


def test_the_plan_that_an_archive_keeps_has_all_that_was_to_be_measured(opened):
    session = opened(concurrency=None, sweep="adaptive", budget="0")
    model = session.planner.sweep(MODEL)
    plan = session.verdicts.plan()
    [(series, facts)] = plan["sweeps"].items()
    assert series == model.cases[0].series and facts["model"] == MODEL
    assert facts["concurrencies"] == list(model.concurrencies) and facts["adaptive"] == {"tolerance": 0.1}
    assert [load for load, _ in facts["skipped"]] == [load for load, _ in model.cut]
    assert plan["interim_analyses"] == [2] and "compared" not in plan
    gpus_cases(session.planner, [MODEL])
    assert session.verdicts.plan()["compared"] == sorted(session.planner.beside) != []


def test_only_an_adaptive_sweep_has_a_tolerance(opened):
    assert opened().verdicts.adaptive(MODEL) is None
    assert opened(sweep="adaptive").verdicts.adaptive(MODEL) == 0.1


def test_a_case_that_is_awaited_and_never_measured_is_in_no_report(opened):
    session = opened()
    session.executor.ask([session.planner.sweep(MODEL).cases[0]], 3)
    found = session.findings()
    assert (found.curves, found.measurements, found.reused) == ([], [], {})


# Curves


def test_a_users_own_engine_of_a_swept_model_has_no_planned_loads(opened):
    session = sweep(opened(), (4,))
    mine = replace(session.planner.spec(MODEL), max_num_seqs=32)
    for load in (1, 2):
        records_of(session, mine, ClosedLoop(load, window_s=0.5))
    planned, other = session.verdicts.curves()
    assert (loads_of(other), other.missing, other.cut) == ([1, 2], (), ())
    assert (loads_of(planned), planned.missing) == ([4], (16, 64, 128))
    curves = judged_again(read(session.options.records)).curves
    assert list(map(judged_of, curves)) == list(map(judged_of, (planned, other)))
    assert (planned.beside, other.beside) == (False, True)


def test_a_users_load_on_a_planned_curve_joins_it_at_once(opened):
    session = sweep(opened())
    assert loads_of(session.verdicts.curve(MODEL)) == list(LOADS)
    records_of(session, session.planner.spec(MODEL), ClosedLoop(32, window_s=0.5))
    [curve] = session.verdicts.curves()
    assert loads_of(curve) == [4, 16, 32, 64, 128] and curve == session.verdicts.curve(MODEL)
    point(session, 32, repeats=3)
    assert len(session.verdicts.curves()) == 2, "another window is another curve"


def test_a_sweep_that_was_begun_has_what_the_archive_knows_and_another_has_not(opened):
    sweep(opened())
    again = opened(resume=True)
    case = again.planner.sweep(MODEL).cases[0]
    assert again.verdicts.curves() == []
    again.executor.measure(case)
    [curve] = again.verdicts.curves()
    assert loads_of(curve) == list(LOADS) and again.devices.pool.starts == []


def test_a_model_whose_loads_are_all_cut_has_an_empty_curve(opened):
    session = opened(concurrency=None, input_len="256", output_len="64", gpu_memory_utilization="0.0303")
    plan = session.planner.sweep(MODEL)
    curve = session.verdicts.curve(MODEL)
    assert (curve.points, curve.cut) == ((), plan.cut) and plan.cut


# Questions


def test_a_claim_under_another_ramp_up_reads_its_own_curve_and_no_planned_load(opened):
    """So a sweep whose claims are open is not measured again for it."""
    session = sweep(opened())
    ours, other = (session.verdicts.question(PLATEAU, MODEL, words) for words in ({}, {"ramp_up": "burst"}))
    assert ours.planned and not other.planned and ours.series != other.series
    assert session.verdicts.verdict(ours).n == 8
    unseen = session.verdicts.verdict(other)
    assert (unseen.state, unseen.n or 0, unseen.again) == (State.INCONCLUSIVE, 0, ())


@pytest.mark.parametrize(
    ("claim", "model", "reads"),
    [
        (PLATEAU, MODEL, (True, True)),
        (PLATEAU, "opt-350m", (True, False)),
        (next(each.name for each in CLAIMS.values() if each.of == "replicas"), MODEL, (True, False)),
        ("table-1-batch-fits", MODEL, (False, False)),
        ("throughput-follows-arrivals", MODEL, (False, False)),
    ],
)
def test_a_question_names_the_curve_that_it_reads(opened, claim, model, reads):
    question = opened().verdicts.question(claim, model)
    assert (question.series is not None, question.planned) == reads
    assert (question.row.claim, question.model, question.of) == (claim, model, CLAIMS[claim].of)


def test_a_model_that_is_not_swept_needs_no_plan_to_be_judged(opened, monkeypatch):
    """512 requests do not fit OPT-13B, which nobody wants to serve here: Table 1 is arithmetic."""
    session = opened()
    assert judged(session, PLATEAU, "opt-13b").state is State.INCONCLUSIVE

    def refuse(model, **words):
        raise BadUsage(f"{model} does not fit", "a smaller model")

    monkeypatch.setattr(session.planner, "spec", refuse)
    assert judged(session, "table-1-batch-fits", "opt-13b"), "arithmetic needs no engine that fits the host"
    assert [row.claim for _, row in session.verdicts.judged] == [PLATEAU, "table-1-batch-fits"]


@pytest.mark.parametrize(
    ("given", "words", "facts"),
    [
        ({"ramp_up": "burst"}, {}, ("engine", "burst")),
        ({"ramp_up": "burst"}, {"ramp_up": "staggered"}, ("engine", "staggered")),
        ({}, {}, ("engine", "staggered")),
    ],
)
def test_the_interface_and_the_way_of_starting_choose_the_row(opened, monkeypatch, given, words, facts):
    session = opened(**given)
    monkeypatch.setattr(table, "row_for", lambda *facts: facts)
    here = session.host.environment
    assert session.verdicts.row(PLATEAU, MODEL, words) == (PLATEAU, MODEL, here, *facts)
    session.planner.platform = "remote"
    assert session.verdicts.row(PLATEAU, MODEL)[3] == "endpoint"


def test_a_claim_on_jobs_reads_the_jobs_of_its_model(opened):
    session = opened(models="opt-125m,opt-350m")
    words = {
        "jobs": [{"model": m, "requests": 200, "lengths": (32, n)} for m in session.planner.models for n in (8, 64)]
    }
    for case in job_cases(session.planner, words):
        session.executor.measure(case)
    found = judged(session, "longer-outputs-fewer-requests")
    assert found.state is State.PASSES and found.subject == MODEL
    assert judged(session, "longer-outputs-fewer-requests", "opt-1.3b").state is State.INCONCLUSIVE


def test_a_claim_on_several_gpus_reads_the_curve_of_the_fewest(opened):
    session = opened(concurrency="64")
    for case in gpus_cases(session.planner, [MODEL]):
        if not case.skip_reason:
            session.executor.measure(case)
    claim = "tensor-parallel-loses-per-gpu"
    verdict = judged(session, claim)
    assert verdict.state in (State.PASSES, State.FAILS) and verdict.subject.startswith(MODEL)
    later = judged_again(read(session.options.records))
    assert [(v.state, v.value) for v, _ in later.judged if v.claim == claim] == [
        (verdict.state, pytest.approx(verdict.value, rel=1e-4))
    ]


# Advice


def test_an_advice_needs_two_loads_and_a_share(opened):
    session = sweep(opened(models=f"{MODEL},opt-350m"), (4,))
    for model, facts in ((MODEL, "concurrency 4"), ("opt-350m", "nothing")):
        with pytest.raises(Inconclusive) as caught:
            session.verdicts.advice(model, None, 0.1)
        assert model in str(caught.value) and facts in str(caught.value)
        assert session.notes[-1] == str(caught.value), "pytest shows no reason for it"
    for share in (0.0, 1.0, 10.0):
        with pytest.raises(BadUsage) as wrong:
            session.verdicts.advice(MODEL, None, share)
        assert f"{share:g}" in wrong.value.problem and wrong.value.hint.startswith("efficiency=")


def test_an_advice_follows_the_objective(opened):
    session = sweep(opened())
    free, bound = (session.verdicts.advice(f"facebook/{MODEL}", slo, 0.1) for slo in (None, "2x@4"))
    assert free.batch in LOADS and bound.batch < free.batch and bound.subject.name == MODEL
    assert session.verdicts.advice(MODEL, "0.0001ms", 0.1).batch is None
    with pytest.raises(BadUsage):
        session.verdicts.advice(MODEL, "twice", 0.1)


def test_a_note_is_noted_once(opened):
    session = opened()
    session.note("one", "two", "one")
    session.note("two", "three")
    assert session.notes == ["one", "two", "three"]


# A stored baseline


@pytest.fixture
def held(opened, tmp_path):
    """A run that is held against an archive: `held(t_inf=6000)`, after a sweep with that speed."""
    before = sweep(opened(engine_arg=["t_inf=8000", "b_half=16", "noise=0.0005"])).options.records

    def run(t_inf=8000, **given):
        arguments = [f"t_inf={t_inf}", "b_half=16", "noise=0.0005"]
        session = opened(records=str(tmp_path / "b.jsonl"), baseline=before, engine_arg=arguments, **given)
        return sweep(session), StoredBaseline.of_run(session.verdicts)

    return run


def test_an_equal_run_is_no_worse_and_each_case_is_judged(held):
    session, baseline = held(gate_margin="0.1")
    verdict = baseline.judge(MODEL)
    assert (verdict.claim, verdict.subject, verdict.state, verdict.n) == (NO_WORSE, MODEL, State.PASSES, 8)
    assert len(session.verdicts.judged) == 8 and {row for _, row in session.verdicts.judged} == {None}
    claims = [each.claim for each, _ in session.verdicts.judged]
    assert claims == sorted(claims) and session.notes.count(WARNING) == 1
    baseline.judge(MODEL)
    assert session.notes.count(WARNING) == 1


def test_a_slower_run_fails_and_tells_the_cases_that_do(held):
    session, baseline = held(t_inf=6000)
    verdict = baseline.judge(MODEL)
    failing = [v for v, _ in session.verdicts.judged if v.state is State.FAILS]
    assert verdict.state is State.FAILS and failing
    assert all(v.subject in verdict.why and v.why in verdict.why for v in failing)
    assert held(t_inf=6000, gate_margin="0.5")[1].judge(MODEL).state is State.PASSES


def test_a_model_that_only_one_side_has_is_not_compared(held):
    verdict = held()[1].judge("opt-350m")
    assert (verdict.state, verdict.n) == (State.INCONCLUSIVE, 1)


def test_a_baseline_that_is_not_there_or_is_none(opened, tmp_path):
    with pytest.raises(BadUsage) as caught:
        StoredBaseline.of_run(opened(baseline="nowhere.jsonl").verdicts)
    assert "--slm-baseline nowhere.jsonl" in caught.value.problem
    (tmp_path / "none.jsonl").write_text("nothing of ours\n")
    with pytest.raises(BadArchive):
        StoredBaseline.of_run(opened(baseline=str(tmp_path / "none.jsonl")).verdicts)
