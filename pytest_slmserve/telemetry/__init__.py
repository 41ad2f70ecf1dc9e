"""Sensors beside a measurement: sources that answer, and the sampler that asks them."""
