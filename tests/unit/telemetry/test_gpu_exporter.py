"""dcgm-exporter, on pages made by hand after its documentation: each value of our GPU becomes ours and is given once it
changes, blanks say why, any other page or answer is a failure, and no question lasts longer than it may.

The pages are made after NVIDIA/dcgm-exporter (README.md, etc/default-counters.csv, the template in
internal/pkg/rendermetrics/render_metrics.go), not recorded; a pair of sockets stands in place of the network."""

import http.client
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies as st
from refusals import refused

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.telemetry import gpu as sources
from pytest_slmserve.telemetry.gpu import ON_A_PAGE, ExporterSource, ask_once, in_our_unit, samples, values_of_gpu

URL = "http://node-1:9400/metrics"
WATTS = "DCGM_FI_DEV_POWER_USAGE"
DEFAULT = {
    "DCGM_FI_DEV_SM_CLOCK": 1980, "DCGM_FI_DEV_MEM_CLOCK": 3201, "DCGM_FI_DEV_MEMORY_TEMP": 41,
    "DCGM_FI_DEV_GPU_TEMP": 64, WATTS: "431.250000", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 123456789,
    "DCGM_FI_DEV_GPU_UTIL": 97, "DCGM_FI_DEV_XID_ERRORS": 0, "DCGM_FI_DEV_FB_USED": 141000,
}  # fmt: skip
PROFILING = {
    "DCGM_FI_PROF_SM_ACTIVE": "0.875000", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "0.125000",
    "DCGM_FI_PROF_DRAM_ACTIVE": "0.500000",
}  # fmt: skip
OURS = {
    of.SM_CLOCK: 1.98e9, of.MEMORY_CLOCK: 3.201e9, of.TEMPERATURE: 64, of.POWER: 431.25, of.ENERGY: 123_456.789,
    of.GPU_UTIL: 0.97, of.XID: 0, of.MEMORY_USED: 141_000 * 2**20,
}  # fmt: skip
GPU = "GPU-11111111-2222-3333-4444-555555555555"
OTHER_GPU = "GPU-99999999-8888-7777-6666-555555555555"
HEAD = """# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
"""
LABELS = (
    'gpu="{index}",UUID="{uuid}",pci_bus_id="00000000:01:00.0",device="nvidia{index}",modelName="NVIDIA H200"{more},'
    'Hostname="node-1",DCGM_FI_DRIVER_VERSION="580.95.05"'
)


def page(values: Mapping[str, object], uuid: str = GPU, *, index: int = 0, more: str = "") -> str:
    """One GPU's rows, with the comments that a page has."""
    labels = LABELS.format(index=index, uuid=uuid, more=more)
    return HEAD + "".join(f"{name}{{{labels}}} {value}\n" for name, value in values.items())


@dataclass
class Exporter:
    """What is shown next. asked: the kind of each connection, where it leads, how long it may last, and its far end."""

    text: str = ""
    status: int = 200
    version: str = "HTTP/1.0"
    gone: bool = False
    asked: list[tuple[str, str, int | None, float, socket.socket]] = field(default_factory=list)

    def answer(self, connection: http.client.HTTPConnection) -> socket.socket:
        if self.gone:
            raise ConnectionRefusedError("nobody is there")
        near, far = socket.socketpair()
        body = self.text.encode()
        head = f"{self.version} {self.status} x\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
        far.sendall(head.encode() + body)
        self.asked.append((type(connection).__name__, connection.host, connection.port, connection.timeout, far))
        return near


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    """Whatever is connected to shows this page, or what is put in its place."""
    shown = Exporter(page(DEFAULT))

    def connect(self: http.client.HTTPConnection) -> None:
        self.sock = shown.answer(self)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as undo:
        for kind in (http.client.HTTPConnection, http.client.HTTPSConnection):
            patch.setattr(kind, "connect", connect)
        undo.callback(lambda: [far.close() for *_, far in shown.asked])
        yield shown


@pytest.fixture
def source(exporter):
    return ExporterSource(URL, GPU)


def read(exporter, source, values, now_s=0.0):
    """The reading of a page of these values."""
    exporter.text = page(values)
    return source.read(now_s)


def test_exporter_units_are_converted(exporter, source):
    assert of.SM_ACTIVE not in source.read(0.0).values
    found = read(exporter, source, {**DEFAULT, **PROFILING})
    assert found.values == OURS | {of.SM_ACTIVE: 0.875, of.TENSOR_ACTIVE: 0.125, of.DRAM_ACTIVE: 0.5}
    assert (source.name, found.missing, found.span_s) == ("dcgm-exporter", (), None)
    gone = read(exporter, source, {**DEFAULT, WATTS: 1.0})
    assert (gone.values[of.POWER], gone.values[of.SM_ACTIVE]) == (1.0, None)
    assert f"{of.SM_ACTIVE}: not on the page" in gone.missing
    source.close(), source.close()
    name = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
    text = f"\n# HELP {name} Energy (in mJ).\n# TYPE {name} counter\n# EOF\n\n"
    text += page({**DEFAULT, "DCGM_EXP_XID_ERRORS_COUNT": 3}) + "go_goroutines 12\n"
    found = values_of_gpu(samples(text, ON_A_PAGE), GPU)
    assert found.keys() == OURS.keys() and found[of.ENERGY] == 123456789


def test_changed_values_are_given_once(exporter, source):
    first = source.read(0.0)
    assert first.values == dict.fromkeys(OURS) and len(first.missing) == 8
    assert f"{of.POWER}: not updated" in first.missing
    changed = {**DEFAULT, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 123456790}
    assert read(exporter, source, changed).values[of.POWER] == 431.25, "one value that moved: all were collected"
    assert source.read(2.0).values[of.POWER] is None
    exporter.text += page({**DEFAULT, WATTS: 1.0}, OTHER_GPU, index=1)
    assert source.read(3.0).values[of.POWER] is None, "another GPU's news are no news"
    exporter.text = page({**DEFAULT, WATTS: 1.0}, OTHER_GPU, index=1) + page({**DEFAULT, WATTS: 2.0})
    assert source.read(4.0).values[of.POWER] == 2.0
    nan = {**DEFAULT, "DCGM_FI_PROF_SM_ACTIVE": "NaN"}
    assert [read(exporter, source, nan).values[of.POWER] for _ in range(2)] == [431.25, None], "a NaN is no news either"


def test_span_follows_counter_updates(exporter, source):
    pages = [{**DEFAULT, "DCGM_FI_PROF_SM_ACTIVE": active} for active in (0.25, 0.25, 0.5, 0.5)]
    spans = [read(exporter, source, values, now).span_s for now, values in zip((10.0, 11.0, 40.0, 41.0), pages)]
    spans += [read(exporter, source, {**DEFAULT, WATTS: now}, now).span_s for now in (50.0, 51.0)]
    assert spans == [None, None, 30.0, None, None, None]


BLANKS = {
    "9223372036854775792": "blank", "9223372036854775794": "not supported",  # shown in the exporter's README
    "9.223372036854776e+18": "blank", "140737488355328.000000": "blank", "1.4073748835533e+14": "not supported",
    "2147483634": "not supported", "NaN": "nan", "-Inf": "-inf", f"-{10**400}": "an integer that is too large",
}  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), BLANKS.items(), ids=range(len(BLANKS)))
def test_exporter_sentinel_value_is_explained(exporter, source, text, reason):
    reading = read(exporter, source, {**DEFAULT, WATTS: text})
    assert (reading.values[of.POWER], reading.missing) == (None, (f"{of.POWER}: {reason}",))
    assert reading.values[of.TEMPERATURE] == 64


@pytest.mark.parametrize(("rows", "values"), [
    (["DEV_GPU_UTIL_RATIO 97"], {of.GPU_UTIL: 0.97}),  # 4.6: another name of field 203
    (["DEV_BOARD_POWER_WATTS 431.2", "PROF_SM_UTIL_RATIO 0.5"], {of.POWER: 431.2, of.SM_ACTIVE: 0.5}),
    (["DEV_GPU_UTIL_RATIO 0.97"], {of.GPU_UTIL: 0.97}),  # 4.7: field 1613
    (["DEV_GPU_UTIL_RATIO 0"], {of.GPU_UTIL: 0.0}),
    (["DEV_GPU_UTIL_RATIO 1"], {}),  # 1% by the one, and all of the time by the other
    (["DEV_GPU_UTIL_RATIO 1", "DEV_FB_USED_BYTES 4096"], {of.GPU_UTIL: 1.0, of.MEMORY_USED: 4096}),
    (["DEV_GPU_UTIL 97", "DEV_GPU_UTIL_RATIO 0.971"], {of.GPU_UTIL: 0.97}),
    (["DEV_GPU_ENERGY_JOULES_TOTAL 5000"], {of.ENERGY: 5000}),
    (["DEV_SM_CLOCK_HERTZ 1980000000", "DEV_MEMORY_CLOCK_HERTZ 1e9"], {of.SM_CLOCK: 1.98e9, of.MEMORY_CLOCK: 1e9}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("written", [str.upper, str.lower], ids=["capitals", "small"])
def test_newer_names_have_own_units(rows, values, written):
    labels = f'{{{written("UUID")}="{GPU.upper()}"}}'
    lines = (f"{written(f'DCGM_FI_{name}')}{labels} {value}" for name, value in map(str.split, rows))
    found = values_of_gpu(samples("\n".join(lines), ON_A_PAGE), GPU)
    assert {number: in_our_unit(number, raw) for number, raw in found.items()} == pytest.approx(values)
    row = f'DCGM_FI_DEV_GPU_UTIL_RATIO{{UUID="{GPU}",DCGM_FI_SYSTEM_DRIVER_VERSION="590.1"}} 1'
    assert values_of_gpu(samples(row, ON_A_PAGE), GPU) == {of.GPU_UTIL: 100}, "this label tells the release"


@pytest.mark.parametrize(
    "rows", [[(WATTS, 300.1), (WATTS, 0)], [("DCGM_FI_DEV_GPU_UTIL", 97), ("DCGM_FI_DEV_GPU_UTIL_RATIO", 0.5)]]
)
@pytest.mark.parametrize("order", [1, -1])
def test_contradictory_rows_are_refused(rows, order):
    lines = [f'{name}{{UUID="{GPU}",pod="p{i}"}} {value}' for i, (name, value) in enumerate(rows[::order])]
    with pytest.raises(SensorFailed, match=GPU):
        values_of_gpu(samples("\n".join(lines), ON_A_PAGE), GPU)
    elsewhere = [*lines, f'{WATTS}{{UUID="{OTHER_GPU}"}} 7', f'{WATTS}{{UUID="{OTHER_GPU}",pod="q"}} 7']
    assert values_of_gpu(samples("\n".join(elsewhere), ON_A_PAGE), OTHER_GPU) == {of.POWER: 7}


@pytest.mark.parametrize("labels", ['uuid="{}"', 'UUID="{}"', 'gpu="0",UUID="{}",uuid="x"', 'gpu="0"'])
def test_gpu_is_found_by_uuid(labels):
    rows = [f"{WATTS}{{{labels.format(GPU)}}} 300"]
    rows += [f"{WATTS}{{{labels.format(OTHER_GPU)}}} 1"] if "{}" in labels else []
    assert values_of_gpu(samples("\n".join(rows), ON_A_PAGE), GPU) == {of.POWER: 300}


TWO = "".join(f'{WATTS}{{gpu="{number}"}} 300\n' for number in range(2))
MIG = page(DEFAULT, more=',GPU_I_PROFILE="1g.18gb",GPU_I_ID="7"')


@pytest.mark.parametrize(("text", "uuid", "facts"), [
    (page(DEFAULT), OTHER_GPU, [OTHER_GPU, GPU]),
    (page(DEFAULT) + page(DEFAULT, OTHER_GPU), "GPU-0", ["GPU-0", f"{GPU}, {OTHER_GPU}"]),
    (MIG, GPU, [GPU, "MIG"]), (TWO, GPU, [GPU, "gpu 0, gpu 1"]),
    *((text, GPU, [GPU]) for text in ("# HELP nothing here\n", "node_load1 0.5\n", "<!doctype html>\n<p>404</p>")),
])  # fmt: skip
def test_page_without_gpu_is_refused(exporter, text, uuid, facts):
    exporter.text = text
    with refused(*facts, kind=SensorFailed):
        ExporterSource(URL, uuid)


@pytest.mark.parametrize(("shown", "facts"), [
    ({"status": 503}, [URL, 503]), ({"text": f"{WATTS}{{"}, ["Prometheus"]), ({"gone": True}, [URL]),
])  # fmt: skip
def test_failing_exporter_is_reported(exporter, source, shown, facts):
    vars(exporter).update(shown)
    for ask in (lambda: source.read(0.0), lambda: ExporterSource(URL, GPU)):
        with refused(*facts, kind=SensorFailed, hint="http://localhost:9400/metrics"):
            ask()


NO_URLS = ("file:///etc/passwd", "ftp://host/m", "localhost:9400", "dgcm", "http:///x", "http://[1/x")
NO_PLACES = ("http://127.0.0.1:port/x", "http://127.0.0.1:99999/x", "http://127.0.0.1/a b")


@pytest.mark.parametrize("url", [*NO_URLS, *NO_PLACES])
def test_non_http_url_is_refused(exporter, url):
    kind, option = (BadUsage, "--slm-telemetry ") if url in NO_URLS else (SensorFailed, "")
    with refused(url, kind=kind, hint=f"{option}http://localhost:9400/metrics"):
        ExporterSource(url, GPU)


@pytest.mark.parametrize(("url", "kind", "host", "port", "target"), [
    ("http://node:9400/metrics", "HTTPConnection", "node", 9400, "/metrics"),
    ("https://node/a?b=c&d", "HTTPSConnection", "node", 443, "/a?b=c&d"),
])  # fmt: skip
def test_exporter_request_bypasses_proxy(exporter, monkeypatch, url, kind, host, port, target):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    exporter.text, exporter.status = "é", 404
    assert ask_once("POST", url, {"Key": "k"}, "body", 5.0) == (404, "text/plain", "é")
    ((*where, timeout, far),) = exporter.asked
    assert (where, timeout) == ([kind, host, port], 5.0)
    sent = far.recv(9999).decode()
    assert sent.startswith(f"POST {target} HTTP/1.1\r\n") and "\r\nKey: k\r\n" in sent and sent.endswith("\r\n\r\nbody")


@pytest.mark.parametrize(("interim", "status"), [(0, 200), (1, 200), (7, 200), (8, 103)])
def test_interim_responses_are_skipped(exporter, interim, status):
    exporter.version = "HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n" * interim + "HTTP/1.1"
    assert ask_once("GET", URL, {}, None, 5.0)[0] == status


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_closed_complete_answer_is_read(exporter, version, monkeypatch):
    """As 3.13 does; releases before do so with the next read."""
    read1 = http.client.HTTPResponse.read1

    def closing(self, n=-1):
        piece = read1(self, n)
        if piece and not self.length:
            self._close_conn()
        return piece

    monkeypatch.setattr(http.client.HTTPResponse, "read1", closing)
    exporter.text, exporter.version = "hello", version
    assert ask_once("GET", URL, {}, None, 5.0) == (200, "text/plain", "hello")


def test_long_answer_is_cut(exporter, monkeypatch):
    monkeypatch.setattr(sources, "MOST_BYTES", 8)
    exporter.text = "x" * 30
    status, _, text = ask_once("GET", URL, {}, None, 5.0)
    assert status == 200 and 8 <= len(text) < 30
    clock = iter([100.0, 104.9, 200.0, 205.0])
    monkeypatch.setattr(sources.time, "monotonic", lambda: next(clock))
    assert ask_once("GET", URL, {}, None, 5.0)[0] == 200
    with pytest.raises(TimeoutError, match="5 s"):
        ask_once("GET", URL, {}, None, 5.0)


@pytest.mark.parametrize("text", ["up", 'up{x="1} 1', "up{x=1} 1", r"up{} one", "up{"])
def test_malformed_line_is_refused(text):
    with pytest.raises(ValueError, match="Prometheus"):
        samples(f"up 1\n{text}\n", ["up"])


@given(st.lists(st.sampled_from([*'1{}"\\,=#. \n\t', WATTS, "UUID", "GPU-1", "gpu", "NaN"])))
def test_garbage_page_never_crashes(words):
    try:
        found = values_of_gpu(samples("".join(words), ON_A_PAGE), "GPU-1")
    except (SensorFailed, ValueError) as error:
        found = {of.POWER: error}
    assert found.keys() == {of.POWER}
