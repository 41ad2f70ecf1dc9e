"""Picture of a gate: the ratio of the sides in each pair and over all, against the margin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_slmserve.analysis.gate.decision import Comparison, PairSeries
from pytest_slmserve.analysis.gate.launch_pairs import SIDES, Gated, gated_series, nothing_counts, shown_series
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.report.figures.drawing import COLOURS, GREY, Picture, dress, key_below, panels, where_of
from pytest_slmserve.report.gate.text import WORDS, title

COLOUR = {State.PASSES: COLOURS[2], State.FAILS: COLOURS[1], State.INCONCLUSIVE: COLOURS[5]}
BETTER = {"higher": "\u2191", "lower": "\u2193"}
X = "candidate / baseline (\u2191 higher is better, \u2193 lower is better)"
BELOW = 0.25  # of a row: how far the pairs lie under their ratio


def gate_pictures(gates: Sequence[Gated]) -> list[Picture]:
    """A picture for each gate, or the reason why no pair of it counts. Raises BadUsage without matplotlib."""
    often = Counter(gated.model for gated in gates)
    return [_drawn(f"gate-{g.model}{f'-{g.gate}' if often[g.model] > 1 else ''}", g) for g in gates]


def _drawn(name: str, gated: Gated) -> Picture:
    rows = [each for each in (*gated.gated, *gated.shown) if each.ratio]
    if not rows:
        return Picture(name, None, nothing_counts(gated.dropped))
    figure, (axes,) = panels([where_of(gated.pairs[0].baseline.measurements[0].environment)], 1)
    first = gated.pairs[0]
    baseline, candidate = (first.launch(side).measurements[0].environment.vllm for side in SIDES)
    compared = f"vLLM {candidate} against {baseline}" if baseline != candidate else f"vLLM {baseline} on both sides"
    dress(axes, X, title="\n".join([title(gated), *([compared] if baseline and candidate else [])]))
    series = {each.name: each for each in (*gated_series(gated.pairs), *shown_series(gated.pairs))}
    for row, each in enumerate(rows):
        _draw_row(axes, row, each, series[each.name], is_gated=each in gated.gated)
    axes.axvline(1, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [f"{each.name} {BETTER[each.better]}" for each in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first one on top
    axes.set_xlim(*_limits(rows, series))
    axes.errorbar([], [], [], color=GREY, fmt="o", markersize=5, capsize=3, label="ratio, with its 95 % interval")
    axes.plot([], [], "o", color=GREY, markersize=3, fillstyle="none", label="one pair of launches")
    axes.plot([], [], "|", color="black", markersize=9, markeredgewidth=1.5, label="margin")
    key_below(figure)
    return Picture(name, figure)


def _limits(rows: Sequence[Comparison], series: Mapping[str, PairSeries]) -> tuple[float, float]:
    """Ends of the x axis: every pair and every margin is in the picture, an interval may go on beyond it."""
    at = [ratio for each in rows for ratio in (*ratios(series[each.name]), margin_at(each))]
    room = 0.05 * (max(at) - min(at))
    return min(at) - room, max(at) + room


def ratios(series: PairSeries) -> list[float]:
    return [after / before for before, after in series.pairs if before and after is not None]


def margin_at(seen: Comparison) -> float:
    """The ratio at which the candidate costs more by the margin."""
    return 1 + seen.margin if seen.better == "lower" else 1 / (1 + seen.margin)


def _draw_row(axes: Any, row: int, seen: Comparison, series: PairSeries, is_gated: bool) -> None:
    """The ratio with its interval, the pairs under it, and for what is gated the margin and the outcome."""
    colour = COLOUR[seen.outcome] if is_gated else GREY
    pairs = ratios(series)
    axes.plot(pairs, [row + BELOW] * len(pairs), "o", color=colour, markersize=3, fillstyle="none")
    assert seen.ratio
    axes.plot(seen.ratio.value, row, "o", color=colour, markersize=5)
    if seen.ratio.low is not None and seen.ratio.high is not None:
        ends = [[seen.ratio.value - seen.ratio.low], [seen.ratio.high - seen.ratio.value]]
        axes.errorbar(seen.ratio.value, row, xerr=ends, fmt="none", ecolor=colour, elinewidth=1.5, capsize=3)
    if is_gated:
        axes.plot([margin_at(seen)] * 2, [row - 0.35, row + 0.35], color="black", linewidth=1.5)
        axes.text(1.01, row, WORDS[seen.outcome], color=colour, transform=axes.get_yaxis_transform(), va="center")
