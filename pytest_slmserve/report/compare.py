"""Two runs side by side, as text and as facts for JSON and CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from pytest_slmserve.analysis.compare.runs import (
    FEW_LAUNCHES,
    NOISE,
    ONE_REPEAT,
    Judgement,
    MetricChange,
    ReleaseHistory,
    ReleaseMean,
    RunComparison,
)
from pytest_slmserve.analysis.stats.estimates import grouped, percent
from pytest_slmserve.report.as_json import facts, plain
from pytest_slmserve.report.gate.text import difference_text
from pytest_slmserve.report.text_table import (
    ABSENT,
    Column,
    between,
    counted,
    figure,
    hanging,
    interval_text,
    named_lines,
    table,
)
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.records import Measurement


def measured_facts(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Counts of measurements and launches; models, vllm, devices and hosts: every one that they have."""
    where = [m.environment for m in measurements]
    return {
        "measurements": len(measurements),
        "launches": len({m.launch for m in measurements}),
        "models": _each(short_name(m.spec.model) for m in measurements),
        "vllm": _each(each.vllm for each in where),
        "devices": _each(map(device_of, where)),
        "hosts": _each(each.host for each in where),
    }


def days_of(measurements: Iterable[Measurement]) -> str:
    """ "2026-01-01 to 2026-01-03", or one day; empty of nothing."""
    days = sorted({m.measured_at[:10] for m in measurements})
    return " to ".join(dict.fromkeys((*days[:1], *days[-1:])))


def run_table(rows: Sequence[dict[str, Any]], *, several: bool) -> str:
    """A line for each run. several: of more than one archive, whose names are shown."""

    def told(name: str, head: str, rank: int = 0) -> Column[dict[str, Any]]:
        return Column(head, lambda row: ", ".join(row[name]) or ABSENT, "left", rank=rank)

    archive: Column[dict[str, Any]] = Column("archive", lambda row: row["path"].name, "left")
    columns: list[Column[dict[str, Any]]] = [
        *([archive] if several else []),
        Column("run", lambda row: row["id"], "left"),
        Column("started", lambda row: row["started"][:16].replace("T", " ") or ABSENT, "left"),
        Column("measure-\nments", lambda row: str(row["measurements"])),
        Column("launches", lambda row: str(row["launches"]), rank=3),
        told("models", "models"),
        told("vllm", "vLLM", rank=1),
        told("devices", "device", rank=2),
        told("hosts", "host", rank=4),
        Column("", lambda row: "resumes what is above it" if row["resumes"] else "", "left"),
    ]
    return table(rows, columns)


def device_of(environment: Environment) -> str | None:
    """A short name of the device, or the URL."""
    return environment.gpu_name or environment.url or environment.cpu or environment.platform


def _each(values: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(value for value in values if value))


METRICS = {  # heading and factor, by the name of the field
    "output_tokens_per_s": ("tokens/s", 1.0),
    "requests_per_s": ("requests/s", 1.0),
    "ttft_s": ("TTFT ms, mean", 1e3),
    "ttft_p99_s": ("TTFT ms, p99", 1e3),
    "tpot_s": ("TPOT ms, mean", 1e3),
    "tpot_p99_s": ("TPOT ms, p99", 1e3),
    "itl_s": ("ITL ms, mean", 1e3),
    "itl_p99_s": ("ITL ms, p99", 1e3),
    "e2e_s": ("E2E ms, mean", 1e3),
    "e2e_p99_s": ("E2E ms, p99", 1e3),
    "energy_per_token_j": ("mJ/token", 1e3),
}
AT_ANOTHER_TIME = "both sides were measured at different times, and machines drift: --slm-gate measures them in turns"
BY_CHANCE = "of so many 95 % intervals a few miss the truth by chance: measure a single finding again, or gate it"


@dataclass(frozen=True, slots=True)
class RunSide:
    """One side of a comparison. name: of the archive, and of the run where it has several."""

    name: str
    measurements: Sequence[Measurement]


def comparison_text(baseline: RunSide, candidate: RunSide, found: RunComparison) -> str:
    """Sides, differences, a table for each model, and in the end what is known and what is not."""
    return "\n".join(_parts(baseline, candidate, found))


def _parts(baseline: RunSide, candidate: RunSide, found: RunComparison) -> Iterator[str]:
    yield named_lines([("baseline", _about(baseline)), ("candidate", _about(candidate))])
    if found.changes or found.differences:
        yield f"\n{difference_text(found.differences)}"
    for subject, changes in groupby(found.changes, key=lambda each: each.subject):
        yield f"\n{subject}\n{table(change_rows(list(changes)), CHANGES, always=len(CHANGES))}"
    yield ""
    for name, only in (("baseline", found.baseline_only), ("candidate", found.candidate_only)):
        if only:
            cases = [f"{case} ({n} cases)" if n > 1 else case for case, n in Counter(only).items()]
            yield hanging(f"measured by the {name} alone: {', '.join(cases)}", 2)
    yield from (hanging(f"note: {note}", 2) for note in (*found.notes, AT_ANOTHER_TIME))
    yield from _inconclusive(found.changes)
    decided = [each for each in found.changes if each.verdict in (Judgement.BETTER, Judgement.WORSE)]
    yield from (hanging(f"note: {note}", 2) for note in [BY_CHANCE] if decided)
    for each in sorted(decided, key=lambda each: each.verdict is Judgement.WORSE):
        ratio = f"{figure(each.ratio.value, 4)} of the baseline{between(each.ratio)}"
        yield hanging(f"{each.verdict.value}: {each.subject} at {each.load}: {METRICS[each.metric][0]} {ratio}", 2)
    yield counts_text(found)


def _about(side: RunSide) -> str:
    """ "before.jsonl: 12 measurements, 2 launches, 2026-01-31, vLLM 0.26.0, NVIDIA H200, host 0123abcd" """
    where = [m.environment for m in side.measurements]
    told = [
        [counted(len(side.measurements), "measurement")],
        [counted(len({m.launch for m in side.measurements}), "launch")],
        [days_of(side.measurements)],
        [f"vLLM {each.vllm}" if each.vllm else "no vLLM" for each in where],
        [device_of(each) or "" for each in where],
        [f"host {each.host}" for each in where if each.host],
    ]
    return f"{side.name}: {', '.join(' and '.join(dict.fromkeys(each)) for each in told if any(each))}"


CHANGES: tuple[Column[tuple[MetricChange, bool]], ...] = (
    Column("load", lambda row: row[0].load if row[1] else "", "left"),
    Column("metric", lambda row: METRICS[row[0].metric][0], "left"),
    Column("baseline", lambda row: _value(row[0], row[0].baseline)),
    Column("candidate", lambda row: _value(row[0], row[0].candidate)),
    Column("ratio", lambda row: figure(row[0].ratio.value, 4)),
    Column("95 %", lambda row: interval_text(row[0].ratio, lambda end: figure(end, 4)), "left"),
    Column("verdict", lambda row: row[0].verdict.value, "left"),
)


def change_rows(changes: Sequence[MetricChange]) -> list[tuple[MetricChange, bool]]:
    """Each with whether it is the first of its case."""
    loads = ["", *(each.load for each in changes)]
    return [(each, each.load != before) for each, before in zip(changes, loads)]


def _value(change: MetricChange, value: float) -> str:
    return figure(METRICS[change.metric][1] * value, 4)


def _inconclusive(changes: Sequence[MetricChange]) -> Iterator[str]:
    """A line for each reason, with the cases that it concerns."""
    inconclusive = (each for each in changes if each.verdict is Judgement.INCONCLUSIVE)
    for why, concerned in grouped(inconclusive, lambda each: each.why).items():
        loads = {
            subject: dict.fromkeys(each.load.removesuffix(" in flight") for each in same)
            for subject, same in grouped(concerned, lambda each: each.subject).items()
        }
        cases = "; ".join(f"{subject} at {', '.join(each)}" for subject, each in loads.items())
        yield hanging(f"inconclusive: {why} ({counted(len(concerned), 'metric')}: {cases})", 2)


def counts_text(found: RunComparison) -> str:
    """ "of 40 metrics: 2 better, 1 worse, 30 same, 7 inconclusive; margin 3 %" """
    if not found.changes:
        return hanging("inconclusive: nothing was measured by both sides under one load with the same requests", 2)
    always = (Judgement.BETTER, Judgement.WORSE)
    each = [f"{count} {verdict.value}" for verdict, count in found.counts.items() if count or verdict in always]
    return f"of {counted(len(found.changes), 'metric')}: {', '.join(each)}; margin {percent(found.margin)}"


def change_facts(baseline: RunSide, candidate: RunSide, found: RunComparison) -> dict[str, Any]:
    """One comparison for JSON."""
    sides = {"baseline": _side_facts(baseline), "candidate": _side_facts(candidate)}
    return {**sides, **facts(found), "counts": {verdict.value: count for verdict, count in found.counts.items()}}


def _side_facts(side: RunSide) -> dict[str, Any]:
    measured = measured_facts(side.measurements)
    del measured["devices"]  # among what differs, where they do
    return {"name": side.name, **measured}


def comparison_rows(baseline: RunSide, candidate: RunSide, found: RunComparison) -> Iterator[dict[str, Any]]:
    """A row for each metric of each case."""
    for each in found.changes:
        yield {"baseline_run": baseline.name, "candidate_run": candidate.name, **plain(each)}


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
    Column(
        "95 %\nof value", lambda row: interval_text(row[1].mean, lambda end: value_text(row[0], end)), "left", rank=1
    ),
    Column("\nratio", lambda row: figure(row[1].step.ratio.value, 4) if row[1].step else ""),
    Column("95 %\nof ratio", lambda row: interval_text(row[1].step.ratio, FOUR) if row[1].step else "", "left"),
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
    """The table of one case, and why steps are inconclusive."""
    rows = table(rows_of_history(alike), COLUMNS, always=len(COLUMNS))
    return "\n".join([hanging(f"History: {title}", 2), "", rows, *_reasons(alike)])


def step_words(step: MetricChange) -> str:
    """What became of a metric since the release before, in words."""
    if step.verdict is Judgement.INCONCLUSIVE:
        return NO_DIFFERENCE if step.why in (NOISE, ONE_REPEAT, FEW_LAUNCHES) else NOT_COMPARABLE
    return WORDS.get(step.verdict) or str(step.verdict.value)


def value_text(history: ReleaseHistory, value: float) -> str:
    return figure(METRICS[history.metric][1] * value, 4)


def _reasons(alike: Sequence[ReleaseHistory]) -> Iterator[str]:
    """A line for each reason of an inconclusive step, with the releases that it concerns."""
    inconclusive = [
        (release.step, release.release)
        for each in alike
        for release in each.releases
        if release.step and release.step.verdict is Judgement.INCONCLUSIVE
    ]
    for why, concerned in grouped(inconclusive, lambda pair: pair[0].why).items():
        releases = ", ".join(dict.fromkeys(release for _, release in concerned))
        yield hanging(f"{step_words(concerned[0][0])}: {why} ({releases})", 2)
