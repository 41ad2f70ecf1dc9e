"""Is the candidate slower than the baseline? `--slm-models` names the model, and `--slm-side` the difference."""


def test_no_slower(slm_gate):
    """pytest runs this test for each metric of the gate, for example throughput, latency and energy."""
    assert slm_gate()
