"""Three short tests to begin with, for a user to run, to read and to copy. Nothing imports them, and they import
nothing of the package."""
