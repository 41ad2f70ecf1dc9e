"""Whether replicas of a small model on one GPU pay (arXiv:2404.03353, figures 5 to 7; arXiv:2503.08311).

One engine is compared with several that share the GPU and its memory, under as many concurrent requests in all:
throughput, latency, and the use of the GPU. Engines have today's default, chunked prefill, which the papers' baseline
did not have. Each property is judged for each way of sharing. `--slm-replicas` and `--slm-sharing` choose what is
measured. On the CPU backend the replicas run as well, but no paper claims what two engines gain on two cores.
"""

import pytest

pytestmark = pytest.mark.slm_suite("papers")

WAYS = ("time-slicing", "mps")
PAIR = ["opt-125m", "opt-1.3b"]


def each_way(claim):
    """The claim for each way of sharing."""
    marks = {way: pytest.mark.slm(claim=f"{claim}-{way}", needs="gpu") for way in WAYS}
    return pytest.mark.parametrize("sharing", [pytest.param(way, marks=mark) for way, mark in marks.items()])


def test_point_of_replicas(slm_replica_point):
    """The point is measured, and every measurement of it can be trusted."""
    assert slm_replica_point.measure()


@each_way("replicas-pay")
def test_replicas_pay(slm_claim, sharing):
    """Replicas serve more than one engine does."""
    assert slm_claim()


@each_way("replicas-keep-the-tail")
def test_replicas_keep_the_tail(slm_claim, sharing):
    """The 99th percentile of E2E is no longer than that of one engine."""
    assert slm_claim()


@each_way("replicas-answer-sooner")
def test_replicas_answer_sooner(slm_claim, sharing):
    """Their mean E2E is shorter than that of one engine."""
    assert slm_claim()


@each_way("replicas-use-the-gpu-more")
def test_replicas_use_the_gpu_more(slm_claim, sharing):
    """GPU utilisation is a tenth more than with one engine, or more."""
    assert slm_claim()


@pytest.mark.slm(models=["opt-125m", "opt-1.3b"])
@each_way("replicas-draw-more-power")
def test_replicas_draw_more_power(slm_claim, sharing):
    """Power is more than with one engine."""
    assert slm_claim()


@pytest.mark.slm(models=["opt-2.7b"])
@each_way("replicas-keep-the-power")
def test_replicas_keep_the_power(slm_claim, sharing):
    """Power is that of one engine, within 5 %."""
    assert slm_claim()


@pytest.mark.slm(points=[(model, 96) for model in PAIR], needs="gpu")
def test_point_of_a_model_alone(slm_point):
    """What each of the two models serves with the GPU to itself, under the load that it has beside the other."""
    assert slm_point.measure()


@pytest.mark.slm(needs="gpu")
@pytest.mark.parametrize("sharing", WAYS)
def test_two_models_on_one_gpu(slm_replicas, slm_session, sharing):
    """The papers' case of several models; the report says what they serve, in units of taking turns."""
    if not all(map(slm_session.planner.swept, PAIR)):
        pytest.skip("not both models are measured in this run")
    assert slm_replicas(models=PAIR, sharing=sharing).measure(192).valid
