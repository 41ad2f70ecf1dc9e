"""Sections of deployments: replicas, engines on several GPUs, and the server next to the engine."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import get_args

from pytest_slmserve.analysis.compare import deployments
from pytest_slmserve.analysis.compare.deployments import AtBothInterfaces, Deployment
from pytest_slmserve.analysis.estimates import Interval, grouped
from pytest_slmserve.analysis.metrics.gpu_figures import GpuMemory, device_figures, memory_in_use, runs_of_each_gpu
from pytest_slmserve.analysis.points import Point, ReplicaPoint, engines, ratio
from pytest_slmserve.analysis.sweep.curve import Curve, front_ends, labels
from pytest_slmserve.analysis.verdict import above
from pytest_slmserve.report import text_table
from pytest_slmserve.report.findings import Findings, reasons, served_on, valid_cell
from pytest_slmserve.report.page import charts
from pytest_slmserve.report.section import Chart, Legend, Part, Section, Table
from pytest_slmserve.report.text_table import ABSENT, Column, changed, counted, figure, gib, hundredths, milliseconds
from pytest_slmserve.schema.errors import Sharing
from pytest_slmserve.schema.specs import GIB

SHARINGS = get_args(Sharing)
REPLICAS_LEGEND = (
    "concurrency: in all engines. tokens: of all, over the span that their windows have in common, or whole convoys of "
    "requests that start together; sum: of each over its own window, where that differs. gain: over one engine on the "
    "same host under the same load. E2E: the largest of the replicas' means, and the 99th percentile of all requests. "
    "What sensors say is of all engines together."
)
MEMORY_LEGEND = (
    "Memory: weights, KV cache: of each engine, as it told them. other: what sensors saw in use beyond them at most: "
    "activations, captured graphs, contexts, of which engine is not known. free: with what the driver keeps. other and "
    "unused: no sensor tells them apart."
)
MEMORY_TITLE = "Memory of the GPU by engine"


@dataclass(frozen=True, slots=True)
class Entry:
    """Row of the tables of replicas.

    Attributes:
        gain: throughput over that of one engine, None if unknown.
    """

    engines: str
    sharing: str
    served: Point
    gain: Interval | None = None


def _other_sum(served: Point) -> str:
    text = figure(getattr(served, "sum_tokens_per_s", None), 4)
    return ABSENT if text == figure(served.output_tokens_per_s, 4) else text


NAMES: tuple[Column[Entry], ...] = (
    Column("\nengines", lambda e: e.engines, "left"),
    Column("\nsharing", lambda e: e.sharing, "left"),
    Column("concur-\nrency", lambda e: str(e.served.concurrency)),
)
SERVED: tuple[Column[Entry], ...] = (
    Column("tokens\n/s", lambda e: figure(e.served.output_tokens_per_s, 4)),
    Column("\nsum", lambda e: _other_sum(e.served), rank=6),
    Column("gain\n%", lambda e: changed(e.gain)[0], rank=1),
    Column("95%\n", lambda e: changed(e.gain)[1], "left", rank=2),
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
    """Engines with the largest memory use of their GPUs under any load."""

    engines: str
    sharing: str
    memory: GpuMemory

    def each_gib(self, name: str) -> str:
        """Return a size of each engine, or one if all are equal: "2.45", "0.234 + 2.45"."""
        sizes = [getattr(engine, name) for engine in self.memory.engines]
        return " + ".join(map(gib, sizes[:1] if len(set(sizes)) == 1 else sizes))


MEMORY: tuple[Column[MemoryRow], ...] = (
    Column("\nengines", lambda r: r.engines, "left"),
    Column("\nsharing", lambda r: r.sharing, "left"),
    Column("weights\nGiB each", lambda r: r.each_gib("weight_bytes")),
    Column("KV cache\nGiB each", lambda r: r.each_gib("kv_bytes")),
    Column("other\nGiB", lambda r: gib(r.memory.other_bytes)),
    Column("free\nGiB", lambda r: ABSENT if r.memory.used_bytes is None else gib(r.memory.left_bytes)),
    Column("other and\nunused GiB", lambda r: gib(r.memory.left_bytes) if r.memory.used_bytes is None else ABSENT),
    Column("of\nGiB", lambda r: gib(r.memory.total_bytes)),
)
MEMORY_COLOURS = {  # of the parts, in the order of the key
    "weights": charts.BLUE,
    "KV cache": charts.SKY,
    "other": charts.YELLOW,
    "free": charts.GREY,
    "other and unused": charts.PINK,
}


def memory_chart(rows: Sequence[MemoryRow]) -> charts.Spec | None:
    """Return stacked bars of the GPU memory in GiB for each set of engines; None without rows."""
    names = [f"{row.engines}, {row.sharing}" for row in rows]
    bars: charts.Values = []
    for row, name in zip(rows, names):
        seen, subject = row.memory, name
        if names.count(name) > 1:
            subject = f"{name}, KV {row.each_gib('kv_bytes')} GiB"
        parts: list[tuple[str, str, int]] = []  # engine, part and bytes
        for number, engine in enumerate(seen.engines, 1):
            whose = f"engine {number}, {engine.model}" if len(seen.engines) > 1 else engine.model
            parts += [(whose, "weights", engine.weight_bytes), (whose, "KV cache", engine.kv_bytes)]
        parts += [] if seen.other_bytes is None else [("all", "other", seen.other_bytes)]
        parts.append(("", "other and unused" if seen.used_bytes is None else "free", seen.left_bytes))
        for whose, series, size in parts:
            part = {"subject": subject, "engine": whose, "series": series}
            bars.append(part | {"size": size / GIB, "shown": f"{gib(size)} GiB"})
    return charts.stacked_bars(bars, MEMORY_COLOURS, "GiB of the memory", "memory of the GPU by engine")


def replica_sections(curves: Sequence[Curve], shared: Sequence[ReplicaPoint]) -> Iterator[Section | Legend]:
    """Yield throughput, sensors and memory of replicas on each kind of host, then legends."""
    any_memory = False
    for points in grouped(shared, lambda p: p.environment.per_gpu_key).values():
        where = points[0].environment
        place = "" if any(point.sharing == "gpus" for point in points) else " on one device"
        title = f"Replicas{place}: {served_on(where)}"
        if where.platform == "remote":
            title = f"Replicas at URLs of their own, the first at {where.url}: what they share is not known"
        models = sorted(grouped(points, lambda p: p.model or p.models).values(), key=lambda alike: not alike[0].model)
        entries = [entry for alike in models for entry in _entries(alike, curves)]
        sensed = [entry for entry in entries if any(column.cell(entry) != ABSENT for column in SENSED)]
        seen = [MemoryRow(e.engines, e.sharing, found) for e in entries if (found := memory_in_use(e.served.used))]
        # Engines with different KV caches have separate rows.
        same = grouped(seen, lambda row: (row.engines, row.sharing, row.memory.engines, row.memory.total_bytes))
        memory = [max(rows, key=lambda row: row.memory.used_bytes or 0) for rows in same.values()]
        any_memory = any_memory or bool(memory)
        parts: list[Part] = [Table(entries, (*NAMES, *SERVED), caption="Throughput"), *_remarks(points, curves)]
        parts += [Table(sensed, (*NAMES, *SENSED), caption="Sensors"), Table(memory, MEMORY, caption=MEMORY_TITLE)]
        yield Section(title, parts, charts=partial(_replica_charts, entries, memory))
    if shared:
        yield Legend(REPLICAS_LEGEND)
    if any_memory:
        yield Legend(MEMORY_LEGEND)


def _replica_charts(entries: Sequence[Entry], memory: Sequence[MemoryRow]) -> Iterator[Chart]:
    gains: list[charts.Estimate] = []
    for each in entries:
        if gain := each.gain:
            name = f"{each.engines}, {each.sharing}, concurrency {each.served.concurrency}"
            gains.append((name, gain, 1.0, above(gain, 1.0), f"{figure(gain.value)} times"))
    drawn = charts.interval_chart(gains, "times the throughput of one engine", "gain over one engine")
    yield Chart("Gain over one engine", drawn, "Bars: 95% interval. Upright line: one engine alone.")
    yield Chart(MEMORY_TITLE, memory_chart(memory), MEMORY_LEGEND)


def _entries(points: Sequence[ReplicaPoint], curves: Sequence[Curve]) -> Iterator[Entry]:
    """Yield rows of the same models; under each load, one engine comes first if it was measured."""

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
    """Return the valid point of one engine under the load of all replicas on their host."""
    found = (curve.one_engine(shared.concurrency, shared) for curve in curves if shared in curve.shared)
    return next((point for point in found if point), None)


def deployed(point: ReplicaPoint) -> str:
    """Return how replicas share the device: "mps, pinned, 50%"."""
    part = f", {point.thread_percentage}%" if point.thread_percentage else ""
    return f"{point.sharing}{', pinned' if point.pinned else ''}{part}"


def best_deployments(found: Findings) -> Iterator[str]:
    """Yield a sentence on the deployment with the highest throughput for each set of models."""
    alike = grouped(found.shared, lambda p: (p.environment.per_gpu_key, p.models[0] if p.model else p.models))
    for group in alike.values():
        if valid := [point for point in group if point.valid]:
            best = max(valid, key=lambda p: p.output_tokens_per_s or 0.0)
            alone = alone_at(best, found.curves)
            gain = ratio(best, alone, several=len(valid)) if alone else None
            change, ends = changed(gain)
            over = f", {change}% (95%: {ends}) over one engine" if gain else ""
            rate = f"{figure(best.output_tokens_per_s, 4)} tokens/s at concurrency {best.concurrency}{over}"
            of = f"; most of {len(group)} deployments and loads" if len(group) > 1 else ""
            yield f"replicas: {engines(best.models)}, {deployed(best)}: {rate}{of}"


def _remarks(points: Sequence[ReplicaPoint], curves: Sequence[Curve]) -> Iterator[str]:
    """Yield lines on replicas that are not fully valid, and on the joint throughput of different models."""
    for point in points:
        name = f"{engines(point.models)}, {deployed(point)}"
        used = f"{len(point.repeats)} of {counted(len(point.repeats) + point.left_out, 'run')} are used"
        yield from reasons(point, f"{name}, concurrency {point.concurrency}", used)
        if point.model is not None:
            continue
        alone = []  # output tokens/s of one engine of each model, on the same kind of host and with the same requests
        for model, load in zip(point.models, point.loads):
            wanted = (model, point.environment.per_gpu_key, point.ramp_up)
            found = [
                c.one_engine(load, point)
                for c in curves
                if c.environment and c.load and (c.subject, c.environment.per_gpu_key, c.load.ramp_up) == wanted
                if point.workload is None or (c.workload and c.workload.hash == point.workload)
            ]
            alone.append(next((one.output_tokens_per_s or 0.0 for one in found if one), 0.0))
        rates = point.each_tokens_per_s
        if len(rates) == len(alone) and all(alone):
            each = ", ".join(f"{m} {figure(rate, 4)} tokens/s" for m, rate in zip(point.models, rates))
            # 1 would be the result of taking turns (system throughput: Eyerman and Eeckhout, IEEE Micro 2008).
            together = sum(rate / own for rate, own in zip(rates, alone))
            yield f"{name}: {each}; {figure(together)} times what serving one after the other would give"


# Goals of a deployment, in words and with their unit.
WISHES = {
    "requests_per_s": ("most requests/s", ""),
    "e2e_s": ("lowest E2E", " s"),
    "joules_per_request": ("fewest joules", " J/request"),
}
SEVERAL_GPUS_LEGEND = (
    "concurrency: in all engines. batch: mean sequences of an engine step, below the load where some had to wait for "
    "KV memory. gain: of tokens/s over one engine on the fewest GPUs under that load. power: of all GPUs together; "
    "imbalance: between the one that takes most and the one that takes least, over their mean."
)


def several_gpus(curves: Iterable[Curve]) -> Iterator[tuple[Curve, Sequence[Deployment]]]:
    yield from ((curve, deployments.deployments(curve)) for curve in curves if deployments.on_several_gpus(curve))


def gpus_sections(curves: Sequence[Curve]) -> Iterator[Section | Legend]:
    """Yield the deployments of each model on several GPUs, then a legend."""
    shown = [(curve, found) for curve, found in several_gpus(curves) if any(one.gpus > 1 for one in found)]
    for name, (curve, found) in zip(labels([curve for curve, _ in shown]), shown):
        waiting = (
            f"{one.concurrency} concurrent requests do not fit into the KV memory of {one.place}: "
            f"{figure(one.served.batch)} ran at once, the others waited. What more GPUs gain there is memory, not speed"
            for one in found
            if not one.fits
        )
        parts: list[Part] = [Table(found, _deployment_columns(curve, found), caption="Deployments"), *waiting]
        for wide in curve.wider:  # power and activity of each GPU under the largest load
            for largest in (point for point in wide.valid[-1:] if point.used):
                gpus = [device_figures(run) for run in runs_of_each_gpu(largest.used[0][0].run)]
                told = "; ".join(
                    f"GPU {i} {figure(g.power_w)} W, SM {hundredths(g.sm_active)}%, DRAM {hundredths(g.dram_active)}%"
                    for i, g in enumerate(gpus)
                )
                if wide.spec and any(gpu.power_w is not None for gpu in gpus):
                    parts.append(f"TP {wide.spec.tensor_parallel_size}, concurrency {largest.concurrency}: {told}")
        yield Section(f"{name} on several GPUs: {served_on(curve.environment)}", [*parts, *answers(curve, found)])
    if shown:
        yield Legend(SEVERAL_GPUS_LEGEND)


def _deployment_columns(curve: Curve, found: Sequence[Deployment]) -> tuple[Column[Deployment], ...]:
    base = {one.concurrency: one for one in reversed(found) if one.sharing is None}

    def gain(one: Deployment) -> Interval | None:
        first = base.get(one.concurrency, one)
        return None if first is one else ratio(one.served, first.served)

    return (
        Column("concur-\nrency", lambda one: str(one.concurrency)),
        Column("\nGPUs", lambda one: str(one.gpus)),
        Column("\ndeployment", deployment_name, "left"),
        Column("\nbatch", lambda one: figure(one.served.batch), rank=7),
        Column("KV\nblocks", lambda one: text_table.whole(one.kv_blocks), rank=6),
        Column("requests\n/s", lambda one: figure(requests_per_s(curve, one)), rank=4),
        Column("tokens\n/s", lambda one: figure(one.tokens_per_s, 4)),
        Column("tokens/s\nper GPU", lambda one: figure(one.tokens_per_s / one.gpus, 4), rank=4),
        Column("gain\n%", lambda one: changed(gain(one))[0], rank=1),
        Column("95%\n", lambda one: changed(gain(one))[1], "left", rank=2),
        Column("E2E s\nmean", lambda one: figure(one.served.e2e_s), rank=1),
        Column("E2E s\np99", lambda one: figure(one.served.e2e_p99_s), rank=5),
        Column("power\nW", lambda one: figure(one.served.power_w), rank=3),
        Column("imbal-\nance %", lambda one: hundredths(one.served.power_imbalance), rank=8),
        Column("J/\nrequest", lambda one: figure(joules_per_request(curve, one)), rank=2),
        Column("\nvalid", lambda one: valid_cell(one.served), "left"),
    )


def deployment_name(one: Deployment) -> str:
    """Return a name: "one engine, TP 2", "2 replicas, a GPU each" or "2 replicas, mps"."""
    parallel = "" if one.tensor_parallel_size == 1 else f", TP {one.tensor_parallel_size}"
    if one.sharing is None:
        return f"one engine{parallel}"
    how = "a GPU each" if one.sharing == "gpus" else str(one.sharing)
    return f"{one.engines} replicas, {how}{parallel}"


def requests_per_s(curve: Curve, one: Deployment) -> float | None:
    """Return requests/s, by the mean output tokens of a request."""
    return one.tokens_per_s / curve.workload.mean_output_tokens if curve.workload else None


def joules_per_request(curve: Curve, one: Deployment) -> float | None:
    """Return joules per request, by the mean output tokens of a request."""
    per_token = one.served.energy_per_token_j
    return None if per_token is None or curve.workload is None else per_token * curve.workload.mean_output_tokens


def answers(curve: Curve, found: Sequence[Deployment]) -> Iterator[str]:
    """Yield the best deployment by each goal for each number of GPUs and load, if there was a choice."""
    for gpus, load, best in best_on_several(curve, found):
        wishes = [
            f"{WISHES[wish][0]}: {deployment_name(one)} ({figure(value)}{WISHES[wish][1]})"
            for wish, (one, value) in best.items()
        ]
        yield f"{gpus} GPUs, concurrency {load}: {'; '.join(wishes)}"


def best_on_several(
    curve: Curve, found: Sequence[Deployment]
) -> Iterator[tuple[int, int, dict[str, tuple[Deployment, float | None]]]]:
    """Yield GPUs, load, and the best deployment by each goal, if there is a choice.

    Latency and energy are omitted unless all deployments have them.
    """
    several = grouped((one for one in found if one.gpus > 1), lambda one: (one.gpus, one.concurrency))
    for (gpus, load), choices in sorted(several.items(), key=itemgetter(0)):
        if len(choices) < 2:
            continue
        most = max(choices, key=lambda one: one.tokens_per_s)
        best: dict[str, tuple[Deployment, float | None]] = {"requests_per_s": (most, requests_per_s(curve, most))}
        costs = {
            "e2e_s": [one.served.e2e_s for one in choices],
            "joules_per_request": [joules_per_request(curve, one) for one in choices],
        }
        for wish, values in costs.items():
            known = [(value, i) for i, value in enumerate(values) if value is not None]
            if len(known) == len(choices):
                best[wish] = choices[min(known)[1]], min(known)[0]
        yield gpus, load, best


INTERFACES_LEGEND = (
    "Interfaces: the same engine, requests and load, without HTTP and through the server. change: of output tokens/s. "
    "prompt steps: steps that processed a prompt: the fewer there are, the more prompts came together. own "
    "cores: CPU time of engine, server and client per second. A launch has luck of its own, so what one launch of each "
    "interface shows is of these launches."
)
INTERFACES: tuple[Column[AtBothInterfaces], ...] = (
    Column("concur-\nrency", lambda at: str(at.engine.concurrency)),
    Column("tokens/s\nengine", lambda at: figure(at.engine.output_tokens_per_s, 4)),
    Column("tokens/s\nserver", lambda at: figure(at.server.output_tokens_per_s, 4)),
    Column("change\n%", lambda at: changed(at.ratio)[0]),
    Column("95%\n", lambda at: changed(at.ratio)[1], rank=1),
    Column("TTFT ms\nengine", lambda at: milliseconds(at.engine.ttft_s), rank=2),
    Column("TTFT ms\nserver", lambda at: milliseconds(at.server.ttft_s), rank=2),
    Column("TPOT ms\nengine", lambda at: milliseconds(at.engine.tpot_s), rank=3),
    Column("TPOT ms\nserver", lambda at: milliseconds(at.server.tpot_s), rank=3),
    Column("step ms\nengine", lambda at: milliseconds(at.engine.step_s), rank=5),
    Column("step ms\nserver", lambda at: milliseconds(at.server.step_s), rank=5),
    Column("prompt steps\n% engine", lambda at: hundredths(at.prompt_steps[0]), rank=6),
    Column("prompt steps\n% server", lambda at: hundredths(at.prompt_steps[1]), rank=6),
    Column("own cores\nengine", lambda at: figure(at.engine.own_cores), rank=4),
    Column("own cores\nserver", lambda at: figure(at.server.own_cores), rank=4),
)


def interfaces_sections(curves: Sequence[Curve]) -> Iterator[Section | Legend]:
    """Yield each model that was measured through both interfaces, then a legend."""
    found = deployments.at_both_interfaces(curves)
    for engine, server, loads in found:
        launches = " and ".join(counted(len(curve.resolved), "launch") for curve in (engine, server))
        through = f"{server.subject} through the server{front_ends(server.spec)} beside the engine"
        title = f"{through}: {served_on(server.environment)}, {launches}"
        yield Section(title, [Table(loads, INTERFACES, caption=through)])
    if found:
        yield Legend(INTERFACES_LEGEND)
