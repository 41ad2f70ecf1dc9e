"""The page without a browser: its numbers are the terminal's, nothing of an archive is markup, and it is small."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from html_pages import Page, values_of
from scripts import BASELINES, needs_checkout
from stored_records import KNOWN, engine_alone, repeats
from strategies import H200, WELL, law, measurement, planted_telemetry

pytest.importorskip("jinja2", reason="a page needs Jinja2")

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.compare.changes import release_histories
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.loads import latency_charts
from pytest_slmserve.report.page import charts, writer
from pytest_slmserve.report.page.writer import FOLDER, GLOSSARY, as_script_json, rendered, write_page
from pytest_slmserve.report.text_table import figure
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import BadArchive, BadUsage
from pytest_slmserve.schema.records import Stream
from pytest_slmserve.schema.specs import EngineSpec, OpenLoop

ARCHIVES = ("h200-vllm-0.26.0-core-opt-2.7b", "cpu-vllm-0.32.0", "h200-vllm-0.26.0-gate-eager-at-512")
RELEASES = ("0.20.2", "0.22.1", "0.24.0", "0.26.0")
HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202e&lt;"
MOST = 2_000_000  # bytes of a page
TWO_RELEASES = {"0.9.0": (1000.0, 1001.0), "0.10.0": (900.0, 901.0)}

Report = Callable[..., tuple[Page, str]]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The page of archives, and what the terminal prints of them."""
    monkeypatch.setenv("COLUMNS", "400")

    def made(*words: object) -> tuple[Page, str]:
        path = tmp_path / "out.html"
        main(["report", *map(str, words), "--show", "all", "--html", str(path)])
        return Page(path.read_text("utf-8")), capsys.readouterr().out

    return made


def committed(name: str) -> Path:
    needs_checkout()
    return BASELINES / f"{name}.jsonl.xz"


def sweep(model: str = "opt-1.3b", rates: tuple[float, ...] = (100, 180, 300, 310)) -> Curve:
    found = [
        measurement(2**i, rate * wobble, model=model, environment=H200, repeat=repeat)
        for i, rate in enumerate(rates)
        for repeat, wobble in enumerate((0.99, 1, 1.01))
    ]
    return curve_of(model, found)


def shown_of(made: Curve, **more: object) -> Page:
    return Page(rendered(Findings(curves=[made], measurements=made.measurements, **more)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ARCHIVES)
def test_every_number_is_one_that_the_terminal_prints(report, name, capsys):
    page, printed = report(committed(name), "--goodput", "ttft:200ms,tpot:50ms")
    main(["report", str(committed(name)), "--goodput", "ttft:200ms,tpot:50ms", "--show", "summary"])
    printed += capsys.readouterr().out
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    tables = {caption: rows for caption, rows in page.tables.items() if caption not in ("Environment", "")}
    rows = [row for caption, each in tables.items() if not caption.startswith(("Goodput", "Cost")) for row in each[1:]]
    missing = [row for row in rows if not any(" ".join(" ".join(row).split()) in line for line in lines)]
    assert rows and missing == []
    terminal = set(re.findall(r"[\d,.]*\d", printed))
    told = " ".join(row[-1] for each in tables.values() for row in each[1:])
    told += " ".join(cell for row in tables.get("Cost of a million output tokens", [])[1:] for cell in row[1:4])
    assert set(re.findall(r"[\d,.]*\d", told)) <= terminal


@pytest.mark.parametrize("name", ARCHIVES[:2])
def test_charts_show_the_values_of_the_tables(report, name):
    page, _ = report(committed(name))
    (caption,) = (caption for caption in page.tables if caption.startswith("Points of "))
    head, *rows = page.tables[caption]
    in_flight, tokens, e2e = (head.index(column) for column in ("concurrency", "tokens /s", "E2E s mean"))
    spec = next(spec for spec in page.charts.values() if spec.get("description", "").startswith("output tokens/s over"))
    drawn = {
        (row["x"], figure(row["y"], 4)) for row in values_of(spec) if "shown" in row and "predicted" not in row["shown"]
    }
    assert drawn == {(int(row[in_flight]), row[tokens]) for row in rows}
    plane = next(spec for spec in page.charts.values() if spec.get("description") == "throughput against latency")
    assert {(row["load"], figure(row["x"])) for row in values_of(plane)} == {(int(r[in_flight]), r[e2e]) for r in rows}


def test_every_chart_is_one_that_vega_lite_knows(report, vega_lite):
    pages = [report(committed(name))[0] for name in (*ARCHIVES, "h200-vllm-0.26.0-replicas")]
    specs = [spec for page in (*pages, planted_history(TWO_RELEASES)) for spec in page.charts.values()]
    assert [spec["description"] for spec in specs if not vega_lite.is_valid(spec)] == []
    specs[-1]["layer"][-1]["mark"]["colour"] = "red"
    assert not vega_lite.is_valid(specs[-1]), "a misspelt word is found"


def test_goodput_in_the_table_is_that_of_the_points(report):
    page, printed = report(committed(ARCHIVES[0]), "--goodput", "ttft:30ms,tpot:12ms")
    for _, load, per_s, good, _ in page.tables["Goodput of each load"][1:]:
        assert re.search(rf"(?m)^\s*{load}\s+[\d,]+\s+{per_s}\s+{good}\s", printed), (
            load,
            per_s,
            good,
        )


def test_the_speed_of_a_host_is_relative_to_its_best_in_all_sweeps():
    curves = []
    for model, seconds in (("fast", 0.004), ("slow", 0.008)):
        pieces = {sensors.OWN_CORES: 1.0, sensors.PROBE: seconds, sensors.PROBE_CPU: seconds}
        seen = planted_telemetry(pieces, interval_s=0.001, until_s=0.7)
        made = [measurement(c, law(c), model=model, environment=H200) for c in (1, 2, 4)]
        curves.append(curve_of(model, [replace(m, run=replace(m.run, telemetry=seen)) for m in made]))
    tables = Page(rendered(Findings(curves=curves))).tables
    speeds = {}
    for curve in curves:
        head, *rows = tables[f"Sensors of {curve.subject}"]
        speeds[curve.subject] = {row[head.index("host speed %")] for row in rows}
    assert speeds == {"fast": {"100.0"}, "slow": {"50.0"}}


def test_libraries_are_packed_once():
    one, other = (rendered(Findings()) for _ in range(2))
    assert one == other and writer.shared_parts.cache_info().misses == 1


def test_verdicts_disturbances_and_findings_are_sentences_of_the_terminal(report):
    page, printed = report(committed(ARCHIVES[0]))
    words, seen = " ".join(printed.split()), " ".join(page.text.split())
    found = re.findall(r"(?m)^  (?:passes|fails, as expected|inconclusive) +(\S+) +(.*)$", printed)
    assert len(found) >= 10
    assert [why for _, why in found if " ".join(why.split()) not in seen] == []
    assert "plateau" in words and "saturation law" in page.text


def test_a_page_is_read_again_as_the_archive_that_it_was_made_of(report, tmp_path, capsys):
    first = report(committed(ARCHIVES[0]))[1]
    page = tmp_path / "out.html"
    main(["report", str(page), "--show", "all"])
    again = capsys.readouterr().out
    assert again == first.replace(f"written: {page}\n", "")
    report(page)  # over itself
    assert read(page) == read(committed(ARCHIVES[0]))


def test_several_archives_of_one_page_stay_apart(report, tmp_path, capsys):
    first = report(committed(ARCHIVES[0]), committed(ARCHIVES[1]))[1]
    main(["report", str(tmp_path / "out.html"), "--show", "all"])
    assert capsys.readouterr().out == first.replace(f"written: {tmp_path / 'out.html'}\n", "")
    one, other = (read(committed(name)) for name in ARCHIVES[:2])
    both = read(tmp_path / "out.html")
    assert both.measurements == one.measurements + other.measurements
    assert both.measured[-3:] == other.measured[-3:]


def test_an_archive_that_was_cut_off_keeps_its_whole_lines(tmp_path, report):
    path = tmp_path / "records.jsonl"
    with Archive.open(path) as archive:
        for each in sweep().measurements:
            archive.add(each)
    path.write_bytes(path.read_bytes()[:-7])
    report(path)
    assert len(read(tmp_path / "out.html").measurements) == 11
    assert read(tmp_path / "out.html").notes == ()


@pytest.mark.parametrize(
    "page",
    [
        b"<!doctype html><p>",
        b'<!DOCTYPE html><script type="application/octet-stream" data-records="a.gz">AA=A</script>',
    ],
)
def test_a_page_without_sound_records_is_refused(tmp_path, page):
    path = tmp_path / "other.html"
    path.write_bytes(page)
    with pytest.raises(BadArchive, match="other.html"):
        read(path)


def test_the_page_of_the_largest_archive_is_below_2_mb(report):
    path = committed("h200-vllm-0.26.0-jobs")
    assert path == max(BASELINES.glob("*.jsonl.xz"), key=lambda each: each.stat().st_size)
    page, _ = report(path)
    assert len(page.source.encode()) < MOST


def test_names_of_an_archive_are_text_and_never_markup():
    page, plain = map(named, (HOSTILE, "name"))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert "<img src=x onerror=alert(1)>" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", page.source)
    assert "</script><img" not in page.source


def named(name: str) -> Page:
    """A page of which every name and sentence is this one."""
    made, seen = sweep(), name.partition("\x1b")[0]  # a model's name has no such characters
    found = [
        replace(
            m, environment=replace(m.environment, gpu_name=name), spec=replace(m.spec, model=seen, model_facts=None)
        )
        for m in made.measurements
    ]
    verdict = Verdict(name, name, State.FAILS, name, 1.0, 0.5, 2.0, 1.5)
    made = replace(made, subject=name, measurements=tuple(found))
    return shown_of(made, judged=[(verdict, None)], notes=[name], reused={"a case": 1}, reused_from=name)


def test_json_in_a_script_ends_no_tag():
    assert as_script_json({"a": "</script><!--&"}) == '{"a":"\\u003c/script\\u003e\\u003c!--\\u0026"}'


def test_only_hashed_scripts_run_and_nothing_is_fetched():
    page = shown_of(sweep())
    (policy,) = (a["content"] or "" for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and rules["base-uri"] == "'none'" and rules["form-action"] == "'none'"
    (script,) = (text for attrs, text in page.scripts if not attrs)
    (style,) = page.styles
    assert hashed(script) in rules["script-src"] and rules["style-src"] == hashed(style)
    assert "unsafe" not in policy and "http" not in policy
    attributes = {name for _, attrs in page.tags for name in attrs}
    assert not {name for name in attributes if name.startswith("on")} | attributes & {"style", "src", "action"} - {
        "src"
    }
    assert "src" not in attributes
    assert all((a.get("href") or "#").startswith(("#", "data:image/svg+xml")) for _, a in page.tags)


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


def test_libraries_are_those_that_their_table_names():
    rows = re.findall(
        r"\| `([\w.-]+)` \|.*\| `([0-9a-f]{64})` \|", (FOLDER / "vendor" / "README.md").read_text("utf-8")
    )
    assert {name for name, _ in rows} == {"vega.min.js", "vega-lite.min.js", "vega-interpreter.js"}
    assert [name for name, told in rows if sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() != told] == []


def test_each_term_of_a_heading_has_its_meaning_on_the_page():
    page = shown_of(sweep())
    terms = [attrs["popovertarget"] for _, attrs in page.tags if attrs.get("class") == "term"]
    meanings = {attrs["id"] for _, attrs in page.tags if attrs.get("class") == "meaning"}
    assert set(terms) <= meanings and len(meanings) == len(GLOSSARY)
    heads = re.findall(r"<(?:th scope=.col|figcaption|h2)[^\n]*?class=.term.[^>]*>([^<]*)<", page.source)
    assert {"concurrency", "TTFT", "TPOT", "E2E", "Pareto", "valid", "Service-level objective"} <= set(heads)


def test_without_jinja2_a_page_is_a_usage_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(BadUsage, match="needs Jinja2"):
        rendered(Findings())


def test_a_page_that_cannot_be_written_is_a_usage_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadUsage, match="cannot write"):
        write_page(tmp_path / "file" / "out.html", Findings())


def test_a_page_of_nothing_says_so():
    assert "nothing was measured" in Page(rendered(Findings())).text


def test_throughput_has_plateau_predictions_and_intervals():
    made = sweep(rates=(100, 180, 300, 305, 308))
    spec = charts.throughputs([(made.subject, made)], 4)
    rows = values_of(spec)
    assert {"from": 4, "to": 16} in rows
    points = [row for row in rows if "shown" in row]
    assert [row["x"] for row in points] == [1, 2, 4, 8, 16]
    assert all(row["low"] < row["y"] < row["high"] for row in points)
    assert points[0]["y"] == pytest.approx(made.points[0].output_tokens_per_s)


def test_the_course_of_a_window_has_the_steps_and_the_sensors_in_it():
    made = engine_alone(columns={**WELL, sensors.POWER: lambda at: 300 + at, sensors.PROBE: 0.006})
    opens, closes = made.run.window_s
    drawn = {chart.title: chart.spec for chart in charts.timeline(made, "One window")}
    assert {"running, waiting", "power", "host-speed probe, its CPU time"} <= drawn.keys()
    pieces = [
        row["y"] for row in values_of(drawn["host-speed probe, its CPU time"]) if row["series"] == "host-speed probe"
    ]
    assert pieces and set(pieces) == {6.0}
    (power,) = (spec for title, spec in drawn.items() if title == "power")
    rows = values_of(power)
    assert all(0 < row["x"] < closes - opens for row in rows)
    wanted = [300 + opens + row["x"] for row in rows]
    assert [row["y"] for row in rows] == pytest.approx(wanted, abs=(closes - opens) / 30 + 0.1)


def test_gaps_between_tokens_are_drawn_where_a_client_saw_them():
    gaps = {"growth": 1.01, "least_s": 1e-4, "counts": {463: 90, 694: 10}, "sum_s": 1.9}
    seen = Stream(0.01, 0.0, (), gaps)
    made = [replace(m, run=replace(m.run, stream=seen)) for m in sweep().measurements]
    drawn = {chart.title: chart.spec for chart in latency_charts({m.load.max_concurrency: [m] for m in made})}
    median = next(row["x"] for row in values_of(drawn["ITL"]) if row["y"] == 50 and row["load"] == 8)
    assert median == pytest.approx(1e3 * 1e-4 * 1.01**463, rel=0.01)
    assert "ITL" not in {chart.title for chart in latency_charts({8: sweep().measurements}) if chart.spec}


def test_a_history_has_the_rows_that_the_terminal_prints(report):
    page, printed = report(*(committed(f"h200-vllm-{release}-history") for release in RELEASES))
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    tables = {caption: rows for caption, rows in page.tables.items() if caption.startswith("History of ")}
    assert list(tables) == [f"History of {model} at concurrency 512, NVIDIA H200" for model in ("opt-1.3b", "opt-125m")]
    drawn = [spec for spec in page.charts.values() if " over releases, " in spec["description"]]
    cells = [(row["x"], row["shown"], row["ratio"], row["series"]) for spec in drawn for row in values_of(spec)]
    for rows in tables.values():
        assert [row for row in rows[1:] if " ".join(" ".join(row).split()) not in lines] == []
        assert [row[1] for row in rows[1:]] == [*RELEASES, *RELEASES]
    told = [(row[1], row[2], row[4], row[6] or "first release") for rows in tables.values() for row in rows[1:]]
    assert cells == told
    assert "Cut at the edge: 0.24.0." in page.text, "the interval of OPT-125M goes on to 50,176 tokens/s"


def planted_history(rates: dict[str, tuple[float, ...]], elsewhere: str = "") -> Page:
    """elsewhere: a release that another host measured."""
    made = []
    for release, each in rates.items():
        where = replace(KNOWN, vllm=release, host="two" if release == elsewhere else KNOWN.host)
        made += repeats(each, environment=where, launch=release)
    return Page(rendered(Findings(history=release_histories(made), measurements=made)))


def test_a_step_is_marked_by_its_ratio_and_a_line_ends_where_the_host_changes():
    rates = {"0.9.0": (1000, 1001), "0.10.0": (900, 901), "0.11.0": (901, 902), "0.12.0": (700, 701)}
    page = planted_history(rates, elsewhere="0.12.0")
    rate, tpot = page.charts.values()
    rows = values_of(rate)
    assert [row["series"] for row in rows] == ["first release", "regressed", "same", "not comparable"]
    assert [row["run"] for row in rows] == [0, 0, 0, 1]
    assert [row["text"] for row in rows] == ["", "0.9000", "", ""]
    assert [row["text"] for row in values_of(tpot)] == ["", "1.111", "", ""]
    assert rate["layer"][0]["encoding"]["x"]["sort"] == list(rates)
    assert page.text.count("95 % interval of the mean of a release's repeats. Number") == 2


def test_a_wide_whisker_is_cut_and_told_and_a_small_difference_looks_small():
    page = planted_history({"0.9.0": (500, 1500), "0.10.0": (1020, 1021), "0.11.0": (900, 901)})
    least, most = next(iter(page.charts.values()))["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert 600 < least < 800 and 1100 < most < 1300
    assert page.text.count("Cut at the edge: 0.9.0.") == 2
    alike = planted_history({"0.9.0": (1000.0, 1000.1), "0.10.0": (1000.2, 1000.3)})
    least, most = next(iter(alike.charts.values()))["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert least < 970 and most > 1030 and "Cut at the edge" not in alike.text


def test_bars_of_a_step_are_the_columns_of_the_table(report):
    page, _ = report(committed(ARCHIVES[0]))
    (head, *rows), (spec,) = page.tables["Where a step goes, opt-2.7b"], described(page, "parts of a step")
    for load, step_ms, *shares in rows:
        bar = [row for row in values_of(spec) if row["subject"] == f"concurrency {load}"]
        assert [row["shown"] for row in bar] == [f"{share} % of {step_ms} ms" for share in shares]
        assert [f"{row['series']} %" for row in bar] == head[2:]
        assert [row["x"] for row in bar] == [0, *(row["end"] for row in bar[:-1])]
        assert bar[-1]["end"] == pytest.approx(100)


def test_gains_and_memory_of_replicas_are_those_of_the_tables(report):
    page, printed = report(committed("h200-vllm-0.26.0-replicas"))
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for caption in ("Throughput", "Sensors"):
        assert [row for row in page.tables[caption][1:] if " ".join(row) not in lines] == []
    (spec,) = (spec for spec in page.charts.values() if spec["description"] == "gain over one engine")
    states = {row["subject"]: row["state"] for row in values_of(spec)}
    assert states["2 x opt-1.3b, mps, concurrency 192"] == "passes"
    assert len(states) == 1, "the other sets were measured on another host than the one engine"
    (_, *rows), (spec,) = page.tables["Memory of the GPU by engine"], described(page, "memory of the GPU")
    for engines, sharing, weights, kv, other, free, total in rows:
        bar = [row for row in values_of(spec) if row["subject"] == f"{engines}, {sharing}"]
        count = int(engines.split(" x ")[0]) if " x " in engines else 1
        sizes = [*[weights, kv] * count, other, free]
        assert [row["shown"] for row in bar] == [f"{size} GiB" for size in sizes]
        assert figure(bar[-1]["end"]) == total
        assert bar[-2]["engine"] == "all" and "opt-1.3b" in bar[0]["engine"]


def described(page: Page, begins: str) -> list[Any]:
    return [spec for spec in page.charts.values() if spec.get("description", "").startswith(begins)]


def test_an_interval_far_beyond_the_bound_leaves_the_chart_and_the_estimates_stay_apart():
    near = Verdict("claim", "near", State.PASSES, "", 0.05, 0.04, 0.06, 0.1)
    far = Verdict("claim", "far", State.INCONCLUSIVE, "", 0.2, -50.0, 90.0, 0.1)
    low, high = charts.forest([near, far])["layer"][1]["encoding"]["x"]["scale"]["domain"]
    assert -2 < low < 0.04 and 0.2 < high < 2
    assert charts.forest([Verdict("claim", "none", State.INCONCLUSIVE, "")]) is None


def test_requests_are_whole_microseconds_that_give_the_latencies_again():
    made = sweep()
    (window, *_) = writer.goodput_part([("m", made)], writer.STARTING_SLO)["requests"][0]["windows"]
    assert len(window["sent"]) == len(window["first"]) == len(window["last"]) == len(window["tokens"]) > 0
    assert all(isinstance(us, int) for name in ("sent", "first", "last") for us in window[name])


def test_the_command_to_reproduce_names_models_and_loads():
    made = sweep().measurements
    command = writer.reproduce(made)
    assert command.startswith("pytest --pyargs pytest_slmserve.benchmarks --slm-gpu --slm-models=")
    assert "--slm-concurrency=1,2,4,8" in command
    elsewhere = EngineSpec("m", platform="remote", interface="endpoint", url="http://host:8000/v1/completions")
    for others in ({"spec": elsewhere}, {"load": OpenLoop(requests=40, rate=10.0)}):
        assert writer.reproduce([replace(m, **others) for m in made]) == "", "of a server or a job there is none"
    assert writer.reproduce([]) == ""


def test_a_full_disk_leaves_no_part_of_a_page(tmp_path):
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99)); "
    code += "from pathlib import Path; from pytest_slmserve.report.page.writer import write_page; "
    code += "from pytest_slmserve.report.findings import Findings; "
    code += f"write_page(Path({str(tmp_path / 'out.html')!r}), Findings())"
    seen = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=False)
    assert "out.html: File too large" in seen.stderr and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["folder", "pipe", "records.jsonl"])
def test_a_page_takes_the_place_of_a_page_only(tmp_path, name):
    path = tmp_path / name
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "records.jsonl").write_text('{"kind":"session"}')
    before = [*tmp_path.iterdir()]
    with pytest.raises(BadUsage, match="cannot write|is no page"):
        write_page(path, Findings())
    assert [*tmp_path.iterdir()] == before and (tmp_path / "pipe").is_fifo()
