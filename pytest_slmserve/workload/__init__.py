"""Requests and their arrival times, made from datasets, traces and lengths. This package does not import engines."""
