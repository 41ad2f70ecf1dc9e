"""The load generator: a separate process with only the standard library, which uses the kernel's receive times."""
