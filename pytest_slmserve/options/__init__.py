"""The options of pytest, read once into one frozen value. Only the plugin sees `pytest.Config`."""
