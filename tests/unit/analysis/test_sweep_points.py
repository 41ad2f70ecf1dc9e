from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest
from strategies import WELL, measurement, planted_telemetry, point

from pytest_slmserve.analysis.metrics.window import PARTS, goodput_of, latencies, parse_slo
from pytest_slmserve.analysis.points import Summary, points_of, summarize
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Stream
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop


def test_summary_of_a_planted_measurement():
    seen = summarize(measurement(8, 1000.0))
    assert (seen.batch, seen.output_tokens_per_s) == pytest.approx((8, 1000))
    assert seen.requests_per_s == pytest.approx(1000 / 32) and seen.step_s == pytest.approx(0.008)
    assert seen.e2e_s == pytest.approx(0.256) and seen.normalized_latency_s == pytest.approx(0.008)
    assert seen.kv_usage == 0.5 and 0 < seen.roofline_fraction < 1


def test_no_figure_of_a_full_measurement_is_missing():
    seen = summarize(sensed(measurement()))
    absent = [f.name for f in fields(Summary) if getattr(seen, f.name) is None]
    assert [name for name in absent if not name.startswith("itl")] == ["power_imbalance"], "of one GPU"
    assert len(absent) == 6, "and no client saw the gaps between tokens"


def sensed(made, **columns):
    """With the sensors of a healthy GPU beside it; columns by the name of their number."""
    window = made.run.window_s
    planted = {**WELL, **{getattr(sensors, name): value for name, value in columns.items()}}
    telemetry = planted_telemetry(planted, until_s=window[1] + 0.1, interval_s=0.01)
    return replace(made, run=replace(made.run, telemetry=telemetry))


def test_figures_of_the_sensors():
    seen = summarize(sensed(measurement(8, 1000.0)))
    assert (seen.dram_active, seen.sm_occupancy, seen.sm_active_max) == pytest.approx((0.6, 0.2, 0.8))
    assert seen.power_w == pytest.approx(400, rel=0.02) and seen.energy_per_token_j == pytest.approx(0.4, rel=0.02)
    assert seen.bound == "memory" and 0 < seen.unexplained < 1


def test_without_sensors_their_figures_are_absent_not_zero():
    seen = summarize(measurement())
    assert (seen.dram_active, seen.power_w, seen.energy_per_token_j, seen.own_cores) == (None,) * 4


def clocks_down(at):
    return 1.5e9 if round(at / 0.01) % 5 == 0 else 1.98e9


def test_noisy_repeats_count_as_others_do_and_it_is_said():
    good = sensed(measurement(8, 1000.0))
    noisy = sensed(measurement(8, 500.0, repeat=1), SM_CLOCK=clocks_down)
    [seen] = points_of([good, noisy])
    assert seen.repeats == pytest.approx((1000, 500)) and seen.records == (good.id, noisy.id)
    assert (seen.left_out, seen.problems, seen.degraded) == (0, (), ())
    [text] = seen.noise
    assert "SM clock fell" in text


def test_noise_of_a_repeat_that_is_left_out_is_not_that_of_the_point():
    noisy = sensed(measurement(8, 500.0, repeat=1, preempted=1), SM_CLOCK=clocks_down)
    [seen] = points_of([sensed(measurement(8, 1000.0)), noisy])
    assert seen.left_out == 1 and "preemption" in seen.problems[0] and seen.noise == ()


def now_and_then(at):
    return 0.8 if round(at / 0.01) % 5 == 0 else None


def test_degraded_repeats_give_way_to_sound_ones():
    good = sensed(measurement(8, 1000.0))
    bad = sensed(measurement(8, 500.0, repeat=1), SM_ACTIVE=now_and_then)
    [seen] = points_of([good, bad])
    assert seen.repeats == pytest.approx((1000,)) and seen.left_out == 1 and seen.degraded == ()
    assert "SM_ACTIVE is missing" in seen.problems[0]


def test_where_all_are_degraded_they_are_used_and_it_is_said():
    [seen] = points_of([sensed(measurement(8, 1000.0, repeat=i), SM_ACTIVE=now_and_then) for i in range(2)])
    assert seen.valid and len(seen.repeats) == len(seen.each) == 2 and seen.left_out == 0
    assert "SM_ACTIVE is missing" in seen.degraded[0]


def test_what_the_sensors_call_invalid_is_no_repeat():
    [seen] = points_of([sensed(measurement(8), FOREIGN_PROCESSES=1.0), sensed(measurement(8, repeat=1))])
    assert len(seen.repeats) == 1 and "processes of others" in seen.problems[0]


def test_a_point_is_the_mean_of_its_valid_repeats():
    good = [measurement(8, rate, repeat=i) for i, rate in enumerate((1000.0, 1100.0))]
    [seen] = points_of([*good, measurement(8, 500.0, repeat=2, preempted=1)])
    assert seen.repeats == pytest.approx((1000, 1100)) and seen.output_tokens_per_s == pytest.approx(1050)
    assert seen.records == tuple(m.id for m in good)
    assert seen.e2e_repeats == pytest.approx((0.256, 0.256 / 1.1)) and seen.batch_repeats == pytest.approx((8, 8))
    assert seen.valid and len(seen.problems) == 1 and "preemption" in seen.problems[0]


def test_a_point_without_a_valid_repeat_shows_no_figure():
    [seen] = points_of([measurement(8, failures=1, repeat=i) for i in range(2)])
    assert not seen.valid and seen.repeats == () and seen.output_tokens_per_s is None and seen.records == ()
    assert seen.problems == ("1 requests failed, the first with Planted: as it was told to",)


def test_points_ascend_and_repeats_keep_the_order_measured():
    made = [measurement(c, 100.0 * c + i, repeat=i) for c in (1, 2, 16) for i in range(3)]
    shuffled = random.Random(5).sample(made, len(made))
    assert points_of(shuffled) == points_of(made)
    assert [p.concurrency for p in points_of(shuffled)] == [1, 2, 16]
    assert points_of(shuffled)[2].repeats == pytest.approx((1600, 1601, 1602))


def test_other_loads_are_no_points():
    assert points_of([measurement(load=OpenLoop(requests=8)), measurement(load=ClosedLoop(8, requests=64))]) == ()


@pytest.mark.parametrize("repeats", [(), (0.0,), (float("inf"),), (float("nan"),), (-1.0, 5.0)])
def test_a_point_needs_positive_throughput(repeats):
    assert not point(8, repeats, [1.0] * len(repeats)).valid


def test_a_point_needs_a_latency_for_each_throughput():
    assert not point(8, [5.0, 5.0], [1.0]).valid


# Percentiles and goodput


def test_percentiles_of_a_point_are_means_over_its_repeats():
    measured = [measurement(8, 1000.0), measurement(8, 500.0, repeat=1)]
    [seen] = points_of(measured)
    each = [latencies([m.run]) for m in measured]
    for name in ("ttft", "tpot", "e2e"):
        for part in PARTS:
            found = [getattr(getattr(one, f"{name}_s"), part) for one in each]
            assert getattr(seen, f"{name}_{part}_s") == pytest.approx(sum(found) / 2) and found[1] > found[0]
    assert seen.itl_s is None and seen.itl_p99_s is None, "nobody saw the gaps between tokens"


def test_itl_of_a_point_is_that_of_its_client():
    gaps = {"growth": 1.01, "least_s": 1e-4, "counts": {"300": 99, "500": 1}, "sum_s": 0.5}
    made = measurement(8, 1000.0)
    [seen] = points_of([replace(made, run=replace(made.run, stream=Stream(0.1, 0.0, (1.0,), gaps)))])
    assert seen.itl_s == pytest.approx(0.005)
    assert seen.itl_p50_s == seen.itl_p99_s == pytest.approx(1e-4 * 1.01**300.5)


def test_goodput_of_a_point_is_over_all_repeats_used():
    fast, slow = measurement(8, 1000.0), measurement(8, 500.0, repeat=1)
    broken = measurement(8, 1000.0, repeat=2)
    broken = replace(broken, run=replace(broken.run, failures=1))
    [seen] = points_of([fast, slow, broken])
    alone = [goodput_of(parse_slo("e2e:300ms"), (m,)) for m in (fast, slow)]
    found = seen.goodput("e2e:300ms")
    assert [each.attainment for each in alone] == [1, 0]
    assert (found.requests, found.good) == (sum(each.requests for each in alone), alone[0].requests)
    assert found.attainment == found.good / found.requests and found.per_s == pytest.approx(alone[0].per_s / 2)
    assert seen.goodput(parse_slo("e2e:300ms")) == found


def test_a_point_without_a_valid_repeat_has_no_goodput():
    made = measurement(8, 1000.0)
    [seen] = points_of([replace(made, run=replace(made.run, failures=1))])
    assert not seen.valid and seen.goodput("e2e:1s") is None


@pytest.mark.parametrize(("words", "said"), [("", "is no SLO"), ("itl:9ms", "not request by request")])
def test_goodput_by_other_words_is_refused(words, said):
    [seen] = points_of([measurement(8, 1000.0)])
    with pytest.raises(BadUsage, match=said):
        seen.goodput(words)
