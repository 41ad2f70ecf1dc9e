"""The advice on a sweep of real vLLM, then engines started as advised: is it as predicted?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

import pytest
from runs import POINTS, START_S, PytestRun, nothing_left_of

from pytest_slmserve.store import read

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]
MARGIN = 0.35  # two cores, shared with others
ARGUMENTS = ("advise", ".slm/records.jsonl", "--verify", "--verify-margin", str(MARGIN), "--json")


def test_what_was_advised_is_what_is_served(tmp_path):
    (tmp_path / "test_points.py").write_text(dedent(POINTS), "utf-8")
    words = ("--slm-cpu", "--slm-batches=1,8,32", "--slm-window=1", "-p", "no:cacheprovider", "-v")
    with TemporaryDirectory(prefix="slm-") as tmp:
        sweep = PytestRun(tmp_path, Path(tmp), words)
        try:
            sweep.engine()
            status = sweep.end(within_s=START_S)
            assert status in (0, 1), sweep.text  # 1: a repeat was too noisy, and a larger batch may be predicted
        finally:
            sweep.stop()
        done = subprocess.run(
            [sys.executable, "-m", "pytest_slmserve", *ARGUMENTS],
            cwd=tmp_path,
            env=os.environ | {"TMPDIR": tmp},
            capture_output=True,
            text=True,
            timeout=START_S,
        )
    assert done.stderr == "" and nothing_left_of(tmp_path)
    seen = json.loads(done.stdout)
    [model], [start] = seen["verification"]["models"], seen["starts"]
    batch, measured = model["batch_requests"], model["measured"]
    assert (batch in (8, 32) or status == 1) and f"--max-num-seqs {batch} " in start["commands"][0]
    assert abs(measured["kv_blocks"] - model["predicted"]["kv_blocks"]) <= 2 and measured["preemptions_count"] == 0
    assert done.returncode == {"holds": 0, "fails": 1, "undecided": 10}[seen["verification"]["state"]]
    kept = read(tmp_path / ".slm" / "verify.jsonl").measurements
    assert {(m.spec.max_num_seqs, m.load.concurrency, m.load.window_s) for m in kept} == {(batch, batch, 1.0)}
    if measured["valid_repeats_count"] and status == 0:  # else the machine was too noisy to say anything
        assert abs(model["measured_of_predicted_ratio"]["value"] - 1) < MARGIN, done.stdout
