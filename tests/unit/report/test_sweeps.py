"""A sweep's section: its heading counts what was measured, each row has the figures of its point, each finding has the
number that was planted and is silent where nothing is known, and all else is of what is shown."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from html_pages import values_of
from hypothesis import given
from scripts import BASELINES, in_checkout
from sections import column_of, legends_of, named_of, rows_of, sentences_of, tables_of
from strategies import (
    H200,
    RESOLVED,
    WELL,
    curves,
    law,
    measurement,
    noisy_curve,
    planted_telemetry,
    point,
    without,
)

from pytest_slmserve.analysis.claims.table import ClaimRow, stored_curves
from pytest_slmserve.analysis.metrics.validity import trustworthy
from pytest_slmserve.analysis.metrics.window import parse_slo
from pytest_slmserve.analysis.points import Point, Summary
from pytest_slmserve.analysis.sweep.curve import PLATEAU, Axes, Curve, curve_of, labels
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.archive.store import read
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.section import Legend, Section, Table
from pytest_slmserve.report.sweeps import (
    SENSOR_LEGEND,
    STEP,
    STEP_LEGEND,
    SWEEP_LEGEND,
    energy_sections,
    findings,
    heading,
    overview_tables,
    point_columns,
    relative_range,
    remarks,
    sensor_table,
    skip_note,
    step_rows,
    sweep_charts,
    sweep_section,
    sweep_sections,
)
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Environment, Measurement
from pytest_slmserve.schema.specs import GIB, ClosedLoop

BATCHES = (1, 4, 16, 64, 256)
CPU = Environment(platform="cpu", cpu="Imagined CPU", cores=2, vllm="0.32.0")
SIMULATED = Environment(platform="simulated", gpu_name="simulated")
LIFELIKE = {
    "gpu_util": 1.0,
    "engine_active": 0.972,
    "sm_active": 0.718,
    "sm_active_max": 0.884,
    "sm_occupancy": 0.135,
    "sm_occupancy_max": 0.149,
    "dram_active": 0.613,
    "tensor_active": 0.0521,
    "power_w": 412.345,
    "power_limit_w": 700.0,
    "energy_per_token_j": 1.23456,
    "sm_clock_hz": 1.98e9,
    "power_capped": 0.954,
    "own_cores": 2.31,
    "probe_s": 0.0048,
    "probe_cpu_s": 0.0045,
    "unexplained": 0.412,
    "bound": "compute",
}


def sweep(
    environment: Environment = H200, repeats: int = 2, noise: float = 0.002, model: str = "opt-1.3b", **numbers: float
) -> Curve:
    """A curve with a planted law."""
    made = [
        measurement(c, law(c, **numbers) * (1 + noise * i), environment=environment, model=model, repeat=i)
        for c in BATCHES
        for i in range(repeats)
    ]
    return curve_of("opt-1.3b", made)


def section_of(curve: Curve, **found: object) -> Section:
    return sweep_section(curve, curve.subject, Findings(**found))  # type: ignore[arg-type]


def found(curve: Curve, tolerance: float = 0.10) -> dict[str, str]:
    return dict(findings(curve, tolerance))


def measured(curve: Curve) -> str:
    return [*heading(curve)][-1]


def points_of(curve: Curve) -> dict[str, dict[str, str]]:
    return {row["concurrency"]: row for row in rows_of(Table(curve.points, point_columns(curve)))}


def has(text: str, *facts: object) -> bool:
    return all(str(fact) in text for fact in facts)


# The heading


def test_the_heading_counts_points_repeats_launches_and_hosts():
    places = [("one", "a"), ("two", "b"), ("three", "b")]
    made = [
        measurement(c, law(c), repeat=i, launch=launch, environment=replace(H200, host=host))
        for c in BATCHES
        for i, (launch, host) in enumerate(places)
    ]
    assert has(measured(curve_of("opt-1.3b", made)), "5 points, 3 repeats each, 3 launches, 2 hosts")
    uneven = curve_of("opt-1.3b", [*made, measurement(1, law(1), repeat=9)])
    assert has(measured(uneven), "3 to 4 repeats each, 4 launches")
    assert has(measured(curve_of("x", [measurement(1, failures=1)])), "1 point, no valid repeat")


def test_hosts_are_those_of_valid_measurements():
    def at(host: str | None, **facts: object) -> Measurement:
        return measurement(64, law(64), environment=replace(H200, host=host), **facts)

    assert measured(curve_of("x", [at("a"), at("b", repeat=1), at("c", repeat=2, failures=1)])).endswith(", 2 hosts")
    assert "host" not in measured(curve_of("x", [at(None)]))


@pytest.mark.parametrize(
    ("environment", "facts"),
    [
        (CPU, ["Imagined CPU, 2 cores"]),
        (replace(H200, gpu_name=None), ["unknown GPU"]),
        (SIMULATED, ["SIMULATED ENGINE"]),
        (H200, ["opt-1.3b on NVIDIA H200"]),
    ],
)
def test_the_device_is_in_the_title(environment, facts):
    assert has(section_of(sweep(environment)).title, *facts)


def test_engines_over_several_gpus_are_told():
    def on(gpus: int, platform: str) -> str:
        made = [
            replace(m, spec=replace(m.spec, tensor_parallel_size=gpus, platform=platform)) for m in sweep().measurements
        ]
        return next(heading(curve_of("opt-1.3b", made)))

    assert on(1, "cuda").startswith("opt-1.3b on NVIDIA") and on(2, "cuda").startswith("opt-1.3b on 2 x NVIDIA")
    assert on(2, "simulated").startswith("opt-1.3b, TP 2, on ")


def test_requests_load_and_limits_are_told():
    _, engine_line, workload, load, limits, _ = heading(sweep())
    assert has(engine_line, "vLLM 0.26.0", "engine interface", "float16") and has(
        workload, "64/32", "64 requests", "0123456789ab"
    )
    assert has(load, "staggered", "5 s", "1 lifetime of") and has(
        limits, "1,024", "1,365 blocks x 16", "227 requests of 96"
    )
    plain = measurement()
    natural = replace(plain.workload, spec=replace(plain.workload.spec, prompt_tokens=None, output_tokens=None))
    longer = replace(plain, workload=natural, load=ClosedLoop(8, settle_lifetimes=2.0))
    _, _, workload, load, *_ = heading(curve_of("opt-1.3b", [longer]))
    assert has(workload, "natural", "64/32") and has(load, "2 lifetimes")


def test_launches_that_differ_show_both_limits():
    other = replace(RESOLVED, kv_blocks=1366, attention_backend="FLASH_ATTN")
    made = [measurement(8, 100.0, repeat=1), measurement(8, 100.0, resolved=other, launch="launch-2")]
    assert has(" ".join(heading(curve_of("opt-1.3b", made))), "1,365 or 1,366 blocks", "- or FLASH_ATTN")


def test_labels_tell_curves_of_one_subject_apart():
    together = curve_of("opt-1.3b", [measurement(1, 50.0, load=ClosedLoop(1, ramp_up="burst"))])
    longer = curve_of("opt-1.3b", [measurement(1, 50.0, load=ClosedLoop(1, window_s=9.0))])
    other = curve_of("opt-2.7b", [measurement(model="opt-2.7b")])
    assert labels([sweep(), other]) == ["opt-1.3b", "opt-2.7b"]
    assert labels([sweep(), together]) == ["opt-1.3b, ramp-up staggered", "opt-1.3b, ramp-up burst"]
    assert labels([sweep(), longer, other]) == ["opt-1.3b, window 5 s", "opt-1.3b, window 9 s", "opt-2.7b"]
    assert labels([sweep(), sweep(CPU)])[1].startswith("opt-1.3b, Imagined CPU")
    assert labels([Curve(subject="x"), Curve(subject="x")]) == ["x", "x"]


def test_engines_and_requests_that_differ_are_named_in_words():
    base = sweep(repeats=1)

    def changed(**fields: object) -> Curve:
        return curve_of("opt-1.3b", [replace(m, spec=replace(m.spec, **fields)) for m in base.measurements])

    def sent(hash_: str, **fields: object) -> Curve:
        made = [
            replace(m, workload=replace(m.workload, hash=hash_, spec=replace(m.workload.spec, **fields)))
            for m in base.measurements
        ]
        return curve_of("opt-1.3b", made)

    def told(*some: Curve) -> list[list[str]]:
        return [label.split(", ")[1:] for label in labels(some)]

    three = told(changed(max_num_seqs=256), changed(enforce_eager=True), changed(kv_cache_bytes=3 * GIB))
    assert three[:2] == [
        ["max_num_seqs 256", "KV cache 4 GiB", "no enforce_eager"],
        ["max_num_seqs 1024", "KV cache 4 GiB", "enforce_eager"],
    ]
    assert "KV cache 3 GiB" in three[2]
    name = "max_cudagraph_capture_size"
    assert told(base, changed(extra=((name, 2048),))) == [[f"{name} unset"], [f"{name} 2048"]]
    two = changed(tensor_parallel_size=2, kv_cache_bytes=9 * GIB)
    assert told(base, two) == [["TP 1"], ["TP 2"]], "more GPUs have more cache"
    half = changed(tensor_parallel_size=2, kv_cache_bytes=4 * GIB)
    assert told(two, half) == [["KV cache 9 GiB"], ["KV cache 4 GiB"]]
    assert told(base, sent("fedcba987654", prompt_tokens=None, output_tokens=None))[1] == ["natural lengths"]
    assert told(base, sent("fedcba987654"))[1] == ["workload fedcba"], "nothing else tells them apart"


# Points and remarks


def test_a_row_shows_the_figures_of_its_point():
    curve = sweep()
    row, p = points_of(curve)["16"], curve.points[2]
    rate = p.output_tokens_per_s
    assert (row["batch"], row["requests /s"], row["tokens /s"]) == ("16.00", f"{rate / 32:.2f}", f"{rate:,.0f}")
    assert row["spread %"] == "0.2", "per cent between two repeats"
    seconds, ms = ["E2E s mean", "E2E s p50", "E2E s p99"], ["ms/token", "TTFT ms", "TPOT ms", "step ms"]
    assert [float(row[name]) for name in seconds] == pytest.approx([p.e2e_s, p.e2e_p50_s, p.e2e_p99_s], rel=0.005)
    in_ms = [p.normalized_latency_s, p.ttft_s, p.tpot_s, p.step_s]
    assert [float(row[name]) for name in ms] == pytest.approx([1e3 * value for value in in_ms], rel=0.005)
    assert row["gain %"] == f"{100 * curve.gains()[1].value:+.1f}"
    assert (row["roofline %"], row["Pareto"], row["valid"]) == (f"{100 * p.roofline_fraction:.1f}", "*", "yes")


@given(curves(repeats=1) | curves(repeats=2))
def test_every_curve_can_be_shown(curve):
    section = section_of(curve)
    (table,) = tables_of(section)
    assert column_of(table, "valid") == ["yes"] * len(curve.points)
    assert ("plateau" in named_of(section)) == (len(curve.points) > 1)
    marked = [int(row["concurrency"]) for row in rows_of(table) if row["Pareto"] == "*"]
    assert marked == [p.concurrency for p in curve.points if not any(beats(other, p) for other in curve.points)]


def beats(one: Point, other: Point) -> bool:
    better = one.output_tokens_per_s >= other.output_tokens_per_s and one.e2e_s <= other.e2e_s
    return better and (one.output_tokens_per_s, one.e2e_s) != (other.output_tokens_per_s, other.e2e_s)


def test_cut_missing_invalid_and_partly_valid_points_are_named():
    made = [measurement(c, law(c), repeat=i, preempted=c == 16) for c in BATCHES for i in range(2)]
    made.append(measurement(4, law(4), repeat=2, failures=3))
    curve = curve_of("opt-1.3b", made, planned=(*BATCHES, 8, 32, 512), cut=((512, "full"), (1024, "full")))
    said = list(remarks(curve))
    assert [text for text in said if text.startswith("cut: ")] == ["cut: concurrency 512, 1024: full"]
    assert [text for text in said if text.startswith("not measured") and text.endswith("concurrency 8, 32")]
    assert [text for text in said if text.startswith("INVALID: concurrency 16: 0 of 2 ") and "1 preemptions" in text]
    assert [
        text for text in said if text.startswith("left out: concurrency 4: 2 of 3 ") and "3 requests failed" in text
    ]
    rows = points_of(curve)
    assert {*rows["16"].values()} == {"16", "-", "", "NO"} and rows["4"]["valid"] == "partly"
    (lost,) = remarks(without(noisy_curve({4: 1.0, 8: 2.0}), 4))
    assert lost.startswith("INVALID: concurrency 4: 0 of 1 ")


def test_noisy_points_are_marked_and_named():
    made = [measurement(c, law(c), repeat=i, steps=200) for c in (2, 4, 8) for i in range(2)]
    made += [measurement(8, law(8), repeat=2, steps=200, slow_from=100, slow_factor=1.25)]
    made += [measurement(4, law(4), repeat=2, steps=200, slow_from=100, slow_factor=1.25, failures=1)]
    curve = curve_of("opt-1.3b", made)
    assert {load: row["valid"] for load, row in points_of(curve).items()} == {"2": "yes", "4": "partly", "8": "noisy"}
    (noisy,) = [text for text in remarks(curve) if text.startswith("noisy")]
    assert has(noisy, "concurrency 8: not steady: ")


def test_the_report_and_the_item_say_alike_what_was_left_out():
    made = [measurement(8, 100.0, repeat=i, failures=3 * (i == 2)) for i in range(3)]
    (said,) = remarks(curve_of("opt-1.3b", made))
    item = trustworthy("opt-1.3b-8", [(m,) for m in made], 2)
    assert item and item.why.endswith(said.split("are used: ")[1])


def test_spread_is_over_the_mean():
    assert relative_range(point(1, [90.0, 100.0, 110.0])) == pytest.approx(0.2)
    assert relative_range(point(1, [90.0])) is None and relative_range(point(1, [])) is None


GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def swept(rates: dict[int, float]) -> Curve:
    made = [measurement(load, rate * (1 + 0.001 * i), repeat=i) for load, rate in rates.items() for i in range(2)]
    return curve_of("opt-1.3b", made, planned=GRID, adaptive=0.1)


LAWFUL = swept({load: law(load) for load in (1, 128, 256, 1024)})
DENTED = swept({1: 665.0, 512: 42274.0, 1024: 53466.0})  # OPT-125M on an H200


def test_predictions_stand_below_the_table_and_in_the_reason_of_a_skip():
    (said,) = remarks(LAWFUL)
    assert has(said, "426 at 2, 817 at 4, 1,510 at 8, 2,", "misses it by at most 0")
    assert has(skip_note(LAWFUL, 512), "predicted: 9,1", " to 9,") and said in sentences_of(section_of(LAWFUL))
    assert has(measured(LAWFUL), "4 points (adaptive sweep, 7 planned loads not needed), ")


def test_where_the_law_does_not_describe_the_curve_there_are_none():
    assert has(next(remarks(DENTED)), "concurrency 2, 4, 8, 16, 32, 64, 128, 256; no prediction")
    assert skip_note(DENTED, 256).endswith("17.4 % (at 512)") and "predicted" not in skip_note(DENTED, 256)


def test_a_sweep_that_has_not_ended_says_what_was_next():
    early = swept({1: law(1), 1024: law(1024)})
    (said,) = remarks(early)
    assert said.endswith("concurrency 256") and has(skip_note(early, 4), "concurrency 256 was next")
    assert has(measured(early), "2 points (adaptive sweep, not at its end), ")


def test_a_sweep_without_measurements_says_so():
    section = section_of(Curve(subject="opt-1.3b", missing=(1, 2)))
    assert tables_of(section) == [] and named_of(section) == {}
    assert section.title.startswith("opt-1.3b: ") and sentences_of(section)[-1].endswith("concurrency 1, 2")


def test_external_results_are_named_by_their_columns():
    curve = replace(noisy_curve({1: 100.0, 2: 190.0, 4: 350.0}), axes=Axes("batch", "tok", "lat_ms"), subject="mine")
    section = section_of(curve)
    (table,) = tables_of(section)
    assert section.title == "mine" and {"batch", "tok", "lat ms"} <= {*table.cells.heads}
    assert [float(text.replace(",", "")) for text in column_of(table, "lat ms")] == pytest.approx(
        [1e3 * p.e2e_s for p in curve.points], rel=0.01
    )
    assert {"roofline", "repeats"}.isdisjoint(named_of(section)) and [chart.title for chart in section.charts()] == [
        "tok over the load"
    ]


# Findings on throughput


@pytest.mark.parametrize(
    ("rates", "repeats", "begins", "facts"),
    [
        ({b: law(b) for b in (64, 128, 256, 512)}, 3, "from concurrency 256 (95 %: 256 to 256): ", ["10 %"]),
        ({b: law(b) for b in (64, 128, 256, 512)}, 1, "from concurrency 256: ", ["noise unknown"]),
        ({1: 1.0, 2: 2.0, 4: 4.0}, 3, "not reached: ", ["(2 to 4)", "99.", " %"]),
    ],
)
def test_the_plateau_with_its_confidence(rates, repeats, begins, facts):
    text = found(noisy_curve(rates, noise=0.001 if repeats > 1 else 0.0, repeats=repeats))["plateau"]
    assert text.startswith(begins) and has(text, *facts) and "may be from" not in text
    assert ("not certain" in text) is (repeats == 1)


def test_a_flat_stretch_that_does_not_last_is_no_plateau():
    """As OPT-125M on an H200, which gains 6 % from 128 to 256 and 53 % from 256 to 512."""
    bent = {64: 22.7, 128: 32.7, 256: 34.6, 512: 53.1}
    text = found(noisy_curve({**bent, 1024: 61.8}, noise=0.03, repeats=2))["plateau"]
    assert text.startswith("not reached: ") and has(text, "(512 to 1024)", "from concurrency 512 on", "from 256 to 512")
    later = found(noisy_curve({**bent, 1024: 53.5}, noise=0.001))["plateau"]
    assert later.startswith("from concurrency 512") and has(later, "from 128 to 256 (")


def test_the_plateau_is_by_the_tolerance_of_its_claim():
    row = ClaimRow(PLATEAU, parameters={"tolerance": 0.75})
    judged = [(Verdict(PLATEAU, "opt-1.3b", State.PASSES, "because"), row)]
    assert has(named_of(section_of(sweep(), judged=judged))["plateau"], "75 %")


@pytest.mark.parametrize(
    ("rates", "cut", "begins", "facts"),
    [
        ((12_141.0, 12_511.0, 10_893.0, 11_005.0), (), "12,511 at concurrency 2; ", ["concurrency 8 has 12 % less"]),
        ((100.0, 101.0, 100.0), (), "101.0 at concurrency 2; ", ["concurrency 4", "same"]),
        ((1.0, 2.0), (), "2.000 at concurrency 2, ", ["measured"]),
        ((1.0, 2.0), ((4, "too large"),), "2.000 at concurrency 2, ", ["fits"]),
    ],
)
def test_the_best_load_and_what_lies_past_it(rates, cut, begins, facts):
    curve = noisy_curve(dict(zip((1, 2, 4, 8), rates)), noise=0)
    text = found(replace(curve, cut=cut))["most tokens/s"]
    assert text.startswith(begins) and has(text, *facts)


def test_loads_that_none_beats_are_told():
    assert has(found(noisy_curve({1: 1.0, 2: 1.9, 4: 1.8}, noise=0))["Pareto-optimal"], "concurrency 1, 2 (")
    assert has(found(noisy_curve({1: 1.0, 2: 1.5}, noise=0))["Pareto-optimal"], "all points")


# Findings on the law, the sensors and the clients


def test_the_law_and_its_fixed_part_against_shapes():
    """b_half 45 at 10,000 tokens/s: 4.5 ms; the weights of OPT-1.3B take 2.6315 GB / 4.8 TB/s = 0.548 ms."""
    seen = found(sweep())
    assert has(seen["saturation law"], "T_inf 10,010 ", "b_half 45.0 ", "(95 %: ", "0 % in the mean, 0 % at most")
    assert seen["fixed part"].startswith("4.50 ms ") and has(
        seen["fixed part"], "0.548 ms", "4,800 GB/s", " 167 ", "3.95 ms"
    )
    assert "(95 %" not in found(sweep(repeats=1))["saturation law"]
    assert "b_half 44.0 " in dict(findings(sweep(), 0.1, b_half=44.0))["saturation law"]
    assert "not describe" in dict(findings(sweep(), 0.1, b_half=30.0))["saturation law"]


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ({16: 10_300.0, 64: 10_150.0, 256: 10_000.0}, "not identified"),
        ({1: 597.0, 4: 2132.0, 16: 5981.0, 64: 12_141.0, 128: 12_511.0, 256: 10_893.0, 512: 11_005.0}, "not describe"),
    ],
)
def test_a_law_that_cannot_be_or_is_far_off_is_not_taken_apart(rates, words):
    seen = found(noisy_curve(rates, noise=0.001))
    assert words in seen["saturation law"] and "fixed part" not in seen


@pytest.mark.parametrize("b_half", [1.0, 5.5])
def test_no_host_is_made_up_where_weights_explain_the_fixed_part(b_half):
    seen = found(sweep(noise=0.01, t_inf=10_000.0, b_half=b_half))["fixed part"]
    assert "no time is left" in seen and "the other" not in seen


def test_without_a_data_sheet_or_a_shape_nothing_is_split():
    seen = found(sweep(CPU))
    assert has(seen["fixed part"], "; b_half from shapes is 167 ") and not {"roofline", "regime"} & seen.keys()
    seen = found(sweep(model="/nowhere/unknown"))
    assert seen["fixed part"].startswith("4.50 ms ") and "shapes" not in seen["fixed part"]


def test_the_roofline_and_the_regime_are_by_shapes():
    curve = sweep()
    seen, shares = found(curve), {p.roofline_fraction: p.concurrency for p in curve.valid}
    assert has(seen["roofline"], f"{100 * max(shares):.1f} %", f"concurrency {shares[max(shares)]}")
    assert seen["regime"].startswith("memory-bound") and has(seen["regime"], "FLOP/byte", "H200")


def test_nothing_is_said_of_what_is_not_there():
    assert found(Curve(subject="x")) == {}
    assert found(noisy_curve({4: 1.0}, repeats=1)).keys() == {"most tokens/s"}
    assert not {"saturation law", "fixed part"} & found(noisy_curve({1: 1.0, 2: 2.0})).keys(), "too few for a law"


def test_the_worst_of_littles_law_and_where():
    late = [measurement(4, law(4), repeat=i, admitted_early=0.02 * i) for i in range(2)]
    text = found(curve_of("opt-1.3b", [*(measurement(c, law(c)) for c in BATCHES if c != 4), *late]))["Little's law"]
    assert text.endswith("concurrency 4") and 1.5 < float(text.split("at most ")[1].split(" %")[0]) < 2.5
    exact = tuple(replace(point(c, [100.0 * c] * 2), little=0.0002) for c in (1, 2, 4))
    assert "Little's law" not in found(Curve(subject="x", points=exact)), "what rounds to nothing is not said"


@pytest.mark.parametrize(
    ("counters", "facts"),
    [
        ([(0.713, 0.032), (0.8, 0.1)], ["71.3, 80.0 %", "3.2, 10.0 %", "concurrency 1, 8"]),
        ([(0.7, 0.1), (0.7, 0.1)], ["70.0 %", "10.0 %", "every"]),
        ([(0.7, 0.1), (None, 0.1)], None),
    ],
)
def test_activity_while_decoding_needs_the_counters_of_the_largest_load(counters, facts):
    points = [
        replace(point(c, [100.0 * c]), decode_dram=dram, decode_tensor=tensor)
        for c, (dram, tensor) in zip((1, 8), counters)
    ]
    said = found(Curve(subject="x", points=tuple(points))).get("decoding", "")
    assert has(said, *facts) if facts else said == ""


def test_latencies_of_a_load_that_was_still_rising_are_told():
    """At constant load requests/s x E2E is the batch; looked back upon, a rising load was a smaller one."""
    young = replace(noisy_curve({8: 800.0}).points[0], requests_per_s=2.0, e2e_s=3.0, batch=8.0)
    assert has(found(Curve(subject="x", points=(young,)))["latency"], "25 % less", "concurrency 8")
    told = found(Curve(subject="x", points=(young,), measurements=(measurement(),)))["latency"]
    assert has(told, "1 lifetime")
    for steady in (Curve(subject="x", points=(replace(young, e2e_s=3.9),)), sweep()):
        assert "latency" not in found(steady)


def test_an_engine_that_its_server_does_not_feed_is_told():
    behind = replace(measurement(), spec=replace(measurement().spec, interface="server"))
    fed, starved = (
        replace(noisy_curve({c: 900.0}).points[0], batch=b, kv_usage=0.3) for c, b in ((128, 120.0), (512, 240.0))
    )

    def told(*points: Point, m: Measurement = behind) -> str:
        return found(Curve(subject="x", points=points, measurements=(m,))).get("front end", "")

    assert has(told(fed, starved), "concurrency 512", " 240 ", "api_server_count")
    waits = replace(starved, kv_usage=0.99)  # in the engine's own queue
    small = replace(behind, spec=replace(behind.spec, max_num_seqs=256))
    assert [told(fed), told(fed, waits), told(starved, m=measurement()), told(starved, m=small)] == [""] * 4
    assert (
        told(replace(starved, kv_usage=None))
        and told(replace(starved, batch=0.75 * 512))
        and not told(replace(starved, batch=0.76 * 512))
    )


def test_repeats_agree_by_so_much():
    points = tuple(point(c, [100.0, 100.0 + c]) for c in (1, 2, 4))
    said = found(Curve(subject="x", points=points))["repeats"]
    assert has(said, "2 % in the median", "3.9 % at most", "concurrency 4") and "host" not in said
    assert "repeats" not in found(noisy_curve({1: 1.0, 2: 2.0}, repeats=1))
    made = [
        measurement(c, law(c), repeat=i, environment=replace(H200, host=host))
        for c in BATCHES
        for i, host in enumerate("ab")
    ]
    assert "2 hosts" in found(curve_of("x", made))["repeats"]


# Sensors and steps


def seen(concurrency: int = 8, **figures: object) -> Point:
    return replace(point(concurrency, [100.0, 101.0]), **figures)


def sensed(**figures: object) -> Curve:
    return Curve(subject="opt-1.3b", points=tuple(seen(c, **figures) for c in (1, 8, 1024)))


def sensor_rows(*some: Curve) -> list[list[dict[str, str]]]:
    together = Findings(curves=some)
    return [rows_of(sensor_table(curve, "", together)) for curve in some]


def sensor_legend(*some: Curve) -> list[str]:
    told = legends_of(sweep_sections(Findings(curves=some)))
    return [text for text in told if text not in (SWEEP_LEGEND, STEP_LEGEND)]


def test_a_row_shows_what_the_sensors_saw_at_its_point():
    ((_, row, _),) = sensor_rows(sensed(**LIFELIKE))
    assert row == {
        "concurrency": "8", "GPU util %": "100.0", "busy %": "97.2", "SM % mean": "71.8", "SM % max": "88.4",
        "warp % mean": "13.5", "warp % max": "14.9", "DRAM %": "61.3", "tensor %": "5.2", "power W": "412",
        "mJ/token": "1,235", "clock MHz": "1,980", "cap %": "95.4", "own cores": "2.31", "host wait %": "6.2",
        "rest %": "41.2", "bound": "compute", "sensors": "ok",
    }  # fmt: skip


@pytest.mark.parametrize("figures", [{}, {"unexplained": 0.3, "bound": "memory"}])
def test_without_sensors_there_is_no_table(figures):
    """What shapes say alone needs no table of sensors."""
    curve = sensed(**figures)
    assert sensor_rows(curve) == [[]] and sensor_legend(curve) == [] == list(energy_sections(Findings(curves=[curve])))


def test_only_loads_with_sensors_have_a_row_and_degraded_ones_are_marked():
    slow, lost = seen(8, power_w=300.0, degraded=("it was slow",)), replace(point(9, ()), power_w=300.0)
    curve = Curve(subject="x", points=(seen(1), seen(2, power_w=300.0), point(4, ()), slow, lost))
    (rows,) = sensor_rows(curve)
    assert [(row["concurrency"], row["sensors"]) for row in rows] == [("2", "ok"), ("8", "degraded"), ("9", "-")]
    assert points_of(curve)["8"]["valid"] == "degraded" and "degraded: concurrency 8: it was slow" in list(
        remarks(curve)
    )


def test_the_legend_is_of_the_columns_shown():
    def of(*names: str) -> list[str]:
        return [" ".join(SENSOR_LEGEND[name] for name in names)]

    assert sensor_legend(sensed(gpu_util=1.0)) == of("GPU util %")
    assert sensor_legend(sensed(gpu_util=1.0), sensed(own_cores=1.0, power_capped=0.0)) == of(
        "GPU util %", "cap %", "own cores"
    )
    assert sensor_legend(sensed(**LIFELIKE)) == of(*(name for name in SENSOR_LEGEND if name != "host speed %"))
    assert list(sweep_sections(Findings())) == []


def slower(concurrency: int, cpu_ms: float, model: str = "opt-1.3b") -> Measurement:
    """A measurement beside which a host-speed probe took so long, and waited as long again."""
    made = measurement(concurrency, law(concurrency), model=model)
    pieces = {sensors.OWN_CORES: 1.0, sensors.PROBE: 2e-3 * cpu_ms, sensors.PROBE_CPU: 1e-3 * cpu_ms}
    return replace(made, run=replace(made.run, telemetry=planted_telemetry(pieces, interval_s=0.001, until_s=0.7)))


def test_the_speed_of_a_host_is_relative_to_its_best_in_all_sweeps():
    curve = curve_of("a", [slower(1, 4.0), slower(2, 5.0), slower(4, 4.0)])
    other = curve_of("b", [slower(c, 8.0, "b") for c in (1, 2)])
    speeds = [[(row["host speed %"], row["host wait %"]) for row in rows] for rows in sensor_rows(curve, other)]
    assert speeds == [[("100.0", "50.0"), ("80.0", "50.0"), ("100.0", "50.0")], [("50.0", "50.0")] * 2]
    assert SENSOR_LEGEND["host speed %"] in sensor_legend(curve)[0]


@in_checkout
def test_parts_of_a_step_agree_with_the_sensors_beside_them():
    (curve,) = stored_curves(read(BASELINES / "h200-vllm-0.26.0-core-opt-2.7b.jsonl.xz").measurements, ())
    parts, ((*watched,),) = rows_of(Table(step_rows(curve), STEP)), sensor_rows(curve)
    for row, beside in zip(parts, watched, strict=True):
        weights, kv, kernels, idle = (
            float(row[name]) for name in ("weights %", "KV %", "other kernels %", "no kernel %")
        )
        assert weights + kv + kernels + idle == pytest.approx(100, abs=0.25)
        assert idle == pytest.approx(100 - float(beside["busy %"]), abs=0.11)
        assert kernels + idle == pytest.approx(float(beside["rest %"]), abs=0.11)


def test_parts_of_a_step_are_told_with_their_legend_and_add_up_in_the_chart():
    made = curve_of("opt-1.3b", [measurement(load, 100.0, environment=H200) for load in (1, 2)])
    (row, _) = rows_of(Table(step_rows(made), STEP))
    assert list(row) == ["concurrency", "step ms", "weights %", "KV %", "kernels and host %"]
    drawn = next(chart for chart in sweep_charts(made, 0.1) if "step" in chart.title)
    ends = [bar["end"] for bar in values_of(drawn.spec) if bar["subject"] == "concurrency 1"]
    assert ends[-1] == pytest.approx(100) and STEP_LEGEND in legends_of(sweep_sections(Findings(curves=[made])))
    unknown = curve_of("opt-1.3b", [measurement(1, 100.0, environment=replace(H200, gpu_name="another"))])
    assert step_rows(unknown) == [] and STEP_LEGEND not in legends_of(sweep_sections(Findings(curves=[unknown])))


def test_goodput_is_shown_where_limits_are_given():
    assert [table.caption for table in tables_of(section_of(sweep(), slo=parse_slo("e2e:1s")))].count("Goodput") == 1
    assert "Goodput" not in [table.caption for table in tables_of(section_of(sweep()))]


# Energy


def spent(model: str, concurrency: int, joules: float, limit: float | None = 700.0, **where: object) -> Curve:
    made = measurement(concurrency, 1000.0, model=model, **where)
    figures = {"energy_per_token_j": joules, "power_w": 350.0, "power_limit_w": limit}
    shown = replace(seen(concurrency, **figures), each=(Summary(**figures),) * 2)
    return Curve(subject=model, points=(shown,), measurements=(made,))


def energy(*some: Curve) -> dict[str, list[list[str]]]:
    """Rows by the words on the power limit."""
    made = energy_sections(Findings(curves=some))
    return {section.title.partition("under ")[2]: tables_of(section)[0].cells.rows for section in made}


def test_energy_of_each_model_at_its_largest_batch_has_a_table_for_each_power_limit():
    some = spent("opt-125m", 512, 0.00843), spent("opt-1.3b", 256, 0.0476, limit=500.0), spent("opt-2.7b", 128, 0.09)
    found_ = energy(*some, spent("opt-6.7b", 64, 0.2, limit=None), spent("opt-1.3b", 64, 0.1))
    (first, second, third) = found_
    assert "700 W" in first and "500 W" in second and "unknown" in third
    assert found_[first] == [
        ["opt-125m", "512", "100.5", "350", "0.00843"],
        ["opt-2.7b", "128", "100.5", "350", "0.0900"],
    ]
    assert [len(rows) for rows in found_.values()] == [2, 1, 1], "64 is not the batch of OPT-1.3B"


def test_one_model_on_two_devices_is_told_apart():
    other = replace(H200, gpu_name="NVIDIA H100 80GB HBM3")
    (rows,) = energy(spent("opt-125m", 512, 0.01), spent("opt-125m", 512, 0.02, environment=other)).values()
    assert [row[0] for row in rows] == ["opt-125m, NVIDIA H200", "opt-125m, NVIDIA H100 80GB HBM3"]


def test_repeats_under_two_limits_are_under_no_known_one():
    limits = [planted_telemetry({**WELL, sensors.POWER_LIMIT: limit}, interval_s=0.1) for limit in (700.0, 500.0)]
    made = [measurement(512, 1e4, repeat=i, model="opt-125m", steps=120) for i in range(2)]
    both = [replace(m, run=replace(m.run, telemetry=limits[i])) for i, m in enumerate(made)]
    assert ["unknown" in limit for limit in energy(curve_of("opt-125m", both))] == [True]


# The overview


def overview(*some: Curve, **found: object) -> list[list[dict[str, str]]]:
    return [rows_of(table) for table in overview_tables(Findings(curves=some, **found))]  # type: ignore[arg-type]


def grid(*loads: int, model: str = "opt-1.3b", environment: Environment = H200) -> Curve:
    made = [
        measurement(c, law(c) * (1 + 0.002 * i), model=model, environment=environment, repeat=i)
        for c in loads
        for i in range(2)
    ]
    return curve_of(model, made)


KNEE = grid(64, 128, 256, 512)


def test_a_model_is_a_row_with_its_figures_where_the_plateau_begins():
    alone = grid(64, model="opt-125m")
    further = replace(curve_of("opt-1.3b", [measurement(8, 100.0)]), beside=True)
    ((row, other),) = overview(KNEE, alone, further)
    at = next(p for p in KNEE.points if p.concurrency == 256)
    assert (row["plateau"], row["concurrency"], row["tokens /s"]) == (
        "from 256",
        "256",
        f"{at.output_tokens_per_s:,.0f}",
    )
    assert (other["model"], other["plateau"], other["concurrency"]) == ("opt-125m", "", "64")


@pytest.mark.parametrize(
    ("rates", "noise", "repeats", "plateau"),
    [
        ({1: 1000.0, 2: 2000.0, 4: 4000.0}, 0.001, 3, "past 4"),
        ({1: 1000.0, 2: 2000.0, 4: 4000.0}, 0.0, 1, "past 4?"),  # nothing tells the noise
        ({1: 1000.0, 2: 2000.0, 4: 2100.0}, 0.1, 2, "from 2?"),  # the claim is inconclusive
        ({8: 100.0}, 0.0, 1, ""),  # one point has no plateau to be named
    ],
)
def test_a_plateau_that_is_not_reached_or_not_sure_is_marked(rates, noise, repeats, plateau):
    ((row,),) = overview(noisy_curve(rates, noise=noise, repeats=repeats))
    assert row.get("plateau", "") == plateau and row["concurrency"] == (re.sub(r"\D", "", plateau) or "8")


@pytest.mark.parametrize(("limit_s", "good"), [(999.0, ">=512"), (0.001, "none"), (None, None)])
def test_the_largest_load_within_the_slo_is_told(limit_s, good):
    slo = limit_s and parse_slo(f"e2e:{limit_s}s")
    ((row,),) = overview(KNEE, slo=slo)
    assert row.get("SLO met up to") == good


def test_a_load_within_the_slo_and_the_energy_are_told():
    at = KNEE.points[2].e2e_s
    slo = parse_slo(f"e2e:{at:.3f}s")
    ((row,),) = overview(KNEE, slo=slo)
    assert (
        row["SLO met up to"] in ("128", "256")
        and str(slo) in overview_tables(Findings(curves=[KNEE], slo=slo))[0].caption
    )
    costly = replace(KNEE, points=tuple(replace(p, energy_per_token_j=0.0512) for p in KNEE.points))
    assert overview(costly)[0][0]["J/token"] == "0.0512" and "J/token" not in row


def test_devices_have_a_table_each_and_simulated_numbers_shout():
    tables = overview_tables(Findings(curves=[KNEE, grid(64, 128, 256, 512, environment=SIMULATED)]))
    assert tables[0].caption == "NVIDIA H200, vLLM 0.26.0" and "SIMULATED" in tables[1].caption
    assert not any(isinstance(each, Legend) for each in tables)
