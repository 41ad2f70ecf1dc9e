from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from strategies import H200, RESOLVED, curves, law, measurement, noisy_curve, without

from pytest_slmserve.analysis.claims.table import ClaimRow
from pytest_slmserve.analysis.metrics.validity import trustworthy
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.screen import tables
from pytest_slmserve.report.section import section_text
from pytest_slmserve.report.sweeps import heading, point_columns, sweep_section
from pytest_slmserve.report.text_table import table
from pytest_slmserve.schema.records import Environment

BATCHES = (1, 2, 4, 8, 16, 32)
CPU = Environment(platform="cpu", cpu="Imagined CPU", cores=2, vllm="0.32.0")
SIMULATED = Environment(platform="simulated", gpu_name="simulated")


def sweep(environment: Environment = H200, repeats: int = 2, **run: object) -> Curve:
    """A curve with a planted law."""
    made = [
        measurement(c, law(c) * (1 + 0.002 * i), environment=environment, repeat=i, **run)
        for c in BATCHES
        for i in range(repeats)
    ]
    return curve_of("opt-1.3b", made, planned=BATCHES)


def sweep_report(curve: Curve) -> str:
    return section_text(sweep_section(curve, curve.subject, Findings()))


def point_table(curve: Curve) -> str:
    return table(curve.points, point_columns(curve))


def words(text: str) -> str:
    """Where lines are broken does not matter."""
    return " ".join(text.split())


def row(table: str, concurrency: int) -> list[str]:
    return next(line.split() for line in table.splitlines() if line.split()[:1] == [str(concurrency)])


def test_a_row_shows_the_figures_of_its_point():
    curve = sweep()
    seen, p = row(point_table(curve), 8), curve.points[3]
    rate = p.output_tokens_per_s
    assert seen[:4] == ["8", "8.000", f"{rate / 32:.2f}", f"{rate:,.0f}"]
    assert seen[4] == "0.2", "per cent between two repeats"
    assert [float(s) for s in seen[5:8]] == pytest.approx([p.e2e_s, p.e2e_p50_s, p.e2e_p99_s], rel=0.005)
    in_ms = [p.normalized_latency_s, p.ttft_s, p.tpot_s, p.step_s]
    assert [float(s) for s in seen[8:12]] == pytest.approx([1e3 * v for v in in_ms], rel=0.005)
    assert seen[12] == f"{100 * curve.gains()[2].value:+.1f}"
    assert seen[13:] == [f"{100 * p.roofline_fraction:.1f}", "*", "yes"]


def test_the_heading_counts_launches_and_hosts():
    pairs = [("one", "a"), ("two", "b"), ("three", "b")]
    made = [
        measurement(c, law(c), repeat=i, launch=launch, environment=replace(H200, host=host))
        for c in BATCHES
        for i, (launch, host) in enumerate(pairs)
    ]
    curve = curve_of("opt-1.3b", made)
    assert "6 points, 3 repeats each, 3 launches, 2 hosts" in sweep_report(curve)


def test_other_devices():
    assert "Imagined CPU, 2 cores" in sweep_report(sweep(CPU))
    unknown = sweep_report(sweep(replace(H200, gpu_name=None)))
    assert "on an unknown GPU" in unknown and "vLLM 0.26.0" in unknown


def test_simulated_numbers_shout():
    assert "SIMULATED ENGINE" in sweep_report(sweep(SIMULATED)).splitlines()[0]


def test_natural_lengths_are_told_by_their_means():
    plain = measurement().workload
    natural = replace(plain, spec=replace(plain.spec, prompt_tokens=None, output_tokens=None))
    curve = curve_of("opt-1.3b", [replace(measurement(), workload=natural)])
    assert any(line.startswith("  workload: natural lengths, 64/32 tokens in the mean") for line in heading(curve))


def test_launches_that_differ_show_both_limits():
    other = replace(RESOLVED, kv_blocks=1366, attention_backend="FLASH_ATTN")
    made = [measurement(8, 100.0, repeat=1), measurement(8, 100.0, resolved=other, launch="launch-2")]
    text = sweep_report(curve_of("opt-1.3b", made))
    assert "KV 1,365 or 1,366 blocks" in text and "attention - or FLASH_ATTN" in text


def test_cut_missing_invalid_and_partly_valid_points_are_named():
    made = [measurement(c, law(c), repeat=i, preempted=c == 16) for c in BATCHES for i in range(2)]
    made.append(measurement(8, law(8), repeat=2, failures=3))
    curve = curve_of("opt-1.3b", made, planned=(*BATCHES, 64, 128, 256), cut=((256, "full"), (512, "full")))
    text = sweep_report(curve)
    assert "cut: concurrency 256, 512: full" in text
    assert "not measured, though planned: concurrency 64, 128" in text
    assert "INVALID: concurrency 16: 0 of 2 measurements are used: 1 preemptions in the window" in text
    assert "left out: concurrency 8: 2 of 3 measurements are used: 3 requests failed" in text
    assert row(point_table(curve), 16) == ["16", *["-"] * 13, "NO"] and row(point_table(curve), 8)[-1] == "partly"
    assert "INVALID: concurrency 4: 0 of 1 measurements are used: planted: invalid" in sweep_report(
        without(noisy_curve({4: 1.0, 8: 2.0}), 4)
    )


def test_noisy_points_are_marked_and_named():
    made = [measurement(c, law(c), repeat=i, steps=200) for c in BATCHES for i in range(2)]
    made += [measurement(8, law(8), repeat=2, steps=200, slow_from=100, slow_factor=factor) for factor in (1.25,)]
    made += [measurement(4, law(4), repeat=2, steps=200, slow_from=100, slow_factor=1.25, failures=1)]
    curve = curve_of("opt-1.3b", made)
    text, cells = sweep_report(curve), point_table(curve)
    assert [row(cells, c)[-1] for c in (2, 4, 8)] == ["yes", "partly", "noisy"]
    [line] = [line for line in text.splitlines() if "noisy, kept" in line]
    assert line.startswith("noisy, kept: concurrency 8: not steady: ") and "concurrency 8: 3 of 3" not in text


def test_the_report_and_the_item_say_alike_what_was_left_out():
    made = [measurement(8, 100.0, repeat=i, failures=3 * (i == 2)) for i in range(3)]
    text = sweep_report(curve_of("opt-1.3b", made))
    item = trustworthy("opt-1.3b-8", [(m,) for m in made], 2)
    assert (
        item
        and item.why == "2 of 3 measurements are valid, 2 are wanted: " + text.split("are used: ")[1].split("\n")[0]
    )


def test_a_sweep_without_measurements_says_so():
    text = sweep_report(Curve(subject="opt-1.3b", missing=(1, 2)))
    assert text.startswith("opt-1.3b: nothing was measured")
    assert "not measured, though planned: concurrency 1, 2" in text and "Pareto" not in text


@given(curves(repeats=1) | curves(repeats=2))
def test_every_curve_can_be_shown(curve):
    text = sweep_report(curve)
    assert all(row(text, p.concurrency)[-1] == "yes" for p in curve.points)
    assert ("plateau" in text) == (len(curve.points) > 1)


def test_a_run_without_results_has_no_tables():
    assert list(tables(Findings())) == []


def test_the_plateau_in_the_findings_is_by_the_tolerance_of_its_claim():
    curve = sweep()
    judged = [
        (
            Verdict("throughput-plateau", "opt-1.3b", State.PASSES, "because"),
            ClaimRow("throughput-plateau", parameters={"tolerance": 0.75}),
        )
    ]
    text = "\n".join(text for text, _ in tables(Findings(curves=[curve], judged=judged)))
    assert "a doubling gains less than 75 %" in text and "batch: mean sequences of an engine step" in text
