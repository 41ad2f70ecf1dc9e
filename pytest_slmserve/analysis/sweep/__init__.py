"""Sweeps: curves over concurrency or request rate, their gains, saturation and next load."""
