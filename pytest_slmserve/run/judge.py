"""What a run has measured becomes curves, and verdicts on them. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pytest_slmserve.analysis.claims import claim, lookup
from pytest_slmserve.analysis.compare.deployments import on_several_gpus, with_wider
from pytest_slmserve.analysis.points.sweep_points import by_series
from pytest_slmserve.analysis.sweep.curve import PLATEAU, Curve, curve_of, with_jobs, with_shared
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.plan.planner import AS_THE_OPTIONS_SAY, MarkerOverrides, Planner
from pytest_slmserve.run.results import Results
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.loads import ClosedLoop
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.schema.workloads import Workload


@dataclass(slots=True)
class JudgedClaim:
    """A verdict with what was expected of it."""

    verdict: Verdict
    row: claim.ClaimRow | None = None


@dataclass(repr=False)
class Verdicts:
    """judged: so far, in the order asked; for the report."""

    planner: Planner
    known: Results
    judged: list[JudgedClaim] = field(default_factory=list)
    _curves: tuple[tuple[int, ...], dict[str, Curve]] | None = None

    def curve(self, model: str) -> Curve:
        """What is known of a planned sweep so far, with other loads that users' tests asked for on the same curve."""
        sweep, workload = self.planner.sweep(model), self.planner.workload(model)
        planned = (self.planner.key(sweep.spec, workload, load) for load in sweep.loads)
        keys = dict.fromkeys([*planned, *self.known.asked])
        known = by_series(m for key in keys for m in self.known.measured.get(key, ()))
        found = known.get(self.planner.series(model), ()) if sweep.loads else ()
        return curve_of(
            short_name(model), found, planned=sweep.concurrencies, cut=sweep.cut, adaptive=self.adaptive(model)
        )

    def adaptive(self, model: str) -> float | None:
        """The tolerance of a plateau, where sweeps measure only what it depends on; None where they measure all."""
        if not self.planner.sweep(model).adaptive:
            return None
        return float(self.row(PLATEAU, model).parameters["tolerance"])

    def curve_of(self, spec: EngineSpec, workload: Workload, loads: tuple[ClosedLoop, ...]) -> Curve:
        """The curve of these loads, as far as they have been measured."""
        found = [m for load in loads for m in self.known.measured.get(self.planner.key(spec, workload, load), [])]
        return curve_of(short_name(spec.model), found, planned=[load.concurrency for load in loads])

    def curves(self) -> list[Curve]:
        """All that this run asked for, in the order asked: planned sweeps, and what users' tests measured."""
        return list(self._by_series().values())

    def _by_series(self) -> dict[str, Curve]:
        known = (
            len(self.planner.sweeps),
            *(len(self.known.measured[key]) for key in self.known.asked),
            *(len(self.known.shared[key]) for key in self.known.asked_shared),
        )
        if self._curves is None or self._curves[0] != known:  # each claim asks for them, and they take their time
            self._curves = known, self._made_curves()
        return self._curves[1]

    def _made_curves(self) -> dict[str, Curve]:
        planned = {self.planner.series(model): model for model, sweep in self.planner.sweeps.items() if sweep.loads}
        asked = by_series(self.known.measurements())
        curves = [
            self.curve(planned[series]) if series in planned else curve_of(short_name(found[0].spec.model), found)
            for series, found in asked.items()
        ]
        return dict(zip(asked, with_wider(with_shared(curves, self.known.shared_points()))))

    def row(self, name: str, model: str, variant: MarkerOverrides = AS_THE_OPTIONS_SAY) -> claim.ClaimRow:
        """What is expected of a claim here."""
        planner = self.planner
        ramp_up = variant.ramp_up or planner.options.ramp_up
        return lookup.row_for(name, model, planner.host.environment, planner.interface, ramp_up)

    def judge(self, name: str, model: str, variant: MarkerOverrides = AS_THE_OPTIONS_SAY) -> Verdict:
        """Judge one claim for one model from what was measured, and remember it for the report. A model of which
        nothing was measured here has no curve: what can be judged of it is arithmetic."""
        row, claim, jobs = self.row(name, model, variant), lookup.claim_of(name), self.known.job_points()
        if claim.of == "gpus":
            curve = self._curve_on_gpus(model)
        else:
            curve = self._known_curve(model, variant, planned=claim.of == "sweeps")
        curve = replace(curve, jobs=tuple(job for job in jobs if job.model == curve.subject))
        verdict = lookup.judge_row(name, curve, row, with_jobs(self.curves(), jobs))
        self.judged.append(JudgedClaim(verdict, row))
        return verdict

    def _curve_on_gpus(self, model: str) -> Curve:
        """What is known of a model on the fewest GPUs, which has what it served on more."""
        mine = [curve for curve in self.curves() if curve.subject == short_name(model)]
        return next(filter(on_several_gpus, mine), Curve(subject=short_name(model)))

    def _known_curve(self, model: str, variant: MarkerOverrides, planned: bool) -> Curve:
        """A model's sweep, or what was measured of it beside the sweeps. As the options say: what a user's own engine
        or load gave is another curve."""
        series = self.planner.series(model, variant)
        planned = planned and self.planner.swept(model) and series == self.planner.series(model)
        if planned:
            self.planner.sweep(model)  # what is missing of it counts
        found = self._by_series().get(series)
        return found or (self.curve(model) if planned else Curve(subject=short_name(model)))
