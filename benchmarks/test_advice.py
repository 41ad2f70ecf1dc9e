"""Advice in practice: an engine with the limits that `slmserve advise` recommends performs as predicted.

The advice on a model uses its sweep, which the points below measure, unless `--slm-resume` provides it.
"""

import pytest

from pytest_slmserve.analysis.advice.subjects import (
    KV_BLOCKS,
    LATENCY,
    THROUGHPUT,
    UNPREEMPTED,
    gain_within_bound,
    recommended_engine,
    verified,
)
from pytest_slmserve.analysis.verdict import Inconclusive
from pytest_slmserve.engines.pool import cannot_share
from pytest_slmserve.plugin.items import SharedEngines
from pytest_slmserve.schema.specs import ReplicaSpec

pytestmark = pytest.mark.slm_suite("all")

SLO = "2x@32"  # at most twice the time per output token at concurrency 32
EFFICIENCY = 0.1
REPEATS = 2  # without repeats no noise is known


@pytest.fixture
def advice(slm_session, slm_model):
    """Advice on the model, or the reason why it is inconclusive."""
    try:
        return slm_session.verdicts.advice(slm_model, SLO, EFFICIENCY)
    except Inconclusive as error:
        return error


@pytest.fixture
def slm_spec(slm_session, slm_model, advice):
    """Engine of the sweep, with the recommended limits if a batch is recommended."""
    spec = slm_session.planner.spec(slm_model)
    if isinstance(advice, Inconclusive) or advice.batch is None:
        return spec
    return recommended_engine(advice, spec, advice.batch)


def advised(advice):
    """Return the advice. Raise Inconclusive, or skip the test, if no batch is recommended."""
    if isinstance(advice, Inconclusive):
        raise advice
    if advice.batch is None:
        pytest.skip(advice.decision.reason or "the memory of the GPU does not hold one request")
    return advice


def test_point(slm_point):
    """The measurements of the point can be trusted."""
    assert slm_point.measure()


@pytest.mark.slm(needs="own-engine")
@pytest.mark.parametrize("promise", [UNPREEMPTED, KV_BLOCKS, THROUGHPUT, LATENCY])
def test_engine_serves_what_was_predicted(slm_session, slm_spec, slm_measure, advice, promise):
    """The engine preempts no request and has the predicted KV blocks. Throughput and latency are within 15%."""
    advice = advised(advice)
    slm_measure(concurrency=advice.batch, repeats=REPEATS)
    found = [m for m in slm_session.results.measurements() if m.spec == slm_spec and not m.replica]
    verdicts = {verdict.claim: verdict for verdict in verified(advice, slm_spec, found)}
    if promise not in verdicts:
        pytest.skip("the engine does not report its KV blocks, or the model's shape is not known")
    assert verdicts[promise]


@pytest.mark.slm(needs="own-engine")
@pytest.mark.parametrize("sharing", ["time-slicing", "mps"])
def test_gain_of_several_engines_is_within_its_bound(slm_session, slm_spec, slm_measure, advice, sharing):
    """The gain of several engines on one GPU is at most the capacity that one leaves unused, plus 15%."""
    advice = advised(advice)
    fit = advice.replicas
    if fit is None or fit.advised == 1:
        pytest.skip(f"one engine is advised: {fit.why if fit else 'the memory of the GPU is not known'}")
    engines = ReplicaSpec(
        (recommended_engine(advice, slm_spec, fit.each),) * fit.advised,
        sharing,
        pinned=slm_session.options.pin_cores,
    )
    if why := cannot_share(engines, slm_session.host.device):
        pytest.skip(why)
    single = slm_measure(concurrency=advice.batch, repeats=REPEATS)
    together = SharedEngines(slm_session, engines).measure(fit.advised * fit.each, repeats=REPEATS)
    assert gain_within_bound(advice, single, together)
