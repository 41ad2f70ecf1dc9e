"""What is found on a measurement or on engines at once: an honest one has no problem, each fault is the only one told,
as what it is and with its numbers, and each limit has a harmless side. For the sensors see `test_sensor_health.py`."""

from dataclasses import fields, replace

import pytest
from facts import numbers
from hypothesis import given, strategies as st
from strategies import NO_STEPS, changed, measurement, planted_run, sensed

from pytest_slmserve.analysis.metrics import validity, window
from pytest_slmserve.analysis.metrics.validity import CheckResult, check, is_clean, problems, trustworthy
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.records import Failures, Replica, Samples, Stream
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop

CLEAN = CheckResult(unknown=())
PERIOD = 129  # steps of a convoy of 128 tokens a request
BURST = ClosedLoop(8, ramp_up="burst")
RUN = planted_run(4, 400.0)
ENDED = window.finished_in_window(RUN)
FEWER = {"SM_ACTIVE": lambda at: 0.8 if round(at / 0.01) % 5 == 0 else None}
PLAIN, LONG = measurement(), measurement(8, steps=400, failures=2)
SERVER = {"interface": "server"}
ENDPOINT = {"interface": "endpoint", "platform": "remote", "url": "http://h/v1"}


def each(m, **values):
    """The measurement, of which each request has these values."""
    return changed(m, "run", "samples", **{name: (value,) * len(m.run.samples) for name, value in values.items()})


def with_stream(m, **facts):
    return changed(m, "run", stream=Stream(**{"bin_s": 0.1, "begins_s": 0.0, "tokens": (), "gaps": {}, **facts}))


def waiting(m, count):
    """The measurement with so many requests more that were sent at its beginning and wait to its end."""
    added = {"sent_s": 0.0, "prompt_tokens": 64, "output_tokens": 0, "finished": False, "request": 0}
    columns = {f.name: getattr(m.run.samples, f.name) for f in fields(Samples)}
    more = {name: (*each, *(added.get(name),) * count) if each else () for name, each in columns.items()}
    return changed(m, "run", samples=Samples(**more))


def early_ends(count, extra=(), spec=ENDPOINT, **stream):
    """A measurement of an endpoint, of whose requests so many ended with fewer tokens than they asked for."""
    done = [i for i, finished in enumerate(PLAIN.run.samples.finished) if finished]
    tokens = tuple(31 if i in done[:count] else 32 for i in range(len(PLAIN.run.samples)))
    m = changed(changed(PLAIN, "run", "samples", output_tokens=tokens), "spec", **spec, extra=extra)
    return with_stream(m, tokens_per_chunk=stream.pop("tokens_per_chunk", 1.0), **stream)


def in_json(m):
    """The measurement, whose outputs were asked to be JSON."""
    return changed(m, "workload", spec=replace(m.workload.spec, response_format="json"))


def looked_up(m, hits):
    return with_stream(m, cache_lookups=(1000, hits))


def shared(share, cached, base=PLAIN, groups=1, block=16):
    """A measurement whose prompts of 64 tokens have a share in common. cached: of each row, from the cache."""
    m = changed(base, "workload", spec=replace(base.workload.spec, prefix_share=share, prefix_groups=groups))
    m = changed(changed(m, "resolved", block_size=block), "spec", allow_prefix_cache=True)
    told = tuple(cached(row) if callable(cached) else cached for row in range(len(m.run.samples)))
    return changed(m, "run", "samples", cached_tokens=told if cached is not None else ())


def talks(*cached, think_s=0, **spec):
    """A measurement of conversations of two turns with prompts of 32 and 64 tokens. cached: of each turn, from the
    cache, which is on unless `spec` says another thing."""
    m = changed(PLAIN, "workload", spec=replace(PLAIN.workload.spec, turns=2))
    m = changed(changed(m, "resolved", block_size=16), "spec", **{"prefix_caching": True, **spec})
    m = replace(m, load=replace(m.load, think_s=think_s))
    turns = [number % 2 for number in m.run.samples.request]
    told = tuple(cached[turn] for turn in turns) if cached else ()
    return changed(m, "run", "samples", prompt_tokens=tuple(32 + 32 * turn for turn in turns), cached_tokens=told)


def second_turns(cached):
    """A measurement of second turns alone, of 16 new and 16 output tokens: an archive has lost the first ones."""
    m = talks()
    m = changed(m, "workload", spec=replace(m.workload.spec, prompt_tokens=16, output_tokens=16))
    count, odd = len(m.run.samples), tuple(2 * n + 1 for n in m.run.samples.request)
    return changed(m, "run", "samples", request=odd, prompt_tokens=(64,) * count, cached_tokens=(cached,) * count)


def by_client(doubt_s, ttft_s=0.0):
    """A server's measurement whose client may be so late with its stamps."""
    m = with_stream(changed(PLAIN, "spec", **SERVER), stamp_uncertainty_s=(doubt_s, 3 * doubt_s))
    first = tuple(at + ttft_s for at in m.run.samples.sent_s)
    return changed(m, "run", "samples", first_token_s=first) if ttft_s else m


def job(asked=40, steps=32, failures=0, finished=40, preempted=0):
    """A job of which 40 requests of 32 tokens began together, and so many were finished. steps: that tell of tokens."""
    run = measurement(40, steps=40, failures=failures).run
    at, n = run.steps.time_s, 40
    stamps = ((0.0,) * n, (0.0,) * n, (at[0],) * n, (at[31],) * n)
    samples = Samples(tuple(range(n)), *stamps, (64,) * n, (32,) * n, tuple(i < finished for i in range(n)))
    made = tuple(n if i < steps else 0 for i in range(len(at)))
    trace = replace(run.steps, new_tokens=made, preempted=(preempted,) * len(at))
    made = replace(run, samples=samples, steps=trace, window_s=(0.0, at[-1]))
    return replace(measurement(load=OpenLoop(requests=asked)), run=made)


@given(st.integers(1, 100), st.integers(2, 64), st.integers(41, 120))
def test_honest_measurement_has_no_problem(concurrency, output_tokens, steps):
    # the window has to be long enough for a request to end in it
    made = measurement(concurrency, 50.0, output_tokens=output_tokens, steps=max(steps, output_tokens))
    assert problems(made) == ()


FULL = changed(measurement(8), load=ClosedLoop(64))  # of which 8 were sent
FAST, IDLE = measurement(8, 1e6), measurement(16, idle_steps=8, steps=400)
LATE = with_stream(PLAIN, scheduled_s=tuple(at - 0.1 for at in PLAIN.run.samples.sent_s))
BINS = {"bin_s": 0.01, "begins_s": PLAIN.run.window_s[0], "tokens": (1.0,) * 4}
IN_SPANS = with_stream(changed(PLAIN, "run", steps=NO_STEPS), **BINS)


@pytest.mark.parametrize(("m", "facts"), [
    (measurement(preempted=2), {2}), (measurement(8, steps=10), {11, 20}),
    *((measurement(8, steps=steps, output_tokens=2), facts) for steps, facts in ((18, {19, 20}), (19, None))),
    (IN_SPANS, {0.04, 0.2}),  # a client counts in spans of time
    (each(PLAIN, finished=False), set()), (each(PLAIN, first_token_s=None), set()),
    # Failures
    (measurement(failures=3), {3}),
    (with_stream(measurement(failures=8), unsent_s=(1.0, 2.0)), {8, 2}),
    (with_stream(measurement(failures=8)), {8}),
    # Load: by Little's law, which may be off by two steps, or a twentieth, and by what was sent and held
    (each(PLAIN, admitted_s=None), None),
    (measurement(first_early=0.25, steps=3200), {10, 8, 25, 6.2}),  # requests, batch, per cent apart
    *((measurement(first_early=by, steps=3200), None) for by in (0.02, 0.05)),
    *((measurement(first_early=by, steps=3200), set()) for by in (0.12, -0.07)),
    *((measurement(4, first_early=by, output_tokens=256, steps=5000), facts)
      for by, facts in ((0.045, None), (0.055, set()))),
    (FULL, {8, 64}), (changed(FULL, "resolved", max_num_seqs=8), {8, 64}),
    (waiting(FULL, 56), None),  # its tokens in a step are the limit
    (changed(waiting(FULL, 56), "resolved", kv_blocks=8 * 6 + 1), {8, 64}),
    (changed(waiting(FULL, 56), "resolved", kv_blocks=64 * 6 + 1), None),
    (changed(waiting(FULL, 56), "resolved", kv_blocks=8 * 6 + 1, max_num_seqs=8), None),
    (changed(changed(waiting(FULL, 56), "resolved", kv_blocks=None), "spec", kv_cache_bytes=0), {8, 64}),
    (changed(changed(waiting(FULL, 56), "resolved", kv_blocks=9, max_num_seqs=None), "spec", max_num_seqs=8), None),
    (changed(FULL, "spec", **SERVER), None),
    *((measurement(16, idle_steps=n, steps=400), None) for n in (0, 1, 2)),
    (IDLE, {16}), (changed(IDLE, load=ClosedLoop(16, requests=9)), None),
    # Tokens
    (early_ends(0), None), (early_ends(3), {3, 32}), (early_ends(3, refused=("ignore_eos",)), None),
    (early_ends(3, tokens_per_chunk=None), None), (early_ends(3, (("ignore_eos", "null"),)), None),
    (early_ends(3, (("top_k", "5"),)), {3, 32}), (early_ends(3, spec=SERVER), None),
    (in_json(early_ends(3, spec=SERVER)), {3, 32}), (in_json(early_ends(0, spec=SERVER)), None),
    (in_json(early_ends(3)), {3, 32}),
    # Plausible
    (FAST, {1_000_000, 8.0}),  # tokens/s, batch: beyond the roofline
    (changed(FAST, "environment", gpu_name="Some GPU"), None),
    (LATE, {100.0, 5.0}), (looked_up(measurement(4), 50), None), (looked_up(measurement(4), 51), {5.1, 5}),
    (changed(looked_up(measurement(4), 51), "spec", allow_prefix_cache=True), None),
    # The hit rate that was asked for: of 0.7 of 64 tokens two whole blocks
    *((shared(0.7, n), None if n == 32 else {100 * n / 64, 50, 0.7, 16, 52.5}) for n in (16, 32, 48)),
    (shared(0.0, 0), None), (shared(0.0, 16), {25, 0, 5}), (shared(0.7, None), set()),
    (shared(0.7, 0, block=128), None), (shared(0.7, 32, block=128), {50, 0, 128}),
    (shared(0.7, 32, block=None), None), (shared(0.7, 52, block=None), {81.2, 70.3}),
    (looked_up(shared(0.5, None), 490), None), (looked_up(shared(0.5, None), 530), {53, 50}),
    *((shared(0.5, lambda row, n=n: 32 * (row >= n), base=job(), groups=4), None if n < 7 else {50})
      for n in (0, 4, 7)),
    # Conversations: the second turn finds the first one's prompt, a third of all tokens, and none with the cache off
    (talks(0, 32), None), (talks(0, 0), {0, 33.3, 2, 16, 30, 36.7}), (talks(32, 32), {66.7, 33.3, 2}),
    (talks(), set()), (talks(prefix_caching=False), None), (talks(0, 0, prefix_caching=False), None),
    (talks(0, 32, prefix_caching=False), {33.3, 0, 2}), (second_turns(32), None), (second_turns(0), {0, 50}),
    # Jobs
    (job(), None), (job(finished=39), {39, 40}), (job(asked=41, failures=1), {1}),
    (each(job(), first_token_s=None), set()), (job(steps=33), {1280, 1320}),
    (changed(job(), "run", steps=NO_STEPS), None), (job(preempted=9), None),
])  # fmt: skip
def test_each_fault_is_reported_alone(m, facts):
    """facts: None where there is no problem."""
    found = check(m)
    assert len(found.problems) == (facts is not None) and problems(m) == found.problems
    assert (found.state == "invalid", is_clean((m,))) == (facts is not None, facts is None)
    assert facts is None or facts <= {*numbers(found.problems[0])}


def test_several_problems_are_all_reported():
    assert len(problems(changed(measurement(first_early=-0.12, steps=3200), load=ClosedLoop(64)))) == 2
    nowhere = changed(each(PLAIN, finished=False), "run", window_s=(1e6, 1e6 + 1))
    steps, unfinished = problems(nowhere)
    [failed] = problems(changed(nowhere, "run", failures=8, first_failure="Planted"))
    assert (numbers(steps), numbers(failed)) == ([0, 20], [8]) and "window" in unfinished and "Planted" in failed
    # Its requests end after steps of their own, so no whole number of periods can be told.
    for steps, periods in ((51, 0.40), (110, 0.85), (190, 1.47), (148, 1.15)):
        assert periods in [number for text in problems(convoy(steps)) for number in numbers(text)]
    made = convoy(129)
    some = tuple(int(i == 3) for i in range(len(made.run.steps)))
    drafting = changed(made, "run", "steps", drafts=some, accepted=some)
    assert problems(made) == () and "staggered" in " ".join(problems(drafting))
    assert "staggered" not in " ".join(problems(changed(drafting, load=ClosedLoop(8))))
    for periods in (1, 2, 3, 4):
        made = convoys(periods)
        slow, staggered = convoys(periods, slow_period=periods - 1), changed(made, load=ClosedLoop(8))
        found = [len(check(m).noise) for m in (made, slow, staggered)]
        assert found == [0, periods > 1, periods % 2], "a staggered one is cut in mid-convoy"


@pytest.mark.parametrize(("sent_s", "others"), [
    (None, len(window.judged_requests(LONG).rows)),
    (sum(LONG.run.window_s) / 2, len(window.judged_requests(LONG).rows)),  # not diluted by what lies around the window
    (0.0, len(LONG.run.samples)),  # those outside the window count among all
])  # fmt: skip
def test_failure_share_can_be_tolerated(sent_s, others):
    failed = None if sent_s is None else Failures((0, 1), (sent_s,) * 2, (sent_s,) * 2, ("timeout",) * 2)
    m, share = changed(LONG, "run", failed=failed), 2 / (2 + others)
    assert problems(m, failed_share=share) == () != problems(m, failed_share=0.99 * share) != problems(m)
    assert {2, round(100 * share, 1), 1} <= {*numbers(problems(m, failed_share=0.01)[0])}
    assert problems(job(asked=41, failures=1), failed_share=0.05) == ()


def slowed(factor=1.0, steps=200, **facts):
    return measurement(8, steps=steps, slow_from=steps // 2, slow_factor=factor, **facts)


def convoy(steps, load=BURST):
    return measurement(8, output_tokens=PERIOD - 1, steps=steps, load=load)


@pytest.mark.parametrize(("m", "facts"), [
    *((made, []) for made in (PLAIN, sensed(PLAIN), by_client(0.0), by_client(0.005))),
    (by_client(0.3), [300, 5]),
    (by_client(0.019, ttft_s=0.2), []),  # a tenth of the median TTFT
    (by_client(0.021, ttft_s=0.2), [21, 20]),
    # Halves that differ by a tenth are not steady, if they have more than 20 steps
    *((slowed(factor), []) for factor in (1.0, 1.05)),
    *((slowed(factor), [10]) for factor in (1.2, 0.8)),
    (slowed(2.0), [833, 500, 10]), (slowed(1.5, steps=39, output_tokens=16), []),
    (slowed(1.5, steps=50, output_tokens=16), [10]),
    # Whole convoys, and any part of a staggered load
    *((convoy(n, load), []) for n in (129, 258, 253, 134) for load in (BURST, ClosedLoop(8))),
    (convoy(190, ClosedLoop(8)), []),
    # A load without a steady window need be neither full nor steady
    *((slowed(2.0, steps=100, idle_steps=16, load=load), [])
      for load in (OpenLoop(requests=8), ClosedLoop(8, requests=100))),
])  # fmt: skip
def test_noise_keeps_measurement_valid(m, facts):
    found = check(m)
    assert (found.problems, found.degradations, len(found.noise), is_clean((m,))) == ((), (), bool(facts), True)
    assert facts == [] or {*facts} <= {*numbers(found.noise[0])}


def convoys(periods, slow_period=None):
    """Whole convoys, the steps of whose first third take ten times as long; one of the periods can be slower."""
    m = convoy(periods * PERIOD)
    opens = m.run.steps.time_s.index(m.run.window_s[0])
    clock, moved = 0.0, {0.0: 0.0}
    for i, at in enumerate(m.run.steps.time_s):
        period, step = divmod(i - opens - 1, PERIOD)
        clock += 0.01 * (10 if step < PERIOD // 3 else 1) * (1.5 if period == slow_period else 1)
        moved[at] = clock
    names = ("sent_s", "admitted_s", "first_token_s", "last_token_s")
    stamps = {name: tuple(moved[at] for at in getattr(m.run.samples, name)) for name in names}
    m = changed(changed(m, "run", "samples", **stamps), "run", "steps", time_s=[moved[at] for at in m.run.steps.time_s])
    return changed(m, "run", window_s=[moved[at] for at in m.run.window_s])


def together(*made, began_s=None):
    """Engines of one run; began_s: on the common clock, of each."""
    parts = [replace(m, replica=Replica("g", i, len(made), "s", "mps")) for i, m in enumerate(made)]
    return [changed(m, "run", began_s=at) for m, at in zip(parts, began_s or [None] * len(made))]


@pytest.mark.parametrize(("factors", "models", "noisy"), [
    ((1, 1), ("opt-1.3b",) * 2, []), ((1.25, 0.84), ("opt-1.3b",) * 2, []),
    ((1.3, 1.0), ("opt-1.3b",) * 2, ["opt-1.3b"]), ((1.25, 1.25), ("opt-1.3b",) * 2, ["opt-1.3b"]),
    ((1.25, 0.84), ("opt-125m", "opt-1.3b"), ["opt-125m", "opt-1.3b"]),  # each is to be steady
])  # fmt: skip
def test_exchanged_engine_speed_is_steady(factors, models, noisy):
    """One engine loses what another of its model gains."""
    members = together(*(slowed(f, tokens_per_s=400.0, model=model) for f, model in zip(factors, models)))
    found = check(*members)
    assert ([text.partition(":")[0] for text in found.noise], is_clean(members), found.starved) == (noisy, True, False)


def test_engines_must_overlap_in_time():
    apart = check(*together(PLAIN, PLAIN, began_s=(100.0, 900.0)))
    assert (len(apart.problems), apart.noise, apart.starved) == (1, (), False)
    assert check(*together(PLAIN, PLAIN, began_s=(100.0, 100.1))) == CLEAN
    busy, broken = sensed(PLAIN, CPU_THROTTLED=0.5), measurement(failures=1)
    crowded = sensed(PLAIN, FOREIGN_PROCESSES=None, GPU_PROCESSES=9.0)
    worst = [["replica 1"], ["replica 3"], ["replica 2"], False]
    for members, expected in (([PLAIN, busy], [[], [], ["replica 2"], False]), ([broken, busy, crowded], worst)):
        found = check(*together(*members))
        named = [[text.partition(":")[0] for text in texts] for texts in found[:3]]
        assert [*named, found.starved] == expected, "whoever is invalid had its cores"


@pytest.mark.parametrize(("others", "state"), [(0.5, State.FAILS), (13.5, State.INCONCLUSIVE)])
@pytest.mark.parametrize(("m", "facts"), [(IDLE, {16}), (measurement(16, steps=12), {13, 20})], ids=["load", "steps"])
def test_starved_client_is_inconclusive(m, facts, others, state):
    busy = sensed(changed(m, "environment", cores=16), HOST_CORES=2 + others)
    verdict = trustworthy("opt-1.3b", [(busy,), (busy,)])
    assert verdict.state is state and facts <= {*numbers(verdict.why)}
    failed = changed(busy, "run", failures=3)
    assert trustworthy("opt-1.3b", [(busy,), (failed,)]).state is State.FAILS
    at_once = [check(*together(busy, measurement(failures=n))).starved for n in (0, 1)]
    assert at_once == [state is State.INCONCLUSIVE, False], "each invalid one has to be"


def test_trustworthy_counts_valid_measurements():
    made = [(PLAIN,), (measurement(repeat=1, preempted=1),)]
    verdict = trustworthy("opt-1.3b[8]", made, wanted=2)
    assert trustworthy("opt-1.3b[8]", made) and not verdict
    assert {1, 2} <= {*numbers(verdict.why)} and problems(made[1][0])[0] in verdict.why
    assert (verdict.value, verdict.threshold, verdict.n) == (1, 2, 2)
    assert verdict.records == tuple(m.id for (m,) in made)
    assert not trustworthy("opt-1.3b[8]", []), "nothing measured is not a pass"
    runs = [together(PLAIN, measurement(failures=n)) for n in (0, 1)]
    verdict = trustworthy("two", runs, 2)
    assert trustworthy("two", runs, 1) and verdict.state is State.FAILS
    assert (verdict.value, verdict.n, len(verdict.records)) == (1, 2, 4), "runs of several engines are one"
    found = [CheckResult(*kinds, unknown=("c",)) for kinds in ((("a",), ("b",)), ((), ("b",)), ((), (), ("d",)))]
    told = [(each.state, each.reasons) for each in (*found, CheckResult(noise=("d",)))]
    assert told == [("invalid", ("a",)), ("degraded", ("b",)), ("unknown", ("c",)), ("ok", ())]


@pytest.mark.parametrize(("columns", "counts"), [
    ({"FOREIGN_PROCESSES": 1.0}, (1, 0, 0)),
    ({"XID": lambda at: 79.0 if at > 0.6 else 0.0}, (1, 0, 0)),
    ({"FOREIGN_PROCESSES": None, "GPU_PROCESSES": 3.0}, (0, 1, 0)),
    (FEWER, (0, 1, 0)), ({"STOLEN_CORES": 0.5}, (0, 0, 1)),
    # Where two kinds are found the worse has all but noise.
    ({"FOREIGN_PROCESSES": 1.0, "CPU_THROTTLED": 0.5} | FEWER, (2, 0, 1)),
])  # fmt: skip
def test_sensor_finding_has_one_kind(columns, counts):
    found = check(made := sensed(PLAIN, **columns))
    assert tuple(map(len, found[:3])) == counts and is_clean((made,)) is (counts[:2] == (0, 0))
    assert bool(trustworthy("opt-1.3b[8]", [(made,)])) is (counts[0] == 0)
    broken = check(sensed(measurement(preempted=2), **columns))
    assert len(broken.problems) == 1 and broken[1:3] == found[1:3], "of a broken one the sensors' problems are left out"


def cached(count):
    """A run whose requests had so many of their 64 prompt tokens in a cache. count: of a row."""
    return replace(RUN, samples=replace(RUN.samples, cached_tokens=tuple(map(count, range(len(RUN.samples))))))


@pytest.mark.parametrize(("run", "share", "teller"), [
    *((cached(lambda row, n=n: n), n / 64, "request") for n in (0, 16, 48)),
    (cached(lambda row: 0 if row in ENDED else 48), 0, "request"),  # of the requests that ended in the window
    (cached(lambda row: 64 if row == ENDED[0] else None), 1 / len(ENDED), "request"),  # left out is 0
    (looked_up(replace(PLAIN, run=RUN), 100).run, 0.1, "server"),
    (looked_up(replace(PLAIN, run=cached(lambda row: 0)), 100).run, 0, "request"),  # no counters where requests tell
    (looked_up(replace(PLAIN, run=replace(cached(lambda row: 0), window_s=(0.0, 0.0))), 100).run, 0.1, "server"),
])  # fmt: skip
def test_cache_hit_share_names_source(run, share, teller):
    found = validity.cache_hit_share(run)
    assert found.share == pytest.approx(share) and teller in found.told_by
    for silent in (RUN, with_stream(PLAIN, cache_lookups=(0, 0)).run):
        assert validity.cache_hit_share(silent) is None
