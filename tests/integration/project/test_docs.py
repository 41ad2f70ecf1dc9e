"""What the documentation promises: commands, links and options; and the words of all that users read, help and messages
too. test_blocks.py runs the examples.

python tests/test_docs.py      writes docs/glossary.md and the tables of docs/options.md anew
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from scripts import checkout_script, loaded, needs_checkout
from shipped import BENCHMARKS, PACKAGE

from pytest_slmserve.__main__ import parser as command_line
from pytest_slmserve.analysis.claims.table import CLAIMS
from pytest_slmserve.options.table import OPTS, Opt
from pytest_slmserve.plan.cases import DEFAULTS
from pytest_slmserve.report.page.writer import GLOSSARY

CHECKOUT = Path(__file__).parents[3]
README = CHECKOUT / "README.md"
DOCS = CHECKOUT / "docs"
EXAMPLES = CHECKOUT / "examples/README.md"
OPTIONS = DOCS / "options.md"
TERMS = DOCS / "glossary.md"
PAGES = {p.relative_to(CHECKOUT).as_posix(): p for p in (README, EXAMPLES, *sorted(DOCS.glob("*.md")))}
ALL_PAGES = PAGES | {
    p.relative_to(CHECKOUT).as_posix(): p for p in sorted([*CHECKOUT.glob("*.md"), *CHECKOUT.glob(".github/*.md")])
}
WANTED = (
    "README.md",
    *(f"docs/{n}.md" for n in ("architecture", "gpu-runner", "index", "method", "options", "records")),
)
REFERENCE = ("docs/claims.md", "docs/options.md", "docs/results.md")
NEVER = (
    (r"(?<![\w-])doors?(?![\w-])", "interface"),
    (r"\bcells\b", "case"),
    (r"\binterim looks?\b|\blooks? after \d", "interim analysis"),
    (r"\bforeign (?:records|results)\b", "external results"),
    (r"\bstarts (?:spread|together)=", "ramp-up"),
    (r"\b(?:sound|standing) (?:measurement|window|point)s?\b|\btrusted\b", "valid"),
    (r"\bwhat is asked\b", "case"),
    (r"\bstart of a turn\b", "launch"),
    (r"\bfound from\b", "minimum detectable change"),
    (r"\bpriced?\b of (?:a|the) (?:plan|run)", "estimated time"),
    (r"\bmood\b|\bruler\b", "plain words"),
)
ADDRESS = re.compile(r"https://[\w-]+(\.[\w-]+)+(:\d+)?(/[\w./~%?=&#+-]*)?")
FOLDERS = (
    "benchmarks",
    "docs",
    "examples",
    "pytest_slmserve",
    "requirements",
    "studies",
    "tests",
    r"\.ci",
    r"\.github",
)
OF_A_RUNNER = ".github/calibration.json"  # who sets one up commits it
WORDS_OF_PROMPTS = "time year people "  # how the words begin that prompts are made of
SETUP = "python3 -m venv .venv && .venv/bin/pip install tox && .venv/bin/tox -e"

needs_checkout()


# The tables of docs/options.md, from the code

TOP = """# Options

Each option may be given on the command line, in the environment, or in the ini file (`pytest.ini`, or
`[tool.pytest.ini_options]` in `pyproject.toml`), in this order of precedence; the header of a run says which it took
from where. Options that few people need have no place of their own on the command line: `-o slm_seed=7` sets one there.
In the environment and the ini file a flag is 1 or 0, and several values are separated by spaces. In TOML
(`[tool.pytest]` of pytest 9 too) a flag may be `true` or `false`, and several values a list.

A mode (`--slm-gpu`, `--slm-cpu`, `--slm-simulate` or `--slm-endpoint`) is what makes anything run: without one, what
measures is skipped. Modes exclude each other.
"""
WORDS = """# Glossary

The terms of tables, pages and messages. On [the page](page.md) of a run each term shows its meaning where it stands.
"""
PER_BACKEND = '\nWhere the default is "by mode":\n'


def default_of(opt: Opt) -> str:
    if opt.default is None:
        return "by mode" if "by mode" in opt.help else "-"
    return "off" if opt.is_flag or opt.bare else f"`{opt.default_text}`" if opt.default_text else "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def option_rows() -> Iterator[tuple[str, ...]]:
    for opt in OPTS:
        flag = f"{opt.flag} {opt.metavar}" if opt.metavar else opt.flag
        yield (
            "ini file only" if opt.ini_only else f"`{flag}`",
            f"`SLM_{opt.name.upper()}`",
            f"`slm_{opt.name}`",
            default_of(opt),
            opt.help,
        )


def mode_rows() -> Iterator[tuple[str, ...]]:
    for platform, defaults in DEFAULTS.items():
        prompt, output = defaults.lengths
        end = "" if platform == "remote" else " or the KV capacity"
        loads = f"1, 2, 4 … to {defaults.largest}{end}"
        mode = {"cuda": "gpu", "simulated": "simulate", "remote": "endpoint"}.get(platform, platform)
        models = ", ".join(defaults.models) or "to be named"
        yield f"`--slm-{mode}`", models, loads, f"{prompt}", f"{output}", f"{defaults.window_s:g} s"


def options_page() -> str:
    """What docs/options.md should be."""
    columns = ("option", "environment", "ini", "default", "meaning")
    given = ("models", "concurrency", "input-len", "output-len", "window")
    modes = ("mode", *(f"`--slm-{name}`" for name in given))
    return f"{TOP}\n{table(columns, list(option_rows()))}{PER_BACKEND}\n{table(modes, list(mode_rows()))}"


def glossary_page() -> str:
    """What docs/glossary.md should be: the terms in the order of the alphabet."""
    terms = [(", ".join(forms), meaning) for forms, meaning in GLOSSARY.items()]
    return f"{WORDS}\n{table(('term', 'meaning'), sorted(terms, key=lambda term: term[0].lower()))}"


# Reading Markdown


def fences(text: str) -> list[tuple[str, str]]:
    """Pairs of the words after the opening fence, and what stands in the block."""
    found = re.findall(r"^( *)```([^\n]*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [(words, textwrap.dedent(block)) for _, words, block in found]


def unfenced(text: str) -> str:
    """Text without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """Targets of links and pictures, those of other sites left out."""
    return [t for t in re.findall(r"\]\(([^)\s]+)\)", unfenced(text)) if not re.match(r"[a-z]+:", t)]


def anchors(text: str) -> set[str]:
    """Fragments that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", unfenced(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, root: Path = CHECKOUT) -> list[str]:
    """Links to what is not there, not below `root`, or no heading of the page."""
    broken = []
    for target in links(page.read_text("utf-8")):
        path, _, fragment = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        inside = there.is_relative_to(root.resolve())
        if not (inside and there.exists() and (not fragment or fragment in anchors(there.read_text("utf-8")))):
            broken.append(target)
    return broken


def sentences(text: str) -> list[int]:
    """Words of each sentence. Blocks, tables, headings and pictures are left out; inline code is one word."""
    lines = "\n".join(line.strip() for line in unfenced(text).split("\n") if not re.match(r"    \S|\||#|!|\(", line))
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "Code", lines))
    parts = re.split(r"(?<=[.!?:;])\**\s+|\n\n+|\n(?=[-*] |\d+\. )", re.sub(r" \([^()]*\)", "", plain))
    return [words for part in parts if (words := len(part.split())) > 2]


# What users read elsewhere


def help_texts(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Pairs of where it stands and a text, of this parser and those of its commands."""
    yield parser.prog, f"{parser.description or ''} {parser.epilog or ''}"
    for action in parser._actions:
        yield f"{parser.prog} {' '.join(action.option_strings) or action.dest}", action.help or ""
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from help_texts(command)


def messages(node: ast.AST) -> Iterator[str]:
    """Texts of two words or more; what an f-string puts in is one word. Docstrings are none."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return
        case ast.Constant(value=str(text)):
            pass
        case ast.JoinedStr(values=parts):
            text = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from messages(child)
            return
    if " " in text.strip():
        yield text


HELP = [*help_texts(command_line()), *((opt.flag, opt.help) for opt in OPTS)]
MESSAGES = [
    (path.name, text)
    for path in sorted({*PACKAGE.rglob("*.py"), *BENCHMARKS.glob("test_*.py")})
    for text in messages(ast.parse(path.read_text("utf-8")))
    if not text.startswith(WORDS_OF_PROMPTS)
]


def runnable(page: Path) -> list[str]:
    """Its Python blocks that are marked as runnable: ```python runs"""
    return [text for words, text in fences(page.read_text("utf-8")) if words == "python runs"]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_is_short_and_its_sentences_too(name: str) -> None:
    """At most 1,500 words but in reference, 18 words a sentence in the mean, and one sentence of ten above 25."""
    text = PAGES[name].read_text("utf-8")
    found = sentences(text)
    assert len(text.split()) <= 1500 or name in REFERENCE
    assert sum(found) <= 18 * len(found)
    assert sum(words > 25 for words in found) <= max(1, len(found) / 10)


@pytest.mark.parametrize(("pattern", "instead"), NEVER)
def test_all_that_users_read_has_the_words_of_the_field(pattern: str, instead: str) -> None:
    pages = [(name, re.sub(r"`[^`]+`", "", page.read_text("utf-8"))) for name, page in PAGES.items()]
    texts = [*pages, *HELP, *MESSAGES]
    assert [(where, text) for where, text in texts if re.search(pattern, text, re.IGNORECASE)] == [], instead


def test_no_sentence_of_the_help_or_a_message_is_long() -> None:
    assert {"slmserve compare --replace", "--slm-gate"} <= dict(HELP).keys() and len(MESSAGES) > 1000
    told = [pair for pair in HELP + MESSAGES if pair[0] != "slmserve"]  # whose help is a table of commands
    assert [(where, text) for where, text in told if max(sentences(text), default=0) > 25] == []


def test_messages_are_found_in_code() -> None:
    code = """
"No docstring, please."
def f(n):
    "No docstring, either."
    raise ValueError(f"{n} of {'all':>3} are there", "a hint" " in two parts", "word")
"""
    assert list(messages(ast.parse(code))) == ["… of … are there", "a hint in two parts"]


def test_sentences_are_counted_as_a_reader_would() -> None:
    text = "# A heading of some words\n\nOne `a b c` two (not these) three. A [link of four](page.md) ends.\n\n"
    text += "    no code\n\n| no | table |\n\n- one item here\n- another item there\n"
    assert sentences(text) == [4, 5, 4, 4]


def test_the_pages_are_there() -> None:
    assert set(WANTED) <= PAGES.keys()


def test_the_first_block_of_the_readme_is_two_commands() -> None:
    words, block = fences(README.read_text("utf-8"))[0]
    assert words in ("", "console", "sh")
    assert block == f"{SETUP} slm-cpu\n{SETUP} tests\n"


@pytest.mark.parametrize("name", ALL_PAGES)
def test_every_link_leads_somewhere(name: str) -> None:
    assert broken_links(ALL_PAGES[name]) == []


@pytest.mark.parametrize("name", ALL_PAGES)
def test_every_link_to_another_site_is_well_formed(name: str) -> None:
    """Whether it answers, no test asks: tests need no network."""
    text = unfenced(ALL_PAGES[name].read_text("utf-8"))
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert len(targets) == text.count("](")
    assert [target for target in targets if ":" in target and not ADDRESS.fullmatch(target)] == []
    assert [
        paper for paper in re.findall(r"arXiv[: ]([\w.]*\w)", text) if not re.fullmatch(r"\d{4}\.\d{5}", paper)
    ] == []
    assert [pair for pair in re.findall(r"\[arXiv:([\d.]+)\]\(\S+/([\d.]+)\)", text) if len(set(pair)) > 1] == []


@pytest.mark.parametrize("name", ALL_PAGES)
def test_every_file_of_this_repository_that_is_named_exists(name: str) -> None:
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[a-z0-9_./*-]+)`", ALL_PAGES[name].read_text("utf-8"))
    assert [path for path in named if path != OF_A_RUNNER and not [*CHECKOUT.glob(path)]] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading: here\n[d](page.md#a-heading-here) [a](nowhere.md) [b](https://example.org/x) ![c](#none)\n"
        "[e](../outside.md)\n```\n[f](in-code.md)\n```\n"
    )
    (tmp_path.parent / "outside.md").touch()
    assert broken_links(page, tmp_path) == ["nowhere.md", "#none", "../outside.md"]


def test_every_page_is_on_the_map() -> None:
    mapped = {(DOCS / target).resolve() for target in links((DOCS / "index.md").read_text("utf-8"))}
    assert {page.resolve() for page in PAGES.values()} - {(DOCS / "index.md").resolve()} <= mapped


@pytest.mark.parametrize("name", PAGES)
def test_every_option_that_is_named_exists(name: str) -> None:
    named = set(re.findall(r"--slm-[a-z-]*[a-z]", PAGES[name].read_text("utf-8")))
    assert named - {opt.flag for opt in OPTS} == set()


def test_the_options_page_is_the_table_of_the_code() -> None:
    page = OPTIONS.read_text("utf-8") if OPTIONS.is_file() else ""
    assert page == options_page(), f"python tests/test_docs.py writes it; it should be\n\n{options_page()}"


def test_the_page_of_claims_has_each_claim_once() -> None:
    page, _, _ = (DOCS / "claims.md").read_text("utf-8").partition("## Today")
    rows = re.findall(r"^\| (.+) \|$", page, re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    named = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell[2])]
    assert sorted(named) == sorted(CLAIMS)
    assert not [cell for cell in cells if len(cell) != 4 or not all(cell)]


def test_the_verdicts_of_today_are_those_of_the_archives() -> None:
    with loaded(checkout_script("studies/claims_today.py")) as script:
        written = script.page()
    assert written in (DOCS / "claims.md").read_text("utf-8"), "python studies/claims_today.py writes it"


def test_the_readme_and_the_guide_begin_with_the_same_example_of_five_lines() -> None:
    first, again = (runnable(page)[0] for page in (README, DOCS / "writing-tests.md"))
    assert first == again
    assert len([line for line in first.splitlines() if line]) <= 5


def test_the_glossary_is_that_of_the_code() -> None:
    assert TERMS.read_text("utf-8") == glossary_page(), "python tests/test_docs.py writes it"


if __name__ == "__main__":
    TERMS.write_text(glossary_page(), "utf-8")
    OPTIONS.write_text(options_page(), "utf-8")
