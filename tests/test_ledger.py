"""The script that makes the releases of vLLM the commits of a repository."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from scripts import benchmark_script, loaded

SCRIPT = benchmark_script("asv/make_ledger")
RESULTS = SCRIPT.parent / "results"
FIRST = "9308b394fd60cb7a2c455db7c23db7695e30887d"
ROWS = [("0.20.0", "2026-04-27"), ("0.20.1", "2026-05-03"), ("0.20.2", "2026-05-10")]


@pytest.fixture(scope="module")
def script():
    if shutil.which("git") is None:
        pytest.skip("needs git")
    with loaded(SCRIPT) as module:
        yield module


def tags(ledger: Path) -> dict[str, str]:
    """Commit of each tag; a tag that is no mere name of a commit has another type."""
    form = "--format=%(refname:strip=2) %(objecttype) %(objectname)"
    command = ["git", "--git-dir", str(ledger), "for-each-ref", form, "refs/tags"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: commit for name, kind, commit in map(str.split, lines) if kind == "commit"}


def test_a_commit_and_a_tag_for_each_release(script, tmp_path) -> None:
    ledger = tmp_path / "ledger"
    assert script.make(ledger, ROWS) == 3 and script.rows_of(ledger) == ROWS
    assert script.git(ledger, "show", "v0.20.1:requirements.txt") == "vllm==0.20.1\n"
    assert script.git(ledger, "rev-list", "--reverse", "main").split() == list(tags(ledger).values())


def test_the_hashes_are_the_same_everywhere_and_however_it_was_made(script, tmp_path, monkeypatch) -> None:
    """Also within a hook of git, and for a user who has other settings."""
    script.make(tmp_path / "one", ROWS)
    settings = tmp_path / "settings"
    settings.write_text("[user]\nname = Somebody\n[init]\ndefaultBranch = trunk\n[commit]\ngpgsign = true\n", "utf-8")
    for name, value in {"GIT_DIR": "elsewhere", "GIT_CONFIG_GLOBAL": settings, "GIT_AUTHOR_NAME": "Somebody"}.items():
        monkeypatch.setenv(name, str(value))
    assert [script.make(tmp_path / "two", ROWS[:count]) for count in (1, 2, 3, 3)] == [1, 1, 1, 0]
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
def test_a_row_is_only_ever_added_at_the_end(script, tmp_path, capsys, rows, words) -> None:
    releases = tmp_path / "releases.json"
    releases.write_text(json.dumps(ROWS), "utf-8")
    assert script.main(tmp_path) == 0
    before = tags(tmp_path / "ledger")
    releases.write_text(json.dumps(rows), "utf-8")
    capsys.readouterr()
    assert script.main(tmp_path) == 1
    told = capsys.readouterr()
    assert words in told.err and "nothing was changed" in told.err and told.out == ""
    assert tags(tmp_path / "ledger") == before


@pytest.mark.parametrize("text", ["", "[[1]]", '[["0.20.0", "in May"]]', "3", None])
def test_what_is_no_list_of_releases_is_one_sentence_and_no_ledger(script, tmp_path, capsys, text) -> None:
    if text is not None:
        (tmp_path / "releases.json").write_text(text, "utf-8")
    assert script.main(tmp_path) == 1 and capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "ledger").exists() or tags(tmp_path / "ledger") == {}


def test_every_result_that_is_kept_is_of_a_release_of_the_ledger(script, tmp_path) -> None:
    rows = json.loads((SCRIPT.parent / "releases.json").read_text("utf-8"))
    script.make(tmp_path / "ledger", [(release, day) for release, day in rows])
    known = tags(tmp_path / "ledger")
    kept = [json.loads(path.read_text("utf-8")) for path in RESULTS.glob("*/*.json") if path.name != "machine.json"]
    assert kept and [file["commit_hash"] for file in kept] == [known[f"v{f['requirements']['vllm']}"] for f in kept]
