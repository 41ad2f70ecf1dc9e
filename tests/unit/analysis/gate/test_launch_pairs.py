"""A gate from its records: which launches make a pair, which pairs count, and what they say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launches import LOADS, RATES, launch, pair_of_launches, pairs
from stored_records import BUSY
from strategies import measurement

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import (
    BLOCKS,
    ENDPOINTS,
    MEMORY,
    OUTPUTS,
    SIDES,
    Answers,
    Differs,
    compare_outputs,
    judge_gate,
    pairs_of,
)
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.points import by_series
from pytest_slmserve.analysis.verdict import Inconclusive, State
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import Side

SLOWER = 0.9
OF_DUMMY = [name for name in ENDPOINTS if name != OUTPUTS]


def state(gated, endpoint):
    return gated.verdict(endpoint).state


# Which launches make a pair

made_once = cache(pairs)  # as often as hypothesis asks


@given(st.randoms(use_true_random=False), st.integers(1, 5))
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


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"preempted": 2}, "preemptions in the window"),
        ({"columns": {**BUSY, sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}}, "3 processes computed on"),
        ({"columns": {**BUSY, sensors.SM_CLOCK: clocks_down}}, None),
    ],
    ids=["invalid", "degraded", "noisy"],
)
def test_a_pair_that_cannot_be_trusted_is_left_out_with_a_sentence_and_noise_drops_none(facts, why):
    made = pair_of_launches(5, **facts)
    gated = judge_gate([*pairs(4), *made], GateCriteria())
    assert [p.number for p in gated.pairs] == [1, 2, 3, 4, *([] if why else [5])]
    if why:
        [told] = gated.dropped
        assert told.startswith("pair 5: ") and why in told
    else:
        assert any("the SM clock fell" in text for m in made for text in check(m).noise) and gated.dropped == ()


def test_without_a_pair_that_counts_everything_is_inconclusive_and_nothing_passes():
    gated = judge_gate(pairs(4, failures=1), GateCriteria())
    assert gated.pairs == () and len(gated.dropped) == 4 and gated.outcome is State.INCONCLUSIVE
    for endpoint in OF_DUMMY:
        verdict = gated.verdict(endpoint)
        assert verdict.state is State.INCONCLUSIVE
        assert "no pair of launches counts; pair 1: 1 requests failed" in verdict.why
        with pytest.raises(Inconclusive):
            assert verdict


# What they say


@pytest.mark.parametrize(
    ("count", "speed", "wanted"), [(4, 1.0, State.PASSES), (4, 1 / SLOWER, State.PASSES), (3, 1.0, State.INCONCLUSIVE)]
)
def test_four_pairs_of_a_candidate_that_is_no_slower_pass_in_every_endpoint(count, speed, wanted):
    gated = judge_gate(pairs(count, speed=speed), GateCriteria())
    assert gated.outcome is state(gated, "throughput") is wanted and gated.settled is (count == 4)
    if count == 4:
        assert {name: state(gated, name) for name in OF_DUMMY} == dict.fromkeys(OF_DUMMY, State.PASSES)
    assert (gated.caches, gated.model, gated.gate) == ("warm", "opt-1.3b", "gate")


def test_a_slower_candidate_fails_where_it_is_slower_and_not_where_it_is_not():
    gated = judge_gate(pairs(4, speed=SLOWER), GateCriteria())
    assert gated.outcome is State.FAILS
    found = {name: state(gated, name) for name in OF_DUMMY}
    slower = dict.fromkeys(("throughput", "latency", "energy"), State.FAILS)
    assert found == {**slower, "start": State.PASSES, BLOCKS: State.PASSES, MEMORY: State.PASSES}
    verdict = gated.verdict("throughput")
    assert verdict.value == pytest.approx(SLOWER) and verdict.n == 4 and verdict.claim == "no-worse-throughput"
    assert set(verdict.records) == {m.id for m in pairs(4, speed=SLOWER)}


def test_each_endpoint_reads_its_own_load():
    """Slower at the large load alone: the latency is that of the small one."""
    made = [m for n in range(1, 5) for m in pair_of_launches(n)]
    slow = {m.id: m for n in range(1, 5) for m in launch("candidate", n, speed=SLOWER)}
    at_large = [
        next(s for s in slow.values() if (s.launch, s.load) == (m.launch, m.load))
        if m.paired.side == "candidate" and m.load.concurrency == LOADS[1]
        else m
        for m in made
    ]
    gated = judge_gate(at_large, GateCriteria())
    assert (state(gated, "throughput"), state(gated, "latency")) == (State.FAILS, State.PASSES)
    beside = {each.name: each.ratio.value for each in gated.shown}
    assert beside["output tokens/s, small load"] == pytest.approx(1.0)
    assert beside["mean TPOT, large load"] == pytest.approx(1 / SLOWER)


def test_one_load_is_the_small_and_the_large_one():
    made = [m for m in pairs(4, speed=SLOWER) if m.load.concurrency == LOADS[0]]
    gated = judge_gate(made, GateCriteria())
    assert (state(gated, "throughput"), state(gated, "latency")) == (State.FAILS, State.FAILS)
    labels = [each.name for each in (*gated.gated, *gated.shown)]
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


def test_an_energy_that_one_side_does_not_tell_never_passes():
    gated = judge_gate(pairs(4, sensed=False), GateCriteria())
    assert state(gated, "energy") is State.INCONCLUSIVE and gated.outcome is State.INCONCLUSIVE
    assert "pair 1 has no value of the candidate" in gated.verdict("energy").why


def test_an_unknown_endpoint_is_a_key_error():
    with pytest.raises(KeyError, match="speed"):
        judge_gate(pairs(1), GateCriteria()).verdict("speed")


# Outputs


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
    assert "the log probability of the baseline's tokens changes by" in gated.verdict(OUTPUTS).why


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


# KV blocks


@pytest.mark.parametrize(
    ("blocks", "wanted"),
    [(1365, State.PASSES), (2000, State.PASSES), (1352, State.PASSES), (1351, State.FAILS), (None, State.INCONCLUSIVE)],
)
def test_fewer_kv_blocks_fail_and_one_in_a_hundred_is_allowed(blocks, wanted):
    gated = judge_gate(pairs(4, kv_blocks=blocks), GateCriteria())
    assert state(gated, BLOCKS) is wanted
    assert gated.outcome is wanted


def test_the_worst_pair_tells_of_the_kv_blocks():
    gated = judge_gate([*pairs(3), *pair_of_launches(4, kv_blocks=1000)], GateCriteria())
    assert gated.verdict(BLOCKS).why.startswith("1,000 blocks where the baseline has 1,365")


# When more pairs have nothing to decide


@pytest.mark.parametrize("facts", [{}, {"speed": SLOWER}, {"kv_blocks": None}, {"sensed": False}, {"ready_s": None}])
def test_what_is_decided_or_missing_waits_for_no_further_pair(facts):
    assert judge_gate(pairs(4, **facts), GateCriteria()).settled


def test_a_difference_that_noise_may_explain_asks_for_more():
    made = [m for n in range(1, 5) for m in pair_of_launches(n, speed=1.1 if n % 2 else 0.9)]
    gated = judge_gate(made, GateCriteria())
    assert gated.outcome is State.INCONCLUSIVE and not gated.settled


# A gate is no sweep


def test_measurements_of_a_gate_are_no_points_of_a_sweep():
    alone = measurement(8, RATES[0])
    assert by_series(pairs(2)) == {}
    assert [*by_series([*pairs(2), alone]).values()] == [[alone]]


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
