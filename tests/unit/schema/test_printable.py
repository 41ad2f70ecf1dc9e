"""Text of others: a terminal shows it, and does not obey; no secret is left in it, however a server writes it."""

import html
import json
from base64 import b64encode, urlsafe_b64encode
from itertools import product
from unicodedata import category
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, strategies as st

from pytest_slmserve.schema.printable import HIDDEN, hidden, printable, printable_value

OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
KEY = 'sk/FAULT+9f8e "7d6c"&5b4a'
RAW = KEY.encode()
ENCODED = [
    KEY, KEY.upper(), quote(KEY, ""), quote_plus(KEY), "".join(f"%{byte:02X}" for byte in RAW), html.escape(KEY),
    "".join(f"&#{ord(c)};" for c in KEY), "".join(f"&#x{ord(c):X};" for c in KEY),
    "".join(f"\\u{ord(c):04x}" for c in KEY), RAW.hex(), RAW.hex().upper(), RAW.hex(" "), RAW.hex(":"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "shown"), [
    ("\x1b[2J\x1b]0;pwned\x07", r"\x1b[2J\x1b]0;pwned\x07"), ("a\rb\bc\x7f", r"a\rb\x08c\x7f"),
    ("\x9b31m", r"\x9b31m"),  # one character that begins what ESC [ begins
    ("\u202egnp", r"\u202egnp"),  # turns the direction of what follows
    ("\u2028\ud800", r"\u2028\ud800"), ("naïve 模型 ±3%\n\tnext", "naïve 模型 ±3%\n\tnext"),
    ("non-breaking\u00a0space", "non-breaking\u00a0space"),
])  # fmt: skip
def test_control_characters_are_escaped(text, shown):
    assert printable(text) == printable_value(text) == shown


@given(st.text(), st.sampled_from(["", "\n\t", "\x1b"]))
def test_printable_changes_only_control_characters(text, layout):
    shown = printable(text, layout)
    obeyed = [c for c in text if category(c) in OBEYED and c not in layout]
    assert not [c for c in shown if category(c) in OBEYED and c not in layout]
    assert printable(shown, layout) == shown
    assert len(shown) > len(text) if obeyed else shown == text
    for how, written in (({}, "\n"), ({"layout": ""}, r"\n"), ({"layout": "\n"}, "\n")):
        value = {"a\x07": ["\x1b", {"b\n": "\n"}, 5, None, True, 1.5]}
        assert printable_value(value, **how) == {r"a\x07": [r"\x1b", {f"b{written}": written}, 5, None, True, 1.5]}


@given(st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=4, max_size=12))
def test_random_key_is_hidden(key):
    for form in (key, quote(key, ""), json.dumps(key)[1:-1], html.escape(key), key.encode().hex()):
        assert hidden(f"\x00\x01{form}\x01", [key]) == f"\x00\x01{HIDDEN}\x01"


@pytest.mark.parametrize("encode", [b64encode, urlsafe_b64encode])
@pytest.mark.parametrize("key", [KEY, "k?~ÿ", "four", "fives", "sixsix"])
def test_base64_key_is_hidden(encode, key):
    for before, after in product(["", "x", "Bearer ", "user:", "ab", "abcd"], ["", "x", "yz"]):
        sent = encode(f"{before}{key}{after}".encode()).decode()
        begins, ends = 8 * len(before.encode()), 8 * len((before + key).encode())  # bits, of which a digit has six
        own = sent[-(-begins // 6) : ends // 6]
        assert hidden(f"you said {sent}", [key]) == f"you said {sent.replace(own, HIDDEN)}"


@pytest.mark.parametrize(("text", "keys", "shown"), [
    *((f"bad key: {form}; go away", ["", "abc", KEY], f"bad key: {HIDDEN}; go away") for form in ENCODED),
    (f"bad key: {json.dumps(KEY)}; go away", ["", "abc", KEY], f'bad key: "{HIDDEN}"; go away'),
    ("nothing of that kind", [KEY, "abc", ""], "nothing of that kind"),
    ("abc", ["abc"], "abc"),  # too short to be one
    ("abcd", ["abcd"], HIDDEN),
    ("first and other", ["first", "other"], f"{HIDDEN} and {HIDDEN}"),
    ("<abc&amp;>", ["abc&"], f"<{HIDDEN}>"),  # of the last character nothing is left
])  # fmt: skip
def test_every_key_encoding_is_hidden(text, keys, shown):
    assert hidden(text, keys) == shown
