"""`report --json` and `--csv`: the same keys, a row for each point, and nothing else on stdout."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from published import CSV
from strategies import law, measurement

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.points import Summary, points_of
from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.schema.records import Replica
from pytest_slmserve.schema.specs import OpenLoop

BASELINES = Path(__file__).parents[3] / "benchmarks/baselines"
LOADS = (16, 64, 256)
JUDGED = ("--knob=max_num_seqs", "--throughput=total_tok_per_s", "--latency=mean_itl_ms")


@pytest.fixture
def records(tmp_path):
    """Three points of two repeats each, one of them invalid; two replicas; and a job."""
    path = tmp_path / "r.jsonl"
    made = [measurement(c, law(c) * (1 + 0.001 * i), repeat=i) for c in LOADS for i in range(2)]
    made[-2:] = [replace(m, run=replace(m.run, failures=1)) for m in made[-2:]]
    part = Replica("one", 0, 2, "asked", "mps")
    pair = [replace(measurement(8, 500.0, launch=f"r{i}"), replica=replace(part, index=i)) for i in range(2)]
    job = measurement(8, 1000.0, launch="job")
    served = sum(job.run.samples.finished)
    with Archive.open(path) as archive:
        for each in (*made, *pair, replace(job, load=OpenLoop(requests=served))):
            archive.add(each)
    return path


def told(capsys, *words):
    status = main(list(map(str, words)))
    return status, capsys.readouterr()


def test_json_is_one_object_with_all_that_the_text_tells(records, capsys):
    status, said = told(capsys, "report", records, "--json")
    assert status == told(capsys, "report", records)[0] and said.err == ""
    found = json.loads(said.out)
    assert {"points", "loads", "sweeps", "verdicts", "gates", "history", "notes"} <= found.keys()
    by_kind = [(each["kind"], each.get("concurrency")) for each in found["points"]]
    assert by_kind == [("point", 16), ("point", 64), ("point", 256), ("replicas", 16), ("job", None)]
    assert [each["subject"] for each in found["sweeps"]] == ["opt-1.3b"] and found["sweeps"][0]["pareto"] == [16, 64]
    verdict = next(each for each in found["verdicts"] if each["claim"] == "throughput-plateau")
    assert (verdict["state"], verdict["expected"], verdict["outcome"]) == ("inconclusive", "passes", "inconclusive")


def test_a_point_has_the_names_of_its_fields(records, capsys):
    first, *_, broken, several, job = json.loads(told(capsys, "report", records, "--json")[1].out)["points"]
    [point, *_] = points_of(m for m in measured(records) if m.load.max_concurrency == 16)
    assert {name: first[name] for name in names()} == pytest.approx({name: getattr(point, name) for name in names()})
    for each in (broken, several, job):
        assert first.keys() - {"batch_repeats", "concurrency"} <= each.keys(), "one thing, one key"
    assert first["load"]["concurrency"] == 16 and first["environment"]["vllm"] == "0.26.0"
    assert (first["valid"], broken["valid"], broken["e2e_s"]) == (True, False, None) and "failed" in broken["problems"][
        0
    ]
    assert (several["sharing"], several["models"], several["model"]) == ("mps", ["opt-1.3b"] * 2, "opt-1.3b")
    assert job["seconds"] > 0 and job["load"]["kind"] == "job"


def names():
    return [field.name for field in fields(Summary) if field.name != "bound"]


def measured(path):
    return [m for m in read(path).measurements if m.replica is None]


def test_csv_has_a_line_for_each_point_with_the_keys_of_the_json(records, capsys):
    found = json.loads(told(capsys, "report", records, "--json", "--goodput", "e2e:1s")[1].out)["points"]
    status, said = told(capsys, "report", records, "--csv", "--goodput", "e2e:1s")
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert status == told(capsys, "report", records)[0] and len(rows) == len(found)
    for row, point in zip(rows, found):
        assert float(row["output_tokens_per_s"] or 0) == (point["output_tokens_per_s"] or 0)
        assert row["workload.hash"] == point["workload"]["hash"] and row["valid"] == str(point["valid"]).lower()
        assert row["goodput.attainment"] == ("1.0" if point["valid"] else "")
    assert rows[0]["repeats"] == "; ".join(map(repr, found[0]["repeats"]))


def test_noise_is_in_the_json_and_in_the_csv_of_a_point_that_is_valid(tmp_path, capsys):
    path = tmp_path / "noisy.jsonl"
    with Archive.open(path) as archive:
        for factor in (1.0, 1.25):
            archive.add(measurement(8, 1000.0, launch=f"{factor}", steps=200, slow_from=100, slow_factor=factor))
    [point] = json.loads(told(capsys, "report", path, "--run=all", "--json")[1].out)["points"]
    assert (point["valid"], point["left_out"], point["problems"], point["degraded"]) == (True, 0, [], [])
    [text] = point["noise"]
    assert text.startswith("not steady: ") and len(point["repeats"]) == 2
    [row] = csv.DictReader(io.StringIO(told(capsys, "report", path, "--run=all", "--csv")[1].out))
    assert (row["valid"], row["degraded"], row["noise"]) == ("true", "", text)


def test_of_jobs_alone_nothing_is_said_of_a_sweep(tmp_path, capsys):
    made = measurement(8, 1000.0)
    with Archive.open(tmp_path / "jobs.jsonl") as archive:
        archive.add(replace(made, load=OpenLoop(requests=sum(made.run.samples.finished))))
    out = told(capsys, "report", tmp_path / "jobs.jsonl")[1].out
    assert "at once" in out and "saturation law" not in out and "no sweep" not in out
    found = json.loads(told(capsys, "report", tmp_path / "jobs.jsonl", "--json")[1].out)
    assert [each["kind"] for each in found["points"]] == ["job"] and found["sweeps"] == []


def test_what_is_said_beside_the_csv_is_on_stderr(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    path.write_text("")
    status, said = told(capsys, "report", path, "--csv")
    assert status == 10 and said.out.strip() == "" and "is empty" in said.err


def test_gates_and_loads_are_in_the_json(capsys):
    gate = json.loads(told(capsys, "report", BASELINES / "h200-vllm-0.26.0-gate-same.jsonl.xz", "--json")[1].out)
    assert gate["gates"][0]["outcome"] == "pass" and gate["points"] == []
    server = BASELINES / "cpu-vllm-0.32.0-server.jsonl.xz"
    loads = json.loads(told(capsys, "report", server, "--json", "--goodput", "ttft:1s")[1].out)["loads"]
    assert all(load["ttft_p95_s"] > 0 and load["itl_p95_s"] > 0 and load["goodput"] for load in loads) and loads
    lines = told(capsys, "report", server, "--csv")[1].out.splitlines()
    kinds = [line.split(",")[0] for line in lines]
    assert kinds.count("load") >= len(loads), "a ramp has one for each step"


def test_external_results_as_csv_are_the_points_of_the_json(capsys, tmp_path):
    (tmp_path / "r.csv").write_text(CSV)
    words = ["report", tmp_path / "r.csv", *JUDGED]
    found = json.loads(told(capsys, *words, "--json")[1].out)["points"]
    status, said = told(capsys, *words, "--csv")
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert status == 0 and [row["concurrency"] for row in rows] == [str(point["concurrency"]) for point in found]
    assert {"output_tokens_per_s", "e2e_s", "batch", "valid", "problems"} <= rows[0].keys()


def test_every_key_of_external_results_is_documented(capsys, tmp_path):
    (tmp_path / "r.csv").write_text("n,seqs,tps,itl_ms\n1,4,100,10\n1,8,150,12\n1,16,180,15\n2,8,210,11\n")
    words = [
        "report",
        "--where=n=1",
        tmp_path / "r.csv",
        "--knob=seqs",
        "--throughput=tps",
        "--latency=itl_ms",
        "--json",
    ]
    page = (BASELINES.parents[1] / "docs/external-json.md").read_text("utf-8")
    assert [key for key in json.loads(told(capsys, *words)[1].out) if f"`{key}`" not in page] == []


def test_rows_that_are_left_out_are_said_beside_the_csv(capsys, tmp_path):
    (tmp_path / "r.csv").write_text("seqs,tps,itl_ms\n4,100,10\n8,150,12\n16,180,15\n32,,20")
    words = ["report", tmp_path / "r.csv", "--knob=seqs", "--throughput=tps", "--latency=itl_ms", "--csv"]
    status, said = told(capsys, *words)
    assert (status, "note" in said.out) == (0, False)
    assert "note: left out, without a value of tps: r.csv: line 5\n" in said.err
