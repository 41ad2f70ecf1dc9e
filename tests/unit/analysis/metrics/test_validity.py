from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import WELL, measurement, planted_run, planted_telemetry

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import (
    MOST_CACHED,
    cache_hit_share,
    check,
    is_clean,
    problems,
    trustworthy,
)
from pytest_slmserve.analysis.metrics.window import judged_requests
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.codec import measurement_line, measurement_of
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import Failures, Steps, Stream
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 100), st.integers(2, 64), st.integers(41, 120))
def test_an_honest_measurement_has_no_problem(concurrency, output_tokens, steps):
    # the window has to be long enough for a request to end in it
    steps = max(steps, output_tokens)
    assert problems(measurement(concurrency, 50.0, output_tokens=output_tokens, steps=steps)) == ()


def only(m) -> str:
    found = problems(m)
    assert len(found) == 1, found
    return found[0]


def noise_only(m) -> str:
    """The one thing that is found, which is noise: it leaves a measurement clean."""
    found = check(m)
    assert not found.problems and not found.degradations and is_clean((m,))
    (text,) = found.noise
    return text


def of_all_requests(**values):
    """A measurement of which each request has these values."""
    m = measurement()
    columns = {name: (value,) * len(m.run.samples) for name, value in values.items()}
    return replace(m, run=replace(m.run, samples=replace(m.run.samples, **columns)))


@pytest.mark.parametrize(
    ("m", "text"),
    [
        (measurement(preempted=2), "2 preemptions in the window"),
        (measurement(failures=3), "3 requests failed, the first with Planted"),
        (measurement(8, steps=10), "11 engine steps in the window, 20 are needed"),
        (of_all_requests(finished=False), "no request finished in the window"),
        (of_all_requests(first_token_s=None), "when its first token came"),
        (of_all_requests(admitted_s=None), "Little's law cannot be checked"),
        (
            measurement(admitted_early=0.25, steps=3200),
            "10.0 requests by their own intervals, 8.0 by the step trace (25 % apart",
        ),
        (measurement(8, 1e6), "times what NVIDIA H200 can do at most"),
        (replace(measurement(8), load=ClosedLoop(64)), "held 8.0 requests"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_fault_is_the_only_problem(m, text):
    assert text in only(m)


def test_a_share_of_failures_may_be_borne():
    m = measurement(8, steps=400, failures=2)
    share = 2 / (2 + len(judged_requests(m).rows))
    assert problems(m, failed_share=share) == () != problems(m, failed_share=0.9 * share) != problems(m)
    assert "(1.9 % of the requests, 1 % may)" in problems(m, failed_share=0.01)[0]


def test_failures_of_the_window_are_not_diluted_by_what_lies_around_it():
    m = measurement(8, steps=400, failures=2)
    inside = sum(m.run.window_s) / 2
    failed = Failures((0, 1), (inside,) * 2, (inside,) * 2, ("timeout",) * 2)
    together = replace(m, run=replace(m.run, failed=failed))
    counted = len(judged_requests(together).rows)
    assert problems(together, 2 / (2 + counted)) == () != problems(together, 2 / (3 + counted))


def test_no_window_at_all():
    m = measurement()
    steps, finished = problems(replace(m, run=replace(m.run, window_s=(1e6, 1e6 + 1))))
    assert "0 engine steps" in steps and "no request finished in the window" in finished


def test_where_all_failed_no_longer_window_is_asked_for():
    m = of_all_requests(finished=False)
    failed = replace(m, run=replace(m.run, window_s=(1e6, 1e6 + 1), failures=8, first_failure="Planted"))
    assert only(failed).startswith("8 requests failed, the first with")


def test_a_load_that_was_given_up_is_told():
    m = measurement(failures=8)
    stream = Stream(bin_s=0.1, begins_s=0.0, tokens=(), gaps={}, unsent_s=(1.0, 2.0))
    assert problems(replace(m, run=replace(m.run, stream=stream)))[0].endswith(
        "; the load was given up, 2 requests were not sent any more"
    )


def test_a_client_counts_in_spans_of_time_and_not_in_steps():
    m = measurement()
    stream = Stream(bin_s=0.01, begins_s=m.run.window_s[0], tokens=(1.0,) * 4, gaps={})
    told = only(replace(m, run=replace(m.run, steps=Steps(*[()] * 7), stream=stream)))
    assert told == "tokens came for 0.04 s of the window, 0.2 s are needed: a longer window, or more requests"


def through_a_client(m, doubt_s):
    stream = Stream(bin_s=0.1, begins_s=0.0, tokens=(), gaps={}, stamp_uncertainty_s=(doubt_s, 3 * doubt_s))
    return replace(m, spec=replace(m.spec, interface="server"), run=replace(m.run, stream=stream))


def test_a_client_that_was_held_up_tells_of_itself():
    assert not any(check(through_a_client(measurement(), 0.0))) and not any(
        check(through_a_client(measurement(), 0.004))
    )
    assert any(check(through_a_client(measurement(), 0.006))), "5 ms are harmless, or a tenth of the median TTFT"
    assert noise_only(through_a_client(measurement(), 0.3)).startswith(
        "the client was held up: its stamps can be 300.0 ms late"
    )


@pytest.mark.parametrize(("early", "caught"), [(0.02, False), (0.12, True), (-0.12, True)])
def test_littles_law(early, caught):
    found = [text for text in problems(measurement(admitted_early=early)) if "Little's law" in text]
    assert bool(found) is caught


def test_an_unknown_gpu_has_no_bound():
    fast = measurement(8, 1e6)
    assert problems(replace(fast, environment=replace(fast.environment, gpu_name="Some GPU"))) == ()


@pytest.mark.parametrize(("idle", "caught"), [(0, False), (1, False), (8, True)])
def test_load_not_reached(idle, caught):
    found = problems(measurement(16, idle_steps=idle, steps=400))
    assert any("not the 16 asked for" in text for text in found) is caught


@pytest.mark.parametrize(("others", "state"), [(0.5, State.FAILS), (13.5, State.INCONCLUSIVE)])
@pytest.mark.parametrize(
    ("m", "why"),
    [
        (measurement(16, idle_steps=8, steps=400), "not the 16 asked for"),
        (measurement(16, steps=12), "engine steps in the window, 20 are needed"),
    ],
    ids=["load", "steps"],
)
def test_what_a_client_without_a_core_causes_is_inconclusive(m, why, others, state):
    columns = {**WELL, sensors.HOST_CORES: 2 + others}
    watched = replace(m.run, telemetry=planted_telemetry(columns, until_s=m.run.window_s[1], interval_s=0.01))
    busy = replace(m, environment=replace(m.environment, cores=16), run=watched)
    verdict = trustworthy("opt-1.3b", [(busy,), (busy,)])
    assert verdict.state is state and why in verdict.why
    failed = replace(busy, run=replace(watched, failures=3))
    assert trustworthy("opt-1.3b", [(busy,), (failed,)]).state is State.FAILS


def test_an_engine_limit_is_no_fault_of_the_load():
    held = measurement(8)
    assert problems(replace(held, load=ClosedLoop(64), resolved=replace(held.resolved, max_num_seqs=8))) == ()


@pytest.mark.parametrize("load", [OpenLoop(requests=8), ClosedLoop(8, requests=100)])
def test_a_load_without_a_steady_window_need_be_neither_full_nor_steady(load):
    assert not any(check(measurement(8, load=load, idle_steps=16, slow_from=50, slow_factor=2.0)))


@pytest.mark.parametrize(("factor", "caught"), [(1.0, False), (1.05, False), (1.2, True), (0.8, True)])
def test_not_steady(factor, caught):
    made = measurement(8, steps=200, slow_from=100, slow_factor=factor)
    assert noise_only(made).startswith("not steady: ") if caught else not any(check(made))


PERIOD = 129  # a convoy of 128 tokens a request


@pytest.mark.parametrize(("steps", "periods"), [(51, "0.40"), (110, "0.85"), (190, "1.47"), (148, "1.15")])
def test_a_window_that_holds_a_part_of_a_convoy(steps, periods):
    load = ClosedLoop(8, ramp_up="burst")
    found = problems(measurement(8, output_tokens=PERIOD - 1, steps=steps, load=load))
    assert f"the window holds {periods} periods of a convoy, not a whole number, and their parts differ" in found


@pytest.mark.parametrize("steps", [PERIOD, 2 * PERIOD, 2 * PERIOD - 5, PERIOD + 5])
def test_windows_of_whole_convoys_and_of_any_part_of_a_staggered_load(steps):
    for load in (ClosedLoop(8, ramp_up="burst"), ClosedLoop(8)):
        assert not any(check(measurement(8, output_tokens=PERIOD - 1, steps=steps, load=load)))
    assert not any(check(measurement(8, output_tokens=PERIOD - 1, steps=190)))


def convoys(periods, slow_period=None):
    """Whole convoys, the steps of whose first third take ten times as long; one of the periods can be slower."""
    m = measurement(8, output_tokens=PERIOD - 1, steps=periods * PERIOD, load=ClosedLoop(8, ramp_up="burst"))
    opens = m.run.steps.time_s.index(m.run.window_s[0])
    clock, moved = 0.0, {0.0: 0.0}
    for i, at in enumerate(m.run.steps.time_s):
        period, step = divmod(i - opens - 1, PERIOD)
        clock += 0.01 * (10 if step < PERIOD // 3 else 1) * (1.5 if period == slow_period else 1)
        moved[at] = clock
    stamps = {
        name: tuple(moved[at] for at in getattr(m.run.samples, name))
        for name in ("sent_s", "admitted_s", "first_token_s", "last_token_s")
    }
    steps = replace(m.run.steps, time_s=tuple(moved[at] for at in m.run.steps.time_s))
    opened, closed = m.run.window_s
    run = replace(m.run, steps=steps, samples=replace(m.run.samples, **stamps), window_s=(moved[opened], moved[closed]))
    return replace(m, run=run)


def unsteady(m):
    return any("not steady" in text for text in check(m).noise)


@pytest.mark.parametrize("periods", [1, 2, 3, 4])
def test_a_convoy_is_compared_with_another_not_with_its_own_parts(periods):
    made = convoys(periods)
    assert not unsteady(made)
    assert unsteady(replace(made, load=ClosedLoop(8))) is (periods % 2 == 1), "where the cut is in mid-convoy"


@pytest.mark.parametrize("periods", [2, 3, 4])
def test_a_convoy_slower_than_the_others_is_not_steady(periods):
    assert unsteady(convoys(periods, slow_period=periods - 1))


def test_halves_of_few_steps_are_not_compared():
    assert not any(check(measurement(8, steps=38, output_tokens=16, slow_from=19, slow_factor=1.5)))


def test_trustworthy_counts_the_valid_and_tells_the_reasons():
    made = [(measurement(),), (measurement(repeat=1, preempted=1),)]
    assert trustworthy("opt-1.3b[8]", made)
    verdict = trustworthy("opt-1.3b[8]", made, wanted=2)
    assert not verdict and "1 of 2 measurements are valid, 2 are wanted: 1 preemptions" in verdict.why
    assert not trustworthy("opt-1.3b[8]", []), "nothing measured is not a pass"


# What the sensors say against it


def sensed(m=None, **columns):
    """With the sensors of a healthy GPU beside it; columns by the name of their number."""
    m = m or measurement()
    planted = {**WELL, **{getattr(sensors, name): value for name, value in columns.items()}}
    telemetry = planted_telemetry(planted, until_s=m.run.window_s[1] + 0.02, interval_s=0.01)
    return replace(m, run=replace(m.run, telemetry=telemetry))


def now_and_then(low, high):
    return lambda at: low if round(at / 0.01) % 5 == 0 else high


@pytest.mark.parametrize("made", [measurement(), sensed()], ids=["no sensors", "healthy"])
def test_what_nothing_is_said_against_is_clean(made):
    assert is_clean((made,)) and problems(made) == check(made).degradations == ()


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"FOREIGN_PROCESSES": 1.0}, "1 processes of others computed on the GPU"),
        ({"CLOCK_REASONS": float(0x40)}, "hardware thermal slowdown"),
        ({"XID": lambda at: 79.0 if at > 0.6 else 0.0}, "the GPU reported Xid 79"),
        ({"POWER_LIMIT": now_and_then(500.0, 700.0)}, "the power limit moved between 500 W and 700 W"),
        ({"DRAM_ACTIVE": 0.0}, "DCGM_FI_PROF_DRAM_ACTIVE is 0 in all"),
    ],
)
def test_what_makes_a_window_invalid_is_a_problem(columns, why):
    made = sensed(**columns)
    assert why in only(made)
    assert check(made).degradations == () and not is_clean((made,))
    assert not trustworthy("opt-1.3b[8]", [(made,)])


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"FOREIGN_PROCESSES": None, "GPU_PROCESSES": 3.0}, "3 processes computed on the GPU"),
        ({"SM_ACTIVE": now_and_then(0.8, None)}, "DCGM_FI_PROF_SM_ACTIVE is missing"),
    ],
)
def test_what_degrades_a_window_is_no_problem_but_it_is_not_clean(columns, why):
    made = sensed(**columns)
    [reason] = check(made).degradations
    assert why in reason and problems(made) == () and not is_clean((made,))
    assert trustworthy("opt-1.3b[8]", [(made,)]), "it stands, and the table says how"


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"SM_CLOCK": now_and_then(1.5e9, 1.98e9)}, "the SM clock fell to 1500 MHz"),
        ({"STOLEN_CORES": 0.5}, "the hypervisor took 0.50 cores where 2.00 were used"),
        ({"CPU_THROTTLED": 0.5}, "the CPU quota was used up for 50 % of the time"),
    ],
)
def test_noise_of_the_host_is_told_and_leaves_a_window_clean(columns, why):
    made = sensed(**columns)
    assert why in noise_only(made) and trustworthy("opt-1.3b[8]", [(made,)])


def test_where_both_kinds_are_found_all_of_it_is_the_problem():
    made = sensed(FOREIGN_PROCESSES=1.0, SM_ACTIVE=now_and_then(0.8, None))
    assert [text.split()[0] for text in problems(made)] == ["1", "DCGM_FI_PROF_SM_ACTIVE"] and check(
        made
    ).degradations == ()


def test_noise_is_kept_beside_what_makes_a_window_invalid():
    found = check(sensed(FOREIGN_PROCESSES=1.0, CPU_THROTTLED=0.5))
    assert [text.split()[0] for text in found.problems] == ["1"] and found.degradations == ()
    assert [text.partition(" was")[0] for text in found.noise] == ["the CPU quota"]
    broken = check(sensed(measurement(preempted=2), CPU_THROTTLED=0.5))
    assert len(broken.problems) == 1 and broken.noise == found.noise


def test_a_broken_run_is_not_clean_whatever_the_sensors_say():
    made = sensed(measurement(preempted=2))
    assert not is_clean((made,)) and only(made).startswith("2 preemptions") and check(made).degradations == ()


STREAM = Stream(0.01, 0.0, (), {"growth": 1.01, "least_s": 1e-4, "counts": {}, "sum_s": 0.0})


def told(tokens, *, of_all=True):
    """A run whose requests had so many of their 64 prompt tokens in a cache; of_all: else only those outside of the
    window."""
    run = planted_run(4, 400.0)
    inside = set(window.finished_in_window(run))
    counts = tuple(tokens if of_all or i not in inside else 0 for i in range(len(run.samples)))
    return replace(run, samples=replace(run.samples, cached_tokens=counts))


@pytest.mark.parametrize(("tokens", "share"), [(0, 0.0), (16, 0.25), (48, 0.75)])
def test_the_share_is_of_the_requests_that_ended_in_the_window(tokens, share):
    assert cache_hit_share(told(tokens)).share == share
    assert cache_hit_share(told(tokens, of_all=False)).share == 0 if tokens else True


def test_a_count_that_is_left_out_is_a_zero_where_others_count():
    """As older releases of vLLM have it."""
    run = told(16)
    inside = window.finished_in_window(run)
    counts = [None] * len(run.samples)
    counts[inside[0]] = 64
    seen = cache_hit_share(replace(run, samples=replace(run.samples, cached_tokens=tuple(counts))))
    assert seen.share == pytest.approx(1 / len(inside))


def test_counters_are_asked_only_where_no_request_tells():
    by_counters = replace(planted_run(4, 400.0), stream=replace(STREAM, cache_lookups=(1000, 100)))
    assert cache_hit_share(by_counters).share == 0.1 and "metrics" in cache_hit_share(by_counters).told_by
    both = replace(told(0), stream=by_counters.stream)
    assert cache_hit_share(both).share == 0 and "each request" in cache_hit_share(both).told_by
    nothing = replace(by_counters, stream=replace(STREAM, cache_lookups=(0, 0)))
    assert cache_hit_share(nothing) is None and cache_hit_share(planted_run(4, 400.0)) is None


def test_the_bound_itself_is_not_too_much():
    at = replace(planted_run(4, 400.0), stream=replace(STREAM, cache_lookups=(1000, round(1000 * MOST_CACHED))))
    beyond = replace(at, stream=replace(STREAM, cache_lookups=(1000, round(1000 * MOST_CACHED) + 1)))
    m = measurement(concurrency=4)
    assert problems(replace(m, run=at)) == ()
    assert "came from a prefix cache" in only(replace(m, run=beyond))
    allowed = replace(m, run=beyond, spec=replace(m.spec, allow_prefix_cache=True))
    assert problems(allowed) == ()


def test_a_record_keeps_who_told_what():
    m = measurement(concurrency=4)
    stream = replace(STREAM, cache_lookups=(1000, 7), salt=(5, 6), refused=("ignore_eos",))
    for run in (replace(told(16), stream=stream), planted_run(4, 400.0)):
        kept = replace(m, run=run)
        line = measurement_line(kept)
        again = measurement_of(line, m.spec, m.resolved, m.environment).run
        assert tuple(again.samples.cached_tokens) == run.samples.cached_tokens and cache_hit_share(
            again
        ) == cache_hit_share(run)
        assert ("cached_tokens" in line["run"]["samples"]) is bool(run.samples.cached_tokens)
        assert again.stream == run.stream
