"""Comparisons of releases, baselines and deployments: replicas, several GPUs, interfaces, neighboring engines."""
