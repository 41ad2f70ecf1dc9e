"""Functions for a regression gate: pairs of launches, sequential decision, calibration, diagnosis and waivers."""
