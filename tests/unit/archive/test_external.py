"""Files of other tools become a curve of points, in which no row is lost and nothing is guessed but a unit; and our own
results are written in the words of `vllm bench serve`, so that what reads its JSON reads ours."""

import json
import lzma
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, strategies as st
from published import CSV, ROWS
from refusals import refused
from strategies import measurement

from pytest_slmserve.analysis.metrics.window import Slo
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.archive import external
from pytest_slmserve.archive.external import Columns, Export, Row, as_vllm_bench, external_curve, matching, read_results
from pytest_slmserve.schema.records import Failures, Measurement, Run, Samples, Steps, Stream
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

COLUMNS = Columns(knob="max_num_seqs", throughput="total_tok_per_s", latency="mean_itl_ms")
OTHERS = Columns(knob="n", throughput="rate", latency="wait")
RATE = "output_throughput"
VLLM = Columns(knob="max_concurrency", throughput=RATE, latency="mean_itl_ms", output_throughput=RATE)


def result(concurrency: object, rate: object = 100.0, **more: object) -> dict[str, object]:
    """What `vllm bench serve --save-result` keeps, as far as it matters here."""
    facts = {"date": "20250101-000000", "platform": "openai", "model_id": "facebook/opt-125m", "request_rate": "inf"}
    numbers = {"max_concurrency": concurrency, "output_throughput": rate, "mean_itl_ms": 5.0, "itls": [[0.1], [0.2]]}
    return {**facts, "total_token_throughput": 300.0, **numbers, **more}


def written(path: Path, text: str) -> list[Row]:
    path.write_text(text, "utf-8")
    return read_results(path)


def rows(*cells: dict[str, object]) -> list[Row]:
    return [Row(f"row {i}", cell) for i, cell in enumerate(cells, 1)]


def points(columns: Columns, *cells: dict[str, object]) -> tuple[Point, ...]:
    return external_curve(rows(*cells), columns).points


def test_csv_becomes_curve(tmp_path):
    found = written(tmp_path / "a.csv", CSV)
    for delimiter in (";", "\t"):  # and a mark at the start
        text = "\ufeff" + CSV.replace(",", delimiter).replace("max_num_seqs", " max_num_seqs ")
        assert written(tmp_path / "a.csv", text) == found
    curve = external_curve(found, COLUMNS)
    figures = [(p.concurrency, p.repeats[0], pytest.approx(p.e2e_repeats[0] * 1e3)) for p in curve.points]
    assert figures == [(row[0], row[2], row[3]) for row in ROWS]
    third = curve.points[2]
    assert (third.output_tokens_per_s, third.e2e_s, third.batch_repeats) == (5734.137894, 7.509587e-3, (32.0,))
    assert (third.valid, third.problems, third.left_out) == (True, (), 0)
    assert third.batch is third.little is third.ttft_s is third.power_w is third.each[0].batch is None
    assert curve.axes.at(32) == "max_num_seqs 32" and curve.subject
    assert (curve.axes.throughput, curve.axes.latency) == ("total_tok_per_s", "mean_itl_ms")
    columns = replace(COLUMNS, running="mean_running", output_throughput="output_tok_per_s")
    names = ("max_num_seqs", "output_tok_per_s", "total_tok_per_s", "mean_itl_ms", "mean_running")
    cells = [dict(zip(names, row)) for row in ROWS]
    found = {p.concurrency: p for p in points(columns, *cells)}
    assert [round(found[cap].batch) for cap in (96, 256, 768)] == [91, 230, 584]
    assert [round((1 + found[cap].little) * found[cap].batch) for cap in (96, 256, 768)] == [75, 184, 459]
    assert points(replace(COLUMNS, running="mean_running"), cells[0])[0].little is None


def test_external_row_knows_its_place(tmp_path):
    found = written(tmp_path / "a.csv", 'n,t,,\n1,"a,b",3,4\n\n2," c ",,\n')
    told = [(row.place, row.cells["n"], row.cells["t"]) for row in found]
    assert told == [("a.csv: line 2", "1", "a,b"), ("a.csv: line 4", "2", " c ")]
    assert (found[1].text("t"), found[1].text("else")) == ("c", "") and Row("", {"a": None, "b": 0}).text("b") == "0"
    one, two = json.dumps(result(1)), json.dumps(result(2))
    for text in (f"[{one},\n {two}]", f"{one}\n{two}\n", one + two, f"\n[{one}]\n\n[{two}]"):
        assert written(tmp_path / "a.json", text) == [Row(f"a.json: result {n}", result(n)) for n in (1, 2)]
    assert [written(tmp_path / "a", text) for text in ("", "a,b\n", "[]")] == [[], [], []]
    (row,) = written(tmp_path / "a\x07.csv", "max_num_seqs,\x1b[2Jkind\n4,\x1b]0;owned\x07\n")
    assert row == Row(r"a\x07.csv: line 2", {"max_num_seqs": "4", r"\x1b[2Jkind": r"\x1b]0;owned\x07"})
    (other,) = written(tmp_path / "b.json", '{"max_num_seqs": 4, "\\u001b[2Jkind": ["\\u202e"], "a\\n": "b\\t"}')
    assert other.cells == {"max_num_seqs": 4, r"\x1b[2Jkind": [r"\u202e"], r"a\n": r"b\t"}


@pytest.mark.parametrize(("text", "facts"), [
    (b"a,b\n1,2,3\n", ("line 2 ", "3 fields", "2")), (b"a,b\n1,2\n1\n", ("line 3 ", "1 fields", "2")),
    (b"b,a,a,b\n1,2,3,4\n", ("'a'",)), (b'a,b\n"1,2\n', ("line 2",)),
    (b'{"a": 1', ("line 1",)), (b'{"a": 1}\n\n{"a": }', ("line 3",)), (b"[" * 100_000, ("line 1",)),
    (b"[1, 2]", ("result 1 ",)), (b'[{}, "a"]', ("result 2 ",)),
    (b'{"kind":"session"', ("is a results file",)), (lzma.compress(b""), ("is a results file",)),
    (b"\xff\xfe\x00", ("UTF-8",)), (None, ("No such file",)),
])  # fmt: skip
def test_damaged_external_file_is_located(tmp_path, text, facts):
    if text is not None:
        (tmp_path / "a").write_bytes(text)
    with refused("a", *facts):
        read_results(tmp_path / "a")


def test_duplicate_results_are_left_out(tmp_path):
    first, second = result(8, run_number=0), result(8, 101.0, run_number=1)
    files = {"run=0.json": first, "run=1.json": second, "summary.json": [first, second]}
    files["warmup.json"] = result(8, 50.0, run_number=-1)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), "utf-8")
    found, left_out = external.results([tmp_path / name for name in files])
    assert [row.cells["output_throughput"] for row in found] == [100.0, 101.0]
    assert [note.rpartition(" ")[2] for note in left_out] == ["1", "2"] and "warm-ups" in left_out[0]
    equal, again = tmp_path / "a.csv", tmp_path / "b.csv"
    equal.write_text("n,rate\n1,10\n1,10\n", "utf-8")
    again.write_text("rate,n\n10,1\n11,1\n", "utf-8")  # whose cells are in another order
    assert [tuple(map(len, external.results(paths))) for paths in ([equal], [equal, again])] == [(2, 0), (3, 1)]


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e6)), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_curve_point_averages_its_rows(pairs, wait_ms):
    found = points(VLLM, *(result(knob, rate, mean_itl_ms=wait_ms) for knob, rate in pairs))
    assert sorted((p.concurrency, rate) for p in found for rate in p.repeats) == sorted(pairs)
    assert [p.concurrency for p in found] == sorted({knob for knob, _ in pairs})
    for point in found:
        own = [rate for knob, rate in pairs if knob == point.concurrency]
        assert point.output_tokens_per_s == pytest.approx(fmean(own)) and point.valid
        assert point.e2e_s == pytest.approx(wait_ms / 1e3)
        assert point.e2e_repeats == pytest.approx([wait_ms / 1e3] * len(own))
        assert point.batch == pytest.approx(point.output_tokens_per_s * point.e2e_s), "by Little's law"
        assert point.batch_repeats == (float(point.concurrency),) * len(own)
        each = [(each.output_tokens_per_s, each.batch) for each in point.each]
        assert each == [(rate, pytest.approx(rate * wait_ms / 1e3)) for rate in own]


def test_preempted_repeat_spoils_its_point():
    found = points(VLLM, result(8), result(4), result("8.0", 110.0))
    assert [(p.concurrency, p.repeats) for p in found] == [(4, (100.0,)), (8, (100.0, 110.0))]
    columns = replace(VLLM, preemptions="lost")
    spoilt, sound = points(columns, result(8, lost="0"), result(8, lost=178), result(9, lost=0))
    assert spoilt.output_tokens_per_s == 100.0 and len(spoilt.each) == spoilt.left_out == 2, "it is shown"
    assert not spoilt.valid and "178" in spoilt.problems[0] and spoilt.repeats == () and sound.valid
    for length, shown in ((38, f"'{'x' * 38}',"), (39, f"'{'x' * 36}...,")):
        with refused(f"r: a is {shown}", hint="--where"):
            external.number_in(Row("r", {"a": "x" * length}), "a")
    assert [external.number_in(Row("r", {"a": value}), "a") for value in (1e-12, "1e12", " 5 ")] == [1e-12, 1e12, 5.0]
    assert [external.knob_of(Row("r", {"a": value}), "a") for value in (1, "8.0", 10**9)] == [1, 8, 10**9]


@pytest.mark.parametrize(("cells", "facts"), [
    *(({"rate": cell}, ("output_throughput", "number")) for cell in
      (None, "", "fast", "nan", "inf", True, [1.0], {}, 10**400, "1e999")),
    *(({"rate": cell}, ("output_throughput", cell, "rate")) for cell in (0, -1.0, 1e300, "1e-300", 1e-13, 1.01e12)),
    *(({"concurrency": cell}, ("max_concurrency", cell, "whole")) for cell in (0, -8, 1.5, 1e10, 10**9 + 1)),
    ({"lost": -1}, ("lost", -1, "preemptions")), ({"mean_itl_ms": 0}, ("mean_itl_ms", 0)),
])  # fmt: skip
def test_impossible_external_values_are_refused(cells, facts):
    with refused("row 2", *facts):
        points(replace(VLLM, preemptions="lost"), result(8, lost=0), result(**{"concurrency": 8, "lost": 0, **cells}))


@pytest.mark.parametrize(("name", "given_unit", "unit"), [
    ("a_itl_ms", None, 0.005), ("itl_s", None, 5.0), ("itl", "ms", 0.005), ("itl_s", "s", 5.0), ("a_per_s", "s", 5.0),
    ("itl", None, "--latency-unit ms"), ("tok_per_s", None, "--latency-unit ms"),
    ("itl_ms", "s", "Remove --latency-unit"),
])  # fmt: skip
def test_latency_unit_follows_column_name(name, given_unit, unit):
    columns = replace(COLUMNS, latency=name, latency_unit=given_unit)
    cells = {"max_num_seqs": 8, "total_tok_per_s": 100.0, name: 5.0}
    if isinstance(unit, float):
        assert points(columns, cells)[0].e2e_s == unit
    else:
        with refused(repr(name), hint=unit):
            points(columns, cells)


def test_incomplete_rows_are_left_out():
    found = rows(result(8), result(16, None), result(32, ""), result(None), result(64))
    left, notes = external.with_values(found, VLLM)
    assert left == [found[0], found[4]] and len(notes) == 2
    assert notes[0].endswith("output_throughput: row 2, row 3") and notes[1].endswith("max_concurrency: row 4")
    for name in ("output_throughput", "mean_itl_ms"):
        for nothing in (0.0, "0", math.nan, "nan", math.inf, "", None):
            bad = result(16, **{name: nothing}) if name == "mean_itl_ms" else result(16, nothing)
            left, (note,) = external.with_values(rows(result(8), bad), VLLM)
            assert [row.cells["max_concurrency"] for row in left] == [8] and note.endswith(f"{name}: row 2")
            with refused(repr(name), hint="another column"):
                external.with_values(rows(bad), VLLM)
    with refused("'max_concurrency'", hint="--max-concurrency"):
        external.with_values(rows(result(None), result(None)), VLLM)
    assert VLLM.names == ("max_concurrency", "output_throughput", "mean_itl_ms", "output_throughput")
    told = {"completed": 9, "failed": 2}, {"completed": 9, "failed": 0}, {"failed": 3}, {"completed": 9, "failed": "x"}
    (note,) = external.with_values(rows(*(result(8, **each) for each in told)), VLLM)[1]
    assert note.endswith(": row 1")


@pytest.mark.parametrize(("conditions", "left"), [
    (["model=a"], [0]), (["chunked=true"], [0]), ([" model = A "], [0]), (["n=1"], [0, 1]), ([], [0, 1]),
    (["chunked="], [1]), (["n=1", "model=b"], [1]),
])  # fmt: skip
def test_conditions_match_text_or_numbers(conditions, left):
    mixed = rows({"model": "A", "n": 1, "chunked": True}, {"model": "b", "n": "1.0", "chunked": None})
    assert matching(mixed, conditions) == [mixed[i] for i in left]


MANY = [{"n": n, "itls": [n]} for n in range(20)]


@pytest.mark.parametrize(("cells", "conditions", "facts", "hint"), [
    ([], [], [], "results"), (MANY, ["model=c"], ["'model'"], "one of n"),
    (MANY, ["n=99"], ["--where n=99"], "n has: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"),
    (MANY, ["n=1", "n=2"], ["--where n=1 --where n=2"], "fewer conditions"),
    (MANY, ["n=1", "n=99"], ["--where n=1 --where n=99"], "n has: 0, 1"),
    (MANY, ["n"], ["n"], "NAME=VALUE"), (MANY, ["=a"], ["=a"], "NAME=VALUE"),
])  # fmt: skip
def test_unmatched_conditions_list_available_values(cells, conditions, facts, hint):
    """Twelve values, and all columns but lists."""
    with refused(*facts, hint=hint) as caught:
        matching(rows(*cells), conditions)
    assert not [more for more in ("12", "itls") if more in caught.value.hint]
    external.check_columns(rows({"a": 1}, {"b": 1}), ["b", "a"])


@pytest.mark.parametrize(("cells", "found", "taken"), [
    ([{"kind": m, "id": f"{m}{n}", "n": n, "same": "x"} for m in "ab" for n in (1, 2)], "kind (a, b)", "one curve"),
    ([{"backend": m, "n": n} for n, m in enumerate("ab", 1)], "backend (a, b)", "one curve"),
    ([{"chunked": flag, "n": 1} for flag in ("True", "false")], "chunked (True, false)", "one curve"),
    ([{"kind": kind, "n": 1} for kind in ("", "x", "x")], "kind (empty, x)", "one curve"),
    ([{"size": size, "n": n, "run_number": 0} for n in (1, 8) for size in (32, 64)], "size (32, 64)", "repeats"),
    ([{"size": size, "n": n} for n in (1, 2) for size in (1, 2, 3, 4, 5)], "size (1, 2, 3, 4, ...)", "repeats"),
    ([{"size": size, "n": n} for n in (1, 2) for size in (1, 2, 3, 4)], "size (1, 2, 3, 4)", "repeats"),
    *((cells, "", "") for cells in (
        [{"model": "a", "n": n} for n in (1, 2)], [{"name": m, "n": n} for n, m in enumerate("abcd", 1)],
        [{"size": n, "n": n} for n in (1, 8) for _ in range(2)], [{"itls": [m], "n": 1} for m in "aabb"],
        [{"noise": n + size, "n": n} for n in (1, 8) for size in (32, 64)],
        [{"rate": size, "n": n} for n in (1, 8) for size in (32, 64)],
        [{"n": n, "run_number": run} for n in (1, 8) for run in (0, 1)],
    )),
])  # fmt: skip
def test_mixed_settings_are_noted(cells, found, taken):
    """Words in which some rows agree, and numbers in which repeats differ and that are in several rows."""
    notes = external.mixed_settings(rows(*cells), OTHERS)
    assert len(notes) == bool(found)
    for note in notes:
        assert f"of different {found} " in note and f"--where {found.split()[0]}=" in note and taken in note
    for name in ("model_id", "model"):
        with refused("a, b", hint=f"--where {name}=a"):
            external.mixed_settings(rows({name: "a", "n": 1}, {"n": 2}, {name: "b", "n": 4}), OTHERS)


# Our own results in vLLM's words

GAPS = {"growth": 1.01, "least_s": 1e-4, "counts": {"463": 9}, "sum_s": 0.0909}


def overloaded(**facts: object) -> Measurement:
    """Ten requests a second come for 20 s, of 8 and 4 tokens; half as many are served, one after the other. facts: of
    the run."""
    sent = tuple(i / 10 for i in range(200))
    first = tuple((i + 1) / 5 for i in range(200))
    columns = (8,) * 200, (4,) * 200, (True,) * 200
    samples = Samples(tuple(range(200)), sent, (None,) * 200, first, tuple(at + 0.01 for at in first), *columns)
    run = Run(samples, Steps(*[()] * 7), (5.0, 15.0), stream=streamed())
    load = OpenLoop(arrivals="even", rate=10.0, settle_s=5.0, window_s=10.0)
    return replace(measurement(output_tokens=4), load=load, run=replace(run, **facts))


def streamed(**gaps: object) -> Stream:
    sent = tuple(i / 10 for i in range(200))
    return Stream(0.01, 0.0, (4 * 5 * 0.01,) * 4000, GAPS | gaps, scheduled_s=sent)


def test_overloaded_export_counts_served_requests():
    """Judged are those sent from 5 to 15 s: request i waits (i + 1) / 5 - i / 10 s."""
    told, samples = as_vllm_bench(overloaded()), overloaded().run.samples
    counts = ("duration", "num_prompts", "completed", "total_input_tokens", "total_output_tokens")
    assert [told[name] for name in counts] == [10, 100, 100, 800, 400]
    assert told["request_throughput"] == pytest.approx(5, abs=0.1)
    assert told["output_throughput"] == pytest.approx(20)
    assert told["total_token_throughput"] == pytest.approx(5 * (4 + 8), abs=1)
    ttft_ms = np.array([((i + 1) / 5 - i / 10) * 1e3 for i in range(50, 150)])
    for name, values in {"ttft": ttft_ms, "e2el": ttft_ms + 10, "tpot": np.full(100, 10 / 3)}.items():
        facts = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
        facts |= {f"p{share}": np.percentile(values, share) for share in (50, 90, 95, 99)}
        assert {what: told[f"{what}_{name}_ms"] for what in facts} == pytest.approx(facts, abs=1e-6), name
    cut = replace(samples, last_token_s=(*samples.last_token_s[:-50], *[None] * 50))
    assert "mean_ttft_ms" in as_vllm_bench(overloaded(samples=cut))


def test_exported_gaps_follow_histogram():
    coarse = streamed(growth=2.0, least_s=1.0, counts={"0": 3, "1": 1}, sum_s=6.5)
    told, fine = as_vllm_bench(overloaded(stream=coarse)), as_vllm_bench(overloaded())
    middles = [math.sqrt(2)] * 3 + [2 * math.sqrt(2)]
    assert told["mean_itl_ms"] == pytest.approx(6.5 / 4 * 1e3)
    assert told["std_itl_ms"] == pytest.approx(1e3 * math.sqrt(fmean((m - 6.5 / 4) ** 2 for m in middles)), rel=0.1)
    assert 1000 <= told["median_itl_ms"] == told["p50_itl_ms"] <= 2000 < told["p99_itl_ms"] <= 4000
    assert fine["mean_itl_ms"] == pytest.approx(10.1) and fine["std_itl_ms"] < 0.1
    for stream in (None, streamed(counts={}, sum_s=0.0)):
        assert not [name for name in as_vllm_bench(overloaded(stream=stream)) if "_itl_" in name]
    samples = overloaded().run.samples
    facts = {"samples": replace(samples, last_token_s=samples.first_token_s), "failures": 1}
    lost = Failures(request=(0,), sent_s=(6.0,), scheduled_s=(6.0,), ended_s=(7.0,), kind=("timeout",))
    told = as_vllm_bench(overloaded(stream=streamed(counts={"-1": 9}, sum_s=0.0), failed=lost, **facts))
    json.dumps(told, allow_nan=False)
    assert told["median_tpot_ms"] == told["p50_tpot_ms"] == told["p99_tpot_ms"] == told["mean_itl_ms"] == 0
    assert (told["num_prompts"], told["completed"], told["failed"], told["valid"]) == (101, 100, 1, False)


@pytest.mark.parametrize(("load", "told", "name"), [
    (ClosedLoop(8), ("inf", None, 8), "infqps-concurrency8"),
    (OpenLoop(rate=10.0, settle_s=5.0, window_s=10.0), (10.0, None, None), "10qps"),
    (OpenLoop(rate=2.5, requests=200, burstiness=0.5, max_concurrency=4), (2.5, 0.5, 4), "2.5qps"),
    (OpenLoop(rate=2.5, requests=200), (2.5, 1.0, None), "2.5qps"),
    (OpenLoop(requests=200), ("inf", 1.0, None), "infqps"),
])  # fmt: skip
def test_exported_load_uses_vllm_words(tmp_path, load, told, name):
    m = replace(overloaded(), load=load)
    m = replace(m, spec=replace(m.spec, model="/a/facebook/opt-1.3b/", interface="server"))
    external.export_to(f"vllm-bench={tmp_path}/new/folder").add(m)
    (path,) = (tmp_path / "new" / "folder").iterdir()
    found = as_vllm_bench(m)
    assert (found["request_rate"], found["burstiness"], found["max_concurrency"]) == told
    assert path.name == f"server-{name}-opt-1.3b-20260101-000000-{m.id}.json"
    assert json.loads(path.read_text("utf-8")) == found


@pytest.mark.parametrize(("interface", "backend"), [("engine", "engine"), ("server", "openai")])
def test_exported_result_describes_its_measurement(interface, backend):
    m = measurement(4, 1000.0)
    m = replace(m, spec=replace(m.spec, interface=interface))
    found = as_vllm_bench(m)
    told = {"date": m.measured_at, "record_id": m.id, "model_id": "opt-1.3b", "tokenizer_id": "opt-1.3b", "valid": True,
            "backend": backend, "endpoint_type": backend, "label": interface, "vllm_version": "0.26.0",
            "max_concurrent_requests": 4, "request_goodput": None, "pytest_slmserve_version": None}  # fmt: skip
    assert {name: found[name] for name in told} == told
    (begin, end), last = m.run.window_s, m.run.samples.last_token_s
    assert found["duration"] == pytest.approx(end - begin)
    ended = sum(begin < at <= end + 1e-9 for at in last)
    assert found["request_throughput"] == pytest.approx(ended / found["duration"], rel=0.2)


def test_export_appends_result_lines(tmp_path):
    path, each = tmp_path / "new" / "folder" / "all.json", (overloaded(), measurement(2))
    Export(path).add(each[0])
    Export(path, Slo(ttft_s=6.0)).add(each[1])
    first, second = map(json.loads, path.read_text("utf-8").splitlines())
    assert (first["record_id"], second["record_id"], first["request_goodput"]) == (each[0].id, each[1].id, None)
    assert second["request_goodput"] == pytest.approx(second["request_throughput"]) and len(read_results(path)) == 2
    slo = Slo(ttft_s=1.0)
    assert external.export_to("vllm-bench=a=b.json", slo) == Export(Path("a=b.json"), slo)
    for text in ("vllm-bench=", "vllm-bench", "csv=a", "=a", ""):
        with refused(repr(text), hint="vllm-bench=results.json"):
            external.export_to(text)
    (tmp_path / "taken").touch()
    (tmp_path / "folder.json").mkdir()
    for path in (tmp_path / "taken", tmp_path / "taken" / "x", tmp_path / "folder.json"):
        with refused(path, hint="vllm-bench=results/"):
            Export(path).add(measurement(1))
