"""The load generator: a process of its own on the standard library alone, with kernel receive stamps."""
