"""What is printed of each committed archive is what its golden file has."""

from __future__ import annotations

from copy import deepcopy

import pytest
from scripts import in_checkout
from write import HERE, archive_names, changes, golden_file, kept, printed

pytestmark = in_checkout
LINES = 60  # of a difference: more is too long to read


@pytest.mark.parametrize("name", archive_names())
def test_an_archive_prints_what_its_golden_file_has(name: str) -> None:
    lines = list(changes(kept(name), printed(name)))
    more = [f"... and {len(lines) - LINES} more lines"] if len(lines) > LINES else []
    rewrite = f"if that is wanted: python tests/golden/write.py {name}"
    assert not lines, "\n".join([name, *lines[:LINES], *more, rewrite])


def test_there_is_one_golden_file_for_each_archive() -> None:
    names = archive_names()
    assert names and sorted(HERE.glob("*.json.xz")) == sorted(map(golden_file, names))


def test_a_changed_number_word_or_status_is_seen_and_a_last_digit_is_not() -> None:
    before = {
        "a": {"status": 0, "out": {"n": 3, "rates": [100.0, 0.1], "why": None}},
        "b": {"status": 4, "out": "x\ny"},
    }

    def seen(output: str, key: str, value: object) -> list[str]:
        after = deepcopy(before)
        (after[output] if key in ("status", "out") else after[output]["out"])[key] = value
        return [line for line in changes(before, after) if line[0] in "+-" and line[:3] not in ("+++", "---")]

    assert seen("a", "rates", [100 * (1 + 1e-11), 0.1]) == [] == seen("a", "n", 3.0)
    assert seen("a", "n", 4) == ['- "n": 3,', '+ "n": 4,'] and seen("a", "rates", [100.0, False])
    assert seen("a", "rates", [100 * (1 + 1e-8), 0.1]) == ["-  100.0,", "+  100.000001,"]
    assert seen("a", "rates", [100.0]) == ["-  100.0,", "-  0.1", "+  100.0"]
    assert seen("a", "why", False) == ['- "why": null', '+ "why": false']
    assert seen("a", "new", None) == ['+ "new": null,']
    assert seen("b", "out", "x\nz") == ["-y", "+z"]
    assert seen("b", "status", 1) == ["-exit status 4", "+exit status 1"]
