"""studies/migrate.py: archives of formats 1 and 2 in the format of today."""

from __future__ import annotations

import json
import sys

import pytest
from scripts import DATA, checkout_script, loaded

from pytest_slmserve.archive.store import read

SCRIPT = checkout_script("studies/migrate.py")


@pytest.fixture
def migrate(monkeypatch, tmp_path):
    def carried_out(old):
        new = tmp_path / "new.jsonl"
        monkeypatch.setattr(sys, "argv", ["migrate.py", str(old), str(new)])
        with loaded(SCRIPT) as script:
            assert script.main() == 0
        return new

    return carried_out


@pytest.mark.parametrize("number", [1, 2])
def test_older_formats_are_written_anew(number, migrate):
    new = migrate(DATA / f"archive-format-{number}.jsonl")
    assert new.read_bytes() == (DATA / "archive-format-3.jsonl").read_bytes()


def test_a_model_that_is_not_in_the_catalogue_is_described_where_its_folder_is(migrate, tmp_path):
    old = tmp_path / "old.jsonl"
    old.write_text((DATA / "archive-format-2.jsonl").read_text().replace('"opt-125m"', f'"{tmp_path}/mine"'))
    assert {m.spec.model_facts for m in read(migrate(old)).measurements} == {None}
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "vocab_size": 49152,
    }  # fmt: skip
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    [model] = {m.spec.model_facts for m in read(migrate(old)).measurements}
    assert (model.layers, model.source) == (30, "folder")
