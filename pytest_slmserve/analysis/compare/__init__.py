"""Comparisons of two ways to serve: replicas, several GPUs, interfaces, engines that run side by side."""
