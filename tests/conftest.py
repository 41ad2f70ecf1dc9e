"""Its being here puts this folder on the path: a test writes `from strategies import measurement`."""
