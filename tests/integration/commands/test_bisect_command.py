"""`bisect` on simulated releases, some of them slow, and what it says where nothing can be told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_slmserve.__main__ import main
from pytest_slmserve.commands import bisect
from pytest_slmserve.commands.plan import SHIPPED

SIMULATED = ("--", "--slm-simulate", "--slm-models=opt-1.3b")


@pytest.fixture
def releases(tmp_path, monkeypatch):
    """Writes a file of releases 1.0, 1.1 ...; each with these engine arguments."""
    monkeypatch.chdir(tmp_path)

    def write(*arguments: dict[str, object]) -> tuple[str, ...]:
        rows = [{"release": f"1.{i}", "engine_arg": each} for i, each in enumerate(arguments)]
        Path("releases.json").write_text(json.dumps(rows), "utf-8")
        return ("bisect", "--good=1.0", f"--bad=1.{len(rows) - 1}", "--releases=releases.json")

    return write


SLOW = {"slowdown": 0.1}


def test_the_first_slow_release_is_named_with_its_interval_and_a_second_run_reads_it(releases, capsys):
    words = releases({}, SLOW, SLOW)
    assert main([*words, *SIMULATED]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("first slow release: 1.1: opt-1.3b: FAIL after ") and "of the good one (95 %: 0.8" in said
    before = {path: path.read_bytes() for path in Path(".slm/bisect").glob("*/records.jsonl")}
    assert {path.parent.name for path in before} == {"1.1", "1.2"}
    assert main([*words, "--json", *SIMULATED]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["suspects"] == ["1.1"] and [gate["release"] for gate in found["gates"]] == ["1.2", "1.1"]
    measured = [path.read_bytes().count(b'"kind":"measurement"') for path in before]
    assert measured == [text.count(b'"kind":"measurement"') for text in before.values()], "nothing is measured again"


def test_a_last_release_that_is_not_slow_ends_it(releases, capsys):
    assert main([*releases({}, SLOW, {}), *SIMULATED]) == 0
    assert capsys.readouterr().out.startswith("nothing to find: 1.2 is not slower than 1.0: 1.2: opt-1.3b: PASS")
    assert not Path(".slm/bisect/1.1").exists()


def test_a_release_that_does_not_start_stays_a_suspect(releases, capsys):
    assert main([*releases({}, {"no_such": 1}, SLOW), *SIMULATED]) == 10
    said = capsys.readouterr()
    assert said.out.startswith("one of 1.1, 1.2 is the first slow release")
    assert "1.1: pytest ended with" in " ".join(said.err.split())


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--good=1.0", "--bad=9"), "9 is none of the releases"),
        (("--good=1.1", "--bad=1.0"), "1.0 does not come after 1.1"),
        (
            ("--good=1.0", "--bad=1.1", "--python=/nowhere/{release}/python"),
            "there is no interpreter /nowhere/1.0/python",
        ),
    ],
)
def test_wrong_usage_is_one_sentence(words, problem, releases, capsys):
    releases({}, {})
    assert main(["bisect", "--releases=releases.json", *words, *SIMULATED]) == 4
    assert problem in capsys.readouterr().err


def test_nothing_is_installed_for_the_simulated_engine(monkeypatch, capsys):
    monkeypatch.setattr(bisect.subprocess, "run", None)
    assert main(["bisect", "--good=0.24.0", "--bad=0.26.0", *SIMULATED]) == 4
    assert "the simulated engine is of no release of vLLM" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "given", "tests"),
    [
        ([], [], SHIPPED),
        (["--pyargs", "my.tests"], ["--pyargs", "my.tests"], ()),
        (["--slm-python", "releases.json"], ["--slm-python=releases.json"], SHIPPED),
    ],
)
def test_words_that_name_tests_stand_for_the_built_in_ones(words, given, tests, releases, monkeypatch):
    """As in `plan`: the value of an option names no tests, and what follows --pyargs does."""
    commands = []

    class Interrupted:
        returncode = 2

    monkeypatch.setattr(bisect.subprocess, "run", lambda command, **_: commands.append(command) or Interrupted)
    with pytest.raises(KeyboardInterrupt):
        main([*releases({}, SLOW), *SIMULATED, *words])
    [command] = commands
    assert command[command.index("--slm-simulate") :] == [*SIMULATED[1:], *given, *tests]


def test_a_file_that_is_no_list_of_releases(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("releases.json").write_text('[{"name": "1.0"}]', "utf-8")
    assert main(["bisect", "--releases=releases.json", "--good=1.0", "--bad=1.1"]) == 4
    assert "releases.json is no list of releases" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        (
            "vllm (0.26.0)\nAvailable versions: 0.26.0, 0.25.1, 0.25.0rc1, 0.9.2, 0.10.0\n",
            ["0.9.2", "0.10.0", "0.25.1", "0.26.0"],
        ),
        ("", None),
    ],
)
def test_the_index_is_asked_by_pip(printed, found, monkeypatch, capsys):
    class Answer:
        stdout, stderr = printed, "ERROR: no network"

    monkeypatch.setattr(bisect.subprocess, "run", lambda *words, **options: Answer)
    if found:
        assert main(["bisect", "--good=0.8", "--bad=0.26.0", "--", "--slm-gpu"]) == 4
        assert f"0.8 is none of the releases\n  try: one of {', '.join(found)}\n" in capsys.readouterr().err
    else:
        assert main(["bisect", "--good=0.25.1", "--bad=0.26.0"]) == 4
        assert "no option says on which engine to gate" in capsys.readouterr().err
        assert main(["bisect", "--good=0.25.1", "--bad=0.26.0", "--", "--slm-gpu"]) == 4
        assert "pip lists no releases of vLLM (ERROR: no network)" in capsys.readouterr().err
