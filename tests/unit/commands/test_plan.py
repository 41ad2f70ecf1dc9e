"""`plan`: words go on to pytest as they are, and what is missing is added: a mode, and the built-in tests."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from command_line import said
from hypothesis import given, strategies as st

from pytest_slmserve.__main__ import main
from pytest_slmserve.commands import plan
from pytest_slmserve.commands.cli import SUMMARIES
from pytest_slmserve.commands.plan import QUIET, SHIPPED, with_tests
from pytest_slmserve.options.table import OPTS

VALUED = [opt.flag for opt in OPTS if not opt.is_flag and not opt.bare]


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """The words that pytest gets for these; it ends with 3."""
    monkeypatch.chdir(tmp_path)
    for name in ("test_mine.py", "python"):
        (tmp_path / name).touch()
    commands = []
    run = lambda command, **_: commands.append(command) or SimpleNamespace(returncode=3, stdout="a plan\n")  # noqa: E731
    monkeypatch.setattr(plan.subprocess, "run", run)

    def words(*given):
        seen = said(capsys, "plan", *given)
        assert (seen.status, seen.out) == (3, "a plan\n")
        interpreter, *rest = commands.pop()
        assert (interpreter, rest[: 2 + len(QUIET)]) == (sys.executable, ["-m", "pytest", *QUIET])
        return rest[2 + len(QUIET) :]

    return words


@pytest.mark.parametrize(("given", "handed_on"), [
    ([], ["--slm-gpu", "--slm-plan", *SHIPPED]),
    (["--slm-simulate", "-k", "point"], ["--slm-plan", "--slm-simulate", "-k", "point", *SHIPPED]),
    (["test_mine.py::test_it", "--slm-cpu"], ["--slm-plan", "test_mine.py::test_it", "--slm-cpu"]),
    (["--slm-python", "python", "--slm-cpu"], ["--slm-plan", "--slm-python=python", "--slm-cpu", *SHIPPED]),
    (["--pyargs", "my.tests"], ["--slm-gpu", "--slm-plan", "--pyargs", "my.tests"]),
])  # fmt: skip
def test_missing_mode_is_added(given, handed_on, planned):
    assert planned(*given) == handed_on


@given(st.sampled_from(VALUED), st.text(st.characters(categories=("L", "N")), min_size=1), st.booleans())
def test_value_stays_with_its_option(flag, value, joined):
    words = [f"{flag}={value}"] if joined else [flag, value]
    assert with_tests(["-q", *words]) == ["-q", f"{flag}={value}", *SHIPPED]


@pytest.mark.parametrize("words", [["plan"], ["plan", "-h"], ["report", "--help"], ["--help"]])
def test_full_output_is_error(planned, monkeypatch, capsys, words):
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("builtins.print", Mock(side_effect=[full, None]))
    assert main(words) == 1
    assert print.call_args == call("error: the output: No space left on device", file=sys.stderr)


@pytest.mark.parametrize("words", [["--help"], ["--slm-gpu", "-h"]])
def test_plan_prints_own_help(words, capsys, monkeypatch):
    monkeypatch.setattr(plan.subprocess, "run", None)
    seen = said(capsys, "plan", *words)
    assert seen.status == 0 and seen.out.startswith("usage: slmserve plan [WORD ...]\n") and "--slm-gpu" in seen.out
    assert len(seen.out.splitlines()) < 20 and f"{SUMMARIES['plan'].capitalize()}." in seen.words
