"""For each claim of the table, records that refute it: judged by the claim's own numbers it fails on them. Claims
whose failure another test of planted records shows are named there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from facts import tells
from strategies import RESOLVED, job_point, judge, measurement, point

from pytest_slmserve.analysis.claims.table import CLAIMS, ROWS, judge_row, row_for
from pytest_slmserve.analysis.compare.deployments import CLAIM
from pytest_slmserve.analysis.points import Summary, shared_points
from pytest_slmserve.analysis.sweep.curve import LATENCY, PARETO, PLATEAU, Curve, curve_of, with_shared
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


def other_kv_blocks() -> Curve:
    return curve_of("opt-1.3b", [measurement(resolved=replace(RESOLVED, kv_blocks=1000))])


SHARING = ("time-slicing", "mps", "mig", "gpus")
REFUTED: dict[str, Callable[[], tuple[Curve, ...]]] = {
    "kv-blocks-as-predicted": lambda: (other_kv_blocks(),),
    "advised-batch-costs-little": lambda: (advised_at_half(),),
    **{
        f"replicas-{claim}-{sharing}": lambda sharing=sharing: (slow_replicas(sharing),)
        for claim in ("pay", "keep-the-tail", "answer-sooner")
        for sharing in SHARING
    },
    **{
        f"replicas-{claim}-{sharing}": lambda sharing=sharing: (sensed_replicas(sharing, with_two=0.9),)
        for claim in ("use-the-gpu-more", "draw-more-power", "keep-the-power")
        for sharing in SHARING
    },
    "larger-models-draw-more-power": lambda: (
        at_table_1("opt-6.7b", 64, 0.1, power_w=690.0),
        at_table_1("opt-1.3b", 256, 0.01, power_w=684.0),
        at_table_1("opt-2.7b", 128, 0.02, power_w=500.0),
    ),
    "longer-outputs-shrink-the-batch": lambda: (jobs(batched(260.0, output_tokens=32), batched(281.0)),),
    "longer-outputs-wait-slightly-longer": lambda: (jobs(at_rate(50.0, output_tokens=32), at_rate(20.0, 2.7)),),
    "occupancy-below-a-saturated-kernel": lambda: (sensed(sm_occupancy=(0.1, 0.2, 0.4, 0.6)),),
}


def test_every_claim_is_refuted_here_or_by_a_test_of_its_own():
    files = [path for path in Path(__file__).parents[1].glob("*/test_*.py") if path.name != Path(__file__).name]
    elsewhere = "".join(path.read_text("utf-8") for path in files)
    by_name = {*REFUTED, PLATEAU, LATENCY, PARETO, CLAIM}
    assert [name for name in CLAIMS if name not in by_name and f'"{name}"' not in elsewhere] == []


@pytest.mark.parametrize("name", REFUTED)
def test_a_claim_fails_where_the_records_refute_its_sentence(name):
    curve, *others = REFUTED[name]()
    verdict = judge_row(row_for(name, "*", rows=ROWS[: len(CLAIMS)]), curve, others)
    assert (verdict.claim, verdict.state) == (name, State.FAILS), verdict.why


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize(
    ("claim", "value"), [("pay", 601 / 1002), ("answer-sooner", 1002 / 601), ("keep-the-tail", 1002 / 601)]
)
def test_replicas_are_held_against_one_engine_under_the_same_load(claim, value, sharing):
    """Two of 8 together serve 601, one of 16 serves 1002: by Little's law each waits so much longer."""
    curve = slow_replicas(sharing)
    verdict = judge(f"replicas-{claim}-{sharing}", curve)
    assert verdict.value == pytest.approx(value, rel=0.02) and tells(verdict.why, 2)
    nothing, alone = (judge(verdict.claim, replace(curve, **{name: ()})) for name in ("shared", "points"))
    assert nothing.state is alone.state is State.INCONCLUSIVE and tells(alone.why, 16)
