"""`slmserve asv`: what it writes, what asv makes of it, and its exit status."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from scripts import checkout_script, loaded
from strategies import H200, RESOLVED, law, measurement

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.commands import asv as export
from pytest_slmserve.schema.records import Measurement

pytest.importorskip("asv_runner", reason="needs asv")
CHANGES = checkout_script("benchmarks/asv/changes.py")
ROWS = [("0.24.0", "2026-06-30"), ("0.25.1", "2026-07-14"), ("0.26.0", "2026-07-25")]
LOADS = (8, 64)


def launches(
    release: str = "0.26.0", slower: float = 1.0, loads=LOADS, name: str = "launch", **facts: object
) -> list[Measurement]:
    """A repeat of each load in each of two launches, between which there is 1 %."""
    where = replace(H200, vllm=release, torch="2.11.0", driver="580", host="one")
    made = [
        measurement(
            c, law(c) / slower * (1 + 0.01 * i), launch=f"{release}-{name}-{i}", environment=where, repeat=i, **facts
        )
        for c in loads
        for i in range(2)
    ]
    return [replace(m, resolved=replace(RESOLVED, ready_s=40.0 * slower)) for m in made]


def archive(path: Path, measurements) -> Path:
    with Archive.open(path) as opened:
        for one in measurements:
            opened.add(one)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As `init` makes it of a list of three releases."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    made = tmp_path / "asv"
    made.mkdir()
    for name, text in export.initial_files().items():
        (made / name).write_text(text, "utf-8")
    (made / export.RELEASES).write_text(json.dumps(ROWS), "utf-8")
    export.make_repository(made / export.REPOSITORY, ROWS)
    return made


def run(capsys, folder: Path, *arguments: object) -> tuple[int, str, str]:
    status = main(["asv", "convert", *(str(a) for a in arguments), "--into", str(folder)])
    seen = capsys.readouterr()
    return status, seen.out, seen.err


def results(folder: Path) -> dict[str, str]:
    """Text of every file below results/."""
    found = folder / "results"
    return {str(path.relative_to(found)): path.read_text("utf-8") for path in sorted(found.rglob("*.json"))}


def test_a_release_a_machine_and_the_list_of_benchmarks(tmp_path, folder, capsys) -> None:
    status, out, err = run(capsys, folder, archive(tmp_path / "a.jsonl", launches()))
    machine, listed = json.loads(results(folder)["nvidia-h200/machine.json"]), results(folder)["benchmarks.json"]
    (name,) = results(folder).keys() - {"nvidia-h200/machine.json", "benchmarks.json"}
    assert (status, err) == (0, "") and out == f"written: {folder}/results/{name} (5 values)\n"
    assert machine == {"machine": "nvidia-h200", "version": 1, "gpu": "NVIDIA H200"}
    assert json.loads(listed)["64-32-staggered-012345.ms_per_output_token"]["params"] == [["'opt-1.3b'"], ["8", "64"]]


def test_the_same_records_again_change_nothing(tmp_path, folder, capsys) -> None:
    path = archive(tmp_path / "a.jsonl", launches())
    run(capsys, folder, path)
    before = results(folder)
    assert run(capsys, folder, path, path)[0] == 0 and results(folder) == before


def test_another_archive_joins_what_is_there(tmp_path, folder, capsys) -> None:
    """Whatever the order in which they come."""
    one, two = launches(loads=(8,)), launches(loads=(64,), name="other")
    paths = [archive(tmp_path / f"{i}.jsonl", m) for i, m in enumerate((one, two))]
    for path in paths:
        assert run(capsys, folder, path)[0] == 0
    columns = served(folder)
    assert columns["params"] == [["'opt-1.3b'"], ["8", "64"]] and None not in columns["result"]
    for path in reversed(paths):
        assert run(capsys, folder, path)[0] == 0
    assert {**served(folder), "started_at": 0} == {**columns, "started_at": 0}


def test_one_archive_does_not_replace_what_several_made(tmp_path, folder, capsys) -> None:
    """As a nightly job converts them: each night's archive by itself."""
    nights = [archive(tmp_path / f"{n}.jsonl", launches(name=f"night-{n}", slower=1 + 0.01 * n)) for n in range(3)]
    run(capsys, folder, *nights)
    together = served(folder)["samples"]
    assert [len(samples) for samples in together] == [6, 6]
    run(capsys, folder, nights[0])
    assert served(folder)["samples"] == together
    shutil.rmtree(folder / "results")
    for night in nights:
        run(capsys, folder, night)
    assert list(map(sorted, served(folder)["samples"])) == list(map(sorted, together))


def served(folder: Path) -> dict:
    """Columns of seconds per 1000 requests in the only result file."""
    (file,) = [json.loads(text) for name, text in results(folder).items() if "-vllm-" in name]
    return dict(zip(file["result_columns"], file["results"]["64-32-staggered-012345.seconds_per_1000_requests"]))


def test_what_was_left_out_and_what_was_taken_together_is_said(tmp_path, folder, capsys) -> None:
    remote_executor = [replace(m, environment=replace(m.environment, host="two")) for m in launches(name="elsewhere")]
    path = archive(tmp_path / "a.jsonl", [*launches(), *remote_executor, *launches(failures=1, loads=(16,))])
    status, out, _ = run(capsys, folder, path)
    assert status == 0 and "note: left out: 2 measurements, invalid\n" in out
    assert "vLLM 0.26.0 on nvidia-h200: launches of 2 hosts are taken together" in out


def test_hosts_of_two_drivers_are_not_taken_together(tmp_path, folder, capsys) -> None:
    newer = [replace(m, environment=replace(m.environment, host="two", driver="590")) for m in launches(name="newer")]
    status, out, _ = run(capsys, folder, archive(tmp_path / "a.jsonl", [*launches(), *newer]))
    assert status == 0 and out.count("written: ") == 2 and "taken together" not in out


def test_a_release_without_a_row_is_4_and_nothing_is_written(tmp_path, folder, capsys) -> None:
    path = archive(tmp_path / "a.jsonl", [*launches(), *launches("0.25.0")])
    status, out, err = run(capsys, folder, path)
    assert (status, out) == (4, "") and "error: vLLM 0.25.0 is not in the repository of releases" in err
    assert '["0.25.0", "YYYY-MM-DD"]' in err and err.count("\n") == 2 and results(folder) == {}


def test_without_the_releases_it_is_said_how_to_make_them(tmp_path, capsys) -> None:
    """The folder may lie in a repository, which is none of releases."""
    (tmp_path / ".git").mkdir()
    status, out, err = run(capsys, tmp_path, archive(tmp_path / "a.jsonl", launches()))
    assert (status, out) == (4, "") and f"{tmp_path} has no repository of releases" in err
    assert f"slmserve asv init --into {tmp_path}" in err


def test_without_asv_that_is_said_first(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "asv_runner.statistics", None)
    status, out, err = run(capsys, tmp_path, tmp_path / "no.jsonl")
    assert (status, out) == (4, "") and "pip install 'pytest-slmserve[asv]'" in err


@pytest.mark.parametrize(
    ("made", "words", "said"),
    [
        (launches(failures=1), [], "there is no valid measurement"),
        *((launches(), ["--machine", name], "is no name of a folder") for name in ("", "..", "a/b")),
    ],
)
def test_wrong_usage_is_4_and_writes_nothing(tmp_path, folder, capsys, made, words, said) -> None:
    status, _, err = run(capsys, folder, archive(tmp_path / "a.jsonl", made), *words)
    assert status == 4 and said in err and results(folder) == {}


def test_a_machine_that_is_described_stays_as_it_is(tmp_path, folder, capsys) -> None:
    described = folder / "results" / "runner-1" / "machine.json"
    described.parent.mkdir(parents=True)
    described.write_text('{"machine": "runner-1", "version": 1, "ram": "2 TB"}', "utf-8")
    before = described.read_text("utf-8")
    assert run(capsys, folder, archive(tmp_path / "a.jsonl", launches()), "--machine", "runner-1")[0] == 0
    assert described.read_text("utf-8") == before and len(results(folder)) == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"result_columns": [], "results": {"x": [1]}}', '{"results": 3}'])
@pytest.mark.parametrize("damaged", ["nvidia-h200/", "benchmarks.json"])
def test_a_file_that_is_none_of_asv_is_4_and_nothing_is_written(tmp_path, folder, capsys, damaged, text) -> None:
    path = archive(tmp_path / "a.jsonl", launches())
    run(capsys, folder, path)
    (name,) = [name for name in results(folder) if name.startswith(damaged) and "machine" not in name]
    (folder / "results" / name).write_text(text, "utf-8")
    before = results(folder)
    status, out, err = run(capsys, folder, path)
    harmless = damaged == "benchmarks.json" and text.startswith("{")
    assert status == (0 if harmless else 4)
    if not harmless:
        assert out == "" and "results of asv" in err and results(folder) == before


# The folder


def init(capsys, folder: Path) -> tuple[int, str, str]:
    status = main(["asv", "init", "--into", str(folder)])
    seen = capsys.readouterr()
    return status, seen.out, seen.err


def test_a_folder_begins_with_the_releases_and_stays_as_it_is(tmp_path, capsys) -> None:
    folder = tmp_path / "history" / "asv"
    status, out, err = init(capsys, folder)
    files = {path.name: path.read_text("utf-8") for path in folder.iterdir() if path.is_file()}
    shipped = export.releases_in(files["releases.json"])
    told = f"{folder}/releases.git: {len(shipped)} releases, {len(shipped)} added\n"
    assert (status, err) == (0, "") and out.endswith(told)
    assert files == export.initial_files() and json.loads(files["asv.conf.json"])["repo"] == "./releases.git"
    (folder / "asv.conf.json").write_text("{}", "utf-8")
    assert init(capsys, folder) == (0, f"{folder}/releases.git: {len(shipped)} releases, 0 added\n", "")
    assert (folder / "asv.conf.json").read_text("utf-8") == "{}"


def test_a_newer_package_adds_its_releases_and_a_row_of_ones_own_stays(tmp_path, capsys) -> None:
    shipped = export.releases_in(export.initial_files()["releases.json"])
    listed = tmp_path / "releases.json"
    listed.write_text(json.dumps(shipped[:-2]), "utf-8")
    assert f"written: {listed}\n" in init(capsys, tmp_path)[1]
    assert listed.read_text("utf-8") == export.initial_files()["releases.json"], "so that a difference is a row"
    listed.write_text(json.dumps([*shipped, ("99.0", "2030-01-01")]), "utf-8")
    status, out, _ = init(capsys, tmp_path)
    assert status == 0 and out == f"{tmp_path}/releases.git: {len(shipped) + 1} releases, 1 added\n"


@pytest.mark.parametrize("text", ["", "[[1]]", '[["0.20.0", "in May"]]', "3"])
def test_a_list_that_cannot_be_read_is_4_and_makes_no_repository(tmp_path, capsys, text) -> None:
    (tmp_path / "releases.json").write_text(text, "utf-8")
    status, out, err = init(capsys, tmp_path)
    assert (status, out) == (4, "") and f"error: {tmp_path}/releases.json: " in err and "new ones at the end" in err
    assert not (tmp_path / "releases.git").exists()


def test_without_git_it_is_said(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = init(capsys, tmp_path)
    assert status == 4 and "git" in err


def test_nothing_heavy_is_imported_for_other_commands() -> None:
    code = "import sys; import pytest_slmserve.__main__\n"
    code += "sys.exit(repr([n for n in sys.modules if n.startswith(('asv', 'numpy', 'pytest_slmserve.report'))]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def test_asv_publishes_it_with_the_releases_as_x_axis(tmp_path, folder, capsys) -> None:
    """The last release is 20 % slower: that, and nothing else, is a regression. Also the comparison of two releases."""
    if find_spec("asv") is None:
        pytest.skip("needs asv")
    slower = {"0.24.0": 1.0, "0.25.1": 1.0, "0.26.0": 1.2}
    paths = [archive(tmp_path / f"{r}.jsonl", launches(r, by)) for r, by in slower.items()]
    assert run(capsys, folder, *paths)[0] == 0
    asv(folder, "publish", "--no-pull")
    index = json.loads((folder / ".asv/html/index.json").read_text("utf-8"))
    assert index["tags"] == {"v0.24.0": 0, "v0.25.1": 1, "v0.26.0": 2}
    (graph,) = (folder / ".asv/html/graphs").glob("branch-main/**/*.seconds_per_1000_requests.json")
    shown = json.loads(graph.read_text("utf-8"))
    expected = [[1000 * 32 / law(c) * by for c in LOADS] for by in slower.values()]
    assert [revision for revision, _ in shown] == [0, 1, 2]
    assert [values for _, values in shown] == [pytest.approx(values, rel=0.01) for values in expected]
    regressions = json.loads((folder / ".asv/html/regressions.json").read_text("utf-8"))["regressions"]
    assert {name.partition("(")[0].partition(".")[2] for name, *_ in regressions} == {
        "seconds_per_1000_requests",
        "ms_per_output_token",
        "seconds_to_start",
    }
    table = asv(folder, "compare", "v0.25.1", "v0.26.0", "--factor", "1.03")
    assert "1.20" in table and "seconds_per_1000_requests('opt-1.3b', 64)" in table


def asv(folder: Path, *arguments: str) -> str:
    """What it prints; away from the user's own settings."""
    env = {**os.environ, "HOME": str(folder), "ASV_CONF_DIR": str(folder)}
    command = [sys.executable, "-m", "asv", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# The script that looks for changes


@pytest.fixture(scope="module")
def changes():
    with loaded(CHANGES) as module:
        yield module


def history(tmp_path: Path, folder: Path, capsys, slower: float) -> None:
    """Three releases, eight launches each, the last one slower."""
    for release, _ in ROWS:
        by = slower if release == ROWS[-1][0] else 1.0
        made = [m for i in range(4) for m in launches(release, by, loads=(8,), name=str(i))]
        assert run(capsys, folder, archive(tmp_path / f"{release}.jsonl", made))[0] == 0


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


def test_without_otava_it_is_said_what_to_install(tmp_path, folder, capsys, changes, monkeypatch):
    run(capsys, folder, archive(tmp_path / "a.jsonl", launches()))
    monkeypatch.setitem(sys.modules, "otava", None)
    monkeypatch.setitem(sys.modules, "otava.analysis", None)
    assert changes.main(folder / "results") == 1 and "pip install apache-otava" in capsys.readouterr().err


def test_a_change_within_a_release_is_the_machine(changes):
    moved = changes.Change("x", "0.25.1", "0.25.1", 0.04, 1e-5)
    assert changes.line(moved).endswith("within 0.25.1: 4.0 % higher (worse), p = 1e-05: the machine, not the release")
    assert changes.line(changes.Change("x", "0.25.1", "0.26.0", -0.04, 1e-5)).endswith(
        "0.26.0: 4.0 % lower (better), p = 1e-05"
    )
