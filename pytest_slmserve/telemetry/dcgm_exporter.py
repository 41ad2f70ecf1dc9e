"""Values on the page of a dcgm-exporter (NVIDIA/dcgm-exporter, etc/default-counters.csv and METRICS.md).

Its values have no times and are those of its last collection, every 30 s unless it was told otherwise: fine for a
fleet, poor for a short window. The page is text of Prometheus' exposition format, which its own library parses.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.schema.sensors import OURS, PROFILED, SENSORS
from pytest_slmserve.telemetry.base import Answer, Reading, reading_of
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


EXAMPLE = "http://localhost:9400/metrics"
NUMBERS = {name: sensor.number for sensor in SENSORS.values() if sensor.number < OURS for name in sensor.names}
TIMEOUT_S = 2.0


def samples(page: str, names: Iterable[str]) -> list[Any]:
    """Return the samples of Prometheus' client (`name`, `labels`, `value`) on a page whose names begin with one of
    `names`. An integer stays one. Raises ValueError for a line that is not of the format."""
    from prometheus_client.parser import text_string_to_metric_families

    # The other lines would take most of the time, and after a comment on its type a counter gets another name.
    begins = tuple(names)
    lines = "\n".join(line for line in page.split("\n") if line.startswith(begins))
    try:
        return [sample for family in text_string_to_metric_families(lines) for sample in family.samples]
    except (ValueError, IndexError) as error:
        raise ValueError(f"the page is not in Prometheus' format: {error}") from error


def values_of_gpu(page: Iterable[Any], device_uuid: str) -> dict[int, float]:
    """Values of one GPU among the samples of a page, by number, in DCGM's units. Metrics without a number are skipped.

    The GPU is the one of that UUID or, if either we or the page know none, the only one. Raises SensorFailed if it is
    not on the page, or if MIG divides it.
    """
    gpus: dict[str, dict[int, float]] = {}
    divided = set()
    for sample in page:
        if (number := NUMBERS.get(sample.name)) is not None:
            labels = sample.labels
            gpu = labels.get("UUID") or labels.get("uuid") or f"gpu {labels.get('gpu', '?')}"
            gpus.setdefault(gpu, {})[number] = sample.value
            divided |= {gpu} if labels.get("GPU_I_ID") else set()
    if device_uuid not in gpus:
        there = sorted(gpus)
        if len(there) != 1 or (device_uuid and not there[0].startswith("gpu ")):
            known = f"{device_uuid or 'just one GPU'}, but of {', '.join(there) or 'no GPU at all'}"
            hint = "the page of the dcgm-exporter on the host that measures"
            raise SensorFailed(f"the page has no values of {known}", hint)
        (device_uuid,) = there
    if device_uuid in divided:
        why = f"{device_uuid} is cut into MIG instances: whose values are whose cannot be told"
        raise SensorFailed(why, "a whole GPU")
    return gpus[device_uuid]


class ExporterSource:
    """Scrapes the page at each reading. A page that says what the last one said counts as not updated.

    The first page is read when the source is made, because nobody knows how old it is: values are given once they
    change. device_uuid: "" for the only GPU. Raises BadUsage for a URL that is not of http or https, SensorFailed if
    there is no such page or GPU.
    """

    name = "dcgm-exporter"

    def __init__(self, url: str, device_uuid: str) -> None:
        try:
            parts = urlsplit(url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:  # brackets of an address that is none
            fits = False
        if not fits:
            raise BadUsage(f"{url!r} is not the address of a dcgm-exporter's page", f"--slm-telemetry {EXAMPLE}")
        self._url, self._device_uuid = url, device_uuid
        self._page = self._scraped()
        self._numbers = set(self._page)
        self._updated_s: float | None = None

    def read(self, now_s: float) -> Reading:
        """The values of the page, if it has changed. The span is the time since the last change; None without profiling
        counters, and at first: the exporter's interval is unknown."""
        page, last = self._scraped(), self._page
        self._numbers |= page.keys()
        if str(sorted(page.items())) == str(sorted(last.items())):  # as text, in which NaN equals NaN
            return reading_of(dict.fromkeys(sorted(self._numbers), "not updated"))
        self._page = page
        answers: dict[int, Answer] = dict.fromkeys(sorted(self._numbers), "not on the page")
        reading = reading_of(answers | {number: in_our_unit(number, raw) for number, raw in page.items()})
        last_s, self._updated_s = self._updated_s, now_s
        profiled = any(reading.values.get(number) is not None for number in PROFILED)
        return replace(reading, span_s=now_s - last_s) if last_s is not None and profiled else reading

    def close(self) -> None:
        """Nothing is held between two readings."""

    def _scraped(self) -> dict[int, float]:
        try:
            status, _, text = ask_once("GET", self._url, {}, None, TIMEOUT_S)
        except (OSError, HTTPException, ValueError) as error:  # ValueError: no such port
            raise SensorFailed(f"no page of dcgm-exporter at {self._url}: {error}", EXAMPLE) from error
        if status != 200:
            raise SensorFailed(f"no page of dcgm-exporter at {self._url}: HTTP {status}", EXAMPLE)
        try:
            return values_of_gpu(samples(text, NUMBERS), self._device_uuid)
        except ValueError as error:
            raise SensorFailed(str(error), EXAMPLE) from error
