"""A section as text of a terminal, as Markdown that obeys nothing of what others wrote, and as charts."""

from dataclasses import replace

import pytest
from sections import difference

from pytest_slmserve.report import section as of
from pytest_slmserve.report.section import Chart, Details, Legend, Named, Section, Table, Verbatim, in_units
from pytest_slmserve.report.text_table import Column, laid_out

text_of, markdown = of.section_text, of.section_markdown
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


def test_section_formats_match_expected_file():
    shown = {"text": text_of(SHOWN), "Markdown": markdown(SHOWN), "hostile": markdown(HOSTILE)}
    with laid_out(20):
        shown["a narrow legend"] = text_of(Legend("one two three four five", ["six seven eight nine ten"]))
    assert difference("sections", shown) == ""
    assert text_of(Section("a", [Named([])])) == "a"
    known = Chart("b", {"x": 1}), Chart("c", {"x": 2}, group="g"), Chart("d", {"x": 3})
    drawn = Section("", charts=lambda: [Chart("a", {}), *known, Chart("e", None)]).drawn
    assert drawn == {"": [known[0], known[2]], "g": [known[1]]}
    assert Section("").drawn == {}
    columns = [Column("a\nname", str, "left"), *COLUMNS[2:], Column("n", lambda _: "1")]
    with laid_out(20):
        cells = Table(["x" * 30], columns, "T").cells
    assert (cells.caption, cells.heads, cells.numeric) == ("T", ["a name", "n"], [False, True])
    assert cells.rows == [["x" * 30, "1"]]
    spec = {"title": "tokens/s", "data": [{"output_tokens_per_s": 1}]}
    shown = Section("tokens/s", SHOWN.parts, charts=lambda: [Chart("of a token", spec)], name="a token")
    other = in_units(shown, "pair")
    assert "token" not in text_of(other) and text_of(other).count("pair") == text_of(shown).count("token") == 5
    assert in_units(shown, "token") is shown and other.parts[1].rows is shown.parts[1].rows
    own = [in_units(replace(shown, unit=unit), "pair") for unit in ("token", "text")]
    assert [text_of(each).count("pair") for each in own] == [0, 0] and text_of(own[0]) == text_of(shown)
    assert text_of(own[1]) == text_of(in_units(shown, "text"))
    [chart] = other.charts()
    assert (chart.title, chart.spec) == ("of a pair", {"title": "pairs/s", "data": [{"output_tokens_per_s": 1}]})
    before, after = of.Cells("tokens", ["a token"], [["1"]], [True]), of.Cells("texts", ["a text"], [["1"]], [True])
    assert in_units({"x": (before, 3)}, "text") == {"x": (after, 3)}


@pytest.mark.parametrize(("text", "called"), [
    ("most tokens/s 7", "most texts/s 7"),
    ("output tokens/s", "texts/s"),
    ("mJ/token", "mJ/text"),
    ("tokens\n/busy s", "texts\n/busy s"),
    ("7 prompt tokens/s", "7 prompt tokens/s"),
    ("prompt\ntokens/s", "prompt\ntokens/s"),
    ("64 prompt tokens a text", "64 prompt tokens a text"),
    ("7 blocks x 16 tokens; 3 requests of 1,024 tokens", "7 blocks x 16 tokens; 3 requests of 1,024 tokens"),
    ("synthetic token ids", "synthetic token ids"),
    ("energy-per-token-falls-with-load", "energy-per-token-falls-with-load"),
    ("output_tokens_per_s, tokenizer", "output_tokens_per_s, tokenizer"),
])  # fmt: skip
def test_units_rename_outputs_only(text, called):
    assert (of.renamed(text, "text"), of.renamed(text, "token")) == (called, text)
