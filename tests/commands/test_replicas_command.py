"""`slmserve replicas`: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import REPLICA_CSV

from pytest_slmserve.__main__ import main

NAMES = ("--knob", "max_num_seqs", "--throughput", "total_tok_per_s", "--latency", "mean_itl_ms")
ASKED = (*NAMES, "--replicas", "replicas", "--preemptions", "preemptions")


def external(tmp_path: Path, text: str = REPLICA_CSV) -> Path:
    path = tmp_path / "results.csv"
    path.write_text(text, "utf-8")
    return path


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = main(["replicas", *(str(a) for a in arguments)])
    seen = capsys.readouterr()
    return status, seen.out, seen.err


def answer(capsys, *arguments: object) -> dict:
    status, out, err = run(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize(
    ("baseline", "rate", "gain", "shown"),
    [("False", 10967.555704, 0.33754, "+33.8 %"), ("True", 11864.81399, 0.23639, "+23.6 %")],
)
def test_the_published_gain_against_either_baseline(tmp_path, capsys, baseline, rate, gain, shown):
    """OPT-1.3B of arXiv:2503.08311, whose text has +33.7 %."""
    asked = (external(tmp_path), *ASKED, "--where", "model=opt-1.3b", "--baseline", f"chunked_prefill={baseline}")
    found = answer(capsys, *asked)
    assert (found["baseline"]["concurrency"], found["baseline"]["tokens_per_s"]) == (768, rate)
    assert (found["best"]["concurrency"], found["best"]["tokens_per_s"]) == (512, 14669.488148)
    assert found["gain"] == {"value": pytest.approx(gain, abs=1e-5), "low": None, "high": None}
    status, out, err = run(capsys, *asked)
    assert (status, err) == (0, "") and f"14,669 total_tok_per_s, {shown} over one engine of 768" in out


def test_without_a_baseline_any_row_of_one_engine_may_be_it(tmp_path, capsys):
    found = answer(capsys, external(tmp_path), *ASKED)
    assert found["baseline"]["settings"] == {"chunked_prefill": "True"}
    assert any("different chunked_prefill (False, True) are compared" in note for note in found["notes"])


def test_without_preemptions_it_is_said_that_they_are_not_known(tmp_path, capsys):
    found = answer(capsys, external(tmp_path), *NAMES, "--replicas", "replicas")
    assert found["best"]["replicas"] == 4 and any("no --preemptions" in note for note in found["notes"])


def test_repeats_in_several_files_give_intervals(tmp_path, capsys):
    (tmp_path / "again").mkdir()
    again = REPLICA_CSV.replace("14669.488148", "14600").replace("10967.555704", "11000")
    paths = external(tmp_path), external(tmp_path / "again", again)
    found = answer(capsys, *paths, *ASKED, "--baseline", "chunked_prefill=False")
    gain = found["gain"]
    assert found["best"]["repeats"] == [14669.488148, 14600.0] and gain["low"] < gain["value"] < gain["high"]
    assert gain["value"] == pytest.approx((14669.488148 + 14600) / (10967.555704 + 11000) - 1)
    out = run(capsys, *paths, *ASKED)[1]
    assert "95 %" in out and "nothing was repeated" not in out


def test_power_gives_energy_per_token(tmp_path, capsys):
    results = [
        {"n": 1, "limit": 8, "rate": 100.0, "itl": 0.01, "w": 300},
        {"n": 2, "limit": 4, "rate": 125.0, "itl": 0.01, "w": 350},
    ]
    path = external(tmp_path, json.dumps(results))
    names = ("--replicas", "n", "--knob", "limit", "--throughput", "rate", "--latency", "itl", "--latency-unit", "s")
    found = answer(capsys, path, *names, "--power", "w")
    assert [row["energy_per_token_j"] for row in found["rows"]] == [3.0, 2.8]
    assert found["best"]["gain_at_equal_concurrency"]["value"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--replicas", "engines"), "there is no column 'engines'"),
        (("--replicas", "max_num_seqs"), "no row of one engine to compare"),
        (("--replicas", "preemptions"), "preemptions is '0', which is no number of engines"),
        (("--replicas", "model"), "model is 'opt-1.3b', which is no number"),
        (("--knob", "preemptions"), "a knob has to be a positive whole number"),
        (("--where", "model=opt-2.7b"), "no row is left after --where model=opt-2.7b"),
        (("--where", "replicas=1"), "there is no row of several engines"),
        (("--where", "replicas=2"), "there is no row of one engine"),
        (("--baseline", "chunked_prefill=maybe"), "no row is left after --baseline chunked_prefill=maybe"),
        (("--baseline", "max_num_seqs"), "--baseline max_num_seqs: there is no condition in it"),
        (("--preemptions", "max_num_seqs"), "no row of one engine without preemption (4 with)"),
        (("--latency", "preemptions"), "--latency-unit"),
        (("--power", "watts"), "there is no column 'watts'"),
        (("--power", "model"), "model is 'opt-1.3b', which is no number"),
    ],
)
def test_what_cannot_be_judged_is_one_sentence_and_4(tmp_path, capsys, arguments, words):
    status, out, err = run(capsys, external(tmp_path), *ASKED, *arguments)
    assert (status, out) == (4, "") and err.startswith("error: ") and words in err and err.count("\n") <= 2


def test_columns_must_be_named(tmp_path, capsys):
    status, out, err = run(capsys, external(tmp_path), *NAMES)
    assert (status, out) == (4, "") and "--replicas" in err and "--help" in err


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(REPLICA_CSV.splitlines()[1:]))
def test_the_order_of_rows_does_not_matter(tmp_path, capsys, lines):
    header = REPLICA_CSV.splitlines()[0]
    shuffled = answer(capsys, external(tmp_path, "\n".join([header, *lines])), *ASKED)
    assert shuffled == answer(capsys, external(tmp_path), *ASKED)


VALUES = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=3)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_value_stands_in_a_result_there_is_an_answer_or_one_sentence(tmp_path, capsys, data):
    header, *lines = [line.split(",") for line in REPLICA_CSV.splitlines()]
    results = [dict(zip(header, line)) | {"watts": "300"} for line in lines + lines[:3]]
    for _ in range(data.draw(st.integers(1, 3))):
        result, name = data.draw(st.sampled_from(results)), data.draw(st.sampled_from([*header, "watts"]))
        result[name] = data.draw(VALUES | st.sampled_from([0, 1, 1e-12, 1e12, 10**9, "1e3", []]))
    path = external(tmp_path, json.dumps(results))
    more = data.draw(st.sampled_from([(), ("--json",), ("--baseline", "chunked_prefill=False")]))
    status, out, err = run(capsys, path, *ASKED, "--power", "watts", *more)
    assert (status == 0 and "best" in out) or (status == 4 and err.startswith("error: "))
