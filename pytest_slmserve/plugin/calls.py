"""Words of a user's test, checked before they cost anything: those of a call to a fixture, and names of figures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import TypeVar

from pytest_slmserve.schema.errors import BadUsage

T = TypeVar("T")


def checked(name: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator of what tests call as `name`. It raises BadUsage for a word that the function does not have, for one
    that is missing, and for repeats that are no number. Words that it takes as `**load` are fields of ClosedLoop."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        signature = inspect.signature(function)
        known = [word for word in signature.parameters if word not in ("self", "load")]
        if "load" in signature.parameters:
            from pytest_slmserve.schema.loads import ClosedLoop

            known += [field.name for field in fields(ClosedLoop) if field.name != "concurrency"]

        @wraps(function)
        def call(*values: object, **words: object) -> T:
            if unknown := [word for word in words if word not in known]:
                raise BadUsage(f"{name} takes no {unknown[0]!r}", nearest(unknown[0], known))
            try:
                signature.bind(*values, **words)
            except TypeError as error:
                raise BadUsage(f"{name}: {error}", ", ".join(known)) from None
            repeats = words.get("repeats")
            if repeats is not None and not (isinstance(repeats, int) and repeats > 0):
                raise BadUsage(f"{name}: repeats={repeats!r} is no number of repeats", "repeats=3")
            return function(*values, **words)

        return call

    return decorate


def nearest(word: str, known: Iterable[str]) -> str:
    """The known words that are most like this one, or all of them where none is."""
    names = list(known)
    near = get_close_matches(word, names, cutoff=0.7)
    return " or ".join(near) if near else ", ".join(names)


def name_the_figures(error: AttributeError) -> None:
    """Add to the message of an unknown attribute of ours which ones there are: the nearest, or all."""
    kind = type(error.obj)
    if not error.name or kind.__module__.partition(".")[0] != "pytest_slmserve":
        return
    public = [name for name in dir(error.obj) if not name.startswith("_")]
    error.args = (f"{error}; it has {nearest(error.name, public)}",)
