"""Throughput of several engines on one device: a row for each set, below one engine alone under that load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import get_args

from pytest_slmserve.analysis.compare.deployments import Deployment, deployments, on_several_gpus, speedup
from pytest_slmserve.analysis.device.gpu_figures import GpuMemory, figures_of_each_gpu, memory_in_use
from pytest_slmserve.analysis.points import Point, ReplicaPoint, engines, ratio, system_throughput
from pytest_slmserve.analysis.stats.estimates import Interval, grouped
from pytest_slmserve.analysis.sweep.curve import Curve, labels
from pytest_slmserve.report.tables.findings import reasons, served_on, valid_cell
from pytest_slmserve.report.text_table import (
    ABSENT,
    Column,
    change,
    change_interval,
    counted,
    figure,
    gib,
    hanging,
    hundredths,
    milliseconds,
    table,
    whole,
)
from pytest_slmserve.schema.errors import Sharing

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
    Column("95 %\n", lambda e: change_interval(e.gain), "left", rank=2),
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


# What one may wish of a deployment, in words, and its unit.
WISHES = {
    "requests_per_s": ("most requests/s", ""),
    "e2e_s": ("lowest E2E", " s"),
    "joules_per_request": ("fewest joules", " J/request"),
}
SEVERAL_GPUS_LEGEND = (
    "in flight: in all engines. batch: mean sequences of an engine step, below the load where some had to wait for KV "
    "memory. gain: of tokens/s over one engine on the fewest GPUs under that load. power: of all GPUs together; "
    "imbalance: between the one that takes most and the one that takes least, over their mean."
)


def gpus_report(curves: Sequence[Curve]) -> Iterator[str]:
    """A table for each model that was served on several GPUs, what to deploy by it, and how to read it."""
    each = ((curve, deployments(curve)) for curve in curves if on_several_gpus(curve))
    shown = [(curve, found) for curve, found in each if any(one.gpus > 1 for one in found)]
    names = labels([curve for curve, _ in shown])
    yield from (_of_model(name, curve, found) for name, (curve, found) in zip(names, shown))
    if shown:
        yield hanging(SEVERAL_GPUS_LEGEND, 0)


def gpus_advice(curves: Sequence[Curve]) -> Iterator[str]:
    """Advice on deployments over several GPUs, by each model's measurements there; nothing without a choice."""
    for curve in curves:
        if on_several_gpus(curve):
            for text in _answers(curve, deployments(curve)):
                yield hanging(f"{curve.subject} on {text}", 2)


def _of_model(name: str, curve: Curve, found: Sequence[Deployment]) -> str:
    waiting = [
        f"{one.concurrency} in flight do not fit into the KV memory of {counted(one.gpus, 'GPU')}: "
        f"{figure(one.served.batch)} ran at once, the others waited. What more GPUs gain there is memory, not speed"
        for one in found
        if not one.fits and isinstance(one.served, Point)
    ]
    said = [hanging(text, 2) for text in (*waiting, *_each_gpu(curve), *_answers(curve, found))]
    return "\n".join([f"{name} on several GPUs: {served_on(curve.environment)}", "", _table(curve, found), *said])


def _table(curve: Curve, found: Sequence[Deployment]) -> str:
    """A row for each deployment, its gain over one engine on the fewest GPUs under the same load."""
    base = {one.concurrency: one for one in reversed(found) if one.sharing is None}

    def gain(one: Deployment) -> Interval | None:
        first = base.get(one.concurrency, one)
        return None if first is one else speedup(first, one)

    columns: tuple[Column[Deployment], ...] = (
        Column("in\nflight", lambda one: str(one.concurrency)),
        Column("\nGPUs", lambda one: str(one.gpus)),
        Column("\ndeployment", deployment_name, "left"),
        Column("\nbatch", lambda one: figure(one.served.batch) if isinstance(one.served, Point) else ABSENT, rank=7),
        Column("KV\nblocks", lambda one: whole(one.kv_blocks), rank=6),
        Column("requests\n/s", lambda one: figure(requests_per_s(curve, one)), rank=4),
        Column("tokens\n/s", lambda one: figure(one.tokens_per_s, 4)),
        Column("tokens/s\nper GPU", lambda one: figure(one.tokens_per_s / one.gpus, 4), rank=4),
        Column("gain\n%", lambda one: change(gain(one)), rank=1),
        Column("95 %\n", lambda one: change_interval(gain(one)), "left", rank=2),
        Column("E2E s\nmean", lambda one: figure(one.e2e_s), rank=1),
        Column("E2E s\np99", lambda one: figure(one.served.e2e_p99_s), rank=5),
        Column("power\nW", lambda one: figure(one.served.power_w), rank=3),
        Column("imbal-\nance %", lambda one: hundredths(one.served.power_imbalance), rank=8),
        Column("J/\nrequest", lambda one: figure(joules_per_request(curve, one)), rank=2),
        Column("\nvalid", lambda one: valid_cell(one.served), "left"),
    )
    return table(found, columns)


def deployment_name(one: Deployment) -> str:
    """ "one engine", "one engine, TP 2", "2 replicas, a GPU each", "2 replicas, mps" """
    parallel = "" if one.tensor_parallel_size == 1 else f", TP {one.tensor_parallel_size}"
    if one.sharing is None:
        return f"one engine{parallel}"
    how = "a GPU each" if one.sharing == "gpus" else str(one.sharing)
    return f"{one.engines} replicas, {how}{parallel}"


def requests_per_s(curve: Curve, one: Deployment) -> float | None:
    return one.tokens_per_s / curve.workload.mean_output_tokens if curve.workload else None


def joules_per_request(curve: Curve, one: Deployment) -> float | None:
    per_token = one.served.energy_per_token_j
    return None if per_token is None or curve.workload is None else per_token * curve.workload.mean_output_tokens


def _each_gpu(curve: Curve) -> Iterator[str]:
    """Power and activity of each GPU at the largest load of each engine over several GPUs."""
    for wide in curve.wider:
        if not wide.valid or wide.spec is None:
            continue
        largest = wide.valid[-1]
        last = next((m for m in wide.trusted if m.id in largest.records), None)
        each = figures_of_each_gpu(last.run) if last else ()
        if any(gpu.power_w is not None for gpu in each):
            told = (
                f"GPU {i} {figure(g.power_w)} W, SM {hundredths(g.sm_active)} %, DRAM {hundredths(g.dram_active)} %"
                for i, g in enumerate(each)
            )
            yield f"TP {wide.spec.tensor_parallel_size}, {largest.concurrency} in flight: {'; '.join(told)}"


def _answers(curve: Curve, found: Sequence[Deployment]) -> Iterator[str]:
    """The best deployment for each number of GPUs and each of three wishes, where there was a choice."""
    for gpus, load, best in best_on_several(curve, found):
        wishes = [
            f"{WISHES[wish][0]}: {deployment_name(one)} ({figure(value)}{WISHES[wish][1]})"
            for wish, (one, value) in best.items()
        ]
        yield f"{gpus} GPUs, {load} in flight: {'; '.join(wishes)}"


def best_on_several(
    curve: Curve, found: Sequence[Deployment]
) -> Iterator[tuple[int, int, dict[str, tuple[Deployment, float | None]]]]:
    """The best deployment by each wish whose value is known of all, per number of GPUs and load with a choice."""
    by_gpus = sorted((one for one in found if one.gpus > 1), key=lambda one: (one.gpus, one.concurrency))
    for (gpus, load), under in groupby(by_gpus, key=lambda one: (one.gpus, one.concurrency)):
        choices = list(under)
        if len(choices) < 2:
            continue
        most = max(choices, key=lambda one: one.tokens_per_s)
        best: dict[str, tuple[Deployment, float | None]] = {"requests_per_s": (most, requests_per_s(curve, most))}
        costs = {
            "e2e_s": [one.e2e_s for one in choices],
            "joules_per_request": [joules_per_request(curve, one) for one in choices],
        }
        for wish, values in costs.items():
            known = [(value, i) for i, value in enumerate(values) if value is not None]
            if len(known) == len(choices):
                best[wish] = choices[min(known)[1]], min(known)[0]
        yield gpus, load, best
