"""Functions that escape control characters in text of others, and hide secrets."""

import html
import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable
from itertools import product
from typing import Any
from unicodedata import category

LAYOUT = "\n\t"  # of messages with several lines
HARMFUL = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, changes of text direction, lone surrogates, separators of lines


def printable(text: str, layout: str = LAYOUT) -> str:
    """Return the text with each control character escaped, ESC as `\\x1b`.

    Args:
        layout: control characters that stay.
    """
    if text.isprintable():
        return text
    return "".join(
        each.encode("unicode_escape").decode() if category(each) in HARMFUL and each not in layout else each
        for each in text
    )


def printable_value(value: Any, layout: str = LAYOUT) -> Any:
    """Return a JSON value with `printable` applied to all texts and names."""
    match value:
        case str():
            return printable(value, layout)
        case list():
            return [printable_value(each, layout) for each in value]
        case dict():
            return {printable(name, layout): printable_value(each, layout) for name, each in value.items()}
    return value


HIDDEN = "[hidden]"
SHORTEST = 4  # characters: shorter texts are not secrets, and occur in any sentence


def hidden(text: str, secrets: Iterable[str]) -> str:
    """Return the text without these secrets, plain or encoded for a URL, HTML, JSON, hex or base64."""
    for secret in (each for each in secrets if len(each) >= SHORTEST):
        raw = secret.encode("utf-8", "replace")
        forms = ["".join(map(_spellings, secret)), "[ :]?".join(f"{byte:02x}" for byte in raw)]
        for encode, before in product((b64encode, urlsafe_b64encode), range(3)):
            # Other bytes before and after the secret may share its first and last digits.
            digits = encode(b"\0" * before + raw).decode().rstrip("=")
            last = len(digits) - 1 if (before + len(raw)) % 3 else len(digits)
            if len(own := digits[(0, 2, 3)[before] : last]) >= SHORTEST:
                forms.append(re.escape(own))
        text = re.sub("|".join(forms), HIDDEN, text, flags=re.IGNORECASE)
    return text


def _spellings(character: str) -> str:
    """Return a pattern of one character, plain or escaped, because a server may escape only some."""
    in_url = "".join(f"%{byte:02x}" for byte in character.encode("utf-8", "replace"))
    number = ord(character)
    forms = {character, in_url, html.escape(character), json.dumps(character)[1:-1], f"\\u{number:04x}"}
    forms |= {f"&#{number};", f"&#x{number:x};"} | ({"+"} if character == " " else set())
    return f"(?:{'|'.join(map(re.escape, sorted(forms, key=len, reverse=True)))})"
