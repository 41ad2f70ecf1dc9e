"""The shipped benchmark on real vLLM; its archive read again without it; and an engine started as that advises."""

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

from pytest_slmserve.analysis.advice.subjects import BLOCK_TOLERANCE
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.schema.kv_cache import predicted_blocks

BATCHES = (1, 8, 32)
MEASURED = "verified(advice, slm_spec, found, margin=0.35)"  # on two cores, shared with others
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]


@pytest.fixture(scope="module")
def finished(vllm_here, tmp_path_factory):
    """One run of the shipped files over three points, two repeats each."""
    folder = tmp_path_factory.mktemp("sweep")
    put(folder, "test_pareto_plateau", "test_kv_capacity")
    words = ("--slm-cpu", "--slm-concurrency=1,8,32", "--slm-repeats=2", "-p", "no:cacheprovider", "-v")
    with TemporaryDirectory(prefix="slm-") as tmp:
        run = PytestRun(folder, Path(tmp), words)
        try:
            run.engine()
            run.end(within_s=START_S)
            yield run
        finally:
            run.stop()


def test_every_point_was_measured_and_every_claim_judged(finished):
    assert finished.process.returncode in (0, 1, 10), finished.text
    for batch in BATCHES:
        assert re.search(rf"test_point\[opt-tiny-{batch}\] PASSED", finished.text), finished.text
    assert re.search(r"predicted_kv_blocks\[opt-tiny\] PASSED", finished.text)
    assert len(re.findall(r"\[opt-tiny\] (X?PASS|X?FAIL|INCONCLUSIVE)", finished.text)) == 5
    assert "Traceback" not in finished.text


def test_no_measurement_is_invalid_or_degraded(finished):
    assert [found[:2] for m in finished.archived() if any((found := check(m))[:2])] == []


def test_its_records_hold_what_was_asked_for(finished):
    found = finished.archived()
    assert {m.load.concurrency for m in found} == set(BATCHES)
    assert min(Counter(m.load.concurrency for m in found).values()) >= 2, "and on until the claims are decided"
    assert len({m.launch for m in found}) == 1
    assert len({m.workload.hash for m in found}) == 1
    first = found[0]
    assert first.environment.vllm
    assert first.environment.platform == "cpu"
    assert abs(first.resolved.kv_blocks - predicted_blocks(first.spec, first.resolved)) <= BLOCK_TOLERANCE


def test_a_larger_load_gives_more_throughput(finished):
    def tokens_per_s(m):
        opened, closed = m.run.window_s
        made = sum(n for t, n in zip(m.run.steps.time_s, m.run.steps.new_tokens) if opened < t <= closed)
        return made / (closed - opened)

    best = {
        batch: max(tokens_per_s(m) for m in finished.archived() if m.load.concurrency == batch) for batch in BATCHES
    }
    assert best[1] < best[8] < best[32]


def test_the_report_prints_the_same_table_without_vllm(finished):
    """The tables, and the screen that a run has below them."""
    code = "import sys; sys.modules['vllm'] = None; from pytest_slmserve.__main__ import main; sys.exit(main())"
    printed = set()
    for show in ("tables", "summary"):
        command = [sys.executable, "-c", code, "report", ".slm/records.jsonl", "--show", show]
        done = subprocess.run(command, cwd=finished.folder, capture_output=True, text=True, timeout=60)
        assert done.returncode in (0, 1, 10), done.stderr
        assert "Traceback" not in done.stderr
        printed |= {line.rstrip() for line in done.stdout.splitlines()}
    # no number that a sentence is broken at
    row = re.compile(r" +(in|flight) | +\d+ .*(yes|noisy|ok)$")
    table = [line for line in map(str.rstrip, finished.text.splitlines()) if row.match(line)]
    assert {int(line.split()[0]) for line in table if re.match(r" +\d", line)} == set(BATCHES)
    assert [line for line in table if line not in printed] == []


def test_nothing_is_left_of_it(finished):
    assert nothing_left_of(finished.folder)
    assert len(finished.engines) == 1
    assert [path.name for path in finished.tmp.iterdir() if path.name.startswith("pytest-slmserve-")] == [
        "pytest-slmserve-cpu.lock"
    ]


def test_what_was_advised_is_what_is_served(finished):
    """An engine started as the advice on that sweep says, by the shipped test: is it as predicted?"""
    noisy = any(check(m).noise for m in finished.archived())  # then a larger batch may be predicted
    put(finished.folder, "test_advice")
    path = finished.folder / "test_advice_shipped.py"
    path.write_text(path.read_text("utf-8").replace("verified(advice, slm_spec, found)", MEASURED), "utf-8")
    words = ("--slm-cpu", "--slm-concurrency=1,8,32", "--slm-repeats=2", "--slm-resume", "-p", "no:cacheprovider", "-v")
    with TemporaryDirectory(prefix="slm-") as tmp:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, "test_advice_shipped.py"],
            cwd=finished.folder,
            env=os.environ | {"TMPDIR": tmp},
            capture_output=True,
            text=True,
            timeout=START_S,
        )
    assert nothing_left_of(finished.folder) and "Traceback" not in done.stdout
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
