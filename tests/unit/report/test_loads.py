"""Jobs, single loads, rates and ramps, and goodput: planted ones have the sections that are kept, what fails or is held
back is counted, and the charts have the values of the table."""

import math
from dataclasses import replace

import pytest
from committed import archive
from facts import tells
from html_pages import values_of
from sections import difference, in_words, sentences_of, tables_of
from strategies import job_point, law, measurement

from pytest_slmserve.analysis.metrics.window import Slo, parse_slo
from pytest_slmserve.analysis.sweep import batching, curve
from pytest_slmserve.report import loads
from pytest_slmserve.report.loads import Served, ValidityCriteria, load_figures
from pytest_slmserve.report.section import Section, in_units, section_text
from pytest_slmserve.schema.records import Environment, Measurement, Stream
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop

SLO = Slo(ttft_s=10, e2e_s=0.5)  # concurrency 8 at 1,000 tokens/s take 0.256 s for 32 tokens
CRITERIA = ValidityCriteria(parse_slo("ttft:50ms,tpot:20ms"))
THEIRS = EngineSpec("m", platform="remote", interface="endpoint", url="http://h/v1")
SEATS, ARRIVING = ((64, "engine"), (128, "engine"), (64, "server")), ((1.0, None), (0.5, 8), (math.inf, 16))
ENGINES = [EngineSpec("opt-1.3b", max_num_seqs=n, interface=interface) for n, interface in SEATS]
UNEVEN = [OpenLoop(requests=500, rate=5.0, burstiness=b, max_concurrency=n) for b, n in ARRIVING]
SIMULATED = Environment(platform="simulated")
EIGHT = measurement(8, 1000.0)
JOBS = {
    "in the order of model, length and rate": [
        *(job_point(output_tokens=n, rate=r) for r in (10.0, None, 20.0) for n in (256, 32)), job_point(model="a"),
    ],
    "all figures": [job_point(batch=12.3, preemptions=3.0, waste=0.25, ttft_s=0.5, rate=5.0)],
    "limits and interfaces": [job_point(spec=spec) for spec in ENGINES],
    "arrivals": [replace(job_point(rate=5.0), load=load) for load in UNEVEN],
    "invalid": [job_point(()), job_point(rate=1.0)],
    "two hosts": [job_point(), replace(job_point(), environment=SIMULATED), job_point(rate=2.0)],
    "none": [],
}  # fmt: skip
ARRIVALS = ("gamma 1", "gamma inf", "gamma 0.5, seed 3", "at gamma 1", "xgamma 1")
FAILED = {"failures": 3, "failed": ["timeout", "HTTP 503", "HTTP 503"]}, {"failures": 0, "failed": None}
DOUBTS = {"problems": ["a"], "degraded": ["b", "c"], "noise": []}
GOODPUT = {
    "of points, and failures of one that does not count": [EIGHT, measurement(32, 1e3), measurement(64, failures=3)],
    "a repeat with failures counts only as dropped": [EIGHT, measurement(8, 1000.0, repeat=1, failures=2)],
    "of nothing": [],
}  # fmt: skip


def test_job_sections_match_expected_file():
    shown = {f"jobs: {name}": in_words(loads.job_sections(some)) for name, some in JOBS.items()}
    lost, good = Served(8, None, 3), loads.goodput_rows(curve.curve_of("opt-1.3b", [EIGHT]), SLO)
    rows = {name: loads.goodput_rows(curve.curve_of("opt-1.3b", made), SLO) for name, made in GOODPUT.items()}
    rows |= {"nothing valid": [lost], "one that is not valid": [*good, replace(good[0], load=9, valid=False)]}
    shown |= {f"goodput: {name}": in_words(loads.goodput_parts(some, SLO)) for name, some in rows.items()}
    words = {"arrivals": map(loads.in_words, ARRIVALS), "failures": map(loads.failed_text, FAILED)}
    words["doubts"] = loads.doubts_of(DOUBTS, "8/s: ")
    shown |= {name: "\n".join(lines) for name, lines in words.items()}
    shown["goodput: rates"] = in_words(loads.goodput_parts([lost], SLO, unit=batching.RATE))
    assert difference("jobs", shown) == ""
    assert loads.goodput_found([lost]) == (None, None) == loads.goodput_found([replace(good[0], valid=False)])
    assert loads.goodput_found(good, attainment=1.0)[1].load == 8
    enough = {0.5: 5, 0.9: 29, 0.95: 59, 0.99: 299}  # that one is likely to be above it
    assert all(loads.supported(share, n) and not loads.supported(share, n - 1) for share, n in enough.items())
    m, lossy = EIGHT, replace(EIGHT, run=replace(EIGHT.run, failures=len(EIGHT.run.samples) // 10))
    judged = [load_figures(lossy, ValidityCriteria(failed_share=share)) for share in (0.0, 0.5)]
    assert [row["valid"] for row in judged] == [False, True] and judged[0]["problems"]
    assert judged[0]["goodput"] is None and load_figures(m, ValidityCriteria(SLO))["goodput"].attainment == 1
    seen, (opens, closes) = load_figures(m, ValidityCriteria()), m.run.window_s
    assert (seen["window_s"], seen["concurrency_max"]) == (closes - opens, 8)
    assert (seen["output_tokens"], seen["prompt_tokens"]) == (32 * seen["requests"], 64 * seen["requests"])


def streamed(m: Measurement, tokens_per_chunk: float | None = None, **seen) -> Measurement:
    stream = Stream(0.01, 0.0, (), seen.pop("gaps", {}), tokens_per_chunk=tokens_per_chunk, **seen)
    return replace(m, run=replace(m.run, stream=stream))


def repeated(*rates):
    return [measurement(8, rate, repeat=i) for i, rate in enumerate(rates)]


def test_repeats_share_one_section(at_rates):
    alike, apart, wild = repeated(1000, 1001, 1002), repeated(1000, 940, 1060), repeated(1000, 300, 2000)
    assert loads.middle_repeat(apart) is apart[0] and loads.middle_repeat(apart[:2]) is apart[1]
    found = loads.repeat_intervals(apart)["output_tokens_per_s"]
    assert found.low < 940 < found.value < 1060 < found.high
    said = [in_words([Section("", loads.repeat_parts([group]))]) for group in (alike, apart, wild)]
    assert "--repeats" not in said[0] and "--repeats 27" in said[1] and "longer --window" in said[2]
    assert all("median" in text for text in said)
    assert loads.repeat_intervals([replace(alike[0], run=replace(alike[0].run, failures=500))]) == {}
    counted = [replace(m, spec=THEIRS, load=ClosedLoop(8, requests=40)) for m in repeated(1000, 940, 1060, 990)]
    counted[2] = replace(counted[2], run=replace(counted[2].run, failures=7))
    ramp = next(m for m in at_rates if m.load.steps)
    again = [replace(m, measured_at=f"later {m.measured_at}") for m in at_rates]
    for some, count in ((counted, 1), ([ramp, replace(ramp, measured_at="later")], 1), ([*at_rates, *again], 3)):
        sections = loads.load_sections(some, CRITERIA)
        assert len(sections) == count and all("of all repeats" in in_words([each]) for each in sections)
    text = in_words(loads.load_sections(counted, CRITERIA))
    assert "invalid: concurrency 8, 40 requests, repeat 3 of 4: 7 requests failed" in text
    assert "of all repeats" not in in_words(loads.load_sections(at_rates, CRITERIA))


def test_counted_endpoint_loop_has_section():
    ours = measurement(4, load=ClosedLoop(4, requests=40))
    theirs, rows = replace(ours, spec=THEIRS), ours.run.samples
    asked = replace(theirs, spec=replace(THEIRS, extra=(("top_k", "5"),)))
    lost = replace(theirs, run=replace(theirs.run, failures=len(rows) // 10))
    short = replace(theirs, workload=replace(ours.workload, spec=replace(ours.workload.spec, output_tokens=33)))
    whole = replace(theirs, run=replace(theirs.run, samples=replace(rows, first_token_s=rows.last_token_s)))
    counted = [loads.is_counted_loop(m) for m in (ours, theirs, replace(theirs, load=ClosedLoop(4)))]
    assert counted == [False, True, False]
    found = {
        "served": theirs,
        "fields that requests have and that a server refuses": streamed(asked, 1.0, refused=("min_tokens", "seed")),
        "failures": lost,
        "answers that ended early": short,
        "answers in one piece": whole,
    }
    shown = {name: in_words(loads.load_sections([ours, m], ValidityCriteria(SLO))) for name, m in found.items()}
    for share in (None, 1.0, 1.04, 1.06, 0.9):  # where chunks are not tokens, it is told how tokens were counted
        shown[f"{share} tokens in a chunk"] = "\n".join(loads.endpoint_notes(streamed(ours, share)))
    assert difference("loads", shown) == ""
    latencies = dict(tables_of(loads.load_section(theirs, ValidityCriteria(SLO)))[0].rows)
    lifetime_s = 32 * 4 / 1000
    assert latencies["E2E"].p50 == pytest.approx(lifetime_s, rel=0.01)
    assert latencies["E2E/token"].mean == pytest.approx(lifetime_s / 32, rel=0.01)
    m = measurement(4, load=ClosedLoop(4, requests=40))
    cached = replace(m.run, samples=replace(m.run.samples, cached_tokens=(32,) * len(m.run.samples)))
    half = replace(m.workload, spec=replace(m.workload.spec, prefix_share=0.5))
    [told] = loads.facts_of_load(replace(m, workload=half, run=cached), CRITERIA)["notes"]
    assert "50.0% in common" in told and "hit rate 50.0%" in told


def test_latency_quantiles_rise_with_share():
    gaps = {"growth": 1.01, "least_s": 1e-4, "counts": {463: 90, 694: 10}, "sum_s": 1.9}
    made = {n: measurement(n, law(n)) for n in (2, 8)}
    heard = {n: [streamed(m, gaps=gaps)] for n, m in made.items()}
    drawn = {chart.title: values_of(chart.spec) for chart in loads.latency_charts(heard)}
    for values in drawn.values():
        for load in made:
            line = [(row["y"], row["x"]) for row in values if row["load"] == load]
            assert line == sorted(line) and (line[0][0], line[-1][0]) == (0, 100)
            assert [x for _, x in line] == sorted(x for _, x in line)
    median = next(row["x"] for row in drawn["ITL"] if row["y"] == 50 and row["load"] == 8)
    assert median == pytest.approx(1e3 * 1e-4 * 1.01**463, rel=0.01)
    unheard = loads.latency_charts({8: [*made.values()]})
    assert [chart.title for chart in unheard if chart.spec] == ["TTFT", "TPOT", "E2E"]
    slo, headings = parse_slo("ttft:200ms,e2e:5s"), ("TTFT, ms", "E2E, ms", "TPOT, ms", "requests/s")
    rules = [(row["y"], row["text"]) for heading in headings for row in loads.slo_rule(heading, slo)]
    assert rules == [(200.0, "ttft:200ms"), (5000.0, "e2e:5s")] and loads.slo_rule("TTFT, ms", None) == []
    made = archive("h200-vllm-0.26.0-rerank")
    at_64 = next(m for m in made if m.load.concurrency == 64)
    assert [chart.title for chart in loads.latency_charts({64: [at_64]})] == ["E2E"]
    shown = section_text(in_units(loads.load_section(at_64, loads.ValidityCriteria()), at_64.workload.unit))
    assert tells(shown, 64, 512) and "prompt tokens a pair" in shown and "TTFT" not in shown and "E2E" in shown


@pytest.fixture
def at_rates() -> list[Measurement]:
    return [m for m in archive("cpu-vllm-0.32.0-server") if loads.is_windowed(m.load)]


def test_rate_series_shares_other_settings(at_rates):
    series = loads.rate_series(at_rates[::-1])
    assert sorted(len(each) for each in series) == [1, 1, len(at_rates) - 2]
    rates = [m.load.rate for m in max(series, key=len)]
    assert rates == sorted(rates) and [len(each) for each in series if each[0].load.steps] == [1]
    assert loads.rate_series([measurement()]) == []
    ramp = next(m for m in at_rates if m.load.steps)
    facts, rows = loads.facts_of_load(ramp, CRITERIA), loads.rows_of_load(ramp, CRITERIA)
    assert [(row["rate"], row["from_s"]) for row in rows] == [(step["rate"], step["from_s"]) for step in facts["steps"]]
    assert "peak" in facts and not {"peak", "highest_load", "steps"} & rows[0].keys()
    told = loads.rates_facts(at_rates[:2], ValidityCriteria())
    assert [point["rate"] for point in told["points"]] == [m.load.rate for m in at_rates[:2]] and told["peak"] is None
    lost = [replace(m, run=replace(m.run, failures=1 + len(m.run.samples))) for m in at_rates]
    (served, *_), _ = loads.rate_panels([lost[0], *at_rates[1:]], None)
    assert len({row["series"] for row in served["data"]["values"] if row["stroke"] == "served"}) == 2
    assert loads.rate_panels(lost, None) == ([], ())
    m = next(m for m in at_rates if not m.load.steps)
    lossy = replace(m, run=replace(m.run, failures=len(m.run.samples) // 10))
    sections = [loads.rates_section([lossy], ValidityCriteria(failed_share=share)) for share in (0, 0.5)]
    none, all_of_it = ([chart.title for chart in section.charts() if chart.spec] for section in sections)
    assert len(all_of_it) > len(none) > 0
    first, *others = max(loads.rate_series(at_rates), key=len)
    section = loads.rates_section([replace(first, run=replace(first.run, failures=2)), *others], CRITERIA)
    (failed,) = [text for text in sentences_of(section) if text.startswith(f"failed: {first.load.rate:g} ")]
    assert " 2 failed" in failed and [table.caption for table in tables_of(section)] == ["Rates", "Goodput"]
    assert [table.caption for table in tables_of(loads.rates_section(others, ValidityCriteria()))] == ["Rates"]
