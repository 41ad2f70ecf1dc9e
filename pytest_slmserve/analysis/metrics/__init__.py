"""Metrics of one measurement: window, latency, goodput, step time, roofline, validity."""
