"""The line that shows how far a run is, as long as a terminal has room for, and a terminal that it is written over
on."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from pytest_slmserve.engines.child import stage_of
from pytest_slmserve.plan.cases import Engines, clock, engine_title
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
        """The same, with how far a measurement is."""
        return replace(
            self,
            phase=f"{progress.phase} {progress.elapsed_s:.1f} s",
            done=f"{progress.done:,} done",
            rate="" if progress.tokens_per_s is None else f"{progress.tokens_per_s:,.0f} tokens/s",
        )

    def within(self, columns: int) -> str:
        """One line of fewer columns, so that the cursor stays on it: the least important fields are left out first."""
        fields = (self.place, self.left, self.subject, self.phase, self.done, self.rate)
        by_importance = (self.phase, self.left, self.place, self.subject, self.rate, self.done)
        chosen: list[str] = []
        for field in filter(None, by_importance):
            if len(_joined([*chosen, field])) < columns:
                chosen.append(field)
        return _joined([field for field in fields if field in chosen]) or self.phase[: columns - 1]


def _joined(fields: Sequence[str]) -> str:
    return " | ".join(fields)


def left_text(seconds: float, more: bool = False, over: bool = False) -> str:
    """The time that is left, never 0:00, for something is. more: so much at least. over: so much when what is done has
    ended, which takes longer than planned."""
    left = f"{clock(max(1.0, seconds))}{'+' if more or over else ''} left"
    if not over:
        return left
    return f"{left}, longer than planned" if seconds >= 1.0 else "longer than planned"


def terminal_columns(stream: TextIO) -> int:
    """Columns of the terminal behind a stream, whatever the environment says."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or UNKNOWN
    except (OSError, ValueError):
        return UNKNOWN


class StartWatch:
    """Stages of engine starts, looked up in their logs now and then."""

    def __init__(self) -> None:
        self._log: Path | None = None
        self._began_s = self._looked_s = 0.0

    def phase(self, log: Path) -> str | None:
        """The stage of the start with this log, and its seconds; None if the last look was a moment ago."""
        now = time.monotonic()
        if log != self._log:
            self._log, self._began_s = log, now
        elif now - self._looked_s < LOOK_S:
            return None
        self._looked_s = now
        return f"{stage_of(log)} {now - self._began_s:.0f} s"


class LiveLine:
    """One line of a stream that is written over; where that is no terminal, a line for what begins."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.live = stream, stream.isatty()
        self._starts = StartWatch()

    def show(self, status: Status) -> None:
        self._write(status.within(terminal_columns(self.stream)))

    def on_wait(self, spec: Engines, log: Path) -> None:
        """Shows how far the start of an engine is."""
        if phase := self._starts.phase(log):
            self.show(Status(subject=engine_title(spec), phase=phase))

    def begin(self, status: Status) -> None:
        """Tells what begins in a line that stays, where the stream is no terminal: in the log of a CI."""
        if not self.live:
            print(f"slmserve: {status.within(UNKNOWN)}", file=self.stream, flush=True)

    def clear(self) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        if self.live:
            self.stream.write(f"\r{text}\x1b[K")
            self.stream.flush()
