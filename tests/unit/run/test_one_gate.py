"""A gate whose sides live on one device at once: who lives when, whose window is next and how many there are, when it
ends and from where it goes on, what a calibration measures more; and where sides cannot live together, or are none."""

import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from refusals import refused
from simulated_sessions import FEW_STEPS, MODEL, stored

from pytest_slmserve.analysis.gate import decision
from pytest_slmserve.analysis.gate.launch_pairs import EXACT, GATED, SIDES, TOGETHER
from pytest_slmserve.analysis.gate.side_by_side import FIRST_PAIRS, THROWN_AWAY
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.baselines import read_calibrations
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.report.gate import next_step
from pytest_slmserve.run import one_gate as gates
from pytest_slmserve.run.gate import Gates, check_differ, check_gate, launches_left, live_together, not_told, one_gate
from pytest_slmserve.run.one_gate import CALIBRATING, OneGate, SideBySide, order, sides
from pytest_slmserve.schema.errors import EngineFailed

STEADY = [*FEW_STEPS["engine_arg"], "scatter=0"]
LEAST = THROWN_AWAY + FIRST_PAIRS
UNCLEAR = {"simulate_slowdown": "1.9%"}  # of a margin of 3%: too much for a pass, and two launches are too few


class Device:
    """One that knows the engines that live on it, and after each event ("+" a start, "-" an end, otherwise a window)
    how many do. fails: planted failures of a run, by the number of the start and of the run. breaks: the run that ends
    all."""

    def __init__(self, fails=(), breaks=()):
        self.fails, self.breaks, self.starts = fails, breaks, 0
        self.living, self.events = {}, []

    def launch(self, spec, **_):
        device, runs = self, count(1)

        class Watched(SimulatedEngine):
            number = 0

            def start(self, on_wait=None):
                device.starts += 1
                self.number = device.starts
                device.living[id(self)] = self.number
                device.events.append(("+", len(device.living)))
                return super().start(on_wait)

            def close(self):
                if device.living.pop(id(self), None):
                    device.events.append(("-", len(device.living)))
                super().close()

            def run(self, *arguments):
                run = self.number, next(runs)
                device.events.append((run[0], len(device.living)))
                if run == device.breaks:
                    raise EngineFailed("planted")
                found = super().run(*arguments)
                return replace(found, failures=1) if run in device.fails else found

        return Watched(spec)


@pytest.fixture
def opened(opened, monkeypatch):
    """Opens sessions that gate at one load, unless told, on a device."""
    monkeypatch.setattr(gates, "LEAST_WINDOW_S", 0.02)  # a round of requests
    monkeypatch.setattr(gates, "MANY_CORES", 1)  # two launches import at once

    def open_session(device=None, **given):
        session = opened(**{"gate": True, "concurrency": "8", **FEW_STEPS, "engine_arg": STEADY, **given})
        session.devices.pool = Pool((device or Device()).launch)
        session.begin()
        return session

    return open_session


def test_both_sides_live_together(opened):
    device = Device()
    session = opened(device, **UNCLEAR, concurrency="8,16")
    gated = Gates(session).of(MODEL)
    assert [pair.number for pair in gated.pairs] == [1, 2, 3, 4] and device.living == {}
    told = [what for what, _ in device.events if what in ("+", "-")]
    assert told == ["+", "+", "-", "-"] * 4 and max(n for _, n in device.events) == 2
    assert {n for what, n in device.events if what not in ("+", "-")} == {2}
    both = sides(session.planner.spec(MODEL, gpu_memory_utilization=session.options.gpu_memory_utilization / 2),
                 session.options)  # fmt: skip
    assert session.devices.pool.starts == [both[side] for n in range(1, 5) for side in order(n)]
    assert [order(n)[0] for n in (1, 2)] == list(SIDES)
    found = stored(session)
    assert {m.spec.gpu_memory_utilization for m in found} == {0.45} and {m.paired.gate for m in found} == {gated.gate}
    each = [(m.paired.pair, m.load.concurrency, m.paired.window, m.paired.side, m.paired.second) for m in found]
    turns = [(w, side, i == 1) for w in range(1, LEAST + 1) for i, side in enumerate(SIDES if w % 2 else SIDES[::-1])]
    assert each == [(n, load, *turn) for n in range(1, 5) for load in (8, 16) for turn in turns]
    assert len({m.launch for m in found}) == 8 and gated.windows == (FIRST_PAIRS,) * 8
    assert len({m.workload.hash for m in found}) == 1 and not any(m.paired.scores for m in found)
    asked = [m.paired for m in found if m.paired.outputs]
    assert [(its.pair, its.side, its.window) for its in asked] == [(1, side, 1) for side in SIDES], "once is enough"


@pytest.mark.parametrize(("given", "launches", "outcome"), [
    ({}, 2, State.PASSES), ({"simulate_slowdown": "8%"}, 2, State.FAILS), (UNCLEAR, 4, State.FAILS),
])  # fmt: skip
def test_clear_gate_ends_early(opened, given, launches, outcome):
    session = opened(**given)
    assert launches_left(session, MODEL) == (0, 4)
    gated = Gates(session).of(MODEL)
    assert (len(gated.pairs), gated.outcome, len(session.devices.pool.starts)) == (launches, outcome, 2 * launches)
    assert launches_left(session, MODEL) == (0, 0) and gated.terms.together and gated.terms.pairs == 4
    assert session.notes[-1].endswith(f"{launches} pairs of launches count")
    assert not one_gate(session, MODEL).cold(), "how long a start takes is not compared"

    def over(there, settled=True, refused=()):
        shown = [SimpleNamespace(name="seconds")]
        one.gated = SimpleNamespace(pairs=range(there), settled=settled, terms=one.terms, gated=shown, refused=refused)
        return one.over

    one = SideBySide(opened(), MODEL)
    assert not one.over and [n for n in range(6) if over(n)] == [2, 4, 5]
    assert [n for n in range(6) if over(n, settled=False)] == [4, 5]
    assert [n for n in range(6) if over(n, refused={"seconds"})] == [1, 2, 3, 4, 5]
    one = SideBySide(opened(gate=None, calibrate=True), MODEL)
    assert [n for n in range(10) if over(n, refused={"seconds"})] == [8, 9]


@pytest.mark.parametrize(("windows", "launches"), [(2, 0), (LEAST + 3, 1)])
def test_interrupted_gate_shows_its_windows(opened, monkeypatch, windows, launches):
    """The interrupted launch counts in the last screen if enough of its windows were measured."""
    session, whole = opened(engine_arg=[*STEADY, "noise=0.02"], **UNCLEAR), SideBySide.window

    def interrupted(self, number, load, window, side, second):
        if window > windows:
            raise KeyboardInterrupt
        return whole(self, number, load, window, side, second)

    monkeypatch.setattr(SideBySide, "window", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Gates(session).of(MODEL)
    [gated] = session.gates
    assert len(gated.pairs) == launches and len(stored(session)) == 2 * windows


def test_noisy_launches_get_equal_windows(opened, monkeypatch):
    gated = Gates(opened(engine_arg=[*STEADY, "noise=0.02"], **UNCLEAR)).of(MODEL)
    assert len(gated.windows) == 4 and FIRST_PAIRS < gated.windows[0] <= 40 and len({*gated.windows}) == 1
    numbers = [m.paired.window for m in gated.measurements("candidate")]
    assert numbers == [*range(THROWN_AWAY + 1, THROWN_AWAY + 1 + gated.windows[0])] * 4
    session = opened(Device({(start, run) for start in range(99) for run in range(99)}))
    gated = Gates(session).of(MODEL)
    assert gated.pairs == () and gated.outcome is State.INCONCLUSIVE
    assert len(session.devices.pool.starts) == 2 * (4 + decision.MAX_DROPPED)
    laps = []

    class Clock:
        def lap(self):
            laps.append(len(laps))
            return None if laps[-1] in (0, 1, 9, 10) else float(laps[-1])

    session = opened(archive="busy")
    monkeypatch.setattr(session.devices, "busy_clock", Clock)
    Gates(session).of(MODEL)
    found = stored(session)
    last = {n: max(m.paired.window for m in found if m.paired.pair == n) for n in (1, 2)}
    assert last == {1: LEAST + 1, 2: LEAST}, "laps 9 and 10 are the fifth pair of windows'"
    wanted = [None if lap in (1, 9, 10) else lap for lap in laps if lap not in (0, 1 + 2 * last[1])]
    assert [m.paired.busy_s for m in found] == wanted, "one lap more at the beginning of each launch"


LATER, ALWAYS = {(1, THROWN_AWAY + n) for n in (3, 5)}, {(start, run) for start in (1, 5) for run in range(99)}


@pytest.mark.parametrize(("fails", "launches", "windows", "told"), [
    (LATER, [1, 2], [LEAST + 2, LEAST], 2), (ALWAYS, [2, 4], [LEAST + decision.MAX_DROPPED, LEAST] * 2, None),
])  # fmt: skip
def test_untrusted_windows_are_made_again(opened, fails, launches, windows, told):
    session = opened(Device(fails))
    gated = Gates(session).of(MODEL)
    assert [pair.number for pair in gated.pairs] == launches and gated.outcome is State.PASSES
    assert [*Counter(m.paired.pair for m in stored(session)).values()] == [2 * n for n in windows]
    assert told is None or len(gated.dropped) == told


@pytest.mark.parametrize("breaks", [(1, 5), (3, 1), (4, 7)])
def test_gate_resumes_whole_launches(opened, breaks):
    device = Device(breaks=breaks)
    with pytest.raises(EngineFailed):
        Gates(opened(device)).of(MODEL)
    assert device.living == {} and device.events[-1] == ("-", 0)
    session = opened(resume=True)
    there, before = (breaks[0] > 2), stored(session)
    assert launches_left(session, MODEL) == (0, 4 - 2 * there)
    gated = Gates(session).of(MODEL)
    assert len(session.devices.pool.starts) == 4 - 2 * there and [pair.number for pair in gated.pairs] == [1, 2]
    found = stored(session)
    assert {m.paired.gate for m in found} == {gated.gate} and found[: len(before)] == before
    counts, broken = {m.launch for side in SIDES for m in gated.measurements(side)}, 1 + there
    assert not counts & {m.launch for m in before if m.paired.pair == broken}
    again = opened(resume=True)
    assert Gates(again).of(MODEL).outcome is State.PASSES and again.devices.pool.starts == []


@pytest.mark.parametrize("launches", ["together", "apart"])
def test_resumed_gate_measures_all_loads(opened, launches):
    """Also if its first launch was interrupted before the large load; a whole gate of the small load is another one."""
    given = {"concurrency": "4,8", "gate_launches": launches}
    with pytest.raises(EngineFailed):
        Gates(opened(Device(breaks=(1, 1 + LEAST if launches == "together" else 2)), **given)).of(MODEL)
    assert {m.load.concurrency for m in stored(opened(**given))} == {4}
    gated = Gates(opened(resume=True, **given)).of(MODEL)
    loads = [{m.load.concurrency for m in pair.baseline.measurements} for pair in gated.pairs]
    assert gated.outcome is State.PASSES and len(loads) > 1 and {*map(frozenset, loads)} == {frozenset({4, 8})}
    assert {m.paired.gate for m in stored(opened(**given))} == {gated.gate}, "it is the interrupted one"

    given["archive"] = "small"
    small = Gates(opened(**given | {"concurrency": "4"})).of(MODEL)
    both = Gates(opened(resume=True, **given)).of(MODEL)
    assert small.gate != both.gate and {m.load.concurrency for m in both.measurements("baseline")} == {4, 8}


def test_resumed_gate_ends_as_whole_one(opened):
    """Its windows are as many as those of the launches that it continues, and it knows the noise of a calibration."""
    given = {"engine_arg": [*FEW_STEPS["engine_arg"], "scatter=0.016", "noise=0.03"], "concurrency": "8,16", **UNCLEAR}
    whole = Gates(opened(archive="whole", **given)).of(MODEL)
    with pytest.raises(EngineFailed):
        Gates(opened(Device(breaks=(3, 5)), **given)).of(MODEL)
    resumed = Gates(opened(resume=True, **given)).of(MODEL)
    assert (resumed.windows, resumed.outcome, len(resumed.pairs)) == (whole.windows, whole.outcome, 4)
    assert [each.ratio for each in resumed.gated] == [each.ratio for each in whole.gated]
    given |= {"concurrency": "8", "archive": "first"}
    with pytest.raises(EngineFailed):
        Gates(opened(Device(breaks=(1, LEAST + 2)), **given)).of(MODEL)
    assert min(Gates(opened(resume=True, **given)).of(MODEL).windows[1:]) > LEAST, "the first launch wanted more"


def test_resumed_gate_knows_calibration(opened):
    """Without it, two launches would settle the gate, which would then never go on."""
    noisy = [*FEW_STEPS["engine_arg"], "scatter=0.031"]
    Gates(opened(gate=None, calibrate=True, engine_arg=noisy)).of(MODEL)
    with pytest.raises(EngineFailed):
        Gates(opened(Device(breaks=(6, 3)), simulate_slowdown="1.3%")).of(MODEL)
    session = opened(simulate_slowdown="1.3%", resume=True)
    gated = Gates(session).of(MODEL)
    assert (len(gated.pairs), len(session.devices.pool.starts), gated.calibrated) == (4, 4, True)


def test_gate_of_noisy_runner_ends_early(opened, monkeypatch):
    """More launches would not let it pass."""
    monkeypatch.setattr(decision, "MIN_POWER", 1.1)
    Gates(opened(gate=None, calibrate=True, engine_arg=FEW_STEPS["engine_arg"])).of(MODEL)
    gated = Gates(opened()).of(MODEL)
    assert (len(gated.pairs), gated.outcome) == (2, State.INCONCLUSIVE) and "noisy" in gated.verdict("throughput").why
    assert next_step(gated)[1] == "--slm-gate-launches=apart"


def test_outputs_of_disturbed_launches_count(opened):
    disturbed = {(start, run) for start in (1, 3) for run in range(99)}  # of the launches that have them
    gated = Gates(opened(Device(disturbed), load_format="auto")).of(MODEL)
    assert [pair.number for pair in gated.pairs] == [3, 4] and gated.outcome is State.PASSES
    assert gated.verdict("outputs").state is State.PASSES


@pytest.mark.parametrize(
    ("launches", "breaks", "pairs"), [("apart", (6, 1), [2, 3, 4, 5]), ("start", (9, 1), [1, 2, 3])]
)
def test_dropped_pair_does_not_end_gate(opened, launches, breaks, pairs):
    given = {"gate_launches": launches}
    with pytest.raises(EngineFailed):
        Gates(opened(Device({(1, run) for run in range(9)}, breaks), **given)).of(MODEL)
    goes_on = next_step(one_gate(opened(resume=True, **given), MODEL).judge())[1]
    assert goes_on.startswith(f"--slm-gate --slm-resume --slm-gate-launches={launches}")
    assert [pair.number for pair in Gates(opened(resume=True, **given)).of(MODEL).pairs] == pairs


@pytest.mark.parametrize("begun", [False, True])
def test_calibration_informs_later_gates(opened, begun):
    given = {"gate": None, "calibrate": True, "engine_arg": FEW_STEPS["engine_arg"]}
    if begun:
        with pytest.raises(EngineFailed):
            Gates(opened(Device(breaks=(1, LEAST + 5)), **given)).of(MODEL)
    device = Device()
    session = opened(device, **given, resume=begun)
    assert launches_left(session, MODEL) == (0, 2 * CALIBRATING)
    gated = Gates(session).of(MODEL)
    assert (len(gated.pairs), len(session.devices.pool.starts)) == (CALIBRATING, 2 * CALIBRATING)
    living = [n for what, n in device.events if what == 1]  # of the first engine
    assert living[: 2 * LEAST] == [1] * LEAST + [2] * LEAST
    own = [m for m in stored(session) if m.paired.pair == 0]
    assert [m.paired.window for m in own][-2 * LEAST :] == [*range(1, 2 * LEAST + 1)]
    assert {m.paired.side for m in own} == {"baseline"} and len({m.launch for m in own}) == 1 + begun
    assert any("beside an idle engine" in note for note in session.notes)

    [kept] = read_calibrations(session.options.records).values()
    assert (kept.place.launches, kept.place.pairs, kept.place.loads) == ("together", 4, (8,))
    assert len(kept.calibration.noise.costs) == CALIBRATING
    session = opened(engine_arg=FEW_STEPS["engine_arg"])
    later, again = Gates(session).of(MODEL), SideBySide(session, MODEL)
    again.found = [m for m in stored(session) if m.paired.gate == later.gate]
    assert again.judge().allowances == later.allowances, "while it is measured too"
    assert {name: (each.sd, each.df) for name, each in later.allowances.items()} == {
        name: (max(sd.value, 0.005), CALIBRATING - 1) for name, sd in kept.calibration.noise.spread.items()
    }
    assert all(f"{CALIBRATING} launches" in each.source for each in later.allowances.values())
    elsewhere = Gates(opened(engine_arg=FEW_STEPS["engine_arg"], concurrency="16")).of(MODEL)
    assert not any(f"{CALIBRATING} launches" in each.source for each in elsewhere.allowances.values())


WHERE_NOT = {  # options, the platform and the interface, and words of the reason
    "halves too small": ({"concurrency": "8,20000"}, "simulated", "engine", "half of the memory"),
    "on a CPU": ({}, "cpu", "engine", "CPU"),
    "on two GPUs": ({"tensor_parallel_size": "2"}, "simulated", "engine", "2 GPUs"),
    "with Transformers": ({}, "simulated", "transformers", "Transformers"),
}


@pytest.mark.parametrize(("given", "platform", "interface", "why"), WHERE_NOT.values(), ids=WHERE_NOT)
def test_unfit_sides_live_apart(opened, monkeypatch, given, platform, interface, why):
    def where(**more):
        session = opened(**given, **more)
        session.platform, spec = platform, session.planner.spec
        monkeypatch.setattr(session.planner, "spec", lambda *of, **its: replace(spec(*of, **its), interface=interface))
        return session

    session = where()
    assert not live_together(session, MODEL) and not live_together(session, MODEL)
    assert [why in note for note in session.notes] == [True], "said once"
    assert type(one_gate(session, MODEL)) is OneGate
    session = where(gate_launches="together")
    with refused(why, hint="--slm-gate-launches=apart"):
        check_gate(session, MODEL)
    assert session.devices.pool.starts == []


@pytest.mark.parametrize(("given", "together", "told"), [
    ({"gate_launches": "apart"}, False, TOGETHER.keys() - GATED.keys()),
    ({}, True, {"energy", "start", *EXACT, "latency", "busy-small"}),
    ({"concurrency": "8,64"}, True, {"energy", "start", *EXACT}),
])  # fmt: skip
def test_unjudged_endpoints_have_reasons(opened, given, together, told):
    session = opened(**given)
    assert live_together(session, MODEL) is together is isinstance(one_gate(session, MODEL), SideBySide)
    reasons = not_told(session, MODEL)
    of_starts = {"start-cold", "wake"}
    assert reasons.keys() == told | of_starts and session.notes == []
    assert all("--slm-gate-launches=start" in reasons[name] for name in of_starts)
    assert all(("apart" in reasons[name]) is together for name in ("energy", "busy") if name in reasons)
    assert "latency" not in reasons or "--slm-concurrency" in reasons["latency"]


@pytest.fixture
def pythons(tmp_path, monkeypatch):
    """Returns the interpreter of an environment, that of another one, and the first one by a folder that is a link."""
    for name in ("one", "two"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "link").symlink_to(tmp_path / "one")
    monkeypatch.setenv("PATH", str(tmp_path / "one" / "bin"))
    return {name: str(tmp_path / name / "bin" / "python") for name in ("one", "two", "link")} | {"found": "python"}


@pytest.mark.parametrize(("baseline", "candidate", "why"), [
    ("python={one}", "python={link}", "/one/bin"), ("python={one}", "python={found}", "/one/bin"),
    ("arg=b_half=16", "arg=b_half=16.0", ""), ("python={one}", "python={two}", None),
    ("python={one}", "python={link},env=A=1", None), ("env=A=1", "arg=b_half=9", None),
])  # fmt: skip
def test_identical_sides_are_refused(opened, pythons, baseline, candidate, why):
    side = [f"baseline:{baseline.format_map(pythons)}", f"candidate:{candidate.format_map(pythons)}"]
    session = opened(side=side, plan=True)
    with nullcontext() if why is None else refused(why):
        check_gate(session, MODEL)
    assert session.devices.pool.starts == []
    session = opened()
    check_gate(session, MODEL)
    with refused("the candidate is the baseline", hint="--slm-calibrate"):
        check_differ(sides(session.planner.spec(MODEL), session.options))
