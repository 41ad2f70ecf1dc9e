"""External results: which files are such, which columns they have, what is refused; the figures and notes of one curve,
as data and as text; and Little's law on their means."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from command_line import answered, refused, said
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import CSV, NAMES, ROWS, external, served
from scripts import CHECKOUT, in_checkout
from strategies import law
from swept import spoilt_csv

from pytest_slmserve.analysis.advice.advisor import ModelSweep, Objectives, plan
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.sweep.batching import RelativeSlo, Slo
from pytest_slmserve.analysis.sweep.curve import TOLERANCE, Axes, Curve
from pytest_slmserve.archive import external as files
from pytest_slmserve.archive.external import Columns
from pytest_slmserve.commands import external as ours
from pytest_slmserve.report.as_json import as_json
from pytest_slmserve.report.section import section_text
from pytest_slmserve.report.text_table import laid_out

COLUMNS = Columns(
    knob="max_num_seqs", throughput="total", latency="itl_ms", preemptions="lost", running="running",
    output_throughput="out",
)  # fmt: skip
PLAIN = Columns(knob="n", throughput="rate", latency="itl_s")
LAW_OF_TWO = RelativeSlo(2.0, 32)
PUBLISHED = [
    served(knob, [total], [ms / 1e3], batch=output * ms / 1e3, little=running / (output * ms / 1e3) - 1)
    for knob, output, total, ms, running in ROWS
]
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Told:
    """The report as lines of words and as JSON."""

    text: str
    json: dict

    def noted(self, *facts: str) -> bool:
        """Whether one note has all of these."""
        return any(all(fact in note for fact in facts) for note in self.json["notes"])

    def row(self, load: int) -> list[str]:
        (found,) = (line.split() for line in self.text.splitlines() if line.split()[:1] == [str(load)])
        return found


def told(
    points: Sequence[Point],
    slo: Slo | None = None,
    *,
    columns: Columns = PLAIN,
    threshold: float = 0.1,
    b_half: float | None = None,
) -> Told:
    axes = Axes(columns.knob, columns.throughput, columns.latency)
    curve = Curve(subject="external results", points=tuple(points), axes=axes)
    sweep = ModelSweep(name="results", points=curve.points, b_half=b_half)
    found = plan([sweep], Objectives(slo=slo, threshold=threshold))
    with laid_out(150):
        section, facts = ours.external_report(
            ours.ExternalResults(curve, columns, ["planted note"], None), found, TOLERANCE
        )
        return Told(section_text(section), json.loads(as_json(facts)))


def planted(knob: int, *scales: float, lost: float = 0.0, **facts: object) -> Point:
    rates = [scale * law(knob) for scale in scales or (1.0,)]
    return served(knob, rates, [knob / rate for rate in rates], lost, **facts)


# The figures of one curve


def test_the_published_results_have_the_published_answers():
    found = told(PUBLISHED, LAW_OF_TWO, columns=COLUMNS)
    [sweep] = found.json["sweeps"]
    assert sweep["plateau"] == {"value": 256, "low": None, "high": None, "known": False}
    assert sweep["pareto"] == [1, 8, 32, 64, 96, 128, 256, 384]
    assert found.json["b_opt"]["value"] == 96 and found.json["limit_s"] == 2 * 7.509587e-3
    assert found.json["saturation_law"]["error_mean"] < 0.03 and found.json["saturation_law"]["error_max"] < 0.06
    assert found.json["objectives"]["threshold"] == 0.1 and found.json["caps"]["slo"] == pytest.approx(105, rel=0.06)
    assert found.json["points"][-1]["little"] == pytest.approx(-0.214, abs=1e-3)
    assert [point["output_tokens_per_s"] for point in found.json["points"]] == [total for _, _, total, *_ in ROWS]
    assert found.json["advised"]["share"] == pytest.approx(9032.789447 / 11144.551474, abs=1e-4)
    assert found.noted("planted note") and found.json["columns"]["knob"] == "max_num_seqs"
    assert found.row(96) == ["96", "91.04", "9,033", "13.9", "+19.4", "*", "yes"]
    assert ["max_num_seqs", "batch", "total", "itl", "ms"] in [line.split()[:5] for line in found.text.splitlines()]
    assert all(line == line.rstrip() and len(line) <= 150 for line in found.text.splitlines())


def test_littles_law_exposes_a_biased_mean_and_a_knob_that_is_no_batch():
    found = told(PUBLISHED, columns=COLUMNS)
    least, most = (100 * end(p.little for p in PUBLISHED) for end in (min, max))
    assert found.noted("running", f"{least:.1f} to {most:.1f} %", "max_num_seqs 768", "459", "584")
    assert found.noted("max_num_seqs 768", "584", f"{100 * 584.3 / 768:.1f} %")


def test_littles_law_agrees_is_missing_or_cannot_be_applied():
    sound = [planted(b, batch=float(b), little=-0.01) for b in GRID]
    assert told(sound, columns=COLUMNS).noted("running", "out x itl_ms", "1 %")
    above = [planted(b, batch=float(b), little=0.2 if b > 8 else 0.1) for b in GRID]
    assert told(above, columns=COLUMNS).noted("running", "+10.0 to +20.0 %", "max_num_seqs 16")
    unknown = [replace(point, batch=None, little=None) for point in sound]
    without = told(unknown, columns=replace(COLUMNS, output_throughput=None))
    assert without.noted("running", "--output-throughput") and not without.noted("out x itl_ms")
    slow = told([replace(point, batch=100.0 * point.concurrency) for point in sound], columns=COLUMNS)
    assert slow.noted("out x itl_ms", "max_num_seqs at 1, 2, 4") and not slow.noted("running")


def test_repeats_give_intervals_that_hold_the_planted_law():
    found = told([planted(b, 0.99, 1.01, 1.0) for b in GRID], LAW_OF_TWO).json
    for name, true in (("t_inf_tokens_per_s", law(1e12)), ("b_half", 45.0)):
        seen = found["saturation_law"][name]
        assert seen["low"] < seen["value"] < seen["high"] and seen["value"] == pytest.approx(true, rel=1e-6)
    assert [found["b_opt"][end] for end in ("value", "low", "high")] == [64, 64, 64]
    assert found["sweeps"][0]["plateau"]["low"] <= found["sweeps"][0]["plateau"]["value"] == 256
    given = told([planted(b, 0.99, 1.01) for b in GRID], b_half=45.0).json["saturation_law"]
    assert given["b_half"] == {"value": 45.0, "low": None, "high": None}, "what is known is not fitted"
    assert given["t_inf_tokens_per_s"]["low"] < law(1e12) < given["t_inf_tokens_per_s"]["high"]


def test_a_point_that_preempted_is_shown_and_never_chosen():
    found = told([planted(b) for b in GRID[:-1]] + [planted(512, 2.0, lost=178.0)], threshold=0.01)
    assert found.json["b_opt"]["value"] == 256 and 512 not in found.json["sweeps"][0]["pareto"]
    assert found.json["sweeps"][0]["plateau"]["value"] is None
    assert found.row(512)[-1] == "NO" and "*" not in found.row(512) and "178 preemptions" in found.text
    entry = found.json["points"][-1]
    assert (entry["valid"], entry["output_tokens_per_s"]) == (False, 2 * law(512)) and len(entry["problems"]) == 1
    assert found.noted("n 512", "preempted")


def test_what_is_not_measured_and_a_law_that_does_not_describe_are_told():
    found = told([planted(b) for b in GRID[2:]], RelativeSlo(2.0, 24))
    assert found.noted("T(1)") and found.noted("24", "between 16 and 32") and not found.noted("--slo-itl")
    whole = told([planted(b) for b in GRID])
    assert whole.noted("--slo-itl") and not whole.noted("T(1)") and not whole.noted("law", "off")
    assert told([planted(b, 0.4 if b == 32 else 1.0) for b in GRID]).noted("law", "off")


def test_a_law_that_cannot_be_leaves_the_other_answers():
    falling = told([served(b, [rate], [b / rate]) for b, rate in ((1, 10_400.0), (16, 10_300.0), (256, 10_000.0))])
    assert falling.json["saturation_law"] is None and falling.noted("b_half below 0")
    steep = [served(b, [100.0 * b], [0.01]) for b in (2, 4, 8)]
    found = told(steep).json
    assert found["saturation_law"] is None and found["sweeps"][0]["plateau"]["value"] is None
    assert found["b_opt"]["value"] is None and found["advised"] is None
    assert told([served(1, [100.0], [0.01]), *steep]).json["b_opt"]["value"] == 8


def test_nothing_within_the_limits_and_a_choice_that_a_smaller_load_beats():
    assert told([planted(b) for b in GRID], RelativeSlo(0.5, 1)).json["b_opt"]["value"] is None
    falling = [planted(b, 0.7 if b == 512 else 1.0) for b in GRID]
    assert told(falling, threshold=0.01).noted("concurrency 256")


# Files and their columns


def found(capsys, *words, command="report"):
    seen = said(capsys, command, *words, "--json")
    assert (seen.status, seen.err) == (0, "")
    return json.loads(seen.out)


def vllms(folder, loads):
    """Files as `vllm bench serve` writes them; null where nothing set the column, as it does for max_concurrency."""
    for load in loads:
        rate = law(load or 32)
        facts = {"max_concurrency": load, "output_throughput": rate, "mean_tpot_ms": 1e3 * (load or 32) / rate}
        (folder / f"{load}.json").write_text(json.dumps({"model_id": "m", "request_rate": "inf", **facts}), "utf-8")
    return sorted(folder.glob("*.json"))


@pytest.mark.parametrize(("slo", "chosen"), [("2x@32", 96), ("4x@32", 256), ("15.1ms", 96)])
def test_the_published_file_chooses_as_published(tmp_path, capsys, slo, chosen):
    """OPT-1.3B of arXiv:2503.08311, epsilon 0.1."""
    words = (external(tmp_path), *NAMES, "--where", "model=opt-1.3b", "--preemptions", "preemptions", "--slo-itl", slo)
    choice = found(capsys, *words, "--efficiency", "0.1")["b_opt"]
    assert (choice["value"], choice["known"]) == (chosen, False)
    assert f"B_opt is {chosen} " in said(capsys, "report", *words).out


@pytest.mark.parametrize("latency", ["mean_itl_ms", "mean_tpot_ms"])
def test_of_vllms_own_results_the_columns_are_known_and_each_file_is_read_once(tmp_path, capsys, monkeypatch, latency):
    """By those that it always has, though another latency was asked for."""
    paths, seen, real = vllms(tmp_path, (1, 8, 64, 512)), [], files.read_results
    for path in paths:
        path.write_text(path.read_text("utf-8").replace("mean_tpot_ms", latency), "utf-8")
    monkeypatch.setattr(files, "read_results", lambda path: seen.append(path) or real(path))
    if latency != "mean_tpot_ms":
        for path in paths:
            path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"mean_tpot_ms": 1.0}), "utf-8")
    told_ = found(capsys, *paths, *([] if latency == "mean_tpot_ms" else ["--latency", latency]))
    assert seen == paths
    assert told_["saturation_law"]["b_half"]["value"] == pytest.approx(45)
    assert told_["saturation_law"]["error_max"] < 1e-9 and told_["sweeps"][0]["plateau"]["value"] is None
    known = {"knob": "max_concurrency", "throughput": "output_throughput", "output_throughput": "output_throughput"}
    assert {name: told_["columns"][name] for name in (*known, "latency")} == known | {"latency": latency}


def test_of_other_results_columns_are_not_guessed_and_one_is_enough_for_advice(tmp_path, capsys):
    refused(said(capsys, "report", external(tmp_path)), "--knob NAME --throughput NAME --latency NAME")
    refused(said(capsys, "report", external(tmp_path), NAMES[0]), "--throughput NAME --latency NAME")
    paths = vllms(tmp_path, (32, 64, 128, 256))
    assert found(capsys, *paths, "--knob=max_concurrency", command="advise")["models"]
    path = tmp_path / "a.json"
    path.write_text('{"max_concurrency": 1, "output_throughput": 2}', "utf-8")
    refused(said(capsys, "report", path), "a.json", "mean_tpot_ms", "--latency NAME")
    path.write_text("[]", "utf-8")
    refused(said(capsys, "report", path), "a.json", "no results")


def test_a_file_with_a_null_costs_no_other_and_is_named(tmp_path, capsys):
    told_ = found(capsys, *vllms(tmp_path, (None, 1, 8, 64, 512)))
    assert [point["concurrency"] for point in told_["points"]] == [1, 8, 64, 512]
    assert any("max_concurrency" in note and "None.json" in note for note in told_["notes"])
    few = [tmp_path / f"{load}.json" for load in (None, 1, 8)]
    refused(said(capsys, "report", *few), "2 values of max_concurrency", "3 are", "None.json")


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("--latency", "mean_itl"), ["'mean_itl'"]),
        (("--throughput", "model"), ["results.csv", "line 2", "'opt-1.3b'"]),
        (("--latency", "preemptions"), ["preemptions"]),  # all of them are 0
        (("--latency", "max_num_seqs"), ["--latency-unit"]),
        (("--latency", "preemptions", "--latency-unit", "ms"), ["preemptions"]),
        (("--knob", "preemptions"), ["positive whole number"]),
        (("--where", "model=opt-2.7b"), ["--where model=opt-2.7b"]),
        (("--where", "max_num_seqs=32"), ["1 value of max_num_seqs", "3 are"]),
        (("--where", "max_num_seqs=32", "--preemptions", "mean_running"), ["0 values of max_num_seqs", "1 with"]),
        (("--preemptions", "max_num_seqs"), ["0 values of max_num_seqs", "9 with", "3 are"]),
        (("--slo-itl", "2x"), ["'2x'"]),
        (("--efficiency", "10"), ["--efficiency", "'10'"]),
        (("--tolerance", "nan"), ["--tolerance", "'nan'"]),
        (("--b-half", "-1"), ["--b-half -1"]),
        (("--b-half", "0"), ["--b-half 0"]),
        (("--b-half", "1e9"), ["--b-half 1e+09"]),
        (("--running", "mean_runing"), ["'mean_runing'"]),
    ],
)
def test_what_cannot_be_judged_is_refused(tmp_path, capsys, words, facts):
    refused(said(capsys, "report", external(tmp_path), *NAMES, *words), *facts)


def test_the_tolerance_that_is_typed_says_what_is_flat_and_rows_of_several_models_are_refused(tmp_path, capsys):
    words = (external(tmp_path), *NAMES, "--tolerance")
    plateaus = [found(capsys, *words, share)["sweeps"][0]["plateau"]["value"] for share in (0.1, 0.3, 0.9)]
    assert plateaus == sorted(plateaus, reverse=True) and len(set(plateaus)) == 3
    both = CSV + "".join(f"{line.replace('1.3b', '2.7b')}\n" for line in CSV.splitlines()[1:])
    refused(said(capsys, "report", external(tmp_path, both), *NAMES), "opt-1.3b, opt-2.7b", "--where model=")


def test_the_csv_has_the_points_of_the_json_and_notes_beside_it_and_the_page_one_section(tmp_path, capsys, monkeypatch):
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
def test_every_key_of_external_results_is_documented(capsys, tmp_path):
    path = external(tmp_path, "n,seqs,tps,itl_ms\n1,4,100,10\n1,8,150,12\n1,16,180,15\n2,8,210,11\n")
    keys = found(capsys, path, "--where=n=1", "--knob=seqs", "--throughput=tps", "--latency=itl_ms")
    page = (CHECKOUT / "docs/external-json.md").read_text("utf-8")
    assert len(keys) > 8 and [key for key in keys if f"`{key}`" not in page] == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_value_stands_in_a_result_there_is_an_answer_or_one_sentence(tmp_path, capsys, data):
    sensed = ("--running=mean_running", "--output-throughput=output_tok_per_s", "--preemptions=preemptions")
    words = (*NAMES, *sensed, "--slo-itl", "2x@32", *data.draw(st.sampled_from([(), ("--json",)])))
    seen = said(capsys, "report", external(tmp_path, spoilt_csv(data, CSV)), *words)
    assert answered(seen, "b_opt", "plateau") and seen.status in (0, 4)
