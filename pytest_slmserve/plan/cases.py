"""Cases that can be measured, with key, title and estimated time, and the order in which a run starts them."""

import heapq
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.points import engines
from pytest_slmserve.schema.errors import BadUsage, Platform
from pytest_slmserve.schema.kv_cache import given_limit, kv_capacity
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Replica, measurement_key, replica_set, series_key
from pytest_slmserve.schema.specs import ClosedLoop, Engines, EngineSpec, Load, ReplicaSpec, Workload, short_hash

LARGEST_LOAD = 1024


@dataclass(frozen=True, slots=True)
class Defaults:
    """Defaults of a platform."""

    models: tuple[str, ...]
    lengths: tuple[int, int]
    window_s: float
    largest: int
    dtype: str  # "" for the model's own
    start_s: float  # of an engine, for estimates
    first_s: float  # additional for the first start of a run, because files and compiled code are not cached
    turn_s: float  # additional for each further replica
    budget_s: float  # for an engine's curves, whose repeats continue until their claims are conclusive


DEFAULTS: dict[Platform, Defaults] = {
    "cuda": Defaults(("opt-125m", "opt-1.3b", "opt-2.7b"), (512, 256), 2.0, LARGEST_LOAD, "", 60.0, 30.0, 27.0, 175.0),
    "cpu": Defaults(("opt-tiny",), (64, 32), 2.0, 256, "bfloat16", 15.0, 0.0, 5.0, 60.0),
    "simulated": Defaults(("opt-125m", "opt-1.3b", "opt-2.7b"), (512, 256), 5.0, LARGEST_LOAD, "", 0.0, 0.0, 0.0, 60.0),
    "remote": Defaults((), (512, 256), 5.0, 256, "", 0.0, 0.0, 0.0, 240.0),
}


def engine_title(spec: Engines) -> str:
    """Return a title such as "opt-125m on 2 GPUs"."""
    if isinstance(spec, EngineSpec):
        if spec.interface == "transformers":
            return f"{spec.model} in Transformers, batching {spec.arguments.get('batching')}"
        return spec.model if spec.tensor_parallel_size == 1 else f"{spec.model} on {spec.tensor_parallel_size} GPUs"
    how = "a GPU each" if spec.sharing == "gpus" else f"by {spec.sharing}"
    return f"{engines([engine.model for engine in spec.engines])}, {how}"


def point_title(spec: EngineSpec, load: Load) -> str:
    """Return a title such as "opt-125m at 64"."""
    name = short_name(spec.model)
    return f"{name} at {load.concurrency}" if isinstance(load, ClosedLoop) else f"{name}, {load.title}"


def clock(seconds: float) -> str:
    """Return minutes and seconds, such as 3:07."""
    return f"{int(seconds + 0.5) // 60}:{int(seconds + 0.5) % 60:02d}"


def engines_of_set(engine: Engines) -> tuple[EngineSpec, ...]:
    return engine.engines if isinstance(engine, ReplicaSpec) else (engine,)


def url_lock(url: str) -> str:
    return f"url-{short_hash(url)}"


AGAIN = "again while claims are open, at most"  # name of the rest of an engine's budget


class PlannedItem(NamedTuple):
    """One item of a run; `engine` is None if it only reads, or if its engine starts are part of `seconds`."""

    name: str
    engine: Engines | None
    seconds: float


def repeat_estimate_s(spec: EngineSpec, workload: Workload, load: Load, concurrency: int | None = None) -> float:
    """Return the estimated seconds of one repeat, without the engine's start.

    A fixed-size workload takes the time of all work, or that of all arrivals and the last request if that is longer.
    Prompts take 4e14 operations per second, as measured on an H200. A step of Transformers takes 20 ms on a GPU (a
    guess) and 12 ms on a CPU (measured with the tiny model).

    Args:
        concurrency: of all engines that share the device.
    """
    prompt, output = workload.mean_prompt_tokens, workload.mean_output_tokens
    on_cpu, context = spec.platform == "cpu", prompt + output / 2
    if spec.platform == "simulated":
        return 0.1
    if isinstance(load, ClosedLoop):
        whole = load if concurrency is None else replace(load, concurrency=concurrency)
        if workload.spec.kind != "generate":  # a request waits until the prompts before it are computed
            return whole.duration_s(whole.concurrency * prompt * _prompt_token_s(spec))
        return whole.duration_s(output * _step_s(spec, whole.concurrency, context))
    requests = load.requests or 0
    if spec.interface == "transformers":
        batch = 1 if ("batching", "none") in spec.extra else spec.max_num_seqs
        tokens = [request.output_tokens for request in workload.requests]
        steps = sum(max(tokens[i : i + batch]) for i in range(0, len(tokens), batch))
        return max(steps * (12e-3 if on_cpu else 20e-3), requests / load.rate)
    if spec.platform == "remote":  # of unknown speed
        return requests / load.rate
    capacity = kv_capacity(spec, workload.longest)
    batch = max(1, min(requests, given_limit(spec, "max_num_seqs"), requests if capacity is None else capacity))
    step_s = _step_s(spec, batch, context)
    prompts_s = requests * prompt * _prompt_token_s(spec)
    work_s = prompts_s + requests / batch * output * step_s
    return max(work_s, requests / load.rate + output * step_s)


def _prompt_token_s(spec: EngineSpec) -> float:
    if spec.platform == "remote":
        return 0.0
    return 1e-5 if spec.platform == "cpu" else (spec.known_model.active or 0) / 2e14


def _step_s(spec: EngineSpec, batch: float, context: float) -> float:
    """Return the seconds of a step, as measured once on an H200 and on two CPU cores."""
    if spec.platform == "remote":
        return 0.0
    running = min(batch, given_limit(spec, "max_num_seqs"))
    if spec.platform == "cpu":
        return (2.5e-3 + 1.5e-4 * running) * batch / running  # a batch above the engine's limit takes several steps
    model = spec.known_model
    read = (model.weight_bytes() or 0) + running * (model.kv_read_bytes(context) or 0)
    return (1.5e-3 + 2 * read / (4.8e12 * spec.tensor_parallel_size)) * batch / running


def start_estimate_s(spec: Engines) -> float:
    defaults, further = DEFAULTS[spec.platform], len(spec) - 1 if isinstance(spec, ReplicaSpec) else 0
    if isinstance(spec, ReplicaSpec) and spec.sharing == "gpus":
        further = min(further, 1)
    return defaults.start_s + further * defaults.turn_s


NOWHERE = Environment()


@dataclass(frozen=True, eq=False)  # no slots, because cached_property needs __dict__
class Case:
    """One case to measure: an engine, or several that share a device, with a workload and a load for each.

    Attributes:
        engines: None if this host cannot have them, for `skip_reason`. A set of one is only compared with larger sets.
        model: as named by the options or a marker.
        id: of the test; "" for a case from the body of a test.
    """

    engines: Engines | None = None
    workloads: tuple[Workload, ...] = ()
    loads: tuple[Load, ...] = ()
    environment: Environment = NOWHERE
    model: str = ""
    id: str = ""
    skip_reason: str | None = None

    @property
    def engine(self) -> Engines:
        """Engines to start; for a set of one the single engine, which may already run."""
        return self.engines if isinstance(self.engines, ReplicaSpec) and len(self.engines) > 1 else self.each[0]

    @property
    def each(self) -> tuple[EngineSpec, ...]:
        """Specifications of the engines. Raise ValueError if this host cannot have them."""
        if self.engines is None:
            raise ValueError(f"{self.id} has no engine: {self.skip_reason}")
        return engines_of_set(self.engines)

    def replicas(self) -> tuple[Replica | None, ...]:
        """Return the part of each engine in a new repeat, or None for a single engine."""
        if not isinstance(self.engines, ReplicaSpec):
            return (None,)
        spec, group = self.engines, uuid.uuid4().hex[:12]
        key = replica_set(spec, [workload.hash for workload in self.workloads], self.loads)
        how = spec.sharing, spec.pinned, spec.thread_percentage
        return tuple(Replica(group, i, len(spec), key, *how) for i in range(len(spec)))

    @cached_property
    def key(self) -> str:
        first = self.replicas()[0]
        if first and first.count > 1:
            return short_hash([first.set, self.environment.key])
        alone = measurement_key(self.each[0], self.workloads[0].hash, self.loads[0], self.environment)
        return first.key(alone) if first else alone

    @cached_property
    def series(self) -> str:
        """Key without the concurrency, the same for all points of a curve."""
        load = self.loads[0]
        assert isinstance(load, ClosedLoop)
        return series_key(self.each[0], self.workloads[0].hash, load, self.environment)

    @property
    def title(self) -> str:
        if isinstance(self.engine, EngineSpec):
            return point_title(self.engine, self.loads[0])
        return f"{engine_title(self.engine)} at {self.concurrency}"

    @property
    def concurrency(self) -> int:
        """Concurrent requests in all engines, if the loads are closed loops."""
        return sum(load.concurrency for load in self.loads if isinstance(load, ClosedLoop))

    @property
    def estimate_s(self) -> float:
        shares = isinstance(self.engines, ReplicaSpec) and self.engines.sharing != "gpus"
        in_all = self.concurrency if shares else None
        return repeat_estimate_s(self.each[0], self.workloads[0], self.loads[0], in_all)


class Group(NamedTuple):
    """Engine or set of replicas with its number of items, and the seconds of its start and of these items.

    Attributes:
        gpus: indices of its GPUs, from `spread`.
        begins_s: its start in the run, from `spread`.
    """

    engine: Engines
    items: int
    seconds: float
    gpus: tuple[int, ...] = ()
    begins_s: float = 0.0


def groups_of(cells: Sequence[PlannedItem]) -> list[Group]:
    """Return items grouped by engine, in the order of `in_order`; items without an engine are excluded."""
    return in_order(
        Group(engine, len(its), start_estimate_s(engine) + sum(cell.seconds for cell in its))
        for engine, its in grouped(cells, lambda cell: cell.engine).items()
        if engine is not None
    )


def in_order(groups: Iterable[Group]) -> list[Group]:
    """Return groups in starting order: references, because a run may end early, then the widest, then the longest."""

    def subject(group: Group) -> tuple[str, str]:
        engine = engines_of_set(group.engine)[0]
        return engine.model, engine.interface

    groups = list(groups)
    alike = grouped(groups, subject)

    def rank(group: Group) -> tuple[bool, int, float]:
        gpus, widths = len(group.engine.gpus), {len(other.engine.gpus) for other in alike[subject(group)]}
        reference = isinstance(group.engine, EngineSpec) and gpus == min(widths) < max(widths)
        return not reference, -gpus, -group.seconds

    return sorted(groups, key=rank)


def spread(groups: Sequence[Group], gpus: int) -> list[Group]:
    """Return the groups of `in_order` on the GPUs that are free first.

    If each group takes one GPU, the last end is at most 2 - 1/gpus times the smallest possible (Graham 1966, "Bounds
    for certain multiprocessing anomalies").
    """
    free = [(0.0, gpu) for gpu in range(gpus)]
    placed = []
    for group in in_order(groups):
        width = len(group.engine.gpus)
        if width > gpus:
            raise BadUsage(f"an engine takes {width} GPUs, and the plan has {gpus}", f"Plan with {width} GPUs or more.")
        taken = [heapq.heappop(free) for _ in range(width)]
        begins_s = max(at for at, _ in taken)
        placed.append(group._replace(gpus=tuple(sorted(gpu for _, gpu in taken)), begins_s=begins_s))
        for gpu in placed[-1].gpus:
            heapq.heappush(free, (begins_s + group.seconds, gpu))
    return placed


def makespan_s(placed: Sequence[Group]) -> float:
    return max((group.begins_s + group.seconds for group in placed), default=0.0)


def spread_lines(cells: Sequence[PlannedItem], gpus: int) -> list[str]:
    """Return the plan on several GPUs as text, one line for each GPU."""
    placed = spread(groups_of(cells), gpus)
    on_each: dict[int, list[str]] = {gpu: [] for gpu in range(gpus)}
    for group in placed:
        items = f"{group.items} item{'s' if group.items != 1 else ''}, {clock(group.seconds)} min"
        for gpu in group.gpus:
            on_each[gpu].append(f"{engine_title(group.engine)} from {clock(group.begins_s)} ({items})")
    lines = [f"GPU {gpu}: {', '.join(its) or 'nothing'}" for gpu, its in on_each.items()]
    alone, plural = clock(sum(group.seconds for group in placed)), "s" if gpus != 1 else ""
    end = f"{clock(makespan_s(placed))} min on {gpus} GPU{plural}"
    return [*lines, f"spread by engine: {end}; one engine after the other: {alone} min"]


def plan_lines(cells: Sequence[PlannedItem]) -> list[str]:
    """Return the plan as text: a line for each start and item, and the total."""
    lines, total, gpu_seconds = [f"{'min:s':>7}  what begins then, and how long it takes"], 0.0, 0.0
    engine: Engines | None = None
    for name, needed, seconds in cells:
        if needed is not None and needed != engine:
            start = start_estimate_s(needed) + (0.0 if engine else DEFAULTS[needed.platform].first_s)
            engine = needed
            lines.append(f"{clock(total):>7}  start {engine_title(needed)} ({needed.platform}, {start:.0f} s)")
            total += start
            gpu_seconds += start * len(needed.gpus)
        takes = f" ({seconds:.0f} s)" if needed or seconds else " (measures nothing)"
        lines.append(f"{clock(total):>7}    {name}{takes}")
        total += seconds
        gpu_seconds += seconds * (len(needed.gpus) if needed else 1)
    on_gpus = f", {gpu_seconds:,.0f} GPU s" if engine and engine.platform == "cuda" else ""
    items = sum(name != AGAIN for name, *_ in cells)
    return [*lines, f"{clock(total):>7}  end: {items} item{'s' if items != 1 else ''}{on_gpus}"]
