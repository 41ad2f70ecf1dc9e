"""What several engines serve together, from records whose truth is planted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import H200, WELL, judge, measurement, planted_run, planted_telemetry, point

from pytest_slmserve.analysis.claims.table import applies, claim_of
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import CheckResult, check, is_clean, trustworthy
from pytest_slmserve.analysis.metrics.window import goodput_of, latencies, parse_slo
from pytest_slmserve.analysis.points import (
    Summary,
    all_groups,
    figure_ratio,
    ratio,
    shared_points,
    summary_of,
)
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of, with_shared
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Replica, Stream
from pytest_slmserve.schema.specs import ClosedLoop

PAY, SOONER, TAIL = "replicas-pay-mps", "replicas-answer-sooner-mps", "replicas-keep-the-tail-mps"
PASSES, FAILS, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE


def together(*rates, concurrency=8, group="one", sharing="mps", models=None, repeat=0, began_s=None, **how):
    """One run of an engine for each rate."""
    names = models or ["opt-1.3b"] * len(rates)
    asked = f"{sharing} {names} {concurrency} {how.get('output_tokens')}"
    made = []
    for index, (rate, model) in enumerate(zip(rates, names)):
        m = measurement(concurrency, rate, model=model, launch=f"{group}-{index}", repeat=repeat, **how)
        run = replace(m.run, began_s=None if began_s is None else began_s[index])
        part = Replica(f"{group}-{repeat}", index, len(rates), asked, sharing)
        made.append(replace(m, run=run, replica=part))
    return made


def slowed(m, factor):
    """The same, its second half by so much slower."""
    run = planted_run(8, 400.0, output_tokens=32, steps=200, slow_from=100, slow_factor=factor)
    return replace(m, run=run)


def alone(*rates, concurrency=16):
    return [measurement(concurrency, rate, repeat=i) for i, rate in enumerate(rates)]


def curve(rates, shared):
    return with_shared([curve_of("opt-1.3b", alone(*rates))], shared_points(shared))[0]


# One run


def test_what_all_serve_is_added_up():
    seen = summary_of(*together(400.0, 600.0))
    assert seen.output_tokens_per_s == pytest.approx(1000.0) == seen.sum_tokens_per_s
    assert seen.each_tokens_per_s == pytest.approx((400.0, 600.0))


def test_latencies_are_pooled_and_the_largest_mean_is_the_papers():
    slow, fast = together(400.0, 800.0)
    seen = summary_of(slow, fast)
    each = [latencies([run]) for run in window.common_span([slow, fast])]
    assert seen.largest_e2e_s == pytest.approx(max(one.e2e_s.mean for one in each))
    requests = [one.requests for one in each]
    pooled = sum(one.e2e_s.mean * n for one, n in zip(each, requests)) / sum(requests)
    assert seen.e2e_s == pytest.approx(pooled)
    assert min(one.e2e_s.p50 for one in each) <= seen.e2e_p50_s <= max(one.e2e_s.p50 for one in each)
    assert seen.e2e_p99_s > 0.95 * each[0].e2e_s.p99, "the slow one's"


def test_goodput_of_engines_at_once_is_added_up_and_of_repeats_averaged():
    measured = [*together(400.0, 600.0), *together(400.0, 600.0, repeat=1)]
    [point] = shared_points(measured)
    alone = [goodput_of(parse_slo("e2e:600ms"), (m,)) for m in measured]
    found = point.goodput("e2e:600ms")
    assert [each.attainment for each in alone] == [0, 1, 0, 1]
    assert found.per_s == pytest.approx(alone[1].per_s) and found.requests == sum(each.requests for each in alone)
    assert found.good == alone[1].good + alone[3].good
    assert point.ttft_p95_s > 0 and point.e2e_p99_s > point.e2e_p50_s


def test_gaps_of_engines_at_once_are_counted_together():
    counts = [{"10": 3}, {"10": 1, "20": 4}]
    made = together(400.0, 600.0)
    streams = [
        Stream(0.1, 0.0, (1.0,), {"growth": 1.01, "least_s": 1e-4, "counts": each, "sum_s": 0.0}) for each in counts
    ]
    members = tuple(replace(m, run=replace(m.run, stream=s)) for m, s in zip(made, streams))
    seen = summary_of(*members)
    assert (seen.itl_p50_s, seen.itl_p90_s) == pytest.approx((1e-4 * 1.01**10.5, 1e-4 * 1.01**20.5))
    assert summary_of(members[0], made[1]).itl_p50_s is None, "of one of them nobody counted"


def test_rates_are_of_the_span_that_all_windows_have_in_common():
    first, second = together(400.0, 400.0, began_s=(100.0, 100.5))
    runs = window.common_span([first, second])
    spans = [(run.began_s + run.window_s[0], run.began_s + run.window_s[1]) for run in runs]
    assert spans[0] == pytest.approx(spans[1])
    assert spans[0][0] == pytest.approx(100.5 + second.run.window_s[0])
    assert spans[0][1] == pytest.approx(100.0 + first.run.window_s[1])


def test_of_requests_that_start_together_each_engine_keeps_its_whole_convoys():
    load = ClosedLoop(8, ramp_up="burst")
    first, second = together(400.0, 600.0, began_s=(100.0, 100.5), output_tokens=32, steps=66, load=load)
    assert window.common_span([first, second]) == [first.run, second.run]
    assert not check(first, second).problems
    assert summary_of(first, second).output_tokens_per_s == pytest.approx(1000.0)


def test_windows_with_nothing_in_common_have_no_rate():
    first, second = together(400.0, 400.0, began_s=(100.0, 900.0))
    seen = summary_of(first, second)
    assert seen.output_tokens_per_s is None and seen.sum_tokens_per_s == pytest.approx(800.0)
    assert check(first, second)[0] == ("the windows of the replicas have no time in common",)


def test_the_sensors_are_of_all():
    first, second = together(400.0, 600.0)
    columns = {**WELL, sensors.ENERGY: None, sensors.POWER_INSTANT: 500.0, sensors.POWER: 500.0}
    telemetry = planted_telemetry(columns, until_s=first.run.window_s[1], interval_s=0.05)
    seen = summary_of(replace(first, run=replace(first.run, telemetry=telemetry)), second)
    assert (seen.power_w, seen.dram_active) == pytest.approx((500.0, 0.6))
    assert seen.energy_per_token_j == pytest.approx(0.5)


@given(st.permutations(range(3)))
def test_records_come_in_any_order_and_a_lost_one_makes_no_run(order):
    members = together(100.0, 200.0, 300.0)
    (found,) = all_groups([members[i] for i in order])
    assert list(found) == members
    assert all_groups(members[:2]) == []


# Points


def test_repeats_make_a_point_and_invalid_ones_are_left_out():
    runs = [
        *together(400.0, 400.0, repeat=0),
        *together(410.0, 410.0, repeat=1),
        *together(500.0, 500.0, repeat=2, failures=1),
    ]
    (found,) = shared_points(runs)
    assert found.repeats == pytest.approx((800.0, 820.0)) and found.valid
    assert (found.models, found.count, found.model) == (("opt-1.3b",) * 2, 2, "opt-1.3b")
    assert (found.concurrency, found.loads, found.sharing) == (16, (8, 8), "mps")
    assert found.left_out == 1 and "replica 1: 1 requests failed" in found.problems[0]
    assert len(found.records) == 4
    groups = all_groups(runs)
    verdict = trustworthy("two", groups, 3)
    assert not verdict and "2 of 3 runs are valid, 3 are wanted: replica 1" in verdict.why
    assert trustworthy("two", groups, 2)


@pytest.mark.parametrize(
    ("factors", "caught"), [((1.0, 1.0), False), ((1.25, 0.84), False), ((1.3, 1.0), True), ((1.25, 1.25), True)]
)
def test_what_one_loses_and_another_gains_is_steady(factors, caught):
    members = tuple(slowed(m, factor) for m, factor in zip(together(400.0, 400.0, steps=200), factors))
    found = check(*members)
    assert [text.partition(" not steady")[0] for text in found.noise] == ["opt-1.3b:"] * caught
    assert not found.problems and not found.degradations and is_clean(members)


def test_of_different_models_each_is_to_be_steady():
    pair = together(400.0, 400.0, models=["opt-125m", "opt-1.3b"], steps=200)
    found = check(slowed(pair[0], 1.25), slowed(pair[1], 0.84))
    assert [text.partition(" not steady")[0] for text in found.noise] == ["opt-125m:", "opt-1.3b:"]


def test_engines_with_nothing_in_common_are_invalid_and_noise_names_its_replica():
    apart = check(*together(400.0, 400.0, began_s=(100.0, 900.0)))
    assert apart.problems == ("the windows of the replicas have no time in common",) and not apart.noise
    first, second = together(400.0, 400.0)
    busy = planted_telemetry({**WELL, sensors.CPU_THROTTLED: 0.5}, until_s=second.run.window_s[1], interval_s=0.01)
    found = check(first, replace(second, run=replace(second.run, telemetry=busy)))
    noise = ("replica 2: the CPU quota was used up for 50 % of the time (limit 1 %)",)
    assert found == CheckResult(noise=noise)


def test_noisy_runs_are_repeats_as_others_are_and_the_point_tells():
    runs = [together(400.0, 400.0, steps=200), together(410.0, 410.0, repeat=1, steps=200)]
    runs[1] = [slowed(m, 1.3) for m in runs[1]]
    (found,) = shared_points([m for run in runs for m in run])
    assert len(found.repeats) == 2 and (found.left_out, found.problems, found.degraded) == (0, (), ())
    assert found.noise[0].startswith("opt-1.3b: not steady: ")


def test_different_questions_are_different_points():
    runs = [
        *together(400.0, 400.0), *together(300.0, 300.0, 300.0, group="three"),
        *together(390.0, 390.0, group="turns", sharing="time-slicing"),
        *together(400.0, 100.0, group="pair", models=["opt-125m", "opt-1.3b"]),
    ]  # fmt: skip
    found = shared_points(runs)
    assert [(p.count, p.sharing, p.model) for p in found] == [
        (2, "mps", "opt-1.3b"), (3, "mps", "opt-1.3b"), (2, "time-slicing", "opt-1.3b"), (2, "mps", None),
    ]  # fmt: skip


def test_replicas_are_no_points_of_a_sweep():
    swept = curve_of("opt-1.3b", [*alone(1000.0, 1010.0), *together(400.0, 400.0)])
    assert [p.concurrency for p in swept.points] == [16] and swept.shared == ()


def test_a_curve_has_the_replicas_of_its_own_model_host_and_requests():
    mine = together(400.0, 400.0)
    other = replace(mine[0].workload, hash="of other requests")
    others = [
        *together(400.0, 400.0, group="a", models=["opt-125m"] * 2),
        *together(400.0, 400.0, group="b", environment=replace(H200, driver="1")),
        *(replace(m, workload=other) for m in together(400.0, 400.0, group="c", output_tokens=64)),
    ]
    found = with_shared([curve_of("opt-1.3b", alone(1000.0)), Curve(subject="x")], shared_points([*mine, *others]))
    assert [[s.records for s in c.shared] for c in found] == [[tuple(m.id for m in mine)], []]


# Judgements


def test_the_gain_by_hand():
    (shared,) = shared_points([*together(600.0, 600.0), *together(610.0, 610.0, repeat=1)])
    gain = ratio(shared, point(16, [1000.0, 1000.0]))
    assert gain.value == pytest.approx(1210 / 1000)
    assert gain.low < 1.21 < gain.high
    assert ratio(shared_points(together(600.0, 600.0))[0], point(16, [1000.0])).low is None


@pytest.mark.parametrize(
    ("rates", "state"), [((620.0, 624.0), PASSES), ((450.0, 452.0), FAILS), ((400.0, 620.0), INCONCLUSIVE)]
)
def test_do_replicas_pay(rates, state):
    runs = [m for i, rate in enumerate(rates) for m in together(rate, rate, repeat=i)]
    verdict = judge(PAY, curve((1000.0, 1004.0), runs))
    assert (verdict.claim, verdict.state) == (PAY, state)
    assert "2 replicas under MPS serve" in verdict.why and "at concurrency 16" in verdict.why
    assert verdict.n == 6 and verdict.value == pytest.approx(2 * sum(rates) / 2 / 1002)
    assert verdict.why.endswith(", of one launch")


@pytest.mark.parametrize("claim", [PAY, SOONER])
def test_the_best_of_several_numbers_of_replicas_is_corrected_for_having_been_chosen(claim):
    two = [m for i in range(2) for m in together(600.0 + i, 600.0, repeat=i)]
    four = [m for i in range(2) for m in together(*[250.0 + i] * 4, repeat=i, concurrency=4, group="four")]
    alone, best = (judge(claim, curve((1000.0, 1004.0), runs)) for runs in (two, [*two, *four]))
    assert alone.value == best.value and best.low < alone.low < alone.high < best.high


def test_the_best_load_of_one_engine_is_corrected_for_having_been_chosen():
    """Three loads of one engine serve as much as the set: the largest mean of them is larger by chance."""
    shared = shared_points([m for i in range(2) for m in together(500.0 + i, 500.0, repeat=i)])
    single = [measurement(load, 1000.0 + load + i, repeat=i) for load in (4, 8, 16) for i in range(2)]
    one, three = (judge(PAY, with_shared([curve_of("opt-1.3b", of)], shared)[0]) for of in (single[-2:], single))
    assert one.value == three.value and three.low < one.low < one.high < three.high


def test_the_best_number_of_replicas_decides_and_the_others_are_told():
    runs = [m for i in range(2) for m in together(600.0 + i, 600.0 + i, repeat=i)]
    runs += [m for i in range(2) for m in together(*[260.0 + i] * 4, group="four", concurrency=4, repeat=i)]
    verdict = judge(PAY, curve((1000.0, 1004.0), runs))
    assert verdict and verdict.why.startswith("2 replicas") and "(4: 1.04)" in verdict.why


def test_one_engine_is_held_against_them_at_its_best_load():
    """It serves more at concurrency 32 than at the 16 of the replicas, who then do not pay."""
    runs = [m for i in range(2) for m in together(600.0 + i, 600.0 + i, repeat=i)]
    single = [
        measurement(load, rate, repeat=i) for i in range(2) for load, rate in ((16, 1000.0 + i), (32, 1300.0 + i))
    ]
    verdict = judge(PAY, with_shared([curve_of("opt-1.3b", single)], shared_points(runs))[0])
    assert verdict.state is FAILS and verdict.value == pytest.approx(1201 / 1300.5, rel=1e-3)
    assert "at concurrency 16, and one engine serves most at 32" in verdict.why


def test_one_engine_of_another_host_says_nothing_of_them():
    """Hosts of one kind, in one archive: on the other host one engine serves more at 32, and at concurrency 16."""
    here, there = (replace(H200, host=host) for host in ("here", "there"))
    runs = [m for i in range(2) for m in together(600.0 + i, 600.0 + i, repeat=i, environment=here)]
    mine = [measurement(16, 1000.0 + i, repeat=i, environment=here) for i in range(2)]
    theirs = [measurement(load, 1300.0 + i, repeat=i, environment=there) for i in range(2) for load in (16, 32)]

    def judged(single, claim=PAY):
        return judge(claim, with_shared([curve_of("opt-1.3b", single)], shared_points(runs))[0])

    assert judged([*mine, *theirs]).state is PASSES
    assert judged([*mine, *theirs]).value == judged(mine).value == pytest.approx(1201 / 1000.5)
    for claim in (PAY, TAIL):
        assert judged(theirs, claim).why == "one engine alone was not measured at concurrency 16 on their host"


@pytest.mark.parametrize(("bound", "state"), [(1.1, PASSES), (0.5, FAILS)])
def test_the_tail(bound, state):
    runs = [m for i in range(2) for m in together(520.0 + i, 520.0 + i, repeat=i)]
    verdict = judge(TAIL, curve((1000.0, 1004.0), runs), threshold=bound)
    assert (verdict.claim, verdict.state) == (TAIL, state)
    assert verdict.value == pytest.approx(1002 / 1041, rel=0.03)


def test_what_is_missing_is_said():
    runs = together(600.0, 600.0)
    for claim in (PAY, TAIL):
        none = judge(claim.replace("mps", "time-slicing"), curve((1000.0,), runs))
        assert (none.state, none.why) == (INCONCLUSIVE, "no replicas were measured by time slicing")
        remote_executor = with_shared([curve_of("opt-1.3b", [measurement(8, 900.0)])], shared_points(runs))[0]
        assert judge(claim, remote_executor).why == "one engine alone was not measured at concurrency 16"
        broken = judge(claim, curve((1000.0,), together(600.0, 600.0, failures=2)))
        assert broken.state is INCONCLUSIVE and "2 replicas have no valid repeat (replica 1: 2 requests" in broken.why
    once = judge(PAY, curve((1000.0,), runs))
    assert once.state is INCONCLUSIVE and "--slm-repeats 2" in once.why
    there = {how: applies(claim_of(f"replicas-pay-{how}"), curve((1.0,), runs)) for how in ("mps", "mig")}
    assert there == {"mps": True, "mig": False}


def test_a_latency_that_nobody_knows_has_no_ratio():
    (shared,) = shared_points(together(600.0, 600.0))
    assert figure_ratio(point(16, [1000.0]), shared, "e2e_p99_s") is None
    busy, blind = (replace(shared, each=tuple(replace(s, gpu_util=util) for s in shared.each)) for util in (0.9, 0.0))
    one = replace(point(16, [1000.0]), each=(Summary(gpu_util=0.6),))
    assert figure_ratio(one, busy, "gpu_util").value == pytest.approx(1.5)
    assert figure_ratio(one, blind, "gpu_util") is None


# One engine, to compare with


def test_one_engine_measured_for_comparison_is_no_point_of_a_sweep():
    swept = [measurement(c, 100.0 * c) for c in (8, 32)]
    one = replace(measurement(16, 990.0), replica=Replica("g", 0, 1, "one", "time-slicing"))
    found = curve_of("opt-1.3b", [*swept, one])
    assert [p.concurrency for p in found.points] == [8, 32] and len(found.measurements) == 3
    assert found.one_engine(16).repeats == pytest.approx((990.0,))
    assert found.one_engine(8).repeats == pytest.approx((800.0,)) and found.one_engine(64) is None
    assert all_groups([one]) == [(one,)] and one.key != replace(one, replica=None).key
