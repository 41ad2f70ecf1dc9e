"""Pages of the commands that compare, advise, gate and judge: what they print, as charts and tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from html_pages import Page, values_of
from scripts import BASELINES, in_checkout

pytest.importorskip("jinja2", reason="a page needs Jinja2")

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read

ONE, OTHER = (BASELINES / f"h200-vllm-0.26.0-adaptive{which}.jsonl.xz" for which in ("", "-next-host"))
PAIRS = "baseline,candidate\n100,97\n101,98\n99,97\n100,96\n"
SWEEP = "batch,tok,lat_ms\n1,100,10\n2,190,10.5\n4,350,11\n8,600,13\n16,800,20\n32,820,39\n"


@pytest.fixture
def page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The page of a command, its status, and what it printed."""

    def made(*words: object) -> tuple[Page, int, str]:
        path = tmp_path / "out.html"
        status = main([*map(str, words), "--html", str(path)])
        return Page(path.read_text("utf-8")), status, capsys.readouterr().out

    return made


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


@in_checkout
def test_compare_has_every_metric_and_both_archives(page, tmp_path):
    seen, status, printed = page("compare", ONE, OTHER)
    assert f"Exit status {status}" in seen.text
    rows = seen.tables["opt-1.3b"][1:]
    assert len(rows) == 45
    assert [row for row in rows if " ".join(" ".join(row).split()) not in lines(printed)] == []
    planes = [spec for spec in seen.charts.values() if spec["description"] == "throughput against latency"]
    assert {row["series"].split(",")[0] for row in values_of(planes[0])} == {"baseline", "candidate"}
    assert len(read(tmp_path / "out.html").measurements) == len(read(ONE).measurements) + len(read(OTHER).measurements)


@in_checkout
def test_advise_has_the_advice_and_the_sweep_that_it_rests_on(page):
    seen, _, printed = page("advise", ONE)
    assert "vllm serve facebook/opt-1.3b" in seen.text and "vllm serve facebook/opt-1.3b" in printed
    assert "Points of opt-1.3b" in seen.tables


def test_a_gate_of_anybody_s_pairs_has_each_pair(page, tmp_path):
    (tmp_path / "pairs.csv").write_text(PAIRS)
    seen, status, printed = page("pairs", tmp_path / "pairs.csv", "--direction", "higher")
    assert f"Exit status {status}" in seen.text and status == 1
    forest, looks = seen.charts.values()
    pairs = [row["pair"] for row in values_of(forest) if "pair" in row]
    assert pairs == pytest.approx([0.97, 98 / 101, 97 / 99, 0.96])
    least, most = forest["layer"][-1]["encoding"]["x"]["scale"]["domain"]
    assert least < min(pairs) and most > 1, "a mark outside would squeeze the chart"
    assert " ".join(seen.tables["Endpoints"][1]) in lines(printed)
    assert looks["description"] == "interim analyses of pairs.csv"
    drawn = [row["shown"] for row in values_of(looks) if "shown" in row]
    (interim,) = seen.tables["Interim analyses"][1:]
    assert interim == ["pairs.csv", "4", *drawn, "fail"] and " ".join(interim) in lines(printed)


def test_external_results_are_drawn_under_their_own_names(page, tmp_path):
    (tmp_path / "sweep.csv").write_text(SWEEP)
    columns = ("--knob", "batch", "--throughput", "tok", "--latency", "lat_ms")
    seen, status, printed = page("report", tmp_path / "sweep.csv", *columns)
    (spec,) = seen.charts.values()
    assert spec["description"].startswith("tok over batch")
    assert [row["y"] for row in values_of(spec) if "shown" in row] == [100, 190, 350, 600, 800, 820]
    assert "closed form" in printed and "closed form" in seen.text and status == 0
    as_csv, _, printed = page("report", tmp_path / "sweep.csv", *columns, "--csv")
    assert printed.startswith("kind,subject,") and as_csv.charts == seen.charts
