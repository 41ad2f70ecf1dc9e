"""What one engine, one on more GPUs, and replicas serve under one load belongs together if engine, host and requests
are the same: on simulated engines whose waits are planted, with the claims on them; and a load alone and beside
neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts import tells
from gpus import alone, engine, on_gpus, replicas
from strategies import judge, measurement, point

from pytest_slmserve.analysis.claims.table import applies, claim_of
from pytest_slmserve.analysis.compare.deployments import (
    CLAIM,
    Deployment,
    at_both_interfaces,
    deployments,
    on_several_gpus,
    with_wider,
)
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
    assert tells(verdict.why, "2 GPUs", "1 GPU", 16)


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
    assert missing.state is State.INCONCLUSIVE and tells(missing.why, 2, "4 GPUs")
    whole = on_gpus()
    invalid = replace(whole, wider=tuple(replace(wide, points=()) for wide in whole.wider))
    claim = claim_of(STILL_GAINS)
    of_the_paper = (replace(curve, subject=claim.models[0]) for curve in (on_gpus((1, 2)), whole, invalid))
    assert [applies(claim, curve) for curve in of_the_paper] == [False, True, True]
    assert judge(STILL_GAINS, invalid).state is State.INCONCLUSIVE


def test_the_gain_of_more_gpus_is_with_their_memory():
    """Two GPUs run 4 of 16 at once, four all of them: each has its best load."""
    verdict = judge(STILL_GAINS, on_gpus(all_reduce_s=1e-3, room={1: 2, 2: 4}))
    assert verdict.state is State.PASSES and verdict.value > 1.5 * 20 / 12 and tells(verdict.why, 1024, 4)


def test_a_load_that_waits_for_memory_is_no_measure_of_speed():
    """One GPU runs 4 of 16: two gain 3.3 times there, by memory."""
    curve = on_gpus((1, 2), room={1: 4}, all_reduce_s=1e-3)
    waiting = next(d for d in deployments(curve) if (d.gpus, d.concurrency) == (1, 16))
    assert not waiting.fits and waiting.room == 4 and waiting.served.batch == pytest.approx(4, rel=0.02)
    verdict = judge(LESS_IN_ALL, curve)
    assert verdict.value == pytest.approx(20 / (10 + 4), rel=0.02) and tells(verdict.why, 4)
    nowhere = on_gpus((1, 2), room={1: 2}, loads=(4,))
    assert judge(LOSES_PER_GPU, nowhere).state is State.INCONCLUSIVE


@pytest.mark.parametrize(("room", "concurrency", "fits"), [(None, 99, True), (16, 16, True), (16, 17, False)])
def test_a_load_fits_into_the_room_that_is_known(room, concurrency, fits):
    assert Deployment(1, 1, 1, None, concurrency, point(concurrency, [1.0]), room).fits is fits


@pytest.mark.parametrize(("all_reduce_s", "state"), [(0.0, State.FAILS), (8e-3, State.PASSES)])
def test_replicas_beat_an_engine_over_all_where_waiting_costs_more_than_weights(all_reduce_s, state):
    """Two replicas of 8: (16 + 8)/1000 s a step, 667 tokens/s together."""
    curve = on_gpus((1, 2), shared=replicas(2, all_reduce_s=all_reduce_s), all_reduce_s=all_reduce_s)
    verdict = judge(REPLICAS_BEAT, curve)
    planted = (16 / 0.024) / (16 / (0.016 + 4 * all_reduce_s))
    assert verdict.state is state and verdict.value == pytest.approx(planted, rel=0.02) and tells(verdict.why, 2)
    [both] = [d for d in deployments(curve) if d.sharing]
    assert (both.gpus, both.engines, both.sharing) == (2, 2, "gpus")
    assert both.served.power_w == pytest.approx(2 * 350), "both GPUs"


def test_of_replicas_too_it_is_told_where_one_gpu_had_no_room():
    curve = on_gpus((1, 2), shared=replicas(2), room={1: 4})
    assert "memory" in judge(REPLICAS_BEAT, curve).why and tells(judge(REPLICAS_BEAT, curve).why, 4)
    for nothing in (on_gpus((1, 2)), Curve(subject="opt-tiny")):
        assert judge(REPLICAS_BEAT, nothing).state is State.INCONCLUSIVE


def test_one_repeat_decides_nothing():
    verdict = judge(LESS_IN_ALL, on_gpus((1, 2), repeats=1))
    assert verdict.state is State.INCONCLUSIVE and tells(verdict.why, "--slm-repeats 2")


def test_replicas_are_compared_with_engines_of_as_many_gpus_each():
    first, wide = with_shared([curve_of("opt-tiny", alone(engine(n))) for n in (1, 2)], shared_points(replicas(2)))
    assert len(first.shared) == 1 and wide.shared == ()


def test_replicas_are_compared_with_engines_of_the_same_arguments():
    """What is divided among them, memory and requests, differs and does not count."""
    ours, others = (curve_of("opt-tiny", alone(engine(b_half=b_half))) for b_half in (16.0, 8.0))
    smaller = curve_of("opt-tiny", alone(replace(engine(), kv_cache_bytes=GIB, max_num_seqs=64)))
    ours, others, smaller = with_shared([ours, others, smaller], shared_points(replicas(2)))
    assert len(ours.shared) == len(smaller.shared) == 1 and others.shared == ()


# Without and with the server


def test_loads_of_both_interfaces_are_held_against_each_other():
    """What the server serves over what the engine does alone, at the loads that both have."""
    alone_, served = (
        curve_of("opt-1.3b", [replace(m, spec=replace(m.spec, interface=interface)) for m in made])
        for interface, made in (
            ("engine", [measurement(c, 100.0 * c + i, repeat=i) for c in (4, 8, 16) for i in range(2)]),
            ("server", [measurement(c, 90.0 * c + i, repeat=i) for c in (8, 16, 32) for i in range(2)]),
        )
    )
    [(engine_, server, loads)] = at_both_interfaces([served, alone_])
    assert (engine_, server) == (alone_, served)
    assert [(each.engine.concurrency, each.server.concurrency) for each in loads] == [(8, 8), (16, 16)]
    for each in loads:
        load = each.engine.concurrency
        assert each.ratio.value == pytest.approx((90 * load + 0.5) / (100 * load + 0.5), rel=1e-3)
        assert each.ratio.low < each.ratio.value < each.ratio.high
    assert at_both_interfaces([alone_]) == at_both_interfaces([served]) == []


# Beside neighbours


MARGIN = 0.03


def neighbours(slower: float = 1.0, again=(4, 16)):
    """Two repeats of each load beside one other engine, `slower` so much, and some of them alone."""
    beside = alone(engine(t_inf=1000.0 / slower))
    lone = [replace(m, spec=beside[0].spec) for m in alone(engine(), loads=again, repeats=1)]
    return curve_of("opt-tiny", [*(replace(m, neighbours=1) for m in beside), *lone])


@pytest.mark.parametrize(
    ("slower", "state", "value"), [(1.0, State.PASSES, 0.0), (1.1, State.FAILS, 0.1), (0.9, State.FAILS, -0.1)]
)
def test_what_neighbours_slow_or_hasten_fails_with_the_number(slower, state, value):
    verdict = judge(CLAIM, neighbours(slower), margin=MARGIN)
    assert verdict.state is state and verdict.n == 6 and verdict.value == pytest.approx(value, abs=0.01)
    assert tells(verdict.why, 4, 16, "3 %")


def test_one_disturbed_cell_is_enough():
    good, bad = neighbours(), neighbours(1.1)
    mixed = [m for m in good.measurements if m.load.concurrency == 4]
    mixed += [replace(m, spec=good.spec) for m in bad.measurements if m.load.concurrency == 16]
    assert judge(CLAIM, curve_of("opt-tiny", mixed), margin=MARGIN).state is State.FAILS


def test_without_both_there_is_nothing_to_tell():
    assert judge(CLAIM, neighbours(again=()), margin=MARGIN).state is State.INCONCLUSIVE
    verdict = judge(CLAIM, neighbours(again=(16,)), margin=MARGIN)
    assert verdict.state is State.PASSES and tells(verdict.why, 16) and not tells(verdict.why, 4)
    assert applies(claim_of(CLAIM), neighbours())
    assert not applies(claim_of(CLAIM), curve_of("opt-tiny", alone(engine())))
