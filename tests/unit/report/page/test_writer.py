"""The page without a browser: nothing of an archive is markup, only our scripts run, requests give the latencies again,
costs and environments are tables, terms have their meaning, and a file is replaced at once or not at all."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
from html_pages import Page
from hypothesis import given
from hypothesis import strategies as st
from launches import pairs
from scripts import DATA
from strategies import H200, law, measurement, shared_point

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import judge_gate
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page import writer
from pytest_slmserve.report.page.writer import (
    FOLDER,
    GLOSSARY,
    PAUSE,
    RunPage,
    as_script_json,
    check_replaceable,
    cost_part,
    goodput_part,
    packed,
    page_content,
    parts,
    rendered,
    reproduce,
    write_page,
)
from pytest_slmserve.report.section import Section
from pytest_slmserve.report.text_table import figure, hundredths, milliseconds
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202e&lt;"
NUMBERS = {forms[0]: number for number, forms in enumerate(GLOSSARY, 1)}
SLO = writer.STARTING_SLO


def sweep(model: str = "opt-1.3b", rates: tuple[float, ...] = (100, 180, 300, 310), environment=H200) -> Curve:
    found = [
        measurement(2**i, rate * wobble, model=model, environment=environment, repeat=repeat)
        for i, rate in enumerate(rates)
        for repeat, wobble in enumerate((0.99, 1, 1.01))
    ]
    return curve_of(model, found)


def found_of(made: Curve, **more: object) -> Findings:
    return Findings(curves=[made], measurements=made.measurements, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(rendered(found_of(sweep())))


# Content


def test_outcomes_are_tallied_with_a_look_and_what_is_wrong_is_named():
    states = [State.PASSES, State.FAILS, State.INCONCLUSIVE]
    judged = [(Verdict("claim", f"m{n}", state, f"why {n}"), None) for n, state in enumerate(states)]
    gates = [judge_gate(pairs(4, speed=speed), GateCriteria()) for speed in (1.0, 0.9)]
    content = page_content(Findings(judged=judged, gates=gates, failed=["test_a: why"], inconclusive=["open"]), 1, {})
    assert content["tallies"] == [
        (1, "pass", "good"),
        (1, "FAIL", "bad"),
        (1, "inconclusive", "open"),
        (1, "gate: pass", "good"),
        (1, "gate: fail", "bad"),
    ]
    wrong = content["unexpected"]
    assert wrong[0].endswith("why 1") and wrong[-1] == "test_a: why"
    assert all(text.startswith("opt-1.3b: ") for text in wrong[1:-1]) and len(wrong) > 2
    assert content["inconclusive"][-1] == "open" and content["sections"][0][0] == "Gate"
    assert [name for name, *_ in content["claims"]] == ["claim"] and content["status_words"]


def test_a_page_is_named_by_what_was_measured_or_by_its_sections():
    assert page_content(found_of(sweep()), None, {})["title"] == "NVIDIA H200, vLLM 0.26.0"
    assert page_content(Findings(), None, {"Advice": [Section("x")]})["title"] == "Advice"
    assert page_content(Findings(), None, {})["title"] == writer.NOTHING
    simulated = sweep(environment=Environment(platform="simulated"))
    assert "SIMULATED" in page_content(found_of(simulated), None, {})["title"]
    facts = dict(page_content(found_of(sweep()), None, {})["facts"])
    assert facts["measurements"].split()[0] == "12," and facts["models"] == "opt-1.3b"


def test_sweeps_of_each_environment_have_a_plane_of_their_own():
    curves = [
        sweep(),
        sweep("b"),
        sweep("c", environment=replace(H200, driver="580")),
        Curve(subject="x", points=sweep().points),
    ]
    planes = page_content(Findings(curves=curves), None, {})["pareto"]
    series = [list(dict.fromkeys(row["series"] for row in plane.spec["data"]["values"])) for plane in planes]
    assert series == [["opt-1.3b", "b"], ["c"], ["x"]]


def test_each_environment_is_a_column_of_the_facts_that_any_knows():
    other = sweep("b", environment=replace(H200, driver="580"))
    both = [*sweep().measurements, *other.measurements]
    (table,) = [page_content(Findings(measurements=ms), None, {})["environments"] for ms in (both,)]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["driver"] == ["-", "580"] and rows["gpu name"] == ["NVIDIA H200"] * 2
    assert not {"host", "git commit", "cores"} & rows.keys() and len(table.heads) == 3
    assert page_content(found_of(sweep()), None, {})["environments"].heads == ["fact", "value"]


def test_the_command_to_reproduce_names_models_and_loads():
    made = sweep().measurements
    words = reproduce(made).split()
    assert words[:4] == ["pytest", "--pyargs", "pytest_slmserve.benchmarks", "--slm-gpu"]
    assert {"--slm-models=opt-1.3b", "--slm-concurrency=1,2,4,8", "--slm-window=5.0"} <= {*words}
    assert not any("interface" in word or "ramp" in word for word in words)
    server = [replace(m, spec=replace(m.spec, interface="server"), load=ClosedLoop(2, ramp_up="burst")) for m in made]
    assert {"--slm-interface=server", "--slm-ramp-up=burst"} <= {*reproduce(server).split()}


@pytest.mark.parametrize(
    "others",
    [
        {"spec": EngineSpec("m", platform="remote", interface="endpoint", url="http://host:8000/v1/completions")},
        {"load": OpenLoop(requests=40, rate=10.0)},
    ],
    ids=["server", "job"],
)
def test_of_a_server_a_job_a_gate_and_nothing_there_is_no_command(others):
    assert reproduce([replace(m, **others) for m in sweep().measurements]) == "" == reproduce([]) == reproduce(pairs(1))


def test_requests_give_the_latencies_of_the_package_again():
    made = sweep()
    part = goodput_part([("m", made)], SLO)
    for point, told in zip(made.valid, part["requests"], strict=True):
        assert (told["series"], told["x"], len(told["windows"])) == ("m", point.concurrency, 3)
        for (m,), seen in zip(point.used, told["windows"], strict=True):
            assert all(isinstance(us, int) for name in ("sent", "first", "last") for us in seen[name])
            judged = window.judged_requests(m)
            latencies = [window.request_latency(m.run.samples, row) for row in judged.rows]
            wanted = [(one.ttft_s, one.e2e_s) for one in latencies if one.e2e_s is not None]
            got = [(1e-6 * first, 1e-6 * last) for first, last in zip(seen["first"], seen["last"])]
            assert len(got) == len(wanted) > 0
            assert [each[0] for each in got] == pytest.approx([each[0] for each in wanted], abs=2e-6)
            assert [each[1] for each in got] == pytest.approx([each[1] for each in wanted], abs=2e-6)
            opens, closes = m.run.window_s
            assert seen["seconds"] == closes - opens and seen["dropped"] == 0 and set(seen["tokens"]) == {32}


def test_requests_that_failed_or_did_not_end_are_dropped():
    m = measurement(4, 300.0)
    lost = replace(m, run=replace(m.run, failures=3))
    assert writer._window((lost,))["dropped"] == 3


def test_goodput_and_its_charts_are_of_the_points():
    made = sweep()
    part = goodput_part([("m", made)], SLO)
    goods = [point.goodput(SLO) for point in made.valid]
    wanted = [
        ["m", str(p.concurrency), figure(g.per_s, 4), hundredths(g.attainment), "0"] for p, g in zip(made.valid, goods)
    ]
    assert part["table"].rows == wanted and part["bounds"] == {"ttft": 0.2, "tpot": 0.05, "e2e": None}
    assert [chart.spec["usermeta"]["field"] for chart in part["charts"]] == ["per_s", "percent"]
    assert goodput_part([], SLO) is None is cost_part([])


def test_costs_have_throughput_and_energy_of_each_load():
    made = sweep()
    costly = replace(made, points=tuple(replace(p, energy_per_token_j=0.05 * p.concurrency) for p in made.points))
    part = cost_part([("m", costly)])
    assert part["points"] == [[p.output_tokens_per_s, p.energy_per_token_j] for p in costly.points]
    assert part["table"].rows == [
        ["m", str(p.concurrency), figure(p.output_tokens_per_s, 4), milliseconds(p.energy_per_token_j), "-", "-", "-"]
        for p in costly.points
    ]


def test_the_numbers_of_points_replicas_and_charts_are_on_the_page(page):
    (head, *rows) = page.tables["Points of opt-1.3b"]
    made = sweep()
    at = head.index("tokens /s")
    assert [row[at] for row in rows] == [figure(p.output_tokens_per_s, 4) for p in made.points]
    planes = [spec for spec in page.charts.values() if spec["description"] == "throughput against latency"]
    assert len(planes) == 1 and {"Goodput of each load", "Cost of a million output tokens"} <= page.tables.keys()
    shared = Page(rendered(Findings(shared=[shared_point(2, (900.0,))])))
    assert "Throughput" in shared.tables and shared.text.count("2 x opt-1.3b") >= 2


def test_a_status_progress_and_nothing_are_told():
    assert "Exit status 10" in Page(rendered(Findings(), status=10)).text
    seen = Page(rendered(Findings(), progress="case 3 of 9")).text
    assert "case 3 of 9" in seen and "Exit status" not in seen and writer.NOTHING in seen


# Terms


@pytest.mark.parametrize(
    ("heading", "terms"),
    [
        ("TTFT ms", {"TTFT": "TTFT"}),
        ("concurrent requests", {"concurrent requests": "concurrent requests"}),
        ("mean concurrency", {"concurrency": "concurrent requests"}),
        ("Interim analyses: mean E2E", {"Interim analyses": "interim analysis", "E2E": "E2E"}),
        ("opt-1.3b: INCONCLUSIVE after 4 pairs of launches", {"INCONCLUSIVE": "inconclusive", "launches": "launch"}),
        ("batching", {}),
        ("throughput-plateau", {}),
        ("", {}),
    ],
)
def test_terms_are_whole_words_in_any_of_their_forms(heading, terms):
    found = parts(heading)
    assert "".join(part for part, _ in found) == heading
    assert {part: number for part, number in found if number} == {part: NUMBERS[name] for part, name in terms.items()}


def test_each_term_of_a_heading_has_its_meaning_on_the_page(page):
    terms = [attrs["popovertarget"] for _, attrs in page.tags if attrs.get("class") == "term"]
    meanings = {attrs["id"] for _, attrs in page.tags if attrs.get("class") == "meaning"}
    assert set(terms) <= meanings and len(meanings) == len(GLOSSARY)
    heads = re.findall(r"<(?:th scope=.col|figcaption|h2)[^\n]*?class=.term.[^>]*>([^<]*)<", page.source)
    assert {"concurrency", "TTFT", "TPOT", "E2E", "Pareto", "valid", "Service-level objective"} <= set(heads)
    assert {forms[0]: meaning for forms, meaning in GLOSSARY.items() if len(meaning.split()) > 25} == {}


# What runs, and what is text


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
    return Page(
        rendered(found_of(made, judged=[(verdict, None)], notes=[name], reused={"a case": 1}, reused_from=name))
    )


def test_names_of_an_archive_are_text_and_never_markup():
    hostile, plain = map(named, (HOSTILE, "name"))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert "<img src=x onerror=alert(1)>" in hostile.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", hostile.source)
    assert "</script><img" not in hostile.source


@given(st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=6))
def test_json_in_a_script_ends_no_tag_and_is_the_value(value):
    text = as_script_json({"a": value, "b": "</script><!--&"})
    assert not re.search("[<>&]", text) and json.loads(text) == {"a": value, "b": "</script><!--&"}
    assert packed(text) == packed(text) and gzip.decompress(base64.b64decode(packed(text))).decode() == text


def test_only_hashed_scripts_run_and_nothing_is_fetched(page):
    (policy,) = (a["content"] or "" for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and rules["base-uri"] == "'none'" and rules["form-action"] == "'none'"
    (script,) = (text for attrs, text in page.scripts if not attrs)
    (style,) = page.styles
    assert hashed(script) in rules["script-src"] and rules["style-src"] == hashed(style)
    assert "unsafe" not in policy and "http" not in policy and rules["script-src"].count("sha256-") == 4
    attributes = {name for _, attrs in page.tags for name in attrs}
    assert not {name for name in attributes if name.startswith("on")} | attributes & {"style", "src", "action"}
    assert all((a.get("href") or "#").startswith(("#", "data:image/svg+xml")) for _, a in page.tags)


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


def test_libraries_are_those_that_their_table_names_and_are_packed_once():
    rows = re.findall(
        r"\| `([\w.-]+)` \|.*\| `([0-9a-f]{64})` \|", (FOLDER / "vendor" / "README.md").read_text("utf-8")
    )
    assert {name for name, _ in rows} == {"vega.min.js", "vega-lite.min.js", "vega-interpreter.js"}
    assert [name for name, told in rows if sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() != told] == []
    assert rendered(Findings()) == rendered(Findings()) and writer.shared_parts.cache_info().misses == 1


def test_an_archive_is_in_its_page():
    archive = DATA / "archive-format-3.jsonl"
    seen = Page(rendered(Findings(), [archive]))
    assert [attrs["data-records"] for attrs, _ in seen.scripts if "data-records" in attrs]


# Files


def test_without_jinja2_a_page_is_a_usage_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(BadUsage, match="Jinja2") as error:
        RunPage(tmp_path / "out.html")
    assert "pytest-slmserve[report]" in str(error.value)


def test_a_page_is_written_with_its_folder_and_replaced_by_a_page(tmp_path):
    path = tmp_path / "a" / "out.html"
    for status in (0, 1):
        write_page(path, Findings(), status=status)
        assert f"Exit status {status}" in path.read_text("utf-8") and [*path.parent.iterdir()] == [path]
    path.write_bytes(b"")
    check_replaceable(path)
    path.write_bytes(b"<!DOCTYPE HTML><p>")
    check_replaceable(path)


@pytest.mark.parametrize("name", ["folder", "pipe", "records.jsonl", "records.jsonl/out.html"])
def test_a_page_takes_the_place_of_a_page_only(tmp_path, name):
    path = tmp_path / name
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "records.jsonl").write_text('{"kind":"session"}')
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BadUsage, match=re.escape(str(path))) as error:
        write_page(path, Findings())
    assert "--html" in str(error.value) and sorted(tmp_path.iterdir()) == before and (tmp_path / "pipe").is_fifo()


def test_a_page_that_breaks_off_leaves_the_old_one_and_no_part(tmp_path, monkeypatch):
    path = tmp_path / "out.html"
    write_page(path, Findings(), status=0)

    def full(self: Path, *_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(BadUsage, match="No space left"):
        write_page(path, Findings(), status=1)
    assert "Exit status 0" in path.read_text("utf-8") and [*tmp_path.iterdir()] == [path]


def test_a_run_goes_on_without_its_page_and_waits_as_long_as_the_last_one_took(tmp_path, monkeypatch):
    now = iter([100.0, 100.5, 100.5, 200.0])
    run = RunPage(tmp_path / "out.html")
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert run.write(Findings(), 10, "case 1") == "" and run.next_at == 100.5 + PAUSE * 0.5
    assert all(words in run.path.read_text("utf-8") for words in ("case 1", "Exit status 10"))
    run.path.write_text("no page")
    assert str(run.path) in run.write(Findings()) and run.next_at == float("inf")


def test_the_law_of_a_sweep_is_not_needed_for_its_page():
    assert "opt-1.3b" in Page(rendered(found_of(curve_of("opt-1.3b", [measurement(8, law(8))])))).text
