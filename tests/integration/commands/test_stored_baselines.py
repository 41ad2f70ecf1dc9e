"""`slmserve compare --save`, `--list` and `--show`: what they print, and their exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from stored_records import BUSY, engine_alone, repeats

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Replica

NAME = "h200-vllm-0.26.0"
HEAVY = ("vl_convert", "pytest", "_pytest", "numpy", "vllm", "torch", "transformers", "pynvml")


def archive(path: Path, measurements=None) -> Path:
    with Archive.open(path) as opened:
        opened.begin({}, {})
        for one in [*repeats([1000, 1004]), *repeats([1900], 16)] if measurements is None else measurements:
            opened.add(one)
    return path


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = main(["compare", *(str(a) for a in arguments)])
    seen = capsys.readouterr()
    return status, seen.out, seen.err


@pytest.fixture
def folder(tmp_path, capsys) -> Path:
    status, _, err = run(capsys, archive(tmp_path / "a.jsonl"), "--save", "--folder", tmp_path / "kept")
    assert (status, err) == (0, "")
    return tmp_path / "kept"


def test_save_says_what_is_kept_and_what_is_left_out_and_why(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good, bad = repeats([1000, 1004]), [engine_alone(failures=2, repeat=i) for i in (5, 6)]
    shared = replace(engine_alone(repeat=8), replica=Replica("g", 0, 2, "s", "mps"))
    crowded = {**BUSY, sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}
    doubtful = [
        engine_alone(columns=crowded, repeat=7),
        engine_alone(columns={**BUSY, sensors.STOLEN_CORES: 0.5}, repeat=9),
    ]
    rows = {"a.jsonl": [*good, shared], "copy.jsonl": good, "b.jsonl.gz": bad, "c.jsonl": doubtful}
    paths = [archive(Path(name), made) for name, made in rows.items()]
    status, out, err = run(capsys, *paths, "--save")
    kept, note, first, second = out.splitlines()
    assert (status, err) == (0, "") and kept == f"kept: .slm/baselines/{NAME}.jsonl.xz: 4 measurements of opt-1.3b"
    assert note.startswith("note: degraded, kept: opt-1.3b at concurrency 8: 3 processes computed on the GPU")
    assert first.startswith("left out: opt-1.3b at concurrency 8: 2 requests failed") and first.endswith("(2 times)")
    assert second == (
        "left out: opt-1.3b at concurrency 8: it belongs to a run of several engines on one device, of which others "
        "are missing"
    )
    assert NAME in run(capsys, "--list")[1] and NAME in run(capsys, "--show", NAME)[1]


def test_save_overwrites_only_when_told(folder, tmp_path, capsys):
    other = archive(tmp_path / "b.jsonl", repeats([7, 7], 2))
    status, out, err = run(capsys, other, "--save", "--folder", folder)
    assert (status, out) == (4, "") and f"{NAME}.jsonl.xz is there already" in err and "--replace" in err
    assert run(capsys, other, "--save", "--folder", folder, "--replace")[0] == 0
    assert "1 launch, 1 host" in run(capsys, "--show", NAME, "--folder", folder)[1]


def test_a_damaged_archive_stops_it_unless_the_line_is_left_out(tmp_path, capsys):
    path = archive(tmp_path / "a.jsonl")
    path.write_text(path.read_text("utf-8").replace('"kind":"measurement"', '"kind":"measure', 1), "utf-8")
    status, out, err = run(capsys, path, "--save", "--folder", tmp_path)
    assert (status, out) == (4, "") and "--skip-damaged" in err
    status, out, _ = run(capsys, path, "--save", "--folder", tmp_path, "--skip-damaged")
    assert status == 0 and "2 measurements" in out and "note: " in out and "skipped: line" in out


def test_list_names_each_and_what_cannot_be_read(folder, capsys):
    (folder / "broken.jsonl.xz").write_text("no gzip")
    status, out, err = run(capsys, "--list", "--folder", folder)
    row = next(line.split() for line in out.splitlines() if line.startswith(NAME))
    assert (status, err) == (0, "") and row == [NAME, "2026-01-01", "3", "1", "opt-1.3b"]
    assert f"note: {folder / 'broken.jsonl.xz'} ends in .xz but is not xz" in out


def test_list_of_none(tmp_path, capsys):
    assert run(capsys, "--list", "--folder", tmp_path / "none") == (0, f"no baseline in {tmp_path / 'none'}\n", "")
    assert run(capsys, "--list", "--folder", tmp_path / "none", "--json") == (0, "[]\n", "")


def test_list_as_json(folder, capsys):
    (found,) = json.loads(run(capsys, "--list", "--folder", folder, "--json")[1])
    assert (found["name"], found["measurements"], found["launches"], found["models"]) == (NAME, 3, 1, ["opt-1.3b"])
    assert found["measured"] == ["2026-01-01T00:00:00.000+00:00", "2026-01-01T00:00:01.000+00:00"]
    assert found["environment"]["driver"] == ["580.159.04"] and found["environment"]["vllm"] == ["0.26.0"]


def test_show_tells_launches_date_and_environment_and_has_the_tables_of_report(folder, capsys):
    status, out, err = run(capsys, "--show", NAME, "--folder", folder)
    head, device, software, host, _, title, *table = out.splitlines()
    assert (status, err) == (0, "")
    assert head == f"{NAME}: 3 measurements, 1 launch, 1 host, measured 2026-01-01"
    assert device.split(maxsplit=1) == ["device", "NVIDIA H200, 140 GiB, driver 580.159.04"]
    assert software.split(maxsplit=1) == ["software", "vLLM 0.26.0, torch 2.11.0, CUDA 13.0"]
    assert host.split(maxsplit=1) == ["host", "Xeon, cores: 16, Linux, one"]
    assert title == "opt-1.3b on NVIDIA H200" and "ramp-up staggered, window 5 s" in " ".join(table)
    assert "2 points, 1 to 2 repeats each, 1 launch, 1 host" in " ".join(table)
    rows = [line.split() for line in table]
    assert [row[0] for row in rows if row and row[-1] == "yes"] == ["8", "16"]
    main(["report", str(folder / f"{NAME}.jsonl.xz")])
    assert set(table) <= set(capsys.readouterr().out.splitlines())


def test_show_takes_a_path_as_slm_baseline_does(folder, capsys):
    status, out, err = run(capsys, "--show", folder / f"{NAME}.jsonl.xz")
    assert (status, out, err) == run(capsys, "--show", NAME, "--folder", folder) and out.startswith(f"{NAME}: 3 meas")


def test_show_as_json_has_the_points(folder, capsys):
    found = json.loads(run(capsys, "--show", NAME, "--folder", folder, "--json")[1])
    assert [(row["concurrency"], len(row["repeats"])) for row in found["points"]] == [(8, 2), (16, 1)]


def test_show_of_any_archive_says_what_is_no_part_of_a_baseline(tmp_path, capsys):
    shared = replace(engine_alone(repeat=8), replica=Replica("g", 0, 2, "s", "mps"))
    archive(tmp_path / "mine.jsonl.xz", [*repeats([1000, 1004]), shared])
    _, out, _ = run(capsys, "--show", "mine", "--folder", tmp_path)
    assert out.endswith("note: 1 of loads without a window, or of engines among several of which some are missing\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "RECORDS"),
        (["--save"], "RECORDS"),
        (["--show"], "--show"),
        (["--show", "nothing"], "there is no baseline nothing"),
        (["--save", "--list"], "not allowed with"),
        (["--save", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--save", "--run", "a", "--run", "b", "c.jsonl"], "--save takes one --run"),
    ],
)
def test_wrong_usage_is_4(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (4, "") and message in err.splitlines()[0] and err.count("\n") == 2


def test_a_stored_baseline_is_compared_by_its_name(folder, tmp_path, capsys):
    other = archive(tmp_path / "b.jsonl", repeats([1001, 1003]))
    status, out, _ = run(capsys, NAME, other, "--folder", folder)
    assert status in (0, 10) and f"baseline {NAME}: 3 measurements" in " ".join(out.split())


def test_help_tells_the_exit_statuses(capsys):
    with pytest.raises(SystemExit) as end:
        main(["compare", "--help"])
    assert end.value.code == 0 and "4 wrong usage" in " ".join(capsys.readouterr().out.split())


def test_nothing_heavy_is_imported(folder):
    asked = ["compare", "--show", NAME, "--folder", str(folder)]
    code = f"import sys; from pytest_slmserve.__main__ import main; main({asked!r})\n"
    code += f"sys.exit(repr([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[]" and NAME in done.stdout
