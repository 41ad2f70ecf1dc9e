"""A model of your own, by its config.json alone: speed depends on shapes, so its weights need not be here."""

from pathlib import Path

import pytest

MODEL = str(Path(__file__).parent / "my-llama")


@pytest.mark.slm(model=MODEL)
def test_plateau(slm_sweep):
    """More concurrent requests bring more throughput, until a doubling gains less than 10 %."""
    curve = slm_sweep(concurrency=[1, 4, 16, 64, 128, 256, 512])
    assert curve.pareto_plateau(tolerance=0.10)


@pytest.mark.slm(model=MODEL, max_num_batched_tokens=2048)
def test_a_small_token_budget_is_enough(slm_measure):
    """What follows the model are arguments of vLLM's engine."""
    point = slm_measure(concurrency=32)
    assert point.valid, point.problems
    assert point.tpot_s < 0.05
