"""What is found on a measurement or on engines at once: an honest one has no problem, each fault is the only one told,
as what it is and with its numbers, and each limit has a harmless side. For the sensors see `test_sensor_health.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts import numbers
from hypothesis import given
from hypothesis import strategies as st
from measured import measure
from strategies import measurement, planted_run, sensed

from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import (
    MOST_CACHED,
    CheckResult,
    cache_hit_share,
    check,
    is_clean,
    problems,
    trustworthy,
)
from pytest_slmserve.analysis.metrics.window import judged_requests
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.codec import measurement_line, measurement_of
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.records import Environment, Failures, Replica, Samples, Steps, Stream
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop, Request, Workload, WorkloadSpec

CLEAN = CheckResult(unknown=())


def only(m):
    """The one problem that is found."""
    [found] = problems(m)
    return found


def noise_of(m):
    """What is found, which is noise: it leaves a measurement clean."""
    found = check(m)
    assert not found.problems and not found.degradations and is_clean((m,))
    return found.noise


def with_samples(m, **values):
    """The measurement, of which each request has these values."""
    columns = {name: (value,) * len(m.run.samples) for name, value in values.items()}
    return replace(m, run=replace(m.run, samples=replace(m.run.samples, **columns)))


def with_stream(m, **facts):
    return replace(
        m, run=replace(m.run, stream=Stream(**{"bin_s": 0.1, "begins_s": 0.0, "tokens": (), "gaps": {}, **facts}))
    )


@given(st.integers(1, 100), st.integers(2, 64), st.integers(41, 120))
def test_an_honest_measurement_has_no_problem(concurrency, output_tokens, steps):
    # the window has to be long enough for a request to end in it
    steps = max(steps, output_tokens)
    assert problems(measurement(concurrency, 50.0, output_tokens=output_tokens, steps=steps)) == ()


def test_a_simulated_run_is_valid_and_obeys_littles_law():
    engine = SimulatedEngine(EngineSpec("opt-tiny", "simulated", extra=(("t_inf", 5000.0), ("b_half", 10.0))))
    asked = Workload(WorkloadSpec(prompt_tokens=64, output_tokens=32, requests=16), (Request((5,) * 64, 32),) * 16, "")
    made = measure(engine, asked, ClosedLoop(16, window_s=2.0), Environment(platform="simulated"))
    assert problems(made) == () and window.littles_law(made.run) == pytest.approx(0, abs=1e-6)


# Each fault, and the numbers that tell of it
@pytest.mark.parametrize(
    ("m", "facts"),
    [
        (measurement(preempted=2), {2}),
        (measurement(failures=3), {3}),
        (measurement(8, steps=10), {11, 20}),  # steps
        (with_samples(measurement(), finished=False), set()),
        (with_samples(measurement(), first_token_s=None), set()),
        (with_samples(measurement(), admitted_s=None), set()),
        (measurement(admitted_early=0.25, steps=3200), {10, 8, 25, 6.2}),  # requests, batch, per cent apart
        (measurement(8, 1e6), {1_000_000, 8.0}),  # tokens/s, batch
        (replace(measurement(8), load=ClosedLoop(64)), {8, 64}),
    ],
    ids=["preempted", "failed", "short", "unfinished", "no token", "never admitted", "little", "roofline", "load"],
)  # fmt: skip
def test_one_fault_is_the_only_problem(m, facts):
    assert facts <= {*numbers(only(m))}
    assert not is_clean((m,)) and check(m).state == "invalid"


def test_a_window_of_twenty_steps_is_long_enough():
    short = [check(measurement(8, steps=steps, output_tokens=2)).problems for steps in (18, 19)]
    assert [len(found) for found in short] == [1, 0], "a window holds the step at which it opens too"


# Failures


def test_a_share_of_failures_may_be_borne():
    m = measurement(8, steps=400, failures=2)
    share = 2 / (2 + len(judged_requests(m).rows))
    assert problems(m, failed_share=share) == () != problems(m, failed_share=0.9 * share) != problems(m)
    assert {2, 1.9, 1} <= {*numbers(problems(m, failed_share=0.01)[0])}


def test_failures_of_the_window_are_not_diluted_by_what_lies_around_it():
    m = measurement(8, steps=400, failures=2)
    inside = sum(m.run.window_s) / 2
    failed = Failures((0, 1), (inside,) * 2, (inside,) * 2, ("timeout",) * 2)
    together = replace(m, run=replace(m.run, failed=failed))
    counted = len(judged_requests(together).rows)
    assert problems(together, 2 / (2 + counted)) == () != problems(together, 2 / (3 + counted))


def test_failures_outside_the_window_count_among_all_requests():
    m = measurement(8, steps=400, failures=2)
    outside = replace(m, run=replace(m.run, failed=Failures((0, 1), (0.0,) * 2, (0.0,) * 2, ("timeout",) * 2)))
    share = 2 / (2 + len(m.run.samples))
    assert problems(outside, share) == () != problems(outside, 0.99 * share)


def test_where_all_failed_no_longer_window_is_asked_for():
    m, nowhere = with_samples(measurement(), finished=False), (1e6, 1e6 + 1)
    steps, unfinished = problems(replace(m, run=replace(m.run, window_s=nowhere)))
    assert numbers(steps) == [0, 20] and "window" in unfinished
    failed = replace(m, run=replace(m.run, window_s=nowhere, failures=8, first_failure="Planted"))
    assert numbers(only(failed)) == [8] and "Planted" in only(failed)


def test_a_load_that_was_given_up_is_told_with_what_it_did_not_send():
    found = problems(with_stream(measurement(failures=8), unsent_s=(1.0, 2.0)))
    assert numbers(found[0]) == [8, 2] and numbers(problems(with_stream(measurement(failures=8)))[0]) == [8]


# A client of a server


def test_a_client_counts_in_spans_of_time_and_not_in_steps():
    m = measurement()
    told = replace(m, run=replace(m.run, steps=Steps(*[()] * 7)))
    assert numbers(only(with_stream(told, bin_s=0.01, begins_s=m.run.window_s[0], tokens=(1.0,) * 4))) == [0.04, 0.2]


def through_a_client(doubt_s, ttft_s=None):
    m = with_stream(measurement(), stamp_uncertainty_s=(doubt_s, 3 * doubt_s))
    if ttft_s:
        first = tuple(at + ttft_s for at in m.run.samples.sent_s)
        m = replace(m, run=replace(m.run, samples=replace(m.run.samples, first_token_s=first)))
    return replace(m, spec=replace(m.spec, interface="server"))


def test_a_client_that_was_held_up_is_noise_beyond_what_is_harmless():
    assert [noise_of(through_a_client(doubt_s)) for doubt_s in (0.0, 0.005)] == [(), ()]
    assert [numbers(text) for text in noise_of(through_a_client(0.3))] == [[300, 5]]
    assert noise_of(through_a_client(0.019, ttft_s=0.2)) == (), "a tenth of the median TTFT"
    assert [numbers(text) for text in noise_of(through_a_client(0.021, ttft_s=0.2))] == [[21, 20]]


def test_a_client_that_sends_late_is_invalid():
    m = measurement()
    late = with_stream(m, scheduled_s=tuple(at - 0.1 for at in m.run.samples.sent_s))
    assert {100.0, 5.0} <= {*numbers(only(late))}


# Load


@pytest.mark.parametrize(("early", "caught"), [(0.02, 0), (0.05, 0), (0.12, 1), (-0.07, 1), (-0.12, 2)])
def test_littles_law_may_be_off_by_two_steps(early, caught):
    assert len(problems(measurement(admitted_early=early, steps=3200))) == caught


@pytest.mark.parametrize(("early", "caught"), [(0.045, False), (0.055, True)])
def test_littles_law_of_long_requests_may_be_off_by_a_twentieth(early, caught):
    assert len(problems(measurement(4, admitted_early=early, output_tokens=256, steps=5000))) == caught


def test_an_unknown_gpu_has_no_roofline():
    fast = measurement(8, 1e6)
    assert problems(replace(fast, environment=replace(fast.environment, gpu_name="Some GPU"))) == ()


@pytest.mark.parametrize(("idle", "caught"), [(0, False), (1, False), (2, False), (8, True)])
def test_a_load_is_held_but_for_three_steps_between_requests(idle, caught):
    assert len(problems(measurement(16, idle_steps=idle, steps=400))) == caught
    assert problems(replace(measurement(16, idle_steps=8, steps=400), load=ClosedLoop(16, requests=9))) == ()


def test_an_engine_limit_or_a_server_is_no_fault_of_the_load():
    held = replace(measurement(8), load=ClosedLoop(64))
    assert problems(replace(held, resolved=replace(held.resolved, max_num_seqs=8))) == ()
    own = replace(held, resolved=replace(held.resolved, max_num_seqs=None), spec=replace(held.spec, max_num_seqs=8))
    assert problems(own) == () and problems(replace(held, spec=replace(held.spec, interface="server"))) == ()


@pytest.mark.parametrize("load", [OpenLoop(requests=8), ClosedLoop(8, requests=100)])
def test_a_load_without_a_steady_window_need_be_neither_full_nor_steady(load):
    assert check(measurement(8, load=load, idle_steps=16, slow_from=50, slow_factor=2.0))[:4] == ((), (), (), False)


@pytest.mark.parametrize(("others", "state"), [(0.5, State.FAILS), (13.5, State.INCONCLUSIVE)])
@pytest.mark.parametrize(
    ("m", "facts"),
    [(measurement(16, idle_steps=8, steps=400), {16}), (measurement(16, steps=12), {13, 20})],
    ids=["load", "steps"],
)
def test_what_a_client_without_a_core_causes_is_inconclusive(m, facts, others, state):
    busy = sensed(replace(m, environment=replace(m.environment, cores=16)), HOST_CORES=2 + others)
    verdict = trustworthy("opt-1.3b", [(busy,), (busy,)])
    assert verdict.state is state and facts <= {*numbers(verdict.why)}
    failed = replace(busy, run=replace(busy.run, failures=3))
    assert trustworthy("opt-1.3b", [(busy,), (failed,)]).state is State.FAILS


# Steadiness


@pytest.mark.parametrize(("factor", "caught"), [(1.0, 0), (1.05, 0), (1.2, 1), (0.8, 1)])
def test_halves_that_differ_by_a_tenth_are_not_steady(factor, caught):
    found = noise_of(measurement(8, steps=200, slow_from=100, slow_factor=factor))
    assert len(found) == caught and all(10 in numbers(text) for text in found)


def test_both_rates_of_an_unsteady_window_are_told():
    [text] = noise_of(measurement(8, 1000.0, steps=200, slow_from=100, slow_factor=2.0))
    assert numbers(text)[0] == pytest.approx(2500 / 3, rel=0.01) and numbers(text)[1] == 500


@pytest.mark.parametrize(("steps", "caught"), [(39, 0), (50, 1)])
def test_halves_of_few_steps_are_not_compared(steps, caught):
    assert len(noise_of(measurement(8, steps=steps, output_tokens=16, slow_from=steps // 2, slow_factor=1.5))) == caught


PERIOD = 129  # steps of a convoy of 128 tokens a request
BURST = ClosedLoop(8, ramp_up="burst")


@pytest.mark.parametrize(("steps", "periods"), [(51, 0.40), (110, 0.85), (190, 1.47), (148, 1.15)])
def test_a_window_that_holds_a_part_of_a_convoy_is_invalid(steps, periods):
    found = problems(measurement(8, output_tokens=PERIOD - 1, steps=steps, load=BURST))
    assert periods in [number for text in found for number in numbers(text)]


@pytest.mark.parametrize("steps", [PERIOD, 2 * PERIOD, 2 * PERIOD - 5, PERIOD + 5])
def test_windows_of_whole_convoys_and_of_any_part_of_a_staggered_load_are_clean(steps):
    for load in (BURST, ClosedLoop(8)):
        assert noise_of(measurement(8, output_tokens=PERIOD - 1, steps=steps, load=load)) == ()
    assert noise_of(measurement(8, output_tokens=PERIOD - 1, steps=190)) == ()


def convoys(periods, slow_period=None):
    """Whole convoys, the steps of whose first third take ten times as long; one of the periods can be slower."""
    m = measurement(8, output_tokens=PERIOD - 1, steps=periods * PERIOD, load=BURST)
    opens = m.run.steps.time_s.index(m.run.window_s[0])
    clock, moved = 0.0, {0.0: 0.0}
    for i, at in enumerate(m.run.steps.time_s):
        period, step = divmod(i - opens - 1, PERIOD)
        clock += 0.01 * (10 if step < PERIOD // 3 else 1) * (1.5 if period == slow_period else 1)
        moved[at] = clock
    names = ("sent_s", "admitted_s", "first_token_s", "last_token_s")
    stamps = {name: tuple(moved[at] for at in getattr(m.run.samples, name)) for name in names}
    steps = replace(m.run.steps, time_s=tuple(moved[at] for at in m.run.steps.time_s))
    opened, closed = m.run.window_s
    run = replace(m.run, steps=steps, samples=replace(m.run.samples, **stamps), window_s=(moved[opened], moved[closed]))
    return replace(m, run=run)


@pytest.mark.parametrize("periods", [1, 2, 3, 4])
def test_a_convoy_is_compared_with_another_not_with_its_own_parts(periods):
    made = convoys(periods)
    assert check(made).noise == ()
    assert len(check(replace(made, load=ClosedLoop(8))).noise) == periods % 2, "where the cut is in mid-convoy"
    assert len(check(convoys(periods, slow_period=periods - 1)).noise) == (periods > 1)


# Several engines at once


def together(*made, began_s=None):
    """Engines of one run; began_s: on the common clock, of each."""
    parts = [replace(m, replica=Replica("g", i, len(made), "s", "mps")) for i, m in enumerate(made)]
    return [replace(m, run=replace(m.run, began_s=at)) for m, at in zip(parts, began_s or [None] * len(made))]


def slowed(factor, model="opt-1.3b"):
    return measurement(8, 400.0, model=model, steps=200, slow_from=100, slow_factor=factor)


@pytest.mark.parametrize(("factors", "caught"), [((1, 1), 0), ((1.25, 0.84), 0), ((1.3, 1.0), 1), ((1.25, 1.25), 1)])
def test_what_one_engine_loses_and_another_gains_is_steady(factors, caught):
    members = together(*map(slowed, factors))
    found = check(*members)
    assert [text.partition(":")[0] for text in found.noise] == ["opt-1.3b"] * caught
    assert is_clean(members) and found.starved is False


def test_of_different_models_each_is_to_be_steady():
    found = check(*together(slowed(1.25, "opt-125m"), slowed(0.84)))
    assert [text.partition(":")[0] for text in found.noise] == ["opt-125m", "opt-1.3b"]


def test_engines_with_no_time_in_common_are_invalid():
    apart = check(*together(measurement(), measurement(), began_s=(100.0, 900.0)))
    assert (len(apart.problems), apart.noise, apart.starved) == (1, (), False)
    assert check(*together(measurement(), measurement(), began_s=(100.0, 100.1))) == CLEAN


def test_each_finding_names_its_engine():
    busy, broken = sensed(measurement(), CPU_THROTTLED=0.5), measurement(failures=1)
    found = check(*together(measurement(), busy))
    assert found.problems == () and [text.partition(":")[0] for text in found.noise] == ["replica 2"]
    found = check(*together(broken, busy, sensed(measurement(), FOREIGN_PROCESSES=None, GPU_PROCESSES=9.0)))
    kinds = (found.problems, found.degradations, found.noise)
    assert [[text.partition(":")[0] for text in texts] for texts in kinds] == [
        ["replica 1"],
        ["replica 3"],
        ["replica 2"],
    ]
    assert not found.starved, "whoever is invalid had its cores"


def test_several_engines_are_starved_where_each_invalid_one_is():
    short = measurement(16, steps=12)
    starved = sensed(replace(short, environment=replace(short.environment, cores=16)), HOST_CORES=15.5)
    assert [check(*together(starved, measurement(failures=n))).starved for n in (0, 1)] == [True, False]


# Trust


def test_trustworthy_counts_the_valid_and_tells_the_reasons():
    made = [(measurement(),), (measurement(repeat=1, preempted=1),)]
    verdict = trustworthy("opt-1.3b[8]", made, wanted=2)
    assert trustworthy("opt-1.3b[8]", made) and not verdict
    assert {1, 2} <= {*numbers(verdict.why)} and problems(made[1][0])[0] in verdict.why
    assert (verdict.value, verdict.threshold, verdict.n) == (1, 2, 2)
    assert verdict.records == tuple(m.id for (m,) in made)
    assert not trustworthy("opt-1.3b[8]", []), "nothing measured is not a pass"


def test_runs_of_several_engines_are_trusted_as_one():
    runs = [together(measurement(), measurement(failures=n)) for n in (0, 1)]
    verdict = trustworthy("two", runs, 2)
    assert trustworthy("two", runs, 1) and verdict.state is State.FAILS
    assert (verdict.value, verdict.n, len(verdict.records)) == (1, 2, 4)


# What the sensors say against it


def now_and_then(low, high):
    return lambda at: low if round(at / 0.01) % 5 == 0 else high


@pytest.mark.parametrize("made", [measurement(), sensed(measurement())], ids=["no sensors", "healthy"])
def test_what_nothing_is_said_against_is_clean(made):
    assert is_clean((made,)) and check(made) == CLEAN


SAID = [
    ({"FOREIGN_PROCESSES": 1.0}, "problems"),
    ({"CLOCK_REASONS": float(0x40)}, "problems"),
    ({"XID": lambda at: 79.0 if at > 0.6 else 0.0}, "problems"),
    ({"POWER_LIMIT": now_and_then(500.0, 700.0)}, "problems"),
    ({"DRAM_ACTIVE": 0.0}, "problems"),
    ({"FOREIGN_PROCESSES": None, "GPU_PROCESSES": 3.0}, "degradations"),
    ({"SM_ACTIVE": now_and_then(0.8, None)}, "degradations"),
    ({"SM_CLOCK": now_and_then(1.5e9, 1.98e9)}, "noise"),
    ({"STOLEN_CORES": 0.5}, "noise"),
    ({"CPU_THROTTLED": 0.5}, "noise"),
]


@pytest.mark.parametrize(("columns", "kind"), SAID, ids=["-".join(columns) for columns, _ in SAID])
def test_what_sensors_say_is_of_one_kind_and_only_a_problem_is_no_ground_to_stand_on(columns, kind):
    found = check(made := sensed(measurement(), **columns))
    assert [name for name in ("problems", "degradations", "noise") if getattr(found, name)] == [kind]
    assert len(getattr(found, kind)) == 1 and is_clean((made,)) is (kind == "noise")
    assert bool(trustworthy("opt-1.3b[8]", [(made,)])) is (kind != "problems")


def test_where_two_kinds_are_found_the_worse_has_all_but_noise():
    both = check(sensed(measurement(), FOREIGN_PROCESSES=1.0, SM_ACTIVE=now_and_then(0.8, None), CPU_THROTTLED=0.5))
    assert (len(both.problems), both.degradations, len(both.noise)) == (2, (), 1)
    broken = check(sensed(measurement(preempted=2), CPU_THROTTLED=0.5, FOREIGN_PROCESSES=None, GPU_PROCESSES=3.0))
    assert (len(broken.problems), len(broken.degradations)) == (1, 1) and broken.noise == both.noise
    assert [CheckResult(*found).state for found in ((("a",), ("b",)), ((), ("b",)), ())] == [
        "invalid",
        "degraded",
        "ok",
    ]
    assert CheckResult(("a",), ("b",), unknown=("c",)).reasons == ("a",) and CheckResult((), ("b",)).reasons == ("b",)


# Caches of prefixes

STREAM = Stream(0.01, 0.0, (), {"growth": 1.01, "least_s": 1e-4, "counts": {}, "sum_s": 0.0})


def cached(tokens, inside=True):
    """A run whose requests had so many of their 64 prompt tokens in a cache; inside: also those of the window."""
    run = planted_run(4, 400.0)
    ended = set(window.finished_in_window(run))
    counts = tuple(tokens if inside or i not in ended else 0 for i in range(len(run.samples)))
    return replace(run, samples=replace(run.samples, cached_tokens=counts))


@pytest.mark.parametrize("tokens", [0, 16, 48])
def test_the_share_is_of_the_requests_that_ended_in_the_window(tokens):
    assert cache_hit_share(cached(tokens)).share == tokens / 64 and cache_hit_share(cached(tokens, False)).share == 0


def test_a_count_that_is_left_out_is_a_zero_where_others_count():
    run = cached(16)
    ended = window.finished_in_window(run)
    counts = [64 if i == ended[0] else None for i in range(len(run.samples))]
    seen = cache_hit_share(replace(run, samples=replace(run.samples, cached_tokens=tuple(counts))))
    assert seen.share == pytest.approx(1 / len(ended))


def test_counters_of_a_server_are_asked_only_where_no_request_tells():
    by_counters = replace(planted_run(4, 400.0), stream=replace(STREAM, cache_lookups=(1000, 100)))
    both = replace(cached(0), stream=by_counters.stream)
    assert [cache_hit_share(run).share for run in (by_counters, both)] == [0.1, 0]
    assert cache_hit_share(by_counters).told_by != cache_hit_share(both).told_by
    nothing = replace(by_counters, stream=replace(STREAM, cache_lookups=(0, 0)))
    assert cache_hit_share(nothing) is cache_hit_share(planted_run(4, 400.0)) is None
    assert cache_hit_share(replace(both, window_s=(0.0, 0.0))).share == 0.1, "no request ended there"


def test_more_than_a_twentieth_of_the_prompts_cached_is_a_problem_unless_asked_for():
    m = measurement(concurrency=4)
    at, beyond = (replace(m, run=replace(m.run, stream=replace(STREAM, cache_lookups=(1000, n)))) for n in (50, 51))
    assert MOST_CACHED == 0.05 and problems(at) == () and {5.1, 5} <= {*numbers(only(beyond))}
    assert problems(replace(beyond, spec=replace(m.spec, allow_prefix_cache=True))) == ()


def test_a_record_keeps_who_told_what_of_caches():
    m = measurement(concurrency=4)
    stream = replace(STREAM, cache_lookups=(1000, 7), salt=(5, 6), refused=("ignore_eos",))
    for run in (replace(cached(16), stream=stream), planted_run(4, 400.0)):
        line = measurement_line(replace(m, run=run))
        again = measurement_of(line, m.spec, m.resolved, m.environment).run
        assert tuple(again.samples.cached_tokens) == run.samples.cached_tokens and again.stream == run.stream
        assert cache_hit_share(again) == cache_hit_share(run)
        assert ("cached_tokens" in line["run"]["samples"]) is bool(run.samples.cached_tokens)


# Jobs


def job(asked=40, steps=32, failures=0, finished=40):
    """A job of which 40 requests of 32 tokens began together, and so many were finished. steps: that tell of tokens."""
    run = measurement(40, steps=40, failures=failures).run
    at, n = run.steps.time_s, 40
    stamps = ((0.0,) * n, (0.0,) * n, (at[0],) * n, (at[31],) * n)
    samples = Samples(tuple(range(n)), *stamps, (64,) * n, (32,) * n, tuple(i < finished for i in range(n)))
    trace = replace(run.steps, new_tokens=tuple(n if i < steps else 0 for i in range(len(at))))
    made = replace(run, samples=samples, steps=trace, window_s=(0.0, at[-1]))
    return replace(measurement(load=OpenLoop(requests=asked)), run=made)


def test_a_job_is_served_to_the_end_but_for_the_failures_that_may_be():
    assert problems(job()) == () and numbers(only(job(finished=39))) == [39, 40]
    assert problems(job(asked=41, failures=1), failed_share=0.05) == () != problems(job(asked=41, failures=1))
    assert numbers(only(with_samples(job(), first_token_s=None))) == []


def test_a_job_whose_steps_tell_of_other_tokens_is_invalid():
    assert numbers(only(job(steps=33))) == [1280, 1320]
    nothing = job()
    assert problems(replace(nothing, run=replace(nothing.run, steps=Steps(*[()] * 7)))) == ()


def test_preemptions_of_a_job_are_no_problem():
    made = job()
    preempted = replace(made.run.steps, preempted=(9,) * len(made.run.steps))
    assert problems(replace(made, run=replace(made.run, steps=preempted))) == ()
