"""The shipped benchmark on real vLLM, and an engine started as its archive advises."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from runs import START_S, PytestRun, nothing_left_of
from shipped import put

from pytest_slmserve.analysis.metrics.validity import check

BATCHES = (1, 8, 32)
WORDS = ("--slm-cpu", "--slm-concurrency=1,8,32", "--slm-repeats=2", "-p", "no:cacheprovider", "-v")
MEASURED = "verified(advice, slm_spec, found, margin=0.35)"  # on two cores, shared with others
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]


@pytest.fixture(scope="module")
def finished(vllm_here, tmp_path_factory):
    """One run of the shipped files over three points, two repeats each."""
    folder = tmp_path_factory.mktemp("sweep")
    put(folder, "test_pareto_plateau", "test_kv_capacity")
    with TemporaryDirectory(prefix="slm-") as tmp:
        run = PytestRun(folder, Path(tmp), WORDS)
        try:
            run.engine()
            run.end(within_s=START_S)
            yield run
        finally:
            run.stop()


def test_shipped_benchmark_measures_every_point(finished):
    assert finished.process.returncode in (0, 1, 10) and "Traceback" not in finished.text, finished.text
    for batch in BATCHES:
        assert re.search(rf"test_point\[opt-tiny-{batch}\] PASSED", finished.text), finished.text
    assert re.search(r"predicted_kv_blocks\[opt-tiny\] PASSED", finished.text)
    assert len(re.findall(r"\[opt-tiny\] (X?PASS|X?FAIL|INCONCLUSIVE)", finished.text)) == 5
    assert nothing_left_of(finished.folder) and len(finished.engines) == 1
    left = [path.name for path in finished.tmp.iterdir() if path.name.startswith("pytest-slmserve-")]
    assert left == ["pytest-slmserve-cpu.lock"]


def test_records_are_valid(finished):
    found = finished.archived()
    assert [checked[:2] for m in found if any((checked := check(m))[:2])] == []
    repeats = Counter(m.load.concurrency for m in found)
    assert set(repeats) == set(BATCHES) and min(repeats.values()) >= 2, "and on until the claims are decided"
    assert len({(m.launch, m.workload.hash) for m in found}) == 1
    assert found[0].environment.vllm and found[0].environment.platform == "cpu"


def test_advised_engine_serves_as_predicted(finished):
    """An engine started as the advice on that sweep says, by the shipped test: is it as predicted?"""
    put(finished.folder, "test_advice")
    path = finished.folder / "test_advice_shipped.py"
    path.write_text(path.read_text("utf-8").replace("verified(advice, slm_spec, found)", MEASURED), "utf-8")
    with TemporaryDirectory(prefix="slm-") as tmp:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *WORDS, "test_advice_shipped.py", "--slm-resume"],
            cwd=finished.folder,
            env=os.environ | {"TMPDIR": tmp},
            capture_output=True,
            text=True,
            timeout=START_S,
        )
    assert nothing_left_of(finished.folder) and "Traceback" not in done.stdout
    noisy = any(check(m).noise for m in finished.archived())  # of the sweep, or of the advised engine
    if "no advice on" in done.stdout:  # the noise leaves too little to advise by
        assert noisy and done.returncode == 10
        return
    assert done.returncode in (0, 1, 10), done.stdout
    for promise in ("no-request-preempted", "kv-blocks-as-predicted"):
        assert re.search(rf"what_was_predicted\[opt-tiny-{promise}\] PASSED", done.stdout), done.stdout
    advised = [m for m in finished.archived() if m.spec.max_num_seqs in BATCHES]
    assert {(m.load.concurrency, m.load.window_s) for m in advised} == {(advised[0].spec.max_num_seqs, 2.0)}
    if not noisy:  # else the machine was too noisy to say anything
        assert "throughput-as-predicted] FAILED" not in done.stdout, done.stdout
