"""Records that refute a claim, for each claim of the table: judged by the claim's own numbers, it fails on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from gpus import alone, engine, on_gpus
from gpus import replicas as one_on_each
from strategies import RESOLVED, job_point, measurement, point

from pytest_slmserve.analysis.claims.table import CLAIMS, ROWS, judge_row, row_for
from pytest_slmserve.analysis.points import Summary, shared_points
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of, with_shared
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.records import Replica
from pytest_slmserve.schema.specs import EngineSpec

LOADS = (1, 2, 4, 8)


def sweep(rates: tuple[float, ...], e2e_s: tuple[float, ...] | None = None, loads: tuple[int, ...] = LOADS) -> Curve:
    """A curve of two repeats of each load, 1 % apart."""
    waits = e2e_s or tuple(256 * n / rate for n, rate in zip(loads, rates, strict=True))
    pairs = zip(loads, rates, waits, strict=True)
    return Curve(subject="opt-1.3b", points=tuple(point(n, (r, 1.01 * r), (w, 1.01 * w)) for n, r, w in pairs))


def sensed(rates: tuple[float, ...] = (100.0, 190.0, 350.0, 600.0), **figures: tuple[float, ...]) -> Curve:
    """A sweep whose sensors saw these figures, one for each load."""
    made = sweep(rates)
    by_load = [{name: values[i] for name, values in figures.items()} for i in range(len(LOADS))]
    seen = zip(made.points, by_load, strict=True)
    return replace(made, points=tuple(replace(p, each=(Summary(**f),) * 2, **f) for p, f in seen))


def at_table_1(model: str, load: int, joules: float, power_w: float | None = None) -> Curve:
    seen = tuple(Summary(energy_per_token_j=each * joules, power_w=power_w) for each in (1.0, 1.01))
    return Curve(subject=model, points=(replace(point(load, (1e4, 1.01e4)), each=seen, energy_per_token_j=joules),))


def jobs(*made, subject: str = "opt-6.7b") -> Curve:
    return Curve(subject=subject, jobs=made)


def at_rate(served: float, e2e_s: float = 1.0, batching: str | None = None, **more):
    extra = (("batching", batching),) if batching else ()
    spec = EngineSpec(more.get("model", "opt-6.7b"), extra=extra)
    return job_point((served, 1.01 * served), e2e_s=(e2e_s, 1.01 * e2e_s), spec=spec, **more)


def batched(batch: float, **more):
    made = at_rate(50.0, **more)
    return replace(
        made, each=tuple(replace(each, batch=wobble * batch) for each, wobble in zip(made.each, (1.0, 1.01)))
    )


def cache(served: float, requests_that_fit: int):
    blocks = requests_that_fit * 3 + 1  # of 32 + 16 tokens in blocks of 16
    spec = EngineSpec("opt-6.7b", kv_cache_bytes=blocks << 20)
    made = job_point((served, 1.01 * served), output_tokens=16, requests=64, spec=spec, kv_blocks=blocks)
    return replace(made, workload=replace(made.workload, longest=48))


def limited(limit: int, served: float, e2e_s: float = 1.0):
    made = job_point((served, 1.01 * served), e2e_s=(e2e_s, 1.01 * e2e_s), spec=EngineSpec("m", max_num_seqs=limit))
    return replace(made, batch=float(limit))


def advised_at_half() -> Curve:
    """32 concurrent requests serve half of what 128 do, whose tokens take longer than twice as long as those of 32."""
    rates = {1: 100.0, 32: 2400.0, 128: 4800.0, 512: 4900.0}
    return curve_of("opt-1.3b", [measurement(n, rate + i, repeat=i) for n, rate in rates.items() for i in range(2)])


def slow_replicas(sharing: str) -> Curve:
    """Two replicas that together serve 0.6 times as much as one engine, each request so much later."""
    single = [measurement(16, rate, repeat=i) for i, rate in enumerate((1000.0, 1004.0))]
    runs = [
        replace(
            measurement(8, rate, launch=f"launch-{index}", repeat=repeat),
            replica=Replica(f"group-{repeat}", index, 2, "both", sharing),
        )
        for repeat, rate in enumerate((300.0, 301.0))
        for index in range(2)
    ]
    return with_shared([curve_of("opt-1.3b", single)], shared_points(runs))[0]


def sensed_replicas(sharing: str, with_two: float) -> Curve:
    """The same where sensors saw of two replicas `with_two` times the utilisation and power of one engine."""

    def seen(share: float) -> dict[str, float]:
        return {"gpu_util": 0.8 * share, "power_w": 600.0 * share}

    curve = slow_replicas(sharing)
    one = tuple(replace(p, each=tuple(replace(s, **seen(1.0)) for s in p.each)) for p in curve.points)
    two = tuple(replace(p, each=tuple(replace(s, **seen(with_two)) for s in p.each)) for p in curve.shared)
    return replace(curve, points=one, shared=two)


def beside_a_neighbour() -> Curve:
    beside = [replace(m, neighbours=1) for m in alone(engine(t_inf=900.0))]
    return curve_of("opt-tiny", [*beside, *(replace(m, spec=beside[0].spec) for m in alone(engine()))])


def slower_on_four() -> Curve:
    curve = on_gpus()
    two, four = curve.wider
    points = tuple(replace(p, repeats=tuple(r / 4 for r in p.repeats)) for p in four.points)
    return replace(curve, wider=(two, replace(four, points=points)))


def other_kv_blocks() -> Curve:
    return curve_of("opt-1.3b", [measurement(resolved=replace(RESOLVED, kv_blocks=1000))])


RISING = (100.0, 200.0, 400.0, 800.0)
FLAT = (100.0, 190.0, 200.0, 201.0)
REFUTED: dict[str, Callable[[], tuple[Curve, ...]]] = {
    "throughput-plateau": lambda: (sweep(RISING),),
    "latency-rises-past-plateau": lambda: (sweep(FLAT, (5.0, 5.0, 5.0, 5.0)),),
    "pareto-up-to-plateau": lambda: (sweep(FLAT, (9.0, 2.0, 4.0, 8.0)),),
    "neighbours-do-not-disturb": lambda: (beside_a_neighbour(),),
    "kv-blocks-as-predicted": lambda: (other_kv_blocks(),),
    "occupancy-below-a-saturated-kernel": lambda: (sensed(sm_occupancy=(0.1, 0.2, 0.4, 0.6)),),
    "gpu-util-saturates-first": lambda: (sensed(FLAT, gpu_util=(0.5, 0.95, 1.0, 1.0)),),
    "decode-stays-memory-bound": lambda: (
        sensed(
            dram_active=(0.6,) * 4,
            tensor_active=(0.1,) * 4,
            decode_dram=(0.6,) * 4,
            decode_tensor=(0.1,) * 4,
            saturation_gap=(1.7, 1.0, 0.5, -0.5),
        ),
    ),
    "advised-batch-costs-little": lambda: (advised_at_half(),),
    "energy-per-token-falls-with-load": lambda: (sensed(energy_per_token_j=(1.0, 0.9, 0.8, 0.8)),),
    "energy-per-token-grows-with-model": lambda: (
        at_table_1("opt-1.3b", 256, 0.005),
        at_table_1("opt-125m", 512, 0.01),
    ),
    **{
        f"{claim}-{sharing}": lambda sharing=sharing: (slow_replicas(sharing),)
        for claim in ("replicas-pay", "replicas-keep-the-tail", "replicas-answer-sooner")
        for sharing in ("time-slicing", "mps", "mig", "gpus")
    },
    **{
        f"{claim}-{sharing}": lambda sharing=sharing: (sensed_replicas(sharing, with_two=0.9),)
        for claim in ("replicas-use-the-gpu-more", "replicas-draw-more-power")
        for sharing in ("time-slicing", "mps", "mig", "gpus")
    },
    **{
        f"replicas-keep-the-power-{sharing}": lambda sharing=sharing: (sensed_replicas(sharing, with_two=0.9),)
        for sharing in ("time-slicing", "mps", "mig", "gpus")
    },
    "marginal-after-128": lambda: (sweep((100.0, 200.0, 400.0), loads=(64, 128, 256)),),
    "sm-activity-stays-low": lambda: (sensed(sm_active=(0.3, 0.9, 0.4, 0.4)),),
    "host-takes-at-most-half": lambda: (sensed(engine_active=(0.3, 0.9, 0.9, 0.9)),),
    "gpu-util-falls-at-the-largest-load": lambda: (sensed(gpu_util=(0.5, 0.9, 0.95, 0.99)),),
    "decode-saturates-dram": lambda: (sensed(decode_dram=(0.6, 0.5, 0.4, 0.3), decode_tensor=(0.1,) * 4),),
    "larger-models-draw-more-power": lambda: (
        at_table_1("opt-6.7b", 64, 0.1, power_w=690.0),
        at_table_1("opt-1.3b", 256, 0.01, power_w=684.0),
        at_table_1("opt-2.7b", 128, 0.02, power_w=500.0),
    ),
    "tensor-parallel-loses-per-gpu": lambda: (on_gpus((1, 2), all_reduce_s=-1e-3),),
    "tensor-parallel-serves-less-in-all": lambda: (on_gpus((1, 2), all_reduce_s=1e-3),),
    "tensor-parallel-still-gains": lambda: (slower_on_four(),),
    "replicas-per-gpu-beat-tensor-parallel": lambda: (on_gpus((1, 2), shared=one_on_each(2)),),
    "throughput-follows-arrivals": lambda: (jobs(at_rate(6.0, rate=10.0, output_tokens=32)),),
    "longer-outputs-fewer-requests": lambda: (jobs(at_rate(50.0, output_tokens=32), at_rate(48.0)),),
    "longer-outputs-shrink-the-batch": lambda: (jobs(batched(260.0, output_tokens=32), batched(281.0)),),
    "longer-outputs-wait-slightly-longer": lambda: (jobs(at_rate(50.0, output_tokens=32), at_rate(20.0, 2.7)),),
    "all-at-once-waits-longer": lambda: (jobs(at_rate(9.0, rate=10.0), at_rate(9.0)),),
    "alike-at-one-size": lambda: (
        jobs(at_rate(6.0, model="llama-7b"), subject="llama-7b"),
        jobs(at_rate(10.0)),
    ),
    "throughput-grows-with-kv-blocks": lambda: (jobs(cache(19.5, 8), cache(20.0, 64), cache(20.1, 128)),),
    "batch-limit-reaches-a-plateau": lambda: (jobs(limited(64, 10.0), limited(128, 20.0)),),
    "batch-limit-gains-little-after-128": lambda: (jobs(limited(128, 10.0), limited(256, 12.0)),),
    "batch-limit-costs-latency": lambda: (jobs(limited(64, 10.0, 2.0), limited(128, 10.0, 1.9)),),
    "continuous-batching-serves-most": lambda: (jobs(at_rate(5.0), at_rate(10.0, batching="static")),),
    "dynamic-batching-answers-sooner": lambda: (
        jobs(at_rate(2.0, rate=2.0, batching="static"), at_rate(2.0, 3.0, rate=2.0, batching="dynamic")),
    ),
    "table-1-batch-fits": lambda: (Curve(subject="opt-1.3b"),),
    "table-1-request-size": lambda: (Curve(subject="opt-1.3b"),),
    "table-1-batch-size": lambda: (Curve(subject="opt-1.3b"),),
    "larger-models-cannot-hold-500": lambda: (Curve(subject="opt-125m"),),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_fails_where_the_records_refute_its_sentence(name):
    curve, *others = REFUTED[name]()
    verdict = judge_row(row_for(name, "*", rows=ROWS[: len(CLAIMS)]), curve, others)
    assert (verdict.claim, verdict.state) == (name, State.FAILS), verdict.why
