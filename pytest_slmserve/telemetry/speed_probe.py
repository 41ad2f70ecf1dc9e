"""Time a fixed piece of pure Python for each line of input.

    python -I -S speed_probe.py PARENT_PID [CORE]

A line of output has time and CPU time of one piece in microseconds. The parent cannot delay this separate process,
which ends with the parent. It imports only the standard library to start fast.
"""

import os
import select
import signal
import sys
import time

STEPS = 30_000  # 3 to 6 ms; a change makes existing records incomparable


def probe_work() -> int:
    """Do typical work of an interpreter: arithmetic, small integers, a table of 50 KB."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all, but the parent ends this process
    if core:
        os.sched_setaffinity(0, {int(core[0])})
    try:
        gone = os.pidfd_open(int(parent))
    except ProcessLookupError:
        return
    probe_work()  # the first execution is slower
    while gone not in (ready := select.select([0, gone], [], [])[0]) and ready and os.read(0, 1 << 10):
        os.write(1, b"%d %d\n" % timed())


if __name__ == "__main__":
    _main(*sys.argv[1:])
