"""A run on the GPUs of this host at once, or of a Ray cluster. The only place that imports ray."""
