"""Reports on results of other tools."""
