"""The commands of `python -m pytest_slmserve`."""
