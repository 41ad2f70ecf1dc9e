"""Throughput of several engines on one device: a row for each set, below one engine alone under that load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from pytest_slmserve.analysis.device.engine_memory import GpuMemory, memory_in_use
from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.points.replica_points import ReplicaPoint, engines, system_throughput
from pytest_slmserve.analysis.points.sweep_points import Point, ratio
from pytest_slmserve.analysis.stats.estimates import Interval
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.report.numbers import ABSENT, change, changes, counted, figure, gib, hundredths, milliseconds
from pytest_slmserve.report.tables.findings import served_on
from pytest_slmserve.report.tables.valid_column import reasons, valid_cell
from pytest_slmserve.report.text_table import Column, hanging, table
from pytest_slmserve.schema.literals import Sharing

SHARINGS = get_args(Sharing)
LEGEND = (
    "in flight: in all engines. tokens: of all, over the span that their windows have in common, or whole convoys of "
    "requests that start together; sum: of each over its own window, where that differs. gain: over one engine on the "
    "same host under the same load. E2E: the largest of the replicas' means, and the 99th percentile of all requests. "
    "What sensors say is of all engines together."
)
MEMORY_LEGEND = (
    "Memory: weights, KV cache: of each engine, as it told them. other: what sensors saw in use beyond them at most: "
    "activations, captured graphs, contexts, of which engine is not known. free: with what the driver keeps. other and "
    "unused: no sensor tells them apart."
)


@dataclass(frozen=True, slots=True)
class Entry:
    """Row of the tables. gain: over one engine alone, None where that is not known."""

    engines: str
    sharing: str
    served: Point | ReplicaPoint
    gain: Interval | None = None


NAMES: tuple[Column[Entry], ...] = (
    Column("\nengines", lambda e: e.engines, "left"),
    Column("\nsharing", lambda e: e.sharing, "left"),
    Column("in\nflight", lambda e: str(e.served.concurrency)),
)
SERVED: tuple[Column[Entry], ...] = (
    Column("tokens\n/s", lambda e: figure(e.served.output_tokens_per_s, 4)),
    Column("\nsum", lambda e: _other_sum(e.served), rank=6),
    Column("gain\n%", lambda e: change(e.gain), rank=1),
    Column("95 %\n", lambda e: changes(e.gain), "left", rank=2),
    Column("E2E s\nlargest", lambda e: figure(getattr(e.served, "largest_e2e_s", e.served.e2e_s)), rank=3),
    Column("E2E s\np99", lambda e: figure(e.served.e2e_p99_s), rank=4),
    Column("\nvalid", lambda e: valid_cell(e.served), "left"),
)
SENSED: tuple[Column[Entry], ...] = (
    Column("GPU\nutil %", lambda e: hundredths(e.served.gpu_util), rank=6),
    Column("busy\n%", lambda e: hundredths(e.served.engine_active), rank=2),
    Column("SM\n%", lambda e: hundredths(e.served.sm_active), rank=1),
    Column("DRAM\n%", lambda e: hundredths(e.served.dram_active), rank=1),
    Column("tensor\n%", lambda e: hundredths(e.served.tensor_active), rank=1),
    Column("power\nW", lambda e: figure(e.served.power_w), rank=3),
    Column("mJ/\ntoken", lambda e: milliseconds(e.served.energy_per_token_j), rank=1),
    Column("cap\n%", lambda e: hundredths(e.served.power_capped), rank=4),
    Column("own\ncores", lambda e: figure(e.served.own_cores), rank=5),
)


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A set of engines with the most that their GPUs had in use under any load."""

    engines: str
    sharing: str
    memory: GpuMemory

    @property
    def kv_gib(self) -> str:
        return _each([engine.kv_bytes for engine in self.memory.engines])


MEMORY: tuple[Column[MemoryRow], ...] = (
    Column("\nengines", lambda r: r.engines, "left"),
    Column("\nsharing", lambda r: r.sharing, "left"),
    Column("weights\nGiB each", lambda r: _each([engine.weight_bytes for engine in r.memory.engines])),
    Column("KV cache\nGiB each", lambda r: r.kv_gib),
    Column("other\nGiB", lambda r: gib(r.memory.other_bytes)),
    Column("free\nGiB", lambda r: ABSENT if r.memory.used_bytes is None else gib(r.memory.left_bytes)),
    Column("other and\nunused GiB", lambda r: gib(r.memory.left_bytes) if r.memory.used_bytes is None else ABSENT),
    Column("of\nGiB", lambda r: gib(r.memory.total_bytes)),
)


def _each(sizes: Sequence[int]) -> str:
    """Sizes in GiB, one of them where all are alike: "2.45", "0.234 + 2.45" """
    return " + ".join(dict.fromkeys(map(gib, sizes)) if len(set(sizes)) == 1 else map(gib, sizes))


def replica_report(curves: Sequence[Curve], shared: Sequence[ReplicaPoint]) -> Iterator[str]:
    """Tables of throughput, sensor values and memory for each kind of host, then a legend; nothing without measured
    replicas. One model's rows are together; sets of different models come last."""
    used: list[MemoryRow] = []
    for title, points, entries in replicas_by_host(curves, shared):
        sensed = [entry for entry in entries if any(column.cell(entry) != ABSENT for column in SENSED)]
        pieces = [title, "", table(entries, (*NAMES, *SERVED)), *_remarks(points, curves)]
        pieces += ["", table(sensed, (*NAMES, *SENSED))] if sensed else []
        used += (there := memory_rows(entries))
        pieces += ["", table(there, MEMORY)] if there else []
        yield "\n".join(pieces)
    if shared:
        yield hanging(LEGEND, 0)
    if used:
        yield hanging(MEMORY_LEGEND, 0)


def replicas_by_host(
    curves: Sequence[Curve], shared: Sequence[ReplicaPoint]
) -> Iterator[tuple[str, list[ReplicaPoint], list[Entry]]]:
    """Title, points and rows of the table of each kind of host."""
    for points in grouped(shared, lambda p: p.environment.per_gpu_key).values():
        models = grouped(points, lambda p: p.model or p.models).values()
        alike, where = sorted(models, key=lambda alike: not alike[0].model), points[0].environment
        place = "" if any(point.sharing == "gpus" for point in points) else " on one device"
        title = f"Replicas{place}: {served_on(where)}"
        if where.platform == "remote":
            title = f"Replicas at URLs of their own, the first at {where.url}: what they share is not known"
        yield title, points, [entry for each in alike for entry in _entries(each, curves)]


def memory_rows(entries: Sequence[Entry]) -> list[MemoryRow]:
    """A row for each set of engines whose parts are known, whatever its load; those whose caches differ stay apart."""
    rows = [MemoryRow(e.engines, e.sharing, memory) for e in entries if (memory := memory_in_use(e.served.used))]
    alike = grouped(rows, lambda row: (row.engines, row.sharing, row.memory.engines, row.memory.total_bytes))
    return [max(each, key=lambda row: row.memory.used_bytes or 0) for each in alike.values()]


def memory_names(rows: Sequence[MemoryRow]) -> list[str]:
    """Names of the rows, with their KV cache where it tells two apart."""
    names = [f"{row.engines}, {row.sharing}" for row in rows]
    often = Counter(names)
    return [f"{name}, KV {row.kv_gib} GiB" if often[name] > 1 else name for name, row in zip(names, rows)]


def _entries(points: Sequence[ReplicaPoint], curves: Sequence[Curve]) -> Iterator[Entry]:
    """Rows of one model, or one set of them: under each load one engine alone first, where it was measured."""

    def place(point: ReplicaPoint) -> tuple[int, bool, int, int]:
        return SHARINGS.index(point.sharing), point.pinned, point.thread_percentage or 0, point.count

    for under in grouped(points, lambda p: (p.concurrency, p.workload, p.ramp_up, p.families)).values():
        found = [(point, alone_at(point, curves)) for point in sorted(under, key=place)]
        if alone := next((base for _, base in found if base), None):
            yield Entry(under[0].models[0], "alone", alone)
        for point, base in found:
            gain = ratio(point, base) if base and point.valid else None
            yield Entry(engines(point.models), deployed(point), point, gain)


def alone_at(shared: ReplicaPoint, curves: Sequence[Curve]) -> Point | None:
    """One engine under the load of all the replicas, where it was measured on their host and is valid."""
    found = (curve.one_engine(shared.concurrency, shared) for curve in curves if shared in curve.shared)
    return next((point for point in found if point), None)


def deployed(point: ReplicaPoint) -> str:
    part = f", {point.thread_percentage} %" if point.thread_percentage else ""
    return f"{point.sharing}{', pinned' if point.pinned else ''}{part}"


def _other_sum(served: Point | ReplicaPoint) -> str:
    """The paper's sum, where it is another number to the digits shown."""
    text = figure(getattr(served, "sum_tokens_per_s", None), 4)
    return ABSENT if text == figure(served.output_tokens_per_s, 4) else text


def _remarks(points: Sequence[ReplicaPoint], curves: Sequence[Curve]) -> Iterator[str]:
    for point in points:
        name = f"{engines(point.models)}, {deployed(point)}, {point.concurrency} in flight"
        used = f"{len(point.repeats)} of {counted(len(point.repeats) + point.left_out, 'run')} are used"
        yield from reasons(point, name, used)
        if point.model is None and (text := _one_by_one(point, curves)):
            yield hanging(f"{engines(point.models)}, {deployed(point)}: {text}", 2)


def _one_by_one(point: ReplicaPoint, curves: Sequence[Curve]) -> str:
    """Throughput of different models together in units of what each serves alone, as text; empty where unknown."""
    own = [_rate_alone(model, load, point, curves) for model, load in zip(point.models, point.loads)]
    together = system_throughput(point, [rate or 0.0 for rate in own])
    if together is None:
        return ""
    each = ", ".join(f"{m} {figure(rate, 4)} tokens/s" for m, rate in zip(point.models, point.each_tokens_per_s))
    return f"{each}; {figure(together)} times what serving one after the other would give"


def _rate_alone(model: str, load: int, beside: ReplicaPoint, curves: Sequence[Curve]) -> float | None:
    """Output tokens/s of one engine alone, on the same kind of host and with the same requests."""
    here = (model, beside.environment.per_gpu_key, beside.ramp_up)
    alike = (
        c for c in curves if c.environment and c.load and (c.subject, c.environment.per_gpu_key, c.load.ramp_up) == here
    )
    mine = (c for c in alike if beside.workload is None or (c.workload and c.workload.hash == beside.workload))
    return next((point.output_tokens_per_s for c in mine if (point := c.one_engine(load, beside))), None)
