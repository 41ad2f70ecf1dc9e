"""What pages promise about the code: options, files, claims, tables and the screen that the README shows. Links within
the site are its builder's matter; nightly tests carry the pages out, and count the words of their sentences."""

import re
from pathlib import Path

import pytest
from pages import ALL_PAGES, DOCS, PAGES, broken_links, fences, links
from scripts import CHECKOUT, needs_checkout
from written_pages import WRITTEN

from pytest_slmserve.analysis.claims.table import CLAIMS
from pytest_slmserve.options.table import OPTS

needs_checkout()
FOLDERS = r"benchmarks|docs|examples|pytest_slmserve|requirements|studies|tests|\.ci|\.github"
OF_A_RUNNER = ".github/calibration.json"  # who sets one up commits it
SETUP = "python3 -m venv .venv && .venv/bin/pip install tox && .venv/bin/tox -e"
TEXTS = {name: page.read_text("utf-8") for name, page in ALL_PAGES.items()}


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_a_page_that_is_written_from_the_code_is_that_of_the_code(path: Path) -> None:
    assert path.read_text("utf-8") == WRITTEN[path](), "python tests/support/written_pages.py writes it"


def test_links_lead_somewhere_every_page_is_on_the_map_and_what_is_named_exists(tmp_path: Path) -> None:
    assert {name: found for name, page in ALL_PAGES.items() if (found := broken_links(page))} == {}
    mapped = {(DOCS / target).resolve() for target in links(TEXTS["docs/index.md"])}
    assert {page.resolve() for page in PAGES.values()} - {(DOCS / "index.md").resolve()} <= mapped
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading: here\n[d](page.md#a-heading-here) [a](nowhere.md) [b](https://example.org/x) ![c](#none)\n"
        "[e](../outside.md)\n```\n[f](in-code.md)\n```\n"
    )
    (tmp_path.parent / "outside.md").touch()
    assert broken_links(page, tmp_path) == ["nowhere.md", "#none", "../outside.md"]
    path = rf"`((?:{FOLDERS})/[a-z0-9_./*-]+)`"
    named = {(name, found) for name, text in TEXTS.items() for found in re.findall(path, text)}
    assert len(named) > 30
    assert {pair for pair in named if pair[1] != OF_A_RUNNER and not [*CHECKOUT.glob(pair[1])]} == set()
    named = {(name, flag) for name in PAGES for flag in re.findall(r"--slm-[a-z-]*[a-z]", TEXTS[name])}
    known = {opt.flag for opt in OPTS}
    assert len(named) > 100 and {pair for pair in named if pair[1] not in known} == set()


def test_the_page_of_claims_has_each_once_and_the_readme_begins_with_commands_of_ci_and_a_short_example() -> None:
    rows = re.findall(r"^\| (.+) \|$", TEXTS["docs/claims.md"].partition("## Today")[0], re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    assert sorted(name for cell in cells for name in re.findall(r"`([^`]+)`", cell[2])) == sorted(CLAIMS)
    assert [cell for cell in cells if len(cell) != 4 or not all(cell)] == []
    words, block = fences(TEXTS["README.md"])[0]
    assert words in ("", "console", "sh") and block == f"{SETUP} slm-cpu\n{SETUP} tests\n"
    assert block.splitlines()[-1] in (CHECKOUT / ".ci/run").read_text("utf-8").splitlines()
    example, of_the_guide = (
        next(text for words, text in fences(TEXTS[name]) if words == "python runs")
        for name in ("README.md", "docs/write-tests.md")
    )
    assert example == of_the_guide and len([line for line in example.splitlines() if line]) <= 5
