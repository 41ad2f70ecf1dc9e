"""A run on the GPUs of a Ray cluster. The only place that imports ray."""
