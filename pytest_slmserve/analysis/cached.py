"""A quantity of a run is computed once: verdicts, tables and claims ask for the same ones again and again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from pytest_slmserve.schema.records import Run

T = TypeVar("T")


def once(quantity: Callable[[Run], T]) -> Callable[[Run], T]:
    """Decorates a function of a run so that each run computes it once. The answer is kept with the run, which is
    frozen, for as long as that lives. Nobody may change a returned value."""
    name = f"{quantity.__module__}.{quantity.__name__}"

    @wraps(quantity)
    def kept(run: Run) -> T:
        derived: dict[str, Any] = run.derived
        if name not in derived:
            derived[name] = quantity(run)
        return cast(T, derived[name])

    return kept
