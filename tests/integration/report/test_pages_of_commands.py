"""Pages and pictures as commands write them: every number is one that the terminal prints, a page is read again as the
archives that it was made of, and what cannot be written is told."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from committed import archive
from html_pages import Page, values_of
from scripts import BASELINES, in_checkout
from stored_records import stored
from strategies import measurement

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read
from pytest_slmserve.report.loads import is_windowed
from pytest_slmserve.report.page.charts import PER_BUSY_S, SEEN
from pytest_slmserve.report.text_table import figure
from pytest_slmserve.schema.specs import ClosedLoop

pytestmark = in_checkout
SWEPT, OTHERS = "h200-vllm-0.26.0-core-opt-2.7b", ("cpu-vllm-0.32.0", "h200-vllm-0.26.0-gate-eager-at-512")
RELEASES = ("0.20.2", "0.22.1", "0.24.0", "0.26.0")
SLO = "ttft:30ms,tpot:12ms"
PAIRS = "baseline,candidate\n100,97\n101,98\n99,97\n100,96\n"
SWEEP = "batch,tok,lat_ms\n1,100,10\n2,190,10.5\n4,350,11\n8,600,13\n16,800,20\n32,820,39\n"


def committed(name: str) -> Path:
    return BASELINES / f"{name}.jsonl.xz"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.html"


@pytest.fixture
def page(out, capsys, monkeypatch):
    """The page of a command, its status, and what it printed."""
    monkeypatch.setenv("COLUMNS", "400")

    def made(*words: object) -> tuple[Page, int, str]:
        status = main([*map(str, words), "--html", str(out)])
        return Page(out.read_text("utf-8")), status, capsys.readouterr().out

    return made


def missing(rows: list[list[str]], printed: str) -> list[list[str]]:
    """Rows of a page that the terminal does not have."""
    there = [" ".join(line.split()) for line in printed.splitlines()]
    return [row for row in rows if not any(" ".join(" ".join(row).split()) in line for line in there)]


def described(page: Page, begins: str) -> dict[str, Any]:
    (found,) = (spec for spec in page.charts.values() if spec.get("description", "").startswith(begins))
    return found


@pytest.mark.parametrize("name", [SWEPT, *OTHERS])
def test_page_numbers_match_terminal(page, name, capsys):
    seen, _, printed = page("report", committed(name), "--goodput", SLO, "--show", "all")
    main(["report", str(committed(name)), "--goodput", SLO, "--show", "summary"])
    printed += capsys.readouterr().out
    tables = {caption: rows[1:] for caption, rows in seen.tables.items() if caption not in ("Environment", "")}
    rows = [row for caption, each in tables.items() if not caption.startswith(("Goodput", "Cost")) for row in each]
    assert rows and missing(rows, printed) == []
    told = " ".join(row[-1] for each in tables.values() for row in each)
    told += " ".join(cell for row in tables.get("Cost of a million output tokens", []) for cell in row[1:4])
    assert set(re.findall(r"[\d,.]*\d", told)) <= set(re.findall(r"[\d,.]*\d", printed))
    for _, load, per_s, good, _ in tables.get("Goodput of each load", []):
        assert re.search(rf"(?m)^\s*{load}\s+[\d,]+\s+{per_s}\s+{good}\s", printed), (load, per_s, good)
    verdicts = re.findall(r"(?m)^  (?:passed|expected failure|inconclusive) +\S+ +(.*)$", printed)
    text = " ".join(seen.text.split())
    assert [why for why in verdicts if " ".join(why.split()) not in text] == []


def test_chart_values_match_tables(page):
    seen, *_ = page("report", committed(SWEPT))
    head, *rows = seen.tables["Points of opt-2.7b"]
    sensors, *of_sensors = seen.tables["Sensors of opt-2.7b"]
    load, tokens, e2e = (head.index(column) for column in ("concurrency", "tokens /s", "E2E s mean"))
    drawn = values_of(described(seen, "output tokens/s over"))
    known = (row for row in drawn if "predicted" not in row.get("shown", "predicted"))
    found = {(row["series"], row["x"], figure(row["y"], 4)) for row in known}
    sensed = [(int(row[0]), row[sensors.index("tokens /busy s")]) for row in of_sensors]
    measured = [(int(row[load]), row[tokens]) for row in rows]
    assert found == {(name, *point) for name, points in ((SEEN, measured), (PER_BUSY_S, sensed)) for point in points}
    plane = values_of(described(seen, "throughput against latency"))
    assert {(row["load"], figure(row["x"])) for row in plane} == {(int(row[load]), row[e2e]) for row in rows}
    head, *rows = seen.tables["Where a step goes, opt-2.7b"]
    for load_, step_ms, *shares in rows:
        parts = values_of(described(seen, "parts of a step"))
        bar = [row for row in parts if row["subject"] == f"concurrency {load_}"]
        assert [row["shown"] for row in bar] == [f"{share}% of {step_ms} ms" for share in shares]
        assert [f"{row['series']} %" for row in bar] == head[2:] and bar[-1]["end"] == pytest.approx(100)


def test_page_reads_back_as_archive(page, out, capsys):
    _, _, first = page("report", committed(SWEPT), "--show", "all")
    main(["report", str(out), "--show", "all"])
    assert capsys.readouterr().out == first.replace(f"written: {out}\n", "")
    page("report", out)  # over itself
    assert read(out) == read(committed(SWEPT))
    one, other = (committed(f"h200-vllm-0.26.0-adaptive{which}") for which in ("", "-next-host"))
    seen, status, printed = page("compare", one, other)
    rows = seen.tables["opt-1.3b"][1:]
    assert f"Exit status {status}" in seen.text and len(rows) == 50 and missing(rows, printed) == []
    assert len(read(out).measurements) == len(read(one).measurements) + len(read(other).measurements)
    seen, _, printed = page("report", *(committed(f"h200-vllm-{each}-history") for each in RELEASES), "--show", "all")
    rows = [row for caption, each in seen.tables.items() if caption.startswith("History of ") for row in each[1:]]
    specs = [spec for spec in seen.charts.values() if " over releases, " in spec["description"]]
    cells = [(row["x"], row["shown"], row["ratio"], row["series"]) for spec in specs for row in values_of(spec)]
    assert missing(rows, printed) == [] and [row[1] for row in rows] == [*RELEASES] * 6
    told = [re.sub(r"^\w+ launch(es)? each$", "too few launches", row[6]) or "first release" for row in rows]
    assert cells == [(row[1], row[2], row[4], word) for row, word in zip(rows, told)]
    assert "Cut at the edge: 0.24.0." in seen.text, "the interval of OPT-125M goes on to 50,176 tokens/s"


def test_pairs_page_draws_given_pairs(page, tmp_path):
    (tmp_path / "pairs.csv").write_text(PAIRS)
    seen, status, printed = page("pairs", tmp_path / "pairs.csv", "--direction", "higher")
    assert "Exit status 1" in seen.text and status == 1
    forest, looks = seen.charts.values()
    pairs = [row["pair"] for row in values_of(forest) if "pair" in row]
    assert pairs == pytest.approx([0.97, 98 / 101, 97 / 99, 0.96])
    least, most = forest["layer"][-1]["encoding"]["x"]["scale"]["domain"]
    assert least < min(pairs) and most > 1, "a mark outside would squeeze the chart"
    (interim,) = seen.tables["Interim analyses"][1:]
    assert interim == ["pairs.csv", "4", *(row["shown"] for row in values_of(looks) if "shown" in row), "fail"]
    assert missing([interim, seen.tables["Endpoints"][1]], printed) == []
    (tmp_path / "sweep.csv").write_text(SWEEP)
    words = ("report", tmp_path / "sweep.csv", "--knob", "batch", "--throughput", "tok", "--latency", "lat_ms")
    (seen, status, _), (as_csv, _, printed) = page(*words), page(*words, "--csv")
    (spec,) = seen.charts.values()
    assert spec["description"].startswith("tok over batch") and status == 0
    assert [row["y"] for row in values_of(spec) if "shown" in row] == [100, 190, 350, 600, 800, 820]
    assert printed.startswith("kind,subject,") and as_csv.charts == seen.charts


def test_figures_draw_request_rates(tmp_path, capsys):
    """Requests of a closed loop, as `measure --max-concurrency 4 --num-prompts 40` keeps them, have no rate."""
    rates = [m for m in archive("cpu-vllm-0.32.0-server") if is_windowed(m.load)][:2]
    failed = [replace(m, run=replace(m.run, failures=1 + len(m.run.samples))) for m in rates]
    counted = [measurement(4, load=ClosedLoop(4, requests=40))]
    for name, made, status in (("a", rates, 0), ("failed", failed, 4), ("counted", counted, 4)):
        words = [str(stored(tmp_path / f"{name}.jsonl", *made)), "--figures", str(tmp_path / name), "--goodput", SLO]
        assert main(["report", *words]) == status
        out, err = capsys.readouterr()
        assert ("rates: " in err) is (name == "failed") and (tmp_path / name).exists() is (status == 0)
        assert status or out.endswith(f"drawn: {tmp_path}/a/rates.png\n")
    drawn = (tmp_path / "a/rates.png").read_bytes()
    assert drawn.startswith(b"\x89PNG") and 1600 <= int.from_bytes(drawn[16:20], "big") <= 1900, "900 pixels twice over"
