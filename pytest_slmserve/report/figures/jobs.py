"""Pictures of jobs: output length against arrivals, models of one size, KV blocks, ways to batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytest_slmserve.analysis.claims.job_claims import SIZED_AS, caches_of, grid_of, kv_blocks, ways_of
from pytest_slmserve.analysis.points.job_points import CONTINUOUS, JobPoint, grouped
from pytest_slmserve.report.figures.drawing import (
    COLOURS,
    GREY,
    MARKERS,
    Picture,
    dress,
    key_below,
    panels_of,
    plain,
    where_of,
)

STROKES = ("-", "--", ":", "-.")
BATCHINGS = ("none", "static", "dynamic", CONTINUOUS)


def job_pictures(jobs: Sequence[JobPoint]) -> list[Picture]:
    """Those that there are jobs for."""
    valid = [job for job in jobs if job.valid]
    lengths = _by_model(valid, grid_of, lambda p: p.output_tokens)
    drawn = [
        ("output-length", [group for group in lengths if group[0].model not in SIZED_AS], _lengths),
        ("models-of-one-size", _of_one_size(lengths), _lengths),
        ("kv-blocks", _by_model(valid, caches_of, lambda p: p.kv_blocks), _blocks),
        ("batching", _by_model(valid, ways_of, lambda p: p.batching), _batchings),
    ]
    return [Picture(name, draw(groups)) for name, groups, draw in drawn if groups]


def _by_model(
    jobs: Sequence[JobPoint],
    chosen: Callable[[Sequence[JobPoint]], list[JobPoint]],
    varied: Callable[[JobPoint], Any],
) -> list[list[JobPoint]]:
    """Of each model the jobs that belong together, where they differ in what is drawn."""
    groups = [chosen(group) for group in grouped(jobs, lambda p: (p.model, p.environment.key))]
    return [group for group in groups if len({varied(p) for p in group}) > 1]


def _of_one_size(groups: Sequence[list[JobPoint]]) -> list[list[JobPoint]]:
    """Models that are compared for their size, all at once, beside what they are compared with; none where there is
    only that."""
    if not any(group[0].model in SIZED_AS for group in groups):
        return []
    sized = {*SIZED_AS, *SIZED_AS.values()}
    return [[p for p in group if p.load.rate is None] for group in groups if group[0].model in sized]


def _panels(groups: Sequence[Sequence[JobPoint]], count: int = 2) -> tuple[Any, list[Any]]:
    return panels_of([where_of(p.environment) for group in groups for p in group], count)


def _look(number: int) -> dict[str, Any]:
    many = len(COLOURS)
    return {"color": COLOURS[number % many], "marker": MARKERS[number // many % len(MARKERS)], "markersize": 4}


def _lengths(groups: Sequence[Sequence[JobPoint]]) -> Any:
    """Requests/s and mean E2E against the output length, a line for each model and rate (arXiv:2404.03353, fig. 2)."""
    figure, (served, waited) = _panels(groups)
    for number, group in enumerate(groups):
        for stroke, points in zip(STROKES, grouped(sorted(group, key=_fastest), lambda p: p.load.rate)):
            ordered = sorted(points, key=lambda p: p.output_tokens)
            rate = ordered[0].load.rate
            label = f"{ordered[0].model}, {'all at once' if rate is None else f'{rate:g}/s'}"
            lengths = [p.output_tokens for p in ordered]
            served.plot(lengths, [p.requests_per_s for p in ordered], label=label, linestyle=stroke, **_look(number))
            waited.plot(lengths, [p.e2e_s for p in ordered], linestyle=stroke, **_look(number))
    dress(served, "output tokens of a request", "requests/s")
    dress(waited, "output tokens of a request", "mean E2E latency, s")
    for axes in (served, waited):
        _logarithmic(axes, sorted({p.output_tokens for group in groups for p in group}))
    key_below(figure)
    return figure


def _fastest(point: JobPoint) -> float:
    return float("-inf") if point.load.rate is None else -point.load.rate


def _blocks(groups: Sequence[Sequence[JobPoint]]) -> Any:
    """Throughput, and the batch with the preemptions, against the number of KV blocks; dashed: all requests fit."""
    figure, (served, batch) = _panels(groups)
    for number, group in enumerate(groups):
        ordered = sorted(group, key=kv_blocks)
        blocks = [kv_blocks(p) for p in ordered]
        served.plot(blocks, [p.output_tokens_per_s for p in ordered], label=ordered[0].model, **_look(number))
        batch.plot(blocks, [p.batch for p in ordered], label=ordered[0].model, **_look(number))
        preempted = [p.preemptions or 0.0 for p in ordered]
        batch.plot(blocks, preempted, label="preemptions", linestyle=":", **_look(number))
        if fitting := [p for p in ordered if p.fits]:
            for axes in (served, batch):
                axes.axvline(kv_blocks(fitting[0]), color=GREY, linewidth=1, linestyle="--")
    dress(served, "KV blocks (dashed: all requests fit)", "output tokens/s")
    dress(batch, "KV blocks", "requests in the engine, preemptions")
    for axes in (served, batch):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(plain)
        axes.yaxis.set_major_formatter(plain)
        axes.set_ylim(bottom=0)
    key_below(figure)
    return figure


def _batchings(groups: Sequence[Sequence[JobPoint]]) -> Any:
    """Throughput and mean E2E of each way to batch the same requests, a group of bars for each rate."""
    figure, (served, waited) = _panels(groups)
    bars = [p for group in groups for p in sorted(group, key=lambda p: (_fastest(p), BATCHINGS.index(p.batching)))]
    names = [f"{p.batching}\n{'at once' if p.load.rate is None else f'{p.load.rate:g}/s'}" for p in bars]
    colours = [COLOURS[BATCHINGS.index(p.batching)] for p in bars]
    served.bar(range(len(bars)), [p.output_tokens_per_s for p in bars], color=colours)
    waited.bar(range(len(bars)), [p.e2e_s for p in bars], color=colours)
    dress(served, ", ".join(dict.fromkeys(p.model for p in bars)), "output tokens/s")
    dress(waited, "", "mean E2E latency, s")
    for axes in (served, waited):
        axes.set_xticks(range(len(bars)), names, fontsize=7)
    return figure


def _logarithmic(axes: Any, ticks: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [plain(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(plain)
    low, high = axes.get_ylim()
    if high < 10 * low:  # within a decade there may be no major tick
        axes.yaxis.set_minor_formatter(plain)
