from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import date, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_slmserve.analysis.gate.diagnosis import Waiver, explained, waiver_for
from pytest_slmserve.archive.baselines import read_waivers
from pytest_slmserve.schema.errors import BadUsage

UNTIL = date(2027, 1, 31)
WAIVER = Waiver("requests_per_s", "opt-1.3b", "H200", "Ada", "slower attention kernel, fixed upstream", UNTIL)
ROW = {**asdict(WAIVER), "until": "2027-01-31"}
WORDS = st.text("abc xyz-.*0", min_size=1, max_size=8).filter(str.strip).map(str.strip)


def read(tmp_path, rows: object):
    path = tmp_path / "waivers.json"
    path.write_text(json.dumps(rows), "utf-8")
    return read_waivers(path)


def complaint(tmp_path, rows: object) -> str:
    with pytest.raises(BadUsage) as caught:
        read(tmp_path, rows)
    assert caught.value.hint
    return caught.value.problem.removeprefix(f"{tmp_path}/")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(waivers=st.lists(st.builds(Waiver, *[WORDS] * 5, st.dates()), max_size=4))
def test_waivers_are_read_as_they_were_written(tmp_path, waivers):
    assert read(tmp_path, [{**asdict(w), "until": w.until.isoformat()} for w in waivers]) == tuple(waivers)


def test_the_model_of_a_waiver_has_its_short_name(tmp_path):
    assert read(tmp_path, [ROW, {**ROW, "model": "facebook/opt-125m"}]) == (WAIVER, replace(WAIVER, model="opt-125m"))


@pytest.mark.parametrize("name", ROW)
@pytest.mark.parametrize(
    ("value", "said"), [("", "empty"), (" ", "empty"), (3, "the int 3"), (None, "the NoneType None")]
)
def test_a_field_that_is_no_text_is_named(tmp_path, name, value, said):
    assert complaint(tmp_path, [{**ROW, name: value}]) == f"waivers.json, row 1: {name} is {said}, not a text"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        *(([ROW, {k: v for k, v in ROW.items() if k != name}], f", row 2 has no {name}") for name in ROW),
        *(
            ([row], f", row 1 is the {kind}, not a waiver")
            for row, kind in (("a", "str 'a'"), (7, "int 7"), ([], "list []"))
        ),
        *(
            ([{**ROW, "until": day}], f", row 1: until is {day!r}, not a day")
            for day in ("2027-02-30", "20270131", "2027-W04-7", "31.1.2027", "never", "2027-1-3")
        ),
        *((rows, " holds no list of waivers") for rows in ({}, {"waivers": []}, None, "[]")),
        ([{**ROW, "untill": "2030-01-01"}], ", row 1 has the unknown field 'untill'"),
    ],
)
def test_what_is_no_waiver_is_named_with_its_row(tmp_path, rows, said):
    assert complaint(tmp_path, rows) == f"waivers.json{said}"


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"[\n{]", "line 2: no JSON"), (b"", "line 1: no JSON"), (b"\xff\xfe", "is no JSON text"), (b"[" * 10**6, "JSON")],
)
def test_a_file_that_is_no_json_is_named(tmp_path, content, said):
    path = tmp_path / "waivers.json"
    path.write_bytes(content)
    with pytest.raises(BadUsage, match=said) as caught:
        read_waivers(path)
    assert str(path) in caught.value.problem


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadUsage, match=r"gone\.json cannot be read: No such file"):
        read_waivers(tmp_path / "gone.json")


@pytest.mark.parametrize("model", ["opt-1.3b", "facebook/opt-1.3b", "/models/OPT-1.3B/"])
@pytest.mark.parametrize("device", ["H200", "NVIDIA H200"])
def test_a_waiver_is_found_by_what_the_gate_knows(model, device):
    assert waiver_for([WAIVER], model, "requests_per_s", device) == WAIVER


@pytest.mark.parametrize(
    ("model", "endpoint", "device"),
    [
        ("opt-125m", "requests_per_s", "H200"),
        ("opt-1.3b", "ttft_p99_s", "H200"),
        ("opt-1.3b", "requests_per_s", "NVIDIA H100 80GB HBM3"),
        ("opt-1.3b", "requests_per_s", "cpu"),
    ],
)
def test_a_waiver_is_of_nothing_else(model, endpoint, device):
    assert waiver_for([WAIVER], model, endpoint, device) is None


def test_an_unknown_gpu_has_waivers_by_its_own_name():
    named, anywhere = replace(WAIVER, device="NVIDIA B300"), replace(WAIVER, device="*")
    assert waiver_for([named], "opt-1.3b", "requests_per_s", "NVIDIA B300") == named
    assert waiver_for([named], "opt-1.3b", "requests_per_s", "NVIDIA B200") is None
    assert waiver_for([anywhere], "opt-1.3b", "requests_per_s", "cpu") == anywhere


@given(st.permutations(range(5)))
def test_the_most_specific_waiver_counts_whatever_the_order(order):
    ranked = [
        WAIVER,
        replace(WAIVER, until=UNTIL - timedelta(days=1)),
        replace(WAIVER, device="*", until=UNTIL + timedelta(days=1)),
        replace(WAIVER, model="*", until=UNTIL + timedelta(days=2)),
        replace(WAIVER, model="*", device="*", until=UNTIL + timedelta(days=3)),
    ]
    left = list(ranked)
    while left:
        assert waiver_for([ranked[i] for i in order if ranked[i] in left], "opt-1.3b", "requests_per_s", "H200") == (
            left.pop(0)
        )


@given(st.integers(-400, 400))
def test_a_waiver_says_who_and_why_and_holds_to_the_end_of_its_last_day(days):
    about = "the waiver of requests_per_s of opt-1.3b on H200 expired on 2027-01-31; its owner is Ada "
    about += "(slower attention kernel, fixed upstream)"
    if days <= 0:
        about = "requests_per_s of opt-1.3b on H200 is waived until 2027-01-31 by Ada: slower attention kernel, fixed "
        about += "upstream"
    assert explained(WAIVER, UNTIL + timedelta(days=days)) == about
