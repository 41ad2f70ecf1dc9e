"""Findings of a gate, and comparisons of any two sides: text, Markdown for a pull request, facts for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any

from pytest_slmserve.analysis.gate.decision import Calibration, Comparison, InterimAnalysis, next_look
from pytest_slmserve.analysis.gate.diagnosis import (
    FEWEST_ALONE,
    Change,
    Diagnosis,
    Difference,
    Split,
    diagnose,
    explaining,
)
from pytest_slmserve.analysis.gate.launch_pairs import EXACT, OUTPUTS, SIDES, Gated
from pytest_slmserve.analysis.stats.estimates import FIRST_LOOKS, percent
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.text_table import (
    ABSENT,
    Column,
    counted,
    figure,
    hanging,
    hundredths,
    interval_text,
    named_lines,
    table,
)
from pytest_slmserve.schema.environment import SIMULATED
from pytest_slmserve.schema.errors import Side
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import GIB

DIAGNOSIS_COLUMNS: tuple[Column[Change], ...] = (
    Column("", lambda c: c.name, "left"),
    Column("baseline", lambda c: figure(c.baseline)),
    Column("candidate", lambda c: figure(c.candidate)),
    Column("change", lambda c: _difference(c.absolute, figure(c.baseline))),
    Column("%", lambda c: _diagnosis_percents(c.relative)),
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
PROBE_LEGEND = (
    "host-speed probe: a fixed piece of Python beside each window. If its CPU time changed, the cores had another "
    "speed beside that side; if only its time changed, others wanted them too."
)


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """All there is to say, as pieces of text; nothing where nothing was measured on both sides."""
    for split in diagnosis.splits:
        yield split_text(split)
    if diagnosis.splits:
        yield hanging(SPLIT_LEGEND, 0)
    if any(split.probe for split in diagnosis.splits):
        yield hanging(PROBE_LEGEND, 0)
    for start in diagnosis.start_ups:
        change = start.change
        relative = f" ({_diagnosis_percents(change.relative)} %)" if change.relative is not None else ""
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
    rows += [replace(_times(1000, each), name=f"{each.name}, ms") for each in split.probe]
    shown = table(rows, DIAGNOSIS_COLUMNS, always=len(DIAGNOSIS_COLUMNS))
    return "\n".join([heading, shown, *(hanging(line, 2) for line in gate_findings(split))])


def gate_findings(split: Split) -> Iterator[str]:
    """The part that explains most of the change, by steps and by the GPU; the unknown parts, with reasons."""
    change, sides = split.total.relative, {"baseline": split.baseline, "candidate": split.candidate}
    if change is None or abs(change) < NOTABLE:
        yield f"time per request changed by less than {percent(NOTABLE)}: there is nothing to explain at this load"
    else:
        for found in filter(None, map(explaining, (split.by_step, split.by_device))):
            part, share = found
            more = ", and the other part went the other way" if round(share, 2) > 1 else ""
            yield f"most of the change is {part.name}: {percent(share)} of it{more}"
        count, step = _diagnosis_percents(split.steps.relative), _diagnosis_percents(split.step.relative)
        yield f"steps per request {count} %, time per step {step} %"
    if any(abs(part.relative or 0.0) >= NOTABLE for part in split.probe):  # the total may have that from the host
        changed = ", ".join(f"{part.name} {_diagnosis_percents(part.relative)} %" for part in split.probe)
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


def _diagnosis_percents(relative: float | None) -> str:
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


CACHES = {
    "warm": "compile caches were warm: each side was launched before the first pair",
    "cold": "compile caches were cold: each launch had empty ones",
}
WORDS = {State.PASSES: "pass", State.FAILS: "fail", State.INCONCLUSIVE: "inconclusive"}  # as a gate says them
KEY = (
    "candidate / baseline: Hodges-Lehmann estimate over the pairs. spread: standard deviation of a pair. detectable: "
    "of what does not pass, the smallest worsening of it alone that so many pairs find with a power of 90 %. "
    "Without a margin: shown, not gated. Mean ratio: the geometric mean, which an interim analysis tests; both bounds "
    "allow for the noise of so many pairs."
)
Row = tuple[Comparison, bool]  # what was compared, and whether it is gated
COLUMNS: tuple[Column[Row], ...] = (
    Column("endpoint", lambda row: row[0].name, "left"),
    Column("better", lambda row: row[0].better, "left", rank=5),
    Column("pairs", lambda row: str(row[0].n), rank=3),
    Column("candidate /\nbaseline", lambda row: ABSENT if row[0].ratio is None else f"{row[0].ratio.value:.4f}"),
    Column("95 %", lambda row: interval_text(row[0].ratio, "{:.4f}".format), "left", rank=1),
    Column("spread\n%", lambda row: _percents(row[0].sd), rank=4),
    Column("detectable\n% worse", lambda row: _percents(_detectable(*row)), rank=2),
    Column("margin\n%", lambda row: f"{100 * row[0].margin:.3g}" if row[1] else ABSENT, rank=3),
    Column("", lambda row: WORDS[row[0].outcome] if row[1] else "", "left"),
)

Step = tuple[str, InterimAnalysis]  # of which endpoint
INTERIM: tuple[Column[Step], ...] = (
    Column("interim analysis", lambda step: step[0], "left"),
    Column("pairs", lambda step: str(step[1].pairs)),
    Column("mean\nratio", lambda step: f"{step[1].mean:.4f}"),
    Column("fails if mean\nis worse than", lambda step: f"{step[1].fails_beyond:.4f}"),
    Column("passes if mean\nis better than", lambda step: f"{step[1].passes_within:.4f}"),
    Column("", lambda step: WORDS[step[1].outcome], "left"),
)


def gate_text(gated: Gated) -> str:
    """Text of a gate: what was compared, the table, the diagnosis if it failed, and the launches that do not count."""
    found = endpoints_text(gated.gated, gated.shown) if gated.gated else "nothing was compared"
    pieces = [title(gated), *([SIMULATED] if is_simulated(gated) else ())]
    pieces += [*(f"  {side}: {words}" for side, words in _sides(gated)), f"  {caches_text(gated)}"]
    pieces += ["", found, *_exact(gated)]
    pieces += [f"next: {more}"] if (more := next_step(gated)) else []
    pieces += [outputs] if (outputs := outputs_text(gated)) else []
    pieces += [f"left out: {why}" for why in gated.dropped]
    pieces += [*interim_lines(gated.gated), "", hanging(KEY, 0)]
    for lines in diagnosis(gated):
        pieces += ["", lines]
    return "\n".join(pieces)


def title(gated: Gated) -> str:
    """The outcome; of fewer pairs than an outcome takes, that speed is not judged."""
    if has_few_pairs(gated):
        return f"{gated.model}: speed NOT JUDGED after {counted(len(gated.pairs), 'pair')} of launches"
    return f"{gated.model}: {WORDS[gated.outcome].upper()} after {len(gated.pairs)} pairs of launches"


def is_simulated(gated: Gated) -> bool:
    """Whether its numbers come from a formula."""
    return any(pair.baseline.measurements[0].environment.platform == "simulated" for pair in gated.pairs)


def has_few_pairs(gated: Gated) -> bool:
    """Whether an inconclusive gate has some pairs, and fewer than its first look takes."""
    return gated.outcome is State.INCONCLUSIVE and 0 < len(gated.pairs) < FIRST_LOOKS[0]


def next_step(gated: Gated) -> str:
    """What may decide an inconclusive gate; empty of another one, and where no pair counts."""
    if gated.outcome is not State.INCONCLUSIVE or not gated.pairs:
        return ""
    unknown = any(each.state is State.INCONCLUSIVE for each in gated.exact)
    if unknown or any(each.n < len(gated.pairs) for each in gated.gated):
        return "repair what is missing (slmserve doctor), and gate again"
    waits = not all(each.decided_at for each in gated.gated)  # else the runner's noise hides what it would find
    if waits and len(gated.pairs) < gated.terms.pairs and not gated.dropped:
        return goes_on(gated)
    more = f"-o slm_gate_pairs={2 * gated.terms.pairs}"
    return f"a new gate with {more}, a quieter host (slmserve doctor) or a larger margin may decide"


def goes_on(gated: Gated) -> str:
    """Options that measure what a gate lacks for its next planned look, and up to which time it may take by the pairs
    there, with their engine starts: a pair more, for the launches that do not count. The median leaves out a pause."""
    there, most = len(gated.pairs), gated.terms.pairs
    look = next_look(there, gated.terms) or most
    began = [min(m.measured_at for launch in pair.launches for m in launch.measurements) for pair in gated.pairs]
    times = map(datetime.fromisoformat, began)
    more = counted(look - there, "more pair")
    if there > 1:
        each_s = median((after - before).total_seconds() for before, after in pairwise(times))
        more += f", about {(look - there + 1) * each_s:.0f} s, can decide"
        more += f", and all {most} take {(most - there + 1) * each_s:.0f} s" if look < most else ""
    else:
        more += " can decide"
    first = gated.pairs[0].baseline.measurements
    loads = ",".join(f"{m.load.max_concurrency}" for m in first)
    return f"{more}: {first[0].environment.mode} --slm-gate --slm-resume --slm-concurrency={loads}"


def diagnosis(gated: Gated) -> list[str]:
    """What is to be said of a gate that fails, from the launches that count; nothing of any other."""
    if gated.outcome is not State.FAILS:
        return []
    baseline, candidate = (measurements(gated, side) for side in SIDES)
    return list(diagnosis_lines(diagnose(baseline, candidate)))


def measurements(gated: Gated, side: Side) -> list[Measurement]:
    return [m for pair in gated.pairs for m in pair.launch(side).measurements]


def _exact(gated: Gated) -> Iterator[str]:
    """A line for each verdict on what is no matter of chance."""
    labels = {endpoint.name: endpoint.label for endpoint in EXACT}
    for verdict in gated.exact:
        yield f"{labels.get(verdict.claim, verdict.claim)}: {WORDS[verdict.state]}, {verdict.why}"


def caches_text(gated: Gated) -> str:
    """State of the compilation caches, and the seconds that compiling or reading took of a start where engines report
    it. A cache is warm where it is hit."""
    sides = ((side, [m.resolved.compile_s for m in measurements(gated, side)]) for side in SIDES)
    told = {side: median(known) for side, values in sides if (known := [s for s in values if s is not None])}
    if len(told) < len(SIDES):
        return CACHES[gated.caches]
    took = " and ".join(figure(told[side], 2) for side in SIDES)
    return f"{CACHES[gated.caches]}; compiling took {took} s of a start"


def outputs_text(gated: Gated) -> str:
    """Comparison of both sides' tokens, same or different, of which dummy weights prove nothing; empty where none were
    requested, and of real weights, which have a verdict."""
    seen = gated.answers
    if seen is None or any(verdict.claim == OUTPUTS for verdict in gated.exact):
        return ""
    asked = f"outputs: the first {seen.tokens} greedy tokens of {counted(seen.requests, 'request')}"
    unsteady = "" if seen.steady else "; launches of one side differ among themselves"
    unsteady += "; whether they are right, dummy weights cannot tell"
    if seen.differs is None:
        return f"{asked} are the same{unsteady}"
    at = seen.differs
    tokens = f"{at.baseline} and {at.candidate}"
    return f"{asked} differ from token {at.position} of request {at.request} on ({tokens}){unsteady}"


def calibration_text(model: str, calibration: Calibration, measured_at: str) -> str:
    """The detection rates of a model's gates on this runner, from a calibration."""
    seen, margin = calibration.unchanged, percent(calibration.terms.margin)
    worse = ", ".join(f"{name} {percent(rates.fail)}" for name, rates in calibration.worse.items())
    return (
        f"{model}, by {calibration.n} pairs of equal sides ({measured_at[:10]}): an unchanged candidate passes in "
        f"{percent(seen.passed)} and fails in {percent(seen.fail)} of gates, after {seen.pairs:.1f} pairs in the mean; "
        f"one that is worse by the margin ({margin}, or an endpoint's own) fails: {worse}"
    )


def _sides(gated: Gated) -> Iterator[tuple[Side, str]]:
    """Description of each side, from its first launch that counts."""
    for side in SIDES if gated.pairs else ():
        each = gated.pairs[0].launch(side).measurements
        loads = " and ".join(str(m.load.max_concurrency) for m in each)
        vllm, spec = each[0].environment.vllm, each[0].spec
        words = [f"vLLM {vllm}" if vllm else "no vLLM", *([spec.python] if spec.python else [])]
        words += [f"max_num_seqs {spec.max_num_seqs:,}", f"max_num_batched_tokens {spec.max_num_batched_tokens:,}"]
        words += ["eager"] if spec.enforce_eager else []
        words += [f"{name}={value}" for name, value in (*spec.env, *spec.extra)]
        yield side, f"{', '.join(words)}, at {loads} requests in flight"


def as_markdown(gates: Sequence[Gated]) -> str:
    """Gates as Markdown for the summary of a workflow, or for a comment on a pull request."""
    return "\n".join(line for gated in gates for line in _markdown(gated))


def _markdown(gated: Gated) -> Iterator[str]:
    yield f"### {title(gated)}"
    yield ""
    yield from (f"**{SIMULATED}**", "") if is_simulated(gated) else ()
    yield from (f"- {side}: {words}" for side, words in _sides(gated))
    yield f"- {caches_text(gated)}"
    yield ""
    yield f"| {' | '.join(column.name or 'outcome' for column in COLUMNS)} |"
    yield f"|{'|'.join('---:' if column.side == 'right' else '---' for column in COLUMNS)}|"
    for each in (*gated.gated, *gated.shown):
        yield f"| {' | '.join(column.cell((each, each in gated.gated)) for column in COLUMNS)} |"
    yield ""
    yield from (f"- {e.name}: {WORDS[e.outcome]}, {e.why}" for e in gated.gated if e.outcome is not State.PASSES)
    yield from (f"- {line}" for line in _exact(gated))
    yield from ("", f"**Next:** {more}") if (more := next_step(gated)) else ()
    yield from ("", outputs) if (outputs := outputs_text(gated)) else ()
    yield from (f"\nleft out: {why}" for why in gated.dropped)
    if lines := diagnosis(gated):
        yield from ("", "<details><summary>Where the time goes, and what differs</summary>", "", "```")
        yield from lines
        yield from ("```", "", "</details>")
    yield ""


def gate_facts(gated: Gated) -> dict[str, Any]:
    """Facts for JSON. exact: verdicts by claim on what is no matter of chance."""
    return {
        **facts(gated, "model", "dropped", "answers", "caches"),
        "outcome": WORDS[gated.outcome],
        "pairs": len(gated.pairs),
        "sides": dict(_sides(gated)),
        "gated": [comparison_facts(each) for each in gated.gated],
        "shown": [comparison_facts(each, gated=False) for each in gated.shown],
        "exact": {each.claim: each for each in gated.exact},
    }


def endpoints_text(found: Sequence[Comparison], shown: Sequence[Comparison] = ()) -> str:
    """Table, and why each gated endpoint has its outcome. shown: endpoints that are not gated."""
    rows = [*((each, True) for each in found), *((each, False) for each in shown)]
    said = [(each.name, f"{WORDS[each.outcome]}: {each.why}") for each in found]
    return "\n".join([table(rows, COLUMNS, always=len(COLUMNS)), "", named_lines(said)])


def interim_steps(found: Sequence[Comparison]) -> list[Step]:
    return [(each.name, step) for each in found for step in each.interim]


def interim_lines(found: Sequence[Comparison]) -> list[str]:
    """The boundaries at each interim analysis, as a table below an empty line; nothing before the first one."""
    steps = interim_steps(found)
    return ["", table(steps, INTERIM)] if steps else []


def _detectable(seen: Comparison, gated: bool) -> float | None:
    """None of what passes: its noise was small enough."""
    return None if gated and seen.outcome is State.PASSES else seen.detectable


def _percents(share: float | None) -> str:
    return figure(None if share is None else 100 * share, 2)


def comparison_facts(seen: Comparison, gated: bool = True) -> dict[str, Any]:
    """Facts for JSON. worse, margin, detectable: shares, negative if better. gated: with what a gated endpoint has."""
    found = facts(seen, "name", "better", "n", "decided_at", "ratio", "sd", "detectable")
    found["worse"] = None if seen.worse is None else math.expm1(seen.worse)
    return {**found, "outcome": WORDS[seen.outcome], **facts(seen, "why", "margin")} if gated else found
