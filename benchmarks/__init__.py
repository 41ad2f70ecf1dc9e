"""Benchmarks, each of which measures, or evaluates a claim on measurements. Shipped as pytest_slmserve.benchmarks."""
