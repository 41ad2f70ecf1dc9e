"""Coverage of the intervals, wrong verdicts and cost of sweeps on hosts whose noise is known, by simulation.

    python studies/noise_study.py --runs 1000

Each run is a sweep in virtual time: a closed loop obeys the saturation law, and the host's noise sets its pace. The
code that measures real engines decides what is measured, and when it is enough. Three truths: the last doubling gains
5%, 10% (the bound) and 16%. Prints the table of docs/statistics.md.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from common import BASELINES, parser_of
from host_noise import HostNoise

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.points import COUNTED, Figure, Point, Summary, busy_rate, by_series, output_rate
from pytest_slmserve.analysis.sweep.curve import TOLERANCE, Curve
from pytest_slmserve.analysis.sweep.plateau import looks_from
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.simulated import TICK_S
from pytest_slmserve.plan.cases import DEFAULTS
from pytest_slmserve.run.session import Rounds
from pytest_slmserve.schema.records import Run, Samples, Steps
from pytest_slmserve.schema.specs import ClosedLoop, least_window_s

GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256)
STEP_S = 0.02  # of the largest load, as on a GPU
OUTPUT = 128  # tokens of a request: its lifetime is then a second and a half to three, as on a GPU
WINDOW_S, BUDGET_S, REPEATS = DEFAULTS["cuda"].window_s, DEFAULTS["cuda"].budget_s, 2
FIXED_WINDOW_S = 5.0  # of a sweep that measures each load twice, and ends
ROUNDING = 1e-9  # of floating-point numbers: where no window has any noise, an interval has no width
AWAY = (0.05, 0.16)  # from the bound
GAINS = (AWAY[0], TOLERANCE, AWAY[1])
WRONG = ((0.05, State.FAILS), (TOLERANCE, State.PASSES), (TOLERANCE, State.FAILS), (0.16, State.PASSES))
Noise = str | tuple[float, ...]
NOISES: dict[str, str] = {
    "none": "white:0.0001",
    "white, 10%": "white:0.1",
    "1/f, 12%": "pink:0.12",
    "1/f, 20%": "pink:0.2",
    "OU, 10%, 1 s": "ou:0.1:1",
    "OU, 10%, 3 s": "ou:0.1:3",
    "OU, 10%, 10 s": "ou:0.1:10",
    "30% slower for 2 s, 20% of the time": "slow:0.2:0.3:2",
    "launches 4% apart, white, 2%": "states:0.04+white:0.02",
}
TWO_SPEEDS = "speeds:1.85"
# Time of the host's part of a step, on a fast core, over that of its kernels: a step takes the longer of both.
HOSTS = {"host-bound": 1.3, "half hidden": 0.9, "GPU mostly": 0.6}
RECORDED = {
    "recorded: OPT-125M, H200": ("h200-vllm-0.26.0-staggered.jsonl.xz", "opt-125m"),
    "recorded: OPT-1.3B, H200": ("h200-vllm-0.26.0-sensors.jsonl.xz", "opt-1.3b"),
    "recorded: tiny OPT, two CPU cores": ("cpu-vllm-0.32.0.jsonl.xz", "opt-tiny"),
}


@dataclass(frozen=True)
class Outcome:
    """One sweep: whether each gain's interval covers the truth, the verdict on the plateau, and seconds of the GPU."""

    covered: tuple[bool, ...]
    state: State
    seconds: float


@dataclass(frozen=True)
class Law:
    """T(B) = t_inf * B / (B + b_half), such that the last doubling gains so much."""

    gain: float

    @property
    def b_half(self) -> float:
        return GRID[-1] * self.gain / (1 - self.gain)

    def step_s(self, batch: float) -> float:
        return STEP_S * (batch + self.b_half) / (GRID[-1] + self.b_half)

    def gains(self) -> list[float]:
        rates = [load / self.step_s(load) for load in GRID]
        return [after / before - 1 for before, after in pairwise(rates)]

    def before_window_s(self, load: int) -> float:
        """Seconds of the ramp and of settling at full pace."""
        return OUTPUT * (self.step_s(load / 2) + self.step_s(load))


class Host:
    """A session and its executor as `Rounds` sees them, in virtual time. noise: of `HostNoise`. host: time of the
    host's part of a step over that of its kernels; None: the noise sets the pace of both."""

    def __init__(
        self,
        law: Law,
        noise: Noise,
        seed: int,
        window_s: float = WINDOW_S,
        looks: Sequence[int] = looks_from(1),
        host: float | None = None,
    ) -> None:
        self.law, self.speed, self.window_s, self.host = law, HostNoise(noise, str(seed)), window_s, host
        self.chance = random.Random(seed)
        self.looks, self.budget_s, self.say = looks, BUDGET_S, lambda text: None
        self.executor = self.results = self
        self.spent_s = defaultdict[str, float](float)
        self.repeats: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        self.launch, self.now_s = "1", 0.0
        self._done = [0.0]  # seconds of work at full pace, until each tick

    def noise(self, at_s: float) -> float:
        """The pace: the share of the time in which a kernel runs, if the host has a part of its own."""
        return self.speed(at_s) if self.host is None else min(1.0, self.speed(at_s) / self.host)

    def _work(self, at_s: float) -> float:
        """Seconds of work at full pace that the host has done until then."""
        tick = int(at_s / TICK_S)
        while len(self._done) <= tick:
            self._more()
        return self._done[tick] + self.noise(at_s) * (at_s - tick * TICK_S)

    def _when(self, work_s: float) -> float:
        while self._done[-1] < work_s:
            self._more()
        tick = bisect_right(self._done, work_s) - 1
        return tick * TICK_S + (work_s - self._done[tick]) / self.noise(tick * TICK_S)

    def _more(self) -> None:
        self._done.append(self._done[-1] + TICK_S * self.noise((len(self._done) - 1) * TICK_S))

    def measure(self, case: Any, repeats: int, why: str = "") -> list[tuple[Any, ...]]:
        found = self.repeats[case.key]
        while len(found) < repeats:
            began = self.now_s
            found.append((self.once(case.key),))
            self.spent_s[case.engine] += self.now_s - began
        return found

    def once(self, load: int) -> Any:
        """One window, as a measurement: its trace has two spans for each part that its variance is taken from."""
        began, parts = self.now_s, 2 * window.BATCHES
        opens = self._when(self._work(began) + self.law.before_window_s(load))
        done = self._work(opens)
        lasts = max(self.window_s, least_window_s(self._when(done + OUTPUT * self.law.step_s(load)) - opens))
        times = [opens + lasts * i / parts for i in range(parts + 1)]
        self.now_s, rate = times[-1], load / self.law.step_s(load)
        tokens = [rate * (self._work(b) - self._work(a)) for a, b in pairwise(times)]
        nothing: list[Any] = [0] * len(times)
        ends = [at - began for at in times]
        steps = Steps(ends, nothing, nothing, [0, *tokens], nothing, nothing, nothing)  # type: ignore[list-item]
        run = Run(Samples(*[()] * 8), steps, (ends[0], ends[-1]))
        facts = {"launch": self.launch, "measured_at": f"{began:09.3f}", "environment": SimpleNamespace(host="1")}
        busy = (self._work(times[-1]) - done) / lasts
        counted = rate * math.exp(self.chance.gauss(0, math.sqrt(COUNTED / lasts)))
        seen = Summary(tokens_per_busy_s=counted, engine_active=min(1.0, busy))
        return SimpleNamespace(run=run, load=ClosedLoop(load), seen=seen, **facts)

    def curve(self, over: bool = False) -> Curve:
        points = tuple(point_of_windows(load, self.repeats[load]) for load in GRID)
        return Curve(subject="simulated", points=points, looks=self.looks, over=over)


def point_of_windows(load: int, groups: Sequence[tuple[Any, ...]]) -> Point:
    rates = tuple(window.output_tokens_per_s(m.run) or 0.0 for (m,) in groups)
    waits = tuple(OUTPUT * load / rate for rate in rates)
    each = tuple(m.seen for (m,) in groups)
    busy = fmean(one.engine_active for one in each) if each else None
    return Point(concurrency=load, repeats=rates, e2e_repeats=waits, used=tuple(groups), each=each, engine_active=busy)


def one(
    noise: Noise, gain: float, seed: int, fixed: bool = False, host: float | None = None, figure: Figure = output_rate
) -> Outcome:
    """One sweep on a host of its own. fixed: two rounds of longer windows, and no more. host: see `Host`. figure: whose
    gains are judged."""
    law = Law(gain)
    timing = (FIXED_WINDOW_S, (REPEATS,)) if fixed else (WINDOW_S, looks_from(1))
    at = Host(law, noise, seed, *timing, host)
    rounds = Rounds(at, {load: SimpleNamespace(key=load, engine="") for load in GRID})  # type: ignore[arg-type]
    once = figure is busy_rate and not fixed  # what was seen has the noise of the host, which a second round tells
    for number in range(1, (1 if once else REPEATS) + 1):
        rounds.round(number, GRID)
    rounds.until_decided(lambda: [at.curve().pareto_plateau(figure=figure)])
    curve = at.curve(over=True)
    covered = tuple(
        (g.low or 0) - ROUNDING <= true <= (g.high or 0) + ROUNDING
        for g, true in zip(curve.gains(figure), law.gains(), strict=True)
    )
    return Outcome(covered, curve.pareto_plateau(figure=figure).state, at.now_s)


def recorded(name: str, model: str) -> tuple[float, ...]:
    """Factors of the speed in ticks, by the step traces of a sweep: throughput over the mean of its load."""
    windows: dict[int, list[list[float]]] = defaultdict(list)
    for m in read(BASELINES / name).measurements:
        if m.spec.model == model and by_series([m]):
            trace = window.window_trace(m.run)
            ticks = Counter[int]()
            for at, made in zip(trace.ends_s[1:], trace.tokens[1:]):
                ticks[int((at - trace.ends_s[0]) / TICK_S)] += made
            windows[m.load.max_concurrency or 0].append([ticks[i] for i in range(len(ticks) - 1)])
    return tuple(
        tick / fmean(map(fmean, of_load)) for of_load in windows.values() for ticks in of_load for tick in ticks
    )


def share(values: Iterable[bool]) -> float:
    """Per cent."""
    return 100 * fmean(values)


def decided(outcomes: Sequence[Outcome]) -> float:
    return share(outcome.state is not State.INCONCLUSIVE for outcome in outcomes)


def row(name: str, sweeps: Mapping[float, Sequence[Outcome]], fixed: Mapping[float, Sequence[Outcome]]) -> str:
    """Row of the table. sweeps, fixed: by the truth."""
    every = [covered for outcomes in fixed.values() for outcome in outcomes for covered in outcome.covered]
    each = zip(*(outcome.covered for outcomes in sweeps.values() for outcome in outcomes))
    last = [outcome.covered[-1] for outcomes in sweeps.values() for outcome in outcomes]
    cells = [
        name,
        f"{share(every):.1f}",
        f"{share(last):.1f}",
        f"{min(map(share, each)):.1f}",
        ", ".join(f"{share(o.state is state for o in sweeps[gain]):.1f}" for gain, state in WRONG),
        ", ".join(f"{decided(sweeps[gain]):.0f}" for gain in AWAY),
        ", ".join(f"{fmean(o.seconds for o in sweeps[gain]):.0f}" for gain in AWAY),
        ", ".join(f"{decided(fixed[gain]):.0f}" for gain in AWAY),
        ", ".join(f"{fmean(o.seconds for o in fixed[gain]):.0f}" for gain in AWAY),
    ]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| noise | covers: two rounds | last gain | least | wrong | decided | GPU s | fixed: decided | GPU s |\n|---|"
    + "---:|" * 8
)


def study(
    noise: Noise,
    seeds: Sequence[int],
    each: Callable[..., Iterable[Outcome]] = map,
    host: float | None = None,
    figure: Figure = output_rate,
) -> list[dict[float, list[Outcome]]]:
    """Outcomes of the sweeps, and of those of fixed length, by the truth. each: `map`, of a pool or not. host, figure:
    see `one`."""
    return [
        {gain: list(each(partial(one, noise, gain, fixed=fixed, host=host, figure=figure), seeds)) for gain in truths}
        for fixed, truths in ((False, GAINS), (True, AWAY))
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="of each noise and truth")
    parser.add_argument("--noise", help="only those whose name has this in it", default="")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    print(HEAD)
    with ProcessPoolExecutor(given.processes) as pool:
        each = partial(pool.map, chunksize=25) if given.processes > 1 else map
        speeds = {f"two speeds, {name}": host for name, host in HOSTS.items()}
        for number, name in enumerate((*NOISES, *RECORDED, *speeds)):
            if given.noise not in name:
                continue
            seeds = range(number * given.runs, (number + 1) * given.runs)
            noise = NOISES.get(name) or (TWO_SPEEDS if name in speeds else recorded(*RECORDED[name]))
            print(row(name, *study(noise, seeds, each, speeds.get(name))), flush=True)
            if name in speeds:
                print(row(f"{name}, per busy second", *study(noise, seeds, each, speeds[name], busy_rate)), flush=True)


if __name__ == "__main__":
    main()
