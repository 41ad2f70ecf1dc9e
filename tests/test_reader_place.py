"""A record is read alike wherever its reader is: nothing of his machine tells of a model."""

from __future__ import annotations

import json
import lzma
import re
from pathlib import Path

import pytest
from scripts import BASELINES
from sealed_lines import reseal

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema.models import CATALOGUE

ARCHIVES = sorted(BASELINES.glob("*.jsonl.xz"))
RENAMED = "h100-vllm-0.26.0-core-opt-125m.jsonl.xz"
OTHER = json.dumps(dict(CATALOGUE["mpt-7b"].config))


@pytest.fixture
def told(capsys, monkeypatch, tmp_path):
    """The status and JSON of `report` in a folder of its own with an empty home, or beside folders with the names of
    the archive's models that hold another one."""

    def report(archive: Path, beside: bool = False) -> tuple[int, str]:
        here = tmp_path / ("beside" if beside else "empty")
        here.mkdir(exist_ok=True)
        monkeypatch.chdir(here)
        for variable in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
            monkeypatch.setenv(variable, str(here))
        models = {m.spec.model for m in read(archive).measurements} if beside else set()
        for model in models - {name for name in models if Path(name).is_absolute()}:  # those lie outside of the test
            (here / model).mkdir(parents=True, exist_ok=True)
            (here / model / "config.json").write_text(OTHER, "utf-8")
        status = main(["report", str(archive), "--json"])
        return status, capsys.readouterr().out

    return report


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name.partition(".jsonl")[0])
def test_an_archive_says_the_same_in_an_empty_home_and_beside_another_model(archive, told):
    assert told(archive) == told(archive, beside=True)


def test_a_model_by_its_folder_is_the_one_that_was_measured(told, tmp_path):
    """The sizes are in the record, so the folder may be there, gone, or another model's by now."""
    text = lzma.decompress((BASELINES / RENAMED).read_bytes()).decode()
    mine = tmp_path / "mine.jsonl"
    mine.write_text(re.sub(r'("spec":\{"model":)"opt-125m"', r'\1"./mine125"', text), "utf-8")
    reseal(mine)
    seen = told(mine)
    assert {m.spec.model for m in read(mine).measurements} == {"./mine125"}
    assert seen == told(mine, beside=True) and seen[0] == 0
    roofline = [point["roofline_fraction"] for point in json.loads(seen[1])["points"]]
    assert roofline and None not in roofline
