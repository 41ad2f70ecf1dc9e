"""The pages of the documentation, and how to read Markdown."""

import re
import textwrap
from pathlib import Path

from scripts import CHECKOUT

README = CHECKOUT / "README.md"
DOCS = CHECKOUT / "docs"
PAGES = {
    path.relative_to(CHECKOUT).as_posix(): path
    for path in (README, CHECKOUT / "examples/README.md", *sorted(DOCS.glob("*.md")))
}
ALL_PAGES = PAGES | {
    path.relative_to(CHECKOUT).as_posix(): path
    for path in sorted([*CHECKOUT.glob("*.md"), *CHECKOUT.glob(".github/*.md")])
}


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


def broken_links(page: Path, root: Path = CHECKOUT) -> list[str]:
    """Links to what is not there, not below `root`, or no heading of the page, as GitHub makes fragments of them."""
    broken = []
    for target in links(page.read_text("utf-8")):
        path, _, fragment = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        found = there.is_relative_to(root.resolve()) and there.exists()
        if found and fragment:
            titles = re.findall(r"^#+ (.+)$", unfenced(there.read_text("utf-8")), re.MULTILINE)
            found = fragment in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        broken += [] if found else [target]
    return broken
