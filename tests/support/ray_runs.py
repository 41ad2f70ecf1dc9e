"""Runs on Ray with the simulated engine: on the GPUs of this host, and on a cluster of nodes that are its processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pytest_slmserve.archive.store import read
from pytest_slmserve.schema.records import Measurement

POINTS = """
    import pytest

    def test_point(slm_point):
        assert slm_point.measure()
"""

SWEEP = f"""{POINTS}
    @pytest.mark.slm(claim="throughput-plateau")
    def test_plateau(slm_claim):
        assert slm_claim()
"""
SWEEPS = f"""{SWEEP}
    @pytest.mark.slm(models=("opt-1.3b",))
    def test_of_two_models(slm_session, slm_model):
        known = {{m.spec.model.removeprefix("facebook/") for m in slm_session.results.measurements()}}
        assert {{"opt-125m", "opt-1.3b"}} <= known
"""
WORDS = (
    *("--slm-simulate", "--slm-records=.slm/records.jsonl", "-oslm_report=tables", "--slm-models=opt-125m,opt-1.3b"),
    *("--slm-concurrency=1,16,64,128,256", "-p", "no:cacheprovider"),
)
# Noise is drawn in the order of the measurements, and that is another in each run.
MODELS = (*WORDS, "--slm-engine-arg=noise=0", "--slm-engine-arg=scatter=0")
LOCAL = "--slm-ray=local:2"
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
WITH_A_GPU = {**NODE, "num_gpus": 1, "resources": {"imagined": 1}}


def records(pytester: pytest.Pytester) -> list[Measurement]:
    return list(read(pytester.path / ".slm" / "records.jsonl").measurements)


@contextmanager
def cluster_of_two() -> Iterator[Any]:
    """A head without GPUs, and two nodes with one imagined GPU each, as processes of this host."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("SLM_", "PYTEST_XDIST", "RAY_ADDRESS"))]:
            patch.delenv(name)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_gpus": 0})
        try:
            cluster.workers = [cluster.add_node(**WITH_A_GPU) for _ in range(2)]
            yield cluster
        finally:
            cluster.shutdown()
