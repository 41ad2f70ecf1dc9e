"""A ramp, step by step: each as a measurement of its own, so that all that is said of a load can be said of a step.

What a step left unserved the next one has to serve too, so a step after an overload is judged with that backlog: this
is what a ramp is for. A rate by itself is measured by a load of its own.
"""

from __future__ import annotations

from dataclasses import replace

from pytest_slmserve.schema.loads import OpenLoop
from pytest_slmserve.schema.records import Measurement, Run, Stream


def steps_of(measurement: Measurement) -> list[Measurement]:
    """A measurement for each step of the load, whose window is the step but for its first `settle_s`; none where the
    load is no ramp. Gaps between tokens are those of the step; an older record has them of the whole run alone."""
    load = measurement.load
    if not isinstance(load, OpenLoop):
        return []
    return [
        replace(
            measurement,
            load=replace(load, rate=rate, window_s=until - begin, steps=()),
            run=_within(measurement.run, number, (begin, until), load.settle_s),
        )
        for number, ((rate, _), (begin, until)) in enumerate(zip(load.steps, load.step_windows_s, strict=True))
    ]


def _within(run: Run, number: int, window_s: tuple[float, float], settle_s: float) -> Run:
    """The run with one step's window, its gaps between tokens and its failures, those of its settling time included.
    Where failure times are unknown, each step keeps all failures of the run."""
    stream = run.stream and _stream_of(run.stream, number)
    if run.failed is None:
        return replace(run, window_s=window_s, stream=stream)
    begin, end = window_s
    failed = run.failed.kept([row for row, at in enumerate(run.failed.sent_s) if begin - settle_s <= at < end])
    return replace(run, window_s=window_s, stream=stream, failed=failed, failures=len(failed))


def _stream_of(stream: Stream, number: int) -> Stream:
    gaps = stream.step_gaps[number] if stream.step_gaps else {**stream.gaps, "counts": {}, "sum_s": None}
    return replace(stream, gaps=gaps, step_gaps=())
