"""Is the candidate slower than the baseline? `--slm-models` says of which model, `--slm-side` what changes."""


def test_no_worse(slm_gate):
    """A test for each endpoint: throughput, latency, energy, time to start, KV blocks, device memory."""
    assert slm_gate()
