"""Reports of gates and of their diagnosis."""
