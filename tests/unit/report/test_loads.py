"""Jobs, single loads, rates and ramps, and goodput: each row has the figures that were planted, what fails or is held
back is counted, what all loads share is said once, and the charts have the values of the table."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from html_pages import values_of
from scripts import BASELINES, in_checkout
from sections import column_of, legends_of, rows_of, sentences_of, tables_of
from strategies import job_point, law, measurement

from pytest_slmserve.analysis.metrics.window import Slo, parse_slo
from pytest_slmserve.analysis.sweep.batching import RATE
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.archive.store import read
from pytest_slmserve.report.loads import (
    GOODPUT_LEGEND,
    RATES_GOODPUT_LEGEND,
    Served,
    ValidityCriteria,
    doubts_of,
    endpoint_notes,
    facts_of_load,
    failed_text,
    goodput_found,
    goodput_parts,
    goodput_rows,
    in_words,
    is_counted_loop,
    is_windowed,
    job_sections,
    latency_charts,
    load_figures,
    load_section,
    load_sections,
    rate_panels,
    rate_series,
    rates_facts,
    rates_section,
    rows_of_load,
    slo_rule,
)
from pytest_slmserve.report.text_table import figure
from pytest_slmserve.schema.records import Environment, Measurement, Stream
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop

SLO = Slo(ttft_s=10, e2e_s=0.5)  # concurrency 8 at 1,000 tokens/s take 0.256 s for 32 tokens
CRITERIA = ValidityCriteria(parse_slo("ttft:50ms,tpot:20ms"))


# Goodput


def goodput(made: list[Measurement]) -> list[dict[str, str]]:
    table, *_ = goodput_parts(goodput_rows(curve_of("opt-1.3b", made), SLO), SLO)
    return rows_of(table)


def test_a_row_for_each_point_and_the_failures_of_those_that_do_not_count():
    made = [measurement(8, 1000.0), measurement(32, 1000.0), measurement(64, 1000.0, failures=3)]
    rows = goodput(made)
    assert [(row["concurrency"], row["good %"], row["dropped"]) for row in rows] == [
        ("8", "100.0", "0"),
        ("32", "0.0", "0"),
        ("64", "-", "3"),
    ]
    assert (rows[0]["ttft %"], rows[0]["e2e %"], rows[1]["ttft %"]) == ("100.0", "100.0", "100.0")
    _, highest = goodput_found(goodput_rows(curve_of("opt-1.3b", made), SLO))
    assert highest.load == 8


def test_a_repeat_with_failures_counts_only_as_dropped():
    made = [measurement(8, 1000.0), measurement(8, 1000.0, repeat=1, failures=2)]
    ((both,), (alone,)) = goodput(made), goodput(made[:1])
    assert both["requests"] == alone["requests"] and (both["dropped"], alone["dropped"]) == ("2", "0")


def test_of_nothing_there_is_no_table_and_of_nothing_valid_no_peak():
    assert goodput_parts(goodput_rows(Curve(subject="opt-1.3b"), SLO), SLO) == []
    lost = Served(8, None, 3)
    assert goodput_found([lost]) == (None, None)
    table, said, legend = goodput_parts([lost], SLO)
    assert "no load" in said and legend.text == GOODPUT_LEGEND and rows_of(table)[0]["dropped"] == "3"
    at_rates = goodput_parts([lost], SLO, unit=RATE)
    assert legends_of(at_rates) == [RATES_GOODPUT_LEGEND] and "offered /s" in at_rates[0].cells.heads


def test_a_load_that_is_not_valid_has_no_peak():
    (good,) = goodput_rows(curve_of("opt-1.3b", [measurement(8, 1000.0)]), SLO)
    best, highest = goodput_found([good, replace(good, load=9, valid=False)])
    assert best is not None and highest is not None and highest.load == 8
    assert goodput_found([replace(good, valid=False)]) == (None, None)
    assert goodput_found([good], attainment=1.0)[1].load == 8


# Jobs

LIMITS = [job_point(spec=EngineSpec("opt-1.3b", max_num_seqs=n)) for n in (64, 128)]


def jobs(*points: object) -> list[dict[str, str]]:
    (section,) = job_sections(points)  # type: ignore[arg-type]
    return rows_of(tables_of(section)[0])


def test_jobs_are_in_the_order_of_model_length_and_rate():
    mixed = [job_point(output_tokens=n, rate=r) for r in (10.0, None, 20.0) for n in (256, 32)]
    rows = jobs(*mixed, job_point(model="a"))
    assert [(row["prompt/output"], row["offered /s"]) for row in rows] == [
        ("512/256", "at once"),
        *((f"512/{n}", rate) for n in (32, 256) for rate in ("at once", "20", "10")),
    ]
    assert [row["model"] for row in rows] == ["a", *["opt-6.7b"] * 6]


def test_a_job_has_its_figures_and_columns_of_nothing_are_left_out():
    (row,) = jobs(job_point(batch=12.3, preemptions=3.0, waste=0.25, ttft_s=0.5, rate=5.0))
    wanted = {
        "requests": "500", "requests /s": "10.05", "tokens /s": "2,573", "batch": "12.3", "preempted": "3.00",
        "waste %": "25.0", "TTFT ms": "500",
    }  # fmt: skip
    assert wanted.items() < row.items()
    assert (row["arrived /s"], row["E2E s mean"], row["KV blocks"]) == ("5.00", "2.01", "100,000")
    assert not {"waste %", "batching", "interface", "burstiness"} & jobs(job_point())[0].keys()


def test_limits_interfaces_and_arrivals_are_told_where_they_differ():
    assert [row["max_num_seqs"] for row in jobs(*LIMITS)] == ["64", "128"]
    server = job_point(spec=EngineSpec("opt-1.3b", max_num_seqs=64, interface="server"))
    assert [row["interface"] for row in jobs(LIMITS[0], server)] == ["", "server"]
    uneven = [
        replace(job_point(rate=5.0), load=OpenLoop(requests=500, rate=5.0, burstiness=b, max_concurrency=m))
        for b, m in ((1.0, None), (0.5, 8), (math.inf, 16))
    ]
    assert [(row["burstiness"], row["max concurrency"]) for row in jobs(*uneven)] == [
        ("", ""),
        ("0.5", "8"),
        ("constant", "16"),
    ]


def test_what_is_invalid_is_told_with_its_reason():
    (section,) = job_sections([job_point(()), job_point(rate=1.0)])
    assert column_of(tables_of(section)[0], "valid") == ["NO", "yes"]
    (said,) = sentences_of(section)
    assert said.startswith("INVALID: opt-6.7b, 256 ") and said.endswith("planted: invalid")


def test_hosts_have_sections_and_a_simulated_one_says_so():
    fake = replace(job_point(), environment=Environment(platform="simulated"))
    titles = [section.title for section in job_sections([job_point(), fake, job_point(rate=2.0)])]
    assert ["SIMULATED" in title for title in titles] == [False, True] and job_sections([]) == []


# Requests, notes and words


@pytest.mark.parametrize(
    ("arrivals", "words"),
    [
        ("gamma 1", "Poisson arrivals"),
        ("gamma inf", "arrivals with constant gaps"),
        ("gamma 0.5, seed 3", "arrivals with gamma gaps, burstiness 0.5, seed 3"),
        ("at gamma 1", "at Poisson arrivals"),
        ("xgamma 1", "xgamma 1"),
    ],
)
def test_arrivals_have_their_usual_name(arrivals, words):
    assert in_words(arrivals) == words


def test_failures_are_counted_by_kind_the_most_frequent_first():
    row = {"failures": 3, "failed": ["timeout", "HTTP 503", "HTTP 503"]}
    assert failed_text(row) == "3 failed (HTTP 503: 2, timeout: 1)"
    assert failed_text({"failures": 0, "failed": None}) == "0 failed"
    row = {"problems": ["a"], "degraded": ["b", "c"], "noise": []}
    assert doubts_of(row, "8/s: ") == ["INVALID: 8/s: a", "degraded: 8/s: b", "degraded: 8/s: c"]


def streamed(m: Measurement, tokens_per_chunk: float | None, refused=(), salt=None) -> Measurement:
    stream = Stream(0.01, 0.0, (), {}, tokens_per_chunk=tokens_per_chunk, refused=refused, salt=salt)
    return replace(m, run=replace(m.run, stream=stream))


@pytest.mark.parametrize(("per_chunk", "notes"), [(None, 1), (1.0, 0), (1.04, 0), (1.06, 1), (0.9, 1)])
def test_a_note_tells_how_tokens_were_counted_where_chunks_are_not_tokens(per_chunk, notes):
    said = list(endpoint_notes(streamed(measurement(), per_chunk)))
    assert len(said) == notes and all(f"{per_chunk or 1:.2f}" in text or per_chunk is None for text in said)


def test_fields_that_requests_have_and_that_a_server_refuses_are_told():
    theirs = replace(
        measurement(),
        spec=EngineSpec("m", platform="remote", interface="endpoint", url="http://h/v1", extra=(("top_k", "5"),)),
    )
    asked, refused = endpoint_notes(streamed(theirs, 1.0, ("min_tokens", "seed")))
    assert "top_k: 5" in asked and "min_tokens, seed" in refused


def test_a_load_is_judged_by_the_failures_that_are_allowed():
    m = measurement(8, 1000.0)
    lossy = replace(m, run=replace(m.run, failures=len(m.run.samples) // 10))
    judged = [load_figures(lossy, ValidityCriteria(failed_share=share)) for share in (0.0, 0.5)]
    assert [row["valid"] for row in judged] == [False, True] and judged[0]["problems"]
    assert judged[0]["goodput"] is None and load_figures(m, ValidityCriteria(SLO))["goodput"].attainment == 1
    seen = load_figures(m, ValidityCriteria())
    opens, closes = m.run.window_s
    assert seen["window_s"] == closes - opens and seen["concurrency_max"] == 8
    assert seen["output_tokens"] == 32 * seen["requests"] and seen["prompt_tokens"] == 64 * seen["requests"]


def test_a_counted_loop_of_an_endpoint_is_a_section_of_its_own():
    ours = measurement(4, load=ClosedLoop(4, requests=40))
    spec = EngineSpec("m", platform="remote", interface="endpoint", url="http://h/v1")
    theirs = replace(ours, spec=spec)
    assert [is_counted_loop(m) for m in (ours, theirs, replace(theirs, load=ClosedLoop(4)))] == [False, True, False]
    (section,) = load_sections([ours, theirs], ValidityCriteria(SLO))
    assert section.title == "m at http://h/v1"
    (latency,) = tables_of(section)
    rows = {row["ms"]: row for row in rows_of(latency)}
    lifetime = 1e3 * 32 * 4 / 1000
    assert float(rows["E2E"]["p50"]) == pytest.approx(lifetime, rel=0.01)
    assert float(rows["E2E/token"]["mean"]) == pytest.approx(lifetime / 32, rel=0.01)
    said = sentences_of(section)
    assert [text for text in said if text.startswith("goodput") and "(ttft 100.0 %, e2e 100.0 %)" in text]
    rate = figure(load_figures(theirs, ValidityCriteria())["output_tokens_per_s"], 4)
    assert len([text for text in said if f" {rate} output" in text]) == 1
    assert [chart.title for chart in section.charts() if chart.spec] == ["TTFT", "TPOT", "E2E"]


def test_answers_that_ended_early_or_came_in_one_piece_are_counted():
    m = measurement(4, load=ClosedLoop(4, requests=40))
    rows = m.run.samples
    short = replace(m, workload=replace(m.workload, spec=replace(m.workload.spec, output_tokens=33)))
    whole = replace(m, run=replace(m.run, samples=replace(rows, first_token_s=rows.last_token_s)))
    finished = sum(rows.finished)
    for each, words in ((short, f"{finished} of {finished} requests "), (whole, f"{finished} of {finished} answers ")):
        assert (
            len([text for text in sentences_of(load_section(each, ValidityCriteria())) if text.startswith(words)]) == 1
        )
    assert not [t for t in sentences_of(load_section(m, ValidityCriteria())) if " of " in t and "answers" in t]


def test_quantiles_rise_with_their_share_and_gaps_need_a_client_that_saw_them():
    gaps = {"growth": 1.01, "least_s": 1e-4, "counts": {463: 90, 694: 10}, "sum_s": 1.9}
    made = [measurement(n, law(n)) for n in (2, 8)]
    heard = [replace(m, run=replace(m.run, stream=Stream(0.01, 0.0, (), gaps))) for m in made]
    drawn = {chart.title: chart.spec for chart in latency_charts({m.load.max_concurrency: [m] for m in heard})}
    for spec in drawn.values():
        for load in (2, 8):
            line = [(row["y"], row["x"]) for row in values_of(spec) if row["load"] == load]
            assert line == sorted(line) and (line[0][0], line[-1][0]) == (0, 100)
            assert [x for _, x in line] == sorted(x for _, x in line)
    median = next(row["x"] for row in values_of(drawn["ITL"]) if row["y"] == 50 and row["load"] == 8)
    assert median == pytest.approx(1e3 * 1e-4 * 1.01**463, rel=0.01)
    assert [chart.title for chart in latency_charts({8: made}) if chart.spec] == ["TTFT", "TPOT", "E2E"]


# Rates and ramps


@pytest.fixture(scope="module")
def at_rates() -> list[Measurement]:
    return [m for m in read(BASELINES / "cpu-vllm-0.32.0-server.jsonl.xz").measurements if is_windowed(m.load)]


def lines(panel: dict, stroke: str) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in panel["data"]["values"]:
        if row["stroke"] == stroke:
            found.setdefault(row["series"], []).append((row["x"], row["y"]))
    return found


@in_checkout
def test_a_series_differs_in_its_rate_alone_and_a_ramp_is_by_itself(at_rates):
    series = rate_series(at_rates[::-1])
    assert sorted(len(each) for each in series) == [1, 1, len(at_rates) - 2]
    rates = [m.load.rate for m in max(series, key=len)]
    assert rates == sorted(rates) and [len(each) for each in series if each[0].load.steps] == [1]
    assert rate_series([measurement()]) == []


@in_checkout
def test_rates_in_pictures_are_those_of_the_rows(at_rates):
    short, *plain, ramp = [rows_of_load(m, CRITERIA) for m in at_rates]
    series = [short, sorted((row for each in plain for row in each), key=lambda row: row["load"]["rate"]), ramp]
    (served, *waits), origins = rate_panels(at_rates, CRITERIA.slo)

    def told(value) -> list[list[tuple[float, float]]]:
        return [[(row["schedule_delay"].achieved_per_s, value(row)) for row in each] for each in series]

    assert [*lines(served, "served").values()] == told(lambda row: row["requests_per_s"])
    assert [*lines(served, f"good: {CRITERIA.slo}").values()] == told(lambda row: row["goodput"].per_s)
    names = list(lines(served, "served"))
    assert all(word in name for name, word in zip(names, (" 10 s", " 20 s", "ramp"))) and len(origins) == 1
    for panel, name in zip(waits, ("ttft", "tpot", "e2e"), strict=True):
        for part in ("p50", "p99"):
            assert [*lines(panel, part).values()] == told(lambda row, key=f"{name}_{part}_s": 1e3 * row[key])


@in_checkout
def test_a_rate_that_is_not_valid_is_not_drawn(at_rates):
    lost = [replace(m, run=replace(m.run, failures=1 + len(m.run.samples))) for m in at_rates]
    (served, *_), _ = rate_panels([lost[0], *at_rates[1:]], None)
    assert len(lines(served, "served")) == 2 and rate_panels(lost, None) == ([], ())
    m = next(m for m in at_rates if not m.load.steps)
    lossy = replace(m, run=replace(m.run, failures=len(m.run.samples) // 10))
    drawn = [
        [c.title for c in rates_section([lossy], ValidityCriteria(failed_share=s)).charts() if c.spec] for s in (0, 0.5)
    ]
    assert len(drawn[1]) > len(drawn[0]) > 0


@in_checkout
def test_the_section_of_rates_has_a_row_for_each_and_what_is_wrong(at_rates):
    plain = max(rate_series(at_rates), key=len)
    lossy = replace(plain[0], run=replace(plain[0].run, failures=2))
    section = rates_section([lossy, *plain[1:]], CRITERIA)
    rates, good = tables_of(section)
    figures = [load_figures(m, CRITERIA) for m in plain]
    assert column_of(rates, "offered /s") == [f"{m.load.rate:g}" for m in plain] == column_of(good, "offered /s")
    assert [float(text.replace(",", "")) for text in column_of(rates, "TTFT ms p50")] == pytest.approx(
        [1e3 * row["ttft_p50_s"] for row in figures], rel=5e-3
    )
    assert [
        text
        for text in sentences_of(section)
        if text.startswith(f"failed: {plain[0].load.rate:g} ") and " 2 failed" in text
    ]
    assert [table.caption for table in tables_of(rates_section(plain, ValidityCriteria()))] == ["Rates"]


@in_checkout
def test_facts_of_a_ramp_have_its_steps_and_the_best_of_them(at_rates):
    ramp = next(m for m in at_rates if m.load.steps)
    facts, rows = facts_of_load(ramp, CRITERIA), rows_of_load(ramp, CRITERIA)
    assert [(step["from_s"] < step["until_s"]) for step in facts["steps"]] == [True] * len(ramp.load.steps)
    assert [row["rate"] for row in rows] == [step["rate"] for step in facts["steps"]]
    assert "peak" in facts and not {"peak", "highest_load", "steps"} & rows[0].keys()
    (single,) = rows_of_load(at_rates[0], CRITERIA)
    assert "rate" not in single and single["id"] == at_rates[0].id
    together = rates_facts(at_rates[:2], CRITERIA)
    assert [point["rate"] for point in together["points"]] == [m.load.rate for m in at_rates[:2]]
    assert rates_facts(at_rates[:1], ValidityCriteria())["peak"] is None


@pytest.mark.parametrize(
    ("heading", "rules"),
    [("TTFT, ms", [(200.0, "ttft:200ms")]), ("E2E, ms", [(5000.0, "e2e:5s")]), ("TPOT, ms", []), ("requests/s", [])],
)
def test_a_limit_is_a_line_with_its_words(heading, rules):
    assert [(row["y"], row["text"]) for row in slo_rule(heading, parse_slo("ttft:200ms,e2e:5s"))] == rules
    assert slo_rule(heading, None) == []
