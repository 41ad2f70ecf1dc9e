"""`slmserve`: which command is carried out, what becomes of each kind of error, and that neither a closed nor a narrow
output is one."""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import version

import pytest
from command_line import refused, said

from pytest_slmserve import __main__ as ours
from pytest_slmserve.commands import pairs
from pytest_slmserve.commands.cli import COMMANDS, SUMMARIES
from pytest_slmserve.schema.errors import BadArchive, BadUsage, EngineFailed

PAIRS = ("pairs", "a.csv", "--direction=higher")


def ends_with(monkeypatch, outcome):
    """`slmserve pairs` ends so, whatever it is given."""

    def carried_out(given):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(pairs, "run_pairs", carried_out)


def test_without_arguments_there_is_help_with_all_commands_by_what_one_wants(capsys):
    status, out, err = said(capsys)
    assert (status, err) == (4, "") and "usage: slmserve" in out
    assert all(f"\n{title}:\n" in out for title in COMMANDS)
    assert all(f"  {name:<9} {summary}\n" in out for name, summary in SUMMARIES.items())


def test_the_version_is_that_of_the_package(capsys):
    assert said(capsys, "--version") == (0, f"pytest-slmserve {version('pytest-slmserve')}\n", "")


@pytest.mark.parametrize(("word", "near"), [("nonsense", ""), ("reprot", "report"), ("figures", "")])
def test_a_command_that_is_none_is_named_with_the_nearest(word, near, capsys):
    err = refused(said(capsys, word, "a"), repr(word), "slmserve --help")
    assert ("did you mean" in err) is bool(near) and near in err


def test_no_command_imports_what_others_need(monkeypatch):
    asked = []
    real = ours.import_module
    monkeypatch.setattr(ours, "import_module", lambda name: asked.append(name) or real(name))
    ours.parser("pairs")
    assert asked == ["pytest_slmserve.commands.pairs"]
    for other in ("", "--version", "nonsense"):
        asked.clear()
        ours.parser(other)
        assert len(asked) == len(SUMMARIES)


def test_words_of_the_command_line_are_taken_where_none_are_given(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["slmserve", *PAIRS])
    ends_with(monkeypatch, 10)
    assert ours.main() == 10 == ours.main(PAIRS)


@pytest.mark.parametrize(
    ("error", "status", "facts"),
    [
        (BadUsage("it is wrong", "--right"), 4, ["it is wrong", "--right"]),
        (BadArchive("it is damaged", "--skip-damaged"), 4, ["it is damaged"]),
        (EngineFailed("it is gone"), 1, ["it is gone"]),
        (OSError(errno.ENOSPC, "No space left", "/out.csv"), 1, ["/out.csv", "No space left"]),
        (OSError("only words"), 1, ["only words"]),
        (MemoryError(), 1, ["memory"]),
    ],
)
def test_an_error_is_one_sentence_and_its_status(error, status, facts, monkeypatch, capsys):
    ends_with(monkeypatch, error)
    seen = said(capsys, *PAIRS)
    assert (seen.status, seen.out) == (status, "") and seen.err.startswith("error: ")
    assert [fact for fact in facts if fact not in seen.err] == [] and "Traceback" not in seen.err


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Runs the program: its exit status, and what it wrote to a file, of ASCII, in place of stdout."""

    def ended(main=None, then=""):
        monkeypatch.setattr(sys, "argv", ["slmserve", *PAIRS])
        with (tmp_path / "out").open("w", encoding="ascii") as file, pytest.MonkeyPatch.context() as patch:
            if main:
                patch.setattr(ours, "main", main)
            patch.setattr(sys, "stdout", file)
            status = ours.run()
            print(then, end="", flush=True)
        return status, (tmp_path / "out").read_text("ascii")

    return ended


@pytest.mark.parametrize("status", [0, 1, 10])
def test_the_status_of_a_command_is_that_of_the_program(status, program, monkeypatch):
    ends_with(monkeypatch, status)
    assert program() == (status, "")


def test_what_the_terminal_cannot_show_is_written_in_escapes(program):
    assert program(lambda: print("caf\xe9 \u2713") or 0) == (0, "caf\\xe9 \\u2713\n")


def test_a_reader_that_leaves_early_ends_it_without_a_word(program, monkeypatch, capsys):
    ends_with(monkeypatch, BrokenPipeError())
    assert program(then="what is left in the buffer") == (1, "") and capsys.readouterr().err == ""


def test_an_interrupt_is_130_and_one_line(program, monkeypatch, capsys):
    ends_with(monkeypatch, KeyboardInterrupt())
    assert program() == (130, "") and len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_an_output_that_the_caller_has_closed_is_no_error(name, monkeypatch):
    monkeypatch.setattr(ours, "main", lambda: print("words") or print("words", file=sys.stderr) or 0)
    monkeypatch.setattr(sys, name, None)
    assert ours.run() == 0
    assert getattr(sys, name).name == os.devnull
    getattr(sys, name).close()
