"""What a run writes and prints, as its options say: records, how much of the report, exports, goodput, a plan, a page.

What the report says is held by the golden files of the archives."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys

import pytest
from html_pages import Page
from inner_runs import FEW
from inside import SWEEP, usage_error

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.claims.table import ROWS
from pytest_slmserve.analysis.metrics.window import goodput_of, output_tokens_per_s, parse_slo
from pytest_slmserve.archive import external
from pytest_slmserve.archive.store import LEFT_OUT, RecordedRun, read, runs_of
from pytest_slmserve.plugin import progress, session_hooks
from pytest_slmserve.report.screen import MOST_LINES

TWO = "--slm-concurrency=1,16"
COLUMNS = external.Columns(knob="max_concurrency", throughput="output_throughput", latency="mean_e2el_ms")
PAGES = pytest.mark.skipif(importlib.util.find_spec("jinja2") is None, reason="a page needs Jinja2")


@pytest.fixture
def plain(runs):
    """A sweep of five loads, two repeats each, and its claim."""
    return runs(SWEEP, *FEW)


@pytest.fixture
def small(pytester, monkeypatch):
    """Runs the sweep at a width: `small("-v", width=80)`."""
    pytester.makepyfile(SWEEP)

    def run(*words, width=80):
        monkeypatch.setenv("COLUMNS", str(width))
        few = [word for word in FEW if not word.startswith("--slm-report")]
        return pytester.runpytest_inprocess(*few, *words, "-p", "no:cacheprovider", "-p", "no:benchmark")

    return run


# Records


def test_by_default_records_lie_under_dot_slm_which_git_ignores(pytester, stand_in_here):
    pytester.makepyfile("def test_point(slm_point): assert slm_point.measure()")
    short = ("--slm-concurrency=2", "--slm-window=0.2", "--slm-repeats=1", "--slm-input-len=16", "--slm-output-len=8")
    pytester.runpytest_inprocess("--slm-cpu", "--slm-telemetry=off", *short, stand_in_here, "-p", "no:cacheprovider")
    assert (pytester.path / ".slm/records.jsonl").is_file()
    assert (pytester.path / ".slm/.gitignore").read_text("utf-8") == "*\n"


def test_records_of_a_simulated_run_are_not_kept_unless_a_place_is_named(small, pytester, tmp_path, monkeypatch):
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    result = small(width=400)
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*not kept*", "note: *--slm-records=FILE*"])
    assert not (pytester.path / ".slm").exists() and not [*(tmp_path / "temp").glob("slmserve-*")]
    if importlib.util.find_spec("jinja2"):
        assert "more: slmserve report out.html" in small("--slm-html=out.html").outlines, "no path is named that goes"
    assert "not kept" not in small("--slm-resume").stdout.str(), "what is to be resumed"
    assert (pytester.path / ".slm/records.jsonl").is_file()


def test_the_suffix_gz_compresses(runs):
    ran = runs(SWEEP, *FEW, TWO, "--slm-records=deep/down/r.jsonl.gz")
    lines = gzip.decompress((ran.folder / "deep/down/r.jsonl.gz").read_bytes()).splitlines()
    assert json.loads(lines[0])["kind"] == "session" and len(ran.measured("deep/down/r.jsonl.gz")) == 4


@pytest.fixture(scope="module")
def twice(runs):
    """The same sweep again, in the same folder."""
    first = runs.anew(SWEEP, *FEW)
    return first, runs.anew(SWEEP, *FEW, folder=first.folder)


def report_of(ran, capsys, *words):
    """What `report` prints of its archive, and its line of what was measured."""
    capsys.readouterr()
    main(["report", str(ran.folder / ".slm/records.jsonl"), *words])
    out = capsys.readouterr().out
    return next((line for line in out.splitlines() if "measured: " in line), ""), out


def test_a_second_run_is_appended_and_not_pooled_with_the_first(twice, capsys):
    """A run says nothing of another, and the report of the archive says what the last run said."""
    first, second = runs_of(twice[1].archive())
    assert first.header.id != second.header.id and len(first.measurements) == len(second.measurements) == 10
    line, out = report_of(twice[1], capsys)
    assert line in twice[1].out and "2 repeats each, 1 launch" in line and LEFT_OUT in out
    assert "4 repeats each, 2 launches" in report_of(twice[1], capsys, "--run", "all")[0]
    line, out = report_of(twice[1], capsys, "--run", first.header.id)
    assert "2 repeats each, 1 launch" in line and LEFT_OUT not in out
    rows = report_of(twice[1], capsys, "--list")[1].splitlines()
    assert [row.split()[0] for row in rows[-2:]] == [first.header.id, second.header.id] and "opt-125m" in rows[-1]


def test_the_claims_parameters_and_the_plan_are_kept(plain):
    [run] = runs_of(plain.archive())
    session = plain.archive().sessions[0]
    assert isinstance(run, RecordedRun) and len(session.claims["rows"]) == len(ROWS)
    [planned] = session.plan["sweeps"].values()
    assert planned == {"model": "opt-125m", "concurrencies": [1, 2, 4, 8, 16], "skipped": []}


def test_a_place_that_cannot_be_written_and_what_is_no_archive_stay_as_they_are(small, pytester):
    (pytester.path / "notes.txt").write_text("dear diary\n")
    assert "notes.txt/r.jsonl" in usage_error(small("--slm-records=notes.txt/r.jsonl"))
    assert "notes.txt" in usage_error(small("--slm-records=notes.txt"))
    assert (pytester.path / "notes.txt").read_text() == "dear diary\n"


# How much of the report


def ours(result):
    """Lines between the section of the run and the next one."""
    lines = result.stdout.lines
    begin = next(number for number, line in enumerate(lines) if line.strip("= ") == "slmserve") + 1
    end = next(number for number, line in enumerate(lines) if number > begin and line.startswith("==="))
    return lines[begin:end]


def detail(result):
    text = result.stdout.str()
    assert "opt-125m  from " in text, "the screen comes in any case"
    if "opt-125m on a SIMULATED ENGINE" not in text:
        return "summary"
    return "tables" if "not shown:" in text else "all"


@pytest.mark.parametrize(
    ("variable", "words", "wanted"),
    [
        ("", "", "summary"),
        ("", "--slm-report=all", "all"),
        ("", "-v", "tables"),
        ("", "-vv", "all"),
        ("", "-v --slm-report=summary", "summary"),
        ("", "-q --slm-report=tables", "tables"),
        ("tables", "", "tables"),
        ("tables", "-q", "summary"),
        ("tables", "-vv", "all"),
    ],
)
def test_pytests_switches_come_before_the_environment_and_an_option_before_both(
    small, monkeypatch, variable, words, wanted
):
    if variable:
        monkeypatch.setenv("SLM_REPORT", variable)
    result = small(*words.split())
    assert detail(result) == wanted
    if not words and not variable:
        lines = ours(result)
        assert len(lines) <= MOST_LINES and max(map(len, lines)) <= 80 and "--slm-report=tables" in lines[-1]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_what_fits_is_what_the_terminal_has_room_for(small, width):
    lines = ours(small(TWO, "--slm-report=tables", width=width))
    assert max(map(len, lines)) <= width
    assert any(line.startswith("not shown: ") for line in lines) == (width < 120)


@pytest.mark.parametrize("words", ["--slm-sweep=adaptive", "--slm-plan --slm-ray=local:2"], ids=["run", "plan"])
def test_nothing_that_a_run_says_is_wider_than_the_terminal(small, monkeypatch, words):
    monkeypatch.setattr(progress, "LEAST_S", 0.0)  # lines of a log on what took no time
    monkeypatch.setattr(session_hooks, "LONG_S", 0.0)
    text = small(*words.split(), "--slm-resume").stdout.str()
    said = text[text.index("slmserve: ") :]
    assert "case 1 of 5" in said or "spread by engine" in said
    wide = [line for line in said.splitlines() if len(line) > 80]
    assert [line for line in wide if not line.startswith(("plugins: ", "rootdir: "))] == [], "but for those of others"


@pytest.mark.parametrize(("words", "there"), [(("-v",), False), (("--slm-report=all",), True)])
def test_pytest_benchmarks_table_is_there_where_all_is_wanted_and_for_a_users_own(pytester, words, there):
    pytest.importorskip("pytest_benchmark")
    pytester.makepyfile(test_points=SWEEP, test_own="def test_own(benchmark): benchmark(sum, range(9))\n")
    text = pytester.runpytest_inprocess(*FEW[:-1], TWO, *words, ".", "-p", "no:cacheprovider").stdout.str()
    assert "Name (time in " in text and "test_own " in text and ("per request: opt-125m': 2 tests" in text) == there
    assert text.rindex("= slmserve =") > text.find("Name (time in"), "what a person wants to know comes last"


# Exports and goodput


@pytest.fixture
def exported(runs):
    return runs(SWEEP, *FEW, TWO, "--slm-window=5", "--slm-export=vllm-bench=results/", "--slm-goodput=ttft:1s")


def test_a_folder_gets_a_file_of_each_measurement(exported):
    paths = sorted((exported.folder / "results").iterdir())
    told = {result["record_id"]: result for path in paths for result in [json.loads(path.read_text("utf-8"))]}
    measured = {m.id: m for m in exported.measured()}
    assert told.keys() == measured.keys() and len(paths) == 4, "two repeats of two loads"
    for name, result in told.items():
        assert result["max_concurrency"] == measured[name].load.concurrency
        assert result["output_throughput"] == pytest.approx(output_tokens_per_s(measured[name].run))
        assert result["request_goodput"] > 0 and result["valid"] and result["backend"] == "engine"
    assert all(path.name.startswith("engine-infqps-concurrency") for path in paths)


def test_a_file_gets_an_object_a_line_that_judge_reads(runs):
    ran = runs(SWEEP, *FEW, TWO, "--slm-export=vllm-bench=all.json")
    points = external.external_curve(external.read_results(ran.folder / "all.json"), COLUMNS).points
    assert [(point.concurrency, len(point.repeats)) for point in points] == [(1, 2), (16, 2)]


@pytest.mark.parametrize(
    ("word", "fact"),
    [("--slm-export=csv=x", "csv=x"), ("--slm-export=vllm-bench=", "vllm-bench="), ("--slm-goodput=ttft:5", "ttft:5"),
     ("--slm-goodput=itl:9ms", "tpot")],
    ids=["kind", "nowhere", "unit", "figure"],
)  # fmt: skip
def test_other_words_of_exports_and_goodput_are_refused(small, word, fact):
    assert fact in usage_error(small(word))


def test_what_cannot_be_written_costs_no_record(small, archive, pytester):
    (pytester.path / "taken").write_text("a file")
    for number, word in enumerate(("--slm-export=vllm-bench=taken", "--slm-html=taken/out.html")):
        records = f"--slm-records={number}.jsonl"
        assert "cannot write taken" in small(word, TWO, records, width=400).stdout.str()
        assert {m.load.concurrency for m in archive(f"{number}.jsonl").measurements} == {1, 16}


SLO = "ttft:1s,tpot:4ms"


def goodput_table(text):
    """Rows below "good: SLO", as words."""
    lines = text[text.index(f"good: {SLO}") :].splitlines()
    end = next(i for i, line in enumerate(lines) if "most goodput" in line)
    return [line.split() for line in lines[4:end]]


def test_attainment_and_goodput_are_those_of_each_point_in_run_and_report(runs, plain, capsys):
    ran = runs(SWEEP, *FEW, f"--slm-goodput={SLO}")
    rows = goodput_table(ran.out)
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16"]
    for row in rows:
        found = goodput_of(parse_slo(SLO), *((m,) for m in ran.measured() if m.load.concurrency == int(row[0])))
        assert row[1] == f"{found.requests:,}" and row[3] == f"{100 * found.attainment:.1f}" and row[-1] == "0"
    assert rows[0][3] == "100.0" and float(rows[-1][3]) < 50, "steps of 16 take some 8 ms"
    assert goodput_table(report_of(ran, capsys, "--goodput", SLO)[1]) == rows
    assert "most tokens/s" in plain.out and "most goodput" not in plain.out


# A plan


def test_a_plan_runs_nothing_and_has_items_engine_by_engine_with_claims_last(runs):
    ran = runs(SWEEP, "--slm-simulate", "--slm-plan", "--slm-models=opt-125m,opt-350m", "--slm-concurrency=1,2")
    assert ran.ret == 0 and not (ran.folder / ".slm").exists() and " passed" not in ran.out
    each = ["start {0} *", "test_point?{0}-1? (*", "test_point?{0}-2? (*", "test_plateau?{0}? (*"]
    lines = [f"*{line.format(model)}" for model in ("opt-125m", "opt-350m") for line in each]
    ran.lines.fnmatch_lines([*lines, "*end: 6 items"], consecutive=True)


def test_what_an_archive_answers_costs_nothing(plain, runs):
    plan = runs.anew(SWEEP, *FEW, "--slm-plan", "--slm-resume", folder=plain.folder)
    plan.lines.fnmatch_lines(["*test_point?opt-125m-16? (measures nothing)"])
    assert " start " not in plan.out, "no engine"


# Strict, and what is inconclusive


KNOWN = """
    import pytest

    @pytest.mark.slm(claim="table-1-batch-fits", models=("opt-1.3b", "opt-2.7b"))
    def test_fits(slm_claim):
        assert slm_claim()
"""


def test_a_claim_known_to_fail_is_an_expected_failure_with_its_evidence_unless_strict(runs):
    usual, strict = runs(KNOWN, "--slm-simulate", "-rx"), runs(KNOWN, "--slm-simulate", "--slm-strict")
    assert (usual.ret, usual.counts) == (0, {"passed": 1, "xfailed": 1})
    usual.lines.fnmatch_lines(["*XFAIL*opt-1.3b*238 requests*256*"])
    assert (strict.ret, strict.counts) == (1, {"passed": 1, "failed": 1})


EITHER_WAY = """
    import pytest

    @pytest.mark.slm(claim="marginal-after-128", models=["opt-1.3b"])
    def test_little(slm_claim): assert slm_claim()

    def test_point(slm_point): assert slm_point.measure()
"""


@pytest.mark.parametrize("gain", [1.05, 1.5])
def test_what_may_go_either_way_is_no_failure_and_strict_judges_it(runs, gain):
    """Throughput from concurrency 128 to 256 of a simulated engine whose law is told: 2 (128 + b)/(256 + b)."""
    b_half = (gain - 1) * 256 / (2 - gain)
    law = ("--slm-engine-arg=t_inf=10000.0", f"--slm-engine-arg=b_half={b_half}", "--slm-concurrency=64,128,256")
    words = ("--slm-simulate", "--slm-models=opt-1.3b", "--slm-budget=0", *law)
    assert runs(EITHER_WAY, *words).ret == 0
    assert runs(EITHER_WAY, *words, "--slm-strict").ret == (0 if gain < 1.1 else 1)


def test_what_is_inconclusive_is_shown_and_may_be_allowed_and_a_failure_stays_one(runs):
    once = "--slm-repeats=1"
    allowed = runs(SWEEP, *FEW, once, "--slm-allow-inconclusive")
    assert (allowed.ret, runs(SWEEP, *FEW, once).ret) == (0, 10)
    allowed.lines.fnmatch_lines(["*inconclusive*--slm-resume*--slm-repeats 2*", "*5 passed, 1 inconclusive*"])
    assert runs(SWEEP, *FEW, "--slm-allow-inconclusive", "--slm-engine-arg=b_half=300").ret == 1


# The page


def page(folder):
    return Page((folder / "out.html").read_text("utf-8"))


@PAGES
def test_the_page_has_the_runs_status_verdicts_and_records(runs):
    ran = runs(SWEEP, *FEW, "--slm-html=out.html")
    seen = page(ran.folder)
    assert f"Exit status {int(ran.ret)}" in seen.text and "out.html" in ran.out
    assert "throughput-plateau" in seen.text and "Points of opt-125m" in seen.tables
    assert read(ran.folder / "out.html").measurements == ran.measured()


@PAGES
def test_while_the_run_goes_on_the_page_says_how_far_it_is(runs):
    source = """
        from pathlib import Path

        def test_point(slm_point):
            page = Path("out.html")
            if page.exists():
                text = page.read_text("utf-8")
                assert "1 of 2 tests have ended" in text and "Exit status" not in text
                Path("seen").touch()
            assert slm_point.measure()
        """
    ran = runs.anew(source, *FEW, TWO, "--slm-html=out.html")
    assert ran.counts == {"passed": 2} and (ran.folder / "seen").exists()
    assert "Exit status 0" in page(ran.folder).text and len(read(ran.folder / "out.html").measurements) == 4


@PAGES
def test_without_jinja2_and_over_a_file_that_is_no_page_it_is_refused(small, pytester, archive, monkeypatch):
    small("--slm-records=r.jsonl", TWO)
    before = (pytester.path / "r.jsonl").read_bytes()
    assert "r.jsonl" in usage_error(small("--slm-records=r.jsonl", "--slm-html=r.jsonl"))
    assert (pytester.path / "r.jsonl").read_bytes() == before
    assert "new.jsonl" in small("--slm-records=new.jsonl", "--slm-html=new.jsonl", TWO, width=400).stdout.str()
    assert len(archive("new.jsonl").measurements) == 4
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "Jinja2" in usage_error(small("--slm-html=out.html"))


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
def test_what_failed_or_stayed_inconclusive_is_named_on_the_page_and_in_the_step_summary(runs, monkeypatch, tmp_path):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    ran = runs.anew(FAILS, *FEW, "--slm-html=out.html")
    seen, summary = page(ran.folder), " ".join((tmp_path / "summary.md").read_text("utf-8").split())
    assert ran.ret == 1 and ran.counts == {"failed": 3, "inconclusive": 1}
    for name, told in (
        ("objective", "AssertionError: <b>first</b>\\x1b token"),
        ("engine", "EngineFailed: the simulated engine died at concurrency 8"),
        ("early", "RuntimeError"),
        ("mine", "<inconclusive: throughput-plateau"),
    ):
        told = f"::test_{name}: {told}"
        assert told in seen.text and told in summary
