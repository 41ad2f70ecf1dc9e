"""Progress of a run: time estimates, and one live line on a terminal, or elsewhere a line for each case or start."""

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pytest_slmserve.plan import cases
from pytest_slmserve.plan.cases import AGAIN, Case, PlannedItem, engine_title, start_estimate_s
from pytest_slmserve.plugin.items import ItemPlan, cases_of_items, plans_of
from pytest_slmserve.report.live_line import LiveLine, Status, TimeLeft
from pytest_slmserve.report.text_table import counted, folded
from pytest_slmserve.run.executor import slot_count
from pytest_slmserve.run.gate import launches_left, one_gate
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.records import Progress
from pytest_slmserve.schema.specs import Engines

LEAST_S = 1.0  # shorter steps get no line in a log
LONGER = 1.1  # times the promised time, from which on a longer run is reported


def plan_rows(session: Session, plans: Sequence[ItemPlan]) -> list[PlannedItem]:
    """Return a row for each item that runs, and one for the rest of each engine's budget while claims are open.

    Only the first item that requests a point has its time. A gate is estimated as a clear case, which ends at the next
    interim analysis.
    """
    rows, paid, launched = list[PlannedItem](), set[str](), set[Engines]()
    executor, claimed = session.executor, {plan.claim.series for plan in plans if plan.claim}
    open_s, last = defaultdict[Engines, float](float), dict[Engines, int]()
    goes_on = len(session.looks) > 1 and session.platform != "simulated"  # whose seconds are none of a clock
    for plan in plans:
        if plan.skipped:
            continue
        engine, seconds = plan.engine if plan.starts else None, 0.0
        if case := plan.case:
            of_claims = plan.swept and case.series in claimed
            wanted = session.first if of_claims else session.options.repeats
            left = executor.count_missing(case, max(wanted, executor.wanted(case)))
            engine = case.engine if left else None
            seconds = 0.0 if case.key in paid else left * case.estimate_s * executor.pace
            if of_claims and goes_on and (left or case.series in session.verdicts.measuring):
                open_s[case.engine] += seconds
                last[case.engine] = len(rows)
            paid.add(case.key)
            launched |= {case.engine} if left else set()
        elif model := plan.gate:
            engine = None  # it launches its own
            if model not in paid:
                gate = one_gate(session, model)  # which judges its pairs, if it goes on
                uncounted, measured = gate.launches_left(launched)
                starts_s = (uncounted + measured) * start_estimate_s(session.planner.spec(model))
                seconds = starts_s + measured * gate.launch_s
                if model in session.pair_s:  # up to the pairs of a clear case by what they took
                    made, each_s = session.pair_s[model]
                    seconds = max(0.0, measured / gate.launches_of_pair - made) * each_s
            paid.add(model)
        rows.append(PlannedItem(plan.name, engine, seconds))
    for engine, after in sorted(last.items(), key=lambda row: -row[1]):
        rest_s = session.budget_s - executor.spent_s[engine] - open_s[engine]
        if rest_s > 0:
            rows.insert(after + 1, PlannedItem(AGAIN, engine, rest_s))
    return rows


def start_s(session: Session, engine: Engines) -> float:
    """Return the estimated seconds of an engine start, scaled by the first start of this run."""
    first_s, taken = cases.DEFAULTS[engine.platform].first_s, session.devices.pool.first_start
    if taken is None:
        return start_estimate_s(engine)
    first, seconds = taken
    return start_estimate_s(engine) * seconds / (start_estimate_s(first) + first_s) if first_s else seconds


def time_left(session: Session, plans: Sequence[ItemPlan], step_s: float = 0.0) -> TimeLeft:
    """Return the time left for items, of which the first is running.

    Args:
        step_s: seconds of its current step, unless it is a gate.
    """
    rows, planned = plan_rows(session, plans), {case.key for case in cases_of_items(plans)}
    executor, current = session.executor, session.devices.pool.current
    asked = {case: missing for case, missing in executor.awaited().items() if case.key not in planned}
    engines = {row.engine for row in rows if row.engine} | {case.engine for case in asked}
    starts_s = sum(start_s(session, engine) for engine in engines - {current})
    asked_s = sum(missing * case.estimate_s for case, missing in asked.items()) * executor.pace
    total_s = sum(row.seconds for row in rows) + asked_s + starts_s
    step_s = min(total_s, rows[0].seconds if plans and plans[0].compares else step_s)
    return TimeLeft(step_s, total_s - step_s, any(plan.open for plan in plans))


def length_of(session: Session, plans: Sequence[ItemPlan], rows: Sequence[PlannedItem]) -> tuple[float, str]:
    """Return the seconds that a run of items takes, and a sentence about it.

    Args:
        rows: from `plan_rows`.
    """
    groups = cases.groups_of(rows)
    gates = {plan.gate for plan in plans if plan.gate}
    engines = {group.engine for group in groups}
    starts = len(groups) + sum(sum(launches_left(session, model, engines)) for model in gates)
    seconds = sum(group.seconds for group in groups) + sum(row.seconds for row in rows if row.engine is None)
    if session.options.on_all_gpus:
        gpus = slot_count(session.options, session.host)
        seconds = cases.makespan_s(cases.spread(groups, gpus))
    seconds += cases.DEFAULTS[session.platform].first_s if starts else 0.0
    models = {spec.model for group in groups for spec in cases.engines_of_set(group.engine)} | gates
    often = [counted(starts, "engine start")] if session.platform != "remote" else []
    at_most = session.options.sweep == "adaptive" or any(row.name == AGAIN for row in rows)
    roughly = "up to" if at_most else "about"
    parts = [f"{roughly} {minutes(seconds)}", *often, counted(len(models), "model")]
    if asking := sum(plan.open for plan in plans):
        parts.append(f"and what {counted(asking, 'test')} will ask for")
    return seconds, ", ".join(parts)


def minutes(seconds: float) -> str:
    """Return a rough time in words: "11 min", or "32 s" below a minute."""
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


class ProgressLine:
    """Line below pytest's own that shows what is started or measured.

    Without a terminal, lines stay, unless pytest is quiet.

    Args:
        promised_s: seconds that the run was said to take.
    """

    def __init__(self, session: pytest.Session, slm: Session, reporter: Any, promised_s: float = 0.0) -> None:
        self.promised_s, self.began = promised_s, time.monotonic()
        self.plans, self.slm, self.reporter = plans_of(session.items), slm, reporter
        self.writer = session.config.get_terminal_writer()
        capture = session.config.pluginmanager.getplugin("capturemanager")
        uncaptured = capture.global_and_fixture_disabled if capture else nullcontext
        # Nothing is captured before the first item. It bypasses pytest's writer, which counts the columns of its line.
        self.line = LiveLine(sys.stdout, lambda: int(self.writer.width_of_current_line), uncaptured)
        self.quiet = session.config.option.verbose < 0
        self.index = {item.nodeid: index for index, item in enumerate(session.items)}
        # Cases that tests request while they run are added.
        self.cases = {case.key for case in cases_of_items(self.plans) if slm.executor.count_missing(case)}
        self.places: dict[str, int] = {}  # of cases, in the order in which they begin
        self.left = self.plans  # plans of the running and all later items
        self.item_began = self.since = time.monotonic()  # since: what was printed last
        self.step: tuple[object, float, TimeLeft] | None = None  # what is done, since when, and what is left
        self.measured: tuple[Case, str] | None = None  # and the title of its last repeat
        self.told = False  # there were lines that stay
        slm.executor.on_progress, slm.say = self.on_progress, self._tell
        slm.devices.pool.on_wait = self.on_wait
        slm.devices.pool.on_started = self.on_started

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.left = self.plans[self.index[nodeid] :]
        self.item_began = self.since = time.monotonic()
        self.slm.executor.forget_awaited()  # an earlier test may have failed to get its cases

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.line.show(None)
        if report.when == "call":
            self._tell_measured(self.left[1:])
        if self.told and (report.when == "call" or not report.passed):
            self.told = False
            if self.reporter.showfspath and not self.reporter.showlongtestinfo:
                self.reporter.write_fspath_result(report.nodeid, "")  # so that no dot stands alone

    def on_progress(self, case: Case, title: str, progress: Progress) -> None:
        self._measures(case, title)
        if self.line.live:
            left = self._left(title, case.estimate_s)
            self.line.show(Status(self._place(case), left, title).measuring(progress))

    def wait(self, case: Case, text: str) -> None:
        """Show the wait for a case that is measured elsewhere, without the time left, which nobody knows."""
        self._measures(case, case.title)
        self.line.show(Status(self._place(case), subject=case.title, phase=text))

    def on_wait(self, spec: Engines, log: Path) -> None:
        if self.line.live and (stage := self.line.stage(log)):
            left = self._left(log, start_estimate_s(spec))
            self.line.show(Status(self._place(), left, engine_title(spec), stage))

    def on_started(self, spec: Engines, seconds: float) -> None:
        self.line.show(None)
        self._tell_measured(self.left)
        if seconds >= LEAST_S:
            longer = self._longer()
            if longer or not self.line.live:
                self._tell(f"{engine_title(spec)} started in {seconds:.0f} s{longer}")

    def _longer(self) -> str:
        """Return a clause on the time of the whole run if it is longer than promised."""
        if self.left[0].compares:  # the length of a gate is unknown until it ends
            return ""
        left = time_left(self.slm, self.left)
        seconds = time.monotonic() - self.began + left.step_s + left.rest_s
        if not self.promised_s or seconds <= LONGER * self.promised_s:
            return ""
        before, self.promised_s = minutes(self.promised_s), seconds
        return f": the run takes up to {minutes(seconds)} in all, not {before}" if minutes(seconds) != before else ""

    def _left(self, step: object, estimate_s: float) -> str:
        began = time.monotonic()
        # A gate is one step, because the number of its pairs is known late.
        if self.left[0].compares:
            step, began = self.left[0], self.item_began
        if self.step is None or step != self.step[0]:  # once for each step, because this hashes the keys of cases
            self.step = step, began, time_left(self.slm, self.left, estimate_s)
        _, began, left = self.step
        return left.text(time.monotonic() - began)

    def _place(self, case: Case | None = None) -> str:
        """Return "case 3 of 9", or "9 cases" without a case, or "" for a gate, whose pairs are not planned cases."""
        if not self.cases or (case and case.key not in self.cases) or self.left[0].compares:
            return ""
        number = f"{len(self.cases)}{'+' if any(plan.open for plan in self.left) else ''}"
        return f"case {self.places[case.key]} of {number}" if case else f"{number} cases"

    def _measures(self, case: Case, title: str) -> None:
        if self.measured == (case, title):
            return
        if self.measured and self.measured[0].key != case.key and self.measured[1] != title:
            self._tell_measured(self.left)
        self.measured = case, title
        self.cases |= {asked.key for asked in self.slm.executor.awaited()}
        if case.key in self.cases:
            self.places.setdefault(case.key, len(self.places) + 1)

    def _tell_measured(self, left: Sequence[ItemPlan]) -> None:
        now = time.monotonic()
        seconds, self.since = now - self.since, now
        if self.measured and not self.line.live and seconds >= LEAST_S:
            case, title = self.measured
            rest = time_left(self.slm, left)
            parts = (self._place(case), f"{title}: {seconds:.0f} s", rest.text() if rest else "")
            self._tell(", ".join(filter(None, parts)))
        self.measured = None

    def _tell(self, text: str) -> None:
        self.line.show(None)
        if not self.quiet:
            with self.line.uncaptured():
                self.writer.write(f"\n{folded(f'slmserve: {text}')}", flush=True)
            self.reporter.currentfspath = None  # so pytest begins a new line before it names a test or a file
            self.told = True
