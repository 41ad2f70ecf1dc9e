"""Does reading the sensors slow down what is measured? Two estimates of the throughput that it costs, and its CPU time.

    python studies/sampler_cost.py --platform cuda --model opt-125m --concurrency 512 --pairs 60
    python studies/sampler_cost.py --platform cuda --model opt-125m --concurrency 512 --pairs 60 --probe
    python studies/sampler_cost.py --again studies/results/sampler-cost-h200.json.xz

One long steady run on one engine; the sensors are read in one stretch of time and left alone in the next, in the order
A B B A, so that what drifts cancels. The first estimate is the ratio of throughputs of neighbouring stretches, by the
step trace. On a host whose own disturbances last for seconds it is too noisy; the second is not: a reading lasts for
some milliseconds and can only lengthen the engine's steps that it overlaps, so these are compared with the steps around
them. A moment more often falls into a long step than into a short one, but that holds for the moments, too, at which
the sensors were left alone, and the difference of the two is what a reading costs. The engine tells of a step a little
after it, and one that schedules ahead may be late one step later, so it is told with the next step, too.

With --probe the host-speed probe alone is left out of every other stretch, and a reading is one of its pieces of work.

OPT-125M at 512 is the hardest case: there the host is the limit.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import StatisticsError, fmean, variance
from typing import Any

from common import engine_parser, keep, results_in

from pytest_slmserve.analysis.estimates import Interval, ends, student_interval, t_above
from pytest_slmserve.engines.base import Engine
from pytest_slmserve.engines.pool import launch_engine
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.plan.planner import engine_spec, workload_spec
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.schema.records import Environment, Run
from pytest_slmserve.schema.sensors import PROBE, PROBE_CPU
from pytest_slmserve.schema.specs import ClosedLoop, Load
from pytest_slmserve.telemetry.host import Host, Reading, SensorSource, SpeedProbeSource, probe
from pytest_slmserve.telemetry.sampler import INTERVAL_S, Sampler, open_sampler
from pytest_slmserve.workload.requests import build_workload

LOSS, CORE = 0.005, 0.02  # at most 0.5% of throughput, and 2% of one core
ORDER = (True, False, False, True)  # of stretches with and without the sensors
BESIDE = 20  # steps on either side of a reading that tell how long a step takes just then
DIGITS = 5  # of seconds


@dataclass
class Gated:
    """A source that is asked in every other stretch only, and timed: CPU time of the thread, and time on the clock.

    rounds: when all sources were asked, and when the last of them had answered. They share it.
    """

    source: SensorSource
    stretch_s: float
    rounds: dict[float, float]
    readings: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    @property
    def name(self) -> str:
        return self.source.name

    def read(self, now_s: float) -> Reading:
        if not is_on(now_s, self.stretch_s):
            self.rounds[now_s] = now_s
            return Reading()
        cpu, wall = time.thread_time(), time.monotonic()
        try:
            return self.source.read(now_s)
        finally:
            self.readings += 1
            self.cpu_s += time.thread_time() - cpu
            self.rounds[now_s] = time.monotonic()
            self.wall_s += self.rounds[now_s] - wall

    def close(self) -> None:
        self.source.close()


@dataclass
class GatedProbe(Gated):
    """The cost of the host-speed probe is that of the piece of work that a reading begins, in a process of its own. It
    is a round once its time is known."""

    def read(self, now_s: float) -> Reading:
        assert isinstance(self.source, SpeedProbeSource)
        if not is_on(now_s, self.stretch_s):
            self.rounds[now_s] = now_s
            return Reading()
        asked_s, reading = self.source.asked_s, self.source.read(now_s)
        lasted, cpu = reading.values.get(PROBE), reading.values.get(PROBE_CPU)
        if lasted is not None and cpu is not None:
            self.readings += 1
            self.cpu_s += cpu
            self.wall_s += lasted
            self.rounds[asked_s] = asked_s + lasted
        return reading


def is_on(now_s: float, stretch_s: float) -> bool:
    return ORDER[int(now_s / stretch_s) % len(ORDER)]


def pairs_of(run: Run, stretch_s: float) -> Iterator[tuple[float, float]]:
    """Tokens/s of neighbouring whole stretches of the window, with the sensors and without. A pair is left out where
    the host stood still for a stretch, so that it has no two steps."""
    assert run.began_s is not None
    opens, closes = (run.began_s + at for at in run.window_s)
    first, last = math.ceil(opens / stretch_s / 2), math.floor(closes / stretch_s / 2)
    for number in range(first, last):
        rates = {is_on(at, stretch_s): rate(run, at, at + stretch_s) for at in halves(number, stretch_s)}
        on, off = rates[True], rates[False]
        if on and off:
            yield on, off


def halves(number: int, stretch_s: float) -> tuple[float, float]:
    """Where the two stretches of a pair begin: a hair past the edge, or rounding might take it for the one before."""
    return 2 * number * stretch_s + stretch_s / 1e6, (2 * number + 1) * stretch_s + stretch_s / 1e6


def rate(run: Run, begin_s: float, end_s: float) -> float | None:
    """Output tokens/s of the steps in a stretch, cut at step boundaries; None below two."""
    times = [run.began_s + at for at in run.steps.time_s]  # type: ignore[operator]
    inside = [i for i, at in enumerate(times) if begin_s <= at < end_s]
    tokens = sum(run.steps.new_tokens[i] for i in inside[1:])
    return tokens / (times[inside[-1]] - times[inside[0]]) if len(inside) > 1 else None


@dataclass(frozen=True, slots=True)
class Trace:
    """The window, in seconds since it opened: when steps ended, from when to when the sensors were read, and when they
    would have been read but were left alone."""

    steps: Sequence[float]
    readings: Sequence[tuple[float, float]]
    shams: Sequence[float]


def trace_of(run: Run, rounds: Mapping[float, float], stretch_s: float) -> Trace:
    assert run.began_s is not None
    opens, closes = run.window_s
    zero = run.began_s + opens
    inside = {at: end for at, end in rounds.items() if zero <= at and end <= run.began_s + closes}
    return Trace(
        steps=[round(at - opens, DIGITS) for at in run.steps.time_s if opens <= at <= closes],
        readings=[
            (round(at - zero, DIGITS), round(end - zero, DIGITS)) for at, end in inside.items() if is_on(at, stretch_s)
        ],
        shams=[round(at - zero, DIGITS) for at in inside if not is_on(at, stretch_s)],
    )


def reading_costs(trace: Trace, behind: int = 0) -> Interval:
    """Seconds by which a reading lengthens the steps that it overlaps, and so many behind them: their excess over the
    steps around them, less that of a sham as long as the mean reading. Raises StatisticsError for too few of either."""
    length = fmean(end - begin for begin, end in trace.readings)
    real = [overlapped(trace.steps, begin, end, behind) for begin, end in trace.readings]
    sham = [overlapped(trace.steps, begin, begin + length, behind) for begin in trace.shams]
    apart = frozenset(i for steps in (*real, *sham) for i in steps)
    return welch(excesses(trace.steps, real, apart), excesses(trace.steps, sham, apart))


def overlapped(steps: Sequence[float], begin: float, end: float, behind: int) -> range:
    """Which steps a reading overlaps, and so many behind them: step i is from steps[i] to steps[i + 1].

    Nothing where these are not all known: half of a step is none.
    """
    first = bisect_right(steps, begin) - 1
    stop = max(first + 1, bisect_left(steps, end)) + behind
    return range(first, stop) if first >= 0 and stop < len(steps) else range(0)


def excesses(steps: Sequence[float], events: Sequence[range], apart: frozenset[int]) -> list[float]:
    """By how many seconds the steps of each event are longer than as many mean steps beside them.

    apart: steps of all events, none of which counts as beside. An event that has no steps, or none beside, is left out.
    """
    lasting = [end - begin for begin, end in pairwise(steps)]
    found = []
    for event in events:
        around = range(max(0, event.start - BESIDE), min(len(lasting), event.stop + BESIDE))
        beside = [lasting[i] for i in around if i not in apart]
        if event and beside:
            found.append(sum(lasting[i] for i in event) - len(event) * fmean(beside))
    return found


def welch(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Difference of two means whose values scatter differently (Welch 1947), by Satterthwaite's degrees of freedom."""
    value = fmean(first) - fmean(second)
    if min(len(first), len(second)) < 2:
        return Interval(value)
    of_first, of_second = variance(first) / len(first), variance(second) / len(second)
    both = of_first + of_second
    if not both:
        return Interval(value, value, value)
    df = both**2 / (of_first**2 / (len(first) - 1) + of_second**2 / (len(second) - 1))
    half = t_above(0.025, max(1, math.floor(df))) * math.sqrt(both)
    return Interval(value, value - half, value + half)


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--stretch", type=float, default=1.0, help="seconds with, and then without, the sensors")
    parser.add_argument("--interval", type=float, default=INTERVAL_S, help="seconds between readings")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--probe", action="store_true", help="what the host-speed probe costs, the other sensors being read"
    )
    args = parser.parse_args()
    if args.again:
        return tell(results_in(args.again))
    options, host = read_options({}, {}, {}), probe(args.platform)
    engine = launch_engine(engine_spec(options, args.platform, args.model, host.environment)).start()
    try:
        study(engine, host, args)
    finally:
        engine.close()


def sources_of(device: str, interval_s: float) -> Sequence[SensorSource]:
    """Sources of the sensors that are there; why others are not is printed."""
    opened, notes = open_sampler("auto", device, interval_s, window_s=0.0)  # as in short windows, the dearest case
    for note in notes:
        print(f"note: {note}")
    return opened.sources if opened else ()


def measured(engine: Engine, load: Load, environment: Environment, sampler: Sampler) -> Run:
    """One run of the default workload on an engine; the sampler is closed."""
    workload = build_workload(
        workload_spec(read_options({}, {}, {}), engine.spec.platform), model_of(engine.spec.model)
    )
    try:
        return measure_case(engine, Case(engine.spec, (workload,), (load,), environment), sampler=sampler)[0].run
    finally:
        sampler.close()


def study(engine: Engine, host: Host, args: argparse.Namespace) -> None:
    """Measure on an engine that runs, and print the estimates."""
    opened = sources_of(host.device, args.interval)
    if not opened:
        sys.exit("no sensors here")
    rounds: dict[float, float] = {}
    probes = [source for source in opened if isinstance(source, SpeedProbeSource)]
    others = [source for source in opened if source not in probes]
    gated: list[Gated] = [
        *(GatedProbe(source, args.stretch, rounds) for source in probes if args.probe),
        *(Gated(source, args.stretch, rounds) for source in others if not args.probe),
    ]
    sampler = Sampler([*gated, *(others if args.probe else probes)], args.interval)
    load = ClosedLoop(args.concurrency, window_s=(2 * args.pairs + 4) * args.stretch)
    run = measured(engine, load, host.environment, sampler)
    pairs, trace = list(pairs_of(run, args.stretch)), trace_of(run, rounds, args.stretch)
    where = host.environment
    print(f"{args.model} at {args.concurrency} on {where.gpu_name or where.cpu}, vLLM {where.vllm}")
    rest_s = max((source.rest_s for source in probes if args.probe), default=0.0)
    facts = {
        "interval_s": args.interval * max(1, math.ceil(rest_s / args.interval)),
        "stretch_s": args.stretch,
        "pairs": pairs,
        "costs": {g.name: {"readings": g.readings, "cpu_s": g.cpu_s, "wall_s": g.wall_s} for g in gated},
        **asdict(trace),
    }
    keep(args.out, facts)
    tell(facts)


def tell(facts: Mapping[str, Any]) -> None:
    """Print the estimates of one run. interval_s: seconds between readings, or between pieces of the probe."""
    tell_pairs(facts["pairs"])
    tell_readings(Trace(facts["steps"], facts["readings"], facts["shams"]), facts["interval_s"])
    tell_costs(facts["costs"], facts["interval_s"])


def tell_pairs(pairs: Sequence[tuple[float, float]]) -> None:
    seen = student_interval([math.log(on / off) for on, off in pairs])
    low, high = (math.exp(end) for end in ends(seen))
    print(f"throughput with/without {math.exp(seen.value):.4f} (95%: {low:.4f} to {high:.4f}), {len(pairs)} pairs")
    print(f"  {judged(1 - high, 1 - low)}")


def tell_readings(trace: Trace, interval_s: float) -> None:
    print(f"{len(trace.readings)} readings, and {len(trace.shams)} times without, beside {len(trace.steps)} steps")
    for behind, what in enumerate(("steps that a reading overlaps", "these and the step behind")):
        try:
            seen = reading_costs(trace, behind)
        except StatisticsError:
            print(f"{what}: too few to compare")
            continue
        low, high = ends(seen)
        print(f"{what}: {1e3 * seen.value:.3f} ms longer (95%: {1e3 * low:.3f} to {1e3 * high:.3f})")
        share, low, high = (value / interval_s for value in (seen.value, low, high))
        print(f"  {share:.2%} of the time (95%: {low:.2%} to {high:.2%}): {judged(low, high)}")


def judged(low: float, high: float) -> str:
    """The promise about the share of throughput that is lost, given its interval."""
    if high <= LOSS:
        return f"at most {LOSS:.1%} is lost"
    if low <= LOSS < high - low:
        return f"too noisy to tell whether at most {LOSS:.1%} is lost"
    return f"MORE than {LOSS:.1%} may be lost"


def tell_costs(costs: Mapping[str, Mapping[str, float]], interval_s: float) -> None:
    for name, cost in costs.items():
        cpu_ms, wall_ms = (1e3 * cost[key] / cost["readings"] for key in ("cpu_s", "wall_s"))
        print(f"{name}: {cost['readings']} readings of {cpu_ms:.2f} ms CPU time, {wall_ms:.2f} ms in all, each")
    core = sum(cost["cpu_s"] / cost["readings"] for cost in costs.values()) / interval_s
    print(f"share of a core at {interval_s:g} s: {core:.2%}, {'at most' if core <= CORE else 'ABOVE'} {CORE:.0%}")


if __name__ == "__main__":
    main()
