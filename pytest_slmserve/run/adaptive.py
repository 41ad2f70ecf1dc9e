"""Adaptive sweeps as a run carries them out: what is wanted next is measured, until nothing is.

An item of a planned load carries out the whole sweep of its model, if no item before it did. So it does not matter
which of them runs first, and a sweep that was interrupted goes on where it ended: what is known is not wanted again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_slmserve.analysis.sweep.adaptive import Wanted, next_measurement
from pytest_slmserve.plan.costs import duration_s
from pytest_slmserve.report.tables.adaptive_notes import skip_note
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import SlmError


@dataclass(repr=False)
class AdaptiveSweeps:
    """asked: by model and load, the repeats that were wanted. failed: by model, the load that ended its sweep, and how.

    A failure ends a sweep: what to measure next depends on the load that cannot be measured.
    """

    session: Session
    asked: dict[tuple[str, int], int] = field(default_factory=dict)
    failed: dict[str, tuple[int, SlmError]] = field(default_factory=dict)

    def carry_out(self, model: str) -> None:
        """Measure until nothing is wanted, or a load cannot be measured."""
        while model not in self.failed and (wanted := self.wanted(model)):
            try:
                self._measure(model, wanted)
            except SlmError as error:
                self.failed[model] = wanted.concurrency, error
                where = f"{short_name(model)}: the adaptive sweep ended at {wanted.concurrency} in flight"
                self.session.notes.append(f"{where}: {error.problem.partition(chr(10))[0]}")

    def wanted(self, model: str) -> Wanted | None:
        """The next measurement of the model's adaptive sweep, or None where no further one is worth its time."""
        session, tolerance = self.session, self.session.verdicts.adaptive(model)
        assert tolerance is not None, "asked of a full sweep"
        sweep, tokens = session.planner.sweep(model), session.planner.workload(model).mean_output_tokens
        loads = {load.concurrency: load for load in sweep.loads}

        def seconds(concurrency: int, tokens_per_s: float) -> float:
            return duration_s(loads[concurrency], tokens * concurrency / tokens_per_s)

        return next_measurement(
            sweep.concurrencies, session.verdicts.curve(model).points, tolerance, session.options.repeats, seconds
        )

    def _measure(self, model: str, wanted: Wanted) -> None:
        planner = self.session.planner
        sweep = planner.sweep(model)
        load = next(load for load in sweep.loads if load.concurrency == wanted.concurrency)
        self.asked[model, wanted.concurrency] = wanted.repeats
        case = planner.case(sweep.spec, [planner.workload(model)], [load])
        self.session.executor.measure(case, wanted.repeats, wanted.why)

    def repeats(self, model: str, concurrency: int) -> int | None:
        """The number of repeats that the sweep requested of this load, after carrying out the whole sweep. It is 1 for
        a load that was measured already and is not needed, None for one that was not measured. Raises the error that
        kept the load from being measured."""
        self.carry_out(model)
        failed_at, error = self.failed.get(model, (None, None))
        if error and failed_at == concurrency:
            raise error
        known = any(p.concurrency == concurrency for p in self.session.verdicts.curve(model).points)
        return self.asked.get((model, concurrency), 1 if known else None)

    def why_not(self, model: str, concurrency: int) -> str:
        """The reason why a load was not measured. For a load that was not needed, it adds the saturation law's
        prediction, if any, and the law's error on measured loads."""
        return skip_note(self.session.verdicts.curve(model), concurrency)
