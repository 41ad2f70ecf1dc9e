"""What is written of a measurement is read again, whatever it is, as a reader of its own reads it too; it is small, as
the schema of records says, and the same for years. What is damaged raises one of the errors that a reader of files
knows."""

import functools
import json
import random
import re
import string
import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from archives import RUN, example
from hypothesis import given, settings, strategies as st
from jsonschema import Draft202012Validator
from scripts import CHECKOUT, DATA, in_checkout
from strategies import NAMES, loads, measurement, measurements, places_in_a_gate, planted_telemetry, replicas

from pytest_slmserve.archive import codec
from pytest_slmserve.archive.codec import engine_line, measurement_line
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema.errors import UNUSABLE, BadUsage
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.records import Failures, Measurement, Samples, Steps, Stream, Telemetry
from pytest_slmserve.schema.sensors import SENSORS
from pytest_slmserve.schema.specs import Adapters

Facts = dict[str, Any]
DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
TIMES = st.integers(0, 10**10).map(lambda us: us / 1e6)
GAPS = {"growth": 1.01, "least_s": 1e-4, "counts": {"3": 2}, "sum_s": 0.5}


def lines_of(m: Measurement) -> tuple[Facts, Facts]:
    engine = engine_line(m.launch, m.spec, m.resolved, m.environment)
    return json.loads(json.dumps([engine, measurement_line(m)], allow_nan=False))


def read_again(engine: Facts, line: Facts) -> Measurement:
    return codec.measurement_of(line, *codec.engine_from_record(engine))


@st.composite
def telemetries(draw: st.DrawFn) -> Telemetry:
    """Any readings that are whole multiples of their sensor's resolution."""
    rows, names = draw(st.integers(1, 6)), st.lists(NAMES, max_size=2).map(tuple)

    def column(values: st.SearchStrategy[float | None]) -> tuple[float | None, ...]:
        return tuple(draw(st.lists(values, min_size=rows, max_size=rows) | values.map(lambda value: [value] * rows)))

    def columns() -> dict[int, tuple[float | None, ...]]:
        made = {}
        for number in draw(st.sets(st.sampled_from([*SENSORS, 77]), max_size=4)):
            step = SENSORS[number].resolution if number in SENSORS else 1e-6
            per_unit = 1 / step if step >= 1 else round(1 / step)
            made[number] = column(st.none() | st.integers(-(10**9), 10**9).map(lambda whole: whole / per_unit))  # noqa: B023
        return made

    times, spans, missing = column(TIMES), column(st.none() | TIMES), st.dictionaries(NAMES, st.integers(0, 99))
    gpus = tuple(columns() for _ in range(draw(st.integers(0, 2))))
    return Telemetry(draw(names), draw(TIMES), times, spans, columns(), draw(missing), draw(names), gpus)


def streams() -> st.SearchStrategy[Stream]:
    times = st.none() | st.lists(st.floats(0, 9), max_size=2).map(tuple)
    pair = st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9))
    return st.builds(Stream, st.floats(0.01, 1), st.floats(0, 1), st.just((1.0, 2.0)), st.just(GAPS), scheduled_s=times,
                     salt=pair, refused=st.lists(NAMES, max_size=1).map(tuple))  # fmt: skip


@st.composite
def full_measurements(draw: st.DrawFn) -> Measurement:
    """Any measurement with any of what a run may have or not."""
    m, rows = draw(measurements()), draw(st.integers(0, 2))
    told = {name: draw(st.none() | values) for name, values in
            {"began_s": TIMES, "telemetry": telemetries(), "stream": streams()}.items()}  # fmt: skip
    if draw(st.booleans()):
        scheduled = draw(st.none() | st.just((0.2,) * rows))
        failed = Failures((1,) * rows, (0.25,) * rows, (0.5,) * rows, ("HTTP 503",) * rows, scheduled)
        told |= {"failures": rows, "failed": failed}
    return replace(m, run=replace(m.run, **told), neighbours=draw(st.integers(0, 3)))


@settings(max_examples=60)
@given(full_measurements())
def test_written_measurement_is_read_back(m):
    """Read by hand: differences or one value, ticks of a clock in base 64, the KV usage in millionths."""
    engine, line = lines_of(m)
    found = read_again(engine, line)
    assert found == m and found.id == m.id
    first, *places = line["run"]["clock_us"] or [0]
    gaps = [functools.reduce(lambda gap, digit: gap * 64 + DIGITS.index(digit), digits, 0) for digits in zip(*places)]
    clock = [*accumulate([first, *gaps])]
    assert clock == sorted(set(clock))
    for table, stored in ((m.run.samples, line["run"]["samples"]), (m.run.steps, line["run"]["steps"])):
        for column in fields(table):
            name = {"kv_usage": "kv_usage_ppm"}.get(column.name, re.sub("_s$", "_tick", column.name))
            values = list(getattr(table, column.name))
            if name not in stored:
                assert not values and name in ("cached_tokens", "drafts", "accepted")
            elif isinstance(coded := stored[name], list):
                assert [plain(each, name, clock) for each in (coded if name == "finished" else summed(coded))] == values
            else:
                assert {plain(coded, name, clock)} == set(values) and column is not fields(table)[0]


def summed(coded: list[int | None]) -> list[int | None]:
    total = [0, *accumulate(difference or 0 for difference in coded)]
    return [None if difference is None else at for difference, at in zip(coded, total[1:])]


def plain(value: Any, name: str, clock: list[int]) -> Any:
    if value is None or not name.endswith(("_tick", "_ppm")):
        return value
    return (clock[value] if name.endswith("_tick") else value) / 1_000_000


@given(st.lists(st.integers(0, 2**50), unique=True).map(sorted))
def test_clock_digits_fit_largest_gap(clock):
    first, *places = codec.clock_gaps(clock) or [None]
    largest = max((later - earlier for earlier, later in pairwise(clock)), default=0)
    assert first == (clock[0] if clock else None) and {*map(len, places)} <= {len(clock) - 1}
    assert 64 ** len(places) > largest and (not places or 64 ** (len(places) - 1) <= largest)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=20))
def test_stamps_keep_microsecond_precision(stamps):
    m = replace(example(), run=replace(RUN, steps=Steps(stamps, *[[0] * len(stamps)] * 6)))
    assert read_again(*lines_of(m)).run.steps.time_s == pytest.approx(stamps, rel=0, abs=0.500001e-6)


def test_record_omits_absent_fields():
    engine, line = lines_of(replace(example(), run=replace(RUN, telemetry=planted_telemetry({155: 300.0}, until_s=1))))
    assert not {"replica", "paired", "neighbours"} & line.keys() and [*line][-1] == "run"
    assert not {"began_us", "stream", "failed"} & line["run"].keys() and "gpus" not in line["run"]["telemetry"]
    assert engine["model"]["name"] == "opt-125m"
    assert "config" not in engine["model"] and "model_facts" not in engine["spec"]
    run = replace(RUN, samples=Samples(*[()] * 8), steps=Steps((-1e-6, 0, 63e-6, 4158e-6), *[(0,) * 4] * 6))
    told = measurement_line(replace(example(), run=run))["run"]
    assert told["clock_us"] == [-1, "AA/", "B//"], "one text for each place" and "telemetry" not in told
    mine = replace(example(), load=replace(example().load, window_s=5))  # asked for with 5 s, not 5.0 s
    assert read_again(*lines_of(mine)).key == mine.key != example().key
    plain = example()
    assert "adapters" not in measurement_line(plain)["workload"]["spec"]
    spec = replace(plain.workload.spec, adapters=Adapters(4, 8, "zipf"))
    made = replace(plain, workload=replace(plain.workload, spec=spec))
    assert measurement_line(made)["workload"]["spec"]["adapters"] == {"count": 4, "rank": 8, "traffic": "zipf"}
    assert read_again(*lines_of(made)) == made
    bad = planted(measurement_line(made), "workload.spec.adapters.rank", 9)
    with pytest.raises(BadUsage):
        read_again(lines_of(made)[0], bad)


def noisy(rng: random.Random, rows: int = 2500, requests: int = 1000):
    """A point as real engines make it: steps vary by the microsecond, requests of one step share their stamps."""
    ends = [0.0, *accumulate(rng.lognormvariate(-6, 0.05) for _ in range(rows + 256))]
    at = sorted(rng.randrange(rows) for _ in range(requests))
    samples = Samples(
        tuple(n % 1024 for n in range(requests)),
        tuple(ends[step] + n * 1e-7 + rng.uniform(0, 3e-4) for n, step in enumerate(at)),
        *(tuple(ends[step + later] for step in at) for later in (1, 2, 256)),
        *((value,) * requests for value in (512, 256, True)),
    )
    usage = tuple((n % 97) / 7281 for n in range(rows))
    steps = Steps(tuple(ends[1 : rows + 1]), (100,) * rows, *[(0,) * rows] * 3, usage, (0,) * rows)
    return replace(RUN, samples=samples, steps=steps)


def test_current_format_stays_readable():
    """Never adapt the file or these facts to the code: archives like this are kept for years."""
    path = DATA / "archive-format-3.jsonl"
    contents = read(path)
    (session,) = contents.sessions
    assert (session.format, session.claims, session.plan) == (3, {"plateau": {"tolerance": 0.1}}, {"batches": [1, 2]})
    assert contents.measurements == (example(1), example(2))
    assert contents.measurements[1].spec.known_model == CATALOGUE["opt-125m"]
    engine, first, second = map(json.loads, path.read_text("utf-8").splitlines()[1:])
    for line in (engine, first, second):
        del line["crc32"]
    assert lines_of(example(1)) == [engine | lines_of(example(1))[0], first] and lines_of(example(2))[1] == second
    points = [measurement_line(replace(example(), run=noisy(random.Random(seed)))) for seed in range(2)]
    sizes = [len(zlib.compress(json.dumps(line, separators=(",", ":")).encode())) for line in points]
    assert sum(sizes) / 2 * 99 < 1e6


# The schema, docs/records.schema.json


@functools.cache
def schema() -> Draft202012Validator:
    facts = json.loads((CHECKOUT / "docs" / "records.schema.json").read_text("utf-8"))
    Draft202012Validator.check_schema(facts)
    return Draft202012Validator(facts)


@in_checkout
@given(loads(), st.none() | replicas(), st.none() | places_in_a_gate(), st.booleans())
def test_written_lines_match_schema(load, replica, paired, sensed):
    m = measurement(2, steps=5, launch="0d")
    run = replace(m.run, telemetry=planted_telemetry(until_s=1.0) if sensed else None, began_s=5.0 if sensed else None)
    told = replace(replica, group="0a", set="0b") if replica else None
    made = replace(m, load=load, run=run, replica=told, paired=replace(paired, gate="0c") if paired else None)
    sealed = [line | {"crc32": "0123abcd"} for line in lines_of(made)]
    assert not [error.message for line in sealed for error in schema().iter_errors(line)]


@in_checkout
@pytest.mark.parametrize(("kind", "path", "value"), [
    ("session", "format", 2), ("session", "started", "yesterday"),
    ("engine", "resolved.kv_blocks", "many"), ("engine", "spec.platform", "tpu"), ("engine", "model.layers", None),
    *(("measurement", path, value) for path, value in (
        ("crc32", "none"), ("workload.kind", "sing"), ("load.kind", "sweep"), ("load.concurrency", 0),
        ("run.failures", -1), ("run.samples.finished", "yes"), ("run.steps.running", [1.5]), ("run.clock_us", ["AA"]),
    )),
])  # fmt: skip
def test_damaged_line_violates_schema(kind, path, value):
    lines = map(json.loads, (DATA / "archive-format-3.jsonl").read_text("utf-8").splitlines())
    line = next(line for line in lines if line["kind"] == kind)
    assert schema().is_valid(line) and not schema().is_valid(planted(line, path, value))


# Damage


def planted(line: Facts, path: str, value: object) -> Facts:
    """The line with another value at a place."""
    first, _, rest = path.partition(".")
    return {**line, first: planted(line[first], rest, value) if rest else value}


SEEN = Telemetry(("nvml",), 0.25, (1.0, 2.0), (None, 0.25), {155: (300.0, 301.0)}, gpus=({100: (1e9, 2e9)},))
FAILED = Failures((1,), (0.25,), (0.5,), ("HTTP 503",), (0.2,))
FULL = replace(example(), run=replace(RUN, telemetry=SEEN, failed=FAILED, stream=Stream(0.1, 0.0, (), GAPS)))


@pytest.mark.parametrize(("path", "value", "fact"), [
    *((path, value, path.split(".")[-1]) for path, value in (
        ("spec.max_num_seqs", "1024"), ("spec.max_num_seqs", True), ("spec.env", [["A", 1]]), ("load.concurrency", "2"),
        ("resolved.capture_sizes", [1, None]), ("resolved.ready_s", "33"), ("environment.cores", 1.5),
        ("load.settle_lifetimes", None), ("run.failures", None), ("run.window_us", ["0", 1]), ("run.failed.kind", [5]),
        ("run.failed.sent_s", ["soon"]), ("run.failed.ended_s", None), ("run.telemetry.span_us", [None, "1"]),
    )),
    *((f"workload.{name}", value, "a workload without") for name, value in
      (("longest", 0), ("requests", 0), ("mean_prompt_tokens", 0.0), ("mean_output_tokens", -1.0))),
    *(("resolved.kv_blocks", value, "a number that") for value in (1 << 70, 1 << 63, -(1 << 63))),
    ("spec.platform", "tpu", "tpu"), ("spec.env", [["A"]], "length 2"), ("workload.spec", {"seed": "0"}, "seed"),
    ("load.kind", "storm", "storm"), ("measured_at", 5, "str"), ("neighbours", "1", "int"),
    ("replica", {"group": "g"}, "index"),
    ("paired", {"gate": "g", "pair": "x", "side": "baseline", "second": False}, "pair"),
    ("paired", {"pair": 1}, "gate"), ("run.failures", 2, "2"), ("run.samples.sent_tick", [0, None], "sent_s: NoneType"),
    *(("run.samples.sent_tick", ticks, "sent_s: a tick") for ticks in ([0, 7], [-1, 2])),
    ("run.samples.prompt_tokens", "512", "prompt_tokens: str"),
    *(("run.samples.prompt_tokens", each, "prompt_tokens: a number") for each in
      (10**400, [1 << 63, 0], [-(1 << 62), -(1 << 62)])),
    ("run.samples.prompt_tokens", [1], "1 rows of prompt_tokens, 2 of request"),
    ("run.samples.finished", [1, 0], "finished: int"), ("run.samples.request", [True, 1], "request: bool"),
    ("run.steps.new_tokens", 1.5, "new_tokens: float"),
    ("run.steps.time_tick", [0, 1, 1, 1], "3 rows of running, 4 of time_s"),
    *(("run.clock_us", clock, fact) for clock, fact in (
        (["1"], "int"), ([1, 3], "str"), ([12, "AB", "A"], "length"), ([12, "A B"], "digit"), ([12, "AÄ"], "ascii"),
    )),
    ("run.stream.bin_s", 0.0, "bins of 0"), ("run.failed.request", [1, 2], "1"), ("run.failed.scheduled_s", [], "1"),
    *((f"run.telemetry.{name}", value, "2 rows") for name, value in
      (("columns", {"155": [300000]}), ("gpus", [{"100": [1]}]), ("span_us", [None]))),
])  # fmt: skip
def test_impossible_record_value_is_named(path, value, fact):
    engine, line = lines_of(FULL)
    assert read_again(engine, line) == FULL
    if path.split(".")[0] in engine:
        engine = planted(engine, path, value)
    else:
        line = planted(line, path, value)
    with pytest.raises((BadUsage, *UNUSABLE), match=fact):
        read_again(engine, line)


@pytest.mark.parametrize("name", ["spec", "resolved", "environment", "workload", "load", "measured_at", "run"])
def test_missing_record_entry_is_named(name):
    engine, line = ({key: value for key, value in each.items() if key != name} for each in lines_of(FULL))
    with pytest.raises(LookupError, match=name):
        read_again(engine, line)


def test_unknown_record_entries_are_ignored():
    mine = replace(CATALOGUE["qwen3-0.6b"], name="mine", source="folder")
    engine, line = lines_of(replace(example(), spec=replace(example().spec, model="./mine", model_facts=mine)))
    found = read_again(engine, line).spec.model_facts
    assert found == mine and mine.config and found.config == ()
    del engine["model"]
    assert read_again(engine, line).spec.model_facts is None
    engine, line = lines_of(FULL)
    for path in ("spec.new", "model.new", "resolved.new"):
        engine = planted(engine, path, 1)
    for path in ("run.samples.new", "run.new", "load.new", "new", "run.telemetry.new"):
        line = planted(line, path, 1)
    assert read_again(engine, line) == FULL


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(facts: Mapping[str, Any], before: str = "") -> list[str]:
    """The paths of all entries, also of those inside others."""
    found = [f"{before}{name}" for name in facts]
    for name, value in facts.items():
        found += places(value, f"{before}{name}.") if isinstance(value, dict) else []
    return found


@settings(max_examples=200)
@given(st.sampled_from([(number, place) for number, line in enumerate(lines_of(FULL)) for place in places(line)]), JSON)
def test_arbitrary_entries_raise_known_errors(place, value):
    lines, (number, path) = [*lines_of(FULL)], place
    lines[number] = planted(lines[number], path, value)
    try:
        assert isinstance(read_again(*lines), Measurement)
    except (BadUsage, *UNUSABLE) as error:
        assert str(error)
