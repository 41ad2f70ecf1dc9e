"""More GPUs for one small model: one engine over all of them, or a replica on each? (arXiv:2404.03353, figure 1)

Each model on 1, 2 and 4 GPUs under the same concurrent requests in all, as far as there are GPUs; then with a replica
on each GPU. The report's table answers what to deploy in requests/s, latency and joules. `--slm-tensor-parallel-size`
chooses the numbers of GPUs, `--slm-concurrency` the loads, one of which is usually that of test_replication_gain.py.
Where a load does not fit into the KV memory of one GPU, some of its requests wait there: claims are judged under the
largest load that fits, for above it the gain is memory, not speed; that of the largest model, under its best loads.
"""

import pytest

pytestmark = pytest.mark.slm_suite("papers")

MODELS = ["opt-125m", "opt-1.3b", "opt-6.7b", "opt-13b"]


@pytest.mark.slm(models=MODELS, needs="gpu")
def test_point_on_gpus(slm_gpus_point):
    """The point is measured, and every measurement of it can be trusted."""
    assert slm_gpus_point.measure()


@pytest.mark.slm(claim="tensor-parallel-loses-per-gpu", models=MODELS, needs="gpu", gpus=2)
def test_an_engine_over_more_gpus_serves_less_per_gpu(slm_claim):
    """All-reduces and what the host does for a step are not divided."""
    assert slm_claim()


@pytest.mark.slm(claim="tensor-parallel-serves-less-in-all", models=MODELS[:2], needs="gpu", gpus=2)
def test_a_small_model_serves_less_even_in_all(slm_claim):
    """Its steps are so short that the all-reduces add more time than the division of the work saves."""
    assert slm_claim()


@pytest.mark.slm(claim="tensor-parallel-still-gains", models=["opt-13b"], needs="gpu", gpus=4)
def test_the_largest_model_still_gains_from_two_gpus_to_four(slm_claim):
    """Its steps are long enough that reading weights on more GPUs outweighs the all-reduces."""
    assert slm_claim()


@pytest.mark.slm(claim="replicas-per-gpu-beat-tensor-parallel", models=MODELS, needs="gpu", gpus=2)
def test_a_replica_on_each_gpu_serves_more_than_one_engine_over_all(slm_claim):
    """Replicas have no all-reduces to wait for."""
    assert slm_claim()
