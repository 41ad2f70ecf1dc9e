"""Sweeps as a run carries them out: in rounds over their loads, and then on until their claims are decided.

An item of a planned load carries out the whole sweep of its model, if no item before it did. So it does not matter
which of them runs first, and a sweep that was interrupted goes on where it ended: what is known is not measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_slmserve.analysis.sweep.adaptive import Grid, Wanted, next_measurement
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.report.sweeps import skip_note
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import SlmError
from pytest_slmserve.schema.records import ReplicaGroup


@dataclass(repr=False)
class Rounds:
    """Rounds over the cases of one engine, by their load: each round is one more draw of the host for all of them.

    failed: loads that could not be measured, and how. spent_s: so far, without the engine's start.
    """

    session: Session
    cases: Mapping[int, Case]
    failed: dict[int, SlmError] = field(default_factory=dict)
    spent_s: float = 0.0

    def rounds(self, repeats: int, loads: Collection[int]) -> None:
        """Measure round after round until each load has so many repeats."""
        for number in range(1, repeats + 1):
            self.round(number, loads)

    def round(self, number: int, loads: Iterable[int], why: str = "") -> None:
        """Measure loads in ascending order until each has `number` repeats."""
        for load in sorted(loads):
            self.measure(load, number, why)

    def measure(self, load: int, repeats: int, why: str = "") -> None:
        """Measure a load, unless it has so many repeats or failed before."""
        if load in self.failed:
            return
        known = len(self._repeats(load))
        try:
            made = self.session.executor.measure(self.cases[load], repeats, why)[known:]
            self.spent_s += sum(map(_seconds, made))
        except SlmError as error:
            self.failed[load] = error

    def until_decided(self, judge: Callable[[], Sequence[Verdict]]) -> None:
        """Measure again the loads that inconclusive verdicts depend on most, until none is left that more measurements
        would decide, or the budget is spent. Verdicts are only asked for after the numbers of repeats that their
        intervals are made for."""
        while again := {load: self._next_look(load) for verdict in judge() for load in self._again(verdict)}:
            for number in range(1, max(again.values()) + 1):
                wanted = [load for load, look in again.items() if number <= look]
                if not self._time_for(wanted, number):
                    return
                self.round(number, wanted, "inconclusive so far")

    def _again(self, verdict: Verdict) -> list[int]:
        inconclusive = verdict.state is State.INCONCLUSIVE
        return [load for load in verdict.again if inconclusive and load in self.cases and self._next_look(load)]

    def _next_look(self, load: int) -> int:
        """The number of repeats at the next look; 0 where none is left, or the load cannot be measured."""
        if load in self.failed:
            return 0
        looks, there = self.session.looks, len(self._repeats(load))
        return next((look for look in looks if look > there), 0)

    def _repeats(self, load: int) -> Sequence[ReplicaGroup]:
        return self.session.results.repeats.get(self.cases[load].key, ())

    def _time_for(self, loads: Sequence[int], number: int) -> bool:
        """Is there time for a round? A repeat takes as long as the one before."""
        missing = [load for load in loads if len(self._repeats(load)) < number]
        return self.spent_s + sum(_seconds(self._repeats(load)[-1]) for load in missing) <= self.session.budget_s


def _seconds(group: ReplicaGroup) -> float:
    """Seconds that a repeat took on its engine's clock, from its first request to the end of its window."""
    return group[0].run.window_s[1]


@dataclass(repr=False)
class Sweeps:
    """The planned sweeps of a run. loads: by model, those that its items ask for. claims: by model, those that it
    judges."""

    session: Session
    loads: Mapping[str, Sequence[int]]
    claims: Mapping[str, Sequence[str]]
    _done: dict[str, Rounds] = field(default_factory=dict)
    asked: dict[tuple[str, int], int] = field(default_factory=dict)

    def carry_out(self, model: str) -> Rounds:
        """Measure a model's sweep, once in a run."""
        if model in self._done:
            return self._done[model]
        planner = self.session.planner
        sweep, workload = planner.sweep(model), [planner.workload(model)]
        cases = {load.concurrency: planner.case(sweep.spec, workload, [load]) for load in sweep.loads}
        rounds = Rounds(self.session, cases)
        self._done[model] = rounds
        if sweep.adaptive:
            self._adaptive(model, rounds)
        else:
            rounds.rounds(self.session.options.repeats, self.loads[model])
        rounds.until_decided(lambda: self._verdicts(model))
        return rounds

    def _verdicts(self, model: str) -> list[Verdict]:
        return [self.session.verdicts.verdict(claim, model) for claim in self.claims.get(model, ())]

    def _adaptive(self, model: str, rounds: Rounds) -> None:
        """Measure what is wanted next until nothing is, or a load cannot be measured: the choice depends on it."""
        while not rounds.failed and (wanted := self.wanted(model)):
            self.asked[model, wanted.concurrency] = wanted.repeats
            rounds.measure(wanted.concurrency, wanted.repeats, wanted.why)
        for load, error in rounds.failed.items():
            where = f"{short_name(model)}: the adaptive sweep ended at {load} in flight"
            self.session.notes.append(f"{where}: {error.problem.partition(chr(10))[0]}")

    def wanted(self, model: str) -> Wanted | None:
        """The next measurement of the model's adaptive sweep, or None where no further one is worth its time."""
        session, tolerance = self.session, self.session.verdicts.adaptive(model)
        assert tolerance is not None, "asked of a full sweep"
        sweep, tokens = session.planner.sweep(model), session.planner.workload(model).mean_output_tokens
        loads = {load.concurrency: load for load in sweep.loads}

        def seconds(concurrency: int, tokens_per_s: float) -> float:
            return loads[concurrency].duration_s(tokens * concurrency / tokens_per_s)

        grid = Grid(sweep.concurrencies, tolerance, session.options.repeats, seconds, session.looks)
        return next_measurement(grid, session.verdicts.curve(model).points)

    def repeats(self, model: str, concurrency: int) -> int | None:
        """The number of repeats that the sweep requested of this load, after carrying out the whole sweep. It is 1 for
        a load of an adaptive sweep that was measured already and is not needed, None for one that was not measured.
        Raises the error that kept the load from being measured."""
        failed = self.carry_out(model).failed
        if concurrency in failed:
            raise failed[concurrency]
        if not self.session.planner.sweep(model).adaptive:
            return self.session.options.repeats
        known = any(p.concurrency == concurrency for p in self.curve(model).points)
        return self.asked.get((model, concurrency), 1 if known else None)

    def curve(self, model: str) -> Curve:
        return self.session.verdicts.curve(model)

    def why_not(self, model: str, concurrency: int) -> str:
        """The reason why a load was not measured. For a load that was not needed, it adds the saturation law's
        prediction, if any, and the law's error on measured loads."""
        return skip_note(self.curve(model), concurrency)
