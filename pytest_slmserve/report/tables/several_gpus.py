"""Several GPUs and one model: a row for each way to deploy it, under the same requests in flight in all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from pytest_slmserve.analysis.compare.deployments import Deployment, deployments, on_several_gpus, speedup
from pytest_slmserve.analysis.device.gpu_figures import figures_of_each_gpu
from pytest_slmserve.analysis.points.sweep_points import Point
from pytest_slmserve.analysis.stats.estimates import Interval
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.labels import labels
from pytest_slmserve.report.numbers import ABSENT, change, changes, counted, figure, hundredths, whole
from pytest_slmserve.report.tables.findings import served_on
from pytest_slmserve.report.tables.valid_column import valid_cell
from pytest_slmserve.report.text_table import Column, hanging, table

# What one may wish of a deployment, in words, and its unit.
WISHES = {
    "requests_per_s": ("most requests/s", ""),
    "e2e_s": ("lowest E2E", " s"),
    "joules_per_request": ("fewest joules", " J/request"),
}
LEGEND = (
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
        yield hanging(LEGEND, 0)


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
        Column("\ndeployment", name_of, "left"),
        Column("\nbatch", lambda one: figure(one.served.batch) if isinstance(one.served, Point) else ABSENT, rank=7),
        Column("KV\nblocks", lambda one: whole(one.kv_blocks), rank=6),
        Column("requests\n/s", lambda one: figure(requests_per_s(curve, one)), rank=4),
        Column("tokens\n/s", lambda one: figure(one.tokens_per_s, 4)),
        Column("tokens/s\nper GPU", lambda one: figure(one.tokens_per_s / one.gpus, 4), rank=4),
        Column("gain\n%", lambda one: change(gain(one)), rank=1),
        Column("95 %\n", lambda one: changes(gain(one)), "left", rank=2),
        Column("E2E s\nmean", lambda one: figure(one.e2e_s), rank=1),
        Column("E2E s\np99", lambda one: figure(one.served.e2e_p99_s), rank=5),
        Column("power\nW", lambda one: figure(one.served.power_w), rank=3),
        Column("imbal-\nance %", lambda one: hundredths(one.served.power_imbalance), rank=8),
        Column("J/\nrequest", lambda one: figure(joules_per_request(curve, one)), rank=2),
        Column("\nvalid", lambda one: valid_cell(one.served), "left"),
    )
    return table(found, columns)


def name_of(one: Deployment) -> str:
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
            f"{WISHES[wish][0]}: {name_of(one)} ({figure(value)}{WISHES[wish][1]})"
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
