"""`asv` with git and asv themselves: the repository's commits are the same everywhere, the page's commands are carried
out as they stand there, and asv shows releases in order and finds the one slow release; so does our script."""

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

from pytest_slmserve.__main__ import main
from pytest_slmserve.commands import asv

if shutil.which("git") is None:
    pytest.skip("needs git", allow_module_level=True)

FIRST = "9308b394fd60cb7a2c455db7c23db7695e30887d"
SLOWER = {"0.26.0": 1.2}
SERIES = {"seconds_per_1000_requests", "ms_per_output_token", "seconds_to_start"}
OLD = [("0.20.0", "2026-04-27"), ("0.20.1", "2026-05-03"), ("0.20.2", "2026-05-10")]


def tags(repository: Path) -> dict[str, str]:
    """Commit of each tag; a tag that is no mere name of a commit has another type."""
    form = "--format=%(refname:strip=2) %(objecttype) %(objectname)"
    lines = asv.git(repository, "for-each-ref", form, "refs/tags").splitlines()
    return {name: commit for name, kind, commit in map(str.split, lines) if kind == "commit"}


def test_a_commit_and_a_tag_stand_for_each_release_everywhere_and_however_it_was_made(tmp_path, monkeypatch) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert asv.make_repository(one, OLD) == 3
    settings = tmp_path / "settings"
    settings.write_text("[user]\nname = Somebody\n[init]\ndefaultBranch = trunk\n[commit]\ngpgsign = true\n", "utf-8")
    for name, value in {"GIT_DIR": "elsewhere", "GIT_CONFIG_GLOBAL": settings, "GIT_AUTHOR_NAME": "Somebody"}.items():
        monkeypatch.setenv(name, str(value))
    assert [asv.make_repository(two, OLD[:count]) for count in (1, 2, 3, 3)] == [1, 1, 1, 0]
    monkeypatch.undo()
    assert tags(one) == tags(two) and tags(one)["v0.20.0"] == FIRST
    log = asv.git(one, "log", "--reverse", "--format=%s %as", "main").splitlines()
    assert log == [f"vllm {release} {day}" for release, day in OLD]
    assert asv.git(one, "show", "v0.20.1:requirements.txt") == "vllm==0.20.1\n"
    assert asv.git(one, "rev-list", "--reverse", "main").split() == list(tags(one).values())


@in_checkout
def test_every_result_that_is_kept_is_of_a_release_of_the_list(tmp_path) -> None:
    asv.make_repository(tmp_path / "releases", asv.releases_in(asv.initial_files()[asv.RELEASES]))
    known, paths = tags(tmp_path / "releases"), (CHECKOUT / "benchmarks/asv/results").glob("*/*.json")
    kept = [json.loads(path.read_text("utf-8")) for path in paths if path.name != "machine.json"]
    assert kept and [file["commit_hash"] for file in kept] == [known[f"v{f['requirements']['vllm']}"] for f in kept]


# asv's own commands, as the page has them


def commands(heading: str) -> list[list[str]]:
    """Words of each command in the blocks of a section; the shell's own substitution is one file."""
    section = (CHECKOUT / "docs/asv.md").read_text("utf-8").partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    lines = re.sub(r"\$\(.*\)", "records.jsonl", blocks).splitlines()
    return [shlex.split(command, comments=True) for line in lines for command in line.split(" && ")]


@in_checkout
def test_a_history_is_kept_as_the_page_says_and_asv_finds_the_slow_release(tmp_path, monkeypatch, capfd) -> None:
    """Only what installs, measures or serves the page is not run. The last release is 20 % slower: that, and nothing
    else, is a regression."""
    for name in ("HOME", "ASV_CONF_DIR"):  # away from the user's own settings
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done, measured = [], []
    for words in commands("## Keep a history"):
        match words:
            case ["pip", "install", "asv>=0.6.4"] | ["asv", "preview"]:
                pass
            case ["pytest", "--slm-gpu", _, records]:
                path = Path(records.removeprefix("--slm-records="))
                measured.append(path.name.removeprefix("h200-").removesuffix(".jsonl.gz"))
                stored(path, *launches(measured[-1], SLOWER.get(measured[-1], 1.0)))
            case ["slmserve", *arguments]:
                assert main(arguments) == 0
            case ["cd", folder]:
                os.chdir(tmp_path / folder)
            case ["asv", *arguments]:
                subprocess.run([sys.executable, "-m", "asv", *arguments], check=True, timeout=120)
                done.append(arguments[0])
            case _:
                pytest.fail(f"unknown: {words}")
    printed, html = capfd.readouterr().out, Path(".asv/html")
    assert done == ["publish", "show", "compare"] and (html / "index.html").is_file()
    assert "seconds_per_1000_requests('opt-1.3b', 64)" in printed and "Benchmark (Parameter)" in printed
    known = json.loads((html / "index.json").read_text("utf-8"))["tags"]
    assert [f"v{release}" for release in measured] == sorted({f"v{r}" for r in measured} & known.keys(), key=known.get)
    (graph,) = (html / "graphs").glob("branch-main/**/*.seconds_per_1000_requests.json")
    shown = json.loads(graph.read_text("utf-8"))
    expected = [[1000 * 32 / law(c) * SLOWER.get(release, 1.0) for c in LOADS] for release in measured]
    assert [revision for revision, _ in shown] == [known[f"v{release}"] for release in measured]
    assert [values for _, values in shown] == [pytest.approx(values, rel=0.01) for values in expected]
    regressions = json.loads((html / "regressions.json").read_text("utf-8"))["regressions"]
    assert {name.partition("(")[0].partition(".")[2] for name, *_ in regressions} == SERIES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = folder_of_releases(tmp_path / "asv")
    asv.make_repository(made / asv.REPOSITORY, ROWS)
    return made


@pytest.fixture(scope="module")
def changes():
    with loaded(checkout_script("benchmarks/asv/changes.py")) as module:
        yield module


def history(tmp_path: Path, folder: Path, capsys, slower: float) -> Path:
    """Results of three releases, eight launches each, the last one slower."""
    made = [launches(r, slower if r == "0.26.0" else 1.0, (8,), str(i)) for r, _ in ROWS for i in range(4)]
    path = stored(tmp_path / f"{slower}.jsonl", *(m for each in made for m in each))
    assert said(capsys, "asv", "convert", path, "--into", folder).status == 0
    return folder / "results"


def test_a_change_at_a_release_is_found_and_none_without(tmp_path, folder, capsys, changes):
    results = history(tmp_path, folder, capsys, 1.1)
    found = changes.histories(results)
    assert {name.partition("(")[0].partition(".")[2] for name in found} == SERIES
    for series in found.values():
        assert [release for _, release, _ in series] == [release for release, _ in ROWS for _ in range(8)]
    pytest.importorskip("otava", reason="needs apache-otava")
    assert changes.main(results) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 4 and all("0.25.1 to 0.26.0: " in line and "% higher (worse)" in line for line in told[:-1])
    assert changes.main(history(tmp_path, folder, capsys, 1.0)) == 0
    assert capsys.readouterr().out == "0 of 3 series change by 2 % or more\n"


@pytest.mark.parametrize(("release", "share", "facts"), [
    ("0.25.1", 0.04, ["within 0.25.1", "4.0 % higher (worse)"]),
    ("0.26.0", -0.04, ["to 0.26.0", "4.0 % lower (better)"]),
])  # fmt: skip
def test_changes_within_a_release_and_what_is_told_without_otava(release, share, facts, changes, capsys, monkeypatch):
    told = changes.line(changes.Change("x", "0.25.1", release, share, 1e-5))
    assert [fact for fact in (*facts, "p = 1e-05") if fact not in told] == [] and ("machine" in told) is (share > 0)
    for name in ("otava", "otava.analysis"):
        monkeypatch.setitem(sys.modules, name, None)
    assert changes.main(CHECKOUT / "benchmarks/asv/results") == 1
    assert "pip install apache-otava" in capsys.readouterr().err
