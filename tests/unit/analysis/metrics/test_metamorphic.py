"""What becomes of the figures of a measurement when all of its times are shifted and scaled: each stays, or follows as
stated. What a figure is of any run is told by the oracles beside this."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import TICK_S, drawn_readings, drawn_runs, measurement

from pytest_slmserve.analysis.metrics.gpu_figures import decode_window
from pytest_slmserve.analysis.points import summarize
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.records import Stream
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

GAPS = {"growth": 1.01, "least_s": 1e-4, "counts": {"300": 5, "310": 2}, "sum_s": 0.5}
SECONDS = (of.ENERGY, of.CAPPED_POWER)  # counters that grow with time
LOADS = st.sampled_from([ClosedLoop(8), OpenLoop(arrivals="gamma", rate=9.0, window_s=2.0)])
LATENCIES = [
    f"{name}{part}" for name in ("e2e", "ttft", "tpot", "itl") for part in ("", "_p50", "_p90", "_p95", "_p99")
]
TIMES = [*(f"{name}_s" for name in LATENCIES), "normalized_latency_s", "step_s", "energy_per_token_j"]
RATES = ["requests_per_s", "output_tokens_per_s", "roofline_fraction"]


@st.composite
def watched(draw):
    """A measurement of any run, with the gaps that a client saw and the readings of any sensors."""
    run = draw(drawn_runs())
    readings = draw(drawn_readings(run.window_s[0]))
    run = replace(run, telemetry=readings, stream=Stream(0.01, 0.0, (), GAPS))
    return replace(measurement(load=draw(LOADS)), run=run)


def retimed(m, move, factor):
    """All moments of a record moved, and its spans of time by a factor."""

    def mapped(table, *columns):
        moved = {name: tuple(None if at is None else move(at) for at in getattr(table, name)) for name in columns}
        return replace(table, **moved)

    run, t = m.run, m.run.telemetry
    counted = {n: [v and factor * v for v in column] if n in SECONDS else column for n, column in t.columns.items()}
    spans = [span and factor * span for span in t.span_s]
    telemetry = replace(mapped(t, "time_s"), interval_s=factor * t.interval_s, columns=counted, span_s=spans)
    run = replace(
        mapped(run, "window_s"),
        samples=mapped(run.samples, "sent_s", "admitted_s", "first_token_s", "last_token_s"),
        steps=mapped(run.steps, "time_s"),
        telemetry=telemetry,
        stream=replace(run.stream, gaps={**GAPS, "least_s": factor * 1e-4, "sum_s": factor * 0.5}),
        failed=mapped(run.failed, "sent_s", "ended_s"),
    )
    return replace(m, run=run)


@given(watched(), st.integers(0, 2**16), st.sampled_from([0.25, 1.0, 2.0, 8.0]))
def test_latencies_follow_the_clock_rates_its_inverse_and_nothing_depends_on_when_a_run_began(m, ticks, factor):
    other = retimed(m, lambda at: factor * at + ticks * TICK_S, factor)
    before, after = asdict(summarize(m)), asdict(summarize(other))
    expected = {
        **before,
        **{name: before[name] and factor * before[name] for name in TIMES},
        **{name: before[name] and before[name] / factor for name in RATES},
        "unexplained": before["unexplained"] and 1 - (1 - before["unexplained"]) / factor,
    }
    bounds = expected.pop("bound"), after.pop("bound")  # by shapes, if counters do not tell, so by a data sheet
    assert factor != 1 or bounds[0] == bounds[1]
    known = [{name: value for name, value in each.items() if value is not None} for each in (after, expected)]
    assert known[0] == pytest.approx(known[1], rel=1e-9, abs=1e-9)
    decoding = [decode_window(each.run) for each in (m, other)]
    assert len({each and each.rows for each in decoding}) == 1
