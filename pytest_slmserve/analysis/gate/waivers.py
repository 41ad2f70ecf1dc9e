"""Known regressions that somebody answers for: until a day, and for a reason. An expired waiver excuses nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import date
from typing import Any

from pytest_slmserve.analysis.metrics.roofline import peaks_of
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import BadUsage

ANY = "*"
EXAMPLE = (
    '[{"endpoint": "throughput", "model": "opt-1.3b", "device": "H200", "owner": "a name", '
    '"reason": "a sentence", "until": "2027-01-31"}]'
)


@dataclass(frozen=True, slots=True)
class Waiver:
    """endpoint: as the gate names it. model: a short name or "*". device: a platform ("cuda", "cpu", "simulated"), a
    GPU family of `roofline.GPUS` ("H200"), a name as the driver has it, or "*". until: the last day on which it
    holds."""

    endpoint: str
    model: str
    device: str
    owner: str
    reason: str
    until: date

    def __str__(self) -> str:
        return f"{self.endpoint} of {self.model} on {self.device}"


NAMES = tuple(f.name for f in fields(Waiver))


def waivers_of(rows: object, where: str) -> tuple[Waiver, ...]:
    """Waivers from plain JSON values: a list of objects that have every field of a waiver as text, and no other.

    where: the source of the values, for messages. Raises BadUsage: which row, which field, what is wrong with it.
    """
    if not isinstance(rows, list):
        raise BadUsage(f"{where} holds no list of waivers", EXAMPLE)
    return tuple(_waiver(row, f"{where}, row {number}") for number, row in enumerate(rows, 1))


def waiver_for(waivers: Iterable[Waiver], model: str, endpoint: str, device: str) -> Waiver | None:
    """The most specific waiver that fits, expired or not; of equals the one that holds longest.

    model: a name or a path. device: a platform, a GPU family or a GPU's name. A named model counts for more than a
    named device.
    """
    peaks = peaks_of(device)
    devices, models = {ANY, device, peaks.family if peaks else ANY}, {ANY, short_name(model)}
    fitting = [w for w in waivers if w.endpoint == endpoint and w.model in models and w.device in devices]
    return max(fitting, key=lambda w: (w.model != ANY, w.device != ANY, w.until), default=None)


def expired(waiver: Waiver, today: date) -> bool:
    """A waiver holds on its last day."""
    return today > waiver.until


def explained(waiver: Waiver, today: date) -> str:
    """One sentence for a verdict: who waived it, until when and why; or that this is over."""
    if expired(waiver, today):
        return f"the waiver of {waiver} expired on {waiver.until}; its owner is {waiver.owner} ({waiver.reason})"
    return f"{waiver} is waived until {waiver.until} by {waiver.owner}: {waiver.reason}"


def _waiver(row: object, where: str) -> Waiver:
    if not isinstance(row, Mapping):
        raise BadUsage(f"{where} is {_kind(row)}, not a waiver", EXAMPLE)
    if unknown := sorted(set(row) - set(NAMES)):
        raise BadUsage(f"{where} has the unknown field {unknown[0]!r}", f"one of {', '.join(NAMES)}")
    endpoint, model, device, owner, reason, until = (_text(row, name, where) for name in NAMES)
    return Waiver(endpoint, short_name(model), device, owner, reason, _day(until, where))


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    if name not in row:
        raise BadUsage(f"{where} has no {name}", EXAMPLE)
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise BadUsage(f"{where}: {name} is {_kind(value)}, not a text", EXAMPLE)
    return value.strip()


def _day(text: str, where: str) -> date:
    """A date from text of the one form YYYY-MM-DD, which every Python release reads. Raises BadUsage for any other
    text."""
    try:
        if (day := date.fromisoformat(text)).isoformat() == text:
            return day
    except ValueError:
        pass
    raise BadUsage(f"{where}: until is {text!r}, not a day", '"until": "2027-01-31"')


def _kind(value: object) -> str:
    return "empty" if isinstance(value, str) and not value.strip() else f"the {type(value).__name__} {value!r}"
