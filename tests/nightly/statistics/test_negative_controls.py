"""Each gated endpoint, made worse in records of launches, fails; and it alone."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import pytest
from strategies import RESOLVED, measurement, planted_telemetry

from pytest_slmserve.analysis.gate.decision import MAX_GATED, GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import BLOCKS, ENDPOINTS, GATED, MEMORY, OUTPUTS, Gated, judge_gate
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.run.gate import order
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import Side
from pytest_slmserve.schema.records import GateLaunch, Measurement
from pytest_slmserve.schema.specs import GIB

SMALL, LARGE = 8, 32
PAIRS, NOISE = 8, 0.003  # of one launch
OF_DUMMY = tuple(name for name in ENDPOINTS if name != OUTPUTS)
POWER_W = 400.0
MEMORY_USED = 8.0 * GIB
MIB = 1 << 20
NAMES = tuple(GATED)


def launch(paired: GateLaunch, factors: Mapping[str, float]) -> Iterator[Measurement]:
    """Both loads of one start. factors: of the cost, by endpoint; power is what energy per token leaves it to be."""
    cost = {name: factors.get(name, 1.0) for name in OF_DUMMY}
    rates = {SMALL: 1000.0 / cost["latency"], LARGE: 3000.0 / cost["throughput"]}
    watts = POWER_W * cost["energy"] / cost["throughput"]
    kv_blocks = round(RESOLVED.kv_blocks / cost[BLOCKS])
    resolved = replace(RESOLVED, ready_s=30.0 * cost["start"], kv_blocks=kv_blocks)
    readings = {sensors.POWER: watts, sensors.MEMORY_USED: MEMORY_USED * cost[MEMORY]}
    for load, rate in rates.items():
        made = measurement(load, rate, launch=f"{paired.pair}-{paired.side}", resolved=resolved, output_tokens=16)
        seen = planted_telemetry(readings, until_s=made.run.window_s[1] + 0.1, interval_s=0.05)
        yield replace(made, run=replace(made.run, telemetry=seen), paired=paired)


def records(planted: Mapping[str, float], seed: int = 1) -> Iterator[Measurement]:
    """A gate of a candidate with these factors of its costs, and a little noise of every launch."""
    chance = random.Random(seed)
    for number in range(1, PAIRS + 1):
        for place, side in enumerate(order(number)):
            noise = {name: math.exp(chance.gauss(0, NOISE)) for name in NAMES}
            worse = planted if side == "candidate" else {}
            factors = {name: noise.get(name, 1.0) * worse.get(name, 1.0) for name in OF_DUMMY}
            yield from launch(GateLaunch("gate", number, side, bool(place)), factors)


@lru_cache(maxsize=8)
def gated(endpoint: str = "", factor: float = 1.0) -> Gated:
    return judge_gate(list(records({endpoint: factor} if endpoint else {})), GateCriteria())


def states(found: Gated) -> dict[str, State]:
    verdicts = {name: found.verdict(name) for name in OF_DUMMY}
    return {name: verdict.state for name, verdict in verdicts.items() if verdict is not None}


def test_the_records_can_be_trusted():
    found = gated()
    assert not found.dropped and len(found.pairs) == PAIRS and len(found.gated) == len(GATED) == MAX_GATED


def test_an_unchanged_candidate_passes_in_every_endpoint():
    found = gated()
    assert states(found) == dict.fromkeys(OF_DUMMY, State.PASSES) and found.outcome is State.PASSES


@pytest.mark.parametrize("endpoint", OF_DUMMY)
def test_ten_percent_worse_fails_there_and_nowhere_else(endpoint):
    found = gated(endpoint, 1.1)
    assert states(found) == dict.fromkeys(OF_DUMMY, State.PASSES) | {endpoint: State.FAILS}
    assert found.outcome is State.FAILS


@pytest.mark.parametrize("endpoint", NAMES)
def test_the_ratio_is_the_planted_one(endpoint):
    found = gated(endpoint, 1.1)
    seen = {each.name: each for each in found.gated}
    for name, each in GATED.items():
        cost = 1.1 if name == endpoint else 1.0
        ratio = 1 / cost if each.better == "higher" else cost
        assert seen[each.label].ratio.value == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("endpoint", OF_DUMMY)
def test_ten_percent_better_passes_everywhere(endpoint):
    found = gated(endpoint, 1 / 1.1)
    assert states(found) == dict.fromkeys(OF_DUMMY, State.PASSES) and found.outcome is State.PASSES


def without_sensor(made: Measurement) -> Measurement:
    return replace(made, run=replace(made.run, telemetry=None))


def without_start(made: Measurement) -> Measurement:
    return replace(made, resolved=replace(made.resolved, ready_s=None))


def without_blocks(made: Measurement) -> Measurement:
    return replace(made, resolved=replace(made.resolved, kv_blocks=None))


def without_memory(made: Measurement) -> Measurement:
    seen = made.run.telemetry
    columns = {number: values for number, values in seen.columns.items() if number != sensors.MEMORY_USED}
    return replace(made, run=replace(made.run, telemetry=replace(seen, columns=columns)))


def test_where_no_sensor_tells_memory_there_is_no_verdict_on_it():
    found = judge_gate([without_memory(m) for m in records({})], GateCriteria())
    assert found.verdict(MEMORY) is None and found.outcome is State.PASSES


@pytest.mark.parametrize("unknown", [SMALL, LARGE])
def test_memory_that_a_side_tells_at_one_load_alone_leaves_it_inconclusive(unknown):
    """It may have needed more at the other."""
    made = [
        without_memory(m) if (m.paired.side, m.load.concurrency) == ("candidate", unknown) else m for m in records({})
    ]
    assert states(judge_gate(made, GateCriteria()))[MEMORY] is State.INCONCLUSIVE


@pytest.mark.parametrize(
    ("before", "more", "wanted"),
    [
        (8 * GIB, 250 * MIB, State.PASSES),  # within the grain
        (8 * GIB, 260 * MIB, State.FAILS),
        (100 * GIB, 1000 * MIB, State.PASSES),  # within one in a hundred
        (100 * GIB, 1040 * MIB, State.FAILS),
    ],
)
def test_a_candidate_may_need_one_in_a_hundred_more_or_256_mib(before, more, wanted):
    def launched(number: int, side: Side) -> Iterator[Measurement]:
        worse = side == "candidate" and number == 2  # one pair is enough
        used = {MEMORY: (before + more * worse) / MEMORY_USED}
        return launch(GateLaunch("gate", number, side, False), dict.fromkeys(OF_DUMMY, 1.0) | used)

    made = [m for number in range(1, 5) for side in order(number) for m in launched(number, side)]
    found = judge_gate(made, GateCriteria()).verdict(MEMORY)
    assert found.state is wanted and found.n == 4
    assert found.value == pytest.approx(1 + more / before) and "GiB in use where the baseline has" in found.why


@pytest.mark.parametrize(
    ("lost", "blind"),
    [
        (("energy", MEMORY), without_sensor),
        (("start",), without_start),
        ((BLOCKS,), without_blocks),
        ((MEMORY,), without_memory),
    ],
    ids=["sensors", "start", BLOCKS, MEMORY],
)
@pytest.mark.parametrize("side", ["baseline", "candidate"])
@pytest.mark.parametrize("pair", [1, 4, PAIRS])
def test_a_value_that_one_launch_did_not_report_leaves_it_inconclusive(lost, blind, side, pair):
    made = [blind(m) if (m.paired.pair, m.paired.side) == (pair, side) else m for m in records({})]
    found = judge_gate(made, GateCriteria())
    assert states(found) == dict.fromkeys(OF_DUMMY, State.PASSES) | dict.fromkeys(lost, State.INCONCLUSIVE)
    assert found.outcome is State.INCONCLUSIVE


def test_a_value_that_only_one_side_ever_reports_leaves_it_inconclusive():
    """A release that no longer says how long it took to start, say."""
    made = [without_start(m) if m.paired.side == "candidate" else m for m in records({})]
    found = judge_gate(made, GateCriteria())
    assert states(found)["start"] is State.INCONCLUSIVE and found.outcome is State.INCONCLUSIVE


def test_too_few_pairs_pass_nothing():
    found = judge_gate([m for m in records({}) if m.paired.pair <= 3], GateCriteria())
    assert {each.outcome for each in found.gated} == {State.INCONCLUSIVE} and found.outcome is State.INCONCLUSIVE
