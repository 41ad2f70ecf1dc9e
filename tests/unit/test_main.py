"""`slmserve`: which command is carried out, what becomes of each kind of error, and that neither a closed nor a narrow
output is one."""

import errno
import os
import sys
from importlib.metadata import version
from unittest.mock import Mock

import pytest
from command_line import refused, said
from hidden_texts import SECRET_PAIRS, repeats

from pytest_slmserve import __main__ as ours
from pytest_slmserve.commands import pairs
from pytest_slmserve.commands.cli import COMMANDS, SUMMARIES
from pytest_slmserve.schema.errors import BadArchive, BadUsage, EngineFailed

PAIRS = ("pairs", "a.csv", "--direction=higher")


@pytest.fixture
def ends_with(monkeypatch):
    """`slmserve pairs`, which is what is typed, ends with this status or error, whatever it is given."""
    monkeypatch.setattr(sys, "argv", ["slmserve", *PAIRS])
    monkeypatch.setattr(pairs, "run_pairs", run := Mock())
    return lambda outcome: run.configure_mock(side_effect=[outcome] * 9)


def test_bare_command_prints_help(capsys):
    status, out, err = said(capsys)
    assert (status, err) == (4, "") and "usage: slmserve" in out
    assert all(f"\n{title}:\n" in out for title in COMMANDS)
    assert all(f"  {name:<9} {summary}\n" in out for name, summary in SUMMARIES.items())
    assert said(capsys, "--version") == (0, f"pytest-slmserve {version('pytest-slmserve')}\n", "")


@pytest.mark.parametrize(("word", "near"), [("nonsense", ""), ("reprot", "report"), ("figures", "")])
def test_unknown_command_suggests_nearest(word, near, capsys):
    err = refused(said(capsys, word, "a"), repr(word), "slmserve --help")
    assert ("did you mean" in err) is bool(near) and near in err


@pytest.mark.parametrize("text", SECRET_PAIRS[::3])
def test_every_command_refuses_secrets(text, capsys):
    for words, where in (
        (["measure", "--extra-body", text], "--extra-body"), (["report", f"--since={text}"], "--since"),
        ([text], "the command"), (["plan", f"--{text}"], "holds"),
    ):  # fmt: skip
        assert not repeats(refused(said(capsys, *words), where, "records"))


def test_command_imports_only_its_module(monkeypatch):
    monkeypatch.setattr(ours, "import_module", asked := Mock(wraps=ours.import_module))
    for word in ("pairs", "", "--version", "nonsense"):
        asked.reset_mock()
        ours.parser(word)
        names = [call.args[0] for call in asked.call_args_list]
        assert len(names) == (1 if word == "pairs" else len(SUMMARIES)) and "pytest_slmserve.commands.pairs" in names


@pytest.mark.parametrize(("error", "status", "facts"), [
    (BadUsage("it is wrong", "--right"), 4, ["it is wrong", "--right"]),
    (BadArchive("it is damaged", "--skip-damaged"), 4, ["it is damaged"]),
    (EngineFailed("it is gone"), 1, ["it is gone"]),
    (OSError(errno.ENOSPC, "No space left", "/out.csv"), 1, ["/out.csv", "No space left"]),
    (OSError("only words"), 1, ["only words"]), (MemoryError(), 1, ["memory"]),
])  # fmt: skip
def test_error_ends_with_its_status(error, status, facts, ends_with, capsys):
    ends_with(error)
    seen = said(capsys, *PAIRS)
    assert (seen.status, seen.out) == (status, "") and seen.err.startswith("error: ")
    assert [fact for fact in facts if fact not in seen.err] == [] and "Traceback" not in seen.err


@pytest.fixture
def program(tmp_path, ends_with, capsys):
    """Runs the program, whose command ends with an outcome: its exit status, what it wrote to a file, of ASCII, in
    place of stdout, and how many lines on stderr. then: what is left in the buffer."""

    def ended(outcome, main=ours.main, then=""):
        ends_with(outcome)
        with (tmp_path / "out").open("w", encoding="ascii") as file, pytest.MonkeyPatch.context() as patch:
            patch.setattr(ours, "main", main)
            patch.setattr(sys, "stdout", file)
            status = ours.run()
            print(then, end="", flush=True)
        return status, (tmp_path / "out").read_text("ascii"), len(capsys.readouterr().err.strip().splitlines())

    return ended


def test_program_returns_command_status(program):
    assert [program(status) for status in (0, 1, 10)] == [(0, "", 0), (1, "", 0), (10, "", 0)]
    assert ours.main() == 10 == ours.main(PAIRS), "words of the command line, where none are given"
    assert program(0, lambda: print("caf\xe9 \u2713") or 0) == (0, "caf\\xe9 \\u2713\n", 0)
    assert program(BrokenPipeError(), then="what is left in the buffer") == (1, "", 0)
    assert program(KeyboardInterrupt()) == (130, "", 1)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_closed_output_is_no_error(name, monkeypatch):
    monkeypatch.setattr(ours, "main", lambda: print("words") or print("words", file=sys.stderr) or 0)
    monkeypatch.setattr(sys, name, None)
    assert ours.run() == 0
    assert getattr(sys, name).name == os.devnull
    getattr(sys, name).close()
