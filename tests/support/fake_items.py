"""Test items as pytest would make them, without pytest: for what the plugin makes of their markers and fixtures."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_slmserve.plugin import PARAMETRISED
from pytest_slmserve.plugin.items import parameters_of


class FakeItem(SimpleNamespace):
    """An item with those fixtures, markers by their names, and values of parameters."""

    def __init__(
        self,
        name: str,
        fixtures: Collection[str],
        markers: Mapping[str, pytest.Mark] | None = None,
        parameters: Mapping[str, Any] | None = None,
        *,
        function: Callable[..., Any] | None = None,
        path: str = "t.py",
        args: Collection[str] = (),
    ) -> None:
        super().__init__(name=name, nodeid=f"{path}::{name}", fixturenames=list(fixtures), markers=dict(markers or {}))
        self.stash, self.own_markers, self.path, self.function = pytest.Stash(), [], Path(path), function
        self.config = SimpleNamespace(args=list(args))
        self._fixtureinfo = SimpleNamespace(name2fixturedefs={name: [None] for name in ("slm_spec", "sharegpt")})
        if parameters:
            self.callspec = SimpleNamespace(params=dict(parameters))

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.markers.get(name)

    def add_marker(self, marker: pytest.MarkDecorator, append: bool = True) -> None:
        self.markers[marker.name] = marker.mark

    @property
    def why_skipped(self) -> str:
        return self.markers["skip"].kwargs["reason"] if "skip" in self.markers else ""


def items_for(session: Any, fixtures: str, name: str = "test_it", **words: Any) -> list[FakeItem]:
    """The items of a test with these fixtures, parted by blanks, whose `slm` marker has these words."""
    names = fixtures.split()
    slm = {"slm": pytest.mark.slm(**words).mark} if words else {}
    wanted = next((fixture for fixture in names if fixture in PARAMETRISED), None)
    if wanted is None:
        return [FakeItem(name, names, slm)]
    found = []
    for each in parameters_of(wanted, session, words):
        marks = slm | {mark.name: mark.mark for mark in each.marks}
        found.append(FakeItem(f"{name}[{each.id}]", names, marks, dict.fromkeys([wanted], each.values[0])))
    return found
