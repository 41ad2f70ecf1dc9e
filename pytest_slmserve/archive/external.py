"""Results of other tools, read as points of a curve, and our results in the format of `vllm bench serve`.

Input is CSV with named columns, or JSON: an object, a list, or objects one after the other. Nested values are read only
for the tools in `other_tools`. The user names the columns; only the unit follows from the end of a name.

Output has the names in vllm/benchmarks/serve.py of release 0.32. `duration` is the window, and requests and tokens are
those of the window, so rates are as in our reports. `vllm-bench=PATH.json` appends all results to one file, as vLLM's
--append-result. Any other path is a folder with a file for each result, named as by vLLM, and by the record's ID,
because two results may have the same second.
"""

import csv
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from pytest_slmserve.analysis.estimates import grouped, mean_of_known, per_second, percentile
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.metrics.window import Goodput, Slo, goodput_of
from pytest_slmserve.analysis.points import Point, Summary, summary_of
from pytest_slmserve.analysis.sweep.curve import Axes, Curve
from pytest_slmserve.archive.lines import FIRST, PACKINGS
from pytest_slmserve.archive.other_tools import rows_of_tool
from pytest_slmserve.schema.errors import BadUsage, content, json_at, regular, write_file
from pytest_slmserve.schema.printable import printable, printable_value
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import ClosedLoop, is_job, load_facts

SECONDS = {"ms": 1e-3, "s": 1.0}
SMALLEST, LARGEST = 1e-12, 1e12  # limits of a rate or a latency in any unit
LARGEST_KNOB = 10**9
LARGEST_FILE = 10**9  # bytes; `vllm bench serve --save-detailed` writes some million
RUN, WARM_UP = "run_number", "-1"  # of `vllm bench sweep`
MODELS, SERVED_BY = ("model_id", "model"), {"backend", "tokenizer_id", "endpoint_type", "tool"}


@dataclass(frozen=True, slots=True)
class Row:
    """One result with its place in a file, for messages, and its values by name."""

    place: str
    cells: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return the stripped text of a cell, empty if there is none."""
        cell = self.cells.get(name)
        return "" if cell is None else str(cell).strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of columns, from the options of `report`; None if a file has no such column.

    Attributes:
        throughput: tokens/s of any kind.
        latency_unit: "ms" or "s", if the name of the latency does not end in it.
        running: mean number of running requests.
    """

    knob: str
    throughput: str
    latency: str
    latency_unit: str | None = None
    preemptions: str | None = None
    running: str | None = None
    output_throughput: str | None = None
    kv_blocks: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in astuple(replace(self, latency_unit=None)) if name is not None)


def external_curve(rows: Sequence[Row], columns: Columns) -> Curve:
    """Return the curve over the knob, with rows of the same knob as repeats of a point.

    `e2e_s` is the given latency, and `output_tokens_per_s` the given throughput. The batch is output rate times
    latency, by Little's law the concurrent requests; `little` is the relative difference of the reported running
    requests. A point with preemptions is not valid.
    """
    name, said = columns.latency, columns.latency_unit
    stem, _, ending = name.rpartition("_")
    unit = ending if ending in SECONDS and not stem.endswith("per") else said
    if unit is None:
        raise BadUsage(
            f"the column {name!r} does not end in its unit (_ms or _s)", "Pass --latency-unit ms or --latency-unit s."
        )
    if said and said != unit:
        raise BadUsage(f"the column {name!r} ends in its unit, which is not {said}", "Remove --latency-unit.")
    points = []
    for load, group in sorted(grouped(rows, lambda row: knob_of(row, columns.knob)).items()):
        rates = tuple(number_in(row, columns.throughput) for row in group)
        waits = tuple(SECONDS[unit] * number_in(row, name) for row in group)
        batches: list[float | None] = [None] * len(group)
        if columns.output_throughput:
            batches = [number_in(row, columns.output_throughput) * wait for row, wait in zip(group, waits)]
        batch = mean_of_known(batches)
        running = fmean(number_in(row, columns.running) for row in group) if columns.running else None
        lost = 0.0
        if columns.preemptions:
            why_not = "is not a number of preemptions"
            lost = math.fsum(number_in(row, columns.preemptions, 0, LARGEST, why_not) for row in group)
        facts: dict[str, Any] = {"left_out": len(group), "problems": (f"{lost:g} preemptions",)}
        if not lost:
            facts = {"repeats": rates, "e2e_repeats": waits, "batch_repeats": (float(load),) * len(group)}
        each = zip(rates, waits, batches)
        point = Point(
            concurrency=load,
            each=tuple(Summary(output_tokens_per_s=rate, e2e_s=wait, batch=of_row) for rate, wait, of_row in each),
            output_tokens_per_s=fmean(rates),
            e2e_s=fmean(waits),
            batch=batch,
            little=running / batch - 1 if running and batch else None,
            **facts,
        )
        points.append(point)
    axes = Axes(columns.knob, columns.throughput, columns.latency)
    return Curve(subject="external results", points=tuple(points), axes=axes)


def number_of(cell: object) -> float | None:
    """Return the text of a cell as a number, also infinity or NaN, or None."""
    try:
        return float(str(cell))
    except ValueError:
        return None


def number_in(
    row: Row,
    column: str,
    low: float = SMALLEST,
    high: float = LARGEST,
    why_not: str = "no rate and no latency can be",
    *,
    whole: bool = False,
) -> float:
    """Return a number of a row, or raise BadUsage if the cell has none between `low` and `high`.

    Args:
        why_not: end of the error about other numbers.
    """
    value, shown = number_of(cell := row.cells.get(column)), repr(cell)
    said = f"{row.place}: {column} is {shown if len(shown) <= 40 else f'{shown[:37]}...'}, which"
    if value is None or not math.isfinite(value):
        raise BadUsage(f"{said} is not a number", "Exclude such rows with --where.")
    if not low <= value <= high or (whole and not value.is_integer()):
        raise BadUsage(f"{said} {why_not}", "Choose another column.")
    return value


def knob_of(row: Row, column: str) -> int:
    """Return the load of a row, a positive whole number."""
    why_not = "is no knob: a knob has to be a positive whole number"
    return int(number_in(row, column, 1, LARGEST_KNOB, why_not, whole=True))


def matching(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """Return the rows that meet all conditions NAME=VALUE of `--where`, compared as numbers or as texts in any case."""
    pairs = []
    for text in conditions:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise BadUsage(f"--where {text}: there is no condition in it", "--where NAME=VALUE")
        pairs.append((name.strip(), value.strip()))
    check_columns(rows, [name for name, _ in pairs])

    def meets(row: Row, name: str, wanted: str) -> bool:
        seen, number = number_of(row.text(name)), number_of(wanted)
        return row.text(name).casefold() == wanted.casefold() if seen is None or number is None else seen == number

    left = [row for row in rows if all(meets(row, *pair) for pair in pairs)]
    if left:
        return left
    if not conditions:
        raise BadUsage("there are no rows", "Pass a file that has results in it.")
    tried, hint = " ".join(f"--where {text}" for text in conditions), "Use fewer conditions."
    if unmet := [name for name, wanted in pairs if not any(meets(row, name, wanted) for row in rows)]:
        seen = dict.fromkeys(str(row.cells.get(unmet[0])) for row in rows)
        hint = f"Choose a value that {unmet[0]} has: {', '.join(list(seen)[:12])}."
    raise BadUsage(f"no row is left after {tried}", hint)


def with_values(rows: Sequence[Row], columns: Columns) -> tuple[list[Row], list[str]]:
    """Return the rows that have a value in each column, and notes on skipped rows and on failed requests.

    In rates and latencies, 0, infinity and NaN count as missing, because nothing was served.
    """
    measured = {columns.throughput, columns.latency, columns.output_throughput}

    def is_empty(row: Row, name: str) -> bool:
        value = number_of(row.text(name))
        nothing = name in measured and value is not None and (value == 0 or not math.isfinite(value))
        return nothing or not row.text(name)

    by_empty = grouped(rows, lambda row: next((name for name in columns.names if is_empty(row, name)), ""))
    left = by_empty.pop("", [])
    if not left:
        empty, hint = next(iter(by_empty)), "Choose another column."
        if empty == "max_concurrency":
            hint = "Run `vllm bench serve --max-concurrency N` once for each N."
        raise BadUsage(f"the column {empty!r} has no value in any result", hint)
    notes = [
        f"skipped, because they have no value of {name}: {some([r.place for r in each])}"
        for name, each in by_empty.items()
    ]
    of_vllm = (row for row in left if "completed" in row.cells)
    if failed := [row.place for row in of_vllm if (number_of(row.text("failed")) or 0) > 0]:
        notes.append(f"requests failed, so the load was less than it says: {some(failed)}")
    return left, notes


def mixed_settings(rows: Sequence[Row], columns: Columns) -> list[str]:
    """Return a note for each setting that differs between rows of one curve, or between repeats.

    A column of words is a setting if some rows agree in it (otherwise it is a name or a date), if it is true or false,
    or if it names the server. A column of numbers is one if rows of the same knob differ and each value occurs several
    times, unlike in measurements.

    Raises:
        BadUsage: for rows of several models, which are not one curve.
    """
    for name in MODELS:
        if len(kinds := dict.fromkeys(row.text(name) for row in rows if row.text(name))) > 1:
            raise BadUsage(
                f"these are results of several models: {some([*kinds])}", f"--where {name}={next(iter(kinds))}"
            )
    groups = grouped(rows, lambda row: knob_of(row, columns.knob)).values()
    curves, repeats = list[tuple[str, list[str], str]](), list[tuple[str, list[str], str]]()
    for name in dict.fromkeys(name for row in rows for name in row.cells):
        if any(isinstance(row.cells.get(name), (list, dict)) for row in rows):
            continue
        often = Counter(row.text(name) for row in rows)
        words = len(often) > 1 and all(number_of(kind) is None for kind in often)
        if words and (
            name in SERVED_BY or len(often) < len(rows) or {kind.casefold() for kind in often} <= {"true", "false"}
        ):
            curves.append((name, [*often], "one curve"))
            continue
        by_group = ({row.text(name) for row in group} for group in groups)
        differing = sorted({text for texts in by_group if len(texts) > 1 for text in texts})
        if differing and min(often.values()) > 1 and name not in {*columns.names, RUN}:
            repeats.append((name, differing, "repeats"))
    return [
        f"rows of different {name} ({some(kinds)}) are taken as {taken}; --where {name}=... chooses"
        for name, kinds, taken in (*curves, *repeats)
    ]


def some(kinds: Sequence[str]) -> str:
    return f"{', '.join(kind or 'empty' for kind in kinds[:4])}{', ...' if len(kinds) > 4 else ''}"


def check_columns(rows: Sequence[Row], names: Sequence[str]) -> None:
    """Raise BadUsage if no row has one of these columns; lists and objects do not count."""
    there = dict.fromkeys(n for row in rows for n, cell in row.cells.items() if not isinstance(cell, (list, dict)))
    for name in names:
        if rows and name not in there:
            raise BadUsage(f"there is no column {name!r}", f"Use one of {', '.join(there)}.")


def results(paths: Iterable[Path]) -> tuple[list[Row], list[str]]:
    """Return the rows of all files, and notes on those left out: warm-ups, and rows that an earlier file has.

    `vllm bench sweep` writes each result to a file and to a summary, so such a row is not a repeat.
    """
    found, first_in = list[Row](), dict[str, int]()
    lost = dict.fromkeys(("warm-ups of a sweep", "for an earlier file has the same"), 0)
    for number, path in enumerate(paths):
        for row in read_results(path):
            is_copy = first_in.setdefault(repr(sorted(row.cells.items())), number) < number
            if row.text(RUN) == WARM_UP:
                lost["warm-ups of a sweep"] += 1
            elif is_copy:
                lost["for an earlier file has the same"] += 1
            else:
                found.append(row)
    return found, [f"left out, {why}: {times}" for why, times in lost.items() if times]


def read_results(path: Path) -> list[Row]:
    """Return the rows of a CSV or JSON file, with control characters escaped."""
    try:
        raw = content(path, LARGEST_FILE)
        if raw.startswith((FIRST, *(magic for _, magic in PACKINGS.values()))):
            hint = f"Run slmserve report {shlex.quote(str(path))}, without --knob, --throughput and --latency."
            raise BadUsage(f"{path} is a results file of pytest-slmserve", hint)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise BadUsage(f"cannot read {path}: {error.strerror}", "Pass the CSV or JSON file with the results.") from None
    except UnicodeDecodeError:
        raise BadUsage(f"{path} is no text in UTF-8", "Pass a CSV or JSON file in UTF-8.") from None
    is_json = text.lstrip()[:1] in ("{", "[")
    rows = (_json_rows if is_json else _csv_rows)(text, printable(path.name, layout=""))
    return [Row(row.place, printable_value(row.cells, layout="")) for row in rows]


def _json_rows(text: str, name: str) -> Iterator[Row]:
    numbers, at = count(1), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        try:
            found, at = json_at(text, at)
        except ValueError:
            line = text.count("\n", 0, at) + 1
            raise BadUsage(f"{name}: no JSON in what begins at line {line}", "Pass a complete file.") from None
        for value, number in zip(found if isinstance(found, list) else [found], numbers):
            if not isinstance(value, dict):
                raise BadUsage(
                    f"{name}: result {number} is not a JSON object", "Pass the files that `vllm bench serve` saves."
                )
            place = f"{name}: result {number}"
            known = [Row(f"{place}.{part}", cells) for part, cells in enumerate(rows_of_tool(value), 1)]
            yield from known or [Row(place, value)]


def _csv_rows(text: str, name: str) -> Iterator[Row]:
    lines = text.splitlines()
    if not lines:
        return
    reader = csv.reader(lines, delimiter=max(",;\t", key=lines[0].count), strict=True)
    try:
        header = [cell.strip() for cell in next(reader)]
        if twice := {cell for cell in header if cell and header.count(cell) > 1}:
            raise BadUsage(f"{name}: several columns are called {min(twice)!r}", "Give each column its own name.")
        for cells in reader:
            if len(cells) not in (0, len(header)):
                seen = f"{name}: line {reader.line_num} has {len(cells)} fields, the header has {len(header)}"
                raise BadUsage(seen, "Pass a complete CSV file with a header.")
            if cells:
                yield Row(f"{name}: line {reader.line_num}", dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise BadUsage(f"{name}: no CSV in line {reader.line_num}: {error}", "Pass a CSV or JSON file.") from None


PERCENTILES = (50, 90, 95, 99)


def as_vllm_bench(measurement: Measurement, served: Goodput | None = None) -> dict[str, Any]:
    """Return a measurement as a result of `vllm bench serve`, with further entries: ID, validity, versions."""
    run, load, facts = measurement.run, measurement.load, load_facts(measurement.load)
    judged = window.judged_requests(measurement)
    seconds = run.window_s[1] - run.window_s[0]
    tokens_per_s = summary_of(measurement).output_tokens_per_s
    prompts_per_s = window.prompt_tokens_per_s(run) or 0.0
    backend = "engine" if measurement.spec.interface == "engine" else "openai"
    return {
        "date": measurement.measured_at,
        "endpoint_type": backend,
        "backend": backend,
        "label": measurement.spec.interface,
        "model_id": measurement.spec.model,
        "tokenizer_id": measurement.spec.model,
        "num_prompts": len(judged.rows) + judged.failures,
        "request_rate": facts.get("rate") or "inf",
        "burstiness": facts.get("burstiness", 1.0) if is_job(load) else None,
        "max_concurrency": load.max_concurrency,
        "duration": seconds,
        "completed": sum(run.samples.finished[row] for row in judged.rows),
        "failed": judged.failures,
        "total_input_tokens": judged.prompt_tokens,
        "total_output_tokens": judged.output_tokens,
        "request_throughput": per_second(len(window.finished_in_window(run)), run.window_s),
        "request_goodput": served and served.per_s,
        "output_throughput": tokens_per_s,
        "total_token_throughput": None if tokens_per_s is None else tokens_per_s + prompts_per_s,
        "max_concurrent_requests": window.most_in_flight(run),
        **_latencies(measurement, judged.rows),
        "record_id": measurement.id,
        "valid": not problems(measurement),
        "vllm_version": measurement.environment.vllm,
        "pytest_slmserve_version": measurement.environment.pytest_slmserve,
    }


def _latencies(measurement: Measurement, rows: Sequence[int]) -> dict[str, float]:
    """Return latency statistics in ms by vLLM's names; like vLLM's they exclude unfinished requests."""
    seen = [
        each
        for each in (window.request_latency(measurement.run.samples, row) for row in rows)
        if each.e2e_s is not None
    ]
    found: dict[str, dict[str, float]] = {}
    for name, attribute in {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "e2e_s"}.items():
        values = [value for each in seen if (value := getattr(each, attribute)) is not None]
        if values:
            found[name] = {"mean": fmean(values), "median": median(values), "std": pstdev(values)}
            found[name] |= {f"p{share}": percentile(values, share / 100) or 0.0 for share in PERCENTILES}
    if (stream := measurement.run.stream) and (gaps := window.gap_histogram(stream.gaps)).gaps:
        # ITL comes from a histogram, whose bins are 1% wide; the deviation uses their middles.
        average, middle = gaps.mean_s or 0.0, gaps.percentile(0.5) or 0.0
        square = sum((gaps.middle_s(i) - average) ** 2 * count for i, count in gaps.counts.items()) / gaps.gaps
        found["itl"] = {"mean": average, "median": middle, "std": math.sqrt(square)}
        found["itl"] |= {f"p{share}": gaps.percentile(share / 100) or 0.0 for share in PERCENTILES}
    return {f"{what}_{name}_ms": 1e3 * value for name, each in found.items() for what, value in each.items()}


FORMAT = "vllm-bench"
EXAMPLE = f"{FORMAT}=results/ for one file per result, or {FORMAT}=results.json"


@dataclass(frozen=True, slots=True)
class Export:
    """Destination of exported results; without an SLO they have no goodput."""

    path: Path
    slo: Slo | None = None

    def add(self, measurement: Measurement) -> None:
        """Write a measurement."""
        result = json.dumps(as_vllm_bench(measurement, goodput_of(self.slo, (measurement,)) if self.slo else None))
        try:
            if self.path.suffix == ".json":
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with open(self.path, "a", encoding="utf-8", opener=regular) as file:
                    file.write(f"{result}\n")
            else:
                self.path.mkdir(parents=True, exist_ok=True)
                load, model = measurement.load, measurement.spec.model.rstrip("/").rpartition("/")[2]
                users = f"infqps-concurrency{load.concurrency}" if isinstance(load, ClosedLoop) else f"{load.rate:g}qps"
                at = re.sub("[-:]", "", measurement.measured_at[:19]).replace("T", "-")
                name = f"{measurement.spec.interface}-{users}-{model}-{at}-{measurement.id}.json"
                write_file(self.path / name, f"{result}\n")
        except OSError as error:
            raise BadUsage(f"cannot write {self.path}: {error.strerror}", f"Write {EXAMPLE}.") from None


def export_to(text: str, slo: Slo | None = None) -> Export:
    """Return the export of an option's text, `vllm-bench=PATH`."""
    name, _, path = text.partition("=")
    if name != FORMAT or not path:
        raise BadUsage(f"{text!r} is not an export", f"Write {EXAMPLE}.")
    return Export(Path(path), slo)
