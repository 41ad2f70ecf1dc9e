"""The whole campaign, whose table is printed at the end."""

from typing import Any

import pytest
from campaign import url  # noqa: F401 - a fixture
from judged import ANSWERED, PLANTED, case, table  # noqa: F401


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
