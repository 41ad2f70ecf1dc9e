"""How much of the noise of a measurement is of its own making? Throughput and its scatter, each cause left out in turn.

    python studies/noise_sources.py --platform cuda --model opt-125m --concurrency 512 --rounds 8
    python studies/noise_sources.py --platform cuda --model opt-1.3b --concurrency 128 --rounds 8
    python studies/noise_sources.py --again studies/results/noise-sources-h200.json.xz

One long steady run on one engine. Every two seconds another variant begins: processes are pinned to cores of their own
or may run on all, the garbage collector of both is on or off, and the sensors are read or not. Each round has all
variants, and begins with the next one. A ratio is of a stretch and the plain one nearest to it, so that drift cancels.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import psutil
from common import engine_parser, keep, results_in
from sampler_cost import measured, rate, sources_of

from pytest_slmserve.analysis.estimates import ends, sample_sd, student_interval
from pytest_slmserve.engines.server import OfflineEngine
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.planner import engine_spec
from pytest_slmserve.schema.records import Environment, Run
from pytest_slmserve.schema.sensors import ENGINE_ACTIVE, HOST_CORES, PROBE, PROBE_CPU, SM_CLOCK, STOLEN_CORES
from pytest_slmserve.schema.specs import ClosedLoop
from pytest_slmserve.telemetry.host import Reading, SensorSource, probe
from pytest_slmserve.telemetry.sampler import INTERVAL_S, Sampler

SKIPPED_S = 0.2  # at the beginning of a stretch: the engine works on what was scheduled before
PART_S = 0.5
KEPT = (PROBE, PROBE_CPU, ENGINE_ACTIVE, HOST_CORES, SM_CLOCK, STOLEN_CORES)


@dataclass(frozen=True, slots=True)
class Variant:
    """core, client: whether the engine core and the load generator have cores of their own. wide: twice as many."""

    core: bool = False
    client: bool = False
    wide: bool = False
    collector: bool = True
    sensors: bool = True


PLAIN = "plain"
VARIANTS: Mapping[str, Variant] = {
    PLAIN: Variant(),
    "engine core pinned": Variant(core=True),
    "load generator pinned": Variant(client=True),
    "both pinned": Variant(core=True, client=True),
    "both pinned, twice the cores": Variant(core=True, client=True, wide=True),
    "no garbage collection": Variant(collector=False),
    "no sensors, no host-speed probe": Variant(sensors=False),
    "all of these": Variant(core=True, client=True, collector=False, sensors=False),
}


class NoiseEngine(OfflineEngine):
    worker = Path(__file__).with_name("bare_worker.py")


@dataclass
class Switch:
    """A source that reads nothing: asked at even times, it begins the next variant when it is time, and notes when."""

    client: int
    stretch_s: float
    cores: Sequence[int] = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))
    marks: list[tuple[float, str]] = field(default_factory=list)
    name: str = "switch"

    def read(self, now_s: float) -> Reading:
        if not self.marks or now_s >= self.marks[-1][0] + self.stretch_s - INTERVAL_S / 2:
            name = in_turn(len(self.marks))
            self.apply(VARIANTS[name])
            self.marks.append((now_s, name))
        return Reading()

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.marks[-1][1]]

    def apply(self, variant: Variant) -> None:
        core, client = own_cores(self.cores, variant.wide)
        children = [child.pid for child in psutil.Process(self.client).children(recursive=True)]
        pin([self.client], client if variant.client else self.cores)
        pin(children, core if variant.core else self.cores)
        for pid in (self.client, *children):
            if catches(pid, signal.SIGUSR1):
                os.kill(pid, signal.SIGUSR2 if variant.collector else signal.SIGUSR1)

    def close(self) -> None:
        self.apply(Variant())


@dataclass
class Silenced:
    """A source that is left alone in some variants."""

    source: SensorSource
    switch: Switch

    @property
    def name(self) -> str:
        return self.source.name

    def read(self, now_s: float) -> Reading:
        return self.source.read(now_s) if self.switch.variant.sensors else Reading()

    def close(self) -> None:
        self.source.close()


def in_turn(number: int) -> str:
    """The variant of a stretch; each round begins one further on."""
    names = list(VARIANTS)
    return names[(number + number // len(names)) % len(names)]


def own_cores(cores: Sequence[int], wide: bool) -> tuple[Sequence[int], Sequence[int]]:
    """Neighbouring cores for the engine core and for the load generator: an eighth of all each, or a quarter. The
    first eighth, where interrupts are served, is left out where it can be."""
    each = max(1, len(cores) // 8)
    rest, each = cores[each:] or cores, 2 * each if wide else each
    return rest[:each], rest[each : 2 * each] or rest[:each]


def pin(pids: Sequence[int], cores: Sequence[int]) -> None:
    """Each thread that is there; those that they start take after them."""
    for pid in pids:
        with suppress(FileNotFoundError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), cores)


def catches(pid: int, number: signal.Signals) -> bool:
    """Has the process a handler for the signal? One without would end of it."""
    with suppress(FileNotFoundError):
        lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return bool(int(lines["SigCgt"], 16) >> (number - 1) & 1)
    return False


@dataclass(frozen=True, slots=True)
class Stretch:
    """One variant for two seconds: its number since the first, and tokens/s in each half second."""

    number: int
    name: str
    rates: tuple[float, ...]


def stretches_of(run: Run, marks: Sequence[tuple[float, str]]) -> Iterator[Stretch]:
    """Those that lie within the window."""
    assert run.began_s is not None
    opens, closes = (run.began_s + at for at in run.window_s)
    for number, ((begin, name), (end, _)) in enumerate(pairwise(marks)):
        parts = round((end - begin) / PART_S)
        if begin < opens or end > closes or not parts:
            continue
        edges = [begin + SKIPPED_S + (end - begin - SKIPPED_S) * i / parts for i in range(parts + 1)]
        rates = [rate(run, *pair) for pair in pairwise(edges)]
        if None not in rates:
            yield Stretch(number, name, tuple(rates))  # type: ignore[arg-type]


def table(stretches: Sequence[Stretch]) -> Iterator[tuple[str, ...]]:
    """Rows of text, the heading first. Scatter is relative to the mean."""
    yield "variant", "stretches", "tokens/s", "over plain", "95%", "sd of 0.5 s %", "sd of stretches %"
    plain = [s for s in stretches if s.name == PLAIN]
    for name in VARIANTS:
        mine = [s for s in stretches if s.name == name]
        if min(len(mine), len(plain)) < 2:
            continue
        means = [fmean(s.rates) for s in mine]
        within = [r / fmean(s.rates) - 1 for s in mine for r in s.rates]
        free = sum(len(s.rates) - 1 for s in mine)
        inside = math.sqrt(sum(w * w for w in within) / free) if free else math.nan
        seen = student_interval([math.log(mean / fmean(nearest(plain, s).rates)) for s, mean in zip(mine, means)])
        low, high = map(math.exp, ends(seen))
        cells = fmean(means), math.exp(seen.value), low, high, 100 * inside, 100 * sample_sd(means) / fmean(means)
        rates, ratio, low, high, inside, between = cells
        own = ("", "") if name == PLAIN else (f"{ratio:.4f}", f"{low:.4f} to {high:.4f}")
        yield name, str(len(mine)), f"{rates:.0f}", *own, f"{inside:.2f}", f"{between:.2f}"


def nearest(stretches: Sequence[Stretch], to: Stretch) -> Stretch:
    return min(stretches, key=lambda s: abs(s.number - to.number))


def study(
    engine: OfflineEngine, environment: Environment, load: ClosedLoop, stretch_s: float, device: str
) -> tuple[list[Stretch], Run]:
    """Measure on an engine that runs, every stretch another variant."""
    switch = Switch(engine.child.process.pid, stretch_s)
    sources = [Silenced(source, switch) for source in sources_of(device, INTERVAL_S)]
    run = measured(engine, load, environment, Sampler([switch, *sources]))
    return list(stretches_of(run, switch.marks)), run


def facts(stretches: Sequence[Stretch], run: Run) -> dict[str, object]:
    """What the table is made of, and what the sensors said meanwhile, each in rows."""
    sensors = run.telemetry
    columns = {} if sensors is None else {"time_s": sensors.time_s} | {k: sensors.columns.get(k) for k in KEPT}
    rows = [[s.number, s.name, [round(r, 1) for r in s.rates]] for s in stretches]
    return {"stretches": rows, "window_s": run.window_s, "sensors": columns}


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--stretch", type=float, default=2.0, help="seconds of one variant")
    parser.add_argument("--rounds", type=int, default=4, help="stretches of each variant")
    args = parser.parse_args()
    if args.again:
        for name, run in results_in(args.again).items():
            if name != "host":
                tell(name, [Stretch(number, variant, tuple(rates)) for number, variant, rates in run["stretches"]])
        return
    if not hasattr(os, "sched_getaffinity"):
        sys.exit("this system cannot pin processes")
    host = probe(args.platform)
    environment = host.environment
    load = ClosedLoop(args.concurrency, window_s=(args.rounds * len(VARIANTS) + 1) * args.stretch)
    engine = NoiseEngine(engine_spec(read_options({}, {}, {}), args.platform, args.model, environment)).start()
    try:
        stretches, run = study(engine, environment, load, args.stretch, host.device)
    finally:
        engine.close()
    name = f"{args.model} at {args.concurrency}"
    host_words = f"{environment.gpu_name or environment.cpu}, vLLM {environment.vllm}"
    tell(f"{name} on {host_words}", stretches)
    keep(args.out, {"host": host_words, name: facts(stretches, run)})


def tell(title: str, stretches: Sequence[Stretch]) -> None:
    print(title)
    for row in table(stretches):
        print(*row, sep=" | ")


if __name__ == "__main__":
    main()
