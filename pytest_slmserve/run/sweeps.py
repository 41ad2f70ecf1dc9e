"""Sweeps as a run carries them out: in rounds over their loads, and then on until their claims are decided.

An item of a planned load carries out the whole sweep of its model, if no item before it did. So it does not matter
which of them runs first, and a sweep that was interrupted goes on where it ended: what is known is not measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_slmserve.analysis.sweep.plateau import Grid, next_measurement
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import SlmError
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import ReplicaGroup
from pytest_slmserve.schema.specs import ClosedLoop


@dataclass(repr=False)
class Rounds:
    """Rounds over the cases of one engine, by their load: each round measures all loads on one more state of the host.

    failed: loads that could not be measured, and how. spent_s: so far, without the engine's start.
    """

    session: Session
    cases: Mapping[int, Case]
    failed: dict[int, SlmError] = field(default_factory=dict)
    spent_s: float = 0.0

    def round(self, number: int, loads: Iterable[int], why: str = "") -> None:
        """Measure loads in ascending order until each has `number` repeats, unless it failed before."""
        for load in sorted(loads):
            if load in self.failed:
                continue
            known = len(self._repeats(load))
            try:
                made = self.session.executor.measure(self.cases[load], number, why)[known:]
                self.spent_s += sum(map(_seconds, made))
            except SlmError as error:
                self.failed[load] = error

    def until_decided(self, judge: Callable[[], Sequence[Verdict]]) -> None:
        """Measure again the loads that inconclusive verdicts depend on most, until none is left that more measurements
        would decide, or the budget is spent. Verdicts are only asked for after the numbers of repeats that their
        intervals are made for. A repeat takes as long as the one before."""
        while True:
            inconclusive = (verdict for verdict in judge() if verdict.state is State.INCONCLUSIVE)
            depended_on = {load for verdict in inconclusive for load in verdict.again}
            again: dict[int, int] = {}  # the number of repeats at the next look, by load
            for load in depended_on & (self.cases.keys() - self.failed.keys()):
                made = len(self._repeats(load))
                if look := next((n for n in self.session.looks if n > made), None):
                    again[load] = look
            if not again:
                return
            for number in range(1, max(again.values()) + 1):
                wanted = [load for load, look in again.items() if number <= look]
                missing = [load for load in wanted if len(self._repeats(load)) < number]
                if self.spent_s + sum(_seconds(self._repeats(load)[-1]) for load in missing) > self.session.budget_s:
                    return
                self.round(number, wanted, "inconclusive so far")

    def _repeats(self, load: int) -> Sequence[ReplicaGroup]:
        return self.session.results.repeats.get(self.cases[load].key, ())


def _seconds(group: ReplicaGroup) -> float:
    """Return the seconds that a repeat took on its engine's clock, from its first request to the end of its window."""
    return group[0].run.window_s[1]


@dataclass(repr=False)
class Sweeps:
    """The planned sweeps of a run.

    loads: by model, those that its items ask for. claims: by model, those that it judges. asked: repeats that adaptive
    sweeps requested, by model and load.
    """

    session: Session
    loads: Mapping[str, Sequence[int]]
    claims: Mapping[str, Sequence[str]]
    asked: dict[tuple[str, int], int] = field(default_factory=dict)
    _done: dict[str, Rounds] = field(default_factory=dict)

    def carry_out(self, model: str) -> Rounds:
        """Measure a model's sweep, once in a run.

        An adaptive sweep measures what is wanted next until nothing is, or a load cannot be measured: the choice
        depends on it.
        """
        if model in self._done:
            return self._done[model]
        session, sweep = self.session, self.session.planner.sweep(model)
        verdicts, cases = session.verdicts, {case.concurrency: case for case in sweep.cases}
        rounds = self._done[model] = Rounds(session, cases)
        tolerance = verdicts.adaptive(model)
        if tolerance is None:
            for number in range(1, session.options.repeats + 1):
                rounds.round(number, self.loads[model])
        else:

            def seconds(concurrency: int, tokens_per_s: float) -> float:
                load, workload = cases[concurrency].loads[0], cases[concurrency].workloads[0]
                assert isinstance(load, ClosedLoop)
                return load.duration_s(workload.mean_output_tokens * concurrency / tokens_per_s)

            grid = Grid(sweep.concurrencies, tolerance, session.options.repeats, seconds, session.looks)
            while not rounds.failed and (wanted := next_measurement(grid, verdicts.curve(model).points)):
                self.asked[model, wanted.concurrency] = wanted.repeats
                rounds.round(wanted.repeats, [wanted.concurrency], wanted.why)
            for load, error in rounds.failed.items():
                where = f"{short_name(model)}: the adaptive sweep ended at {load} in flight"
                session.notes.append(f"{where}: {error.problem.partition(chr(10))[0]}")
        rounds.until_decided(lambda: [verdicts.verdict(claim, model) for claim in self.claims.get(model, ())])
        return rounds

    def repeats(self, model: str, concurrency: int) -> int | None:
        """Return the number of repeats that the sweep requested of this load, after carrying out the whole sweep.

        It is 1 for a load of an adaptive sweep that was measured already and is not needed, None for one that was not
        measured. Raises the error that kept the load from being measured.
        """
        failed = self.carry_out(model).failed
        if concurrency in failed:
            raise failed[concurrency]
        if not self.session.planner.sweep(model).adaptive:
            return self.session.options.repeats
        known = any(p.concurrency == concurrency for p in self.session.verdicts.curve(model).points)
        return self.asked.get((model, concurrency), 1 if known else None)
