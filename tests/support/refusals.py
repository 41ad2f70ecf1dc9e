"""An error that a user can cause, by its kind and the facts in it, whatever its words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pytest_slmserve.schema.errors import BadUsage, SlmError


@contextmanager
def refused(*facts: object, hint: str = "", of: type[SlmError] = BadUsage) -> Iterator[pytest.ExceptionInfo[SlmError]]:
    """Fails unless an error of this kind is raised that holds each of the facts, and its hint these words.

    Facts are options, values, numbers and names, as they are typed or counted; sentences are not.
    """
    with pytest.raises(of) as caught:
        yield caught
    lacking = [str(fact) for fact in facts if str(fact) not in caught.value.problem]
    assert not lacking, f"{lacking} not in {caught.value.problem!r}"
    assert caught.value.hint and hint in caught.value.hint
