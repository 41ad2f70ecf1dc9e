"""Estimates of the time that the items of a run take, in seconds: what they measure, less what is measured already."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_slmserve.analysis.stats.estimates import FIRST_LOOKS
from pytest_slmserve.plan.cases import (
    ADAPTIVE_ESTIMATE,
    ENDPOINT_ESTIMATE,
    Case,
    Engines,
    PlannedItem,
    engines_of_set,
    repeat_estimate_s,
    start_estimate_s,
)
from pytest_slmserve.plan.schedule import groups_of, makespan_s, spread
from pytest_slmserve.plugin.items import (
    AS_IT_GOES,
    asks_the_engine,
    case_of,
    cases_of_items,
    chosen_parameters,
    engine_of,
    is_gate,
    is_measured,
    is_planned_point,
    is_skipped,
)
from pytest_slmserve.report.live_line import left_text
from pytest_slmserve.report.text_table import counted
from pytest_slmserve.run.gate import launches_left, loads_of
from pytest_slmserve.run.gpu_slots import slot_count
from pytest_slmserve.run.session import Session

LONG_S = 300.0  # a run that takes longer says so before it begins


def plan_rows(session: Session, items: Sequence[Any]) -> list[PlannedItem]:
    """A cell for each item that is not skipped. A point that several items ask for is paid by the first; one that is
    known needs no engine."""
    rows, paid, launched = list[PlannedItem](), set[str](), set[Engines]()
    for item in items:
        if is_skipped(item):
            continue
        if case := case_of(item):
            left = _missing(session, case)
            seconds = 0.0 if case.key in paid else left * case.estimate_s
            rows.append(PlannedItem(item.name, case.engine if left else None, seconds))
            paid.add(case.key)
            launched |= {case.engine} if left else set()
        elif sides := chosen_parameters(item).get("slm_gate"):
            again = sides[0] in paid
            paid.add(sides[0])
            seconds = 0.0 if again else gate_estimate_s(session, sides[0], launched)
            rows.append(PlannedItem(item.name, None, seconds))
        else:
            asks = is_measured(item) and asks_the_engine(item)
            rows.append(PlannedItem(item.name, engine_of(session, item) if asks else None, 0.0))
    return rows


def _missing(session: Session, case: Case) -> int:
    """Repeats of a planned case that are still to be made: those of the options, and those that its sweep asks for
    until its claims are decided."""
    _, asked = session.executor.asked.get(case.key, (case, 0))
    return session.executor.count_missing(case, max(session.options.repeats, asked))


def gate_estimate_s(session: Session, model: str, launched: Collection[Engines]) -> float:
    """Seconds that a model's gate takes in a clear case, which ends at the next look at its pairs. launched: engines
    that were launched before it."""
    uncounted, measured = launches_left(session, model, launched)
    spec, workload = session.planner.spec(model), session.planner.workload(model)
    each = sum(repeat_estimate_s(spec, workload, load) for load in loads_of(session, model))
    return (uncounted + measured) * start_estimate_s(spec) + measured * each


def estimate_notes(session: Session) -> list[str]:
    """Notes on what the estimates of a plan leave open."""
    options = session.options
    adaptive = options.sweep == "adaptive" and not options.gate
    clear = (
        f"a gate is estimated as a clear case, {FIRST_LOOKS[0]} pairs; one that is not takes up to {options.gate_pairs}"
    )
    goes_on = f"a sweep goes on until its claims are decided, up to {session.budget_s:g} s a model (--slm-budget)"
    notes = {
        ADAPTIVE_ESTIMATE: adaptive,
        goes_on: len(session.looks) > 1 and not options.gate,
        clear: options.gate,
        ENDPOINT_ESTIMATE: bool(options.endpoint),
    }
    return [note for note, holds in notes.items() if holds]


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Seconds until all items end: step_s of them for what is done at present. more: some tests may ask for what is not
    known yet, so that this is the least."""

    step_s: float = 0.0
    rest_s: float = 0.0
    more: bool = False

    def __bool__(self) -> bool:
        return self.step_s + self.rest_s > 0 or self.more

    def text(self, elapsed_s: float = 0.0) -> str:
        """In words. elapsed_s: of what is done at present; where that takes longer than was estimated, it is said."""
        over = elapsed_s > max(1.0, self.step_s)
        return left_text(max(0.0, self.step_s - elapsed_s) + self.rest_s, self.more, over)


def time_left(session: Session, items: Sequence[Any], step_s: float = 0.0) -> TimeLeft:
    """The time left for `items`, of which the first runs. step_s: the estimate for what it does at present; a gate is
    one step."""
    rows, planned = plan_rows(session, items), {case.key for case in cases_of_items(items)}
    executor, current = session.executor, session.devices.pool.current
    asked = [(case, executor.count_missing(case, n)) for case, n in executor.asked.values() if case.key not in planned]
    engines = {row.engine for row in rows if row.engine} | {case.engine for case, missing in asked if missing}
    starts_s = sum(map(start_estimate_s, engines - {current}))
    asked_s = sum(missing * case.estimate_s for case, missing in asked if missing)
    total_s = sum(row.seconds for row in rows) + asked_s + starts_s
    step_s = min(total_s, rows[0].seconds if items and is_gate(items[0]) else step_s)
    # Sweeps may go on until their claims are decided.
    points = [case_of(item) for item in items if is_measured(item) and is_planned_point(item) and not is_skipped(item)]
    goes_on = len(session.looks) > 1 and any(_missing(session, case) for case in points if case)
    return TimeLeft(step_s, total_s - step_s, may_ask_for_more(items) or goes_on)


def may_ask_for_more(items: Sequence[Any]) -> bool:
    """Does one of the items measure what its body asks for?"""
    return any(
        is_measured(item) and not is_skipped(item) and case_of(item) is None and AS_IT_GOES & {*item.fixturenames}
        for item in items
    )


def length_of(session: Session, items: Sequence[Any], rows: Sequence[PlannedItem]) -> tuple[float, str]:
    """Seconds that a run of `items` takes, and the same in words, with its engine starts and models. rows: what
    `plan_rows` makes of them; items that measure nothing may be among those."""
    groups = groups_of(rows)
    gates = {sides[0] for item in items if (sides := chosen_parameters(item).get("slm_gate"))}
    engines = {group.engine for group in groups}
    starts = len(groups) + sum(sum(launches_left(session, model, engines)) for model in gates)
    seconds = sum(group.seconds for group in groups) + sum(row.seconds for row in rows if row.engine is None)
    if session.options.on_all_gpus:
        gpus = slot_count(session.options, session.host)
        seconds = makespan_s(spread(groups, gpus))
    models = {spec.model for group in groups for spec in engines_of_set(group.engine)} | gates
    often = [counted(starts, "engine start")] if session.platform != "remote" else []
    roughly = "up to" if session.options.sweep == "adaptive" else "about"
    long = f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"
    parts = [f"{roughly} {long}", *often, counted(len(models), "model")]
    if asking := sum(may_ask_for_more([item]) for item in items):
        parts.append(f"and what {counted(asking, 'test')} will ask for")
    return seconds, ", ".join(parts)
