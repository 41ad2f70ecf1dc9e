"""Advice on what to deploy: batch limit, GPU memory utilization, replicas, and how it is verified."""
