"""A session holds what belongs to one run: options, devices, executor, archive, and what is known.

Knows nothing of pytest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import SIDES, Gated
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.metrics.window import Slo, parse_slo
from pytest_slmserve.analysis.points import all_groups, group_key, job_points, shared_points
from pytest_slmserve.analysis.sweep.curve import GPU_PLATEAU
from pytest_slmserve.analysis.sweep.plateau import Grid, looks_from, next_measurement
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.archive.external import export_to
from pytest_slmserve.archive.store import Archive, Contents, read
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import DEFAULTS, Case, point_title, start_estimate_s
from pytest_slmserve.plan.planner import Planner, check_there
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page.writer import RunPage
from pytest_slmserve.run.executor import Devices, Executor, Results
from pytest_slmserve.run.judge import Question, Verdicts
from pytest_slmserve.schema.errors import BadUsage, SlmError, is_file
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement, ReplicaGroup
from pytest_slmserve.schema.specs import ClosedLoop
from pytest_slmserve.telemetry.host import Host, probe


@dataclass(repr=False)
class Session:
    """All that belongs to one run. `open` takes the device and the archive, and `close` releases both.

    notes: sentences for the end of the run; `note` adds some, each once. results: all repeats that are known so far.
    keeps_records: whether the measurements stay. Those of a formula do only if an archive was named, or is resumed: in
    the usual one they would stand among what was measured. source: the archive that is resumed, if `resumes`: it is
    there, and was named, or is that of this run. budget_s: seconds after which the curves of an engine
    are not measured again. first: repeats of each load of a curve that claims read. looks: numbers of repeats of a load
    after which claims may be judged; only one if nothing is measured until it is decided. say: tells the user something
    while the run goes on.
    """

    executor: Executor
    slo: Slo | None = None
    page: RunPage | None = None
    reused: set[str] = field(default_factory=set)  # ids of the stored measurements that this run resumes
    stored: list[Measurement] = field(default_factory=list)  # of the archive that is resumed, valid or not
    gates: list[Gated] = field(default_factory=list)  # that have ended
    pair_s: dict[str, tuple[int, float]] = field(default_factory=dict)  # of a gate: pairs made, and seconds of each
    claims: Collection[str] | None = None  # that the tests of this run judge; None if no tests are known
    inconclusive: list[str] = field(default_factory=list)  # tests with the reason, except for claims and gates
    failed: list[str] = field(default_factory=list)  # tests with a line of why, once all have ended
    command: str = ""  # that makes the same run again
    say: Callable[[str], None] = lambda text: None
    undo: ExitStack = field(default_factory=ExitStack)  # at the close, while the archive still takes measurements

    def __post_init__(self) -> None:
        self.devices, self.results = self.executor.devices, self.executor.results
        planner = self.planner = self.devices.planner
        options = self.options = planner.options
        self.platform, self.host, self.notes = planner.platform, planner.host, planner.notes
        named = options.source["records"] != "default"
        self.keeps_records = planner.platform != "simulated" or named or bool(options.resume)
        self.source = Path(options.resume if isinstance(options.resume, str) else options.records)
        self.resumes = bool(options.resume) and is_file(self.source)  # the archive of this run may be made later
        if isinstance(options.resume, str) and not self.resumes:
            raise BadUsage(
                f"--slm-resume: there is no results file at {self.source}",
                "Pass --slm-resume RECORDS with the results file of an earlier run.",
            )
        self.gate_terms = GateCriteria(options.gate_margin, options.gate_alpha, pairs=options.gate_pairs)
        self.budget_s = DEFAULTS[planner.platform].budget_s if options.budget is None else options.budget
        goes_on = self.budget_s and options.repeats > 1 and not options.ray
        once = goes_on and options.source["repeats"] == "default" and not options.baseline  # which reads all loads
        self.first = 1 if once else options.repeats
        self.looks: tuple[int, ...] = looks_from(self.first) if goes_on else (self.first,)
        self.verdicts = Verdicts(planner, self.results, self.looks)
        self.note = self.verdicts.note

    @classmethod
    def from_options(cls, options: Options, root: Path, host: Host | None = None, is_run: bool = True) -> Session:
        """Return a session on `host`; None: on this one, which is probed. Raises BadUsage if the platform cannot run,
        or the options fit neither host nor archive; a plan assumes a host instead. is_run: whether tests will run."""
        platform, slo = options.platform, parse_slo(options.goodput) if options.goodput else None
        assert platform is not None
        export = export_to(options.export, slo) if options.export else None
        python, variables = options.engine
        try:
            host = host or probe(platform, python, dict(variables), root)
        except BadUsage as error:
            if not options.plan:
                raise
            assumed = f"{error.problem}: the plan assumes a GPU of 140 GiB" if platform == "cuda" else error.problem
            host = Host(Environment(platform=platform), "none", (assumed,))
        host = replace(host, environment=replace(host.environment, gpu_peaks=options.gpu_peaks))
        check_there(host, range(options.tensor_parallel_size[-1]))
        planner = Planner(options, platform, host, list(host.warnings), is_run=is_run)
        planner.check_options()
        executor = Executor(Devices.from_options(planner), Results(), options.repeats, export=export)
        return cls(executor, slo, RunPage(Path(options.html)) if options.html else None)

    def open(self) -> None:
        """Take the device, open the archive, and resume if requested. Raises BadUsage, DeviceBusy or BadArchive."""
        self.devices.hold()
        if self.keeps_records:
            archive = self.undo.enter_context(Archive.open(self.options.records, moves=True))
            self.executor.archive = archive
            self.notes.extend(archive.notes)
        else:
            self.notes.append("records of a simulated run are not kept; --slm-records=FILE keeps them")
            folder = self.undo.enter_context(TemporaryDirectory(prefix="slmserve-"))
            self.executor.archive = self.undo.enter_context(Archive.open(Path(folder) / "records.jsonl"))
        self.resume()

    def begin(self, compares: bool = False) -> None:
        """Note in the archive that this run measures, and by which parameters its claims and gates are judged."""
        if archive := self.executor.archive:
            rows = list(map(asdict, table.ROWS))
            plan = self.verdicts.plan()
            plan |= {"command": self.command} if self.command else {}
            plan |= {"sweeps": {}} if self.options.gate else {}  # it measures none
            terms = replace(self.gate_terms, launches=self.options.gate_launches)
            plan |= {"gate": asdict(terms)} if self.options.gate or compares else {}
            plan |= {} if self.claims is None else {"claims": sorted(self.claims)}
            archive.begin({"rows": rows}, plan, resumes=bool(self.options.resume))

    def close(self) -> None:
        self.undo.close()
        if self.moved:
            self.note(self.moved)
        self.devices.close()

    @property
    def moved(self) -> str:
        """Why and where the measurements of this run are in a second file; "" if they are in the archive."""
        return self.executor.archive.moved if self.executor.archive else ""

    @cached_property
    def resumed(self) -> Contents | None:
        """What the archive that is resumed held at first; None if there is nothing to be resumed. Raises BadArchive."""
        return read(self.source, skip_damaged=self.options.skip_damaged) if self.resumes else None

    def resume(self) -> None:
        """Take over the valid measurements of the archive that is resumed, if any. Raises BadArchive."""
        if self.resumed is None:
            return
        self.notes.extend(self.resumed.notes)
        self.stored = [m for m in self.resumed.measurements if m.paired is None]
        valid = [group for group in all_groups(self.stored) if not check(*group).problems]
        for group in valid:
            self.results.repeats.setdefault(group_key(group), []).append(group)
            self.reused.update(m.id for m in group)

    def findings(self) -> Findings:
        """Return what this run has found so far, for its reports."""
        archive = self.executor.archive
        shown = archive.path if archive else None
        if archive and not self.keeps_records:  # the file goes with the run, and the HTML report holds it
            shown = self.page.path if self.page else None
        of_gates = [m for gated in self.gates for side in SIDES for m in gated.measurements(side)]
        reused: Counter[str] = Counter()  # measurements of the archive that stood in for new ones
        elsewhere = 0
        for group in chain.from_iterable(self.results.repeats.get(key, ()) for key in self.results.requested):
            several = f"{len(group)} x " if len(group) > 1 else ""
            mine = [m for m in group if m.id in self.reused]
            reused[f"{several}{point_title(group[0].spec, group[0].load)}"] += len(mine)
            elsewhere += sum(m.environment.host != self.host.environment.host for m in mine)
        return Findings(
            curves=self.verdicts.curves(),
            judged=list(self.verdicts.judged),
            shared=shared_points(self.results.measurements()),
            jobs=job_points(self.results.measurements()),
            gates=list(self.gates),
            measurements=of_gates or list(self.results.measurements()),
            slo=self.slo,
            strict=self.options.strict,
            failed=list(self.failed),
            inconclusive=list(self.inconclusive),
            notes=list(self.notes),
            reused=dict(+reused),
            reused_from=f"{self.source}{f' ({elsewhere} of another host, or from before a boot)' if elsewhere else ''}",
            archives=[str(shown)] if shown else [],
            records=archive.path if archive else None,
            page=str(self.page.path) if self.page and self.page.path.exists() else "",
            command=self.command,
        )


# Sweeps: in rounds over their loads, and then on until their claims are decided


ESTIMATES, FAR = 4, 4  # repeats that tell the noise well enough, to within so many times, to give a claim up


@dataclass(repr=False)
class Rounds:
    """Rounds over the cases of one engine, by their load: each round measures all loads on one more state of the host.

    asked: repeats that were requested of each load. failed: loads that could not be measured, and how. given_up: claims
    that the budget is far from deciding, and larger loads that it does not pay for. reserved_s: of the budget, for a
    larger load.
    """

    session: Session
    cases: Mapping[int, Case]
    asked: dict[int, int] = field(default_factory=dict)
    failed: dict[int, SlmError] = field(default_factory=dict)
    given_up: set[tuple[str, str]] = field(default_factory=set)
    reserved_s: float = 0.0

    def round(self, number: int, loads: Iterable[int], why: str = "") -> None:
        """Measure loads in ascending order until each has `number` repeats, unless it failed before."""
        for load in sorted(loads):
            if load in self.failed:
                continue
            try:
                self.session.executor.measure(self.cases[load], number, why)
                self.asked[load] = max(number, self.asked.get(load, 0))
            except SlmError as error:
                self.failed[load] = error

    def second_round(self) -> None:
        """Measure each load that has one repeat again, if the budget pays for it, or no noise is known; else say so."""
        missing = [load for load in self.cases if len(self._repeats(load)) == 1]
        needed_s = sum(map(self.repeat_s, missing))
        if needed_s <= max(0.0, self.left_s) or not self._noise_known:
            return self.round(2, missing, "the noise of the host")
        [model] = {short_name(case.model) for case in self.cases.values()}
        self._say(f"{model}: a second round, to know the host's noise, takes about {needed_s:.0f} s")

    def reserve(self, plateau: Verdict, beyond: Case) -> None:
        """Keep seconds of the budget for a larger load on an engine of its own, as long as the curve has no plateau for
        sure; say so once if there are too few."""
        largest, load, self.reserved_s = max(self.cases), beyond.concurrency, 0.0
        if plateau.value is None or plateau.state is State.PASSES or largest in self.failed:
            return
        needed_s = start_estimate_s(beyond.engine) + 2 * load / largest * self.repeat_s(largest)
        if needed_s <= self.left_s:
            self.reserved_s = needed_s
        else:
            self._give_up(str(load), plateau.subject, f"concurrency {load} would take about {needed_s:.0f} s more")

    def until_decided(self, judge: Callable[[], Sequence[Verdict]]) -> None:
        """Measure again the loads that the first open verdict depends on most, until none is left that the rest of the
        budget would decide. Without a second repeat of any load no verdict is possible, so that is made in any case.
        Verdicts are only asked for after the numbers of repeats that their intervals are made for. A repeat takes as
        long as the one before."""
        while again := next(filter(None, map(self._next_look, judge())), None):
            in_any_case = not self._noise_known
            for number in range(1, max(again.values()) + 1):
                wanted = [load for load, look in again.items() if number <= look]
                missing = [load for load in wanted if len(self._repeats(load)) < number]
                if not in_any_case and sum(map(self.repeat_s, missing)) > self.left_s:
                    return
                self.round(number, wanted, "inconclusive so far")

    def _next_look(self, verdict: Verdict) -> dict[int, int]:
        """Return the number of repeats at the next look of each load that an open verdict depends on; none if the rest
        of the budget is far from deciding it, which is said once."""
        loads = {*verdict.again} & (self.cases.keys() - self.failed.keys())
        if verdict.state is not State.INCONCLUSIVE or not loads:
            return {}
        made = {load: len(self._repeats(load)) for load in loads}
        fewest = min(made.values())
        needed_s = (verdict.more_repeats or math.inf) * sum(map(self.repeat_s, loads))
        if fewest < ESTIMATES or needed_s <= FAR * self.left_s:
            look = next((n for n in self.session.looks if n > fewest), 0)
            return {load: look for load, repeats in made.items() if repeats < look}
        needs = f"about {needed_s:.0f} s more would decide it" if verdict.more_repeats else verdict.remedy
        self._give_up(verdict.claim, verdict.subject, f"{verdict.claim} stays open: {needs}")
        return {}

    def _give_up(self, what: str, subject: str, why: str) -> None:
        if (what, subject) not in self.given_up:
            self.given_up.add((what, subject))
            self._say(f"{subject}: {why}")

    def _say(self, text: str) -> None:
        self.session.say(f"{text}, and --slm-budget leaves {max(0.0, self.left_s):.0f} s")

    @property
    def left_s(self) -> float:
        """Seconds of the budget of all curves of the engine."""
        [engine] = {case.engine for case in self.cases.values()}
        return self.session.budget_s - self.session.executor.spent_s[engine] - self.reserved_s

    @property
    def _noise_known(self) -> bool:
        return any(len(self._repeats(load)) > 1 for load in self.cases)

    def _repeats(self, load: int) -> Sequence[ReplicaGroup]:
        return self.session.results.repeats.get(self.cases[load].key, ())

    def repeat_s(self, load: int) -> float:
        """Return seconds of the last repeat of a load, from its first request to the end of its window."""
        return self._repeats(load)[-1][0].run.window_s[1]


@dataclass(repr=False)
class Sweeps:
    """The curves that the points of a run belong to, by their series. An item of a load carries out the whole curve, if
    none before it did: it does not matter which runs first, and what is known is not measured again.

    A curve that no claim reads is measured in as many rounds as the options say. One that claims read is measured once,
    and from then on only where a claim is open, unless the options name a number of repeats: first for claims on what
    the GPU does. Those on what was seen have the noise of the host, which a second round of all loads tells.

    cases: of each curve, those that its items ask for, by load. claims: that read it.
    """

    session: Session
    cases: Mapping[str, Mapping[int, Case]]
    claims: Mapping[str, Sequence[Question]]
    _done: dict[str, Rounds] = field(default_factory=dict)

    def carry_out(self, series: str) -> Rounds:
        """Measure a curve, once in a run. An adaptive sweep measures what is wanted next until nothing is, or a load
        cannot be measured: the choice depends on it."""
        if series in self._done:
            return self._done[series]
        session, cases, verdicts = self.session, self.cases[series], self.session.verdicts
        claims = self.claims.get(series, ())
        rounds, one = Rounds(session, cases), next(iter(cases.values()))
        self._done[series], planned = rounds, session.planner.in_sweep(one)
        tolerance = verdicts.adaptive(one.model) if planned else None
        if tolerance is None:
            for number in range(1, (session.first if claims else session.options.repeats) + 1):
                rounds.round(number, cases)
        else:
            self._adaptively(rounds, one.model, tolerance)

        goes_on = tolerance is None and len(session.looks) > 1
        beyond = session.planner.sweep(one.model).beyond if goes_on and planned else None

        def judged(of_gpu: bool) -> list[Verdict]:
            found = [verdicts.verdict(each) for each in claims if table.is_of_gpu(each.row.claim) is of_gpu]
            for verdict in found:
                if beyond and verdict.claim == GPU_PLATEAU:
                    rounds.reserve(verdict, beyond)
            return found

        verdicts.measuring.add(series)
        try:
            rounds.until_decided(lambda: judged(True))
            judged(True)  # whose last look may lie before the last repeat: what is kept for a larger load is as it ends
            if goes_on and any(verdict.state is State.INCONCLUSIVE for verdict in judged(False)):
                rounds.second_round()
            rounds.until_decided(lambda: judged(False))
            if beyond and rounds.reserved_s:
                self._go_beyond(beyond)
        finally:  # an interrupted run is judged as its archive will be
            verdicts.measuring.discard(series)
        return rounds

    def _go_beyond(self, case: Case) -> None:
        self.session.say(f"{point_title(case.each[0], case.loads[0])} follows: the GPU has no plateau for sure before")
        further = Rounds(self.session, {case.concurrency: case})
        for number in (1, 2):
            further.round(number, further.cases)
        for load, error in further.failed.items():
            why = error.problem.partition(chr(10))[0]
            self.session.note(f"{short_name(case.model)} was not measured at concurrency {load}: {why}")

    def _adaptively(self, rounds: Rounds, model: str, tolerance: float) -> None:
        session, sweep = self.session, self.session.planner.sweep(model)
        cases = rounds.cases = {case.concurrency: case for case in sweep.cases}

        def seconds(concurrency: int, tokens_per_s: float) -> float:
            load, workload = cases[concurrency].loads[0], cases[concurrency].workloads[0]
            assert isinstance(load, ClosedLoop)
            return load.duration_s(workload.mean_output_tokens * concurrency / tokens_per_s)

        grid = Grid(sweep.concurrencies, tolerance, session.options.repeats, seconds, session.looks)
        while not rounds.failed:
            now = replace(grid, left_s=rounds.left_s) if session.options.budget else grid
            if (wanted := next_measurement(now, session.verdicts.curve(model).points)) is None:
                break
            rounds.round(wanted.repeats, [wanted.concurrency], wanted.why)
        for load, error in rounds.failed.items():
            where = f"{short_name(model)}: the adaptive sweep ended at concurrency {load}"
            session.notes.append(f"{where}: {error.problem.partition(chr(10))[0]}")

    def repeats(self, case: Case) -> int | None:
        """Carry out the curve of a case, and return the number of repeats that were requested of its load: 1 for one
        that an adaptive sweep does not need and that was measured already, None for one that was not. Raises the error
        that kept the load from being measured."""
        rounds, load = self.carry_out(case.series), case.concurrency
        if load in rounds.failed:
            raise rounds.failed[load]
        if load in rounds.asked:
            return rounds.asked[load]
        return 1 if any(p.concurrency == load for p in self.session.verdicts.curve(case.model).points) else None
