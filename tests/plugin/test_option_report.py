"""--slm-report chooses how much is printed at the end of a run; so do pytest's own -v and -q."""

import pytest
from inside import SWEEP, usage_error

from pytest_slmserve.plugin import estimates, progress
from pytest_slmserve.report.screen import MOST_LINES

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
    [((), "slmserve: case 1 of 5, opt-125m at 1"), (("--slm-plan", "--slm-plan-gpus=2"), "spread by engine")],
)
def test_nothing_that_a_run_says_is_wider_than_the_terminal(run, monkeypatch, words, among):
    monkeypatch.setattr(progress, "LEAST_S", 0.0)  # lines of a log on what took no time
    monkeypatch.setattr(estimates, "LONG_S", 0.0)
    text = run(*words, "--slm-sweep=adaptive", "--slm-resume").stdout.str()
    said = text[text.index("slmserve: ") :]
    assert "; set: simulate (command line)" in said and among in said
    wide = [line for line in said.splitlines() if len(line) > 80]
    assert [line for line in wide if not line.startswith(("plugins: ", "rootdir: "))] == [], "but for pytest's own"


def test_other_words_are_refused(run):
    assert "--slm-report" in usage_error(run("--slm-report=short"))


# pytest-benchmark's table, which is wide, and whose times are of requests

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
