"""vLLM's own sampling of ShareGPT, request by request, against vLLM itself."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from textwrap import dedent

import pytest
from conversations import clustered, write_tokenizer
from refusals import refused

from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.specs import WorkloadSpec
from pytest_slmserve.workload.requests import build_workload, read_conversations, sample_as_vllm
from pytest_slmserve.workload.tokens import first_in_order, hub_tokenizer

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
        dataset = ShareGPTDataset(
            dataset_path=f"{folder}/sharegpt.json", random_seed=asked["seed"]
        )
        samples = dataset.sample(
            tokenizers[asked["tokenizer"]],
            asked["requests"],
            output_len=asked["output"],
        )
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
def by_vllm(vllm_here, folder) -> list[list[tuple[str, int, int]]]:
    """What vLLM's own class samples in each of the configurations."""
    (folder / "asked.json").write_text(json.dumps(CONFIGURATIONS))
    command = [sys.executable, "-c", dedent(BY_VLLM), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return [[tuple(row) for row in rows] for rows in json.loads((folder / "found.json").read_text())]


def ours(folder: Path, configurations) -> list[list[tuple[str, int, int]]]:
    conversations = list(read_conversations(folder / "sharegpt.json"))
    tokenizers = {
        name: remembering(hub_tokenizer(str(folder / name), special_tokens=True)) for name in ("plain", "bos")
    }
    drawn = (
        sample_as_vllm(
            conversations,
            tokenizers[asked["tokenizer"]],
            asked["requests"],
            seed=asked["seed"],
            output_tokens=asked["output"],
        )
        for asked in configurations
    )
    return [[(each.text, len(each.prompt), each.output_tokens) for each in rows] for rows in drawn]


def remembering(tokenize):
    known: dict[str, list[int]] = {}

    def ask(texts):
        new = [text for text in texts if text not in known]
        known.update(zip(new, tokenize(new) if new else []))
        return [known[text] for text in texts]

    return ask


def test_every_request_is_vllms_own(by_vllm, folder):
    for asked, theirs, mine in zip(CONFIGURATIONS, by_vllm, ours(folder, CONFIGURATIONS), strict=True):
        assert mine == theirs, asked


def test_every_request_of_a_workload_is_vllms_own(by_vllm, folder):
    """From the specification that options make to the requests that are measured: text, ids and output."""
    assert len(CONFIGURATIONS) == 60
    for asked, theirs in zip(CONFIGURATIONS, by_vllm, strict=True):
        tokenizer = str(folder / asked["tokenizer"])
        spec = WorkloadSpec(
            source="sharegpt",
            path=str(folder / "sharegpt.json"),
            rule="vllm",
            prompt_tokens=None,
            output_tokens=asked["output"],
            requests=asked["requests"],
            seed=asked["seed"],
            tokenizer=tokenizer,
        )
        made = build_workload(spec, model_of("opt-125m"))
        assert [(r.text, len(r.prompt), r.output_tokens) for r in made.requests] == theirs, asked
        ids = hub_tokenizer(tokenizer, special_tokens=True)([r.text for r in made.requests])
        assert [list(r.prompt) for r in made.requests] == ids


def test_the_comparison_would_see_a_difference(by_vllm, folder):
    """Another seed, tokens without <s>, an output that is not asked for: none of them passes as vLLM's."""
    usual = [n for n, asked in enumerate(CONFIGURATIONS) if asked["requests"] == 25]
    for changed in (lambda asked: {"seed": asked["seed"] + 1}, lambda asked: {"output": (asked["output"] or 5) + 1}):
        other = ours(folder, [CONFIGURATIONS[n] | changed(CONFIGURATIONS[n]) for n in usual])
        assert all(mine != by_vllm[n] for n, mine in zip(usual, other, strict=True))
    bos = [n for n in usual if CONFIGURATIONS[n]["tokenizer"] == "bos"]
    other = ours(folder, [CONFIGURATIONS[n] | {"tokenizer": "plain"} for n in bos])
    assert all(mine != by_vllm[n] for n, mine in zip(bos, other, strict=True))


def test_the_lengths_lie_on_every_bound(by_vllm):
    """Negative control of the dataset: a bound that is off by one changes what is kept."""
    kept = {(prompt, output) for rows in by_vllm for _, prompt, output in rows}
    prompts, totals = {prompt for prompt, _ in kept}, {prompt + output for prompt, output in kept}
    assert (min(prompts), max(prompts), max(totals)) == (4, 1024, 2048)
    replies = {
        output for asked, rows in zip(CONFIGURATIONS, by_vllm) for _, _, output in rows if asked["output"] is None
    }
    assert min(replies) == 4


def test_with_fixed_lengths_the_rule_takes_vllms_conversations_in_an_order_of_our_own(by_vllm, folder):
    asked = {"tokenizer": "plain", "seed": 0, "requests": 25, "output": None}
    theirs = [prompt for prompt, _, _ in by_vllm[CONFIGURATIONS.index(asked)]]
    paired = (each[:2] for each in read_conversations(folder / "sharegpt.json") if len(each) >= 2)
    picked = first_in_order(paired, seed=0, limit=1000)
    assert set(theirs) <= {prompt.text for prompt, _ in picked}
    assert [prompt.text for prompt, _ in picked if prompt.text in set(theirs)] != theirs


def test_a_folder_with_a_tokenizer_and_one_without(folder, tmp_path):
    words = {name: hub_tokenizer(str(folder / name)) for name in ("plain", "bos")}
    assert words["plain"](["w x", "w"]) == words["bos"](["w x", "w"]) == [[2, 0], [2]]
    assert hub_tokenizer(str(folder / "bos"), special_tokens=True)(["w"]) == [[1, 2]]
    with refused(tmp_path, hint="tokenizer.json"):
        hub_tokenizer(str(tmp_path))
