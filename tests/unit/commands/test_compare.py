"""`compare`: what is worse is worse in every format and in the exit status, whichever runs are named; and stored
baselines hold what was valid, are listed, shown, and never overwritten unasked."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import refused, said, told_in_json
from scripts import BASELINES, in_checkout
from stored_records import BUSY, KNOWN, engine_alone, repeats

from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.commands import compare
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Replica

RATE = "--metric=output_tokens_per_s"
NAME = "h200-vllm-0.26.0"
SHARED = replace(engine_alone(repeat=8), replica=Replica("g", 0, 2, "s", "mps"))


def written(path, *sessions):
    for each in sessions:
        with Archive.open(path) as archive:
            archive.begin({}, {})
            for m in each:
                archive.add(m)
    return path


def of(factor, launch="b", **facts):
    """Two repeats on a newer release that are slower by this factor."""
    newer = replace(KNOWN, vllm="0.27.0")
    return repeats([1000 / factor, 1001 / factor], launch=launch, environment=newer, **facts)


@pytest.fixture
def before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return written(Path("before.jsonl"), repeats([1000, 1001]))


def compared(capsys, *words, status=None):
    return told_in_json("compare", capsys, *words, status=status)["comparisons"]


def rate_of(capsys, *words):
    [one] = compared(capsys, *words, RATE)
    return one["changes"][0]["ratio"]["value"]


def test_worse_metric_exits_1(before, capsys):
    after = written(Path("after.jsonl"), of(1.1))
    [one] = compared(capsys, before, after, status=1)
    assert one["counts"] == {"better": 0, "worse": 5, "same": 0, "no worse": 0, "inconclusive": 5}
    assert one["differences"] == [{"field": "vllm", "baseline": ["0.26.0"], "candidate": ["0.27.0"]}]
    rate = one["changes"][0]
    assert (rate["metric"], rate["verdict"], rate["launches"]) == ("output_tokens_per_s", "worse", [1, 1])
    assert rate["ratio"]["value"] == pytest.approx(1 / 1.1, rel=1e-3)
    assert rate["ratio"]["low"] < rate["ratio"]["value"] < rate["ratio"]["high"] < 1
    assert (one["tolerance"], one["baseline"]["vllm"], one["candidate"]["hosts"]) == (0.03, ["0.26.0"], ["one"])
    rows = list(csv.DictReader(io.StringIO(said(capsys, "compare", before, after, "--csv").out)))
    assert [(row["metric"], row["verdict"], float(row["ratio.value"])) for row in rows] == [
        (each["metric"], each["verdict"], each["ratio"]["value"]) for each in one["changes"]
    ]
    assert (rows[0]["baseline_run"], rows[0]["candidate_run"], rows[3]["ratio.low"]) == (str(before), str(after), "")
    lines = said(capsys, "compare", before, after).out.splitlines()
    assert lines[0] == f"{after} against {before}: {lines[-1]}"
    assert lines[-1] == "of 10 metrics: 0 better, 5 worse, 5 inconclusive; tolerance 3%"


@pytest.mark.parametrize(("factor", "words", "status"), [
    (1.0, [RATE], 0), (1.0, [], 10), (1.03, [RATE], 10), (0.9, [RATE], 0), (1.1, [RATE], 1),
    (1.1, [RATE, "--tolerance=0.2"], 0),
])  # fmt: skip
def test_worst_metric_sets_exit_status(factor, words, status, before, capsys):
    """Of the latencies nothing is known of one launch."""
    after = written(Path("after.jsonl"), of(factor))
    compared(capsys, before, after, *words, status=status)
    assert rate_of(capsys, before, after) == pytest.approx(1 / factor, rel=1e-3)
    assert rate_of(capsys, before, after) * rate_of(capsys, after, before) == pytest.approx(1)


def test_candidates_are_compared_with_first(before, capsys, monkeypatch):
    good, bad = written(Path("good.jsonl"), of(1.0)), written(Path("bad.jsonl"), of(1.5))
    found = compared(capsys, before, good, bad, RATE, status=1)
    names = [(each["baseline"]["name"], each["candidate"]["name"]) for each in found]
    assert names == [(str(before), str(good)), (str(before), str(bad))]
    pages = []
    monkeypatch.setattr(compare, "write_page", lambda *given, **more: pages.append((*given, more)))
    status = said(capsys, "compare", before, before, "--html=page.html").status
    [(path, found, paths, more)] = pages
    assert (path, paths, more["status"]) == (Path("page.html"), [before, before], status)
    assert ([*more["sections"]], len(found.measurements)) == (["Comparison"], 2)
    other = written(Path("other.jsonl"), repeats([900, 901], 64))
    [one] = compared(capsys, before, other, status=10)
    [none] = compared(capsys, before, before, "--since=2999-01-01", status=10)
    assert one["changes"] == none["changes"] == [] and none["baseline"]["measurements"] == 0
    monkeypatch.setenv("COLUMNS", "80")
    seen = said(capsys, "compare", before, other)
    assert max(map(len, seen.out.splitlines())) <= 80
    assert seen.words.count("at concurrency 8") == seen.words.count("at concurrency 64") == 1
    limits = [[replace(m, spec=replace(m.spec, max_num_seqs=n)) for m in repeats([900, 901])] for n in (64, 128)]
    assert "(2 cases)" in said(capsys, "compare", before, written(Path("two.jsonl"), *limits)).words


def test_runs_of_archive_are_compared(tmp_path, capsys):
    path = written(tmp_path / "r.jsonl", repeats([1000, 1001]), of(1.1))
    assert rate_of(capsys, path) == pytest.approx(1 / 1.1, rel=1e-3)
    written(path, of(2.0, launch="c"))
    refused(said(capsys, "compare", path), "3 runs", "--run ID --run ID")
    runs = told_in_json("report", capsys, path, "--list")["runs"]
    first, second, third = (run["id"] for run in runs)
    for names, ratio in (((first, "last"), 1 / 2), ((third, first), 2), ((third, second), 2 / 1.1)):
        assert rate_of(capsys, path, *(f"--run={name}" for name in names)) == pytest.approx(ratio, rel=1e-3)
    [one] = compared(capsys, path, f"--run={first}", f"--run={third}")
    assert [one[side]["name"] for side in ("baseline", "candidate")] == [f"{path} run {run}" for run in (first, third)]


def test_endpoints_need_repeated_calls(tmp_path, capsys, monkeypatch):
    """However often one call repeats a load, the calls are what differs by more."""
    monkeypatch.chdir(tmp_path)
    there = replace(KNOWN, platform="remote", url="http://h/v1/completions")

    def call(path, number, rate):
        with Archive.open(path) as archive:
            archive.begin({}, {"claims": [], "command": f"slmserve measure --model=m --records={path}"})
            launch = {"launch": f"{path} {number}", "environment": there, "sensed": False}
            for m in repeats([rate + number, rate + number + 1], **launch):
                archive.add(replace(m, measured_at=m.measured_at.replace("T00", f"T0{number}")))

    for path, rate in (("a.jsonl", 1000), ("b.jsonl", 500)):
        call(path, 0, rate)
    seen = said(capsys, "compare", "a.jsonl", "b.jsonl", RATE)
    assert seen.status == 10 and "fewer than 4 calls of `slmserve measure`" in seen.out
    *commands, last = [line.strip() for line in seen.out.split("all runs:\n")[1].splitlines() if line.startswith("  ")]
    assert commands == [f"slmserve measure --model=m --records={path}" for path in ("a.jsonl", "b.jsonl")]
    for number in (1, 2, 3):
        call("a.jsonl", number, 1000)
        call("b.jsonl", number, 500)
    decided = said(capsys, *last.split()[1:], RATE)
    assert decided.status == 1 and "all runs:" not in decided.out
    assert said(capsys, "compare", "a.jsonl", "b.jsonl", RATE).status == 10, "of the last call alone"


@pytest.mark.parametrize(("words", "facts"), [
    ("", ["RECORDS"]), ("before.jsonl", ["before.jsonl"]), ("before.jsonl before.jsonl --run last", ["--run"]),
    ("before.jsonl before.jsonl --metric speed", ["--metric speed", "output_tokens_per_s"]),
    ("before.jsonl before.jsonl --tolerance 3", ["--tolerance", "'3'"]),
    ("before.jsonl nowhere.jsonl", ["nowhere.jsonl"]),
    ("--save", ["RECORDS"]), ("--show", ["--show"]), ("--show nothing", ["nothing"]),
    ("--save --list", ["--save", "--list"]), ("--save nowhere.jsonl", ["nowhere.jsonl"]),
    ("--save --run a --run b c.jsonl", ["--save", "--run"]),
])  # fmt: skip
def test_wrong_usage_names_option(before, capsys, words, facts):
    seen = said(capsys, "compare", *words.split())
    refused(seen, *facts)
    assert re.search(r"^  (try: .+|[A-Z].+\.)$", seen.err, re.MULTILINE)


@in_checkout
@pytest.mark.parametrize("order", [1, -1])
def test_different_hosts_stay_inconclusive(order, capsys):
    paths = [BASELINES / f"h200-vllm-0.26.0-{name}.jsonl.xz" for name in ("adaptive", "adaptive-next-host")][::order]
    [one] = compared(capsys, *paths, status=10)
    assert {name: count for name, count in one["counts"].items() if count} == {"inconclusive": 50}
    [host] = [each for each in one["differences"] if each["field"] == "host"]
    assert {*host["baseline"], *host["candidate"]} == {"5742266f", "01984512"}


@pytest.fixture
def folder(tmp_path, capsys):
    """A folder with one baseline: two measurements of concurrency 8 and one of 16."""
    path = written(tmp_path / "a.jsonl", [*repeats([1000, 1004]), *repeats([1900], 16)])
    assert said(capsys, "compare", path, "--save", "--folder", tmp_path / "kept").status == 0
    return tmp_path / "kept"


def test_baseline_keeps_valid_measurements(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good, bad = repeats([1000, 1004]), [engine_alone(failures=2, repeat=i) for i in (5, 6)]
    crowded, stolen = {sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}, {sensors.STOLEN_CORES: 0.5}
    doubtful = [engine_alone(columns={**BUSY, **each}, repeat=7 + i) for i, each in enumerate((crowded, stolen))]
    rows = {"a.jsonl": [*good, SHARED], "copy.jsonl": good, "b.jsonl.gz": bad, "c.jsonl": doubtful}
    seen = said(capsys, "compare", *(written(Path(name), made) for name, made in rows.items()), "--save")
    kept, *lines = seen.out.splitlines()
    path = Path(f".slm/baselines/{NAME}.jsonl.xz")
    assert (seen.status, seen.err) == (0, "") and len(read(path).measurements) == 4
    assert [fact for fact in (str(path), "4 measurements", "opt-1.3b") if fact not in kept] == []
    told = [(line.partition(": ")[0], line.endswith("(2 times)")) for line in lines]
    assert sorted(set(told)) == [("left out", False), ("left out", True), ("note", False)]
    assert all("opt-1.3b at concurrency 8: " in line for line in lines)


def test_baseline_is_replaced_when_asked(folder, tmp_path, capsys):
    path = folder / f"{NAME}.jsonl.xz"
    before, other = path.read_bytes(), written(tmp_path / "b.jsonl", repeats([7, 7], 2), repeats([5], 4, launch="b"))
    words = ("compare", other, "--save", "--folder", folder)
    refused(said(capsys, *words), path.name, "--replace")
    assert path.read_bytes() == before
    for more, loads in (((), [2, 2, 4]), (("--run=last",), [4])):
        assert said(capsys, *words, "--replace", *more).status == 0
        assert sorted(m.load.max_concurrency for m in read(path).measurements) == loads


def test_damaged_line_is_refused(tmp_path, capsys):
    path = written(tmp_path / "a.jsonl", repeats([1000, 1001, 1002]))
    path.write_text(path.read_text("utf-8").replace('"kind":"measurement"', '"kind":"measure', 1), "utf-8")
    for words, told in ((("--save", "--folder", tmp_path), "note: "), ((path,), "inconclusive")):
        refused(said(capsys, "compare", path, *words), "--skip-damaged")
        seen = said(capsys, "compare", path, *words, "--skip-damaged")
        assert seen.status in (0, 10) and told in seen.out and "2 measurements" in seen.out


def test_baseline_is_shown_by_name(folder, tmp_path, capsys):
    words = ("compare", "--show", NAME, "--folder", folder)
    seen = said(capsys, *words)
    head, device, software, host, _, *table = seen.out.splitlines()
    assert (seen.status, seen.err) == (0, "")
    assert [head, *(" ".join(line.split()) for line in (device, software, host))] == [
        f"{NAME}: 3 measurements, 1 launch, 1 host, measured 2026-01-01",
        "device NVIDIA H200, 140 GiB, driver 580.159.04",
        "software vLLM 0.26.0, torch 2.11.0, CUDA 13.0",
        "host Xeon, cores: 16, Linux, one",
    ]
    [one] = compared(capsys, NAME, written(tmp_path / "b.jsonl", of(1.1)), "--folder", folder)
    assert (one["baseline"]["name"], one["baseline"]["measurements"]) == (NAME, 3)
    report = said(capsys, "report", folder / f"{NAME}.jsonl.xz").out.splitlines()
    assert len(table) > 8 and set(table) <= set(report) and "note: " not in seen.out
    assert said(capsys, "compare", "--show", folder / f"{NAME}.jsonl.xz") == seen, "as --slm-baseline takes it"
    points = json.loads(said(capsys, *words, "--json").out)["points"]
    assert [(row["concurrency"], len(row["repeats"])) for row in points] == [(8, 2), (16, 1)]
    written(tmp_path / "mine.jsonl.xz", [*repeats([1000, 1004]), SHARED])
    last = said(capsys, "compare", "--show", "mine", "--folder", tmp_path).out.splitlines()[-1]
    assert last.startswith("note: 1 of loads"), "what is no part of a baseline"
    words = ("compare", "--list", "--folder")
    [one] = json.loads(said(capsys, *words, folder, "--json").out)
    assert (one["name"], one["measurements"], one["launches"], one["models"]) == (NAME, 3, 1, ["opt-1.3b"])
    assert one["measured"] == ["2026-01-01T00:00:00.000+00:00", "2026-01-01T00:00:01.000+00:00"]
    assert one["environment"]["driver"] == ["580.159.04"] and one["environment"]["vllm"] == ["0.26.0"]
    (folder / "broken.jsonl.xz").write_text("no gzip")
    seen = said(capsys, *words, folder)
    row = next(line.split() for line in seen.out.splitlines() if line.startswith(NAME))
    assert (seen.status, seen.err) == (0, "") and row == [NAME, "2026-01-01", "3", "1", "opt-1.3b"]
    assert f"note: {folder / 'broken.jsonl.xz'}" in seen.words and "broken  " not in seen.out
    assert said(capsys, *words, folder / "none") == (0, f"no baseline in {folder / 'none'}\n", "")
    assert said(capsys, *words, folder / "none", "--json") == (0, "[]\n", "")
