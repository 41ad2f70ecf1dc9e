"""Which launches make a pair and which pairs count; each endpoint reads its own figure: worse by a tenth it fails, and
it alone; what one launch does not tell never passes; and KV blocks, memory and tokens are judged apart."""

import itertools
import math
import random
from dataclasses import astuple, replace
from functools import cache
from statistics import fmean

import pytest
from facts import tells
from hypothesis import given, strategies as st
from launches import LOADS, launch, pair_of_launches, pairs
from stored_records import BUSY, having

from pytest_slmserve.analysis.gate import launch_pairs
from pytest_slmserve.analysis.gate.decision import MAX_GATED, GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import BLOCKS, GATED, MEMORY, OUTPUTS, SIDES, Answers, Differs, pairs_of
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.report.gate import next_step
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import GIB

PASS, FAIL, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE
OF_DUMMY = [name for name in launch_pairs.ENDPOINTS if name != OUTPUTS]
ALL_PASS = dict.fromkeys(OF_DUMMY, PASS)
MIB, MEMORY_USED = 1 << 20, 8.0 * GIB
TERMS = GateCriteria()
NOISY = {**BUSY, sensors.SM_CLOCK: lambda at: 1.5e9 if at % 0.2 < 0.1 else 1.98e9}
CROWDED = {**BUSY, sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}
TOKENS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple), min_size=1, max_size=4).map(tuple)
SAME, OTHER = ((1, 2), (3, 4)), ((1, 2), (3, 5))


def judged(measurements, criteria=TERMS):
    return launch_pairs.judge_gate(measurements, criteria)


def state(gated, endpoint) -> State:
    return gated.verdict(endpoint).state


def states(gated) -> dict[str, State]:
    return {name: verdict.state for name in OF_DUMMY if (verdict := gated.verdict(name)) is not None}


@cache
def started(side, number, **costs: float) -> tuple[Measurement, ...]:
    """Both loads of one start. costs: factors by endpoint; power is what energy per token leaves it to be."""
    cost = dict.fromkeys(OF_DUMMY, 1.0) | {name.replace("_", "-"): factor for name, factor in costs.items()}
    power, used = 400.0 * cost["energy"] / cost["throughput"], MEMORY_USED * cost[MEMORY]
    columns = {sensors.POWER: power, sensors.MEMORY_USED: used}
    facts = {"kv_blocks": round(1365 / cost[BLOCKS]), "ready_s": 30.0 * cost["start"], "columns": columns}
    speeds = zip(LOADS, (1 / cost["latency"], 1 / cost["throughput"]))
    return tuple(m for n, speed in speeds for m in launch(side, number, speed=speed, loads=[n], **facts))


def records(count: int = 4, **costs: float) -> list[Measurement]:
    """costs: of the candidate."""
    numbers = range(1, count + 1)
    return [m for n in numbers for each in (started("baseline", n), started("candidate", n, **costs)) for m in each]


def test_pairs_need_both_whole_launches():
    made = pairs(2)
    found = pairs_of(made)
    assert [pair.number for pair in found] == [1, 2]
    first = [[launch.measurements[0].paired for launch in pair.launches] for pair in found]
    places = [[(its.side, its.second) for its in pair] for pair in first]
    assert places == [[*zip(SIDES, (False, True))], [*zip(SIDES, (True, False))]]
    assert tuple(m.load.concurrency for m in found[0].candidate.measurements) == LOADS
    for seed in range(10):
        assert pairs_of(random.Random(seed).sample(made, len(made))) == found
    for broken, loads in itertools.product(SIDES, ((), LOADS[:1])):
        found = [m for m in pair_of_launches(2) if m.paired.side != broken or m.load.concurrency in loads]
        assert [p.number for p in pairs_of([*pair_of_launches(1), *found])] == [1]
        assert pairs_of(found) == (), "nor as the first of all"
    made = pair_of_launches(1)
    bad = replace(made[1], run=replace(made[1].run, failures=3))
    again = replace(made[1], measured_at="2026-01-01T00:01:05.000+00:00")
    for order in ([*made, again], [again, *made], [made[0], bad, again, *made[2:]]):
        [pair] = pairs_of(order)
        assert pair.baseline.measurements == (made[0], again) and pair.baseline.problems == ()


@pytest.mark.parametrize(
    ("facts", "told"), [({"preempted": 2}, 2), ({"columns": CROWDED}, 3), ({"columns": NOISY}, None)]
)
def test_untrusted_pair_is_dropped(facts, told):
    made = pair_of_launches(5, **facts)
    gated = judged([*pairs(4), *made])
    assert [p.number for p in gated.pairs] == [1, 2, 3, 4, *([] if told else [5])]
    assert len(gated.dropped) == bool(told) and all(tells(each, 5, told) for each in gated.dropped)
    assert told or any(check(m).noise for m in made)


@pytest.mark.parametrize(("bad", "lost"), [
    ({("baseline", 1), ("baseline", 2)}, "baseline"), ({("candidate", 1), ("candidate", 2)}, "candidate"),
    ({("baseline", 1), ("candidate", 2)}, None), ({("baseline", 1), ("candidate", 1), ("candidate", 2)}, None),
    ({("candidate", 1)}, None), (set(), None),
])  # fmt: skip
def test_side_losing_pairs_is_named(bad, lost):
    made = [m for n in (1, 2) for side in SIDES for m in launch(side, n, failures=(side, n) in bad)]
    gated = judged(made)
    assert gated.lost == lost and len(gated.dropped) == len({number for _, number in bad})
    first = {number: min(side for side, of in bad if of == number) for _, number in bad}
    assert all(f"pair {n}: {first[n]}: " in text for n, text in zip(sorted(first), gated.dropped))
    for verdict in gated.exact if len(gated.dropped) == 2 else ():
        assert (f"measurements of the {lost}" in verdict.why) is (lost is not None)


def test_four_unchanged_pairs_pass_gate():
    for count, wanted in ((4, PASS), (3, INCONCLUSIVE)):
        gated = judged(records(count))
        assert gated.outcome is state(gated, "throughput") is wanted and gated.settled is (count == 4)
        assert states(gated) == {name: PASS if name in launch_pairs.EXACT else wanted for name in OF_DUMMY}
        assert (gated.caches, gated.model, gated.gate, len(gated.gated)) == ("warm", "opt-1.3b", "gate", MAX_GATED)
    gated = judged(pairs(4, failures=1))
    assert gated.pairs == () and len(gated.dropped) == 4 and gated.outcome is INCONCLUSIVE
    assert states(gated) == dict.fromkeys(OF_DUMMY, INCONCLUSIVE) and not gated.settled
    assert all(gated.dropped[0] in gated.verdict(endpoint).why for endpoint in OF_DUMMY)
    # A start has a margin of its own.
    for ready_s, wanted in ((21.0, PASS), (30.0, FAIL), (10.0, PASS)):
        gated = judged(pairs(4, ready_s=ready_s), GateCriteria(margin=0.01))
        assert state(gated, "start") is gated.outcome is wanted
        assert (gated.verdict("start").threshold, gated.verdict("latency").threshold) == (0.15, 0.01)


@pytest.mark.parametrize("endpoint", OF_DUMMY)
def test_worse_endpoint_fails_alone(endpoint):
    better, worse = (judged(records(**{endpoint.replace("-", "_"): cost})) for cost in (1 / 1.1, 1.1))
    assert states(better) == ALL_PASS and better.outcome is PASS
    assert states(worse) == ALL_PASS | {endpoint: FAIL} and worse.outcome is FAIL
    costs = {each: 1.1 if name == endpoint else 1.0 for name, each in GATED.items()}
    wanted = {each.label: 1 / cost if each.better == "higher" else cost for each, cost in costs.items()}
    assert {each.name: each.ratio.value for each in worse.gated} == pytest.approx(wanted, rel=0.01)


def test_gate_verdict_has_interval():
    shown = judged(records(throughput=1.1)).shown
    unseen = {each.label for each in (launch_pairs.BUSY, launch_pairs.SHARE, launch_pairs.CORES)}  # without sensors
    assert {each.name for each in shown} == {each.label for each in launch_pairs.SHOWN} - unseen
    assert not any(each.gated for each in shown)
    slower = {each.name for each in shown if each.ratio.value == pytest.approx(1.1, rel=1e-3)}
    assert slower == {each.label for each in launch_pairs.SHOWN if each.load == launch_pairs.LARGE} - unseen
    gated = judged([m for m in pairs(4, speed=0.9) if m.load.concurrency == LOADS[0]])
    assert state(gated, "throughput") is state(gated, "latency") is FAIL
    labels = [each.name for each in gated.compared]
    assert not any("load" in label for label in labels) and len(labels) == len(set(labels)), "nothing is told twice"
    made = having(records(throughput=1.1), paired={"caches": "cold"})
    gated = judged(made, GateCriteria(margin=0.05))
    assert (gated.caches, gated.terms.margin, gated.dropped) == ("cold", 0.05, ())
    [its] = [each for each in gated.gated if each.name == GATED["throughput"].label]
    verdict = gated.verdict("throughput")
    assert (verdict.value, verdict.low, verdict.high) == astuple(its.ratio) and verdict.claim == "no-worse-throughput"
    assert (verdict.threshold, verdict.n, verdict.subject) == (0.05, 4, "opt-1.3b")
    assert set(verdict.records) == {m.id for m in made}
    assert set(map(id, gated.measurements("baseline"))) == {id(m) for m in made if m.paired.side == "baseline"}
    with pytest.raises(KeyError):
        gated.verdict("speed")


def blind(m: Measurement, *numbers: int, **resolved: None) -> Measurement:
    seen = m.run.telemetry
    left = replace(seen, columns={number: values for number, values in seen.columns.items() if number not in numbers})
    return replace(m, resolved=replace(m.resolved, **resolved), run=replace(m.run, telemetry=left))


@pytest.mark.parametrize(("lost", "numbers", "resolved"), [
    (("energy", MEMORY), (sensors.POWER, sensors.MEMORY_USED), {}), (("start",), (), {"ready_s": None}),
    ((BLOCKS,), (), {"kv_blocks": None}), ((MEMORY,), (sensors.MEMORY_USED,), {}),
])  # fmt: skip
@pytest.mark.parametrize("where", [[(1, "baseline")], [(4, "candidate")], [(n, "candidate") for n in (1, 2, 3, 4)]])
def test_unreported_value_is_inconclusive(lost, numbers, resolved, where):
    made = [blind(m, *numbers, **resolved) if (m.paired.pair, m.paired.side) in where else m for m in records()]
    found = judged(made)
    assert states(found) == ALL_PASS | dict.fromkeys(lost, INCONCLUSIVE)
    assert found.outcome is INCONCLUSIVE and found.settled, "a missing value stays missing"


def test_missing_sensor_gives_no_verdict():
    found = judged([blind(m, sensors.MEMORY_USED) for m in records()])
    assert found.verdict(MEMORY) is None and found.outcome is PASS
    found = judged([m for n in range(1, 5) for side in SIDES for m in launch(side, n, sensed=False)])
    assert found.verdict("energy") is None and len(found.gated) == 3 and found.outcome is PASS
    for place in (("candidate", load) for load in LOADS):  # it may have needed more at the other
        made = [blind(m, sensors.MEMORY_USED) if (m.paired.side, m.load.concurrency) == place else m for m in records()]
        assert states(judged(made))[MEMORY] is INCONCLUSIVE
    assert state(judged(scored((0.2, -0.2))), OUTPUTS) is FAIL, "changes both ways do not cancel out"
    assert judged(scored((1.5,), load_format="dummy")).verdict(OUTPUTS) is None
    gated = judged(having(scored(), paired={"scores": ()}))
    assert state(gated, OUTPUTS) is gated.outcome is INCONCLUSIVE
    for facts in ({}, {"speed": 0.9}, {"kv_blocks": None}, {"sensed": False}, {"ready_s": None}):
        assert judged(pairs(4, **facts)).settled
    gated = judged([m for n in range(1, 5) for m in pair_of_launches(n, speed=1.1 if n % 2 else 0.9)])
    assert gated.outcome is INCONCLUSIVE and not gated.settled, "noise may explain the difference"


def test_fewer_kv_blocks_fail_gate():
    """The worst launch decides."""
    for blocks, wanted in ((1365, PASS), (2000, PASS), (1352, PASS), (1351, FAIL)):
        gated = judged([*pairs(3), *pair_of_launches(4, kv_blocks=blocks)])
        verdict = gated.verdict(BLOCKS)
        assert verdict.state is gated.outcome is wanted and verdict.n == 4
        assert (verdict.value, verdict.threshold) == (min(1, blocks / 1365), pytest.approx(0.99))
    grain = (8 * GIB, 256 * MIB, PASS), (8 * GIB, 257 * MIB, FAIL)
    for before, more, wanted in (*grain, (100 * GIB, 1023 * MIB, PASS), (100 * GIB, 1025 * MIB, FAIL)):
        used = {place: float(before) for place in ((n, side) for n in range(1, 5) for side in SIDES)}
        used[2, "candidate"] += more
        made = [m for (n, side), size in used.items() for m in started(side, n, memory=size / MEMORY_USED)]
        found = judged(made).verdict(MEMORY)
        assert found.state is wanted and found.n == 4 and found.value == pytest.approx(1 + more / before)
        assert found.threshold == pytest.approx(max(1.01, 1 + 256 * MIB / before))


CPU, NOISY, GPU_GIB = (3024, 3018, 3020, 3022), (445, 425, 448, 440), (57.0, 58.0, 57.5, 57.0)


@pytest.mark.parametrize(("name", "had", "has", "wanted"), [
    (BLOCKS, CPU, (3017, 3019, 3023, 3018), PASS), (BLOCKS, CPU, (2818, 2823, 2821, 2820), FAIL),
    (BLOCKS, CPU, tuple(0.995 * n for n in CPU), PASS), (BLOCKS, CPU, tuple(0.985 * n for n in CPU), FAIL),
    (BLOCKS, NOISY, (434, 460, 457, 470), INCONCLUSIVE), (BLOCKS, NOISY, tuple(0.8 * n for n in NOISY), FAIL),
    (BLOCKS, (1365, 1365, 1365, 1000), (640,) * 4, FAIL),  # although one launch of the baseline is worse, too
    (BLOCKS, (10_000, 10_000, 9000, 9000), (9000, 9000, 8100, 8100), FAIL),  # on two hosts
    (MEMORY, GPU_GIB, (57.0, 57.9, 57.6, 57.1), PASS), (MEMORY, GPU_GIB, (60.0, 61.0, 60.5, 60.1), FAIL),
])  # fmt: skip
def test_memory_that_scatters_is_tested_by_pairs(name, had, has, wanted):
    used = [(n, dict(zip(SIDES, sizes))) for n, sizes in enumerate(zip(had, has), 1)]
    costs = {BLOCKS: lambda size: 1365 / size, MEMORY: lambda size: size * GIB / MEMORY_USED}
    made = [m for n, sizes in used for side in SIDES for m in started(side, n, **{name: costs[name](sizes[side])})]
    gated = judged(made)
    verdict = gated.verdict(name)
    assert (
        verdict.state is wanted
        and "means of 4 launches" in verdict.why
        and verdict.low <= verdict.value <= verdict.high
    )
    assert gated.settled is (wanted is not INCONCLUSIVE) and gated.unsure_of_memory is (wanted is INCONCLUSIVE)
    assert ("2 more pairs" in next_step(gated)[0] and "can decide" in next_step(gated)[0]) is (wanted is INCONCLUSIVE)


def scored(changes=(0.0,), between=0.0, load_format="auto"):
    """Pairs of which the first two tell how likely 64 answers are: less by `changes`, in turns, to the candidate, and
    by `between` to both of the second pair."""
    made = []
    for m in having(pairs(4), spec={"load_format": load_format}):
        less = [changes[n % len(changes)] if m.paired.side == "candidate" else 0.0 for n in range(64)]
        common = between if m.paired.pair == 2 else 0.0
        scores = tuple(-0.4 - 0.002 * (n % 8) - common - less[n] for n in range(64)) if m.paired.pair <= 2 else ()
        made += having([m], paired={"scores": scores})
    return made


@pytest.mark.parametrize(("changes", "between", "wanted", "half"), [
    ((0.0,), 0.0, PASS, 0), ((0.045,), 0.0, PASS, 0), ((-0.045,), 0.0, PASS, 0),
    ((0.055,), 0.0, FAIL, 0), ((1.5,), 0.0, FAIL, 0),
    ((-0.055,), 0.0, FAIL, 0),  # likelier than to the baseline is wrong too
    ((0.055,), 0.02, PASS, 0),  # launches of the baseline differ by that
    # Student's over the requests: of changes in turns, of 64, 1.9983 standard errors.
    ((0.01, 0.03), 0.0, PASS, 1.9983 * 0.01 * math.sqrt(64 / 63) / 8),
])  # fmt: skip
def test_changed_answer_likelihood_fails_gate(changes, between, wanted, half):
    gated = judged(scored(changes, between))
    verdict, seen = gated.verdict(OUTPUTS), abs(fmean(changes))
    assert gated.outcome is verdict.state is wanted and verdict.subject == "opt-1.3b"
    assert (verdict.value, verdict.threshold) == pytest.approx((seen, 0.05 + between), abs=1e-6)
    assert (verdict.low, verdict.high) == pytest.approx((seen - half, seen + half), abs=1e-6)


@given(TOKENS, st.data())
def test_first_output_difference_is_found(tokens, data):
    request = data.draw(st.integers(0, len(tokens) - 1))
    position = data.draw(st.integers(0, len(tokens[request]) - 1))
    places = [[(i, at) >= (request, position) for at in range(len(row))] for i, row in enumerate(tokens)]
    other = tuple(tuple(t + 10 * late for t, late in zip(*each)) for each in zip(tokens, places))
    was = tokens[request][position]
    found = launch_pairs.compare_outputs([tokens], [other])
    assert found.differs == Differs(request + 1, position + 1, was, was + 10)
    assert launch_pairs.compare_outputs([tokens], [tokens]).differs is None


@pytest.mark.parametrize(("baseline", "candidate", "answers"), [
    ([((1, 2),)], [((1,),)], Answers(1, 2, 0, True, Differs(1, 2, 2, None))),  # one ends early
    ([((1,),)], [((1,), (5,))], Answers(1, 1, 1, True, Differs(2, 1, None, 5))),
    ([SAME, SAME], [SAME, ()], Answers(2, 2, 2, True, None)),
    ([SAME, OTHER], [SAME], Answers(2, 2, 2, False, None)),  # launches of one side may disagree
    ([SAME], [OTHER], Answers(2, 2, 1, True, Differs(2, 2, 4, 5))),
    ([()], [((1,),)], None),  # nobody asked
    ([], [], None),
])  # fmt: skip
def test_outputs_of_sides_are_compared(baseline, candidate, answers):
    assert launch_pairs.compare_outputs(baseline, candidate) == answers
