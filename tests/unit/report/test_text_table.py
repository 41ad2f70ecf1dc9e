"""Tables of rows by their columns, and lines that fit a terminal."""

from __future__ import annotations

import shlex
import subprocess
from operator import itemgetter

import pytest

from pytest_slmserve.report.text_table import (
    NOT_A_TERMINAL,
    Column,
    command_lines,
    folded,
    laid_out,
    layout,
    table,
    telling,
)

LETTER: Column[str] = Column("a\nletter", lambda row: row, "left")
CODE: Column[str] = Column("code", lambda row: str(ord(row)))
NOTHING: Column[str] = Column("nothing", lambda row: "")
DASH: Column[str] = Column("dash", lambda row: "-")
SOMETIMES: Column[str] = Column("b?", lambda row: "*" if row == "b" else "-", "center")
RANKED: tuple[Column[str], ...] = (  # 52 wide
    LETTER,
    CODE,
    Column("least im-\nportant", lambda row: "1", rank=3),
    Column("a pair", lambda row: "2".rjust(10), rank=2),
    Column("its other", lambda row: "3".rjust(8), rank=2),
    Column("some", lambda row: "4", rank=1),
)


def test_cells_stand_below_their_headings_each_on_its_side():
    assert table("ad", (LETTER, CODE)).splitlines() == [
        "a       code",
        "letter",
        "------  ----",
        "a         97",
        "d        100",
    ]


@pytest.mark.parametrize(
    ("head", "name"), [("max_num\n_seqs", "max_num_seqs"), ("ms/\ntoken", "ms/token"), ("roof-\nline %", "roofline %")]
)
def test_a_broken_heading_is_whole_where_the_column_is_named(head, name):
    assert Column(head, str).name == name


def test_columns_that_tell_nothing_are_left_out():
    columns = (NOTHING, LETTER, DASH, SOMETIMES)
    assert telling("ab", columns) == [LETTER, SOMETIMES] and telling("a", columns) == [LETTER]
    assert table("ab", columns) == table("ab", (LETTER, SOMETIMES))


def test_the_first_columns_can_be_kept_in_any_case():
    columns = (NOTHING, DASH, LETTER, DASH)
    assert telling("a", columns, always=1) == [NOTHING, LETTER]
    assert telling("", columns, always=len(columns)) == list(columns)
    assert table("", (LETTER, DASH), always=2).splitlines()[0].split() == ["a", "dash"]


def test_the_least_important_columns_go_first_and_are_named():
    with laid_out(60):
        assert "not shown" not in table("ad", RANKED)
    with laid_out(45):
        narrow = table("ad", RANKED).splitlines()
    assert narrow[0].split() == ["a", "code", "a", "pair", "its", "other", "some"]
    assert narrow[-2:] == ["not shown: least important; COLUMNS=52 shows", "  them"]
    assert max(map(len, narrow)) <= 45


def test_columns_of_one_rank_go_together():
    with laid_out(30):
        text = table("ad", RANKED)
    assert text.splitlines()[0].split() == ["a", "code", "some"]
    assert " ".join(text.split()).endswith("not shown: least important, a pair, its other; COLUMNS=52 shows them")


@pytest.mark.parametrize("width", [25, 30, 45])
def test_a_further_table_can_have_the_columns_that_do_not_fit(width):
    with laid_out(width, every_column=True):
        text = table("ad", RANKED)
    tables = [part.splitlines() for part in text.split("\n\n")]
    assert "not shown" not in text and len(tables) > 1
    assert all(part[0].split()[:2] == ["a", "code"] for part in tables), "each row is named again"
    assert sum(part[0].count("some") for part in tables) == 1 and text.count("portant") == 1


def test_texts_on_the_left_are_broken_where_nothing_can_go():
    cells = [["one two three four five six seven", "8"], ["nine", "10"]]
    columns: list[Column[list[str]]] = [Column("words", itemgetter(0), "left"), Column("number", itemgetter(1))]
    with laid_out(30):
        lines = table(cells, columns).splitlines()
    assert lines[2:] == ["one two three four       8", "five six seven", "nine                    10"]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_lines_that_are_too_long_go_on_below_their_indent(width):
    long = "  load: " + "closed loop " * 30
    with laid_out(width):
        lines = folded(f"short\n{long}").splitlines()
    assert lines[0] == "short" and max(map(len, lines)) <= width
    assert lines[1].startswith("  load: closed") and {line[:5].rstrip() for line in lines[2:]} <= {"    c", "    l"}


def test_the_width_is_that_of_the_terminal_or_what_columns_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "123")
    assert layout().width == 123
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.__stdout__", None)  # as where there is none
    assert layout().width == NOT_A_TERMINAL
    with laid_out(70):
        assert layout().width == 70


def test_a_command_is_broken_between_words_and_can_be_typed():
    command = shlex.join(["printf", "%s|", "a b c d e f", "it's", "x" * 30, "-k", "one or two"])
    with laid_out(24):
        first, *others = command_lines("to repeat it:", command)
    assert others and all(line.endswith(" \\") for line in [first, *others[:-1]])
    typed = "\n".join([first.removeprefix("to repeat it:"), *others])
    printed = subprocess.run(["sh", "-c", typed], capture_output=True, text=True, check=True).stdout
    assert printed == "a b c d e f|it's|" + "x" * 30 + "|-k|one or two|"
