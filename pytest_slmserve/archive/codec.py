"""Conversion of measurements to plain JSON values and back.

Columns are whole numbers, stored as differences between neighbors, because most of them are 0 and compress well. A
constant column is one value. KV usage is in millionths.

Requests of one engine step share their timestamps. So a run stores all timestamps once and in order, as a clock in
microseconds, and columns have the index of a timestamp in it (its tick).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from itertools import accumulate, pairwise
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any, NamedTuple

from pytest_slmserve.schema import records
from pytest_slmserve.schema.records import Environment, Measurement, Resolved, Run, Samples, Steps, Telemetry
from pytest_slmserve.schema.sensors import per_unit
from pytest_slmserve.schema.specs import EngineSpec, WorkloadReference, load_facts, load_of, workload_facts

LARGEST = 1 << 63  # limit of numbers: larger ones are damage
NoneType = type(None)
BASE_64 = f"{ascii_uppercase}{ascii_lowercase}{digits}+/".encode()  # digits of RFC 4648
NO_DIGIT = len(BASE_64)
VALUES = bytes(BASE_64.index(byte) if byte in BASE_64 else NO_DIGIT for byte in range(256))
PER_S = 1_000_000  # stamps and times are stored in microseconds, the KV usage in millionths


@dataclass(frozen=True, slots=True)
class StoredTelemetry:
    """Telemetry as stored: columns are differences in multiples of the sensor's resolution, or one value."""

    sources: tuple[str, ...]
    interval_us: int
    time_us: list[int | None]
    span_us: list[int | None]
    columns: dict[int, list[int | None] | int | None]
    missing: dict[str, int]
    notes: tuple[str, ...]
    gpus: tuple[dict[int, list[int | None] | int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Run as stored; `samples` and `steps` come from `_table_facts`."""

    window_us: tuple[int, int]
    failures: int
    first_failure: str | None
    clock_us: list[int | str]
    samples: dict[str, Any]
    steps: dict[str, Any]
    began_us: int | None = None
    telemetry: StoredTelemetry | None = None
    stream: records.Stream | None = None
    failed: records.Failures | None = None


# Writing


def engine_line(launch: str, spec: EngineSpec, resolved: Resolved, environment: Environment) -> dict[str, Any]:
    asked = asdict(spec)
    if model := asked.pop("model_facts"):
        del model["config"]
    facts = {"spec": asked, "model": model, "resolved": asdict(resolved), "environment": asdict(environment)}
    return {"kind": "engine", "id": launch, **facts}


def measurement_line(measurement: Measurement) -> dict[str, Any]:
    m, run, seen = measurement, measurement.run, measurement.run.telemetry
    columns = ((table, column.name) for table in (run.samples, run.steps) for column in fields(table))
    stamps = {_whole(at) for table, name in columns if name.endswith("_s") for at in getattr(table, name)}
    clock = sorted(stamp for stamp in stamps if stamp is not None)
    ticks: dict[int | None, int | None] = {stamp: tick for tick, stamp in enumerate(clock)}
    telemetry = None
    if seen is not None:
        whole = (
            {number: [_whole(value, per_unit(number)) for value in values] for number, values in columns.items()}
            for columns in (seen.columns, *seen.gpus)
        )
        host, *gpus = (
            {str(number): values[0] if len(set(values)) == 1 else deltas(values) for number, values in columns.items()}
            for columns in whole
        )
        telemetry = {
            "sources": list(seen.sources),
            "interval_us": _whole(seen.interval_s),
            "time_us": deltas(map(_whole, seen.time_s)),
            "span_us": [*map(_whole, seen.span_s)],
            "columns": host,
            **_told(gpus=gpus or None),
            "missing": dict(seen.missing),
            "notes": list(seen.notes),
        }
    return {
        "kind": "measurement",
        "engine": m.launch,
        "workload": {**asdict(m.workload), "spec": workload_facts(m.workload.spec)},
        "load": load_facts(m.load),
        "measured_at": m.measured_at,
        **_told(replica=m.replica, paired=m.paired, neighbours=m.neighbours or None),
        "run": {
            "window_us": [*map(_whole, run.window_s)],
            "failures": run.failures,
            "first_failure": run.first_failure,
            "clock_us": clock_gaps(clock),
            "samples": _table_facts(run.samples, ticks),
            "steps": _table_facts(run.steps, ticks),
            **_told(began_us=_whole(run.began_s), telemetry=telemetry, stream=run.stream, failed=run.failed),
        },
    }


def _told(**entries: Any) -> dict[str, Any]:
    told = {name: value for name, value in entries.items() if value is not None}
    return {n: asdict(v) if is_dataclass(v) and not isinstance(v, type) else v for n, v in told.items()}


def clock_gaps(clock: Sequence[int]) -> list[int | str]:
    """Return the first timestamp, and the gaps between them in base 64 with one text for each digit place.

    Only the last digits are noisy, so separate texts compress better.
    """
    gaps = [later - earlier for earlier, later in pairwise(clock)]
    places = -(-max(gaps, default=0).bit_length() // 6)
    shifts = range(6 * places - 6, -1, -6)
    return [*clock[:1], *(bytes(BASE_64[gap >> shift & 63] for gap in gaps).decode() for shift in shifts)]


def _table_facts(table: Samples | Steps, ticks: Mapping[int | None, int | None]) -> dict[str, Any]:
    """Return the columns of a table; the first one is always a list, because it has the number of rows."""
    facts: dict[str, Any] = {}
    for index, column in enumerate(fields(table)):
        name, values = column.name, list(getattr(table, column.name))
        if not values and column.default == ():
            continue
        if name.endswith("_s"):
            values = [None if at is None else ticks[_whole(at)] for at in values]
        elif name == "kv_usage":
            values = [*map(_whole, values)]
        constant = index > 0 and len(set(values)) == 1
        facts[_stored_name(name)] = values[0] if constant else values if name == "finished" else deltas(values)
    return facts


def _stored_name(name: str) -> str:
    return "kv_usage_ppm" if name == "kv_usage" else f"{name[:-1]}tick" if name.endswith("_s") else name


def _whole(value: float | None, units: float = PER_S) -> int | None:
    if value is None:
        return None
    if not math.isfinite(value * units):
        raise ValueError(f"{value * units} is not a finite number")
    return round(value * units)


def deltas(values: Iterable[int | None]) -> list[int | None]:
    """Return the difference of each value to the last one that is not None."""
    coded: list[int | None] = []
    last = 0
    for value in values:
        coded.append(None if value is None else value - last)
        last = last if value is None else value
    return coded


# Reading


def engine_from_record(facts: dict[str, Any]) -> tuple[EngineSpec, Resolved, Environment]:
    """Return the launch that a line describes. Raises as `converted`."""
    asked, host = {**facts["spec"], "model_facts": facts.get("model")}, facts["environment"]
    return converted(EngineSpec, asked), converted(Resolved, facts["resolved"]), converted(Environment, host)


def measurement_of(
    facts: dict[str, Any], spec: EngineSpec, resolved: Resolved, environment: Environment
) -> Measurement:
    workload: WorkloadReference = converted(WorkloadReference, facts["workload"])
    if min(workload.requests, workload.longest, workload.mean_prompt_tokens, workload.mean_output_tokens) <= 0:
        raise ValueError("a workload without requests or tokens")
    return Measurement(
        spec=spec,
        resolved=resolved,
        environment=environment,
        workload=workload,
        load=load_of(facts["load"], converted),
        run=run_of_record(facts),
        launch=facts["engine"],
        measured_at=converted(str, facts["measured_at"]),
        replica=converted(records.Replica | None, facts.get("replica")),
        paired=converted(records.GateLaunch | None, facts.get("paired")),
        neighbours=converted(int, facts.get("neighbours", 0)),
    )


def converted(kind: Any, value: Any) -> Any:
    """Return a JSON value as this type; entries without a field are ignored, as a later minor release may add some.

    Raises:
        ValueError: for values of other types, and whole numbers of 2**63 or more.
        BadUsage: from the checks of a specification.
    """
    import msgspec  # here, because an idle run reads no records

    found = msgspec.convert(value, kind, str_keys=True)
    pending = [found]
    for each in pending:
        if isinstance(each, int) and abs(each) >= LARGEST:
            raise ValueError("a number that cannot be meant")
        pending += [getattr(each, name) for name in _field_names(each.__class__)]
    return found


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def run_of_record(facts: dict[str, Any]) -> Run:
    """Return the run of a measurement. A damaged one raises one of `schema.errors.UNUSABLE`."""
    stored: StoredRun = converted(StoredRun, facts["run"])
    first, *texts = stored.clock_us or [0]
    places = [converted(str, text).encode("ascii").translate(VALUES) for text in texts] or [b""]
    if len(set(map(len, places))) > 1 or any(NO_DIGIT in place for place in places):
        raise ValueError("its clock has places of unequal length, or what is no digit")
    gaps: Sequence[int] = places[0]
    for place in places[1:]:
        gaps = [gap << 6 | digit for gap, digit in zip(gaps, place, strict=True)]
    clock = [stamp / PER_S for stamp in accumulate(gaps, initial=converted(int, first))] if stored.clock_us else []
    failed, stream, seen, telemetry = stored.failed, stored.stream, stored.telemetry, None
    if failed is not None:  # older records have only the number of failures
        columns = (failed.request, failed.sent_s, failed.ended_s, failed.kind, failed.scheduled_s)
        if {len(column) for column in columns if column is not None} != {stored.failures}:
            raise ValueError(f"rows of failures that are not {stored.failures}")
    if stream is not None and stream.bin_s <= 0:
        raise ValueError(f"bins of {stream.bin_s} s")
    if seen is not None:
        rows, time_s = len(seen.time_us), _in_units(running_sums(seen.time_us), PER_S)
        span_s, interval_s = _in_units(seen.span_us, PER_S), seen.interval_us / PER_S
        host, *gpus = (
            {
                number: _in_units(running_sums(coded) if isinstance(coded, list) else [coded] * rows, per_unit(number))
                for number, coded in columns.items()
            }
            for columns in (seen.columns, *seen.gpus)
        )
        if {len(span_s), *(len(column) for each in (host, *gpus) for column in each.values())} != {rows}:
            raise ValueError(f"columns of the telemetry that have not {rows} rows")
        telemetry = Telemetry(seen.sources, interval_s, time_s, span_s, host, seen.missing, seen.notes, tuple(gpus))
    return Run(
        samples=Samples(**_table(Samples, stored.samples, clock)),
        steps=Steps(**_table(Steps, stored.steps, clock)),
        window_s=(stored.window_us[0] / PER_S, stored.window_us[1] / PER_S),
        failures=stored.failures,
        first_failure=stored.first_failure,
        began_s=None if stored.began_us is None else stored.began_us / PER_S,
        telemetry=telemetry,
        stream=stream,
        failed=failed,
    )


class StoredColumn(NamedTuple):
    """Storage of one column of a table.

    Attributes:
        may_lack: the column is missing if its values are unknown.
        kinds: types of its values.
    """

    name: str
    stored: str
    may_lack: bool
    kinds: frozenset[type]


@cache
def _columns_of(table: type) -> tuple[StoredColumn, ...]:
    found = []
    for column in fields(table):
        kinds = {bool if column.name == "finished" else int} | ({NoneType} if "None" in str(column.type) else set())
        found.append(StoredColumn(column.name, _stored_name(column.name), column.default == (), frozenset(kinds)))
    return tuple(found)


def _table(cls: type, facts: Mapping[str, Any], clock: Sequence[float]) -> dict[str, tuple[Any, ...]]:
    """Return the inverse of `_table_facts`."""
    table: dict[str, tuple[Any, ...]] = {}
    first, *_ = columns = _columns_of(cls)
    rows = len(facts[first.stored])
    for name, stored, may_lack, kinds in columns:
        if may_lack and stored not in facts:
            continue
        coded = facts[stored]
        told = coded if isinstance(coded, list) else [coded]  # one value stands for all rows
        if not kinds.issuperset(map(type, told)):
            foreign = sorted({kind.__name__ for kind in map(type, told) if kind not in kinds})
            raise TypeError(f"{name}: {', '.join(foreign)} among its values")
        if isinstance(coded, list) and name != "finished":
            told = running_sums(coded)
        known = [value for value in told if value is not None] if None in told else told
        if known and max(max(known), -min(known)) >= LARGEST:
            raise ValueError(f"{name}: a number that cannot be meant")
        if name.endswith("_s"):
            if known and not 0 <= min(known) <= max(known) < len(clock):
                raise ValueError(f"{name}: a tick that its clock does not have")
            told = [None if tick is None else clock[tick] for tick in told]
        values = _in_units(told, PER_S) if name == "kv_usage" else tuple(told)
        table[name] = values if isinstance(coded, list) else values * rows
        if len(table[name]) != rows:
            raise ValueError(f"{len(table[name])} rows of {name}, {rows} of {first.name}")
    return table


def _in_units(values: Iterable[int | None], units: float) -> tuple[Any, ...]:
    return tuple([None if value is None else value / units for value in values])


def running_sums(differences: Sequence[int | None]) -> list[int | None]:
    if None not in differences:  # most columns, and a report reads millions of values
        return list(accumulate(differences))
    values: list[int | None] = []
    last = 0
    for difference in differences:
        last += difference or 0
        values.append(None if difference is None else last)
    return values
