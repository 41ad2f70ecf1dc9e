"""Files that others wrote, read into a curve of points."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import CSV, ROWS

from pytest_slmserve.analysis.points import Point
from pytest_slmserve.archive.external import (
    Columns,
    Row,
    check_columns,
    external_curve,
    matching,
    mixed_settings,
    read_results,
    results,
    with_values,
)
from pytest_slmserve.schema.errors import BadUsage

COLUMNS = Columns(knob="max_num_seqs", throughput="total_tok_per_s", latency="mean_itl_ms")
VLLM = Columns(
    knob="max_concurrency", throughput="output_throughput", latency="mean_itl_ms", output_throughput="output_throughput"
)


def test_names_and_values_are_printable(tmp_path):
    line, told = tmp_path / "a.csv", tmp_path / "b.json"
    line.write_text("max_num_seqs,\x1b[2Jkind\n4,\x1b]0;owned\x07\n", "utf-8")
    told.write_text('{"max_num_seqs": 4, "\\u001b[2Jkind": ["\\u202e"]}', "utf-8")
    (row,), (other,) = read_results(line), read_results(told)
    assert row.cells == {"max_num_seqs": "4", r"\x1b[2Jkind": r"\x1b]0;owned\x07"}
    assert other.cells == {"max_num_seqs": 4, r"\x1b[2Jkind": [r"\u202e"]}


def result(concurrency: object, rate: object = 100.0, **more: object) -> dict[str, object]:
    """What `vllm bench serve --save-result` keeps, as far as it matters here."""
    facts = {"date": "20250101-000000", "platform": "openai", "model_id": "facebook/opt-125m", "request_rate": "inf"}
    numbers = {"max_concurrency": concurrency, "output_throughput": rate, "mean_itl_ms": 5.0, "itls": [[0.1], [0.2]]}
    return {**facts, "total_token_throughput": 3 * 100.0, **numbers, **more}


def written(path: Path, text: str) -> list[Row]:
    path.write_text(text, "utf-8")
    return read_results(path)


def rows(*cells: dict[str, object]) -> list[Row]:
    return [Row(f"row {i}", cell) for i, cell in enumerate(cells, 1)]


def points(found: list[Row], columns: Columns) -> tuple[Point, ...]:
    return external_curve(found, columns).points


def test_a_csv_becomes_a_curve(tmp_path):
    curve = external_curve(written(tmp_path / "a.csv", CSV), COLUMNS)
    found = curve.points
    assert [p.concurrency for p in found] == [row[0] for row in ROWS]
    assert (found[2].repeats, found[2].e2e_repeats, found[2].batch_repeats) == ((5734.137894,), (7.509587e-3,), (32.0,))
    assert (found[2].output_tokens_per_s, found[2].e2e_s) == (5734.137894, 7.509587e-3)
    assert found[2].valid and found[2].batch is None and found[2].ttft_s is None and found[2].power_w is None
    assert curve.axes.at(32) == "max_num_seqs 32" and curve.axes.throughput == "total_tok_per_s"


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_other_delimiters_and_a_mark_at_the_start(tmp_path, delimiter):
    path = tmp_path / "a.csv"
    path.write_text("\ufeff" + CSV.replace(",", delimiter), "utf-8")
    assert [row.cells for row in read_results(path)] == [row.cells for row in written(tmp_path / "b.csv", CSV)]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([result(1), result(2)], indent=1),
        f"{json.dumps(result(1))}\n{json.dumps(result(2))}\n",
        json.dumps(result(1), indent=4) + json.dumps(result(2), indent=4),
        f"\n[{json.dumps(result(1))}]\n\n[{json.dumps(result(2))}]",
    ],
    ids=["list", "lines", "one after the other", "lists"],
)
def test_json_in_the_ways_it_comes(tmp_path, text):
    found = points(written(tmp_path / "a.json", text), VLLM)
    assert [(p.concurrency, p.repeats, p.e2e_repeats) for p in found] == [
        (1, (100.0,), (0.005,)),
        (2, (100.0,), (0.005,)),
    ]


def test_rows_of_one_knob_are_repeats():
    found = points(rows(result(8), result(4), result("8.0", 110.0)), VLLM)
    assert [(p.concurrency, p.repeats) for p in found] == [(4, (100.0,)), (8, (100.0, 110.0))]
    assert found[1].batch_repeats == (8.0, 8.0) and found[1].output_tokens_per_s == 105.0


def test_one_repeat_that_preempted_spoils_its_point():
    columns = replace(VLLM, preemptions="lost")
    [seen] = points(rows(result(8, lost="0"), result(8, lost=178)), columns)
    assert seen.output_tokens_per_s == 100.0 and len(seen.each) == seen.left_out == 2, "it is shown"
    assert not seen.valid and seen.problems == ("178 preemptions",)


def test_requests_in_flight_by_littles_law():
    columns = replace(COLUMNS, running="mean_running", output_throughput="output_tok_per_s")
    cells = [
        dict(zip(("max_num_seqs", "output_tok_per_s", "total_tok_per_s", "mean_itl_ms", "mean_running"), row))
        for row in ROWS
    ]
    found = {p.concurrency: p for p in points(rows(*cells), columns)}
    assert [round(found[cap].batch) for cap in (96, 256, 768)] == [91, 230, 584]
    assert [round((1 + found[cap].little) * found[cap].batch) for cap in (96, 256, 768)] == [75, 184, 459]


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        *(
            ({"rate": cell}, "row 1: output_throughput is .*, which is no number")
            for cell in (None, "", "fast", "nan", "inf", True, [1.0], {}, 10**400, "1e999")
        ),
        *(({"rate": cell}, "no rate and no latency") for cell in (0, -1.0, 1e300, "1e-300")),
        *(({"concurrency": cell}, "a knob has to be a positive whole number") for cell in (0, -8, 1.5, 1e10)),
        ({"lost": -1}, "no number of preemptions"),
    ],
)
def test_values_that_cannot_be(cells, words):
    with pytest.raises(BadUsage, match=words):
        points(rows(result(**{"concurrency": 8, "lost": 0, **cells})), replace(VLLM, preemptions="lost"))


@pytest.mark.parametrize(
    ("name", "given_unit", "unit"),
    [
        ("mean_itl_ms", None, "ms"),
        ("itl_s", None, "s"),
        ("itl", "ms", "ms"),
        ("itl_s", "s", "s"),
        ("a_per_s", "s", "s"),
        ("itl", None, "--latency-unit"),
        ("tok_per_s", None, "--latency-unit"),
        ("itl_ms", "s", "which is not s"),
    ],
)
def test_the_unit_is_that_of_the_name_or_of_the_option(name, given_unit, unit):
    columns = replace(COLUMNS, latency=name, latency_unit=given_unit)
    cells = rows({"max_num_seqs": 8, "total_tok_per_s": 100.0, name: 5.0})
    if unit in ("ms", "s"):
        assert points(cells, columns)[0].e2e_s == {"ms": 0.005, "s": 5.0}[unit]
    else:
        with pytest.raises(BadUsage, match=unit):
            points(cells, columns)


def test_a_row_without_the_value():
    with pytest.raises(BadUsage, match="row 2: output_throughput is None, which is no number"):
        points(rows(result(8), {"max_concurrency": 4}), VLLM)


def test_a_row_with_an_empty_cell_is_left_out_by_name():
    found = rows(result(8), result(16, None), result(32, ""), result(None), result(64))
    left, notes = with_values(found, VLLM)
    assert left == [found[0], found[4]]
    assert notes == [
        "left out, without a value of output_throughput: row 2, row 3",
        "left out, without a value of max_concurrency: row 4",
    ]
    words = "the column 'max_concurrency' is empty in all results\n  try: `vllm bench serve --max-concurrency N`"
    with pytest.raises(BadUsage, match=words):
        with_values(rows(result(None), result(None)), VLLM)


def test_conditions_are_equal_as_text_or_as_numbers():
    mixed = rows({"model": "A", "n": 1, "chunked": True}, {"model": "b", "n": "1.0", "chunked": None})
    assert matching(mixed, ["model=a"]) == mixed[:1] == matching(mixed, ["chunked=true"])
    assert matching(mixed, ["n=1"]) == mixed and matching(mixed, []) == mixed
    assert matching(mixed, ["chunked="]) == mixed[1:]


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        (["model=c"], "no row is left after --where model=c\n.*model is a, b"),
        (["model=a", "n=2"], "--where model=a --where n=2\n.*fewer conditions"),
        (["modle=a"], "no column 'modle'\n.*model, n"),
        (["model"], "NAME=VALUE"),
    ],
)
def test_conditions_that_leave_nothing(conditions, words):
    with pytest.raises(BadUsage, match=words):
        matching(rows({"model": "a", "n": 1}, {"model": "b", "n": 2}), conditions)


def test_columns_are_named_but_not_lists():
    with pytest.raises(BadUsage) as seen:
        check_columns(rows(result(8)), ["max_concurrency", "itl"])
    assert "'itl'" in str(seen.value) and "mean_itl_ms" in seen.value.hint and "itls" not in seen.value.hint


def test_a_mixture_is_said():
    mixed = rows(*({"model": m, "id": f"{m}{n}", "n": str(n), "same": "x"} for m in "ab" for n in (1, 2)))
    columns = Columns(knob="n", throughput="n", latency="n")
    [seen] = mixed_settings(mixed, columns)
    assert "different model (a, b)" in seen and "--where model=" in seen
    assert mixed_settings(mixed[:2], columns) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2,3\n", "line 2 has 3 fields, the header has 2"),
        ("a,a\n1,2\n", "several columns are called 'a'"),
        ('a,b\n"1,2\n', "no CSV in line 2"),
        ('{"a": 1', "no JSON in what begins at line 1"),
        ('{"a": 1}\n\n{"a": }', "no JSON in what begins at line 3"),
        ("[1, 2]", "result 1 is no JSON object"),
        ("[" * 100_000, "no JSON"),
        (b"\xff\xfe\x00", "no text in UTF-8"),
        (None, "cannot read .*: No such file"),
    ],
)
def test_damaged_files(tmp_path, text, words):
    if text is not None:
        (tmp_path / "a").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadUsage, match=words):
        read_results(tmp_path / "a")


@pytest.mark.parametrize("text", ["", "a,b\n", "[]"])
def test_files_with_nothing_in_them(tmp_path, text):
    with pytest.raises(BadUsage, match="there are no rows"):
        matching(written(tmp_path / "a.csv", text), [])


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e6)), min_size=1, max_size=20))
def test_no_row_is_lost(pairs):
    found = points(rows(*(result(knob, rate) for knob, rate in pairs)), VLLM)
    assert sorted((p.concurrency, rate) for p in found for rate in p.repeats) == sorted(pairs)
    assert [p.concurrency for p in found] == sorted({knob for knob, _ in pairs})


def test_a_result_of_two_files_is_no_repeat_nor_is_a_warm_up(tmp_path):
    first, second = result(8, run_number=0), result(8, 101.0, run_number=1)
    files = {"run=0.json": first, "run=1.json": second, "summary.json": [first, second]}
    files["warmup.json"] = result(8, 50.0, run_number=-1)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), "utf-8")
    found, left_out = results([tmp_path / name for name in files])
    assert [row.cells["output_throughput"] for row in found] == [100.0, 101.0]
    assert left_out == ["left out, warm-ups of a sweep: 1", "left out, for an earlier file has the same: 2"]


def test_equal_rows_of_one_file_are_repeats(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("n,rate\n1,10\n1,10\n", "utf-8")
    found, left_out = results([path])
    assert len(found) == 2 and not left_out


def test_failed_requests_of_vllms_benchmark_are_told():
    found = rows(result(8, completed=98, failed=2), result(16, completed=100, failed=0), result(32, failed=3))
    assert with_values(found, VLLM)[1] == ["requests failed, so the load was less than it says: row 1"]


def test_settings_in_numbers_that_repeats_differ_in_are_told():
    lengths = [result(n, 100.0 * n - size, random_input_len=size, run_number=0) for n in (1, 8) for size in (32, 64)]
    assert mixed_settings(rows(*lengths), VLLM) == [
        "rows of different random_input_len (32, 64) are taken as repeats; --where random_input_len=... chooses"
    ]
    again = [result(n, 100.0 + n + run, run_number=run) for n in (1, 8) for run in (0, 1)]
    assert not mixed_settings(rows(*again), VLLM)
