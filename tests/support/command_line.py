"""Commands of `slmserve`, carried out in this process."""

import json
from typing import Any, NamedTuple

import pytest

from pytest_slmserve.__main__ import main


class Said(NamedTuple):
    """What a command printed, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The output in one line, however it was folded."""
        return " ".join(self.out.split())


def said(capsys: pytest.CaptureFixture[str], *words: object) -> Said:
    status = main([str(word) for word in words])
    return Said(status, *capsys.readouterr())


def told_in_json(command: str, capsys: pytest.CaptureFixture[str], *words: object, status: int | None = None) -> Any:
    """What a command tells as JSON, without a word beside it. status: the one that it must end with."""
    seen = said(capsys, command, *words, "--json")
    assert seen.err == "" and status in (None, seen.status), seen
    return json.loads(seen.out)


def refused(seen: Said, *facts: str) -> str:
    """The message of a usage error: one sentence with these facts, perhaps what to type, and nothing on stdout. What
    the command was doing may stand above it."""
    _, error, told = seen.err.rpartition("error: ")
    assert (seen.status, seen.out, error) == (4, "", "error: "), seen
    assert len(told.splitlines()) <= 2 and [fact for fact in facts if fact not in told] == [], told
    return told


def answered(seen: Said, *names: str) -> bool:
    """Whether it answered, or refused what it was given by one sentence."""
    told: Any = seen.status in (0, 1, 10) and any(name in seen.out for name in names)
    return bool(told) or (seen.status == 4 and seen.err.startswith("error: "))
