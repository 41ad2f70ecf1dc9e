"""`report`: what it prints is what the run itself had said, in three formats with the same facts; its exit status is
the worst verdict; and whatever stands in a file, there is an answer or one sentence."""

import csv
import io
import json
from dataclasses import replace
from functools import cache, partial
from unittest.mock import Mock

import pytest
from command_line import answered, refused, said, told_in_json
from hypothesis import HealthCheck, given, settings, strategies as st
from scripts import BASELINES, in_checkout
from sealed_lines import reseal
from stored_records import stored
from strategies import H200, law, measurement
from swept import BATCHES, CUT, archive, measured, put_into, spoilt, watched

from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.commands import report
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.screen import tables
from pytest_slmserve.report.text_table import short_path
from pytest_slmserve.schema.records import Replica
from pytest_slmserve.schema.specs import OpenLoop

SWEEP = cache(measured)
LOADS = (16, 64, 256)
ONE = measurement()
found = partial(told_in_json, "report")
FAILING = table.ClaimRow("throughput-plateau", "opt-1.3b", parameters={"tolerance": 0.1}, expected="fails")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The archive of a whole sweep, of which all that is planned was measured."""
    return archive(tmp_path_factory.mktemp("swept") / "a.jsonl", SWEEP())


@pytest.fixture
def records(tmp_path):
    """Three points of two repeats each, the last one invalid; two replicas; and a job."""
    made = [measurement(c, law(c) * (1 + 0.001 * i), repeat=i, failures=int(c == 256)) for c in LOADS for i in range(2)]
    part = Replica("one", 0, 2, "asked", "mps")
    pair = [replace(measurement(8, 500.0, launch=f"r{i}"), replica=replace(part, index=i)) for i in range(2)]
    job = measurement(8, 1000.0, launch="job")
    job = replace(job, load=OpenLoop(requests=sum(job.run.samples.finished)))
    return stored(tmp_path / "r.jsonl", *made, *pair, job)


def run_of(path, m, **plan):
    """The archive with a further run, of one measurement."""
    with Archive.open(path) as opened:
        opened.begin({}, plan)
        opened.add(m)
    return path


def test_archive_repeats_run_text(swept, capsys, tmp_path):
    curve = curve_of("opt-1.3b", SWEEP(), planned=BATCHES, cut=[(c, why) for c, why in CUT])
    subjects = [(c.name, curve) for c in table.CLAIMS.values() if c.of != "arithmetic" and table.applies(c, curve)]
    arithmetic = [c for c in table.CLAIMS.values() if c.of == "arithmetic"]
    subjects += [(c.name, Curve(subject=model)) for c in arithmetic for model in c.models]
    rows = [(table.row_for(name, c.subject, H200), c) for name, c in subjects]
    judged = [(table.judge_row(row, c), row) for row, c in rows]
    live = "\n".join(text for text, _ in tables(Findings(curves=[curve], judged=judged)))
    assert said(capsys, "report", swept) == (0, f"{live}\n", "")
    other = archive(tmp_path / "b.jsonl", measured(launch="launch-2"))
    copy = archive(tmp_path / "c.jsonl", SWEEP())
    points = found(capsys, swept, other, copy, status=0)["points"]
    assert [(each["concurrency"], len(each["repeats"])) for each in points] == [(load, 4) for load in BATCHES]


def rewritten(path, swept, change):
    """The archive with these lines, as JSON, changed."""
    lines = [json.loads(line) for line in swept.read_text("utf-8").splitlines()]
    change(lines)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    reseal(path)
    return path


@pytest.mark.parametrize(("loads", "planned", "repeats", "words", "status"), [
    (BATCHES, BATCHES, 2, (), 0), (BATCHES, BATCHES, 2, ("--strict",), 1), (BATCHES, BATCHES, 1, (), 10),
    (BATCHES[:4], BATCHES[:4], 2, (), 1), (BATCHES[:5], BATCHES, 2, (), 10), ((), BATCHES, 2, (), 10),
], ids=["all as expected", "strict", "one repeat", "no plateau", "not all planned", "nothing"])  # fmt: skip
def test_worst_verdict_sets_exit_status(loads, planned, repeats, words, status, tmp_path, capsys):
    path = archive(tmp_path / "a.jsonl", SWEEP(loads, repeats), planned)
    outcomes = {each["outcome"] for each in found(capsys, path, *words, status=status)["verdicts"]}
    assert ("unexpected" in outcomes) is (status == 1)
    assert status != 0 or outcomes == {"as expected"}


def test_strict_expects_claims_to_pass(swept, tmp_path, capsys):
    def judges_one(lines):
        next(line["plan"] for line in lines if "plan" in line)["claims"] = ["throughput-plateau"]

    path = rewritten(tmp_path / "b.jsonl", swept, judges_one)
    usual, strict, some, strict_some = (found(capsys, each, *w) for each in (swept, path) for w in ((), ("--strict",)))
    assert [each["state"] for each in usual["verdicts"]] == [each["state"] for each in strict["verdicts"]]
    for seen, outcome in ((strict, "unexpected"), (usual, "as expected")):
        assert {each["outcome"] for each in seen["verdicts"] if each["state"] == "fails"} == {outcome}
    assert [each["claim"] for each in some["verdicts"]] == ["throughput-plateau"]
    assert some["notes"] == [report.NOT_JUDGED] and report.NOT_JUDGED not in strict_some["notes"]
    assert len(strict_some["verdicts"]) == len(usual["verdicts"]) > 10


@pytest.mark.parametrize(("rows_today", "status"), [((FAILING,), 1), ((), 0)])
def test_todays_claims_table_rules(rows_today, status, tmp_path, capsys, monkeypatch):
    rows_then = table.ROWS if rows_today else (*table.ROWS, FAILING)
    path = archive(tmp_path / "a.jsonl", SWEEP(), rows=rows_then)
    monkeypatch.setattr(table, "ROWS", (*table.ROWS, *rows_today))
    seen = found(capsys, path, status=status)["verdicts"]
    (verdict,) = (each for each in seen if each["claim"] == "throughput-plateau")
    assert (verdict["outcome"] == "unexpected") is bool(rows_today)
    assert said(capsys, "report", path).words.count("expected result when recorded") == 1


@in_checkout
def test_gate_sets_exit_status(capsys):
    same = BASELINES / "h200-vllm-0.26.0-gate-same.jsonl.xz"
    seen = found(capsys, same, same, status=0)
    assert [gate["outcome"] for gate in seen["gates"]] == ["pass"] and seen["points"] == [], "each gate once"
    gate = BASELINES / "h200-vllm-0.20.2-0.26.0-gate.jsonl.xz"
    summary, shown = (said(capsys, "report", gate, f"--show={show}") for show in ("summary", "tables"))
    assert summary.status == shown.status == 10 and shown == said(capsys, "report", gate)
    assert len(summary.out.splitlines()) < len(shown.out.splitlines())


@in_checkout
def test_gate_names_its_own_results_file(capsys, tmp_path):
    names = [BASELINES / f"h200-vllm-0.26.0-gate-{name}.jsonl.xz" for name in ("same", "at-once-layer")]
    page = tmp_path / "p.html"
    told = found(capsys, *names)["gates"]
    assert [gate["five"]["where"] for gate in told] == [f"slmserve report {short_path(name)}" for name in names]
    seen = said(capsys, "report", *names, f"--html={page}")
    failing = f"where: slmserve report {short_path(names[1])}"
    assert seen.status == 1 and failing in seen.words and short_path(names[0]) not in seen.words.partition(failing)[0]
    assert {gate["five"]["where"] for gate in found(capsys, page)["gates"]} == {f"slmserve report {short_path(page)}"}


def test_json_csv_agree_with_text(records, capsys, tmp_path):
    seen = found(capsys, records, status=said(capsys, "report", records).status)
    assert {"points", "loads", "sweeps", "verdicts", "gates", "history", "notes"} <= seen.keys()
    by_kind = [(each["kind"], each.get("concurrency")) for each in seen["points"]]
    assert by_kind == [("point", 16), ("point", 64), ("point", 256), ("replicas", 16), ("job", None)]
    verdict = next(each for each in seen["verdicts"] if each["claim"] == "throughput-plateau")
    assert (verdict["state"], verdict["expected"], verdict["outcome"]) == ("inconclusive", "passes", "inconclusive")
    first, *_, broken, several, job = seen["points"]
    for each in (broken, several, job):
        assert first.keys() - {"batch_repeats", "concurrency"} <= each.keys(), "one thing, one key"
    assert (first["valid"], broken["valid"], broken["e2e_s"], len(broken["problems"])) == (True, False, None, 1)
    points = found(capsys, records, "--goodput", "e2e:1s")["points"]
    seen = said(capsys, "report", records, "--csv", "--goodput", "e2e:1s")
    rows = list(csv.DictReader(io.StringIO(seen.out)))
    assert seen.status == said(capsys, "report", records).status
    for row, point in zip(rows, points, strict=True):
        assert float(row["output_tokens_per_s"] or 0) == (point["output_tokens_per_s"] or 0)
        assert row["workload.hash"] == point["workload"]["hash"] and row["valid"] == str(point["valid"]).lower()
        assert row["goodput.attainment"] == ("1.0" if point["valid"] else "")
    assert rows[0]["repeats"] == "; ".join(map(repr, points[0]["repeats"]))
    (tmp_path / "empty.jsonl").touch()
    seen = said(capsys, "report", tmp_path / "empty.jsonl", "--csv")
    assert (seen.status, seen.out.strip()) == (10, "") and str(tmp_path / "empty.jsonl") in " ".join(seen.err.split())


@pytest.mark.parametrize("kind", ["job", "load"])
def test_records_without_claims_pass(kind, tmp_path, capsys):
    made = measurement(8, 1000.0)
    load = OpenLoop(requests=sum(made.run.samples.finished)) if kind == "job" else OpenLoop(rate=10.0, window_s=0.5)
    path = run_of(tmp_path / "a.jsonl", replace(made, load=load), claims=[])
    seen = found(capsys, path, status=0)
    assert seen["verdicts"] == seen["sweeps"] == [] and bool(seen["loads"]) is (kind == "load")
    assert [each["kind"] for each in seen["points"]] == ["job"] * (kind == "job")
    assert "sweep" not in said(capsys, "report", path).out
    rows = said(capsys, "report", path, "--csv").out.splitlines()
    assert [row.partition(",")[0] for row in rows[1:]] == [kind], "a load that is no point has a row too"


def two_runs(path, capsys):
    """An archive of two runs, and how `--list` names them."""
    for launch, rate in (("one", 1000.0), ("two", 2000.0)):
        run_of(path, measurement(8, rate, launch=launch))
    return [run["id"] for run in found(capsys, path, "--list", status=0)["runs"]]


def test_runs_are_chosen_by_name(tmp_path, capsys):
    path, other = tmp_path / "r.jsonl", tmp_path / "s.jsonl"
    first, second = two_runs(path, capsys)
    for words, rates in (((first,), [1000]), ((second,), [2000]), (("last",), [2000]), (("all",), [1000, 2000])):
        [point] = found(capsys, path, "--run", *words)["points"]
        assert [round(rate) for rate in point["repeats"]] == rates
    rows = csv.DictReader(io.StringIO(said(capsys, "report", path, "--list", "--csv").out))
    assert [(row["id"], row["path"], row["measurements"]) for row in rows] == [
        (n, str(path), "1") for n in (first, second)
    ]
    assert found(capsys, path, "--since", "2999-01-01")["points"] == []
    refused(said(capsys, "report", path, "--run", "nonsense"), "nonsense")
    two_runs(other, capsys)
    (tmp_path / "none.jsonl").touch()
    for paths, count in (([path], 0), ([path, other], 2), ([tmp_path / "none.jsonl"], 0)):
        listed = said(capsys, "report", *paths, "--list")
        assert [listed.out.count(each.name) for each in (path, other)] == [count] * 2, "the file of each, if of several"
        assert listed.status == 0 and (first in listed.out) is (second in listed.out) is (path in paths)


def test_merge_holds_each_record_once(tmp_path, capsys):
    made = [measurement(8, 900.0 + j, launch=str(j)) for j in range(3)]
    paths = [stored(tmp_path / f"{i}.jsonl", *made[i : i + 2]) for i in range(2)]
    into, before = tmp_path / "out.jsonl.xz", [path.read_bytes() for path in paths]
    words = ("report", *paths, "--merge", into)
    assert said(capsys, *words) == (0, f"{into}: 3 measurements added, 1 were there\n", "")
    assert sorted(m.launch for m in read(into).measurements) == ["0", "1", "2"]
    for again in (words, ("report", *paths, into, "--merge", into)):  # also where it is one of its parts
        assert said(capsys, *again).out.count(" 0 measurements added, 4 were there") == 1
    assert [path.read_bytes() for path in paths] == before
    paths[0].write_bytes(before[0][:-10])
    seen = said(capsys, "report", paths[0], "--merge", tmp_path / "torn.jsonl")
    assert seen.status == 1 and "note: " in seen.out and len(read(tmp_path / "torn.jsonl").measurements) == 1
    path, into = stored(tmp_path / "whole.jsonl", ONE), tmp_path / "no.jsonl"
    for words in ("--run=last", "--since=2026-01-01"):
        refused(said(capsys, "report", path, words, "--merge", into), "--merge", "--run", "--since")
    refused(said(capsys, "report", path, tmp_path / "none.jsonl", "--merge", into), "none.jsonl")
    assert not into.exists()
    refused(said(capsys, "report", path, "--merge", tmp_path), "--merge")


@pytest.mark.parametrize("words", [(), ("--json",), ("--csv",)])
def test_written_files_are_named(words, swept, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "draw_pictures", draw := Mock(return_value=["drawn: a.svg"]))
    monkeypatch.setattr(report, "write_page", write := Mock())
    page, folder = tmp_path / "page.html", tmp_path / "pictures"
    seen = said(capsys, "report", swept, "--figures", folder, "--format=svg", "--html", page, *words)
    assert draw.call_args.args[1:] == (folder, "svg")
    assert (write.call_args.args[::2], write.call_args.kwargs) == ((page, [swept]), {"status": 0})
    lines = ["drawn: a.svg", f"written: {page}"]
    assert (seen.err if words else seen.out).splitlines()[-2:] == lines and "drawn" not in (seen.out if words else "")
    said(capsys, "report", swept, "--figures", folder)
    assert draw.call_args.args[1:] == (folder, "png")


def test_page_keeps_run_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "write_page", write := Mock())
    texts = ("pytest --slm-gpu  'a b'", "pytest 'no end", "pytest --slm-cpu")
    one, endless, other = (run_of(tmp_path / f"{i}.jsonl", ONE, command=text) for i, text in enumerate(texts))
    for some in ([one], [endless], [one, other]):
        said(capsys, "report", *some, "--html", tmp_path / "page.html")
    assert [call.args[1].command for call in write.call_args_list] == ["pytest --slm-gpu 'a b'", "", ""]


def test_damaged_line_is_refused(swept, tmp_path, capsys):
    lines = swept.read_text("utf-8").splitlines(keepends=True)
    lines[4] = lines[4][:50] + "\n"
    path = tmp_path / "a.jsonl"
    path.write_text("".join(lines), "utf-8")
    for words in ((), ("--list",)):
        refused(said(capsys, "report", path, *words), str(path), "line 5", "--skip-damaged")
        assert "note: " in said(capsys, "report", path, *words, "--skip-damaged").out
    seen = found(capsys, path, "--skip-damaged", status=0)
    assert len(seen["notes"]) == 1 and str(path) in seen["notes"][0] and "line 5" in seen["notes"][0]
    assert sorted(len(each["repeats"]) for each in seen["points"]) == [1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(("text", "facts"), [
    ('{"kind":"session","format":99}\n', ["format 99"]), ("PK\x03\x04 not ours\n", ["a.jsonl"]),
    ('{"output_throughput": 1000.0}\n', ["--knob"]), (None, ["a.jsonl", "--slm-records"]),
])  # fmt: skip
def test_foreign_file_is_refused(text, facts, tmp_path, capsys):
    if text is not None:
        (tmp_path / "a.jsonl").write_text(text, "utf-8")
    refused(said(capsys, "report", tmp_path / "a.jsonl"), *facts)


WRONG = {("claims", "rows"): 5, ("plan", "sweeps"): 5, ("plan",): 5, ("environment", "gpu_name"): 5}


@pytest.mark.parametrize("place", WRONG)
def test_wrong_value_kind_is_refused(place, swept, tmp_path, capsys):
    def spoil(lines):
        put_into(next(line for line in lines if place[0] in line), place, WRONG[place])

    refused(said(capsys, "report", rewritten(tmp_path / "a.jsonl", swept, spoil)))


@pytest.mark.parametrize("words", ["--nonsense a", "--figures", "--format pdf", "--show none", "--tolerance nan"])
def test_wrong_usage_names_option(words, capsys):
    refused(said(capsys, "report"), "PATH", "--help")
    refused(said(capsys, "report", "a", *words.split()), *words.removesuffix(" a").split(), "--help")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return archive(tmp_path_factory.mktemp("whole") / "a.jsonl", watched(SWEEP((16, 32, 64))), (16, 32, 64))


@pytest.mark.parametrize("command", ["report", "advise"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_line_value_is_handled(command, small, tmp_path, capsys, data):
    path = tmp_path / "a.jsonl"
    path.write_text(spoilt(data, small), "utf-8")
    reseal(path)
    seen = said(capsys, command, path, *data.draw(st.sampled_from([(), ("--json",)])))
    assert answered(seen, "verdicts", "wanted: ", '"starts": [') and (command == "report" or seen.status != 1)
