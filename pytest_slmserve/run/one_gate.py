"""Gate of one model while it is measured: pairs of fresh launches until the outcome is known.

In a pair the sides use the device one after the other (`OneGate`), or both at once with alternating windows
(`SideBySide`). `StartGate` measures only starts.
"""

import math
import time
import uuid
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count
from pathlib import Path

from pytest_slmserve.analysis.claims.evidence import PUBLISHED
from pytest_slmserve.analysis.claims.table import stored_gates
from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.gate import decision
from pytest_slmserve.analysis.gate.launch_pairs import SIDES, Gated, judge_gate, pairs_of
from pytest_slmserve.analysis.gate.side_by_side import FIRST_PAIRS, THROWN_AWAY
from pytest_slmserve.analysis.gate.starts import FIRST, judge_starts
from pytest_slmserve.analysis.gate.windows import (
    PairOfWindows,
    judge_windows,
    wanted,
    windows_that_count,
)
from pytest_slmserve.analysis.metrics.validity import LONGER_WINDOW, check, is_clean
from pytest_slmserve.archive import baselines
from pytest_slmserve.engines.base import PROFILE_FOLDER, Engine, Outputs
from pytest_slmserve.engines.pool import abreast
from pytest_slmserve.engines.server import caches
from pytest_slmserve.engines.simulated import START_S
from pytest_slmserve.options.table import Options, joined
from pytest_slmserve.plan import cases
from pytest_slmserve.report.gate import beside_texts
from pytest_slmserve.report.text_table import counted, short_path
from pytest_slmserve.run.executor import count_missing
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import ENDS_WITH, BadUsage, Caches, EngineFailed, Side, naming
from pytest_slmserve.schema.kv_cache import check_arguments, no_room
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import GateLaunch, Measurement, ReplicaGroup
from pytest_slmserve.schema.specs import SLEEP_MODE, ClosedLoop, Engines, EngineSpec, OpenLoop, Workload
from pytest_slmserve.telemetry.gpu import BusyClock

LONGER = 4  # factor for a window that was too short
SHORT = 2  # pairs of a gate among other tests, because each takes most of a minute
PAIRS_AT_ONCE, MANY_CORES = 2, 8  # interim analyses follow even numbers of pairs; an importing engine needs two cores
WARM_UP = 0  # in place of a pair's number
# Requests and their tokens, for comparing outputs: with real weights as many as a verdict needs.
ASKED = {"dummy": (4, 32), "auto": (64, 16)}
SCORED = 2  # pairs whose launches score the baseline's tokens: two of the baseline, to know the scatter
SMALL_WINDOWS = 4  # times the window of the options, because few requests have few tokens and depend on the host
LARGE_LOAD = {"cuda": 256, "cpu": 64, "simulated": 256}  # of a model that is not in table 1


def is_short(session: Session) -> bool:
    """Return whether a gate runs among other tests, with only SHORT pairs at the large load, and without judging speed.

    A simulated gate takes no time and runs in full.
    """
    return not session.options.gate and session.platform != "simulated"


def order(number: int) -> tuple[Side, Side]:
    """Return the sides of a pair in the order of launching: AB, BA, BA, AB, so that drift and place favor no side."""
    baseline, candidate = SIDES
    return (baseline, candidate) if number % 4 in (0, 1) else (candidate, baseline)


def sides(spec: EngineSpec, options: Options) -> dict[Side, EngineSpec]:
    """Return the engine of each side: `spec` with the side's interpreter, variables and arguments."""
    found: dict[Side, EngineSpec] = {}
    for side in SIDES:
        python, env, arguments = options.side_of(side)
        if side == "candidate" and options.simulate and options.simulate_slowdown:
            slow = options.simulate_slowdown
            planted = ("start_s", START_S * (1 + slow)) if options.gate_launches == "start" else ("slowdown", slow)
            arguments = (*arguments, planted)
        with naming(f"the {side}"):
            own = spec.with_arguments(arguments)
            check_arguments(own)
            found[side] = replace(own, python=python or spec.python, env=joined(spec.env, env))
    return found


def loads_of(session: Session, model: str) -> tuple[ClosedLoop, ...]:
    """Return the ends of `--slm-concurrency`, the smaller one with a longer window.

    By default, and in a short gate, it is only the large load, because small loads depend on the host.
    """
    planner, chosen = session.planner, session.options.concurrency
    large = PUBLISHED.get(short_name(model), LARGE_LOAD[session.platform])
    ends = sorted({chosen[0], chosen[-1]} if chosen else {large})
    loads = tuple(planner.load(n) for n in (ends[-1:] if is_short(session) else ends))
    if len(loads) > 1:
        loads = (replace(loads[0], window_s=SMALL_WINDOWS * loads[0].window_s), *loads[1:])
    for load in loads:
        if why := no_room(planner.spec(model), planner.workload(model).longest, load.concurrency):
            raise BadUsage(
                f"{short_name(model)} at concurrency {load.concurrency}: {why}", "Use a smaller --slm-concurrency."
            )
    return loads


def as_long_as_may_be(loads: Sequence[ClosedLoop]) -> list[ClosedLoop]:
    """Return the loads with each length of window that they may get."""
    times = (LONGER**often for often in range(decision.MAX_DROPPED + 1))
    return [replace(load, window_s=n * load.window_s) for n in times for load in loads]


class OneGate:
    """Gate of one model while it is measured.

    Attributes:
        found: measurements so far.
        gated: their evaluation, if there is one.
    """

    beside = False  # whether both sides of a pair live on the device at once

    def __init__(self, session: Session, model: str) -> None:
        """Continue the last fitting gate of the resumed results file, if any.

        Sides, requests, loads, caches and the kind of host must be the same, but not the host, because a pair is
        compared within itself. The terms must be the same, because changed terms after an interim analysis would cause
        more errors.
        """
        self.session, self.model, self.title = session, model, f"the gate of {short_name(model)}"
        self.id, self.terms, self.most = uuid.uuid4().hex[:12], session.gate_terms, session.gate_terms.pairs
        self.states: tuple[Caches, ...] = (session.options.gate_caches,)  # of caches, for the launches of a side
        self.specs: Mapping[Side, EngineSpec] = {}
        self.loads: tuple[ClosedLoop, ...] = ()
        self.prepare()
        self.possible = as_long_as_may_be(self.loads)
        self.reference: Outputs = ()  # of the first baseline
        self.found: list[Measurement] = []
        self.gated: Gated | None = None
        if (stored := session.resumed) is None:
            if session.options.resume:
                session.note(f"{self.title} starts again: there is no results file {session.source} yet")
            return
        environment, states = session.planner.environment, set(self.states)
        wanted = {side: (spec, environment(spec).key, self.workload.hash) for side, spec in self.specs.items()}
        for gated, assumed in reversed([*stored_gates(stored.measurements, stored.plans)]):
            parts = [(m, part) for m in stored.measurements if (part := m.paired) and part.gate == gated.gate]
            there = {m.load for m, _ in parts}
            measured: dict[int, ClosedLoop] = {load.concurrency: load for load in self.possible if load in there}
            whole = len(measured) == len(self.loads)  # else its first pair was interrupted before the last load
            if (
                assumed
                or gated.terms != self.terms
                or not (whole or all(part.pair <= 1 for _, part in parts))
                or {part.caches for _, part in parts} != states
                or not all(
                    wanted[part.side] == (m.spec, m.environment.key, m.workload.hash) and m.load in self.possible
                    for m, part in parts
                )
            ):
                continue
            outputs = (part.outputs for _, part in parts if part.side == "baseline" and part.outputs)
            self.id, self.reference = gated.gate, next(outputs, ())
            self.found = [m for m, _ in parts]
            self.gated = self.judge() if whole else None  # with the noise of this host, as while it was measured
            requested = {load.concurrency: load for load in self.possible[: len(self.loads)]}
            self.loads = tuple((requested | measured).values())
            pairs = f"{counted(len(self.there()), 'pair')} of launches in {session.source}"
            session.note(f"{self.title} continues from {pairs}")
            return
        same = "sides, kind of host, loads, caches and terms"
        session.note(f"{self.title} starts again: {session.source} has none of the same {same}")

    def prepare(self) -> None:
        """Set the engine of each side, the requests and the loads."""
        planner = self.session.planner
        self.specs = sides(planner.spec(self.model), self.session.options)
        self.workload: Workload = planner.workload(self.model)
        self.loads = loads_of(self.session, self.model)

    def judge(self) -> Gated:
        return judge_gate(self.found, self.terms)

    def there(self) -> set[int]:
        """Return the numbers of the pairs of launches that were measured at all loads."""
        return {pair.number for pair in pairs_of(self.found)} if self.gated else set()

    @property
    def launch_s(self) -> float:
        """Rough number of seconds that one launch is measured."""
        return sum(cases.repeat_estimate_s(self.specs["baseline"], self.workload, load) for load in self.loads)

    def run(self) -> Gated:
        """Measure pairs until the outcome is known, or all of them are measured."""
        session, began = self.session, time.monotonic()
        if self.specs["baseline"] == self.specs["candidate"]:
            session.notes.append(f"both sides of {self.title} are the same: what differs is noise")
        try:
            if not self.over:
                if session.platform != "simulated":  # warm-up launches read files from disk and fill caches
                    list(self.launch_in_turn([(side, WARM_UP) for side in self.cold()]))
                there = self.there()
                numbers = (number for number in range(1, self.most + decision.MAX_DROPPED + 1) if number not in there)
                launches = [(side, number) for number in numbers for side in order(number)]
                started = time.monotonic()
                with closing(self.launch_in_turn(launches)) as each:
                    for made, _ in enumerate(zip(each, each), 1):
                        self.gated = self.judge()
                        session.pair_s[self.model] = made, (time.monotonic() - started) / made
                        if self.over:
                            break
            assert self.gated is not None
            traced = self.traced(self.gated) if session.options.profile and not session.options.calibrate else ""
        except KeyboardInterrupt:
            if self.found:  # the summary shows its progress, also in the interrupted launch
                session.gates.append(self.judge())
            raise
        finally:
            session.devices.pool.close()
        if not is_short(session):
            took_s = time.monotonic() - began
            took = f"{took_s / 60:.1f} minutes" if took_s >= 60 else f"{took_s:.0f} s"
            session.notes.append(
                f"{self.title} took {took}, {counted(len(self.gated.pairs), 'pair')} of launches count"
            )
        session.notes += [traced] if traced else []
        return self.gated

    @property
    def over(self) -> bool:
        """True if all pairs are measured, too many were dropped, or an interim analysis settles the outcome.

        A calibration and a short gate have no interim analysis.
        """
        if (gated := self.gated) is None:
            return False
        there, dropped = len(gated.pairs), len(gated.dropped)
        if is_short(self.session):
            return there + dropped >= SHORT
        if there >= self.most or dropped > decision.MAX_DROPPED:
            return True
        looks = there > 0 and decision.next_look(there - 1, gated.terms) == there
        return looks and not self.session.options.calibrate and gated.settled

    def cold(self, launched: Collection[Engines] = ()) -> tuple[Side, ...]:
        """Return the sides that were not launched since this host booted.

        If both are equal they count as one, and launches of other tests count, too.
        """
        host = self.session.host.environment.host
        same = self.specs["baseline"] == self.specs["candidate"]  # else each has its own caches
        measured = [*self.found, *(self.session.results.measurements() if same else ())]
        there = {m.spec for m in measured if host and m.environment.host == host} | set(launched if same else ())
        return tuple(side for side in (SIDES[:1] if same else SIDES) if self.specs[side] not in there)

    def launches_left(self, launched: Collection[Engines] = ()) -> tuple[int, int]:
        """Return the remaining numbers of warm-up launches, and of launches until the next interim analysis.

        A calibration makes all of them.

        Args:
            launched: engines that other tests will have launched before.
        """
        there, short = len(self.gated.pairs) if self.gated else 0, is_short(self.session)
        goal = decision.next_look(there, self.terms)
        if short or self.session.options.calibrate:
            goal = SHORT if short else self.most
        ended = any(gated.model == short_name(self.model) for gated in self.session.gates)
        if goal is None or self.over or ended:
            return 0, 0
        return len(self.cold(launched)), self.launches_of_pair * (goal - there)

    @property
    def launches_of_pair(self) -> int:
        return len(SIDES) * len(self.states)

    def launch_in_turn(self, launches: Sequence[tuple[Side, int]]) -> Generator[None]:
        """Measure each launch that is no warm-up, and yield after it.

        With enough cores, two pairs are launched at once and wait for their turns, because imports take half of a
        start.

        Args:
            launches: side and number of the pair, or `WARM_UP`. The launches of a pair follow each other.
        """
        how, cores = self.session.options.gate_caches, self.session.host.environment.cores or 0
        at_once = 2 * (PAIRS_AT_ONCE if cores >= MANY_CORES else 1)
        for first in range(0, len(launches), at_once):
            some = launches[first : first + at_once]
            with ExitStack() as undo:
                wanted = [(self.specs[side], undo.enter_context(caches(how, side, self.specs))) for side, _ in some]
                starts = undo.enter_context(abreast(self.session.devices.pool, wanted, self.beside))
                for place, ((side, number), start) in enumerate(zip(some, starts)):
                    with naming(f"the {side}, {f'pair {number}' if number else 'before the first pair'}"):
                        engine = start()
                        if number:
                            self.serve(number, engine, side, second=bool(place % 2))
                    yield

    def measure(
        self,
        case: cases.Case,
        name: str,
        paired: GateLaunch,
        engine: Engine | None = None,
        clock: BusyClock | None = None,
    ) -> ReplicaGroup:
        """Measure one repeat, write it, and keep it for the evaluation."""
        group = self.session.executor.measure_once(case, name, paired, engine, clock)
        self.found += group
        return group

    def serve(self, number: int, engine: Engine, side: Side, second: bool) -> None:
        """Measure one launch at each load, with outputs and scores if this pair has them.

        Args:
            second: whether it is the second launch of its pair.
        """
        engine.differ(f"{side} {number}")
        spec = self.specs[side]
        paired = self.answered(
            GateLaunch(self.id, number, side, second, caches=self.session.options.gate_caches), engine
        )
        for place, load in enumerate(self.loads):
            name, tried = f"{short_name(self.model)} at {load.concurrency}, {side}, pair {number}", list[ReplicaGroup]()
            while count_missing(map(is_clean, tried), 1):
                case = self.session.planner.case(spec, [self.workload], [self.loads[place]])
                group = self.measure(case, name, paired)
                if not self.lengthened(place, group):
                    tried.append(group)

    def lengthened(self, place: int, group: ReplicaGroup) -> bool:
        """Lengthen the windows of a load if this one had too few steps or no finished request.

        Return whether it did.
        """
        load = self.loads[place]
        longer = replace(load, window_s=LONGER * load.window_s)
        if longer not in self.possible or not any(LONGER_WINDOW in text for m in group for text in check(m).problems):
            return False
        self.loads = (*self.loads[:place], longer, *self.loads[place + 1 :])
        at = f"{short_name(self.model)} at {load.concurrency}"
        self.session.note(f"windows of {longer.window_s:g} s at {at}, as those of {load.window_s:g} s were too short")
        return True

    def answered(self, paired: GateLaunch, engine: Engine) -> GateLaunch:
        """Return the launch's part in the gate with its outputs and scores, if this pair has them."""
        load_format = engine.spec.load_format
        if self.workload.spec.kind != "generate":  # there are no tokens to compare
            return paired
        if paired.pair == 1:  # once is enough, because an engine with other outputs always has them
            paired = replace(paired, outputs=engine.outputs(self.workload, *ASKED[load_format]))
        if paired.side == "baseline":
            self.reference = self.reference or paired.outputs
        if load_format == "auto" and paired.pair <= SCORED and self.reference:
            paired = replace(paired, scores=engine.scores(self.workload, self.reference))
        return paired

    def traced(self, gated: Gated) -> str:
        """Profile the load of the first failing endpoint with one more launch of each side.

        Return a sentence with the paths of the traces or the problem, or "" if no endpoint of a load fails.
        """
        if gated.slow_load is None:
            return ""
        load = gated.pairs[0].baseline.at_each_load[gated.slow_load].load
        written, place = [], Path(self.session.options.profile).absolute() / short_name(self.model)
        for side in SIDES:
            folder = place / side
            try:
                folder.mkdir(parents=True, exist_ok=True)
                before = set(folder.iterdir())
                with caches(self.session.options.gate_caches, side, self.specs) as own:
                    launch = self.specs[side], {**own, PROFILE_FOLDER: str(folder)}
                    with abreast(self.session.devices.pool, [launch]) as (start,):
                        problem = start().profile(self.workload, load) or "its profiler wrote nothing"
                paths = ", ".join(sorted(f"{side}/{path.name}" for path in set(folder.iterdir()) - before))
                written.append(paths or f"{side}: none ({problem})")
            except Exception as error:  # a failed trace does not change the verdict
                written.append(f"{side}: none ({str(error).partition(ENDS_WITH)[0]})")
        at = f"{short_name(self.model)} at {load.max_concurrency}"
        return f"traces of {at}, in {short_path(place)}: {'; '.join(written)}"


BRIEF = 16  # output tokens of the request after a start
NAPS = 3  # of each launch


class StartGate(OneGate):
    """Gate of only the start.

    One engine starts at a time, serves one request, and ends: by default first without compiled code, and then with it.
    If both sides have a sleep mode, they also sleep and wake.
    """

    def prepare(self) -> None:
        session, planner = self.session, self.session.planner
        self.terms = session.gate_terms.of_starts
        self.most = self.terms.pairs
        if session.options.source["gate_caches"] == "default":
            self.states = "cold", "warm"
        self.specs = sides(planner.spec(self.model), session.options)
        usual = planner.workload(self.model)
        lengths = round(usual.mean_prompt_tokens), min(round(usual.mean_output_tokens), BRIEF)
        self.workload = planner.workload(self.model, {"lengths": lengths})
        self.loads = (FIRST,)
        self.sleeps = all(spec.arguments.get(SLEEP_MODE) for spec in self.specs.values())

    def judge(self) -> Gated:
        return judge_starts(self.found, self.terms)

    def there(self) -> set[int]:
        return {pair.number for pair in self.gated.pairs} if self.gated else set()

    def cold(self, launched: Collection[Engines] = ()) -> tuple[Side, ...]:
        """Return sides whose launches do not count, twice if only warm starts are judged.

        The first launch compiles, and the second one is slow as well, while it profiles or captures: on an H200,
        OPT-125M of vLLM 0.26.0 took 46, 27, 27 and 22 s to start from the second launch on. Kernels that it loads from
        the caches for the first time may be compiled once more.
        """
        return super().cold(launched) * (1 if "cold" in self.states else 2)

    @property
    def launch_s(self) -> float:
        first_s = cases.DEFAULTS[self.specs["baseline"].platform].first_s  # of one that compiles
        return first_s * self.states.count("cold") / len(self.states)

    def launch_in_turn(self, launches: Sequence[tuple[Side, int]]) -> Generator[None]:
        """Measure each side of a pair in each state of the caches, and yield after it."""
        for side, number in launches:
            states = self.states if number else ("warm",)
            with caches(states[0], side, self.specs) as folders:
                for how in states:
                    name = f"the {side}, {f'pair {number}, {how} caches' if number else 'before the first pair'}"
                    with abreast(self.session.devices.pool, [(self.specs[side], folders)]) as (start,), naming(name):
                        engine, second = start(), side != order(number)[0]
                        if number:
                            self.started(engine, GateLaunch(self.id, number, side, second, caches=how))
            yield

    def started(self, engine: Engine, paired: GateLaunch) -> None:
        engine.differ(f"{paired.side} {paired.pair} {paired.caches}", cold=paired.caches == "cold")
        try:
            naps = [engine.nap() for _ in range(NAPS * self.sleeps)]
        except EngineFailed as error:  # a missing value never passes
            self.session.note(f"the {paired.side} does not sleep: {error.cause}")
            naps = []
        paired = replace(paired, sleep_s=tuple(slept for slept, _ in naps), wake_s=tuple(woke for _, woke in naps))
        name = f"{short_name(self.model)}, a start with {paired.caches} caches, {paired.side}, pair {paired.pair}"
        self.measure(self.session.planner.case(engine.spec, [self.workload], [FIRST]), name, paired, engine)


ANSWER = 128  # output tokens of a request in a window at most: windows of a second or two alternate
LEAST_WINDOW_S = 1.0  # estimated; busy seconds are counted in ticks of 0.1 s
GAP_S = 0.3  # between windows: the GPU is idle for a whole tick, and a window is written
CALIBRATING = 8  # launches of two equal sides
LIKELY_PAIRS = 12  # of windows in a launch


def halves(session: Session, model: str) -> tuple[dict[Side, EngineSpec], Workload, tuple[ClosedLoop, ...]]:
    """Return the engine of each side with half of the memory, the requests, and the windows of the loads.

    A window has as many bursts of requests as take a second. If the sides do not fit on the device, BadUsage is raised.
    """
    planner, options = session.planner, session.options
    whole = planner.workload(model)
    if whole.spec.turns > 1:
        raise BadUsage("the turns of a conversation cannot be served in short windows", "--slm-gate-launches=apart")
    prompt, answer = round(whole.mean_prompt_tokens), round(whole.mean_output_tokens)
    workload = planner.workload(model, {"lengths": (prompt, min(answer, ANSWER))})
    specs = sides(planner.spec(model, gpu_memory_utilization=options.gpu_memory_utilization / 2), options)
    windows = []
    for load in loads_of(session, model):
        for side, spec in specs.items():
            if why := no_room(spec, workload.longest, load.concurrency):
                raise BadUsage(f"the {side} has half of the memory, and then {why}", "--slm-gate-launches=apart")
        alike = replace(specs["baseline"], platform="cuda")
        round_s = cases.repeat_estimate_s(alike, workload, OpenLoop(requests=load.concurrency))
        requests = load.concurrency * max(1, math.ceil(LEAST_WINDOW_S / round_s))
        windows.append(ClosedLoop(load.concurrency, requests=requests, ramp_up="burst"))
    return specs, workload, tuple(windows)


class SideBySide(OneGate):
    """Gate whose sides share one GPU, each with half of the memory. A window is a burst of requests to one of them."""

    beside = True

    def __init__(self, session: Session, model: str) -> None:
        """Continue with the number of windows that the first launch wanted."""
        super().__init__(session, model)
        for pair in self.gated.pairs[:1] if self.gated else ():  # which may have been interrupted
            windows = zip(*(launch.measurements for launch in pair.launches))
            for load, those in grouped(windows, lambda both: both[0].load).items():
                self.pairs_wanted[load] = max(len(those), wanted(those, self.terms))

    def prepare(self) -> None:
        self.terms = self.session.gate_terms.with_both_at_once
        self.most = CALIBRATING if self.session.options.calibrate else self.terms.pairs
        self.clock: BusyClock | None = None
        self.living: dict[Side, Engine] = {}  # of the pair that is measured
        self.pairs_wanted = dict[ClosedLoop, int]()
        self.specs, self.workload, self.loads = halves(self.session, self.model)

    def run(self) -> Gated:
        gated = super().run()
        self.session.notes += beside_texts(gated.model, self.found)
        return gated

    def judge(self) -> Gated:
        gated = judge_windows(self.found, self.terms)
        if self.session.options.calibrate:
            return gated
        return baselines.judged_by_noise(gated, self.session.options.records)[0]

    def there(self) -> set[int]:
        return {pair.number for pair in self.gated.pairs} if self.gated else set()

    @property
    def launch_s(self) -> float:
        """Rough number of seconds of one launch: half of those of both engines."""
        spec = self.specs["baseline"]
        each = (cases.repeat_estimate_s(spec, self.workload, OpenLoop(requests=load.requests)) for load in self.loads)
        return sum((THROWN_AWAY + LIKELY_PAIRS) * (seconds + GAP_S) for seconds in each)

    @property
    def over(self) -> bool:
        """True if all launches are measured, or no further launch can decide anything."""
        if (gated := self.gated) is None or not gated.pairs:
            return False
        if len(gated.pairs) >= self.most or self.session.options.calibrate:
            return len(gated.pairs) >= self.most
        looks = len(gated.pairs) in gated.terms.looks(len(gated.pairs))
        return gated.settled and (looks or all(each.name in gated.refused for each in gated.gated))

    def cold(self, launched: Collection[Engines] = ()) -> tuple[Side, ...]:
        """Return no side, because the length of a start is not compared."""
        return ()

    def serve(self, number: int, engine: Engine, side: Side, second: bool) -> None:
        """Measure both sides once the second has started, and end both."""
        engine.differ(f"{side} {number}", beside=True)
        self.clock = self.clock or self.session.devices.busy_clock()
        self.living[side] = engine
        if number == 1 and self.session.options.calibrate:
            self.of_one(order(number)[0], (THROWN_AWAY + FIRST_PAIRS) * second)
        if second:
            for load in self.loads:
                self.in_turns(number, load)
            for each in self.living.values():
                each.close()
            self.living.clear()

    def of_one(self, side: Side, done: int) -> None:
        """Measure windows of one engine, numbered after `done`, with the other one idle or absent."""
        self.lap()
        for window in range(1, THROWN_AWAY + FIRST_PAIRS + 1):
            self.window(WARM_UP, self.loads[-1], done + window, side, False)

    def in_turns(self, number: int, load: ClosedLoop) -> None:
        """Measure windows of one load on both sides, in the order ABBA, until enough of them count."""
        counted_ones, decides = list[PairOfWindows](), load not in self.pairs_wanted
        self.lap()
        for window in count(1):
            if decides and counted_ones and len(counted_ones) % FIRST_PAIRS == 0:
                first, pairs = load not in self.pairs_wanted, wanted(counted_ones, self.terms)
                self.pairs_wanted[load] = pairs
                if first and pairs > LIKELY_PAIRS:
                    why = f"windows of {short_name(self.model)} at {load.concurrency} scatter"
                    self.session.say(f"{why}, so each launch of both sides has {pairs} pairs of them")
            most = self.pairs_wanted.get(load, FIRST_PAIRS)
            if len(counted_ones) >= most or window > THROWN_AWAY + most + decision.MAX_DROPPED:
                return
            turn: tuple[Side, ...] = SIDES if window % 2 else SIDES[::-1]
            both = [self.window(number, load, window, side, side != turn[0]) for side in turn]
            counted_ones += windows_that_count(both, self.clock is not None)[0]
        raise AssertionError("windows have no end")

    def lap(self) -> None:
        if self.clock:
            self.clock.lap()

    def window(self, number: int, load: ClosedLoop, window: int, side: Side, second: bool) -> Measurement:
        engine, spec = self.living[side], self.specs[side]
        paired = GateLaunch(self.id, number, side, second, caches=self.session.options.gate_caches, window=window)
        if window == 1 and load == self.loads[0]:
            paired = self.answered(paired, engine) if number else paired
        name = (
            f"{short_name(self.model)} at {load.concurrency}, {f'launch {number} of both sides' if number else 'alone'}"
        )
        case = self.session.planner.case(spec, [self.workload], [load])
        [found] = self.measure(case, name, paired, engine, self.clock)
        return found
