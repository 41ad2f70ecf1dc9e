"""`compare`: what it prints, as text, JSON and CSV, and its exit status."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from scripts import BASELINES, in_checkout
from stored_records import KNOWN, engine_alone, repeats

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.compare.changes import compare
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.report.compare import RunSide, comparison_section

NEW = replace(KNOWN, vllm="0.27.0")
RATE = "--metric=output_tokens_per_s"


def written(path, *sessions):
    for each in sessions:
        with Archive.open(path) as archive:
            archive.begin({}, {})
            for m in each:
                archive.add(m)
    return path


def of(factor, launch="b", environment=NEW, **facts):
    return repeats([1000 / factor, 1001 / factor], launch=launch, environment=environment, **facts)


@pytest.fixture
def before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return written(Path("before.jsonl"), repeats([1000, 1001]))


def told(capsys, *words):
    status = main(["compare", *map(str, words)])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_regression_is_named_with_its_ratio_and_the_status_is_1(before, capsys):
    after = written(Path("after.jsonl"), of(1.1))
    status, out, err = told(capsys, before, after)
    assert (status, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == f"{after} against {before}: {lines[-1]}"
    assert lines[2].startswith(f"baseline   {before}: 2 measurements, 1 launch, 2026-01-01, vLLM 0.26.0, NVIDIA H200")
    assert lines[3].startswith(f"candidate  {after}: 2 measurements")
    assert ["vllm", "0.26.0", "0.27.0"] in [line.split() for line in lines]
    row = next(line.split() for line in lines if "tokens/s" in line)
    assert row[:5] == ["concurrency", "8", "tokens/s", "1,000", "909.5"] and row[-1] == "worse"
    assert "worse: opt-1.3b at concurrency 8: tokens/s 0.9091 of the baseline (95 %: 0.90" in out
    assert "inconclusive: fewer than 4 launches on a side" in out and "miss the truth by chance" in out
    assert lines[-1] == "of 9 metrics: 0 better, 4 worse, 5 inconclusive; tolerance 3 %"


def test_no_regression_is_0_and_what_is_inconclusive_10(before, capsys):
    same = written(Path("same.jsonl"), of(1.0))
    assert told(capsys, before, same, RATE)[0] == 0
    assert told(capsys, before, same)[0] == 10, "of the latencies nothing is known"
    assert told(capsys, before, written(Path("close.jsonl"), of(1.03)), RATE)[0] == 10
    status, out, _ = told(capsys, before, written(Path("fast.jsonl"), of(0.9)), RATE)
    assert status == 0 and "better: opt-1.3b at concurrency 8: tokens/s 1.11" in out
    assert told(capsys, before, written(Path("wide.jsonl"), of(1.1)), RATE, "--tolerance", "0.2")[0] == 0


def test_nothing_in_common_is_inconclusive(before, capsys, monkeypatch):
    other = written(Path("other.jsonl"), repeats([900, 901], 64))
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = told(capsys, before, other)
    assert status == 10 and "\ninconclusive: nothing was measured by both sides" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "measured by the baseline alone: opt-1.3b at concurrency 8" in out
    assert "measured by the candidate alone: opt-1.3b at concurrency 64" in out
    sides = RunSide("before", repeats([1000])), RunSide("after", repeats([900], 64))
    found = compare(*(side.measurements for side in sides), 0.03)
    assert comparison_section(*sides, found).look == "open", "not as if all were well"


def test_cases_that_are_called_alike_are_counted(before, capsys):
    found = repeats([900, 901])
    other = [[replace(m, spec=replace(m.spec, max_num_seqs=limit)) for m in found] for limit in (64, 128)]
    out = told(capsys, before, written(Path("two.jsonl"), *other))[1]
    told_once = "measured by the candidate alone: opt-1.3b at concurrency 8, with another engine (2 cases)"
    assert told_once in " ".join(out.split())


def test_several_candidates_are_each_held_against_the_first(before, capsys):
    good, bad = written(Path("good.jsonl"), of(1.0)), written(Path("bad.jsonl"), of(1.5))
    status, out, _ = told(capsys, before, good, bad, RATE)
    assert status == 1 and out.count("baseline   before.jsonl: ") == 2
    found = json.loads(told(capsys, before, good, bad, RATE, "--json")[1])
    names = [(each["baseline"]["name"], each["candidate"]["name"]) for each in found["comparisons"]]
    assert names == [(str(before), str(good)), (str(before), str(bad))]


def test_json_has_the_fields_by_their_names(before, capsys):
    after = written(Path("after.jsonl"), of(1.1))
    status, out, _ = told(capsys, before, after, "--json")
    found = json.loads(out)
    (each,) = found["comparisons"]
    assert status == 1 and found["tolerance"] == 0.03 == each["tolerance"]
    assert each["counts"] == {"better": 0, "worse": 4, "same": 0, "no worse": 0, "inconclusive": 5}
    assert each["differences"] == [{"field": "vllm", "baseline": ["0.26.0"], "candidate": ["0.27.0"]}]
    rate = each["changes"][0]
    assert (rate["metric"], rate["verdict"], rate["launches"]) == ("output_tokens_per_s", "worse", [1, 1])
    assert rate["ratio"]["low"] < rate["ratio"]["value"] < rate["ratio"]["high"] < 1
    assert each["baseline"]["vllm"] == ["0.26.0"] and each["candidate"]["hosts"] == ["one"]


def test_csv_has_a_line_for_each_metric(before, capsys):
    after = written(Path("after.jsonl"), of(1.1))
    rows = list(csv.DictReader(io.StringIO(told(capsys, before, after, "--csv")[1])))
    changes = json.loads(told(capsys, before, after, "--json")[1])["comparisons"][0]["changes"]
    assert [(row["metric"], row["verdict"], float(row["ratio.value"])) for row in rows] == [
        (each["metric"], each["verdict"], each["ratio"]["value"]) for each in changes
    ]
    assert rows[0]["baseline_run"] == str(before) and rows[2]["ratio.low"] == ""


def test_a_page_counts_a_record_of_both_sides_once(before, capsys):
    told(capsys, before, before, "--html=page.html")
    assert "2, of 1 launches" in Path("page.html").read_text("utf-8")


def test_two_runs_of_one_archive_are_compared(tmp_path, capsys):
    path = written(tmp_path / "r.jsonl", repeats([1000, 1001]), of(1.1))
    status, out, _ = told(capsys, path, RATE)
    assert status == 1 and out.count(f"{path} run ") == 4 and "0.9091" in out


def test_of_more_runs_two_are_named(tmp_path, capsys):
    path = written(tmp_path / "r.jsonl", repeats([1000, 1001]), of(1.1), of(2.0, launch="c"))
    status, _, err = told(capsys, path)
    assert status == 4 and "has 3 runs: which two?" in err and "--run ID --run ID" in err
    main(["report", str(path), "--list", "--json"])
    first, second, third = (run["id"] for run in json.loads(capsys.readouterr().out)["runs"])
    assert "0.5000" in told(capsys, path, RATE, "--run", first, "--run", "last")[1]
    assert "2.000" in told(capsys, path, RATE, "--run", third, "--run", first)[1]
    assert "1.818" in told(capsys, path, RATE, "--run", third, "--run", second)[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{before}"], "has one run to compare, and two are needed"),
        (["{before}", "{before}", "--run", "last"], "--run chooses among the runs of one archive"),
        (["{before}", "{before}", "--metric", "speed"], "--metric speed is not compared"),
        (["{before}", "{before}", "--tolerance", "3"], "argument --tolerance: '3' is not a share"),
        (["{before}", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
    ],
)
def test_wrong_usage_is_a_sentence(before, capsys, words, said):
    status, out, err = told(capsys, *(word.format(before=before) for word in words))
    assert status == 4 and said in err and "try: " in err and out == ""


def test_what_engines_resolved_differs_in_short(before, capsys):
    sizes = replace(engine_alone().resolved, capture_sizes=tuple(range(1, 60)))
    out = told(capsys, before, written(Path("after.jsonl"), of(1.0, resolved=sizes)))[1]
    assert ["capture_sizes", "-", "59", "up", "to", "59"] in [line.split() for line in out.splitlines()]


@in_checkout
def test_committed_archives_of_two_hosts_say_so_and_claim_nothing(capsys):
    paths = [BASELINES / f"h200-vllm-0.26.0-{name}.jsonl.xz" for name in ("adaptive", "adaptive-next-host")]
    for each in (paths, paths[::-1]):
        status, out, _ = told(capsys, *each)
        assert status == 10
        assert ["host", "5742266f", "01984512"] in [line.split() for line in out.splitlines()] or each is not paths
        assert "inconclusive: other host or boot: hosts of one kind differ" in out
        assert out.splitlines()[-1] == "of 45 metrics: 0 better, 0 worse, 45 inconclusive; tolerance 3 %"
