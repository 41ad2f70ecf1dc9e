"""An error that the user can act on: its class, the facts in it, and what to type; never its sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pytest_slmserve.schema.errors import BadUsage, SlmError


@contextmanager
def refused(*facts: object, kind: type[SlmError] = BadUsage, hint: object = "") -> Iterator[Any]:
    """Whatever the block does must raise exactly this kind of error, whose problem names all facts, with a hint that
    names its own."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert type(error) is kind
    assert not [fact for fact in facts if str(fact) not in error.problem], error.problem
    assert error.hint and str(hint) in error.hint, error.hint
