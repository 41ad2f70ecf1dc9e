"""Verdicts of a run on what it has measured so far. Nothing is measured here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pytest_slmserve.analysis.claims import claim, table
from pytest_slmserve.analysis.claims.stored import planned_curve, planned_curves
from pytest_slmserve.analysis.compare.deployments import on_several_gpus
from pytest_slmserve.analysis.points import by_series, job_points
from pytest_slmserve.analysis.sweep.curve import PLATEAU, Curve, curve_of, with_jobs
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.plan.planner import AS_THE_OPTIONS_SAY, MarkerOverrides, Planner, Sweep
from pytest_slmserve.report.findings import Judged
from pytest_slmserve.run.executor import Results
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.loads import ClosedLoop, Workload
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import EngineSpec


@dataclass(repr=False)
class Verdicts:
    """Curves and verdicts of a run, by the code that judges its archive. judged: so far, in the order asked; for the
    report. looks: of sweeps that measure until they are decided."""

    planner: Planner
    results: Results
    looks: tuple[int, ...] = ()
    judged: list[Judged] = field(default_factory=list)
    _curves: tuple[tuple[int, ...], dict[str, Curve]] | None = None

    def plan(self) -> dict[str, Any]:
        """The plan of the sweeps that the archive keeps, as plain JSON values; this run judges by the same plan."""
        sweeps = {
            self.planner.series(model): _facts(sweep, self.adaptive(model))
            for model, sweep in self.planner.sweeps.items()
            if sweep.loads
        }
        beside = {"compared": sorted(self.planner.beside)} if self.planner.beside else {}
        return {"sweeps": sweeps, "interim_analyses": [*self.looks], **beside}

    def curve(self, model: str) -> Curve:
        """The curve of a planned sweep as measured so far, with other loads that users' tests requested on the same
        curve."""
        sweep, series = self.planner.sweep(model), self.planner.series(model)
        if not sweep.loads:  # each is cut, so it is in no plan
            return curve_of(short_name(model), (), cut=sweep.cut, adaptive=self.adaptive(model), looks=self.looks)
        keys = dict.fromkeys([*self._planned_keys(model), *self.results.requested])
        found = by_series(self.results.measurements(keys)).get(series, [])
        return planned_curve(short_name(model), series, found, [("", self.plan())])

    def _planned_keys(self, model: str) -> list[str]:
        sweep, workload = self.planner.sweep(model), self.planner.workload(model)
        return [self.planner.case(sweep.spec, [workload], [load]).key for load in sweep.loads]

    def adaptive(self, model: str) -> float | None:
        """The tolerance of a plateau, where sweeps measure only what it depends on; None where they measure all."""
        if not self.planner.sweep(model).adaptive:
            return None
        return float(self.row(PLATEAU, model).parameters["tolerance"])

    def curve_of(
        self, spec: EngineSpec, workload: Workload, loads: tuple[ClosedLoop, ...], looks: tuple[int, ...] = ()
    ) -> Curve:
        """The curve of these loads, as far as they have been measured. looks: where they are measured until it is
        decided."""
        keys = [self.planner.case(spec, [workload], [load]).key for load in loads]
        return curve_of(
            short_name(spec.model),
            self.results.measurements(keys),
            planned=[load.concurrency for load in loads],
            looks=looks,
        )

    def curves(self) -> list[Curve]:
        """All that this run requested, in the order requested: planned sweeps, and what users' tests measured."""
        return list(self._by_series().values())

    def _by_series(self) -> dict[str, Curve]:
        known = len(self.planner.sweeps), *(len(self.results.repeats[key]) for key in self.results.requested)
        if self._curves is None or self._curves[0] != known:  # each claim asks for them, and they take their time
            self._curves = known, planned_curves(self._measurements(), [("", self.plan())])
        return self._curves[1]

    def _measurements(self) -> list[Measurement]:
        """Measurements of the cases that this run requested, and those that an archive has of the sweeps that the run
        has begun."""
        own = list(self.results.measurements())
        there = by_series(own)
        begun = [model for model in self.planner.sweeps if self.planner.series(model) in there]
        further = {key for model in begun for key in self._planned_keys(model)} - self.results.requested.keys()
        return [*own, *self.results.measurements(further)]

    def row(self, name: str, model: str, overrides: MarkerOverrides = AS_THE_OPTIONS_SAY) -> claim.ClaimRow:
        """The expectation of a claim for this model on this host."""
        planner = self.planner
        ramp_up = overrides.ramp_up or planner.options.ramp_up
        return table.row_for(name, model, planner.host.environment, planner.interface, ramp_up)

    def judge(self, name: str, model: str, overrides: MarkerOverrides = AS_THE_OPTIONS_SAY) -> Verdict:
        """Judge one claim for one model from what was measured, and remember it for the report."""
        verdict = self.verdict(name, model, overrides)
        self.judged.append((verdict, self.row(name, model, overrides)))
        return verdict

    def verdict(self, name: str, model: str, overrides: MarkerOverrides = AS_THE_OPTIONS_SAY) -> Verdict:
        """The verdict on one claim for one model from what was measured so far. A model of which nothing was measured
        here has no curve: what can be judged of it is arithmetic."""
        row, claim, jobs = (
            self.row(name, model, overrides),
            table.claim_of(name),
            job_points(self.results.measurements()),
        )
        if claim.of == "gpus":
            curve = self._curve_on_gpus(model)
        else:
            curve = self._known_curve(model, overrides, planned=claim.of == "sweeps")
        curve = replace(curve, jobs=tuple(job for job in jobs if job.model == curve.subject))
        return table.judge_row(name, curve, row, with_jobs(self.curves(), jobs))

    def _curve_on_gpus(self, model: str) -> Curve:
        """The curve of a model on the fewest GPUs, which includes what the model served on more; an empty curve where
        there is none."""
        mine = [curve for curve in self.curves() if curve.subject == short_name(model)]
        return next(filter(on_several_gpus, mine), Curve(subject=short_name(model)))

    def _known_curve(self, model: str, overrides: MarkerOverrides, planned: bool) -> Curve:
        """A model's sweep, or what was measured of it beside the sweeps. As the options say: what a user's own engine
        or load gave is another curve."""
        series = self.planner.series(model, overrides)
        planned = planned and self.planner.swept(model) and series == self.planner.series(model)
        if planned:
            self.planner.sweep(model)  # what is missing of it counts
        found = self._by_series().get(series)
        return found or (self.curve(model) if planned else Curve(subject=short_name(model)))


def _facts(sweep: Sweep, adaptive: float | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "model": short_name(sweep.spec.model),
        "concurrencies": [*sweep.concurrencies],
        "skipped": [list(pair) for pair in sweep.cut],
    }
    return facts if adaptive is None else {**facts, "adaptive": {"tolerance": adaptive}}
