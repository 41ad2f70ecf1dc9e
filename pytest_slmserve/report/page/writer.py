"""The HTML report: sections, charts, template, libraries and records in one file.

The page fetches nothing, and only three libraries and our script run, by their hashes. Content of a results file is
text: the template escapes it, and in JSON no tag can end.
"""

import gzip
import json
import re
import shlex
import time
import tomllib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from pytest_slmserve.analysis.claims.table import CLAIMS
from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.lines import BEGINS
from pytest_slmserve.archive.store import embedded, make_folder
from pytest_slmserve.report import as_json, compare, deployments, gate, loads, screen, sweeps, verdicts
from pytest_slmserve.report.answer import answer_of
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page import charts
from pytest_slmserve.report.section import Cells, Chart, Look, Section, in_units
from pytest_slmserve.report.text_table import ABSENT, counted, figure, laid_out, milliseconds
from pytest_slmserve.schema.errors import BadUsage, SlmError, regular, to_install, write_file
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.records import SIMULATED, Environment, Measurement
from pytest_slmserve.schema.specs import ClosedLoop

FOLDER = files("pytest_slmserve.report.page")
GLOSSARY: dict[tuple[str, ...], str] = {  # meanings by a term and its other forms
    tuple(term["forms"]): term["meaning"]
    for term in tomllib.loads((FOLDER / "glossary.toml").read_text("utf-8"))["term"]
}
_NUMBERS = {form.lower(): number for number, forms in enumerate(GLOSSARY, 1) for form in forms}
_FORMS = "|".join(re.escape(form) for form in sorted(_NUMBERS, key=len, reverse=True))
_TERM = re.compile(rf"(?<![\w-])({_FORMS})(?![\w-])", re.IGNORECASE)
INTERPRETER = "vega-interpreter.js"
LIBRARIES = ("vega.min.js", "vega-lite.min.js", INTERPRETER)
_MODULE = (  # because a page in a file cannot import the published module of the interpreter
    ("import {", "const {"),
    ("} from 'vega-util';", "} = vega;"),
    ("export { expression as expressionInterpreter };", "vega.expressionInterpreter = expression;"),
)
NOTHING = "nothing was measured"
TEXT_WIDTH = 150  # columns of a table as text
WIDE = 100_000  # columns of a layout without wrapped lines, because the browser wraps them
STARTING_SLO = window.parse_slo("ttft:200ms,tpot:50ms")  # if no SLO was given
# Looks of the outcomes of claims; others are open.
LOOKS: dict[str, Look] = {"passed": "good", "expected failure": "good", "failed": "bad", "unexpected pass": "bad"}
STATUSES = {
    0: "all is as expected",
    1: "something fails",
    2: "the run was interrupted",
    3: "something broke off",
    4: "wrong usage",
    5: "no test was collected",
    10: "nothing fails, but something is inconclusive",
}
GOODPUT = ("concurrency", "goodput /s", "good %", "dropped")  # columns that the page's script can compute
UNSAID = ("host", "git_commit", "gpu_memory_bytes", "of_gpus")  # hidden fields of an environment


def page_content(found: Findings, status: int | None, sections: Mapping[str, Iterable[Section]]) -> dict[str, Any]:
    """Return the values of the template by name.

    Args:
        sections: further ones by heading, after the gates.
    """
    measurements, kinds = found.measurements, verdicts.by_outcome(found.outcomes)
    shown = [(label, curve) for curve, label in found.labelled if curve.valid]
    failures = [
        *(f"{g.model}: {e.name}: {e.why}" for g in found.gates for e in g.gated if e.outcome is State.FAILS),
        *(f"{v.subject}: {v.claim}: {v.why}" for g in found.gates for v in g.exact if v.state is State.FAILS),
    ]
    either = {name: each for name, each in kinds.items() if name.startswith(verdicts.INFORMATIONAL) and each}
    tallies = [
        (len(each), verdicts.plural(name, len(each)), LOOKS.get(name, "open"))
        for name, each in kinds.items()
        if each and name not in either
    ]
    tallies += [(sum(map(len, either.values())), verdicts.tally(either), "open")] if either else []
    for state, judged in grouped(found.gates, lambda gated: gated.outcome).items():
        tallies.append((len(judged), f"gate: {gate.WORDS[state]}", gate.LOOKS[state]))
    others = screen.subject_sections(found)
    others.pop("Answer")
    answers = [in_units(five.section, found.unit)] if (five := answer_of(found)) else []
    subjects = [(heading, [*each]) for heading, each in {"Gate": others.pop("Gate"), **sections, **others}.items()]
    title, measured = _measured(measurements)
    alike = grouped(shown, lambda pair: pair[1].environment and pair[1].environment.key).values()
    with laid_out(WIDE):
        disturbed = screen.disturbances(found)
        content = {
            "title": title or " and ".join(sections) or NOTHING,
            "answers": answers,
            "tallies": tallies,
            "status": status,
            "status_words": STATUSES.get(status or 0, ""),
            "unexpected": [*verdicts.unexpected(kinds), *failures, *found.failed],
            "inconclusive": [*verdicts.inconclusive(kinds, found.curves), *found.inconclusive],
            "facts": measured.items(),
            "reproduce": found.command or reproduce(measurements),
            "overview": [shown.cells for shown in sweeps.overview_tables(found)],
            "deployments": list(deployments.best_deployments(found)),
            "disturbed": disturbed if found.curves or found.shared or found.jobs or found.gates else None,
            "environments": _environments(measurements),
            "claims": [
                (name, CLAIMS.get(name), charts.forest([each.verdict for each in group]), group)
                for name, group in verdicts.by_claim(found.outcomes).items()
            ],
            "pareto": [Chart(charts.PLANE, charts.pareto(curves), charts.PLANE_NOTE) for curves in alike],
            "sections": [(heading, each) for heading, each in subjects if each],
            "notes": [*found.notes, *filter(None, [found.reused_text])],
            "goodput": goodput_part(shown, found.slo or STARTING_SLO),
            "costs": cost_part(shown),
        }
        return {name: in_units(value, found.unit) for name, value in content.items()}


def _measured(measurements: Sequence[Measurement]) -> tuple[str, dict[str, str]]:
    known = compare.measured_facts(measurements)
    devices, releases, models = (", ".join(known[name]) for name in ("devices", "vllm", "models"))
    title = f"{devices}, vLLM {releases}" if releases and devices else devices
    if measurements and all(m.environment.platform == "simulated" for m in measurements):
        title = SIMULATED
    days = compare.days_of(m.measured_at for m in measurements)
    each = {"machine": devices, "vLLM": releases, "models": models, "measured": days}
    if measurements:
        each["measurements"] = f"{known['measurements']:,}, of {counted(known['launches'], 'launch')}"
    return title, {name: value for name, value in each.items() if value}


def reproduce(measurements: Sequence[Measurement]) -> str:
    """Return a command for the same models and loads, for results files without one.

    Empty for gates, for servers that already ran, and without a closed loop.
    """
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
    each = list({m.environment.key: m.environment for m in measurements}.values())
    names = [field.name for field in fields(Environment) if field.name not in UNSAID]
    known = [name for name in names if any(getattr(one, name) is not None for one in each)]
    values = {name: [getattr(one, name) for one in each] for name in known}
    rows = [[name.replace("_", " "), *(ABSENT if v is None else str(v) for v in row)] for name, row in values.items()]
    heads = ["fact", *("value" if len(each) == 1 else f"environment {i}" for i in range(1, len(each) + 1))]
    return Cells("Environment", heads, rows, [False] * len(heads)) if rows else None


def goodput_part(shown: Sequence[tuple[str, Curve]], slo: window.Slo) -> dict[str, Any] | None:
    """Return goodput under an SLO, with data for other SLOs; None without points."""
    if not shown:
        return None
    columns = [column for column in loads.goodput_columns("concur-\nrency", slo) if column.name in GOODPUT]
    points, cells = [], []
    for label, curve in shown:
        for point, row in zip(curve.points, loads.goodput_rows(curve, slo)):
            if point.valid:
                points.append((label, point))
                cells.append([label, *(column.cell(row) for column in columns)])
    heads, names, drawn = ["model", *GOODPUT], [label for label, _ in shown], []
    x = charts.load_axis(point.concurrency for _, point in points)
    for title, field, what in (
        ("Goodput over load", "per_s", "goodput, requests/s"),
        ("Share of good requests", "percent", "good requests, %"),
    ):  # the page's script fills them in
        words = f"{what} over {charts.CONCURRENCY}"
        spec = charts.line_chart([], x, charts.axis("y", what), names, description=words, height=240)
        drawn.append(Chart(title, spec | {"usermeta": {"field": field}}))
    return {
        "bounds": {name: slo.bounds.get(name) for name in ("ttft", "tpot", "e2e")},
        "table": Cells("Goodput of each load", heads, cells, [False, *(True for _ in columns)]),
        "charts": drawn,
        "requests": [
            {"series": label, "x": point.concurrency, "windows": list(map(_window, point.used))}
            for label, point in points
        ],
    }


def cost_part(shown: Sequence[tuple[str, Curve]]) -> dict[str, Any] | None:
    """Return a table of throughput and energy that the page fills with costs; None without points."""
    rows = [(label, point) for label, curve in shown for point in curve.valid]
    if not rows:
        return None
    cells = [
        [label, str(p.concurrency), figure(p.output_tokens_per_s, 4), milliseconds(p.energy_per_token_j), *[ABSENT] * 3]
        for label, p in rows
    ]
    heads = ["model", "concurrency", "tokens/s", "mJ per token", "GPU", "energy", "both"]
    table = Cells("Cost of a million output tokens", heads, cells, [False, *[True] * 6])
    return {"table": table, "points": [[p.output_tokens_per_s, p.energy_per_token_j] for _, p in rows]}


def _window(group: Sequence[Measurement]) -> dict[str, Any]:
    """Return the requests of one repeat as differences of times, in microseconds."""
    (measurement,) = group
    samples, (opens, closes) = measurement.run.samples, measurement.run.window_s
    judged = window.judged_requests(measurement)
    ended = [row for row in judged.rows if samples.finished[row] and samples.last_token_s[row] is not None]
    sent = [round(1e6 * samples.sent_s[row]) for row in ended]
    first = [None if (at := samples.first_token_s[row]) is None else round(1e6 * at) for row in ended]
    return {
        "seconds": closes - opens,
        "dropped": judged.failures + len(judged.rows) - len(ended),
        "sent": [at - before for at, before in zip(sent, [0, *sent])],  # since the request before
        "first": [None if at is None else at - begin for at, begin in zip(first, sent)],  # since sending
        "last": [round(1e6 * (samples.last_token_s[row] or 0.0)) - begin for row, begin in zip(ended, sent)],
        "tokens": [samples.output_tokens[row] for row in ended],
    }


def write_page(path: Path, found: Findings, archives: Iterable[Path] = (), **more: Any) -> None:
    """Write the HTML report. An old one is replaced at once, so no reader sees a part.

    Args:
        more: see `rendered`.

    Raises:
        BadUsage: if the report cannot be written.
    """
    page = rendered(found, archives, **more)
    check_replaceable(path)
    try:
        make_folder(path.parent)
        write_file(path, page)
    except OSError as error:
        raise BadUsage(f"cannot write {path}: {error.strerror}", "Choose another path with --html.") from None


def check_replaceable(path: Path, option: str = "--html") -> None:
    """Raise BadUsage without Jinja2, or if the path is another file, such as a results file.

    Args:
        option: that named the path.
    """
    template()
    try:
        with open(path, "rb", opener=regular) as file:
            begins = file.read(len(BEGINS))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise BadUsage(f"cannot write {path}: {error.strerror}", f"Choose another path with {option}.") from None
    if begins and begins.lower() != BEGINS:
        raise BadUsage(f"{path} is there, and is not a page", f"Choose another path with {option}.")


def rendered(
    found: Findings,
    archives: Iterable[Path] = (),
    *,
    status: int | None = None,
    progress: str = "",
    sections: Mapping[str, Iterable[Section]] | None = None,
) -> str:
    """Return the text of the HTML report. Raise BadUsage without Jinja2.

    Args:
        archives: results files to embed.
        status: exit status of the command or run.
        progress: sentence on the progress of a run.
        sections: further ones by heading.
    """
    content = page_content(found, status, sections or {})
    records = [one for archive in archives for one in embedded(archive)]
    with laid_out(TEXT_WIDTH, every_column=True):
        text = "\n".join(text for text, _ in screen.tables(found))
    page: str = template().render(content, **shared_parts(), records=records, progress=progress, text=text)
    return page


@cache
def shared_parts() -> dict[str, Any]:
    """Return style, script and libraries of all reports, with the policy that only these run."""
    style, script = ((FOLDER / name).read_text("utf-8") for name in ("page.css", "page.js"))
    libraries = {name: (FOLDER / "vendor" / name).read_text("utf-8") for name in LIBRARIES}
    for published, ours in _MODULE:
        assert published in libraries[INTERPRETER], f"{INTERPRETER} is of another release"
        libraries[INTERPRETER] = libraries[INTERPRETER].replace(published, ours)
    libraries[INTERPRETER] = f"(() => {{{libraries[INTERPRETER]}\n}})();"
    hashes = [
        f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'"
        for each in (style, script, *libraries.values())
    ]
    rest = "img-src data:; base-uri 'none'; form-action 'none'"
    return {
        "words": GLOSSARY,
        "style": style,
        "script": script,
        "libraries": {name: packed(library) for name, library in libraries.items()},
        "policy": f"default-src 'none'; style-src {hashes[0]}; script-src {' '.join(hashes[1:])}; {rest}",
    }


def template() -> Any:
    """Return the template of the HTML report. Raise BadUsage without Jinja2."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise BadUsage("a page needs Jinja2", to_install("report")) from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=visible, trim_blocks=True)
    environment.filters |= {
        "parts": parts,
        "json": as_script_json,
        "packed": lambda value: packed(as_script_json(value)),
    }
    return environment.from_string((FOLDER / "page.html").read_text("utf-8"))


def parts(text: str) -> list[tuple[str, int]]:
    """Return the parts of a heading: terms with their number in the glossary, other texts with 0."""
    return [(part, _NUMBERS[part.lower()] if i % 2 else 0) for i, part in enumerate(_TERM.split(text))]


def packed(text: str) -> str:
    """Return text as gzip in base64, the same for the same text."""
    return b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def as_script_json(value: Any) -> str:
    """Return JSON that may stand in a script element, because no tag can begin or end in it."""
    text = json.dumps(as_json.plain(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def visible(value: object) -> object:
    """Return a value for the template, with control characters escaped."""
    return printable(value) if type(value) is str else value


PAUSE = 20  # times the seconds of a write, so that a run spends at most 5% on it


@dataclass(slots=True)
class RunPage:
    """The HTML report of a run.

    Raises:
        BadUsage: if no report can be written, before anything is measured.
    """

    path: Path
    next_at: float = 0.0  # when it may be written again, by the monotonic clock

    def __post_init__(self) -> None:
        check_replaceable(self.path, "--slm-html")

    def write(self, found: Findings, status: int | None = None, progress: str = "") -> str:
        """Write the findings, and return why no report was written; empty if one was.

        The run goes on after a failure, because the results file has everything.

        Args:
            status: exit status; None while the run goes on.
        """
        begun = time.monotonic()
        try:
            write_page(self.path, found, filter(None, [found.records]), status=status, progress=progress)
        except SlmError as error:
            self.next_at = float("inf")
            return f"no page was written: {error}"
        self.next_at = time.monotonic() + PAUSE * (time.monotonic() - begun)
        return ""
