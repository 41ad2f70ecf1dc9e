"""Advice on what to deploy: batch limit, memory share, replicas, and how it is verified."""
