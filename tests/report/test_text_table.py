"""Tables of rows by their columns."""

from __future__ import annotations

from pytest_slmserve.report.text_table import Column, table, telling

LETTER: Column[str] = Column("a\nletter", lambda row: row, "left")
CODE: Column[str] = Column("code", lambda row: str(ord(row)))
NOTHING: Column[str] = Column("nothing", lambda row: "")
DASH: Column[str] = Column("dash", lambda row: "-")
SOMETIMES: Column[str] = Column("b?", lambda row: "*" if row == "b" else "-", "center")


def test_cells_stand_below_their_headings_each_on_its_side():
    assert table("ad", (LETTER, CODE)).splitlines() == [
        "a           code",
        "letter",
        "--------  ------",
        "a             97",
        "d            100",
    ]


def test_columns_that_tell_nothing_are_left_out():
    columns = (NOTHING, LETTER, DASH, SOMETIMES)
    assert telling("ab", columns) == [LETTER, SOMETIMES] and telling("a", columns) == [LETTER]
    assert table("ab", columns) == table("ab", (LETTER, SOMETIMES))


def test_the_first_columns_can_be_kept_in_any_case():
    columns = (NOTHING, DASH, LETTER, DASH)
    assert telling("a", columns, always=1) == [NOTHING, LETTER]
    assert telling("", columns, always=len(columns)) == list(columns)
    assert table("", (LETTER, DASH), always=2).splitlines()[0].split() == ["a", "dash"]
