"""Engines at a URL: what another's server is asked, what is refused before anything is measured, what is known."""

import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from interfaces import SIMULATED, engine_with, problems_of, small_workload, somebodys_server, url_of
from measured import measure

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.points import summarize
from pytest_slmserve.archive.codec import engine_from_record, engine_line, measurement_line, measurement_of
from pytest_slmserve.engines.endpoint import EndpointEngine
from pytest_slmserve.engines.pool import launch_engine
from pytest_slmserve.report.loads import ValidityCriteria, in_words, load_section
from pytest_slmserve.report.section import section_text
from pytest_slmserve.report.text_table import laid_out
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.records import Samples
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop
from pytest_slmserve.telemetry.host import this_host
from pytest_slmserve.workload.arrivals import job

SCHEDULE = tuple(i / 50 for i in range(100))
EVERY_20_MS = OpenLoop(rate=50.0, settle_s=0.5, window_s=1.0, arrivals="every 20 ms", schedule_s=SCHEDULE)


@pytest.fixture(scope="module")
def there():
    with somebodys_server() as found:
        yield found


def spec_of(there, model="slm", path="/v1/completions"):
    return EngineSpec(model, platform="remote", interface="endpoint", url=url_of(there, path))


@pytest.fixture(scope="module")
def endpoint(there):
    found = engine_with(there._key, spec_of(there))
    yield found
    found.close()


def test_a_client_that_was_killed_is_not_taken_for_the_next_load(there):
    engine = engine_with(there._key, spec_of(there))
    assert engine.ready

    def kill(progress):
        os.kill(engine._client.children[0].process.pid, signal.SIGKILL)

    with pytest.raises(EngineFailed, match="the load generator was killed by SIGKILL"):
        engine.run(small_workload(), ClosedLoop(2, window_s=30.0), kill)
    assert not engine.ready
    engine._client.children[0].keep_log = False
    engine.close()


def load_text(found):
    with laid_out(400):
        return section_text(load_section(found, ValidityCriteria()))


def test_a_closed_loop_without_a_step_trace(endpoint):
    found = measure(endpoint, small_workload(), ClosedLoop(4, window_s=0.6), this_host("remote"))
    run = found.run
    assert problems_of([found]) == [] and len(run.steps) == 0
    assert window.step_s(run) is None and window.kv_usage(run) is None and window.littles_law(run) is None
    assert 3 < window.mean_batch(run) <= 4
    ended = window.finished_in_window(run)
    by_requests = 8 * len(ended) / (run.window_s[1] - run.window_s[0])
    assert window.output_tokens_per_s(run) == pytest.approx(by_requests, rel=0.15)


@pytest.fixture(scope="module")
def counted(endpoint):
    """A measurement of twenty requests."""
    return measure(endpoint, small_workload(), ClosedLoop(2, requests=20), this_host("remote"))


@pytest.fixture(scope="module")
def scheduled(endpoint):
    """A measurement of a request every 20 ms."""
    return measure(endpoint, small_workload(), EVERY_20_MS, this_host("remote"))


def test_all_tokens_are_in_the_stream(counted):
    run = counted.run
    assert sum(run.stream.tokens) == 160 == sum(run.samples.output_tokens)
    assert sum(run.stream.gaps["counts"].values()) == pytest.approx(20 * 7, abs=2), "but for those at the window's ends"
    assert run.stream.tokens_per_chunk == 1


def test_requests_come_when_the_schedule_says_and_a_client_that_lagged_is_invalid(scheduled):
    run = scheduled.run
    assert run.window_s == (0.5, 1.5)
    assert run.stream.scheduled_s == pytest.approx(SCHEDULE, abs=1e-5)
    late = [sent - at for at, sent in zip(SCHEDULE, run.samples.sent_s)]
    assert min(late) > -1e-4, "never early"
    assert sorted(late)[50] < 0.1, "a busy machine is late"
    earlier = tuple(at - 0.05 for at in run.stream.scheduled_s)
    lagged = replace(scheduled, run=replace(run, stream=replace(run.stream, scheduled_s=earlier)))
    assert any("the client lagged" in text for text in problems(lagged))


def test_a_record_keeps_the_stream_and_not_the_schedule_twice(scheduled):
    engine = engine_line(scheduled.launch, scheduled.spec, scheduled.resolved, scheduled.environment)
    lines = json.loads(json.dumps([engine, measurement_line(scheduled)]))
    again = measurement_of(lines[1], *engine_from_record(lines[0]))
    assert again.run.stream == scheduled.run.stream and again.load == scheduled.load and again.id == scheduled.id
    assert "schedule_s" not in lines[1]["load"]


@pytest.mark.parametrize("load", [EVERY_20_MS, job(4, max_concurrency=2)])
def test_a_schedule_with_a_window_or_a_limit_is_for_a_server(load):
    with pytest.raises(BadUsage, match="an open loop with a window or .* needs a server"):
        launch_engine(SIMULATED).run(small_workload(), load)


# What is asked of it


def test_modules_of_the_working_folder_are_not_run_by_the_client(there, monkeypatch, tmp_path):
    for name in ("json", "uuid", "socket", "resource", "dataclasses"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLM_ENDPOINT_KEY", there._key)
    engine = EndpointEngine(spec_of(there))
    environment = Path(f"/proc/{engine._client.children[0].process.pid}/environ").read_bytes()
    engine.close()
    assert there._key.encode() not in environment and b"SLM_ENDPOINT_KEY" not in environment


@pytest.mark.parametrize(
    ("model", "path", "key", "problem"),
    [
        ("slm", "/v1/completions", "wrong", "answered 401"),
        ("other", "/v1/completions", None, "answered 404: .*`other` does not exist"),
    ],
)
def test_what_is_refused_is_an_error_before_anything_is_measured(there, model, path, key, problem):
    with pytest.raises(BadUsage, match=problem) as caught:
        engine_with(key or there._key, spec_of(there, model, path))
    assert there._key not in str(caught.value)


def test_requests_that_ended_early_are_counted(counted):
    run = counted.run
    short = replace(run, samples=replace(run.samples, output_tokens=(4, *run.samples.output_tokens[1:])))
    told = "1 of 20 requests ended early, 7.8 output tokens in the mean"
    assert told in load_text(replace(counted, run=short)) and "ended early" not in load_text(counted)
    steady = replace(counted, load=ClosedLoop(2))
    as_asked, early = (summarize(replace(steady, run=each)).requests_per_s for each in (run, short))
    assert early == pytest.approx(as_asked * 8 / 7.8), "as many tokens, shorter requests"


def test_a_server_that_has_nothing_more_to_say_is_slow_until_the_window_closes(endpoint):
    early = tuple(i / 50 for i in range(12))
    run = endpoint.run(small_workload(), OpenLoop(rate=10.0, window_s=1.2, arrivals="early", schedule_s=early))
    assert window.output_tokens_per_s(run) == pytest.approx(12 * 8 / 1.2, rel=0.1), (
        "of the window, not of its first 0.3 s"
    )
    assert sum(run.stream.tokens) == 12 * 8


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (2.5, "2.50 tokens came in a chunk, in the mean: ITL is between chunks"),
        (None, "the server does not say how many tokens it sent: each chunk counts as one"),
        (1.0, ""),
    ],
)
def test_the_page_says_what_a_chunk_is(counted, tokens, told):
    stream = replace(counted.run.stream, tokens_per_chunk=tokens)
    text = load_text(replace(counted, run=replace(counted.run, stream=stream)))
    assert told in text and ("chunk" in text) == bool(told)


def test_the_page_tells_the_throughput_of_requests_and_of_tokens_both_ways(counted):
    line = re.search(
        r"^([\d.,]+) requests/s, ([\d.,]+) output and ([\d.,]+) prompt tokens/s over", load_text(counted), re.M
    )
    requests, outputs, prompts = (float(number.replace(",", "")) for number in line.groups())
    seconds = counted.run.window_s[1] - counted.run.window_s[0]
    assert prompts == pytest.approx(16 * 20 / seconds, rel=1e-3) and outputs == pytest.approx(8 * requests, rel=1e-3)
    assert requests == pytest.approx(20 / seconds, rel=1e-3), "of all its time, and not from the first token on"


def test_a_server_that_keeps_a_request_waiting_with_comments_is_not_waited_for(monkeypatch):
    """A limit on each read of a socket would begin anew with every one of them."""
    monkeypatch.setattr("pytest_slmserve.engines.endpoint.ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=comment, args=(listening,), daemon=True).start()
        spec = EngineSpec(
            "m", platform="remote", interface="endpoint", url=f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        )
        with pytest.raises(BadUsage, match="does not answer: "):
            EndpointEngine(spec)
    with pytest.raises(BadUsage, match="127.0.0.1:1/v1/completions does not answer"):
        EndpointEngine(replace(spec, url="http://127.0.0.1:1/v1/completions"))


def comment(listening):
    """Answers one connection with comments until it is closed."""
    connection, _ = listening.accept()
    with connection, suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        while True:
            connection.sendall(b": wait\n\n")
            time.sleep(0.05)


def test_a_load_of_which_nothing_came_has_no_table_of_dashes(counted):
    run = replace(counted.run, samples=Samples(*[()] * 8), stream=None, failures=20, first_failure="HTTP 400: no")
    told = load_text(replace(counted, run=run))
    assert "TTFT" not in told and "INVALID: 20 requests failed, the first with HTTP 400: no" in told


def test_gamma_gaps_have_the_name_of_the_field():
    assert in_words("gamma 1, 20/s, seed 0") == "Poisson arrivals, 20/s, seed 0"
    assert in_words("ramp 20,60/s, 1 s each, gamma inf") == "ramp 20,60/s, 1 s each, arrivals with constant gaps"
    assert in_words("gamma 0.5") == "arrivals with gamma gaps, burstiness 0.5"
    assert in_words("every 20 ms") == "every 20 ms"
