"""The page: its lines, its exit status, and the command on this host."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from pytest_slmserve.__main__ import main
from pytest_slmserve.commands import doctor as module
from pytest_slmserve.commands.doctor import Finding, lines

HEAVY = ("vl_convert", "numpy", "pytest", "torch", "vllm")
PAGE = [Finding("a", "ok", "one"), Finding("longer", "warning", "two", "do it"), Finding("b", "problem", "three")]


def test_a_line_each_in_columns_and_a_count():
    assert lines(PAGE) == [
        "ok       a       one",
        "warning  longer  two -> do it",
        "problem  b       three",
        "problems: 1, warnings: 1",
    ]


def test_colour_changes_the_states_alone():
    coloured = lines(PAGE, colour=True)
    assert coloured[2] == "\033[31mproblem\033[0m  b       three"
    assert [re.sub(r"\033\[\d+m", "", line) for line in coloured] == lines(PAGE)


def test_what_is_wider_than_the_terminal_goes_on_below_itself(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    found = [Finding("GPU", "warning", "no GPU here", "needs a driver")]
    text = ["warning  GPU  no GPU here ->", "              needs a driver"]
    assert lines(found)[0].splitlines() == text
    assert lines(found, colour=True)[0].startswith("\033[33mwarning\033[0m  GPU  no GPU here ->\n")


@pytest.mark.parametrize(("page", "status"), [(PAGE, 1), (PAGE[:2], 0)])
def test_only_a_problem_is_1(monkeypatch, capsys, page, status):
    asked = []
    monkeypatch.setattr(module, "examine", lambda pythons: asked.append(pythons) or page)
    assert main(["doctor"]) == status
    assert main(["doctor", "--python", "a", "--python", "b"]) == status
    assert asked == [[sys.executable], ["a", "b"]]
    assert capsys.readouterr().out.splitlines() == lines(page) * 2


def test_wrong_usage_is_4_and_help_tells_the_exit_statuses(capsys):
    assert main(["doctor", "--nonsense"]) == 4
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "Exit status: 0 nothing is a problem; 1 something is" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [(), ("--python", sys.executable, "--python", "/nowhere/python")])
def test_the_command_on_this_host(arguments):
    """Its state is whatever it is; the exit status agrees with it, and nothing heavy is imported."""
    call = f"main({['doctor', *arguments]!r})"
    code = f"import sys; from pytest_slmserve.__main__ import main; status = {call}\n"
    code += f"print([name for name in {HEAVY!r} if name in sys.modules]); sys.exit(status)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    *page, counts, heavy = done.stdout.splitlines()
    problems = sum(line.startswith("problem") for line in page)
    assert (done.stderr, done.returncode, heavy) == ("", int(problems > 0), "[]")
    assert re.fullmatch(rf"problems: {problems}, warnings: \d+", counts)
    names = [line[9:].split("  ")[0] for line in page]
    assert names.count("vLLM") == max(1, len(arguments) // 2)
    assert {"GPU", "telemetry", "lock", "cores", "steal", "other work", "memory", "compile cache"} <= set(names)
    assert not arguments or "/nowhere/python is not a Python interpreter that runs" in done.stdout
