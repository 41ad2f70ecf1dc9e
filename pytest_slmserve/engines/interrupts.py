"""Signals that end a run, like Ctrl-C: the first one interrupts it, and later ones do not disturb its end."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType
from typing import Any

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FREE = (signal.SIG_DFL, signal.default_int_handler)  # other signals are ignored, as by `nohup`, or have a handler
# Seconds after an interrupt in which signals belong to it: users press a key again, and a runner sends SIGTERM after
# SIGINT. A run that hangs longer can be interrupted again.
BURST_S = 10.0


class Interrupts:
    """The process's handler of signals that end a run.

    It raises KeyboardInterrupt, but not within `BURST_S` of the last one, which would break off the end of the run.

    Attributes:
        before: handlers that it replaces.
        runs: number of nested open runs.
        held: number of open contexts that it does not interrupt.
        waits: whether a signal waits for the end of these contexts.
        hurried: whether a signal came after the first one.
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
        """Replace the handlers of signals that have the default handler."""
        self.waits = self.hurried = False
        self.raised_at = -inf
        for number in ENDINGS:
            if (handler := signal.getsignal(number)) in FREE:
                self.before[number] = handler
                signal.signal(number, self)

    def leave(self) -> None:
        """Restore the replaced handlers."""
        while self.before:
            signal.signal(*self.before.popitem())


HANDLER = Interrupts()


def is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT, SIGTERM and SIGHUP in this context, unless they are ignored or handled.

    After an interrupt, the signals of its burst do not reach the caller either, which is about to end.
    """
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
    """Delay the interrupt of a signal until the end of this context, which should take only a moment."""
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
    """Return whether a signal came again after the interrupt, so that children are killed without a wait."""
    return HANDLER.hurried
