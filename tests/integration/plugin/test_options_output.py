"""What a run writes, prints and ends with, as its options say: records, how much of the report, exports, goodput, a
plan, exit status, a page, and pytest-benchmark's view.

What the report says is held by the golden files of the archives."""

import gzip
import importlib.util
import json
import re
import sys
from collections import Counter
from xml.etree import ElementTree

import jsonschema
import pytest
from html_pages import Page
from inner_runs import FEW, SWEEP
from shipped import shipped

from pytest_slmserve.analysis.claims.table import ROWS
from pytest_slmserve.analysis.metrics.window import goodput_of, parse_slo
from pytest_slmserve.archive import external
from pytest_slmserve.archive.store import LEFT_OUT, read, runs_of
from pytest_slmserve.plugin import progress, session_hooks
from pytest_slmserve.report.screen import MOST_LINES

TWO = "--slm-concurrency=1,16"
BARE = FEW.replace("-o slm_report=tables", "")
NO_PLATEAU = "--slm-engine-arg=b_half=300 --slm-engine-arg=t_inf=200000"
PAGES = pytest.mark.skipif(importlib.util.find_spec("jinja2") is None, reason="a page needs Jinja2")


# Records


def test_records_lie_under_dot_slm(runs, tmp_path, stand_in_here):
    ran = runs.anew(SWEEP, BARE, records="")
    assert ran.counts == {"passed": 6} and not (ran.folder / ".slm").exists() and not [*tmp_path.glob("slmserve-*")]
    ran.says("*not kept*", "note: *--slm-records=FILE*")
    resumed = runs.anew(SWEEP, BARE, "--slm-resume", records="")
    assert "not kept" not in resumed.out and (resumed.folder / ".slm/records.jsonl").is_file()
    short = "--slm-concurrency=2 --slm-window=0.2 --slm-repeats=1 --slm-input-len=16 --slm-output-len=8"
    ran = runs.anew("def test_point(slm_point): assert slm_point.measure()", short, stand_in_here, records="")
    assert (ran.folder / ".slm/records.jsonl").is_file()
    assert (ran.folder / ".slm/.gitignore").read_text("utf-8") == "*\n"


def test_second_run_appends_to_records(runs):
    ran, name = runs(SWEEP, FEW, "--slm-records=deep/down/r.jsonl.gz"), "deep/down/r.jsonl.gz"
    [run], session = runs_of(ran.archive(name)), ran.archive(name).sessions[0]
    assert gzip.decompress((ran.folder / name).read_bytes()) and len(run.measurements) == 10
    assert len(session.claims["rows"]) == len(ROWS)
    [planned] = session.plan["sweeps"].values()
    assert planned == {"model": "opt-125m", "concurrencies": [1, 2, 4, 8, 16], "skipped": []}
    for name in ("notes.txt/r.jsonl", "notes.txt"):
        ran = runs.anew({"test_it.py": SWEEP, "notes.txt": "dear diary\n"}, FEW, f"--slm-records={name}")
        ran.refuses(name)
        assert (ran.folder / "notes.txt").read_text() == "dear diary\n"
    # A run says nothing of another, and the report of the archive says what the last run said.
    ran = runs.anew(SWEEP, FEW, folder=runs.anew(SWEEP, FEW).folder)
    first, second = runs_of(ran.archive())
    assert first.header.id != second.header.id and len(first.measurements) == len(second.measurements) == 10
    text = ran.report()[1]
    measured = next(line for line in text.splitlines() if "measured: " in line)
    assert measured in ran.out and "2 repeats each, 1 launch" in measured and LEFT_OUT in text
    assert "4 repeats each, 2 launches" in ran.report("--run", "all")[1]


# How much of the report


def ours(ran):
    """Lines between the section of the run and the next one."""
    (section,) = re.findall(r"(?ms)^=+ slmserve =+$(.+?)^===", ran.out)
    return section.strip().splitlines()


@pytest.mark.parametrize(("variable", "words", "wanted"), [
    ("", "", "summary"), ("", "-oslm_report=all", "all"), ("", "-v", "tables"), ("", "-vv", "all"),
    ("", "-v -o slm_report=summary", "tables"), ("", "-q -o slm_report=tables", "summary"),
    ("tables", "", "tables"), ("tables", "-q", "summary"), ("tables", "-vv", "all"),
])  # fmt: skip
def test_verbosity_overrides_report_option(runs, monkeypatch, variable, words, wanted):
    monkeypatch.setenv("SLM_REPORT", variable)
    ran = runs.anew(SWEEP, BARE, words, columns=80, records="")
    shown = "tables" if "not shown:" in ran.out else "all"
    assert "opt-125m  from " in ran.out, "the screen comes in any case"
    assert (shown if "opt-125m on a SIMULATED ENGINE" in ran.out else "summary") == wanted
    if not words and not variable:
        assert len(ours(ran)) <= MOST_LINES and max(map(len, ours(ran))) <= 80
        assert ours(ran)[-1] == "more: -v"


@pytest.mark.parametrize("columns", [80, 160])
def test_narrow_terminal_hides_columns(runs, columns):
    lines = ours(runs.anew(SWEEP, FEW, TWO, columns=columns))
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("not shown: ") for line in lines) == (columns < 120)


@pytest.mark.parametrize("words", ["--slm-sweep=adaptive", "--slm-plan --slm-ray=local:2"], ids=["run", "plan"])
def test_run_lines_fit_terminal(runs, monkeypatch, words):
    monkeypatch.setattr(progress, "LEAST_S", 0.0)  # lines of a log on what took no time
    monkeypatch.setattr(session_hooks, "LONG_S", 0.0)
    ran = runs.anew(SWEEP, BARE, words, "--slm-resume", columns=80)
    said = ran.out[ran.out.index("slmserve: ") :]
    assert "case 1 of 5" in said or "spread by engine" in said
    wide = [line for line in said.splitlines() if len(line) > 80]
    assert [line for line in wide if not line.startswith(("plugins: ", "rootdir: "))] == [], "but for those of others"


# Exports and goodput


def test_export_writes_each_measurement(runs):
    ran = runs(SWEEP, FEW, TWO, "--slm-window=5 -o slm_export=vllm-bench=results/ --slm-goodput=ttft:1s")
    told = [json.loads(path.read_text("utf-8")) for path in (ran.folder / "results").iterdir()]
    assert {result["record_id"] for result in told} == {m.id for m in ran.measured()} and len(told) == 4
    assert all(result["request_goodput"] > 0 and result["valid"] for result in told)
    one = runs(SWEEP, FEW, TWO, "-o slm_export=vllm-bench=all.json")
    columns = external.Columns(knob="max_concurrency", throughput="output_throughput", latency="mean_e2el_ms")
    points = external.external_curve(external.read_results(one.folder / "all.json"), columns).points
    assert [(point.concurrency, len(point.repeats)) for point in points] == [(1, 2), (16, 2)]
    runs(SWEEP, FEW, "-o slm_export=csv=x").refuses("csv=x")
    runs(SWEEP, FEW, "--slm-goodput=itl:9ms").refuses("tpot")


@pytest.mark.parametrize("word", [
    "-o slm_export=vllm-bench=taken", pytest.param("--slm-html=taken/out.html", marks=PAGES)
])  # fmt: skip
def test_failed_write_costs_no_record(runs, word):
    ran = runs.anew({"test_it.py": SWEEP, "taken": "a file"}, FEW, TWO, word)
    assert "cannot write taken" in ran.out and {*ran.loads()} == {1, 16}


SLO = "ttft:1s,tpot:4ms"


def goodput_table(text):
    """Rows below "good: SLO", as words."""
    lines = text.partition(f"good: {SLO}")[2].partition("most goodput")[0].splitlines()
    return [line.split() for line in lines[4:]]


def test_goodput_agrees_in_report(runs):
    ran = runs(SWEEP, FEW, f"--slm-goodput={SLO}")
    rows = goodput_table(ran.out)
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16"]
    for row in rows:
        found = goodput_of(parse_slo(SLO), *((m,) for m in ran.measured() if m.load.concurrency == int(row[0])))
        assert row[1] == f"{found.requests:,}" and row[3] == f"{100 * found.attainment:.1f}" and row[-1] == "0"
    assert rows[0][3] == "100.0" and float(rows[-1][3]) < 50, "steps of 16 take some 8 ms"
    assert goodput_table(ran.report("--goodput", SLO)[1]) == rows and "most goodput" not in runs(SWEEP, FEW).out


def test_plan_runs_nothing(runs):
    ran = runs(SWEEP, "--slm-simulate --slm-plan --slm-models=opt-125m,opt-350m --slm-concurrency=1,2")
    assert ran.ret == 0 and not (ran.folder / ".slm").exists() and " passed" not in ran.out
    each = ["start {0} *", "test_point?{0}-1? (*", "test_point?{0}-2? (*", "test_plateau?{0}? (*"]
    lines = [f"*{line.format(model)}" for model in ("opt-125m", "opt-350m") for line in each]
    pytest.LineMatcher(ran.lines).fnmatch_lines([*lines, "*end: 6 items"], consecutive=True)


# How a run ends
KNOWN = """
    import pytest

    @pytest.mark.slm(claim="table-1-batch-fits", models=("opt-1.3b", "opt-2.7b"))
    def test_fits(slm_claim): assert slm_claim()
"""
EITHER_WAY = """
    import pytest

    @pytest.mark.slm(claim="marginal-after-128", models=["opt-1.3b"])
    def test_little(slm_claim): assert slm_claim()

    def test_point(slm_point): assert slm_point.measure()
"""
NOISY = """
    import pytest
    from pytest_slmserve import State, Verdict

    noisy = Verdict("claim", "model", State.INCONCLUSIVE, "too noisy")

    @pytest.mark.slm
    @pytest.mark.xfail(raises=AssertionError, strict=True)
    def test_expected(): assert noisy

    @pytest.fixture
    def quick_enough(): assert noisy

    @pytest.mark.slm
    def test_fixture(quick_enough): raise AssertionError("its fixture was not inconclusive")
"""
ONCE = "--slm-repeats=1"


def gains(times):
    """Words by which throughput grows so from load 128 to 256, by the law that is told: 2 (128 + b)/(256 + b)."""
    law = f"--slm-engine-arg=t_inf=10000.0 --slm-engine-arg=b_half={(times - 1) * 256 / (2 - times)}"
    return f"--slm-simulate --slm-models=opt-1.3b --slm-budget=0 --slm-concurrency=64,128,256 {law}"


ENDS = {
    "all as expected": (SWEEP, FEW, 0, {"passed": 6}, "*"),
    "a claim that fails": (SWEEP, f"{FEW} {NO_PLATEAU}", 1, {"passed": 5, "failed": 1}, "*fails: throughput-plateau*"),
    "inconclusive": (SWEEP, f"{FEW} {ONCE}", 10, {"passed": 5, "inconclusive": 1}, "*noise unknown: one repeat*"),
    "allowed": (SWEEP, f"{FEW} {ONCE} --slm-allow-inconclusive", 0, {"passed": 5, "inconclusive": 1},
                "*INCONCLUSIVE*--slm-resume*--slm-repeats 2*"),
    "allowed, and a failure": (SWEEP, f"{FEW} {NO_PLATEAU} --slm-allow-inconclusive", 1, {"passed": 5, "failed": 1},
                               "*fails: throughput-plateau*"),
    "known to fail": (KNOWN, "--slm-simulate -rx", 0, {"passed": 1, "xfailed": 1}, "*XFAIL*opt-1.3b*238 request*256*"),
    "known, and strict": (KNOWN, "--slm-simulate -o slm_strict=1", 1, {"passed": 1, "failed": 1}, "*"),
    "either way, little": (EITHER_WAY, gains(1.05), 0, {"passed": 3, "xpassed": 1}, "*"),
    "either way, much": (EITHER_WAY, gains(1.5), 0, {"passed": 3, "xfailed": 1}, "*"),
    "strict, little": (EITHER_WAY, f"{gains(1.05)} -o slm_strict=1", 0, {"passed": 4}, "*"),
    "strict, much": (EITHER_WAY, f"{gains(1.5)} -o slm_strict=1", 1, {"passed": 3, "failed": 1}, "*"),
    "inconclusive in a fixture and an expected failure": (NOISY, "--slm-simulate", 10, {"inconclusive": 2}, "*"),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_run_ends_with_worst_status(runs, case):
    """Status 3, of a gate that was broken off, is among the tests of the gate."""
    source, words, status, counts, line = ENDS[case]
    ran = runs(source, words)
    assert (ran.ret, ran.counts) == (status, counts)
    ran.says(line)


def test_inconclusive_is_junit_failure(runs):
    ran = runs(SWEEP, FEW, ONCE, "--junitxml=out.xml")
    ran.says("*.py .....U*", "*5 passed, 1 inconclusive*")
    suite = ElementTree.parse(ran.folder / "out.xml").getroot()[0]
    properties = {p.attrib["name"]: p.attrib["value"] for p in suite.iter("property")}
    assert (suite.attrib["failures"], properties["slm_state"]) == ("1", "inconclusive")


WHOLE = {"type": "integer", "minimum": 0}
TIMES = ("start", "stop")
COUNTS = ("tests", "passed", "failed", "skipped", "pending", "other")
# What https://github.com/ctrf-io/ctrf/blob/main/schema/ctrf.schema.json requires.
CTRF = {
    "required": ["reportFormat", "specVersion", "results"],
    "properties": {
        "reportFormat": {"const": "CTRF"},
        "specVersion": {"pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
        "results": {
            "required": ["tool", "summary", "tests"],
            "properties": {
                "tool": {"required": ["name"]},
                "summary": {"required": [*COUNTS, *TIMES], "properties": dict.fromkeys([*COUNTS, *TIMES], WHOLE)},
                "tests": {"items": {
                    "required": ["name", "status", "duration"],
                    "properties": {"name": {"minLength": 1}, "status": {"enum": [*COUNTS[1:]]}, "duration": WHOLE},
                }},
            },
        },
    },
}  # fmt: skip
IN_CTRF = {"PASSED": "passed", "FAILED": "failed", "INCONCLUSIVE": "failed", "SKIPPED": "skipped"}
GATED = """--slm-simulate --slm-gate --slm-models=opt-125m --slm-concurrency=16 --slm-input-len=16 --slm-output-len=8
    --slm-side=candidate:arg=t_inf=9000 --slm-side=baseline:arg=t_inf=10000 --slm-engine-arg=b_half=16"""
WITH_OTHERS = {
    "a gate that fails": (shipped("test_gate"), GATED, {"PASSED": 0, "FAILED": 2, "SKIPPED": 5}),
    "an inconclusive claim": (SWEEP, f"{FEW} {ONCE}", {"PASSED": 5, "INCONCLUSIVE": 1}),
}


@pytest.mark.skipif(importlib.util.find_spec("ctrf") is None, reason="needs pytest-json-ctrf")
@pytest.mark.parametrize("name", WITH_OTHERS)
def test_ctrf_agrees_with_junit(runs, name):
    source, words, counts = WITH_OTHERS[name]
    ran = runs.anew(source, words, "-v --junitxml=out.xml --ctrf=out.json")
    assert Counter(ran.outcomes.values()) == Counter(counts), ran.out
    told = json.loads((ran.folder / "out.json").read_text("utf-8"))
    jsonschema.validate(told, CTRF)
    ends = {each["name"].partition("::")[2]: each for each in told["results"]["tests"]}
    assert {test: each["status"] for test, each in ends.items()} == {
        test: IN_CTRF[outcome] for test, outcome in ran.outcomes.items()
    }
    summary = Counter(each["status"] for each in ends.values())
    assert {kind: told["results"]["summary"][kind] for kind in COUNTS} == {
        **dict.fromkeys(COUNTS, 0),
        "tests": len(ends),
        **summary,
    }
    cases = {case.attrib["name"]: case for case in ElementTree.parse(ran.folder / "out.xml").iter("testcase")}
    assert cases.keys() == ends.keys()
    for test, outcome in ran.outcomes.items():
        said = {each.tag: each.attrib["message"] for each in cases[test] if "message" in each.attrib}
        facts = {each.attrib["name"]: each.attrib["value"] for each in cases[test].iter("property")}
        assert [*said] == {"PASSED": [], "SKIPPED": ["skipped"]}.get(outcome, ["failure"])
        assert "message" not in ends[test] or " ".join(ends[test]["message"].split()) in " ".join(
            "".join(said.values()).split()
        )
        assert facts.get("slm_state") == ("inconclusive" if outcome == "INCONCLUSIVE" else None)
        assert ("Inconclusive" in ends[test].get("message", "")) is (outcome == "INCONCLUSIVE")
        if outcome == "FAILED":
            assert facts["slm_gate"] == "fails" and float(facts["slm_ratio"]) == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(("second", "status", "failed", "inconclusive"), [("True", 10, 0, 2), ("False", 1, 2, 1)])
def test_inconclusive_subtests_fail_no_run(runs, second, status, failed, inconclusive):
    pytest.importorskip("_pytest.subtests", reason="pytest has subtests from 9 on")
    source = f"""{NOISY.partition("    @pytest.mark.slm")[0]}
    @pytest.mark.slm
    def test_it(subtests):
        with subtests.test(n=1):
            assert noisy
        with subtests.test(n=2):
            assert {second}
    """
    ran = runs(source, "--slm-simulate")
    assert (ran.ret, ran.counts.get("failed", 0), ran.counts["inconclusive"]) == (status, failed, inconclusive)


WATCHES = """
    from pathlib import Path

    def test_point(slm_point):
        page = Path("out.html")
        if page.exists():
            text = page.read_text("utf-8")
            assert "1 of 2 tests have ended" in text and "Exit status" not in text
            Path("seen").touch()
        assert slm_point.measure()
"""


@PAGES
def test_html_page_holds_records(runs, monkeypatch):
    ran = runs(WATCHES, FEW, TWO, "--slm-html=out.html")
    page = Page((ran.folder / "out.html").read_text("utf-8"))
    assert ran.counts == {"passed": 2} and (ran.folder / "seen").exists()
    assert "Exit status 0" in page.text and "out.html" in ran.out and "Points of opt-125m" in page.tables
    assert read(ran.folder / "out.html").measurements == ran.measured()
    without = runs.anew(SWEEP, BARE, "--slm-html=out.html", records="")
    assert any(line.startswith("  where: slmserve report out.html") for line in without.lines), (
        "no path is named that goes"
    )
    ran = runs.anew(SWEEP, FEW, TWO, "--slm-records=r.jsonl")
    before = (ran.folder / "r.jsonl").read_bytes()
    runs.anew(SWEEP, FEW, "--slm-records=r.jsonl --slm-html=r.jsonl", folder=ran.folder).refuses("r.jsonl")
    assert (ran.folder / "r.jsonl").read_bytes() == before
    new = runs.anew(SWEEP, FEW, TWO, "--slm-records=new.jsonl --slm-html=new.jsonl")
    assert "new.jsonl" in new.out and len(new.measured("new.jsonl")) == 4
    monkeypatch.setitem(sys.modules, "jinja2", None)
    runs.anew(SWEEP, FEW, "--slm-html=out.html").refuses("Jinja2")


FAILS = """
    import pytest

    @pytest.mark.slm(model="opt-125m")
    def test_objective(slm_measure):
        point = slm_measure(concurrency=8)
        assert point.goodput("ttft:0.001ms").attainment >= 0.99, "<b>first</b>\\x1b token"

    @pytest.mark.slm(model="opt-125m", extra=(("die_at", 1),))
    def test_engine(slm_measure): slm_measure(concurrency=8)

    def test_early(slm_spec): raise RuntimeError

    def test_mine(slm_sweep): assert slm_sweep(concurrency=[1, 16]).pareto_plateau(tolerance=0.1)
"""


@PAGES
def test_html_page_names_failures(runs, monkeypatch, tmp_path):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    ran = runs.anew(FAILS, FEW, "--slm-html=out.html")
    seen = Page((ran.folder / "out.html").read_text("utf-8")).text
    summary = " ".join((tmp_path / "summary.md").read_text("utf-8").split())
    assert ran.ret == 1 and ran.counts == {"failed": 3, "inconclusive": 1}
    for told in (
        "objective: AssertionError: <b>first</b>\\x1b token",
        "engine: EngineFailed: the simulated engine died at concurrency 8",
        "early: RuntimeError",
        "mine: <inconclusive: throughput-plateau",
    ):
        assert f"::test_{told}" in seen and f"::test_{told}" in summary


# pytest-benchmark is a view: seconds per request, and everything else in `extra_info`

ALONE = "-p no:cacheprovider"
BRIEF = "--benchmark-min-rounds=1 --benchmark-max-time=0.01"


@pytest.fixture(scope="module")
def saved(runs):
    """In a process of its own: pytest-benchmark 5.0 leaves files open, one for each time that it reads options."""
    pytest.importorskip("pytest_benchmark")
    return runs.anew(
        SWEEP, FEW, "--benchmark-json=out.json --benchmark-autosave --slm-engine-arg=preempt_from=16",
        quiet=ALONE, process=True,
    )  # fmt: skip


def test_valid_points_become_benchmarks(saved, runs):
    told = json.loads((saved.folder / "out.json").read_text())
    rows = {row["name"]: row for row in told["benchmarks"]}
    assert list(rows) == [f"test_point[opt-125m-{n}]" for n in (1, 2, 4, 8)], "nothing is valid at 16"
    row, info = rows["test_point[opt-125m-8]"], rows["test_point[opt-125m-8]"]["extra_info"]
    assert (row["stats"]["rounds"], row["group"], info["concurrency"]) == (2, "opt-125m", 8)
    assert row["stats"]["ops"] == pytest.approx(info["requests_per_s"], rel=0.01)
    assert set(info["records"]) <= {m.id for m in saved.measured()} and row["params"] == {"slm_point": "opt-125m-8"}
    assert told["machine_info"]["slmserve"]["platform"] == "simulated"
    runs.anew({}, FEW, "--benchmark-compare", folder=saved.folder, quiet=ALONE).says("*opt-125m-8* (0001_*")
    off = runs.anew(SWEEP, FEW, "--benchmark-disable", quiet=ALONE)
    assert off.counts == {"passed": 6} and len(off.measured()) == 10


@pytest.mark.parametrize(("words", "there"), [("-v", False), ("-oslm_report=all", True)])
def test_benchmark_table_needs_full_report(runs, words, there):
    pytest.importorskip("pytest_benchmark")
    own = "def test_own(benchmark): benchmark(sum, range(9))\n"
    text = runs.anew({"test_points.py": SWEEP, "test_own.py": own}, BARE, TWO, words, ".", BRIEF, quiet=ALONE).out
    assert "Name (time in " in text and "test_own " in text and ("per request: opt-125m': 2 tests" in text) == there
    assert text.rindex("= slmserve =") > text.find("Name (time in"), "what a person wants to know comes last"


INTERRUPTS = """
    def interrupt():
        raise KeyboardInterrupt

    interrupt.__code__ = interrupt.__code__.replace(co_linetable=b"")

    def pytest_runtest_call(item):
        if "opt-125m-8" in item.name:
            interrupt()
"""


def test_interrupted_run_prints_last_screen(runs):
    """Also if CPython was at an instruction of no line, which pytest itself does not survive."""
    ran = runs.anew({"test_it.py": SWEEP, "conftest.py": INTERRUPTS}, FEW, "-W error", process=True, quiet=ALONE)
    assert ran.ret == 2 and "Traceback" not in ran.out + ran.err
    ran.says("opt-125m *", "*! KeyboardInterrupt !*", "*3 passed*")
