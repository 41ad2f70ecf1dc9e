"""dcgm-exporter, on pages made by hand after its documentation and a server on the loopback (fake_exporter.py)."""

from __future__ import annotations

import http.client
import math

import pytest
from fake_exporter import GPU, OTHER_GPU, line, page, serving
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.schema.sensors import (
    DRAM_ACTIVE,
    ENERGY,
    GPU_UTIL,
    MEMORY_CLOCK,
    MEMORY_USED,
    POWER,
    PROFILED,
    SM_ACTIVE,
    SM_CLOCK,
    TEMPERATURE,
    TENSOR_ACTIVE,
    XID,
)
from pytest_slmserve.telemetry.gpu import NUMBERS, ExporterSource, ask_once, samples, values_of_gpu

DEFAULT = {
    "DCGM_FI_DEV_SM_CLOCK": 1980,
    "DCGM_FI_DEV_MEM_CLOCK": 3201,
    "DCGM_FI_DEV_MEMORY_TEMP": 41,
    "DCGM_FI_DEV_GPU_TEMP": 64,
    "DCGM_FI_DEV_POWER_USAGE": "431.250000",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 123456789,
    "DCGM_FI_DEV_GPU_UTIL": 97,
    "DCGM_FI_DEV_XID_ERRORS": 0,
    "DCGM_FI_DEV_FB_USED": 141000,
}
PROFILING = {
    "DCGM_FI_PROF_SM_ACTIVE": "0.875000",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "0.125000",
    "DCGM_FI_PROF_DRAM_ACTIVE": "0.500000",
}


@pytest.fixture
def exporter():
    with serving(page(DEFAULT)) as shown:
        yield shown


def updated(exporter, values):
    """The first reading after the page has changed to these values."""
    source = ExporterSource(exporter.url, GPU)
    exporter.text = page(values)
    return source.read(0.0)


def test_each_unit_becomes_ours(exporter):
    assert updated(exporter, {**DEFAULT, **PROFILING}).values == {
        SM_CLOCK: 1.98e9,
        MEMORY_CLOCK: 3.201e9,
        TEMPERATURE: 64,
        POWER: 431.25,
        ENERGY: 123_456.789,
        GPU_UTIL: 0.97,
        XID: 0,
        MEMORY_USED: 141_000 * 2**20,
        SM_ACTIVE: 0.875,
        TENSOR_ACTIVE: 0.125,
        DRAM_ACTIVE: 0.5,
    }


def test_the_names_of_4_6_mean_the_same_numbers(exporter):
    new = {
        "DCGM_FI_DEV_GPU_UTIL_RATIO": 97,
        "DCGM_FI_DEV_BOARD_POWER_WATTS": "431.250000",
        "DCGM_FI_PROF_SM_UTIL_RATIO": "0.875000",
    }
    exporter.text = page({**new, "DCGM_FI_PROF_SM_UTIL_RATIO": 0})
    assert updated(exporter, new).values == {GPU_UTIL: 0.97, POWER: 431.25, SM_ACTIVE: 0.875}


def test_rows_that_are_not_on_the_page_are_absent(exporter):
    source = ExporterSource(exporter.url, GPU)
    assert (source.name, exporter.asked) == ("dcgm-exporter", ["/metrics"])
    assert not set(PROFILED) & set(source.read(0.0).values)
    source.close()
    source.close()


# A page that repeats itself


def test_values_are_given_once_they_change(exporter):
    source = ExporterSource(exporter.url, GPU)
    first = source.read(0.0)
    assert set(first.values.values()) == {None}
    assert f"{POWER}: not updated" in first.missing
    assert len(first.missing) == len(first.values) == 8
    exporter.text = page({**DEFAULT, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 123456790})
    assert source.read(1.0).values[POWER] == 431.25, "one value that moved tells that all were collected"
    assert source.read(2.0).values[POWER] is None


def test_a_page_with_a_value_that_is_none_repeats_itself_too(exporter):
    source = ExporterSource(exporter.url, GPU)
    exporter.text = page({**DEFAULT, "DCGM_FI_PROF_SM_ACTIVE": "NaN"})
    assert source.read(0.0).values[POWER] == 431.25
    assert source.read(1.0).values[POWER] is None


def test_another_gpus_news_are_no_news(exporter):
    exporter.text = page(DEFAULT) + page(DEFAULT, OTHER_GPU, index=1)
    source = ExporterSource(exporter.url, GPU)
    exporter.text = page(DEFAULT) + page({**DEFAULT, "DCGM_FI_DEV_POWER_USAGE": 1.0}, OTHER_GPU, index=1)
    assert source.read(0.0).values[POWER] is None


def test_the_span_is_the_time_since_the_last_update(exporter):
    source = ExporterSource(exporter.url, GPU)
    spans = []
    for now, active in ((10.0, 0.25), (11.0, 0.25), (40.0, 0.5), (41.0, 0.5)):
        exporter.text = page({**DEFAULT, "DCGM_FI_PROF_SM_ACTIVE": active})
        spans.append(source.read(now).span_s)
    assert spans == [None, None, 30.0, None]


def test_without_profiling_counters_there_is_no_span(exporter):
    source = ExporterSource(exporter.url, GPU)
    for now in (1.0, 2.0):
        exporter.text = page({**DEFAULT, "DCGM_FI_DEV_POWER_USAGE": now})
        assert source.read(now).span_s is None


def test_a_row_that_comes_late_and_one_that_goes(exporter):
    source = ExporterSource(exporter.url, GPU)
    exporter.text = page({**DEFAULT, **PROFILING})
    assert source.read(0.0).values[SM_ACTIVE] == 0.875
    exporter.text = page({**DEFAULT, "DCGM_FI_DEV_POWER_USAGE": 1.0})
    reading = source.read(1.0)
    assert (reading.values[POWER], reading.values[SM_ACTIVE]) == (1.0, None)
    assert f"{SM_ACTIVE}: not on the page" in reading.missing


# What is no value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("9223372036854775792", "blank"),
        ("9223372036854775794", "not supported"),  # shown in the exporter's README
        ("9.223372036854776e+18", "blank"),
        ("140737488355328.000000", "blank"),
        ("1.4073748835533e+14", "not supported"),
        ("2147483634", "not supported"),
        ("NaN", "nan"),
        ("-Inf", "-inf"),
        (f"-{10**400}", "an integer that is too large"),
    ],
)
def test_a_sentinel_is_none_and_says_why(exporter, text, reason):
    reading = updated(exporter, {**DEFAULT, "DCGM_FI_DEV_POWER_USAGE": text})
    assert reading.values[POWER] is None
    assert f"{POWER}: {reason}" in reading.missing
    assert reading.values[TEMPERATURE] == 64


# Which GPU


def test_of_two_gpus_ours_is_read(exporter):
    other = page({**DEFAULT, "DCGM_FI_DEV_POWER_USAGE": 1.0}, OTHER_GPU, index=1)
    exporter.text = other + page(DEFAULT)
    source = ExporterSource(exporter.url, GPU)
    exporter.text = other + page({**DEFAULT, "DCGM_FI_DEV_POWER_USAGE": 2.0})
    assert source.read(0.0).values[POWER] == 2.0


def test_the_only_gpu_is_taken_where_the_page_has_no_uuids(exporter):
    exporter.text = 'DCGM_FI_DEV_POWER_USAGE{gpu="0"} 300\n'
    assert POWER in ExporterSource(exporter.url, GPU).read(0.0).values


def test_the_old_label_of_the_uuid_is_known():
    rows = (f'DCGM_FI_DEV_POWER_USAGE{{gpu="0",uuid="{uuid}"}} {watts}' for uuid, watts in ((GPU, 300), (OTHER_GPU, 1)))
    assert values_of_gpu(samples("\n".join(rows), NUMBERS), GPU) == {POWER: 300}


@pytest.mark.parametrize(
    ("text", "uuid", "words"),
    [
        (page(DEFAULT), OTHER_GPU, f"no values of {OTHER_GPU}, but of {GPU}"),
        (page(DEFAULT) + page(DEFAULT, OTHER_GPU), "GPU-0", "no values of GPU-0, but of GPU-1.*, GPU-9"),
        (page(DEFAULT, more=',GPU_I_PROFILE="1g.18gb",GPU_I_ID="7"'), GPU, "MIG instances"),
        ("# HELP nothing here\n", GPU, "but of no GPU at all"),
        ("node_load1 0.5\n", GPU, "but of no GPU at all"),
        ("<!doctype html>\n<p>404</p>", GPU, "but of no GPU at all"),
    ],
)
def test_a_page_without_our_gpu_is_no_source(exporter, text, uuid, words):
    exporter.text = text
    with pytest.raises(SensorFailed, match=words):
        ExporterSource(exporter.url, uuid)


# What is not there


def test_nobody_there_is_named_with_an_example():
    with serving(page(DEFAULT)) as gone:
        source = ExporterSource(gone.url, GPU)
    for ask in (lambda: source.read(0.0), lambda: ExporterSource(gone.url, GPU)):
        with pytest.raises(SensorFailed, match=f"no page of dcgm-exporter at {gone.url}") as found:
            ask()
        assert found.value.hint == "http://localhost:9400/metrics"


@pytest.mark.parametrize(
    ("shown", "words"),
    [({"status": 503}, "503"), ({"text": "DCGM_FI_DEV_POWER_USAGE{"}, "the page is not in Prometheus' format")],
)
def test_an_error_of_the_server_and_garbage_are_failures(exporter, shown, words):
    source = ExporterSource(exporter.url, GPU)
    vars(exporter).update(shown)
    with pytest.raises(SensorFailed, match=words):
        source.read(0.0)


def test_a_proxy_is_not_asked(exporter, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    ExporterSource(exporter.url, GPU)
    assert exporter.asked


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/metrics", "localhost:9400", "dgcm", "http://[1/x"])
def test_only_http_is_asked(url):
    with pytest.raises(BadUsage, match="is not the address of a dcgm-exporter's page"):
        ExporterSource(url, GPU)


@pytest.mark.parametrize("url", ["http://127.0.0.1:port/x", "http://127.0.0.1:99999/x", "http://127.0.0.1/a b"])
def test_an_address_that_cannot_be_asked_is_a_failure(url):
    with pytest.raises(SensorFailed, match="no page"):
        ExporterSource(url, GPU)


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_an_answer_that_python_closes_at_its_end(version, monkeypatch):
    """As 3.13 does; releases before do so with the next read."""
    read1 = http.client.HTTPResponse.read1

    def closing(self, n=-1):
        piece = read1(self, n)
        if piece and not self.length:
            self._close_conn()
        return piece

    monkeypatch.setattr(http.client.HTTPResponse, "read1", closing)
    with serving("hello", version) as shown:
        assert ask_once("GET", shown.url, {}, None, 5.0) == (200, "", "hello")


# The format


def test_comments_blank_lines_and_other_metrics_are_skipped():
    text = "\n# HELP x y\n# EOF\n\n" + page(DEFAULT) + line("DCGM_EXP_XID_ERRORS_COUNT", 3) + "go_goroutines 12\n"
    assert values_of_gpu(samples(text, NUMBERS), GPU).keys() == {NUMBERS[name] for name in DEFAULT if name in NUMBERS}


def test_a_counter_keeps_its_name():
    """Prometheus' own client adds `_total` to it."""
    name = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
    text = f"# HELP {name} Energy (in mJ).\n# TYPE {name} counter\n" + line(name, 123456789)
    assert values_of_gpu(samples(text, NUMBERS), GPU) == {ENERGY: 123456789}


@pytest.mark.parametrize(
    ("text", "labels", "value"),
    [
        ("up 1", {}, 1),
        ("up 1 1700000000000", {}, 1),
        ('up{x="1",}2.5', {"x": "1"}, 2.5),
        ('up {x = "}" , y="{,="}\t+Inf\r', {"x": "}", "y": "{,="}, math.inf),
        (r'up{x="\"\\\n"} 1e3', {"x": '"\\\n'}, 1000.0),
        ("up 9223372036854775793", {}, 9223372036854775793),  # a float cannot distinguish it from its neighbours
    ],
)
def test_a_line_of_the_format(text, labels, value):
    [sample] = samples(f"{text}\ndown 0\n", ["up"])
    assert (sample.labels, sample.value) == (labels, value) and type(sample.value) is type(value)


@pytest.mark.parametrize("text", ["up", 'up{x="1} 1', "up{x=1} 1", r"up{} one", "up{"])
def test_a_line_that_is_not_of_the_format_is_a_failure(text):
    with pytest.raises(ValueError, match="the page is not in Prometheus' format"):
        samples(f"up 1\n{text}\n", ["up"])


@given(st.text('up1{}="\\,#. \n\t', max_size=40))
def test_garbage_is_a_failure_or_a_page(text):
    try:
        found = samples(text, ["up"])
    except ValueError:
        return
    assert all(isinstance(sample.value, int | float) for sample in found)


@given(st.lists(st.sampled_from([*'{}"\\,= \n', "DCGM_FI_DEV_POWER_USAGE", "UUID", "GPU-1", "gpu", "1", "NaN"])))
def test_garbage_of_the_right_words_is_a_failure_or_has_our_gpu(words):
    try:
        found = {*values_of_gpu(samples("".join(words), NUMBERS), "GPU-1")}
    except (SensorFailed, ValueError):
        found = set()
    assert found in ({POWER}, set())
