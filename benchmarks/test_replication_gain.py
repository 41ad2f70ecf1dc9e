"""Replicas of a small model on one GPU: do they pay (arXiv:2404.03353, figures 5 to 7; arXiv:2503.08311)?

One engine is compared with several that share the GPU and its memory, at the same total concurrency. Engines have the
current default, chunked prefill, unlike the papers' baseline. Each claim is evaluated for each way of sharing.
`--slm-replicas` and `--slm-sharing` choose the measurements. On the CPU backend the replicas run, too, but no paper has
a claim about them.
"""

import pytest

pytestmark = pytest.mark.slm_suite("papers")

WAYS = ("time-slicing", "mps")
PAIR = ["opt-125m", "opt-1.3b"]


def each_way(claim):
    """Return a decorator that runs a test with its claim for each way of sharing."""
    marks = {way: pytest.mark.slm(claim=f"{claim}-{way}", needs="gpu") for way in WAYS}
    return pytest.mark.parametrize("sharing", [pytest.param(way, marks=mark) for way, mark in marks.items()])


def test_point_of_replicas(slm_replica_point):
    """The measurements of the point can be trusted."""
    assert slm_replica_point.measure()


@each_way("replicas-pay")
def test_replicas_pay(slm_claim, sharing):
    """Throughput of replicas is higher than that of one engine at its best load."""
    assert slm_claim()


@each_way("replicas-keep-the-tail")
def test_replicas_keep_the_tail(slm_claim, sharing):
    """The 99th percentile of E2E latency is no longer than that of one engine."""
    assert slm_claim()


@each_way("replicas-answer-sooner")
def test_replicas_answer_sooner(slm_claim, sharing):
    """Mean E2E latency is shorter than that of one engine."""
    assert slm_claim()


@each_way("replicas-use-the-gpu-more")
def test_replicas_use_the_gpu_more(slm_claim, sharing):
    """GPU utilization is at least a tenth higher than with one engine."""
    assert slm_claim()


@pytest.mark.slm(models=["opt-125m", "opt-1.3b"])
@each_way("replicas-draw-more-power")
def test_replicas_draw_more_power(slm_claim, sharing):
    """Power is higher than with one engine."""
    assert slm_claim()


@pytest.mark.slm(models=["opt-2.7b"])
@each_way("replicas-keep-the-power")
def test_replicas_keep_the_power(slm_claim, sharing):
    """Power is within 5% of that of one engine."""
    assert slm_claim()


@pytest.mark.slm(points=[(model, 96) for model in PAIR], needs="gpu")
def test_point_of_a_model_alone(slm_point):
    """The measurements can be trusted of each model alone, under the load that it has next to the other model."""
    assert slm_point.measure()


@pytest.mark.slm(needs="gpu")
@pytest.mark.parametrize("sharing", WAYS)
def test_two_models_on_one_gpu(slm_replicas, slm_session, sharing):
    """The measurements of two models on one GPU can be trusted, the papers' case of several models.

    The report compares their throughput with taking turns.
    """
    if not all(map(slm_session.planner.swept, PAIR)):
        pytest.skip("not both models are measured in this run")
    assert slm_replicas(models=PAIR, sharing=sharing).measure(192).valid
