"""Engines at a URL, on a stand-in for vLLM's server: what is known of a load, what never reaches its client, and a
cache of prefixes, which makes a prompt free that has been there. What is asked of it is in tests/unit/engines."""

import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from interfaces import engine_with, problems_of, small_workload, somebodys_server, stand_in, url_of
from measured import measure

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import cache_hit_share, problems
from pytest_slmserve.analysis.points import summarize
from pytest_slmserve.archive.codec import engine_from_record, engine_line, measurement_line, measurement_of
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.endpoint import EndpointEngine, cache_lookups
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.report.loads import ValidityCriteria, in_words, load_section
from pytest_slmserve.report.section import section_text
from pytest_slmserve.report.text_table import laid_out
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.records import Samples
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop
from pytest_slmserve.telemetry.host import this_host

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


def test_a_server_that_has_nothing_more_to_say_is_slow_until_the_window_closes(endpoint):
    early = tuple(i / 50 for i in range(12))
    run = endpoint.run(small_workload(), OpenLoop(rate=10.0, window_s=1.2, arrivals="early", schedule_s=early))
    assert window.output_tokens_per_s(run) == pytest.approx(12 * 8 / 1.2, rel=0.1), (
        "of the window, not of its first 0.3 s"
    )
    assert sum(run.stream.tokens) == 12 * 8


def test_modules_of_the_working_folder_are_not_run_by_the_client(there, monkeypatch, tmp_path):
    for name in ("json", "uuid", "socket", "resource", "dataclasses"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLM_ENDPOINT_KEY", there._key)
    engine = EndpointEngine(spec_of(there))
    environment = Path(f"/proc/{engine._client.children[0].process.pid}/environ").read_bytes()
    engine.close()
    assert there._key.encode() not in environment and b"SLM_ENDPOINT_KEY" not in environment


def test_a_client_that_was_killed_is_not_taken_for_the_next_load(there):
    engine = engine_with(there._key, spec_of(there))
    assert engine.ready

    def kill(progress):
        os.kill(engine._client.children[0].process.pid, signal.SIGKILL)

    with pytest.raises(EngineFailed) as caught:
        engine.run(small_workload(), ClosedLoop(2, window_s=30.0), kill)
    assert "SIGKILL" in caught.value.problem and not engine.ready
    engine._client.children[0].keep_log = False
    engine.close()


@pytest.mark.parametrize(
    ("model", "key", "facts"), [("slm", "wrong", {"401"}), ("other", None, {"404", "`other`"})], ids=["key", "model"]
)
def test_what_is_refused_is_an_error_before_anything_is_measured(there, model, key, facts):
    with pytest.raises(BadUsage) as caught:
        engine_with(key or there._key, spec_of(there, model))
    assert all(fact in caught.value.problem for fact in facts) and there._key not in str(caught.value)


# What the page says of a load


def load_text(found, **changed):
    """Its section, where the run has these fields instead."""
    with laid_out(400):
        return section_text(load_section(replace(found, run=replace(found.run, **changed)), ValidityCriteria()))


def test_requests_that_ended_early_are_counted(counted):
    tokens = (4, *counted.run.samples.output_tokens[1:])
    short = replace(counted.run, samples=replace(counted.run.samples, output_tokens=tokens))
    (line,) = [line for line in load_text(counted, samples=short.samples).splitlines() if "early" in line]
    assert {"1", "20", "7.8"} <= set(line.replace(",", "").split()) and "early" not in load_text(counted)
    steady = replace(counted, load=ClosedLoop(2))
    as_asked, early = (summarize(replace(steady, run=each)).requests_per_s for each in (counted.run, short))
    assert early == pytest.approx(as_asked * 8 / 7.8), "as many tokens, shorter requests"


@pytest.mark.parametrize(("tokens", "fact"), [(2.5, "2.50"), (None, "counts as one"), (1.0, "")])
def test_the_page_says_what_a_chunk_is_unless_it_is_a_token(counted, tokens, fact):
    text = load_text(counted, stream=replace(counted.run.stream, tokens_per_chunk=tokens))
    assert fact in text and ("chunk" in text) == bool(fact)


def test_the_page_tells_the_throughput_of_requests_and_of_tokens_both_ways(counted):
    numbers = re.search(
        r"^([\d.,]+) requests/s, ([\d.,]+) output\D+([\d.,]+) prompt", load_text(counted), re.M
    ).groups()
    requests, outputs, prompts = (float(number.replace(",", "")) for number in numbers)
    seconds = counted.run.window_s[1] - counted.run.window_s[0]
    assert prompts == pytest.approx(16 * 20 / seconds, rel=1e-3) and outputs == pytest.approx(8 * requests, rel=1e-3)
    assert requests == pytest.approx(20 / seconds, rel=1e-3), "of all its time, and not from the first token on"


def test_a_load_of_which_nothing_came_has_no_table_of_dashes(counted):
    nothing = {"samples": Samples(*[()] * 8), "stream": None, "failures": 20, "first_failure": "HTTP 400: no"}
    told = load_text(counted, **nothing)
    assert "TTFT" not in told and "INVALID" in told and "20" in told and "HTTP 400: no" in told


@pytest.mark.parametrize(
    ("arrivals", "facts"),
    [("gamma 1, 20/s, seed 0", ("Poisson", "20/s")), ("gamma inf", ("constant",)), ("gamma 0.5", ("gamma", "0.5"))],
)
def test_gamma_gaps_have_the_name_of_the_field(arrivals, facts):
    assert all(fact in in_words(arrivals) for fact in facts) and in_words("every 20 ms") == "every 20 ms"


def test_a_server_that_keeps_a_request_waiting_with_comments_is_not_waited_for(monkeypatch):
    """A limit on each read of a socket would begin anew with every one of them."""
    monkeypatch.setattr("pytest_slmserve.engines.endpoint.ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=comment, args=(listening,), daemon=True).start()
        spec = EngineSpec(
            "m", platform="remote", interface="endpoint", url=f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        )
        with pytest.raises(BadUsage):
            EndpointEngine(spec)
    with pytest.raises(BadUsage):
        EndpointEngine(replace(spec, url="http://127.0.0.1:1/v1/completions"))


def comment(listening):
    """Answers one connection with comments until it is closed."""
    connection, _ = listening.accept()
    with connection, suppress(OSError):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        while True:
            connection.sendall(b": wait\n\n")
            time.sleep(0.05)


# A server that caches

BURST = ClosedLoop(2, requests=40)  # of 32 requests: the first eight come again


REASON = "of the prompt tokens came from a prefix cache"


@pytest.fixture(scope="module", params=["usage", "counters"])
def caching(request):
    """Tells of its cache for each request, or by its counters alone."""
    told = {} if request.param == "usage" else {"metrics": True, "enable_prompt_tokens_details": False}
    with somebodys_server(enable_prefix_caching=True, **told) as server:
        yield server, request.param


@pytest.fixture
def ask(caching, tmp_path, capsys, monkeypatch):
    """`measure` at that server: exit status, and what it says as JSON."""
    server, _ = caching
    monkeypatch.setenv("SLM_ENDPOINT_KEY", server._key)
    lengths = ("--input-len", "16", "--output-len", "4", "--max-concurrency", "2", "--num-prompts", "40")

    def run(*arguments, form="--json"):
        words = ["--endpoint", url_of(server), "--model", "slm", "--records", str(tmp_path / "r.jsonl")]
        status = main(["measure", *words, *lengths, *arguments, form])
        return status, capsys.readouterr().out

    return run


def test_by_default_nothing_comes_from_a_cache_however_often_it_is_measured(ask, tmp_path):
    for _ in range(3):
        status, told = ask()
        assert status == 0 and json.loads(told)["cached_prompt_share"] == 0
    salts = [m.run.stream.salt for m in read(tmp_path / "r.jsonl").measurements]
    assert len(set(salts)) == 3 and all(salts)
    assert len({m.key for m in read(tmp_path / "r.jsonl").measurements}) == 1, "one question, however it was varied"


def test_a_seed_gives_the_same_prompts_again_and_that_is_not_valid(ask, tmp_path):
    assert ask("--seed", "3")[0] == 0
    status, told = ask("--seed", "3")
    found = json.loads(told)
    assert status == 1 and found["cached_prompt_share"] == pytest.approx(12 / 16)
    assert any(REASON in text and "75 %" in text and "limit 5 %" in text for text in found["problems"])
    assert [m.run.stream.salt for m in read(tmp_path / "r.jsonl").measurements] == [None, None]


def test_unless_it_was_asked_for(ask, caching, tmp_path):
    ask("--seed", "4")
    status, told = ask("--seed", "4", "--allow-prefix-cache", form="--json")
    assert status == 0 and json.loads(told)["cached_prompt_share"] > 0.7
    apart = ("--records", str(tmp_path / "other.jsonl"))
    status, page = ask("--allow-prefix-cache", *apart, form="--seed=4")
    by = "counted for each request" if caching[1] == "usage" else "server metrics"
    assert status == 0 and f"prefix-cache hit rate 75.0 % ({by})" in page
    refused, allowed = read(tmp_path / "r.jsonl").measurements
    assert refused.key != allowed.key, "never reused for each other"


def test_rounds_within_one_load_are_not_alike_either(caching):
    """Thirty-two requests, five times over."""
    server, how = caching
    spec = EngineSpec("slm", platform="remote", interface="endpoint", url=url_of(server))
    engine = engine_with(server._key, spec)
    try:
        found = measure(engine, small_workload(), ClosedLoop(4, requests=160), this_host("remote"))
        again = measure(engine, small_workload(), ClosedLoop(4, requests=160), this_host("remote"))
    finally:
        engine.close()
    assert [cache_hit_share(m.run).share for m in (found, again)] == [0, 0]
    assert bool(found.run.samples.cached_tokens) is (how == "usage")
    assert (found.run.stream.cache_lookups is None) is (how == "usage")


def test_a_server_that_does_not_tell_is_not_judged(tmp_path):
    with somebodys_server(enable_prefix_caching=True, enable_prompt_tokens_details=False) as server:
        spec = EngineSpec("slm", platform="remote", interface="endpoint", url=url_of(server))
        engine = engine_with(server._key, spec, own_prompts=False)
        found = [measure(engine, small_workload(), BURST, this_host("remote")) for _ in range(2)]
        engine.close()
        assert cache_lookups(url_of(server), {}) is None
    assert cache_hit_share(found[1].run) is None and problems_of(found[1:]) == []


@pytest.mark.parametrize("interface", ["engine", "server"])
def test_an_engine_of_ours_with_a_cache_says_when_it_is_warm(interface):
    spec = replace(stand_in(), interface=interface, prefix_caching=True)
    with closing(Pool()) as pool:
        first, second = (measure(pool.engine(spec), small_workload(), BURST, this_host("remote")) for _ in range(2))
    assert (
        cache_hit_share(first.run).share == pytest.approx(8 / 40 * 12 / 16)
        and cache_hit_share(second.run).share == 12 / 16
    )
    assert any(REASON in text for text in problems(second))
    allowed = replace(second, spec=replace(spec, allow_prefix_cache=True))
    assert not any(REASON in text for text in problems(allowed)) and allowed.key != second.key


@pytest.mark.parametrize("interface", ["engine", "server"])
def test_without_a_cache_there_is_nothing_to_tell(interface):
    with closing(Pool()) as pool:
        engine = pool.engine(replace(stand_in(), interface=interface))
        found = [measure(engine, small_workload(), BURST, this_host("remote")) for _ in range(2)]
    assert [cache_hit_share(m.run) and cache_hit_share(m.run).share for m in found] == [
        0 if interface == "engine" else None
    ] * 2
