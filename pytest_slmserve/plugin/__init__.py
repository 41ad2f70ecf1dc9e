"""The pytest plugin, and the only room that imports pytest: hooks, items, parametrisation, fixtures, order,
progress."""
