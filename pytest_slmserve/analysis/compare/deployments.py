"""Deployments of one model on the available GPUs, compared under the same total concurrency.

An engine may span several GPUs (tensor parallelism), or each GPU may have its own engine (replicas). If a load does not
fit into the KV cache of one GPU, more GPUs gain memory and not only speed. So claims that a model is slower
(arXiv:2404.03353, figure 1) are evaluated under the largest load that fits into fewer GPUs. The claim that a large
model still gains uses the best load of each deployment, because its source names memory as the cause.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from pytest_slmserve.analysis.estimates import Interval, grouped, mean_of_known
from pytest_slmserve.analysis.metrics.window import steps_with_prompts
from pytest_slmserve.analysis.points import Point, ReplicaPoint, at_common_loads, ratio
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.schema.errors import Sharing
from pytest_slmserve.schema.records import hosts_of, series_key


@dataclass(frozen=True, slots=True)
class Deployment:
    """One deployment under one load.

    Attributes:
        tensor_parallel_size: GPUs of each engine.
        sharing: placement of several engines; None for a single engine.
        room: requests that a single engine can run at once; None if unknown, or for replicas.
        kv_blocks: of a single engine; None likewise.
    """

    gpus: int
    engines: int
    tensor_parallel_size: int
    sharing: Sharing | None
    concurrency: int
    served: Point
    room: int | None = None
    kv_blocks: int | None = None

    @property
    def fits(self) -> bool:
        """True if all requests can run at once, or if the limit is unknown."""
        return self.room is None or self.concurrency <= self.room

    @property
    def place(self) -> str:
        """ "1 GPU" or, for example, "2 GPUs"."""
        return "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"

    @property
    def tokens_per_s(self) -> float:
        return self.served.output_tokens_per_s or 0.0


def with_wider(curves: Iterable[Curve]) -> list[Curve]:
    """Return the curves, and give the one on the fewest GPUs the curves of the same engine on more GPUs (`wider`).

    Curves are combined only if they have a host in common, or if a host is unknown.
    """

    found, degree = list(curves), attrgetter("spec.tensor_parallel_size")
    wider: dict[int, tuple[Curve, ...]] = {}
    for family in grouped((curve for curve in found if curve.spec), lambda curve: curve.family).values():
        rest = sorted(family, key=degree)
        while rest:
            first, *others = rest
            alike, rest = [first], []
            here = hosts_of(first.measurements)
            for other in others:
                there = hosts_of(other.measurements)
                (alike if None in here | there or here & there else rest).append(other)
            if degree(first) < degree(alike[-1]):
                wider[id(first)] = tuple(alike[1:])
    return [replace(curve, wider=wider.get(id(curve), ())) for curve in found]


def deployments(curve: Curve) -> tuple[Deployment, ...]:
    """Return the valid deployments of a curve's engine, sorted by load, then by GPUs."""
    made = []
    for each in (curve, *curve.wider):
        if first := each.first:
            gpus, most = first.spec.tensor_parallel_size, first.resolved.max_num_seqs or first.spec.max_num_seqs
            room, blocks = most if each.kv_capacity is None else min(most, each.kv_capacity), first.resolved.kv_blocks
            for point in (*each.valid, *(point for point in each.alone if point.valid)):
                made.append(Deployment(gpus, 1, gpus, None, point.concurrency, point, room, blocks))
        for shared in each.shared:
            if shared.valid:
                degree = shared.tensor_parallel_size
                gpus = shared.count * degree if shared.sharing == "gpus" else degree
                made.append(Deployment(gpus, shared.count, degree, shared.sharing, shared.concurrency, shared))
    found = grouped(made, lambda one: (one.concurrency, one.gpus, one.engines, str(one.sharing)))
    return tuple(found[key][0] for key in sorted(found))


def on_several_gpus(curve: Curve) -> bool:
    """Return whether the engine was measured with several numbers of GPUs, or as replicas with a GPU each."""
    return bool(curve.wider) or any(shared.sharing == "gpus" for shared in curve.shared)


def one_engine_each(found: Iterable[Deployment]) -> dict[int, dict[int, Deployment]]:
    """Return the single engines by number of GPUs and by concurrency."""
    alone = grouped((one for one in found if one.sharing is None), lambda one: one.gpus)
    return {gpus: {one.concurrency: one for one in each} for gpus, each in alone.items()}


@dataclass(frozen=True, slots=True)
class AtBothInterfaces:
    """One load without and with the server.

    Attributes:
        ratio: output tokens/s with the server over without it. The repeats of all loads provide the noise.
        prompt_steps: share of the steps that processed a prompt, without and with the server.
    """

    engine: Point
    server: Point
    ratio: Interval
    prompt_steps: tuple[float | None, float | None]


# The sweeps without and with the server, and the loads at which both have valid points.
Interfaces = tuple[Curve, Curve, tuple[AtBothInterfaces, ...]]


def at_both_interfaces(curves: Sequence[Curve]) -> list[Interfaces]:
    """Return each sweep through the server with the sweep without it, and their common loads, ascending."""

    def prompt_steps(curve: Curve, point: Point) -> float | None:
        return mean_of_known(steps_with_prompts(m.run) for m in curve.measurements if m.id in point.records)

    by_interface: dict[str, list[tuple[str, Curve]]] = {"engine": [], "server": []}
    for c in curves:
        if c.first and c.load and c.first.spec.interface in by_interface:
            key = series_key(c.first.spec.without_http, c.first.workload.hash, c.load, c.first.environment)
            by_interface[c.first.spec.interface].append((key, c))
    found, engines = list[Interfaces](), dict(by_interface["engine"])
    for key, server in by_interface["server"]:
        if engine := engines.get(key):
            pairs, among = at_common_loads(engine.valid, server.valid)
            loads = tuple(
                AtBothInterfaces(p, q, ratio(q, p, among), (prompt_steps(engine, p), prompt_steps(server, q)))
                for p, q in pairs
            )
            found += [(engine, server, loads)] if loads else []
    return found


CLAIM = "neighbours-do-not-disturb"
HOW: dict[Sharing, str] = {
    "time-slicing": "by time slicing",
    "mps": "under MPS",
    "mig": "on MIG instances",
    "gpus": "with a GPU each",
    "urls": "at URLs of their own",
}
PairReplicas = tuple[ReplicaPoint, Point]


def compared(curve: Curve, sharing: Sharing) -> list[PairReplicas]:
    """Return valid replicas, each with a single engine on their host under the same total load."""
    valid = (shared for shared in curve.shared if shared.sharing == sharing and shared.valid)
    return [(shared, one) for shared in valid if (one := curve.one_engine(shared.concurrency, shared))]
