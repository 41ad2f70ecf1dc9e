"""Values on the page of a dcgm-exporter (NVIDIA/dcgm-exporter, etc/default-counters.csv and METRICS.md).

Its values have no times and are those of its last collection, every 30 s unless it was told otherwise: fine for a
fleet, poor for a short window. The page is text of Prometheus' exposition format.
"""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from urllib.parse import urlsplit

from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.schema.sensors import OURS, PROFILED, SENSORS
from pytest_slmserve.telemetry.base import Reading
from pytest_slmserve.telemetry.dcgm import in_our_unit

MOST_BYTES = 1 << 22  # of an answer to one question: the page of a server's metrics has some ten thousand


def ask_once(
    method: str, url: str, headers: Mapping[str, str], body: str | None, within_s: float
) -> tuple[int, str, str]:
    """Status, content type and text of an answer, if long its beginning. Raises OSError or HTTPException."""
    until = time.monotonic() + within_s
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=within_s)
    try:
        connection.request(method, parts.path + (f"?{parts.query}" if parts.query else ""), body, dict(headers))
        wire, answer, text = connection.sock, connection.getresponse(), bytearray()
        while len(text) < MOST_BYTES and (piece := answer.read1(MOST_BYTES)):
            text += piece
            if (left_s := until - time.monotonic()) <= 0:  # a socket's own limit begins anew with every byte
                raise TimeoutError(f"no end within {within_s:g} s")
            if not answer.isclosed():  # at its end, by Python 3.13, and its socket with it
                wire.settimeout(left_s)
        return answer.status, answer.headers.get("content-type", ""), text.decode(errors="replace")
    finally:
        connection.close()


_NAME, _TEXT = "[a-zA-Z_][a-zA-Z0-9_]*", r'(?:[^"\\]|\\[\\"n])*'
_LABEL = rf'[ \t]*{_NAME}[ \t]*=[ \t]*"{_TEXT}"[ \t]*'
_LABELS = rf"\{{((?:{_LABEL},)*(?:{_LABEL}|[ \t]*))\}}"
_SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:[ \t]*{_LABELS}[ \t]*|[ \t]+)(\S+)(?:[ \t]+-?[0-9]+)?")
_NAME_AND_TEXT = re.compile(rf'({_NAME})[ \t]*=[ \t]*"({_TEXT})"')
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One line. An integer stays one: a float cannot tell DCGM's blanks apart."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(page: str) -> list[Sample]:
    """The samples of a page, without comments and times. Raises ValueError for a line that is not of the format."""
    lines = ((number, line.strip(" \t\r")) for number, line in enumerate(page.split("\n"), 1))
    return [_sample(number, line) for number, line in lines if line and not line.startswith("#")]


def _sample(number: int, line: str) -> Sample:
    found = _SAMPLE.fullmatch(line)
    try:
        if found:
            name, labels, value = found.groups(default="")
            return Sample(name, _labels(labels), int(value) if _INTEGER.fullmatch(value) else float(value))
    except ValueError:
        pass
    raise ValueError(f"line {number} of the page is not in Prometheus' format: {line[:60]!r}")


def _labels(text: str) -> dict[str, str]:
    pairs = _NAME_AND_TEXT.findall(text)
    return {name: re.sub(r"\\(.)", lambda e: "\n" if e[1] == "n" else e[1], value) for name, value in pairs}


EXAMPLE = "http://localhost:9400/metrics"
NUMBERS = {name: sensor.number for sensor in SENSORS.values() if sensor.number < OURS for name in sensor.names}

_TIMEOUT_S = 2.0


def of_device(page: Sequence[Sample], device_uuid: str) -> dict[int, float]:
    """Values of one GPU on the page, by number, in DCGM's units; metrics without a number are passed over.

    The GPU is the one of that UUID or, where neither we nor the page know one, the only one.
    """
    ours = [(NUMBERS[sample.name], sample) for sample in page if sample.name in NUMBERS]
    device = _device(sorted({_device_of(sample) for _, sample in ours}), device_uuid)
    ours = [(number, sample) for number, sample in ours if _device_of(sample) == device]
    if any(sample.labels.get("GPU_I_ID") for _, sample in ours):
        raise SensorFailed(f"{device} is cut into MIG instances: whose values are whose cannot be told", "a whole GPU")
    return {number: sample.value for number, sample in ours}


def _device_of(sample: Sample) -> str:
    labels = sample.labels
    return labels.get("UUID") or labels.get("uuid") or f"gpu {labels.get('gpu', '?')}"


def _device(there: Sequence[str], device_uuid: str) -> str:
    if device_uuid in there:
        return device_uuid
    if len(there) == 1 and (not device_uuid or there[0].startswith("gpu ")):
        return there[0]
    raise SensorFailed(
        f"the page has no values of {device_uuid or 'just one GPU'}, but of {', '.join(there) or 'no GPU at all'}",
        "the page of the dcgm-exporter on the host that measures",
    )


class ExporterSource:
    """Scrapes the page at each reading. A page that says what the last one said counts as not updated.

    The first page is read when the source is opened, for nobody knows how old it is: values are given once they change.
    """

    name = "dcgm-exporter"

    def __init__(self, url: str, device_uuid: str) -> None:
        self._url, self._device_uuid = url, device_uuid
        self._page = self._scraped()
        self._numbers = set(self._page)
        self._updated_s: float | None = None

    def read(self, now_s: float) -> Reading:
        page, last = self._scraped(), self._page
        self._numbers |= page.keys()
        if _same(page, last):
            why = tuple(f"{number}: not updated" for number in sorted(self._numbers))
            return Reading(dict.fromkeys(self._numbers), None, why)
        self._page = page
        missing = [f"{number}: not on the page" for number in sorted(self._numbers - page.keys())]
        values = {**dict.fromkeys(self._numbers), **{n: in_our_unit(n, raw, missing) for n, raw in page.items()}}
        return Reading(values, self._span_s(now_s, values), tuple(missing))

    def close(self) -> None:
        """Nothing is held between two readings."""

    def _span_s(self, now_s: float, values: Mapping[int, float | None]) -> float | None:
        """Since the last update; None without profiling counters, and at first: the exporter's interval is unknown."""
        last, self._updated_s = self._updated_s, now_s
        return now_s - last if last is not None and any(values.get(n) is not None for n in PROFILED) else None

    def _scraped(self) -> dict[int, float]:
        try:
            status, _, text = ask_once("GET", self._url, {}, None, _TIMEOUT_S)
        except (OSError, HTTPException, ValueError) as error:  # ValueError: no such port
            raise SensorFailed(f"no page of dcgm-exporter at {self._url}: {error}", EXAMPLE) from error
        if status != 200:
            raise SensorFailed(f"no page of dcgm-exporter at {self._url}: HTTP {status}", EXAMPLE)
        try:
            return of_device(samples(text), self._device_uuid)
        except ValueError as error:
            raise SensorFailed(str(error), EXAMPLE) from error


def _same(page: Mapping[int, float], last: Mapping[int, float]) -> bool:
    """Equality of two pages by the text of their values, in which NaN equals NaN."""
    return page.keys() == last.keys() and all(repr(page[number]) == repr(last[number]) for number in page)


def open_exporter(url: str, device_uuid: str) -> ExporterSource:
    """The GPU of that UUID ("" for the only one) as the page at `url` shows it.

    Raises BadUsage for an address that is not of http or https, SensorFailed where there is no such page or GPU.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # brackets of an address that is none
        fits = False
    if not fits:
        raise BadUsage(f"{url!r} is not the address of a dcgm-exporter's page", f"--slm-telemetry {EXAMPLE}")
    return ExporterSource(url, device_uuid)
