"""A gate: what each side is, that launches are fresh and take turns so that nothing favours a side, that it ends at
planned looks only, goes on where it was broken off, and is broken off once."""

import json
import math
import random
from dataclasses import replace
from itertools import chain, groupby, repeat
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from launches import launch, pairs
from refusals import refused
from simulated_sessions import FEW_STEPS, MODEL, stored

from pytest_slmserve.analysis.gate.decision import MAX_DROPPED, GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import SIDES, judge_gate
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.baselines import read_calibrations
from pytest_slmserve.engines import pool as pools
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan import planner as planners
from pytest_slmserve.run import gate, one_gate, session as sessions
from pytest_slmserve.run.executor import Devices, Executor, Results
from pytest_slmserve.run.gate import Gates, launches_left
from pytest_slmserve.run.one_gate import OneGate, is_short, loads_of, order, sides
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.telemetry.host import Host

STEADY = [*FEW_STEPS["engine_arg"], "scatter=0"]  # equal launches are equal
OTHER = {"side": ["candidate:arg=b_half=9"]}
SLOW = {"side": ["candidate:arg=t_inf=1000"]}
CALIBRATE = {"gate": None, "calibrate": True}


@pytest.fixture
def opened(opened):
    """Opens sessions that gate under one load; `start` takes the place of that of the simulated engine."""

    def open_session(start=SimulatedEngine, **given):
        one_load = {"gate": True, "gate_launches": "apart", "concurrency": "8", **FEW_STEPS, "engine_arg": STEADY}
        session = opened(**one_load | given)
        session.devices.pool = Pool(lambda spec, **_: start(spec))
        session.begin()
        return session

    return open_session


def real_session(session, start=SimulatedEngine, host=None, **given):
    """The same on a device that warms up; what it starts is simulated all the same."""
    words = {"gate": True, "models": MODEL, **FEW_STEPS, "concurrency": "8", "cpu": True, **given}
    planner = planners.Planner(read_options(words, {}, {}), "cpu", Host(Environment(platform="cpu", host=host), "none"))
    devices = Devices(planner, Pool(lambda spec, **_: start(spec)))
    return sessions.Session(Executor(devices, Results(), 2, archive=session.executor.archive))


def both_sides(session):
    return sides(session.planner.spec(MODEL), session.options)


def in_turn(session, numbers):
    """Specifications of whole pairs, in the order of launching."""
    both = both_sides(session)
    return [both[side] for number in numbers for side in order(number)]


def noisy(sd):
    """Launches whose speeds differ by chance."""
    chance = random.Random(0)
    return lambda spec: SimulatedEngine(spec, speed=math.exp(chance.gauss(0, sd)))


def faulty(launches, **faults):
    """The first so many launches have faults."""
    left = [1] * launches

    def start(spec):
        planted = left and left.pop()
        engine = SimulatedEngine(replace(spec, extra=(*spec.extra, *faults.items())) if planted else spec)
        engine.spec = spec
        return engine

    return start


SPEC = EngineSpec(MODEL, python="common", env=(("A", "1"),), extra=(("block_size", 16), ("max_num_seqs", 512)))
COMMON = replace(SPEC, extra=(("block_size", 16),), max_num_seqs=512)
GIVEN = [
    "baseline:python=old,arg=block_size=32",
    "candidate:env=A=2,env=PYTHONPATH=/checkout",
    "candidate:arg=max_num_batched_tokens=2048,arg=enforce_eager=true,arg=max_num_seqs=64",
]


@pytest.mark.parametrize(("given", "baseline", "candidate"), [
    ({}, {}, {}),
    ({"simulate_slowdown": "10%"}, {}, {"extra": (*COMMON.extra, ("slowdown", 0.1))}),
    ({"side": GIVEN}, {"python": "old", "extra": (("block_size", 32),)},
     {"env": (("A", "2"), ("PYTHONPATH", "/checkout")),
      "max_num_seqs": 64, "max_num_batched_tokens": 2048, "enforce_eager": True}),  # in place of those of both
])  # fmt: skip
def test_side_gets_own_arguments(given, baseline, candidate):
    options = read_options({"gate": True, "simulate": True, **given}, {}, {})
    assert sides(SPEC, options) == dict(zip(SIDES, (replace(COMMON, **baseline), replace(COMMON, **candidate))))


@pytest.mark.parametrize(("short", "model", "concurrency", "wanted"), [
    (False, MODEL, "1,2,4,32", {1: 8.0, 32: 2.0}),  # few requests are watched for longer
    (False, MODEL, "16", {16: 2.0}),
    (False, MODEL, None, {512: 2.0}),  # of table 1
    (False, "opt-350m", None, {256: 2.0}),
    (True, "opt-tiny", None, {64: 2.0}),  # which is not in it
    (True, MODEL, "2,16", {16: 2.0}),
])  # fmt: skip
def test_small_loads_get_longer_windows(opened, short, model, concurrency, wanted):
    session, given = opened(), {"models": model, "concurrency": concurrency, "window": "2"}
    session = real_session(session, gate=None, **given) if short else opened(**given)
    assert {load.concurrency: load.window_s for load in loads_of(session, model)} == wanted
    assert is_short(session) is short and (not short or launches_left(session, model) == (1, 4))


WAIVER = {"endpoint": "throughput", "model": MODEL, "device": "*", "until": "2030-01-01", "owner": "me", "reason": "-"}


@pytest.mark.parametrize(("given", "facts", "hint"), [
    ({"concurrency": "8,90000"}, ["90000"], "--slm-concurrency"),
    ({"side": ["candidate:arg=max_model_len=64"]}, ["the candidate", "64"], ""),
    *(({"side": [f"candidate:arg={argument}"]}, ["the candidate"], argument.partition("=")[0] + "=")
      for argument in ("max_num_seqs=many", "max_num_seqs=true", "enforce_eager=1", "dtype=16")),
    ({"waivers": "waivers.json"}, ["'beauty'"], "throughput"),
])  # fmt: skip
def test_impossible_gate_is_refused(opened, tmp_path, monkeypatch, given, facts, hint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "waivers.json").write_text(json.dumps([{**WAIVER, "endpoint": "beauty"}]), "utf-8")
    session = opened(**given)
    with refused(*facts, hint=hint):
        gate.check_gate(session, MODEL)
    assert session.devices.pool.starts == []


def test_side_interpreter_is_probed(opened, monkeypatch):
    asked = []

    def probe(platform, python, env):
        asked.append(python)
        if python == "/old/python":
            raise BadUsage(f"{python} has no vLLM", f"{python} -m pip install vllm")
        return Host(Environment(vllm="0.25"), "none")

    monkeypatch.setattr(planners, "probe", probe)
    gate.check_gate(real_session(opened(), side=["baseline:python=/old/python"], plan=True), MODEL)
    assert asked == []
    with refused("the baseline", "/old/python"):
        gate.check_gate(real_session(opened(), side=["baseline:python=/old/python"]), MODEL)
    session = real_session(opened(), side=["baseline:python=/older/python", "candidate:python=/new/python"])
    gate.check_gate(session, MODEL)
    assert asked == ["/old/python", "/older/python"], "the candidate's was probed when the session was made"
    assert [session.planner.environment(both_sides(session)[side]).vllm for side in SIDES] == ["0.25", None]


def test_gate_launches_take_turns(opened, tmp_path):
    assert [order(n)[0][0] for n in range(1, 9)] == list("bccbbccb")
    for first in range(8):
        when = {side: sum(2 * n + order(n).index(side) for n in range(first, first + 4)) for side in SIDES}
        assert when["baseline"] == when["candidate"]
    path = tmp_path / "waivers.json"
    path.write_text(json.dumps([WAIVER, {**WAIVER, "endpoint": "latency", "device": "simulated"}]), "utf-8")
    gates = Gates(opened(waivers=str(path)))
    assert gates.waiver(MODEL, "throughput").owner == "me" and gates.waiver(MODEL, "latency").device == "simulated"
    assert gates.waiver(MODEL, "energy") is gates.waiver("opt-350m", "throughput") is None
    assert Gates(opened()).waiver(MODEL, "throughput") is None, "no file, no waiver"
    session = opened(**OTHER, concurrency="4,16")
    gated = Gates(session).of(MODEL)
    assert len(gated.pairs) == 4 and session.devices.pool.current is None
    assert session.devices.pool.starts == in_turn(session, range(1, 5))
    found = stored(session)
    each = [[*group] for _, group in groupby(found, key=lambda m: m.launch)]
    assert len(each) == 8 == len({m.launch for m in found}), "no engine serves twice"
    assert [[m.load.concurrency for m in launched] for launched in each] == [[4, 16]] * 8
    places = [(m.paired.pair, m.paired.side, m.paired.second) for m, _ in each]
    assert places == [(n, side, second) for n in range(1, 5) for second, side in enumerate(order(n))]
    assert {m.paired.gate for m in found} == {gated.gate} and len({m.workload.hash for m in found}) == 1
    assert [len(m.paired.outputs) for m in found] == [4] * 4 + [0] * 12, "once is enough"
    assert session.notes[-1].endswith("4 pairs of launches count")
    assert not any("the same" in note for note in session.notes)
    # Each model has a gate, which is made once.
    session = opened(models="opt-125m,opt-350m")
    gates = Gates(session)
    found = [gates.of(model) for model in ("opt-125m", "opt-350m")]
    assert found[0].gate != found[1].gate and gates.of(MODEL) is found[0] and session.gates == found
    assert len(session.devices.pool.starts) == 16
    assert sum("are the same" in note for note in session.notes) == 2


@pytest.mark.parametrize(
    ("arguments", "state"), [([], State.PASSES), (["candidate:arg=other_token_at=0"], State.FAILS)]
)
def test_real_weights_compare_outputs(opened, arguments, state):
    session = opened(load_format="auto", side=arguments)
    assert Gates(session).of(MODEL).verdict("outputs").state is state
    asked = {(m.paired.pair, m.paired.side): m.paired for m in stored(session)}
    assert {key: (len(each.outputs), len(each.scores)) for key, each in asked.items()} == {
        (n, side): (64 * (n == 1), 64 * (n <= 2)) for n in range(1, 5) for side in SIDES
    }
    assert all(len(answer) == 16 for answer in asked[1, "baseline"].outputs)


@pytest.mark.parametrize(("given", "warm_ups"), [({}, ["baseline"]), (OTHER, ["baseline", "candidate"])])
def test_real_engine_warms_up(opened, given, warm_ups):
    session = real_session(opened(), **given)
    gated = Gates(session).of(MODEL)
    warmed = [both_sides(session)[side] for side in warm_ups]
    assert session.devices.pool.starts == [*warmed, *in_turn(session, range(1, 5))]
    measured = [m for p in gated.pairs for side in p.launches for m in side.measurements]
    assert len(measured) == 8 == len({m.launch for m in measured})
    session = real_session(opened(), host="booted once")
    spec, load = session.planner.spec(MODEL), session.planner.load(4)
    assert (launches_left(session, MODEL), launches_left(session, MODEL, [spec])) == ((1, 8), (0, 8))
    session.executor.measure(session.planner.case(spec, [session.planner.workload(MODEL)], [load]))
    assert launches_left(session, MODEL) == (0, 8), "what other tests launched counts"

    one, here = OneGate(real_session(opened(), host="booted once", **OTHER), MODEL), session.host.environment
    assert one.cold() == one.cold([spec]) == SIDES, "each side has caches of its own"
    for host, cold in (("booted once", ("candidate",)), ("another boot", SIDES), (None, SIDES)):
        one.found = [SimpleNamespace(spec=one.specs["baseline"], environment=replace(here, host=host))]
        assert one.cold() == cold
    one.session = real_session(opened(), **OTHER)
    assert one.cold() == SIDES, "neither boot is known, so it may be another"


@pytest.mark.parametrize(("enough_cores", "at_once"), [(1, 4), (10_000, 2)])
def test_two_pairs_import_at_once(opened, monkeypatch, enough_cores, at_once):
    """Each has the device by itself, in its turn; one more pair than is wanted has imported for nothing, and ends."""
    events, speeds = [], noisy(0.1)

    class Waits(SimulatedEngine):
        def await_turn(self, on_wait=None):
            events.append("imported")

        def start(self, on_wait=None):
            self.speed = speeds(self.spec).speed
            events.append("turn")
            return self

        def close(self):
            events.append("end")

    monkeypatch.setattr(one_gate, "MANY_CORES", enough_cores)
    session = opened(Waits, gate_pairs="5")
    monkeypatch.setattr(pools, "PROCESSES", {"simulated"})
    gated = Gates(session).of(MODEL)
    assert [p.number for p in gated.pairs] == [1, 2, 3, 4, 5] and gated.outcome is State.INCONCLUSIVE
    assert events[: at_once + 1] == ["imported"] * at_once + ["turn"]
    assert events.count("turn") == 10 and events.count("imported") == {4: 12, 2: 10}[at_once]
    assert [event for event in events if event != "imported"][:4] == ["turn", "end", "turn", "end"]
    assert session.devices.pool.starts == in_turn(session, range(1, 6))
    assert [m.paired.second for m in stored(session)] == [False, True] * 5


def test_gate_ends_at_planned_looks(opened):
    def over(there, dropped=0, settled=True):
        terms = GateCriteria(pairs=12)
        one.gated = SimpleNamespace(pairs=range(there), dropped=range(dropped), settled=settled, terms=terms)
        return one.over

    for given, settled, ends in (({}, True, [4, 6, 8, 12]), ({}, False, [12]), (CALIBRATE, True, [12])):
        one = OneGate(opened(**given), MODEL)
        assert not one.over and not is_short(one.session), "nothing was measured; a formula takes no time"
        assert [n for n in range(13) if over(n, settled=settled)] == ends
        assert [n for n in range(6) if over(1, n)] == [MAX_DROPPED + 1, MAX_DROPPED + 2]
    one = OneGate(real_session(opened(), gate=None), MODEL)  # a short one ends after two pairs, whatever they tell
    assert [over(*made, settled=False) for made in ((1, 0), (2, 0), (1, 1), (0, 1))] == [False, True, True, False]
    done = Gates(opened(noisy(0.02), gate_pairs="6")).of(MODEL)
    session = opened(resume=True, gate_pairs="6")
    assert session.results.repeats == {} and session.verdicts.curves() == [], "a gate has no points of a sweep"
    assert launches_left(session, MODEL) == (0, 0)
    again = Gates(session).of(MODEL)
    assert session.devices.pool.starts == [] and again.gate == done.gate
    assert [(c.name, c.n, c.outcome) for c in again.gated] == [(c.name, c.n, c.outcome) for c in done.gated]
    assert launches_left(session, MODEL) == (0, 0)
    before = len({m.launch for m in stored(session)})
    for launches in (1, 1):
        begun(opened, launches, resume=True)
    session = opened(resume=True)
    first = Gates(session).of(MODEL).pairs[0]
    launched = list(dict.fromkeys(m.launch for m in stored(session)))[before:]
    assert [m.measurements[0].launch for m in first.launches] == launched[2:4] and first.number == 1


class SecondTime(SimulatedEngine):
    """Its first run has failed requests, the others have none."""

    failures = 1

    def run(self, *arguments):
        found, self.failures = replace(super().run(*arguments), failures=self.failures), 0
        return found


@pytest.mark.parametrize(("start", "given", "pairs", "dropped", "outcome", "runs"), [
    (lambda: noisy(0.1), {"gate_pairs": "4"}, [1, 2, 3, 4], 0, State.INCONCLUSIVE, 8),
    (lambda: noisy(0.1), {"gate_pairs": "5"}, [1, 2, 3, 4, 5], 0, State.INCONCLUSIVE, 10),
    (lambda: faulty(1, lost_from=8), {}, [2, 3, 4, 5], 1, State.PASSES, 11),
    (lambda: faulty(6, preempt_from=8), {"gate_pairs": "4"}, [4, 5, 6, 7], MAX_DROPPED, State.PASSES, 20),
    (lambda: SimulatedEngine, {"side": ["candidate:arg=lost_from=8"]}, [], MAX_DROPPED + 1, State.INCONCLUSIVE, 12),
    (lambda: SimulatedEngine, {"side": ["candidate:arg=slow_clock_from=8"]}, [1, 2, 3, 4], 0, State.PASSES, 8),  # noise
    (lambda: SecondTime, {}, [1, 2, 3, 4], 0, State.PASSES, 16),  # on the same launch
])  # fmt: skip
def test_untrusted_pairs_are_made_again(opened, start, given, pairs, dropped, outcome, runs):
    session = opened(start(), **given)
    gated = Gates(session).of(MODEL)
    assert ([p.number for p in gated.pairs], gated.outcome, len(stored(session))) == (pairs, outcome, runs)
    assert [why.partition(":")[0] for why in gated.dropped] == [f"pair {n}" for n in range(1, dropped + 1)]
    assert len(session.devices.pool.starts) == 2 * (len(pairs) + dropped)
    assert session.notes[-1].endswith(f", {len(pairs)} pair{'s' * (len(pairs) != 1)} of launches count")


def begun(opened, launches, error=ConnectionAbortedError, **given):
    """A session that is killed after so many launches."""
    starts = chain([SimulatedEngine] * launches, [Mock(side_effect=error)])
    session = opened(lambda spec: next(starts)(spec), **given)
    with pytest.raises(error):
        Gates(session).of(MODEL)
    return session


@pytest.mark.parametrize(("launches", "there"), [(1, 0), (2, 1), (5, 2)])
def test_gate_resumes_whole_pairs(opened, monkeypatch, launches, there):
    begun(opened, launches)
    session, reads = opened(resume=True), []
    monkeypatch.setattr(sessions, "read", reads.append)
    before, lefts = stored(session), [launches_left(session, MODEL)]
    session.devices.pool.on_started = lambda *_: lefts.append(launches_left(session, MODEL))
    gated = Gates(session).of(MODEL)
    assert session.devices.pool.starts == in_turn(session, range(there + 1, 5))
    assert [p.number for p in gated.pairs] == [1, 2, 3, 4] and gated.outcome is State.PASSES
    assert {m.paired.gate for m in stored(session)} == {gated.gate} == {before[0].paired.gate}
    assert [f"continues from {there} pair" in note for note in session.notes if "continues from" in note] == [True], (
        "said once"
    )
    assert reads == [] and {*lefts} == {(0, 8 - 2 * there)} and launches_left(session, MODEL) == (0, 0)


@pytest.mark.parametrize("other", [
    {"gate_pairs": "6"}, {"gate_margin": "0.05"}, {"concurrency": "9"}, {"window": "2"}, {"gate_caches": "cold"},
    {"seed": "1"}, OTHER, {"side": ["candidate:env=PYTHONPATH=/checkout"]},
], ids=lambda other: next(iter(other)))  # fmt: skip
def test_changed_gate_begins_anew(opened, other):
    begun(opened, 2)
    session = opened(resume=True, **other)
    one = OneGate(session, MODEL)
    assert one.id not in {m.paired.gate for m in stored(session)} and one.gated is None and one.found == []
    assert launches_left(session, MODEL)[1] == 8
    assert sum("starts again" in note for note in session.notes) == 1, "said once"


@pytest.mark.parametrize(("launches", "given", "left", "anew"), [
    (0, {}, (1, 8), 0), (0, {"resume": True}, (1, 8), 1), (0, OTHER, (2, 8), 0), (4, {"resume": True}, (0, 4), 0),
    (4, {"resume": True, **CALIBRATE}, (0, 20), 0),
])  # fmt: skip
def test_plan_counts_launches_left(opened, tmp_path, launches, given, left, anew):
    if launches:
        begun(opened, launches)
    session = opened(**given)
    assert [launches_left(session, MODEL) for _ in range(2)] == [left] * 2
    said = [str(tmp_path / "a.jsonl") in note for note in session.notes if "starts again" in note]
    assert said == [True] * anew


def test_short_window_is_extended(opened, tmp_path, monkeypatch):
    short = {"window": "0.5", "output_len": "4", "engine_arg": ["t_inf=80", "b_half=8", "scatter=0"]}
    gated, there = Gates(opened(**short)).of(MODEL), {}
    for m in stored(session := opened(**short, resume=True)):
        there.setdefault(m.paired.pair, []).append(m.load.window_s)
    assert there == {1: [0.5, 2.0, 8.0, 8.0]} | {n: [8.0] * 2 for n in (2, 3, 4)}
    assert gated.outcome is State.PASSES and len(gated.pairs) == 4
    assert [load.window_s for load in OneGate(session, MODEL).loads] == [8.0]
    assert launches_left(session, MODEL) == (0, 0)
    monkeypatch.setattr(gate, "in_view_of_noise", lambda session, gated: gated)
    monkeypatch.setattr(OneGate, "traced", lambda self, gated: "traced")
    done = Gates(opened(gate_pairs="6")).of(MODEL)
    session = opened(**CALIBRATE, resume=True, gate_pairs="6", profile=str(tmp_path / "p"))
    again = Gates(session).of(MODEL)
    assert (len(done.pairs), len(again.pairs), again.gate) == (4, 6, done.gate)
    assert session.devices.pool.starts == in_turn(session, (5, 6)) and "traced" not in session.notes


def failed_twice(session, first=EngineFailed):
    """The problem of a gate that is asked for twice, and what the last screen says first of it. For the second time it
    launches nothing, and is told shortly."""
    gates, problems, launched = Gates(session), [], []
    for kind in (first, EngineFailed):
        with pytest.raises(kind) as caught:
            gates.of(MODEL)
        problems.append(str(caught.value))
        launched.append(len(session.devices.pool.starts))
    assert launched[0] == launched[1] and session.gates == [] and session.devices.pool.current is None
    assert problems[1] == f"the gate of {MODEL} was broken off"
    return (problems[0], session.notes[0]), launched[0]


def test_broken_gate_is_not_retried(opened, monkeypatch):
    session = opened(side=["candidate:arg=die_at=8"], concurrency="4,8")
    (first, again), launched = failed_twice(session)
    assert "the candidate, pair 1" in first and "concurrency 8" in first and launched == 2
    assert again.endswith(first) and again != first
    assert [m.paired.side for m in stored(session)] == ["baseline", "baseline", "candidate"], "what there is, is kept"

    class Refuses(SimulatedEngine):
        def start(self, on_wait=None):
            if ("b_half", 9) in self.spec.extra:
                raise EngineFailed("it did not start: no memory. The log ends with\nmany\nlines")
            return self

    (first, again), launched = failed_twice(real_session(opened(), Refuses, **OTHER))
    assert "the candidate, before the first pair" in first and "lines" in first and launched == 2
    assert "no memory" in again and "lines" not in again, "the log is shown once"
    session = begun(opened, 6, KeyboardInterrupt)
    assert [len(gated.pairs) for gated in session.gates] == [3] and session.devices.pool.current is None
    starts = chain([Mock(side_effect=ZeroDivisionError)], repeat(SimulatedEngine))
    gates = Gates(opened(lambda spec: next(starts)(spec), models=f"{MODEL},opt-350m"))
    with pytest.raises(ZeroDivisionError):
        gates.of(MODEL)
    assert len(gates.of("opt-350m").pairs) == 4 and list(gates.failed) == [MODEL]
    # What nobody foresaw is not taken for a verdict that fails.
    for error, kind in ((OSError("disk"), OSError), (AssertionError("never"), RuntimeError)):
        session = opened()
        monkeypatch.setattr(session.executor.archive, "add", Mock(side_effect=error))
        (_, again), launched = failed_twice(session, kind)
        assert f"{type(error).__name__}: {error}" in again and launched == 1


def test_calibration_needs_complete_pairs(opened):
    """Of one pair with every figure the noise would be 0, and every later gate would pass by it."""
    for known in (0, 1, 3):
        half = [m for n in range(known + 1, 5) for m in [*launch("baseline", n), *launch("candidate", n, ready_s=None)]]
        with refused(f"{known} pairs of opt-1.3b"):
            gate.in_view_of_noise(opened(**CALIBRATE), judge_gate([*pairs(known), *half], GateCriteria()))
    gated, session = judge_gate(pairs(4), GateCriteria()), opened(**CALIBRATE)
    assert gate.in_view_of_noise(session, gated).gate == gated.gate
    [entry] = read_calibrations(session.options.records).values()
    assert (entry.place.model, entry.place.loads, entry.place.pairs) == ("opt-1.3b", (8, 64), 12)
    later, real = opened(), real_session(opened())
    gate.in_view_of_noise(later, gated)
    assert len(session.notes) == 1 and later.notes == session.notes, "it is told, and that of the same place counts"
    # A real host without one is told how to make it; without pairs there is nothing to say.
    for made in (judge_gate(pairs(1), GateCriteria()), judge_gate([*launch("baseline", 1)], GateCriteria())):
        assert gate.in_view_of_noise(real, made) is made
    assert ["--slm-calibrate" in note for note in real.notes] == [True]


def test_failing_sides_are_traced(opened, tmp_path):
    for extra, traces in ((), 1), (("profiler=false",), 0):
        session = opened(profile=str(tmp_path / f"{traces}"), **SLOW, engine_arg=[*STEADY, *extra])
        session.devices.pool = Pool()
        assert Gates(session).of(MODEL).outcome is State.FAILS
        written = {side: list((tmp_path / f"{traces}" / MODEL / side).iterdir()) for side in SIDES}
        assert {side: len(paths) for side, paths in written.items()} == dict.fromkeys(SIDES, traces), extra
        said = session.notes[-1]
        assert "at 8, in " in said and all(
            f"{path.parent.name}/{path.name}" in said for paths in written.values() for path in paths
        )
        assert session.devices.pool.starts[8:] == [both_sides(session)[side] for side in SIDES]
    for given, outcome in (({}, State.PASSES), (SLOW, State.FAILS)):
        session = opened(profile=str(tmp_path / "p"), **given)
        assert Gates(session).of(MODEL).outcome is outcome and len(session.devices.pool.starts) == 8
        assert (tmp_path / "p").exists() is (outcome is State.FAILS)
        (tmp_path / "p").write_text("a file")
    assert session.notes[-1].count("none (") == 2
