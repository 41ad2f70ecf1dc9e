"""Results of other tools: a CSV with named columns, or the JSON of `vllm bench serve`, read into the points of a curve;
and our own, written as they are made in the words of the latter, so that what reads its JSON reads ours.

JSON may be one object, a list, one object a line, or whole objects one after the other; nested values are read of the
tools that `other_tools` knows. What a column means is the user's word; nothing is guessed but the unit that a name ends
in.

Key names that are written are those that vllm/benchmarks/serve.py of release 0.32 saves. Times end in _ms where vLLM's
do. What it calls `duration` is the window; requests and tokens are those of the window, so the rates are the same as in
our own reports. `vllm-bench=PATH`: if PATH ends in .json, all results go into that file, an object a line, as vLLM's
--append-result writes them; else it is a folder that gets a file for each, under the name that vLLM gives it
(`--save-result --result-dir`), with the record's id at its end: two of one second are two files.
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
SMALLEST, LARGEST = 1e-12, 1e12  # of what a rate or a latency can be, whatever its unit
LARGEST_KNOB = 10**9
LARGEST_FILE = 10**9  # bytes, of which `vllm bench serve --save-detailed` writes some million
RUN, WARM_UP = "run_number", "-1"  # of `vllm bench sweep`
MODELS, SERVED_BY = ("model_id", "model"), {"backend", "tokenizer_id", "endpoint_type", "tool"}


@dataclass(frozen=True, slots=True)
class Row:
    """One result: where it stands, for messages, and its named values as they were read."""

    place: str
    cells: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return the text of a cell without surrounding spaces; empty if there is no cell."""
        cell = self.cells.get(name)
        return "" if cell is None else str(cell).strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of the columns, as the options of `report` have them; None if a file has no such column. throughput:
    tokens/s of whatever tokens. running: mean number of running requests. output_throughput: output tokens/s.
    kv_blocks: of the engine's KV cache. latency_unit: "ms" or "s" if the name does not end in it."""

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
        """All columns that are named."""
        return tuple(name for name in astuple(replace(self, latency_unit=None)) if name is not None)


def external_curve(rows: Sequence[Row], columns: Columns) -> Curve:
    """Return the curve over the knob. Rows of the same knob are repeats of a point. Its e2e_s is the latency, whatever
    it is, its output_tokens_per_s the throughput, of whatever tokens. Its batch is output rate times latency: by
    Little's law the concurrent requests. Its little is how far the reported mean of running requests is from that, a
    share. If a row preempted, the point keeps its figures, but is not valid.

    Raises BadUsage for a value that cannot be what its column is said to hold, and if neither the name of the latency
    nor the user says its unit, or they disagree.
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
    """Return the number that a cell's text is, finite or not; None if it is none."""
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
    """Return a number of a row, from text too. Raises BadUsage if there is none between `low` and `high`, by default
    those of a rate or a latency. why_not: end of the error about another number, as in "is no number of KV blocks"."""
    value, shown = number_of(cell := row.cells.get(column)), repr(cell)
    said = f"{row.place}: {column} is {shown if len(shown) <= 40 else f'{shown[:37]}...'}, which"
    if value is None or not math.isfinite(value):
        raise BadUsage(f"{said} is not a number", "Exclude such rows with --where.")
    if not low <= value <= high or (whole and not value.is_integer()):
        raise BadUsage(f"{said} {why_not}", "Choose another column.")
    return value


def knob_of(row: Row, column: str) -> int:
    """Return the load of a row. Raises BadUsage if it is no positive whole number."""
    why_not = "is no knob: a knob has to be a positive whole number"
    return int(number_in(row, column, 1, LARGEST_KNOB, why_not, whole=True))


def matching(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """Return the rows that meet all conditions NAME=VALUE of `--where`, as texts in any case or as numbers. Raises
    BadUsage for what is no condition, for a column that is not there, and if no row is left."""
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
    """Return the rows that have a value in each column, and sentences on the others and on those of vLLM with failed
    requests. A rate or a latency of 0, and one that is no number, is no value: nothing was served. Raises BadUsage if
    no row has all values."""
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
    """Return a sentence for each column of settings in which rows differ that are taken as one curve or as repeats.

    A column of words is one of settings if some rows agree in it: if no two agree it is a name or a date. A column of
    numbers is one if rows of the same knob differ and each of its values is in several rows, as measurements are not.
    An empty cell of a column of words is a word. The number of a run is no setting. Models, and what serves them, are
    settings in any case: rows of several models are no curve. Raises BadUsage for those.
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
    """Raises BadUsage if no row has one of these columns, and says which there are; lists are none."""
    there = dict.fromkeys(n for row in rows for n, cell in row.cells.items() if not isinstance(cell, (list, dict)))
    for name in names:
        if rows and name not in there:
            raise BadUsage(f"there is no column {name!r}", f"Use one of {', '.join(there)}.")


def results(paths: Iterable[Path]) -> tuple[list[Row], list[str]]:
    """Return the rows of all files, and sentences on those left out. `vllm bench sweep` keeps each result in a file of
    its own and in a summary: what an earlier file has, too, is no repeat, nor is a warm-up. Raises BadUsage."""
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
    """Return the rows of a CSV or JSON file; names and values as a terminal may show them. Raises BadUsage."""
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
    """One result, with what vLLM's has no word for beside it: the record's id, whether it is valid, versions."""
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
    """Return latency statistics in ms by vLLM's names; a request that did not finish is left out, as vLLM does. Those
    of the ITL are from the gap histogram. Its deviation uses the middles of the bins, which are 1 % wide."""
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
        average, middle = gaps.mean_s or 0.0, gaps.percentile(0.5) or 0.0
        square = sum((gaps.middle_s(i) - average) ** 2 * count for i, count in gaps.counts.items()) / gaps.gaps
        found["itl"] = {"mean": average, "median": middle, "std": math.sqrt(square)}
        found["itl"] |= {f"p{share}": gaps.percentile(share / 100) or 0.0 for share in PERCENTILES}
    return {f"{what}_{name}_ms": 1e3 * value for name, each in found.items() for what, value in each.items()}


FORMAT = "vllm-bench"
EXAMPLE = f"{FORMAT}=results/ for one file per result, or {FORMAT}=results.json"


@dataclass(frozen=True, slots=True)
class Export:
    """The destination of exported results. slo: None means no goodput."""

    path: Path
    slo: Slo | None = None

    def add(self, measurement: Measurement) -> None:
        """Raises BadUsage where it cannot be written; the record is in the archive by then."""
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
    """Return the export that an option's text names: `vllm-bench=PATH`. Raises BadUsage for any other text."""
    name, _, path = text.partition("=")
    if name != FORMAT or not path:
        raise BadUsage(f"{text!r} is not an export", f"Write {EXAMPLE}.")
    return Export(Path(path), slo)
