"""Decoding stays memory-bound in large batches: memory is closer to its achievable peak (arXiv:2503.08311).

Requests start together, so that most of the time the engine only decodes. Otherwise almost every step would include a
prompt. The counterexample is a model with grouped keys at a short context: by its configuration its decoding can pass
the ridge of the roofline, and that of an OPT cannot.
"""

import pytest

DECODING = [(model, n) for model in ("opt-125m", "opt-1.3b", "opt-2.7b") for n in (1, 16, 64, 256)]
GROUPED_KEYS = [("qwen2.5-3b", n) for n in (1, 32, 256, 1024)]
SHORT = (64, 128)  # prompt and output tokens
OF_TODAY = [
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "llama-3.2-1b",
    "gemma-3-1b",
    "smollm3-3b",
    "granite-4.0-h-1b",
]


@pytest.mark.slm(points=DECODING, ramp_up="burst", needs="gpu")
def test_point_of_decoding(slm_point):
    """The measurements of the point can be trusted."""
    assert slm_point.measure()


@pytest.mark.slm(
    claim="decode-stays-memory-bound", models=["opt-125m", "opt-1.3b", "opt-2.7b"], ramp_up="burst", needs="gpu"
)
def test_decode_is_memory_bound_at_every_load(slm_claim):
    """DRAM is closer to its achievable peak than the tensor cores are."""
    assert slm_claim()


@pytest.mark.slm_suite("papers")
@pytest.mark.slm(
    claim="decode-saturates-dram", models=["opt-125m", "opt-1.3b", "opt-2.7b"], ramp_up="burst", needs="gpu"
)
def test_decode_saturates_the_memory(slm_claim):
    """DRAM activity at the largest load is at least 80% of its achievable peak."""
    assert slm_claim()


@pytest.mark.slm_suite("papers")
@pytest.mark.slm(points=GROUPED_KEYS, lengths=SHORT, ramp_up="burst", needs="gpu")
def test_point_of_grouped_keys(slm_point):
    """The measurements of the point can be trusted."""
    assert slm_point.measure()


@pytest.mark.slm_suite("papers")
@pytest.mark.slm(claim="decode-stays-memory-bound", models=["qwen2.5-3b"], lengths=SHORT, ramp_up="burst", needs="gpu")
def test_grouped_keys_at_a_short_context(slm_claim):
    """Decoding stays memory-bound even for a model whose arithmetic allows it to be compute-bound."""
    assert slm_claim()


@pytest.mark.slm_suite("all")
@pytest.mark.slm(points=[(model, n) for model in OF_TODAY for n in (1, 64, 256)], ramp_up="burst", needs="gpu")
def test_point_of_a_model_of_today(slm_point):
    """The measurements of the point can be trusted."""
    assert slm_point.measure()


@pytest.mark.slm_suite("all")
@pytest.mark.slm(claim="decode-stays-memory-bound", models=OF_TODAY, ramp_up="burst", needs="gpu")
def test_decode_of_a_model_of_today(slm_claim):
    """Decoding stays memory-bound with grouped queries, sliding windows and states, which keep less of each token."""
    assert slm_claim()
