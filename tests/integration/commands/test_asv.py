"""`asv` with git and asv themselves: the repository's commits are the same everywhere, the page's commands are carried
out as they stand there, asv shows releases in order and finds the one slow release, and a step is named and drawn on a
page that needs no network."""

import base64
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import asv as asv_package
import pytest
from asv_folders import LOADS, launches
from chromium import PATIENCE_MS, launched, needs_browser
from command_line import said
from scripts import CHECKOUT, in_checkout
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


def test_release_commits_are_reproducible(tmp_path, monkeypatch) -> None:
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
def test_kept_results_name_listed_releases(tmp_path) -> None:
    asv.make_repository(tmp_path / "releases", asv.releases_in(asv.initial_files()[asv.RELEASES]))
    known, paths = tags(tmp_path / "releases"), (CHECKOUT / "benchmarks/asv/results").glob("*/*.json")
    kept = [json.loads(path.read_text("utf-8")) for path in paths if path.name != "machine.json"]
    assert kept and [file["commit_hash"] for file in kept] == [known[f"v{f['requirements']['vllm']}"] for f in kept]


# asv's own commands, as the page has them


def commands(heading: str) -> list[list[str]]:
    """Words of each command in the blocks of a section; the shell's own substitution is one file."""
    section = (
        (CHECKOUT / "docs/compare-releases.md").read_text("utf-8").partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    )
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    lines = re.sub(r"\$\(.*\)", "records.jsonl", blocks).splitlines()
    return [shlex.split(command, comments=True) for line in lines for command in line.split(" && ")]


@in_checkout
def test_asv_history_finds_slow_release(tmp_path, monkeypatch, capfd) -> None:
    """Only what installs, measures or serves the page is not run. The last release is 20% slower: that, and nothing
    else, is a regression."""
    for name in ("HOME", "ASV_CONF_DIR"):  # away from the user's own settings
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done, measured = [], []
    for words in commands("## Follow releases with asv"):
        match words:
            case ["pip", "install", "asv>=0.6.4"] | ["asv", "preview"]:
                pass
            case ["pytest", "--pyargs", _, "--slm-gpu", _, records]:
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
    assert done == ["show", "compare"] and 'src="jquery.min.js"' in (html / "index.html").read_text("utf-8")
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


# A history with a step, and its page

STEP = 6  # number of the release from which on all costs are a tenth higher
RELEASES = [release for release, _ in asv.releases_in(asv.initial_files()[asv.RELEASES])][:12]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A folder of asv with its page, as `publish` made it."""
    folder = tmp_path_factory.mktemp("asv") / "asv"
    assert main(["asv", "init", "--into", str(folder)]) == 0
    made = [m for i, r in enumerate(RELEASES) for m in launches(r, 1.1 if i >= STEP else 1.0, (8,))]
    assert main(["asv", "convert", str(stored(folder / "r.jsonl", *made)), "--into", str(folder)]) == 0
    return folder


def test_publish_names_each_cost_step(published, capsys) -> None:
    seen = said(capsys, "asv", "publish", "--into", published)
    assert (seen.status, seen.err) == (0, "")
    *steps, last = seen.out.splitlines()
    assert last.startswith(f"written: {published}/.asv/html/index.html")
    assert {line.partition("(")[0].partition(".")[2] for line in steps} == SERIES
    assert [line for line in steps if f": step at {RELEASES[STEP]}: 10% dearer; " not in line] == []
    assert said(capsys, "asv", "publish", "--into", published.parent).status == 4


@needs_browser
def test_published_page_needs_no_network(published, capsys) -> None:
    said(capsys, "asv", "publish", "--into", published)
    asked, wrong = list[str](), list[str]()
    served = partial(SimpleHTTPRequestHandler, directory=published / ".asv/html")
    with ThreadingHTTPServer(("127.0.0.1", 0), served) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        for browser in launched():
            page = browser.new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.on("request", lambda request: asked.append(request.url))
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("requestfailed", lambda request: wrong.append(request.url))
            page.goto(home)
            page.wait_for_selector("#summarygrid-display canvas")
            page.goto(f"{home}#64-32-staggered.ms_per_output_token")
            page.wait_for_selector("#main-graph canvas.flot-base")
            page.wait_for_function("$('#main-graph').data('plot').getData().some(curve => curve.data.length == 12)")
            page.goto(f"{home}#/regressions")
            page.wait_for_selector("#regressions-display table")
        server.shutdown()
    assert len(asked) > 10 and [url for url in asked if not url.startswith(home)] == wrong == []


def test_page_scripts_match_published_files() -> None:
    """Where npm has the very file that asv's page asks for, its integrity says so."""
    page = (Path(asv_package.__file__).parent / "www/index.html").read_text("utf-8")
    asked = re.findall(r'(?:src|href)="https://[^"]*/([^"/]+)" integrity="(sha\d+)-([^"]+)"', page)
    text, left = asv.with_local_scripts(page)
    assert len(asked) == len(asv.scripts()) == 10 and left == []
    assert all(f'="{name}"' in text for name in asv.scripts()) and "integrity" not in text
    kept = [(asv.PAGE_FILES / name).read_bytes() for name in asv.scripts()]
    same = [
        name
        for name, kind, wanted in asked
        if any(base64.b64encode(hashlib.new(kind, file).digest()).decode() == wanted for file in kept)
    ]
    assert len(same) == 5
    table = (asv.PAGE_FILES / "README.md").read_text("utf-8")
    assert [name for name, file in zip(asv.scripts(), kept) if hashlib.sha256(file).hexdigest() not in table] == []
    newer = page.replace("jquery-3.3.1.min.js", "new-4.0.0.min.js")
    assert asv.with_local_scripts(newer)[1] == ["https://code.jquery.com/new-4.0.0.min.js"]
