"""Tables of a run, one module for each kind of row."""
