"""What the sensors say about a window, in figures, and whether they can be believed."""
