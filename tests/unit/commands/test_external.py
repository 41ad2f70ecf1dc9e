"""External results: which files are such, which columns they have, what is refused; the figures and notes of one curve,
as data and as text; and Little's law on their means."""

import csv
import io
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from command_line import answered, refused, said, told_in_json
from hypothesis import HealthCheck, given, settings, strategies as st
from published import CSV, NAMES, ROWS, external, served
from scripts import CHECKOUT, in_checkout
from strategies import law
from swept import spoilt_csv

from pytest_slmserve.analysis.advice.advisor import ModelSweep, Objectives, plan
from pytest_slmserve.analysis.sweep.batching import RelativeSlo
from pytest_slmserve.analysis.sweep.curve import TOLERANCE, Axes, Curve
from pytest_slmserve.archive import external as files
from pytest_slmserve.archive.external import Columns
from pytest_slmserve.commands import external as ours
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.section import section_text
from pytest_slmserve.report.text_table import laid_out

PLAIN = Columns(knob="n", throughput="rate", latency="itl_s")
NAMED = {"knob": "max_num_seqs", "throughput": "total", "latency": "itl_ms", "preemptions": "lost"}
COLUMNS = Columns(**NAMED, running="running", output_throughput="out")
PUBLISHED = [
    served(knob, [total], [ms / 1e3], batch=output * ms / 1e3, little=running / (output * ms / 1e3) - 1)
    for knob, output, total, ms, running in ROWS
]
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
found = partial(told_in_json, "report", status=0)


def planted(knob, *scales, lost=0.0, **facts):
    rates = [scale * law(knob) for scale in scales or (1.0,)]
    return served(knob, rates, [knob / rate for rate in rates], lost, **facts)


def told(points, columns=PLAIN, slo=None, b_half=None):
    """The report of one curve: its facts, as JSON has them, and the words of each line of the text."""
    axes = Axes(columns.knob, columns.throughput, columns.latency)
    curve = Curve(subject="external results", points=tuple(points), axes=axes)
    found = plan([ModelSweep(name="results", points=curve.points, b_half=b_half)], Objectives(slo=slo, threshold=0.01))
    with laid_out(150):
        results = ours.ExternalResults(curve, columns, ["planted note"], None)
        section, facts = ours.external_report(results, found, TOLERANCE)
        lines = section_text(section).splitlines()
    return SimpleNamespace(lines=lines, rows=[line.split() for line in lines], **json.loads(as_json(facts)))


def test_published_results_have_published_answers():
    found = told(PUBLISHED, COLUMNS, RelativeSlo(2.0, 32))
    [sweep] = found.sweeps
    assert sweep["plateau"] == {"value": 256, "low": None, "high": None, "known": False}
    assert sweep["pareto"] == [1, 8, 32, 64, 96, 128, 256, 384]
    assert found.b_opt["value"] == 96 and found.limit_s == 2 * 7.509587e-3
    assert found.saturation_law["error_mean"] < 0.03 and found.saturation_law["error_max"] < 0.06
    assert found.objectives["threshold"] == 0.01 and found.caps["slo"] == pytest.approx(105, rel=0.06)
    assert [point["output_tokens_per_s"] for point in found.points] == [total for _, _, total, *_ in ROWS]
    assert found.advised["share"] == pytest.approx(9032.789447 / 11144.551474, abs=1e-4)
    assert "planted note" in found.notes and found.columns["knob"] == "max_num_seqs"
    assert ["96", "91.04", "9,033", "13.9", "+19.4", "*", "yes"] in found.rows
    assert ["max_num_seqs", "batch", "total", "itl", "ms"] in [row[:5] for row in found.rows]
    assert all(line == line.rstrip() and len(line) <= 150 for line in found.lines)


WHOLE = [planted(b) for b in GRID]
SOUND = [planted(b, batch=float(b), little=-0.01) for b in GRID]
ABOVE = [planted(b, batch=float(b), little=0.2 if b > 8 else 0.1) for b in GRID]
UNKNOWN = [replace(point, batch=None, little=None) for point in SOUND]
SLOW = [replace(point, batch=100.0 * point.concurrency) for point in SOUND]
FALLING = [served(b, [rate], [b / rate]) for b, rate in ((1, 10_400.0), (16, 10_300.0), (256, 10_000.0))]
LITTLE = "{:.1f} to {:.1f}%".format(*(100 * end(p.little for p in PUBLISHED) for end in (min, max)))


@pytest.mark.parametrize(("points", "how", "facts", "absent"), [
    (PUBLISHED, {"columns": COLUMNS}, ["running", LITTLE, "max_num_seqs 768", "459", "584"], "agrees"),
    (PUBLISHED, {"columns": COLUMNS}, ["max_num_seqs 768", "584", f"{100 * 584.3 / 768:.1f}%"], "agrees"),
    (SOUND, {"columns": COLUMNS}, ["running", "out x itl_ms", "1%"], "biased"),
    (ABOVE, {"columns": COLUMNS}, ["running", "+10.0 to +20.0%", "max_num_seqs 16"], "agrees"),
    (UNKNOWN, {"columns": replace(COLUMNS, output_throughput=None)}, ["running", "--output-throughput"], "out x itl"),
    (SLOW, {"columns": COLUMNS}, ["out x itl_ms", "max_num_seqs at 1, 2, 4"], "running"),
    (WHOLE, {}, ["--slo-itl"], "T(1)"),
    (WHOLE[2:], {"slo": RelativeSlo(2.0, 24)}, ["24", "between 16 and 32"], "--slo-itl"),
    (FALLING, {}, ["b_half below 0"], "off"),
])  # fmt: skip
def test_notes_tell_littles_law(points, how, facts, absent):
    notes = told(points, **how).notes
    assert any(all(fact in note for fact in facts) for note in notes), notes
    assert not any(absent in note for note in notes), notes


def test_preempted_point_is_never_chosen():
    found = told([*WHOLE[:-1], planted(512, 2.0, lost=178.0)])
    assert found.b_opt["value"] == 256 and 512 not in found.sweeps[0]["pareto"]
    assert found.sweeps[0]["plateau"]["value"] is None
    (row,) = (row for row in found.rows if row[:1] == ["512"])
    assert row[-1] == "invalid" and "*" not in row and any("178 preemptions" in line for line in found.lines)
    entry = found.points[-1]
    assert (entry["valid"], entry["output_tokens_per_s"]) == (False, 2 * law(512)) and len(entry["problems"]) == 1
    assert any("n 512" in note and "preempted" in note for note in found.notes)
    repeated = [planted(b, 0.99, 1.01, 1.0) for b in GRID]
    for b_half in (None, 45.0):
        fitted = told(repeated, b_half=b_half).saturation_law
        assert fitted["t_inf_tokens_per_s"]["low"] < law(1e12) < fitted["t_inf_tokens_per_s"]["high"]
        assert fitted["b_half"]["value"] == pytest.approx(45.0) and (fitted["b_half"]["low"] is None) is bool(b_half)
    steep = [served(b, [100.0 * b], [0.01]) for b in (2, 4, 8)]
    found, more = told(steep), told([served(1, [100.0], [0.01]), *steep])
    assert (found.saturation_law, found.b_opt["value"], found.advised, more.b_opt["value"]) == (None, None, None, 8)
    assert told(FALLING).saturation_law is None


def vllms(folder, loads, latency="mean_tpot_ms"):
    """Files as `vllm bench serve` writes them; null where nothing set the column, as it does for max_concurrency."""
    for load in loads:
        rate = law(load or 32)
        told = {"mean_tpot_ms": 1.0, "output_throughput": rate, latency: 1e3 * (load or 32) / rate}
        facts = {"model_id": "m", "request_rate": "inf", "max_concurrency": load, **told}
        (folder / f"{load}.json").write_text(json.dumps(facts), "utf-8")
    return sorted(folder.glob("*.json"))


@pytest.mark.parametrize("latency", ["mean_itl_ms", "mean_tpot_ms"])
def test_vllm_columns_are_known(tmp_path, capsys, monkeypatch, latency):
    paths, seen, real = vllms(tmp_path, (1, 8, 64, 512), latency), [], files.read_results
    monkeypatch.setattr(files, "read_results", lambda path: seen.append(path) or real(path))
    facts = found(capsys, *paths, *([] if latency == "mean_tpot_ms" else ["--latency", latency]))
    assert seen == paths and facts["sweeps"][0]["plateau"]["value"] is None
    assert facts["saturation_law"]["b_half"]["value"] == pytest.approx(45)
    known = {"knob": "max_concurrency", "throughput": "output_throughput", "output_throughput": "output_throughput"}
    assert facts["columns"].items() >= (known | {"latency": latency}).items()


def test_other_columns_are_not_guessed(tmp_path, capsys):
    refused(said(capsys, "report", external(tmp_path)), "--knob NAME --throughput NAME --latency NAME")
    refused(said(capsys, "report", external(tmp_path), NAMES[0]), "--throughput NAME --latency NAME")
    paths = vllms(tmp_path, (32, 64, 128, 256))
    assert told_in_json("advise", capsys, *paths, "--knob=max_concurrency", status=0)["models"]
    path = tmp_path / "a.json"
    path.write_text('{"max_concurrency": 1, "output_throughput": 2}', "utf-8")
    refused(said(capsys, "report", path), "a.json", "mean_tpot_ms", "--latency NAME")
    path.write_text("[]", "utf-8")
    refused(said(capsys, "report", path), "a.json", "no results")


def test_null_value_costs_one_file(tmp_path, capsys):
    facts = found(capsys, *vllms(tmp_path, (None, 1, 8, 64, 512)))
    assert [point["concurrency"] for point in facts["points"]] == [1, 8, 64, 512]
    assert any("max_concurrency" in note and "None.json" in note for note in facts["notes"])
    few = [tmp_path / f"{load}.json" for load in (None, 1, 8)]
    refused(said(capsys, "report", *few), "2 values of max_concurrency", "3 are", "None.json")


@pytest.mark.parametrize(("words", "facts"), [
    ("--throughput model", ["results.csv", "line 2", "'opt-1.3b'"]),
    ("--latency preemptions", ["preemptions"]),  # all of them are 0
    ("--latency preemptions --latency-unit ms", ["preemptions"]),
    ("--where max_num_seqs=32", ["1 value of max_num_seqs", "3 are"]),
    ("--where max_num_seqs=32 --preemptions mean_running", ["0 values of max_num_seqs", "1 with"]),
    ("--preemptions max_num_seqs", ["0 values of max_num_seqs", "9 with", "3 are"]),
    ("--slo-itl 2x", ["'2x'"]), ("--efficiency 10", ["--efficiency", "'10'"]),
    ("--tolerance nan", ["--tolerance", "'nan'"]),
    ("--b-half -1", ["--b-half -1"]), ("--b-half 0", ["--b-half 0"]), ("--b-half 1e9", ["--b-half 1e+09"]),
    ("--running mean_runing", ["'mean_runing'"]),
    ("--figures a", ["--figures"]), ("--run last", ["--run"]), ("--since 2026-01-01", ["--since"]),
])  # fmt: skip
def test_unjudgeable_results_are_refused(tmp_path, capsys, words, facts):
    refused(said(capsys, "report", external(tmp_path), *NAMES, *words.split()), *facts)


def test_typed_tolerance_moves_plateau(tmp_path, capsys):
    words = (external(tmp_path), *NAMES, "--where", "model=opt-1.3b", "--preemptions", "preemptions")
    plateaus = [found(capsys, *words, "--tolerance", by)["sweeps"][0]["plateau"]["value"] for by in (0.1, 0.3, 0.9)]
    assert plateaus == sorted(plateaus, reverse=True) and len(set(plateaus)) == 3
    for slo, chosen in (("4x@32", 256), ("15.1ms", 96)):
        assert found(capsys, *words, "--slo-itl", slo, "--efficiency", "0.1")["b_opt"]["value"] == chosen
        assert f"B_opt is {chosen} " in said(capsys, "report", *words, "--slo-itl", slo).out
    both = CSV + "".join(f"{line.replace('1.3b', '2.7b')}\n" for line in CSV.splitlines()[1:])
    refused(said(capsys, "report", external(tmp_path, both), *NAMES), "opt-1.3b, opt-2.7b", "--where model=")


def test_csv_has_json_points(tmp_path, capsys, monkeypatch):
    words = (external(tmp_path, f"{CSV}opt-1.3b,1024,,,20,1,0\n"), *NAMES)
    points, seen = found(capsys, *words)["points"], said(capsys, "report", *words, "--csv")
    rows = list(csv.DictReader(io.StringIO(seen.out)))
    assert seen.status == 0 and [row["concurrency"] for row in rows] == [str(each["concurrency"]) for each in points]
    assert {"output_tokens_per_s", "e2e_s", "batch", "valid", "problems"} <= rows[0].keys()
    assert "note: " not in seen.out and "line 11" in " ".join(seen.err.split())
    written = []
    monkeypatch.setattr(ours, "write_page", lambda path, _, sections: written.append((path, list(sections))))
    assert said(capsys, "report", *words, "--html", tmp_path / "a.html").status == 0
    assert written == [(tmp_path / "a.html", ["External results"])]


@in_checkout
def test_every_json_key_is_documented(capsys, tmp_path):
    keys = found(capsys, external(tmp_path), *NAMES)
    page = (CHECKOUT / "docs/file-formats.md").read_text("utf-8")
    assert len(keys) > 8 and [key for key in keys if f"`{key}`" not in page] == []


@pytest.mark.parametrize(("command", "words", "statuses"), [
    ("report", ["--running=mean_running"], {0, 4}),
    ("advise", ["--model=opt-1.3b", "--gpu-memory=63.43GiB", "--max-model-len=632"], {0, 4, 10}),
])  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_result_value_is_handled(command, words, statuses, tmp_path, capsys, data):
    sensed = ("--output-throughput=output_tok_per_s", "--preemptions=preemptions", "--slo-itl=2x@32")
    path, form = external(tmp_path, spoilt_csv(data, CSV)), data.draw(st.sampled_from([(), ("--json",)]))
    seen = said(capsys, command, path, *NAMES, *sensed, *words, *form)
    assert answered(seen, "b_opt", "plateau", "B_opt", "none: ") and seen.status in statuses
