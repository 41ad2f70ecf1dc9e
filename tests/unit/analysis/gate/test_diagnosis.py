"""Planted parts of a step come out, add up, and change places with the sides; what differs between engines is told
once, with both values; and the most specific waiver rules, to the end of its last day."""

from dataclasses import replace
from datetime import date, timedelta
from statistics import median

import pytest
from committed import archive
from facts import tells
from hypothesis import given, settings, strategies as st
from stored_records import having
from strategies import RESOLVED, measurement, planted_telemetry
from traces import traced

from pytest_slmserve.analysis.gate import diagnosis
from pytest_slmserve.analysis.gate.diagnosis import BY_DEVICE, BY_STEP, Change, Difference, explaining, splits
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.schema import sensors, specs
from pytest_slmserve.schema.records import Replica

FIGURES = ("total", "steps per request", "step", *BY_STEP, *BY_DEVICE)
PER_REQUEST = 32 / 8  # steps of a request of 32 tokens among eight
DECODE_S = st.floats(0.001, 0.1)  # less would be faster than the roofline, and so invalid
PROMPT_S = st.floats(0.0, 0.1)
IDLE = st.none() | st.floats(0.0, 1.0)
SIDES = st.fixed_dictionaries({"decode_s": DECODE_S, "prompt_s": PROMPT_S, "lag": st.integers(0, 1), "idle": IDLE})
UNTIL = date(2027, 1, 31)
RATE = "requests_per_s"
WAIVER = diagnosis.Waiver(RATE, "opt-1.3b", "H200", "Ada", "slower attention kernel, fixed upstream", UNTIL)
OLD = {"async_scheduling": False, "attention_backend": "FLASH_ATTN", "chunked_prefill": None}
NEW = {"async_scheduling": True, "attention_backend": "FLASHINFER", "chunked_prefill": None}
EAGER = {"enforce_eager": True, "extra": (("block_size", 32),), "env": (("VLLM_X", "1"),), "python": "elsewhere"}
ROOM = Difference("max_num_seqs", ("1024",), ("64",))


def split(baseline, candidate) -> diagnosis.Split:
    (found,) = splits([baseline], [candidate])
    return found


def change(found: diagnosis.Split, name: str) -> Change:
    (seen,) = found.known([name])
    return seen


@pytest.mark.parametrize("lag", [0, 1])
@given(DECODE_S, PROMPT_S)
@settings(max_examples=20)
def test_planted_step_parts_are_recovered(lag, decode_s, prompt_s):
    m = traced(decode_s, prompt_s, lag=lag)
    prefill, decode = split(m, m).known(BY_STEP)
    assert decode.baseline == pytest.approx(PER_REQUEST * decode_s, rel=1e-6)
    assert prefill.baseline == pytest.approx(prompt_s, rel=0.02, abs=1e-6 * decode_s + 1e-9)


@given(SIDES, SIDES)
def test_step_parts_sum_to_total(baseline, candidate):
    one, other = traced(**baseline), traced(**candidate)
    found, back = split(one, other), split(other, one)
    total, steps, step = found.known(("total", "steps per request", "step"))
    swapped = [replace(each, baseline=each.candidate, candidate=each.baseline) for each in found.known(FIGURES)]
    assert back.known(FIGURES) == swapped
    whole = [steps.baseline * step.baseline, steps.candidate * step.candidate]
    assert whole == pytest.approx([total.baseline, total.candidate])
    assert found.known(BY_STEP)
    for parts in filter(None, (found.known(BY_STEP), found.known(BY_DEVICE))):
        whole = [sum(side) for side in zip(*((p.baseline, p.candidate, p.absolute) for p in parts))]
        scale = total.baseline + total.candidate
        assert whole == pytest.approx([total.baseline, total.candidate, total.absolute], abs=1e-9 * scale)


@pytest.mark.parametrize("planted", [("decode", {"decode_s": 0.0046}), ("prefill", {"prompt_s": 0.008})])
@pytest.mark.parametrize("lags", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("concurrency", [2, 4, 8, 12])
def test_planted_slowdown_names_its_part(planted, lags, concurrency):
    part, slower = planted
    baseline, candidate = (traced(lag=lag, concurrency=concurrency, **s) for lag, s in zip(lags, ({}, slower)))
    assert not problems(baseline) and not problems(candidate)
    for sides in ((baseline, candidate), (candidate, baseline)):
        found, share = explaining(split(*sides).known(BY_STEP))
        assert (found.name, share) == (part, pytest.approx(1, abs=0.05))


def test_planted_host_gap_is_found():
    found = split(traced(idle=0.1), traced(0.005, 0.0075, idle=0.28))  # a quarter longer, kernels as before
    gap, share = explaining(found.known(BY_DEVICE))
    assert (gap.name, share) == ("host gap", pytest.approx(1))
    assert change(found, "kernels").absolute == pytest.approx(0, abs=1e-9)
    (found,) = splits([traced(idle=0.3), traced(idle=None)], [traced(idle=0.5)])
    assert change(found, "host gap").baseline == pytest.approx(0.3 * change(found, "total").baseline)
    m = traced()
    assert explaining(split(m, m).known(BY_STEP)) is explaining(()) is None
    part, share = explaining(split(traced(0.004, 0.008), traced(0.005, 0.007)).known(BY_STEP))
    assert part.name == "decode" and share > 1
    assert [Change("prefill", was, 1.0).relative for was in (0.0, -1e-4, 2.0)] == [None, None, -0.5]
    m, made = traced(), []
    for probe_s in (0.004, 0.004, 0.008):
        columns, until_s = {sensors.PROBE: probe_s, sensors.PROBE_CPU: probe_s / 2}, m.run.window_s[1]
        seen = planted_telemetry(columns, until_s=until_s, interval_s=until_s / 40)
        made.append(replace(m, run=replace(m.run, telemetry=seen)))
    [wall, cpu] = splits(made, made)[0].known(diagnosis.PROBE)
    assert (wall.baseline, cpu.baseline) == pytest.approx((0.016 / 3, 0.008 / 3))
    slow, fast = traced(ready_s=60.0, launch="a"), traced(ready_s=20.0, launch="b")
    (found,) = diagnosis.start_ups([slow, slow, slow, fast], [traced(ready_s=50.0)])
    assert (found, found.relative) == (Change("opt-1.3b", 40.0, 50.0), pytest.approx(0.25))
    others = ([traced(ready_s=None)], [traced()]), ([traced()], [traced(model="opt-125m")])
    assert [diagnosis.start_ups(*sides) for sides in others] == [(), ()]


def test_long_prompt_fills_several_rows():
    for concurrency in (16, 32, 64):
        found = split(traced(concurrency=concurrency), traced(concurrency=concurrency))
        assert found.baseline.alone < diagnosis.FEWEST_ALONE
        assert found.known(BY_STEP) == [] and found.known(BY_DEVICE) != []
    m = measurement()
    assert split(m, m).baseline.alone > diagnosis.FEWEST_ALONE
    assert split(m, m).known(BY_STEP) == split(traced(), m).known(BY_STEP) == []
    # 64 tokens of prompt with 8 requests decoding: 40 a step leave room for 32, so a prompt takes two steps.
    whole, chunked = (traced(resolved=replace(RESOLVED, max_num_batched_tokens=n)) for n in (4096, 40))
    pairs = (whole, whole), (chunked, chunked), (whole, chunked), (chunked, whole)
    alone = [split(*sides).baseline.alone for sides in pairs]
    assert alone == [pytest.approx(160, abs=2), *[pytest.approx(80, abs=2)] * 3], "rows 1 and 2 of four, or one"
    (found,) = splits([traced(0.004), traced(0.005)], [traced(0.004)])
    assert (found.baseline.measurements, found.candidate.measurements) == (2, 1)
    assert change(found, "decode").baseline == pytest.approx(PER_REQUEST * 0.0045)
    baseline = [traced(concurrency=4), traced(concurrency=8), traced(model="opt-125m")]
    found = splits(baseline, [*reversed(baseline), traced(concurrency=2)])
    wanted = [("opt-1.3b", 4), ("opt-1.3b", 8), ("opt-125m", 8)]
    assert [(s.model, s.load) for s in found] == [(model, specs.ClosedLoop(n)) for model, n in wanted]
    broken = traced(0.1, preempted=1)
    (found,) = splits([traced(), broken], [traced()])
    assert problems(broken) and change(found, "total").absolute == 0 and splits([broken], [traced()]) == ()
    both = [having([traced()], replica=Replica("group", 0, count, "set", "mps")) for count in (1, 2)]
    assert [len(splits(each, each)) for each in both] == [1, 0]


def one(part, **facts):
    return having([traced()], **{part: facts})


ON_A, ON_B = one("environment", host="a"), one("environment", host="b")


@pytest.mark.parametrize(("baseline", "candidate", "wanted"), [
    ([traced(ready_s=20.0)], [traced(0.1, ready_s=60.0, launch="other")], ()),  # launches of one engine
    ([traced()], one("environment", vllm="0.27.0", cuda="13.0"),
     (Difference("cuda", (None,), ("13.0",)), Difference("vllm", ("0.26.0",), ("0.27.0",)))),
    (one("resolved", **OLD), one("resolved", **NEW),
     (Difference("attention_backend", ("FLASH_ATTN",), ("FLASHINFER",)),
      Difference("async_scheduling", ("False",), ("True",)))),
    (one("resolved", capture_sizes=(1, 2, 4, 512)), one("resolved", capture_sizes=()),
     (Difference("capture_sizes", ("4 up to 512",), ("none",)),)),
    (one("resolved", capture_sizes=(1, 2, 4)), one("resolved", capture_sizes=(1, 3, 4)),
     (Difference("capture_sizes", ("(1, 2, 4)",), ("(1, 3, 4)",)),)),
    ([traced()], one("spec", **EAGER),  # where the engine does not tell
     (Difference("enforce_eager", ("False",), ("True",)), Difference("extra.block_size", (None,), ("32",)),
      Difference("env.VLLM_X", (None,), ("1",)))),
    ([traced()], one("spec", max_num_seqs=64), (ROOM,)),
    ([traced()], having(one("spec", max_num_seqs=64), resolved={"max_num_seqs": 64}), (ROOM,)),  # not twice
    ([*ON_A, *ON_B], ON_B, (Difference("host", ("a", "b"), ("b",)),)),  # launches of a side may differ
    ([*ON_A, *ON_B], [*ON_B, *ON_A], ()),
    ([traced(), *having([traced(model="opt-125m")], resolved={"kv_blocks": 7})], [traced()], ()),  # of one side only
    ([], [traced()], ()),
])  # fmt: skip
def test_engine_differences_appear_once(baseline, candidate, wanted):
    assert diagnosis.fact_differences(baseline, candidate) == wanted


def test_decode_step_ignores_arrival_pattern():
    """OPT-1.3B on an H200, vLLM 0.26.0."""
    for concurrency in (64, 128):
        sides = []
        for kind in ("staggered", "burst"):
            records = archive(f"h200-vllm-0.26.0-{kind}")
            chosen = [m for m in records if m.spec.model == "opt-1.3b" and m.load.concurrency == concurrency]
            sides.append(splits(chosen, chosen)[0].baseline)
        staggered, burst = sides
        assert staggered.with_prompt > 0.45 * staggered.alone and burst.with_prompt < burst.alone / 20
        each = [side.figures["decode"] / side.figures["steps per request"] for side in sides]
        assert each[0] == pytest.approx(each[1], rel=0.05)
    # Kernels take as long as ever, whatever the host does.
    records = archive("h200-vllm-0.26.0-sensors")
    pairs = [found.known(BY_DEVICE) for found in splits(records[0::2], records[1::2])]
    gaps, kernels = ([abs(parts[i].absolute) for parts in pairs] for i in (0, 1))
    assert len(pairs) > 20
    assert median(gap / max(kernel, 1e-9) for gap, kernel in zip(gaps, kernels)) > 3


@pytest.mark.parametrize(("waived", "model", "endpoint", "device", "found"), [
    *(("H200", model, RATE, device, True)
      for model in ("opt-1.3b", "facebook/opt-1.3b", "/models/OPT-1.3B/") for device in ("H200", "NVIDIA H200")),
    ("H200", "opt-125m", RATE, "H200", False),
    ("H200", "opt-1.3b", "ttft_p99_s", "H200", False),
    ("H200", "opt-1.3b", RATE, "NVIDIA H100 80GB HBM3", False),
    ("H200", "opt-1.3b", RATE, "cpu", False),
    ("NVIDIA B300", "opt-1.3b", RATE, "NVIDIA B300", True),  # an unknown GPU, by its own name
    ("NVIDIA B300", "opt-1.3b", RATE, "NVIDIA B200", False),
    ("*", "opt-1.3b", RATE, "cpu", True),
])  # fmt: skip
def test_waiver_matches_its_gate_only(waived, model, endpoint, device, found):
    waiver = replace(WAIVER, device=waived)
    assert diagnosis.waiver_for([waiver], model, endpoint, device) == (waiver if found else None)


@given(st.permutations(range(5)), st.integers(-400, 400))
def test_most_specific_waiver_wins(order, days):
    ways = {}, {}, {"device": "*"}, {"model": "*"}, {"model": "*", "device": "*"}
    ranked = [replace(WAIVER, **way, until=UNTIL + timedelta(days=d)) for way, d in zip(ways, (0, -1, 1, 2, 3))]
    for best in range(5):
        left = [ranked[i] for i in order if i >= best]
        assert diagnosis.waiver_for(left, "opt-1.3b", RATE, "H200") == ranked[best]
    told = diagnosis.explained(WAIVER, UNTIL + timedelta(days=days))
    assert tells(told, RATE, "opt-1.3b", "H200", "Ada", UNTIL, WAIVER.reason)
    assert ("expired" in told) is (days > 0)
