"""From a simulated engine with a planted law to verdicts: what is planted is found."""

from __future__ import annotations

import pytest
from facts import numbers
from measured import measure

from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.analysis.sweep.plateau import fit
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.records import Environment, Measurement
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, Request, Workload, WorkloadSpec

WORKLOAD = Workload(WorkloadSpec(prompt_tokens=64, output_tokens=32, requests=16), (Request((5,) * 64, 32),) * 16, "")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def serve(concurrency: int, engine: SimulatedEngine) -> Measurement:
    load = ClosedLoop(concurrency, window_s=2.0)
    return measure(engine, WORKLOAD, load, Environment(platform="simulated"))


def sweep(**planted: float) -> Curve:
    """Two repeats of each point on one simulated engine; T_inf is 5,000 output tokens/s."""
    engine = SimulatedEngine(EngineSpec("opt-tiny", platform="simulated", extra=(("t_inf", 5000.0), *planted.items())))
    return curve_of("opt-tiny", [serve(c, engine) for c in BATCHES for _ in range(2)], planned=BATCHES)


def test_planted_law_and_plateau_are_found():
    curve = sweep(b_half=10.0)
    found = fit(curve.points)
    assert (found.t_inf.value, found.b_half.value) == pytest.approx((5000, 10), rel=0.03)
    assert curve.pareto_plateau() and curve.plateau().value == 64, "a doubling of 45 gains 10 %"
    assert curve.latency_keeps_rising() and curve.pareto_up_to_plateau()


def test_no_plateau_is_found_where_none_is():
    assert sweep(b_half=200.0).pareto_plateau().state is State.FAILS


def test_planted_preemption_and_failures_are_never_green():
    preempted, failed = (
        sweep(b_half=10.0, **fault).pareto_plateau() for fault in ({"preempt_from": 128}, {"fail_at": 128})
    )
    assert preempted.state is State.INCONCLUSIVE and "preempt" in preempted.why
    assert failed.state is State.INCONCLUSIVE and numbers(failed.why)
