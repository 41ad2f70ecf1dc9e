"""A Ray cluster measures, this process judges: the only part of the house that knows Ray."""
