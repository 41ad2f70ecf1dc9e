"""Which launches make a pair and which pairs count; each endpoint reads its own figure: worse by a tenth it fails, and
it alone; what one launch does not tell never passes; and what is no matter of chance: KV blocks, memory, tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, replace
from functools import cache
from types import MappingProxyType

import pytest
from facts import tells
from hypothesis import given
from hypothesis import strategies as st
from launches import LOADS, RATES, launch, pair_of_launches, pairs
from stored_records import BUSY
from strategies import measurement

from pytest_slmserve.analysis.gate.decision import MAX_GATED, GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import (
    BLOCKS,
    ENDPOINTS,
    EXACT,
    GATED,
    LARGE,
    MEMORY,
    OUTPUTS,
    SHOWN,
    SIDES,
    Answers,
    Differs,
    Gated,
    compare_outputs,
    judge_gate,
    pairs_of,
)
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.points import by_series
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import Side
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import GIB

OF_DUMMY = [name for name in ENDPOINTS if name != OUTPUTS]


def state(gated, endpoint):
    return gated.verdict(endpoint).state


MIB, MEMORY_USED = 1 << 20, 8.0 * GIB


def planted(side: Side, number: int, costs: Mapping[str, float] = MappingProxyType({})) -> tuple[Measurement, ...]:
    """Both loads of one start. costs: factors by endpoint; power is what energy per token leaves it to be."""
    return started(side, number, tuple(costs.items()))


@cache
def started(side: Side, number: int, costs: tuple[tuple[str, float], ...]) -> tuple[Measurement, ...]:
    cost = dict.fromkeys(OF_DUMMY, 1.0) | dict(costs)
    facts = {
        "kv_blocks": round(1365 / cost[BLOCKS]),
        "ready_s": 30.0 * cost["start"],
        "columns": {
            sensors.POWER: 400.0 * cost["energy"] / cost["throughput"],
            sensors.MEMORY_USED: MEMORY_USED * cost[MEMORY],
        },
    }
    small, large = (1 / cost[name] for name in ("latency", "throughput"))
    speeds = zip(LOADS, (small, large))
    return tuple(m for n, speed in speeds for m in launch(side, number, speed=speed, loads=[n], **facts))


def records(costs: Mapping[str, float] = MappingProxyType({}), count: int = 4) -> list[Measurement]:
    sides = [("baseline", {}), ("candidate", costs)]
    return [m for number in range(1, count + 1) for side, its in sides for m in planted(side, number, its)]


def states(found: Gated) -> dict[str, State]:
    return {name: verdict.state for name in OF_DUMMY if (verdict := found.verdict(name)) is not None}


ALL_PASS = dict.fromkeys(OF_DUMMY, State.PASSES)
# Which launches make a pair
made_once = cache(pairs)  # as often as hypothesis asks


@given(st.randoms(use_true_random=False), st.integers(1, 2))
def test_pairs_do_not_depend_on_the_order_of_the_records(chance, count):
    shuffled = (made := made_once(count))[:]
    chance.shuffle(shuffled)
    found = pairs_of(shuffled)
    assert found == pairs_of(made)
    assert [pair.number for pair in found] == [*range(1, count + 1)]


def test_a_pair_has_its_sides_their_places_and_loads_in_ascending_order():
    first, second = pairs_of([*reversed(pairs(2))])
    places = [[launch.measurements[0].paired for launch in pair.launches] for pair in (first, second)]
    assert [tuple(each.side for each in place) for place in places] == [SIDES, SIDES]
    assert [[each.second for each in place] for place in places] == [[False, True], [True, False]]
    assert tuple(m.load.concurrency for m in first.candidate.measurements) == LOADS


@pytest.mark.parametrize("broken", SIDES)
def test_a_launch_that_is_missing_or_was_broken_off_makes_no_pair(broken: Side):
    halves = [*launch("baseline", 2), *launch("candidate", 2)]
    one_load = [m for m in halves if m.paired.side != broken or m.load.concurrency == LOADS[0]]
    for found in ([m for m in halves if m.paired.side != broken], one_load):
        assert [p.number for p in pairs_of([*pair_of_launches(1), *found])] == [1]
        assert pairs_of(found) == (), "nor as the first of all"


def test_the_second_measurement_of_a_load_on_one_launch_replaces_the_first():
    made = pair_of_launches(1)
    bad = replace(made[1], run=replace(made[1].run, failures=3))
    again = replace(made[1], measured_at="2026-01-01T00:01:05.000+00:00")
    for order in ([*made, again], [again, *made], [made[0], bad, again, *made[2:]]):
        [pair] = pairs_of(order)
        assert pair.baseline.measurements == (made[0], again) and pair.baseline.problems == ()


# Which pairs count


def clocks_down(at: float) -> float:
    return 1.5e9 if at % 0.2 < 0.1 else 1.98e9


CROWDED = {**BUSY, sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}


@pytest.mark.parametrize(
    ("facts", "told"),
    [({"preempted": 2}, 2), ({"columns": CROWDED}, 3), ({"columns": {**BUSY, sensors.SM_CLOCK: clocks_down}}, None)],
    ids=["invalid", "degraded", "noisy"],
)
def test_a_pair_that_cannot_be_trusted_is_left_out_and_noise_drops_none(facts, told):
    made = pair_of_launches(5, **facts)
    gated = judge_gate([*pairs(4), *made], GateCriteria())
    assert [p.number for p in gated.pairs] == [1, 2, 3, 4, *([] if told else [5])]
    assert len(gated.dropped) == bool(told) and all(tells(each, 5, told) for each in gated.dropped)
    assert told or any(check(m).noise for m in made)


def test_without_a_pair_that_counts_everything_is_inconclusive_and_nothing_passes():
    gated = judge_gate(pairs(4, failures=1), GateCriteria())
    assert gated.pairs == () and len(gated.dropped) == 4 and gated.outcome is State.INCONCLUSIVE
    assert states(gated) == dict.fromkeys(OF_DUMMY, State.INCONCLUSIVE) and not gated.settled
    assert all(gated.dropped[0] in gated.verdict(endpoint).why for endpoint in OF_DUMMY)


# What they say


@pytest.mark.parametrize(("count", "wanted"), [(4, State.PASSES), (3, State.INCONCLUSIVE)])
def test_four_pairs_of_an_unchanged_candidate_pass_in_every_endpoint(count, wanted):
    gated = judge_gate(records(count=count), GateCriteria())
    assert gated.outcome is state(gated, "throughput") is wanted and gated.settled is (count == 4)
    assert states(gated) == {name: State.PASSES if name in EXACT else wanted for name in OF_DUMMY}
    assert (gated.caches, gated.model, gated.gate, len(gated.gated)) == ("warm", "opt-1.3b", "gate", MAX_GATED)


@pytest.mark.parametrize("endpoint", OF_DUMMY)
def test_a_tenth_worse_fails_there_and_nowhere_else_and_a_tenth_better_passes(endpoint):
    better, worse = (judge_gate(records({endpoint: cost}), GateCriteria()) for cost in (1 / 1.1, 1.1))
    assert states(better) == ALL_PASS and better.outcome is State.PASSES
    assert states(worse) == ALL_PASS | {endpoint: State.FAILS} and worse.outcome is State.FAILS
    seen = {each.name: each.ratio.value for each in worse.gated}
    for name, each in GATED.items():
        cost = 1.1 if name == endpoint else 1.0
        assert seen[each.label] == pytest.approx(1 / cost if each.better == "higher" else cost, rel=0.01)


def test_a_verdict_has_the_ratio_its_interval_its_margin_and_its_records():
    made = [replace(m, paired=replace(m.paired, caches="cold")) for m in records({"throughput": 1.1})]
    gated = judge_gate(made, GateCriteria(margin=0.05))
    assert (gated.caches, gated.terms.margin, gated.dropped) == ("cold", 0.05, ())
    [its] = [each for each in gated.gated if each.name == GATED["throughput"].label]
    verdict = gated.verdict("throughput")
    assert (verdict.value, verdict.low, verdict.high) == astuple(its.ratio) and verdict.claim == "no-worse-throughput"
    assert (verdict.threshold, verdict.n, verdict.subject) == (0.05, 4, "opt-1.3b")
    assert set(verdict.records) == {m.id for m in made}
    assert set(map(id, gated.measurements("baseline"))) == {id(m) for m in made if m.paired.side == "baseline"}


def test_what_is_only_shown_is_of_its_own_load_too():
    seen = {each.name: each for each in judge_gate(records({"throughput": 1.1}), GateCriteria()).shown}
    by_label = {each.label: each for each in SHOWN}
    assert seen.keys() == by_label.keys() and not any(each.gated for each in seen.values())
    large = {label for label, each in by_label.items() if each.load == LARGE}
    assert {label for label, each in seen.items() if each.ratio.value == pytest.approx(1.1, rel=1e-3)} == large


def test_one_load_is_the_small_and_the_large_one():
    made = [m for m in pairs(4, speed=0.9) if m.load.concurrency == LOADS[0]]
    gated = judge_gate(made, GateCriteria())
    assert (state(gated, "throughput"), state(gated, "latency")) == (State.FAILS, State.FAILS)
    labels = [each.name for each in gated.compared]
    assert not any("load" in label for label in labels) and len(labels) == len(set(labels)), "nothing is told twice"


@pytest.mark.parametrize(("ready_s", "wanted"), [(21.0, State.PASSES), (30.0, State.FAILS), (10.0, State.PASSES)])
def test_a_start_has_a_margin_of_its_own(ready_s, wanted):
    gated = judge_gate(pairs(4, ready_s=ready_s), GateCriteria(margin=0.01))
    assert state(gated, "start") is wanted and gated.verdict("start").threshold == 0.15
    assert gated.verdict("latency").threshold == 0.01
    assert gated.outcome is (State.FAILS if wanted is State.FAILS else State.PASSES)


def without_sensors(count):
    return [m for n in range(1, count + 1) for side in SIDES for m in launch(side, n, sensed=False)]


def test_without_sensors_there_is_no_energy_to_judge_and_the_others_pass():
    gated = judge_gate(without_sensors(4), GateCriteria())
    assert gated.verdict("energy") is None
    assert len(gated.gated) == 3 and gated.outcome is State.PASSES


def test_an_unknown_endpoint_is_a_key_error():
    with pytest.raises(KeyError):
        judge_gate(pairs(1), GateCriteria()).verdict("speed")


# What one launch does not tell


def blind(m: Measurement, *numbers: int, **resolved: None) -> Measurement:
    seen = m.run.telemetry
    left = replace(seen, columns={number: values for number, values in seen.columns.items() if number not in numbers})
    return replace(m, resolved=replace(m.resolved, **resolved), run=replace(m.run, telemetry=left))


@pytest.mark.parametrize(
    ("lost", "numbers", "resolved"),
    [
        (("energy", MEMORY), (sensors.POWER, sensors.MEMORY_USED), {}),
        (("start",), (), {"ready_s": None}),
        ((BLOCKS,), (), {"kv_blocks": None}),
        ((MEMORY,), (sensors.MEMORY_USED,), {}),
    ],
)
@pytest.mark.parametrize("where", [[(1, "baseline")], [(4, "candidate")], [(n, "candidate") for n in (1, 2, 3, 4)]])
def test_a_value_that_one_launch_did_not_report_leaves_it_inconclusive(lost, numbers, resolved, where):
    made = [blind(m, *numbers, **resolved) if (m.paired.pair, m.paired.side) in where else m for m in records()]
    found = judge_gate(made, GateCriteria())
    assert states(found) == ALL_PASS | dict.fromkeys(lost, State.INCONCLUSIVE)
    assert found.outcome is State.INCONCLUSIVE and found.settled, "a missing value stays missing"


@pytest.mark.parametrize("unknown", LOADS)
def test_memory_that_a_side_tells_at_one_load_alone_leaves_it_inconclusive(unknown):
    """It may have needed more at the other."""
    place = "candidate", unknown
    made = [blind(m, sensors.MEMORY_USED) if (m.paired.side, m.load.concurrency) == place else m for m in records()]
    assert states(judge_gate(made, GateCriteria()))[MEMORY] is State.INCONCLUSIVE


def test_where_no_sensor_tells_memory_there_is_no_verdict_on_it():
    found = judge_gate([blind(m, sensors.MEMORY_USED) for m in records()], GateCriteria())
    assert found.verdict(MEMORY) is None and found.outcome is State.PASSES


# What is no matter of chance


@pytest.mark.parametrize(
    ("blocks", "wanted"), [(1365, State.PASSES), (2000, State.PASSES), (1352, State.PASSES), (1351, State.FAILS)]
)
def test_fewer_kv_blocks_fail_and_one_in_a_hundred_is_allowed(blocks, wanted):
    """The worst pair decides."""
    gated = judge_gate([*pairs(3), *pair_of_launches(4, kv_blocks=blocks)], GateCriteria())
    verdict = gated.verdict(BLOCKS)
    assert verdict.state is gated.outcome is wanted and verdict.n == 4
    assert (verdict.value, verdict.threshold) == (min(1, blocks / 1365), pytest.approx(0.99))


@pytest.mark.parametrize(
    ("before", "more", "wanted"),
    [
        (8 * GIB, 256 * MIB, State.PASSES),  # the grain
        (8 * GIB, 257 * MIB, State.FAILS),
        (100 * GIB, 1023 * MIB, State.PASSES),  # within one in a hundred
        (100 * GIB, 1025 * MIB, State.FAILS),
    ],
)
def test_a_candidate_may_need_one_in_a_hundred_more_or_256_mib(before, more, wanted):
    costs = [
        (number, side, before + more * (number == 2 and side == "candidate"))
        for number in range(1, 5)
        for side in SIDES
    ]
    made = [m for number, side, used in costs for m in planted(side, number, {MEMORY: used / MEMORY_USED})]
    found = judge_gate(made, GateCriteria()).verdict(MEMORY)
    assert found.state is wanted and found.n == 4 and found.value == pytest.approx(1 + more / before)
    assert found.threshold == pytest.approx(max(1.01, 1 + 256 * MIB / before))


def scored(drift=0.0, between=0.0, count=4, real=True):
    """Pairs of which the first two tell how likely 64 answers are: less by `drift` to the candidate, and by `between`
    to both of the second pair."""
    made = []
    for m in pairs(count):
        place, less = m.paired, drift if m.paired.side == "candidate" else 0.0
        less += between if place.pair == 2 else 0.0
        scores = tuple(-0.4 - 0.002 * (n % 8) - less for n in range(64)) if place.pair <= 2 else ()
        spec = replace(m.spec, load_format="auto" if real else "dummy")
        made.append(replace(m, spec=spec, paired=replace(place, scores=scores)))
    return made


@pytest.mark.parametrize(
    ("drift", "between", "wanted"),
    [
        (0.0, 0.0, State.PASSES),
        (0.045, 0.0, State.PASSES),
        (-0.045, 0.0, State.PASSES),
        (0.055, 0.0, State.FAILS),
        (-0.055, 0.0, State.FAILS),  # likelier than to the baseline is wrong too
        (0.055, 0.02, State.PASSES),  # launches of the baseline differ by that
        (1.5, 0.0, State.FAILS),
    ],
)
def test_a_candidate_to_which_the_answers_are_not_as_likely_fails(drift, between, wanted):
    gated = judge_gate(scored(drift, between), GateCriteria())
    assert gated.outcome is state(gated, OUTPUTS) is wanted
    assert gated.verdict(OUTPUTS).value == pytest.approx(abs(drift), abs=1e-6)
    assert gated.verdict(OUTPUTS).threshold == pytest.approx(0.05 + between)


def test_changes_both_ways_do_not_cancel_out():
    made = []
    for m in scored():
        wrong = [score + (0.2 if n % 2 else -0.2) for n, score in enumerate(m.paired.scores)]
        made.append(replace(m, paired=replace(m.paired, scores=tuple(wrong))) if m.paired.side == "candidate" else m)
    assert state(judge_gate(made, GateCriteria()), OUTPUTS) is State.FAILS


def test_answers_of_dummy_weights_are_not_judged_and_without_scores_nothing_passes():
    assert judge_gate(scored(1.5, real=False), GateCriteria()).verdict(OUTPUTS) is None
    unscored = [replace(m, paired=replace(m.paired, scores=())) for m in scored()]
    gated = judge_gate(unscored, GateCriteria())
    assert state(gated, OUTPUTS) is gated.outcome is State.INCONCLUSIVE


def test_the_interval_of_the_change_is_students_over_the_requests():
    """Changes of 0.01 and 0.03 in turns, of 64 requests: 1.9983 standard errors with 63 degrees of freedom."""
    made = []
    for m in scored():
        drift = [0.01 + 0.02 * (n % 2) if m.paired.side == "candidate" else 0.0 for n in range(64)]
        scores = tuple(score - less for score, less in zip(m.paired.scores, drift))
        made.append(replace(m, paired=replace(m.paired, scores=scores)))
    verdict, half = judge_gate(made, GateCriteria()).verdict(OUTPUTS), 1.9983 * 0.01 * math.sqrt(64 / 63) / 8
    assert (verdict.value, verdict.low, verdict.high) == pytest.approx((0.02, 0.02 - half, 0.02 + half), abs=1e-6)


# When more pairs have nothing to decide


@pytest.mark.parametrize("facts", [{}, {"speed": 0.9}, {"kv_blocks": None}, {"sensed": False}, {"ready_s": None}])
def test_what_is_decided_or_missing_waits_for_no_further_pair(facts):
    assert judge_gate(pairs(4, **facts), GateCriteria()).settled


def test_a_difference_that_noise_may_explain_asks_for_more():
    made = [m for n in range(1, 5) for m in pair_of_launches(n, speed=1.1 if n % 2 else 0.9)]
    gated = judge_gate(made, GateCriteria())
    assert gated.outcome is State.INCONCLUSIVE and not gated.settled


def test_measurements_of_a_gate_are_no_points_of_a_sweep():
    alone = measurement(8, RATES[0])
    assert by_series(pairs(2)) == {}
    assert [*by_series([*pairs(2), alone]).values()] == [[alone]]


# Greedy tokens


TOKENS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple), min_size=1, max_size=4).map(tuple)


@given(TOKENS, st.data())
def test_the_first_planted_difference_is_found(tokens, data):
    request = data.draw(st.integers(0, len(tokens) - 1))
    position = data.draw(st.integers(0, len(tokens[request]) - 1))
    other = tuple(
        tuple(t + 10 * (i >= request and (i > request or at >= position)) for at, t in enumerate(row))
        for i, row in enumerate(tokens)
    )
    was = tokens[request][position]
    assert compare_outputs([tokens], [other]).differs == Differs(request + 1, position + 1, was, was + 10)
    assert compare_outputs([tokens], [tokens]).differs is None


def test_one_that_ends_early_differs_where_it_ends():
    assert compare_outputs([((1, 2),)], [((1,),)]).differs == Differs(1, 2, 2, None)
    assert compare_outputs([((1,),)], [((1,), (5,))]).differs == Differs(2, 1, None, 5)


def test_launches_of_one_side_may_disagree_among_themselves():
    one, other = ((1, 2), (3, 4)), ((1, 2), (3, 5))
    assert compare_outputs([one, one], [one, ()]) == Answers(2, 2, 2, True, None)
    assert compare_outputs([one, other], [one]) == Answers(2, 2, 2, False, None)
    assert compare_outputs([one], [other]) == Answers(2, 2, 1, True, Differs(2, 2, 4, 5))
    assert compare_outputs([()], [((1,),)]) is None and compare_outputs([], []) is None, "nobody asked"
