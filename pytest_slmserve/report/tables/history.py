"""History over releases: a table for each model, each release beside the one before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from pytest_slmserve.analysis.compare.history import ReleaseHistory, ReleaseMean
from pytest_slmserve.analysis.compare.runs import FEW_LAUNCHES, NOISE, ONE_REPEAT, Judgement, MetricChange
from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.stats.estimates import percent
from pytest_slmserve.report.compare import AT_ANOTHER_TIME, BY_CHANCE, METRICS
from pytest_slmserve.report.numbers import ends, figure
from pytest_slmserve.report.text_table import Column, hanging, table

NO_DIFFERENCE, NOT_COMPARABLE = "no difference shown", "not comparable"
WORDS = {Judgement.BETTER: "improved", Judgement.WORSE: "regressed"}  # other decided verdicts by `compare`'s own words
LEGEND = (
    "value: mean of a release's repeats, with its 95 % interval by the noise of these repeats (of launches, where each "
    "release has four). ratio: to the release before, which is the baseline; its interval counts how launches differ, "
    "too. The verdicts are those of `slmserve compare`"
)

Row = tuple[ReleaseHistory, ReleaseMean]
FOUR = partial(figure, digits=4)

COLUMNS: tuple[Column[Row], ...] = (
    Column("\nmetric", lambda row: METRICS[row[0].metric][0], "left"),
    Column("\nrelease", lambda row: row[1].release, "left"),
    Column("\nvalue", lambda row: value_text(row[0], row[1].mean.value)),
    Column("95 %\nof value", lambda row: ends(row[1].mean, lambda end: value_text(row[0], end)), "left", rank=1),
    Column("\nratio", lambda row: figure(row[1].step.ratio.value, 4) if row[1].step else ""),
    Column("95 %\nof ratio", lambda row: ends(row[1].step.ratio, FOUR) if row[1].step else "", "left"),
    Column("\nverdict", lambda row: step_words(row[1].step) if row[1].step else "", "left"),
)


def history_by_case(found: Sequence[ReleaseHistory]) -> dict[str, list[ReleaseHistory]]:
    """Histories of the same case, by their title."""
    return grouped(found, lambda each: f"{each.subject}, {each.device}")


def rows_of_history(found: Sequence[ReleaseHistory]) -> list[Row]:
    """A row for each metric and release."""
    return [(each, release) for each in found for release in each.releases]


def history_report(found: Sequence[ReleaseHistory]) -> Iterator[str]:
    """A text for each case, and what all verdicts rest on; nothing without releases to compare."""
    for title, alike in history_by_case(found).items():
        yield case_text(title, alike)
    if found:
        steps = [release.step for each in found for release in each.releases if release.step]
        notes = [AT_ANOTHER_TIME, *([BY_CHANCE] if any(step.verdict in WORDS for step in steps) else [])]
        legend = f"{LEGEND}, by a margin of {percent(found[0].margin)}."
        yield "\n".join([hanging(legend, 0), *(hanging(f"note: {note}", 2) for note in notes)])


def case_text(title: str, alike: Sequence[ReleaseHistory]) -> str:
    """The table of one case, and why steps are undecided."""
    rows = table(rows_of_history(alike), COLUMNS, always=len(COLUMNS))
    return "\n".join([hanging(f"History: {title}", 2), "", rows, *_reasons(alike)])


def step_words(step: MetricChange) -> str:
    """What became of a metric since the release before, in words."""
    if step.verdict is Judgement.UNDECIDED:
        return NO_DIFFERENCE if step.why in (NOISE, ONE_REPEAT, FEW_LAUNCHES) else NOT_COMPARABLE
    return WORDS.get(step.verdict) or str(step.verdict.value)


def value_text(history: ReleaseHistory, value: float) -> str:
    return figure(METRICS[history.metric][1] * value, 4)


def _reasons(alike: Sequence[ReleaseHistory]) -> Iterator[str]:
    """A line for each reason of an undecided step, with the releases that it concerns."""
    undecided = [
        (release.step, release.release)
        for each in alike
        for release in each.releases
        if release.step and release.step.verdict is Judgement.UNDECIDED
    ]
    for why, concerned in grouped(undecided, lambda pair: pair[0].why).items():
        releases = ", ".join(dict.fromkeys(release for _, release in concerned))
        yield hanging(f"{step_words(concerned[0][0])}: {why} ({releases})", 2)
