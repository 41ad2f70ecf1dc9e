"""Summary at the end of a run: what a person wants to know first, in so many lines that nothing scrolls away. With all
tables above it if they were asked for, and as Markdown for a workflow."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from textwrap import shorten

from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.gate.launch_pairs import SIDES
from pytest_slmserve.analysis.points import Point, engines
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.store import make_folder
from pytest_slmserve.report import deployments
from pytest_slmserve.report import gate as gates
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.compare import history_report
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.loads import JOB_LEGEND, job_sections
from pytest_slmserve.report.points import first_of_each_kind, reason_kind, valid_cell
from pytest_slmserve.report.section import Legend, Section, Table, section_texts
from pytest_slmserve.report.sweeps import energy_sections, overview_tables, sweep_sections
from pytest_slmserve.report.text_table import command_lines, counted, figure, folded, laid_out, layout, table_parts
from pytest_slmserve.report.verdicts import COLOURS, Colour, by_outcome, inconclusive, tally, unexpected, verdict_lines
from pytest_slmserve.schema.errors import Detail
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.records import SIMULATED

MOST_LINES = 23  # and the line that pytest puts above them
# Lines of one sentence, of verdicts and notes and of all else, as there is room; the tables have all of it.
LONGEST = ((99, 99), (9, 4), (9, 3), (9, 2), (2, 2), (2, 1), (1, 1))
ON_A_PAGE = 100  # columns, and lines, of a summary on the page of a workflow

Line = tuple[str, Colour | None]


@dataclass(slots=True)
class ScreenPart:
    """A part of the summary that can shrink.

    entries: Blocks of lines. The last ones go first if there is no room.
    head, foot: Lines around the entries. In the end only the first line of the head stays.
    unit: What an entry is, for the line that counts those that went.
    weight: A part of weight 3 keeps three times the lines of one of weight 1.
    left_out: How many entries went.
    """

    head: list[Line]
    entries: list[list[Line]]
    unit: str
    weight: int = 1
    foot: list[Line] = field(default_factory=list)
    left_out: int = 0

    @property
    def lines(self) -> list[Line]:
        """Lines of the part as they are shown."""
        none_shown = f"{counted(self.left_out, self.unit)}, which the tables have"
        more = f"and {counted(self.left_out, f'more {self.unit}')}" if self.entries else none_shown
        left_out: list[Line] = [(f"  {more}", None)] if self.left_out else []
        return [*self.head, *(line for entry in self.entries for line in entry), *left_out, *self.foot]

    @property
    def excess(self) -> float:
        """Lines that the part could do without, divided by its weight."""
        return (sum(map(len, self.entries)) + len(self.head) + len(self.foot) - 1) / self.weight if self.entries else 0


def screen(found: Findings, most: int = MOST_LINES) -> list[Line]:
    """Return the lines of the summary, each with a colour. most: number of lines that there is room for."""
    for of_verdicts, of_others in LONGEST:
        parts = [
            *_measured_parts(found, of_others),
            *_gate_parts(found, of_verdicts),
            *_judged_parts(found, of_verdicts, of_others),
        ]
        if sum(len(part.lines) for part in parts) <= most:
            break
    while sum(len(part.lines) for part in parts) > most:
        largest = max(reversed(parts), key=lambda part: part.excess)
        if not largest.excess:
            break
        last = largest.entries.pop()
        if largest.entries:
            largest.left_out += 1
        elif largest.head:
            largest.head, largest.foot, largest.left_out = largest.head[:1], [], largest.left_out + 1
        else:
            largest.head = last[:1]
    return [line for part in parts for line in part.lines]


def _plain(lines: Sequence[str]) -> list[Line]:
    return [(line, None) for line in lines]


def _block(text: str, longest: int, colour: Colour | None = None) -> list[Line]:
    """Return a sentence as lines of the summary, cut if it has more than `longest` of them."""
    room = longest * (layout().width - 4)
    cut = shorten(text, room, placeholder=" ...", break_on_hyphens=False) if len(text) > room else text
    indent = text[: len(text) - len(text.lstrip())]
    return [(line, colour) for line in folded(indent + cut.lstrip()).split("\n")]


def _table_part(heading: str, shown: Table, longest: int, unit: str, weight: int = 1) -> ScreenPart:
    """Return a table as a part of the summary: each row is an entry."""
    parts = table_parts(shown.rows, shown.columns)
    head = [*_block(heading, longest), *_plain(parts.head)]
    return ScreenPart(head, [_plain(lines) for lines in parts.rows], unit, weight, _plain(parts.foot))


def _measured_parts(found: Findings, longest: int) -> Iterator[ScreenPart]:
    """Yield a table of sweeps for each device, the best replicas, and fixed-size workloads: a table for each host, or a
    sentence if there is one."""
    for shown in overview_tables(found):
        yield _table_part(shown.caption, shown, longest, "model", weight=6)
    if entries := [_block(text, max(longest, 2)) for text in deployments.best_deployments(found)]:
        yield ScreenPart([], entries, "deployment")
    for section in job_sections(found.jobs):
        shown = next(part for part in section.parts if isinstance(part, Table))
        if len(shown.rows) > 1:
            yield _table_part(section.title, shown, longest, "job")
            continue
        [job] = shown.rows
        served = f"{figure(job.requests_per_s, 4)} requests/s, {figure(job.output_tokens_per_s, 4)} tokens/s"
        lengths = f"{job.workload.mean_prompt_tokens:.0f}/{job.output_tokens:.0f} tokens"
        latency = f"mean E2E {figure(job.e2e_s)} s ({job.requests:,} of {lengths}, {job.load.pace})"
        yield ScreenPart([], [_block(f"job: {job.model}: {served}, {latency}", 2)], "job")


def _gate_parts(found: Findings, longest: int) -> Iterator[ScreenPart]:
    """Yield each gate with its endpoints, the worst first, and why one does not pass. A gate with too few pairs to
    decide shows only its exact verdicts."""
    colours = {state: COLOURS[look] for state, look in gates.LOOKS.items()}
    worst = [State.FAILS, State.INCONCLUSIVE, State.PASSES]
    for gated in found.gates:
        compared = sorted(() if gates.has_few_pairs(gated) else gated.gated, key=lambda each: worst.index(each.outcome))
        parts = table_parts([(each, True) for each in compared], gates.COLUMNS)
        entries: list[list[Line]] = []
        for each, lines in zip(compared, parts.rows):
            why = [] if each.outcome is State.PASSES else _block(f"  {each.why}", max(longest, 2))
            entries.append([*((line, colours[each.outcome]) for line in lines), *why])
        for verdict in sorted(gated.exact, key=lambda each: worst.index(each.state)):
            text = f"{verdict.claim}: {gates.WORDS[verdict.state]}, {verdict.why}"
            entries.append(_block(text, max(longest, 2), colours[verdict.state]))
        if gated.dropped:
            entries.append(_block(f"left out: {'; '.join(gated.dropped)}", longest))
        sides = [pair.launch(side).measurements[0].environment.vllm for pair in gated.pairs[:1] for side in SIDES]
        releases = f": vLLM {sides[0]} and {sides[1]}" if len(set(sides)) > 1 else ""
        more = gates.next_step(gated)
        head = [
            *_block(f"{gates.title(gated)}{releases}", longest, colours[gated.outcome]),
            *(_block(SIMULATED, longest) if gates.is_simulated(gated) else ()),
            *(_block(f"  next: {more}", 3, "yellow") if more else ()),
            *_plain(parts.head if compared else []),
        ]
        yield ScreenPart(head, entries, "endpoint", weight=4, foot=_plain(parts.foot))


def _judged_parts(found: Findings, of_verdicts: int, of_others: int) -> Iterator[ScreenPart]:
    """Yield how many claims pass, which are not as expected and what would resolve the others, what disturbed the
    points, notes, and where the results are."""
    if own := [_block(f"inconclusive: {text}", of_verdicts, "yellow") for text in found.inconclusive]:
        yield ScreenPart([], own, "inconclusive test", weight=3)
    if found.judged:
        kinds = by_outcome(found.judged, strict=found.strict)
        wrong = unexpected(kinds)
        colour: Colour = "red" if wrong else "yellow" if kinds["inconclusive"] else "green"
        head = _block(f"claims: {tally(kinds)}", of_verdicts, colour)
        yield ScreenPart(head, [_block(f"  {text}", of_verdicts, "red") for text in wrong], "claim", weight=4)
        entries = [_block(f"  {text}", of_verdicts, "yellow") for text in inconclusive(kinds, found.curves)]
        yield ScreenPart([], entries, "reason", weight=2)
    counts, sentences = disturbances(found)
    if sentences:
        entries = [_block(f"  {text}", of_others) for text in sentences]
        yield ScreenPart(_block(counts, of_others, "yellow"), entries, "reason")
    notes = [_block(f"note: {note}", of_verdicts, "yellow") for note in found.notes]
    notes += [_block(found.reused_text, of_verdicts)] if found.reused else []
    if notes:
        yield ScreenPart([], notes, "note")
    if found.curves or found.jobs or found.shared or found.gates:
        more = ["more: -v, or --slm-report=tables"]
        if found.archives:
            paths = shlex.join(min(path, os.path.relpath(path), key=len) for path in found.archives)
            more = [f"archive: {paths}", f"more: slmserve report {paths}"]
        if found.command and any(gated.outcome is State.FAILS for gated in found.gates):
            more = [*command_lines("to repeat it:", found.command), *more]
        yield ScreenPart([*(_block(found.written, of_others) if found.written else []), *_plain(more)], [], "path")


STANDINGS = {"NO": "INVALID", "degraded": "degraded", "partly": "some left out", "noisy": "noisy, kept"}  # worst first


def disturbances(found: Findings) -> tuple[str, list[str]]:
    """Return how many points were disturbed, and a sentence for each kind of reason, the worst first."""

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
    """Yield the lines at the end of a run: the summary, below all tables if `detail` asks for them."""
    with laid_out(every_column=detail == "all"):
        if detail != "summary":  # also the notes that the summary has no room for
            yield from tables(found)
            yield from ((folded(f"note: {note}"), "yellow") for note in found.notes)
            if found.reused:
                each = ", ".join(f"{name} ({n})" for name, n in found.reused.items())
                yield folded(f"{found.reused_text}: {each}"), None
            yield "", None
            found = replace(found, notes=(), reused={})
        yield from screen(found)


def subject_sections(found: Findings) -> dict[str, Iterable[Section | Legend]]:
    """Return the sections of everything that was measured, with their legends, by heading. Gates, the history over
    releases and single loads have sections of their own. A section is made when it is read."""
    jobs = job_sections(found.jobs)
    return {
        "Models": sweep_sections(found),
        "Replicas": deployments.replica_sections(found.curves, found.shared),
        "Several GPUs": deployments.gpus_sections(found.curves),
        "Interfaces": deployments.interfaces_sections(found.curves),
        "Jobs": [*jobs, Legend(JOB_LEGEND)] if jobs else [],
        "Energy": energy_sections(found),
    }


def tables(found: Findings) -> Iterator[Line]:
    """Yield every table and verdict, as pieces of text with a colour."""
    yield from ((text, None) for each in subject_sections(found).values() for text in section_texts(each))
    if found.judged:
        yield from ((folded(text), colour) for text, colour in verdict_lines(found.judged, strict=found.strict))
    yield from ((f"{folded(text)}\n", None) for text in history_report(found.history))
    yield from ((text, None) for text in section_texts(map(gates.gate_section, found.gates)))


def write_for_others(found: Findings, records: str | Path) -> str:
    """Write gates as JSON and Markdown next to the records, and the findings on the page of a GitHub workflow.

    Returns:
        The paths next to the records, or why nothing was written: the records hold the measurements anyway.
    """
    beside, page = Path(records).parent / "gate.json", os.environ.get("GITHUB_STEP_SUMMARY")
    try:
        if page:
            with Path(page).open("a", encoding="utf-8") as file:
                file.write(f"{as_page(found)}\n")
        if not found.gates:
            return ""
        make_folder(beside.parent)
        beside.write_text(as_json(map(gates.gate_facts, found.gates)) + "\n", "utf-8")
        beside.with_suffix(".md").write_text(gates.as_markdown(found.gates), "utf-8")
    except OSError as error:
        return f"not written for others: {error}"
    return f"written: {beside} and {beside.with_suffix('.md').name}"


def as_page(found: Findings) -> str:
    """Return Markdown: the gates in full, the tests that failed, and the summary if there is more than gates."""
    markdown = gates.as_markdown(found.gates)
    if found.command and found.gates:
        markdown += f"To repeat it:\n\n```sh\n{printable(found.command, layout='')}\n```\n\n"
    lines = [f"failed: {printable(text, layout='')}" for text in found.failed]  # never folded: none can end the block
    if not found.gates or found.curves or found.judged:
        with laid_out(ON_A_PAGE):
            lines += [text for text, _ in screen(replace(found, gates=()), most=ON_A_PAGE)]
    text = "\n".join(lines)
    return f"{markdown}### pytest-slmserve\n\n```text\n{text}\n```\n" if lines else markdown
