"""What a run says of its measurements is what a report says of its archive; a question reads its own curve; advice and
a comparison with a stored baseline measure nothing."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from refusals import refused
from simulated_sessions import MODEL, judged, point, records_of, sweep

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
REPLICAS = next(each.name for each in CLAIMS.values() if each.of == "replicas")
FAST = {"input_len": "64", "output_len": "16", "window": "0.5", "engine_arg": ["t_inf=8000", "b_half=16"]}


@pytest.fixture
def opened(opened):
    """Opens sessions on one archive whose sweep has LOADS; options go by their names."""
    return lambda **given: opened(**{"concurrency": ",".join(map(str, LOADS)), **FAST, **given})


def swept(session, only=LOADS):
    sweep(session, only)
    return session


def loads_of(curve):
    return [p.concurrency for p in curve.points]


@pytest.mark.parametrize("only", [LOADS, (4, 64, 128)])
def test_report_repeats_run_verdicts(opened, only):
    """Also where `-k` has deselected a point: it was planned, so the claim is inconclusive in both. An archive keeps
    whole microseconds, which a window of a second does not show."""
    session = swept(opened(window="1"), only)
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


@pytest.mark.parametrize(("words", "adaptive"), [("full", {}), ("adaptive", {"adaptive": {"tolerance": 0.1}})])
def test_archived_plan_is_complete(opened, words, adaptive):
    session = opened(concurrency=None, sweep=words, budget="0")
    sweep = session.planner.sweep(MODEL)
    cut = [[load, why] for load, why in sweep.cut]
    facts = {"model": MODEL, "concurrencies": list(sweep.concurrencies), "skipped": cut, **adaptive}
    facts["beyond"] = sweep.beyond.series
    plan = {"sweeps": {sweep.cases[0].series: facts}, "interim_analyses": [2]}
    assert session.verdicts.plan() == plan
    gpus_cases(session.planner, [MODEL])
    assert session.verdicts.plan() == {**plan, "compared": sorted(session.planner.beside)} and session.planner.beside


def test_unmeasured_case_is_not_reported(opened, monkeypatch):
    session = opened()
    session.executor.ask([session.planner.sweep(MODEL).cases[0]], 3)
    found = session.findings()
    assert (found.curves, found.measurements, found.reused) == ([], [], {})
    session.note("one", "two", "one")
    session.note("two", "three")
    assert session.notes == ["one", "two", "three"]
    # 512 requests do not fit OPT-13B, which nobody wants to serve here: Table 1 is arithmetic.
    assert judged(session, PLATEAU, "opt-13b").state is State.INCONCLUSIVE
    monkeypatch.setattr(session.planner, "spec", Mock(side_effect=BadUsage("it does not fit", "another")))
    assert judged(session, "table-1-batch-fits", "opt-13b"), "arithmetic needs no engine that fits the host"
    assert [row.claim for _, row in session.verdicts.judged] == [PLATEAU, "table-1-batch-fits"]


def test_sweep_includes_archived_loads(opened):
    swept(opened())
    session = opened(resume=True)
    case = session.planner.sweep(MODEL).cases[0]
    assert session.verdicts.curves() == []
    session.executor.measure(case)
    [curve] = session.verdicts.curves()
    assert loads_of(curve) == list(LOADS) and session.devices.pool.starts == []
    records_of(session, session.planner.spec(MODEL), ClosedLoop(32, window_s=0.5))
    [curve] = session.verdicts.curves()
    assert loads_of(curve) == [4, 16, 32, 64, 128] and curve == session.verdicts.curve(MODEL)
    point(session, 32, repeats=3)
    assert len(session.verdicts.curves()) == 2, "another window is another curve"
    session = opened(concurrency=None, input_len="256", output_len="64", gpu_memory_utilization="0.0303")
    plan, curve = session.planner.sweep(MODEL), session.verdicts.curve(MODEL)
    assert (curve.points, curve.cut) == ((), plan.cut) and plan.cut, "all loads are cut"
    # So a sweep whose claims are open is not measured again for it.
    session = swept(opened())
    ours, other = (session.verdicts.question(PLATEAU, MODEL, words) for words in ({}, {"ramp_up": "burst"}))
    assert ours.planned and not other.planned and ours.series != other.series
    assert session.verdicts.verdict(ours).n == 8
    unseen = session.verdicts.verdict(other)
    assert (unseen.state, unseen.n or 0, unseen.again) == (State.INCONCLUSIVE, 0, ())
    session = swept(opened(archive="own"), (4,))
    mine = replace(session.planner.spec(MODEL), max_num_seqs=32)
    for load in (1, 2):
        records_of(session, mine, ClosedLoop(load, window_s=0.5))
    for curves in (session.verdicts.curves(), judged_again(read(session.options.records)).curves):
        assert [(loads_of(each), each.missing, each.cut, each.beside) for each in curves] == [
            ([4], (16, 64, 128), (), False),
            ([1, 2], (), (), True),
        ]


@pytest.mark.parametrize(("claim", "model", "reads"), [
    (PLATEAU, MODEL, (True, True)), (PLATEAU, "opt-350m", (True, False)), (REPLICAS, MODEL, (True, False)),
    ("table-1-batch-fits", MODEL, (False, False)), ("throughput-follows-arrivals", MODEL, (False, False)),
])  # fmt: skip
def test_question_names_its_curve(opened, claim, model, reads):
    question = opened().verdicts.question(claim, model)
    assert (question.series is not None, question.planned) == reads
    assert (question.row.claim, question.model, question.of) == (claim, model, CLAIMS[claim].of)


@pytest.mark.parametrize(("platform", "option", "word", "facts"), [
    ("simulated", "burst", None, ("engine", "burst")),
    ("simulated", "burst", "staggered", ("engine", "staggered")),
    ("remote", "staggered", None, ("endpoint", "staggered")),
])  # fmt: skip
def test_interface_chooses_claim_row(opened, monkeypatch, platform, option, word, facts):
    session = opened(ramp_up=option)
    session.planner.platform = platform
    monkeypatch.setattr(table, "row_for", lambda *facts: facts)
    row = session.verdicts.row(PLATEAU, MODEL, {"ramp_up": word} if word else {})
    assert row == (PLATEAU, MODEL, session.host.environment, *facts)


def test_claims_read_own_measurements(opened):
    session = opened(models="opt-125m,opt-350m", concurrency="64")
    jobs = [{"model": m, "requests": 200, "lengths": (32, n)} for m in session.planner.models for n in (8, 64)]
    for case in (*job_cases(session.planner, {"jobs": jobs}), *gpus_cases(session.planner, [MODEL])):
        if not case.skip_reason:
            session.executor.measure(case)
    found = judged(session, "longer-outputs-fewer-requests")
    assert found.state is State.PASSES and found.subject == MODEL
    assert judged(session, "longer-outputs-fewer-requests", "opt-1.3b").state is State.INCONCLUSIVE
    claim = "tensor-parallel-loses-per-gpu"
    verdict = judged(session, claim)
    assert verdict.state in (State.PASSES, State.FAILS) and verdict.subject.startswith(MODEL)
    [later] = [v for v, _ in judged_again(read(session.options.records)).judged if v.claim == claim]
    assert (later.state, later.value) == (verdict.state, pytest.approx(verdict.value, rel=1e-4))
    session = swept(opened(models=f"{MODEL},opt-350m"), (4,))
    for model, facts in ((MODEL, "concurrency 4"), ("opt-350m", "nothing")):
        with pytest.raises(Inconclusive) as caught:
            session.verdicts.advice(model, None, 0.1)
        assert model in str(caught.value) and facts in str(caught.value)
        assert session.notes[-1] == str(caught.value), "pytest shows no reason for it"
    for share in (0.0, 1.0, 10.0):
        with refused(f"{share:g}", hint="efficiency="):
            session.verdicts.advice(MODEL, None, share)
    session = swept(opened())
    free, bound = (session.verdicts.advice(f"facebook/{MODEL}", slo, 0.1) for slo in (None, "2x@4"))
    assert free.batch in LOADS and bound.batch < free.batch and bound.subject.name == MODEL
    assert session.verdicts.advice(MODEL, "0.0001ms", 0.1).batch is None
    with pytest.raises(BadUsage):
        session.verdicts.advice(MODEL, "twice", 0.1)


@pytest.fixture
def held(opened, tmp_path):
    """A run that is held against an archive: `held(t_inf=6000)`, after a sweep with that speed."""

    def at_speed(t_inf, **given):
        return swept(opened(engine_arg=[f"t_inf={t_inf}", "b_half=16", "noise=0.0005"], **given))

    def run(t_inf=8000, **given):
        session = at_speed(t_inf, records=str(tmp_path / "b.jsonl"), baseline=before, **given)
        return session, StoredBaseline.of_run(session.verdicts)

    before = at_speed(8000).options.records
    return run


def test_slower_run_fails_baseline(held, opened, tmp_path):
    session, baseline = held(gate_margin="0.1")
    verdict = baseline.judge(MODEL)
    assert (verdict.claim, verdict.subject, verdict.state, verdict.n) == (NO_WORSE, MODEL, State.PASSES, 8)
    assert len(session.verdicts.judged) == 8 and {row for _, row in session.verdicts.judged} == {None}
    claims = [each.claim for each, _ in session.verdicts.judged]
    unknown = baseline.judge("opt-350m")
    assert (unknown.state, unknown.n) == (State.INCONCLUSIVE, 1), "only one side has it"
    assert claims == sorted(claims) and session.notes.count(WARNING) == 1
    session, baseline = held(t_inf=6000)
    verdict = baseline.judge(MODEL)
    failing = [v for v, _ in session.verdicts.judged if v.state is State.FAILS]
    assert verdict.state is State.FAILS and failing
    assert all(v.subject in verdict.why and v.why in verdict.why for v in failing)
    assert held(t_inf=6000, gate_margin="0.5")[1].judge(MODEL).state is State.PASSES
    with refused("--slm-baseline nowhere.jsonl"):
        StoredBaseline.of_run(opened(baseline="nowhere.jsonl").verdicts)
    (tmp_path / "none.jsonl").write_text("nothing of ours\n")
    with pytest.raises(BadArchive):
        StoredBaseline.of_run(opened(baseline=str(tmp_path / "none.jsonl")).verdicts)
