"""NVIDIA's DCGM: its own Python bindings, a host engine that runs already, and the page of a dcgm-exporter.

The bindings come with DCGM and are found by their folder, for their structures belong to one release of the library.
Of them only the thin functions over the C library are used, whose names 3.x and 4.x share (NVIDIA/DCGM,
testing/python3/dcgm_agent.py), and fields by number: 4.6 renamed most, and to name an old one then warns.
An engine is never started here: two on one host disturb each other (NVIDIA/DCGM issue 108).

Its values have no times and are those of its last collection, every 30 s unless it was told otherwise: fine for a
fleet, poor for a short window. The page is text of Prometheus' exposition format, which its own library parses.
"""

from __future__ import annotations

import http.client
import math
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.telemetry.host import MIN_SPAN_S, Answer, Reading, SensorSource, reading_of

DEFAULT_FOLDERS = (
    Path("/usr/share/datacenter-gpu-manager-4/bindings/python3"),
    Path("/usr/local/dcgm/bindings/python3"),
)
ADDRESS = "localhost:5555"  # where a host engine listens by default
AUTO = "--slm-telemetry auto"

# DCGM's units are percent, mJ, ns, MHz and MiB; the others are ours.
DIVIDE: dict[int, float] = {
    of.GPU_UTIL: 100,  # a percentage, though 4.6 calls it a ratio (dcgmlib/src/DcgmCacheManager.cpp)
    of.ENERGY: 1000,
    **dict.fromkeys((of.CAPPED_POWER, of.CAPPED_SW_THERMAL, of.CAPPED_HW_THERMAL, of.CAPPED_BRAKE), 1_000_000_000),
}
MULTIPLY: dict[int, float] = {of.SM_CLOCK: 1_000_000, of.MEMORY_CLOCK: 1_000_000, of.MEMORY_USED: 1 << 20}

# These, and the three after each, are no values and say why (NVIDIA/DCGM, dcgmlib/dcgm_structs.h).
BLANK_INT32, BLANK_INT64, BLANK_FP64 = 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, 140737488355328.0
WHY_BLANK = ("blank", "not found", "not supported", "not permissioned")

_GPU_ENTITY, _EMPTY_GROUP, _DOUBLE = 1, 1, "d"  # DCGM_FE_GPU, DCGM_GROUP_EMPTY, DCGM_FT_DOUBLE
_CONNECT_MS = 2000
_KEPT_S = 30.0  # how long the engine keeps values; only the last is read


def in_our_unit(number: int, value: float) -> Answer:
    """DCGM's value in SI units and ratios of 1, or the reason why there is none. Integers are given as int, because a
    float cannot distinguish large blanks."""
    for base in (BLANK_INT32, BLANK_INT64, BLANK_FP64):
        if base <= value < base + len(WHY_BLANK):
            return WHY_BLANK[int(value - base)]
    if value >= (BLANK_INT64 if isinstance(value, int) else BLANK_FP64):
        return WHY_BLANK[0]
    try:
        ours = value * MULTIPLY.get(number, 1) / DIVIDE.get(number, 1)
    except OverflowError:
        return "an integer that is too large"
    return ours if math.isfinite(ours) else f"{ours}"


class DcgmSource(SensorSource):
    """The last values of one GPU, each given once: the engine stamps them, and has none newer if it is read too early.

    unsupported: fields that are absent, and why: unknown to the release, or refused, as profiling counters are without
    root before Hopper. Raises SensorFailed, and whatever the bindings raise.
    """

    name = "dcgm"

    def __init__(
        self, modules: Sequence[Any], address: str, interval_s: float, device_uuid: str, undo: ExitStack
    ) -> None:
        self.interval_s = max(interval_s, MIN_SPAN_S)  # of the engine's watch, however often it is read
        self.unsupported: dict[int, str] = {}
        self.undo = undo
        structs, fields, self._agent = modules
        self._address, self._failed = address, structs.DCGMError
        self._stamps_us: dict[int, int] = {}
        self._profiled_us: int | None = None
        structs._dcgmInit()
        self._agent.dcgmInit()
        how = structs.c_dcgmConnectV2Params_v2()  # all zero: a TCP address, and our watches end with the connection
        how.version, how.timeoutMs = structs.c_dcgmConnectV2Params_version, _CONNECT_MS
        self._handle = self._agent.dcgmConnect_v2(address, how)
        undo.callback(self._quietly, self._agent.dcgmDisconnect, self._handle)
        numbers = self._agent.dcgmGetAllDevices(self._handle)
        gpus = {self._agent.dcgmGetDeviceAttributes(self._handle, gpu).identifiers.uuid: gpu for gpu in numbers}
        if device_uuid not in gpus:
            there = ", ".join(gpus) or "none"
            raise SensorFailed(f"DCGM at {address} does not know the GPU {device_uuid}; it knows {there}", AUTO)
        self._gpu = gpus[device_uuid]
        # Groups of all clients of an engine share one space of names.
        self._name = f"pytest-slmserve-{uuid.uuid4().hex}"
        self._group = self._agent.dcgmGroupCreate(self._handle, _EMPTY_GROUP, self._name)
        undo.callback(self._quietly, self._agent.dcgmGroupDestroy, self._handle, self._group)
        self._agent.dcgmGroupAddDevice(self._handle, self._group, self._gpu)
        wanted = [number for number in of.SENSORS if number < of.OURS]
        theirs = [number for number in wanted if fields.DcgmFieldGetById(number) is not None]
        self.unsupported |= {n: "this release of DCGM does not know it" for n in wanted if n not in theirs}
        self._watch([number for number in theirs if number not in of.PROFILED])
        self._watch([number for number in theirs if number in of.PROFILED])
        self.numbers = [number for number in theirs if number not in self.unsupported]
        if not self.numbers:
            raise SensorFailed(f"DCGM watches nothing for us: {[*self.unsupported.values()][-1]}", AUTO)
        self._agent.dcgmUpdateAllFields(self._handle, 1)

    def read(self, now_s: float) -> Reading:
        """The values that are newer than those of the last reading. Raises SensorFailed if the engine is gone."""
        try:
            found = self._agent.dcgmEntityGetLatestValues(self._handle, _GPU_ENTITY, self._gpu, self.numbers)
        except self._failed as error:
            why = f"DCGM's host engine at {self._address} does not answer any more: {error}"
            raise SensorFailed(why) from error
        answers: dict[int, Answer] = {}
        for each in found:
            raw = each.value.dbl if chr(each.fieldType) == _DOUBLE else each.value.i64
            answer = str(self._failed(each.status)) if each.status else in_our_unit(each.fieldId, raw)
            if not isinstance(answer, str) and each.ts <= self._stamps_us.get(each.fieldId, -1):
                answer = "not updated"
            elif not each.status:
                self._stamps_us[each.fieldId] = each.ts
            answers[each.fieldId] = answer
        reading = reading_of(answers)
        # The span is that between the profiling counters by the engine's clock: at least the interval watched, and at
        # most two, because a mean reaches back to the newest sample that is an interval old (NVIDIA/DCGM,
        # dcgmlib/src/DcgmGpmManager.cpp) and nothing is known of what came before.
        stamps_us = [a.ts for a in found if a.fieldId in of.PROFILED and reading.values[a.fieldId] is not None]
        if not stamps_us:
            return reading
        last_us, self._profiled_us = self._profiled_us, max(stamps_us)
        since_s = 0.0 if last_us is None else (self._profiled_us - last_us) / 1e6
        return replace(reading, span_s=min(max(since_s, self.interval_s), 2 * self.interval_s))

    def _watch(self, numbers: Sequence[int]) -> None:
        """Watch all of them together or, if that is refused, in halves: down to the number that is refused itself."""
        if not numbers:
            return
        agent, handle = self._agent, self._handle
        try:
            with ExitStack() as undo:  # a field group whose watch is refused is destroyed
                group = agent.dcgmFieldGroupCreate(handle, numbers, f"{self._name}-{numbers[0]}-{len(numbers)}")
                undo.callback(self._quietly, agent.dcgmFieldGroupDestroy, handle, group)
                undo.callback(self._quietly, agent.dcgmUnwatchFields, handle, self._group, group)
                agent.dcgmWatchFields(handle, self._group, group, round(self.interval_s * 1e6), _KEPT_S, 0)
                self.undo.enter_context(undo.pop_all())
        except self._failed as error:
            if len(numbers) == 1:
                self.unsupported[numbers[0]] = str(error)
                return
            middle = len(numbers) // 2
            self._watch(numbers[:middle])
            self._watch(numbers[middle:])

    def _quietly(self, undo: Callable[..., object], *arguments: object) -> None:
        with suppress(self._failed):  # an engine that is gone has forgotten us already
            undo(*arguments)


def open_dcgm(
    device_uuid: str, *, address: str = ADDRESS, interval_s: float, folders: Sequence[Path] = DEFAULT_FOLDERS
) -> DcgmSource:
    """The GPU of that UUID as the host engine at `address` (host:port) sees it, watched from now on.

    interval_s: how often the engine shall look, no less than MIN_SPAN_S. folders: where the bindings may be.
    Raises SensorFailed if the bindings, the engine or the GPU are not there.
    """
    folder = next((folder for folder in folders if (folder / "dcgm_agent.py").is_file()), None)
    if folder is None:
        where = " or ".join(str(folder) for folder in folders)
        raise SensorFailed(f"DCGM's Python bindings are not in {where}", f"install DCGM, or {AUTO}")
    sys.path.insert(0, str(folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python thinks of their code is not for our users
            modules = [import_module(name) for name in ("dcgm_structs", "dcgm_fields", "dcgm_agent")]
    except Exception as error:  # code that is not ours
        raise SensorFailed(f"DCGM's Python bindings in {folder} cannot be imported: {error!r}", AUTO) from error
    finally:
        sys.path.remove(str(folder))
    with ExitStack() as undo:
        try:
            source = DcgmSource(modules, address, interval_s, device_uuid, undo)
        except (modules[0].DCGMError, AttributeError, AssertionError) as error:  # what bindings raise
            problem = f"DCGM's host engine at {address} does not answer: {error}"
            raise SensorFailed(problem, f"systemctl start nvidia-dcgm, or {AUTO}") from error
        source.undo = undo.pop_all()
    return source


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
NUMBERS = {name: sensor.number for sensor in of.SENSORS.values() if sensor.number < of.OURS for name in sensor.names}
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


class ExporterSource(SensorSource):
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
        profiled = any(reading.values.get(number) is not None for number in of.PROFILED)
        return replace(reading, span_s=now_s - last_s) if last_s is not None and profiled else reading

    def _scraped(self) -> dict[int, float]:
        try:
            status, _, text = ask_once("GET", self._url, {}, None, TIMEOUT_S)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no such port
            raise SensorFailed(f"no page of dcgm-exporter at {self._url}: {error}", EXAMPLE) from error
        if status != 200:
            raise SensorFailed(f"no page of dcgm-exporter at {self._url}: HTTP {status}", EXAMPLE)
        try:
            return values_of_gpu(samples(text, NUMBERS), self._device_uuid)
        except ValueError as error:
            raise SensorFailed(str(error), EXAMPLE) from error
