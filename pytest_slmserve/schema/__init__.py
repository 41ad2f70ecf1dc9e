"""Values that the packages exchange: specifications, loads, workloads, records, the catalogue, errors.

Functions here may compute, but never measure or evaluate.
"""
