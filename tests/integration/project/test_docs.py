"""Pages agree with the code: options, files, claims, links, and pages that are written from the code. Nightly tests run
the examples of the pages."""

import inspect
import re
from pathlib import Path

import pytest
from pages import ALL_PAGES, DOCS, PAGES, broken_links, fences, links
from scripts import CHECKOUT, needs_checkout
from shipped import PACKAGE
from written_pages import WRITTEN

from pytest_slmserve.analysis.claims.table import CLAIMS
from pytest_slmserve.options.table import OPTS
from pytest_slmserve.report import sweeps

needs_checkout()
SETUP = "python3 -m venv .venv && .venv/bin/pip install tox && .venv/bin/tox -e"
FOLDERS = r"benchmarks|docs|examples|pytest_slmserve|requirements|studies|tests|\.ci|\.github"
OF_A_RUNNER = ".github/calibration.json"  # who sets one up commits it
TEXTS = {name: page.read_text("utf-8") for name, page in ALL_PAGES.items()}


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_written_page_is_current(path: Path) -> None:
    assert path.read_text("utf-8") == WRITTEN[path](), "python tests/support/written_pages.py writes it"


def test_links_options_files_exist(tmp_path: Path) -> None:
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
    assert named
    assert {pair for pair in named if pair[1] != OF_A_RUNNER and not [*CHECKOUT.glob(pair[1])]} == set()
    named = {(name, flag) for name in PAGES for flag in re.findall(r"--slm-[a-z-]*[a-z]", TEXTS[name])}
    known = {opt.flag for opt in OPTS}
    assert named and {pair for pair in named if pair[1] not in known} == set()


def test_claims_page_lists_each_claim() -> None:
    rows = re.findall(r"^\| (.+) \|$", TEXTS["docs/claims.md"], re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    assert sorted(name for cell in cells for name in re.findall(r"`([^`]+)`", cell[2])) == sorted(CLAIMS)
    assert [cell for cell in cells if len(cell) != 4 or not all(cell)] == []


def test_troubleshooting_quotes_real_messages() -> None:
    """Each message stands in the package, in parts between its names and numbers."""
    source = "".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    source = re.sub(r'\{[^{}]*\}|\\(?=")', "", re.sub(r'"\s*f?"', "", source))
    text = TEXTS["docs/troubleshooting.md"].partition("## The run does not start")[2]
    said = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    parts = {part.strip(" :") for one in said for part in one.split("…")} - {"", "s", "no tests ran"}
    assert len(said) > 20 and sorted(part for part in parts if part not in source) == []


def test_report_columns_are_defined() -> None:
    functions = (sweeps.point_columns, sweeps.sensor_table)
    heads = re.findall(r'(?:Column|share)\("((?:[^"])+)"', "".join(map(inspect.getsource, functions)))
    heads += [column.head for column in (*sweeps.ROWS, *sweeps.STEP)]
    text = " ".join(re.findall(r"^\| ([^|]+) \|", TEXTS["docs/metrics-and-terms.md"], re.MULTILINE))
    names = {head.replace("\\n", "\n").replace("-\n", "").replace("/\n", "/").replace("\n/", "/") for head in heads}
    words = {word for name in names for word in name.split()}
    assert len(names) > 30 and [word for word in words if word not in text] == []


def test_readme_shows_ci_commands() -> None:
    _, _, section = TEXTS["README.md"].partition("\n## From a clone\n")
    blocks = [text for words, text in fences(section.partition("\n## ")[0]) if words == "sh"]
    assert blocks == [f"{SETUP} slm-cpu\n", f"{SETUP} tests\n"]
    assert blocks[-1].strip() in (CHECKOUT / ".ci/run").read_text("utf-8").splitlines()
    example, of_the_tutorial = (
        next(text for words, text in fences(TEXTS[name]) if words.startswith("python "))
        for name in ("README.md", "docs/first-test.md")
    )
    assert example == of_the_tutorial
