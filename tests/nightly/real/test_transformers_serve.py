"""A real server that is not vLLM's, that of transformers, on the CPU: what it refuses, and what is measured of it."""

import http.client
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from interfaces import problems_of
from processes import until
from runs import POINTS

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.server import HOST, free_port, tokenizer_files
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.telemetry.gpu import ask_once

pytestmark = pytest.mark.slow
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


@pytest.mark.parametrize(("path", "refused"), [
    ("completions", ("return_token_ids", "ignore_eos", "token ids")),
    ("chat/completions", ("return_token_ids", "ignore_eos")),
])  # fmt: skip
def test_refused_request_fields_are_dropped(transformers_serve, tmp_path, capsys, path, refused):
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


def test_unknown_model_is_refused(transformers_serve, tmp_path, capsys):
    url, _ = transformers_serve
    asked = ("--max-concurrency", "2", "--records", str(tmp_path / "r.jsonl"))
    status = main(["measure", "--endpoint", f"{url}/completions", "--model", "another", *asked])
    assert status == 4 and "answered 400" in (said := capsys.readouterr().err) and "pinned" in said


def test_suite_runs_on_other_server(transformers_serve, pytester):
    pytester.makepyfile(POINTS)
    url, model = transformers_serve
    asked = ("--slm-concurrency=1,2", "--slm-input-len=16", "--slm-output-len=8", "--slm-repeats=1", "--slm-window=3")
    words = (f"--slm-models={model}", *asked, "-oslm_report=tables", "-p", "no:cacheprovider")
    result = pytester.runpytest_inprocess(f"--slm-endpoint={url}/completions", *words)
    result.stdout.fnmatch_lines(
        [f"tiny at {url}/completions, endpoint *", "*requests without return_token_ids, ignore_eos*"]
    )
    found = read(pytester.path / ".slm/records.jsonl").measurements
    assert {m.load.concurrency for m in found} == {1, 2} and problems_of(found) == []
