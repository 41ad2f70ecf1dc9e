"""Weights by the headers of safetensors files."""

from __future__ import annotations

import json

import pytest

from pytest_slmserve.plan.models import stored_parameters

HEAD = {"lm_head.weight": ("BF16", [8, 4])}
MODEL = {"model.embed_tokens.weight": ("BF16", [8, 4]), "model.norm.weight": ("BF16", [4])}


def written(path, tensors):
    told = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in tensors.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **told}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def test_one_file(tmp_path):
    assert stored_parameters(tmp_path, tied=False) is None
    written(tmp_path / "model.safetensors", MODEL)
    assert stored_parameters(tmp_path, tied=False) == 36


def test_a_tied_output_layer_that_is_stored_too_counts_once(tmp_path):
    """Qwen3-0.6B is stored so: 751,632,384 numbers, of which an engine holds 596,049,920."""
    written(tmp_path / "model.safetensors", MODEL | HEAD)
    assert (stored_parameters(tmp_path, tied=True), stored_parameters(tmp_path, tied=False)) == (36, 68)
    written(tmp_path / "model.safetensors", HEAD)
    assert stored_parameters(tmp_path, tied=True) == 32, "all that there is"


def test_an_index_names_the_files_and_all_must_be_there(tmp_path):
    index = {"weight_map": {"lm_head.weight": "b.safetensors", "model.norm.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    written(tmp_path / "a.safetensors", MODEL)
    assert stored_parameters(tmp_path, tied=False) is None
    written(tmp_path / "b.safetensors", HEAD)
    assert stored_parameters(tmp_path, tied=False) == 68


@pytest.mark.parametrize("content", [b"", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 20, b"\x01\0\0\0\0\0\0\0{"])
def test_a_damaged_file_tells_nothing(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert stored_parameters(tmp_path, tied=False) is None


def test_packed_numbers_are_not_weights(tmp_path):
    written(tmp_path / "model.safetensors", MODEL | {"qweight": ("I32", [4, 4])})
    assert stored_parameters(tmp_path, tied=False) is None
