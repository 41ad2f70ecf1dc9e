"""The parts of a page as values for its template: every text and number is one that the terminal prints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

from pytest_slmserve.analysis.claims.table import CLAIMS
from pytest_slmserve.analysis.gate.decision import Comparison, PairSeries
from pytest_slmserve.analysis.gate.launch_pairs import GATED, SHOWN, Gated, series_of
from pytest_slmserve.analysis.metrics import latency
from pytest_slmserve.analysis.metrics.latency import Slo, parse_slo
from pytest_slmserve.analysis.stats.estimates import grouped, percentile
from pytest_slmserve.analysis.sweep.curve import Curve, is_main_sweep, labels
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report import screen
from pytest_slmserve.report.compare import days_of, history_sections, measured_facts
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.gate import text as gates
from pytest_slmserve.report.loads import is_windowed
from pytest_slmserve.report.page import charts
from pytest_slmserve.report.page.charts import PLANE, PLANE_NOTE
from pytest_slmserve.report.page.pictures import rates_picture
from pytest_slmserve.report.section import Cells, Section, section_text
from pytest_slmserve.report.tables import replicas as replica_tables
from pytest_slmserve.report.tables import run as run_tables
from pytest_slmserve.report.tables.findings import findings
from pytest_slmserve.report.tables.jobs import COLUMNS as JOBS
from pytest_slmserve.report.tables.jobs import goodput_columns, job_goodput, jobs_title
from pytest_slmserve.report.tables.sensors import STEP, STEP_LEGEND, step_rows
from pytest_slmserve.report.text_table import ABSENT, Column, figure, laid_out, milliseconds, telling
from pytest_slmserve.schema.environment import SIMULATED, Environment
from pytest_slmserve.schema.loads import ClosedLoop, OpenLoop
from pytest_slmserve.schema.records import Measurement

GLOSSARY: dict[tuple[str, ...], str] = {  # a term and its other forms
    (
        "requests in flight",
        "in flight",
        "concurrency",
    ): "Requests that the client keeps in the engine at once: the load.",
    ("batch",): "Sequences that one step of the engine computes together.",
    ("max_num_seqs",): "The engine's limit of sequences in a batch.",
    ("point", "points"): "One load, measured once or several times (repeats).",
    ("curve", "curves"): "The points of one engine, workload, way of loading and machine.",
    ("step",): "One pass of the model over the batch.",
    ("TTFT",): "Time to first token: from sending a request to its first output token.",
    ("TPOT",): "Time per output token: from the first to the last, over the tokens after the first.",
    ("ITL",): "Inter-token latency: each gap between two output tokens, where a client saw them arrive.",
    ("E2E",): "End-to-end latency: from sending a request to its last output token.",
    ("p99", "p50"): "Percentile: 99, or 50, of 100 requests were at most so slow.",
    ("SLO", "service-level objective"): "Bounds that a request has to keep to be good.",
    ("goodput",): "Requests per second that kept every bound of the service-level objective (SLO).",
    (
        "plateau",
    ): "Loads past which a doubling gains less throughput than the bound of the claim. With ?: inconclusive.",
    ("Pareto-optimal", "Pareto"): "A load that no other one beats in both throughput and latency.",
    ("saturation law",): "Throughput T_inf B/(B + b_half) at a batch B: half of T_inf is reached at b_half.",
    ("Little's law",): "Requests in flight are requests per second times the time that each takes.",
    ("roofline",): "The throughput that the data sheet of the device allows at a batch.",
    ("KV cache", "KV blocks"): "Keys and values of the tokens so far, which the engine keeps in blocks on the device.",
    ("preempted",): "Requests that the engine put back to compute them again, mostly for want of KV blocks.",
    ("GPU util",): "Share of the time in which any kernel ran, as NVML samples it.",
    ("SM",): "Streaming multiprocessors of the GPU. Active: the share that has work.",
    ("DRAM",): "The memory of the device. Active: share of the time in which it moved data.",
    ("tensor",): "Tensor cores of the GPU. Active: share of the time in which they computed.",
    ("host-speed probe",): "A fixed piece of pure Python that runs beside each window: it tells how fast the host is.",
    ("own cores",): "CPU time of this run's processes, as a number of cores.",
    ("replicas",): "Several engines that are measured at once, mostly on one GPU.",
    ("launch", "launches"): "One start of an engine.",
    ("claim", "claims"): "A published statement with a bound, which measurements are held against.",
    ("verdict", "verdicts"): "The answer: a claim passes, fails, or is inconclusive.",
    ("95 % interval", "95 %"): "Where the true value lies in 19 of 20 such measurements.",
    ("inconclusive",): "The measurements do not suffice to tell whether it passes or fails.",
    ("valid",): "yes; noisy: disturbed, but counted; partly: some repeats left out; degraded; NO: invalid.",
    ("gate",): "The test whether a candidate is slower than a baseline, by pairs of launches.",
    (
        "margin",
    ): "The change that matters. Worse by less for certain passes a gate, worse for certain by more than half "
    "of it fails.",
    ("interim analysis", "interim analyses"): "One of several tests of a gate, after more pairs each time.",
    ("minimum detectable change", "detectable"): "The smallest worsening that so much data find in nine of ten cases.",
    ("spread",): "How far repeats lie apart, over their mean; in a gate, the standard deviation of a pair.",
}

_NUMBERS = {form.lower(): number for number, forms in enumerate(GLOSSARY, 1) for form in forms}
_FORMS = "|".join(re.escape(form) for form in sorted(_NUMBERS, key=len, reverse=True))
_TERM = re.compile(rf"(?<![\w-])({_FORMS})(?![\w-])", re.IGNORECASE)


def parts(text: str) -> list[tuple[str, int]]:
    """The parts of a heading: each term with its number in the glossary, from 1, and what is between them with 0."""
    return [(part, _NUMBERS[part.lower()] if i % 2 else 0) for i, part in enumerate(_TERM.split(text))]


Row = TypeVar("Row")

NOTHING = "nothing was measured"
TEXT_WIDTH = 150  # columns of a table as text
WIDE = 100_000  # columns of a layout in which no line is broken: the browser breaks them
STARTING_SLO = parse_slo("ttft:200ms,tpot:50ms")  # where none was given
SHARES = (0.0, 0.01, *(i / 20 for i in range(1, 20)), 0.98, 0.99, 1.0)  # of the quantiles that are drawn
# Of the outcomes of claims; others are open.
LOOKS = {"pass": "good", "fail as expected": "good", "FAIL": "bad", "PASS, UNEXPECTED": "bad"}
GATE_KINDS = {
    State.PASSES: ("pass", "good"),
    State.FAILS: ("fail", "bad"),
    State.INCONCLUSIVE: ("inconclusive", "open"),
}
STATUSES = {
    0: "all is as expected",
    1: "something fails",
    2: "the run was interrupted",
    3: "something broke off",
    4: "wrong usage",
    5: "no test was collected",
    10: "nothing fails, but something is inconclusive",
}
GOODPUT = ("in flight", "goodput /s", "good %", "dropped")  # columns that the page's script can compute
UNSAID = ("host", "git_commit", "gpu_memory_bytes", "of_gpus")  # of an environment: hashes, and what follows


@dataclass(frozen=True, slots=True)
class DrawnChart:
    title: str
    spec: charts.Spec
    note: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a section: a gate, or another comparison. text: as a terminal shows it. look: good, bad or open."""

    title: str
    look: str
    charts: list[DrawnChart]
    tables: list[Cells]
    text: str


@dataclass(frozen=True, slots=True)
class PageSection:
    heading: str
    parts: list[Part]


def drawn_part(section: Section) -> Part:
    """A section as the template shows it."""
    drawn = [DrawnChart(each.title, each.spec, each.note) for each in section.charts() if each.spec]
    with laid_out(TEXT_WIDTH):
        text = section_text(section)
    return Part(section.title, section.look, drawn, section.tables, text)


def as_table(caption: str, rows: Sequence[Row], columns: Sequence[Column[Row]]) -> Cells:
    """The table that a terminal shows, with every column that tells something."""
    kept = telling(rows, columns)
    return Cells(
        caption,
        [column.name for column in kept],
        [[column.cell(row) for column in kept] for row in rows],
        [column.side == "right" for column in kept],
    )


def page_content(
    found: Findings,
    measurements: Sequence[Measurement],
    status: int | None,
    sections: Sequence[PageSection] = (),
) -> dict[str, Any]:
    """Names of the template with their values. sections: further ones."""
    gates = [PageSection("Gate", list(map(_gate, found.gates)))] if found.gates else []
    histories = list(map(drawn_part, history_sections(found.history)))
    history = [PageSection("History", histories)] if histories else []
    kinds = run_tables.by_outcome(found.judged, strict=found.strict)
    shown = [(label, curve) for curve, label in zip(found.curves, labels(found.curves), strict=True) if curve.valid]
    with laid_out(WIDE):
        title, sentences = screen.disturbances(found)
        return {
            "title": _title(measurements) or " and ".join(section.heading for section in sections) or NOTHING,
            "tallies": list(_tallies(kinds, found.gates)),
            "status": status,
            "status_words": STATUSES.get(status or 0, ""),
            "unexpected": [*screen.unexpected(kinds), *_gate_failures(found.gates), *found.failed],
            "inconclusive": [*screen.inconclusive(kinds, found.curves), *found.inconclusive],
            "facts": _facts(measurements),
            "reproduce": found.command or reproduce(measurements),
            "overview": [as_table(place, rows, screen.ROWS) for place, rows in screen.model_rows(found)],
            "deployments": list(screen.best_deployments(found)),
            "jobs": [
                as_table(jobs_title(jobs[0].environment), jobs, JOBS)
                for jobs in grouped(found.jobs, lambda job: job.environment.key).values()
            ],
            "disturbed": (title, sentences) if found.curves or found.shared or found.jobs or found.gates else None,
            "environments": _environments(measurements),
            "claims": list(_claims(found)),
            "pareto": [
                DrawnChart(PLANE, charts.pareto(alike), NOTES[PLANE])
                for alike in grouped(shown, lambda pair: pair[1].environment and pair[1].environment.key).values()
            ],
            "models": [_model(label, curve, found) for label, curve in shown],
            "sections": [*gates, *sections, *_replicas(found), *history],
            "notes": [*found.notes, *filter(None, [found.reused_text])],
            "words": GLOSSARY,
            "goodput": goodput_part(shown, found.slo or STARTING_SLO),
            "costs": cost_part(shown),
        }


def _title(measurements: Sequence[Measurement]) -> str:
    """Devices and releases, or that they are simulated; empty of nothing."""
    if measurements and all(m.environment.platform == "simulated" for m in measurements):
        return SIMULATED
    facts = measured_facts(measurements)
    devices, releases = ", ".join(facts["devices"]), ", ".join(facts["vllm"])
    return f"{devices}, vLLM {releases}" if releases and devices else devices


def _facts(measurements: Sequence[Measurement]) -> list[tuple[str, str]]:
    """Names and values of what was measured, and when."""
    if not measurements:
        return []
    facts = measured_facts(measurements)
    each = {
        "machine": ", ".join(facts["devices"]),
        "vLLM": ", ".join(facts["vllm"]),
        "models": ", ".join(facts["models"]),
        "measured": days_of(measurements),
        "measurements": f"{facts['measurements']:,}, of {facts['launches']:,} launches",
    }
    return [(name, value) for name, value in each.items() if value]


def reproduce(measurements: Sequence[Measurement]) -> str:
    """A command that measures the same models, interfaces and loads, where no archive has that of its run; empty of
    gates, of servers that ran, and without a closed loop."""
    closed = [m.load for m in measurements if isinstance(m.load, ClosedLoop)]
    if not closed or (first := measurements[0]).paired or first.spec.interface == "endpoint":
        return ""
    models = dict.fromkeys(m.spec.model for m in measurements)
    loads = sorted({c for m in measurements if (c := m.load.max_concurrency) is not None})
    words = ["pytest", "--pyargs", "pytest_slmserve.benchmarks", first.environment.mode]
    words += [f"--slm-models={','.join(models)}"]
    words += [f"--slm-concurrency={','.join(map(str, loads))}"] if loads else []
    words += [f"--slm-interface={first.spec.interface}"] if first.spec.interface == "server" else []
    for flag, values in (
        ("--slm-window", {load.window_s for load in closed}),
        ("--slm-ramp-up", {load.ramp_up for load in closed} - {"staggered"}),
    ):
        words += [f"{flag}={value}" for value in values if len(values) == 1]
    return shlex.join(words)


def _environments(measurements: Sequence[Measurement]) -> Cells | None:
    """A row for each fact, a column for each kind of environment."""
    each = list({m.environment.key: m.environment for m in measurements}.values())
    names = [field.name for field in fields(Environment) if field.name not in UNSAID]
    known = [name for name in names if any(getattr(one, name) is not None for one in each)]
    values = {name: [getattr(one, name) for one in each] for name in known}
    rows = [[name.replace("_", " "), *(ABSENT if v is None else str(v) for v in row)] for name, row in values.items()]
    heads = ["fact", *("value" if len(each) == 1 else f"environment {i}" for i in range(1, len(each) + 1))]
    return Cells("Environment", heads, rows, [False] * len(heads)) if rows else None


def _claims(found: Findings) -> Iterator[dict[str, Any]]:
    """Each claim with its statement, its chart and a row for each verdict."""
    for name, pairs in grouped(run_tables.in_order_of_claims(found.judged), lambda pair: pair[0].claim).items():
        claim = next((claim for claim in CLAIMS if claim.name == name), None)
        spec = charts.forest([verdict for verdict, _ in pairs])
        rows = []
        for verdict, row in pairs:
            words = run_tables.outcome_words(verdict, row, strict=found.strict)
            look = "open" if words == "inconclusive" else "bad" if words.isupper() else "good"
            said = {"subject": verdict.subject, "why": run_tables.verdict_reason(verdict, row, strict=found.strict)}
            rows.append({"state": verdict.state.value, "words": words.lower(), "look": look, **said})
        chart = DrawnChart("Interval of each subject against its bound", spec) if spec else None
        about = {"statement": claim.statement if claim else "", "source": claim.source if claim else ""}
        yield {"name": name, **about, "chart": chart, "verdicts": rows}


def _model(label: str, curve: Curve, found: Findings) -> dict[str, Any]:
    """A sweep: lines on what was measured, findings by name, charts, quantiles, the course of one window, tables and
    remarks."""
    tolerance = found.tolerance(curve, label)
    flat = curve.plateau(tolerance).value if is_main_sweep(curve) else None
    made: list[tuple[str, charts.Spec | None]] = [
        ("Throughput over load", charts.throughput(curve, flat)),
        ("Latency over load", charts.latency(curve)),
        ("Batch held", charts.batch(curve)),
        ("Use of the device", charts.shares(curve)),
        ("Energy", charts.energy(curve)),
        (STEP_PARTS, charts.step_parts_chart(steps := step_rows(curve), curve.subject)),
    ]
    tables = [as_table(f"Points of {label}", curve.points, run_tables.point_columns(curve))]
    tables += [as_table(f"{STEP_PARTS}, {label}", steps, STEP)] if steps else []
    largest = curve.valid[-1]
    course = charts.timeline(largest.used[-1][0]) if largest.used else []
    return {
        "label": label,
        "head": [line.strip() for line in run_tables.heading(curve)],
        "findings": list(findings(curve, tolerance)),
        "charts": [DrawnChart(title, spec, NOTES.get(title, "")) for title, spec in made if spec],
        "quantiles": list(_quantiles({p.concurrency: [m for group in p.used for m in group] for p in curve.valid})),
        "course_title": f"One window at {largest.concurrency} in flight",
        "course": [DrawnChart(title, spec) for title, spec in course],
        "tables": tables,
        "remarks": [text.strip() for text in run_tables.remarks(curve)],
    }


MEMORY_PARTS = "Memory of the GPU by engine"
STEP_PARTS = "Where a step goes"
GAIN = "Bars: 95 % interval. Upright line: one engine alone."
NOTES = {
    PLANE: PLANE_NOTE,
    "Throughput over load": "Whiskers: 95 % interval. Shaded: the plateau. Thin line: the fitted law. Dashed: the "
    "roofline, and loads that are predicted. Hollow: degraded, or predicted.",
    "Latency over load": "Whiskers: 95 % interval of the mean. Both axes are logarithmic.",
    STEP_PARTS: STEP_LEGEND,
    "Batch held": "Dashed: every request in flight is in the batch.",
}


def _quantiles(loads: Mapping[float, Sequence[Measurement]], of: str = charts.IN_FLIGHT) -> Iterator[DrawnChart]:
    """Charts of the latencies of all requests under each load, and of the gaps between tokens. of: what a load is."""
    requests = {
        load: [latency.request_latency(m.run.samples, row) for m in each for row in latency.judged_rows(m)]
        for load, each in loads.items()
    }
    for name in ("TTFT", "TPOT", "E2E"):
        values = []
        for load, seen in requests.items():
            known = sorted(value for one in seen if (value := getattr(one, f"{name.lower()}_s")) is not None)
            values += _shares(load, partial(percentile, known))
        if values:
            yield DrawnChart(name, charts.quantiles(name, values, of))
    gaps = [(load, latency.gaps_of(m.run for m in each)) for load, each in loads.items()]
    if values := [row for load, seen in gaps if seen for row in _shares(load, seen.percentile)]:
        yield DrawnChart("ITL", charts.quantiles("ITL", values, of))


def _shares(load: float, latency_s: Callable[[float], float | None]) -> list[dict[str, float]]:
    """Latency in ms that each share of the requests, or of the gaps, keeps."""
    known = [(share, seconds) for share in SHARES if (seconds := latency_s(share)) is not None and seconds > 0]
    return [{"x": 1e3 * seconds, "y": 100 * share, "load": load} for share, seconds in known]


def load_part(name: str, measured: Sequence[Measurement], slo: Slo | None, good: bool, text: str) -> Part:
    """Return the part of a page on loads that a server was measured under: requests served and latencies over the rate,
    and the latencies of all requests."""
    drawn = []
    if at_rates := [m for m in measured if is_windowed(m.load)]:
        drawn += [DrawnChart(panel["description"], panel) for panel in rates_picture(at_rates, slo).panels]
        by_load = {m.load.rate: [m] for m in at_rates if isinstance(m.load, OpenLoop)}
        drawn += _quantiles(by_load, "requests/s asked for")
    else:
        drawn += _quantiles({float(m.load.max_concurrency or 0): [m] for m in measured})
    return Part(name, "good" if good else "bad", drawn, [], text)


def goodput_part(shown: Sequence[tuple[str, Curve]], slo: Slo) -> dict[str, Any] | None:
    """Goodput under an SLO as a table, and what the page needs to compute it for another one; None without points."""
    if not shown:
        return None
    rows = [(label, job_goodput(curve, point, slo)) for label, curve in shown for point in curve.valid]
    columns = [column for column in goodput_columns("in\nflight", slo, 4) if column.name in GOODPUT]
    table = Cells(
        "Goodput of each load",
        ["model", *(column.name for column in columns)],
        [[label, *(column.cell(row) for column in columns)] for label, row in rows],
        [False, *(True for _ in columns)],
    )
    names, loads = [label for label, _ in shown], [point.concurrency for _, curve in shown for point in curve.valid]
    return {
        "bounds": {name: slo.bounds.get(name) for name in ("ttft", "tpot", "e2e")},
        "table": table,
        "charts": [
            DrawnChart("Goodput over load", charts.goodput_chart(names, loads, "per_s", "goodput, requests/s")),
            DrawnChart("Share of good requests", charts.goodput_chart(names, loads, "percent", "good requests, %")),
        ],
        "requests": [
            {"series": label, "x": point.concurrency, "windows": list(map(_window, point.used))}
            for label, curve in shown
            for point in curve.valid
        ],
    }


def cost_part(shown: Sequence[tuple[str, Curve]]) -> dict[str, Any] | None:
    """Throughput and energy of each load as a table, which the page fills with costs; None without points."""
    rows = [(label, point) for label, curve in shown for point in curve.valid]
    if not rows:
        return None
    cells = [
        [label, str(p.concurrency), figure(p.output_tokens_per_s, 4), milliseconds(p.energy_per_token_j), *[ABSENT] * 3]
        for label, p in rows
    ]
    heads = ["model", "in flight", "tokens/s", "mJ per token", "GPU", "energy", "both"]
    table = Cells("Cost of a million output tokens", heads, cells, [False, *[True] * 6])
    return {"table": table, "points": [[p.output_tokens_per_s, p.energy_per_token_j] for _, p in rows]}


def _window(group: Sequence[Measurement]) -> dict[str, Any]:
    """Requests of one repeat, in whole microseconds: since the one before was sent, to the first token, to the last."""
    (measurement,) = group
    samples, (opens, closes) = measurement.run.samples, measurement.run.window_s
    rows = latency.judged_rows(measurement)
    ended = [row for row in rows if samples.finished[row] and samples.last_token_s[row] is not None]
    sent = [_us(samples.sent_s[row]) for row in ended]
    first = [None if (at := samples.first_token_s[row]) is None else _us(at) for row in ended]
    return {
        "seconds": closes - opens,
        "dropped": latency.judged_failures(measurement) + len(rows) - len(ended),
        "sent": [at - before for at, before in zip(sent, [0, *sent])],
        "first": [None if at is None else at - begin for at, begin in zip(first, sent)],
        "last": [_us(samples.last_token_s[row] or 0.0) - begin for row, begin in zip(ended, sent)],
        "tokens": [samples.output_tokens[row] for row in ended],
    }


def _us(seconds: float) -> int:
    return round(1e6 * seconds)


def _tallies(kinds: Mapping[str, Sequence[Verdict]], gates: Iterable[Gated]) -> Iterator[dict[str, Any]]:
    """Numbers of verdicts of each outcome of claims, those of which nothing is expected together, and of gates. look:
    good, bad or open."""
    either = {name: them for name, them in kinds.items() if name.startswith(run_tables.EITHER) and them}
    for name, them in kinds.items():
        if them and name not in either:
            yield {"count": len(them), "words": name, "look": LOOKS.get(name, "open")}
    if either:
        yield {"count": sum(map(len, either.values())), "words": run_tables.tally(either), "look": "open"}
    for state, judged in grouped(gates, lambda gated: gated.outcome).items():
        words, look = GATE_KINDS[state]
        yield {"count": len(judged), "words": f"gate: {words}", "look": look}


def _gate_failures(found: Iterable[Gated]) -> Iterator[str]:
    for gated in found:
        if gated.outcome is State.FAILS:
            yield from (f"{gated.model}: {e.name}: {e.why}" for e in gated.gated if e.outcome is State.FAILS)
            yield from (f"{v.subject}: {v.claim}: {v.why}" for v in gated.exact if v.state is State.FAILS)


def _replicas(found: Findings) -> Iterator[PageSection]:
    """A part for each kind of host that several engines shared."""
    parts = []
    for title, _, entries in replica_tables.replicas_by_host(found.curves, found.shared):
        named = [(f"{e.engines}, {e.sharing}, {e.served.concurrency} in flight", e.gain) for e in entries]
        spec = charts.gain_chart([(name, gain) for name, gain in named if gain])
        tables = [
            as_table("Throughput", entries, (*replica_tables.NAMES, *replica_tables.SERVED)),
            as_table("Sensors", entries, (*replica_tables.NAMES, *replica_tables.SENSED)),
        ]
        tables = [each for each in tables if len(each.heads) > len(replica_tables.NAMES)]
        drawn = [DrawnChart("Gain over one engine", spec, GAIN)] if spec else []
        if (used := replica_tables.memory_rows(entries)) and (spec := charts.memory(used)):
            drawn.append(DrawnChart(MEMORY_PARTS, spec, replica_tables.MEMORY_LEGEND))
            tables.append(as_table(MEMORY_PARTS, used, replica_tables.MEMORY))
        with laid_out(TEXT_WIDTH):
            text = "\n\n".join(replica_tables.replica_report(found.curves, found.shared))
        parts.append(Part(title, "open", drawn, tables, text))
    if parts:
        yield PageSection("Replicas", parts)


def _gate(gated: Gated) -> Part:
    series = series_of((*GATED, *SHOWN), gated.pairs)
    with laid_out(TEXT_WIDTH):
        text = section_text(gates.gate_section(gated))
    look = GATE_KINDS[gated.outcome][1]
    return endpoint_part(gates.title(gated), look, gated.gated, gated.shown, {each.name: each for each in series}, text)


def endpoint_part(
    title: str,
    look: str,
    gated: Sequence[Comparison],
    shown: Sequence[Comparison],
    series: Mapping[str, PairSeries],
    text: str,
) -> Part:
    """Endpoints of pairs, as a chart and a table."""
    spec = charts.gate_forest([*gated, *shown], series, (each.name for each in gated))
    note = "Ticks: pairs of launches. Bars: 95 % interval. Upright line of an endpoint: its margin."
    drawn = [DrawnChart("Candidate over baseline", spec, note)] if spec else []
    looks = "Dashed: the margin, and no change."
    drawn += [DrawnChart(f"Interim analyses: {e.name}", charts.interim(e), looks) for e in gated if e.interim]
    endpoints, _, interim = gates.comparison_parts(gated, shown)
    return Part(title, look, drawn, [part.cells for part in (endpoints, interim) if part.rows], text)


def of_sweep(curve: Curve, tolerance: float, text: str) -> Part:
    """A sweep of external results."""
    drawn = [
        DrawnChart(f"{curve.axes.throughput} over the load", charts.throughput(curve, curve.plateau(tolerance).value))
    ]
    return Part(curve.subject, "open", drawn, [], text)
