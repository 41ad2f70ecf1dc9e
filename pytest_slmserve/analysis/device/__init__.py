"""Figures of a window from sensor readings, and whether these readings can be trusted."""
