"""The page without a browser: nothing of an archive is markup, only our scripts run, requests give the latencies again,
costs and environments are tables, terms have their meaning, and a file is replaced at once or not at all."""

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
from html_pages import Page, values_of
from hypothesis import given, strategies as st
from launches import pairs
from planted import gated, sweep
from refusals import refused
from sections import difference
from strategies import H200

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.page import writer
from pytest_slmserve.report.page.writer import GLOSSARY, page_content, rendered, reproduce
from pytest_slmserve.schema import errors, records
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202e&lt;"
SLO = writer.STARTING_SLO
RATES, WOBBLES = {1: 100, 2: 180, 4: 300, 8: 310}, (0.99, 1, 1.01)
SWEEP, LIKE_IT = (sweep(RATES, WOBBLES, model) for model in ("opt-1.3b", "c"))
OTHER = sweep(RATES, WOBBLES, "b", replace(H200, driver="580"))
HEADINGS = (
    "TTFT ms", "concurrent requests", "mean concurrency", "Interim analyses: mean E2E", "batching", "",
    "throughput-plateau", "opt-1.3b: INCONCLUSIVE after 4 pairs of launches",
)  # fmt: skip
NAMES = ("title", "tallies", "status_words", "unexpected", "inconclusive", "facts", "environments", "reproduce")
STATES = (State.PASSES, State.FAILS, State.INCONCLUSIVE)
JUDGED = [(Verdict("claim", f"m{n}", state, f"why {n}"), None) for n, state in enumerate(STATES)]
GATES = [gated(pairs(4, speed=speed)) for speed in (1.0, 0.9)]
SIMULATED = sweep(RATES, WOBBLES, environment=records.Environment(platform="simulated"))
FIRST = SWEEP.measurements[0]
SERVER = replace(FIRST, spec=replace(FIRST.spec, interface="server"), load=ClosedLoop(2, ramp_up="burst"))
ENDPOINT = EngineSpec("m", platform="remote", interface="endpoint", url="http://h/v1")


def found_of(*curves: Curve, **more: object) -> Findings:
    made = [m for curve in curves for m in curve.measurements]
    return Findings(curves=curves, measurements=made, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(rendered(found_of(SWEEP)))


def test_page_content_matches_expected_file():
    found = {
        "a sweep": found_of(SWEEP),
        "three environments": found_of(SWEEP, LIKE_IT, OTHER, Curve(subject="x", points=SWEEP.points)),
        "simulated": found_of(SIMULATED),
        "outcomes": Findings(judged=JUDGED, gates=GATES, failed=["test_a: why"], inconclusive=["open"]),
    }
    contents = {name: page_content(each, 1, {}) for name, each in found.items()}
    contents["nothing"], contents["advice"] = (page_content(Findings(), None, more) for more in ({}, {"Advice": ["x"]}))
    shown = {}
    for name, content in contents.items():
        planes = [[*dict.fromkeys(row["series"] for row in values_of(plane.spec))] for plane in content["pareto"]]
        told = {key: content[key] for key in NAMES} | {"sections": [*dict(content["sections"])], "planes": planes}
        shown[name] = "\n".join(f"{key}: {value}" for key, value in told.items())
    assert difference("page", shown) == ""
    command = "pytest --pyargs pytest_slmserve.benchmarks --slm-gpu --slm-models=opt-1.3b --slm-concurrency="
    job = replace(FIRST, load=OpenLoop(requests=40, rate=10.0))
    assert reproduce(SWEEP.measurements) == f"{command}1,2,4,8 --slm-window=5.0"
    assert reproduce([SERVER]) == f"{command}2 --slm-interface=server --slm-window=5.0 --slm-ramp-up=burst"
    assert reproduce([replace(FIRST, spec=ENDPOINT)]) == reproduce([job]) == reproduce(pairs(1)) == reproduce([]) == ""


def test_page_requests_reproduce_latencies():
    part = writer.goodput_part([("m", SWEEP)], SLO)
    for point, told in zip(SWEEP.valid, part["requests"], strict=True):
        assert (told["series"], told["x"], len(told["windows"])) == ("m", point.concurrency, 3)
        for (m,), seen in zip(point.used, told["windows"], strict=True):
            assert all(isinstance(us, int) for name in ("sent", "first", "last") for us in seen[name])
            latencies = [window.request_latency(m.run.samples, row) for row in window.judged_requests(m).rows]
            wanted = [one for one in latencies if one.e2e_s is not None]
            assert [us / 1e6 for us in seen["first"]] == pytest.approx([one.ttft_s for one in wanted], abs=2e-6)
            assert [us / 1e6 for us in seen["last"]] == pytest.approx([one.e2e_s for one in wanted], abs=2e-6)
            opens, closes = m.run.window_s
            assert wanted and set(seen["tokens"]) == {32}
            assert (seen["seconds"], seen["dropped"]) == (closes - opens, 0)
    lost = replace(m, run=replace(m.run, failures=3))
    assert writer._window((lost,))["dropped"] == 3
    points = tuple(replace(p, energy_per_token_j=0.05 * p.concurrency) for p in SWEEP.points)
    good, costs = writer.goodput_part([("m", SWEEP)], SLO), writer.cost_part([("m", replace(SWEEP, points=points))])
    shown = {"bounds": f"{good['bounds']}", "goodput": f"{good['table']}", "costs": f"{costs['table']}"}
    assert difference("goodput", shown | {"fields": f"{[chart.spec['usermeta'] for chart in good['charts']]}"}) == ""
    assert costs["points"] == [[p.output_tokens_per_s, p.energy_per_token_j] for p in points]
    assert writer.goodput_part([], SLO) is None is writer.cost_part([])


def test_glossary_terms_have_meanings(page):
    terms = ["no term", *(forms[0] for forms in GLOSSARY)]
    parts = {heading: writer.parts(heading) for heading in HEADINGS}
    shown = {name: "\n".join(f"{part}: {terms[number]}" for part, number in each) for name, each in parts.items()}
    assert difference("terms", shown) == ""
    assert ["".join(part for part, _ in each) for each in parts.values()] == [*HEADINGS]
    terms = [attrs["popovertarget"] for _, attrs in page.tags if attrs.get("class") == "term"]
    meanings = {attrs["id"] for _, attrs in page.tags if attrs.get("class") == "meaning"}
    assert set(terms) <= meanings and len(meanings) == len(GLOSSARY)
    heads = re.findall(r"<(?:th scope=.col|figcaption|h2)[^\n]*?class=.term.[^>]*>([^<]*)<", page.source)
    assert {"concurrency", "TTFT", "TPOT", "E2E", "Pareto", "valid", "Service-level objective"} <= set(heads)


def named(name: str) -> Page:
    """A page of which every name and sentence is this one."""
    where, seen = replace(H200, gpu_name=name), name.partition("\x1b")[0]  # a model's name has no such characters
    specs = [(m, replace(m.spec, model=seen, model_facts=None)) for m in SWEEP.measurements]
    made = [replace(m, environment=where, spec=spec) for m, spec in specs]
    verdict = Verdict(name, name, State.FAILS, name, 1.0, 0.5, 2.0, 1.5)
    told = {"judged": [(verdict, None)], "notes": [name], "reused": {"a case": 1}, "reused_from": name}
    return Page(rendered(found_of(replace(SWEEP, subject=name, measurements=tuple(made)), **told)))


def test_archive_names_are_never_markup(page):
    hostile, plain = map(named, (HOSTILE, "name"))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert "<img src=x onerror=alert(1)>" in hostile.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]|</script><img", hostile.source)
    (policy,) = (a["content"] or "" for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert {rules[name] for name in ("default-src", "base-uri", "form-action")} == {"'none'"}
    (script,) = (text for attrs, text in page.scripts if not attrs)
    (style,) = page.styles
    assert hashed(script) in rules["script-src"] and rules["style-src"] == hashed(style)
    assert "unsafe" not in policy and "http" not in policy and rules["script-src"].count("sha256-") == 4
    attributes = {name for _, attrs in page.tags for name in attrs}
    assert not {name for name in attributes if name.startswith("on")} | attributes & {"style", "src", "action"}
    assert all((a.get("href") or "#").startswith(("#", "data:image/svg+xml")) for _, a in page.tags)
    folder = writer.FOLDER / "vendor"
    rows = re.findall(r"\| `([\w.-]+)` \|.*\| `([0-9a-f]{64})` \|", (folder / "README.md").read_text("utf-8"))
    assert {name for name, _ in rows} == {"vega.min.js", "vega-lite.min.js", "vega-interpreter.js"}
    assert [name for name, told in rows if sha256((folder / name).read_bytes()).hexdigest() != told] == []
    assert rendered(Findings()) == rendered(Findings()) and writer.shared_parts.cache_info().misses == 1


@given(st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=6))
def test_script_json_ends_no_tag(value):
    text = writer.as_script_json({"a": value, "b": "</script><!--&"})
    assert not re.search("[<>&]", text) and json.loads(text) == {"a": value, "b": "</script><!--&"}
    packed = writer.packed(text)
    assert packed == writer.packed(text) and gzip.decompress(base64.b64decode(packed)).decode() == text


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"


def test_failed_write_keeps_old_page(tmp_path, monkeypatch):
    def full(self: Path, *_: object) -> Path:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a" / "out.html"
    for status in (0, 1):
        writer.write_page(path, Findings(), status=status)
        assert f"Exit status {status}" in path.read_text("utf-8") and [*path.parent.iterdir()] == [path]
    for begins in (b"", b"<!DOCTYPE HTML><p>"):
        path.write_bytes(begins)
        writer.check_replaceable(path)
    monkeypatch.setattr(Path, "replace", full)
    with refused("No space left"):
        writer.write_page(path, Findings(), status=1)
    assert path.read_bytes() == begins and [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("name", ["folder", "pipe", "records.jsonl", "records.jsonl/out.html"])
def test_page_replaces_only_pages(tmp_path, name):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "records.jsonl").write_text('{"kind":"session"}')
    before = sorted(tmp_path.iterdir())
    with refused(tmp_path / name, hint="--html"):
        writer.write_page(tmp_path / name, Findings())
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "pipe").is_fifo()


def test_run_continues_without_its_page(tmp_path, monkeypatch):
    now = iter([100.0, 100.5, 100.5, 200.0])
    run = writer.RunPage(tmp_path / "out.html")
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert run.write(Findings(), 10, "case 1") == "" and run.next_at == 100.5 + writer.PAUSE * 0.5
    assert all(words in run.path.read_text("utf-8") for words in ("case 1", "Exit status 10", writer.NOTHING))
    run.path.write_text("no page")
    assert str(run.path) in run.write(Findings()) and run.next_at == float("inf")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with refused("Jinja2", hint=errors.to_install("report")):
        writer.RunPage(tmp_path / "out.html")
