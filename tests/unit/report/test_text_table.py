"""Numbers keep their digits; a table loses no cell in silence and fits its width by the ranks of its columns; broken
lines keep their words, and a broken command is the same for a shell."""

import math
import os
import shlex
from decimal import ROUND_HALF_EVEN, Decimal
from functools import partial
from itertools import pairwise
from operator import itemgetter

import pytest
from hypothesis import given, strategies as st
from sections import difference

from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.report import text_table
from pytest_slmserve.report.text_table import Column, figure, folded, hundredths, laid_out, layout, table, table_parts

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
WORDS = st.text("abcdefgh", min_size=1, max_size=9)
TEXTS = [["one two three four five six seven", "8"], ["nine", "10"]]
NAMED = [("a", "one two three four five"), ("longer", "six")]
BROKEN: list[Column[list[str]]] = [Column("words", itemgetter(0), "left"), Column("number", itemgetter(1))]


@given(st.floats(1e-3, 1e9), st.integers(1, 5))
def test_figure_keeps_given_digits(value, digits):
    least = math.floor(math.log10(float(f"{value:.{digits}g}"))) - digits + 1
    exact = Decimal(value).quantize(Decimal(10) ** max(min(least, 0), -6), ROUND_HALF_EVEN)
    assert Decimal(figure(value, digits).replace(",", "")) == exact


@pytest.mark.parametrize(("shown", "values", "texts"), [
    (partial(figure, digits=3), [None, math.inf, math.nan, 0.0, 1e-9], ["-", "-", "-", "0", "0.000000"]),
    (partial(figure, digits=3), [0.05123, 4.028, 9.996, 65.54, -65.54], ["0.0512", "4.03", "10.0", "65.5", "-65.5"]),
    (partial(figure, digits=4), [511.62, 16772.4, 999.96], ["511.6", "16,772", "1,000"]),
    (partial(figure, digits=1), [1.5], ["2"]),
    (text_table.milliseconds, [0.01234, None], ["12.3", "-"]),
    (text_table.gib, [3 << 29, None], ["1.50", "-"]),
    (text_table.whole, [16772, 0, None], ["16,772", "0", "-"]),
    (hundredths, [None, 0.1234, -0.0001, math.nan, math.inf], ["-", "12.3", "0.0", "-", "-"]),
    (partial(hundredths, signed=True), [0.841, -0.05, -0.0001], ["+84.1", "-5.0", "0.0"]),
    (partial(text_table.counted, 2), ["launch", "host", "loss"], ["2 launches", "2 hosts", "2 losses"]),
    (partial(text_table.counted, what="launch"), [1, 0], ["1 launch", "0 launches"]),
])  # fmt: skip
def test_numbers_have_significant_digits(shown, values, texts):
    assert [shown(value) for value in values] == texts


def test_tables_match_expected_file():
    seen, unknown, half = Interval(2.0, 1.5, 2.5), Interval(2.0), Interval(2.0, 1.0, None)
    assert text_table.between(seen, 1e3) == " (95%: 1,500 to 2,500)" and text_table.between(unknown) == ""
    assert text_table.between(seen, 100, "%") == " (95%: 150 to 250%)"
    assert text_table.interval_text(seen, "{:.2f}".format) == "1.50 to 2.50"
    assert [text_table.interval_text(each, str) for each in (None, unknown, half)] == ["-"] * 3
    assert text_table.changed(Interval(1.023, 1.012, 0.95)) == ("+2.3", "+1.2 to -5.0")
    assert text_table.changed(None) == ("-", "-")
    shown = {}
    for width in (18, 40, 41, 51, 52):
        with laid_out(width):
            shown[f"ranked, {width} columns"] = table("ad", RANKED)
    for width in (25, 30, 45):
        with laid_out(width, every_column=True):
            shown[f"every column, {width} columns"] = table("ad", RANKED)
    for width in (10, 26, 30, 41):
        with laid_out(width):
            shown[f"texts, {width} columns"] = table(TEXTS, BROKEN)
            shown[f"names, {width} columns"] = text_table.named_lines(NAMED)
    heads = ("max_num\n_seqs", "ms/\ntoken", "roof-\nline %", "candidate /\nbaseline")
    shown["names of columns"] = "\n".join(Column(head, str).name for head in heads)
    assert difference("tables", shown) == "" == text_table.named_lines([])


@pytest.mark.parametrize(("rows", "columns", "always", "kept"), [
    ("ab", (NOTHING, LETTER, DASH, SOMETIMES), 0, [LETTER, SOMETIMES]),
    ("a", (NOTHING, LETTER, DASH, SOMETIMES), 0, [LETTER]),
    ("a", (NOTHING, DASH, LETTER, DASH), 1, [NOTHING, LETTER]),
    ("", (LETTER, DASH), 2, [LETTER, DASH]),
])  # fmt: skip
def test_empty_columns_are_left_out(rows, columns, always, kept):
    assert text_table.telling(rows, columns, always) == kept
    assert table(rows, columns, always) == table(rows, kept, len(kept))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(20, 90), st.data())
def test_narrow_table_drops_ranked_columns(ranks, width, data):
    ranks = [0, *ranks]
    rows = [[f"{number}{'x' * data.draw(st.integers(0, 12))}" for number in range(len(ranks))] for _ in range(2)]
    columns = [Column(f"h{i}", itemgetter(i), rank=rank) for i, rank in enumerate(ranks)]
    with laid_out(width):
        head, body, foot = table_parts(rows, columns)
    shown = [column for column in columns if column.head in head[0].split()]
    gone = [column for column in columns if column not in shown]
    needed = sum(max(len(column.head), *(len(column.cell(row)) for row in rows)) + 2 for column in shown) - 2
    assert needed <= width or all(column.rank == 0 for column in shown)
    assert all(each.rank > kept.rank for each in gone for kept in shown)
    assert [lines[0].split() for lines in body] == [[column.cell(row) for column in shown] for row in rows]
    assert all(column.name in " ".join(foot) for column in gone) and bool(foot) == bool(gone)
    with laid_out(width, every_column=True):
        everything = table(rows, columns)
    assert {cell for row in rows for cell in row} <= {*everything.split()} and "COLUMNS=" not in everything


@given(st.lists(WORDS, min_size=1, max_size=40), st.integers(0, 6), st.integers(20, 100))
def test_broken_lines_keep_their_words(words, indent, width):
    with laid_out(width):
        lines = folded(f"{' ' * indent}{' '.join(words)}").split("\n")
        assert folded("a b\nshort") == "a b\nshort"
        flat = text_table.hanging(" ".join(words), 3).split("\n")
    assert max(map(len, [*lines, *flat])) <= width and " ".join(lines).split() == words == " ".join(flat).split()
    assert all(len(line) + 1 + len(after.split()[0]) > width for line, after in pairwise(lines)), "none too early"
    places = [len(line) - len(line.lstrip()) for line in lines]
    assert places == [indent, *[indent + 2] * (len(lines) - 1)]


def test_layout_uses_terminal_width(monkeypatch):
    for columns, width in (("123", 123), ("3", text_table.NARROWEST)):
        monkeypatch.setenv("COLUMNS", columns)
        assert (layout().width, layout().every_column) == (width, False)
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("os.get_terminal_size", lambda *_: os.terminal_size((0, 0)))  # as where there is none
    assert layout().width == text_table.NOT_A_TERMINAL
    with laid_out(70):
        with laid_out(every_column=True):
            assert (layout().width, layout().every_column) == (70, True)
        assert (layout().width, layout().every_column) == (70, False)


@given(st.lists(st.text("ab '\"$", min_size=1, max_size=12), min_size=1, max_size=9), st.integers(20, 60))
def test_broken_command_can_be_typed(words, width):
    with laid_out(width):
        first, *others = lines = text_table.command_lines("to repeat it:", shlex.join(words))
    assert all(line.endswith(" \\") for line in lines[:-1]) and not lines[-1].endswith(" \\")
    typed = "\n".join([first.removeprefix("to repeat it:"), *others]).replace("\\\n", "")  # as a shell joins lines
    assert shlex.split(typed) == words
    longest = max(len(shlex.quote(word)) for word in words)
    assert all(len(line) <= max(width, longest + 4) for line in lines[1:])
