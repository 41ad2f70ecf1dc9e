"""Latencies and goodput: each percentile, mean and share against an oracle over drawn runs; nobody is left out for
being slow; gaps between tokens are known to one per cent; words of an SLO go there and back."""

import json
import math
from dataclasses import fields, replace
from statistics import fmean, quantiles

import pytest
from hypothesis import given, strategies as st
from refusals import refused
from strategies import NO_SAMPLES, NO_STEPS, drawn_runs, measurement

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.window import PARTS, GapHistogram, Slo, goodput_of, latencies, parse_slo
from pytest_slmserve.analysis.points import Summary
from pytest_slmserve.schema.records import Failures, Run, Samples, Stream
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

NEVER = 1e15  # stands for "never came", slower than all others
OPEN = OpenLoop(arrivals="gamma 1", rate=10.0, settle_s=1.0, window_s=2.0)
LOADS = st.sampled_from([OPEN, ClosedLoop(4)])  # whose requests are judged if they were sent in the window, or ended
RUNS = drawn_runs(steps=3)
SLO = Slo(ttft_s=0.2, tpot_s=0.06, e2e_s=5)
GOOD, SLOW = (1.0, 1.1, 1.6, 11, True), (1.0, 1.3, 1.8, 11, True)  # TTFT 0.1 and 0.3, TPOT 0.05
GAPS = st.lists(st.floats(1e-4, 100), min_size=1, max_size=100)
BOUNDS = st.one_of(st.none(), st.integers(1, 10**9).map(lambda microseconds: microseconds / 10**6))


def requests_of(run, judged_by):
    """TTFT, TPOT, E2E and normalised latency of each request that counts, by the definitions."""
    s, (opens, closes) = run.samples, run.window_s
    found = []
    for i, sent in enumerate(s.sent_s):
        first, last, tokens, done = s.first_token_s[i], s.last_token_s[i], s.output_tokens[i], s.finished[i]
        if opens <= sent < closes if judged_by == "sent" else done and opens <= last <= closes:
            ttft = NEVER if first is None else first - sent
            e2e = last - sent if done else NEVER
            single = done and tokens <= 1
            tpot = None if single else (e2e - ttft) / (tokens - 1) if done else NEVER
            found.append((ttft, tpot, e2e, e2e / max(tokens, 1) if done else NEVER))
    return found


def lost_of(run, judged_by):
    """The same of those that failed, which never came."""
    opens, closes = run.window_s
    return [(NEVER,) * 4 for at in getattr(run.failed, f"{judged_by}_s") if opens <= at < closes]


def share_of(values, per_cent):
    """A percentile by the standard library; None where one that never came has a part in it."""
    if not values:
        return None
    found = quantiles(values if len(values) > 1 else values * 2, n=100, method="inclusive")[per_cent - 1]
    return found if found < NEVER / 1e6 else None


@given(st.lists(RUNS, max_size=2), LOADS)
def test_latencies_match_hand_calculation(runs, load):
    by = load.judged_by
    seen, expected = latencies(runs, by), [each for run in runs for each in requests_of(run, by)]
    if by == "sent":
        expected += [each for run in runs for each in lost_of(run, by)]
    assert (seen.requests, seen.unfinished) == (len(expected), sum(e2e == NEVER for *_, e2e, _ in expected))
    figures = {f"itl{part}_s": None for part in ("", *(f"_{part}" for part in PARTS))}
    for place, name in enumerate(("ttft", "tpot", "e2e", "normalized_latency")):
        values, found = [each[place] for each in expected if each[place] is not None], getattr(seen, f"{name}_s")
        known = [value for value in values if value != NEVER]
        mean = fmean(known) if known and len(known) == len(values) else None
        by_part = {part: share_of(values, int(part[1:])) for part in PARTS}
        assert found.known == len(known)
        assert [getattr(found, part) for part in by_part] == pytest.approx([*by_part.values()], abs=1e-9)
        figures[f"{name}_s"] = mean
        if name != "normalized_latency":
            figures |= {f"{name}_{part}_s": value for part, value in by_part.items()}
    assert seen.figures == pytest.approx(figures, abs=1e-9)
    assert figures.keys() < {field.name for field in fields(Summary)}


@given(RUNS, LOADS)
def test_judged_requests_lie_in_window(run, load):
    m, s = replace(measurement(load=load), run=run), run.samples
    seen = window.judged_requests(m)
    prompts, outputs = (sum(column[i] for i in seen.rows) for column in (s.prompt_tokens, s.output_tokens))
    assert (seen.prompt_tokens, seen.output_tokens) == (prompts, outputs)
    counts = len(requests_of(run, load.judged_by)), len(lost_of(run, load.judged_by))
    assert (len(seen.rows), seen.failures) == counts
    assert window.latencies_of(m) == latencies([run], load.judged_by)
    older = replace(m, run=replace(run, failed=None))
    assert window.judged_requests(older).failures == run.failures, "it is not known when"
    assert window.finished_output_tokens(run) == [n for n, done in zip(s.output_tokens, s.finished) if done]


def test_failures_count_against_goodput():
    """Also those after the last answer, with which its window ends."""
    failed = Failures((0,) * 3, (0.5, 1.0, 2.9), (0.8, 1.3, 3.2), ("timeout",) * 3)
    run = replace(measurement().run, window_s=(1.0, 2.0), failures=3, failed=failed)
    for load in (OpenLoop(requests=9), ClosedLoop(4, requests=9)):
        assert window.judged_requests(replace(measurement(load=load), run=run)).failures == 3
    shares = dict.fromkeys(("ttft", "tpot", "e2e"), 0.5)
    assert goodput_of(SLO, (served(GOOD, GOOD, failed=2),)) == window.Goodput(SLO, 4, 2, 2, 1.0, 0.5, shares)
    one, other = served(GOOD, SLOW), served(GOOD, GOOD, GOOD, SLOW)
    both = goodput_of(SLO, (one,), (other,))
    shares = {"ttft": 4 / 6, "tpot": 1, "e2e": 1}
    assert both == window.Goodput(SLO, 6, 4, 0, (1 / 2.0 + 3 / 2.0) / 2, 4 / 6, shares)
    assert goodput_of(SLO, (one, other)) == replace(both, per_s=2 * both.per_s), "engines beside each other"


def histogram(gaps, growth=1.01):
    counts = {}
    for gap in gaps:
        index = math.floor(math.log(gap / 1e-4) / math.log(growth)) if gap > 0 else -1
        counts[index] = counts.get(index, 0) + 1
    return GapHistogram(growth, 1e-4, counts, sum(gaps))


def facts_of(seen):
    return {"growth": seen.growth, "least_s": 1e-4, "counts": seen.counts, "sum_s": seen.sum_s}


@given(GAPS, st.floats(0, 1), st.lists(GAPS, min_size=1, max_size=3))
def test_gap_percentiles_are_nearly_exact(gaps, share, parts):
    exact = sorted(gaps)[max(1, math.ceil(share * len(gaps))) - 1]
    seen = histogram(gaps)
    assert seen.percentile(share) == pytest.approx(exact, rel=0.0051)
    assert (seen.gaps, seen.mean_s) == (len(gaps), pytest.approx(fmean(gaps)))
    facts = facts_of(seen)
    assert window.gap_histogram(json.loads(json.dumps(facts))) == window.gap_histogram(facts) == seen
    nothing, merged = histogram([]), histogram([0.0, 0.0, 5e-5, 0.5])
    assert (nothing.percentile(0.99), nothing.mean_s) == (None, None)
    assert merged.percentile(0.5) == 1e-4, "tokens that came in one chunk"
    assert merged.percentile(1.0) == pytest.approx(0.5, rel=0.0051)

    def run(gaps, growth=1.01):
        return Run(NO_SAMPLES, NO_STEPS, (0.0, 1.0), stream=Stream(0.1, 0.0, (), facts_of(histogram(gaps, growth))))

    runs, whole = [run(gaps) for gaps in parts], histogram([gap for gaps in parts for gap in gaps])
    found, itl = window.gaps_of(runs), latencies(runs).itl_s
    assert (found.counts, found.sum_s) == (whole.counts, pytest.approx(whole.sum_s))
    assert (itl.known, itl.mean) == (whole.gaps, pytest.approx(whole.mean_s))
    assert [itl.p50, itl.p90, itl.p95, itl.p99] == [whole.percentile(share) for share in (0.5, 0.9, 0.95, 0.99)]
    silent = replace(runs[0], stream=None), replace(runs[0], stream=replace(runs[0].stream, gaps={}))
    for other in (*silent, run([1.0], growth=1.02)):
        assert window.gaps_of([*runs, other]) is None, "one has none, or counted in other bins"


@given(BOUNDS, BOUNDS, BOUNDS)
def test_slo_text_round_trips(ttft, tpot, e2e):
    told = {"ttft": ttft, "tpot": tpot, "e2e": e2e}
    if {*told.values()} != {None}:
        slo = Slo(ttft, tpot, None, e2e)
        assert parse_slo(str(slo)) == slo
        assert slo.bounds == {name: bound for name, bound in told.items() if bound is not None}
    slo = Slo(ttft_s=0.2, tpot_s=0.0125, e2e_s=5)
    assert parse_slo(str(slo)) == slo and str(slo) == "ttft:200ms,tpot:12.5ms,e2e:5s"
    assert parse_slo(" e2e : 1.5 s , ttft:.5s") == Slo(ttft_s=0.5, e2e_s=1.5)
    assert parse_slo("TPOT:1500ms") == Slo(tpot_s=1.5)


@pytest.mark.parametrize(("text", "fact", "hint"), [
    ("", "''", "ttft:200ms,tpot:50ms,e2e:5s"), ("ttft:200ms,", "''", "ttft:200ms"),
    ("ttft:200ms tpot:50ms", "'ttft:200ms tpot:50ms'", "ttft:200ms,tpot:50ms"),
    *((text, repr(text), "ttft:200ms") for text in ("ttft", "ttft:200us", "ttft:-5ms", "ttft:nanms")),
    ("ttft:200", "'ttft:200'", "Write ttft:200ms or ttft:200s."), ("ttft:0ms", "0.0 s", "ttft:200ms"),
    ("e2el:5s", "'e2el'", "ttft, tpot, itl, e2e"), ("ttft:1s,ttft:2s", "ttft", "ttft:200ms"),
    ("itl:5ms", "", "tpot:50ms"),
    *((bounds, "", "") for bounds in ({}, {"ttft_s": 0}, {"ttft_s": math.inf}, {"e2e_s": math.nan}, {"itl_s": 1})),
])  # fmt: skip
def test_malformed_slo_is_refused(text, fact, hint):
    with refused(fact, hint=hint):
        parse_slo(text) if isinstance(text, str) else Slo(**text)


@given(RUNS, LOADS, *[st.sampled_from([0.0, 0.05, 0.25, 1.0])] * 3)
def test_goodput_matches_hand_calculation(run, load, ttft, tpot, e2e):
    """All times are whole ticks, so a bound is also just met."""
    bounds = {name: bound for name, bound in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)) if bound}
    if bounds:
        slo, tighter = (Slo(**{f"{name}_s": by * bound for name, bound in bounds.items()}) for by in (1, 0.5))
        seen, less = (goodput_of(each, (replace(measurement(load=load), run=run),)) for each in (slo, tighter))
        each = requests_of(run, load.judged_by) + lost_of(run, load.judged_by)
        values = [{"ttft": one[0], "tpot": one[1] or 0.0, "e2e": one[2]} for one in each]
        met = {name: [one[name] <= bound and one["e2e"] < NEVER for one in values] for name, bound in bounds.items()}
        good, n, lost = sum(map(all, zip(*met.values()))), len(each), sum(one["e2e"] == NEVER for one in values)
        seconds = run.window_s[1] - run.window_s[0]
        shares = {name: sum(kept) / n if n else None for name, kept in met.items()}
        rate, share = good / seconds if seconds else 0, good / n if n else None
        assert seen == window.Goodput(slo, n, good, lost, rate, share, shares) and less.good <= good


def served(*rows, failed=0):
    """An open loop with these requests in its window, and failed ones whose times are not known. rows: sent, first
    token, last token, output tokens, finished."""
    sent, first, last, tokens, finished = zip(*rows)
    samples = Samples(tuple(range(len(rows))), sent, sent, first, last, (1,) * len(rows), tokens, finished)
    return replace(measurement(load=OPEN), run=Run(samples, NO_STEPS, (1.0, 3.0), failures=failed))
