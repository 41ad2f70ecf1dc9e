"""The campaign: all of it by `tox -e faults`, a part of it in every run of the tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from judged import ANSWERED, PLANTED, Case, table


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is long, unless it was asked for."""
    if "faults" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("faults")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in set(long)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells what it has planted."""
    if (told := getattr(session.config, "workeroutput", None)) is not None:
        told["faults"] = dict(PLANTED), dict(ANSWERED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    planted, answered = getattr(node, "workeroutput", {}).get("faults", ({}, {}))
    PLANTED.update(planted)
    ANSWERED.update(answered)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if PLANTED:
        terminalreporter.section("faults")
        for line in table():
            terminalreporter.write_line(line)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path)
    yield made
    made.stop()
    shutil.rmtree(made.temporary, ignore_errors=True)
