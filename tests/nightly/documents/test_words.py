"""The words of all that users read, pages, help and messages: short sentences, the terms of the field, addresses that
are well formed; and the verdicts of today, which a page shows."""

import argparse
import ast
import re
from collections.abc import Iterator

import pytest
from pages import ALL_PAGES, PAGES, unfenced
from scripts import CHECKOUT, checkout_script, loaded, needs_checkout
from shipped import BENCHMARKS, PACKAGE

from pytest_slmserve.__main__ import parser as command_line
from pytest_slmserve.options.table import OPTS

needs_checkout()
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
WORDS_OF_PROMPTS = "time year people "  # how the words begin that prompts are made of


def sentences(text: str) -> list[int]:
    """Words of each sentence. Blocks, tables, headings and pictures are left out; inline code is one word."""
    lines = "\n".join(line.strip() for line in unfenced(text).split("\n") if not re.match(r"    \S|\||#|!|\(", line))
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "Code", lines))
    parts = re.split(r"(?<=[.!?:;])\**\s+|\n\n+|\n(?=[-*] |\d+\. )", re.sub(r" \([^()]*\)", "", plain))
    return [words for part in parts if (words := len(part.split())) > 2]


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


@pytest.fixture(scope="module")
def told() -> list[tuple[str, str]]:
    """Help and messages, with where each stands."""
    found = [*help_texts(command_line()), *((opt.flag, opt.help) for opt in OPTS)]
    assert {"slmserve compare --replace", "--slm-gate"} <= dict(found).keys()
    for path in sorted({*PACKAGE.rglob("*.py"), *BENCHMARKS.glob("test_*.py")}):
        texts = messages(ast.parse(path.read_text("utf-8")))
        found += [(path.name, text) for text in texts if not text.startswith(WORDS_OF_PROMPTS)]
    assert len(found) > 1500
    return found


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_page_is_short_and_its_sentences_too(name: str) -> None:
    """At most 1,500 words but in reference, 18 words a sentence in the mean, and one sentence of ten above 25."""
    text = PAGES[name].read_text("utf-8")
    found = sentences(text)
    assert len(text.split()) <= 1500 or name in REFERENCE
    assert sum(found) <= 18 * len(found)
    assert sum(words > 25 for words in found) <= max(1, len(found) / 10)


@pytest.mark.parametrize(("pattern", "instead"), NEVER)
def test_all_that_users_read_has_the_words_of_the_field(pattern: str, instead: str, told) -> None:
    pages = [(name, re.sub(r"`[^`]+`", "", page.read_text("utf-8"))) for name, page in PAGES.items()]
    assert [(where, text) for where, text in [*pages, *told] if re.search(pattern, text, re.IGNORECASE)] == [], instead


def test_no_sentence_of_the_help_or_a_message_is_long(told) -> None:
    long = [(where, text) for where, text in told if max(sentences(text), default=0) > 25]
    assert [pair for pair in long if pair[0] != "slmserve"] == [], "but of the table of commands"


def test_messages_are_found_and_sentences_counted_as_a_reader_would() -> None:
    code = "def f(n):\n 'No docstring.'\n raise ValueError(f'{n} of {1:>3} are there', 'a hint' ' in two', 'word')"
    assert list(messages(ast.parse(code))) == ["… of … are there", "a hint in two"]
    text = "# A heading of some words\n\nOne `a b c` two (not these) three. A [link of four](page.md) ends.\n\n"
    text += "    no code\n\n| no | table |\n\n- one item here\n- another item there\n"
    assert sentences(text) == [4, 5, 4, 4]


@pytest.mark.parametrize("name", ALL_PAGES)
def test_every_link_to_another_site_is_well_formed(name: str) -> None:
    """Whether it answers, no test asks: tests need no network."""
    text = unfenced(ALL_PAGES[name].read_text("utf-8"))
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert len(targets) == text.count("](")
    assert [target for target in targets if ":" in target and not ADDRESS.fullmatch(target)] == []
    papers = re.findall(r"arXiv[: ]([\w.]*\w)", text)
    assert [paper for paper in papers if not re.fullmatch(r"\d{4}\.\d{5}", paper)] == []
    assert [pair for pair in re.findall(r"\[arXiv:([\d.]+)\]\(\S+/([\d.]+)\)", text) if len(set(pair)) > 1] == []


def test_the_verdicts_of_today_are_those_of_the_archives() -> None:
    with loaded(checkout_script("studies/claims_today.py")) as script:
        written = script.page()
    assert written in (CHECKOUT / "docs/claims.md").read_text("utf-8"), "python studies/claims_today.py writes it"
