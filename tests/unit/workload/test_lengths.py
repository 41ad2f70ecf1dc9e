from __future__ import annotations

import gzip
from importlib import resources
from statistics import mean

import pytest

from pytest_slmserve.workload.tokens import SHIPPED, shipped_lengths, within_vllm_limits


def kept(rule: str, special_tokens: int = 0) -> list[tuple[int, int]]:
    pairs = [(prompt + special_tokens, reply + special_tokens) for prompt, reply in shipped_lengths(rule)]
    return [pair for pair in pairs if within_vllm_limits(*pair)]


def test_vllms_rule_keeps_what_vllm_keeps():
    pairs = kept("vllm")
    assert len(pairs) == 14_906
    assert mean(prompt for prompt, _ in pairs) == pytest.approx(223.9, abs=0.05)
    assert mean(reply for _, reply in pairs) == pytest.approx(230.8, abs=0.05)


def test_the_human_first_rule_keeps_what_the_authors_keep():
    """Published for OPT's tokenizer, which puts one </s> before prompt and reply: counted here, the figures agree."""
    pairs = kept("human-first", special_tokens=1)
    assert len(pairs) == 9_898
    assert mean(prompt for prompt, _ in pairs) == pytest.approx(109.3, abs=0.05)
    assert mean(reply for _, reply in pairs) == pytest.approx(313.5, abs=0.05)


def test_without_special_tokens_a_few_fewer_are_kept():
    pairs = kept("human-first")
    assert len(pairs) == 9_761
    assert mean(prompt for prompt, _ in pairs) == pytest.approx(107.1, abs=0.05)


def test_the_shipped_table_is_whole_and_small():
    assert len(shipped_lengths("vllm")) == 17_400
    assert len(shipped_lengths("human-first")) == 11_135
    packed = resources.files("pytest_slmserve.workload").joinpath(SHIPPED).read_bytes()
    assert len(packed) < 100_000
    assert set(gzip.decompress(packed).decode().partition("\n")[2]) <= set("0123456789,\n")  # numbers, no text


@pytest.mark.parametrize(
    ("prompt", "output", "overridden", "good"),
    [
        (3, 4, False, False),
        (4, 4, False, True),
        (4, 3, False, False),
        (4, 3, True, True),
        (3, 3, True, False),
        (1024, 1024, False, True),
        (1025, 4, False, False),
        (1024, 1025, False, False),
        (1024, 1025, True, False),
    ],
)
def test_vllms_bounds(prompt, output, overridden, good):
    assert within_vllm_limits(prompt, output, overridden=overridden) is good
