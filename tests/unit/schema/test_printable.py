"""Text of others: a terminal shows it, and does not obey."""

import pytest

from pytest_slmserve.schema.errors import SlmError
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.specs import EngineSpec


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;pwned\x07", r"\x1b[2J\x1b]0;pwned\x07"),
        ("a\rb\bc\x7f", r"a\rb\x08c\x7f"),
        ("\x9b31m", r"\x9b31m"),  # one character that begins what ESC [ begins
        ("\u202egnp", r"\u202egnp"),  # turns the direction of what follows
        ("\u2028\ud800", r"\u2028\ud800"),
        ("naïve 模型 ±3 %\n\tnext", "naïve 模型 ±3 %\n\tnext"),
        ("non-breaking\u00a0space", "non-breaking\u00a0space"),
    ],
)
def test_control_characters_are_written_out(text, shown):
    assert printable(text) == shown
    error = SlmError(f"it said {text}", f"not {text}")
    assert str(error) == f"it said {shown}\n  try: not {shown}" and error.problem == f"it said {shown}"


def test_no_model_has_a_name_that_a_terminal_obeys():
    for name in ("\x1b[2Jm", "a\nb", "m\u202e"):
        with pytest.raises(SlmError, match="holds control characters") as caught:
            EngineSpec(name)
        assert not {"\x1b", "\u202e"} & {*str(caught.value)}
