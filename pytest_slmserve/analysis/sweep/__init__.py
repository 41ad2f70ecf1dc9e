"""Sweeps over concurrency or request rate: curves, gains, the saturation model and the next load to measure."""
