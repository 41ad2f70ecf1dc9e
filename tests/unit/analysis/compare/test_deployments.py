"""What one engine, one on more GPUs, and replicas serve under one load belongs together if engine, host and requests
are the same, on simulated engines whose waits are planted; and a load alone and beside neighbours."""

from dataclasses import replace
from statistics import fmean

import pytest
from facts import tells
from gpus import alone, engine, on_gpus, replicas
from stored_records import having
from strategies import FAILS, INCONCLUSIVE, PASSES, judge
from traces import traced

from pytest_slmserve.analysis.claims.table import applies, claim_of
from pytest_slmserve.analysis.compare import deployments as ways
from pytest_slmserve.analysis.metrics.window import steps_with_prompts
from pytest_slmserve.analysis.points import shared_points
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of, with_shared
from pytest_slmserve.schema.specs import GIB

LESS_IN_ALL, LOSES_PER_GPU = "tensor-parallel-serves-less-in-all", "tensor-parallel-loses-per-gpu"
STILL_GAINS, REPLICAS_BEAT = "tensor-parallel-still-gains", "replicas-per-gpu-beat-tensor-parallel"


def degrees(curve):
    return [wide.spec.tensor_parallel_size for wide in curve.wider]


def test_wider_engine_joins_its_curve():
    """A load that waits for memory is no measure of speed."""
    curve = on_gpus()
    assert degrees(curve) == [2, 4] and ways.on_several_gpus(curve)
    assert not any(map(ways.on_several_gpus, curve.wider))
    found = [(d.concurrency, d.gpus, d.engines, d.tensor_parallel_size, d.fits) for d in ways.deployments(curve)]
    assert found == [(load, gpus, 1, gpus, True) for load in (4, 16) for gpus in (1, 2, 4)]
    waiting = next(d for d in ways.deployments(on_gpus((1, 2), room={1: 4})) if (d.gpus, d.concurrency) == (1, 16))
    assert not waiting.fits and waiting.room == 4 and waiting.served.batch == pytest.approx(4, rel=0.02)
    assert [replace(waiting, room=room).fits for room in (None, 16, 15)] == [True, True, False]
    # Two GPUs run 4 of 16 at once, four all of them: each has its best load.
    verdict = judge(STILL_GAINS, on_gpus(all_reduce_s=1e-3, room={1: 2, 2: 4}))
    assert verdict.state is PASSES and verdict.value > 1.5 * 20 / 12 and tells(verdict.why, 1024, 4)
    claim, whole = claim_of(STILL_GAINS), on_gpus()
    invalid = replace(whole, wider=tuple(replace(wide, points=()) for wide in whole.wider))
    of_the_paper = [replace(curve, subject=claim.models[0]) for curve in (on_gpus((1, 2)), whole, invalid)]
    assert [applies(claim, curve) for curve in of_the_paper] == [False, True, True]
    assert judge(STILL_GAINS, invalid).state is INCONCLUSIVE


@pytest.mark.parametrize(("claim", "gpus", "planted", "parameters", "state", "value"), [
    (LESS_IN_ALL, (1, 2), {"all_reduce_s": 1e-3}, {}, FAILS, 2 * 16 / (16 + 4)),
    (LESS_IN_ALL, (1, 2), {"all_reduce_s": 8e-3}, {}, PASSES, 32 / (16 + 32)),
    # One GPU runs 4 of 16: two gain 3.3 times there, by memory.
    (LESS_IN_ALL, (1, 2), {"all_reduce_s": 1e-3, "room": {1: 4}}, {}, FAILS, 20 / (10 + 4)),
    # The number of GPUs that loses least decides.
    (LOSES_PER_GPU, (1, 2, 4), {"all_reduce_s": 1e-3}, {}, PASSES, 16 / 20),
    (LOSES_PER_GPU, (1, 2, 4), {"all_reduce_s": 0.0}, {"threshold": 0.5}, FAILS, 1.0),
    (STILL_GAINS, (1, 2, 4), {"all_reduce_s": 1e-3}, {}, PASSES, 20 / 12),
    (STILL_GAINS, (1, 2, 4), {"all_reduce_s": 1e-3}, {"threshold": 1.8}, FAILS, 20 / 12),
])  # fmt: skip
def test_tensor_parallel_gain_is_found(claim, gpus, planted, parameters, state, value):
    verdict = judge(claim, on_gpus(gpus, **planted), **parameters)
    assert verdict.state is state and verdict.value == pytest.approx(value, rel=0.02)
    assert verdict.low < verdict.value < verdict.high
    if claim == LESS_IN_ALL and "room" not in planted:
        assert len(verdict.records) == 4 and tells(verdict.why, "2 GPUs", "1 GPU", 16)


@pytest.mark.parametrize(("claim", "curve", "facts"), [
    (LESS_IN_ALL, lambda: on_gpus((1, 2), repeats=1), ("--slm-repeats 2",)),
    (LOSES_PER_GPU, lambda: on_gpus(all_reduce_s=0.0, noise=0.05), ()),
    (LOSES_PER_GPU, lambda: on_gpus((1, 2), room={1: 2}, loads=(4,)), ()),
    (STILL_GAINS, lambda: on_gpus((1, 2)), (2, "4 GPUs")),
    (REPLICAS_BEAT, lambda: on_gpus((1, 2)), ()),
    (REPLICAS_BEAT, lambda: Curve(subject="opt-tiny"), ()),
])  # fmt: skip
def test_noisy_deployments_are_inconclusive(claim, curve, facts):
    verdict = judge(claim, curve())
    assert verdict.state is INCONCLUSIVE and tells(verdict.why, *facts)


@pytest.mark.parametrize(("all_reduce_s", "state"), [(0.0, FAILS), (8e-3, PASSES)])
def test_replicas_beat_tensor_parallel_engine(all_reduce_s, state):
    """Two replicas of 8: (16 + 8)/1000 s a step, 667 tokens/s together."""
    shared = replicas(2, all_reduce_s=all_reduce_s)
    curve = on_gpus((1, 2), shared=shared, all_reduce_s=all_reduce_s)
    verdict, planted = judge(REPLICAS_BEAT, curve), (16 / 0.024) / (16 / (0.016 + 4 * all_reduce_s))
    assert verdict.state is state and verdict.value == pytest.approx(planted, rel=0.02) and tells(verdict.why, 2)
    [both] = [d for d in ways.deployments(curve) if d.sharing]
    assert (both.gpus, both.engines, both.sharing) == (2, 2, "gpus")
    assert both.served.power_w == pytest.approx(2 * 350), "both GPUs"
    cramped = judge(REPLICAS_BEAT, on_gpus((1, 2), shared=shared, room={1: 4}, all_reduce_s=all_reduce_s))
    assert "memory" in cramped.why and tells(cramped.why, 4), "one GPU had no room"


def test_only_matching_engines_are_compared():
    one, other = (curve_of("opt-tiny", alone(engine(n, b_half=8.0 * n))) for n in (1, 2))
    assert [*map(degrees, ways.with_wider([one, other, Curve(subject="nothing")]))] == [[], [], []]
    of = ((4, "b"), (1, "a"), (2, "b"))
    curves = [curve_of("opt-tiny", having(alone(engine(n)), environment={"host": host})) for n, host in of]
    assert [*map(degrees, ways.with_wider(curves))] == [[], [], [4]], "two GPUs and four of one host; one of another"
    # What is divided among replicas, memory and requests, differs and does not count.
    engines = engine(), engine(2), engine(b_half=8.0), replace(engine(), kv_cache_bytes=GIB, max_num_seqs=64)
    found = with_shared([curve_of("opt-tiny", alone(each)) for each in engines], shared_points(replicas(2)))
    assert [len(curve.shared) for curve in found] == [1, 0, 0, 1]
    # What the server serves over what the engine does alone, at the loads that both have.
    made = [
        [traced(idle=None, concurrency=c, decode_s=slower * (0.004 + i / 1e5), repeat=i) for c in loads for i in (0, 1)]
        for slower, loads in ((1.0, (4, 8, 16)), (1.1, (8, 16, 32)))
    ]
    named = zip(made, ("engine", "server"))
    alone_, served = (curve_of("opt-1.3b", having(each, spec={"interface": name})) for each, name in named)
    [(engine_, server, loads)] = ways.at_both_interfaces([served, Curve(subject="nothing"), alone_])
    assert (engine_, server) == (alone_, served)
    assert [(each.engine.concurrency, each.server.concurrency) for each in loads] == [(8, 8), (16, 16)]
    for each in loads:
        rates = each.engine.output_tokens_per_s, each.server.output_tokens_per_s
        assert each.ratio.value == pytest.approx(rates[1] / rates[0])
        assert each.ratio.low < each.ratio.value < each.ratio.high < 1
        with_prompts = [steps_with_prompts(m.run) for m in made[0] if m.id in each.engine.records]
        assert each.prompt_steps[0] == pytest.approx(fmean(with_prompts)) and each.prompt_steps[1] is not None
    assert loads[0].prompt_steps[0] < loads[1].prompt_steps[0]
    assert ways.at_both_interfaces([alone_]) == ways.at_both_interfaces([served]) == []


def neighbours(slower: float = 1.0, again=(4, 16)):
    """Two repeats of each load beside one other engine, `slower` so much, and some of them alone."""
    beside = alone(engine(t_inf=1000.0 / slower))
    lone = [replace(m, spec=beside[0].spec) for m in alone(engine(), loads=again, repeats=1)]
    return curve_of("opt-tiny", [*having(beside, neighbours=1), *lone])


def one_slower():
    """The larger load alone is slower beside neighbours."""
    good, bad = neighbours(), neighbours(1.1)
    mixed = [m for m in good.measurements if m.load.concurrency == 4]
    mixed += [replace(m, spec=good.spec) for m in bad.measurements if m.load.concurrency == 16]
    return curve_of("opt-tiny", mixed)


def test_neighbour_influence_fails_claim():
    by = (neighbours(), PASSES, 0.0), (neighbours(1.1), FAILS, 0.1), (neighbours(0.9), FAILS, -0.1)
    for curve, state, value in (*by, (one_slower(), FAILS, 0.1)):
        verdict = judge(ways.CLAIM, curve, margin=0.03)
        assert verdict.state is state and verdict.n == 6 and verdict.value == pytest.approx(value, abs=0.01)
        assert tells(verdict.why, 4, 16, "3%")
    assert judge(ways.CLAIM, neighbours(again=()), margin=0.03).state is INCONCLUSIVE
    verdict = judge(ways.CLAIM, neighbours(again=(16,)), margin=0.03)
    assert verdict.state is PASSES and tells(verdict.why, 16) and not tells(verdict.why, 4)
    asked = [applies(claim_of(ways.CLAIM), curve) for curve in (neighbours(), curve_of("opt-tiny", alone(engine())))]
    assert asked == [True, False]
