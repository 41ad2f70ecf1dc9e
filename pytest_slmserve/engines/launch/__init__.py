"""One engine process: arguments, environment, model files, caches, locks, its start and its end."""
