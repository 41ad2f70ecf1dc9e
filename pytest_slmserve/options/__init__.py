"""The options of pytest, read once into one frozen value. Nothing below it sees `pytest.Config`."""
