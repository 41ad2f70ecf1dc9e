"""Signals that end a run, as Ctrl-C does: the first one interrupts it, and those that follow leave its end alone."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType
from typing import Any

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FREE = (signal.SIG_DFL, signal.default_int_handler)  # else they are ignored, as `nohup` has it, or have a handler
# Seconds after an interrupt in which signals belong to it: a key is pressed again, a runner sends SIGTERM after SIGINT.
# What hangs longer than that can be interrupted again.
BURST_S = 10.0


class Interrupts:
    """The handler of signals that end a run, of which a process has one. It raises KeyboardInterrupt, but not again
    within `BURST_S`, which would break off an end on its way, and not while something must not be broken off.

    before: The handlers that it stands in for. runs: Runs that are open, one inside the other. held: Contexts that are
    open in which nothing is raised. waits: Whether a signal waits for their end. hurried: Whether a signal came after
    the one that was raised.
    """

    def __init__(self) -> None:
        self.before: dict[int, Any] = {}
        self.runs = self.held = 0
        self.waits = self.hurried = False
        self.raised_at = -inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_burst:
            self.hurried = True
        elif self.held:
            self.hurried, self.waits = self.waits, True
        elif self.runs:
            self.interrupt()
        else:  # the process has outlived a run that was interrupted
            self.leave()
            signal.raise_signal(number)

    @property
    def is_burst(self) -> bool:
        return time.monotonic() < self.raised_at + BURST_S

    def interrupt(self) -> None:
        self.raised_at, self.waits = time.monotonic(), False
        raise KeyboardInterrupt

    def take(self) -> None:
        """Stand in for the handlers of signals that nobody has."""
        self.waits = self.hurried = False
        self.raised_at = -inf
        for number in ENDINGS:
            if (handler := signal.getsignal(number)) in FREE:
                self.before[number] = handler
                signal.signal(number, self)

    def leave(self) -> None:
        """Restore the handlers that were there before."""
        while self.before:
            signal.signal(*self.before.popitem())


HANDLER = Interrupts()


def is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def as_interrupts() -> Iterator[None]:
    """Context in which SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt, unless they are ignored or have a handler.
    After an interrupt it keeps the signals of its burst from whoever called us, too, who is about to end."""
    if not is_main():
        yield
        return
    if not HANDLER.runs:
        HANDLER.take()
    HANDLER.runs += 1
    try:
        yield
    finally:
        HANDLER.runs -= 1
        if not HANDLER.runs and not HANDLER.is_burst:
            HANDLER.leave()


@contextmanager
def held() -> Iterator[None]:
    """Context that a signal does not break off: it interrupts at the end of the context. For what takes a moment."""
    if not is_main():
        yield
        return
    HANDLER.held += 1
    try:
        yield
    finally:
        HANDLER.held -= 1
        if HANDLER.waits and not HANDLER.held:
            HANDLER.interrupt()


def hurried() -> bool:
    """Return whether a signal came again since the run was interrupted: then what can be killed is not waited for."""
    return HANDLER.hurried
