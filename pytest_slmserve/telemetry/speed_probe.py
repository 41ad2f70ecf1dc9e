"""A fixed piece of pure Python, timed once for each line that comes in.

    python -I -S speed_probe.py PARENT_PID [CORE]

A line out is the time of a piece by the clock, and its CPU time, in microseconds. A process of its own: nothing that
the parent does can hold up the piece, and it ends when the parent does. The standard library alone, to start fast.
"""

import os
import select
import signal
import sys
import time

STEPS = 30_000  # 3 to 6 ms; another number, or other work, would make older records incomparable


def probe_work() -> int:
    """Work as an interpreter has it: arithmetic, small integers made and dropped, a table of 50 KB."""
    seen: dict[int, int] = {}
    for number in range(STEPS):
        key = number * 7919 % 1021
        seen[key] = seen.get(key, 0) + number
    return seen[0]


def timed() -> tuple[int, int]:
    began, used = time.perf_counter_ns(), time.thread_time_ns()
    probe_work()
    cpu, wall = time.thread_time_ns() - used, time.perf_counter_ns() - began
    return wall // 1000, cpu // 1000


def _main(parent: str, *core: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal it comes to all; the parent decides when we end
    if core:
        os.sched_setaffinity(0, {int(core[0])})
    try:
        gone = os.pidfd_open(int(parent))
    except ProcessLookupError:
        return
    probe_work()  # an interpreter is slower at what it does for the first time
    while gone not in (ready := select.select([0, gone], [], [])[0]) and ready and os.read(0, 1 << 10):
        os.write(1, b"%d %d\n" % timed())


if __name__ == "__main__":
    _main(*sys.argv[1:])
