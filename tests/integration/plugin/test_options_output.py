"""Options of what a run writes and prints."""

from __future__ import annotations

import gzip
import importlib.util
import json

import pytest
from inside import SWEEP, usage_error

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.claims.table import ROWS
from pytest_slmserve.analysis.metrics.window import goodput_of, output_tokens_per_s, parse_slo
from pytest_slmserve.archive import external
from pytest_slmserve.archive.store import LEFT_OUT, runs_of
from pytest_slmserve.plugin import progress, session_hooks
from pytest_slmserve.report.screen import MOST_LINES

# records


def test_by_default_it_lies_under_dot_slm_which_git_ignores(pytester, stand_in_here):
    pytester.makepyfile("def test_point(slm_point): assert slm_point.measure()")
    short = ("--slm-concurrency=2", "--slm-window=0.2", "--slm-repeats=1", "--slm-input-len=16", "--slm-output-len=8")
    pytester.runpytest_inprocess("--slm-cpu", "--slm-telemetry=off", *short, stand_in_here, "-p", "no:cacheprovider")
    assert (pytester.path / ".slm/records.jsonl").is_file()
    assert (pytester.path / ".slm/.gitignore").read_text("utf-8") == "*\n"


def test_records_of_a_simulated_run_are_not_kept_unless_a_place_is_named(sweep, pytester, tmp_path, monkeypatch):
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    result = sweep()
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(
        ["*records: not kept*", "note: records of a simulated run are not kept; --slm-records=FILE keeps them"]
    )
    assert not (pytester.path / ".slm").exists() and not [*(tmp_path / "temp").glob("slmserve-*")]
    if importlib.util.find_spec("jinja2"):
        paged = sweep("--slm-html=out.html", "--slm-report=summary").outlines
        assert "more: slmserve report out.html" in paged, "the page holds them, and no path is named that goes"
    named = sweep("--slm-records=.slm/records.jsonl")
    assert (pytester.path / ".slm/records.jsonl").is_file() and "not kept" not in named.stdout.str()


def test_a_simulated_run_that_is_to_be_resumed_keeps_them(sweep, pytester):
    assert "not kept" not in sweep("--slm-resume").stdout.str()
    sweep("--slm-resume").stdout.fnmatch_lines(["10 measurements were reused from .slm/records.jsonl*"])


def test_the_suffix_gz_compresses(sweep, pytester, archive):
    sweep("--slm-records=deep/down/r.jsonl.gz")
    lines = gzip.decompress((pytester.path / "deep/down/r.jsonl.gz").read_bytes()).splitlines()
    assert json.loads(lines[0])["kind"] == "session"
    assert len(archive("deep/down/r.jsonl.gz").measurements) == 10


def test_runs_are_appended(sweep, archive):
    sweep()
    sweep()
    assert len(archive().measurements) == 20
    assert len(archive().sessions) == 2


def test_a_second_run_is_not_pooled_with_the_first(sweep, archive, pytester, capsys):
    """A run says nothing of another, and the report of the archive says what the last run said."""
    sweep()
    text = sweep().stdout.str()
    first, second = runs_of(archive())
    assert first.header.id != second.header.id and len(first.measurements) == len(second.measurements) == 10
    path = str(pytester.path / ".slm/records.jsonl")

    def measured(*words):
        capsys.readouterr()
        main(["report", path, *words])
        out = capsys.readouterr().out
        return next(line for line in out.splitlines() if "measured: " in line), out

    line, out = measured()
    assert line in text and "2 repeats each, 1 launch" in line and LEFT_OUT in out
    assert "4 repeats each, 2 launches" in measured("--run", "all")[0]
    line, out = measured("--run", first.header.id)
    assert "2 repeats each, 1 launch" in line and LEFT_OUT not in out
    main(["report", path, "--list"])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[-2:]] == [first.header.id, second.header.id] and "opt-125m" in rows[-1]


def test_the_claims_parameters_and_the_plan_are_kept(sweep, archive):
    sweep()
    session = archive().sessions[0]
    assert len(session.claims["rows"]) == len(ROWS)
    [planned] = session.plan["sweeps"].values()
    assert planned == {"model": "opt-125m", "concurrencies": [1, 16, 64, 128, 256], "skipped": []}


def test_a_place_that_cannot_be_written_is_an_error_before_anything_is_measured(sweep, pytester):
    (pytester.path / "file").write_text("")
    assert "file/r.jsonl" in usage_error(sweep("--slm-records=file/r.jsonl"))


def test_something_else_is_not_appended_to(sweep, pytester):
    (pytester.path / "notes.txt").write_text("dear diary\n")
    usage_error(sweep("--slm-records=notes.txt"))
    assert (pytester.path / "notes.txt").read_text() == "dear diary\n"


# report


ONE_MODEL = ("--slm-simulate", "--slm-models=opt-125m", "--slm-concurrency=1,16,64,128,256", "--slm-window=1")


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs a small sweep at 80 columns: `run("-v")`."""
    monkeypatch.setenv("COLUMNS", "80")
    pytester.makepyfile(SWEEP)
    return lambda *args: pytester.runpytest_inprocess(*ONE_MODEL, *args, "-p", "no:cacheprovider")


def ours(result):
    """Lines between the section of the run and the next one."""
    lines = result.stdout.lines
    begin = next(number for number, line in enumerate(lines) if line.strip("= ") == "slmserve") + 1
    end = next(number for number, line in enumerate(lines) if number > begin and line.startswith("==="))
    return lines[begin:end]


def detail(result):
    text = result.stdout.str()
    if "opt-125m on a SIMULATED ENGINE" not in text:
        return "summary"
    return "tables" if "not shown:" in text else "all"


def test_by_default_it_is_one_screen(run):
    lines = ours(run())
    assert len(lines) <= MOST_LINES and max(map(len, lines)) <= 80
    assert lines[0].startswith("SIMULATED ENGINE") and lines[4].startswith("opt-125m  from 64")
    assert lines[-1] == "more: -v, or --slm-report=tables"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), "summary"),
        (("--slm-report=tables",), "tables"),
        (("--slm-report=all",), "all"),
        (("-v",), "tables"),
        (("-vv",), "all"),
        (("-q",), "summary"),
        (("-v", "--slm-report=summary"), "summary"),
        (("-q", "--slm-report=tables"), "tables"),
    ],
)
def test_the_command_line_chooses(run, words, wanted):
    result = run(*words)
    assert detail(result) == wanted
    assert "opt-125m  from 64" in result.stdout.str(), "the screen comes in any case"


@pytest.mark.parametrize(("words", "wanted"), [((), "tables"), (("-q",), "summary"), (("-vv",), "all")])
def test_pytests_own_switches_come_before_the_environment(run, monkeypatch, words, wanted):
    monkeypatch.setenv("SLM_REPORT", "tables")
    assert detail(run(*words)) == wanted


def test_what_fits_is_what_the_terminal_has_room_for(run, monkeypatch):
    for width in (80, 100, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = ours(run("--slm-report=tables"))
        assert max(map(len, lines)) <= width
        assert any(line.startswith("not shown: ") for line in lines) == (width < 120)


@pytest.mark.parametrize(
    ("words", "among"),
    [
        (("--slm-sweep=adaptive",), "slmserve: case 1 of 5, opt-125m at 1"),
        (("--slm-plan", "--slm-ray=local:2"), "spread by engine"),
    ],
)
def test_nothing_that_a_run_says_is_wider_than_the_terminal(run, monkeypatch, words, among):
    monkeypatch.setattr(progress, "LEAST_S", 0.0)  # lines of a log on what took no time
    monkeypatch.setattr(session_hooks, "LONG_S", 0.0)
    text = run(*words, "--slm-resume").stdout.str()
    said = text[text.index("slmserve: ") :]
    assert "; set: simulate (command line)" in " ".join(said.split()) and among in said
    wide = [line for line in said.splitlines() if len(line) > 80]
    assert [line for line in wide if not line.startswith(("plugins: ", "rootdir: ", "benchmark: "))] == [], (
        "but for those of others"
    )


TABLE = "Name (time in ms)"


@pytest.mark.parametrize(("words", "there"), [((), False), (("-v",), False), (("--slm-report=all",), True)])
def test_pytest_benchmarks_table_is_there_where_all_is_wanted(run, words, there):
    pytest.importorskip("pytest_benchmark")
    text = run(*words).stdout.str()
    assert (TABLE in text) == ("benchmark 's per request: opt-125m': 5 tests" in text) == there
    assert text.rindex("= slmserve =") > text.find(TABLE), "what a person wants to know comes last"


def test_a_benchmark_of_the_users_own_is_shown_as_ever(run, pytester):
    pytest.importorskip("pytest_benchmark")
    pytester.makepyfile(test_own="def test_own(benchmark):\n    benchmark(sum, range(9))\n")
    result = run(f"{pytester.path}")
    result.stdout.fnmatch_lines(["*benchmark: 1 tests*", "Name (time in *", "test_own *"])
    assert "test_point[" not in result.stdout.str()


# export


COLUMNS = external.Columns(knob="max_concurrency", throughput="output_throughput", latency="mean_e2el_ms")


def test_a_folder_gets_a_file_of_each_measurement(sweep, archive, pytester):
    sweep("--slm-export=vllm-bench=results/", "--slm-goodput=ttft:1s", "--slm-concurrency=1,16")
    paths = sorted((pytester.path / "results").iterdir())
    told = {result["record_id"]: result for path in paths for result in [json.loads(path.read_text("utf-8"))]}
    measured = {m.id: m for m in archive().measurements}
    assert told.keys() == measured.keys() and len(paths) == 4, "two repeats of two loads"
    for name, result in told.items():
        assert result["max_concurrency"] == measured[name].load.concurrency
        assert result["output_throughput"] == pytest.approx(output_tokens_per_s(measured[name].run))
        assert result["request_goodput"] > 0 and result["valid"] and result["backend"] == "engine"
    assert all(path.name.startswith("engine-infqps-concurrency") for path in paths)


def test_a_file_gets_an_object_a_line_that_judge_reads(sweep, pytester):
    sweep("--slm-export=vllm-bench=all.json", "--slm-concurrency=1,16")
    points = external.external_curve(external.read_results(pytester.path / "all.json"), COLUMNS).points
    assert [(point.concurrency, len(point.repeats)) for point in points] == [(1, 2), (16, 2)]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--slm-export=results/", "is no export"),
        ("--slm-export=csv=x", "is no export"),
        ("--slm-export=vllm-bench=", "is no export"),
        ("--slm-goodput=fast", "'fast' is no SLO"),
        ("--slm-goodput=ttft:5", "has no unit"),
        ("--slm-goodput=itl:9ms", "not request by request"),
    ],
)
def test_other_words_are_refused(sweep, word, said):
    assert said in usage_error(sweep(word))


def test_what_cannot_be_written_costs_no_record(sweep, archive, pytester):
    (pytester.path / "taken").write_text("a file")
    result = sweep("--slm-export=vllm-bench=taken", "--slm-concurrency=1")
    assert "cannot write taken" in result.stdout.str()
    assert len(archive().measurements) >= 1


# goodput


SLO = "ttft:1s,tpot:4ms"


def table(text):
    """Rows below "good: SLO", as words, and what follows them."""
    lines = text[text.index(f"good: {SLO}") :].splitlines()
    end = next(i for i, line in enumerate(lines) if "most goodput" in line)
    return [line.split() for line in lines[4:end]], lines[end:]


def test_attainment_and_goodput_of_each_point(sweep, archive):
    text = sweep(f"--slm-goodput={SLO}").stdout.str()
    rows, further = table(text)
    assert [row[0] for row in rows] == ["1", "16", "64", "128", "256"]
    measurements = archive().measurements
    for row in rows:
        found = goodput_of(parse_slo(SLO), *((m,) for m in measurements if m.load.concurrency == int(row[0])))
        assert row[1] == f"{found.requests:,}" and row[3] == f"{100 * found.attainment:.1f}" and row[-1] == "0"
    assert rows[0][3] == "100.0" and float(rows[-1][3]) < 50, "steps of 256 take some 6 ms"
    assert "concurrent requests" in further[0] and "90 % of the requests are good up to" in further[1]


def test_report_says_the_same_of_the_archive(sweep, pytester, capsys, kept):
    live = sweep(f"--slm-goodput={SLO}").stdout.str()
    capsys.readouterr()
    main(["report", str(pytester.path / ".slm/records.jsonl"), "--goodput", SLO])
    assert table(capsys.readouterr().out)[0] == table(live)[0]


def test_without_it_nothing_is_said_of_goodput(sweep):
    text = sweep().stdout.str()
    assert "most tokens/s" in text and "most goodput" not in text


# plan


def test_nothing_runs(sweep, pytester):
    result = sweep("--slm-plan")
    assert result.ret == 0
    assert not (pytester.path / ".slm").exists()
    assert not any("passed" in line for line in result.outlines)


def test_items_stand_in_order_engine_by_engine_with_claims_last(pytester):
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess(
        "--slm-simulate", "--slm-plan", "--slm-models=opt-125m,opt-350m", "--slm-concurrency=1,2"
    )
    result.stdout.fnmatch_lines(
        [
            "*0:00  start opt-125m (simulated, 0 s)",
            "*test_point?opt-125m-1? (* s)",
            "*test_point?opt-125m-2? (* s)",
            "*test_plateau?opt-125m? (measures nothing)",
            "*start opt-350m (simulated, 0 s)",
            "*test_point?opt-350m-1? (* s)",
            "*test_point?opt-350m-2? (* s)",
            "*test_plateau?opt-350m? (measures nothing)",
            "*end: 6 items",
        ],
        consecutive=True,
    )


def test_what_an_archive_answers_costs_nothing(sweep, kept):
    sweep()
    result = sweep("--slm-plan", "--slm-resume")
    result.stdout.fnmatch_lines(["*test_point?opt-125m-256? (measures nothing)"])
    assert " start " not in result.stdout.str(), "no engine"


# strict


TABLE_STRICT = """
    import pytest

    @pytest.mark.slm(claim="table-1-batch-fits", models=("opt-1.3b", "opt-2.7b"))
    def test_fits(slm_claim):
        assert slm_claim()
"""


@pytest.fixture
def table_strict(pytester):
    pytester.makepyfile(TABLE_STRICT)
    return lambda *args: pytester.runpytest_inprocess("--slm-simulate", *args)


def test_a_claim_known_to_fail_is_an_expected_failure_with_its_evidence(table_strict):
    result = table_strict("-rx")
    assert result.ret == 0
    result.assert_outcomes(passed=1, xfailed=1)
    result.stdout.fnmatch_lines(["*XFAIL*opt-1.3b*238 requests*the paper has 256*"])


def test_strict_makes_it_fail(table_strict):
    result = table_strict("--slm-strict")
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=1)


@pytest.mark.parametrize("gain", [1.05, 1.5])
def test_what_may_go_either_way_is_no_failure_and_strict_judges_it(pytester, gain):
    """Throughput from concurrency 128 to 256 of a simulated engine whose law is told."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.slm(claim="marginal-after-128", models=["opt-1.3b"])
        def test_little(slm_claim):
            assert slm_claim()

        def test_point(slm_point):
            assert slm_point.measure()
        """
    )
    # T(256)/T(128) = 2 (128 + b)/(256 + b)
    b_half = (gain - 1) * 256 / (2 - gain)
    law = ("--slm-engine-arg=t_inf=10000.0", f"--slm-engine-arg=b_half={b_half}", "--slm-concurrency=64,128,256")
    words = ("--slm-simulate", "--slm-models=opt-1.3b", "--slm-budget=0", *law)
    assert pytester.runpytest_inprocess(*words, "--slm-records=a.jsonl").ret == 0
    strict = pytester.runpytest_inprocess(*words, "--slm-records=b.jsonl", "--slm-strict")
    assert strict.ret == (0 if gain < 1.1 else 1)


# allow_inconclusive


INCONCLUSIVE = "--slm-repeats=1"


def test_what_is_inconclusive_is_shown_and_makes_the_run_no_failure(sweep):
    result = sweep("--slm-allow-inconclusive", INCONCLUSIVE)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["  inconclusive: --slm-simulate --slm-resume --slm-repeats 2 tells the noise: *", "*5 passed, 1 inconclusive*"]
    )


def test_a_failure_stays_one(sweep):
    assert sweep("--slm-allow-inconclusive", "--slm-engine-arg=b_half=300").ret == 1


def test_without_it_what_is_inconclusive_has_a_status_of_its_own(sweep):
    assert sweep(INCONCLUSIVE).ret == 10
