"""Secrets: the names and values that look like one, and texts without those that are known."""

from __future__ import annotations

import html
import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable, Iterator

# How names end that hold a secret: of a URL's parameters, a body's fields and variables. `max_tokens` is none.
NAMES = re.compile(
    r"(key|token|secret|passw(or)?d|passphrase|credentials?|signature|bearer|authorization"
    r"|(^|[^a-z])(pass|pwd|pw|auth|sig|code))$",
    re.IGNORECASE,
)
# How keys begin that somebody has issued: OpenAI's, Hugging Face's, GitHub's, GitLab's, Slack's, AWS's, and JWTs.
VALUES = re.compile(r"\b(sk-|hf_|gh[opsur]_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)[\w-]{8,}")
HIDDEN = "[hidden]"
SHORTEST = 4  # shorter ones are no secrets, and parts of any sentence


def names_secret(name: str) -> bool:
    """Report whether what has this name is a secret."""
    return bool(NAMES.search(name))


def holds_secret(text: str) -> bool:
    """Report whether the text holds what looks like a key that somebody has issued."""
    return bool(VALUES.search(text))


def hidden(text: str, secrets: Iterable[str]) -> str:
    """The text without these secrets, plain or as a server may encode them: in a URL, in HTML, JSON, hex and base64."""
    for secret in secrets:
        if len(secret) >= SHORTEST:
            text = re.sub("|".join(_forms(secret)), HIDDEN, text, flags=re.IGNORECASE)
    return text


def _forms(secret: str) -> Iterator[str]:
    """Patterns of what a secret looks like."""
    yield "".join(map(_spellings, secret))
    raw = secret.encode("utf-8", "replace")
    yield "[ :]?".join(f"{byte:02x}" for byte in raw)
    for encode in (b64encode, urlsafe_b64encode):
        for before in range(3):  # bytes before it, of which some share its first digit, as others share its last
            digits = encode(b"\0" * before + raw).decode().rstrip("=")
            last = len(digits) - 1 if (before + len(raw)) % 3 else len(digits)
            if len(own := digits[(0, 2, 3)[before] : last]) >= SHORTEST:
                yield re.escape(own)


def _spellings(character: str) -> str:
    """A pattern of one character: itself, or as HTML, JSON or a URL has it: a server may write only some so."""
    in_url = "".join(f"%{byte:02x}" for byte in character.encode("utf-8", "replace"))
    number = ord(character)
    forms = {character, in_url, html.escape(character), json.dumps(character)[1:-1], f"\\u{number:04x}"}
    forms |= {f"&#{number};", f"&#x{number:x};"} | ({"+"} if character == " " else set())
    return f"(?:{'|'.join(map(re.escape, sorted(forms, key=len, reverse=True)))})"
