"""Running a gate: what each side is, in which order they are launched, and when it ends."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launches import launch, pairs

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import SIDES, judge_gate
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines import pool as pools
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.options.read import read_options
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan import planner as agendas
from pytest_slmserve.plan.planner import Planner
from pytest_slmserve.run import gate
from pytest_slmserve.run import session as sessions
from pytest_slmserve.run.executor import Devices, Executor, Results
from pytest_slmserve.run.gate import MAX_DROPPED, Gates, check_gate, launches_left, loads_of, order, sides
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.records import Environment, Measurement
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.telemetry.host import Host

MODEL = "opt-125m"
FEW_STEPS = {  # of some 10 ms, so that a window has a hundred
    "gate": True,
    "models": MODEL,
    "concurrency": "4,16",
    "window": "1",
    "input_len": "64",
    "output_len": "32",
    "engine_arg": ["t_inf=2000", "b_half=16", "scatter=0"],
}
Open = Callable[..., Session]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens sessions that gate; options go by their names. start: in place of that of the simulated engine."""
    sessions: list[Session] = []

    def open_session(start: Callable[[EngineSpec], Any] = SimulatedEngine, **given: object) -> Session:
        for earlier in sessions:
            earlier.close()
        options = read_options({**FEW_STEPS, "simulate": True, "records": str(tmp_path / "a.jsonl"), **given}, {}, {})
        session = Session.from_options(options, tmp_path)
        session.devices.pool = Pool(lambda spec, **_: start(spec))
        session.open()
        session.begin()
        sessions.append(session)
        return session

    yield open_session
    for each in sessions:
        each.close()


def stored(session: Session) -> list[Measurement]:
    return list(read(session.options.records).measurements)


def options(**given: object) -> Options:
    return read_options({"gate": True, "simulate": True, **given}, {}, {})


def noisy(sd: float, seed: int = 0) -> Callable[[EngineSpec], SimulatedEngine]:
    """Launches whose speeds differ by chance."""
    chance = random.Random(seed)
    return lambda spec: SimulatedEngine(spec, speed=math.exp(chance.gauss(0, sd)))


def faulty(launches: int, **faults: object) -> Callable[[EngineSpec], SimulatedEngine]:
    """The first so many launches have faults."""
    left = [1] * launches

    def start(spec: EngineSpec) -> SimulatedEngine:
        planted = left and left.pop()
        engine = SimulatedEngine(replace(spec, extra=(*spec.extra, *faults.items())) if planted else spec)
        engine.spec = spec
        return engine

    return start


# In which order


@given(st.integers(0, 100), st.integers(1, 12), st.integers(-1000, 1000))
def test_over_four_pairs_each_side_is_second_twice_and_a_drift_cancels(first, fours, drift_per_launch):
    """From any pair on. A drift adds the same with every launch."""
    numbers = range(first, first + 4 * fours)
    assert Counter(order(n)[1] for n in numbers) == dict.fromkeys(SIDES, 2 * fours)
    added = Counter(dict.fromkeys(SIDES, 0))
    for number in numbers:
        for place, side in enumerate(order(number)):
            added[side] += drift_per_launch * (2 * number + place)
    assert added["baseline"] == added["candidate"]


def test_it_begins_with_the_baseline_and_each_pair_has_both():
    assert [order(n)[0][0] for n in range(1, 9)] == list("bccbbccb")
    assert all(set(order(n)) == set(SIDES) for n in range(1, 9))


# What each side is

SPEC = EngineSpec(MODEL, python="common", env=(("A", "1"),), extra=(("block_size", 16), ("max_num_seqs", 512)))


def test_each_side_has_its_interpreter_its_variables_and_its_arguments():
    common = replace(SPEC, extra=(("block_size", 16),), max_num_seqs=512)
    assert sides(SPEC, options()) == {"baseline": common, "candidate": common}, "those of the options"
    found = sides(
        SPEC,
        options(
            side=[
                "baseline:python=old,arg=block_size=32",
                "candidate:env=A=2,env=PYTHONPATH=/checkout",
                "candidate:arg=max_num_batched_tokens=2048,arg=enforce_eager=true,arg=max_num_seqs=64",
            ],
        ),
    )
    baseline, candidate = found["baseline"], found["candidate"]
    assert (baseline.python, candidate.python) == ("old", "common")
    assert (baseline.env, candidate.env) == ((("A", "1"),), (("A", "2"), ("PYTHONPATH", "/checkout")))
    assert (baseline.extra, candidate.extra) == ((("block_size", 32),), (("block_size", 16),))
    assert (baseline.max_num_seqs, candidate.max_num_seqs) == (512, 64), "the value of both gives way to that of a side"
    assert (candidate.max_num_batched_tokens, candidate.enforce_eager) == (2048, True)
    assert (baseline.max_num_batched_tokens, baseline.enforce_eager) == (8192, False)


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("max_num_seqs=many", "the candidate: max_num_seqs is a whole number, not 'many'"),
        ("max_num_seqs=true", "the candidate: max_num_seqs is a whole number, not True"),
        ("enforce_eager=1", "the candidate: enforce_eager is true or false, not 1"),
        ("dtype=16", "the candidate: dtype is a name, not 16"),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused_with_its_side(argument, problem):
    with pytest.raises(BadUsage) as caught:
        sides(SPEC, options(side=[f"candidate:arg={argument}"]))
    assert caught.value.problem == problem and caught.value.hint.startswith(argument.partition("=")[0])


def test_the_same_engine_on_both_sides_is_noted(opened):
    session = opened()
    Gates(session).of(MODEL)
    assert session.notes[0] == "both sides of the gate of opt-125m are the same: what differs is noise"
    other = opened(side=["candidate:arg=b_half=9"])
    Gates(other).of(MODEL)
    assert not any("same" in note for note in other.notes)


# Which loads


@pytest.mark.parametrize(
    ("model", "concurrency", "wanted"),
    [
        (MODEL, "1,2,4,32", (1, 32)),
        (MODEL, "16", (16,)),
        (MODEL, None, (512,)),  # of table 1
        ("opt-350m", None, (256,)),
    ],
)
def test_a_small_load_and_a_large_one(opened, model, concurrency, wanted):
    session = opened(models=model, concurrency=concurrency)
    assert tuple(load.concurrency for load in loads_of(session, model)) == wanted
    windows = [load.window_s for load in loads_of(session, model)]
    assert windows == ([4.0, 1.0] if len(wanted) == 2 else [1.0]), "few requests are watched for longer"


def test_a_load_that_does_not_fit_is_refused_with_what_to_type(opened):
    with pytest.raises(
        BadUsage, match=r"opt-125m at concurrency 90000: the KV cache holds .* requests(.|\n)*--slm-concurrency"
    ):
        loads_of(opened(concurrency="8,90000"), MODEL)


def test_requests_that_a_side_cannot_take_are_refused_before_anything_starts(opened):
    session = opened(side=["candidate:arg=max_model_len=64"])
    with pytest.raises(BadUsage, match="the candidate: requests of 96 tokens do not fit max_model_len 64"):
        check_gate(session, MODEL)
    assert session.devices.pool.starts == []


def test_an_interpreter_of_a_side_is_probed_before_anything_starts(opened, monkeypatch):
    asked = []

    def probe(platform: str, python: str, env: dict[str, str]) -> Host:
        asked.append(python)
        if python == "/old/python":
            raise BadUsage(f"{python} has no vLLM", f"{python} -m pip install vllm")
        return Host(Environment(vllm="0.25"), "none")

    monkeypatch.setattr(agendas, "probe", probe)
    session = real_session(opened(), side=["baseline:python=/old/python"])
    with pytest.raises(BadUsage, match="the baseline: /old/python has no vLLM"):
        check_gate(session, MODEL)
    session = real_session(opened(), side=["baseline:python=/older/python", "candidate:python=/new/python"])
    check_gate(session, MODEL)
    assert asked == ["/old/python", "/older/python"], "the candidate's was probed when the session was made"
    both = sides(session.planner.spec(MODEL), session.options)
    assert [session.planner.environment(both[side]).vllm for side in SIDES] == ["0.25", None]


# Every launch is fresh


def test_every_launch_is_fresh_and_in_the_order_of_the_pairs(opened):
    session = opened(side=["candidate:arg=b_half=9"])
    gated = Gates(session).of(MODEL)
    assert len(gated.pairs) == 4 and session.devices.pool.current is None
    both = sides(session.planner.spec(MODEL), session.options)
    assert session.devices.pool.starts == [both[side] for number in range(1, 5) for side in order(number)]
    found = stored(session)
    each = [[*group] for _, group in groupby(found, key=lambda m: m.launch)]
    assert len(each) == 8 == len({m.launch for m in found}), "no engine serves twice"
    assert [[m.load.concurrency for m in launch] for launch in each] == [[4, 16]] * 8
    assert [(m.paired.pair, m.paired.side) for m, _ in each] == [(n, side) for n in range(1, 5) for side in order(n)]
    assert [m.paired.second for m, _ in each] == [False, True] * 4
    assert {m.paired.gate for m in found} == {gated.gate} and {m.workload.hash for m in found} == {
        found[0].workload.hash
    }


def test_each_model_has_a_gate_which_is_made_once(opened):
    session = opened(models="opt-125m,opt-350m")
    gates = Gates(session)
    found = [gates.of(model) for model in ("opt-125m", "opt-350m")]
    assert found[0].gate != found[1].gate and gates.of(MODEL) is found[0] and session.gates == found
    assert len(session.devices.pool.starts) == 16


def real_session(
    session: Session, start: Callable[[EngineSpec], Any] = SimulatedEngine, host: str | None = None, **given: object
) -> Session:
    """The same on a device that warms up; what it starts is simulated all the same."""
    options = read_options({**FEW_STEPS, "cpu": True, **given}, {}, {})
    planner = Planner(options, "cpu", Host(Environment(platform="cpu", host=host), "none"))
    devices = Devices(planner, Pool(lambda spec, **_: start(spec)))
    return Session(Executor(devices, Results(), 2, archive=session.executor.archive))


@pytest.mark.parametrize(
    ("candidate", "warm_ups"), [([], ["baseline"]), (["b_half=9"], ["baseline", "candidate"])], ids=["same", "other"]
)
def test_a_real_engine_is_launched_once_before_it_counts(opened, candidate, warm_ups):
    session = real_session(opened(), side=[f"candidate:arg={each}" for each in candidate])
    gated = Gates(session).of(MODEL)
    both = sides(session.planner.spec(MODEL), session.options)
    counted = [side for number in range(1, 5) for side in order(number)]
    assert session.devices.pool.starts == [both[side] for side in (*warm_ups, *counted)]
    measured = [m for p in gated.pairs for side in (p.baseline, p.candidate) for m in side.measurements]
    assert len(measured) == 16 and len({m.launch for m in measured}) == 8


def test_what_other_tests_launched_is_a_launch_before_the_first_pair(opened):
    session = real_session(opened(), host="booted once")
    assert launches_left(session, MODEL) == (1, 8)
    spec, load = session.planner.spec(MODEL), session.planner.load(4)
    session.executor.measure(session.planner.case(spec, [session.planner.workload(MODEL)], [load]))
    assert launches_left(session, MODEL) == (0, 8)


@pytest.mark.parametrize(("enough_cores", "at_once"), [(1, 4), (10_000, 2)])
def test_two_pairs_import_at_once_where_there_are_cores_for_it(opened, monkeypatch, enough_cores, at_once):
    """Each has the device by itself, in its turn; one more pair than is wanted has imported for nothing, and ends."""
    events, speeds = [], noisy(0.1)

    class Waits(SimulatedEngine):
        def await_turn(self, on_wait: object = None) -> None:
            events.append("imported")

        def start(self, on_wait: object = None) -> Waits:
            self.speed = speeds(self.spec).speed
            events.append("turn")
            return self

        def close(self) -> None:
            events.append("end")

    monkeypatch.setattr(gate, "MANY_CORES", enough_cores)
    session = opened(gate_pairs="5")
    monkeypatch.setattr(pools, "PROCESSES", {"simulated"})
    session.devices.pool = Pool(lambda spec, **_: Waits(spec))
    gated = Gates(session).of(MODEL)
    assert [p.number for p in gated.pairs] == [1, 2, 3, 4, 5] and gated.outcome is State.INCONCLUSIVE
    assert events[: at_once + 1] == ["imported"] * at_once + ["turn"]
    assert events.count("turn") == 10 and events.count("imported") == {4: 12, 2: 10}[at_once]
    turns = [event for event in events if event != "imported"]
    assert turns[:4] == ["turn", "end", "turn", "end"]
    both = sides(session.planner.spec(MODEL), session.options)
    assert session.devices.pool.starts == [both[side] for number in range(1, 6) for side in order(number)]


# When it ends


def test_it_ends_at_planned_looks_only(opened):
    made, one, over = pairs(12), gate.OneGate(opened(), MODEL), []
    for n in range(1, 13):
        one.gated = judge_gate(made[: 4 * n], GateCriteria())
        over += [n] if one.over else []
    assert over == [4, 6, 8, 12]


@pytest.mark.parametrize("most", [4, 5, 7])
def test_it_ends_when_there_are_as_many_pairs_as_may_be(opened, most):
    session = opened(start=noisy(0.1), gate_pairs=str(most))
    gated = Gates(session).of(MODEL)
    assert gated.outcome is State.INCONCLUSIVE and len(gated.pairs) == most
    assert len(session.devices.pool.starts) == 2 * most


def test_pairs_that_cannot_be_trusted_are_made_again(opened):
    session = opened(start=faulty(1, lost_from=8))
    gated = Gates(session).of(MODEL)
    assert [p.number for p in gated.pairs] == [2, 3, 4, 5] and gated.outcome is State.PASSES
    [why] = gated.dropped
    assert why.startswith("pair 1: a sensor was lost")
    assert any(note.endswith(", 4 pairs count") for note in session.notes)


def test_noisy_pairs_count_and_nothing_of_them_is_measured_again(opened):
    session = opened(side=["candidate:arg=slow_clock_from=8"])
    gated = Gates(session).of(MODEL)
    assert [p.number for p in gated.pairs] == [1, 2, 3, 4] and gated.dropped == ()
    assert len(session.devices.pool.starts) == 8 and gated.outcome is State.PASSES
    each = [m for m in stored(session) if m.paired and m.paired.side == "candidate" and check(m).noise]
    assert len(each) == 4, "one at the load that is noisy, of each pair"


def test_after_too_many_of_them_it_gives_up(opened):
    session = opened(side=["candidate:arg=lost_from=8"])
    gated = Gates(session).of(MODEL)
    assert len(gated.dropped) == MAX_DROPPED + 1 and gated.pairs == ()
    assert len(session.devices.pool.starts) == 2 * (MAX_DROPPED + 1)
    assert gated.outcome is State.INCONCLUSIVE


def test_as_many_as_may_be_dropped_do_not_cost_the_pairs_that_were_asked_for(opened):
    session = opened(start=faulty(2 * MAX_DROPPED, preempt_from=8), gate_pairs="4")
    gated = Gates(session).of(MODEL)
    assert (len(gated.dropped), len(gated.pairs), gated.outcome) == (MAX_DROPPED, 4, State.PASSES)


class SecondTime(SimulatedEngine):
    """Its first run has failed requests, the others have none."""

    runs = 0

    def run(self, *arguments: Any) -> Any:
        self.runs += 1
        found = super().run(*arguments)
        return replace(found, failures=1) if self.runs == 1 else found


def test_a_load_has_a_second_chance_on_its_launch(opened):
    session = opened(start=SecondTime)
    gated = Gates(session).of(MODEL)
    assert gated.outcome is State.PASSES and gated.dropped == () and len(gated.pairs) == 4
    first = [m for m in stored(session) if m.launch == stored(session)[0].launch]
    assert [m.load.concurrency for m in first] == [4, 4, 16]


# Going on where an earlier run ended


class Broken(Exception):
    """A run is killed."""


def killed_after(launches: int, start: Callable[[EngineSpec], Any] = SimulatedEngine) -> Callable[[EngineSpec], Any]:
    """So many launches, and the next is not made."""
    left = iter(range(launches))

    def start_one(spec: EngineSpec) -> Any:
        if next(left, None) is None:
            raise Broken
        return start(spec)

    return start_one


def begun(opened: Open, launches: int, **given: object) -> None:
    with pytest.raises(Broken):
        Gates(opened(start=killed_after(launches), **given)).of(MODEL)


@pytest.mark.parametrize(("launches", "pairs_there"), [(1, 0), (2, 1), (5, 2), (7, 3)])
def test_a_gate_that_was_broken_off_goes_on_with_its_whole_pairs(opened, launches, pairs_there):
    begun(opened, launches)
    session = opened(resume=True)
    before = stored(session)
    gated = Gates(session).of(MODEL)
    both = sides(session.planner.spec(MODEL), session.options)
    missing = range(pairs_there + 1, 5)
    assert session.devices.pool.starts == [both[side] for number in missing for side in order(number)]
    assert [p.number for p in gated.pairs] == [1, 2, 3, 4] and gated.outcome is State.PASSES
    assert {m.paired.gate for m in stored(session)} == {gated.gate} == {before[0].paired.gate}
    there = "1 pair of launches" if pairs_there == 1 else f"{pairs_there} pairs of launches"
    assert any(f"the gate of opt-125m goes on from {there} in " in note for note in session.notes)


def test_of_a_pair_that_was_begun_twice_the_whole_one_counts(opened):
    for launches in (1, 1):
        begun(opened, launches, resume=True)
    session = opened(resume=True)
    gated = Gates(session).of(MODEL)
    [first] = [p for p in gated.pairs if p.number == 1]
    launched = list(dict.fromkeys(m.launch for m in stored(session)))
    assert [m.measurements[0].launch for m in first.launches] == launched[2:4]


def test_a_gate_that_is_over_is_told_again_and_nothing_is_launched(opened):
    done = Gates(opened(start=noisy(0.02))).of(MODEL)
    session = opened(resume=True)
    assert session.results.repeats == {} and session.verdicts.curves() == [], "a gate has no points of a sweep"
    again = Gates(session).of(MODEL)
    assert session.devices.pool.starts == [] and again.gate == done.gate and len(done.pairs) in (6, 8, 12)
    assert [(c.name, c.n, c.outcome) for c in again.gated] == [(c.name, c.n, c.outcome) for c in done.gated]


@pytest.mark.parametrize(
    "other",
    [
        {"gate_pairs": "6"},
        {"gate_margin": "0.05"},
        {"concurrency": "4,32"},
        {"window": "2"},
        {"gate_caches": "cold"},
        {"seed": "1"},
        {"side": ["candidate:arg=b_half=9"]},
        {"side": ["candidate:env=PYTHONPATH=/checkout"]},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_gate_that_asks_something_else_begins_anew(opened, other):
    begun(opened, 4)
    session = opened(resume=True, **other)
    before = {m.paired.gate for m in stored(session)}
    gated = Gates(session).of(MODEL)
    assert gated.gate not in before and len(session.devices.pool.starts) >= 8
    assert any("the gate of opt-125m begins anew: " in note for note in session.notes)


@pytest.mark.parametrize(("resume", "said"), [(True, 1), (False, 0)])
def test_a_gate_without_an_archive_to_resume_says_once_that_it_begins_anew(opened, tmp_path, resume, said):
    session = opened(resume=resume)
    launches_left(session, MODEL)
    Gates(session).of(MODEL)
    note = f"the gate of opt-125m begins anew: there is no archive {tmp_path / 'a.jsonl'} yet"
    assert session.notes.count(note) == said == sum("begins anew" in each for each in session.notes)


def test_a_calibration_goes_on_to_all_its_pairs(opened):
    done = Gates(opened()).of(MODEL)
    session = opened(gate=False, calibrate=True, resume=True)
    assert Gates(session).of(MODEL).gate == done.gate and len(session.devices.pool.starts) == 16


@pytest.mark.parametrize(
    ("launches", "given", "left"),
    [(0, {}, (1, 8)), (4, {}, (0, 4)), (8, {}, (0, 0)), (4, {"gate": False, "calibrate": True}, (0, 20))],
)
def test_a_plan_knows_how_many_launches_are_left(opened, launches, given, left):
    if launches == 8:
        Gates(opened()).of(MODEL)
    elif launches:
        begun(opened, launches)
    assert gate.launches_left(opened(resume=True, **given), MODEL) == left


def test_a_gate_that_goes_on_reads_its_archive_once_and_says_so_once(opened, monkeypatch):
    begun(opened, 4)
    session, reads = opened(resume=True), []
    monkeypatch.setattr(sessions, "read", reads.append)
    lefts = [launches_left(session, MODEL)]
    session.devices.pool.on_started = lambda *_: lefts.append(launches_left(session, MODEL))
    Gates(session).of(MODEL)
    assert reads == [] and {*lefts} == {(0, 4)} and launches_left(session, MODEL) == (0, 0)
    assert len([note for note in session.notes if "goes on from 2 pairs" in note]) == 1
    assert not any("goes on from" in note and "2 pairs" not in note for note in session.notes)


def test_a_side_is_warmed_up_once_for_each_boot_of_a_host(opened):
    begun(opened, 1, side=["candidate:arg=b_half=9"])
    session = opened(resume=True, side=["candidate:arg=b_half=9"])
    (found,), host = {m.paired.side: m for m in stored(session)}.values(), session.host.environment.host
    both = sides(session.planner.spec(MODEL), session.options)
    assert found.paired.side == "baseline" and found.environment.host == host

    def cold(*measured, specs=both):
        one = gate.OneGate(session, MODEL)
        one.specs, one.found = specs, [*measured]
        return one.cold()

    assert cold() == SIDES and cold(found) == ("candidate",)
    for other in (None, "another boot"):
        assert cold(replace(found, environment=replace(found.environment, host=other))) == SIDES
    same = dict.fromkeys(SIDES, both["baseline"])
    assert cold(specs=same) == ("baseline",) and cold(found, specs=same) == ()


# When it is broken off


def test_a_gate_that_was_broken_off_is_not_tried_again_and_says_so(opened):
    session = opened(side=["candidate:arg=die_at=16"])
    gates = Gates(session)
    with pytest.raises(EngineFailed, match="^the candidate, pair 1: the simulated engine died at concurrency 16"):
        gates.of(MODEL)
    assert len(session.devices.pool.starts) == 2 and session.devices.pool.current is None
    for _ in range(2):
        with pytest.raises(
            EngineFailed, match="^the gate of opt-125m was broken off: the candidate, pair 1: the simul"
        ):
            gates.of(MODEL)
    assert len(session.devices.pool.starts) == 2 and session.gates == []
    assert [m.paired.side for m in stored(session)] == ["baseline", "baseline", "candidate"], "what there is, is kept"


def test_a_side_that_does_not_start_is_named_at_its_warm_up(opened):
    class Refuses(SimulatedEngine):
        def start(self, on_wait: object = None) -> Refuses:
            if ("b_half", 9) in self.spec.extra:
                raise EngineFailed("it did not start: no memory. The log ends with\nmany\nlines")
            return self

    session = real_session(opened(), Refuses, side=["candidate:arg=b_half=9"])
    gates = Gates(session)
    with pytest.raises(EngineFailed, match="^the candidate, before the first pair: it did not start(.|\n)*lines"):
        gates.of(MODEL)
    with pytest.raises(EngineFailed) as again:
        gates.of(MODEL)
    assert "no memory" in str(again.value) and "lines" not in str(again.value), "the log is shown once"
    assert len(session.devices.pool.starts) == 2


def test_what_nobody_foresaw_is_not_tried_again_either(opened, monkeypatch):
    def full(measurement: Measurement) -> None:
        raise OSError("No space left on device")

    session = opened()
    monkeypatch.setattr(session.executor.archive, "add", full)
    gates = Gates(session)
    with pytest.raises(OSError, match="No space left"):
        gates.of(MODEL)
    with pytest.raises(EngineFailed, match="broken off: OSError: No space left on device"):
        gates.of(MODEL)
    assert len(session.devices.pool.starts) == 1


def test_one_model_s_failure_is_not_another_s(opened):
    session = opened(models="opt-125m,opt-350m", concurrency=None, engine_arg=[], side=["candidate:arg=die_at=512"])
    gates = Gates(session)
    with pytest.raises(EngineFailed):
        gates.of("opt-125m")  # at 512, the other at 256
    assert gates.of("opt-350m").outcome is State.PASSES


@pytest.mark.parametrize("known", [0, 1, 3])
def test_a_calibration_needs_pairs_with_every_figure(opened: Open, known: int):
    """Of one such pair the noise would be 0, and every later gate would pass by it."""
    half = [m for n in range(known + 1, 13) for m in [*launch("baseline", n), *launch("candidate", n, ready_s=None)]]
    gated = judge_gate([*pairs(known), *half], GateCriteria())
    with pytest.raises(BadUsage, match=f"^{known} pairs of opt-1.3b are valid and have every figure, too few"):
        gate.in_view_of_noise(opened(calibrate=True), gated)
