"""`doctor`: what this host can measure, and what would spoil it."""
