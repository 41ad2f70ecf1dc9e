"""What one run holds, and how it comes by what it does not know yet: measured here, elsewhere, or from the archive.

Knows nothing of pytest.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

from pytest_slmserve.analysis.claims import lookup, table
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import Gated
from pytest_slmserve.analysis.metrics.goodput import Slo, slo_of_requests
from pytest_slmserve.analysis.metrics.validity import is_clean, problems
from pytest_slmserve.analysis.points.replica_points import (
    ReplicaGroup,
    SharedPoint,
    check_group,
    is_clean_group,
    shared_points,
    shared_runs,
)
from pytest_slmserve.archive.merge import move_parts
from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.engines.base import Engine
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import Question, case_key, title
from pytest_slmserve.plan.planner import Planner, check_there
from pytest_slmserve.plan.sweeps import Sweep
from pytest_slmserve.plan.titles import point_title
from pytest_slmserve.report.export.writer import Export, export_to
from pytest_slmserve.run.devices import Devices
from pytest_slmserve.run.executor import RemoteExecutor, left, wanted
from pytest_slmserve.run.gpu_slots import GpuLease, as_seen
from pytest_slmserve.run.judge import Verdicts
from pytest_slmserve.run.measure import measure, measure_together
from pytest_slmserve.run.results import Results
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.literals import Platform, Sharing
from pytest_slmserve.schema.loads import ClosedLoop, Load, OpenLoop, is_job
from pytest_slmserve.schema.records import GateLaunch, Measurement, Progress, Replica, replica_set
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec
from pytest_slmserve.schema.workloads import Workload
from pytest_slmserve.telemetry.host_probe import Host, probe

WARM_UP = 64  # requests at once
ALONE: Sharing = "time-slicing"  # of one engine: nobody to share with


@dataclass(repr=False)
class Session:
    """Opened by `open`, which takes the device and the archive; `close` lets go of everything.

    on_progress: hears how a run is going, with the name of the point.
    """

    planner: Planner
    devices: Devices
    known: Results = field(default_factory=Results)
    verdicts: Verdicts = field(init=False)
    on_progress: Callable[[str, Progress], None] = lambda name, progress: None
    reused: set[str] = field(default_factory=set)
    stored: list[Measurement] = field(default_factory=list)  # of the archive that is resumed, valid or not
    gates: list[Gated] = field(default_factory=list)
    archive: Archive | None = None
    slo: Slo | None = None
    export: Export | None = None
    remote_executor: RemoteExecutor | None = None
    _warmed: str | None = None  # the launch that has served something
    _undo: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.verdicts = Verdicts(self.planner, self.known)

    @classmethod
    def from_options(
        cls, options: Options, root: Path, lease: GpuLease | None = None, host: Host | None = None
    ) -> Session:
        """A session on this host, which is probed where `host` is None. lease: that of a worker. Raises BadUsage where
        the platform cannot run; a plan is made without a GPU too."""
        platform, slo = options.platform, slo_of_requests(options.goodput)
        assert platform is not None
        export = export_to(options.export, slo) if options.export and not lease else None
        if lease:
            lease.slot.sit((lease.slot.own,))
        host = host or _host(options, platform, root)
        if lease:
            host = as_seen(host, lease.slot)
        check_there(host, range(options.tensor_parallel_size[-1]))
        planner = Planner(options, platform, host, list(host.warnings))
        return cls(planner, Devices.from_options(planner, lease), slo=slo, export=export)

    @property
    def options(self) -> Options:
        return self.planner.options

    @property
    def platform(self) -> Platform:
        return self.planner.platform

    @property
    def host(self) -> Host:
        return self.planner.host

    @property
    def notes(self) -> list[str]:
        """One sentence each, for the end of the run."""
        return self.planner.notes

    def open(self) -> None:
        """Take the device, open the archive, read what is to be resumed (a worker has read it to know which items are
        its own). Raises BadUsage or BadArchive."""
        self.devices.hold()
        if self.lease:
            self.archive = self._undo.enter_context(
                Archive.open(self.lease.part)
            )  # the controller has mended the whole
        else:
            self.open_archive()

    def open_archive(self) -> None:
        """With what workers of a run that was killed have left beside it. Raises BadUsage or BadArchive."""
        path = Path(self.options.records)
        resumes = self.resumes  # asked before the archive is made
        self.archive = self._undo.enter_context(Archive.open(path))  # repairs a torn end, so it comes first
        self.notes.extend(self.archive.notes)
        left = move_parts(self.archive)
        self.notes.extend(left.notes)
        if left.written:
            self.notes.append(f"{left.written} measurements of workers that were stopped are in {path} now")
        if resumes or (self.options.resume and left.written):
            self.resume()

    @property
    def lease(self) -> GpuLease | None:
        """Of a worker, which measures beside others."""
        return self.devices.lease

    @property
    def gate_terms(self) -> GateCriteria:
        return GateCriteria(self.options.gate_margin, pairs=self.options.gate_pairs)

    def begin(self) -> None:
        """Note in the archive that this run measures, and by which parameters its claims are judged."""
        if self.archive:
            rows = [lookup.row_to_record(row) for row in table.ROWS]
            sweeps = {
                self.planner.series(model): _planned(sweep, self.verdicts.adaptive(model))
                for model, sweep in self.planner.sweeps.items()
                if sweep.loads and not self.options.gate  # a gate measures no sweep
            }
            gate = {"gate": asdict(self.gate_terms)} if self.options.gate else {}
            beside = {"beside": sorted(self.planner.beside)} if self.planner.beside else {}
            self.archive.begin({"rows": rows}, {"sweeps": sweeps, **gate, **beside})

    def close(self) -> None:
        if self.remote_executor:
            self.remote_executor.close()  # what has come goes into the archive
        self._undo.close()
        self.devices.close()

    @property
    def source(self) -> Path:
        """The archive that is resumed."""
        resumed = self.options.resume
        return Path(resumed if isinstance(resumed, str) else self.options.records)

    @property
    def resumes(self) -> bool:
        """Is there anything to be resumed? The archive of the run itself may not be there yet. Raises BadUsage for
        another one that is not there."""
        if isinstance(self.options.resume, str) and not self.source.is_file():
            raise BadUsage(f"--slm-resume: no archive is at {self.source}", "--slm-resume RECORDS, of an earlier run")
        return bool(self.options.resume) and self.source.exists()

    def resume(self) -> None:
        """Take over the valid measurements of an archive, which stays as it is. Raises BadArchive."""
        contents = read(self.source, skip_damaged=self.options.skip_damaged)
        self.notes.extend(contents.notes)
        self.stored = [m for m in contents.measurements if m.paired is None]
        together = [ms for ms in shared_runs(contents.measurements) if not check_group(ms)[0]]
        alone = [m for m in contents.measurements if m.alone and m.paired is None and not problems(m)]
        self.known.add([*alone, *(m for members in together for m in members)])
        self.reused.update(m.id for m in (*alone, *(m for members in together for m in members)))

    def engine(self, spec: EngineSpec) -> Engine:
        """A running one. Raises BadUsage, DeviceBusy, EngineFailed."""
        return self.devices.engine(spec)

    def measure(
        self, spec: EngineSpec, workload: Workload, load: Load, repeats: int, why: str = ""
    ) -> list[Measurement]:
        """All measurements of one key: what is known already, and new ones until `repeats` are sound. why: for whoever
        is told how it is going.

        One that is invalid or degraded (another process in the way, say) is kept, shown, and measured again, once for
        each point.
        """
        return self.answered(self.question(spec, workload, load), repeats, why)

    def question(self, spec: EngineSpec, workload: Workload, load: Load) -> Question:
        return Question(self.planner.key(spec, workload, load), spec, (workload,), (load,))

    def question_of_one(self, spec: EngineSpec, workload: Workload, load: ClosedLoop) -> Question:
        """Of one engine that several are to be compared with: no point of a sweep."""
        sharing: Sharing = "urls" if spec.platform == "remote" else ALONE
        asked = replica_set(ReplicaSpec((spec,), sharing), [workload.hash], [load])
        one = Replica(uuid.uuid4().hex[:12], 0, 1, asked, sharing)
        return Question(one.key(self.planner.key(spec, workload, load)), spec, (workload,), (load,), one)

    def question_of_replicas(
        self, spec: ReplicaSpec, workloads: Sequence[Workload], loads: Sequence[ClosedLoop]
    ) -> Question:
        key = case_key(spec, workloads, loads, self.planner.environment(spec))
        return Question(key, spec, tuple(workloads), tuple(loads))

    def answered(self, question: Question, repeats: int, why: str = "") -> list[Measurement]:
        known = self.known.measured.setdefault(question.key, [])
        self.known.asked.setdefault(question.key)
        self._answer(question, repeats, why)
        return known

    def _answer(self, question: Question, repeats: int, why: str = "") -> None:
        if self.remote_executor:
            self.remote_executor.fetch(question)
            return
        for _ in self.answers(question, repeats, why):
            pass

    def answers(self, question: Question, repeats: int, why: str = "") -> Iterator[ReplicaGroup]:
        """Measure until `repeats` are sound, those counted that are known. Each is handed out when it has been kept."""
        for repeat in self.unanswered(question, repeats):
            name = f"{title(question)}, repeat {repeat}{why and f' ({why})'}"
            if isinstance(question.engine, ReplicaSpec):
                found = self._made_together(question, question.engine, name)
            else:
                found = (self._made(question.engine, question.workloads[0], question.loads[0], name, question.one),)
            self.keep(question, found)
            yield found

    def unanswered(self, question: Question, repeats: int) -> Iterator[int]:
        """Numbers of the repeats that are still to be made, while what is made is kept."""
        if isinstance(question.engine, ReplicaSpec):
            return wanted(self.known.shared.setdefault(question.key, []), repeats, is_clean_group)
        return wanted(self.known.measured.setdefault(question.key, []), repeats, is_clean)

    def left(self, question: Question) -> int:
        """How many that will be, if each of them is sound."""
        if isinstance(question.engine, ReplicaSpec):
            return left(self.known.shared.get(question.key, ()), self.options.repeats, is_clean_group)
        return left(self.known.measured.get(question.key, ()), self.options.repeats, is_clean)

    def keep(self, question: Question, found: ReplicaGroup) -> None:
        """Know it from now on. The archive has it on return."""
        if isinstance(question.engine, ReplicaSpec):
            self.known.shared.setdefault(question.key, []).append(found)
            for m in found if self.archive else ():
                self.archive.add(m)  # type: ignore[union-attr]
        else:
            self.known.measured.setdefault(question.key, []).extend(found)
            for m in found:
                self._write(m)

    def _write(self, found: Measurement) -> None:
        if self.archive:
            self.archive.add(found)
        if self.export:
            self.export.add(found)

    def measure_into(
        self,
        known: list[Measurement],
        spec: EngineSpec,
        workload: Workload,
        load: Load,
        name: str,
        *,
        paired: GateLaunch | None = None,
    ) -> None:
        """Measure once, on the engine that runs or on one that is started; the archive gets it too. name: for whoever
        is told how it is going."""
        known.append(self._made(spec, workload, load, name, paired=paired))
        self._write(known[-1])

    def _made(
        self,
        spec: EngineSpec,
        workload: Workload,
        load: Load,
        name: str,
        replica: Replica | None = None,
        paired: GateLaunch | None = None,
    ) -> Measurement:
        on_progress, environment = partial(self.on_progress, name), self.planner.environment(spec)
        engine = self.engine(spec)
        if is_job(load):
            self._warm(engine, workload, load)
        neighbours = self.devices.neighbours
        found = measure(engine, workload, load, environment, on_progress, self.devices.sampler_of(spec))
        neighbours = max(neighbours, self.devices.neighbours)
        return replace(found, replica=replica, paired=paired, neighbours=neighbours)

    def _warm(self, engine: Engine, workload: Workload, job: OpenLoop) -> None:
        """A job has no ramp: the first requests of a fresh engine, which are slow, must not be its own."""
        if engine.launch != self._warmed:
            engine.run(workload, OpenLoop(requests=min(job.requests or 1, WARM_UP)))
            self._warmed = engine.launch

    def measure_replicas(
        self, spec: ReplicaSpec, workloads: Sequence[Workload], loads: Sequence[ClosedLoop], repeats: int
    ) -> SharedPoint:
        """The same of several engines at once: what is known, and new runs until `repeats` are sound."""
        return self.answered_together(self.question_of_replicas(spec, workloads, loads), repeats)

    def answered_together(self, question: Question, repeats: int) -> SharedPoint:
        known = self.known.shared.setdefault(question.key, [])
        self.known.asked_shared.setdefault(question.key)
        self._answer(question, repeats)
        return shared_points(m for members in known for m in members)[0]

    def _made_together(self, question: Question, spec: ReplicaSpec, name: str) -> ReplicaGroup:
        environment, on_progress = self.planner.environment(spec), partial(self.on_progress, name)
        replicas, neighbours = self.devices.replicas(spec), self.devices.neighbours
        loads = cast(tuple[ClosedLoop, ...], question.loads)  # replicas have no other
        found = measure_together(
            replicas, question.workloads, loads, environment, on_progress, self.devices.sampler_of(spec)
        )
        return tuple(replace(m, neighbours=max(neighbours, self.devices.neighbours)) for m in found)

    @property
    def reused_cells(self) -> dict[str, int]:
        """Measurements of the archive that stood in for new ones, of each cell by its name."""
        cells: dict[str, int] = {}
        alone = ((point_title(m.spec, m.load), m) for m in self.known.measurements())
        for name, measurement in (*alone, *self._titled_shared()):
            if measurement.id in self.reused:
                cells[name] = cells.get(name, 0) + 1
        return cells

    def _titled_shared(self) -> Iterator[tuple[str, Measurement]]:
        for key in self.known.asked_shared:
            for members in self.known.shared[key]:
                title = f"{len(members)} x {point_title(members[0].spec, members[0].load)}"
                yield from ((title, m) for m in members)


def _host(options: Options, platform: Platform, root: Path) -> Host:
    """This one."""
    try:
        python, variables = options.engine
        return probe(platform, python, dict(variables), root)
    except BadUsage as error:
        if not options.plan:
            raise
        assumed = f"{error.problem}: the plan assumes a GPU of 140 GiB" if platform == "cuda" else error.problem
        return Host(Environment(platform=platform), "none", (assumed,))


def _planned(sweep: Sweep, adaptive: float | None) -> dict[str, object]:
    """What a later report needs to know of a sweep, as plain JSON values."""
    cut = [list(pair) for pair in sweep.cut]
    facts: dict[str, object] = {
        "model": short_name(sweep.spec.model),
        "concurrencies": [*sweep.concurrencies],
        "cut": cut,
    }
    return facts if adaptive is None else {**facts, "adaptive": {"tolerance": adaptive}}
