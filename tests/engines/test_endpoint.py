"""The door to somebody else's server: what it is asked, what is refused before anything is measured, what is known."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from doors import FAKE, small_workload, stand_in

from pytest_slmserve import foreign
from pytest_slmserve.analysis import window
from pytest_slmserve.analysis.validity import problems
from pytest_slmserve.codec import engine_line, engine_of, measurement_line, measurement_of
from pytest_slmserve.engines.endpoint import EndpointEngine, text_of
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.server import ServerEngine
from pytest_slmserve.environment import remote
from pytest_slmserve.errors import BadUsage
from pytest_slmserve.measure import measure
from pytest_slmserve.records import Request
from pytest_slmserve.spec import ClosedLoop, EngineSpec, OpenLoop
from pytest_slmserve.store import read

SCHEDULE = tuple(i / 50 for i in range(100))


@pytest.fixture(scope="module")
def there():
    """A server that somebody has started."""
    found = ServerEngine(replace(stand_in(), door="server"))
    yield found
    found.close()


def spec_of(there, model="slm", path="/v1/completions"):
    return EngineSpec(model, backend="remote", door="endpoint", url=f"http://127.0.0.1:{there.port}{path}")


@pytest.fixture(scope="module")
def endpoint(there):
    found = EndpointEngine(spec_of(there), there._key)
    yield found
    found.close()


def test_a_closed_loop_without_a_step_trace(endpoint):
    found = measure(endpoint, small_workload(), ClosedLoop(4, window_s=0.6), remote())
    run = found.run
    assert problems(found) == () and len(run.steps) == 0
    assert window.step_s(run) is None and window.kv_usage(run) is None and window.littles_law(run) is None
    assert 3 < window.mean_batch(run) <= 4
    ended = window.finished_in_window(run)
    by_requests = 8 * len(ended) / (run.window_s[1] - run.window_s[0])
    assert window.output_tokens_per_s(run) == pytest.approx(by_requests, rel=0.15)


def test_all_tokens_are_in_the_stream(endpoint):
    run = endpoint.run(small_workload(), ClosedLoop(2, requests=20))
    assert sum(run.stream.tokens) == 160 == sum(run.samples.output_tokens)
    assert sum(run.stream.gaps["counts"].values()) == pytest.approx(20 * 7, abs=2), "but for those at the window's ends"
    assert run.stream.tokens_per_chunk == 1


def test_requests_come_when_the_schedule_says(endpoint):
    found = measure(endpoint, small_workload(), OpenLoop("every 20 ms", 50.0, 0.5, 1.0, SCHEDULE), remote())
    run = found.run
    assert run.window_s == (0.5, 1.5)
    assert run.stream.scheduled_s == pytest.approx(SCHEDULE, abs=1e-5)
    late = [sent - at for at, sent in zip(SCHEDULE, run.samples.sent_s)]
    assert min(late) > -1e-4, "never early"
    assert sorted(late)[50] < 0.1, "a busy machine is late"


def test_a_client_that_lagged_makes_a_run_invalid(endpoint):
    found = measure(endpoint, small_workload(), OpenLoop("every 20 ms", 50.0, 0.5, 1.0, SCHEDULE), remote())
    earlier = tuple(at - 0.05 for at in found.run.stream.scheduled_s)
    lagged = replace(found, run=replace(found.run, stream=replace(found.run.stream, scheduled_s=earlier)))
    assert any("the client lagged" in text for text in problems(lagged))


def test_a_record_keeps_the_stream_and_not_the_schedule_twice(endpoint):
    found = measure(endpoint, small_workload(), OpenLoop("every 20 ms", 50.0, 0.5, 1.0, SCHEDULE), remote())
    lines = json.loads(json.dumps([engine_line(found), measurement_line(found)]))
    again = measurement_of(lines[1], *engine_of(lines[0]))
    assert again.run.stream == found.run.stream and again.load == found.load and again.id == found.id
    assert "schedule_s" not in lines[1]["load"]


def test_a_schedule_is_for_a_server():
    with Pool() as pool, pytest.raises(BadUsage, match="a schedule of arrivals is for a server"):
        pool.engine(FAKE).run(small_workload(), OpenLoop("x", 50.0, 0.5, 1.0, SCHEDULE))


# What is asked of it


def test_a_chat_is_asked_in_words_and_completions_in_ids(there):
    chat = EndpointEngine.__new__(EndpointEngine)
    chat.spec, chat._further = spec_of(there, path="/v1/chat/completions"), {"ignore_eos": None, "top_k": 1}
    asked = json.loads(chat.body(Request((5, 6, 7), 9)))
    assert asked["messages"] == [{"role": "user", "content": text_of(Request((5, 6, 7), 9))}]
    assert len(asked["messages"][0]["content"].split()) == 3
    assert asked["top_k"] == 1 and not {"prompt", "ignore_eos"} & set(asked)


@pytest.mark.parametrize(
    ("model", "path", "key", "problem"),
    [
        ("slm", "/v1/completions", "wrong", "answered 401"),
        ("other", "/v1/completions", None, "answered 404: .*`other` does not exist"),
    ],
)
def test_what_is_refused_is_an_error_before_anything_is_measured(there, model, path, key, problem):
    with pytest.raises(BadUsage, match=problem) as caught:
        EndpointEngine(spec_of(there, model, path), key or there._key)
    assert there._key not in str(caught.value)


def test_nobody_there(there):
    spec = replace(spec_of(there), url="http://127.0.0.1:1/v1/completions")
    with pytest.raises(BadUsage, match="127.0.0.1:1/v1/completions does not answer"):
        EndpointEngine(spec)


# Without pytest


def command(there, tmp_path, *arguments, key=None):
    words = ["--endpoint", spec_of(there).url, "--model", "slm", "--records", str(tmp_path / "r.jsonl")]
    env = {**os.environ, "SLM_ENDPOINT_KEY": there._key if key is None else key}
    lengths = ["--input-len", "16", "--output-len", "8"]
    run = [sys.executable, "-m", "pytest_slmserve", "measure", *words, *lengths, *arguments]
    return subprocess.run(run, capture_output=True, text=True, env=env, timeout=60)


def measured(done):
    """What it found; a client that lags, as on a busy machine, is told and no fault of the command."""
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    wrong = [text for text in found["problems"] if "the client lagged" not in text]
    assert wrong == [] and found["valid"] is (done.returncode == 0) is (found["problems"] == [])
    return found


def test_measure_prints_a_page_and_keeps_a_record(there, tmp_path):
    done = command(there, tmp_path, "--concurrency", "4", "--requests", "40")
    assert done.returncode == 0, done.stderr
    assert "40 requests ended in the window, 0 of them unfinished; 0 failed" in done.stdout
    assert {"TTFT", "TPOT", "E2E", "ITL"} <= {line.split()[0] for line in done.stdout.splitlines() if line}
    (kept,) = read(tmp_path / "r.jsonl").measurements
    assert (kept.spec.door, kept.spec.model, len(kept.run.samples)) == ("endpoint", "slm", 40)
    assert there._key not in (tmp_path / "r.jsonl").read_text("utf-8") + done.stdout + done.stderr


def test_a_result_in_the_words_of_vllms_own_client(there, tmp_path):
    """Our own reader of such files reads it, and the numbers are those of the page."""
    saved = tmp_path / "bench.json"
    load = ("--concurrency", "4", "--requests", "40")
    found = json.loads(command(there, tmp_path, *load, "--json", "--vllm-bench", str(saved)).stdout)
    told = json.loads(saved.read_text("utf-8"))
    assert (told["completed"], told["failed"], told["max_concurrency"], told["request_rate"]) == (40, 0, 4, "inf")
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (640, 320)
    assert told["output_throughput"] == pytest.approx(found["output_tokens_per_s"])
    assert told["total_token_throughput"] == pytest.approx(3 * 320 / told["duration"], rel=0.1)
    for theirs, ours in (("ttft", "ttft"), ("tpot", "tpot"), ("e2el", "e2e"), ("itl", "itl")):
        assert told[f"p99_{theirs}_ms"] == pytest.approx(1e3 * found["latency_s"][ours]["p99"])
    assert told["mean_itl_ms"] == pytest.approx(told["mean_tpot_ms"], rel=0.1)
    columns = foreign.Columns(knob="max_concurrency", throughput="output_throughput", latency="mean_tpot_ms")
    (setting,) = foreign.settings_of(foreign.read(saved), columns)
    assert setting.knob == 4 and setting.latency_s == pytest.approx((found["latency_s"]["tpot"]["mean"],))


def test_measure_at_a_rate_tells_goodput_and_delay(there, tmp_path):
    timing = ("--request-rate", "40", "--settle", "0.3", "--window", "1")
    found = measured(command(there, tmp_path, *timing, "--slo", "ttft:1s,e2e:2s", "--json"))
    assert found["requests"] == found["goodput"]["good"] > 20
    assert found["schedule_delay"]["requested_per_s"] == found["requests"]
    assert found["goodput"]["slo"] == "ttft:1s,e2e:2s" and found["latency_s"]["ttft"]["p99"] < 1


def test_measure_replays_a_trace(there, tmp_path):
    lines = [f'{{"timestamp": {50 * i}, "input_length": 12, "output_length": {3 + i % 4}}}' for i in range(60)]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines), "utf-8")
    timing = ("--trace", str(tmp_path / "trace.jsonl"), "--speed", "2", "--settle", "0.2", "--window", "0.79")
    found = measured(command(there, tmp_path, *timing, "--json"))
    (kept,) = read(tmp_path / "r.jsonl").measurements
    assert len(kept.run.samples) == 48, "1.19 s, twice as fast"
    assert list(kept.run.samples.output_tokens[:5]) == [3, 4, 5, 6, 3]
    assert found["load"]["arrivals"].endswith("speed 2")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "one of the arguments --concurrency --request-rate --trace is required"),
        (("--concurrency", "4", "--requests", "3"), "--requests 3 cannot keep 4 in flight"),
        (("--concurrency", "4", "--requests", "9", "--window", "3"), "two ways to end"),
        (("--request-rate", "4", "--requests", "9"), "has a window, not a number of requests"),
        (("--concurrency", "4", "--extra-body", "[1]"), "is no JSON object"),
        (("--concurrency", "4", "--slo", "fast"), "'fast' is no SLO"),
    ],
)
def test_wrong_usage_of_measure(there, tmp_path, arguments, problem):
    done = command(there, tmp_path, *arguments)
    assert done.returncode == 4 and problem in done.stderr
