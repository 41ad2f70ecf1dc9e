"""Messages that a node sends while it measures. Measurements are encoded as in the archive: small, and read by its
rules."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_slmserve.archive.codec import engine_line, engine_of, measurement_line, measurement_of
from pytest_slmserve.schema.errors import SlmError
from pytest_slmserve.schema.records import Measurement


@dataclass(frozen=True, slots=True)
class TaskStarted:
    """The first message. node: Ray's id of where it is from."""

    node: str


@dataclass(frozen=True, slots=True)
class CaseMeasured:
    """One repeat of a case. packed: as `packed` makes it, one measurement for each engine."""

    key: str
    packed: bytes


@dataclass(frozen=True, slots=True)
class CaseDone:
    """The end of a case: all that was requested of it has been sent."""

    key: str


@dataclass(frozen=True, slots=True)
class CaseFailed:
    """The error that ended a case: no more of it comes."""

    key: str
    error: SlmError


@dataclass(frozen=True, slots=True)
class UserNote:
    """A sentence for the user."""

    note: str


Message = TaskStarted | CaseMeasured | CaseDone | CaseFailed | UserNote


def packed(found: Sequence[Measurement]) -> bytes:
    lines = [line for m in found for line in (engine_line(m), measurement_line(m))]
    return gzip.compress(json.dumps(lines, allow_nan=False).encode(), mtime=0)


def unpacked(data: bytes) -> tuple[Measurement, ...]:
    lines = json.loads(gzip.decompress(data))
    return tuple(measurement_of(run, *engine_of(engine)) for engine, run in zip(lines[::2], lines[1::2]))
