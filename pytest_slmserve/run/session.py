"""Session of a run: options, devices, executor, results file, and the sweeps. It does not import pytest."""

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
    """State of one run. `open` takes the device and the results file, and `close` releases both.

    Attributes:
        notes: sentences for the end of the run.
        results: all repeats known so far.
        keeps_records: whether measurements are kept. Simulated ones need a named or resumed results file, because they
            would mix with real ones in the default file.
        source: results file that is resumed, if `resumes`.
        budget_s: seconds after which the curves of an engine are not measured again.
        first: repeats of each load of a curve that claims read.
        looks: numbers of repeats at which claims may be evaluated; one number for sweeps with a fixed length.
        say: prints a message during the run.
    """

    executor: Executor
    slo: Slo | None = None
    page: RunPage | None = None
    reused: set[str] = field(default_factory=set)  # ids of stored measurements that this run reuses
    stored: list[Measurement] = field(default_factory=list)  # measurements of the resumed results file, valid or not
    gates: list[Gated] = field(default_factory=list)  # finished gates
    pair_s: dict[str, tuple[int, float]] = field(default_factory=dict)  # by model: pairs, and seconds of each
    claims: Collection[str] | None = None  # claims that the tests evaluate; None if no tests are known
    inconclusive: list[str] = field(default_factory=list)  # tests with the reason, except for claims and gates
    failed: list[str] = field(default_factory=list)  # tests with the reason, once all have ended
    interrupted: bool = False  # whether the user ended the run
    command: str = ""  # command that repeats this run
    say: Callable[[str], None] = lambda text: None
    undo: ExitStack = field(default_factory=ExitStack)  # at the close, while measurements can still be written

    def __post_init__(self) -> None:
        self.devices, self.results = self.executor.devices, self.executor.results
        planner = self.planner = self.devices.planner
        options = self.options = planner.options
        self.platform, self.host, self.notes = planner.platform, planner.host, planner.notes
        named = options.source["records"] != "default"
        self.keeps_records = planner.platform != "simulated" or named or bool(options.resume)
        self.source = Path(options.resume if isinstance(options.resume, str) else options.records)
        self.resumes = bool(options.resume) and is_file(self.source)  # the results file of this run may not exist yet
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
        """Return a session of a run. Raise BadUsage if the options do not fit the host or the results file.

        Args:
            host: None means this one, which is probed. A plan may assume one.
            is_run: whether tests will run.
        """
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
        """Lock the device, open the results file, and resume if requested."""
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
        """Write to the results file that this run measures, and how its claims and gates are judged.

        Args:
            compares: whether a test runs a gate.
        """
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
        """Reason and place if measurements are in a second file; "" if they are in the results file."""
        return self.executor.archive.moved if self.executor.archive else ""

    @cached_property
    def resumed(self) -> Contents | None:
        """Original contents of the resumed results file, or None. Raises BadArchive."""
        return read(self.source, skip_damaged=self.options.skip_damaged) if self.resumes else None

    def resume(self) -> None:
        """Take over the valid measurements of the resumed results file, if any. Raises BadArchive."""
        if self.resumed is None:
            return
        self.notes.extend(self.resumed.notes)
        self.stored = [m for m in self.resumed.measurements if m.paired is None]
        self.executor.earlier.update(Counter(spec for spec, _ in {(m.spec, m.launch) for m in self.stored}))
        valid = [group for group in all_groups(self.stored) if not check(*group).problems]
        for group in valid:
            self.results.repeats.setdefault(group_key(group), []).append(group)
            self.reused.update(m.id for m in group)

    def findings(self) -> Findings:
        archive = self.executor.archive
        shown = archive.path if archive else None
        if archive and not self.keeps_records:  # the file is temporary, and the HTML report contains it
            shown = self.page.path if self.page else None
        of_gates = [m for gated in self.gates for side in SIDES for m in gated.measurements(side)]
        reused: Counter[str] = Counter()  # reused measurements, by point
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
            interrupted=self.interrupted,
            notes=list(self.notes),
            reused=dict(+reused),
            reused_from=f"{self.source}{f' ({elsewhere} of another host, or from before a boot)' if elsewhere else ''}",
            archives=[str(shown)] if shown else [],
            records=archive.path if archive else None,
            page=str(self.page.path) if self.page and self.page.path.exists() else "",
            command=self.command,
        )


# Sweeps: rounds over their loads, until their claims are decided


ESTIMATES, FAR = 4, 4  # repeats after which a claim is given up if it needs this many times the budget left


@dataclass(repr=False)
class Rounds:
    """Rounds over the cases of one engine. Each round measures all loads in one more state of the host.

    Attributes:
        cases: by load.
        asked: requested repeats of each load.
        failed: errors of loads.
        given_up: claims and larger loads for which the budget is too small.
        reserved_s: seconds of the budget for a larger load.
    """

    session: Session
    cases: Mapping[int, Case]
    asked: dict[int, int] = field(default_factory=dict)
    failed: dict[int, SlmError] = field(default_factory=dict)
    given_up: set[tuple[str, str]] = field(default_factory=set)
    reserved_s: float = 0.0

    def round(self, number: int, loads: Iterable[int], why: str = "") -> None:
        """Measure loads in ascending order until each has `number` repeats, except loads that failed before."""
        for load in sorted(loads):
            if load in self.failed:
                continue
            try:
                self.session.executor.measure(self.cases[load], number, why)
                self.asked[load] = max(number, self.asked.get(load, 0))
            except SlmError as error:
                self.failed[load] = error

    def second_round(self) -> None:
        """Measure each load with one repeat again if the budget allows it or no noise is known, or else say so."""
        missing = [load for load in self.cases if len(self._repeats(load)) == 1]
        needed_s = sum(map(self.repeat_s, missing))
        if needed_s <= max(0.0, self.left_s) or not self._noise_known:
            return self.round(2, missing, "the noise of the host")
        [model] = {short_name(case.model) for case in self.cases.values()}
        self._say(f"{model}: a second round, to know the host's noise, takes about {needed_s:.0f} s")

    def reserve(self, plateau: Verdict, beyond: Case) -> None:
        """Reserve seconds for a larger load while the curve has no certain plateau. Say once if too few are left."""
        largest, load, self.reserved_s = max(self.cases), beyond.concurrency, 0.0
        if plateau.value is None or plateau.state is State.PASSES or largest in self.failed:
            return
        needed_s = start_estimate_s(beyond.engine) + 2 * load / largest * self.repeat_s(largest)
        if needed_s <= self.left_s:
            self.reserved_s = needed_s
        else:
            self._give_up(str(load), plateau.subject, f"concurrency {load} would take about {needed_s:.0f} s more")

    def until_decided(self, judge: Callable[[], Sequence[Verdict]]) -> None:
        """Measure the loads that the first open verdict depends on, until the budget would decide no further verdict.

        If no load has a second repeat, one is measured without regard to the budget, because there is no verdict
        without it. Verdicts are evaluated only at the numbers of repeats for which their intervals are made. A repeat
        is expected to take as long as the one before.
        """
        while again := next(filter(None, map(self._next_look, judge())), None):
            in_any_case = not self._noise_known
            for number in range(1, max(again.values()) + 1):
                wanted = [load for load, look in again.items() if number <= look]
                missing = [load for load in wanted if len(self._repeats(load)) < number]
                if not in_any_case and sum(map(self.repeat_s, missing)) > self.left_s:
                    return
                self.round(number, wanted, "inconclusive so far")

    def _next_look(self, verdict: Verdict) -> dict[int, int]:
        """Return the wanted repeats of each load of an open verdict, or none if the budget is far from deciding it."""
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
        """Seconds of the budget of all curves of the engine that are left."""
        [engine] = {case.engine for case in self.cases.values()}
        return self.session.budget_s - self.session.executor.spent_s[engine] - self.reserved_s

    @property
    def _noise_known(self) -> bool:
        return any(len(self._repeats(load)) > 1 for load in self.cases)

    def _repeats(self, load: int) -> Sequence[ReplicaGroup]:
        return self.session.results.repeats.get(self.cases[load].key, ())

    def repeat_s(self, load: int) -> float:
        """Return the seconds of the last repeat of a load, from its first request to the end of its window."""
        return self._repeats(load)[-1][0].run.window_s[1]


@dataclass(repr=False)
class Sweeps:
    """Curves of a run, by series. The first item of a curve measures it in full.

    A curve without claims gets as many rounds as the options say. A curve with claims is measured once, and then only
    while a claim is open, unless the options set the repeats. Claims on the GPU come first. The others include the
    noise of the host, which a second round shows.

    Attributes:
        cases: of each curve, by load.
        claims: that read each curve.
    """

    session: Session
    cases: Mapping[str, Mapping[int, Case]]
    claims: Mapping[str, Sequence[Question]]
    _done: dict[str, Rounds] = field(default_factory=dict)

    def carry_out(self, series: str) -> Rounds:
        """Measure a curve, once in a run.

        An adaptive sweep ends at a load that fails, because the choice of the next one depends on it.
        """
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
            judged(True)  # the reserve for a larger load depends on the last repeats
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
        """Measure the curve of a case, and return the requested repeats of its load.

        Raise the error of the load, if any.

        If an adaptive sweep does not need the load, it is 1 with a measurement, and None without.
        """
        rounds, load = self.carry_out(case.series), case.concurrency
        if load in rounds.failed:
            raise rounds.failed[load]
        if load in rounds.asked:
            return rounds.asked[load]
        return 1 if any(p.concurrency == load for p in self.session.verdicts.curve(case.model).points) else None
