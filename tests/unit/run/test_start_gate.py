"""A gate of the start: one engine starts at a time, with empty caches and then with what is in them, serves one request
and sleeps if both sides can; it ends at its own looks, goes on where it was broken off, and knows what it takes."""

from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from refusals import refused
from simulated_sessions import FEW_STEPS, MODEL, stored

from pytest_slmserve.analysis.claims.table import stored_gates
from pytest_slmserve.analysis.gate.launch_pairs import SIDES, STARTS
from pytest_slmserve.analysis.gate.starts import FIRST
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.pool import Pool, launch_engine
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.options.read import read_options
from pytest_slmserve.run import one_gate as gates
from pytest_slmserve.run.gate import Gates, check_gate, launches_left, not_told, one_gate
from pytest_slmserve.run.one_gate import NAPS, StartGate, order
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.specs import GIB, EngineSpec

STEADY = [*FEW_STEPS["engine_arg"], "scatter=0.001"]
SLEEPS = [*STEADY, "enable_sleep_mode=true"]
SLOWER = {"simulate_slowdown": "40%"}


@pytest.fixture
def opened(opened, monkeypatch):
    """Opens sessions that gate the start; `folders` are those that launches were given, `living` engines at most."""
    given = []

    @contextmanager
    def folders(how, side, specs):
        yield {"made": f"{len(given)}-{how}-{side}"}

    monkeypatch.setattr(gates, "caches", folders)

    def open_session(start=SimulatedEngine, **words):
        session = opened(**{"gate": True, "gate_launches": "start", **FEW_STEPS, "engine_arg": STEADY, **words})
        session.given, session.killed = given, []

        def launch(spec, extra_env=None, **_):
            given.append((extra_env or {}).get("made", ""))
            return start(spec)

        session.devices.pool = Pool(launch)
        session.begin()
        return session

    return open_session


def parts(session):
    return [(m.paired.pair, m.paired.side, m.paired.caches, m.paired.second) for m in stored(session)]


def test_sides_start_cold_then_warm(opened):
    session = opened()
    assert launches_left(session, MODEL) == (1, 12) and type(one_gate(session, MODEL)) is StartGate
    gated = Gates(session).of(MODEL)
    assert gated.outcome is State.PASSES and [pair.number for pair in gated.pairs] == [1, 2, 3]
    assert parts(session) == [
        (n, side, how, side != order(n)[0]) for n in (1, 2, 3) for side in order(n) for how in ("cold", "warm")
    ]
    folders = [session.given[i : i + 2] for i in range(0, 12, 2)]
    assert all(cold == warm and "-cold-" in cold for cold, warm in folders) and len({*session.given}) == 6
    found = stored(session)
    assert {m.load for m in found} == {FIRST} and {len(m.run.samples) for m in found} == {1}
    assert len({m.launch for m in found}) == 12 and {m.workload.mean_output_tokens for m in found} == {16}
    cold, warm = ([m.resolved for m in found if m.paired.caches == how] for how in ("cold", "warm"))
    assert min(m.ready_s for m in cold) > 2 * max(m.ready_s for m in warm)
    assert all(0 < sum(seconds for _, seconds in m.stages) < m.ready_s for m in (*cold, *warm))
    assert launches_left(session, MODEL) == (0, 0) and not any("calibration" in note for note in session.notes)


@pytest.mark.parametrize(("given", "states", "outcomes", "pairs"), [
    ({}, ("cold", "warm"), {"start": "passes", "start-cold": "passes"}, 3),
    (SLOWER, ("cold", "warm"), {"start": "fails", "start-cold": "fails"}, 3),
    ({"side": ["candidate:arg=start_s=30"], "gate_caches": "warm"}, ("warm",), {"start": "fails"}, 3),
    ({"gate_caches": "cold"}, ("cold",), {"start-cold": "passes"}, 3),
    ({"engine_arg": [*STEADY, "scatter=0.08"]}, ("cold", "warm"),
     {"start": "inconclusive", "start-cold": "passes"}, 5),
    ({"engine_arg": SLEEPS, "side": ["candidate:arg=wake_s=0.6"]}, ("cold", "warm"),
     {"start": "passes", "start-cold": "passes", "wake": "fails"}, 3),
    ({"side": ["candidate:arg=enable_sleep_mode=true"]}, ("cold", "warm"),
     {"start": "passes", "start-cold": "passes"}, 3),
])  # fmt: skip
def test_start_gate_judges_asked_states(opened, given, states, outcomes, pairs):
    session = opened(**given)
    check_gate(session, MODEL)
    judged = {name for name in STARTS if name not in not_told(session, MODEL)}
    gated = Gates(session).of(MODEL)
    seen = {name: verdict.state.value for name in STARTS if (verdict := gated.verdict(name)) is not None}
    assert (seen, len(gated.pairs), gated.states) == (outcomes, pairs, states) and judged == seen.keys()
    assert {len(m.paired.wake_s) for m in stored(session)} == {NAPS * ("wake" in judged)}
    contents = read(session.options.records)
    [(again, note)] = stored_gates(contents.measurements, contents.plans)
    assert again == gated and note == ""


@pytest.mark.parametrize(("given", "warm_ups", "launches"), [
    ({}, ["warm-baseline", "warm-candidate", "cold-baseline"], 2 + 12),
    ({"gate_caches": "warm"}, ["warm-baseline", "warm-candidate"] * 2, 4 + 6),
])  # fmt: skip
def test_real_engine_warms_up_first(opened, monkeypatch, given, warm_ups, launches):
    session = opened(side=["candidate:arg=max_num_seqs=64"], **given)
    session.platform = "cuda"
    monkeypatch.setattr(session.planner, "environment", lambda spec: session.host.environment)
    with suppress(KeyboardInterrupt):
        Gates(session).of(MODEL)
    assert [name.partition("-")[2] for name in session.given[: len(warm_ups)]] == warm_ups
    assert len(session.given) == launches and len(stored(session)) == launches - warm_ups.count("warm-baseline") * 2


def test_start_gate_resumes_whole_pairs(opened):
    starts = []

    def broken(spec):
        starts.append(spec)
        if len(starts) == 7:
            raise KeyboardInterrupt
        return SimulatedEngine(spec)

    session = opened(broken)
    with pytest.raises(KeyboardInterrupt):
        Gates(session).of(MODEL)
    assert len(stored(session)) == 6
    session = opened(resume=True)
    assert launches_left(session, MODEL) == (0, 8)
    gated = Gates(session).of(MODEL)
    assert [pair.number for pair in gated.pairs] == [1, 2, 3] and len(session.given) - 7 == 8
    assert any("continues from 1 pair of launches" in note for note in session.notes)
    for other in ({"gate_caches": "warm"}, {"gate_launches": "apart", "concurrency": "8"}):
        session = opened(resume=True, **other)
        one_gate(session, MODEL)
        assert any("starts again" in note for note in session.notes)


def test_sleepless_engine_leaves_wake_inconclusive(opened):
    class Sleepless(SimulatedEngine):
        def nap(self):
            raise EngineFailed("the engine failed: no sleep; /log")

    session = opened(Sleepless, engine_arg=SLEEPS)
    gated = Gates(session).of(MODEL)
    assert gated.verdict("wake").state is State.INCONCLUSIVE is gated.outcome and len(gated.pairs) == 3
    assert [note for note in session.notes if "does not sleep: the engine failed: no sleep" in note]
    on_cpu = EngineSpec(MODEL, platform="cpu", kv_cache_bytes=GIB, extra=(("enable_sleep_mode", True),))
    for spec, told in (
        (on_cpu, "no sleep mode"), (replace(on_cpu, platform="cuda", interface="server"), "not put to sleep"),
        (replace(on_cpu, interface="transformers", extra=()), "Transformers"),
    ):  # fmt: skip
        session = opened()
        session.planner.spec = lambda *_, spec=spec, **__: spec
        with refused(told, hint="--slm-interface engine" if "sleep mode" not in told else "--slm-gpu"):
            check_gate(session, MODEL)
        assert session.devices.pool.starts == []


def test_failed_first_request_drops_pair(opened):
    gated = Gates(opened(engine_arg=[*STEADY, "fail_at=1"])).of(MODEL)
    assert gated.pairs == () and gated.outcome is State.INCONCLUSIVE and len(gated.dropped) == 4
    assert gated.verdict("start").state is State.INCONCLUSIVE
    with refused("a calibration measures loads", hint="--slm-gate --slm-gate-launches=start"):
        read_options({"calibrate": True, "simulate": True, "gate_launches": "start"}, {}, {})
    assert launch_engine(one_gate(opened(), MODEL).specs[SIDES[0]]).nap() > (0, 0)
