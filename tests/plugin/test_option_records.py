"""--slm-records names the archive that every measurement is appended to."""

import gzip
import json

from inside import usage_error

from pytest_slmserve.analysis.claims.table import ROWS


def test_by_default_it_lies_under_dot_slm(sweep, pytester):
    sweep()
    assert (pytester.path / ".slm/records.jsonl").is_file()


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


def test_the_claims_parameters_and_the_plan_are_kept(sweep, archive):
    sweep()
    session = archive().sessions[0]
    assert len(session.claims["rows"]) == len(ROWS)
    [planned] = session.plan["sweeps"].values()
    assert planned == {"model": "opt-125m", "concurrencies": [1, 16, 64, 128, 256], "cut": []}


def test_a_place_that_cannot_be_written_is_an_error_before_anything_is_measured(sweep, pytester):
    (pytester.path / "file").write_text("")
    assert "file/r.jsonl" in usage_error(sweep("--slm-records=file/r.jsonl"))


def test_something_else_is_not_appended_to(sweep, pytester):
    (pytester.path / "notes.txt").write_text("dear diary\n")
    usage_error(sweep("--slm-records=notes.txt"))
    assert (pytester.path / "notes.txt").read_text() == "dear diary\n"
