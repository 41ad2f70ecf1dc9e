"""Against a stored baseline: what fails, what holds, and all that is inconclusive."""

from __future__ import annotations

import math
import re
from dataclasses import astuple, replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import BASELINES, in_checkout
from stored_records import BASELINE, BUSY, KNOWN, LIMITS, NEW, candidate, engine_alone, repeats

from pytest_slmserve.analysis.compare.changes import (
    COMMON,
    HOST,
    STORED,
    against_stored,
    compare,
    compared_cases,
    compared_pair,
    of_model,
)
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Replica
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

TOLERANCE = 0.03
THROUGHPUT, LATENCY = (claim for claim, _ in STORED.values())
CROWDED = {**BUSY, sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}


def judged(there, here, tolerance=TOLERANCE) -> list[Verdict]:
    return against_stored(there, here, tolerance)[0]


def states(verdicts: list[Verdict]) -> dict[str, str]:
    return {verdict.claim: verdict.state.value for verdict in verdicts}


def both(state: str) -> dict[str, str]:
    return {THROUGHPUT: state, LATENCY: state}


@pytest.mark.parametrize(
    ("factor", "state"),
    [(1.0, "passes"), (1.02, "passes"), (0.9, "passes"), (1.03, "inconclusive"), (1.04, "fails"), (1.1, "fails")],
)
def test_on_one_host_the_launches_noise_decides(factor, state):
    verdicts = judged(BASELINE, candidate(factor))
    assert states(verdicts) == both(state)
    rate, e2e = verdicts
    assert rate.value == pytest.approx(1 / factor) and e2e.value == pytest.approx(factor)
    assert rate.threshold == pytest.approx(1 / 1.03) and e2e.threshold == 1.03
    assert rate.low == pytest.approx(1 / e2e.high) and rate.high == pytest.approx(1 / e2e.low)
    assert rate.n == len(rate.records) == 6 and rate.subject == e2e.subject == "opt-1.3b at concurrency 8"


@pytest.mark.parametrize("factor", [0.9, 1.02, 1.1])
def test_on_one_host_it_is_the_comparison_of_two_runs(factor):
    there, here = BASELINE, candidate(factor)
    changes = {each.metric: each.ratio for each in compare(there, here, TOLERANCE).changes}
    for verdict, metric in zip(judged(there, here), STORED, strict=True):
        assert (verdict.value, verdict.low, verdict.high) == astuple(changes[metric])


@pytest.mark.parametrize(
    ("factor", "state"), [*((f, "inconclusive") for f in (1.0, 1.04, 0.995, 1.06)), (1.1, "fails"), (0.98, "passes")]
)
@pytest.mark.parametrize("host", ["two", None])
def test_on_another_host_a_difference_within_four_per_cent_is_inconclusive(factor, state, host):
    verdicts = judged(BASELINE, candidate(factor, environment=replace(NEW, host=host)))
    assert states(verdicts) == both(state)
    assert all("widened by a factor of 1.04 each way for another host or boot" in verdict.why for verdict in verdicts)


def test_one_repeat_of_another_host_counts_as_another_host_and_a_large_tolerance_can_hold():
    elsewhere = engine_alone(1000.5, environment=replace(KNOWN, host="two"), repeat=3)
    assert states(judged([*BASELINE, elsewhere], candidate(1.0))) == both("inconclusive")
    other = candidate(1.0, environment=replace(NEW, host="two"))
    assert states(judged(BASELINE, other, 0.10)) == both("passes")


def test_where_the_gpu_waits_for_its_host_hosts_and_launches_may_differ_by_more():
    waits = {**BUSY, sensors.ENGINE_ACTIVE: 0.64}
    there, here = (repeats([1000, 1001], columns=waits, environment=e) for e in (KNOWN, replace(NEW, host="two")))
    (rate, _) = judged(there, here, 0.10)
    assert rate.state is State.INCONCLUSIVE and rate.low < 0.64 and "for 36 % of the time" in rate.why
    (rate, _) = judged(there, candidate(1.1, columns=waits))
    assert rate.state is State.INCONCLUSIVE and "a factor of 1.25 each way for another launch" in rate.why
    assert states(judged(there, candidate(1.3, columns=waits))) == both("fails")


def test_utilisation_tells_of_waiting_where_there_are_no_profiling_counters():
    coarse = {n: column for n, column in BUSY.items() if n not in sensors.PROFILED} | {sensors.GPU_UTIL: 0.5}
    (rate, _) = judged(repeats([1000, 1001], columns=coarse), candidate(1.1, columns=coarse))
    assert rate.state is State.INCONCLUSIVE and "for 50 % of the time" in rate.why


def test_without_a_sensor_of_waiting_another_host_is_not_comparable():
    on_cpu = replace(KNOWN, platform="cpu", **dict.fromkeys(("gpu_name", "gpu_memory_bytes", "driver", "cuda")))
    there = repeats([1000, 1001], sensed=False, environment=on_cpu)
    for factor, host, state in ((1.1, "one", "fails"), (1.0, "one", "inconclusive"), (2.0, "two", "inconclusive")):
        verdicts = judged(there, candidate(factor, sensed=False, environment=replace(on_cpu, host=host)))
        assert states(verdicts) == both(state)
    assert "no sensor told how long the device waited" in verdicts[0].why


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_noise_of_the_repeats_widens_the_interval(factor):
    assert states(judged(repeats([900, 1100, 1000]), candidate(factor))) == both("inconclusive")


def test_noise_is_of_one_load_on_both_sides():
    """A noisy load does not hide what another shows; one repeat against several has their noise."""
    there = [*BASELINE, *repeats([500, 700], 4), *repeats([300], 2)]
    here = [*candidate(1.0)[:1], *repeats([500, 700], 4, environment=NEW), *repeats([300], 2, environment=NEW)]
    found = {v.subject: v for v in judged(there, here) if v.claim == THROUGHPUT}
    assert [v.state.value for v in found.values()] == ["inconclusive", "inconclusive", "passes"]
    alone = found["opt-1.3b at concurrency 2"]
    assert alone.low is None and "output tokens/s equal to the baseline's" in alone.why
    assert "noise unknown: one repeat on each side" in alone.why


def test_a_verdict_says_by_how_much_and_of_what():
    rate, e2e = judged(BASELINE, candidate(1.1))
    said = r"9.1 % lower than the baseline's \(0.909\d times, 95 %: 0.90\d+ to 0.91\d+\), tolerance 3 %;"
    assert re.match(rf"output tokens/s {said}", rate.why)
    said = r"10 % higher than the baseline's \(1.1 times, 95 %: 1.09\d+ to 1.10\d+\), tolerance 3 %;"
    assert re.match(rf"mean E2E {said}", e2e.why)


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        (BASELINE, candidate(1.0, resolved=replace(LIMITS, max_num_batched_tokens=2048)), "8192 there, 2048 here"),
        (BASELINE, candidate(1.0, environment=replace(NEW, driver="570.1")), "driver 580.159.04 there, 570.1 here"),
        (BASELINE, candidate(1.0, sensed=False), "power limit 700 W there, not known here"),
        (BASELINE, candidate(1.0, failures=1), "this run is invalid: 1 requests failed"),
        (repeats([1000, 1001], preempted=1), candidate(1.0), "the baseline is invalid: 1 preemptions"),
        (BASELINE, candidate(1.0, columns=CROWDED), "this run is degraded: 3 processes computed on the GPU"),
        (
            [*BASELINE, *candidate(1.0)],
            candidate(1.0, launch="launch-3"),
            "the baseline has 2 different engines or releases",
        ),
        (BASELINE, [*candidate(1.0), *BASELINE], "this run has 2 different engines or releases"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_compared_is_inconclusive_and_says_why(there, here, words):
    verdicts = judged(there, here)
    assert states(verdicts) == both("inconclusive") and all(words in verdict.why for verdict in verdicts)
    assert all(verdict.value is None for verdict in verdicts)


@pytest.mark.parametrize(("factor", "state"), [(1.0, "passes"), (1.1, "fails")])
def test_a_run_on_a_disturbed_host_is_compared_as_others_are(factor, state):
    disturbed = candidate(factor, columns={**BUSY, sensors.STOLEN_CORES: 0.5})
    assert all("the hypervisor took 0.50 cores" in check(m).noise[0] for m in disturbed)
    assert states(judged(BASELINE, disturbed)) == both(state)


def test_an_engine_argument_is_what_is_tested_and_the_engine_that_is_requested_again_counts():
    eager = [replace(m, spec=replace(m.spec, enforce_eager=True)) for m in repeats([500, 501], launch="eager")]
    assert states(judged([*eager, *BASELINE], candidate(1.0))) == both("passes")
    eager = [replace(m, spec=replace(m.spec, enforce_eager=True)) for m in candidate(1.2)]
    assert states(judged(BASELINE, eager)) == both("fails")


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ([], []),
        (BASELINE, []),
        ([], BASELINE),
        (BASELINE, repeats([1000, 1001], 16)),
        (BASELINE, repeats([1000, 1001], model="opt-2.7b")),
        (BASELINE, [replace(m, load=ClosedLoop(8, window_s=9)) for m in BASELINE]),
        (BASELINE, [replace(m, load=OpenLoop(requests=8)) for m in BASELINE]),
        (BASELINE, [replace(m, replica=Replica("g", 0, 2, "s", "mps")) for m in BASELINE]),
    ],
)
def test_nothing_in_common_is_inconclusive(there, here):
    (verdict,) = judged(there, here)
    assert verdict.state is State.INCONCLUSIVE and verdict.claim == COMMON
    assert (
        f"the baseline has {'opt-1.3b at concurrency 8 (ramp-up staggered, window 5 s' if there else 'none'}"
        in verdict.why
    )


def shared(rates, factor=1.0, sharing="mps", models=("opt-1.3b", "opt-1.3b"), **facts):
    """Runs of two engines that share the device; of each a rate. What takes `factor` times as long."""
    return [
        replace(m, replica=Replica(f"{launch}-{run}", index, len(models), f"{sharing} {models}", sharing))
        for launch in [facts.pop("launch", "launch-1")]
        for run, rate in enumerate(rates)
        for index, model in enumerate(models)
        for m in [engine_alone(rate / factor, model=model, launch=f"{launch}-{index}", repeat=run, **facts)]
    ]


@pytest.mark.parametrize(("factor", "state"), [(1.0, "passes"), (1.1, "fails"), (1.03, "inconclusive")])
@pytest.mark.parametrize(
    ("models", "name"), [(("opt-1.3b",) * 2, "2 x opt-1.3b"), (("opt-125m", "opt-1.3b"), "opt-125m + opt-1.3b")]
)
def test_engines_that_share_a_device_are_held_against_such(factor, state, models, name):
    there = shared([500, 501, 500], models=models)
    here = shared([500, 501, 500], factor, models=models, environment=NEW, launch="launch-2")
    verdicts = judged(there, here)
    assert states(verdicts) == both(state)
    assert {verdict.subject for verdict in verdicts} == {f"{name} by mps at concurrency 16"}
    assert verdicts[0].n == len(set(verdicts[0].records)) == 12


def test_another_way_of_sharing_or_another_number_is_another_thing():
    there = [*shared([500, 501]), *repeats([1000, 1001], 16)]
    for other in (shared([500, 501], sharing="time-slicing"), shared([500, 501], models=("opt-1.3b",) * 3)):
        (verdict,) = judged(there, other)
        assert verdict.claim == COMMON and "2 x opt-1.3b by mps at concurrency 16" in verdict.why


def test_a_run_that_lost_a_replica_is_not_used_and_a_single_replica_is_an_engine_alone():
    assert compared_cases(shared([500])[1:], steady=True) == {}
    ((_, left),) = compared_cases(shared([500, 501])[1:], steady=True).items()
    assert len(left) == 2
    one = [replace(m, replica=Replica("g", 0, 1, "s", "mps")) for m in candidate(1.1)]
    assert states(judged(BASELINE, one)) == both("fails")


def test_of_several_models_a_run_belongs_to_the_first():
    mixed = [*BASELINE, *shared([500, 501], models=("opt-125m", "opt-1.3b"))]
    assert [len(of_model(mixed, model)) for model in ("opt-1.3b", "opt-125m", "opt-2.7b")] == [3, 4, 0]


def test_what_one_side_alone_has_is_told():
    here = [*candidate(1.0), *repeats([9, 9], 16), *repeats([9, 9], 4)]
    details = "ramp-up staggered, window 5 s, warm-up 1, workload 012345"
    told = f"measured by this run alone: opt-1.3b at concurrency 4, 16 ({details})"
    assert against_stored(BASELINE, here, TOLERANCE)[1] == (told,)
    assert against_stored(here, BASELINE, TOLERANCE)[1] == (told.replace("this run", "the baseline"),)
    other_host = [replace(m, environment=replace(m.environment, host="two")) for m in BASELINE]
    (note,) = against_stored(BASELINE, other_host, TOLERANCE)[1]
    assert "of another host" in note


def test_two_workloads_under_one_load_are_told_apart():
    def other(measurements):
        return [replace(m, workload=replace(m.workload, hash="fedcba987654")) for m in measurements]

    found = judged([*BASELINE, *other(BASELINE)], [*candidate(1.0), *other(candidate(1.1))])
    assert [(v.subject[-7:-1], v.state.value) for v in found[::2]] == [("012345", "passes"), ("fedcba", "fails")]


SOME = st.lists(st.floats(900, 1100), min_size=2, max_size=3, unique=True)
FEW = settings(deadline=None, max_examples=40)


@FEW
@given(there=SOME, here=SOME, tolerance=st.floats(0.01, 0.3))
def test_a_candidate_that_is_slower_is_never_judged_better(there, here, tolerance):
    """Direction: what holds for a candidate holds for a faster one, what fails fails for a slower one."""
    found = [
        states(judged(repeats(there), repeats([r / f for r in here], environment=NEW), tolerance))
        for f in (0.8, 1.0, 1.25)
    ]
    order = {"passes": 0, "inconclusive": 1, "fails": 2}
    for claim in (THROUGHPUT, LATENCY):
        badness = [order[each[claim]] for each in found]
        assert badness == sorted(badness)


@FEW
@given(there=SOME, here=SOME)
def test_the_two_sides_changed_over_turn_the_ratio_round(there, here):
    ahead = judged(repeats(there), repeats(here, environment=NEW))
    back = judged(repeats(here, environment=NEW), repeats(there))
    for one, other in zip(ahead, back, strict=True):
        assert (one.value, one.low, one.high) == pytest.approx((1 / other.value, 1 / other.high, 1 / other.low))
        assert not (one.state is other.state is State.FAILS)


@FEW
@given(rates=SOME, slower=st.floats(1.5, 3), host=st.sampled_from(["one", "two"]))
def test_much_slower_fails_wherever(rates, slower, host):
    here = repeats([rate / slower for rate in rates], environment=replace(NEW, host=host))
    verdicts = judged(repeats([1000, 1001, 1002, 999]), here)
    assert all(v.state is State.FAILS or v.low <= v.threshold <= v.high for v in verdicts)
    assert all(v.state is not State.PASSES for v in verdicts)


@FEW
@given(st.data())
def test_missing_data_never_passes(data):
    """Whatever of it is not known: an environment's fact, an engine's limit, the sensors, the repeats."""
    here = candidate(0.5)
    match data.draw(st.sampled_from(["environment", "limit", "sensors", "repeats", "latency"])):
        case "environment":
            name = data.draw(st.sampled_from(["platform", "gpu_name", "gpu_memory_bytes", "driver", "cpu", "cores"]))
            here = [replace(m, environment=replace(NEW, **{name: None})) for m in here]
        case "limit":
            name = data.draw(st.sampled_from(["max_num_seqs", "dtype", "chunked_prefill", "kv_blocks", "block_size"]))
            here = [replace(m, resolved=replace(LIMITS, **{name: None})) for m in here]
        case "sensors":
            number = data.draw(st.sampled_from([sensors.POWER_LIMIT, sensors.SM_CLOCK, sensors.MEMORY_CLOCK]))
            here = candidate(0.5, columns={**BUSY, number: None})
        case "repeats":
            here = [replace(m, run=replace(m.run, failures=1)) for m in here]
        case "latency":
            none = (None,) * len(here[0].run.samples)
            here = [replace(m, run=replace(m.run, samples=replace(m.run.samples, first_token_s=none))) for m in here]
    both_ways = [*judged(BASELINE, here), *judged(here, BASELINE)]
    assert len(both_ways) == 4 and all(verdict.state is State.INCONCLUSIVE for verdict in both_ways)


@in_checkout
def test_the_constants_hold_of_what_was_measured_on_three_hosts():
    """The same engine and load on two H200 hosts is never farther apart than is allowed for."""
    paths = sorted(BASELINES.glob("h200-vllm-0.26.0-*.jsonl.xz"))
    apart = []
    for there, here in combinations([compared_cases(read(path).measurements, steady=True) for path in paths], 2):
        for case in there.keys() & here.keys():
            if case.sharing == "alone" and len({m.spec.key for m in (*there[case], *here[case])}) == 1:
                pair = replace(compared_pair(case, case.load, there[case], here[case]), same_boot=False)
                sides = pair.baseline, pair.candidate
                if all(side.valid for side in sides) and pair.idle_share is not None:
                    logs = math.log(sides[1].output_tokens_per_s / sides[0].output_tokens_per_s)
                    apart.append((abs(logs), pair.unseen, f"{case.engines} at {case.load}"))
    assert len(apart) > 30 and max(apart)[0] > 5 * HOST, "there is something to allow for"
    assert [row for row in apart if row[0] > row[1]] == []


@in_checkout
def test_of_what_was_measured_on_one_host_nothing_fails_against_itself():
    """Every other repeat against the rest; some of them are of two launches, 14 % apart."""
    measured = read(BASELINES / "h200-vllm-0.26.0-sensors.jsonl.xz").measurements
    for there, here in ((measured[::2], measured[1::2]), (measured[1::2], measured[::2])):
        verdicts = judged(there, here)
        assert len(verdicts) > 50 and not [v for v in verdicts if v.state is State.FAILS]
        held = {v.subject for v in verdicts if v.state is State.PASSES}
        assert {"opt-1.3b at concurrency 512", "opt-2.7b at concurrency 256"} <= held, "where the GPU is busy"
