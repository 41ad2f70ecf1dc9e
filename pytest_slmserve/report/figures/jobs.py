"""Pictures of jobs: output length against arrivals, models of one size, batch limits, KV blocks, ways to batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from pytest_slmserve.analysis.claims.job_claims import SIZED_AS, caches_of, grid_of, kv_blocks, limits_of, ways_of
from pytest_slmserve.analysis.points import CONTINUOUS, JobPoint
from pytest_slmserve.analysis.stats.estimates import grouped
from pytest_slmserve.report.figures import drawing

STROKES = ("-", "--", ":", "-.")
_length, _limit, _rate = attrgetter("output_tokens"), attrgetter("spec.max_num_seqs"), attrgetter("load.rate")
Figure = Callable[[JobPoint], Any]
BATCHINGS = ("none", "static", "dynamic", CONTINUOUS)


def job_pictures(jobs: Sequence[JobPoint]) -> list[drawing.Picture]:
    """The pictures of jobs for which there are valid jobs to draw."""
    valid = [job for job in jobs if job.valid]
    lengths = _by_model(valid, grid_of, _length)
    others = [group for group in lengths if group[0].model not in SIZED_AS]
    # Models that are compared for their size, all at once, beside their reference.
    sized = {*SIZED_AS, *SIZED_AS.values()} if len(others) < len(lengths) else ()
    of_one_size = [[p for p in group if p.load.at_once] for group in lengths if group[0].model in sized]
    drawn = [
        ("output-length", others, _lengths),
        ("models-of-one-size", of_one_size, _lengths),
        ("batch-limit", _by_model(valid, limits_of, _limit), _limits),
        ("kv-blocks", _by_model(valid, caches_of, lambda p: p.kv_blocks), _blocks),
        ("batching", _by_model(valid, ways_of, lambda p: p.batching), _batchings),
    ]
    return [draw(name, groups) for name, groups, draw in drawn if groups]


def _by_model(
    jobs: Sequence[JobPoint], chosen: Callable[[Sequence[JobPoint]], list[JobPoint]], varied: Callable[[JobPoint], Any]
) -> list[list[JobPoint]]:
    """Comparable jobs of each model and host, kept where the drawn quantity takes more than one value."""
    groups = [chosen(group) for group in grouped(jobs, lambda p: (p.model, p.environment.key)).values()]
    return [group for group in groups if len({varied(p) for p in group}) > 1]


def _hosts(groups: Sequence[Sequence[JobPoint]]) -> list[str]:
    return [drawing.origin(p.environment) for group in groups for p in group]


def _line(
    number: int, points: Sequence[JobPoint], x: Figure, y: Figure, name: str, stroke: str = "-"
) -> drawing.Series:
    """Line of the model of that number."""
    return drawing.Series(name, *drawing.look(number), [(x(p), y(p), False) for p in points], stroke, width=1.5)


def _lengths(name: str, groups: Sequence[Sequence[JobPoint]]) -> drawing.Picture:
    """Requests/s and mean E2E against the output length, a line for each model and rate (arXiv:2404.03353, fig. 2)."""
    served, waited = [], []
    for number, group in enumerate(groups):
        by_rate = grouped(sorted(group, key=_rate, reverse=True), _rate)
        for stroke, points in zip(STROKES, by_rate.values()):
            ordered = sorted(points, key=_length)
            label = f"{ordered[0].model}, {ordered[0].load.pace}"
            served.append(_line(number, ordered, _length, lambda p: p.requests_per_s, label, stroke))
            waited.append(_line(number, ordered, _length, lambda p: p.e2e_s, label, stroke))

    def finish(axes: Any) -> None:
        ticks = sorted({_length(p) for group in groups for p in group})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [drawing.plain(tick) for tick in ticks])
        axes.minorticks_off()
        drawing.decade_axis(axes, axes.yaxis)

    x = "output tokens of a request"
    drawn = [drawing.Panel(served, finish, x, "requests/s"), drawing.Panel(waited, finish, x, "mean E2E latency, s")]
    return drawing.picture(name, _hosts(groups), drawn)


def _limits(name: str, groups: Sequence[Sequence[JobPoint]]) -> drawing.Picture:
    """Throughput and mean E2E against `max_num_seqs`, all requests at once (arXiv:2404.03353, figure 1)."""
    several = len({p.environment.gpu_name for group in groups for p in group}) > 1
    names = [f"{g[0].model}, {g[0].environment.gpu_name}" if several else g[0].model for g in groups]
    served, waited = (
        [_line(n, group, _limit, y, name) for n, (group, name) in enumerate(zip(groups, names, strict=True))]
        for y in (lambda p: p.output_tokens_per_s, lambda p: p.e2e_s)
    )

    x = "max_num_seqs"
    drawn = [
        drawing.Panel(served, _from_zero, x, "output tokens/s"),
        drawing.Panel(waited, _from_zero, x, "mean E2E latency, s"),
    ]
    return drawing.picture(name, _hosts(groups), drawn)


def _from_zero(axes: Any) -> None:
    """Sets a logarithmic x with plain numbers, and y from 0 on."""
    drawing.log_axis(axes, axes.xaxis, base=2)
    axes.yaxis.set_major_formatter(drawing.plain)
    axes.set_ylim(bottom=0)


def _blocks(name: str, groups: Sequence[Sequence[JobPoint]]) -> drawing.Picture:
    """Throughput, and the batch with the preemptions, against the number of KV blocks; dashed: all requests fit."""
    served, batch, fitting = [], [], []
    for number, group in enumerate(groups):
        ordered = sorted(group, key=kv_blocks)
        model = ordered[0].model
        served.append(_line(number, ordered, kv_blocks, lambda p: p.output_tokens_per_s, model))
        batch.append(_line(number, ordered, kv_blocks, lambda p: p.batch, model))
        batch.append(_line(number, ordered, kv_blocks, lambda p: p.preemptions or 0.0, "preemptions", ":"))
        fitting += [kv_blocks(p) for p in ordered if p.fits][:1]

    def finish(axes: Any) -> None:
        for blocks in fitting:
            axes.axvline(blocks, color=drawing.GREY, linewidth=1, linestyle="--")
        _from_zero(axes)

    drawn = [
        drawing.Panel(served, finish, "KV blocks (dashed: all requests fit)", "output tokens/s"),
        drawing.Panel(batch, finish, "KV blocks", "requests in the engine, preemptions"),
    ]
    return drawing.picture(name, _hosts(groups), drawn)


def _batchings(name: str, groups: Sequence[Sequence[JobPoint]]) -> drawing.Picture:
    """Throughput and mean E2E of each way to batch the same requests, a group of bars for each rate."""
    figure, (served, waited) = drawing.panels(_hosts(groups), 2)
    bars = [p for group in groups for p in sorted(group, key=lambda p: (-p.load.rate, BATCHINGS.index(p.batching)))]
    names = [f"{p.batching}\n{p.load.pace}" for p in bars]
    colours = [drawing.COLOURS[BATCHINGS.index(p.batching)] for p in bars]
    served.bar(range(len(bars)), [p.output_tokens_per_s for p in bars], color=colours)
    waited.bar(range(len(bars)), [p.e2e_s for p in bars], color=colours)
    drawing.dress(served, ", ".join(dict.fromkeys(p.model for p in bars)), "output tokens/s")
    drawing.dress(waited, "", "mean E2E latency, s")
    for axes in (served, waited):
        axes.set_xticks(range(len(bars)), names, fontsize=7)
    return drawing.Picture(name, figure)
