"""Batches made one after the other by Transformers, on two CPU cores: a tiny model with random weights."""

import os
import signal
from contextlib import closing

import pytest
from interfaces import batching_spec, natural_workload, small_workload, stand_in
from measured import measure
from real_engine import SPEC

from pytest_slmserve.analysis.points import job_points
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.server import BatchedEngine
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import OpenLoop
from pytest_slmserve.workload.arrivals import job

WORKLOAD = natural_workload()


def test_transformers_refuses_scores():
    told = "is not asked how likely tokens are\n  Use the engine interface."
    with closing(BatchedEngine(batching_spec("static", stand_in()))) as engine, pytest.raises(EngineFailed, match=told):
        engine.scores(small_workload(), ((5, 6),))


@pytest.fixture(scope="module")
def engine():
    pytest.importorskip("transformers")
    with closing(Pool()) as pool:
        yield pool.engine(batching_spec("dynamic", SPEC))


@pytest.mark.slow
def test_transformers_serves_asked_tokens(engine):
    found = measure(engine, WORKLOAD, job(12, rate=20.0), Environment(platform="cpu"))
    (point,) = job_points([found])
    assert point.valid, point.problems
    assert list(found.run.samples.output_tokens) == [r.output_tokens for r in WORKLOAD.requests]
    assert sum(found.run.steps.new_tokens) == sum(r.output_tokens for r in WORKLOAD.requests)
    assert 0 < point.waste < 1 and point.resolved.transformers
    assert point.resolved.attention_backend == "sdpa, without cuDNN"  # which would plan for each new shape


@pytest.mark.slow
def test_greedy_tokens_are_repeatable(engine):
    first = engine.outputs(WORKLOAD, 2, 5)
    assert [len(tokens) for tokens in first] == [5, 5] and engine.outputs(WORKLOAD, 2, 5) == first


@pytest.mark.slow
def test_dead_process_is_clear_error(engine):
    """The last one on this engine: it does not survive."""
    os.kill(engine.child.process.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="was killed by SIGKILL"):
        engine.run(WORKLOAD, OpenLoop(requests=2))
