"""`asv` with git and asv themselves: the repository's commits are the same everywhere, the page's commands are carried
out as they stand there, and asv shows releases in order and finds the one slow release; so does our script."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from asv_folders import LOADS, ROWS, folder_of_releases, launches
from command_line import said
from scripts import CHECKOUT, checkout_script, in_checkout, loaded
from stored_records import stored
from strategies import law

from pytest_slmserve.__main__ import main, parser
from pytest_slmserve.commands import asv

if shutil.which("git") is None:
    pytest.skip("needs git", allow_module_level=True)

FIRST = "9308b394fd60cb7a2c455db7c23db7695e30887d"
OLD = [("0.20.0", "2026-04-27"), ("0.20.1", "2026-05-03"), ("0.20.2", "2026-05-10")]


# The repository of releases


def tags(repository: Path) -> dict[str, str]:
    """Commit of each tag; a tag that is no mere name of a commit has another type."""
    form = "--format=%(refname:strip=2) %(objecttype) %(objectname)"
    lines = asv.git(repository, "for-each-ref", form, "refs/tags").splitlines()
    return {name: commit for name, kind, commit in map(str.split, lines) if kind == "commit"}


def test_the_hashes_are_the_same_everywhere_and_however_it_was_made(tmp_path, monkeypatch) -> None:
    """Also within a hook of git, and for a user who has other settings."""
    assert asv.make_repository(tmp_path / "one", OLD) == 3
    settings = tmp_path / "settings"
    settings.write_text("[user]\nname = Somebody\n[init]\ndefaultBranch = trunk\n[commit]\ngpgsign = true\n", "utf-8")
    for name, value in {"GIT_DIR": "elsewhere", "GIT_CONFIG_GLOBAL": settings, "GIT_AUTHOR_NAME": "Somebody"}.items():
        monkeypatch.setenv(name, str(value))
    assert [asv.make_repository(tmp_path / "two", OLD[:count]) for count in (1, 2, 3, 3)] == [1, 1, 1, 0]
    monkeypatch.undo()
    assert tags(tmp_path / "one") == tags(tmp_path / "two") and tags(tmp_path / "one")["v0.20.0"] == FIRST


def test_a_commit_and_a_tag_stand_for_each_release(tmp_path) -> None:
    repository = tmp_path / "releases"
    asv.make_repository(repository, OLD)
    log = asv.git(repository, "log", "--reverse", "--format=%s %as", "main").splitlines()
    assert log == [f"vllm {release} {day}" for release, day in OLD]
    assert asv.git(repository, "show", "v0.20.1:requirements.txt") == "vllm==0.20.1\n"
    assert asv.git(repository, "rev-list", "--reverse", "main").split() == list(tags(repository).values())
    with pytest.raises(ValueError, match="row 2"):
        asv.make_repository(repository, [OLD[0], OLD[2]])
    assert len(tags(repository)) == 3


@in_checkout
def test_every_result_that_is_kept_is_of_a_release_of_the_list(tmp_path) -> None:
    asv.make_repository(tmp_path / "releases", asv.releases_in(asv.initial_files()[asv.RELEASES]))
    known, paths = tags(tmp_path / "releases"), (CHECKOUT / "benchmarks/asv/results").glob("*/*.json")
    kept = [json.loads(path.read_text("utf-8")) for path in paths if path.name != "machine.json"]
    assert kept and [file["commit_hash"] for file in kept] == [known[f"v{f['requirements']['vllm']}"] for f in kept]


# asv's own commands


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = folder_of_releases(tmp_path / "asv")
    asv.make_repository(made / asv.REPOSITORY, ROWS)
    return made


def convert(capsys, folder: Path, *paths: Path) -> None:
    assert said(capsys, "asv", "convert", *paths, "--into", folder).status == 0


def asv_says(folder: Path, *words: str) -> str:
    """What it prints; away from the user's own settings."""
    env = {**os.environ, "HOME": str(folder), "ASV_CONF_DIR": str(folder)}
    command = [sys.executable, "-m", "asv", *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_asv_publishes_it_with_the_releases_as_x_axis(tmp_path, folder, capsys) -> None:
    """The last release is 20 % slower: that, and nothing else, is a regression. Also the comparison of two releases."""
    slower = {"0.24.0": 1.0, "0.25.1": 1.0, "0.26.0": 1.2}
    convert(capsys, folder, *(stored(tmp_path / f"{r}.jsonl", *launches(r, by)) for r, by in slower.items()))
    asv_says(folder, "publish", "--no-pull")
    html = folder / ".asv/html"
    assert json.loads((html / "index.json").read_text("utf-8"))["tags"] == {f"v{r}": i for i, (r, _) in enumerate(ROWS)}
    (graph,) = (html / "graphs").glob("branch-main/**/*.seconds_per_1000_requests.json")
    shown = json.loads(graph.read_text("utf-8"))
    expected = [[1000 * 32 / law(c) * by for c in LOADS] for by in slower.values()]
    assert [revision for revision, _ in shown] == [0, 1, 2]
    assert [values for _, values in shown] == [pytest.approx(values, rel=0.01) for values in expected]
    regressions = json.loads((html / "regressions.json").read_text("utf-8"))["regressions"]
    assert {name.partition("(")[0].partition(".")[2] for name, *_ in regressions} == {
        "seconds_per_1000_requests",
        "ms_per_output_token",
        "seconds_to_start",
    }
    table = asv_says(folder, "compare", "v0.25.1", "v0.26.0", "--factor", "1.03")
    assert "1.20" in table and "seconds_per_1000_requests('opt-1.3b', 64)" in table


# The page


def commands(heading: str) -> list[list[str]]:
    """Words of each command in the blocks of a section; the shell's own substitution is one file."""
    section = (CHECKOUT / "docs/asv.md").read_text("utf-8").partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    lines = re.sub(r"\$\(.*\)", "records.jsonl", blocks).splitlines()
    return [shlex.split(command, comments=True) for line in lines for command in line.split(" && ")]


@in_checkout
def test_a_history_is_kept_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """Only what installs, measures or serves the page is not run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ASV_CONF_DIR", str(tmp_path))
    done = []
    for words in commands("## Keep a history"):
        match words:
            case ["pip", "install", "pytest-slmserve[asv]"] | ["asv", "preview"]:
                pass
            case ["pytest", "--slm-gpu", _, records]:
                path = Path(records.removeprefix("--slm-records="))
                stored(path, *launches(path.name.removeprefix("h200-").removesuffix(".jsonl.gz")))
            case ["slmserve", *arguments]:
                assert main(arguments) == 0
            case ["cd", folder]:
                os.chdir(tmp_path / folder)
            case ["asv", *arguments]:
                subprocess.run([sys.executable, "-m", "asv", *arguments], check=True, timeout=120)
                done.append(arguments[0])
            case _:
                pytest.fail(f"unknown: {words}")
    printed = capfd.readouterr().out
    assert done == ["publish", "show", "compare"] and Path(".asv/html/index.html").is_file()
    assert "seconds_per_1000_requests('opt-1.3b', 64)" in printed and "Benchmark (Parameter)" in printed


@in_checkout
def test_every_command_on_the_page_is_one() -> None:
    found = commands("## Keep a history") + commands("## The committed history")
    ours = [words[1:] for words in found if words[0] == "slmserve"]
    assert len(ours) >= 4 and {words[1] for words in ours} == {"init", "convert"}
    assert all(parser("asv").parse_args(words).carry_out for words in ours)


# The script that looks for changes


@pytest.fixture(scope="module")
def changes():
    with loaded(checkout_script("benchmarks/asv/changes.py")) as module:
        yield module


def history(tmp_path: Path, folder: Path, capsys, slower: float) -> None:
    """Three releases, eight launches each, the last one slower."""
    for release, _ in ROWS:
        by = slower if release == ROWS[-1][0] else 1.0
        made = [m for i in range(4) for m in launches(release, by, loads=(8,), name=str(i))]
        convert(capsys, folder, stored(tmp_path / f"{release}.jsonl", *made))


def test_the_points_of_a_series_are_the_launches_in_the_order_of_the_releases(tmp_path, folder, capsys, changes):
    history(tmp_path, folder, capsys, 1.1)
    found = changes.histories(folder / "results")
    assert [name.partition("(")[0].partition(".")[2] for name in found] == [
        "ms_per_output_token",
        "seconds_per_1000_requests",
        "seconds_to_start",
    ]
    for series in found.values():
        assert [release for _, release, _ in series] == [release for release, _ in ROWS for _ in range(8)]


def test_a_change_at_a_release_is_found_and_none_without(tmp_path, folder, capsys, changes):
    pytest.importorskip("otava", reason="needs apache-otava")
    history(tmp_path, folder, capsys, 1.1)
    assert changes.main(folder / "results") == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 4 and all("0.25.1 to 0.26.0: " in line and "% higher (worse)" in line for line in told[:-1])
    history(tmp_path / "again", folder, capsys, 1.0)
    assert changes.main(folder / "results") == 0
    assert capsys.readouterr().out == "0 of 3 series change by 2 % or more\n"


def test_without_otava_it_is_told_what_to_install(tmp_path, folder, capsys, changes, monkeypatch):
    convert(capsys, folder, stored(tmp_path / "a.jsonl", *launches()))
    for name in ("otava", "otava.analysis"):
        monkeypatch.setitem(sys.modules, name, None)
    assert changes.main(folder / "results") == 1 and "pip install apache-otava" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("releases", "share", "facts"),
    [
        (("0.25.1", "0.25.1"), 0.04, ["within 0.25.1", "4.0 % higher (worse)", "p = 1e-05", "machine"]),
        (("0.25.1", "0.26.0"), -0.04, ["0.25.1 to 0.26.0", "4.0 % lower (better)", "p = 1e-05"]),
    ],
)
def test_a_change_within_a_release_is_the_machine(releases, share, facts, changes):
    told = changes.line(changes.Change("x", *releases, share, 1e-5))
    assert [fact for fact in facts if fact not in told] == [] and ("machine" in told) is (share > 0)
