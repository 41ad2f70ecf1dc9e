"""Signals that end a run as Ctrl-C does; apart from the session, because the command line needs it before anything."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ENDINGS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def as_interrupts() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise KeyboardInterrupt, unless they are ignored (as `nohup` has it) or
    have a handler."""
    free = threading.current_thread() is threading.main_thread()
    taken = [number for number in ENDINGS if free and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
