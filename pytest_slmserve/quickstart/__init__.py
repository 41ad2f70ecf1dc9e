"""Three short tests for you to run, read and copy. No module imports them, and they import nothing of this package."""
