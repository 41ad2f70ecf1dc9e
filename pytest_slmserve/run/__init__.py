"""One run: session, devices, results, and the code that measures, evaluates, gates and advises.

Nothing here imports pytest.
"""
