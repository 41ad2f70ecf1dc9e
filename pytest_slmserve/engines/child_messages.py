"""Messages of an engine process, read into values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.records import Failures, Resolved, Run, Samples, Steps, known_fields


def resolved_from(ready: dict[str, Any], ready_s: float) -> Resolved:
    """ready: its limits, and what each of its processes knows of the model, which is a part of it."""
    parts = ready.get("parts") or [{}]
    weights = [part.get("weight_bytes") for part in parts]
    known = {"weight_bytes": None if None in weights else sum(weights)}
    facts = known_fields(Resolved, {**ready, **parts[0], **known})
    for name in ("capture_sizes", "kv_windows"):
        facts[name] = None if facts.get(name) is None else tuple(facts[name])
    return Resolved(**{**facts, "ready_s": ready_s})


def run_from(message: dict[str, Any]) -> Run:
    """The worker's columns as a Run, its clock set to zero where the run began and its rows in the order sent."""
    began = message["began"]

    def since(stamps: Sequence[float | None]) -> tuple[float | None, ...]:
        return tuple(None if s is None else round(s - began, 6) for s in stamps)

    rows = sorted(zip(*message["samples"]), key=lambda row: row[1])
    request, sent, admitted, first, last, prompt, output, finished, cached = zip(*rows) if rows else [()] * 9
    time_s, running, waiting, new, prefilled, kv, preempted = message["steps"] or [()] * 7
    start, stop = message["window"]
    return Run(
        samples=Samples(
            tuple(request),
            since(sent),  # type: ignore[arg-type]
            since(admitted),
            since(first),
            since(last),
            tuple(prompt),
            tuple(output),
            tuple(finished),
            () if all(count is None for count in cached) else tuple(cached),
        ),
        steps=Steps(since(time_s), *map(tuple, (running, waiting, new, prefilled, kv, preempted))),  # type: ignore[arg-type]
        window_s=(round(start - began, 6), round(stop - began, 6)),
        failures=message["failures"],
        first_failure=message["first_failure"] and printable(message["first_failure"]),
        began_s=round(began, 6),
        failed=_failures(message["failed"], since) if message["failures"] else None,
    )


def _failures(told: dict[str, Any], since: Callable[[Sequence[Any]], tuple[Any, ...]]) -> Failures:
    scheduled = told.get("scheduled", [None])
    return Failures(
        request=tuple(told["request"]),
        sent_s=since(told["sent"]),
        ended_s=since(told["ended"]),
        kind=tuple(told["kind"]),
        scheduled_s=None if None in scheduled else since(scheduled),
    )
