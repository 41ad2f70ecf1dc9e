"""The live line: progress of a run, overwritten in place on a terminal."""

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

LOOK_S = 0.5  # seconds between two reads of the log of a starting engine
UNKNOWN = 80  # columns of a terminal that does not report its width


@dataclass(frozen=True, slots=True)
class Status:
    """Activity of a run, in words.

    Attributes:
        place: number of the case among all cases.
        left: time left of the run.
        subject: what is measured or started.
        phase: of the subject, with its seconds.
        done: number of requests so far.
        rate: tokens/s so far.
    """

    place: str = ""
    left: str = ""
    subject: str = ""
    phase: str = ""
    done: str = ""
    rate: str = ""

    def measuring(self, progress: Progress) -> Status:
        """Return the status with the progress of a measurement."""
        return replace(
            self,
            phase=f"{progress.phase} {progress.elapsed_s:.1f} s",
            done=f"{progress.done:,} done",
            rate="" if progress.tokens_per_s is None else f"{progress.tokens_per_s:,.0f} tokens/s",
        )

    def within(self, columns: int) -> str:
        """Return one line shorter than `columns`, so that the cursor stays on it, without less important fields."""
        fields, text = (self.place, self.left, self.subject, self.phase, self.done, self.rate), ""
        chosen: set[str] = set()
        for field in filter(None, (self.phase, self.left, self.place, self.subject, self.rate, self.done)):
            longer = " | ".join(each for each in fields if each in {*chosen, field})
            if len(longer) < columns:
                chosen, text = {*chosen, field}, longer
        return text or self.phase[: columns - 1]


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Seconds until a run ends.

    Attributes:
        step_s: of the current activity.
        rest_s: after it.
        more: whether the time may grow.
    """

    step_s: float = 0.0
    rest_s: float = 0.0
    more: bool = False

    def __bool__(self) -> bool:
        return self.step_s + self.rest_s > 0 or self.more

    def text(self, elapsed_s: float = 0.0) -> str:
        """Return the time left in words, never "0:00".

        Args:
            elapsed_s: of the current activity. If it exceeds the plan, the text mentions that.
        """
        over, seconds = elapsed_s > max(1.0, self.step_s), max(0.0, self.step_s - elapsed_s) + self.rest_s
        if over and seconds < 1.0:
            return "longer than planned"
        left = f"{clock(max(1.0, seconds))}{'+' if self.more or over else ''} left"
        return f"{left}, longer than planned" if over else left


def terminal_columns(stream: TextIO) -> int:
    """Return the columns of the terminal behind a stream, whatever the environment says."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or UNKNOWN
    except (OSError, ValueError):
        return UNKNOWN


class LiveLine:
    """Terminal line that is overwritten. Other streams get only the lines of `begin`.

    Args:
        used: returns the columns that another writer used of its line, which is then above this one.
        uncaptured: context in which the stream is the terminal's.
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
        """Overwrite the line. None clears it."""
        if not self.live or (status is None and not self.shown):
            return
        with self.uncaptured():
            columns = terminal_columns(self.stream)
            text = f"{status.within(columns) if status else ''}\x1b[K"
            # Relative moves to the next line and back, because the terminal may scroll. If the other line is wrapped,
            # the cursor is on its last row.
            moved = f"\n{text}\x1b[1A\x1b[{self.used() % columns + 1}G" if self.used else f"\r{text}"
            self.stream.write(moved)
            self.stream.flush()
        self.shown = status is not None

    def begin(self, status: Status) -> None:
        """Print a permanent line if the stream is not a terminal, as in a CI log."""
        if not self.live:
            print(f"slmserve: {status.within(UNKNOWN)}", file=self.stream, flush=True)

    def stage(self, log: Path) -> str:
        """Return the stage of an engine start with its seconds; "" if asked a moment ago."""
        now = time.monotonic()
        if log != self._log:
            self._log, self._began_s = log, now
        elif now - self._looked_s < LOOK_S:
            return ""
        self._looked_s = now
        return f"{stage_of(log)} {now - self._began_s:.0f} s"
