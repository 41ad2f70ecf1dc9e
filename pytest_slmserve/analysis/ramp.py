"""A ramp, step by step: each as a measurement of its own, so that all that is said of a load can be said of a step.

What a step left unserved the next one has to serve too, so a step after an overload is judged with that backlog: this
is what a ramp is for. A rate by itself is measured by a load of its own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from pytest_slmserve.records import Measurement, Run
from pytest_slmserve.spec import OpenLoop

Window = tuple[float, float]


def steps_of(measurement: Measurement) -> list[Measurement]:
    """A measurement for each step of the load, whose window is the step but for its first `settle_s`; none where the
    load is no ramp. Gaps between tokens are counted over the whole run, and no step has them."""
    load = measurement.load
    if not isinstance(load, OpenLoop):
        return []
    return [
        replace(
            measurement,
            load=replace(load, rate=rate, window_s=until - begin, steps=()),
            run=_within(measurement.run, (begin, until), load.settle_s),
        )
        for (rate, _), (begin, until) in zip(load.steps, windows(load), strict=True)
    ]


def windows(load: OpenLoop) -> list[Window]:
    """From and until when the requests of each step are judged, in seconds since the run began."""
    ends = accumulate(seconds for _, seconds in load.steps)
    return [(end - seconds + load.settle_s, end) for (_, seconds), end in zip(load.steps, ends, strict=True)]


def _within(run: Run, window_s: Window, settle_s: float) -> Run:
    """What failed in a step, settling included, is of the step; where it is not known when, of each."""
    stream = run.stream and replace(run.stream, gaps={**run.stream.gaps, "counts": {}})
    if run.failed is None:
        return replace(run, window_s=window_s, stream=stream)
    begin, end = window_s
    failed = run.failed.kept([row for row, at in enumerate(run.failed.sent_s) if begin - settle_s <= at < end])
    return replace(run, window_s=window_s, stream=stream, failed=failed, failures=len(failed))
