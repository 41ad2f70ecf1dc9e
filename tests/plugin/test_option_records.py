"""--slm-records names the archive that every measurement is appended to."""

import gzip
import importlib.util
import json

from inside import usage_error

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.claims.table import ROWS
from pytest_slmserve.archive.store import LEFT_OUT, runs_of


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


def test_a_name_that_a_gate_writes_is_refused(sweep, pytester):
    for name in ("gate.json", "gate.md", "calibration.json"):
        assert f"a gate writes {name} beside its records" in usage_error(sweep(f"--slm-records=out/{name}"))
    assert not (pytester.path / "out").exists()


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
    assert first.id != second.id and len(first.measurements) == len(second.measurements) == 10
    path = str(pytester.path / ".slm/records.jsonl")

    def measured(*words):
        capsys.readouterr()
        main(["report", path, *words])
        out = capsys.readouterr().out
        return next(line for line in out.splitlines() if "measured: " in line), out

    line, out = measured()
    assert line in text and "2 repeats each, 1 launch" in line and LEFT_OUT in out
    assert "4 repeats each, 2 launches" in measured("--run", "all")[0]
    line, out = measured("--run", first.id)
    assert "2 repeats each, 1 launch" in line and LEFT_OUT not in out
    main(["report", path, "--list"])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[-2:]] == [first.id, second.id] and "opt-125m" in rows[-1]


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
