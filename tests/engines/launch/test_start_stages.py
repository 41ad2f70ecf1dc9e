"""Stages of a start, by the marks in the log of an engine, and who hears that it is not ready yet."""

from __future__ import annotations

import sys
import threading

import pytest

from pytest_slmserve.engines.launch.child_process import (
    IMPORTING,
    MARKS,
    Child,
    stage_of,
    still_waiting,
    waiting_for_engine,
)
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


def test_only_who_waits_hears_and_only_in_its_thread(tmp_path):
    heard = []
    still_waiting(tmp_path)
    with waiting_for_engine(heard.append):
        still_waiting(tmp_path)
        with waiting_for_engine(lambda log: None):
            still_waiting(tmp_path)
        other = threading.Thread(target=still_waiting, args=(tmp_path,))
        other.start()
        other.join()
    still_waiting(tmp_path)
    assert heard == [tmp_path]


def test_a_child_that_says_nothing_is_heard_of_until_it_ends():
    child = Child([sys.executable, "-c", "import time; print('so far', flush=True); time.sleep(1.3)"], {})
    heard = []
    with waiting_for_engine(lambda log: heard.append(log.read_text())), pytest.raises(EngineFailed, match="ended"):
        child.receive(20.0, "starting")
    child.keep_log = False
    child.kill()
    assert heard and heard[-1] in ("", "so far\n")
