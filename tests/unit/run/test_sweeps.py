"""Adaptive sweeps of a session on the simulated engine: what is measured, in which order, and what a report says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from simulated_sessions import judged, records_of

from pytest_slmserve.archive.store import read
from pytest_slmserve.commands.report import judged_again
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.screen import tables
from pytest_slmserve.report.sweeps import skip_note
from pytest_slmserve.run import executor
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.run.session import Session, Sweeps
from pytest_slmserve.schema.errors import EngineFailed

MODEL = "opt-125m"
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FAST = {"input_len": "64", "output_len": "32", "window": "2", "engine_arg": ["t_inf=20000", "b_half=20"]}
Open = Callable[..., Sweeps]


@pytest.fixture
def opened(opened: Callable[..., Session]) -> Open:
    """Opens adaptive sweeps on one archive, one session after the other; options go by their names."""

    def open_sweeps(**given: object) -> Sweeps:
        session = opened(**{"sweep": "adaptive", "concurrency": ",".join(map(str, GRID)), **FAST, **given})
        session.planner.sweep(MODEL)
        session.begin()
        return Sweeps(session, {MODEL: GRID}, {})

    return open_sweeps


def measured(sweeps: Sweeps) -> list[int]:
    """Loads in the order measured, over all sessions of the archive."""
    return [m.load.concurrency for m in read(sweeps.session.options.records).measurements]


def reported(sweeps: Sweeps) -> str:
    found = judged_again(read(sweeps.session.options.records))
    return "\n".join(text for text, _ in tables(found))


def said(sweeps: Sweeps) -> str:
    """By the run itself, of the claims on the curve's throughput and latency."""
    session = sweeps.session
    for name in ("throughput-plateau", "latency-rises-past-plateau", "pareto-up-to-plateau"):
        judged(session, name)
    found = Findings(curves=session.verdicts.curves(), judged=session.verdicts.judged)
    return "\n".join(text for text, _ in tables(found))


def test_what_is_wanted_is_measured_in_its_order_and_no_more(opened):
    sweeps = opened()
    rounds = sweeps.carry_out(MODEL)
    assert measured(sweeps) == [1, 512, 128, 64, 64, 128]
    assert rounds.asked == {1: 1, 512: 1, 128: 2, 64: 2}
    assert [sweeps.repeats(MODEL, load) for load in (1, 2, 64)] == [1, None, 2]
    assert len(measured(sweeps)) == 6, "once carried out, it is over"
    curve = sweeps.session.verdicts.curve(MODEL)
    assert curve.adaptive and curve.unneeded == (2, 4, 8, 16, 32, 256) and curve.missing == ()
    assert skip_note(curve, 256).startswith("not needed: the adaptive sweep found the plateau without it; predict")


def test_why_a_load_is_measured_is_told_while_it_is(opened):
    sweeps, told = opened(repeats="1"), []
    sweeps.session.executor.on_progress = lambda case, title, progress: told.append(title)
    sweeps.carry_out(MODEL)
    assert list(dict.fromkeys(told))[:2] == [
        "opt-125m at 1, repeat 1 (the smallest load: what a step takes, whatever the batch)",
        "opt-125m at 512, repeat 1 (the largest load: no prediction tells whether there is more to come)",
    ]


def test_the_report_on_the_archive_says_what_the_run_said(opened):
    sweeps = opened()
    sweeps.carry_out(MODEL)
    live, later = said(sweeps), reported(sweeps)
    assert "adaptive sweep, 6 planned loads not needed" in live and "not measured, predicted: tokens/s" in live
    for line in live.splitlines():
        if "verdict" not in line:
            assert line in later
    assert read(sweeps.session.options.records).sessions[0].plan["sweeps"][
        sweeps.session.planner.sweep(MODEL).cases[0].series
    ] == {
        "model": MODEL,
        "concurrencies": list(GRID),
        "skipped": [],
        "adaptive": {"tolerance": 0.1},
    }


def test_a_sweep_that_was_interrupted_is_inconclusive_and_goes_on_where_it_ended(opened, monkeypatch):
    made = []

    def twice(*arguments):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(measure_case(*arguments))
        return made[-1]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(executor, "measure_case", twice)
        first = opened()
        first.carry_out(MODEL)
    verdict = judged(first.session, "throughput-plateau")
    assert verdict.why == "not measured at concurrency 128", "the next one, not those that may not be needed"
    assert "not measured at concurrency 128" in reported(first) and "not at its end" in reported(first)
    again = opened(resume=True)
    again.carry_out(MODEL)
    assert measured(again)[:4] == [1, 512, 128, 64] and set(measured(again)[4:]) <= {64, 128}
    assert again.repeats(MODEL, 512) == 1, "known, though this session did not ask for it"


def test_a_full_sweep_later_judges_by_all_its_loads(opened):
    first = opened()
    first.carry_out(MODEL)
    full = opened(sweep="full", resume=True).session
    for case in full.planner.sweep(MODEL).cases:
        records_of(full, full.planner.spec(MODEL), case.loads[0])
    curve = full.verdicts.curve(MODEL)
    assert [p.concurrency for p in curve.points] == list(GRID) and not curve.adaptive
    assert len(measured(first)) == 20


def test_a_failure_ends_the_sweep_and_is_that_of_its_load(opened):
    sweeps = opened(engine_arg=[*FAST["engine_arg"], "die_at=100"])
    assert sweeps.repeats(MODEL, 1) == 1
    assert sweeps.repeats(MODEL, 64) is None
    assert (
        skip_note(sweeps.session.verdicts.curve(MODEL), 64)
        == "the adaptive sweep ended early: concurrency 512 was next"
    )
    with pytest.raises(EngineFailed, match="died at concurrency 512"):
        sweeps.repeats(MODEL, 512)
    assert measured(sweeps) == [1] and len(sweeps.session.devices.pool.starts) == 1, "not tried again"
    assert sweeps.session.notes == [
        "opt-125m: the adaptive sweep ended at concurrency 512: the simulated engine died at concurrency 512, as it "
        "was told to"
    ]


def test_invalid_measurements_are_made_again_and_it_ends(opened, monkeypatch):
    left = [1, 1, 1, 1]

    def at_first_broken(*arguments):
        [found] = measure_case(*arguments)
        return (replace(found, run=replace(found.run, failures=left.pop())) if left else found,)

    monkeypatch.setattr(executor, "measure_case", at_first_broken)
    sweeps = opened()
    sweeps.carry_out(MODEL)
    assert measured(sweeps)[:4] == [1, 1, 2, 2], "twice in vain; the next larger load is then the smallest"
    curve = sweeps.session.verdicts.curve(MODEL)
    assert [p.concurrency for p in curve.points if not p.valid] == [1, 2]
    assert judged(sweeps.session, "pareto-up-to-plateau").why.startswith("invalid at concurrency 1, 2")
    assert judged(sweeps.session, "throughput-plateau").again == (128, 512), "which needs neither"


def test_two_models_are_two_sweeps(opened):
    sweeps = opened(models="opt-125m,opt-350m")
    rounds = [sweeps.carry_out(model) for model in sweeps.session.planner.models]
    assert [c.unneeded for c in sweeps.session.verdicts.curves()] == [(2, 4, 8, 16, 32, 256)] * 2
    assert len(rounds) == 2 and all(each.asked for each in rounds)
