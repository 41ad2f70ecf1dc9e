"""Points: the repeats of one case with their means and intervals."""
