"""A gate whose sides live on one GPU at once, from its records: which windows and launches count, that slower kernels
and a slower host fail where each is seen, what the host or the launches leave to busy seconds, and how many windows."""

import math
from dataclasses import replace
from statistics import stdev

import pytest
from facts import tells
from launches import HAPPENS, LOADS, RATES, launch_of_both
from stored_records import BUSY, engine_alone, having

from pytest_slmserve.analysis.gate import decision, diagnosis, side_by_side, windows
from pytest_slmserve.analysis.gate.launch_pairs import SIDES, TOGETHER
from pytest_slmserve.analysis.gate.windows import judge_windows, launches_that_count, windows_that_count
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.report.gate import next_step
from pytest_slmserve.schema import sensors

PASS, FAIL, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE
TERMS = decision.GateCriteria().with_both_at_once
SMALL_ONES = {"latency": "throughput", "busy-small": "busy"}  # with what they are at the large load
CROWDED = {**BUSY, sensors.FOREIGN_PROCESSES: 1.0, sensors.GPU_PROCESSES: 3.0}
FOREIGN = engine_alone(RATES[0], LOADS[0], columns=CROWDED).run
FAILED = engine_alone(RATES[0], LOADS[0], failures=2).run
PREEMPTED = engine_alone(RATES[0], LOADS[0], preempted=3).run
SLOWER = [  # facts of the candidate, what fails, and the layers that tell
    ({}, set(), set()), ({"seconds": 0.9, "kernels": 0.9}, set(), set()),
    ({"seconds": 1.05, "kernels": 1.05}, {"throughput", "busy"}, {"kernels"}),
    ({"seconds": 1.05}, {"throughput"}, {"host"}),
    ({"seconds": 1.05, "kernels": 1.05, "share": None}, {"throughput"}, set()),
    ({"seconds": 1.5}, {"throughput"}, {"host"}),  # less busy than it may be, but the candidate alone
]  # fmt: skip
BY_THE_HOST = [
    ({"share": 0.6}, (60, 70)), ({"noise": 0.2}, (13,)), ({"noise": 0.11, "windows": 18}, (10,)),
]  # fmt: skip
APART, BOTH = {"kernels": [1.0, 1.08], "seconds": [1.0, 1.08]}, ("busy", "throughput")
WIDE, NARROW = side_by_side.Allowance(0.02, 7, "7 nights"), side_by_side.Allowance(0.012, 7, "")


def launches(count=2, **facts):
    """facts: of all launches, a list of those of each."""
    each = ({name: v[n] if isinstance(v, list) else v for name, v in facts.items()} for n in range(count))
    return [m for n, its in enumerate(each, 1) for m in launch_of_both(n, **its)]


def judged(count=2, **facts):
    return judge_windows(launches(count, **facts), TERMS)


def states(gated):
    return {name: verdict.state for name in TOGETHER if (verdict := gated.verdict(name)) is not None}


def spoilt(made, side, *windows, **facts):
    """The same with other facts of these windows of a side."""
    chosen = [m.paired.side == side and m.paired.window in windows for m in made]
    return [having([m], **facts)[0] if of_it else m for m, of_it in zip(made, chosen)]


def numbers(pairs):
    return [m.paired.window for m, _ in pairs]


def test_incomplete_windows_do_not_count():
    made = launch_of_both(windows=12, loads=LOADS[:1])
    found, dropped = windows_that_count(made)
    assert numbers(found) == list(range(3, 13)) and dropped == []
    assert {tuple(m.paired.side for m in pair) for pair in found} == {SIDES}
    assert numbers(windows_that_count(made[:-1])[0]) == list(range(3, 12)), "of the last the candidate's alone"
    assert windows_that_count(reversed(made)) == (found, dropped)
    made = launch_of_both(share=None, loads=LOADS[:1])
    assert [len(windows_that_count(made, counted)[0]) for counted in (None, False, True)] == [8, 8, 0]
    assert len(windows_that_count(made, True)[1]) == 8
    one = spoilt(made, "baseline", 1, paired={"busy_s": 0.5})
    assert windows_that_count(one)[0] == [], "those of one that is thrown away were counted"
    whole, short = launch_of_both(1), launch_of_both(2)
    for bad in (short[:-2], spoilt(short, "candidate", 7, run=FAILED), launch_of_both(2, loads=LOADS[:1])):
        found, dropped = launches_that_count([*whole, *bad])
        assert [pair.number for pair in found] == [1]
        assert tells(dropped[-1], 2, 8) and tells(dropped[-1], 0 if len(bad) == 20 else 7)
    assert [len(gated.pairs) for gated in (judged(), judge_windows([*whole, *short[:-2]], TERMS))] == [2, 1]
    gated = judge_windows(short[:-2], TERMS)
    assert gated.pairs == () and not gated.settled and gated.outcome is INCONCLUSIVE
    assert states(gated) == dict.fromkeys(TOGETHER, INCONCLUSIVE)
    assert gated.dropped[0] in gated.verdict("busy").why and gated.windows == ()
    before, again = launch_of_both(2, seconds=2.0, windows=14)[:33], launch_of_both(2, made=1)
    for made in ([*before, *again], [*again, *before]):
        gated = judge_windows([*made, *launch_of_both(1)], TERMS)
        assert [pair.number for pair in gated.pairs] == [1, 2] and gated.dropped == ()
        assert {m.launch for m in gated.pairs[1].baseline.measurements} == {"2-baseline-1"}
        assert gated.outcome is PASS
    one_side = [m for m in launch_of_both(3) if m.paired.side == "baseline"]
    assert len(judge_windows([*launch_of_both(1), *one_side], TERMS).pairs) == 1


@pytest.mark.parametrize(("facts", "told"), [
    ({"run": FAILED}, 2), ({"run": PREEMPTED}, 3), ({"run": FOREIGN}, 1), ({"paired": {"busy_s": None}}, None),
])  # fmt: skip
@pytest.mark.parametrize("side", SIDES)
def test_untrusted_window_drops_its_pair(side, facts, told):
    made = launch_of_both(windows=12, loads=LOADS[:1])
    found, dropped = windows_that_count(spoilt(made, side, 1, 5, **facts))
    assert numbers(found) == [3, 4, *range(6, 13)] and len(dropped) == 1, "those thrown away are not told"
    assert tells(dropped[0], 5) and side in dropped[0] and (told is None or tells(dropped[0], told))
    [pair], left_out = launches_that_count(spoilt(made, side, 1, 5, **facts))
    assert len(pair.baseline.figures[0]) == 9 and len(left_out) == 1 and dropped[0] in left_out[0]


def test_uncounted_busy_seconds_leave_the_throughput():
    for side in SIDES:
        one, other = (spoilt(launch_of_both(n, seconds=1.05), side, 3, 6, 9, paired={"busy_s": None}) for n in (1, 2))
        gated = judge_windows([*one, *other], TERMS)
        assert gated.windows == (8, 8, 8, 8) and gated.dropped == (windows.UNCOUNTED,)
        assert states(gated) == {"throughput": FAIL, "latency": FAIL}
        for counted in (1, 2):
            made = [*one, *(m for n in range(counted) for m in launch_of_both(2 + n))]
            assert [pair.number for pair in launches_that_count(made)[0]] == [counted, counted + 1]
        hidden = launches(kernels=1.3, share=0.5)  # the host decides the throughput
        gated = judge_windows(spoilt(hidden, side, 3, 6, 9, paired={"busy_s": None}), TERMS)
        assert gated.outcome is INCONCLUSIVE and tells(gated.refused["output tokens/s, large load"], 50, 70)


def test_idle_neighbour_cost_is_reported():
    def own(seconds, **facts):
        made = launch_of_both(0, windows=20, loads=LOADS[1:], seconds=seconds, **facts)
        return [m for m in made if m.paired.side == "candidate"]

    made = [*own(1.0)[:10], *own(1.25)[10:]]
    assert launches_that_count(made) == launches_that_count(launch_of_both(0)) == ((), ())
    gated = judge_windows([*made, *launches()], TERMS)
    assert [pair.number for pair in gated.pairs] == [1, 2] and gated.outcome is PASS and gated.dropped == ()
    found = windows.beside_an_idle_one([*launches(), *reversed(made)])
    wanted = {"output tokens/s": 1 / 1.25, "tokens per busy second": 1.0}
    assert {name: ratio.value for name, ratio in found.items()} == pytest.approx(wanted, rel=1e-3)
    assert all(ratio.low <= ratio.value <= ratio.high for ratio in found.values())
    thrown_away = [m if (m.paired.window - 1) % 10 > 1 else replace(m, run=FAILED) for m in made]
    again = [replace(m, launch="again", measured_at=f"2027{m.measured_at[4:]}") for m in made]
    assert windows.beside_an_idle_one(thrown_away) == windows.beside_an_idle_one([*again, *own(3.0)[:13]]) == found
    assert windows.beside_an_idle_one(launches()) == windows.beside_an_idle_one(made[:13]) == {}, "broken off"


def test_busy_seconds_give_window_figures():
    window = launch_of_both(share=0.8, loads=LOADS[:1])[0]
    seconds = window.run.window_s[1] - window.run.window_s[0]
    seen = windows.figures_of(window)
    assert seen.engine_active == pytest.approx(0.8)
    assert seen.tokens_per_busy_s == pytest.approx(seen.output_tokens_per_s / 0.8)
    assert window.paired.busy_s == pytest.approx(0.8 * seconds)
    (uncounted,) = having([window], paired={"busy_s": None})
    unknown = windows.figures_of(uncounted)
    assert unknown == replace(seen, engine_active=None, tokens_per_busy_s=None), "a short window's sensors are wrong"
    simulated = windows.figures_of(replace(uncounted, environment=replace(window.environment, platform="simulated")))
    assert (simulated.engine_active, simulated.tokens_per_busy_s) == pytest.approx((1.0, seen.output_tokens_per_s))

    def found(processes, beside=True):
        columns = {**BUSY, sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: processes}
        (m, *_) = launch_of_both(columns=columns)
        return check(m if beside else replace(m, paired=replace(m.paired, window=None)))

    assert found(2.0).state == "ok" and found(1.0, beside=False).state == "ok"
    assert tells(found(3.0).degradations[0], 3, 2) and tells(found(2.0, beside=False).degradations[0], 2, 1)


@pytest.mark.parametrize("loads", [LOADS, LOADS[1:]])
@pytest.mark.parametrize(("facts", "fails", "told"), SLOWER)
def test_slower_side_fails_window_gate(loads, facts, fails, told):
    gated = judged(**facts, loads=loads)
    large = {name: SMALL_ONES.get(name, name) for name in TOGETHER if len(loads) == 2 or name not in SMALL_ONES}
    there = [name for name, of in large.items() if of != "busy" or facts.get("share", 1)]
    assert states(gated) == {name: FAIL if large[name] in fails else PASS for name in there}
    assert gated.outcome is (FAIL if fails else PASS) and gated.settled and gated.refused == {}
    assert {each.decided_at for each in gated.gated} == {2} and {
        layer for layer, _ in diagnosis.layers(gated.compared)
    } == told
    assert gated.windows == (8,) * 2 * len(loads) and len(gated.gated) == len(there)
    assert gated.exact == () and all(each.source == side_by_side.COMMITTED.source for each in gated.allowances.values())


def test_single_launch_decides_no_gate():
    one, two = judged(1, seconds=1.05, kernels=1.04), judged(seconds=1.05, kernels=1.04, windows=14)
    assert set(states(one).values()) == {INCONCLUSIVE} and not one.settled and two.settled
    interrupted = judge_windows([m for m in two.measurements("baseline") + two.measurements("candidate")
                                 if m.paired.pair == 1 or m.paired.window < 8], TERMS)  # fmt: skip
    assert "1 more launch" in next_step(interrupted)[0] and "--slm-resume" in next_step(interrupted)[1]
    assert two.windows == (12,) * 4 and two.verdict("busy").n == 2
    ratios = {"throughput": 1 / 1.05, "busy": 1 / 1.04, "latency": 1.05, "busy-small": 1 / 1.04}
    for name, ratio in ratios.items():
        verdict = two.verdict(name)
        assert verdict.value == pytest.approx(ratio, rel=1e-6) and verdict.low < ratio < verdict.high
        assert len(verdict.records) == 2 * 2 * 2 * 12
    with pytest.raises(KeyError):
        two.verdict("energy")
    for noise, refused in ((0.11, 0), (0.15, 2)):
        made = [m for m in launch_of_both(noise=noise) if m.paired.window <= 10]
        more = [m for m in launch_of_both(windows=34) if m.paired.window > 10]
        assert len(judge_windows([*made, *more], TERMS).refused) == refused


@pytest.mark.parametrize(("facts", "told"), BY_THE_HOST)
def test_busy_seconds_decide_despite_host(facts, told):
    """Where the host decides throughput, it is only shown."""
    gated = judged(**facts, loads=LOADS[1:])
    [its] = [each for each in gated.shown if each.name == "output tokens/s"]
    assert not its.gated and [each.name for each in gated.gated] == ["tokens per busy second"]
    assert tells(gated.refused["output tokens/s"], *told) and len(gated.refused) == 1
    assert gated.verdict("throughput") is None and gated.left_out("throughput") == gated.refused["output tokens/s"]
    assert gated.left_out("latency") not in gated.refused.values()
    assert gated.outcome is gated.verdict("busy").state is PASS and gated.settled
    assert judged(**facts, loads=LOADS[1:], kernels=1.05).outcome is FAIL
    blind = judged(**{**facts, "share": None}, loads=LOADS[1:])  # nothing is left to judge it by
    if "share" not in facts:
        assert blind.outcome is blind.verdict("throughput").state is INCONCLUSIVE and blind.settled
        assert tells(blind.verdict("throughput").why, *told)
    small = judged(**facts)
    assert len(small.refused) == 2 and states(small) == {"busy": PASS, "busy-small": PASS}
    worse = judged(**facts, seconds=1.5)  # busy seconds do not show a slower host
    assert states(worse) == {"busy": PASS, "busy-small": PASS, "throughput": INCONCLUSIVE, "latency": INCONCLUSIVE}
    assert "seems worse" in worse.verdict("latency").why and worse.outcome is INCONCLUSIVE
    all_four = judged(4, **facts, seconds=1.5)
    assert not worse.settled and all_four.settled, "two launches more may show that it is not"
    assert tells(next_step(worse)[0], "2 more launches", "only seems") and "--slm-resume" in next_step(worse)[1]
    assert next_step(all_four)[1] == "--slm-gate-launches=apart"


@pytest.mark.parametrize(("facts", "allowed", "refused", "outcome"), [
    (APART, {}, BOTH, INCONCLUSIVE), ({"seconds": [1 / 1.08, 1.0]}, {}, {"throughput"}, PASS),
    ({"seconds": [1.0, 1.08]}, {}, {"throughput"}, INCONCLUSIVE),
    ({}, {"throughput": WIDE}, {"throughput"}, PASS), ({}, {"busy": WIDE}, {"busy"}, INCONCLUSIVE),
    ({}, dict.fromkeys(BOTH, WIDE), BOTH, INCONCLUSIVE), ({}, dict.fromkeys(BOTH, NARROW), set(), PASS),
    ({"share": None}, {"throughput": WIDE}, {"throughput"}, INCONCLUSIVE),
    (APART, dict.fromkeys(BOTH, NARROW), BOTH, INCONCLUSIVE),
])  # fmt: skip
def test_scattered_launches_refuse_endpoint(facts, allowed, refused, outcome):
    """Busy seconds decide in its place, or nothing does."""
    labels = {name: TOGETHER[name].label.partition(",")[0] for name in TOGETHER}
    by_label = {labels[name]: each for name, each in allowed.items()}
    gated = windows.judged_with(judged(**facts, loads=LOADS[1:]), by_label)
    assert gated.refused.keys() == {labels[name] for name in refused} and gated.outcome is outcome
    assert {name: gated.allowances[labels[name]] for name in allowed} == allowed
    for name in refused:
        verdict, why = gated.verdict(name), gated.refused[labels[name]]
        assert tells(why, 2, 1.2, "7 nights") if allowed.get(name) is WIDE else tells(why, 8)
        assert (verdict is None) is (outcome is PASS) and (verdict is None or why in verdict.why)
    waits = len(refused) == 1 and any(each.seems_worse for each in gated.gated)
    assert gated.settled is not waits and not {e.name for e in gated.gated} & {e.name for e in gated.shown}


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.01, 0.014, 0.02, 0.05])
def test_noise_raises_wanted_windows(noise):
    made = windows_that_count(launch_of_both(noise=noise, loads=LOADS[:1]))[0]
    busy = windows_that_count(launch_of_both(busy_noise=noise, loads=LOADS[:1]))[0]
    steady = windows_that_count(launch_of_both(loads=LOADS[:1]))[0]
    needed = (1.2 * stdev([noise * each for each in HAPPENS]) / (TERMS.margin / 4)) ** 2
    assert windows.wanted(made, TERMS) == windows.wanted(busy, TERMS) == min(40, max(8, 4 * math.ceil(needed / 4)))
    assert windows.wanted(made[:7], TERMS) == 8
    assert windows.wanted([*made, *steady], TERMS) == windows.wanted(made, TERMS)

    def asked(**facts):
        return windows.wanted(windows_that_count(launch_of_both(loads=LOADS[:1], **facts))[0], TERMS)

    assert (asked(noise=0.2), asked(noise=0.2, share=None), asked(noise=0.2, busy_noise=0.05)) == (8, 40, 40)
    assert (asked(noise=0.02, share=0.6), asked(noise=0.02)) == (8, 12)


def test_host_noise_ends_waiting():
    """Later windows of a launch may show what the first ones did not."""
    quiet, loud, blind = (
        windows_that_count(launch_of_both(loads=LOADS[:1], **facts))[0]
        for facts in ({"noise": 0.05}, {"noise": 0.2}, {"noise": 0.2, "share": None})
    )
    assert [windows.wanted(made, TERMS) for made in (quiet, [*quiet, *loud], [*blind, *blind])] == [40, 8, 40]
