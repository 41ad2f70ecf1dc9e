"""Real servers that the suite has not started, as far as it knows, on the CPU: vLLM's own, and that of transformers."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
from interfaces import problems_of, url_of
from processes import until
from real_engine import SPEC

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.metrics.validity import cache_hit_share
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.server import HOST, ServerEngine, free_port, tokenizer_files
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.telemetry.gpu import ask_once

POINTS = """
    def test_point(slm_point):
        assert slm_point.measure()
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def there(vllm_here):
    found = ServerEngine(replace(SPEC, interface="server", prefix_caching=True)).start()
    yield found
    found.close()


def test_the_suite_at_its_url(there, pytester, monkeypatch):
    pytester.makepyfile(POINTS)
    monkeypatch.setenv("SLM_ENDPOINT_KEY", there._key)
    asked = (
        "--slm-models=slm",
        "--slm-concurrency=1,8",
        "--slm-input-len=160",
        "--slm-output-len=16",
        "--slm-repeats=1",
    )
    pytester.runpytest_inprocess(f"--slm-endpoint={url_of(there)}", *asked, "-p", "no:cacheprovider")
    found = read(pytester.path / ".slm/records.jsonl").measurements
    assert problems_of(found) == []
    assert [cache_hit_share(m.run).share for m in found] == [0.0] * len(found), "its prompts are its own"
    assert {m.load.concurrency for m in found} == {1, 8} and not any(len(m.run.steps) for m in found)
    assert {tokens for m in found for tokens in m.run.samples.prompt_tokens} == {160}


REQUESTS = 96  # a fast CPU serves fewer in less than the 0.2 s of tokens that a window needs


def test_a_seed_that_comes_again_meets_a_warm_cache(there, tmp_path, capsys, monkeypatch):
    """The CPU's blocks are of 128 tokens: one of a prompt of 160 is kept."""
    monkeypatch.setenv("SLM_ENDPOINT_KEY", there._key)
    lengths = ("--max-concurrency", "4", "--num-prompts", str(REQUESTS), "--input-len", "160", "--output-len", "8")
    words = ("measure", "--endpoint", url_of(there), "--model", "slm", *lengths, "--records", str(tmp_path / "r.jsonl"))
    for further in (["--seed", "5"], ["--seed", "5"], ["--seed", "5", "--allow-prefix-cache"], []):
        assert main([*words, *further]) in (0, 1), capsys.readouterr().err
    found = read(tmp_path / "r.jsonl").measurements
    refused = [any("from a prefix cache" in text for text in problems_of([m])) for m in found]
    assert refused == [False, True, False, False]
    assert [cache_hit_share(m.run).share for m in found] == [0, pytest.approx(128 / 160), pytest.approx(128 / 160), 0]
    by_counters = [m.run.stream.cache_lookups for m in found]
    assert [looked_up >= REQUESTS * 160 for looked_up, _ in by_counters] == [True] * 4, "vLLM's own page agrees"
    assert [hits for _, hits in by_counters] == [0, REQUESTS * 128, REQUESTS * 128, 0]


# Another server than vLLM's

SERVING = ("accelerate", "fastapi", "openai", "rich", "torch", "transformers", "uvicorn")
MAKE = """
import sys
from transformers import OPTConfig, OPTForCausalLM
from pytest_slmserve.plan.models import model_of
OPTForCausalLM(OPTConfig(**dict(model_of("opt-tiny").config))).save_pretrained(sys.argv[1])
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def transformers_serve(tmp_path_factory):
    """Its URL's beginning, and the folder of its model: random weights, and a word for each token."""
    if missing := [name for name in SERVING if not find_spec(name)]:
        pytest.skip(f"transformers serve needs {', '.join(missing)}: requirements/transformers-serve.lock")
    folder, port = tmp_path_factory.mktemp("served") / "tiny", free_port()
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", MAKE, str(folder)], env=offline, check=True, capture_output=True, timeout=120)
    for file, text in tokenizer_files(model_of("opt-tiny")).items():
        (folder / file).write_text(text, "utf-8")
    named = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": TEMPLATE}), "utf-8")
    words = ["serve", str(folder), "--host", HOST, "--port", str(port), "--device", "cpu"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "transformers.cli.transformers", *words], env=offline, stdout=log, stderr=log
        )
    try:
        until(lambda: server.poll() is not None or healthy(port), 120.0, "transformers serve")
        assert server.poll() is None, (folder / "log").read_text("utf-8", errors="replace")
        yield f"http://{HOST}:{port}/v1", str(folder)
    finally:
        server.kill()
        server.wait()


def healthy(port):
    try:
        return ask_once("GET", f"http://{HOST}:{port}/health", {}, None, 5.0)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


@pytest.mark.parametrize(
    ("path", "refused"), [("completions", ("ignore_eos", "token ids")), ("chat/completions", ("ignore_eos",))]
)
def test_a_server_that_refuses_what_vllm_takes(transformers_serve, tmp_path, capsys, path, refused):
    """It knows no ignore_eos, and completions of text alone; it ends its streams without [DONE]."""
    url, model = transformers_serve
    asked = ("--max-concurrency", "2", "--num-prompts", "48", "--input-len", "16", "--output-len", "8")
    records = tmp_path / "r.jsonl"
    main(["measure", "--endpoint", f"{url}/{path}", "--model", model, *asked, "--records", str(records)])
    told = capsys.readouterr().out
    assert f"requests without {', '.join(refused)}, which this server refuses" in told
    (kept,) = read(records).measurements
    assert problems_of([kept]) == [] and kept.run.stream.refused == refused
    assert set(kept.run.samples.prompt_tokens) == {16} and set(kept.run.samples.output_tokens) == {8}
    assert sum(kept.run.stream.tokens) == pytest.approx(48 * 8, rel=0.01)


def test_what_it_refuses_altogether_is_one_sentence(transformers_serve, tmp_path, capsys):
    url, _ = transformers_serve
    asked = ("--max-concurrency", "2", "--records", str(tmp_path / "r.jsonl"))
    status = main(["measure", "--endpoint", f"{url}/completions", "--model", "another", *asked])
    assert status == 4 and "answered 400" in (said := capsys.readouterr().err) and "pinned" in said


def test_the_suite_at_the_url_of_another_server(transformers_serve, pytester):
    pytester.makepyfile(POINTS)
    url, model = transformers_serve
    asked = (
        f"--slm-models={model}",
        "--slm-concurrency=1,2",
        "--slm-input-len=16",
        "--slm-output-len=8",
        "--slm-repeats=1",
        "--slm-window=3",
        "--slm-report=tables",
    )
    result = pytester.runpytest_inprocess(f"--slm-endpoint={url}/completions", *asked, "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(
        [f"tiny at {url}/completions, endpoint interface", "*requests without ignore_eos, token ids*"]
    )
    found = read(pytester.path / ".slm/records.jsonl").measurements
    assert {m.load.concurrency for m in found} == {1, 2} and problems_of(found) == []
