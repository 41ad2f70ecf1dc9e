"""Requests and their arrival times, made from datasets, traces and lengths, without knowledge of engines."""
