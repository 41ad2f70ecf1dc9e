"""Do replicas of a small model on one GPU pay? (arXiv:2404.03353, figures 5 to 7; arXiv:2503.08311)

One engine, then several that share the GPU and its memory, as many requests being in flight in all: gain, latency, and
what the GPU does meanwhile. Against today's default, chunked prefill, which the papers' baseline did not have.
`--slm-replicas` and `--slm-sharing` choose the numbers and the ways of sharing. On the CPU backend the replicas run as
well, but what two engines gain on two cores is no claim of anybody's.
"""

import pytest

pytestmark = pytest.mark.slm_suite("papers")


def test_point_of_replicas(slm_replica_point):
    """It is measured, and every measurement of it can be trusted."""
    assert slm_replica_point.measure()


@pytest.mark.slm(claim="replicas-pay-time-slicing", needs="gpu")
def test_replicas_pay_by_time_slicing(slm_claim):
    """They serve more than one engine does."""
    assert slm_claim()


@pytest.mark.slm(claim="replicas-pay-mps", needs="gpu")
def test_replicas_pay_under_mps(slm_claim):
    """They serve more than one engine does."""
    assert slm_claim()


@pytest.mark.slm(claim="replicas-keep-the-tail-time-slicing", needs="gpu")
def test_replicas_keep_the_tail_by_time_slicing(slm_claim):
    """The 99th percentile of E2E is no longer than that of one engine."""
    assert slm_claim()


@pytest.mark.slm(claim="replicas-keep-the-tail-mps", needs="gpu")
def test_replicas_keep_the_tail_under_mps(slm_claim):
    """The 99th percentile of E2E is no longer than that of one engine."""
    assert slm_claim()


@pytest.mark.slm(claim="replicas-answer-sooner-time-slicing", needs="gpu")
def test_replicas_answer_sooner_by_time_slicing(slm_claim):
    """Their mean E2E is shorter than that of one engine."""
    assert slm_claim()


@pytest.mark.slm(claim="replicas-answer-sooner-mps", needs="gpu")
def test_replicas_answer_sooner_under_mps(slm_claim):
    """Their mean E2E is shorter than that of one engine."""
    assert slm_claim()


@pytest.mark.slm(claim="replicas-use-the-gpu-more-time-slicing", needs="gpu")
def test_replicas_use_the_gpu_more_by_time_slicing(slm_claim):
    """GPU utilisation is a tenth more than with one engine, or more."""
    assert slm_claim()


@pytest.mark.slm(claim="replicas-use-the-gpu-more-mps", needs="gpu")
def test_replicas_use_the_gpu_more_under_mps(slm_claim):
    """GPU utilisation is a tenth more than with one engine, or more."""
    assert slm_claim()


@pytest.mark.slm(claim="replicas-draw-more-power-time-slicing", models=["opt-125m", "opt-1.3b"], needs="gpu")
def test_replicas_draw_more_power_by_time_slicing(slm_claim):
    """Power is more than with one engine."""
    assert slm_claim()


@pytest.mark.slm(claim="replicas-draw-more-power-mps", models=["opt-125m", "opt-1.3b"], needs="gpu")
def test_replicas_draw_more_power_under_mps(slm_claim):
    """Power is more than with one engine."""
    assert slm_claim()


@pytest.mark.slm(claim="replicas-keep-the-power-time-slicing", models=["opt-2.7b"], needs="gpu")
def test_replicas_keep_the_power_by_time_slicing(slm_claim):
    """Power is that of one engine, within 5 %."""
    assert slm_claim()


@pytest.mark.slm(claim="replicas-keep-the-power-mps", models=["opt-2.7b"], needs="gpu")
def test_replicas_keep_the_power_under_mps(slm_claim):
    """Power is that of one engine, within 5 %."""
    assert slm_claim()


PAIR = ["opt-125m", "opt-1.3b"]


@pytest.mark.slm(points=[(model, 96) for model in PAIR], needs="gpu")
def test_point_of_a_model_alone(slm_point):
    """What each of the two models serves with the GPU to itself, under the load that it has beside the other."""
    assert slm_point.measure()


@pytest.mark.slm(needs="gpu")
@pytest.mark.parametrize("sharing", ["time-slicing", "mps"])
def test_two_models_on_one_gpu(slm_replicas, slm_session, sharing):
    """The papers' case of several models; the report says what they serve, in units of taking turns."""
    if not all(map(slm_session.planner.swept, PAIR)):
        pytest.skip("not both models are measured in this run")
    assert slm_replicas(models=PAIR, sharing=sharing).measure(192).valid
