"""What several engines on one device served: a row for each set of them, below one engine alone under that load."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar, get_args

from pytest_slmserve.analysis.points.replica_points import SharedPoint, engines, gain_over, system_throughput
from pytest_slmserve.analysis.points.sweep_points import Point
from pytest_slmserve.analysis.stats.estimates import Interval
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.report.numbers import ABSENT, counted, figure, hundredths, milliseconds
from pytest_slmserve.report.tables.valid_column import valid_cell
from pytest_slmserve.report.text_table import grid, hanging
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.literals import Sharing

NAMES = ("\nengines", "\nsharing", "in\nflight")
SERVED = ("tokens\n/s", "\nsum", "gain\n%", "95 %\n", "E2E s\nlargest", "\np99", "\nvalid")
SENSED = (
    "GPU\nutil %",
    "busy\n%",
    "SM\n%",
    "DRAM\n%",
    "tensor\n%",
    "power\nW",
    "mJ/\ntoken",
    "cap\n%",
    "own\ncores",
)
WORDS = {"\nengines", "\nsharing", "95 %\n", "\nvalid"}
SHARINGS = get_args(Sharing)
LEGEND = (
    "in flight: in all engines. tokens: of all, over the span that their windows have in common; sum: of each over its "
    "own window, where that differs. gain: over one engine under the same load. E2E: the largest of the replicas' "
    "means, and the 99th percentile of all requests. What sensors say is of all engines together."
)

Row = tuple[str, ...]
Entry = tuple[Row, Point | SharedPoint, Row]  # names, of what, what it served
Thing = TypeVar("Thing")


def replica_report(curves: Sequence[Curve], shared: Sequence[SharedPoint]) -> Iterator[str]:
    """What was served and what the sensors saw, two tables for each kind of host, and how to read them; nothing where
    no replicas were measured. One model's rows are together; sets of different models come last."""
    for points in _grouped(shared, lambda p: p.environment.per_gpu_key):
        entries = [
            entry
            for alike in sorted(_grouped(points, lambda p: p.model or p.models), key=lambda alike: not alike[0].model)
            for entry in _entries(alike, curves)
        ]
        served = _table(SERVED, [(names, row) for names, _, row in entries])
        sensed = _table(SENSED, [(names, row) for names, point, _ in entries if any(row := _sensed(point))])
        remarks = list(_remarks(points, curves))
        title = _title(points)
        yield "\n".join([title, "", served, *remarks, *(("", sensed) if sensed else ())])
    if shared:
        yield hanging(LEGEND, 0)


def _grouped(things: Iterable[Thing], key: Callable[[Thing], Hashable]) -> list[list[Thing]]:
    """Lists of equal keys, in the order first met."""
    found: dict[Hashable, list[Thing]] = {}
    for thing in things:
        found.setdefault(key(thing), []).append(thing)
    return list(found.values())


def _title(points: Sequence[SharedPoint]) -> str:
    where = points[0].environment
    if where.backend == "remote":
        return f"Replicas at URLs of their own, the first at {where.url}: what they share is not known"
    place = "" if any(point.sharing == "gpus" for point in points) else " on one device"
    return f"Replicas{place}: {_where(where)}"


def _where(where: Environment) -> str:
    device = where.gpu_name or where.cpu or where.backend or "unknown device"
    return f"{device}, vLLM {where.vllm}" if where.vllm else device


def _table(columns: Sequence[str], rows: Sequence[tuple[Row, Row]]) -> str:
    """Names and figures of each row, the columns left out in which nothing is known; empty without rows."""
    kept = [i for i in range(len(columns)) if any(row[i] not in ("", ABSENT) for _, row in rows)]
    shown = [*NAMES, *(columns[i] for i in kept)]
    sides = ["left" if name in WORDS else "right" for name in shown]
    return grid([[*names, *(row[i] for i in kept)] for names, row in rows], shown, sides) if kept else ""


def _entries(points: Sequence[SharedPoint], curves: Sequence[Curve]) -> Iterator[Entry]:
    """Of one model, or one set of them: under each load one engine alone first, where it was measured."""
    for under in _grouped(points, lambda p: (p.concurrency, p.workload, p.starts)):
        alone = alone_at(under[0], curves)
        if alone:
            yield (under[0].models[0], "alone", str(alone.concurrency)), alone, _alone(alone)
        for point in sorted(under, key=_place):
            yield (engines(point.models), _how(point), str(point.concurrency)), point, _served(point, alone)


def _place(point: SharedPoint) -> tuple[int, bool, int, int]:
    return SHARINGS.index(point.sharing), point.pinned, point.thread_percentage or 0, point.count


def alone_at(shared: SharedPoint, curves: Sequence[Curve]) -> Point | None:
    """One engine under the load of all the replicas, where it was measured and is valid."""
    found = (curve.one_engine(shared.concurrency) for curve in curves if shared in curve.shared)
    return next((point for point in found if point), None)


def _alone(point: Point) -> Row:
    rate = figure(point.output_tokens_per_s, 4)
    return rate, ABSENT, ABSENT, ABSENT, figure(point.e2e_s), figure(point.e2e_p99_s), valid_cell(point)


def _served(point: SharedPoint, alone: Point | None) -> Row:
    gain = gain_over(alone, point) if alone and point.valid else None
    return (
        figure(point.output_tokens_per_s, 4),
        figure(point.sum_tokens_per_s if _differs(point) else None, 4),
        hundredths(None if gain is None else gain.value - 1, signed=True),
        _interval(gain),
        figure(point.largest_e2e_s),
        figure(point.e2e_p99_s),
        valid_cell(point),
    )


def _sensed(point: Point | SharedPoint) -> Row:
    """Empty where no sensor said anything."""
    row = (
        hundredths(point.gpu_util),
        hundredths(point.engine_active),
        hundredths(point.sm_active),
        hundredths(point.dram_active),
        hundredths(point.tensor_active),
        figure(point.power_w),
        milliseconds(point.energy_per_token_j),
        hundredths(point.power_capped),
        figure(point.own_cores),
    )
    return row if any(text != ABSENT for text in row) else ()


def _how(point: SharedPoint) -> str:
    part = f", {point.thread_percentage} %" if point.thread_percentage else ""
    return f"{point.sharing}{', pinned' if point.pinned else ''}{part}"


def _differs(point: SharedPoint) -> bool:
    """Is the paper's sum another number, to the digits shown?"""
    return figure(point.sum_tokens_per_s, 4) != figure(point.output_tokens_per_s, 4)


def _interval(gain: Interval | None) -> str:
    if gain is None or gain.low is None or gain.high is None:
        return ABSENT
    return f"{hundredths(gain.low - 1, signed=True)} to {hundredths(gain.high - 1, signed=True)}"


def _remarks(points: Sequence[SharedPoint], curves: Sequence[Curve]) -> Iterator[str]:
    for point in points:
        name = f"{engines(point.models)}, {_how(point)}, {point.concurrency} in flight"
        if point.left_out or not point.valid:
            kind = "left out" if point.valid else "INVALID"
            seen = f"{len(point.repeats)} of {counted(len(point.repeats) + point.left_out, 'run')} are used"
            yield hanging(f"{kind}: {name}: {': '.join(filter(None, [seen, '; '.join(point.problems)]))}", 2)
        if point.degraded:
            yield hanging(f"degraded: {name}: {'; '.join(point.degraded)}", 2)
        if point.model is None and (text := _turns(point, curves)):
            yield hanging(f"{engines(point.models)}, {_how(point)}: {text}", 2)


def _turns(point: SharedPoint, curves: Sequence[Curve]) -> str:
    """Of different models: what they serve together, in units of what each serves alone under its own load."""
    own = [_rate_alone(model, load, point, curves) for model, load in zip(point.models, point.loads)]
    together = system_throughput(point, [rate or 0.0 for rate in own])
    if together is None:
        return ""
    each = ", ".join(f"{m} {figure(rate, 4)} tokens/s" for m, rate in zip(point.models, point.each_tokens_per_s))
    return f"{each}; {figure(together)} times what taking turns would give"


def _rate_alone(model: str, load: int, beside: SharedPoint, curves: Sequence[Curve]) -> float | None:
    """Output tokens/s of one engine alone, on the same kind of host and with the same requests."""
    here = (model, beside.environment.per_gpu_key, beside.starts)
    alike = (
        c for c in curves if c.environment and c.load and (c.subject, c.environment.per_gpu_key, c.load.starts) == here
    )
    mine = (c for c in alike if beside.workload is None or (c.workload and c.workload.hash == beside.workload))
    return next((point.output_tokens_per_s for c in mine if (point := c.one_engine(load))), None)
