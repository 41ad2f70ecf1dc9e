"""How far a run is: one live line on a terminal, elsewhere a line for each case and each engine start."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from pytest_slmserve.plan.cases import Case, Engines, engine_title, start_estimate_s
from pytest_slmserve.plugin.estimates import TimeLeft, may_ask_for_more, time_left
from pytest_slmserve.plugin.items import cases_of_items, is_gate
from pytest_slmserve.report.live_line import StartWatch, Status, terminal_columns
from pytest_slmserve.report.text_table import folded
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.records import Progress

LEAST_S = 1.0  # what took less is not worth a line in a log


class ProgressLine:
    """One line below pytest's own, written over while something is started or measured. Where the output is no
    terminal: lines that stay, unless pytest is to be quiet."""

    def __init__(self, session: pytest.Session, slm: Session, reporter: Any) -> None:
        self.items, self.slm, self.reporter = session.items, slm, reporter
        self.writer = session.config.get_terminal_writer()
        self.capture = session.config.pluginmanager.getplugin("capturemanager")
        self.live = sys.stdout.isatty()  # nothing is captured before the first item
        self.tells = not self.live and session.config.option.verbose >= 0
        self.index = {item.nodeid: index for index, item in enumerate(session.items)}
        # And those that tests ask for, from then on.
        self.cases = {case.key for case in cases_of_items(session.items) if slm.executor.count_missing(case)}
        self.places: dict[str, int] = {}  # of cases, in the order in which they begin
        self.starts = StartWatch()
        self.left_items = session.items  # the one that runs, and all after it
        self.item_began = self.since = time.monotonic()  # since: what was told last
        self.step: tuple[object, float, TimeLeft] | None = None  # what is done, since when, and what is left
        self.measured: tuple[Case, str] | None = None  # and the title of its last repeat
        self.shown = self.told = False  # there is a live line; there were lines that stay

    def install(self) -> None:
        """Hears from now on of all that is started and measured."""
        self.slm.executor.on_progress = self.on_progress
        self.slm.devices.pool.on_wait = self.on_wait
        self.slm.devices.pool.on_started = self.on_started

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.left_items = self.items[self.index[nodeid] :]
        self.item_began = self.since = time.monotonic()
        self.slm.executor.asked.clear()  # nobody waits any more for what an earlier test could not have

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._clear()
        if report.when == "call":
            self._tell_measured(self.left_items[1:])
        if self.told and (report.when == "call" or not report.passed):
            self.told = False
            if self.reporter.showfspath and not self.reporter.showlongtestinfo:
                self.reporter.write_fspath_result(report.nodeid, "")  # so that no dot stands alone

    def on_progress(self, case: Case, title: str, progress: Progress) -> None:
        self._measures(case, title)
        if self.live:
            left = self._left(title, case.estimate_s)
            self._show(Status(self._place(case), left, title).measuring(progress))

    def wait(self, case: Case, text: str) -> None:
        """Shows how a wait goes for what is measured elsewhere. The time that is left depends on how many engines will
        run at once, which nobody knows."""
        self._measures(case, case.title)
        if self.live:
            self._show(Status(self._place(case), subject=case.title, phase=text))

    def on_wait(self, spec: Engines, log: Path) -> None:
        if self.live and (phase := self.starts.phase(log)):
            left = self._left(log, start_estimate_s(spec))
            self._show(Status(self._place(), left, engine_title(spec), phase))

    def on_started(self, spec: Engines, seconds: float) -> None:
        self._clear()
        self._tell_measured(self.left_items)
        if seconds >= LEAST_S:
            self._tell(f"{engine_title(spec)} started in {seconds:.0f} s")

    def _left(self, step: object, estimate_s: float) -> str:
        """The time left, in words. What is left is estimated once for each step: that hashes the keys of cases, too
        much to do twice a second beside what is measured. A gate is one step, for how many pairs it needs shows late.
        """
        began = time.monotonic()
        if is_gate(self.left_items[0]):
            step, began = self.left_items[0], self.item_began
        if self.step is None or step != self.step[0]:
            self.step = step, began, time_left(self.slm, self.left_items, estimate_s)
        _, began, left = self.step
        return left.text(time.monotonic() - began)

    def _place(self, case: Case | None = None) -> str:
        """Which case of how many; without one, how many. Empty for a gate, whose pairs are no cases of the plan, though
        one may have the key of such a case."""
        if not self.cases or (case and case.key not in self.cases) or is_gate(self.left_items[0]):
            return ""
        number = f"{len(self.cases)}{'+' if may_ask_for_more(self.left_items) else ''}"
        return f"case {self.places[case.key]} of {number}" if case else f"{number} cases"

    def _measures(self, case: Case, title: str) -> None:
        if self.measured and self.measured[0].key != case.key:
            self._tell_measured(self.left_items)
        self.measured = case, title
        executor = self.slm.executor
        self.cases |= {key for key, (asked, n) in executor.asked.items() if executor.count_missing(asked, n)}
        if case.key in self.cases:
            self.places.setdefault(case.key, len(self.places) + 1)

    def _tell_measured(self, left_items: list[Any]) -> None:
        """A line on the case that has been measured, where there is one."""
        now = time.monotonic()
        seconds, self.since = now - self.since, now
        if self.measured and self.tells and seconds >= LEAST_S:
            case, title = self.measured
            left = time_left(self.slm, left_items)
            parts = (self._place(case), f"{title}: {seconds:.0f} s", left.text() if left else "")
            self._tell(", ".join(filter(None, parts)))
        self.measured = None

    def _tell(self, text: str) -> None:
        """A line of its own, to which pytest adds a new line before it names a test or a file again."""
        if self.tells:
            with self._uncaptured():
                self.writer.write(f"\n{folded(f'slmserve: {text}')}", flush=True)
            self.reporter.currentfspath = None
            self.told = True

    def _show(self, status: Status) -> None:
        self._write(status)
        self.shown = True

    def _clear(self) -> None:
        if self.shown:
            self._write(None)
            self.shown = False

    def _write(self, status: Status | None) -> None:
        """Go to the next line and come back, by relative moves: the terminal may scroll in between. Past pytest's
        writer, which counts the columns of the line that it is on; of a longer one the cursor is on the last row."""
        with self._uncaptured():
            columns = terminal_columns(sys.stdout)
            column = self.writer.width_of_current_line % columns + 1
            sys.stdout.write(f"\n{status.within(columns) if status else ''}\x1b[K\x1b[1A\x1b[{column}G")
            sys.stdout.flush()

    def _uncaptured(self) -> AbstractContextManager[None]:
        return self.capture.global_and_fixture_disabled() if self.capture else nullcontext()
