"""All results that a report shows, and texts on the origin and validity of points."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pytest_slmserve.analysis.claims.table import Judged
from pytest_slmserve.analysis.compare.changes import METRICS, NOT_COMPARABLE, ReleaseHistory, release_order
from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.gate.launch_pairs import Gated
from pytest_slmserve.analysis.metrics.gpu_figures import host_speeds
from pytest_slmserve.analysis.metrics.window import Slo
from pytest_slmserve.analysis.points import JobPoint, Point, ReplicaPoint
from pytest_slmserve.analysis.sweep.curve import PLATEAU, TOLERANCE, Curve, labels
from pytest_slmserve.report.text_table import ABSENT, interval_text, short_path
from pytest_slmserve.report.verdicts import ClaimOutcome, claim_outcomes
from pytest_slmserve.schema.records import Environment, Measurement
from pytest_slmserve.schema.specs import WorkloadReference


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results that a report shows. Fields are empty if their source does not have them."""

    curves: Sequence[Curve] = ()
    judged: Sequence[Judged] = ()  # verdicts with their expected results
    shared: Sequence[ReplicaPoint] = ()
    jobs: Sequence[JobPoint] = ()
    gates: Sequence[Gated] = ()
    history: Sequence[ReleaseHistory] = ()  # over releases, if the results files have several
    loads: Sequence[Measurement] = ()  # loads that are not points of a sweep
    measurements: Sequence[Measurement] = ()  # basis of all results, for an HTML report
    slo: Slo | None = None  # latency limits of a request, if goodput is wanted
    flat: float = TOLERANCE  # gain per doubling below which throughput is flat by default
    b_half: float | None = None  # half-saturation in sequences, if it is known
    strict: bool = False  # every claim is expected to pass
    failed: Sequence[str] = ()  # failed tests, each with its reason on one line
    inconclusive: Sequence[str] = ()  # inconclusive tests, except claims and gates
    interrupted: bool = False  # whether the user ended the run before its last test
    notes: Sequence[str] = ()
    reused: Mapping[str, int] = field(default_factory=dict)  # number of reused measurements, by configuration
    reused_from: str = ""
    archives: Sequence[str] = ()  # paths of results files, as a reader would name them
    page: str = ""  # path of the HTML report of a run
    records: Path | None = None  # results file of a run, which may be a temporary one
    written: str = ""  # sentence on other files that were written
    command: str = ""  # repeats the run
    gate_commands: Mapping[str, str] = field(default_factory=dict)  # of the gates, if several runs have them
    bisects: bool = False  # whether the gates are of a bisection, which says itself what comes next
    gate_archives: Mapping[str, str] = field(default_factory=dict)  # results files of the gates, if there are several

    @cached_property
    def labelled(self) -> list[tuple[Curve, str]]:
        """Each curve with a name that distinguishes it."""
        return list(zip(self.curves, labels(self.curves), strict=True))

    @cached_property
    def outcomes(self) -> Sequence[ClaimOutcome]:
        return claim_outcomes(self.judged, strict=self.strict)

    @cached_property
    def host_speeds(self) -> Mapping[str, float]:
        """Host speed in each window with a host-speed probe, by measurement ID."""
        return host_speeds(m for curve in self.curves for m in curve.measurements)

    @cached_property
    def unit(self) -> str:
        """Name of an output: "token", the common result of the requests, or "output" if they differ."""
        shown: list[Measurement | JobPoint | Curve] = [*self.loads, *self.jobs, *self.curves]
        shown += [launch for gated in self.gates for pair in gated.pairs[:1] for launch in pair.baseline.measurements]
        units = {each.workload.unit for each in shown if each.workload}
        return units.pop() if len(units) == 1 else "output" if units else "token"

    @cached_property
    def regression(self) -> tuple[str, str] | None:
        """Sentence on the newest release that regressed in a history, and the command of a gate; None without any."""
        known = [(history, *each) for history in self.history for each in history.regressions[-1:]]
        if not known:
            return None
        history, release, ratio = max(known, key=lambda each: release_order(each[1].release))
        name = " ".join(METRICS[history.metric].heading.split())
        sure = interval_text(ratio, "{:.3f}".format)
        ends = "" if sure == ABSENT else f" (95%: {sure})"
        text = f"{history.subject}: since vLLM {release.release}, {name} is {ratio.value:.3f} times that before{ends}"
        where = " or on different machines" if release.step_words == NOT_COMPARABLE else ""
        return f"{text}, but releases were measured at different times{where}", release.gate

    @property
    def shown_again(self) -> str:
        """Command that shows the results files; empty without any."""
        return shlex.join(["slmserve", "report", *map(short_path, self.archives)]) if self.archives else ""

    @property
    def where(self) -> str:
        """Command that shows the evidence, and path of the HTML report."""
        return "; ".join(filter(None, (self.shown_again, f"page: {self.page}" if self.page else "")))

    def tolerance(self, curve: Curve, label: str) -> float:
        """Return the gain per doubling below which throughput is flat: of the judged claim, else `flat`."""
        found = {v.subject: row.parameters["tolerance"] for v, row in self.judged if row and v.claim == PLATEAU}
        return float(found.get(label) or found.get(curve.subject, self.flat))

    @property
    def reused_text(self) -> str:
        """Sentence on reused measurements; empty without any."""
        if not self.reused:
            return ""
        return f"{sum(self.reused.values())} measurements were reused from {self.reused_from}"


def served_on(where: Environment | None) -> str:
    """Return the device or the URL, and the vLLM release."""
    device = where and (where.url or where.gpu_name or where.cpu or where.platform)
    vllm = f", vLLM {where.vllm}" if where and where.vllm else ""
    return f"{device or 'unknown device'}{vllm}"


def origin(where: Environment | None, workload: WorkloadReference | None = None) -> str:
    """Return device, vLLM release and mean lengths for the title of a chart."""
    if where and where.platform == "simulated":
        return "SIMULATED, not measured on a device"
    if where is None or workload is None:
        return served_on(where)
    return f"{served_on(where)}, {workload.each}"


def valid_cell(point: Point) -> str:
    """Return the validity of a point: "invalid", "questionable", "partial", "noisy" or "yes".

    Questionable means a sensor warning, partial means excluded repeats, and noisy means a disturbed host.
    """
    if not point.valid:
        return "invalid"
    if point.degraded:
        return "questionable"
    return "partial" if point.left_out else "noisy" if point.noise else "yes"


def reasons(point: Point, name: str, used: str = "") -> Iterator[str]:
    """Yield lines on excluded repeats, degradations and noise.

    Args:
        used: how many repeats count.
    """
    if point.left_out or not point.valid:
        kind = "excluded" if point.valid else "invalid"
        yield ": ".join([f"{kind}: {name}", *filter(None, (used, "; ".join(point.problems)))])
    if point.degraded:
        yield f"questionable: {name}: {'; '.join(point.degraded)}"
    if point.noise:
        yield f"noisy (included): {name}: {first_of_each_kind(point.noise)}"


def first_of_each_kind(texts: Sequence[str]) -> str:
    """Return the first text of each `reason_kind`, and how many more it has."""
    kinds = grouped(texts, reason_kind).values()
    return "; ".join(f"{first}{f' ({len(more)} more like it)' if more else ''}" for first, *more in kinds)


def reason_kind(text: str) -> str:
    """Return a reason up to its first colon or number, to group similar ones."""
    return re.split(r":| [-+.\d]+ ", text, maxsplit=1)[0]
