"""Figures as PNG, drawn with matplotlib."""
