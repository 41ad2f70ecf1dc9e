"""Results in the words of vLLM's own benchmark, where these mean something else than they seem to."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from strategies import measurement

from pytest_slmserve.analysis.points import summarize
from pytest_slmserve.archive.external import as_vllm_bench
from pytest_slmserve.schema.records import Failures, Run, Samples, Steps, Stream
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop


def overloaded(served_per_s: float = 5.0):
    """Ten requests a second come for 20 s, of 8 and 4 tokens; half as many are served, one after the other."""
    sent = tuple(i / 10 for i in range(200))
    first = tuple((i + 1) / served_per_s for i in range(200))
    columns = (8,) * 200, (4,) * 200, (True,) * 200
    samples = Samples(tuple(range(200)), sent, (None,) * 200, first, tuple(at + 0.01 for at in first), *columns)
    tokens = tuple(4 * served_per_s * 0.01 for _ in range(4000))
    run = Run(samples, Steps(*[()] * 7), (5.0, 15.0), stream=Stream(0.01, 0.0, tokens, GAPS, scheduled_s=sent))
    return replace(
        measurement(output_tokens=4), load=OpenLoop(arrivals="even", rate=10.0, settle_s=5.0, window_s=10.0), run=run
    )


GAPS = {"growth": 1.01, "least_s": 1e-4, "counts": {"463": 9}, "sum_s": 0.0909}


def test_throughput_under_overload_is_what_was_served_and_not_what_was_sent():
    told = as_vllm_bench(overloaded())
    assert (told["duration"], told["num_prompts"], told["completed"]) == (10, 100, 100)
    assert told["request_throughput"] == pytest.approx(5, abs=0.1)
    assert told["output_throughput"] == pytest.approx(20)
    assert told["total_token_throughput"] == pytest.approx(5 * (4 + 8), abs=1)


def test_the_mean_gap_is_that_of_their_sum():
    told = as_vllm_bench(overloaded())
    assert told["mean_itl_ms"] == pytest.approx(10.1) and told["std_itl_ms"] < 0.1


def test_answers_in_one_piece_have_a_time_per_token_of_0_in_json_that_any_parser_reads():
    seen = overloaded()
    samples = replace(seen.run.samples, last_token_s=seen.run.samples.first_token_s)
    stream = replace(seen.run.stream, gaps={**GAPS, "counts": {"-1": 9}, "sum_s": 0.0})
    told = as_vllm_bench(replace(seen, run=replace(seen.run, samples=samples, stream=stream)))
    json.dumps(told, allow_nan=False)
    assert told["median_tpot_ms"] == told["p50_tpot_ms"] == told["p99_tpot_ms"] == told["mean_itl_ms"] == 0


def test_prompts_that_failed_are_among_those_sent():
    seen = overloaded()
    lost = Failures(request=(0,), sent_s=(6.0,), scheduled_s=(6.0,), ended_s=(7.0,), kind=("timeout",))
    told = as_vllm_bench(replace(seen, run=replace(seen.run, failures=1, failed=lost)))
    assert (told["num_prompts"], told["completed"], told["failed"]) == (101, 100, 1)


def test_a_closed_loop_of_so_many_requests_is_over_all_of_its_time():
    """Two users send four requests each, which wait 1 s for their first of four tokens, and 0.1 s for each other."""
    sent = tuple(1.3 * (i // 2) for i in range(8))
    first, last = tuple(at + 1 for at in sent), tuple(at + 1.3 for at in sent)
    samples = Samples(tuple(range(8)), sent, (None,) * 8, first, last, (8,) * 8, (4,) * 8, (True,) * 8)
    tokens = [0.0] * 520
    for begin in sent:
        for token in range(4):
            tokens[round(100 * begin) + 99 + 10 * token] += 1
    run = Run(samples, Steps(*[()] * 7), (0.0, 5.2), stream=Stream(0.01, 0.99, tuple(tokens[99:]), GAPS))
    loop = replace(measurement(output_tokens=4), load=ClosedLoop(2, requests=8), run=run)
    seen = summarize(loop)
    assert (seen.requests_per_s, seen.output_tokens_per_s) == pytest.approx((8 / 5.2, 32 / 5.2))
    assert as_vllm_bench(loop)["output_throughput"] == pytest.approx(32 / 5.2)
