"""External results from a CSV file or the JSON of another tool: options of `report` and `advise`, and their report."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pytest_slmserve.analysis.advice import advisor, subjects
from pytest_slmserve.analysis.estimates import percent
from pytest_slmserve.analysis.sweep.batching import Slo, parse_relative_slo
from pytest_slmserve.analysis.sweep.curve import FEWEST_POINTS, Curve
from pytest_slmserve.analysis.sweep.plateau import fit
from pytest_slmserve.archive import external
from pytest_slmserve.archive.other_tools import FORMATS
from pytest_slmserve.commands import cli
from pytest_slmserve.options.table import percentage
from pytest_slmserve.report import advice as report
from pytest_slmserve.report.as_json import facts, point_facts, sweep_facts
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page.writer import write_page
from pytest_slmserve.report.section import Named, Section, section_text
from pytest_slmserve.report.sweeps import UNSETTLED, sweep_section
from pytest_slmserve.report.text_table import counted, figure, hundredths
from pytest_slmserve.schema.errors import BadUsage, TooFewPoints

NEEDED = ("knob", "throughput", "latency")  # columns that must be named
VLLMS = {  # columns of `vllm bench serve --save-result`, by the options that name them
    "knob": "max_concurrency",
    "throughput": "output_throughput",
    "latency": "mean_tpot_ms",
    "output_throughput": "output_throughput",
}
COLUMN_OPTIONS = (
    ("knob", "column of the load: max_num_seqs, max_concurrency"),
    ("throughput", "column of tokens/s: of output tokens, or of prompt and output together"),
    ("latency", "column of the latency, best the time per output token"),
    ("preemptions", "column of preemptions: a point with any is shown, and never chosen"),
    ("running", "column of the mean number of running requests, to be checked by Little's law"),
    ("output-throughput", "column of output tokens/s, for Little's law"),
)


def add_columns(command: cli.Taker) -> None:
    """Add options that name the columns of external results, select rows, and set the limits of the batch."""
    for name, meaning in COLUMN_OPTIONS:
        command.add_argument(f"--{name}", metavar="NAME", help=meaning)
    unit = "unit of that column, if its name does not end in _ms or _s"
    command.add_argument("--latency-unit", choices=[*external.SECONDS], help=unit)
    where = "use only rows with this value; can be given several times"
    command.add_argument("--where", metavar="NAME=VALUE", action="append", default=[], help=where)
    objective = "2x@32: at most twice the latency at 32; or 30ms, 0.03s"
    command.add_argument("--slo-itl", metavar="LIMIT", help=objective)
    share = "smallest batching efficiency T(B)/(B T(1)) of B_opt (default: 0.1)"
    command.add_argument("--efficiency", metavar="SHARE", type=cli.typed(percentage), default=0.1, help=share)
    half = "half-saturation batch if it is known from the model configuration: then only T_inf is fitted"
    command.add_argument("--b-half", metavar="BATCH", type=float, help=half)


@dataclass(frozen=True, slots=True)
class ExternalResults:
    """Results of another tool as a curve.

    Attributes:
        kv_blocks: number of blocks of the engine's KV cache; None if unknown.
    """

    curve: Curve
    columns: external.Columns
    notes: list[str]
    kv_blocks: int | None


def external_results(given: argparse.Namespace) -> ExternalResults | None:
    """Return the results of another tool, or None if the files are results files of this package.

    Files are external results if columns are named, or if they are CSV, or JSON with the keys of `vllm bench serve`.
    """
    suffixes = {path.suffix for path in given.paths}
    named = any(getattr(given, name) for name in NEEDED) or suffixes == {".csv"}
    if not named and suffixes != {".json"}:
        return None
    if named and (given.run or given.since):
        why = "--run and --since choose among runs of ours, and these are external results"
        raise BadUsage(why, "--where NAME=VALUE")
    try:
        rows, left_out = external.results(given.paths)
    except BadUsage:
        if named:
            raise
        return None
    if not named and any(row.cells.get("kind") == "session" for row in rows):
        return None  # an archive of ours
    if not rows:
        raise BadUsage(
            f"there are no results in {', '.join(path.name for path in given.paths)}", "Pass a file with results."
        )
    names: dict[str, Any] = {field.name: getattr(given, field.name, None) for field in fields(external.Columns)}
    # Columns of vLLM's own results need no name.
    usual = {option: name for option, name in VLLMS.items() if all(name in row.cells for row in rows)}
    names |= {option: names[option] or name for option, name in usual.items()}
    if missing := [name for name in NEEDED if names[name] is None]:
        raise columns_missing(rows, missing)
    columns = external.Columns(**names)
    external.check_columns(rows, columns.names)
    left, without = external.with_values(external.matching(rows, given.where), columns)
    notes, blocks = [*left_out, *without, *external.mixed_settings(left, columns)], None
    if name := columns.kv_blocks:
        limits = 1, external.LARGEST, "is not a number of KV blocks"
        blocks = max(int(external.number_in(row, name, *limits)) for row in left)
    return ExternalResults(external.external_curve(left, columns), columns, notes, blocks)


def columns_missing(rows: Sequence[external.Row], missing: Sequence[str]) -> BadUsage:
    """Return the error for unnamed columns in results of a tool other than `vllm bench serve`."""
    cells = {name: value for row in rows for name, value in row.cells.items()}
    there = [name for name, value in cells.items() if not isinstance(value, (list, dict))]
    lacks = " and no ".join(VLLMS[name] for name in missing)
    has = f"its columns are {', '.join(there)}"
    if not there:
        has = f"nested values are read of {' and '.join(tool.name for tool in FORMATS)} alone"
    problem = f"{rows[0].place} is not a result of `vllm bench serve`: it has no {lacks}; {has}"
    return BadUsage(problem, " ".join(f"--{name} NAME" for name in missing))


def report_external(given: argparse.Namespace, results: ExternalResults) -> int:
    """Print plateau, Pareto front, saturation model and the batch to choose, from external results."""
    wish = advisor.Objectives(slo=check_wanted(given), threshold=given.efficiency)
    curve, columns, notes = results.curve, results.columns, results.notes
    if len(curve.valid) < FEWEST_POINTS:
        lost = len(curve.points) - len(curve.valid)
        without = f" without preemption ({lost} with)" if lost else ""
        problem = f"{counted(len(curve.valid), 'value')} of {columns.knob}{without}, {FEWEST_POINTS} are needed"
        raise TooFewPoints("; ".join([problem, *notes]), "Pass results of more loads, or change the conditions.")
    sweep = advisor.ModelSweep(name=curve.subject, points=curve.points, output_share=None, b_half=given.b_half)
    section, told = external_report(results, advisor.plan([sweep], wish), given.tolerance)
    aside = notes if given.csv else []  # the text has them
    cli.print_result(given, told, told["points"], [section_text(section)], aside)
    if given.html:
        write_page(given.html, Findings(), sections={"External results": [section]})
    return cli.PASSES


def external_report(results: ExternalResults, found: advisor.Plan, tolerance: float) -> tuple[Section, dict[str, Any]]:
    """Return the section of a sweep with the batch to choose, and its facts for JSON in seconds and shares.

    Args:
        found: recommendation for this curve only.
        tolerance: gain per doubling below which throughput counts as flat.
    """
    (advice,), curve, notes = found.advices, results.curve, list(_notes(results, found))
    seen, b_half = advice.decision, advice.subject.b_half
    alone = Findings(curves=[curve], flat=tolerance, b_half=b_half)
    shown = sweep_section(curve, curve.subject, alone)
    *parts, findings = shown.parts
    assert isinstance(findings, Named)
    pairs = [*findings.pairs, ("batch", report.batch_text(advice, found))]
    pairs += [("closed form", caps)] if (caps := report.caps_text(seen)) else []
    pairs += [("note", note) for note in notes]
    law = None
    try:
        law = fit(curve.points, b_half)
        if not law.identified:
            law = None
            notes.append("the saturation model is not identified: the points fit a b_half below 0, which cannot be")
    except TooFewPoints as error:
        notes.append(f"the saturation model is not fitted: {error.problem}")
    told = {
        "columns": results.columns,
        "objectives": found.wish,
        "points": list(point_facts(alone)),
        "sweeps": sweep_facts(alone),
        "saturation_law": law
        and {"t_inf_tokens_per_s": law.t_inf, **facts(law, "b_half", "fixed_s", "error_mean", "error_max")},
        "b_opt": seen.choice,
        "limit_s": seen.limit and seen.limit.seconds,
        **facts(seen, "caps", "reason"),
        "advised": advice.advised,
        "notes": notes,
    }
    return replace(shown, parts=[*parts, Named(pairs)]), told


def _notes(results: ExternalResults, found: advisor.Plan) -> Iterator[str]:
    """Yield caveats and checks by Little's law: output rate times latency is the number of concurrent requests."""
    curve, columns = results.curve, results.columns
    yield from results.notes
    yield from found.advices[0].decision.notes
    if found.wish.slo is None:
        yield "no latency limit was given (--slo-itl): the batch is by efficiency alone"
    if lost := [p.concurrency for p in curve.points if not p.valid]:
        yield f"left out, for they preempted: {curve.axes.at(', '.join(map(str, lost)))}"
    if columns.output_throughput is None:
        if columns.running is not None:
            yield f"{columns.running} is not checked by Little's law: no --output-throughput"
        return
    product = f"{columns.output_throughput} x {columns.latency}"
    if over := [p.concurrency for p in curve.points if subjects.more_in_flight(p)]:
        yield (
            f"{product} is more than {columns.knob} at {', '.join(map(str, over))}: the latency is not the time per "
            "output token, or the knob does not limit requests; Little's law is not applied"
        )
        return
    known = [(p, p.batch) for p in curve.points if p.batch is not None]
    if biases := [(p.little, p, batch) for p, batch in known if p.little is not None]:
        off, worst, batch = max(biases, key=lambda entry: abs(entry[0]))
        low, high = (hundredths(end(bias for bias, *_ in biases), signed=True) for end in (min, max))
        if abs(off) <= UNSETTLED:
            yield f"{columns.running} agrees with {product} (Little's law) within {percent(abs(off))}"
        else:
            yield (
                f"{columns.running} is biased: it is {low if low == high else f'{low} to {high}'}% off {product} "
                f"(Little's law), most at {columns.knob} {worst.concurrency}: {figure((1 + off) * batch)} reported, "
                f"{figure(batch)} concurrent requests"
            )
    share, fewest, batch = min((batch / p.concurrency, p.concurrency, batch) for p, batch in known)
    if share < 1 - subjects.NOT_THE_BATCH:
        yield (
            f"the knob is not the batch: at {curve.axes.at(fewest)} only {figure(batch)} requests were concurrent "
            f"({percent(share)} of it) by Little's law"
        )


def check_wanted(given: argparse.Namespace) -> Slo | None:
    """Return the latency objective, or None."""
    if given.b_half is not None and not 0 < given.b_half < 1e9:
        raise BadUsage(f"--b-half {given.b_half:g} is not a batch", "Pass a number above 0.")
    return parse_relative_slo(given.slo_itl) if given.slo_itl is not None else None
