"""The load generator beside that of vLLM, `vllm bench serve`, against one server of vLLM's: both keep it as busy, and
both see the throughput that it has by its own step trace, so that what else the machine does is in both sides of a
comparison."""

import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from statistics import median

import pytest
from interfaces import small_workload
from processes import until
from real_engine import SPEC

from pytest_slmserve.engines.server import HOST, NAME, ServerEngine, model_for, trace_lines
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.specs import ClosedLoop, WorkloadSpec
from pytest_slmserve.workload.requests import build_workload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]
MODEL, USERS, REQUESTS, PROMPT, OUTPUT = "opt-125m", 4, 32, 16, 32  # a step is long beside a client's work
WITHIN, TIMES = 0.02, 3
# The words of `vllm bench serve`, whose command wants a distribution named vllm.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(scope="module")
def server():
    spec = replace(SPEC, model=MODEL, model_facts=model_of(MODEL), interface="server")
    with closing(ServerEngine(spec).start()) as found:
        found.run(small_workload(), ClosedLoop(USERS, requests=16))  # the first of a fresh engine are slow
        yield found


def ours(server):
    """Output tokens/s of a load, by our client: from the first request sent to the last token of all."""
    workload = build_workload(
        WorkloadSpec(prompt_tokens=PROMPT, output_tokens=OUTPUT, requests=REQUESTS), model_of(MODEL)
    )
    run = server.run(workload, ClosedLoop(USERS, requests=REQUESTS))
    assert run.failures == 0 and sum(run.samples.output_tokens) == REQUESTS * OUTPUT
    return REQUESTS * OUTPUT / (max(run.samples.last_token_s) - min(run.samples.sent_s))


def theirs(server, folder):
    """The same by vLLM's."""
    options = {"backend": "openai", "host": HOST, "port": server.port, "endpoint": "/v1/completions", "model": NAME}
    options |= {"tokenizer": model_for(server.spec), "dataset-name": "random", "random-input-len": PROMPT}
    options |= {"random-output-len": OUTPUT, "num-prompts": REQUESTS, "max-concurrency": USERS, "temperature": 0}
    options |= {"result-dir": folder, "result-filename": "bench.json"}
    words = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-c", BENCH, *words, "--ignore-eos", "--save-result", "--disable-tqdm"],
        env={**os.environ, "OPENAI_API_KEY": server._key, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((folder / "bench.json").read_text("utf-8"))
    assert (found["completed"], found["total_output_tokens"]) == (REQUESTS, REQUESTS * OUTPUT)
    return found["output_throughput"]


def beside_the_trace(server, measure):
    """The throughput that a client tells over that of the server's steps, and the tokens of a step, in the mean."""
    before = server.trace.stat().st_size
    told = measure()
    until(lambda: sum(row[3] for row in trace_lines(server.trace, before)) >= REQUESTS * OUTPUT, 30, "all its steps")
    times, _, _, tokens, *_ = zip(*(row for row in trace_lines(server.trace, before) if row[3]))
    assert sum(tokens) == REQUESTS * OUTPUT
    return told * (times[-1] - times[0]) / sum(tokens[1:]), sum(tokens) / len(tokens)


def test_throughput_matches_vllm_bench_serve(server, tmp_path):
    pairs = [
        (beside_the_trace(server, lambda: ours(server)), beside_the_trace(server, lambda: theirs(server, tmp_path)))
        for _ in range(TIMES)
    ]
    for own, bench in ((median(each[i] for each in side) for side in zip(*pairs)) for i in range(2)):
        assert own / bench == pytest.approx(1, abs=WITHIN), pairs
    assert median(own[0] for own, _ in pairs) == pytest.approx(1, abs=WITHIN), pairs
