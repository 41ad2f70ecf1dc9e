"""Reasons why a side is slower, in words and small tables: the parts of its time, and the differences between both
sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_slmserve.analysis.gate.diagnosis import FEWEST_ALONE, Change, Diagnosis, Difference, Split, explaining
from pytest_slmserve.analysis.stats.estimates import percent
from pytest_slmserve.report.numbers import ABSENT, counted, figure, hundredths
from pytest_slmserve.report.text_table import Column, hanging, table
from pytest_slmserve.schema.specs import GIB

COLUMNS: tuple[Column[Change], ...] = (
    Column("", lambda c: c.name, "left"),
    Column("baseline", lambda c: figure(c.baseline)),
    Column("candidate", lambda c: figure(c.candidate)),
    Column("change", lambda c: _difference(c.absolute, figure(c.baseline))),
    Column("%", lambda c: _percents(c.relative)),
)
DIFFERENCES: tuple[Column[Difference], ...] = (
    Column("", lambda d: d.field, "left"),
    Column("baseline", lambda d: _both(d)[0], "left"),
    Column("candidate", lambda d: _both(d)[1], "left"),
)
NOTABLE = 0.01  # a smaller change of the whole is not taken apart: its parts are those of noise
SPLIT_LEGEND = (
    "prefill: what prompts add to the steps. decode: the steps without that. host gap: no kernel ran on the GPU. The "
    "time is broken down twice: into prefill and decode, and into host gap and kernels."
)
CANARY_LEGEND = (
    "canary: a fixed piece of Python beside each window. Where its CPU time changed, the host's cores were of another "
    "speed beside that side; where its time alone did, others wanted them too."
)


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """All there is to say, as pieces of text; nothing where nothing was measured on both sides."""
    for split in diagnosis.splits:
        yield split_text(split)
    if diagnosis.splits:
        yield hanging(SPLIT_LEGEND, 0)
    if any(split.canary for split in diagnosis.splits):
        yield hanging(CANARY_LEGEND, 0)
    for start in diagnosis.start_ups:
        change = start.change
        relative = f" ({_percents(change.relative)} %)" if change.relative is not None else ""
        told = f"{figure(change.baseline)} -> {figure(change.candidate)} s{relative}"
        yield f"start-up of {start.model}: {told}, mean of each side's launches"
    if diagnosis.splits or diagnosis.start_ups or diagnosis.differences:
        yield difference_text(diagnosis.differences)


def split_text(split: Split) -> str:
    """Heading, table and findings of one load."""
    counts = f"{split.baseline.measurements} and {counted(split.candidate.measurements, 'measurement')}"
    heading = f"where the time goes: {split.model}, {split.load.title}, seconds per 1,000 requests ({counts})"
    rows = [_times(1000, each) for each in (split.total, *split.by_step, *split.by_device)]
    rows += [split.steps, replace(_times(1000, split.step), name="ms per step")]
    rows += [replace(_times(1000, each), name=f"{each.name}, ms") for each in split.canary]
    shown = table(rows, COLUMNS, always=len(COLUMNS))
    return "\n".join([heading, shown, *(hanging(line, 2) for line in findings(split))])


def findings(split: Split) -> Iterator[str]:
    """The part that explains most of the change, by steps and by the GPU; the unknown parts, with reasons."""
    change, sides = split.total.relative, {"baseline": split.baseline, "candidate": split.candidate}
    if change is None or abs(change) < NOTABLE:
        yield f"time per request changed by less than {percent(NOTABLE)}: there is nothing to explain at this load"
    else:
        for found in filter(None, map(explaining, (split.by_step, split.by_device))):
            part, share = found
            more = ", and the other part went the other way" if round(share, 2) > 1 else ""
            yield f"most of the change is {part.name}: {percent(share)} of it{more}"
        count, step = _percents(split.steps.relative), _percents(split.step.relative)
        yield f"steps per request {count} %, time per step {step} %"
    if any(abs(part.relative or 0.0) >= NOTABLE for part in split.canary):  # the total may have that from the host
        changed = ", ".join(f"{part.name} {_percents(part.relative)} %" for part in split.canary)
        yield f"the host was not the same beside both sides: {changed}"
    unnamed = [name for name, side in sides.items() if not side.with_prompt]
    if not split.by_step and unnamed:
        yield f"prefill and decode unknown: no step is known to hold a prompt ({' and '.join(unnamed)})"
    elif not split.by_step:
        seen = f"{split.baseline.alone} and {split.candidate.alone}"
        yield (
            f"prefill and decode unknown: nearly every step holds a prompt at this load ({seen} steps only decode, "
            f"{FEWEST_ALONE} are wanted of each side); a smaller load tells them apart"
        )
    if not split.by_device:
        lacking = " and ".join(name for name, side in sides.items() if side.idle is None)
        yield f"host gap unknown: no sensor told how long the GPU ran no kernel ({lacking})"


def difference_text(differences: Sequence[Difference]) -> str:
    """A row for each fact that is not the same."""
    if not differences:
        return "nothing differs in the environments, in what the engines resolved, or in what was asked of them"
    return f"what differs between the sides:\n{table(differences, DIFFERENCES, always=len(DIFFERENCES))}"


def _times(scale: float, change: Change) -> Change:
    return replace(change, baseline=scale * change.baseline, candidate=scale * change.candidate)


def _difference(value: float, beside: str) -> str:
    """A signed difference with as many decimals as the value beside it."""
    text = f"{value:+,.{len(beside.partition('.')[2])}f}"
    return text if text.strip("+-0.,") else text[1:]


def _percents(relative: float | None) -> str:
    text = hundredths(relative, signed=True)
    return "0.0" if text == "+0.0" else text


def _both(found: Difference) -> tuple[str, str]:
    """What both sides have: bytes in GiB, where that tells them apart."""

    def told(values: Sequence[str | None], in_gib: bool = False) -> str:
        texts = (ABSENT if value is None else value for value in values)
        return " or ".join(f"{figure(int(t) / GIB, 4)} GiB" if in_gib and t.isdigit() else t for t in texts)

    if found.field.endswith("_bytes"):
        baseline, candidate = told(found.baseline, in_gib=True), told(found.candidate, in_gib=True)
        if baseline != candidate:
            return baseline, candidate
    return told(found.baseline), told(found.candidate)
