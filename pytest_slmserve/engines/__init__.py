"""Doors into an engine. They serve requests and know nothing of workloads, claims or pytest."""
