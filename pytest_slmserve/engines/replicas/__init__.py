"""Several engines on one device or several: the set, the ways of sharing a GPU, MPS."""
