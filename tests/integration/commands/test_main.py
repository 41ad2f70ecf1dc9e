"""`slmserve`: what it prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import CSV
from sealed_lines import reseal
from strategies import H200, law, measurement, planted_telemetry

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.claims import table
from pytest_slmserve.analysis.claims import table as lookup
from pytest_slmserve.analysis.points import by_series
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.archive import external as files
from pytest_slmserve.archive.store import Archive
from pytest_slmserve.commands.cli import COMMANDS, SUMMARIES
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.screen import tables
from pytest_slmserve.schema.records import Run

BATCHES = (16, 32, 64, 128, 256, 512)
CUT = [[1024, "the KV cache holds 884 requests of 768 tokens"]]
HEAVY = ("vl_convert", "pytest", "_pytest", "vllm", "torch", "transformers", "pynvml")


def measured(batches=BATCHES, repeats: int = 2, **facts: object):
    made = [measurement(c, law(c) * (1 + 0.001 * i), repeat=i, **facts) for c in batches for i in range(repeats)]
    return [replace(m, environment=replace(m.environment, host="one"), run=whole_microseconds(m.run)) for m in made]


def whole_microseconds(run: Run) -> Run:
    """As an archive keeps times."""

    def columns(table):
        names = [f.name for f in fields(table) if f.name.endswith("_s")]
        return replace(table, **{name: tuple(round(stamp, 6) for stamp in getattr(table, name)) for name in names})

    start, stop = (round(stamp, 6) for stamp in run.window_s)
    return Run(columns(run.samples), columns(run.steps), (start, stop), run.failures, run.first_failure)


def archive(path: Path, measurements, planned=BATCHES, rows=table.ROWS) -> Path:
    series = by_series(measurements) or {"nothing": []}
    sweep = {"model": "opt-1.3b", "concurrencies": list(planned), "skipped": CUT}
    plan = {"sweeps": dict.fromkeys(series, sweep)}
    with Archive.open(path) as opened:
        opened.begin({"rows": [asdict(row) for row in rows]}, plan)
        for one in measurements:
            opened.add(one)
    dated = path.read_text("utf-8").replace(json.loads(path.read_text("utf-8").partition("\n")[0])["started"], STARTED)
    path.write_text(dated, "utf-8")
    reseal(path)
    return path


PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=3)
STARTED = "2025-12-31T00:00:00+00:00"  # before what `measurement` makes


def live_text(measurements) -> str:
    """As a session has it at the end of its run."""
    curve = curve_of("opt-1.3b", measurements, planned=BATCHES, cut=[(c, why) for c, why in CUT])
    names = [c.name for c in table.CLAIMS.values() if c.of != "arithmetic" and table.applies(c, curve)]
    subjects = [
        *((name, curve) for name in names),
        *((c.name, Curve(subject=model)) for c in table.CLAIMS.values() if c.of == "arithmetic" for model in c.models),
    ]
    rows = [(lookup.row_for(name, c.subject, H200), c) for name, c in subjects]
    judged = [(lookup.judge_row(row, c), row) for row, c in rows]
    return "\n".join(text for text, _ in tables(Findings(curves=[curve], judged=judged)))


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = main([str(a) for a in arguments])
    seen = capsys.readouterr()
    return status, seen.out, seen.err


def test_the_archive_gives_the_text_of_the_run(tmp_path, capsys):
    made = measured()
    status, out, err = run(capsys, "report", archive(tmp_path / "a.jsonl", made))
    assert (status, err) == (0, "") and out == f"{live_text(made)}\n"
    assert "plateau from concurrency 256" in out and "cut: concurrency 1024: the KV cache holds 884" in out
    assert "16 verdicts: 11 pass, 4 fail as expected; either expected: 1 fail" in out and "1 host" in out


def test_results_of_another_tool_are_told_apart_by_their_columns_or_suffix(tmp_path, capsys):
    (tmp_path / "sweep.csv").write_text(CSV, "utf-8")
    asked = (tmp_path / "sweep.csv", "--knob=max_num_seqs", "--throughput=total_tok_per_s", "--latency=mean_itl_ms")
    assert "B_opt" in run(capsys, "report", *asked)[1]
    status, _, err = run(capsys, "report", *asked[:2])
    assert status == 4 and "--throughput --latency NAME" in err
    assert "--figures draws archives of ours" in run(capsys, "report", *asked, "--figures=a")[2]
    assert "these are external results" in run(capsys, "report", *asked, "--run=last")[2]


def test_several_archives_are_one_and_a_copy_adds_nothing(tmp_path, capsys):
    first, second = measured(repeats=2), measured(launch="launch-2")
    paths = [archive(tmp_path / name, m) for name, m in (("a.jsonl", first), ("b.jsonl", second), ("c.jsonl", first))]
    status, out, _ = run(capsys, "report", *paths)
    assert status == 0 and "6 points, 4 repeats each, 2 launches, 1 host" in out


def test_a_failing_claim_is_1(tmp_path, capsys):
    status, out, err = run(capsys, "report", archive(tmp_path / "a.jsonl", measured(BATCHES[:4]), BATCHES[:4]))
    assert (status, err) == (1, "") and "FAILS" in out and "no plateau up to concurrency 128" in out


FAILING = table.ClaimRow("throughput-plateau", "opt-1.3b", parameters={"tolerance": 0.1}, expected="fails")


def test_an_expected_failure_that_holds_is_1(tmp_path, capsys, monkeypatch):
    stored = archive(tmp_path / "a.jsonl", measured(), rows=table.ROWS)
    monkeypatch.setattr(table, "ROWS", (*table.ROWS, FAILING))
    status, out, _ = run(capsys, "report", stored)
    assert status == 1 and "PASSES, UNEXPECTED" in out and "its run expected that it passes" in " ".join(out.split())


def test_a_stored_expectation_is_printed_and_todays_table_rules(tmp_path, capsys):
    status, out, _ = run(capsys, "report", archive(tmp_path / "a.jsonl", measured(), rows=(*table.ROWS, FAILING)))
    assert status == 0 and "UNEXPECTED" not in out
    assert " ".join(out.split()).count("its run expected that it fails") == 1


def test_an_inconclusive_claim_is_10(tmp_path, capsys):
    status, out, _ = run(capsys, "report", archive(tmp_path / "a.jsonl", measured(BATCHES[:5])))
    assert status == 10 and "not measured, though planned: concurrency 512" in out and "inconclusive" in out


def test_one_repeat_is_inconclusive(tmp_path, capsys):
    assert run(capsys, "report", archive(tmp_path / "a.jsonl", measured(repeats=1)))[0] == 10


def test_strict_expects_the_papers_as_written(tmp_path, capsys):
    status, out, _ = run(capsys, "report", "--strict", archive(tmp_path / "a.jsonl", measured()))
    assert status == 1 and "16 verdicts: 11 pass, 5 FAIL" in out


def test_nothing_measured_is_not_a_pass(tmp_path, capsys):
    status, out, _ = run(capsys, "report", archive(tmp_path / "a.jsonl", []))
    assert status == 10 and "note: no sweep was measured" in out
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    status, out, _ = run(capsys, "report", empty)
    assert status == 10 and f"note: {empty} is empty" in out


def test_a_damaged_line_is_4_and_can_be_left_out(tmp_path, capsys):
    path = archive(tmp_path / "a.jsonl", measured())
    lines = path.read_text("utf-8").splitlines(keepends=True)
    lines[4] = lines[4][:50] + "\n"
    path.write_text("".join(lines), "utf-8")
    status, out, err = run(capsys, "report", path)
    assert (
        status == 4 and out == "" and err.startswith(f"error: {path}: line 5 is not JSON") and "--skip-damaged" in err
    )
    status, out, err = run(capsys, "report", "--skip-damaged", path)
    assert (status, err) == (0, "") and f"note: {path}: skipped: line 5" in out and "1 to 2 repeats each" in out


def test_a_torn_end_is_a_note(tmp_path, capsys):
    path = archive(tmp_path / "a.jsonl", measured())
    path.write_bytes(path.read_bytes()[:-10])
    status, out, _ = run(capsys, "report", path)
    assert status == 0 and "ends early" in out.split("note: ")[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind":"session","format":99}\n', "was written by a newer release (format 99"),
        ("PK\x03\x04 not ours\n", "is not an archive of pytest-slmserve"),
        ('{"output_throughput": 1000.0}\n', "for results of another tool: --knob"),
    ],
)
def test_a_newer_or_foreign_file_is_4(text, message, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text(text, "utf-8")
    status, out, err = run(capsys, "report", path)
    assert (status, out) == (4, "") and message in err


def test_a_missing_archive_is_4(tmp_path, capsys):
    status, out, err = run(capsys, "report", tmp_path / "none.jsonl")
    assert (status, out) == (4, "") and err.startswith("error: cannot read ") and "--slm-records" in err


def mutilated(path: Path, *entries: str, value: object) -> Path:
    """One entry of the first line that has it becomes `value`."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    inner = next(line for line in lines if entries[0] in line)
    for entry in entries[:-1]:
        inner = inner[entry]
    inner[entries[-1]] = value
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    reseal(path)
    return path


@pytest.mark.parametrize(
    ("entries", "value"),
    [
        (("claims", "rows"), 5),
        (("plan", "sweeps"), 5),
        (("plan",), 5),
        (("environment", "gpu_name"), 5),
        (("workload", "longest"), 0),
        (("workload", "mean_output_tokens"), "many"),
        (("resolved", "attention_backend"), ["x"]),
    ],
)
def test_a_value_of_the_wrong_kind_is_4_without_a_traceback(entries, value, tmp_path, capsys):
    path = mutilated(archive(tmp_path / "a.jsonl", measured()), *entries, value=value)
    status, out, err = run(capsys, "report", path)
    assert (status, out) == (4, "") and "cannot be used" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report"], "PATH"),
        (["report", "--nonsense", "a"], "--nonsense"),
        (["nonsense"], "there is no command 'nonsense'"),
        (["reprot"], "there is no command 'reprot', did you mean report?"),
        (["figures"], "there is no command 'figures'"),
        (["report", "a", "--jsn"], "unrecognized arguments: --jsn, did you mean --json?"),
        (["advise", "a", "--slo", "2x@32"], "unrecognized arguments: --slo 2x@32, did you mean --slo-itl?"),
        (["report", "a", "--figures"], "--figures"),
        (["report", "a", "--format", "pdf"], "--format"),
    ],
)
def test_wrong_usage_is_4(arguments, message, capsys):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (4, "") and message in err.splitlines()[0] and "--help" in err


def test_without_arguments_there_is_help_with_ten_commands_by_what_one_wants(capsys):
    status, out, err = run(capsys)
    assert (status, err) == (4, "") and "usage: slmserve" in out and len(SUMMARIES) <= 10
    assert all(f"\n{title}:\n" in out for title in COMMANDS)
    assert all(f"  {name:<9} {summary}\n" in out for name, summary in SUMMARIES.items())


def test_the_version_is_that_of_the_package(capsys):
    status, out, err = run(capsys, "--version")
    assert (status, out, err) == (0, f"pytest-slmserve {version('pytest-slmserve')}\n", "")


def test_help_tells_the_exit_statuses(capsys):
    with pytest.raises(SystemExit) as end:
        main(["report", "--help"])
    assert end.value.code == 0 and "10 none is wrong but one is" in " ".join(capsys.readouterr().out.split())


SENSED = ("sm-per-batch", "energy-per-token", "utilisation", "memory-bound", "decoding")


def watched(measurements):
    """The same with the readings of a GPU that is well."""
    return [replace(m, run=replace(m.run, telemetry=readings(m.run.window_s[1]))) for m in measurements]


def readings(closes_s: float):
    return planted_telemetry(until_s=1.1 * closes_s, interval_s=closes_s / 32)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_figures_of_several_archives_are_written_and_named(suffix, tmp_path, capsys):
    pytest.importorskip("vl_convert")
    small, large = measured((1, 512), model="opt-125m"), measured((1, 256))
    paths = [archive(tmp_path / f"{i}.jsonl", watched(m)) for i, m in enumerate((small, large))]
    out = tmp_path / "new" / "pictures"
    status, text, err = run(capsys, "report", *paths, "--figures", out, "--format", suffix)
    names = ("sweeps", "latency", *SENSED)
    drawn = [line for line in text.splitlines() if "drawn: " in line]
    assert (status, err) == (1, ""), "as without pictures: claims need the loads between"
    assert drawn == [f"drawn: {out / name}.{suffix}" for name in names]
    assert {path.name for path in out.iterdir()} == {f"{name}.{suffix}" for name in names}
    if suffix == "svg":
        picture = (out / "sm-per-batch.svg").read_text("utf-8")
        assert "opt-125m" in picture and "opt-1.3b" in picture


def test_without_sensors_the_sweeps_are_drawn_and_the_rest_is_excused(tmp_path, capsys):
    pytest.importorskip("vl_convert")
    path, out = archive(tmp_path / "a.jsonl", measured()), tmp_path / "out"
    path.write_bytes(path.read_bytes()[:-10])
    status, text, err = run(capsys, "report", path, "--figures", out)
    note, _, drawn = text.partition("\ndrawn: ")
    sweeps, latency, *others = f"drawn: {drawn}".splitlines()
    assert (status, err) == (0, "") and "ends early" in " ".join(note.split())
    assert [sweeps, latency] == [f"drawn: {out / name}.png" for name in ("sweeps", "latency")]
    assert [line.split(":")[:2] for line in others] == [["not drawn", f" {name}"] for name in SENSED]
    assert {path.name for path in out.iterdir()} == {"sweeps.png", "latency.png"}


def test_nothing_to_draw_is_4_and_leaves_no_folder(tmp_path, capsys):
    pytest.importorskip("vl_convert")
    out = tmp_path / "out"
    status, _, err = run(capsys, "report", archive(tmp_path / "a.jsonl", []), "--figures", out)
    assert status == 4 and err.startswith("error: there is no sweep, no job, no request rate") and not out.exists()


def test_a_damaged_line_stops_the_figures_unless_it_is_left_out(tmp_path, capsys):
    pytest.importorskip("vl_convert")
    path = archive(tmp_path / "a.jsonl", measured())
    path.write_text(path.read_text("utf-8").replace('"kind":"measurement"', '"kind":"measure', 1), "utf-8")
    assert run(capsys, "report", path, "--figures", tmp_path / "out")[0] == 4
    status, text, _ = run(capsys, "report", path, "--figures", tmp_path / "out", "--skip-damaged")
    assert status == 0 and "skipped: line" in text and "drawn: " in text


def test_figures_without_vl_convert_are_4(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    path = archive(tmp_path / "a.jsonl", measured())
    status, text, err = run(capsys, "report", path, "--figures", tmp_path / "out")
    assert (status, text) == (4, "") and "pip install vl-convert-python" in err


def test_a_folder_that_cannot_be_made_is_4(tmp_path, capsys):
    pytest.importorskip("vl_convert")
    path = archive(tmp_path / "a.jsonl", measured())
    status, text, err = run(capsys, "report", path, "--figures", path)
    assert (status, text) == (4, "") and f"cannot make the folder {path}" in err and "--figures" in err


NAMES = ("--knob", "max_num_seqs", "--throughput", "total_tok_per_s", "--latency", "mean_itl_ms")


def external(tmp_path: Path, text: str = CSV) -> Path:
    path = tmp_path / "results.csv"
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(("slo", "chosen"), [("2x@32", 96), ("4x@32", 256), ("15.1ms", 96)])
def test_external_results_choose_as_published(tmp_path, capsys, slo, chosen):
    """OPT-1.3B of arXiv:2503.08311, epsilon 0.1."""
    path = external(tmp_path)
    asked = (*NAMES, "--where", "model=opt-1.3b", "--preemptions", "preemptions", "--slo-itl", slo)
    status, out, err = run(capsys, "report", path, *asked, "--efficiency", "0.1", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "") and (found["b_opt"]["value"], found["b_opt"]["known"]) == (chosen, False)
    status, out, err = run(capsys, "report", path, *asked)
    assert (status, err) == (0, "") and f"B_opt is {chosen} concurrent requests, the largest measured with" in out


@pytest.mark.parametrize("names", [("--latency", "mean_itl_ms"), ()])
def test_external_results_may_be_what_vllm_saves_and_are_read_once(tmp_path, capsys, monkeypatch, names):
    paths, read, seen = [], files.read_results, []
    monkeypatch.setattr(files, "read_results", lambda path: seen.append(path) or read(path))
    for batch in (1, 8, 64, 512):
        facts = {"max_concurrency": batch, "output_throughput": law(batch)}
        facts |= dict.fromkeys(("mean_itl_ms", "mean_tpot_ms"), 1e3 * batch / law(batch))
        paths.append(tmp_path / f"{batch}.json")
        paths[-1].write_text(json.dumps({"model_id": "m", "request_rate": "inf", **facts}), "utf-8")
    status, out, err = run(capsys, "report", *paths, *names, "--json")
    found = json.loads(out)
    assert seen == paths
    assert (status, err) == (0, "") and found["saturation_law"]["b_half"]["value"] == pytest.approx(45)
    assert found["saturation_law"]["error_max"] < 1e-9 and found["sweeps"][0]["plateau"]["value"] is None


def test_a_file_with_a_null_costs_no_other(tmp_path, capsys):
    """`vllm bench serve` writes null where nothing set the column, as it does for max_concurrency."""
    paths = []
    for batch in (None, 1, 8, 64, 512):
        rate = law(batch or 32)
        facts = {"max_concurrency": batch, "output_throughput": rate, "mean_itl_ms": 1e3 * (batch or 32) / rate}
        paths.append(tmp_path / f"{batch}.json")
        paths[-1].write_text(json.dumps(facts), "utf-8")
    names = ("--knob", "max_concurrency", "--throughput", "output_throughput", "--latency", "mean_itl_ms")
    status, out, err = run(capsys, "report", *paths, *names)
    assert (status, err) == (0, "") and "max_concurrency 512" in out
    assert "left out, without a value of max_concurrency: None.json: result 1" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--latency", "mean_itl"), "there is no column 'mean_itl'"),
        (("--throughput", "model"), "results.csv: line 2: model is 'opt-1.3b', which is no number"),
        (("--latency", "preemptions"), "--latency-unit"),
        (("--latency", "preemptions", "--latency-unit", "ms"), "no rate and no latency"),
        (("--knob", "preemptions"), "a knob has to be a positive whole number"),
        (("--where", "model=opt-2.7b"), "no row is left after --where model=opt-2.7b"),
        (("--where", "max_num_seqs=32"), "1 value of max_num_seqs, 3 are needed"),
        (("--where", "max_num_seqs=32", "--preemptions", "mean_running"), "0 values of max_num_seqs without preemp"),
        (("--preemptions", "max_num_seqs"), "0 values of max_num_seqs without preemption (9 with), 3 are needed"),
        (("--slo-itl", "2x"), "'2x' is no latency objective"),
        (("--efficiency", "10"), "argument --efficiency: '10' is not a share"),
        (("--tolerance", "nan"), "argument --tolerance: 'nan' is not a positive number"),
        (("--b-half", "-1"), "--b-half -1 is no batch"),
        (("--running", "mean_runing"), "there is no column 'mean_runing'"),
    ],
)
def test_what_cannot_be_judged_is_one_sentence_and_4(tmp_path, capsys, arguments, words):
    status, out, err = run(capsys, "report", external(tmp_path), *NAMES, *arguments)
    assert (status, out) == (4, "") and err.startswith("error: ") and words in err and err.count("\n") <= 2


def test_external_results_say_when_rows_of_several_models_are_one_curve(tmp_path, capsys):
    both = CSV + "".join(f"{line.replace('1.3b', '2.7b')}\n" for line in CSV.splitlines()[1:])
    _, out, _ = run(capsys, "report", external(tmp_path, both), *NAMES)
    assert "rows of different model (opt-1.3b, opt-2.7b) are taken as one curve" in out


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_value_stands_in_a_result_there_is_an_answer_or_one_sentence(tmp_path, capsys, data):
    header, *lines = [line.split(",") for line in CSV.splitlines()]
    results = [dict(zip(header, line)) for line in lines + lines[:3]]
    for _ in range(data.draw(st.integers(1, 3))):
        result, name = data.draw(st.sampled_from(results)), data.draw(st.sampled_from(header))
        result[name] = data.draw(PLAIN | st.sampled_from([0, 1, 1e-12, 1e12, 10**9, "1e3"]))
    path = external(tmp_path, json.dumps(results))
    sensed = ("--running", "mean_running", "--output-throughput", "output_tok_per_s", "--preemptions", "preemptions")
    asked = (*NAMES, *sensed, "--slo-itl", "2x@32", *data.draw(st.sampled_from([(), ("--json",)])))
    status, out, err = run(capsys, "report", path, *asked)
    assert (status == 0 and ("b_opt" in out or "plateau" in out)) or (status == 4 and err.startswith("error: "))


def test_nothing_heavy_is_imported(tmp_path):
    path = archive(tmp_path / "a.jsonl", measured())
    code = f"import sys; from pytest_slmserve.__main__ import main; status = main(['report', {str(path)!r}])\n"
    code += f"sys.exit(repr((status, [name for name in {HEAVY!r} if name in sys.modules])))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "(0, [])" and "opt-1.3b on NVIDIA H200" in done.stdout


def test_no_terminal_is_too_narrow(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1")
    assert main(["report", str(archive(tmp_path / "a.jsonl", measured())), "--show", "summary", "--strict"]) == 1
    assert "archive" in capsys.readouterr().out


def test_outputs_that_the_caller_has_closed_are_no_error(tmp_path):
    path = archive(tmp_path / "a.jsonl", measured())
    command = f'exec "{sys.executable}" -m pytest_slmserve report'
    for words, status in ((f"{path} >&-", 0), (f"{path}.none 2>&-", 4)):
        seen = subprocess.run(["bash", "-c", f"{command} {words}"], capture_output=True, text=True, check=False)
        assert (seen.returncode, seen.stderr) == (status, "")


def test_a_reader_that_leaves_early_sees_no_traceback(tmp_path):
    path = archive(tmp_path / "a.jsonl", measured())
    command = [sys.executable, "-m", "pytest_slmserve", "report", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_value_stands_in_a_line_there_is_a_report_or_one_sentence(whole, tmp_path, capsys, data):
    """Of the right type or not: the reader refuses it, or the judgement can live with it."""
    path = tmp_path / "a.jsonl"
    path.write_text(spoilt(data, whole), "utf-8")
    reseal(path)
    status, out, err = run(capsys, "report", path)
    assert (status in (0, 1, 10) and "verdicts" in out) or (status == 4 and err.startswith("error: "))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return archive(tmp_path_factory.mktemp("whole") / "a.jsonl", measured((16, 32, 64)), (16, 32, 64))


def spoilt(data: st.DataObject, whole: Path) -> str:
    """The text of an archive in which one plain value is any other."""
    changed = [json.loads(line) for line in whole.read_text("utf-8").splitlines()]
    number = data.draw(st.integers(0, len(changed) - 1))
    entries = data.draw(st.sampled_from(leaves(changed[number], (number,))))
    inner = changed
    for entry in entries[:-1]:
        inner = inner[entry]
    inner[entries[-1]] = data.draw(PLAIN | st.sampled_from([0, -1, 1e308, 2**62]))
    return "".join(f"{json.dumps(line)}\n" for line in changed)


def leaves(value: object, where: tuple[object, ...]) -> list[tuple[object, ...]]:
    """Where plain values stand; of a list, the first alone."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else None
    return [where] if inner is None else [leaf for key, each in inner for leaf in leaves(each, (*where, key))]


def vllms_results(folder, loads):
    for load in loads:
        rate = law(load or 32)
        facts = {"max_concurrency": load, "output_throughput": rate, "mean_tpot_ms": 1e3 * (load or 32) / rate}
        (folder / f"{load}.json").write_text(json.dumps(facts), "utf-8")
    return sorted(folder.iterdir())


def test_of_vllms_own_results_the_columns_are_known(tmp_path, capsys):
    paths = vllms_results(tmp_path, (32, 64, 128, 256))
    status, out, err = run(capsys, "report", *paths, "--json")
    assert (status, err) == (0, "")
    named = json.loads(out)["columns"]
    assert (named["knob"], named["throughput"], named["latency"]) == (
        "max_concurrency",
        "output_throughput",
        "mean_tpot_ms",
    )
    status, out, err = run(capsys, "advise", *paths, "--knob", "max_concurrency")
    assert (status, err) == (0, "") and "concurrent requests" in out, "of the others one is enough"
    status, _, err = run(capsys, "report", external(tmp_path))
    assert status == 4 and "try: --knob --throughput --latency NAME" in err, "of others they are not guessed"


def test_too_few_results_say_which_had_no_load(tmp_path, capsys):
    status, _, err = run(capsys, "report", *vllms_results(tmp_path, (32, 64, None)))
    assert status == 4 and "2 values of max_concurrency, 3 are needed; left out, without a value of max_c" in err
