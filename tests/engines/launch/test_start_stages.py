"""Stages of a start, by the marks in the log of an engine, and the callback while it is not ready yet."""

from __future__ import annotations

import sys

import pytest

from pytest_slmserve.engines.launch.child_process import IMPORTING, MARKS, Child, stage_of
from pytest_slmserve.schema.errors import EngineFailed

# As vLLM 0.32 logs them on a CPU, and 0.26 on a GPU.
LINES = (
    ("W1124 20:15:54 torch/_library/triton.py:53] Triton not available", IMPORTING),
    ("WARNING [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs, and warmup.", IMPORTING),
    ("INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'", "starting the engine"),
    ("INFO [cpu_model_runner.py:68] Starting to load model /m...", "loading weights"),
    ("INFO [backends.py:1105] Using cache directory: /c for vLLM's torch.compile", "compiling"),
    ("Capturing CUDA graphs (decode, FULL):  12%|#         |", "capturing CUDA graphs"),
    ("INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 4.34 s", "starting the engine"),
)


def test_the_stage_is_that_of_the_last_mark(tmp_path):
    log = tmp_path / "engine.log"
    assert stage_of(log) == IMPORTING, "it is not there before the process is"
    for number, (_, stage) in enumerate(LINES, start=1):
        log.write_text("\n".join(line for line, _ in LINES[:number]))
        assert stage_of(log) == stage
    assert {stage for _, stage in LINES} == {IMPORTING, *MARKS.values()}


def test_a_child_that_says_nothing_is_reported_until_it_ends():
    child = Child([sys.executable, "-c", "import time; print('so far', flush=True); time.sleep(1.3)"], {})
    heard = []
    with pytest.raises(EngineFailed, match="ended"):
        child.receive(20.0, "starting", lambda log: heard.append(log.read_text()))
    child.keep_log = False
    child.kill()
    assert heard and heard[-1] in ("", "so far\n")
