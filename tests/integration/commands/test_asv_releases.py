"""The releases of vLLM as the commits of a repository."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from scripts import needs_checkout

from pytest_slmserve.commands import asv

RESULTS = Path(__file__).parents[3] / "benchmarks/asv/results"
FIRST = "9308b394fd60cb7a2c455db7c23db7695e30887d"
ROWS = [("0.20.0", "2026-04-27"), ("0.20.1", "2026-05-03"), ("0.20.2", "2026-05-10")]


pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def tags(repository: Path) -> dict[str, str]:
    """Commit of each tag; a tag that is no mere name of a commit has another type."""
    form = "--format=%(refname:strip=2) %(objecttype) %(objectname)"
    command = ["git", "--git-dir", str(repository), "for-each-ref", form, "refs/tags"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: commit for name, kind, commit in map(str.split, lines) if kind == "commit"}


def test_a_commit_and_a_tag_for_each_release(tmp_path) -> None:
    repository = tmp_path / "releases"
    assert asv.make_repository(repository, ROWS) == 3
    log = asv.git(repository, "log", "--reverse", "--format=%s %as", "main").splitlines()
    assert log == [f"vllm {release} {day}" for release, day in ROWS]
    assert asv.git(repository, "show", "v0.20.1:requirements.txt") == "vllm==0.20.1\n"
    assert asv.git(repository, "rev-list", "--reverse", "main").split() == list(tags(repository).values())


def test_the_hashes_are_the_same_everywhere_and_however_it_was_made(tmp_path, monkeypatch) -> None:
    """Also within a hook of git, and for a user who has other settings."""
    asv.make_repository(tmp_path / "one", ROWS)
    settings = tmp_path / "settings"
    settings.write_text("[user]\nname = Somebody\n[init]\ndefaultBranch = trunk\n[commit]\ngpgsign = true\n", "utf-8")
    for name, value in {"GIT_DIR": "elsewhere", "GIT_CONFIG_GLOBAL": settings, "GIT_AUTHOR_NAME": "Somebody"}.items():
        monkeypatch.setenv(name, str(value))
    assert [asv.make_repository(tmp_path / "two", ROWS[:count]) for count in (1, 2, 3, 3)] == [1, 1, 1, 0]
    monkeypatch.undo()
    assert tags(tmp_path / "one") == tags(tmp_path / "two")
    assert tags(tmp_path / "one")["v0.20.0"] == FIRST


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROWS[0], ("0.20.0.post1", "2026-04-28"), *ROWS[1:]], "row 2 should be 0.20.1 of 2026-05-03"),
        ([ROWS[0], ("0.20.1", "2026-05-04"), ROWS[2]], "row 2 should be 0.20.1 of 2026-05-03"),
        (ROWS[:2], "row 3 should be 0.20.2"),
        ([*ROWS, ROWS[0]], "stands there twice"),
    ],
    ids=["inserted", "another day", "removed", "twice"],
)
def test_a_row_is_only_ever_added_at_the_end(tmp_path, rows, words) -> None:
    asv.make_repository(tmp_path / "releases", ROWS)
    before = tags(tmp_path / "releases")
    with pytest.raises(ValueError, match=f"{words}.*nothing was changed"):
        asv.make_repository(tmp_path / "releases", rows)
    assert tags(tmp_path / "releases") == before


def test_the_list_that_is_shipped_is_in_the_order_of_the_releases() -> None:
    rows = asv.releases_in(asv.initial_files()[asv.RELEASES])
    assert rows[: len(ROWS)] == ROWS and [day for _, day in rows] == sorted(day for _, day in rows)


def test_every_result_that_is_kept_is_of_a_release_of_the_list(tmp_path) -> None:
    needs_checkout()
    asv.make_repository(tmp_path / "releases", asv.releases_in(asv.initial_files()[asv.RELEASES]))
    known = tags(tmp_path / "releases")
    kept = [json.loads(path.read_text("utf-8")) for path in RESULTS.glob("*/*.json") if path.name != "machine.json"]
    assert kept and [file["commit_hash"] for file in kept] == [known[f"v{f['requirements']['vllm']}"] for f in kept]
