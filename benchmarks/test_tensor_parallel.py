"""Several GPUs for one small model: one engine over all of them, or a replica on each (arXiv:2404.03353, figure 1)?

Each model runs on 1, 2 and 4 GPUs, as far as the host has them, at the same total concurrency, and then with a replica
on each GPU. The report compares requests/s, latency and energy. `--slm-tensor-parallel-size` chooses the numbers of
GPUs, and `--slm-concurrency` the loads. If a load exceeds the KV memory of one GPU, some of its requests wait there.
Above the largest load that fits, the gain is therefore memory and not speed, and claims use that load. The claim on the
largest model uses its best loads.
"""

import pytest

pytestmark = pytest.mark.slm_suite("papers")

MODELS = ["opt-125m", "opt-1.3b", "opt-6.7b", "opt-13b"]


@pytest.mark.slm(models=MODELS, needs="gpu")
def test_point_on_gpus(slm_gpus_point):
    """The measurements of the point can be trusted."""
    assert slm_gpus_point.measure()


@pytest.mark.slm(claim="tensor-parallel-loses-per-gpu", models=MODELS, needs="gpu", gpus=2)
def test_an_engine_over_more_gpus_serves_less_per_gpu(slm_claim):
    """Throughput per GPU is lower on more GPUs, because all-reduces and the host's part of a step are not divided."""
    assert slm_claim()


@pytest.mark.slm(claim="tensor-parallel-serves-less-in-all", models=MODELS[:2], needs="gpu", gpus=2)
def test_a_small_model_serves_less_even_in_all(slm_claim):
    """Total throughput of a small model is lower on more GPUs, because all-reduces take longer than they save."""
    assert slm_claim()


@pytest.mark.slm(claim="tensor-parallel-still-gains", models=["opt-13b"], needs="gpu", gpus=4)
def test_the_largest_model_still_gains_from_two_gpus_to_four(slm_claim):
    """Throughput of the largest model rises from two GPUs to four, because its steps are long."""
    assert slm_claim()


@pytest.mark.slm(claim="replicas-per-gpu-beat-tensor-parallel", models=MODELS, needs="gpu", gpus=2)
def test_a_replica_on_each_gpu_serves_more_than_one_engine_over_all(slm_claim):
    """Throughput of a replica on each GPU is higher than of one engine over all, because it needs no all-reduces."""
    assert slm_claim()
