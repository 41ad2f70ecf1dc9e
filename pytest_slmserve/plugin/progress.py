"""The line that shows how far a run is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_slmserve.run.session import Session
    from pytest_slmserve.schema.records import Progress


def progress_line(number: int, items: int, name: str, progress: Progress, left_s: float) -> str:
    """Item, time left, point, phase, requests done, rate: what matters most first, for narrow terminals."""
    rate = "-" if progress.tokens_per_s is None else f"{progress.tokens_per_s:,.0f}"
    parts = [
        f"item {number} of {items}",
        f"{int(left_s) // 60}:{int(left_s) % 60:02d} left",
        name,
        f"{progress.phase} {progress.elapsed_s:.1f} s",
        f"{progress.done:,} done",
        f"{rate} tokens/s",
    ]
    return " | ".join(parts)


class ProgressLine:
    """One line below pytest's own, written over while a point is measured; on a terminal only."""

    def __init__(self, session: pytest.Session, slm: Session) -> None:
        self.items, self.slm = session.items, slm
        self.writer = session.config.get_terminal_writer()
        self.capture = session.config.pluginmanager.getplugin("capturemanager")
        self.number = 0
        self.name = ""
        self.shown = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self.number += 1

    def on_progress(self, name: str, progress: Any) -> None:
        if not self.writer.hasmarkup:
            return
        from pytest_slmserve.plugin.estimates import seconds_left

        if name != self.name:
            self.name, self.left = name, seconds_left(self.slm, self.items[self.number - 1 :])
        self.write(progress_line(self.number, len(self.items), name, progress, self.left(progress)))
        self.shown = True

    def wait(self, text: str) -> None:
        """Shows `text` on what is measured elsewhere, on a terminal only."""
        if self.writer.hasmarkup:
            self.write(f"item {self.number} of {len(self.items)} | {text}")
            self.shown = True

    def write(self, text: str) -> None:
        """Go to the next line and come back, by relative moves: the terminal may scroll in between. Past pytest's
        writer, which counts the columns of the line that it is on."""
        text, column = text[: self.writer.fullwidth - 1], self.writer.width_of_current_line + 1
        with self.capture.global_and_fixture_disabled():
            sys.stdout.write(f"\n{text}\x1b[K\x1b[1A\x1b[{column}G")
            sys.stdout.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self) -> None:
        if self.shown:
            self.write("")
            self.shown = False
