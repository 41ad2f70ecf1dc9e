"""Does reading the sensors slow down what is measured? Prints the ratio of throughputs, sensors read over not read.

    python benchmarks/sampler_cost.py --backend cuda --model opt-125m --concurrency 512 --pairs 60

One long steady run on one engine; the sensors are read in one stretch of time and left alone in the next, in the order
A B B A, so that what drifts cancels: a host's disturbances last for seconds, which separate runs would not cancel. The
rates are those of the step trace. Prints also what a reading costs. OPT-125M at 512 is the hardest case: there the host
is the limit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_slmserve.analysis.stats import student_interval
from pytest_slmserve.engines.pool import start
from pytest_slmserve.environment import probe
from pytest_slmserve.measure import measure
from pytest_slmserve.models import shape_of
from pytest_slmserve.options import read_options
from pytest_slmserve.plan import engine_spec, workload_spec
from pytest_slmserve.records import Run
from pytest_slmserve.spec import ClosedLoop
from pytest_slmserve.telemetry.base import Reading, Source
from pytest_slmserve.telemetry.choose import open_sampler
from pytest_slmserve.telemetry.sampler import INTERVAL_S, Sampler
from pytest_slmserve.workload.build import build_workload

SLOWER, CORE = 0.995, 0.02  # at most 0.5 % of throughput, and 2 % of one core
ORDER = (True, False, False, True)  # of stretches with and without the sensors


@dataclass
class Gated:
    """A source that is asked in every other stretch only, and timed: CPU time of the thread, and time on the clock."""

    source: Source
    stretch_s: float
    readings: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    @property
    def name(self) -> str:
        return self.source.name

    def read(self, now_s: float) -> Reading:
        if not is_on(now_s, self.stretch_s):
            return Reading()
        cpu, wall = time.thread_time(), time.monotonic()
        try:
            return self.source.read(now_s)
        finally:
            self.readings += 1
            self.cpu_s += time.thread_time() - cpu
            self.wall_s += time.monotonic() - wall

    def close(self) -> None:
        self.source.close()


def is_on(now_s: float, stretch_s: float) -> bool:
    return ORDER[int(now_s / stretch_s) % len(ORDER)]


def pairs_of(run: Run, stretch_s: float) -> Iterator[tuple[float, float]]:
    """Tokens/s of neighbouring whole stretches of the window, with the sensors and without."""
    assert run.began_s is not None
    opens, closes = (run.began_s + at for at in run.window_s)
    first, last = math.ceil(opens / stretch_s / 2), math.floor(closes / stretch_s / 2)
    for number in range(first, last):
        rates = {is_on(at, stretch_s): rate(run, at, at + stretch_s) for at in halves(number, stretch_s)}
        yield rates[True], rates[False]


def halves(number: int, stretch_s: float) -> tuple[float, float]:
    """Where the two stretches of a pair begin: a hair past the edge, or rounding might take it for the one before."""
    return 2 * number * stretch_s + stretch_s / 1e6, (2 * number + 1) * stretch_s + stretch_s / 1e6


def rate(run: Run, begin_s: float, end_s: float) -> float:
    """Output tokens/s of the steps in a stretch, cut at step boundaries."""
    times = [run.began_s + at for at in run.steps.time_s]  # type: ignore[operator]
    inside = [i for i, at in enumerate(times) if begin_s <= at < end_s]
    tokens = sum(run.steps.new_tokens[i] for i in inside[1:])
    return tokens / (times[inside[-1]] - times[inside[0]])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--model", default="opt-tiny")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--stretch", type=float, default=1.0, help="seconds with, and then without, the sensors")
    parser.add_argument("--interval", type=float, default=INTERVAL_S, help="seconds between readings")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path, help="file for the pairs, as JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    options, host = read_options({}, {}, {}), probe(args.backend)
    opened, notes = open_sampler("auto", host.device, args.interval)
    print(*(f"note: {note}" for note in notes), sep="\n", end="" if not notes else "\n")
    if opened is None:
        sys.exit("no sensors here")
    gated = [Gated(source, args.stretch) for source in opened.sources]
    sampler = Sampler(gated, args.interval)
    workload = build_workload(workload_spec(options, args.backend), shape_of(args.model))
    load = ClosedLoop(args.concurrency, window_s=(2 * args.pairs + 4) * args.stretch)
    engine = start(engine_spec(options, args.backend, args.model, host.environment))
    try:
        found = measure(engine, workload, load, host.environment, sampler=sampler)
    finally:
        engine.close()
        sampler.close()
    pairs = list(pairs_of(found.run, args.stretch))
    where = host.environment
    print(f"{args.model} at {args.concurrency} on {where.gpu_name or where.cpu}, vLLM {where.vllm}")
    if args.out:
        costs = {g.name: {"readings": g.readings, "cpu_s": g.cpu_s, "wall_s": g.wall_s} for g in gated}
        facts = {"interval_s": args.interval, "stretch_s": args.stretch, "pairs": pairs, "costs": costs}
        args.out.write_text(json.dumps(facts))
    tell(pairs, gated, args.interval)


def tell(pairs: list[tuple[float, float]], gated: list[Gated], interval_s: float) -> None:
    """One line for each promise, with what was seen."""
    seen = student_interval([math.log(on / off) for on, off in pairs])
    low, high = (math.exp(end) for end in (seen.low or 0.0, seen.high or 0.0))
    print(f"throughput with/without {math.exp(seen.value):.4f} (95 %: {low:.4f} to {high:.4f}), {len(pairs)} pairs")
    print(f"lower bound {low:.4f}: {'at least' if low >= SLOWER else 'BELOW'} {SLOWER}")
    for g in gated:
        cpu_ms, wall_ms = 1e3 * g.cpu_s / g.readings, 1e3 * g.wall_s / g.readings
        print(f"{g.name}: {g.readings} readings of {cpu_ms:.2f} ms CPU time, {wall_ms:.2f} ms in all, each")
    core = sum(g.cpu_s / g.readings for g in gated) / interval_s
    print(f"share of a core at {interval_s:g} s: {core:.2%}, {'at most' if core <= CORE else 'ABOVE'} {CORE:.0%}")


if __name__ == "__main__":
    main()
