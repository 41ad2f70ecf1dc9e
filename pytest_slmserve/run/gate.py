"""Run of a gate: pairs of fresh launches, baseline and candidate in turn, until the outcome is known."""

import time
import uuid
from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain
from pathlib import Path

from pytest_slmserve.analysis.claims.evidence import PUBLISHED
from pytest_slmserve.analysis.claims.table import stored_gates
from pytest_slmserve.analysis.gate import decision, diagnosis
from pytest_slmserve.analysis.gate.launch_pairs import ENDPOINTS, GATED, SIDES, Gated, judge_gate, pairs_of
from pytest_slmserve.analysis.metrics.validity import is_clean
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive import baselines
from pytest_slmserve.engines.base import PROFILE_FOLDER, Engine, Outputs, check_fits
from pytest_slmserve.engines.pool import abreast
from pytest_slmserve.engines.server import caches
from pytest_slmserve.options.table import FEWEST_PAIRS, Options, joined
from pytest_slmserve.report.gate import calibration_text
from pytest_slmserve.report.text_table import counted
from pytest_slmserve.run.executor import count_missing
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import ENDS_WITH, BadUsage, EngineFailed, Side, SlmError, naming
from pytest_slmserve.schema.kv_cache import check_arguments, no_room
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import GateLaunch, Measurement, ReplicaGroup
from pytest_slmserve.schema.specs import ClosedLoop, Engines, EngineSpec

MAX_DROPPED = 3  # more pairs that cannot be trusted say that this host cannot tell
SHORT = 2  # pairs of a gate among other tests, because each takes most of a minute
PAIRS_AT_ONCE, MANY_CORES = 2, 8  # looks are after even numbers of pairs; two cores for each that imports
WARM_UP = 0  # in place of a pair's number
# Requests, and tokens of each, that both sides generate: with real weights as many as a verdict takes.
ASKED = {"dummy": (4, 32), "auto": (64, 16)}
SCORED = 2  # pairs whose launches tell how likely the baseline's tokens are: two of the baseline, to know their scatter
SMALL_WINDOWS = 4  # of the options: few requests make few tokens, and the host decides how fast
LARGE_LOAD = {"cuda": 256, "cpu": 64, "simulated": 256}  # of a model that is not in table 1


@dataclass
class Gates:
    """The gates of a run, each made once. failed: what ended one before its time; it is not tried again."""

    session: Session
    found: dict[str, Gated] = field(default_factory=dict)
    failed: dict[str, SlmError] = field(default_factory=dict)

    @cached_property
    def waivers(self) -> tuple[diagnosis.Waiver, ...]:
        """Waivers of the file that the options name. Raises BadUsage if it cannot be read, or names an endpoint that no
        gate compares."""
        path = self.session.options.waivers
        found = baselines.read_waivers(Path(path)) if path else ()
        if unknown := next((w for w in found if w.endpoint not in ENDPOINTS), None):
            raise BadUsage(f"{path}: no gate compares {unknown.endpoint!r}", ", ".join(ENDPOINTS))
        return found

    def waiver(self, model: str, endpoint: str) -> diagnosis.Waiver | None:
        """The waiver of a regression of this model's endpoint on this device, valid or expired; None without one."""
        device = self.session.host.environment.gpu_name or self.session.platform
        return diagnosis.waiver_for(self.waivers, model, endpoint, device)

    def of(self, model: str) -> Gated:
        """The gate of a model, run at the first request. Raises the error that ended it, for example EngineFailed."""
        if error := self.failed.get(model):
            raise type(error)(f"the gate of {short_name(model)} was broken off: {error.cause}", error.hint)
        if model not in self.found:
            try:
                gated = OneGate(self.session, model).run()
                self.found[model] = gated if is_short(self.session) else in_view_of_noise(self.session, gated)
            except Exception as error:  # a full disk too: launches are dear, and would end in the same way
                known = isinstance(error, SlmError)
                self.failed[model] = error if known else EngineFailed(f"{type(error).__name__}: {error}")
                if isinstance(error, AssertionError):  # one of ours, which pytest would take for a verdict that fails
                    raise RuntimeError(f"the gate of {short_name(model)} was broken off") from error
                raise
            self.session.gates.append(self.found[model])
        return self.found[model]


def is_short(session: Session) -> bool:
    """Whether a gate runs among other tests: then it makes SHORT pairs, only at the large load, and judges what is no
    matter of chance. A simulated gate takes no time and runs in full."""
    return not session.options.gate and session.platform != "simulated"


def check_gate(session: Session, model: str) -> None:
    """Raise BadUsage, with the side, if a gate could not be carried out or judged. Starts nothing."""
    _ = Gates(session).waivers, baselines.read_calibrations(session.options.records)
    loads_of(session, model)
    for side, spec in sides(session.planner.spec(model), session.options).items():
        with naming(f"the {side}"):
            check_fits(spec, session.planner.workload(model))
            if not session.options.plan:  # a plan is made without a GPU too
                session.planner.environment(spec)


def launches_left(session: Session, model: str, launched: Collection[Engines] = ()) -> tuple[int, int]:
    """The number of launches that do not count, one of each side, and of those that follow in a clear case: up to the
    next interim analysis, or in a calibration all. launched: what other tests will have launched before."""
    one, terms = OneGate(session, model), session.gate_terms
    there = len(one.gated.pairs) if one.gated else 0
    goal = decision.next_look(there, terms)
    if is_short(session) or session.options.calibrate:
        goal = SHORT if is_short(session) else terms.pairs
    if goal is None or one.over or any(gated.model == short_name(model) for gated in session.gates):
        return 0, 0
    return len(one.cold(launched)), 2 * (goal - there)


def in_view_of_noise(session: Session, gated: Gated) -> Gated:
    """The gate in view of this runner's noise, if that is known. A calibration stores the noise of its pairs."""
    records = session.options.records
    if session.options.calibrate:
        noise = decision.noise_of(gated.gated)
        if len(noise.costs) < FEWEST_PAIRS:
            few = f"{len(noise.costs)} pairs of {gated.model} are valid and have every figure, too few"
            raise BadUsage(few, "a quieter host: see doctor")
        rates = decision.calibrate(noise, gated.gated, gated.terms)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        place = baselines.noise_key(gated.pairs[0].baseline.measurements, gated.terms, gated.caches)
        baselines.keep(records, baselines.StoredNoise(place, now, rates))
    gated, known = baselines.judged_by_noise(gated, records)
    if known:
        session.notes.append(calibration_text(known))
    elif gated.pairs and session.platform != "simulated":  # whose noise is that of a formula
        unknown = f"no calibration of {gated.model} on this host"
        session.notes.append(f"{unknown}: --slm-calibrate measures what a gate can detect")
    return gated


def order(number: int) -> tuple[Side, Side]:
    """Sides of a pair in the order of launching: AB, BA, BA, AB, so that neither a drift of the host nor the first
    place favours a side."""
    baseline, candidate = SIDES
    return (baseline, candidate) if number % 4 in (0, 1) else (candidate, baseline)


def sides(spec: EngineSpec, options: Options) -> dict[Side, EngineSpec]:
    """The specification of each side: `spec` with the side's own interpreter, variables and arguments. Raises BadUsage
    for an argument of the wrong type."""
    found: dict[Side, EngineSpec] = {}
    for side in SIDES:
        python, env, arguments = options.side_of(side)
        if side == "candidate" and options.simulate and options.simulate_slowdown:
            arguments = (*arguments, ("slowdown", options.simulate_slowdown))
        with naming(f"the {side}"):
            own = spec.with_arguments(arguments)
            check_arguments(own)
            found[side] = replace(own, python=python or spec.python, env=joined(spec.env, env))
    return found


def loads_of(session: Session, model: str) -> tuple[ClosedLoop, ...]:
    """The small load, with a longer window, and the large one: the ends of `--slm-concurrency`. By default, and in a
    short gate, only the large one, because the speed of small loads depends on the host."""
    planner, chosen = session.planner, session.options.concurrency
    large = PUBLISHED.get(short_name(model), LARGE_LOAD[session.platform])
    ends = sorted({chosen[0], chosen[-1]} if chosen else {large})
    loads = tuple(planner.load(n) for n in (ends[-1:] if is_short(session) else ends))
    if len(loads) > 1:
        loads = (replace(loads[0], window_s=SMALL_WINDOWS * loads[0].window_s), *loads[1:])
    for load in loads:
        if why := no_room(planner.spec(model), planner.workload(model).longest, load.concurrency):
            raise BadUsage(
                f"{short_name(model)} at concurrency {load.concurrency}: {why}", "--slm-concurrency with less"
            )
    return loads


class OneGate:
    """The gate of one model while it is measured: `found` so far, and `gated` what that tells, if anything."""

    def __init__(self, session: Session, model: str) -> None:
        """A gate that goes on with its measurements in the resumed archive, and takes over their id. Of several fitting
        gates the last counts. Sides, loads and caches must be the same, on any host of this kind, because a pair is
        compared within itself. The terms must be the same: a gate whose terms changed after an interim analysis would
        err more often than they say."""
        self.session, self.model, self.title = session, model, f"the gate of {short_name(model)}"
        self.specs = sides(session.planner.spec(model), session.options)
        self.id, self.workload = uuid.uuid4().hex[:12], session.planner.workload(model)
        self.loads = loads_of(session, model)
        self.reference: Outputs = ()  # of the first baseline
        self.found: list[Measurement] = []
        self.gated: Gated | None = None
        if (stored := session.resumed) is None:
            if session.options.resume:
                session.note(f"{self.title} begins anew: there is no archive {session.source} yet")
            return
        caches_, environment = session.options.gate_caches, session.planner.environment
        wanted = {side: (spec, environment(spec).key, self.workload.hash, caches_) for side, spec in self.specs.items()}
        for gated, assumed in reversed([*stored_gates(stored.measurements, stored.plans)]):
            parts = [(m, part) for m in stored.measurements if (part := m.paired) and part.gate == gated.gate]
            if (
                assumed
                or gated.terms != session.gate_terms
                or not all(
                    wanted[part.side] == (m.spec, m.environment.key, m.workload.hash, part.caches)
                    and m.load in self.loads
                    for m, part in parts
                )
            ):
                continue
            outputs = (part.outputs for _, part in parts if part.side == "baseline" and part.outputs)
            self.id, self.gated, self.reference = gated.gate, gated, next(outputs, ())
            self.found = [m for m, _ in parts]
            there = f"{counted(len(pairs_of(self.found)), 'pair')} of launches in {session.source}"
            session.note(f"{self.title} goes on from {there}")
            return
        session.note(f"{self.title} begins anew: {session.source} has none of the same sides, loads, caches and terms")

    def run(self) -> Gated:
        """Measure pairs until the outcome is known, or all of them are measured."""
        session, terms, began = self.session, self.session.gate_terms, time.monotonic()
        if self.specs["baseline"] == self.specs["candidate"]:
            session.notes.append(f"both sides of {self.title} are the same: what differs is noise")
        try:
            if not self.over:
                if session.platform != "simulated":  # launches that do not count read files from disk and fill caches
                    list(self.launch_in_turn([(side, WARM_UP) for side in self.cold()]))
                there = {pair.number for pair in pairs_of(self.found)}
                numbers = (number for number in range(1, terms.pairs + MAX_DROPPED + 1) if number not in there)
                launches = [(side, number) for number in numbers for side in order(number)]
                with closing(self.launch_in_turn(launches)) as each:
                    for pair in zip(each, each):
                        self.found += chain(*pair)
                        self.gated = judge_gate(self.found, terms)
                        if self.over:
                            break
            assert self.gated is not None
            traced = self.traced(self.gated) if session.options.profile and not session.options.calibrate else ""
        except KeyboardInterrupt:
            if self.gated:  # the summary says how far it came
                session.gates.append(self.gated)
            raise
        finally:
            session.devices.pool.close()
        if not is_short(session):
            took_s = time.monotonic() - began
            took = f"{took_s / 60:.1f} minutes" if took_s >= 60 else f"{took_s:.0f} s"
            session.notes.append(f"{self.title} took {took}, {len(self.gated.pairs)} pairs count")
        session.notes += [traced] if traced else []
        return self.gated

    @property
    def over(self) -> bool:
        """Whether the gate ends: all pairs are measured, too many were dropped, or the outcome is settled at a planned
        interim analysis. Between two of them the outcome counts for nothing. A calibration and a short gate have
        none."""
        if (gated := self.gated) is None:
            return False
        there, dropped = len(gated.pairs), len(gated.dropped)
        if is_short(self.session):
            return there + dropped >= SHORT
        if there >= gated.terms.pairs or dropped > MAX_DROPPED:
            return True
        looks = there > 0 and decision.next_look(there - 1, gated.terms) == there
        return looks and not self.session.options.calibrate and gated.settled

    def cold(self, launched: Collection[Engines] = ()) -> tuple[Side, ...]:
        """Sides of which nothing was launched since this host was booted. Two equal sides count as one, and then the
        launches of the run's other tests count too. launched: those that are planned."""
        host = self.session.host.environment.host
        same = self.specs["baseline"] == self.specs["candidate"]  # else each has caches of its own
        measured = [*self.found, *(self.session.results.measurements() if same else ())]
        there = {m.spec for m in measured if host and m.environment.host == host} | set(launched if same else ())
        return tuple(side for side in (SIDES[:1] if same else SIDES) if self.specs[side] not in there)

    def launch_in_turn(self, launches: Sequence[tuple[Side, int]]) -> Generator[list[Measurement]]:
        """Measurements of each launch, an empty list for a warm-up. If the host has enough cores, two pairs are
        launched at once and wait for their turns, because imports take as long as the rest of a start.

        Args:
            launches: Each side with the number of its pair, or `WARM_UP`. The launches of a pair follow each other.
        """
        how, cores = self.session.options.gate_caches, self.session.host.environment.cores or 0
        at_once = 2 * (PAIRS_AT_ONCE if cores >= MANY_CORES else 1)
        for first in range(0, len(launches), at_once):
            some = launches[first : first + at_once]
            with ExitStack() as undo:
                wanted = [(self.specs[side], undo.enter_context(caches(how, side, self.specs))) for side, _ in some]
                starts = undo.enter_context(abreast(self.session.devices.pool, wanted))
                for place, ((side, number), start) in enumerate(zip(some, starts)):
                    with naming(f"the {side}, {f'pair {number}' if number else 'before the first pair'}"):
                        engine = start()
                        found = self.measured(number, engine, side, second=bool(place % 2)) if number else []
                    yield found

    def measured(self, number: int, engine: Engine, side: Side, second: bool) -> list[Measurement]:
        """Measurements of one launch at each load, with its outputs and scores if this pair has them. second: of its
        pair."""
        engine.differ(f"{side} {number}")
        spec = self.specs[side]
        paired = GateLaunch(self.id, number, side, second, caches=self.session.options.gate_caches)
        if number == 1:  # once is enough: an engine that answers otherwise does so always
            paired = replace(paired, outputs=engine.outputs(self.workload, *ASKED[spec.load_format]))
        if side == "baseline":
            self.reference = self.reference or paired.outputs
        if spec.load_format == "auto" and number <= SCORED and self.reference:
            paired = replace(paired, scores=engine.scores(self.workload, self.reference))
        found: list[Measurement] = []
        for load in self.loads:
            name = f"{short_name(self.model)} at {load.concurrency}, {side}, pair {number}"
            case, repeats = self.session.planner.case(spec, [self.workload], [load]), list[ReplicaGroup]()
            while count_missing(map(is_clean, repeats), 1):
                repeats.append(self.session.executor.measure_once(case, name, paired))
            found += [m for group in repeats for m in group]
        return found

    def traced(self, gated: Gated) -> str:
        """Serve the load of the first failing endpoint with one more launch of each side under its profiler. Returns a
        sentence with the paths of the traces, or why there are none; empty if no endpoint fails that is read at a
        load."""
        verdicts = ((each.load, gated.verdict(name)) for name, each in GATED.items())
        places = [
            place for place, seen in verdicts if place is not None and seen is not None and seen.state is State.FAILS
        ]
        if not places:
            return ""
        load = gated.pairs[0].baseline.measurements[places[0]].load
        written = []
        for side in SIDES:
            folder = Path(self.session.options.profile).absolute() / short_name(self.model) / side
            try:
                folder.mkdir(parents=True, exist_ok=True)
                before = set(folder.iterdir())
                with caches(self.session.options.gate_caches, side, self.specs) as own:
                    launch = self.specs[side], {**own, PROFILE_FOLDER: str(folder)}
                    with abreast(self.session.devices.pool, [launch]) as (start,):
                        problem = start().profile(self.workload, load) or "its profiler wrote nothing"
                paths = ", ".join(sorted(str(path) for path in set(folder.iterdir()) - before))
                written.append(f"{side}: {paths or f'none ({problem})'}")
            except Exception as error:  # whatever spoils a trace, the verdict stands; a log's end is no part of a note
                written.append(f"{side}: none ({str(error).partition(ENDS_WITH)[0]})")
        return f"traces of {short_name(self.model)} at {load.max_concurrency}: {'; '.join(written)}"
