"""What a session on the simulated engine has measured, as curves and verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_sessions import BATCHES, MODEL, judged, point, records_of, sweep

from pytest_slmserve.analysis.claims import table as lookup
from pytest_slmserve.analysis.claims.table import CLAIMS, applies
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.store import read
from pytest_slmserve.commands.report import judged_again
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.screen import tables
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.specs import ClosedLoop


def reported(session: Session) -> str:
    return "\n".join(text for text, _ in tables(judged_again(read(session.options.records))))


def judged_of(curve: Curve) -> tuple[object, ...]:
    """What a claim reads of a curve, but for the figures, which the archive rounds."""
    records = [point.records for point in curve.points]
    return curve.subject, records, curve.missing, curve.cut, curve.adaptive, curve.unneeded, curve.beside


@pytest.mark.parametrize("only", [BATCHES, (8, 64, 512)])
def test_the_report_on_the_archive_says_what_the_run_said(opened, only):
    """Also where `-k` has deselected a point: it was planned, so the claim is inconclusive in both."""
    session = opened()
    sweep(session, only)
    for claim in CLAIMS.values():
        arithmetic = claim.of == "arithmetic"
        if arithmetic or applies(claim, session.verdicts.curve(MODEL)):
            for model in claim.models if arithmetic else (MODEL,):
                judged(session, claim.name, model)
    live = tables(Findings(curves=session.verdicts.curves(), judged=session.verdicts.judged))
    assert "\n".join(text for text, _ in live) == reported(session)
    missing = "not measured at concurrency 256" in reported(session)
    assert missing == (only != BATCHES) == (session.verdicts.judged[0][0].state is State.INCONCLUSIVE)


def test_a_case_that_is_awaited_and_never_measured_is_in_no_report(opened):
    session = opened()
    case = session.planner.sweep(MODEL).cases[0]
    session.executor.ask([case], 3)
    assert session.executor.awaited() == {case: 3}
    found = session.findings()
    assert (found.curves, found.measurements, found.reused) == ([], [], {})
    session.executor.forget_awaited()
    assert session.executor.awaited() == {} and session.executor.count_missing(case) == 2, "who asks again measures it"


def test_a_model_that_is_not_swept_needs_no_plan_to_be_judged(opened, monkeypatch):
    """512 requests do not fit OPT-13B, which nobody wants to serve here: Table 1 is arithmetic."""
    session = opened()
    assert judged(session, "throughput-plateau", "opt-13b").why == "0 valid points, 3 are needed"

    def refuse(model, **words):
        raise BadUsage(f"{model} does not fit", "a smaller model")

    monkeypatch.setattr(session.planner, "spec", refuse)
    assert judged(session, "table-1-batch-fits", "opt-13b"), "arithmetic needs no engine that fits the host"


def test_a_claim_under_another_ramp_up_reads_its_own_curve_and_no_planned_load(opened):
    """So a sweep whose claims are open is not measured again for it."""
    session = opened()
    sweep(session)
    ours, other = (session.verdicts.question("throughput-plateau", MODEL, w) for w in ({}, {"ramp_up": "burst"}))
    assert ours.planned and not other.planned and ours.series != other.series
    assert session.verdicts.verdict(ours).n == 8
    unseen = session.verdicts.verdict(other)
    assert (unseen.why, unseen.again) == ("0 valid points, 3 are needed", ())


def test_a_users_own_engine_of_a_swept_model_has_no_planned_loads(opened):
    session = opened()
    sweep(session)
    mine = replace(session.planner.spec(MODEL), max_num_seqs=32)
    loads = (ClosedLoop(1), ClosedLoop(2))
    for load in loads:
        records_of(session, mine, load)
    planned, other = session.verdicts.curves()
    assert ([p.concurrency for p in other.points], other.missing, other.cut) == ([1, 2], (), ())
    assert [p.concurrency for p in planned.points] == list(BATCHES)
    curves, text = judged_again(read(session.options.records)).curves, reported(session)
    assert list(map(judged_of, curves)) == list(map(judged_of, (planned, other)))
    assert (planned.beside, other.beside) == (False, True)
    assert [c.missing for c in curves] == [(), ()] and "opt-125m, max_num_seqs 32" in text


def test_a_users_load_on_a_planned_curve_joins_it(opened):
    session = opened()
    sweep(session)
    point(session, 128)
    [curve] = session.verdicts.curves()
    assert [p.concurrency for p in curve.points] == [8, 64, 128, 256, 512]


def test_the_interface_and_the_way_of_starting_choose_the_row(opened, monkeypatch):
    session = opened(ramp_up="burst")
    monkeypatch.setattr(lookup, "row_for", lambda *facts: facts)
    assert session.verdicts.row("throughput-plateau", MODEL)[3:] == ("engine", "burst")
