"""`slmserve plan`: pytest's own cells, priced, with nothing started."""

from __future__ import annotations

import math
import re

import pytest
from scripts import CHECKOUT, in_checkout
from shipped import BENCHMARKS

from pytest_slmserve.__main__ import main
from pytest_slmserve.commands import plan
from pytest_slmserve.commands.plan import QUIET, SHIPPED
from pytest_slmserve.options.table import OPTS


def test_words_of_pytest_are_handed_on_and_what_is_missing_is_added(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = []

    class Done:
        returncode = 3

    def planned_words(words):
        monkeypatch.setattr(plan.subprocess, "run", lambda command, **_: commands.append(command) or Done)
        assert main(["plan", *words]) == 3
        return commands[-1][3 + len(QUIET) :]

    assert planned_words([]) == ["--slm-gpu", "--slm-plan", *SHIPPED]
    assert planned_words(["--slm-simulate", "-k", "point"]) == ["--slm-plan", "--slm-simulate", "-k", "point", *SHIPPED]
    (tmp_path / "test_mine.py").touch()
    mine = "test_mine.py::test_it"
    assert planned_words([mine, "--slm-cpu"]) == ["--slm-plan", mine, "--slm-cpu"]
    (tmp_path / "python").touch()
    assert planned_words(["--slm-python", "python", "--slm-cpu"]) == [
        "--slm-plan",
        "--slm-python=python",
        "--slm-cpu",
        *SHIPPED,
    ]
    assert planned_words(["--pyargs", "my.tests"]) == ["--slm-gpu", "--slm-plan", "--pyargs", "my.tests"]


def test_cells_order_gpus_and_seconds_are_printed_and_nothing_is_started(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = ("--slm-simulate", "--slm-models=opt-13b", "--slm-ray=local:4", str(BENCHMARKS / "test_tensor_parallel.py"))
    assert main(["plan", *words]) == 0
    told = capfd.readouterr().out
    for engine in ("opt-13b", "opt-13b on 2 GPUs", "opt-13b on 4 GPUs", "2 x opt-13b, a GPU each"):
        assert f"start {engine} (simulated, 0 s)" in told
    assert "test_point_on_gpus[opt-13b-256-tp4]" in told and "spread by engine: " in told
    assert not (tmp_path / ".slm").exists()


def test_wrong_usage_is_one_sentence(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--slm-simulate", "--slm-tensor-parallel-size=99"]) == 4
    assert "99 GPUs are asked for, and 8 GPUs are visible" in "".join(capfd.readouterr())


@pytest.mark.parametrize("words", [["--help"], ["--slm-gpu", "-h"]])
def test_its_help_is_its_own(words, capfd):
    assert main(["plan", *words]) == 0
    out = capfd.readouterr().out
    assert out.startswith("usage: slmserve plan [WORD ...]\n") and "--slm-models=opt-1.3b" in out
    assert len(out.splitlines()) < 20


@in_checkout
def test_the_minutes_of_the_core_suite_are_those_of_its_plan(tmp_path, monkeypatch, capfd):
    """In its help, and so in docs/options.md, and in the README."""
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--slm-gpu", str(BENCHMARKS)]) == 0
    minutes, seconds = re.findall(r"(\d+):(\d\d)  end:", capfd.readouterr().out)[-1]
    planned = f"planned for {math.ceil(int(minutes) + int(seconds) / 60)} minutes"
    [suite] = [opt for opt in OPTS if opt.name == "suite"]
    assert planned in suite.help and planned in (CHECKOUT / "README.md").read_text("utf-8")
