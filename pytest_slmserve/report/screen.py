"""The last screen of a run: what a person wants to know first, in so many lines that nothing scrolls away."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from textwrap import shorten

from pytest_slmserve.analysis.gate.launch_pairs import SIDES
from pytest_slmserve.analysis.points import Point, engines, ratio
from pytest_slmserve.analysis.stats.estimates import grouped, percent
from pytest_slmserve.analysis.sweep.batching import ATTAINMENT
from pytest_slmserve.analysis.sweep.curve import Curve, is_main_sweep, is_sweep, labels, obstacle
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.archive.store import make_folder
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.compare import history_report
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.gate.text import COLUMNS as COMPARED
from pytest_slmserve.report.gate.text import (
    WORDS,
    as_markdown,
    gate_facts,
    gate_section,
    has_few_pairs,
    is_simulated,
    next_step,
    title,
)
from pytest_slmserve.report.section import section_texts
from pytest_slmserve.report.tables.findings import AnyPoint, first_of_each_kind, reason_kind, served_on
from pytest_slmserve.report.tables.jobs import COLUMNS as JOBS
from pytest_slmserve.report.tables.jobs import highest_good_load, jobs_title
from pytest_slmserve.report.tables.replicas import alone_at, deployed
from pytest_slmserve.report.tables.run import Colour, by_outcome, run_lines, tally
from pytest_slmserve.report.text_table import (
    Column,
    change,
    change_interval,
    command_lines,
    counted,
    figure,
    folded,
    laid_out,
    layout,
    milliseconds,
    table_parts,
)
from pytest_slmserve.schema.environment import SIMULATED
from pytest_slmserve.schema.errors import Detail
from pytest_slmserve.schema.printable import printable

MOST_LINES = 23  # and the line that pytest puts above them
# Lines of one sentence, of verdicts and notes and of all else, as there is room; the tables have all of it.
LONGEST = ((99, 99), (9, 4), (9, 3), (9, 2), (2, 2), (2, 1), (1, 1))

Line = tuple[str, Colour | None]


@dataclass(slots=True)
class ScreenPart:
    """A part of the screen. entries: blocks of lines, of which the last go first where there is no room. head, foot:
    lines around them, of which the first alone stays in the end. unit: of entries. weight: a part of weight 3 keeps
    three times the lines of one of weight 1. left_out: how many entries went."""

    head: list[Line]
    entries: list[list[Line]]
    unit: str
    weight: int = 1
    foot: list[Line] = field(default_factory=list)
    left_out: int = 0

    @property
    def lines(self) -> list[Line]:
        none_shown = f"{counted(self.left_out, self.unit)}, which the tables have"
        more = f"and {counted(self.left_out, f'more {self.unit}')}" if self.entries else none_shown
        left_out: list[Line] = [(f"  {more}", None)] if self.left_out else []
        return [*self.head, *(line for entry in self.entries for line in entry), *left_out, *self.foot]

    @property
    def excess(self) -> float:
        """Lines that it could do without, by weight."""
        return (sum(map(len, self.entries)) + len(self.head) + len(self.foot) - 1) / self.weight if self.entries else 0

    def shrink(self) -> None:
        """Leaves out the last entry; where that is the only one, all but the first line of the part."""
        last = self.entries.pop()
        if self.entries:
            self.left_out += 1
        elif self.head:
            self.head, self.foot, self.left_out = self.head[:1], [], self.left_out + 1
        else:
            self.head = last[:1]


def screen(found: Findings, most: int = MOST_LINES) -> list[Line]:
    """Lines of the screen, the most important first, each with a colour. most: lines that there is room for."""
    for of_verdicts, of_others in LONGEST:
        longest: dict[Maker, int] = dict.fromkeys((_gates, _claims, _notes), of_verdicts)
        sections = [part for make in PARTS for part in make(found, longest.get(make, of_others))]
        if sum(len(part.lines) for part in sections) <= most:
            break
    while sum(len(part.lines) for part in sections) > most:
        largest = max(reversed(sections), key=lambda part: part.excess)
        if not largest.excess:
            break
        largest.shrink()
    return [line for part in sections for line in part.lines]


def _plain(lines: Sequence[str]) -> list[Line]:
    return [(line, None) for line in lines]


def _block(text: str, longest: int, colour: Colour | None = None) -> list[Line]:
    """A sentence as lines of the screen, cut where it has more than `longest` of them."""
    room = longest * (layout().width - 4)
    cut = shorten(text, room, placeholder=" ...", break_on_hyphens=False) if len(text) > room else text
    indent = text[: len(text) - len(text.lstrip())]
    return [(line, colour) for line in folded(indent + cut.lstrip()).split("\n")]


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A sweep by the point that its figures are of: where the plateau begins, or the one of most throughput. None: no
    point is valid. good: the highest load within the SLO."""

    label: str
    point: Point | None
    plateau: str
    good: str


ROWS: tuple[Column[ModelRow], ...] = (
    Column("\nmodel", lambda row: row.label, "left"),
    Column("\nplateau", lambda row: row.plateau, "left"),
    Column("in\nflight", lambda row: str(row.point.concurrency) if row.point else ""),
    Column("tokens\n/s", lambda row: figure(row.point.output_tokens_per_s if row.point else None, 4)),
    Column("E2E s\nmean", lambda row: figure(row.point.e2e_s if row.point else None)),
    Column("E2E s\np99", lambda row: figure(row.point.e2e_p99_s if row.point else None), rank=2),
    Column("TTFT\nms", lambda row: milliseconds(row.point.ttft_s if row.point else None), rank=1),
    Column("TPOT\nms", lambda row: milliseconds(row.point.tpot_s if row.point else None), rank=1),
    Column("SLO met\nup to", lambda row: row.good),
    Column("J/\ntoken", lambda row: figure(row.point.energy_per_token_j if row.point else None)),
)


def _sweeps(found: Findings, longest: int) -> Iterator[ScreenPart]:
    """A table for each device; what was measured beside the sweeps of a model is in the tables of the run."""
    for place, rows in model_rows(found):
        parts = table_parts(rows, ROWS)
        head = [*_block(place, longest), *_plain(parts.head)]
        yield ScreenPart(head, [_plain(lines) for lines in parts.rows], "model", weight=6, foot=_plain(parts.foot))


def _model(curve: Curve) -> str:
    return curve.spec.model if curve.spec else curve.subject


def model_rows(found: Findings) -> Iterator[tuple[str, list[ModelRow]]]:
    """Rows of each device, below its name."""
    measured = [curve for curve in found.curves if curve.points]
    swept = {_model(curve) for curve in measured if is_main_sweep(curve)}
    shown = [curve for curve in measured if is_main_sweep(curve) or _model(curve) not in swept]
    bounds = f"; SLO {found.slo} of {percent(ATTAINMENT)} of the requests" if found.slo else ""

    def place(pair: tuple[Curve, str]) -> str:
        where = pair[0].environment
        return SIMULATED if where and where.platform == "simulated" else served_on(where)

    for name, group in grouped(zip(shown, labels(shown)), place).items():
        yield f"{name}{bounds}", [_model_row(curve, label, found) for curve, label in group]


def _model_row(curve: Curve, label: str, found: Findings) -> ModelRow:
    tolerance = found.tolerance(curve, label)
    flat = curve.plateau(tolerance).value
    point = max(curve.valid, key=lambda p: fmean(p.repeats), default=None)
    plateau = ""
    if is_sweep(curve) and len(curve.valid) > 1:
        inconclusive = obstacle(curve) or curve.pareto_plateau(tolerance).state is State.INCONCLUSIVE
        unsure = "?" if inconclusive else ""
        plateau = f"past {curve.valid[-1].concurrency}{unsure}" if flat is None else f"from {flat}{unsure}"
        point = next((p for p in curve.valid if p.concurrency == flat), point)
    # "64", "none" of those measured, ">=512" where a larger one may do as well.
    highest = highest_good_load(curve, found.slo) if found.slo else None
    good = ""
    if highest:
        above, unsure = "" if highest.above else ">=", "?" if highest.unknown else ""
        good = "none" if highest.load is None else f"{above}{highest.load:g}{unsure}"
    return ModelRow(label, point, plateau, good)


def _replicas(found: Findings, longest: int) -> Iterator[ScreenPart]:
    """Two lines at most for each set of models: the deployment that serves most of those measured."""
    if entries := [_block(text, max(longest, 2)) for text in best_deployments(found)]:
        yield ScreenPart([], entries, "deployment")


def best_deployments(found: Findings) -> Iterator[str]:
    """A sentence for each set of models that replicas served."""
    alike = grouped(found.shared, lambda p: (p.environment.per_gpu_key, p.models[0] if p.model else p.models))
    for group in alike.values():
        if valid := [point for point in group if point.valid]:
            best = max(valid, key=lambda p: p.output_tokens_per_s or 0.0)
            alone = alone_at(best, found.curves)
            gain = ratio(best, alone, several=len(valid)) if alone else None
            over = f", {change(gain)} % (95 %: {change_interval(gain)}) over one engine" if gain else ""
            rate = f"{figure(best.output_tokens_per_s, 4)} tokens/s at {best.concurrency} in flight{over}"
            of = f"; most of {len(group)} deployments and loads" if len(group) > 1 else ""
            yield f"replicas: {engines(best.models)}, {deployed(best)}: {rate}{of}"


def _jobs(found: Findings, longest: int) -> Iterator[ScreenPart]:
    """A table for each host; a sentence where it served one job."""
    for jobs in grouped(found.jobs, lambda job: job.environment.key).values():
        if len(jobs) == 1:
            [job] = jobs
            served = f"{figure(job.requests_per_s, 4)} requests/s, {figure(job.output_tokens_per_s, 4)} tokens/s"
            lengths = f"{job.workload.mean_prompt_tokens:.0f}/{job.output_tokens:.0f} tokens"
            told = f"mean E2E {figure(job.e2e_s)} s ({job.requests:,} of {lengths}, {job.load.pace})"
            yield ScreenPart([], [_block(f"job: {job.model}: {served}, {told}", 2)], "job")
            continue
        parts = table_parts(jobs, JOBS)
        head = [*_block(jobs_title(jobs[0].environment), longest), *_plain(parts.head)]
        yield ScreenPart(head, list(map(_plain, parts.rows)), "job", foot=_plain(parts.foot))


def _gates(found: Findings, longest: int) -> Iterator[ScreenPart]:
    """Each gate with its endpoints, the worst first, and why one does not pass. Of fewer pairs than can decide, only
    what is no matter of chance."""
    colours: dict[State, Colour] = {State.PASSES: "green", State.FAILS: "red", State.INCONCLUSIVE: "yellow"}
    worst = [State.FAILS, State.INCONCLUSIVE, State.PASSES]
    for gated in found.gates:
        few, more = has_few_pairs(gated), next_step(gated)
        compared = sorted(() if few else gated.gated, key=lambda each: worst.index(each.outcome))
        parts = table_parts([(each, True) for each in compared], COMPARED)
        entries: list[list[Line]] = []
        for each, lines in zip(compared, parts.rows):
            why = [] if each.outcome is State.PASSES else _block(f"  {each.why}", max(longest, 2))
            entries.append([*((line, colours[each.outcome]) for line in lines), *why])
        for verdict in sorted(gated.exact, key=lambda each: worst.index(each.state)):
            text = f"{verdict.claim}: {WORDS[verdict.state]}, {verdict.why}"
            entries.append(_block(text, max(longest, 2), colours[verdict.state]))
        if gated.dropped:
            entries.append(_block(f"left out: {'; '.join(gated.dropped)}", longest))
        sides = [pair.launch(side).measurements[0].environment.vllm for pair in gated.pairs[:1] for side in SIDES]
        releases = f": vLLM {sides[0]} and {sides[1]}" if len(set(sides)) > 1 else ""
        head = [
            *_block(f"{title(gated)}{releases}", longest, colours[gated.outcome]),
            *(_block(SIMULATED, longest) if is_simulated(gated) else ()),
            *(_block(f"  next: {more}", 3, "yellow") if more else ()),
            *_plain(parts.head if compared else []),
        ]
        yield ScreenPart(head, entries, "endpoint", weight=4, foot=_plain(parts.foot))


def _claims(found: Findings, longest: int) -> Iterator[ScreenPart]:
    """How many claims hold, which do not and were expected to, and what would decide the others."""
    kinds = by_outcome(found.judged, strict=found.strict)
    if own := [_block(f"inconclusive: {text}", longest, "yellow") for text in found.inconclusive]:
        yield ScreenPart([], own, "inconclusive test", weight=3)
    if not found.judged:
        return
    wrong = kinds["FAIL"] or kinds["PASS, UNEXPECTED"]
    colour: Colour = "red" if wrong else "yellow" if kinds["inconclusive"] else "green"
    head = _block(f"claims: {tally(kinds)}", longest, colour)
    yield ScreenPart(head, [_block(f"  {text}", longest, "red") for text in unexpected(kinds)], "claim", weight=4)
    entries = [_block(f"  {text}", longest, "yellow") for text in inconclusive(kinds, found.curves)]
    yield ScreenPart([], entries, "reason", weight=2)


def unexpected(kinds: Mapping[str, Sequence[Verdict]]) -> Iterator[str]:
    """A sentence on each claim that is not as expected."""
    for word, kind in (("FAILS", "FAIL"), ("PASSES, UNEXPECTED", "PASS, UNEXPECTED")):
        yield from (f"{word} {v.claim}, {v.subject}: {v.why}" for v in kinds[kind])


def inconclusive(kinds: Mapping[str, Sequence[Verdict]], curves: Sequence[Curve]) -> Iterator[str]:
    """A sentence for each reason, or remedy, with the claims that it is of."""
    for what, them in grouped(kinds["inconclusive"], lambda verdict: remedy(verdict, curves)).items():
        # Such as: throughput-plateau (opt-125m; opt-1.3b), energy-per-token (5 verdicts).
        by_claim = grouped(them, lambda verdict: verdict.claim).items()
        each = {
            name: f"{len(of)} verdicts" if len(of) > 2 else "; ".join(v.subject for v in of) for name, of in by_claim
        }
        yield f"inconclusive: {what}: {', '.join(f'{name} ({of})' for name, of in each.items())}"


def remedy(verdict: Verdict, curves: Sequence[Curve]) -> str:
    """What would decide an inconclusive verdict; where no measurement of the same kind would, the reason."""
    repeats = max((len(point.repeats) for curve in curves for point in curve.points), default=1)
    mode = next((f"{curve.environment.mode} " for curve in curves if curve.environment), "")
    if verdict.remedy:
        return verdict.remedy
    if verdict.low is not None:
        return f"{mode}--slm-resume --slm-repeats {2 * repeats} or a longer --slm-window may decide"
    if verdict.why.startswith(("not measured at", "invalid at")):
        return f"{mode}--slm-resume measures what is missing or invalid"
    if "one repeat" in verdict.why:
        return f"{mode}--slm-resume --slm-repeats 2 tells the noise"
    return verdict.why


def _disturbed(found: Findings, longest: int) -> Iterator[ScreenPart]:
    """Points of which something was left out, or has something against it, grouped by the kind of reason."""
    title, sentences = disturbances(found)
    if sentences:
        yield ScreenPart(
            _block(title, longest, "yellow"), [_block(f"  {text}", longest) for text in sentences], "reason"
        )


def disturbances(found: Findings) -> tuple[str, list[str]]:
    """How many points were disturbed, and a sentence for each kind of reason."""
    points: list[tuple[str, str, AnyPoint]] = []
    for curve, label in zip(found.curves, labels(found.curves), strict=True):
        points += [(label, f"{point.concurrency}", point) for point in curve.points]
    points += [(f"{engines(p.models)}, {deployed(p)},", f"{p.concurrency}", p) for p in found.shared]
    points += [(f"{p.model}, jobs", "once" if p.load.at_once else f"{p.load.rate:g}/s", p) for p in found.jobs]
    wrong = [(_standing(point), label, load, point) for label, load, point in points]
    wrong = sorted((each for each in wrong if each[0]), key=lambda each: STANDINGS.index(each[0]))
    sentences = []
    for (standing, _), group in grouped(wrong, lambda each: (each[0], reason_kind(_reason(each[3])))).items():
        loads = grouped(dict.fromkeys((label, load) for _, label, load, _ in group), itemgetter(0)).items()
        names = "; ".join(f"{label} at {', '.join(load for _, load in same)}" for label, same in loads)
        sentences.append(f"{standing}: {names}: {_reason(group[0][3])}")
    return f"disturbed: {len(wrong)} of {counted(len(points), 'point')}", sentences


STANDINGS = ("INVALID", "degraded", "some left out", "noisy, kept")  # the worst first


def _standing(point: AnyPoint) -> str:
    """Empty where nothing is wrong."""
    invalid, degraded, left_out, noisy = STANDINGS
    if not point.valid or point.degraded:
        return degraded if point.valid else invalid
    return left_out if point.left_out else noisy if point.noise else ""


def _reason(point: AnyPoint) -> str:
    return "; ".join(dict.fromkeys((*point.degraded, *point.problems)) or first_of_each_kind(point.noise))


def _notes(found: Findings, longest: int) -> Iterator[ScreenPart]:
    entries = [_block(f"note: {note}", longest, "yellow") for note in found.notes]
    if found.reused:
        entries.append(_block(found.reused_text, longest))
    if entries:
        yield ScreenPart([], entries, "note")


def _paths(found: Findings, longest: int) -> Iterator[ScreenPart]:
    if not (found.curves or found.jobs or found.shared or found.gates):
        return
    more = ["more: -v, or --slm-report=tables"]
    if found.archives:
        paths = shlex.join(min(path, os.path.relpath(path), key=len) for path in found.archives)
        more = [f"archive: {paths}", f"more: slmserve report {paths}"]
    if found.command and any(gated.outcome is State.FAILS for gated in found.gates):
        more = [*command_lines("to repeat it:", found.command), *more]
    yield ScreenPart([*(_block(found.written, longest) if found.written else []), *_plain(more)], [], "path")


Maker = Callable[[Findings, int], Iterator[ScreenPart]]
PARTS: tuple[Maker, ...] = (_sweeps, _replicas, _jobs, _gates, _claims, _disturbed, _notes, _paths)


ON_A_PAGE = 100  # columns, and lines, of a summary on the page of a workflow


def summary_lines(found: Findings, detail: Detail = "summary") -> Iterator[Line]:
    """Yield the lines at the end of a run: the screen, below all tables where `detail` asks for them."""
    with laid_out(every_column=detail == "all"):
        if detail != "summary":  # also the notes that the screen below has no room for
            yield from tables(found)
            yield from ((folded(f"note: {note}"), "yellow") for note in found.notes)
            if found.reused:
                each = ", ".join(f"{name} ({n})" for name, n in found.reused.items())
                yield folded(f"{found.reused_text}: {each}"), None
            yield "", None
            found = replace(found, notes=(), reused={})
        yield from screen(found)


def tables(found: Findings) -> Iterator[Line]:
    """Every table and verdict, as pieces of text with a colour."""
    yield from ((folded(text), colour) for text, colour in run_lines(found))
    yield from ((f"{folded(text)}\n", None) for text in history_report(found.history))
    yield from ((text, None) for text in section_texts(map(gate_section, found.gates)))


def write_for_others(found: Findings, records: str | Path) -> str:
    """Writes gates as JSON and Markdown beside the records, and what was found on the page of a GitHub workflow.
    Returns the paths beside the records, or the reason for failure: the records hold the measurements anyway."""
    beside, page = Path(records).parent / "gate.json", os.environ.get("GITHUB_STEP_SUMMARY")
    try:
        if page:
            with Path(page).open("a", encoding="utf-8") as file:
                file.write(f"{as_page(found)}\n")
        if not found.gates:
            return ""
        make_folder(beside.parent)
        beside.write_text(as_json(map(gate_facts, found.gates)) + "\n", "utf-8")
        beside.with_suffix(".md").write_text(as_markdown(found.gates), "utf-8")
    except OSError as error:
        return f"not written for others: {error}"
    return f"written: {beside} and {beside.with_suffix('.md').name}"


def as_page(found: Findings) -> str:
    """Markdown: the gates in full, the tests that failed, and the last screen where there is more than gates."""
    gates = as_markdown(found.gates)
    if found.command and found.gates:
        gates += f"To repeat it:\n\n```sh\n{printable(found.command, layout='')}\n```\n\n"
    lines = [f"failed: {printable(text, layout='')}" for text in found.failed]  # never folded: none can end the block
    if not found.gates or found.curves or found.judged:
        with laid_out(ON_A_PAGE):
            lines += [text for text, _ in screen(replace(found, gates=()), most=ON_A_PAGE)]
    text = "\n".join(lines)
    return f"{gates}### pytest-slmserve\n\n```text\n{text}\n```\n" if lines else gates
