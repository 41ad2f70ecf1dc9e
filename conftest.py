"""The tests run pytest inside pytest; a measuring run without a path needs the benchmarks alone."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Leave tests/ uncollected then: their imports (hypothesis, for one) may not be there on a GPU host."""
    from pytest_slmserve.plugin import SESSION

    if SESSION in config.stash and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args = ["benchmarks"]
