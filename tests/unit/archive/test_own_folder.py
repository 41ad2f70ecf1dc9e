"""The folder `.slm`: git ignores what a run made there, and nothing else is touched."""

from __future__ import annotations

import pytest

from pytest_slmserve.archive.store import Archive, make_folder


@pytest.mark.parametrize("folder", [".slm", ".slm/baselines", "deep/.slm"])
def test_a_new_one_is_ignored_by_git(tmp_path, folder):
    make_folder(tmp_path / folder)
    (own,) = tmp_path.rglob(".slm")
    assert (tmp_path / folder).is_dir() and (own / ".gitignore").read_text("utf-8") == "*\n"


def test_one_that_is_there_is_left_as_it_is(tmp_path):
    (tmp_path / ".slm").mkdir()
    make_folder(tmp_path / ".slm" / "baselines")
    assert [path.name for path in (tmp_path / ".slm").iterdir()] == ["baselines"]


def test_a_folder_of_another_name_is_the_user_s(tmp_path):
    Archive.open(tmp_path / "results" / "a.jsonl").close()
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["a.jsonl"]
