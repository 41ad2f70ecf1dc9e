"""Property tests: each measures, or judges a claim from what was measured. Shipped as pytest_slmserve.benchmarks."""
