"""Your own model, if you only have its config.json: speed depends on the configuration, so you need no weights."""

from pathlib import Path

import pytest

MODEL = str(Path(__file__).parent / "my-llama")


@pytest.mark.slm(model=MODEL)
def test_plateau(slm_sweep):
    """Throughput grows with concurrency, until doubling the concurrency gains less than 10%."""
    curve = slm_sweep(concurrency=[1, 4, 16, 64, 128, 256, 512])
    assert curve.pareto_plateau(tolerance=0.10)


@pytest.mark.slm(model=MODEL, max_num_batched_tokens=2048)
def test_small_token_budget(slm_measure):
    """Keyword arguments after the model are arguments of vLLM's engine."""
    point = slm_measure(concurrency=32)
    assert point.meets("tpot:50ms", share=0.95)
