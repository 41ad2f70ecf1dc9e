"""Conclusions from the measurements of a run so far: verdicts, by the code that evaluates results files, and advice.

A comparison with a stored baseline is cheaper than a gate, and weaker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from pytest_slmserve.analysis.advice import advisor, subjects
from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.compare.changes import against_stored, of_model
from pytest_slmserve.analysis.compare.deployments import on_several_gpus
from pytest_slmserve.analysis.points import by_series, job_points
from pytest_slmserve.analysis.sweep.batching import parse_relative_slo
from pytest_slmserve.analysis.sweep.curve import PLATEAU, Curve, curve_of, with_jobs
from pytest_slmserve.analysis.verdict import Inconclusive, Verdict, all_of
from pytest_slmserve.archive import baselines
from pytest_slmserve.plan.planner import NO_WORDS, Planner, Words
from pytest_slmserve.run.executor import Results
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Measurement

FEWEST_LOADS = 2  # the law of a step has two parameters
# A claim on several curves of a model reads the first of which this is true, by the claim's `of`.
READ: dict[str, Callable[[Curve], object]] = {"gpus": on_several_gpus, "jobs": bool}
READ |= {"shares": attrgetter("warmer"), "formats": attrgetter("structured"), "speculation": attrgetter("plain")}
NO_WORSE = "no-worse-than-the-baseline"
WARNING = (
    "a stored baseline was measured at another time: drift of the machine, noise between hosts and launches, and the "
    "order of measuring cannot be told from a change of the software. What matters is decided by measuring both sides "
    "in turns: --slm-gate"
)


@dataclass(frozen=True, slots=True)
class Question:
    """Claim on a model, as an item of a run needs it.

    Attributes:
        row: expected verdict.
        of: measurements that the claim reads, see `Claim`.
        series: key of its curve; None for several curves, or none.
        planned: whether that is the sweep of the options, whose missing loads count.
    """

    row: table.ClaimRow
    model: str
    of: str
    series: str | None = None
    planned: bool = False


@dataclass(repr=False)
class Verdicts:
    """Curves, verdicts and advice of a run.

    Attributes:
        looks: numbers of repeats at which an open-ended sweep may end.
        judged: verdicts so far, for the report.
    """

    planner: Planner
    results: Results
    looks: tuple[int, ...] = ()
    judged: list[table.Judged] = field(default_factory=list)
    measuring: set[str] = field(default_factory=set)  # series of sweeps that continue until they are decided
    _begun: set[str] = field(default_factory=set)  # series of requested sweeps
    # Curves by series, all curves with their jobs, and the state from which they were computed.
    _curves: tuple[dict[str, Curve], list[Curve], tuple[object, ...]] = ({}, [], ())

    def plan(self) -> dict[str, Any]:
        """Return the plan of the sweeps as JSON values, by which this run and later reports judge."""
        sweeps = {}
        for model, sweep in self.planner.sweeps.items():
            if sweep.cases:
                tolerance = self.adaptive(model)
                sweeps[sweep.cases[0].series] = {
                    "model": short_name(sweep.spec.model),
                    "concurrencies": [*sweep.concurrencies],
                    "skipped": [list(pair) for pair in sweep.cut],
                    **({} if tolerance is None else {"adaptive": {"tolerance": tolerance}}),
                    **({"beyond": sweep.beyond.series} if sweep.beyond else {}),
                }
        beside = {"compared": sorted(self.planner.beside)} if self.planner.beside else {}
        return {"sweeps": sweeps, "interim_analyses": [*self.looks], **beside}

    def adaptive(self, model: str) -> float | None:
        """Return the tolerance of a plateau for adaptive sweeps, or None if sweeps measure all loads."""
        if self.planner.options.sweep != "adaptive":
            return None
        return float(self.row(PLATEAU, model).parameters["tolerance"])

    def curve(self, model: str) -> Curve:
        """Return the curve of a planned sweep so far, with further loads that users' tests requested."""
        sweep = self.planner.sweep(model)
        if sweep.cases:  # else no load is measured
            series = sweep.cases[0].series
            self._begun.add(series)
            if found := self._known()[0].get(series):
                return found
        planned, adaptive = sweep.concurrencies, self.adaptive(model)
        return curve_of(short_name(model), (), planned=planned, cut=sweep.cut, adaptive=adaptive, looks=self.looks)

    def curves(self) -> list[Curve]:
        """Return all curves of this run, in the order requested.

        Sweeps that have begun include the measurements of a resumed results file.
        """
        return list(self._known()[0].values())

    def _known(self) -> tuple[dict[str, Curve], list[Curve]]:
        """Return the curves by series, and all curves with jobs, computed again if there are new repeats."""
        repeats = (len(self.results.repeats.get(key, ())) for key in self.results.requested)
        known = len(self.planner.sweeps), len(self._begun), frozenset(self.measuring), *repeats
        if self._curves[2] != known:
            own = list(self.results.measurements())
            begun = self._begun | by_series(own).keys()
            cases = (case for sweep in self.planner.sweeps.values() for case in sweep.cases if case.series in begun)
            further = {case.key for case in cases} - self.results.requested.keys()
            measured = [*own, *self.results.measurements(further)]
            found = table.planned_curves(measured, [("", self.plan())], self.measuring)
            self._curves = found, with_jobs(found.values(), job_points(own)), known
        return self._curves[:2]

    def row(self, name: str, model: str, words: Words = NO_WORDS) -> table.ClaimRow:
        """Return the expected verdict of a claim for this model on this host."""
        planner = self.planner
        interface = "endpoint" if planner.platform == "remote" else planner.options.interface
        ramp_up = words.get("ramp_up") or planner.options.ramp_up
        return table.row_for(name, model, planner.host.environment, interface, ramp_up)

    def question(self, name: str, model: str, words: Words = NO_WORDS) -> Question:
        """Return a claim on a model, with the curve that it reads.

        That is the model's sweep, or a curve next to the sweeps, as options and marker say. A curve of a user's own
        engine or load is another one.
        """
        row, of, planner = self.row(name, model, words), table.CLAIMS[name].of, self.planner
        if of not in ("sweeps", "replicas"):
            return Question(row, model, of)
        case = planner.point(model, 1, words)
        return Question(row, model, of, case.series, planned=of == "sweeps" and planner.in_sweep(case))

    def judge(self, question: Question) -> Verdict:
        """Evaluate a claim, and add the verdict to the report."""
        verdict = self.verdict(question)
        self.judged.append((verdict, question.row))
        return verdict

    def add(self, verdict: Verdict) -> None:
        """Add a verdict without an expected one to the report, for example on a user's objective."""
        self.judged.append((verdict, None))

    def verdict(self, question: Question) -> Verdict:
        """Return the verdict on a claim from the measurements so far.

        Claims on jobs read all curves of the model. Others read the curve on the fewest GPUs, with the smallest prefix
        share, with free text, or with speculation. A model without measurements has an empty curve, enough for
        arithmetic.
        """
        curve = self.curve(question.model) if question.planned else None
        by_series, curves = self._known()
        if read := READ.get(question.of):
            curve = next((each for each in curves if each.subject == short_name(question.model) and read(each)), None)
        elif question.series and not curve:
            curve = by_series.get(question.series)
        return table.judge_row(question.row, curve or Curve(subject=short_name(question.model)), curves)

    def advice(self, model: str, slo_itl: str | None, efficiency: float) -> advisor.Advice:
        """Return the advice on one model, as `slmserve advise --model` gives it, except on sets of engines.

        Args:
            slo_itl: latency objective such as "2x@32".
            efficiency: smallest batching efficiency.

        Raises:
            Inconclusive: if fewer than two loads are usable.
        """
        if not 0 < efficiency < 1:
            raise BadUsage(f"an efficiency of {efficiency:g} is not a share between 0 and 1", "efficiency=0.1")
        slo, name = None if slo_itl is None else parse_relative_slo(slo_itl), short_name(model)
        reasons = ["nothing of it was measured in this run (slm_sweep, or a planned sweep)"]
        if curves := [curve for curve in self.curves() if curve.subject == name]:
            found = subjects.of_curves(curves, None, None)
            wish = advisor.Objectives(slo=slo, threshold=efficiency, gpu_bytes=found.gpu_bytes)
            [advice] = advisor.plan([replace(each, together=None) for each in found.subjects], wish).advices
            if len(advice.subject.usable) >= FEWEST_LOADS:
                return advice
            problems = [text for point in curves[0].points for text in point.problems]
            reasons = [advice.decision.reason, *advice.subject.notes, *problems]
        why = f"no advice on {name}: {'; '.join(dict.fromkeys(reasons))}"
        self.note(why)  # pytest shows no reason for an inconclusive test
        raise Inconclusive(why)

    def note(self, *sentences: str) -> None:
        """Add notes to those of the run, each only once."""
        notes = self.planner.notes
        notes.extend(sentence for sentence in dict.fromkeys(sentences) if sentence not in notes)


@dataclass
class StoredBaseline:
    """Baseline that `--slm-baseline` names. Its notes are caveats."""

    verdicts: Verdicts
    measurements: Sequence[Measurement]
    notes: Sequence[str]

    @classmethod
    def of_run(cls, verdicts: Verdicts) -> StoredBaseline:
        """Return the baseline. Raise BadUsage if there is none, and BadArchive if it cannot be read."""
        named = verdicts.planner.options.baseline
        try:
            _, there = baselines.baseline(baselines.FOLDER, named)
        except BadUsage as error:
            raise BadUsage(f"--slm-baseline {named}: {error.problem}, and no such file", error.hint) from None
        return cls(verdicts, there.measurements, (*there.notes, WARNING))

    def judge(self, model: str) -> Verdict:
        """Return the verdict on all cases of a model that both sides have, and add the verdict on each to the report.

        It fails if one of them fails, and passes if all pass.
        """
        run, name = self.verdicts, short_name(model)
        alone = (m for curve in run.curves() for m in curve.measurements)
        shared = (m for m in run.results.measurements() if not m.alone)
        here, there = of_model((*alone, *shared), name), of_model(self.measurements, name)
        found, notes = against_stored(there, here, run.planner.options.gate_margin)
        run.note(*self.notes, *notes)
        for verdict in sorted(found, key=lambda v: v.claim):
            run.add(verdict)
        state = all_of(verdict.state for verdict in found)
        why = "; ".join(f"{v.subject}: {v.why}" for v in found if v.state is state)
        return Verdict(NO_WORSE, name, state, why, n=len(found))
