"""Sections and facts of comparisons of runs and of releases."""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

from pytest_slmserve.analysis.claims.table import stored_curves
from pytest_slmserve.analysis.compare import changes
from pytest_slmserve.analysis.compare.changes import (
    LAUNCHES,
    METRICS,
    Judgement,
    MetricChange,
    ReleaseHistory,
    ReleaseMean,
    RunComparison,
)
from pytest_slmserve.analysis.compare.steps import LEAST_VALUES, LEVEL
from pytest_slmserve.analysis.estimates import Interval, ends, grouped, percent
from pytest_slmserve.analysis.verdict import all_of
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.gate import LOOKS, difference_parts
from pytest_slmserve.report.page import charts
from pytest_slmserve.report.section import Chart, Legend, Named, Part, Section, Table
from pytest_slmserve.report.text_table import (
    ABSENT,
    Column,
    between,
    command_lines,
    counted,
    figure,
    hundredths,
    interval_text,
    table,
)
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.records import Measurement

AT_ANOTHER_TIME = "both sides were measured at different times, and machines drift: --slm-gate measures them in turns"
BY_CHANCE = "of so many 95% intervals a few miss the truth by chance: measure a single finding again, or gate it"
NOTHING_IN_COMMON = "inconclusive: nothing was measured by both sides under one load with the same requests"
HISTORY_NOTE = (
    "Number: the ratio to the release before, where it improved or regressed. No line: not comparable. The axis does "
    "not begin at 0."
)
LEGEND = (
    "value: mean of a release's repeats, with its 95% interval by the noise of these repeats (of launches, where each "
    "release has four). ratio: to the release before, which is the baseline; its interval counts how launches differ, "
    "too. An interval too wide to show a change of 10% is not printed. The verdicts are those of `slmserve compare`"
)
STEPS = (
    f"A step is a change of the level over all releases (E-divisive means, arXiv:1306.4933), and is found in "
    f"{percent(LEVEL)} of the histories that have none, at most."
)
DRAWN = ("output_tokens_per_s", "ttft_s", "tpot_s", "e2e_s")
FOUR = partial(figure, digits=4)


def measured_facts(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Return the numbers of measurements and launches, with all models, releases, devices and hosts."""
    where = [m.environment for m in measurements]
    values: dict[str, list[str | None]] = {
        "models": [short_name(m.spec.model) for m in measurements],
        "vllm": [each.vllm for each in where],
        "devices": [each.gpu_name or each.url or each.cpu or each.platform for each in where],
        "hosts": [each.host for each in where],
    }
    return {
        "measurements": len(measurements),
        "launches": len({m.launch for m in measurements}),
        **{name: list(dict.fromkeys(filter(None, each))) for name, each in values.items()},
    }


def days_of(times: Iterable[str]) -> str:
    """Return the days of ISO 8601 times: "2026-01-01 to 2026-01-03", one day, or an empty text."""
    days = sorted({at[:10] for at in times})
    return " to ".join(dict.fromkeys((*days[:1], *days[-1:])))


def run_table(rows: Sequence[dict[str, Any]], *, several: bool) -> str:
    """Return a line for each run.

    Args:
        several: whether to name the results file of each run.
    """

    def names(name: str, head: str, rank: int = 0) -> Column[dict[str, Any]]:
        return Column(head, lambda row: ", ".join(row[name]) or ABSENT, "left", rank=rank)

    archive: Column[dict[str, Any]] = Column("results file", lambda row: printable(row["path"].name, layout=""), "left")
    columns: list[Column[dict[str, Any]]] = [
        *([archive] if several else []),
        Column("run", lambda row: row["id"], "left"),
        Column("started", lambda row: row["started"][:16].replace("T", " ") or ABSENT, "left"),
        Column("measure-\nments", lambda row: str(row["measurements"])),
        Column("launches", lambda row: str(row["launches"]), rank=3),
        names("models", "models"),
        names("vllm", "vLLM", rank=1),
        names("devices", "device", rank=2),
        names("hosts", "host", rank=4),
        Column("", lambda row: "resumes what is above it" if row["resumes"] else "", "left"),
    ]
    return table(rows, columns)


@dataclass(frozen=True, slots=True)
class RunSide:
    """Side of a comparison.

    Attributes:
        name: of the results file, and of the run if the file has several.
        command: of `slmserve measure` for this side, if known.
    """

    name: str
    measurements: Sequence[Measurement]
    command: str = ""

    @property
    def about(self) -> str:
        """Text "before.jsonl: 12 measurements, 2 launches, 2026-01-31, vLLM 0.26.0, NVIDIA H200, host 0123abcd"."""
        seen = measured_facts(self.measurements)
        words = [
            counted(seen["measurements"], "measurement"),
            counted(seen["launches"], "launch"),
            days_of(m.measured_at for m in self.measurements),
            " and ".join(f"vLLM {each}" for each in seen["vllm"]) or "no vLLM",
            " and ".join(seen["devices"]),
            " and ".join(f"host {each}" for each in seen["hosts"]),
        ]
        return f"{self.name}: {', '.join(filter(None, words))}"


# A row of a comparison: the change, and whether it is the first of its load.
CHANGES: tuple[Column[tuple[MetricChange, bool]], ...] = (
    Column("load", lambda row: row[0].load if row[1] else "", "left"),
    Column("metric", lambda row: METRICS[row[0].metric].heading, "left"),
    Column("baseline", lambda row: value_text(row[0].metric, row[0].baseline)),
    Column("candidate", lambda row: value_text(row[0].metric, row[0].candidate)),
    Column("ratio", lambda row: FOUR(row[0].ratio.value)),
    Column("95%", lambda row: interval_text(row[0].ratio, FOUR), "left"),
    Column("verdict", lambda row: row[0].verdict.value, "left"),
)


def value_text(metric: str, value: float) -> str:
    return FOUR(METRICS[metric].scale * value)


def comparison_section(baseline: RunSide, candidate: RunSide, found: RunComparison) -> Section:
    """Return the section of a comparison: the differences, a table for each model, and conclusions."""
    parts: list[Part] = [Named([("baseline", baseline.about), ("candidate", candidate.about)])]
    if found.changes or found.differences:
        parts += difference_parts(found.differences)
    for subject, alike in grouped(found.changes, lambda each: each.subject).items():
        loads = pairwise(["", *(each.load for each in alike)])
        rows = [(each, before != load) for each, (before, load) in zip(alike, loads)]
        parts.append(Table(rows, CHANGES, caption=subject, heading=subject, always=len(CHANGES)))
    parts.append("")
    for name, only in (("baseline", found.baseline_only), ("candidate", found.candidate_only)):
        if only:
            cases = [f"{case} ({n} cases)" if n > 1 else case for case, n in Counter(only).items()]
            parts.append(f"measured by the {name} alone: {', '.join(cases)}")
    parts += [f"note: {note}" for note in (*found.notes, AT_ANOTHER_TIME)]
    by_verdict = grouped(found.changes, lambda each: each.verdict)
    for why, concerned in grouped(by_verdict.get(Judgement.INCONCLUSIVE, []), lambda each: each.why).items():
        named_loads = {
            subject: dict.fromkeys(each.load.removeprefix("concurrency ") for each in same)
            for subject, same in grouped(concerned, lambda each: each.subject).items()
        }
        cases = [f"{subject} at {', '.join(each)}" for subject, each in named_loads.items()]
        parts.append(f"inconclusive: {why} ({counted(len(concerned), 'metric')}: {'; '.join(cases)})")
    if by_verdict.get(Judgement.INCONCLUSIVE):
        parts += in_turns((baseline, candidate))
    decided = [*by_verdict.get(Judgement.BETTER, []), *by_verdict.get(Judgement.WORSE, [])]
    parts += [f"note: {BY_CHANCE}"] if decided else []
    for each in decided:
        ratio = f"{FOUR(each.ratio.value)} of the baseline{between(each.ratio)}"
        name = f"{each.subject} at {each.load}: {METRICS[each.metric].heading}"
        parts.append(f"{each.verdict.value}: {name} {ratio}")
    always = (Judgement.BETTER, Judgement.WORSE)
    tally = [f"{count} {verdict.value}" for verdict, count in found.counts.items() if count or verdict in always]
    answer = f"of {counted(len(found.changes), 'metric')}: {', '.join(tally)}; tolerance {percent(found.tolerance)}"
    parts.append(answer if found.changes else NOTHING_IN_COMMON)
    title = f"{candidate.name} against {baseline.name}: {parts[-1]}"
    return Section(title, parts, LOOKS[found.state], partial(comparison_charts, baseline, candidate, found))


def in_turns(sides: Sequence[RunSide]) -> list[str]:
    """Return commands that measure both sides in turns; none unless `slmserve measure` measured both."""
    if not all(side.command for side in sides):
        return []
    commands = [
        *(side.command for side in sides),
        shlex.join(["slmserve", "compare", *(each.name for each in sides), "--run=all"]),
    ]
    lines = chain.from_iterable(command_lines(" ", command) for command in commands)
    return [f"to decide it, measure both in turns, {LAUNCHES} times each, and compare all runs:", *lines]


def comparison_charts(baseline: RunSide, candidate: RunSide, found: RunComparison) -> Iterator[Chart]:
    """Yield the Pareto plane of both sides, and the ratios of the main metrics."""
    curves = [
        (f"{name}, {curve.subject}", curve)
        for name, side in (("baseline", baseline), ("candidate", candidate))
        for curve in stored_curves(side.measurements, ())
        if curve.valid
    ]
    if curves:
        yield Chart(charts.PLANE, charts.pareto(curves), charts.PLANE_NOTE)
    drawn = (change for change in found.changes if change.metric in DRAWN)
    for (subject, name), alike in grouped(drawn, lambda each: (each.subject, each.metric)).items():
        title, bound = f"{subject}: {METRICS[name].heading}", METRICS[name].threshold(found.tolerance)
        seen = [(c.load, c.ratio, bound, c.verdict.state, figure(c.ratio.value, 4)) for c in alike]
        yield Chart(title, charts.interval_chart(seen, "candidate / baseline", title))


def change_facts(baseline: RunSide, candidate: RunSide, found: RunComparison) -> dict[str, Any]:
    sides = {}
    for name, side in (("baseline", baseline), ("candidate", candidate)):
        sides[name] = {"name": side.name, **measured_facts(side.measurements)}
        del sides[name]["devices"]  # among the differences, if they differ
    names = ("tolerance", "changes", "differences", "baseline_only", "candidate_only", "notes")
    counts = {verdict.value: count for verdict, count in found.counts.items()}
    return {**sides, **facts(found, *names), "counts": counts}


# Row of a history: metric and release.
HISTORY: tuple[Column[tuple[str, ReleaseMean]], ...] = (
    Column("\nmetric", lambda row: METRICS[row[0]].heading, "left"),
    Column("\nrelease", lambda row: row[1].release, "left"),
    Column("\nvalue", lambda row: value_text(row[0], row[1].mean.value)),
    Column("95%\nof value", lambda row: telling_interval(row[1].mean, partial(value_text, row[0])), "left", rank=1),
    Column("\nratio", lambda row: FOUR(row[1].step.ratio.value) if row[1].step else ""),
    Column("95%\nof ratio", lambda row: telling_interval(row[1].step.ratio, FOUR) if row[1].step else "", "left"),
    Column("\nverdict", lambda row: verdict_words(row[1]), "left"),
)


def telling_interval(seen: Interval, show: Callable[[float], str]) -> str:
    """Return an interval that can show a change of 10%, or "-"."""
    return interval_text(seen, show) if changes.tells(seen) else ABSENT


def verdict_words(release: ReleaseMean) -> str:
    """Return the change since the last release, or the launches if they are too few: "one launch each"."""
    if release.step is None or release.step_words != changes.TOO_FEW:
        return release.step_words
    one, other = release.step.launches
    each = "one launch" if other == 1 else f"{other} launches"
    return f"{each} each" if one == other else f"{one} and {counted(other, 'launch')}"


def launches_lines(alike: Sequence[ReleaseHistory]) -> Iterator[str]:
    """Yield how many more launches would show a change, and the command that measures them."""
    lacking = [(each, release) for each in alike for release in each.releases if release.launches_more is not None]
    texts = {}
    for (metric, shows), group in grouped(lacking, lambda pair: (pair[0].metric, pair[1].shows or 0.0)).items():
        more = sorted({release.launches_more or 0 for _, release in group})
        number = counted(more[0], "launch") if len(more) == 1 else f"{more[0]} to {more[-1]} launches"
        releases = ", ".join(release.release for _, release in group)
        texts[metric, shows] = f"{number} more of each release would show a change of {percent(shows)} ({releases}"
    for text, same in grouped(texts, texts.__getitem__).items():
        yield f"{text}; {', '.join(METRICS[metric].heading for metric, _ in same)})"

    def newest(pair: tuple[ReleaseHistory, ReleaseMean]) -> tuple[object, ...]:
        return changes.release_order(pair[1].release), pair[1].launches_more or 0

    if lacking:
        yield "launches of one host count: a gate measures the last two releases there in turns, until it knows:"
        yield from command_lines(" ", max(lacking, key=newest)[1].gate)


def step_lines(each: ReleaseHistory) -> Iterator[str]:
    for step in each.steps:
        low, high = (hundredths(end - 1, signed=True) for end in ends(step.ratio))
        by = hundredths(step.ratio.value - 1, signed=True)
        release = each.releases[step.at]
        moved = "; not comparable with the release before, so it may be the machine's"
        yield (
            f"step at {release.release}: {METRICS[each.metric].heading} {by}% (95%: {low} to {high}%)"
            f"{moved if release.step_words == changes.NOT_COMPARABLE else ''}"
        )


def history_sections(found: Sequence[ReleaseHistory]) -> Iterator[Section | Legend]:
    """Yield a section for each case with several releases, then a legend."""
    for title, alike in grouped(found, lambda each: f"{each.subject}, {each.device}").items():
        rows = [(each.metric, release) for each in alike for release in each.releases]
        steps = [(release.step, release) for _, release in rows if release.step]
        inconclusive = [
            (step, release)
            for step, release in steps
            if step.verdict is Judgement.INCONCLUSIVE and release.step_words != changes.TOO_FEW
        ]
        reasons = [
            f"{concerned[0][1].step_words}: {why} ({', '.join(dict.fromkeys(each.release for _, each in concerned))})"
            for why, concerned in grouped(inconclusive, lambda pair: pair[0].why).items()
        ]
        look = LOOKS[all_of(step.verdict.state for step, _ in steps)]
        shown = Table(rows, HISTORY, caption=f"History of {title}", always=len(HISTORY))
        below = [*chain.from_iterable(map(step_lines, alike)), *reasons, *launches_lines(alike)]
        yield Section(f"History: {title}", [shown, *below], look, partial(history_charts, alike))
    if found:
        verdicts = {release.step.verdict for each in found for release in each.releases if release.step}
        by_chance = verdicts & {*changes.WORDS} or any(each.steps for each in found)
        notes = [AT_ANOTHER_TIME, *([BY_CHANCE] if by_chance else [])]
        tolerance = f"by a tolerance of {percent(found[0].tolerance)}."
        stepped = [STEPS] if any(len(each.releases) >= LEAST_VALUES for each in found) else []
        yield Legend(" ".join([f"{LEGEND}, {tolerance}", *stepped]), [f"note: {note}" for note in notes])


def history_charts(alike: Sequence[ReleaseHistory]) -> Iterator[Chart]:
    """Yield a chart for each metric, with a note on its whiskers."""
    for each in alike:
        of = "launches" if min(release.launches for release in each.releases) >= changes.LAUNCHES else "repeats"
        spec, cut = charts.history(each)
        beyond = f" Cut at the edge: {', '.join(cut)}." if cut else ""
        note = f"Whiskers: 95% interval of the mean of a release's {of}.{beyond} {HISTORY_NOTE}"
        yield Chart(METRICS[each.metric].heading, spec, note)
