"""Requests and their arrivals, made from datasets, traces and lengths. Nothing here knows an engine."""
