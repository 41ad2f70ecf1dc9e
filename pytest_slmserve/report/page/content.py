"""The parts of a page as values for its template: every text and number is one that the terminal prints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import takewhile
from typing import Any

from pytest_slmserve.analysis.claims.table import CLAIMS
from pytest_slmserve.analysis.gate.decision import Comparison, PairSeries
from pytest_slmserve.analysis.gate.launch_pairs import GATED, SHOWN, series_of
from pytest_slmserve.analysis.metrics import latency
from pytest_slmserve.analysis.metrics.latency import Slo, parse_slo
from pytest_slmserve.analysis.stats.estimates import grouped
from pytest_slmserve.analysis.sweep.curve import Curve, labels
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.report import screen, verdicts
from pytest_slmserve.report.compare import days_of, history_sections, measured_facts
from pytest_slmserve.report.deployments import gpus_sections, interfaces_sections, replica_sections
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.gate import text as gates
from pytest_slmserve.report.loads import JOB_LEGEND, goodput_columns, goodput_rows, job_sections
from pytest_slmserve.report.page import charts
from pytest_slmserve.report.page.charts import PLANE, PLANE_NOTE
from pytest_slmserve.report.section import Cells, Chart, Legend, Look, Named, Section, section_text
from pytest_slmserve.report.sweeps import sweep_section
from pytest_slmserve.report.text_table import ABSENT, figure, laid_out, milliseconds
from pytest_slmserve.schema.environment import SIMULATED, Environment
from pytest_slmserve.schema.loads import ClosedLoop
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


NOTHING = "nothing was measured"
TEXT_WIDTH = 150  # columns of a table as text
WIDE = 100_000  # columns of a layout in which no line is broken: the browser breaks them
STARTING_SLO = parse_slo("ttft:200ms,tpot:50ms")  # if none was given
# Of the outcomes of claims; others are open.
LOOKS: dict[str, Look] = {"pass": "good", "fail as expected": "good", "FAIL": "bad", "PASS, UNEXPECTED": "bad"}
GATE_KINDS: dict[State, tuple[str, Look]] = {
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
class Part:
    """A section as the template shows it. text: as a terminal shows it."""

    section: Section
    charts: Sequence[Chart]
    text: str = ""

    @property
    def chart_groups(self) -> dict[str, list[Chart]]:
        """Charts of which something is known, by the heading of their group."""
        return grouped((chart for chart in self.charts if chart.spec), lambda chart: chart.group)


@dataclass(frozen=True, slots=True)
class PageSection:
    """Parts of a page below one heading."""

    heading: str
    parts: list[Part]


def page_section(heading: str, shown: Iterable[Section | Legend]) -> PageSection:
    """Return sections as the template shows them. Legends stand below the text of each."""
    each_shown = list(shown)
    sections = [each for each in each_shown if isinstance(each, Section)]
    legends = [each for each in each_shown if isinstance(each, Legend)]
    with laid_out(TEXT_WIDTH):
        texts = ["\n\n".join([section_text(each), *map(section_text, legends)]) for each in sections]
    return PageSection(heading, [Part(each, list(each.charts()), text) for each, text in zip(sections, texts)])


def page_content(
    found: Findings, measurements: Sequence[Measurement], status: int | None, sections: Sequence[PageSection] = ()
) -> dict[str, Any]:
    """Return the names of the template with their values. sections: further ones, after the gates."""
    kinds = verdicts.by_outcome(found.judged, strict=found.strict)
    shown = [(label, curve) for curve, label in zip(found.curves, labels(found.curves), strict=True) if curve.valid]
    failures = [
        *(f"{g.model}: {e.name}: {e.why}" for g in found.gates for e in g.gated if e.outcome is State.FAILS),
        *(f"{v.subject}: {v.claim}: {v.why}" for g in found.gates for v in g.exact if v.state is State.FAILS),
    ]
    gate_sections = []
    for gated in found.gates:
        made = partial(gate_charts, gated.gated, gated.shown, series_of((*GATED, *SHOWN), gated.pairs))
        gate_sections.append(replace(gates.gate_section(gated), charts=made))
    subjects = [
        page_section("Gate", gate_sections),
        *sections,
        page_section("Replicas", replica_sections(found.curves, found.shared)),
        page_section("Several GPUs", gpus_sections(found.curves)),
        page_section("Interfaces", interfaces_sections(found.curves)),
        page_section("Jobs", [*job_sections(found.jobs), Legend(JOB_LEGEND)]),
        page_section("History", history_sections(found.history)),
    ]
    with laid_out(WIDE):
        disturbed = screen.disturbances(found)
        return {
            "title": _title(measurements) or " and ".join(section.heading for section in sections) or NOTHING,
            "tallies": list(_tallies(found)),
            "status": status,
            "status_words": STATUSES.get(status or 0, ""),
            "unexpected": [*verdicts.unexpected(kinds), *failures, *found.failed],
            "inconclusive": [*verdicts.inconclusive(kinds, found.curves), *found.inconclusive],
            "facts": _facts(measurements),
            "reproduce": found.command or reproduce(measurements),
            "overview": [shown.cells for shown in screen.overview_tables(found)],
            "deployments": list(screen.best_deployments(found)),
            "disturbed": disturbed if found.curves or found.shared or found.jobs or found.gates else None,
            "environments": _environments(measurements),
            "claims": list(_claims(found)),
            "pareto": [
                Chart(PLANE, charts.pareto(alike), PLANE_NOTE)
                for alike in grouped(shown, lambda pair: pair[1].environment and pair[1].environment.key).values()
            ],
            "models": [_model(label, sweep_section(curve, label, found)) for label, curve in shown],
            "sections": [section for section in subjects if section.parts],
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
    for name, pairs in verdicts.by_claim(found.judged).items():
        claim = next((claim for claim in CLAIMS if claim.name == name), None)
        spec = charts.forest([verdict for verdict, _ in pairs])
        rows = []
        for verdict, row in pairs:
            words = verdicts.outcome_words(verdict, row, strict=found.strict)
            look = "open" if words == "inconclusive" else "bad" if words.isupper() else "good"
            said = {"subject": verdict.subject, "why": verdicts.verdict_reason(verdict, row, strict=found.strict)}
            rows.append({"state": verdict.state.value, "words": words.lower(), "look": look, **said})
        chart = Chart("Interval of each subject against its bound", spec) if spec else None
        about = {"statement": claim.statement if claim else "", "source": claim.source if claim else ""}
        yield {"name": name, **about, "chart": chart, "verdicts": rows}


def _model(label: str, section: Section) -> dict[str, Any]:
    """Return a sweep as the template shows it: lines on what was measured, findings, charts, tables, remarks."""
    head = [*takewhile(lambda part: isinstance(part, str), section.parts)]
    texts = [part.strip() for part in section.parts if isinstance(part, str)]
    return {
        "label": label,
        "head": [section.title, *texts[: len(head)]],
        "findings": [pair for part in section.parts if isinstance(part, Named) for pair in part.pairs],
        "part": Part(section, list(section.charts())),
        "remarks": texts[len(head) :],
    }


def goodput_part(shown: Sequence[tuple[str, Curve]], slo: Slo) -> dict[str, Any] | None:
    """Goodput under an SLO as a table, and what the page needs to compute it for another one; None without points."""
    if not shown:
        return None
    valid = {label: {point.concurrency for point in curve.valid} for label, curve in shown}
    rows = [(label, row) for label, curve in shown for row in goodput_rows(curve, slo) if row.load in valid[label]]
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
            Chart("Goodput over load", charts.goodput_chart(names, loads, "per_s", "goodput, requests/s")),
            Chart("Share of good requests", charts.goodput_chart(names, loads, "percent", "good requests, %")),
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


def _tallies(found: Findings) -> Iterator[dict[str, Any]]:
    """Yield the numbers of verdicts of each outcome of claims, those of which either is expected together, and of
    gates."""
    kinds = verdicts.by_outcome(found.judged, strict=found.strict)
    either = {name: each for name, each in kinds.items() if name.startswith(verdicts.EITHER) and each}
    for name, each in kinds.items():
        if each and name not in either:
            yield {"count": len(each), "words": name, "look": LOOKS.get(name, "open")}
    if either:
        yield {"count": sum(map(len, either.values())), "words": verdicts.tally(either), "look": "open"}
    for state, judged in grouped(found.gates, lambda gated: gated.outcome).items():
        words, look = GATE_KINDS[state]
        yield {"count": len(judged), "words": f"gate: {words}", "look": look}


def gate_charts(
    gated: Sequence[Comparison], shown: Sequence[Comparison], series: Iterable[PairSeries]
) -> Iterator[Chart]:
    """Yield the endpoints of a gate with each pair, and the interim analyses of each endpoint.

    Args:
        gated: Endpoints that are gated.
        shown: Endpoints that are only shown.
        series: Pairs of each endpoint.
    """
    spec = charts.gate_forest([*gated, *shown], {each.name: each for each in series}, (each.name for each in gated))
    note = "Ticks: pairs of launches. Bars: 95 % interval. Upright line of an endpoint: its margin."
    yield Chart("Candidate over baseline", spec, note)
    for each in gated:
        if each.interim:
            looks = "Dashed: the margin, and no change."
            yield Chart(f"Interim analyses: {each.name}", charts.interim(each), looks)
