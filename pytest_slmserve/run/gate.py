"""A gate is run: pairs of fresh launches, baseline and candidate in turn, until the outcome is known."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from pytest_slmserve.analysis.claims.claim import PUBLISHED
from pytest_slmserve.analysis.claims.stored import stored_gates
from pytest_slmserve.analysis.gate.decision import calibrate, next_look, noise_of
from pytest_slmserve.analysis.gate.diagnosis import Waiver, waiver_for
from pytest_slmserve.analysis.gate.launch_pairs import (
    ENDPOINTS,
    SIDES,
    Gated,
    gated_series,
    judge_gate,
    pairs_of,
    weaker,
)
from pytest_slmserve.analysis.metrics.validity import is_clean
from pytest_slmserve.archive.baselines import StoredNoise, beside, find, keep, place_of, read_calibrations, read_waivers
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.base import PROFILE_FOLDER, Engine, Outputs, check_fits
from pytest_slmserve.engines.launch.vllm_arguments import caches
from pytest_slmserve.engines.pool import abreast
from pytest_slmserve.options.table import FEWEST_PAIRS, Options, joined
from pytest_slmserve.plan.cases import Engines
from pytest_slmserve.report.gate.text import calibration_text
from pytest_slmserve.report.text_table import counted
from pytest_slmserve.run.executor import count_missing
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import (
    ENDS_WITH,
    BadUsage,
    EngineFailed,
    LoadFormat,
    Platform,
    Side,
    SlmError,
    naming,
)
from pytest_slmserve.schema.loads import ClosedLoop, Load, Workload
from pytest_slmserve.schema.records import GateLaunch, Measurement, ReplicaGroup
from pytest_slmserve.schema.specs import EngineSpec

MAX_DROPPED = 3  # more pairs that cannot be trusted say that this host cannot tell
SHORT = 2  # pairs of a gate among other tests, where each takes most of a minute
PAIRS_AT_ONCE, MANY_CORES = 2, 8  # looks are after even numbers of pairs; two cores for each that imports
WARM_UP = 0  # in place of a pair's number
# Requests, and tokens of each, that both sides are asked for: with real weights as many as a verdict takes.
ASKED: dict[LoadFormat, tuple[int, int]] = {"dummy": (4, 32), "auto": (64, 16)}
SCORED = 2  # pairs whose launches tell how likely the baseline's tokens are: two of the baseline, to know their scatter
SMALL_WINDOWS = 4  # of the options: few requests make few tokens, and the host decides how fast
LARGE_LOAD: dict[Platform, int] = {"cuda": 256, "cpu": 64, "simulated": 256}  # of a model that is not in table 1


@dataclass
class Gates:
    """The gates of a run, each made once. failed: what ended one before its time; it is not tried again."""

    session: Session
    found: dict[str, Gated] = field(default_factory=dict)
    failed: dict[str, SlmError] = field(default_factory=dict)

    @cached_property
    def waivers(self) -> tuple[Waiver, ...]:
        """Raises BadUsage where the file cannot be read, or names what no gate compares."""
        path = self.session.options.waivers
        found = read_waivers(Path(path)) if path else ()
        if unknown := next((w for w in found if w.endpoint not in ENDPOINTS), None):
            raise BadUsage(f"{path}: no gate compares {unknown.endpoint!r}", ", ".join(ENDPOINTS))
        return found

    def waiver(self, model: str, endpoint: str) -> Waiver | None:
        """The waiver of a regression of this model's endpoint on this device, valid or expired, with its owner; None
        where there is none."""
        device = self.session.host.environment.gpu_name or self.session.platform
        return waiver_for(self.waivers, model, endpoint, device)

    def of(self, model: str) -> Gated:
        """The gate of a model, run at the first request. Raises the error that ended it, such as EngineFailed."""
        if error := self.failed.get(model):
            raise type(error)(f"the gate of {short_name(model)} was broken off: {error.cause}", error.hint)
        if model not in self.found:
            try:
                gated = run_gate(self.session, model)
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
    """Does a gate run among other tests, so that it makes SHORT pairs, at the large load alone, and decides what is no
    matter of chance? A simulated one takes no time and runs in full."""
    return not session.options.gate and session.platform != "simulated"


def check_gate(session: Session, model: str) -> None:
    """Raises BadUsage, naming the side, where a gate could not be carried out or judged: before anything is started."""
    _ = Gates(session).waivers, read_calibrations(beside(Path(session.options.records)))
    loads_of(session, model)
    for side, spec in sides(session.planner.spec(model), session.options).items():
        with naming(f"the {side}"):
            check_fits(spec, session.planner.workload(model))
            if not session.options.plan:  # a plan is made without a GPU too
                session.planner.environment(spec)


def run_gate(session: Session, model: str) -> Gated:
    """Measure pairs until the outcome is known, or there are enough of them."""
    options, terms, began = session.options, session.gate_terms, time.monotonic()
    one = OneGate(session, model)
    if one.specs["baseline"] == one.specs["candidate"]:
        session.notes.append(f"both sides of the gate of {short_name(model)} are the same: what differs is noise")
    found, gated = one.go_on()
    try:
        if gated is None or not _is_over(gated, session):
            one.warm_up(found)
            there = {pair.number for pair in pairs_of(found)}
            numbers = [number for number in range(1, terms.pairs + MAX_DROPPED + 1) if number not in there]
            with closing(one.pairs(numbers)) as pairs:
                for launched in pairs:
                    found += launched
                    gated = judge_gate(found, terms)
                    if _is_over(gated, session):
                        break
        assert gated is not None
        traced = one.traced(gated.failing_load) if options.profile and not options.calibrate else ""
    except KeyboardInterrupt:
        if gated:  # the last screen says how far it came
            session.gates.append(gated)
        raise
    finally:
        session.devices.pool.close()
    if not is_short(session):
        took_s = time.monotonic() - began
        took = f"{took_s / 60:.1f} minutes" if took_s >= 60 else f"{took_s:.0f} s"
        session.notes.append(f"the gate of {short_name(model)} took {took}, {len(gated.pairs)} pairs count")
    if traced:
        session.notes.append(traced)
    return gated


def launches_left(session: Session, model: str, launched: Collection[Engines] = ()) -> tuple[int, int]:
    """Launches that do not count, one of each side, and those that a clear case measures then: to the next look at its
    pairs, or of a calibration all. launched: what other tests will have launched before."""
    options, terms = session.options, session.gate_terms
    one = OneGate(session, model)
    found, gated = one.go_on()
    there = len(gated.pairs) if gated else 0
    goal = SHORT if is_short(session) else terms.pairs if options.calibrate else next_look(there, terms)
    if goal is None or (gated and _is_over(gated, session)):
        return 0, 0
    return len(one.cold(found, launched)), 2 * (goal - there)


def in_view_of_noise(session: Session, gated: Gated) -> Gated:
    """Keep the noise of a calibration; tell a gate what such noise lets it find, where that is known of this runner."""
    path = beside(Path(session.options.records))
    if session.options.calibrate:
        kept = _calibrated(gated)
        keep(path, kept)
    elif not gated.pairs:
        return gated
    elif (known := find(path, place_of(gated))) is None:
        if session.platform != "simulated":  # whose noise is that of a formula
            unknown = f"no calibration of {gated.model} on this host"
            session.notes.append(f"{unknown}: --slm-calibrate measures what a gate can detect")
        return gated
    else:
        kept = known
    session.notes.append(calibration_text(gated.model, kept.calibration, kept.measured_at))
    return weaker(gated, kept.calibration)


def _calibrated(gated: Gated) -> StoredNoise:
    series = gated_series(gated.pairs)
    noise = noise_of(series)
    if len(noise.costs) < FEWEST_PAIRS:
        few = f"{len(noise.costs)} pairs of {gated.model} are valid and have every figure, too few"
        raise BadUsage(few, "a quieter host: see doctor")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return StoredNoise(place_of(gated), now, noise, calibrate(noise, series, gated.terms))


def _is_over(gated: Gated, session: Session) -> bool:
    """Decides whether a gate ends: all pairs measured, too many dropped, or an outcome that is settled at a planned
    look. Between two looks the outcome counts for nothing. A calibration has no look, nor has a short gate."""
    there, dropped = len(gated.pairs), len(gated.dropped)
    if is_short(session):
        return there + dropped >= SHORT
    if there >= gated.terms.pairs or dropped > MAX_DROPPED:
        return True
    if session.options.calibrate:
        return False
    looked = there > 0 and next_look(there - 1, gated.terms) == there
    return looked and gated.settled


def order(number: int) -> tuple[Side, Side]:
    """AB, BA, BA, AB, and again: neither a drift of the host nor a first place favours a side."""
    baseline, candidate = SIDES
    return (baseline, candidate) if number % 4 in (0, 1) else (candidate, baseline)


def sides(spec: EngineSpec, options: Options) -> dict[Side, EngineSpec]:
    """The specification of each side: the engine of the options, with the side's own interpreter, variables and
    arguments. Raises BadUsage for an argument of the wrong type."""
    found: dict[Side, EngineSpec] = {}
    for side in SIDES:
        python, env, arguments = options.side_of(side)
        if side == "candidate" and options.simulate and options.simulate_slowdown:
            arguments = (*arguments, ("slowdown", options.simulate_slowdown))
        with naming(f"the {side}"):
            own = spec.with_arguments(arguments)
            found[side] = replace(own, python=python or spec.python, env=joined(spec.env, env))
    return found


def loads_of(session: Session, model: str) -> tuple[ClosedLoop, ...]:
    """Small load and large one: the ends of `--slm-concurrency`; by default one, the model's batch of table 1, for how
    fast small loads are the host decides. The small one has a longer window; a short gate has the large one alone."""
    planner, asked = session.planner, session.options.concurrency
    large = PUBLISHED.get(short_name(model), LARGE_LOAD[session.platform])
    ends = sorted({asked[0], asked[-1]} if asked else {large})
    loads = tuple(planner.load(n) for n in (ends[-1:] if is_short(session) else ends))
    if len(loads) > 1:
        loads = (replace(loads[0], window_s=SMALL_WINDOWS * loads[0].window_s), *loads[1:])
    for load in loads:
        if why := planner.overload(model, load):
            raise BadUsage(f"{short_name(model)} at {load.concurrency} in flight: {why}", "--slm-concurrency with less")
    return loads


class OneGate:
    """One model's gate on its way."""

    def __init__(self, session: Session, model: str) -> None:
        self.session, self.model = session, model
        self.specs = sides(session.planner.spec(model), session.options)
        self.id = uuid.uuid4().hex[:12]
        self.workload: Workload = session.planner.workload(model)
        self.loads = loads_of(session, model)
        self.reference: Outputs = ()  # of the first baseline

    def go_on(self) -> tuple[list[Measurement], Gated | None]:
        """The measurements of this gate in the resumed archive, and their outcome; the gate takes over the stored id.
        Returns an empty list and None where nothing fits. Of several fitting gates the last counts. The terms must be
        the same: a gate whose terms changed after a look at it would err more often than they say."""
        if not self.session.resumes:
            return [], None
        contents = read(self.session.source, skip_damaged=self.session.options.skip_damaged)
        of = f"the gate of {short_name(self.model)}"
        for gated, assumed in reversed([*stored_gates(contents.measurements, contents.plans)]):
            found = [m for m in contents.measurements if m.paired and m.paired.gate == gated.gate]
            if gated.terms == self.session.gate_terms and not assumed and all(map(self._asks, found)):
                self.id = gated.gate
                told = [m.paired.outputs for m in found if m.paired and m.paired.side == "baseline"]
                self.reference = next(filter(None, told), ())
                there = f"{counted(len(pairs_of(found)), 'pair')} of launches in {self.session.source}"
                self.session.note(f"{of} goes on from {there}")
                return found, gated
        self.session.note(
            f"{of} begins anew: {self.session.source} has none of the same sides, loads, caches and terms"
        )
        return [], None

    def _asks(self, m: Measurement) -> bool:
        """Would this gate measure it? On whatever host of the kind: a pair is compared within itself."""
        assert m.paired
        spec, how = self.specs[m.paired.side], self.session.options.gate_caches
        asked = spec, self.session.planner.environment(spec).key, self.workload.hash, how
        return (m.spec, m.environment.key, m.workload.hash, m.paired.caches) == asked and m.load in self.loads

    def cold(self, found: Sequence[Measurement], launched: Collection[Engines] = ()) -> tuple[Side, ...]:
        """Sides of which nothing was launched since this host was booted. Two that are the same are one, and what the
        run's other tests launched, or will have, is such a launch too."""
        host = self.session.host.environment.host
        same = self.specs["baseline"] == self.specs["candidate"]  # else each has caches of its own
        measured = [*found, *(self.session.results.measurements() if same else ())]
        there = {m.spec for m in measured if host and m.environment.host == host} | set(launched if same else ())
        first: dict[EngineSpec, Side] = {}
        for side, spec in self.specs.items():
            first.setdefault(spec, side)
        return tuple(side for spec, side in first.items() if spec not in there)

    def warm_up(self, found: Sequence[Measurement]) -> None:
        """A launch that does not count: it reads its files from disk, and fills caches that stay warm."""
        if self.session.platform != "simulated":
            list(self._in_turn([(side, WARM_UP) for side in self.cold(found)]))

    def pairs(self, numbers: Sequence[int]) -> Generator[list[Measurement]]:
        """Yields each pair when it has ended. Where the host has enough cores, two pairs are launched at once and wait
        for their turns. Imports take as long as the rest of a start."""
        at_once = PAIRS_AT_ONCE if (self.session.host.environment.cores or 0) >= MANY_CORES else 1
        for first in range(0, len(numbers), at_once):
            some = numbers[first : first + at_once]
            with closing(self._in_turn([(side, number) for number in some for side in order(number)])) as launches:
                yield from ([*one, *other] for one, other in zip(launches, launches))

    def _in_turn(self, asked: Sequence[tuple[Side, int]]) -> Generator[list[Measurement]]:
        """Yields what a fresh launch of each side measured, an empty list for a warm-up. asked: each side with the
        number of its pair, or `WARM_UP`."""
        with ExitStack() as undo:
            launches = [(self.specs[side], undo.enter_context(self._caches(side))) for side, _ in asked]
            starts = undo.enter_context(abreast(self.session.devices.pool, launches))
            for place, ((side, number), start) in enumerate(zip(asked, starts)):
                with naming(f"the {side}, {f'pair {number}' if number else 'before the first pair'}"):
                    engine = start()
                    found = self._launched(number, engine, side, second=bool(place % 2)) if number else []
                yield found

    def _caches(self, side: Side) -> AbstractContextManager[Mapping[str, str]]:
        return caches(self.session.options.gate_caches, side, self.specs)

    def _launched(self, number: int, engine: Engine, side: Side, second: bool) -> list[Measurement]:
        engine.differ(f"{side} {number}")
        paired = GateLaunch(self.id, number, side, second, caches=self.session.options.gate_caches)
        weights = self.specs[side].load_format
        if number == 1:  # once is enough: whoever answers otherwise does so always
            paired = replace(paired, outputs=engine.outputs(self.workload, *ASKED[weights]))
        if side == "baseline":
            self.reference = self.reference or paired.outputs
        if weights == "auto" and number <= SCORED and self.reference:
            paired = replace(paired, scores=engine.scores(self.workload, self.reference))
        return [m for load in self.loads for m in self._measured(self.specs[side], load, paired)]

    def _measured(self, spec: EngineSpec, load: ClosedLoop, paired: GateLaunch) -> list[Measurement]:
        name = f"{short_name(self.model)} at {load.concurrency}, {paired.side}, pair {paired.pair}"
        case, repeats = self.session.planner.case(spec, [self.workload], [load]), list[ReplicaGroup]()
        while count_missing(repeats, 1, is_clean):
            repeats.append(self.session.executor.measure_once(case, name, paired))
        return [m for group in repeats for m in group]

    def traced(self, load: Load | None) -> str:
        """One more launch of each side serves `load` under its profiler. Says where the traces are, or why there are
        none: what was measured stands. Nothing where there is no load."""
        if load is None:
            return ""
        of = f"{short_name(self.model)} at {load.max_concurrency}"
        return f"traces of {of}: {'; '.join(f'{side}: {self._trace(side, load)}' for side in SIDES)}"

    def _trace(self, side: Side, load: Load) -> str:
        folder = Path(self.session.options.profile).absolute() / short_name(self.model) / side
        try:
            folder.mkdir(parents=True, exist_ok=True)
            before = set(folder.iterdir())
            with self._caches(side) as own:
                launch = self.specs[side], {**own, PROFILE_FOLDER: str(folder)}
                with abreast(self.session.devices.pool, [launch]) as (start,):
                    problem = start().profile(self.workload, load)
        except Exception as error:  # whatever spoils a trace, the verdict stands; a log's end is no part of a note
            return f"none ({str(error).partition(ENDS_WITH)[0]})"
        written = sorted(str(path) for path in set(folder.iterdir()) - before)
        return ", ".join(written) or f"none ({problem or 'its profiler wrote nothing'})"
