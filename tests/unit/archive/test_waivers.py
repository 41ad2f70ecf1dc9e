"""Waivers of a file are those that were written to it, and what is none is refused with its row and its field."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import date

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

from pytest_slmserve.analysis.gate.diagnosis import Waiver
from pytest_slmserve.archive.baselines import read_waivers

UNTIL = date(2027, 1, 31)


WAIVER = Waiver("requests_per_s", "opt-1.3b", "H200", "Ada", "slower attention kernel, fixed upstream", UNTIL)


ROW = {**asdict(WAIVER), "until": "2027-01-31"}


WORDS = st.text("abc xyz-.*0", min_size=1, max_size=8).filter(str.strip).map(str.strip)


def read(tmp_path, rows: object):
    path = tmp_path / "waivers.json"
    path.write_text(json.dumps(rows), "utf-8")
    return read_waivers(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(waivers=st.lists(st.builds(Waiver, *[WORDS] * 5, st.dates()), max_size=4))
def test_waivers_are_read_as_they_were_written(tmp_path, waivers):
    assert read(tmp_path, [{**asdict(w), "until": w.until.isoformat()} for w in waivers]) == tuple(waivers)


def test_the_model_of_a_waiver_has_its_short_name(tmp_path):
    assert read(tmp_path, [ROW, {**ROW, "model": "facebook/opt-125m"}]) == (WAIVER, replace(WAIVER, model="opt-125m"))


@pytest.mark.parametrize("name", ROW)
@pytest.mark.parametrize(("value", "told"), [("", "empty"), (" ", "empty"), (3, "int 3"), (None, "None")])
def test_a_field_that_is_no_text_is_named(tmp_path, name, value, told):
    with refused("waivers.json", "row 1", name, told):
        read(tmp_path, [{**ROW, name: value}])


@pytest.mark.parametrize("name", ROW)
def test_a_field_that_is_missing_is_named(tmp_path, name):
    with refused("waivers.json", "row 2", name):
        read(tmp_path, [ROW, {k: v for k, v in ROW.items() if k != name}])


@pytest.mark.parametrize("day", ["2027-02-30", "20270131", "2027-W04-7", "31.1.2027", "never", "2027-1-3"])
def test_what_is_no_day_is_named(tmp_path, day):
    with refused("waivers.json", "row 1", "until", day):
        read(tmp_path, [{**ROW, "until": day}])


@pytest.mark.parametrize(
    ("rows", "facts"),
    [
        *(([row], ("row 1", f"{kind} {row!r}")) for row, kind in (("a", "str"), (7, "int"), ([], "list"))),
        *((rows, ("list",)) for rows in ({}, {"waivers": []}, None, "[]")),
        ([{**ROW, "untill": "2030-01-01"}], ("row 1", "untill")),
    ],
)
def test_what_is_no_waiver_is_named_with_its_row(tmp_path, rows, facts):
    with refused("waivers.json", *facts):
        read(tmp_path, rows)


@pytest.mark.parametrize(
    ("content", "told"), [(b"[\n{]", "line 2"), (b"", "line 1"), (b"\xff\xfe", ""), (b"[" * 10**6, ""), (None, "")]
)
def test_a_file_that_is_no_json_or_not_there_is_named(tmp_path, content, told):
    path = tmp_path / "waivers.json"
    if content is not None:
        path.write_bytes(content)
    with refused(path, told):
        read_waivers(path)
