"""Text of others, which a terminal shall show and not obey."""

from __future__ import annotations

from typing import Any
from unicodedata import category

LAYOUT = "\n\t"  # of messages with several lines
HARMFUL = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control characters, those that turn the direction of text, lone surrogates


def printable(text: str, layout: str = LAYOUT) -> str:
    """The text with each control character written out, ESC as `\\x1b`. layout: those that stay."""
    if text.isprintable():
        return text
    return "".join(
        each.encode("unicode_escape").decode() if category(each) in HARMFUL and each not in layout else each
        for each in text
    )


def printable_value(value: Any, layout: str = LAYOUT) -> Any:
    """A value of JSON with each of its texts, and each name of a field, as `printable` has it."""
    match value:
        case str():
            return printable(value, layout)
        case list():
            return [printable_value(each, layout) for each in value]
        case dict():
            return {printable(name, layout): printable_value(each, layout) for name, each in value.items()}
    return value
