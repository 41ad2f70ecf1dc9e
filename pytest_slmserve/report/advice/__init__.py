"""Advice in words, commands and JSON."""
