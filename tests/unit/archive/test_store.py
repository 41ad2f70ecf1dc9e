from __future__ import annotations

import errno
import functools
import gzip
import io
import json
import lzma
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sealed_lines import reseal, resealed
from strategies import NAMES, measurements

from pytest_slmserve.archive import store
from pytest_slmserve.archive.codec import measurement_line
from pytest_slmserve.archive.store import FORMAT, Archive, read
from pytest_slmserve.schema.errors import BadArchive, BadUsage
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.records import (
    Environment,
    Failures,
    GateLaunch,
    Measurement,
    Resolved,
    Run,
    Samples,
    Steps,
    Telemetry,
)
from pytest_slmserve.schema.sensors import SENSORS
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, WorkloadReference, WorkloadSpec

TESTS = Path(__file__).parents[2]
DATA = TESTS / "data"
CLAIMS = {"plateau": {"tolerance": 0.1}}
DISK = settings(deadline=None)  # a busy disk takes its time over fsync
EACH = pytest.mark.parametrize("name", ["records.jsonl", "records.jsonl.gz", "records.jsonl.xz"])
PACKED = pytest.mark.parametrize(
    ("name", "magic", "pack"),
    [("a.jsonl.gz", b"\x1f\x8b\x08\x00", gzip.compress), ("a.jsonl.xz", b"\xfd7zXZ\x00", lzma.compress)],
)


# Two requests over three steps; the second is cut off before its first token.
RUN = Run(
    Samples((0, 1), (0.000012, 0.5), (0.0001, 0.500001), (0.01, None), (0.9, None), (512, 512), (3, 0), (True, False)),
    Steps((0.01, 0.011, 0.9), (1, 1, 0), (0, 0, None), (1, 1, 1), (512, 0, 0), (0.0044, 0.004537, None), (0, 0, 0)),
    (0.1, 0.8),
    1,
    "RuntimeError: no answer",
)


def example(concurrency: int = 1, launch: str = "4f1d") -> Measurement:
    return Measurement(
        spec=EngineSpec("opt-125m", env=(("A", "1"),), extra=(("block_size", 16),)),
        resolved=Resolved(kv_blocks=7281, block_size=16, capture_sizes=(1, 2, 4), ready_s=33.25),
        environment=Environment(platform="cuda", gpu_name="NVIDIA H200", vllm="0.26.0", cores=16),
        workload=WorkloadReference("c0ffee", WorkloadSpec(), 1024, 512.0, 256.0, 768, "lengths"),
        load=ClosedLoop(concurrency),
        run=RUN,
        launch=launch,
        measured_at="2025-11-21T12:00:00.000+00:00",
    )


def write(path: Path, *kept: Measurement) -> Path:
    with Archive.open(path) as archive:
        archive.begin(CLAIMS, {"batches": [1, 2]})
        for measurement in kept:
            archive.add(measurement)
    return path


@functools.cache
def written(name: str, *concurrencies: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write(Path(folder, name), *map(example, concurrencies)).read_bytes()


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Lines: session, engine, then measurements with concurrency 1, 2, 4."""
    return write(tmp_path / "records.jsonl", example(1), example(2), example(4))


def change(path: Path, number: int, new: str) -> None:
    lines = path.read_text("utf-8").splitlines()
    lines[number - 1] = resealed(new)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


# What is written is read again


def test_failures_keep_their_rows_and_older_records_have_none(tmp_path):
    failed = Failures((1,), (0.25,), (0.5,), ("HTTP 503",), (0.2,))
    noted = replace(example(), run=replace(RUN, failed=failed))
    bare = replace(example(2), run=replace(RUN, failed=replace(failed, scheduled_s=None)))
    found = read(write(tmp_path / "a.jsonl", noted, bare, example(4))).measurements
    assert [m.run.failed for m in found] == [failed, replace(failed, scheduled_s=None), None]
    assert found[0].id == noted.id and found[2].run.failures == 1


@pytest.mark.parametrize(
    "wrong", [{"request": [1, 2]}, {"sent_s": ["soon"]}, {"kind": [5]}, {"scheduled_s": []}, {"ended_s": None}]
)
def test_damaged_rows_of_failures_are_an_error(tmp_path, wrong):
    failed = Failures((1,), (0.25,), (0.5,), ("HTTP 503",), (0.2,))
    path = write(tmp_path / "a.jsonl", replace(example(), run=replace(RUN, failed=failed)))
    *first, last = path.read_text("utf-8").splitlines()
    facts = json.loads(last)
    facts["run"]["failed"] |= wrong
    path.write_text("\n".join([*first, json.dumps(facts), ""]), "utf-8")
    reseal(path)
    with pytest.raises(BadArchive, match="line 3"):
        read(path)


@EACH
@DISK
@given(st.lists(measurements(), max_size=4))
def test_round_trip(name, kept):
    with tempfile.TemporaryDirectory() as folder:
        contents = read(write(Path(folder, name), *kept))
    assert contents.measurements == tuple(kept)
    assert [m.id for m in contents.measurements] == [m.id for m in kept]
    assert contents.notes == ()


def test_a_launch_of_a_gate_keeps_its_place_and_nobody_else_has_one(tmp_path):
    place = GateLaunch("gate-1", 3, "candidate", second=True)
    path = write(tmp_path / "records.jsonl", example(1), replace(example(2), paired=place))
    assert [m.paired for m in read(path).measurements] == [None, place]
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    [alone, paired] = [line for line in lines if line["kind"] == "measurement"]
    assert "paired" not in alone and paired["paired"]["side"] == "candidate"


@pytest.mark.parametrize("place", [{"gate": "g", "pair": "x", "side": "baseline", "second": False}, {"pair": 1}])
def test_a_place_that_is_none_is_damage(tmp_path, place):
    path = write(tmp_path / "records.jsonl", replace(example(), paired=GateLaunch("g", 1, "baseline", second=False)))
    lines = path.read_text("utf-8").splitlines()
    change(path, len(lines), json.dumps({**json.loads(lines[-1]), "paired": place}))
    with pytest.raises(BadArchive):
        read(path)


def telemetries() -> st.SearchStrategy[Telemetry]:
    """Any readings that are whole multiples of their sensor's resolution."""

    def with_rows(rows: int) -> st.SearchStrategy[Telemetry]:
        def column(number: int) -> st.SearchStrategy[tuple[float | None, ...]]:
            step = SENSORS[number].resolution if number in SENSORS else 1e-6
            per_unit = 1 / step if step >= 1 else round(1 / step)
            value = st.none() | st.integers(-(10**9), 10**9).map(lambda whole: whole / per_unit)
            return st.lists(value, min_size=rows, max_size=rows).map(tuple)

        stamps = st.integers(0, 10**10).map(lambda us: us / 1e6)
        return st.builds(
            Telemetry,
            st.lists(NAMES, max_size=2).map(tuple),
            stamps,
            st.lists(stamps, min_size=rows, max_size=rows).map(tuple),
            st.lists(st.none() | stamps, min_size=rows, max_size=rows).map(tuple),
            st.fixed_dictionaries({}, optional={n: column(n) for n in (*SENSORS, 77)}),
            st.dictionaries(NAMES, st.integers(0, 99), max_size=2),
            st.lists(NAMES, max_size=2).map(tuple),
        )

    return st.integers(0, 6).flatmap(with_rows)


@EACH
@DISK
@given(telemetries(), st.none() | st.integers(0, 10**12).map(lambda us: us / 1e6))
def test_telemetry_round_trip(name, telemetry, began_s):
    kept = replace(example(), run=replace(RUN, telemetry=telemetry, began_s=began_s))
    with tempfile.TemporaryDirectory() as folder:
        [found] = read(write(Path(folder, name), kept)).measurements
    assert found == kept


def test_a_damaged_telemetry_is_a_damaged_line(tmp_path):
    telemetry = Telemetry(("nvml",), 0.25, (1.0, 2.0), (None, 0.25), {155: (300.0, 301.0)})
    path = write(tmp_path / "a.jsonl", replace(example(), run=replace(RUN, telemetry=telemetry)))
    change(path, 3, path.read_text("utf-8").splitlines()[2].replace('"155":[300000,1000]', '"155":[300000]'))
    with pytest.raises(BadArchive, match="line 3.*have not 2 rows"):
        read(path)


@DISK
@given(st.lists(st.integers(-(10**13), 10**13), max_size=40))
def test_a_clock_has_each_stamp_once_and_in_order(stamps):
    shared = [stamp / 1e6 for stamp in (*stamps, *stamps)]
    run = replace(RUN, samples=Samples(*[()] * 8), steps=Steps(tuple(shared), *[(0,) * len(shared)] * 6))
    line = measurement_line(replace(example(), run=run))["run"]
    assert {len(place) for place in line["clock_us"][1:]} <= {len(set(stamps)) - 1}
    assert list(accumulate(line["steps"]["time_tick"])) == [sorted(set(stamps)).index(stamp) for stamp in stamps * 2]
    with tempfile.TemporaryDirectory() as folder:
        [found] = read(write(Path(folder, "a.jsonl"), replace(example(), run=run))).measurements
    assert found.run == run


def test_gaps_are_written_in_base_64_one_text_for_each_place():
    run = replace(RUN, samples=Samples(*[()] * 8), steps=Steps((-1e-6, 0, 63e-6, 4158e-6), *[(0,) * 4] * 6))
    assert measurement_line(replace(example(), run=run))["run"]["clock_us"] == [-1, "AA/", "B//"]


@DISK
@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=20))
def test_finer_stamps_are_kept_to_a_microsecond(stamps):
    columns = Steps(stamps, *[[0] * len(stamps)] * 6)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder, "a.jsonl"), replace(example(), run=replace(RUN, steps=columns)))
        found = read(path).measurements[0].run.steps.time_s
    assert found == pytest.approx(stamps, rel=0, abs=0.500001e-6)


@pytest.mark.parametrize("number", [1, 2])
def test_an_older_format_is_refused_and_the_script_that_writes_it_anew_is_named(number):
    path = DATA / f"archive-format-{number}.jsonl"
    for opening in (read, Archive.open):
        with pytest.raises(
            BadArchive, match=f"has format {number}, and this release reads format {FORMAT}\n"
        ) as raised:
            opening(path)
        assert f"python studies/migrate.py {path} NEW.jsonl" in raised.value.hint


def test_a_line_without_its_checksum_is_damaged(three):
    text = three.read_text("utf-8")
    three.write_text(re.sub(r',"crc32":"[0-9a-f]{8}"', "", text, count=1), "utf-8")
    with pytest.raises(BadArchive, match="line 1 cannot be used .it has no checksum"):
        read(three)


@given(st.data())
def test_a_flipped_bit_is_found_wherever_it_is(data):
    """In a line that is not packed nothing else would tell."""
    raw = bytearray(written("a.jsonl", 1, 2))
    whole = len(raw.splitlines())
    at = data.draw(st.integers(0, len(raw) - 1).filter(lambda at: raw[at : at + 1] != b"\n"))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(raw)
        try:
            assert read(path, skip_damaged=True).notes and whole == 4
        except BadArchive as error:
            assert "format" in error.problem or "not an archive" in error.problem


def test_the_format_of_today():
    """Never adapt the file or these facts to the code: archives like this are kept for years."""
    contents = read(DATA / f"archive-format-{FORMAT}.jsonl")
    assert [session.format for session in contents.sessions] == [FORMAT]
    assert contents.claims == {"plateau": {"tolerance": 0.1}}
    assert contents.sessions[0].plan == {"batches": [1, 2]}
    assert [m.load.concurrency for m in contents.measurements] == [1, 2]
    measurement = contents.measurements[1]
    assert (measurement.spec.model, measurement.spec.env, measurement.spec.extra) == (
        "opt-125m",
        (("A", "1"),),
        (("block_size", 16),),
    )
    assert (measurement.resolved.kv_blocks, measurement.resolved.capture_sizes) == (7281, (1, 2, 4))
    assert (measurement.environment.gpu_name, measurement.environment.cores) == ("NVIDIA H200", 16)
    assert (measurement.workload.hash, measurement.workload.spec.prompt_tokens) == ("c0ffee", 512)
    assert (measurement.launch, measurement.measured_at) == ("4f1d", "2025-11-21T12:00:00.000+00:00")
    assert measurement.spec.known_model == CATALOGUE["opt-125m"]
    assert measurement.load == ClosedLoop(2, window_s=5.0, settle_lifetimes=1.0, ramp_up="staggered")
    assert measurement.run == RUN


@EACH
@pytest.mark.parametrize("coded", [True, False])
def test_a_terminal_obeys_nothing_that_a_record_says(tmp_path, name, coded):
    """Neither where JSON has written the character as \\u001b, nor where it stands there itself."""
    evil = "\x1b]0;pwned\x07\x9b2J\u202e"
    path = tmp_path / name
    with Archive.open(tmp_path / "plain.jsonl") as archive:
        archive.begin({}, {"title": "TITLE"})
        archive.add(replace(example(), run=replace(RUN, first_failure="FAILURE")))
    text = (tmp_path / "plain.jsonl").read_text("utf-8").replace("opt-125m", "MODEL")
    told = json.dumps(evil)[1:-1] if coded else "\x7f\x9b2J\u202e"
    for word in ("TITLE", "FAILURE", "MODEL"):
        text = text.replace(word, word + told)
    text = "".join(f"{resealed(line)}\n" for line in text.split("\n")[:-1])
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(text.encode()))
    found = read(path)
    (kept,) = found.measurements
    for shown in (kept.spec.model, kept.run.first_failure, found.sessions[0].plan["title"]):
        assert shown.isprintable() and "x9b2J" in shown


def test_the_last_session_tells_the_claims(three):
    with Archive.open(three) as archive:
        archive.begin({"plateau": {"tolerance": 0.2}}, {})
        archive.add(example(8))
    contents = read(three)
    assert [session.format for session in contents.sessions] == [FORMAT, FORMAT]
    assert contents.claims == {"plateau": {"tolerance": 0.2}}
    with Archive.open(three) as archive:
        archive.begin({}, {"claims": []})  # as `slmserve measure` does: it judges none
    assert read(three).claims == contents.claims
    assert [m.load.concurrency for m in contents.measurements] == [1, 2, 4, 8]


def test_an_engine_is_described_once_per_launch(tmp_path):
    path = write(tmp_path / "a.jsonl", example(1), example(2), example(1, launch="9999"))
    kinds = [json.loads(line)["kind"] for line in path.read_text("utf-8").splitlines()]
    assert kinds == ["session", "engine", "measurement", "measurement", "engine", "measurement"]


def test_nothing_begun_is_begun_by_the_first_measurement(tmp_path):
    with Archive.open(tmp_path / "a.jsonl") as archive:
        archive.add(example())
    assert read(tmp_path / "a.jsonl").measurements == (example(),)


def test_what_later_releases_add_is_passed_over(three):
    lines = [json.loads(line) for line in three.read_text("utf-8").splitlines()]
    lines[1]["spec"]["new"] = lines[2]["run"]["samples"]["new"] = lines[2]["load"]["new"] = lines[0]["new"] = 1
    lines.insert(2, {"kind": "weather", "rain": True})
    three.write_text("".join(json.dumps(line) + "\n\n" for line in lines), "utf-8")
    reseal(three)
    assert read(three).measurements == (example(1), example(2), example(4))


def noisy(rng: random.Random, rows: int = 2500, requests: int = 1000) -> Run:
    """A point as real engines make it: steps vary by the microsecond, requests of one step share their stamps."""
    ends = [0.0]
    for _ in range(rows + 256):
        ends.append(ends[-1] + rng.lognormvariate(-6, 0.05))
    at = sorted(rng.randrange(rows) for _ in range(requests))
    samples = Samples(
        tuple(n % 1024 for n in range(requests)),
        tuple(ends[step] + n * 1e-7 + rng.uniform(0, 3e-4) for n, step in enumerate(at)),
        tuple(ends[step + 1] for step in at),
        tuple(ends[step + 2] for step in at),
        tuple(ends[step + 256] for step in at),
        (512,) * requests,
        (256,) * requests,
        (True,) * requests,
    )
    usage = tuple((n % 97) / 7281 for n in range(rows))
    return Run(samples, Steps(tuple(ends[1 : rows + 1]), (100,) * rows, *[(0,) * rows] * 3, usage, (0,) * rows), (1, 5))


def test_a_sweep_of_99_such_points_stays_under_a_megabyte(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", *[replace(example(), run=noisy(random.Random(seed))) for seed in range(3)])
    assert path.stat().st_size / 3 * 99 < 1e6


# Runs that are killed


@EACH
@settings(DISK, max_examples=60)
@given(data=st.data())
def test_truncated_anywhere_a_prefix_is_read_and_the_rest_set_aside(name, data):
    whole = written(name, 1, 2, 4)
    left = whole[: data.draw(st.integers(0, len(whole) - 1))]
    kept = (example(1), example(2), example(4))
    with tempfile.TemporaryDirectory() as folder:
        path, torn = Path(folder, name), Path(folder, f"{name}.torn")
        path.write_bytes(left)
        contents = read(path)
        assert contents.measurements == kept[: len(contents.measurements)]
        write(path, example(8))
        again = read(path)
        moved = torn.read_bytes() if torn.exists() else b""

    assert len(contents.measurements) < 3
    assert left.endswith(moved)
    assert again.measurements == (*contents.measurements, example(8))
    assert again.notes == ()
    assert bool(contents.notes) == (bool(moved) or not left)


def test_the_note_says_what_was_lost(three):
    with three.open("rb+") as file:
        file.truncate(three.stat().st_size - 1)
    (note,) = read(three).notes
    assert note == f"{three}: line 5 ends early, as when a run is killed while it writes; measurements used: 2"
    with Archive.open(three) as archive:
        (note,) = archive.notes
    assert note.startswith(f"{three}: line 5 ends early") and note.endswith(f"bytes were moved to {three}.torn")


@EACH
def test_each_measurement_is_there_as_soon_as_it_is_added(tmp_path, name):
    with Archive.open(tmp_path / "new" / "folder" / name) as archive:
        archive.begin(CLAIMS, {})
        for concurrency in (1, 2):
            archive.add(example(concurrency))
            assert len(read(archive.path).measurements) == concurrency


WRITER = """
import sys
from test_store import Archive, example
with Archive.open(sys.argv[1]) as archive:
    for concurrency in range(1, 10**6):
        archive.add(example(concurrency))
        print(concurrency, flush=True)
"""


@EACH
def test_killed_while_it_appends(tmp_path, name):
    path = tmp_path / name
    command = [sys.executable, "-c", WRITER, str(path)]
    ours = str(TESTS / "support"), str(Path(__file__).parent)
    paths = os.pathsep.join(filter(None, [*ours, os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}) as writer:
        assert writer.stdout
        told = [int(writer.stdout.readline()) for _ in range(20)]
        time.sleep(0.003)
        writer.send_signal(signal.SIGKILL)
        told += [int(line) for line in writer.stdout]
    found = [m.load.concurrency for m in read(path).measurements]
    assert found[: len(told)] == told
    assert len(found) <= len(told) + 1


def test_a_full_disk_leaves_no_half_line(three):
    before = three.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Archive.open(three) as archive:
        archive.begin({}, {})
        began = three.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(began) + 100, hard))
        try:
            with pytest.raises(BadUsage, match=r"cannot write to .*: File too large"):
                archive.add(example(8))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert three.read_bytes() == began
        archive.add(example(16))
    assert began.startswith(before)
    assert [m.load.concurrency for m in read(three).measurements] == [1, 2, 4, 16]


def test_an_empty_file_is_an_archive_without_measurements(tmp_path):
    path = tmp_path / "a.jsonl"
    path.touch()
    assert read(path).notes == (f"{path} is empty",)
    assert read(path).claims == {}
    assert read(write(path, example())).measurements == (example(),)


# Damage


@pytest.mark.parametrize(
    ("number", "new", "what"),
    [
        (4, '{"kind":"measurement"', "line 4 is not JSON"),
        (4, '{"kind":"measurement"}', "line 4 has no entry 'engine'"),
        (4, '{"kind":"measurement","engine":"none"}', "line 4 cannot be used .*describes its engine 'none'"),
        (4, '{"kind":"session","format":3}', "line 4 cannot be used"),
        (4, "[1]", "line 4 cannot be used .not an object"),
        (4, '{"kind":NaN}', "line 4 is not JSON"),
        (2, "\x00", r"line 2 is not JSON .* \(and 3 more\)"),
    ],
)
def test_a_damaged_line_is_named_and_can_be_skipped(three, number, new, what):
    change(three, number, new)
    with pytest.raises(BadArchive, match=what) as raised:
        read(three)
    assert str(three) in raised.value.problem
    assert raised.value.hint.startswith("--skip-damaged")
    contents = read(three, skip_damaged=True)
    assert [m.load.concurrency for m in contents.measurements] == ([1, 4] if number == 4 else [])
    assert f"skipped: line {number}" in contents.notes[0]


@pytest.mark.parametrize(
    ("number", "entries", "value", "what"),
    [
        (2, ("spec", "max_num_seqs"), "1024", "Expected `int`, got `str` - at `.[.]max_num_seqs`"),
        (2, ("spec", "max_num_seqs"), True, "Expected `int`, got `bool` - at `.[.]max_num_seqs`"),
        (2, ("spec", "platform"), "tpu", "Invalid enum value 'tpu' - at `.[.]platform`"),
        (2, ("spec", "env"), [["A", 1]], "Expected `str`, got `int` - at `.[.]env"),
        (2, ("spec", "env"), [["A"]], "Expected `array` of length 2"),
        (2, ("resolved", "kv_blocks"), 1 << 70, "a number that cannot be meant"),
        (2, ("resolved", "capture_sizes"), [1, None], "Expected `int`, got `null` - at `.[.]capture_sizes"),
        (2, ("resolved", "ready_s"), "33", "Expected `float . null`, got `str` - at `.[.]ready_s`"),
        (2, ("environment", "cores"), 1.5, "Expected `int . null`, got `float` - at `.[.]cores`"),
        (4, ("workload", "longest"), 0, "a workload without requests or tokens"),
        (4, ("workload", "mean_output_tokens"), -1.0, "a workload without requests or tokens"),
        (4, ("workload", "spec"), {"seed": "0"}, "Expected `int`, got `str` - at `.[.]spec[.]seed`"),
        (4, ("load", "concurrency"), "2", "Expected `int`, got `str` - at `.[.]concurrency`"),
        (4, ("load", "kind"), "storm", "unknown kind of load 'storm'"),
        (4, ("load", "settle_lifetimes"), None, "Expected `int . float`, got `null` - at `.[.]settle_lifetimes`"),
        (4, ("measured_at",), 5, "Expected `str`, got `int`"),
        (4, ("run", "failures"), None, "Expected `int`, got `null`"),
        (4, ("run", "window_us"), ["0", 1], "Expected `int`, got `str`"),
        (4, ("run", "samples", "sent_tick"), [0, None], "sent_s: NoneType among its values"),
        (4, ("run", "samples", "sent_tick"), [0, 8], "sent_s: a tick that its clock does not have"),
        (4, ("run", "samples", "sent_tick"), [-1, 2], "sent_s: a tick that its clock does not have"),
        (4, ("run", "clock_us"), ["12", "AB"], "Expected `int`, got `str`"),
        (4, ("run", "clock_us"), [12, 3], "Expected `str`, got `int`"),
        (4, ("run", "clock_us"), [12, "AB", "A"], "places of unequal length"),
        (4, ("run", "clock_us"), [12, "A B"], "or what is no digit"),
        (4, ("run", "samples", "prompt_tokens"), "512", "prompt_tokens: str among its values"),
        (4, ("run", "samples", "prompt_tokens"), 10**400, "prompt_tokens: a number that cannot be meant"),
        (4, ("run", "samples", "prompt_tokens"), [-(1 << 62), -(1 << 62)], "prompt_tokens: a number that cannot"),
        (4, ("run", "samples", "finished"), [1, 0], "finished: int among its values"),
        (4, ("run", "steps", "new_tokens"), 1.5, "new_tokens: float among its values"),
    ],
)
def test_a_value_of_the_wrong_type_is_a_damaged_line(three, number, entries, value, what):
    line = inner = json.loads(three.read_text("utf-8").splitlines()[number - 1])
    for entry in entries[:-1]:
        inner = inner[entry]
    inner[entries[-1]] = value
    change(three, number, json.dumps(line))
    with pytest.raises(BadArchive, match=f"line {number} cannot be used .*{what}"):
        read(three)
    assert len(read(three, skip_damaged=True).measurements) == (0 if number == 2 else 2)


def test_a_whole_number_may_stand_for_a_fraction_and_stays_whole(three):
    """A load asked for with a window of 5 s, not 5.0 s, has a key of its own."""
    mine = replace(example(8), load=ClosedLoop(8, window_s=5))
    write(three, mine)
    assert read(three).measurements[-1].key == mine.key


def test_columns_of_unequal_length_are_damage(three):
    line = json.loads(three.read_text("utf-8").splitlines()[3])
    line["run"]["steps"]["time_tick"].append(0)
    change(three, 4, json.dumps(line))
    with pytest.raises(BadArchive, match=r"line 4 cannot be used .3 rows of running, 4 of time_s"):
        read(three)


@PACKED
def test_damage_inside_a_packed_piece_costs_that_piece(tmp_path, name, magic, pack):
    path = write(tmp_path / name, example(1), example(2), example(4))
    raw = bytearray(path.read_bytes())
    starts = [at for at in range(len(raw)) if raw.startswith(magic, at)]
    raw[starts[2] + 60] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(BadArchive, match=r"line 4 cannot be used .cannot be unpacked"):
        read(path)
    contents = read(path, skip_damaged=True)
    assert [m.load.concurrency for m in contents.measurements] == [1, 4]


@PACKED
def test_an_archive_compressed_by_hand_is_read_and_continued(three, tmp_path, name, magic, pack):
    path = tmp_path / name
    path.write_bytes(pack(three.read_bytes()))
    write(path, example(8))
    assert [m.load.concurrency for m in read(path).measurements] == [1, 2, 4, 8]


PLACES = st.sampled_from(["kind", "engine", "workload", "load", "measured_at", "run", "samples", "steps", "window_us",
                          "clock_us", "sent_tick", "time_tick", "kv_usage_ppm", "running", "request", "format", "id",
                          "spec", "resolved", "env", "extra", "capture_sizes", "gpu_memory_utilization", "platform",
                          "concurrency", "requests", "model"])  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(DISK, max_examples=200)
@given(PLACES, JSON)
def test_whatever_stands_in_an_entry_only_our_errors_come(place, value):
    def planted(entry):
        return {k: value if k == place else planted(v) for k, v in entry.items()} if isinstance(entry, dict) else entry

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        lines = [json.loads(line) for line in written(path.name, 1, 2).splitlines()]
        lines[1:3] = [planted(line) for line in lines[1:3]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        reseal(path)
        assert len(read(path, skip_damaged=True).measurements) <= 2


@EACH
@DISK
@given(data=st.data())
def test_whatever_bytes_change_only_our_errors_come(name, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        raw = bytearray(written(name, 1, 2))
        for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=5)):
            raw[at] = data.draw(st.integers(0, 255))
        path.write_bytes(raw)
        try:
            assert len(read(path, skip_damaged=True).measurements) <= 2
        except BadArchive as error:
            assert error.hint


# What is no archive, or of another time


@pytest.mark.parametrize("skip_damaged", [False, True])
def test_a_newer_format_is_never_skipped(three, skip_damaged):
    with three.open("a", encoding="utf-8") as file:
        file.write('{"kind":"session","format":7}\n')
    with pytest.raises(BadArchive, match=rf"newer release \(format 7; this one reads format {FORMAT}\)") as raised:
        read(three, skip_damaged=skip_damaged)
    assert raised.value.hint == "pip install --upgrade pytest-slmserve"
    before = three.read_bytes()
    with pytest.raises(BadArchive, match="newer release"):
        Archive.open(three)
    assert three.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("notes.txt", b"nothing like it\nat all\n", "not an archive of pytest-slmserve: line 1 is not JSON"),
        ("one-line", b"no end of line", "not an archive"),
        ("other.json", b'{"machine_info": {}}', "not an archive"),
        ("other.jsonl", b'{"a": 1}\n{"a": 2}\n', "not an archive of pytest-slmserve: line 1 has no entry 'kind'"),
        ("plain.jsonl.gz", b'{"kind":"session","format":1}\n', "ends in .gz but is not gzip"),
        ("plain.jsonl.xz", b'{"kind":"session","format":1}\n', "ends in .xz but is not xz"),
        ("other.gz", gzip.compress(b"nothing like it\n", mtime=0), "not an archive"),
        ("other.xz", lzma.compress(b"nothing like it\n"), "not an archive"),
        ("cut.gz", gzip.compress(b"nothing like it\n" * 99, mtime=0)[:-12], "not an archive"),
        ("zip.jsonl", gzip.compress(b'{"kind":"session"}\n', mtime=0), "not an archive"),
    ],
)
def test_other_files_are_refused_and_left_alone(tmp_path, name, content, what):
    path = tmp_path / name
    path.write_bytes(content)
    for opening in (read, Archive.open):
        with pytest.raises(BadArchive, match=what) as raised:
            opening(path)
        assert raised.value.hint
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("name", "what"), [("missing.jsonl", "No such file"), (".", "Is a directory")])
def test_what_cannot_be_read(tmp_path, name, what):
    with pytest.raises(BadArchive, match=f"cannot read .*: {what}"):
        read(tmp_path / name)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero"), Path("/dev/full"), Path("/dev/null")):
        with pytest.raises(BadArchive, match=f"cannot read {path}: it is a device or a pipe, not a file"):
            read(path)
        with pytest.raises(BadUsage, match=f"cannot write to {path}: it is a device or a pipe, not a file"):
            Archive.open(path)


@PACKED
def test_what_unpacks_to_more_than_an_archive_may_take_is_one_sentence(tmp_path, monkeypatch, name, magic, pack):
    monkeypatch.setattr(store, "_UNPACKED", 1 << 20)
    path = tmp_path / name
    path.write_bytes(pack(b'{"kind":"session"' + b" " * (1 << 22)))
    with pytest.raises(BadArchive, match="needs more memory than an archive may take"):
        read(path)
    path.write_bytes(pack(b" " * (1 << 19) + b"\n") * 3)
    with pytest.raises(BadArchive, match="needs more memory than an archive may take"):
        Archive.open(path)


# Writers


@pytest.mark.parametrize(("name", "what"), [(".", "Is a directory"), ("file/a.jsonl", "File exists|Not a directory")])
def test_what_cannot_be_written(tmp_path, name, what):
    (tmp_path / "file").touch()
    with pytest.raises(BadUsage, match=f"cannot write to .*: {what}") as raised:
        Archive.open(tmp_path / name)
    assert raised.value.hint == "--slm-records with another path"


def test_one_writer_at_a_time(three):
    with Archive.open(three), pytest.raises(BadUsage, match=f"another run is writing to {three}"):
        Archive.open(three)
    Archive.open(three).close()


@pytest.mark.parametrize("count", [4.25, "4", [4]])
def test_what_could_not_be_read_again_is_not_written(three, count):
    before = read(three).measurements
    bad = replace(example(8), run=replace(RUN, samples=replace(RUN.samples, output_tokens=(count, 0))))
    with Archive.open(three) as archive:
        with pytest.raises(BadArchive, match="no reader would take it"):
            archive.add(bad)
        archive.add(example(16))
    assert read(three).measurements == (*before, example(16))


def made_shorter(path: Path) -> None:
    os.truncate(path, 10)


def replaced(path: Path) -> None:
    path.unlink()
    path.write_text("another's", "utf-8")


@pytest.mark.parametrize("plant", [Path.unlink, replaced, made_shorter])
@pytest.mark.parametrize("at", ["before the next", "at the end"])
def test_an_archive_that_is_lost_in_the_middle_goes_on_in_a_second_file(tmp_path, monkeypatch, plant, at):
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    kept = [example(1), example(2), example(4)]
    with Archive.open(tmp_path / "a.jsonl.gz", moves=True) as archive:
        archive.begin(CLAIMS, {"batches": [1]})
        for measurement in kept[:2]:
            archive.add(measurement)
        if at == "before the next":
            plant(tmp_path / "a.jsonl.gz")
        archive.add(kept[2])
        if at == "at the end":
            plant(tmp_path / "a.jsonl.gz")
    [second] = (tmp_path / "t").iterdir()
    found = read(second)
    assert found.measurements == tuple(kept) and found.claims == CLAIMS and len(found.sessions) == 1
    assert archive.moved.startswith(f"cannot write to {tmp_path / 'a.jsonl.gz'}: ")
    assert f"all measurements of this run are in {second} (--slm-resume={second} goes on with them)" in archive.moved
    assert second.stat().st_mode & 0o077 == 0


def test_a_full_disk_loses_no_measurement(three, tmp_path, monkeypatch):
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    before, full = three.read_bytes(), OSError(errno.ENOSPC, "No space left on device")

    def no_room(file: io.FileIO, data: bytes) -> None:
        if Path(file.name) == three:
            raise full
        appended(file, data)

    appended = store._append
    monkeypatch.setattr(store, "_append", no_room)
    with Archive.open(three, moves=True) as archive:
        archive.add(example(8))
        archive.add(example(16))
    assert "No space left on device; all measurements" in archive.moved
    assert three.read_bytes() == before
    [second] = (tmp_path / "t").iterdir()
    assert read(second).measurements == (example(8), example(16))
    with Archive.open(three) as archive, pytest.raises(BadUsage, match="cannot write to .*: No space left on device"):
        archive.add(example(8))


def test_what_can_be_written_nowhere_is_said_before_more_is_measured(three, tmp_path, monkeypatch):
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "t")

    def no_room(file: io.FileIO, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Archive.open(three, moves=True) as archive:
        archive.check_writable()
        monkeypatch.setattr(store, "_append", no_room)
        for again in (lambda: archive.add(example(8)), archive.check_writable):
            with pytest.raises(BadUsage, match="No space left on device, and no second file can be written"):
                again()
    assert not [*(tmp_path / "t").iterdir()] and sorted(tmp_path.iterdir()) == sorted([three, tmp_path / "t"])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_number_that_json_does_not_know_is_written(three, number):
    before = three.read_bytes()
    bad_run = replace(RUN, steps=replace(RUN.steps, time_s=(0.1, number, 0.3)))
    bad = [replace(example(), run=bad_run), replace(example(), resolved=Resolved(ready_s=number))]
    with Archive.open(three) as archive:
        archive.begin({}, {})
        begun = len(three.read_bytes())
        for measurement in bad:
            with pytest.raises(BadArchive, match="a measurement is not written, for no reader would take it"):
                archive.add(measurement)
        assert three.stat().st_size == begun > len(before)
