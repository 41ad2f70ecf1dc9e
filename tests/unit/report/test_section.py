"""A section as text of a terminal, as Markdown that obeys nothing of what others wrote, and as charts."""

from __future__ import annotations

from pytest_slmserve.report.section import (
    Chart,
    Details,
    Legend,
    Named,
    Section,
    Table,
    Verbatim,
    section_markdown,
    section_text,
)
from pytest_slmserve.report.text_table import Column, laid_out

COLUMNS = (Column("\nload", str), Column("tokens\n/s", lambda row: f"{1000 * row:,}"), Column("nothing", lambda _: "-"))
SHOWN = Section(
    "opt-125m: PASS",
    [
        "  baseline: vLLM 0.25.0",
        Table([1, 64], COLUMNS, caption="Endpoints"),
        Table([], COLUMNS),
        Named([("output tokens/s", "pass: not worse")]),
        "",
        Verbatim("pytest --slm-gpu", "sh"),
        "next: a new gate",
        Details("How to read it"),
        Table([2], COLUMNS[:2], heading="half of it:"),
        Legend("tokens: of output.", ["note: measured once"]),
        Details("Why"),
        "a reason",
    ],
)


def test_a_section_is_text_with_its_tables_below_empty_lines():
    assert section_text(SHOWN).split("\n") == [
        "opt-125m: PASS",
        "  baseline: vLLM 0.25.0",
        "",
        "      tokens",
        "load      /s",
        "----  ------",
        "   1   1,000",
        "  64  64,000",
        "",
        "output tokens/s  pass: not worse",
        "",
        "pytest --slm-gpu",
        "next: a new gate",
        "",
        "half of it:",
        "      tokens",
        "load      /s",
        "----  ------",
        "   2   2,000",
        "tokens: of output.",
        "note: measured once",
        "a reason",
    ]
    assert section_text(Section("a", [Named([])])) == "a"


def test_a_legend_has_its_notes_indented():
    with laid_out(20):
        lines = section_text(Legend("one two three four five", ["six seven eight nine ten"])).split("\n")
    assert lines == ["one two three four", "five", "six seven eight nine", "  ten"]


def test_a_section_is_markdown_with_lists_and_what_explains_it_is_folded():
    assert (
        section_markdown(SHOWN)
        == """### opt-125m: PASS

- baseline: vLLM 0.25.0

| load | tokens /s |
| ---: | ---: |
| 1 | 1,000 |
| 64 | 64,000 |

- output tokens/s: pass: not worse

```sh
pytest --slm-gpu
```

- next: a new gate

<details><summary>How to read it</summary>

half of it:

| load | tokens /s |
| ---: | ---: |
| 2 | 2,000 |

tokens: of output.

- note: measured once

</details>

<details><summary>Why</summary>

- a reason

</details>
"""
    )


def test_markdown_of_a_section_shows_what_others_wrote_and_obeys_nothing_of_it():
    cells = (Column("model", str, "left"),)
    shown = Section("a|b", [Table(["<b>|[x](y)"], cells), "two\nlines\x1b of `code`", Verbatim("```\n# no heading")])
    assert section_markdown(shown).split("\n") == [
        r"### a\|b",
        "",
        "| model |",
        "| --- |",
        r"| \<b>\|\[x\](y) |",
        "",
        r"- two lines\\x1b of \`code\`",
        "",
        "````text",
        "```",
        "# no heading",
        "````",
        "",
    ]


def test_charts_of_which_something_is_known_are_in_their_groups():
    drawn = [
        Chart("a", {}),
        Chart("b", {"x": 1}),
        Chart("c", {"x": 2}, group="g"),
        Chart("d", {"x": 3}),
        Chart("e", None),
    ]
    assert [
        (name, [each.title for each in group]) for name, group in Section("", charts=lambda: drawn).drawn.items()
    ] == [
        ("", ["b", "d"]),
        ("g", ["c"]),
    ]
    assert Section("").drawn == {}


def test_cells_of_a_table_are_those_that_tell_something_however_wide():
    with laid_out(20):
        cells = Table(["x" * 30], [Column("a\nname", str, "left"), *COLUMNS[2:], Column("n", lambda _: "1")], "T").cells
    assert (cells.caption, cells.heads, cells.rows, cells.numeric) == (
        "T",
        ["a name", "n"],
        [["x" * 30, "1"]],
        [False, True],
    )
