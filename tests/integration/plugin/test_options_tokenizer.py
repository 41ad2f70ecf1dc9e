"""The slm_tokenizer setting: by which tokenizer the text of a dataset is cut."""

from __future__ import annotations

import pytest
from conversations import write_dataset
from inside import usage_error

from pytest_slmserve.workload.requests import read_conversations, sample_as_vllm
from pytest_slmserve.workload.tokens import hub_tokenizer

VLLM = (
    "--slm-input-len=natural",
    "--slm-concurrency=16",
    "--override-ini=slm_sharegpt_rule=vllm",
    "--override-ini=slm_seed=3",
    "-k",
    "test_point",
)


@pytest.fixture(scope="module", autouse=True)
def torch(tmp_path_factory):
    """pytester forgets what is imported while it works, and torch cannot be imported twice in a process: so before."""
    pytest.importorskip("ijson")
    pytest.importorskip("transformers")
    _, folder = write_dataset(tmp_path_factory.mktemp("once"))
    hub_tokenizer(str(folder), special_tokens=True)


def test_a_sweep_is_measured_with_the_very_requests_of_vllms_benchmark(pytester, sweep, archive):
    path, folder = write_dataset(pytester.path)
    sweep(f"--slm-dataset={path}", f"--override-ini=slm_tokenizer={folder}", *VLLM).assert_outcomes(
        passed=1, deselected=1
    )
    found = archive().measurements[0]
    theirs = sample_as_vllm(read_conversations(path), hub_tokenizer(str(folder), special_tokens=True), 1024, seed=3)
    assert found.workload.requests == 1024 == len(theirs)
    samples = found.run.samples
    asked = [(len(theirs[i].prompt), theirs[i].output_tokens) for i in samples.request]
    rows = zip(samples.prompt_tokens, samples.output_tokens, samples.finished)
    assert all(
        (prompt, output) == wanted or not finished
        for (prompt, output, finished), wanted in zip(rows, asked, strict=True)
    )
    assert found.workload.spec.tokenizer == str(folder)
    assert "as vLLM samples it" in found.workload.source and "of them repeats" in found.workload.source


def test_without_one_vllms_sample_is_refused_in_a_sentence(pytester, sweep):
    path, _ = write_dataset(pytester.path)
    said = usage_error(sweep(f"--slm-dataset={path}", *VLLM))
    assert "vLLM samples by the model's own tokenizer, and none is known for opt-125m" in said


def test_a_folder_without_one_is_refused(pytester, sweep):
    path, _ = write_dataset(pytester.path)
    (pytester.path / "empty").mkdir()
    said = usage_error(sweep(f"--slm-dataset={path}", "--override-ini=slm_tokenizer=empty", *VLLM))
    assert "no tokenizer for empty" in said
