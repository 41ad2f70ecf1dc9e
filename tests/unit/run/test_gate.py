"""A gate: what each side is, that launches are fresh and take turns so that nothing favours a side, that it ends at
planned looks only, goes on where it was broken off, and is broken off once."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launches import launch, pairs
from simulated_sessions import FEW_STEPS

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import SIDES, judge_gate
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.baselines import read_calibrations
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines import pool as pools
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan import planner as planners
from pytest_slmserve.plan.planner import Planner
from pytest_slmserve.run import gate
from pytest_slmserve.run import session as sessions
from pytest_slmserve.run.executor import Devices, Executor, Results
from pytest_slmserve.run.gate import MAX_DROPPED, Gates, OneGate, check_gate, launches_left, loads_of, order, sides
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.telemetry.host import Host

MODEL = "opt-125m"
STEADY = [*FEW_STEPS["engine_arg"], "scatter=0"]  # equal launches are equal


@pytest.fixture
def opened(opened):
    """Opens sessions that gate under one load; `start` takes the place of that of the simulated engine."""

    def open_session(start=SimulatedEngine, **given):
        session = opened(**{"gate": True, "concurrency": "8", **FEW_STEPS, "engine_arg": STEADY, **given})
        session.devices.pool = Pool(lambda spec, **_: start(spec))
        session.begin()
        return session

    return open_session


def real_session(session, start=SimulatedEngine, host=None, **given):
    """The same on a device that warms up; what it starts is simulated all the same."""
    options = read_options(
        {"gate": True, "models": MODEL, **FEW_STEPS, "concurrency": "8", "cpu": True, **given}, {}, {}
    )
    planner = Planner(options, "cpu", Host(Environment(platform="cpu", host=host), "none"))
    devices = Devices(planner, Pool(lambda spec, **_: start(spec)))
    return Session(Executor(devices, Results(), 2, archive=session.executor.archive))


def options(**given):
    return read_options({"gate": True, "simulate": True, **given}, {}, {})


def stored(session):
    return list(read(session.options.records).measurements)


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
    given = [
        "baseline:python=old,arg=block_size=32",
        "candidate:env=A=2,env=PYTHONPATH=/checkout",
        "candidate:arg=max_num_batched_tokens=2048,arg=enforce_eager=true,arg=max_num_seqs=64",
    ]
    found = sides(SPEC, options(side=given))
    assert found["baseline"] == replace(common, python="old", extra=(("block_size", 32),))
    assert found["candidate"] == replace(
        common,
        env=(("A", "2"), ("PYTHONPATH", "/checkout")),
        max_num_seqs=64,  # the value of both gives way to that of a side
        max_num_batched_tokens=2048,
        enforce_eager=True,
    )


@pytest.mark.parametrize(("given", "slower"), [({"simulate_slowdown": "10 %"}, 0.1), ({}, None)])
def test_only_a_simulated_candidate_is_slowed_down(given, slower):
    found = sides(SPEC, options(**given))
    assert [found[side].arguments.get("slowdown") for side in SIDES] == [None, slower]


@pytest.mark.parametrize("argument", ["max_num_seqs=many", "max_num_seqs=true", "enforce_eager=1", "dtype=16"])
def test_an_argument_of_the_wrong_type_is_refused_with_its_side(argument):
    with pytest.raises(BadUsage) as caught:
        sides(SPEC, options(side=[f"candidate:arg={argument}"]))
    name = argument.partition("=")[0]
    assert "the candidate" in caught.value.problem and caught.value.hint.startswith(f"{name}=")


# Which loads


@pytest.mark.parametrize(
    ("model", "concurrency", "wanted"),
    [
        (MODEL, "1,2,4,32", {1: 8.0, 32: 2.0}),  # few requests are watched for longer
        (MODEL, "16", {16: 2.0}),
        (MODEL, None, {512: 2.0}),  # of table 1
        ("opt-350m", None, {256: 2.0}),
    ],
)
def test_a_small_load_with_a_longer_window_and_a_large_one(opened, model, concurrency, wanted):
    session = opened(models=model, concurrency=concurrency, window="2")
    assert {load.concurrency: load.window_s for load in loads_of(session, model)} == wanted


@pytest.mark.parametrize(("model", "concurrency", "wanted"), [("opt-tiny", None, [64]), (MODEL, "2,16", [16])])
def test_among_other_tests_a_gate_is_short_and_has_the_large_load_alone(opened, model, concurrency, wanted):
    session = real_session(opened(), gate=None, models=model, concurrency=concurrency)
    assert gate.is_short(session) and [load.concurrency for load in loads_of(session, model)] == wanted
    assert launches_left(session, model) == (1, 4)
    assert not gate.is_short(opened()) and not gate.is_short(opened(gate=None)), "a formula takes no time"


def test_a_load_that_does_not_fit_is_refused_with_the_option(opened):
    with pytest.raises(BadUsage) as caught:
        loads_of(opened(concurrency="8,90000"), MODEL)
    assert "90000" in caught.value.problem and "--slm-concurrency" in caught.value.hint


def test_requests_that_a_side_cannot_take_are_refused_before_anything_starts(opened):
    session = opened(side=["candidate:arg=max_model_len=64"])
    with pytest.raises(BadUsage) as caught:
        check_gate(session, MODEL)
    assert "the candidate" in caught.value.problem and "64" in caught.value.problem
    assert session.devices.pool.starts == []


@pytest.fixture
def probed(monkeypatch):
    """Interpreters that were asked for what they hold; that of /old has no vLLM."""
    asked = []

    def probe(platform, python, env):
        asked.append(python)
        if python == "/old/python":
            raise BadUsage(f"{python} has no vLLM", f"{python} -m pip install vllm")
        return Host(Environment(vllm="0.25"), "none")

    monkeypatch.setattr(planners, "probe", probe)
    return asked


def test_an_interpreter_of_a_side_is_probed_before_anything_starts(opened, probed):
    session = real_session(opened(), side=["baseline:python=/old/python"])
    with pytest.raises(BadUsage) as caught:
        check_gate(session, MODEL)
    assert "the baseline" in caught.value.problem and "/old/python" in caught.value.problem
    session = real_session(opened(), side=["baseline:python=/older/python", "candidate:python=/new/python"])
    check_gate(session, MODEL)
    assert probed == ["/old/python", "/older/python"], "the candidate's was probed when the session was made"
    assert [session.planner.environment(both_sides(session)[side]).vllm for side in SIDES] == ["0.25", None]


def test_a_plan_probes_nobody(opened, probed):
    check_gate(real_session(opened(), side=["baseline:python=/old/python"], plan=True), MODEL)
    assert probed == []


# Waivers

WAIVER = {"endpoint": "throughput", "model": MODEL, "device": "*", "until": "2030-01-01", "owner": "me", "reason": "-"}


def test_a_waiver_is_of_its_model_endpoint_and_device(opened, tmp_path):
    path = tmp_path / "waivers.json"
    path.write_text(json.dumps([WAIVER, {**WAIVER, "endpoint": "latency", "device": "simulated"}]), "utf-8")
    gates = Gates(opened(waivers=str(path)))
    assert gates.waiver(MODEL, "throughput").owner == "me" and gates.waiver(MODEL, "latency").device == "simulated"
    assert gates.waiver(MODEL, "energy") is gates.waiver("opt-350m", "throughput") is None
    assert Gates(opened()).waiver(MODEL, "throughput") is None, "no file, no waiver"


def test_a_waiver_of_what_no_gate_compares_is_refused(opened, tmp_path):
    path = tmp_path / "waivers.json"
    path.write_text(json.dumps([{**WAIVER, "endpoint": "beauty"}]), "utf-8")
    with pytest.raises(BadUsage) as caught:
        check_gate(opened(waivers=str(path)), MODEL)
    assert "'beauty'" in caught.value.problem and "throughput" in caught.value.hint


# Every launch is fresh


def test_every_launch_is_fresh_and_in_the_order_of_the_pairs(opened):
    session = opened(side=["candidate:arg=b_half=9"], concurrency="4,16")
    gated = Gates(session).of(MODEL)
    assert len(gated.pairs) == 4 and session.devices.pool.current is None
    assert session.devices.pool.starts == in_turn(session, range(1, 5))
    found = stored(session)
    each = [[*group] for _, group in groupby(found, key=lambda m: m.launch)]
    assert len(each) == 8 == len({m.launch for m in found}), "no engine serves twice"
    assert [[m.load.concurrency for m in launched] for launched in each] == [[4, 16]] * 8
    assert [(m.paired.pair, m.paired.side) for m, _ in each] == [(n, side) for n in range(1, 5) for side in order(n)]
    assert [m.paired.second for m, _ in each] == [False, True] * 4
    assert {m.paired.gate for m in found} == {gated.gate} and len({m.workload.hash for m in found}) == 1
    assert {m.paired.outputs == () for m in found if m.paired.pair > 1} == {True}, "once is enough"
    assert all(len(m.paired.outputs) == 4 for m in found if m.paired.pair == 1)
    assert session.notes[-1].endswith("4 pairs count") and not any("the same" in note for note in session.notes)


def test_each_model_has_a_gate_which_is_made_once(opened):
    session = opened(models="opt-125m,opt-350m")
    gates = Gates(session)
    found = [gates.of(model) for model in ("opt-125m", "opt-350m")]
    assert found[0].gate != found[1].gate and gates.of(MODEL) is found[0] and session.gates == found
    assert len(session.devices.pool.starts) == 16
    assert sum("are the same" in note for note in session.notes) == 2


def test_real_weights_are_asked_what_they_say(opened):
    session = opened(load_format="auto")
    asked = {(m.paired.pair, m.paired.side): m.paired for _ in [Gates(session).of(MODEL)] for m in stored(session)}
    assert {key: (len(each.outputs), len(each.scores)) for key, each in asked.items()} == {
        (n, side): (64 * (n == 1), 64 * (n <= 2)) for n in range(1, 5) for side in SIDES
    }
    assert all(len(answer) == 16 for answer in asked[1, "baseline"].outputs)


def test_the_candidate_is_scored_on_the_tokens_of_the_baseline(opened):
    session = opened(load_format="auto", side=["candidate:arg=other_token_at=0"])
    assert Gates(session).of(MODEL).verdict("outputs").state is State.FAILS


@pytest.mark.parametrize(
    ("candidate", "warm_ups"), [([], ["baseline"]), (["b_half=9"], ["baseline", "candidate"])], ids=["same", "other"]
)
def test_a_real_engine_is_launched_once_before_it_counts(opened, candidate, warm_ups):
    session = real_session(opened(), side=[f"candidate:arg={each}" for each in candidate])
    gated = Gates(session).of(MODEL)
    warmed = [both_sides(session)[side] for side in warm_ups]
    assert session.devices.pool.starts == [*warmed, *in_turn(session, range(1, 5))]
    measured = [m for p in gated.pairs for side in p.launches for m in side.measurements]
    assert len(measured) == 8 == len({m.launch for m in measured})


def test_what_other_tests_launched_is_a_launch_before_the_first_pair(opened):
    session = real_session(opened(), host="booted once")
    assert launches_left(session, MODEL) == (1, 8)
    spec, load = session.planner.spec(MODEL), session.planner.load(4)
    assert launches_left(session, MODEL, [spec]) == (0, 8)
    session.executor.measure(session.planner.case(spec, [session.planner.workload(MODEL)], [load]))
    assert launches_left(session, MODEL) == (0, 8)


def test_a_side_is_cold_until_it_was_launched_since_this_boot(opened):
    session = opened(side=["candidate:arg=b_half=9"])
    both, here = both_sides(session), session.host.environment
    one = OneGate(session, MODEL)
    found = SimpleNamespace(spec=both["baseline"], environment=here)

    def cold(*measured, specs=both, launched=()):
        one.specs, one.found = specs, [*measured]
        return one.cold(launched)

    assert cold() == SIDES and cold(found) == ("candidate",)
    for other in (None, "another boot"):
        assert cold(SimpleNamespace(spec=found.spec, environment=replace(here, host=other))) == SIDES
    same = dict.fromkeys(SIDES, both["baseline"])
    assert cold(specs=same) == ("baseline",) and cold(found, specs=same) == ()
    assert cold(specs=same, launched=[found.spec]) == () and cold(launched=[found.spec]) == SIDES


@pytest.mark.parametrize(("enough_cores", "at_once"), [(1, 4), (10_000, 2)])
def test_two_pairs_import_at_once_where_there_are_cores_for_it(opened, monkeypatch, enough_cores, at_once):
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

    monkeypatch.setattr(gate, "MANY_CORES", enough_cores)
    session = opened(Waits, gate_pairs="5")
    monkeypatch.setattr(pools, "PROCESSES", {"simulated"})
    gated = Gates(session).of(MODEL)
    assert [p.number for p in gated.pairs] == [1, 2, 3, 4, 5] and gated.outcome is State.INCONCLUSIVE
    assert events[: at_once + 1] == ["imported"] * at_once + ["turn"]
    assert events.count("turn") == 10 and events.count("imported") == {4: 12, 2: 10}[at_once]
    assert [event for event in events if event != "imported"][:4] == ["turn", "end", "turn", "end"]
    assert session.devices.pool.starts == in_turn(session, range(1, 6))


# When it ends


def gated_so_far(there, dropped=0, settled=True):
    return SimpleNamespace(pairs=range(there), dropped=range(dropped), settled=settled, terms=GateCriteria(pairs=12))


def test_it_ends_at_planned_looks_when_all_is_settled_or_made(opened):
    one = OneGate(opened(), MODEL)

    def over(*states):
        found = []
        for one.gated in states:
            found += [one.over]
        return found

    numbers = range(13)
    assert [n for n, ends in zip(numbers, over(*map(gated_so_far, numbers))) if ends] == [4, 6, 8, 12]
    open_ones = over(*(gated_so_far(n, settled=False) for n in numbers))
    assert [n for n, ends in zip(numbers, open_ones) if ends] == [12]
    dropped = over(*(gated_so_far(1, n) for n in range(6)))
    assert dropped == [n > MAX_DROPPED for n in range(6)]
    assert over(None) == [False], "nothing was measured"


def test_a_calibration_looks_at_the_end_only_and_a_short_gate_never(opened):
    one = OneGate(opened(gate=None, calibrate=True), MODEL)
    ends = []
    for n in range(13):
        one.gated = gated_so_far(n)
        ends += [n] if one.over else []
    assert ends == [12]
    one = OneGate(real_session(opened(), gate=None), MODEL)
    for there, dropped, over in ((1, 0, False), (2, 0, True), (1, 1, True), (0, 1, False)):
        one.gated = gated_so_far(there, dropped, settled=False)
        assert one.over is over


def test_records_of_pairs_end_a_gate_at_a_look_only(opened):
    made, one = pairs(6), OneGate(opened(), MODEL)
    for n, over in ((4, True), (5, False), (6, True)):
        one.gated = judge_gate(made[: 4 * n], GateCriteria())
        assert one.over is over


@pytest.mark.parametrize("most", [4, 5])
def test_it_ends_when_there_are_as_many_pairs_as_may_be(opened, most):
    session = opened(noisy(0.1), gate_pairs=str(most))
    gated = Gates(session).of(MODEL)
    assert gated.outcome is State.INCONCLUSIVE and len(gated.pairs) == most
    assert len(session.devices.pool.starts) == 2 * most


def test_pairs_that_cannot_be_trusted_are_made_again(opened):
    session = opened(faulty(1, lost_from=8))
    gated = Gates(session).of(MODEL)
    assert [p.number for p in gated.pairs] == [2, 3, 4, 5] and gated.outcome is State.PASSES
    [why] = gated.dropped
    assert why.startswith("pair 1:") and any(note.endswith(", 4 pairs count") for note in session.notes)


def test_noisy_pairs_count_and_nothing_of_them_is_measured_again(opened):
    session = opened(side=["candidate:arg=slow_clock_from=8"])
    gated = Gates(session).of(MODEL)
    assert [p.number for p in gated.pairs] == [1, 2, 3, 4] and gated.dropped == ()
    assert len(session.devices.pool.starts) == 8 and gated.outcome is State.PASSES
    assert sum(bool(check(m).noise) for m in stored(session) if m.paired.side == "candidate") == 4


def test_after_too_many_of_them_it_gives_up(opened):
    session = opened(side=["candidate:arg=lost_from=8"])
    gated = Gates(session).of(MODEL)
    assert len(gated.dropped) == MAX_DROPPED + 1 and gated.pairs == () and gated.outcome is State.INCONCLUSIVE
    assert len(session.devices.pool.starts) == 2 * (MAX_DROPPED + 1)


def test_as_many_as_may_be_dropped_do_not_cost_the_pairs_that_were_asked_for(opened):
    gated = Gates(opened(faulty(2 * MAX_DROPPED, preempt_from=8), gate_pairs="4")).of(MODEL)
    assert (len(gated.dropped), len(gated.pairs), gated.outcome) == (MAX_DROPPED, 4, State.PASSES)


class SecondTime(SimulatedEngine):
    """Its first run has failed requests, the others have none."""

    runs = 0

    def run(self, *arguments):
        self.runs += 1
        found = super().run(*arguments)
        return replace(found, failures=1) if self.runs == 1 else found


def test_a_load_has_a_second_chance_on_its_launch(opened):
    session = opened(SecondTime)
    gated = Gates(session).of(MODEL)
    assert gated.outcome is State.PASSES and gated.dropped == () and len(gated.pairs) == 4
    first = [m for m in stored(session) if m.launch == stored(session)[0].launch]
    assert [m.run.failures for m in first] == [1, 0]


# Going on where an earlier run ended


class Broken(Exception):
    """A run is killed."""


def killed_after(launches):
    """So many launches, and the next is not made."""
    left = iter(range(launches))

    def start(spec):
        if next(left, None) is None:
            raise Broken
        return SimulatedEngine(spec)

    return start


def begun(opened, launches, **given):
    with pytest.raises(Broken):
        Gates(opened(killed_after(launches), **given)).of(MODEL)


@pytest.mark.parametrize(("launches", "there"), [(1, 0), (2, 1), (5, 2)])
def test_a_gate_that_was_broken_off_goes_on_with_its_whole_pairs(opened, launches, there):
    begun(opened, launches)
    session = opened(resume=True)
    before = stored(session)
    gated = Gates(session).of(MODEL)
    assert session.devices.pool.starts == in_turn(session, range(there + 1, 5))
    assert [p.number for p in gated.pairs] == [1, 2, 3, 4] and gated.outcome is State.PASSES
    assert {m.paired.gate for m in stored(session)} == {gated.gate} == {before[0].paired.gate}
    assert any(f"goes on from {there} pair" in note for note in session.notes)


def test_of_a_pair_that_was_begun_twice_the_whole_one_counts(opened):
    for launches in (1, 1):
        begun(opened, launches, resume=True)
    session = opened(resume=True)
    [first] = [p for p in Gates(session).of(MODEL).pairs if p.number == 1]
    launched = list(dict.fromkeys(m.launch for m in stored(session)))
    assert [m.measurements[0].launch for m in first.launches] == launched[2:4]


def test_a_gate_that_is_over_is_told_again_and_nothing_is_launched(opened):
    done = Gates(opened(noisy(0.02), gate_pairs="6")).of(MODEL)
    session = opened(resume=True, gate_pairs="6")
    assert session.results.repeats == {} and session.verdicts.curves() == [], "a gate has no points of a sweep"
    assert launches_left(session, MODEL) == (0, 0)
    again = Gates(session).of(MODEL)
    assert session.devices.pool.starts == [] and again.gate == done.gate
    assert [(c.name, c.n, c.outcome) for c in again.gated] == [(c.name, c.n, c.outcome) for c in done.gated]
    assert launches_left(session, MODEL) == (0, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"gate_pairs": "6"},
        {"gate_margin": "0.05"},
        {"concurrency": "9"},
        {"window": "2"},
        {"gate_caches": "cold"},
        {"seed": "1"},
        {"side": ["candidate:arg=b_half=9"]},
        {"side": ["candidate:env=PYTHONPATH=/checkout"]},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_gate_that_asks_something_else_begins_anew(opened, other):
    begun(opened, 2)
    session = opened(resume=True, **other)
    one = OneGate(session, MODEL)
    assert one.id not in {m.paired.gate for m in stored(session)} and one.gated is None and one.found == []
    assert launches_left(session, MODEL)[1] == 8
    assert sum("begins anew" in note for note in session.notes) == 1, "said once"


@pytest.mark.parametrize("resume", [True, False])
def test_a_gate_without_an_archive_to_resume_says_once_that_it_begins_anew(opened, tmp_path, resume):
    session = opened(resume=resume)
    for _ in range(2):
        launches_left(session, MODEL)
    said = [note for note in session.notes if "begins anew" in note]
    assert len(said) == resume and all(str(tmp_path / "a.jsonl") in note for note in said)


@pytest.mark.parametrize(
    ("launches", "given", "left"),
    [
        (0, {}, (1, 8)),
        (4, {}, (0, 4)),
        (4, {"gate": None, "calibrate": True}, (0, 20)),
        (0, {"side": ["candidate:arg=b_half=9"]}, (2, 8)),
    ],
)
def test_a_plan_knows_how_many_launches_are_left(opened, launches, given, left):
    if launches:
        begun(opened, launches)
    assert launches_left(opened(resume=True, **given), MODEL) == left


def test_a_gate_that_goes_on_reads_its_archive_once_and_says_so_once(opened, monkeypatch):
    begun(opened, 4)
    session, reads = opened(resume=True), []
    monkeypatch.setattr(sessions, "read", reads.append)
    lefts = [launches_left(session, MODEL)]
    session.devices.pool.on_started = lambda *_: lefts.append(launches_left(session, MODEL))
    Gates(session).of(MODEL)
    assert reads == [] and {*lefts} == {(0, 4)} and launches_left(session, MODEL) == (0, 0)
    assert len([note for note in session.notes if "goes on from" in note]) == 1


# When it is broken off


def test_a_gate_that_was_broken_off_is_not_tried_again_and_says_so(opened):
    session = opened(side=["candidate:arg=die_at=8"], concurrency="4,8")
    gates = Gates(session)
    with pytest.raises(EngineFailed) as first:
        gates.of(MODEL)
    assert "the candidate, pair 1" in first.value.problem and "concurrency 8" in first.value.problem
    assert len(session.devices.pool.starts) == 2 and session.devices.pool.current is None
    with pytest.raises(EngineFailed) as again:
        gates.of(MODEL)
    assert again.value.problem.endswith(first.value.problem) and again.value.problem != first.value.problem
    assert len(session.devices.pool.starts) == 2 and session.gates == []
    assert [m.paired.side for m in stored(session)] == ["baseline", "baseline", "candidate"], "what there is, is kept"


def test_a_side_that_does_not_start_is_named_at_its_warm_up(opened):
    class Refuses(SimulatedEngine):
        def start(self, on_wait=None):
            if ("b_half", 9) in self.spec.extra:
                raise EngineFailed("it did not start: no memory. The log ends with\nmany\nlines")
            return self

    session = real_session(opened(), Refuses, side=["candidate:arg=b_half=9"])
    gates = Gates(session)
    with pytest.raises(EngineFailed) as first:
        gates.of(MODEL)
    assert "the candidate, before the first pair" in first.value.problem and "lines" in first.value.problem
    with pytest.raises(EngineFailed) as again:
        gates.of(MODEL)
    assert "no memory" in str(again.value) and "lines" not in str(again.value), "the log is shown once"
    assert len(session.devices.pool.starts) == 2


@pytest.mark.parametrize(
    ("error", "first"),
    [(OSError("No space left on device"), OSError), (AssertionError("what cannot be"), RuntimeError)],
)
def test_what_nobody_foresaw_is_not_tried_again_either(opened, monkeypatch, error, first):
    """Nor is an assertion of ours taken for a verdict that fails."""

    def breaks(measurement):
        raise error

    session = opened()
    monkeypatch.setattr(session.executor.archive, "add", breaks)
    gates = Gates(session)
    with pytest.raises(first):
        gates.of(MODEL)
    with pytest.raises(EngineFailed) as again:
        gates.of(MODEL)
    assert f"{type(error).__name__}: {error}" in again.value.problem and len(session.devices.pool.starts) == 1


def test_one_model_s_failure_is_not_another_s(opened):
    small = "opt-350m"
    session = opened(lambda spec: SimulatedEngine(spec) if spec.model == small else None, models=f"{MODEL},{small}")
    gates = Gates(session)
    with pytest.raises(AttributeError):
        gates.of(MODEL)
    assert len(gates.of(small).pairs) == 4 and list(gates.failed) == [MODEL]


def test_an_interrupted_gate_shows_how_far_it_came(opened, monkeypatch):
    def interrupted(self, launches):
        yield from list(launched(self, launches[:6]))
        raise KeyboardInterrupt

    launched = OneGate.launch_in_turn
    monkeypatch.setattr(OneGate, "launch_in_turn", interrupted)
    session = opened()
    with pytest.raises(KeyboardInterrupt):
        Gates(session).of(MODEL)
    [gated] = session.gates
    assert len(gated.pairs) == 3 and session.devices.pool.current is None


# In view of the noise of this host


@pytest.mark.parametrize("known", [0, 1, 3])
def test_a_calibration_needs_pairs_with_every_figure(opened, known):
    """Of one such pair the noise would be 0, and every later gate would pass by it."""
    half = [m for n in range(known + 1, 5) for m in [*launch("baseline", n), *launch("candidate", n, ready_s=None)]]
    gated = judge_gate([*pairs(known), *half], GateCriteria())
    with pytest.raises(BadUsage) as caught:
        gate.in_view_of_noise(opened(calibrate=True, gate=None), gated)
    assert caught.value.problem.startswith(f"{known} pairs of opt-1.3b")


def test_a_calibration_is_kept_and_later_gates_are_judged_by_it(opened):
    gated, session = judge_gate(pairs(4), GateCriteria()), opened(calibrate=True, gate=None)
    assert gate.in_view_of_noise(session, gated).gate == gated.gate
    [entry] = read_calibrations(session.options.records).values()
    assert (entry.place.model, entry.place.loads) == ("opt-1.3b", (8, 64)) and entry.place.pairs == 12
    assert len(session.notes) == 1, "it is told"
    later = opened()
    gate.in_view_of_noise(later, gated)
    assert later.notes == session.notes, "that of the same place counts"


def test_a_real_host_without_a_calibration_is_told_how_to_make_one(opened):
    gated, session = judge_gate(pairs(1), GateCriteria()), real_session(opened())
    assert gate.in_view_of_noise(session, gated) is gated
    assert "--slm-calibrate" in session.notes[-1]
    none = judge_gate([*launch("baseline", 1)], GateCriteria())
    gate.in_view_of_noise(session, none)
    assert len(session.notes) == 1, "without pairs there is nothing to say"


def test_a_calibration_goes_on_to_all_its_pairs(opened, monkeypatch):
    monkeypatch.setattr(gate, "in_view_of_noise", lambda session, gated: gated)
    done = Gates(opened(gate_pairs="6")).of(MODEL)
    session = opened(gate=None, calibrate=True, resume=True, gate_pairs="6")
    again = Gates(session).of(MODEL)
    assert (len(done.pairs), len(again.pairs), again.gate) == (4, 6, done.gate)
    assert session.devices.pool.starts == in_turn(session, (5, 6))


# Traces


@pytest.mark.parametrize(("extra", "traces"), [((), 1), (("profiler=false",), 0)])
def test_each_side_of_a_gate_that_fails_is_traced_at_the_load_that_fails(opened, tmp_path, extra, traces):
    session = opened(profile=str(tmp_path / "p"), side=["candidate:arg=t_inf=1000"], engine_arg=[*STEADY, *extra])
    session.devices.pool = Pool()
    assert Gates(session).of(MODEL).outcome is State.FAILS
    written = {side: list((tmp_path / "p" / MODEL / side).iterdir()) for side in SIDES}
    assert {side: len(paths) for side, paths in written.items()} == dict.fromkeys(SIDES, traces)
    said = session.notes[-1]
    assert "at 8:" in said and all(str(path) in said for paths in written.values() for path in paths)
    assert session.devices.pool.starts[8:] == [both_sides(session)[side] for side in SIDES]


def test_nothing_is_traced_where_nothing_fails(opened, tmp_path):
    session = opened(profile=str(tmp_path / "p"))
    Gates(session).of(MODEL)
    assert len(session.devices.pool.starts) == 8 and not (tmp_path / "p").exists()


def test_a_calibration_is_not_traced(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(OneGate, "traced", lambda self, gated: "traced")
    monkeypatch.setattr(gate, "in_view_of_noise", lambda session, gated: gated)
    session = opened(profile=str(tmp_path / "p"), calibrate=True, gate=None, gate_pairs="4")
    Gates(session).of(MODEL)
    assert "traced" not in session.notes


def test_a_folder_that_cannot_be_made_is_said_and_spoils_nothing(opened, tmp_path):
    (tmp_path / "p").write_text("a file")
    session = opened(profile=str(tmp_path / "p"), side=["candidate:arg=t_inf=1000"])
    assert Gates(session).of(MODEL).outcome is State.FAILS and len(session.devices.pool.starts) == 8
    assert session.notes[-1].count("none (") == 2
