"""Gate whose sides share one GPU, computed from its records: launches of both sides, whose windows alternate."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from statistics import fmean

from pytest_slmserve.analysis.estimates import Interval, grouped, student_interval
from pytest_slmserve.analysis.gate.decision import TOGETHER as LOOKS, GateCriteria, compare_sides, gate
from pytest_slmserve.analysis.gate.launch_pairs import (
    BUSY,
    CORES,
    SHARE,
    SHOWN_TOGETHER,
    SIDES,
    SMALL,
    TOGETHER,
    Endpoint,
    Gated,
    Launch,
    PairOfLaunches,
    firsts_of,
    has_one_load,
    outputs_kept,
)
from pytest_slmserve.analysis.gate.side_by_side import (
    COMMITTED,
    COMMITTED_CORES,
    FIRST_PAIRS,
    THROWN_AWAY,
    Allowance,
    WindowSeries,
    host_decides,
    pairs_wanted,
)
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.points import Summary, summarize
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import GateLaunch, Measurement

PairOfWindows = tuple[Measurement, Measurement]  # baseline, candidate
UNCOUNTED = "all busy seconds: they were counted in too few windows, so the other figures decide"


def part_of(window: Measurement) -> GateLaunch:
    assert window.paired is not None
    return window.paired


def figures_of(window: Measurement) -> Summary:
    """Return the figures of a window, with its busy seconds as counted between idle moments.

    The sensors' share of a short window is wrong by several percent, except on a simulated GPU.
    """
    seen, busy_s = summarize(window), part_of(window).busy_s
    if window.environment.platform == "simulated":
        return seen
    if not busy_s or seen.output_tokens_per_s is None:
        return replace(seen, tokens_per_busy_s=None, engine_active=None)
    seconds = window.run.window_s[1] - window.run.window_s[0]
    return replace(seen, tokens_per_busy_s=seen.output_tokens_per_s * seconds / busy_s, engine_active=busy_s / seconds)


def windows_that_count(
    windows: Iterable[Measurement], counted: bool | None = None
) -> tuple[list[PairOfWindows], list[str]]:
    """Return the pairs of windows of one load in one launch that count, and the reasons why others do not.

    Args:
        counted: whether windows need counted busy seconds; None: if any window has them.
    """
    numbered = grouped(windows, lambda m: part_of(m).window or 0)
    if counted is None:
        counted = any(part_of(m).busy_s is not None for members in numbered.values() for m in members)
    found, dropped = list[PairOfWindows](), list[str]()
    for number, members in sorted(numbered.items()):
        sides = {part_of(m).side: m for m in members}
        if number <= THROWN_AWAY or len(sides) < len(SIDES):
            continue
        problems = [f"{side}: {text}" for side in SIDES for text in chain(*check(sides[side])[:2])]
        if counted:
            uncounted = (side for side in SIDES if not part_of(sides[side]).busy_s)
            problems += [f"{side}: its busy seconds were not counted" for side in uncounted]
        if problems:
            dropped.append(f"windows {number}: {problems[0]}")
        else:
            found.append((sides["baseline"], sides["candidate"]))
    return found, dropped


def launches_that_count(
    measurements: Sequence[Measurement],
) -> tuple[tuple[PairOfLaunches, ...], tuple[str, ...]]:
    """Return the launches with enough windows at each load, and the reasons why others or windows do not count.

    If a launch was repeated, the last one counts. If busy seconds were counted, but in too few windows of the launches,
    all windows are used, without tokens per busy second.
    """
    found, dropped = _launches_that_count(measurements)
    if len(found) < LOOKS[0] and any(part_of(m).busy_s is not None for m in measurements):
        whole, others = _launches_that_count(measurements, counted=False)
        if len(whole) > len(found):
            return whole, (UNCOUNTED, *others)
    return found, dropped


def _launches_that_count(
    measurements: Sequence[Measurement], counted: bool | None = None
) -> tuple[tuple[PairOfLaunches, ...], tuple[str, ...]]:
    found, dropped = list[PairOfLaunches](), list[str]()
    loads = sorted({m.load for m in measurements}, key=attrgetter("concurrency"))
    in_time = sorted(measurements, key=attrgetter("measured_at"))
    for number, members in sorted(grouped(in_time, lambda m: part_of(m).pair).items()):
        last = {part_of(m).side: m.launch for m in members}
        if number < 1 or len(last) < len(SIDES):
            continue
        blocks = []
        for load in loads:
            own = (m for m in members if m.load == load and m.launch in last.values())
            windows, problems = windows_that_count(own, counted)
            blocks.append(windows)
            dropped += [f"launch {number}, {text}" for text in problems]
        if (fewest := min(map(len, blocks))) < FIRST_PAIRS:
            dropped.append(f"launch {number}: {fewest} pairs of its windows count, {FIRST_PAIRS} are wanted")
            continue
        sides = [_launch(members, blocks, place) for place in range(len(SIDES))]
        found.append(PairOfLaunches(number, *(map(without_busy, sides) if counted is False else sides)))
    return tuple(found), tuple(dropped)


def without_busy(launch: Launch) -> Launch:
    """Return a launch without tokens per busy second, of which too few windows have a value."""
    figures = tuple(tuple(replace(each, tokens_per_busy_s=None) for each in windows) for windows in launch.figures)
    return replace(launch, figures=figures)


def _launch(members: Sequence[Measurement], blocks: Sequence[Sequence[PairOfWindows]], place: int) -> Launch:
    own = [part_of(m) for m in members if part_of(m).side == SIDES[place]]
    return Launch(
        measurements=tuple(pair[place] for windows in blocks for pair in windows),
        figures=tuple(tuple(figures_of(pair[place]) for pair in windows) for windows in blocks),
        problems=(),
        outputs=next((each.outputs for each in own if each.outputs), ()),
        scores=next((each.scores for each in own if each.scores), ()),
    )


def window_series(
    endpoint: Endpoint, pairs: Sequence[PairOfLaunches], criteria: GateCriteria, allowances: Mapping[str, Allowance]
) -> WindowSeries | None:
    """Return the series of an endpoint, or None without values, or for the small load if there is only one load."""
    name = endpoint.label_in(pairs)
    values = [[*zip(*map(endpoint.read, pair.launches), strict=True)] for pair in pairs]
    if (has_one_load(pairs) and endpoint.load == SMALL) or not any(any(window) for each in values for window in each):
        return None
    usual = COMMITTED_CORES if endpoint == CORES else COMMITTED
    return WindowSeries.of(name, endpoint.better, values, criteria.margin, allowances.get(name, usual))


def by_the_host(endpoint: Endpoint, pairs: Sequence[PairOfLaunches], series: WindowSeries) -> str:
    """Return why the host determines the figures of an endpoint, or "" as for tokens per busy second.

    The share of time with a kernel is the baseline's, because the candidate's may be its regression.
    """
    if endpoint.figure == BUSY.figure or not series.windows[0]:
        return ""
    active = [each for each in replace(SHARE, load=endpoint.load).read(pairs[0].baseline) if each is not None]
    ratios, busy = series.windows[0], fmean(active) if active else None
    return host_decides(ratios[:FIRST_PAIRS], busy) or host_decides(ratios, busy)


def series_by_endpoint(
    pairs: Sequence[PairOfLaunches], criteria: GateCriteria, allowances: Mapping[str, Allowance]
) -> dict[Endpoint, WindowSeries]:
    """Return the series of the evaluated endpoints."""
    found = {endpoint: window_series(endpoint, pairs, criteria, allowances) for endpoint in TOGETHER.values() if pairs}
    return {endpoint: series for endpoint, series in found.items() if series}


def judge_windows(measurements: Sequence[Measurement], criteria: GateCriteria) -> Gated:
    """Return the result of a gate whose sides share one GPU, with the default noise of launches."""
    (pairs, dropped), first = launches_that_count(measurements), measurements[0]
    numbered = grouped(sorted(measurements, key=attrgetter("measured_at")), lambda m: part_of(m).pair)
    launched = [
        PairOfLaunches(n, *(_launch(own, (), i) for i in range(len(SIDES)))) for n, own in sorted(numbered.items()) if n
    ]
    part, exact = part_of(first), tuple(outputs_kept(first, launched))
    model = short_name(first.spec.model)
    firsts = firsts_of(measurements)
    return judged_with(Gated(model, part.gate, criteria, pairs, dropped, (), (), exact, part.caches, firsts=firsts), {})


def judged_with(gated: Gated, allowances: Mapping[str, Allowance]) -> Gated:
    """Return a gate whose sides share one GPU, evaluated with these allowances by label.

    An endpoint is refused if the host determines it, or if launches differ by more than the allowance. Tokens per busy
    second at the same load then decide. If they cannot be evaluated, or the endpoint seems worse, which they would not
    show of a slower host, it is inconclusive.
    """
    pairs, terms = gated.pairs, gated.terms
    series = series_by_endpoint(pairs, terms, allowances)
    refused = {
        each.name: why
        for endpoint, each in series.items()
        if (why := by_the_host(endpoint, pairs, each) or each.allowance.refused or each.strange)
    }
    sound = {endpoint: each for endpoint, each in series.items() if each.name not in refused}
    busy = {endpoint.load for endpoint in sound if endpoint.figure == BUSY.figure}
    compared = {endpoint: compare_sides(each, terms) for endpoint, each in series.items() if each.name in refused}
    left = [each for endpoint, each in compared.items() if endpoint.load in busy and not each.seems_worse]
    inconclusive = (
        replace(each, gated=True, why=f"{'it seems worse, but ' * each.seems_worse}{refused[each.name]}")
        for each in compared.values()
        if each not in left
    )
    known = [window_series(endpoint, pairs, terms, {}) for endpoint in SHOWN_TOGETHER if pairs]
    shares = (each for each in known if each and any(each.windows))
    return replace(
        gated,
        gated=(*(gate([*sound.values()], terms) if sound else ()), *inconclusive),
        shown=(*left, *(compare_sides(each, terms) for each in shares)),
        refused=refused,
        allowances={each.name: each.allowance for each in series.values()},
    )


def beside_an_idle_one(measurements: Iterable[Measurement]) -> dict[str, Interval]:
    """Return the speed of an engine next to an idle one relative to alone, by label; empty without a calibration."""
    own, found = [m for m in measurements if part_of(m).pair < 1], dict[str, Interval]()
    newest = max(own, key=attrgetter("measured_at")).launch if own else ""  # an earlier one may have been interrupted
    windows = {part_of(m).window or 0: m for m in own if m.launch == newest}
    each = THROWN_AWAY + FIRST_PAIRS
    alone, beside = (
        [figures_of(m) for number, m in sorted(windows.items()) if begin + THROWN_AWAY < number <= begin + each]
        for begin in (0, each)
    )
    if not alone or len(alone) != len(beside):
        return found
    for endpoint in (BUSY, TOGETHER["throughput"]):
        values = [[getattr(figures, endpoint.figure) for figures in side] for side in (alone, beside)]
        series = WindowSeries.of(endpoint.label.partition(",")[0], endpoint.better, [[*zip(*values)]], 0.01)
        if ratios := series.windows[0]:
            found[series.name] = student_interval(ratios).mapped(math.exp)
    return found


def wanted(windows: Sequence[PairOfWindows], criteria: GateCriteria) -> int:
    """Return the number of window pairs per launch at one load, from the first launch's windows that count.

    The first ones tell the number. If busy seconds were counted, an endpoint is ignored as soon as all windows so far
    show that the host determines it.
    """
    if len(windows) < FIRST_PAIRS:
        return FIRST_PAIRS
    pair = PairOfLaunches(1, *(_launch((), [windows], place) for place in range(len(SIDES))))
    series = {e: each for e, each in series_by_endpoint([pair], criteria, {}).items() if each.windows[0]}
    counted = any(endpoint.figure == BUSY.figure for endpoint in series)
    told = [each.windows[0] for e, each in series.items() if not (counted and by_the_host(e, [pair], each))]
    return pairs_wanted([ratios[:FIRST_PAIRS] for ratios in told], criteria.margin)
