"""The line that shows how far a run is, as long as a terminal has room for, and a terminal that it is written over
on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from pytest_slmserve.engines.child import stage_of
from pytest_slmserve.plan.cases import clock
from pytest_slmserve.schema.records import Progress

LOOK_S = 0.5  # between two looks into the log of an engine that starts
UNKNOWN = 80  # columns of a terminal that does not say how many it has


@dataclass(frozen=True, slots=True)
class Status:
    """What a run does at present, in words. place: which case of how many. left: the time that is left of the run.
    subject: what is measured or started. phase: of that, with its seconds. done, rate: requests and tokens so far."""

    place: str = ""
    left: str = ""
    subject: str = ""
    phase: str = ""
    done: str = ""
    rate: str = ""

    def measuring(self, progress: Progress) -> Status:
        """Return the same, with how far a measurement is."""
        return replace(
            self,
            phase=f"{progress.phase} {progress.elapsed_s:.1f} s",
            done=f"{progress.done:,} done",
            rate="" if progress.tokens_per_s is None else f"{progress.tokens_per_s:,.0f} tokens/s",
        )

    def within(self, columns: int) -> str:
        """One line of fewer columns, so that the cursor stays on it: the least important fields are left out first."""
        fields, text = (self.place, self.left, self.subject, self.phase, self.done, self.rate), ""
        chosen: set[str] = set()
        for field in filter(None, (self.phase, self.left, self.place, self.subject, self.rate, self.done)):
            longer = " | ".join(each for each in fields if each in {*chosen, field})
            if len(longer) < columns:
                chosen, text = {*chosen, field}, longer
        return text or self.phase[: columns - 1]


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Seconds until a run ends: step_s of them for what is done at present. more: it may become more."""

    step_s: float = 0.0
    rest_s: float = 0.0
    more: bool = False

    def __bool__(self) -> bool:
        return self.step_s + self.rest_s > 0 or self.more

    def text(self, elapsed_s: float = 0.0) -> str:
        """In words, never "0:00": something is left. elapsed_s: of what is done at present; if that takes longer than
        was estimated, it is said."""
        over, seconds = elapsed_s > max(1.0, self.step_s), max(0.0, self.step_s - elapsed_s) + self.rest_s
        if over and seconds < 1.0:
            return "longer than planned"
        left = f"{clock(max(1.0, seconds))}{'+' if self.more or over else ''} left"
        return f"{left}, longer than planned" if over else left


def terminal_columns(stream: TextIO) -> int:
    """Columns of the terminal behind a stream, whatever the environment says."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or UNKNOWN
    except (OSError, ValueError):
        return UNKNOWN


class LiveLine:
    """One line of a terminal that is written over. A stream that is no terminal gets nothing of it.

    used: The number of columns that another writer has used of its line, if there is one: then the line is below that
        one.
    uncaptured: A context in which the stream is the terminal's.
    """

    def __init__(
        self,
        stream: TextIO,
        used: Callable[[], int] | None = None,
        uncaptured: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.stream, self.used, self.uncaptured = stream, used, uncaptured
        self.live, self.shown = stream.isatty(), False
        self._log: Path | None = None
        self._began_s = self._looked_s = 0.0

    def show(self, status: Status | None) -> None:
        """Write a status over the last one. None clears the line, if there is one."""
        if not self.live or (status is None and not self.shown):
            return
        with self.uncaptured():
            columns = terminal_columns(self.stream)
            text = f"{status.within(columns) if status else ''}\x1b[K"
            # Below another line: to the next line and back, by relative moves, because the terminal may scroll. Of a
            # line that is longer than the terminal is wide, the cursor is on the last row.
            moved = f"\n{text}\x1b[1A\x1b[{self.used() % columns + 1}G" if self.used else f"\r{text}"
            self.stream.write(moved)
            self.stream.flush()
        self.shown = status is not None

    def begin(self, status: Status) -> None:
        """Print what begins as a line that stays if the stream is no terminal, as in the log of a CI."""
        if not self.live:
            print(f"slmserve: {status.within(UNKNOWN)}", file=self.stream, flush=True)

    def stage(self, log: Path) -> str:
        """Return the stage of the engine start with this log, and its seconds; empty if the last look was a moment
        ago."""
        now = time.monotonic()
        if log != self._log:
            self._log, self._began_s = log, now
        elif now - self._looked_s < LOOK_S:
            return ""
        self._looked_s = now
        return f"{stage_of(log)} {now - self._began_s:.0f} s"
