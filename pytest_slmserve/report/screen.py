"""The summary at the end of a run, which fits on one screen; all tables; and Markdown for workflows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.gate.launch_pairs import nothing_counts
from pytest_slmserve.analysis.points import Point, engines
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.store import make_folder
from pytest_slmserve.report import compare, deployments, gate, ledger, loads, sweeps
from pytest_slmserve.report.answer import answer_of
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.findings import Findings, first_of_each_kind, reason_kind, valid_cell
from pytest_slmserve.report.section import (
    FiveLines,
    Legend,
    Section,
    Table,
    Verbatim,
    in_units,
    renamed,
    section_markdown,
    section_text,
)
from pytest_slmserve.report.text_table import command_lines, counted, figure, folded, laid_out, layout, table_parts
from pytest_slmserve.report.verdicts import COLOURS, Colour, by_outcome, inconclusive, tally, unexpected, verdict_lines
from pytest_slmserve.schema.errors import Detail, regular, write_file

MOST_LINES = 23  # without the line that pytest prints above them
# Most lines of a sentence: of verdicts and notes, and of all else. The first pair that fits is used.
LONGEST = ((99, 99), (9, 4), (9, 3), (9, 2), (2, 2), (2, 1), (1, 1))
ON_A_PAGE = 100  # columns and lines of the summary of a workflow

Line = tuple[str, Colour | None]
VERDICT, OTHER = 0, 1  # kinds of sentences: indices of a pair of LONGEST


class Words(NamedTuple):
    """Sentence of the summary, or a line that is shown unchanged.

    Attributes:
        kind: index into a pair of LONGEST, or None.
        least: number of lines that the sentence may always have.
    """

    text: str
    colour: Colour | None = None
    kind: int | None = None
    least: int = 0

    def within(self, longest: tuple[int, int]) -> list[Words]:
        """Return the lines as shown, limited by kind."""
        if not (most := max(self.least, 0 if self.kind is None else longest[self.kind])):
            return [self]
        text, room = self.text, most * (layout().width - 4)
        cut = shorten(text, room, placeholder=" ...", break_on_hyphens=False) if len(text) > room else text
        indent = text[: len(text) - len(text.lstrip())]
        return [Words(line, self.colour) for line in folded(indent + cut.lstrip()).split("\n")]


@dataclass(slots=True)
class ScreenPart:
    """Part of the summary that shrinks by dropping its last entries."""

    entries: Sequence[Sequence[Words]]  # blocks of sentences
    unit: str  # name of an entry
    head: Sequence[Words] = ()  # shrinks to its first line without entries
    foot: Sequence[Words] = ()
    weight: int = 1  # a part of weight 3 keeps three times the lines of one of weight 1
    left_out: int = 0  # number of dropped entries

    @property
    def lines(self) -> list[Words]:
        none_shown = f"{counted(self.left_out, self.unit)}, which the tables have"
        more = f"and {counted(self.left_out, f'more {self.unit}')}" if self.entries else none_shown
        return [*self.head, *chain(*self.entries), *([Words(f"  {more}")] if self.left_out else []), *self.foot]

    @property
    def excess(self) -> float:
        """Lines that can be dropped, divided by the weight."""
        return (sum(map(len, self.entries)) + len(self.head) + len(self.foot) - 1) / self.weight if self.entries else 0

    def in_units(self, unit: str) -> ScreenPart:
        head, foot, *entries = (
            [words._replace(text=renamed(words.text, unit)) for words in block]
            for block in (self.head, self.foot, *self.entries)
        )
        return replace(self, entries=entries, head=head, foot=foot)

    def within(self, longest: tuple[int, int]) -> ScreenPart:
        """Return the part with the lines of its sentences limited by kind."""
        head, *entries = (
            [line for words in block for line in words.within(longest)] for block in (self.head, *self.entries)
        )
        return replace(self, head=head, entries=entries)


def screen(found: Findings, most: int = MOST_LINES) -> list[Line]:
    """Return the colored lines of the summary, at most `most` if they can shrink that far."""
    five = answer_of(found)
    served = (part.in_units(found.unit) for part in (*_measured_parts(found), *_gate_parts(found, five)))
    answers = [_answer_part(five).in_units(five.unit or found.unit)] if five else []
    full = [*answers, *served, *_judged_parts(found, five)]
    for longest in LONGEST:
        parts = [part.within(longest) for part in full]
        if sum(len(part.lines) for part in parts) <= most:
            break
    while sum(len(part.lines) for part in parts) > most:
        largest = max(reversed(parts), key=lambda part: part.excess)
        if not largest.excess:
            break
        *largest.entries, last = largest.entries
        if not largest.entries and not largest.head:
            largest.head = last[:1]
            continue
        if not largest.entries:
            largest.head, largest.foot = largest.head[:1], ()
        largest.left_out += 1
    return [(words.text, words.colour) for part in parts for words in part.lines]


def _table_part(shown: Table, unit: str, weight: int = 1) -> ScreenPart:
    head, rows, foot = table_parts(shown.rows, shown.columns)
    above = [Words(shown.caption, kind=OTHER), *map(Words, head)]
    return ScreenPart([list(map(Words, lines)) for lines in rows], unit, above, list(map(Words, foot)), weight)


def _measured_parts(found: Findings) -> Iterator[ScreenPart]:
    for shown in sweeps.overview_tables(found):
        yield _table_part(in_units(shown, found.unit), "model", weight=6)
    yield ScreenPart([[Words(text, None, OTHER, 2)] for text in deployments.best_deployments(found)], "deployment")
    for section in loads.job_sections(found.jobs):
        shown = next(part for part in section.parts if isinstance(part, Table))
        if len(shown.rows) > 1:
            yield _table_part(in_units(shown, found.unit), "job")
            continue
        [job] = shown.rows
        served = f"{figure(job.requests_per_s, 4)} requests/s, {figure(job.output_tokens_per_s, 4)} tokens/s"
        lengths = f"{job.workload.mean_prompt_tokens:.0f}/{job.output_tokens:.0f} tokens"
        latency = f"mean E2E {figure(job.e2e_s)} s ({job.requests:,} of {lengths}, {job.load.pace})"
        yield ScreenPart([[Words(f"job: {job.model}: {served}, {latency}", least=2)]], "job")


def _answer_part(five: FiveLines) -> ScreenPart:
    answer = Words(five.answer, COLOURS[five.look], VERDICT, 3)
    told = [Words(f"  {text}", kind=VERDICT, least=3) for text in five.below]
    place = next(number for number, words in enumerate(told) if words.text.startswith("  do this: "))
    told[place : place + 1] = [Words(line) for line in command_lines("  do this:", five.do_this)]
    return ScreenPart([], "line", [answer, *told])


def _gate_parts(found: Findings, five: FiveLines | None) -> Iterator[ScreenPart]:
    colours = {state: COLOURS[look] for state, look in gate.LOOKS.items()}
    worst, told_above = gate.WORST, five.why if five else ""
    for gated in found.gates:
        # With too few pairs, only exact verdicts are shown.
        compared = sorted(() if gate.has_few_pairs(gated) else gated.gated, key=lambda each: worst.index(each.outcome))
        shown = in_units(Table(compared, gate.COLUMNS), found.unit)
        above, rows, below = table_parts(compared, shown.columns)
        entries: list[list[Words]] = []
        for each, lines in zip(compared, rows):
            why = [] if each.outcome is State.PASSES else [Words(f"  {each.why}", None, VERDICT, 2)]
            entries.append([*(Words(line, colours[each.outcome]) for line in lines), *why])
        exact = [each for each in gated.exact if gated.pairs or each.state is not State.INCONCLUSIVE]
        for verdict in sorted(exact, key=lambda each: worst.index(each.state)):
            text = f"{verdict.claim}: {gate.WORDS[verdict.state]}, {verdict.why}"
            entries.append([Words(text, colours[verdict.state], VERDICT, 2)])
        if gated.dropped:
            entries.append([Words(f"excluded: {'; '.join(gated.dropped)}", kind=VERDICT)])
        releases = " and ".join(gate.compared_releases(gated))
        head = [Words(f"{gate.title(gated)}{releases and f': vLLM {releases}'}", colours[gated.outcome], VERDICT)]
        head += [] if gated.pairs else [Words(f"  {nothing_counts(gated.dropped, gated.lost)}", kind=VERDICT)]
        head += [Words(f"  {text}", kind=VERDICT) for text in gate.told_of(gated) if text not in told_above]
        more, options = gate.next_step(gated)
        text = f"  next: {more}{options and f': {options}'}"
        head += [Words(text, "yellow", least=3)] if more and more not in told_above else []
        head += [Words(f"  {gate.thresholds_text(gated)}", kind=VERDICT, least=2)] if compared else []
        head += map(Words, above if compared else ())
        yield ScreenPart(entries, "endpoint", head, list(map(Words, below)), weight=4)


def _judged_parts(found: Findings, five: FiveLines | None) -> Iterator[ScreenPart]:
    told = five is not None and five.answer.startswith("INCONCLUSIVE: ") and not found.gates  # of the first
    own = [[Words(f"inconclusive: {text}", "yellow", VERDICT)] for text in found.inconclusive]
    yield ScreenPart(own[told:], "inconclusive test", weight=3)
    if found.judged:
        kinds = by_outcome(found.outcomes)
        wrong = [[Words(f"  {text}", "red", VERDICT)] for text in unexpected(kinds)]
        colour: Colour = "red" if wrong else "yellow" if kinds["inconclusive"] else "green"
        counts = f"claims: {tally(kinds)}"
        head = [] if five and counts in five.why else [Words(counts, colour, VERDICT)]  # already in the lines above
        yield ScreenPart(wrong[not head :], "claim", head, weight=4)
        open_ones = [[Words(f"  {text}", "yellow", VERDICT)] for text in inconclusive(kinds, found.curves)]
        named = told and not (found.inconclusive or found.regression)
        yield ScreenPart(open_ones[named:], "reason", weight=2)
    counts, sentences = disturbances(found)
    if sentences:
        yield ScreenPart(
            [[Words(f"  {renamed(text, found.unit)}", kind=OTHER)] for text in sentences],
            "reason",
            [Words(counts, "yellow", OTHER)],
        )
    notes = [[Words(f"note: {note}", "yellow", VERDICT)] for note in found.notes]
    notes += [[Words(found.reused_text, kind=VERDICT)]] if found.reused else []
    yield ScreenPart(notes, "note")
    if found.curves or found.jobs or found.shared or found.gates:
        more = [] if five and five.where else ["more: -v"]
        if found.command and any(gated.outcome is State.FAILS for gated in found.gates):
            more = [*command_lines("to repeat it:", found.command), *more]
        written = [Words(found.written, kind=OTHER)] if found.written else []
        yield ScreenPart([], "path", [*written, *map(Words, more)])


STANDINGS = {
    "invalid": "invalid",
    "questionable": "questionable",
    "partial": "partial",
    "noisy": "noisy (included)",
}  # worst first


def disturbances(found: Findings) -> tuple[str, list[str]]:
    """Return the number of disturbed points, and a sentence for each kind of reason."""

    def reason(point: Point) -> str:
        return "; ".join(dict.fromkeys((*point.degraded, *point.problems))) or first_of_each_kind(point.noise)

    points: list[tuple[str, str, Point]] = []
    for curve, label in found.labelled:
        points += [(label, f"{point.concurrency}", point) for point in curve.points]
    points += [(f"{engines(p.models)}, {deployments.deployed(p)},", f"{p.concurrency}", p) for p in found.shared]
    points += [(f"{p.model}, jobs", "once" if p.load.at_once else f"{p.load.rate:g}/s", p) for p in found.jobs]
    wrong = [(STANDINGS.get(valid_cell(point), ""), label, load, point) for label, load, point in points]
    worst = [*STANDINGS.values()]
    wrong = sorted((each for each in wrong if each[0]), key=lambda each: worst.index(each[0]))
    sentences = []
    for (kind, _), group in grouped(wrong, lambda each: (each[0], reason_kind(reason(each[3])))).items():
        loads = grouped(dict.fromkeys((label, load) for _, label, load, _ in group), itemgetter(0)).items()
        names = "; ".join(f"{label} at {', '.join(load for _, load in same)}" for label, same in loads)
        sentences.append(f"{kind}: {names}: {reason(group[0][3])}")
    return f"disturbed: {len(wrong)} of {counted(len(points), 'point')}", sentences


def summary_lines(found: Findings, detail: Detail = "summary") -> Iterator[Line]:
    """Yield the summary, below all tables if `detail` asks for them."""
    with laid_out(every_column=detail == "all"):
        if detail != "summary":
            yield from tables(found)
            yield "", None
            found = replace(found, notes=(), reused={})
        yield from screen(found)


def subject_sections(found: Findings) -> dict[str, Iterable[Section | Legend]]:
    """Return all sections with their legends, by heading."""
    jobs, answers = loads.job_sections(found.jobs), [answer_of(found)] if found.gates or found.regression else []
    sections: dict[str, Iterable[Section | Legend]] = {
        "Models": sweeps.sweep_sections(found),
        "Replicas": deployments.replica_sections(found.curves, found.shared),
        "Several GPUs": deployments.gpus_sections(found.curves),
        "Prefix cache": sweeps.hit_rate_sections(found.curves),
        "Structured output": sweeps.format_sections(found.curves),
        "Interfaces": deployments.interfaces_sections(found.curves),
        "Jobs": [*jobs, Legend(loads.JOB_LEGEND)] if jobs else [],
        "Energy": sweeps.energy_sections(found),
        "History": compare.history_sections(found.history),
        "Releases": ledger.ledger_sections(found.gates),
        "Answer": [five.section for five in answers if five],
        "Gate": map(gate.gate_section, found.gates),
        "Loads": loads.load_sections(found.loads, loads.ValidityCriteria(found.slo)),
    }
    return {name: (in_units(each, found.unit) for each in shown) for name, shown in sections.items()}


def tables(found: Findings) -> Iterator[Line]:
    for heading, shown in subject_sections(found).items():
        if heading == "History" and found.judged:  # claims are about the sections above
            yield from ((folded(text), colour) for text, colour in verdict_lines(found.outcomes))
        yield from ((f"{section_text(each)}\n", None) for each in shown)
    yield from ((folded(f"note: {note}"), "yellow") for note in found.notes)
    if found.reused:
        each = ", ".join(f"{name} ({n})" for name, n in found.reused.items())
        yield folded(f"{found.reused_text}: {each}"), None


def write_for_others(found: Findings, records: str | Path) -> str:
    """Write gates as JSON and Markdown next to the records, and a summary for the GitHub workflow.

    Returns:
        A sentence with the paths, or with the reason why nothing was written; empty without gates.
    """
    beside, page = Path(records).parent / "gate.json", os.environ.get("GITHUB_STEP_SUMMARY")
    sections = [gate.five_lines(found.gates, found).section] if found.gates else []
    sections = [in_units(each, found.unit) for each in (*sections, *map(gate.gate_section, found.gates))]
    markdown = "\n".join(map(section_markdown, sections))
    try:
        if page:
            lines = [f"failed: {text}" for text in found.failed]
            if not found.gates or found.curves or found.judged:
                with laid_out(ON_A_PAGE):
                    lines += [text for text, _ in screen(replace(found, gates=()), most=ON_A_PAGE)]
            sections += [Section("To repeat it", [Verbatim(found.command, "sh")])] if found.command and sections else []
            sections += [Section("pytest-slmserve", [Verbatim("\n".join(lines))])] if lines else []
            with open(page, "a", encoding="utf-8", opener=regular) as file:
                file.write("\n".join([*map(section_markdown, sections), ""]))
        if not found.gates:
            return ""
        make_folder(beside.parent)
        write_file(beside, as_json(gate.gate_facts(each, found) for each in found.gates) + "\n")
        write_file(beside.with_suffix(".md"), markdown)
    except OSError as error:
        return f"not written for others: {error}"
    return f"written: {beside} and {beside.with_suffix('.md').name}"
