"""A section as text of a terminal, as Markdown that obeys nothing of what others wrote, and as charts."""

from sections import difference

from pytest_slmserve.report.section import Chart, Details, Legend, Named, Section, Table, Verbatim
from pytest_slmserve.report.section import section_markdown as markdown
from pytest_slmserve.report.section import section_text as text_of
from pytest_slmserve.report.text_table import Column, laid_out

COLUMNS = (Column("\nload", str), Column("tokens\n/s", lambda row: f"{1000 * row:,}"), Column("nothing", lambda _: "-"))
SHOWN = Section("opt-125m: PASS", [
    "  baseline: vLLM 0.25.0", Table([1, 64], COLUMNS, caption="Endpoints"), Table([], COLUMNS),
    Named([("output tokens/s", "pass: not worse")]), "", Verbatim("pytest --slm-gpu", "sh"), "next: a new gate",
    Details("How to read it"), Table([2], COLUMNS[:2], heading="half of it:"),
    Legend("tokens: of output.", ["note: measured once"]), Details("Why"), "a reason",
])  # fmt: skip
HOSTILE = Section("a|b", [
    Table(["<b>|[x](y)"], (Column("model", str, "left"),)), "two\nlines\x1b of `code`", Verbatim("```\n# no heading"),
])  # fmt: skip


def test_a_section_is_text_and_markdown_that_obeys_nothing_of_what_others_wrote():
    shown = {"text": text_of(SHOWN), "Markdown": markdown(SHOWN), "hostile": markdown(HOSTILE)}
    with laid_out(20):
        shown["a narrow legend"] = text_of(Legend("one two three four five", ["six seven eight nine ten"]))
    assert difference("sections", shown) == ""
    assert text_of(Section("a", [Named([])])) == "a"


def test_charts_of_which_something_is_known_are_in_their_groups():
    known = Chart("b", {"x": 1}), Chart("c", {"x": 2}, group="g"), Chart("d", {"x": 3})
    drawn = Section("", charts=lambda: [Chart("a", {}), *known, Chart("e", None)]).drawn
    assert drawn == {"": [known[0], known[2]], "g": [known[1]]}
    assert Section("").drawn == {}


def test_cells_of_a_table_are_those_that_tell_something_however_wide():
    columns = [Column("a\nname", str, "left"), *COLUMNS[2:], Column("n", lambda _: "1")]
    with laid_out(20):
        cells = Table(["x" * 30], columns, "T").cells
    assert (cells.caption, cells.heads, cells.numeric) == ("T", ["a name", "n"], [False, True])
    assert cells.rows == [["x" * 30, "1"]]
