"""`asv`: planted costs come out, dearer is a larger number, and another machine begins a new curve; files are as asv
wants them, keep what was not measured now, and are written all or none; and a release is only added at the end."""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from asv_folders import ROWS as RELEASES, folder_of_releases, launches, results
from asv_runner.statistics import compute_stats
from command_line import refused, said
from hypothesis import given, strategies as st
from scripts import CHECKOUT, in_checkout
from stored_records import BUSY, engine_alone, stored
from strategies import H200, RESOLVED, measurement
from swept import watched

from pytest_slmserve.commands import asv
from pytest_slmserve.commands.asv import START, BenchmarkHost, Value
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import GateLaunch, Measurement, Replica
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

COMMIT = "c6ef7bc849a86350bcc5e10a995c6a715a4bc8ca", 1_784_937_600
SENSED = ("busy_seconds_per_1000_output_tokens", "joules_per_1000_output_tokens")
COSTS = ("seconds_per_1000_requests", "ms_per_output_token", *SENSED)
READY = replace(RESOLVED, ready_s=40.0)
KEPT = sorted((CHECKOUT / "benchmarks/asv/results").glob("nvidia-h200/*-vllm-*.json"))
ONE = measurement()


def values(*measurements: Measurement) -> dict[BenchmarkHost, asv.Rows]:
    return asv.values(asv.steady_measurements(measurements))


def costs(*measurements: Measurement) -> dict[str, tuple[float, ...]]:
    """Samples by the last part of the benchmark's name, of records that all go to one file and have one load."""
    (rows,) = values(*measurements).values()
    found = {name.rpartition(".")[2]: [tuple(v.launches.values()) for v in row.values()] for name, row in rows.items()}
    return {name: samples for name, (samples,) in found.items()}


def place_of(m: Measurement) -> BenchmarkHost:
    (place,) = values(m)
    return place


def test_planted_costs_come_out():
    """concurrency 8 at 1000 tokens/s: a step of 8 ms; 32 tokens a request; 400 W; 95% busy."""
    (sensed,) = watched([measurement(8, 1000.0, resolved=READY)])
    planted = {name: (cost,) for name, cost in zip((*COSTS, "seconds_to_start"), (32, 8, 0.95, 400, 40))}
    assert costs(sensed) == {name: pytest.approx(cost, rel=1e-3) for name, cost in planted.items()}
    assert costs(ONE).keys() == {*COSTS} - {*SENSED}, "neither is known without sensors"
    assert [dict(place_of(m).curve)["power limit"] for m in (ONE, sensed)] == ["unknown", "700 W"]
    rates = {"one": (1000.0, 1100.0), "two": (990.0,), "three": (1010.0, 1030.0, 1050.0)}
    samples = costs(*(measurement(8, r, launch=n, repeat=i) for n, each in rates.items() for i, r in enumerate(each)))
    means = [statistics.fmean(32_000 / r for r in each) for each in rates.values()]
    assert sorted(samples[COSTS[0]]) == pytest.approx(sorted(means), rel=1e-3)
    assert asv.asv_facts([2.0]) == {"result": 2.0, "samples": [2.0]}, "of one launch asv would show ±0"
    facts = asv.asv_facts(listed := [*samples[COSTS[0]]])
    result, stats = compute_stats(listed, 1)
    assert facts["result"] == pytest.approx(result, rel=1e-5) and facts["samples"] == listed
    assert {name: facts[f"stats_{name}"] for name in stats} == pytest.approx(stats, rel=1e-4)


@given(st.integers(1, 64), st.floats(10, 1000), st.floats(1.01, 4), st.floats(1, 500))
def test_slower_run_has_larger_cost(concurrency, rate, factor, ready_s):
    before, after = (
        costs(*watched([measurement(concurrency, rate / by, resolved=replace(READY, ready_s=ready_s * by))]))
        for by in (1, factor)
    )
    assert before.keys() == after.keys() == {*COSTS, "seconds_to_start"}
    for name in before:
        assert after[name][0] / before[name][0] == pytest.approx(factor, rel=2e-3)


@pytest.mark.parametrize("other", [
    measurement(failures=1), measurement(preempted=1),
    measurement(load=OpenLoop(requests=8)), measurement(load=ClosedLoop(8, requests=64)),
    replace(ONE, replica=Replica("g", 0, 2, "s", "mps")), replace(ONE, replica=Replica("g", 0, 1, "s", "mps")),
], ids=["failed", "preempted", "burst", "counted", "replica", "alone-beside-replicas"])  # fmt: skip
def test_only_steady_measurements_count(other):
    assert asv.steady_measurements([other]) == []
    assert costs(ONE, other) == costs(replace(ONE, paired=GateLaunch("g", 1, "candidate", second=True))) == costs(ONE)


def test_degraded_repeat_counts_alone():
    sound, crowded = engine_alone(1000.0), {**BUSY, sensors.FOREIGN_PROCESSES: None, sensors.GPU_PROCESSES: 3.0}
    degraded = engine_alone(500.0, columns=crowded, launch="two")
    of = [next(iter(asv.values(found).values())) for found in ([sound, degraded], [sound], [degraded])]
    each = [next(value for row in rows.values() for value in row.values()) for rows in of]
    assert each[0].launches == each[1].launches != each[2].launches
    assert [value.degraded for value in each] == [False, False, True]
    asked = replace(ONE.workload, hash="ffffff", spec=replace(ONE.workload.spec, seed=1))
    (found,) = values(ONE, measurement(load=ClosedLoop(8, ramp_up="burst")), replace(ONE, workload=asked)).values()
    groups = {name.partition(".")[0] for name in found if name != START}
    assert groups == {"64-32-staggered-012345", "64-32-burst-012345", "64-32-staggered-ffffff"}
    cpu = replace(H200, gpu_name=None, gpu_memory_bytes=None, cpu="Xeon(R) Gold", cores=8)
    both = asv.steady_measurements([ONE, measurement(environment=cpu)])
    assert {place.machine for place in asv.values(both)} == {"nvidia-h200", "xeon-r-gold-8-cores"}
    assert {place.machine for place in asv.values(both[:1], "runner-1")} == {"runner-1"}
    with pytest.raises(BadUsage, match=r"runner-1 .*nvidia-h200 .*xeon-r-gold-8-cores"):
        asv.values(both, "runner-1")
    with pytest.raises(BadUsage):
        values(measurement(environment=replace(H200, vllm=None)))  # a simulated engine is of no release


@pytest.mark.parametrize(("part", "changed", "same_curve", "same_file"), [
    *(("environment", each, False, False) for each in ({"driver": "1"}, {"gpu_name": "NVIDIA H100"}, {"cores": 7})),
    ("environment", {"torch": "9.9"}, True, False),
    *(("environment", each, True, True) for each in ({"host": "a"}, {"python": "3.99"}, {"vllm": "0.26.0+cu129"})),
    ("spec", {"max_num_seqs": 4096}, False, False), ("spec", {"dtype": "bfloat16"}, False, False),
    ("spec", {"extra": (("block_size", 32),)}, False, False), ("spec", {"env": (("VLLM_X", "1"),)}, False, False),
    ("spec", {"env": (("PYTHONPATH", "/x"),)}, True, True), ("spec", {"python": "/opt/python"}, True, True),
    ("spec", {"gpu": 3}, True, True), ("spec", {"kv_cache_bytes": 1 << 33}, True, True),
])  # fmt: skip
def test_new_driver_begins_new_curve(part, changed, same_curve, same_file):
    here, there = place_of(ONE), place_of(replace(ONE, **{part: replace(getattr(ONE, part), **changed)}))
    seen = here.curve == there.curve, here == there, here.env_name == there.env_name
    assert seen == (same_curve, same_file, same_file)


PLACE = BenchmarkHost("nvidia-h200", "0.26.0", (("gpu", "NVIDIA H200"), ("driver", "1")), "2.11.0")
SAMPLES = st.lists(st.floats(1e-3, 1e6).map(asv.rounded_value), min_size=1, max_size=4).map(tuple)
MODELS = st.sampled_from("xy").map(repr)
SERVED = st.tuples(st.sampled_from([f"a.{name}" for name in COSTS]), st.tuples(MODELS, st.integers(1, 99).map(str)))
Cells = dict[tuple[str, tuple[str, ...]], tuple[float, ...]]  # samples by benchmark and parameters
CELLS = st.dictionaries(SERVED | st.tuples(st.just(START), st.tuples(MODELS)), SAMPLES, max_size=6)
CELL = ("a.ms_per_output_token", ("'x'", "8"))


def file_of(planted: Cells, old: asv.File | None = None, launch: str = "a", degraded: bool = False) -> asv.File:
    rows: asv.Rows = {}
    for (name, parameters), samples in planted.items():
        launched = {f"{launch}{i}": sample for i, sample in enumerate(samples)}
        rows.setdefault(name, {})[parameters] = Value(launched, 1_767_225_600_000, degraded)
    joined = asv.joined_rows({} if old is None else asv.result_rows(old), rows)
    file = asv.file_head(PLACE, COMMIT) | asv.rows_as_asv(joined, asv.shown_names([joined]))
    return json.loads(json.dumps(file))


def samples_in(file: asv.File) -> Cells:
    rows = asv.result_rows(file).items()
    return {(name, key): tuple(value.launches.values()) for name, row in rows for key, value in row.items()}


@given(CELLS, CELLS)
def test_joining_keeps_old_samples(old, new):
    assert samples_in(file_of(old)) == old
    joined = file_of(new, file_of(old), launch="b")
    assert samples_in(joined) == {key: old.get(key, ()) + new.get(key, ()) for key in (*old, *new)}
    assert joined == file_of(new, joined, launch="b"), "once more changes nothing"


@pytest.mark.parametrize(("before", "after", "samples"), [
    (False, True, (1.0,)), (True, False, (2.0,)), (True, True, (1.0, 2.0)), (False, False, (1.0, 2.0)),
])  # fmt: skip
def test_sound_samples_replace_degraded(before, after, samples):
    new = file_of({CELL: (2.0,)}, file_of({CELL: (1.0,)}, degraded=before), "b", degraded=after)
    assert samples_in(new) == {CELL: samples}


def test_repeated_launch_replaces_itself():
    old = file_of({CELL: (1.0, 2.0, 3.0)})
    assert samples_in(file_of({CELL: (1.5,)}, old)) == {CELL: (1.5, 2.0, 3.0)}
    for columns in (["result", "params"], [*asv.COLUMNS, "more"]):
        with pytest.raises(ValueError, match="zip"):
            asv.result_rows({**old, "result_columns": columns})
    listed = asv.benchmarks_file([file_of({(CELL[0], ("'x'", str(c))): (1.0,) for c in (1024, 8, 96, 2)})])
    assert listed[CELL[0]]["params"][1] == ["2", "8", "96", "1024"]
    file = {"result_columns": list(asv.COLUMNS), "results": {START: [[3.5, None], [["'x'", "'y'"]], "1"]}}
    assert asv.benchmarks_file([file])[START]["params"] == [["'x'", "'y'"]]


@given(CELLS, CELLS)
def test_rows_follow_asv_format(planted, others):
    """Rows are lists over the product of the parameters, the value being the median of its samples."""
    file = file_of(planted)
    for name, row in file["results"].items():
        columns = dict(zip(file["result_columns"], row, strict=True))
        keys = list(itertools.product(*columns["params"]))
        assert columns["version"] == "1" and {len(columns[c]) for c in asv.PER_VALUE} == {len(keys)}
        for key, value in zip(keys, columns["result"]):
            known = planted.get((name, key))
            assert value == (None if known is None else asv.rounded_value(statistics.median(known)))
    assert (file["commit_hash"], file["date"]) == (COMMIT[0], 1_784_937_600_000)
    assert file["params"] == {"machine": "nvidia-h200", "gpu": "NVIDIA H200", "driver": "1"}
    theirs = {"theirs.time_it": {"name": "theirs.time_it"}}
    listed = asv.benchmarks_file([file, file_of(others)], theirs)
    assert listed.keys() == {"version", *theirs, *(name for name, _ in (*planted, *others))}
    assert listed["version"] == 2 and listed["theirs.time_it"] == theirs["theirs.time_it"]
    for name, parameters in (*planted, *others):
        known = listed[name]
        assert known["name"] == name and len(known["params"]) == len(known["param_names"])
        assert all(value in axis for value, axis in zip(parameters, known["params"], strict=True))


@in_checkout
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_file_round_trips(path):
    old = json.loads(path.read_text("utf-8"))
    machine, *curve = (old["params"] | {asv.ENGINE: old[asv.ENGINE]}).items()
    place = BenchmarkHost(machine[1], old["requirements"]["vllm"], tuple(curve), old["requirements"]["torch"])
    head, rows = asv.file_head(place, (old["commit_hash"], old["date"] // 1000)), asv.result_rows(old)
    made = head | {key: old[key] for key in (asv.ENGINE, "params")} | asv.rows_as_asv(rows, asv.shown_names([rows]))
    assert json.loads(json.dumps(made)) == old and old[asv.ENGINE].startswith(old["params"][asv.ENGINE])
    assert [name for name in old["results"] if asv.HASH.search(name)] == [], "each model has one workload of a name"
    assert set(old["results"]) <= {asv.HASH.sub("", name) for name in old[asv.LAUNCHES]}


def test_ambiguous_workload_gets_hash(folder, convert):
    """Only where a model has two workloads of a name, also in files that were written before: their launches stay."""
    assert convert(launches("0.25.1")).status == 0
    (before,) = [name for name in results(folder) if "-vllm-" in name]
    other = [replace(m, workload=replace(m.workload, hash="abcdef" + 58 * "0")) for m in launches(loads=(8,))]
    assert convert([replace(m, spec=replace(m.spec, model="opt-125m")) for m in other]).status == 0
    shown = [set(json.loads(results(folder)[name])["results"]) for name in results(folder) if "-vllm-" in name]
    assert {name.partition(".")[0] for names in shown for name in names} == {"64-32-staggered", "start"}
    assert convert(other).status == 0
    listed = json.loads(results(folder)["benchmarks.json"])
    hashed = {"64-32-staggered-012345", "64-32-staggered-abcdef", "start"}
    assert {name.partition(".")[0] for name in listed} == {"version", *hashed}
    old = json.loads(results(folder)[before])
    assert set(old["results"]) == set(old[asv.LAUNCHES]) and old["requirements"]["vllm"] == "0.25.1"


def test_ambiguous_engine_gets_hash(folder, convert):
    """Only where two engines have the same words, also in files that were written before: each keeps its curve."""

    def engines():
        files = [json.loads(text) for name, text in results(folder).items() if "-vllm-" in name]
        return sorted(file["params"]["engine"] for file in files)

    words = "dummy float16, 1024 seqs, 8192 tokens"
    assert convert(launches()).status == 0 and engines() == [words]
    few = [replace(m, spec=replace(m.spec, max_num_seqs=64)) for m in launches()]
    assert convert(few).status == 0 and engines() == [words, words.replace("1024", "64")]
    eager = [replace(m, spec=replace(m.spec, enforce_eager=True)) for m in launches()]
    assert convert(eager).status == 0
    both, other = engines()[:2], engines()[2:]
    assert other == [words.replace("1024", "64")] and len({*both}) == 2
    assert all(re.fullmatch(f"{words}, [0-9a-f]{{6}}", each) for each in both)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    tags = [f"v{release} {f'{i}' * 40} {1_782_777_600 + i}" for i, (release, _) in enumerate(RELEASES)]
    form = "--format=%(refname:strip=2) %(objectname) %(authordate:unix)"
    asked = (tmp_path / "asv/releases.git", "for-each-ref", form, "refs/tags/v*")
    monkeypatch.setattr(asv, "git", lambda *given: {asked: "\n".join(tags)}[given])
    return folder_of_releases(tmp_path / "asv")


@pytest.fixture
def convert(capsys, folder, tmp_path):
    """Converts these measurements, each list in an archive of its own; further words of the command by `words`."""

    def converted(*lists, words=()):
        paths = [stored(tmp_path / f"{len([*tmp_path.iterdir()])}.jsonl", *each) for each in lists]
        return said(capsys, "asv", "convert", *paths, "--into", folder, *words)

    return converted


def served(folder: Path) -> dict:
    """Columns of seconds per 1000 requests in the only result file."""
    (file,) = [json.loads(text) for name, text in results(folder).items() if "-vllm-" in name]
    return dict(zip(file["result_columns"], file["results"]["64-32-staggered.seconds_per_1000_requests"]))


def test_converted_results_are_written_once(folder, convert):
    seen, files = convert(launches()), results(folder)
    (name,) = files.keys() - {"nvidia-h200/machine.json", "benchmarks.json"}
    assert seen == (0, f"written: {folder}/results/{name} (5 values)\n", "")
    assert name.startswith("nvidia-h200/22222222-vllm")
    machine = json.loads(files["nvidia-h200/machine.json"])
    assert machine == {"machine": "nvidia-h200", "version": 1, "gpu": "NVIDIA H200"}
    listed = json.loads(files["benchmarks.json"])["64-32-staggered.ms_per_output_token"]
    assert (listed["params"], listed["unit"]) == ([["'opt-1.3b'"], ["8", "64"]], "ms/token")
    assert convert(launches(), launches()).status == 0 and results(folder) == files
    elsewhere = launches(name="elsewhere", environment={"host": "two"})
    seen = convert([*launches(), *elsewhere, *launches(failures=1, loads=(16,))])
    assert seen.status == 0 and "2 measurements, invalid" in seen.words and "2 hosts" in seen.words
    assert [len(samples) for samples in served(folder)["samples"]] == [4, 4]
    other_driver = convert([*launches(), *launches(name="newer", environment={"host": "two", "driver": "590"})])
    assert (other_driver.status, other_driver.out.count("written: "), "note: " in other_driver.out) == (0, 2, False)


@pytest.mark.parametrize(("made", "words", "facts"), [
    ([*launches(), *launches("0.25.0")], [], ["0.25.0", '["0.25.0", "YYYY-MM-DD"]', "asv init --into"]),
    (launches(failures=1), [], ["--slm-gpu"]),
    *((launches(), ["--machine", name], ["--machine"]) for name in ("", "..", "a/b")),
])  # fmt: skip
def test_unconvertible_records_are_refused(folder, convert, made, words, facts, monkeypatch):
    refused(convert(made, words=words), *facts)
    monkeypatch.setattr(asv, "git", Mock(side_effect=FileNotFoundError("git")))
    refused(convert(launches()), str(folder), f"slmserve asv init --into {folder}")
    monkeypatch.setitem(sys.modules, "asv_runner.statistics", None)
    refused(convert(made, words=words), "pip install 'asv>=")
    assert results(folder) == {}


def test_described_machine_stays_unchanged(folder, convert):
    described = folder / "results/runner-1/machine.json"
    described.parent.mkdir(parents=True)
    described.write_text(before := '{"machine": "runner-1", "version": 1, "ram": "2 TB"}', "utf-8")
    assert convert(launches(), words=["--machine", "runner-1"]).status == 0
    assert described.read_text("utf-8") == before
    assert sorted(name.partition("/")[0] for name in results(folder)) == ["benchmarks.json", "runner-1", "runner-1"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"result_columns": [], "results": {"x": [1]}}', '{"results": 3}'])
@pytest.mark.parametrize("damaged", ["nvidia-h200/", "benchmarks.json"])
def test_foreign_result_file_is_refused(folder, convert, damaged, text):
    convert(launches())
    (name,) = [name for name in results(folder) if name.startswith(damaged) and "machine" not in name]
    (folder / "results" / name).write_text(text, "utf-8")
    before, seen = results(folder), convert(launches())
    if damaged == "benchmarks.json" and text.startswith("{"):
        assert seen.status == 0, "its benchmarks are those of the results"
    else:
        refused(seen, str(folder / "results"))
        assert results(folder) == before


SHIPPED = asv.releases_in(asv.initial_files()[asv.RELEASES])


@pytest.fixture
def git(monkeypatch):
    """Answers `log` with its `rows`, and keeps its calls."""

    def answer(repository, command, *words, given=""):
        return "".join(f"vllm {release} {day}\n" for release, day in found.rows) if command == "log" else ""

    found = Mock(side_effect=answer, rows=[])
    monkeypatch.setattr(asv, "git", found)
    return found


@pytest.mark.parametrize(("rows", "fact"), [
    ([RELEASES[0], ("0.24.0.post1", "2026-07-01"), *RELEASES[1:]], "row 2 "),
    ([RELEASES[0], ("0.25.1", "2026-07-15"), RELEASES[2]], "row 2 "),
    (RELEASES[:2], "row 3 "), ([*RELEASES, RELEASES[0]], "twice"),
], ids=["inserted", "another day", "removed", "twice"])  # fmt: skip
def test_releases_are_only_appended(tmp_path, git, rows, fact):
    git.rows = RELEASES
    with pytest.raises(ValueError, match=fact):
        asv.make_repository(tmp_path, rows)
    assert {call.args[1] for call in git.call_args_list} <= {"log"}


@pytest.fixture
def init(capsys, tmp_path):
    return lambda: said(capsys, "asv", "init", "--into", tmp_path / "asv")


def test_init_adds_new_releases(tmp_path, init, git):
    assert len(SHIPPED) > 10 and [day for _, day in SHIPPED] == sorted(day for _, day in SHIPPED)
    folder, seen = tmp_path / "asv", init()
    assert (seen.status, seen.err) == (0, "") and f"{len(SHIPPED)} releases, {len(SHIPPED)} added" in seen.out
    assert {path.name: path.read_text("utf-8") for path in folder.iterdir()} == asv.initial_files()
    git.rows = SHIPPED
    (folder / "releases.git").mkdir()
    (folder / "asv.conf.json").write_text("{}", "utf-8")
    assert init() == (0, f"{folder}/releases.git: {len(SHIPPED)} releases, 0 added\n", "")
    assert (folder / "asv.conf.json").read_text("utf-8") == "{}"
    listed = folder / "releases.json"
    listed.write_text(json.dumps(SHIPPED[:-2]), "utf-8")
    assert f"written: {listed}\n" in init().out
    assert listed.read_text("utf-8") == asv.initial_files()["releases.json"], "so that a difference is a row"
    listed.write_text(json.dumps([*SHIPPED, ("99.0", "2030-01-01")]), "utf-8")
    assert f"{len(SHIPPED) + 1} releases, 1 added" in init().out and "99.0" in listed.read_text("utf-8")


@pytest.mark.parametrize("text", ["", "[[1]]", '[["0.20.0", "in May"]]', "3"])
def test_unreadable_release_list_is_refused(tmp_path, init, git, text):
    failed = subprocess.CalledProcessError(1, "git", stderr="it is locked\n")
    for git.side_effect in (FileNotFoundError(2, "not there", "git"), failed):
        refused(init(), "git", "--into")
    git.reset_mock()
    (tmp_path / "asv/releases.json").write_text(text, "utf-8")
    refused(init(), f"{tmp_path}/asv/releases.json")
    assert not git.called


def test_git_ignores_user_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", "elsewhere")
    monkeypatch.setattr(asv.subprocess, "run", run := Mock())
    assert asv.git(tmp_path, "log", given="a row") is run.return_value.stdout
    given = {name: text for name, text in run.call_args.kwargs["env"].items() if name.startswith("GIT_")}
    assert given == {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    assert run.call_args.args == (["git", "--git-dir", str(tmp_path), "log"],)
