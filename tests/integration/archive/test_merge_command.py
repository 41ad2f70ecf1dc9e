"""`slmserve report --merge` tells how many measurements came, leaves its parts alone, and exits by what was lost."""

from __future__ import annotations

import pytest
from archives import change, example, write

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read


@pytest.fixture
def three(tmp_path):
    return write(tmp_path / "three.jsonl", example(1), example(2), example(4))


def test_the_command_says_how_many_came_and_leaves_the_others_as_they_are(three, tmp_path, capsys):
    more, out = write(tmp_path / "more.jsonl.xz", example(1), example(8)), tmp_path / "all.jsonl.gz"
    before = three.read_bytes(), more.read_bytes()
    assert main(["report", str(three), str(more), "--merge", str(out)]) == 0
    told = capsys.readouterr().out
    assert str(out) in told and "4 measurements" in told and " 1 were" in told
    assert [m.load.concurrency for m in read(out).measurements] == [1, 2, 4, 8]
    assert (three.read_bytes(), more.read_bytes()) == before
    assert main(["report", str(three), str(out), "--merge", str(out)]) == 0
    told = capsys.readouterr().out
    assert "0 measurements" in told and " 3 were" in told


def test_what_could_not_be_merged_is_its_exit_status(three, tmp_path, capsys):
    change(three, 4, "nonsense")
    assert main(["report", str(three), "--merge", str(tmp_path / "all.jsonl")]) == 1
    assert f"{three}: not merged: line 4 " in capsys.readouterr().out
    assert main(["report", str(tmp_path / "none.jsonl"), "--merge", str(tmp_path / "new.jsonl")]) == 4
    assert "none.jsonl" in capsys.readouterr().err and not (tmp_path / "new.jsonl").exists()
    assert main(["report", str(three), "--merge", str(tmp_path)]) == 4
    said = capsys.readouterr().err
    assert f"{tmp_path}: Is a directory" in said and "--merge" in said
