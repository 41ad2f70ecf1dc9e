"""From simulated engines on several GPUs, whose waits are planted, to the claims on tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpus import alone, engine, on_gpus, replicas
from strategies import judge

from pytest_slmserve.analysis.compare.deployments import deployments, on_several_gpus, with_wider
from pytest_slmserve.analysis.points import shared_points
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of, with_shared
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.specs import GIB

LESS_IN_ALL, LOSES_PER_GPU = "tensor-parallel-serves-less-in-all", "tensor-parallel-loses-per-gpu"
STILL_GAINS, REPLICAS_BEAT = "tensor-parallel-still-gains", "replicas-per-gpu-beat-tensor-parallel"


def test_what_an_engine_serves_on_more_gpus_belongs_to_its_curve_on_the_fewest():
    curve = on_gpus()
    assert [wide.spec.tensor_parallel_size for wide in curve.wider] == [2, 4]
    assert on_several_gpus(curve) and not any(map(on_several_gpus, curve.wider))
    found = [(d.concurrency, d.gpus, d.engines) for d in deployments(curve)]
    assert found == [(4, 1, 1), (4, 2, 1), (4, 4, 1), (16, 1, 1), (16, 2, 1), (16, 4, 1)]


def test_other_engines_are_not_compared():
    one, other = (curve_of("opt-tiny", alone(engine(n, b_half=8.0 * n))) for n in (1, 2))
    assert [curve.wider for curve in with_wider([one, other, Curve(subject="nothing")])] == [(), (), ()]


def test_engines_of_other_hosts_are_not_compared():
    def of(gpus, host):
        return [replace(m, environment=replace(m.environment, host=host)) for m in alone(engine(gpus))]

    curves = [curve_of("opt-tiny", of(n, host)) for n, host in ((4, "b"), (1, "a"), (2, "b"))]
    found = [[wide.spec.tensor_parallel_size for wide in curve.wider] for curve in with_wider(curves)]
    assert found == [[], [], [4]], "two GPUs and four of one host; one GPU of another"


@pytest.mark.parametrize(
    ("all_reduce_s", "ratio", "state"), [(1e-3, 2 * 16 / (16 + 4), State.FAILS), (8e-3, 32 / (16 + 32), State.PASSES)]
)
def test_whether_it_serves_less_in_all_is_what_was_planted(all_reduce_s, ratio, state):
    verdict = judge(LESS_IN_ALL, on_gpus((1, 2), all_reduce_s=all_reduce_s))
    assert verdict.state is state and verdict.value == pytest.approx(ratio, rel=0.02)
    assert verdict.low < verdict.value < verdict.high and len(verdict.records) == 4
    assert "on 2 GPUs it serves" in verdict.why and "what it does on 1 GPU at concurrency 16" in verdict.why


def test_per_gpu_it_is_the_number_of_gpus_that_loses_least_which_decides():
    verdict = judge(LOSES_PER_GPU, on_gpus(all_reduce_s=1e-3))
    assert verdict.state is State.PASSES and verdict.value == pytest.approx(16 / 20, rel=0.02)
    free = judge(LOSES_PER_GPU, on_gpus(all_reduce_s=0.0), threshold=0.5)
    assert free.state is State.FAILS and free.value == pytest.approx(1.0, rel=0.02)
    assert judge(LOSES_PER_GPU, on_gpus(all_reduce_s=0.0, noise=0.05)).state is State.INCONCLUSIVE


def test_from_two_gpus_to_four():
    verdict = judge(STILL_GAINS, on_gpus(all_reduce_s=1e-3))
    assert verdict.state is State.PASSES and verdict.value == pytest.approx(20 / 12, rel=0.02)
    assert judge(STILL_GAINS, on_gpus(all_reduce_s=1e-3), threshold=1.8).state is State.FAILS
    missing = judge(STILL_GAINS, on_gpus((1, 2)))
    assert missing.state is State.INCONCLUSIVE and "on 2 and on 4 GPUs" in missing.why


def test_the_gain_of_more_gpus_is_with_their_memory():
    """Two GPUs run 4 of 16 at once, four all of them: each has its best load."""
    curve = on_gpus(all_reduce_s=1e-3, room={1: 2, 2: 4})
    verdict = judge(STILL_GAINS, curve)
    assert verdict.state is State.PASSES and verdict.value > 1.5 * 20 / 12
    assert "1024 requests fit at once on the more GPUs, 4 on the fewer" in verdict.why


def test_a_load_that_waits_for_memory_is_no_measure_of_speed():
    """One GPU runs 4 of 16: two gain 3.3 times there, by memory."""
    curve = on_gpus((1, 2), room={1: 4}, all_reduce_s=1e-3)
    waiting = next(d for d in deployments(curve) if (d.gpus, d.concurrency) == (1, 16))
    assert not waiting.fits and waiting.room == 4 and waiting.served.batch == pytest.approx(4, rel=0.02)
    verdict = judge(LESS_IN_ALL, curve)
    assert "at concurrency 4, the largest load that fits" in verdict.why
    assert verdict.value == pytest.approx(20 / (10 + 4), rel=0.02)
    nowhere = on_gpus((1, 2), room={1: 2}, loads=(4,))
    assert judge(LOSES_PER_GPU, nowhere).state is State.INCONCLUSIVE


@pytest.mark.parametrize(("all_reduce_s", "state"), [(0.0, State.FAILS), (8e-3, State.PASSES)])
def test_replicas_beat_an_engine_over_all_where_waiting_costs_more_than_reading_weights_twice(all_reduce_s, state):
    """Two replicas of 8: (16 + 8)/1000 s a step, 667 tokens/s together."""
    curve = on_gpus((1, 2), shared=replicas(2, all_reduce_s=all_reduce_s), all_reduce_s=all_reduce_s)
    verdict = judge(REPLICAS_BEAT, curve)
    planted = (16 / 0.024) / (16 / (0.016 + 4 * all_reduce_s))
    assert verdict.state is state and verdict.value == pytest.approx(planted, rel=0.02)
    assert "2 replicas serve" in verdict.why and "memory" not in verdict.why
    [both] = [d for d in deployments(curve) if d.sharing]
    assert (both.gpus, both.engines, both.sharing) == (2, 2, "gpus")
    assert both.served.power_w == pytest.approx(2 * 350), "both GPUs"


def test_of_replicas_too_it_is_said_where_one_gpu_had_no_room():
    curve = on_gpus((1, 2), shared=replicas(2), room={1: 4})
    assert "of which one GPU runs 4 at once" in judge(REPLICAS_BEAT, curve).why
    assert judge(REPLICAS_BEAT, on_gpus((1, 2))).state is State.INCONCLUSIVE
    assert judge(REPLICAS_BEAT, Curve(subject="opt-tiny")).state is State.INCONCLUSIVE


def test_one_repeat_decides_nothing():
    verdict = judge(LESS_IN_ALL, on_gpus((1, 2), repeats=1))
    assert verdict.state is State.INCONCLUSIVE and "--slm-repeats 2" in verdict.why


def test_replicas_are_compared_with_engines_of_as_many_gpus_each():
    first, wide = with_shared([curve_of("opt-tiny", alone(engine(n))) for n in (1, 2)], shared_points(replicas(2)))
    assert len(first.shared) == 1 and wide.shared == ()


def test_replicas_are_compared_with_engines_of_the_same_arguments():
    """What is divided among them, memory and requests, differs and does not count."""
    ours, others = (curve_of("opt-tiny", alone(engine(b_half=b_half))) for b_half in (16.0, 8.0))
    smaller = curve_of("opt-tiny", alone(replace(engine(), kv_cache_bytes=GIB, max_num_seqs=64)))
    ours, others, smaller = with_shared([ours, others, smaller], shared_points(replicas(2)))
    assert len(ours.shared) == len(smaller.shared) == 1 and others.shared == ()
