"""Two runs side by side, as text and as facts for JSON and CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pytest_slmserve.analysis.compare.runs import Judgement, MetricChange, RunComparison
from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.stats.estimates import percent
from pytest_slmserve.report.as_json import facts, plain
from pytest_slmserve.report.gate.diagnosis import difference_text
from pytest_slmserve.report.numbers import between, counted, ends, figure
from pytest_slmserve.report.run_list import days_of, device_of, measured_facts
from pytest_slmserve.report.text_table import Column, hanging, named, table
from pytest_slmserve.schema.records import Measurement

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
    yield named([("baseline", _about(baseline)), ("candidate", _about(candidate))])
    if found.changes or found.differences:
        yield f"\n{difference_text(found.differences)}"
    for subject, changes in groupby(found.changes, key=lambda each: each.subject):
        yield f"\n{subject}\n{table(rows_of(list(changes)), CHANGES, always=len(CHANGES))}"
    yield ""
    for name, only in (("baseline", found.baseline_only), ("candidate", found.candidate_only)):
        if only:
            cases = [f"{case} ({n} cases)" if n > 1 else case for case, n in Counter(only).items()]
            yield hanging(f"measured by the {name} alone: {', '.join(cases)}", 2)
    yield from (hanging(f"note: {note}", 2) for note in (*found.notes, AT_ANOTHER_TIME))
    yield from _undecided(found.changes)
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
    Column("95 %", lambda row: ends(row[0].ratio, lambda end: figure(end, 4)), "left"),
    Column("verdict", lambda row: row[0].verdict.value, "left"),
)


def rows_of(changes: Sequence[MetricChange]) -> list[tuple[MetricChange, bool]]:
    """Each with whether it is the first of its case."""
    loads = ["", *(each.load for each in changes)]
    return [(each, each.load != before) for each, before in zip(changes, loads)]


def _value(change: MetricChange, value: float) -> str:
    return figure(METRICS[change.metric][1] * value, 4)


def _undecided(changes: Sequence[MetricChange]) -> Iterator[str]:
    """A line for each reason, with the cases that it concerns."""
    undecided = (each for each in changes if each.verdict is Judgement.UNDECIDED)
    for why, concerned in grouped(undecided, lambda each: each.why).items():
        loads = {
            subject: dict.fromkeys(each.load.removesuffix(" in flight") for each in same)
            for subject, same in grouped(concerned, lambda each: each.subject).items()
        }
        cases = "; ".join(f"{subject} at {', '.join(each)}" for subject, each in loads.items())
        yield hanging(f"undecided: {why} ({counted(len(concerned), 'metric')}: {cases})", 2)


def counts_text(found: RunComparison) -> str:
    """ "of 40 metrics: 2 better, 1 worse, 30 same, 7 undecided; margin 3 %" """
    if not found.changes:
        return hanging("undecided: nothing was measured by both sides under one load with the same requests", 2)
    always = (Judgement.BETTER, Judgement.WORSE)
    each = [f"{count} {verdict.value}" for verdict, count in found.counts.items() if count or verdict in always]
    return f"of {counted(len(found.changes), 'metric')}: {', '.join(each)}; margin {percent(found.margin)}"


def comparison_facts(baseline: RunSide, candidate: RunSide, found: RunComparison) -> dict[str, Any]:
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
