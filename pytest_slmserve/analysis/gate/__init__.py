"""The regression gate as arithmetic: pairs of launches, sequential decision, outputs, calibration, waivers."""
