"""Prompts of many steps on vLLM's CPU backend: a request that waits for its first token is not in the batch."""

from dataclasses import replace
from typing import get_args

import pytest
from measured import measure
from real_engine import SPEC

from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.metrics.window import littles_law, mean_batch, requests_in_flight
from pytest_slmserve.engines.pool import launch_engine
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.errors import OwnInterface
from pytest_slmserve.schema.specs import ClosedLoop, WorkloadSpec
from pytest_slmserve.telemetry.host import probe
from pytest_slmserve.workload.requests import build_workload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]


@pytest.mark.parametrize("interface", get_args(OwnInterface))
def test_prompts_far_above_the_token_budget_are_a_valid_load(interface):
    """A prompt takes 14 steps of its engine, and its request makes a token in 32."""
    spec = replace(SPEC, max_model_len=1024, max_num_batched_tokens=64, interface=interface)
    workload = build_workload(WorkloadSpec(prompt_tokens=896, output_tokens=32, requests=96), model_of(spec.model))
    engine = launch_engine(spec).start()
    try:
        made = measure(engine, workload, ClosedLoop(8, window_s=4.0), probe("cpu").environment)
    finally:
        engine.close()
    sent, batch = requests_in_flight(made.run, "sent_s"), mean_batch(made.run)
    assert sent > 1.1 * batch, "too few wait for their prompt for this test to tell"
    assert abs(littles_law(made.run)) < 0.05
    assert not any("failed" in text or "Little" in text for text in problems(made))
