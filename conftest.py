"""The tests run pytest inside pytest."""

from __future__ import annotations

pytest_plugins = ["pytester"]
