"""Planted parts of a step come out, add up, and change places with the sides; what differs between engines is told
once, with both values; and the most specific waiver rules, to the end of its last day."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from statistics import fmean, median

import pytest
from committed import archive
from facts import tells
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import H200, RESOLVED, measurement, planted_telemetry
from traces import traced

from pytest_slmserve.analysis.gate.diagnosis import (
    BY_DEVICE,
    BY_STEP,
    FEWEST_ALONE,
    PROBE,
    Change,
    Difference,
    Split,
    Waiver,
    Windows,
    explained,
    explaining,
    fact_differences,
    splits,
    start_ups,
    waiver_for,
)
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Replica
from pytest_slmserve.schema.specs import ClosedLoop

LAGS = pytest.mark.parametrize("lag", [0, 1])
FIGURES = ("total", "steps per request", "step", *BY_STEP, *BY_DEVICE)
PER_REQUEST = 32 / 8  # steps of a request of 32 tokens among eight
DECODE_S = st.floats(0.001, 0.1)  # less would be faster than the roofline, and so invalid
PROMPT_S = st.floats(0.0, 0.1)
SIDES = st.fixed_dictionaries(
    {"decode_s": DECODE_S, "prompt_s": PROMPT_S, "lag": st.integers(0, 1), "idle": st.none() | st.floats(0.0, 1.0)}
)


def split(baseline, candidate) -> Split:
    (found,) = splits([baseline], [candidate])
    return found


def change(found: Split, name: str) -> Change:
    (seen,) = found.known([name])
    return seen


def swapped(seen: Change) -> Change:
    return replace(seen, baseline=seen.candidate, candidate=seen.baseline)


@LAGS
@given(DECODE_S, PROMPT_S)
@settings(max_examples=20)
def test_planted_parts_come_out(lag, decode_s, prompt_s):
    m = traced(decode_s, prompt_s, lag=lag)
    prefill, decode = split(m, m).known(BY_STEP)
    assert decode.baseline == pytest.approx(PER_REQUEST * decode_s, rel=1e-6)
    assert prefill.baseline == pytest.approx(prompt_s, rel=0.02, abs=1e-6 * decode_s + 1e-9)


@given(SIDES, SIDES)
def test_parts_add_up_to_the_total_and_change_places_with_the_sides(baseline, candidate):
    one, other = traced(**baseline), traced(**candidate)
    found, back = split(one, other), split(other, one)
    total, steps, step = found.known(("total", "steps per request", "step"))
    assert back.known(FIGURES) == [swapped(each) for each in found.known(FIGURES)]
    assert (steps.baseline * step.baseline, steps.candidate * step.candidate) == pytest.approx(
        (total.baseline, total.candidate)
    )
    assert found.known(BY_STEP)
    for parts in filter(None, (found.known(BY_STEP), found.known(BY_DEVICE))):
        whole = [sum(side) for side in zip(*((p.baseline, p.candidate, p.absolute) for p in parts))]
        scale = total.baseline + total.candidate
        assert whole == pytest.approx([total.baseline, total.candidate, total.absolute], abs=1e-9 * scale)


PLANTED = {"decode": {"decode_s": 0.0046}, "prefill": {"prompt_s": 0.008}}


@pytest.mark.parametrize("part", PLANTED)
@LAGS
@pytest.mark.parametrize("candidate_lag", [0, 1])
@pytest.mark.parametrize("concurrency", [2, 4, 8, 12])
def test_a_planted_slowdown_is_found_whatever_the_lag(part, lag, candidate_lag, concurrency):
    baseline = traced(lag=lag, concurrency=concurrency)
    candidate = traced(lag=candidate_lag, concurrency=concurrency, **PLANTED[part])
    assert not problems(baseline) and not problems(candidate)
    slower, share = explaining(split(baseline, candidate).known(BY_STEP))
    assert slower.name == part
    assert share == pytest.approx(1, abs=0.05)
    faster, share = explaining(split(candidate, baseline).known(BY_STEP))
    assert (faster.name, share) == (part, pytest.approx(1, abs=0.05))


def test_a_planted_gap_is_the_gap():
    baseline, candidate = traced(idle=0.1), traced(0.005, 0.0075, idle=0.28)  # a quarter longer, kernels as before
    found = split(baseline, candidate)
    gap, share = explaining(found.known(BY_DEVICE))
    assert (gap.name, share) == ("host gap", pytest.approx(1))
    assert change(found, "kernels").absolute == pytest.approx(0, abs=1e-9)


def test_the_gap_is_that_of_the_measurements_with_sensors():
    (found,) = splits([traced(idle=0.3), traced(idle=None)], [traced(idle=0.5)])
    gap, _ = found.known(BY_DEVICE)
    assert gap.baseline == pytest.approx(0.3 * change(found, "total").baseline)


@pytest.mark.parametrize("concurrency", [16, 32, 64])
def test_where_nearly_every_step_holds_a_prompt_nothing_is_split(concurrency):
    found = split(traced(concurrency=concurrency), traced(concurrency=concurrency))
    assert found.baseline.alone < FEWEST_ALONE
    assert found.known(BY_STEP) == [] and found.known(BY_DEVICE) != []


def test_a_trace_that_names_no_prompt_is_not_split():
    m = measurement()
    assert split(m, m).baseline.alone > FEWEST_ALONE
    assert split(m, m).known(BY_STEP) == []
    assert split(traced(), measurement()).known(BY_STEP) == []


def test_launches_are_counted_together():
    (found,) = splits([traced(0.004), traced(0.005)], [traced(0.004)])
    assert (found.baseline.measurements, found.candidate.measurements) == (2, 1)
    assert change(found, "decode").baseline == pytest.approx(PER_REQUEST * 0.0045)


def test_each_load_of_each_model_is_split_by_itself():
    baseline = [traced(concurrency=4), traced(concurrency=8), traced(model="opt-125m")]
    found = splits(baseline, [*reversed(baseline), traced(concurrency=2)])
    assert [(s.model, s.load) for s in found] == [
        ("opt-1.3b", ClosedLoop(4)),
        ("opt-1.3b", ClosedLoop(8)),
        ("opt-125m", ClosedLoop(8)),
    ]


def test_invalid_measurements_are_left_out():
    broken = traced(0.1, preempted=1)
    assert problems(broken)
    (found,) = splits([traced(), broken], [traced()])
    assert change(found, "total").absolute == 0
    assert splits([broken], [traced()]) == ()


def test_engines_that_shared_a_device_are_left_out():
    shared = replace(traced(), replica=Replica("group", 0, 2, "set", "mps"))
    alone = replace(traced(), replica=Replica("group", 0, 1, "set", "mps"))
    assert splits([shared], [shared]) == ()
    assert len(splits([alone], [alone])) == 1


def test_a_prompt_of_several_steps_holds_up_several_rows():
    """64 tokens of prompt with 8 requests decoding: 40 a step leave room for 32, so a prompt takes two steps."""
    chunked = traced(resolved=replace(RESOLVED, max_num_batched_tokens=40))
    whole = traced(resolved=replace(RESOLVED, max_num_batched_tokens=4096))
    assert split(whole, whole).baseline.alone == pytest.approx(160, abs=2)  # rows 1 and 2 of four
    assert split(chunked, chunked).baseline.alone == pytest.approx(80, abs=2)
    assert split(chunked, whole).candidate.alone == split(whole, chunked).baseline.alone == pytest.approx(80, abs=2)


def test_a_part_may_explain_more_than_everything_or_nothing():
    m = traced()
    assert explaining(split(m, m).known(BY_STEP)) is explaining(()) is None
    found = split(traced(0.004, 0.008), traced(0.005, 0.007))
    part, share = explaining(found.known(BY_STEP))
    assert part.name == "decode" and share > 1


def test_the_relative_change_of_nothing_is_unknown():
    assert Change("prefill", 0.0, 1.0).relative is None
    assert Change("prefill", -1e-4, 1.0).relative is None
    assert Change("prefill", 2.0, 1.0).relative == -0.5


@pytest.mark.parametrize("others", [(), (0.006,), (0.004, 0.008)])
def test_the_probe_is_the_mean_of_the_measurements(others):
    made = [watched(traced(), probe) for probe in (0.004, *others)]
    [wall, cpu] = splits(made, made)[0].known(PROBE)
    assert wall.baseline == pytest.approx(fmean((0.004, *others))) and cpu.baseline == pytest.approx(wall.baseline / 2)


def watched(m, probe_s: float):
    columns = {sensors.PROBE: probe_s, sensors.PROBE_CPU: probe_s / 2}
    seen = planted_telemetry(columns, until_s=m.run.window_s[1], interval_s=m.run.window_s[1] / 40)
    return replace(m, run=replace(m.run, telemetry=seen))


# Start-up


def test_start_up_is_of_launches_not_of_measurements():
    slow, fast = traced(ready_s=60.0, launch="a"), traced(ready_s=20.0, launch="b")
    (found,) = start_ups([slow, slow, slow, fast], [traced(ready_s=50.0)])
    assert (found.name, found.baseline, found.candidate) == ("opt-1.3b", 40.0, 50.0)
    assert found.relative == pytest.approx(0.25)


def test_start_up_that_one_side_does_not_tell_is_not_compared():
    assert start_ups([traced(ready_s=None)], [traced()]) == ()
    assert start_ups([traced()], [traced(model="opt-125m")]) == ()


# What differs


def test_nothing_differs_between_launches_of_one_engine():
    assert fact_differences([traced(ready_s=20.0)], [traced(0.1, ready_s=60.0, launch="other")]) == ()


def test_what_differs_is_told_with_both_values():
    newer = replace(H200, vllm="0.27.0", torch="2.9.0", cuda="13.0")
    limits = replace(RESOLVED, async_scheduling=True, attention_backend="FLASHINFER", chunked_prefill=None)
    older = replace(RESOLVED, async_scheduling=False, attention_backend="FLASH_ATTN", chunked_prefill=None)
    found = fact_differences([traced(resolved=older)], [traced(resolved=limits, environment=newer)])
    assert set(found) == {
        Difference("vllm", ("0.26.0",), ("0.27.0",)),
        Difference("torch", (None,), ("2.9.0",)),
        Difference("cuda", (None,), ("13.0",)),
        Difference("async_scheduling", ("False",), ("True",)),
        Difference("attention_backend", ("FLASH_ATTN",), ("FLASHINFER",)),
    }


def sized(*sizes: int):
    return traced(resolved=replace(RESOLVED, capture_sizes=sizes))


def test_capture_sizes_are_summarised():
    assert fact_differences([sized(1, 2, 4, 512)], [sized()]) == (
        Difference("capture_sizes", ("4 up to 512",), ("none",)),
    )
    assert fact_differences([sized(1, 2, 4)], [sized(1, 3, 4)]) == (
        Difference("capture_sizes", ("(1, 2, 4)",), ("(1, 3, 4)",)),
    )


def with_spec(**asked: object):
    m = traced()
    return replace(m, spec=replace(m.spec, **asked))


def test_what_was_asked_for_is_told_where_the_engine_does_not_tell():
    eager = with_spec(enforce_eager=True, extra=(("block_size", 32),), env=(("VLLM_X", "1"),), python="elsewhere")
    assert fact_differences([with_spec()], [eager]) == (
        Difference("enforce_eager", ("False",), ("True",)),
        Difference("extra.block_size", (None,), ("32",)),
        Difference("env.VLLM_X", (None,), ("1",)),
    )


def test_a_limit_that_was_resolved_is_not_told_twice():
    asked = with_spec(max_num_seqs=64)
    resolved = replace(asked, resolved=replace(asked.resolved, max_num_seqs=64))
    assert fact_differences([with_spec()], [resolved]) == (Difference("max_num_seqs", ("1024",), ("64",)),)
    assert fact_differences([with_spec()], [asked]) == (Difference("max_num_seqs", ("1024",), ("64",)),)


def test_launches_of_a_side_may_differ():
    here, there = (traced(environment=replace(H200, host=host)) for host in ("a", "b"))
    assert fact_differences([here, there], [there]) == (Difference("host", ("a", "b"), ("b",)),)
    assert fact_differences([here, there], [there, here]) == ()


def test_models_of_one_side_only_are_no_difference():
    other = replace(traced(model="opt-125m"), resolved=replace(RESOLVED, kv_blocks=7))
    assert fact_differences([traced(), other], [traced()]) == ()
    assert fact_differences([], [traced()]) == ()


# What was measured


def measured(kind: str, concurrency: int) -> Windows:
    """OPT-1.3B on an H200, vLLM 0.26.0."""
    records = archive(f"h200-vllm-0.26.0-{kind}")
    chosen = [m for m in records if m.spec.model == "opt-1.3b" and m.load.concurrency == concurrency]
    (found,) = splits(chosen, chosen)
    return found.baseline


@pytest.mark.parametrize("concurrency", [64, 128])
def test_steps_that_only_decode_are_those_of_an_engine_that_decodes_for_seconds(concurrency):
    staggered, burst = measured("staggered", concurrency), measured("burst", concurrency)
    assert staggered.with_prompt > 0.45 * staggered.alone and burst.with_prompt < burst.alone / 20
    each = [side.figures["decode"] / side.figures["steps per request"] for side in (staggered, burst)]
    assert each[0] == pytest.approx(each[1], rel=0.05)


def test_what_differs_between_launches_of_one_release_is_the_gap():
    """Kernels take as long as ever, whatever the host does."""
    records = archive("h200-vllm-0.26.0-sensors")
    pairs = [found.known(BY_DEVICE) for found in splits(records[0::2], records[1::2])]
    gaps, kernels = ([abs(parts[i].absolute) for parts in pairs] for i in (0, 1))
    assert len(pairs) > 20
    assert median(gap / max(kernel, 1e-9) for gap, kernel in zip(gaps, kernels)) > 3


# Waivers


UNTIL = date(2027, 1, 31)
WAIVER = Waiver("requests_per_s", "opt-1.3b", "H200", "Ada", "slower attention kernel, fixed upstream", UNTIL)


@pytest.mark.parametrize("model", ["opt-1.3b", "facebook/opt-1.3b", "/models/OPT-1.3B/"])
@pytest.mark.parametrize("device", ["H200", "NVIDIA H200"])
def test_a_waiver_is_found_by_what_the_gate_knows(model, device):
    assert waiver_for([WAIVER], model, "requests_per_s", device) == WAIVER


@pytest.mark.parametrize(
    ("model", "endpoint", "device"),
    [
        ("opt-125m", "requests_per_s", "H200"),
        ("opt-1.3b", "ttft_p99_s", "H200"),
        ("opt-1.3b", "requests_per_s", "NVIDIA H100 80GB HBM3"),
        ("opt-1.3b", "requests_per_s", "cpu"),
    ],
)
def test_a_waiver_is_of_nothing_else(model, endpoint, device):
    assert waiver_for([WAIVER], model, endpoint, device) is None


def test_an_unknown_gpu_has_waivers_by_its_own_name():
    named, anywhere = replace(WAIVER, device="NVIDIA B300"), replace(WAIVER, device="*")
    assert waiver_for([named], "opt-1.3b", "requests_per_s", "NVIDIA B300") == named
    assert waiver_for([named], "opt-1.3b", "requests_per_s", "NVIDIA B200") is None
    assert waiver_for([anywhere], "opt-1.3b", "requests_per_s", "cpu") == anywhere


@given(st.permutations(range(5)))
def test_the_most_specific_waiver_counts_whatever_the_order(order):
    ranked = [
        WAIVER,
        replace(WAIVER, until=UNTIL - timedelta(days=1)),
        replace(WAIVER, device="*", until=UNTIL + timedelta(days=1)),
        replace(WAIVER, model="*", until=UNTIL + timedelta(days=2)),
        replace(WAIVER, model="*", device="*", until=UNTIL + timedelta(days=3)),
    ]
    left = list(ranked)
    while left:
        assert waiver_for([ranked[i] for i in order if ranked[i] in left], "opt-1.3b", "requests_per_s", "H200") == (
            left.pop(0)
        )


@given(st.integers(-400, 400))
def test_a_waiver_tells_who_and_why_and_holds_to_the_end_of_its_last_day(days):
    told = explained(WAIVER, UNTIL + timedelta(days=days))
    assert tells(told, "requests_per_s", "opt-1.3b", "H200", "Ada", UNTIL, WAIVER.reason)
    assert ("expired" in told) is (days > 0)
