"""A section as text."""

from __future__ import annotations

from pytest_slmserve.report.section import Legend, Named, Section, Table, section_text
from pytest_slmserve.report.text_table import Column

COLUMNS = (Column("\nload", str), Column("tokens\n/s", lambda row: f"{1000 * row:,}"), Column("nothing", lambda _: "-"))
SHOWN = Section(
    "opt-125m: PASS",
    [
        "  baseline: vLLM 0.25.0",
        Table([1, 64], COLUMNS, caption="Endpoints"),
        Table([], COLUMNS),
        Named([("output tokens/s", "pass: not worse")]),
        "",
        "what differs:\n  vllm  0.25.0  0.26.0",
        Legend("tokens: of output."),
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
        "what differs:",
        "  vllm  0.25.0  0.26.0",
        "tokens: of output.",
    ]
