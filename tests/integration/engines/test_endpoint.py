"""Engines at a URL, on a stand-in for vLLM's server: what is known of a load, what never reaches its client, and a
cache of prefixes, which makes a prompt free that has been there. What is asked of it is in tests/unit/engines."""

import json
import threading
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import wire_server
from interfaces import engine_with, problems_of, small_workload, somebodys_server, stand_in, url_of
from measured import measure

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import cache_hit_share, problems
from pytest_slmserve.archive.codec import engine_from_record, engine_line, measurement_line, measurement_of
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.endpoint import EndpointEngine, cache_lookups
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.report.loads import ValidityCriteria, load_figures
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop, WorkloadSpec
from pytest_slmserve.telemetry.host import this_host
from pytest_slmserve.workload.requests import build_workload

SCHEDULE = tuple(i / 50 for i in range(100))
EVERY_20_MS = OpenLoop(rate=50.0, settle_s=0.5, window_s=1.0, arrivals="every 20 ms", schedule_s=SCHEDULE)


def spec_of(there):
    return EngineSpec("slm", platform="remote", interface="endpoint", url=url_of(there))


def measured(engine, *loads):
    return [measure(engine, small_workload(), load, this_host("remote")) for load in loads]


@pytest.fixture(scope="module")
def endpoint(there):
    with closing(engine_with(there._key, spec_of(there))) as found:
        yield found


def test_stream_without_trace_tells_throughput(endpoint):
    [found] = measured(endpoint, ClosedLoop(4, window_s=0.6))
    run = found.run
    assert problems_of([found]) == [] and len(run.steps) == 0 and 3 < window.mean_batch(run) <= 4
    by_requests = 8 * len(window.finished_in_window(run)) / (run.window_s[1] - run.window_s[0])
    assert window.output_tokens_per_s(run) == pytest.approx(by_requests, rel=0.15)
    [counted] = measured(endpoint, ClosedLoop(2, requests=20))
    run, told = counted.run, load_figures(counted, ValidityCriteria())
    assert sum(run.stream.tokens) == 160 == sum(run.samples.output_tokens) and run.stream.tokens_per_chunk == 1
    assert sum(run.stream.gaps["counts"].values()) == pytest.approx(20 * 7, abs=2), "but for those at the window's ends"
    seconds = run.window_s[1] - run.window_s[0]  # of all its time, and not from the first token on
    for name, of_each in (("requests", 1), ("output_tokens", 8), ("prompt_tokens", 16)):
        assert told[f"{name}_per_s"] == pytest.approx(of_each * 20 / seconds, rel=1e-3)
    [scheduled] = measured(endpoint, EVERY_20_MS)
    run = scheduled.run
    assert run.window_s == (0.5, 1.5) and run.stream.scheduled_s == pytest.approx(SCHEDULE, abs=1e-5)
    late = sorted(sent - at for at, sent in zip(SCHEDULE, run.samples.sent_s))
    assert late[0] > -1e-4 and late[50] < 0.1, "never early, and on a busy machine late"
    engine = engine_line(scheduled.launch, scheduled.spec, scheduled.resolved, scheduled.environment)
    lines = json.loads(json.dumps([engine, measurement_line(scheduled)]))
    again = measurement_of(lines[1], *engine_from_record(lines[0]))
    assert (again.run.stream, again.load, again.id) == (run.stream, scheduled.load, scheduled.id)
    assert "schedule_s" not in lines[1]["load"], "a record does not keep it twice"


def test_client_ignores_working_folder_modules(there, monkeypatch, tmp_path):
    for name in ("json", "uuid", "socket", "resource", "dataclasses"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)", "utf-8")
    monkeypatch.chdir(tmp_path)
    with closing(engine_with(there._key, spec_of(there))) as engine:
        [client] = engine._client.children
        environment = Path(f"/proc/{client.process.pid}/environ").read_text("utf-8")
        assert there._key not in environment and "SLM_ENDPOINT_KEY" not in environment and engine.ready
        with pytest.raises(EngineFailed, match="SIGKILL"):
            engine.run(small_workload(), ClosedLoop(2, window_s=30.0), lambda progress: client.process.kill())
        assert not engine.ready


def test_stalled_endpoint_is_not_awaited(monkeypatch):
    """A limit on each read of a socket would begin anew with every comment that the server sends."""
    monkeypatch.setattr("pytest_slmserve.engines.endpoint.ANSWER_S", 0.5)
    server = wire_server.Server()
    threading.Thread(target=server.serve, daemon=True).start()
    url = f"http://127.0.0.1:{server.port}/first-hang-with-comments/v1/completions"
    with pytest.raises(BadUsage, match="does not answer: (timed out|no end)"):
        EndpointEngine(EngineSpec("m", platform="remote", interface="endpoint", url=url))


BURST = ClosedLoop(2, requests=40)  # of 32 requests: the first eight come again
REASON = "of the prompt tokens came from a prefix cache"


@pytest.mark.parametrize(("told", "by"), [
    ({}, "counted for each request"),
    ({"metrics": True, "enable_prompt_tokens_details": False}, "server metrics"),  # by its counters alone
])  # fmt: skip
def test_unasked_cache_hits_are_invalid(told, by, tmp_path, capsys, monkeypatch):
    """Nor do prompts come from the cache within one load, in which they come again."""
    lengths = ("--input-len", "16", "--output-len", "4", "--max-concurrency", "2", "--num-prompts", "40")
    seed, allow, pages = ("--seed", "3"), "--allow-prefix-cache", []
    with somebodys_server(enable_prefix_caching=True, **told) as server:
        monkeypatch.setenv("SLM_ENDPOINT_KEY", server._key)
        words = ("--endpoint", url_of(server), "--model", "slm", "--records", str(tmp_path / "r.jsonl"), *lengths)
        for more, status in (((), 0), ((), 0), (seed, 0), (seed, 1), ((*seed, allow), 0)):
            assert main(["measure", *words, *more]) == status
            pages.append(capsys.readouterr().out)
    found = read(tmp_path / "r.jsonl").measurements
    shares = [cache_hit_share(m.run) for m in found]
    assert [seen.share for seen in shares] == [0, 0, 0, pytest.approx(12 / 16), pytest.approx(12 / 16)]
    assert {seen.told_by for seen in shares} == {by} and f"prefix-cache hit rate 75.0% ({by})" in pages[4]
    first, second, seeded, refused, allowed = found
    assert first.run.stream.salt != second.run.stream.salt and {m.run.stream.salt for m in found[2:]} == {None}
    assert first.key == second.key and seeded.key == refused.key != allowed.key, "one question, however it was varied"
    assert [m for m in found if any(REASON in text and "75%" in text for text in problems(m))] == [refused]


def test_unknown_cache_hits_stay_unjudged():
    with somebodys_server(enable_prefix_caching=True, enable_prompt_tokens_details=False) as server:
        with closing(engine_with(server._key, spec_of(server), own_prompts=False)) as engine:
            *_, found = measured(engine, BURST, BURST)
        assert cache_lookups(url_of(server), {}) is None
    assert cache_hit_share(found.run) is None and problems_of([found]) == []


@contextmanager
def caching(interface):
    """An engine of this interface that caches prefixes, in blocks of four tokens."""
    if interface == "endpoint":
        with (
            somebodys_server(enable_prefix_caching=True) as server,
            closing(engine_with(server._key, spec_of(server))) as engine,
        ):
            yield engine
        return
    with closing(Pool()) as pool:
        yield pool.engine(replace(stand_in(), interface=interface, prefix_caching=True, allow_prefix_cache=True))


@pytest.mark.parametrize("interface", ["engine", "server", "endpoint"])
def test_cache_serves_only_shared_prefixes(interface):
    """Of 16 tokens 10 at most: behind them are ids of the prompt's own, and no block has the first of them twice. An
    engine of ours says when it is warm, and one without a cache has nothing to tell."""
    here = this_host("remote")
    with caching(interface) as engine:
        if interface != "endpoint":
            cold, warm = measured(engine, BURST, BURST)
            assert [cache_hit_share(m.run).share for m in (cold, warm)] == [pytest.approx(8 / 40 * 12 / 16), 12 / 16]
            asks_none = replace(warm, spec=replace(warm.spec, allow_prefix_cache=False))
            assert [any(REASON in text for text in problems(m)) for m in (asks_none, warm)] == [True, False]
            assert asks_none.key != warm.key
        for share, whole in ((0.0, 0), (0.5, 8), (0.9, 8)):
            asked = WorkloadSpec(prompt_tokens=16, output_tokens=4, requests=32, seed=round(10 * share))
            workload = build_workload(replace(asked, prefix_share=share, prefix_groups=2), model_of("opt-tiny"))
            first, warm = (measure(engine, workload, BURST, here) for _ in range(2))
            cold = 2 if whole else 0
            assert sorted(first.run.samples.cached_tokens) == [0] * cold + [whole] * (40 - cold)
            assert set(warm.run.samples.cached_tokens) == {whole} and cache_hit_share(warm.run).share == whole / 16
            salts = {m.run.stream and m.run.stream.salt for m in (first, warm)}
            assert len(salts) == 1 and (salts == {None}) is (interface == "engine"), "they were handed over once"
            if interface == "endpoint":  # whose blocks are not known; those of the others are not the stand-in's
                assert problems_of([first, warm]) == []
        talks = WorkloadSpec(prompt_tokens=12, output_tokens=4, requests=32, turns=2)
        talk = measure(engine, build_workload(talks, model_of("opt-tiny")), replace(BURST, think_s=0.01), here)
        found = {(n % 2, cached) for n, cached in zip(talk.run.samples.request, talk.run.samples.cached_tokens)}
        assert found == {(0, 0), (1, 0), (1, 8)}, "but for users who begin with a second turn"
    if interface != "endpoint":
        with closing(Pool()) as pool:
            [plain] = measured(pool.engine(replace(stand_in(), interface=interface)), BURST)
        told = cache_hit_share(plain.run)
        assert told.share == 0 if interface == "engine" else told is None
