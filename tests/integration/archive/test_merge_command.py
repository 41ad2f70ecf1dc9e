"""`slmserve report --merge` tells how many measurements came, leaves its parts alone, and exits by what was lost."""

import pytest
from archives import example, write

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read


@pytest.fixture
def three(tmp_path):
    return write(tmp_path / "three.jsonl", example(1), example(2), example(4))


def test_the_command_says_how_many_came_and_leaves_the_others_as_they_are(three, tmp_path, capsys):
    more, out = write(tmp_path / "more.jsonl.xz", example(1), example(8)), tmp_path / "all.jsonl.gz"
    before = three.read_bytes(), more.read_bytes()
    for part, came, were in ((more, 4, 1), (out, 0, 3)):
        assert main(["report", str(three), str(part), "--merge", str(out)]) == 0
        told = capsys.readouterr().out
        assert str(out) in told and f"{came} measurements" in told and f" {were} were" in told
        assert [m.load.concurrency for m in read(out).measurements] == [1, 2, 4, 8]
    assert (three.read_bytes(), more.read_bytes()) == before


def test_what_could_not_be_merged_is_its_exit_status(three, tmp_path, capsys):
    three.write_bytes(three.read_bytes().replace(b'"concurrency":2', b'"concurrency":3'))
    assert main(["report", str(three), "--merge", str(tmp_path / "all.jsonl")]) == 1
    assert f"{three}: not merged: line 4 " in capsys.readouterr().out
    for part, into, facts in (("none.jsonl", "new.jsonl", ["none.jsonl"]), (three, "", ["Is a directory", "--merge"])):
        assert main(["report", str(tmp_path / part), "--merge", str(tmp_path / into)]) == 4
        said = capsys.readouterr().err
        assert not [fact for fact in facts if fact not in said] and not (tmp_path / "new.jsonl").exists()
