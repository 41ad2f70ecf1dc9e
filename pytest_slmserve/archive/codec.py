"""Measurements as plain JSON values, and back.

Columns hold whole numbers, each as the difference to the one before it: most differences are 0, and packing makes
nothing of them. A column that never changes is that one value. KV usage is in millionths.

What is left are the stamps. Requests of one engine step share theirs, and begin just after others have ended, so all
stamps of a run are one clock, in microseconds, each once and in order; columns say which tick of it they mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from itertools import accumulate, pairwise
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.loads import WorkloadReference, load_facts, load_of
from pytest_slmserve.schema.records import (
    Failures,
    GateLaunch,
    Measurement,
    Replica,
    Resolved,
    Run,
    Samples,
    Steps,
    Stream,
    Telemetry,
)
from pytest_slmserve.schema.sensors import per_unit
from pytest_slmserve.schema.specs import EngineSpec

LARGEST = 1 << 63  # of a number that can be meant
NoneType = type(None)
BASE_64 = f"{ascii_uppercase}{ascii_lowercase}{digits}+/".encode()  # its digits, as in RFC 4648
NO_DIGIT = len(BASE_64)
VALUES = bytes(BASE_64.index(byte) if byte in BASE_64 else NO_DIGIT for byte in range(256))

# Writing


def engine_line(launch: str, spec: EngineSpec, resolved: Resolved, environment: Environment) -> dict[str, Any]:
    asked = asdict(spec)
    model = asked.pop("model_facts")
    if model:
        del model["config"]  # the sizes that follow from it are all that is read
    return {
        "kind": "engine",
        "id": launch,
        "spec": asked,
        "model": model,
        "resolved": asdict(resolved),
        "environment": asdict(environment),
    }


def measurement_line(measurement: Measurement) -> dict[str, Any]:
    run = measurement.run
    clock = _clock(run)
    ticks = {stamp: tick for tick, stamp in enumerate(clock)}
    return {
        "kind": "measurement",
        "engine": measurement.launch,
        "workload": asdict(measurement.workload),
        "load": load_facts(measurement.load),
        "measured_at": measurement.measured_at,
        **({} if measurement.replica is None else {"replica": asdict(measurement.replica)}),
        **({} if measurement.paired is None else {"paired": asdict(measurement.paired)}),
        **({"neighbours": measurement.neighbours} if measurement.neighbours else {}),
        "run": {
            "window_us": [_millionths(stamp) for stamp in run.window_s],
            "failures": run.failures,
            "first_failure": run.first_failure,
            "clock_us": clock_gaps(clock),
            "samples": dict(_columns(run.samples, ticks)),
            "steps": dict(_columns(run.steps, ticks)),
            **({} if run.began_s is None else {"began_us": _millionths(run.began_s)}),
            **({} if run.telemetry is None else {"telemetry": _telemetry(run.telemetry)}),
            **({} if run.stream is None else {"stream": asdict(run.stream)}),
            **({} if run.failed is None else {"failed": asdict(run.failed)}),
        },
    }


def _clock(run: Run) -> list[int]:
    tables = ((table, column.name) for table in (run.samples, run.steps) for column in fields(table))
    stamps = (value for table, name in tables if _is_stamp(name) for value in getattr(table, name))
    return sorted({_millionths(stamp) for stamp in stamps if stamp is not None})


def clock_gaps(clock: Sequence[int]) -> list[int | str]:
    """The first stamp, and the gaps between them in base 64: a text of all first digits, one of all second, and so on.
    Noise is in the last ones only, so they pack better apart."""
    gaps = [later - earlier for earlier, later in pairwise(clock)]
    places = -(-max(gaps, default=0).bit_length() // 6)
    shifts = range(6 * places - 6, -1, -6)
    return [*clock[:1], *(bytes(BASE_64[gap >> shift & 63] for gap in gaps).decode() for shift in shifts)]


def _telemetry(found: Telemetry) -> dict[str, Any]:
    return {
        "sources": list(found.sources),
        "interval_us": _millionths(found.interval_s),
        "time_us": deltas(map(_millionths, found.time_s)),
        "span_us": [None if span is None else _millionths(span) for span in found.span_s],
        "columns": _sensed_columns(found.columns),
        **({"gpus": [_sensed_columns(each) for each in found.gpus]} if found.gpus else {}),
        "missing": dict(found.missing),
        "notes": list(found.notes),
    }


def _sensed_columns(columns: Mapping[int, Sequence[float | None]]) -> dict[str, Any]:
    """Differences in whole multiples of the sensor's resolution; one value for a column that never changes."""
    coded = {}
    for number, values in columns.items():
        whole = [None if value is None else _whole(value * per_unit(number)) for value in values]
        coded[str(number)] = whole[0] if len(set(whole)) == 1 else deltas(whole)
    return coded


def _columns(table: Samples | Steps, ticks: Mapping[int, int]) -> Iterator[tuple[str, Any]]:
    """The first column is always written out: it tells the number of rows."""
    for index, column in enumerate(fields(table)):
        values = _in_units(column.name, getattr(table, column.name), ticks)
        if not values and column.default == ():  # nobody told
            continue
        constant = index > 0 and len(set(values)) == 1
        coded = values if column.name == "finished" else deltas(values)
        yield _stored_name(column.name), values[0] if constant else coded


def _is_stamp(name: str) -> bool:
    return name.endswith("_s")


def _stored_name(name: str) -> str:
    return "kv_usage_ppm" if name == "kv_usage" else f"{name[:-1]}tick" if _is_stamp(name) else name


def _in_units(name: str, values: Sequence[Any], ticks: Mapping[int, int]) -> list[Any]:
    if _stored_name(name) == name:
        return list(values)
    whole = [None if value is None else _millionths(value) for value in values]
    return [None if stamp is None else ticks[stamp] for stamp in whole] if _is_stamp(name) else whole


def _millionths(value: float) -> int:
    return _whole(value * 1e6)


def _whole(value: float) -> int:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    return round(value)


def deltas(values: Iterable[int | None]) -> list[int | None]:
    """Each less the last one that is not None; the first less 0."""
    coded: list[int | None] = []
    last = 0
    for value in values:
        coded.append(None if value is None else value - last)
        last = last if value is None else value
    return coded


def engine_from_record(facts: dict[str, Any]) -> tuple[EngineSpec, Resolved, Environment]:
    model = facts.get("model")
    return (
        converted(EngineSpec, {**facts["spec"], "model_facts": model}),
        converted(Resolved, facts["resolved"]),
        converted(Environment, facts["environment"]),
    )


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
        run=_run(facts["run"]),
        launch=facts["engine"],
        measured_at=converted(str, facts["measured_at"]),
        replica=converted(Replica, facts["replica"]) if facts.get("replica") else None,
        paired=converted(GateLaunch, facts["paired"]) if facts.get("paired") else None,
        neighbours=converted(int, facts.get("neighbours", 0)),
    )


def converted(kind: Any, value: Any) -> Any:
    """A JSON value as the annotation `kind` has it: lists become tuples, objects dataclasses. Entries that a class has
    no field for are left out: a later minor release may have added some. Raises ValueError or TypeError."""
    import msgspec  # here, for an idle run reads no records

    found = msgspec.convert(value, kind)
    _check_size(found)
    return found


def _check_size(found: Any) -> None:
    """Raises ValueError where a whole number is too large for the arithmetic of fractions."""
    if isinstance(found, int) and abs(found) >= LARGEST:
        raise ValueError("a number that cannot be meant")
    for each in fields(found) if is_dataclass(found) else ():
        _check_size(getattr(found, each.name))


def _run(facts: dict[str, Any]) -> Run:
    start, stop = _from_millionths(converted(tuple[int, int], facts["window_us"]))
    clock = _clock_of(facts["clock_us"])
    return Run(
        samples=Samples(**_table(Samples, facts["samples"], clock)),
        steps=Steps(**_table(Steps, facts["steps"], clock)),
        window_s=(start, stop),
        failures=converted(int, facts["failures"]),
        first_failure=converted(str | None, facts["first_failure"]),
        began_s=None if "began_us" not in facts else converted(int, facts["began_us"]) / 1e6,
        telemetry=None if "telemetry" not in facts else _telemetry_of(facts["telemetry"]),
        stream=None if "stream" not in facts else _stream_of(facts["stream"]),
        failed=_failed_of(facts),
    )


def _clock_of(coded: Sequence[Any]) -> list[float]:
    """The inverse of `clock_gaps`, in seconds."""
    if not coded:
        return []
    places = [converted(str, text).encode("ascii").translate(VALUES) for text in coded[1:]] or [b""]
    if len(set(map(len, places))) > 1 or any(NO_DIGIT in place for place in places):
        raise ValueError("its clock has places of unequal length, or what is no digit")
    gaps: Sequence[int] = places[0]
    for place in places[1:]:
        gaps = [gap << 6 | digit for gap, digit in zip(gaps, place, strict=True)]
    return [stamp / 1e6 for stamp in accumulate(gaps, initial=converted(int, coded[0]))]


def _failed_of(facts: dict[str, Any]) -> Failures | None:
    """A record of before failures had rows has only their number."""
    if "failed" not in facts:
        return None
    found: Failures = converted(Failures, facts["failed"])
    columns = (found.request, found.sent_s, found.ended_s, found.kind, found.scheduled_s)
    if {len(column) for column in columns if column is not None} != {facts["failures"]}:
        raise ValueError(f"rows of failures that are not {facts['failures']}")
    return found


def _stream_of(facts: dict[str, Any]) -> Stream:
    """The stream of a record, whose numbers are few and therefore plain. Raises ValueError for bins of 0 s or less."""
    found: Stream = converted(Stream, facts)
    if found.bin_s <= 0:
        raise ValueError(f"bins of {found.bin_s} s")
    return found


def _telemetry_of(facts: dict[str, Any]) -> Telemetry:
    times = _whole_numbers(facts["time_us"])
    found = Telemetry(
        sources=tuple(converted(str, source) for source in facts["sources"]),
        interval_s=converted(int, facts["interval_us"]) / 1e6,
        time_s=_from_millionths(running_sums(times)),
        span_s=_from_millionths(_whole_numbers(facts["span_us"])),
        columns=_columns_of(facts["columns"], len(times)),
        missing={str(reason): converted(int, count) for reason, count in facts["missing"].items()},
        notes=tuple(converted(str, note) for note in facts["notes"]),
        gpus=tuple(_columns_of(each, len(times)) for each in facts.get("gpus", ())),
    )
    columns = (column for each in (found.columns, *found.gpus) for column in each.values())
    if {len(column) for column in (found.span_s, *columns)} != {len(times)}:
        raise ValueError(f"columns of the telemetry that have not {len(times)} rows")
    return found


def _columns_of(facts: dict[str, Any], rows: int) -> dict[int, tuple[float | None, ...]]:
    """The inverse of `_sensed_columns`."""
    found = {}
    for number, coded in facts.items():
        units = per_unit(int(number))
        whole = running_sums(_whole_numbers(coded)) if isinstance(coded, list) else _whole_numbers([coded] * rows)
        found[int(number)] = tuple([None if value is None else value / units for value in whole])
    return found


def _whole_numbers(values: Any) -> list[int | None]:
    found: list[int | None] = converted(list[int | None], values)
    return found


def _table(cls: type, facts: dict[str, Any], clock: Sequence[float]) -> dict[str, tuple[Any, ...]]:
    stored = {column.name: _stored_name(column.name) for column in fields(cls)}
    names = [column.name for column in fields(cls) if column.default != () or stored[column.name] in facts]
    rows = len(facts[stored[names[0]]])
    table = {name: _column(cls, name, facts[stored[name]], rows, clock) for name in names}
    for name, column in table.items():
        if len(column) != rows:
            raise ValueError(f"{len(column)} rows of {name}, {rows} of {names[0]}")
    return table


def _column(cls: type, name: str, coded: Any, rows: int, clock: Sequence[float]) -> tuple[Any, ...]:
    """The inverse of what `_columns` makes of one column: one value stands for all rows."""
    told = coded if isinstance(coded, list) else [coded]
    optional = {NoneType} if "None" in str(cls.__annotations__[name]) else set()
    if foreign := set(map(type, told)) - {bool if name == "finished" else int} - optional:
        raise TypeError(f"{name}: {', '.join(sorted(kind.__name__ for kind in foreign))} among its values")
    if isinstance(coded, list) and name != "finished":
        told = running_sums(coded)
    known = [value for value in told if value is not None] if None in told else told
    if known and max(max(known), -min(known)) >= LARGEST:
        raise ValueError(f"{name}: a number that cannot be meant")
    values: tuple[Any, ...]
    if _is_stamp(name):
        if known and not 0 <= min(known) <= max(known) < len(clock):
            raise ValueError(f"{name}: a tick that its clock does not have")
        values = tuple([None if tick is None else clock[tick] for tick in told])
    else:
        values = tuple(told) if _stored_name(name) == name else _from_millionths(told)
    return values if isinstance(coded, list) else values * rows


def _from_millionths(values: Iterable[int | None]) -> tuple[Any, ...]:
    return tuple([None if value is None else value / 1e6 for value in values])


def running_sums(differences: Sequence[int | None]) -> list[int | None]:
    """The inverse of `deltas`."""
    if None not in differences:  # most columns, and a report reads millions of values
        return list(accumulate(differences))
    values: list[int | None] = []
    last = 0
    for difference in differences:
        last += difference or 0
        values.append(None if difference is None else last)
    return values
