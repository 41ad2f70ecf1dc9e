"""The closed loop alone: steps of any length go in, and what it decides must hold for all of them."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import example, given, strategies as st

from pytest_slmserve.engines.worker.slm_pacing import ClosedLoopPacer, SchedulePacer, serve_batches
from pytest_slmserve.schema.specs import LONG_S  # by which loads are planned

PHASES, RAMPS = ["ramp", "settle", "window", "over"], ["burst", "staggered"]

concurrencies = st.integers(1, 60)
lifetimes = st.integers(1, 24)
settles = st.sampled_from([0.0, 0.5, 1.0, 2.0])
windows = st.floats(0.01, 1.0)
step_lengths = st.lists(st.floats(0.01, 0.6), min_size=1, max_size=6)


def play(loop, lifetime, seconds, limit=2_000):
    """What a loop decides with an engine that gives each concurrent request a token per step; step lengths are repeated
    for ever. in_flight and started: after the step, when freed users have sent again."""
    played = SimpleNamespace(loop=loop, now=[0.0], phases=[], in_flight=[], started=[])
    left, free = [], loop.users_due()
    for number in range(limit):
        for _ in range(free):
            if loop.next_request() is not None:
                left.append(lifetime)
        played.phases.append(loop.phase)
        played.in_flight.append(len(left))
        played.started.append(loop.started)
        if not left or (loop.phase == "over" and loop.requests is None):
            return played
        left = [tokens - 1 for tokens in left]
        free, left = left.count(0), [tokens for tokens in left if tokens]
        played.now.append(played.now[-1] + seconds[number % len(seconds)])
        loop.stepped(played.now[-1])
        free += loop.users_due()
    raise AssertionError("the loop does not end")


@given(concurrencies, lifetimes, settles, windows, step_lengths, st.sampled_from(RAMPS))
@example(3, 1, 0.0, 0.05, [0.1], "burst")
def test_closed_loop_settles_before_window(concurrency, lifetime, settle, window_s, seconds, ramp_up):
    spread = ramp_up == "staggered"
    played = play(ClosedLoopPacer(concurrency, lifetime, settle, window_s, ramp_up=ramp_up), lifetime, seconds)
    assert max(played.in_flight) == concurrency, "never more than asked for, and all of them after one lifetime"
    assert set(played.in_flight[lifetime if spread else 0 : -1]) <= {concurrency}
    ranks = [PHASES.index(phase) for phase in played.phases]
    assert ranks == sorted(ranks) and played.phases[-1] == "over"
    assert played.phases.count("ramp") == (lifetime if spread else 0)
    opened, closed = played.loop.window
    first, last = played.now.index(opened), played.now.index(closed)
    settled = lifetime * (1 + settle if spread else max(1, settle))
    assert first == math.ceil(settled), "the first whole step after it"
    assert closed - opened >= window_s - 1e-9 and closed == played.now[-1]
    if not spread:
        periods, rest = divmod(last - first, lifetime + 1)
        assert (periods >= 2, rest) == (True, 0), "whole periods of the convoy, two at least"
        return
    half, whole = played.now[first + math.ceil(lifetime / 2)], played.now[min(first + lifetime, last)]
    enough = min(whole, max(half, opened + LONG_S))
    assert enough - 1e-9 <= closed and played.now[-2] < max(enough, opened + window_s), "as soon as it is long enough"


@given(concurrencies, lifetimes, st.integers(1, 80), st.floats(0, 1.5))
def test_users_start_evenly(concurrency, lifetime, requests, steps):
    started = play(ClosedLoopPacer(concurrency, lifetime, window_s=0.1), lifetime, [0.1]).started
    assert started[0] == 1
    even = [concurrency * step / lifetime for step in range(lifetime + 1)]
    assert all(abs(count - share) <= 1 for count, share in zip(started, even))
    assert set(started[lifetime:]) == {concurrency}
    played = play(ClosedLoopPacer(concurrency, lifetime, requests=requests), lifetime, [0.01])
    assert played.in_flight[0] == max(played.in_flight) == min(concurrency, requests)
    assert (played.loop.sent, played.loop.window, played.loop.next_request()) == (requests, None, None)
    loop = ClosedLoopPacer(concurrency, lifetime, requests=requests)
    assert [loop.next_request() for _ in range(requests + 1)] == [*range(requests), None]
    loop = ClosedLoopPacer(4, steps, window_s=1.0)
    assert loop.users_due() == 1
    loop.stepped(0.1)
    assert loop.users_due() >= (3 if steps <= 1 else 1), "one shorter than a step lives one"


@given(concurrencies, lifetimes, step_lengths, st.floats(1.0, 3.0), st.sampled_from(RAMPS))
def test_shared_window_ends_as_told(concurrency, lifetime, seconds, wanted, ramp_up):
    loop = ClosedLoopPacer(concurrency, lifetime, 1.0, 0.01, ramp_up=ramp_up, gated=True)
    period_s = (lifetime + 1) * max(seconds)  # at most
    begins = 2 * lifetime * max(seconds)
    loop.given = begins, (ends := begins + (wanted + 2) * period_s)
    played = play(loop, lifetime, seconds)
    opened, closed = loop.window
    assert opened >= begins and played.now[-1] >= ends > played.now[-2]
    if ramp_up == "staggered":
        assert closed == played.now[-1]
        return
    first, last = played.now.index(opened), played.now.index(closed)
    periods, rest = divmod(last - first, lifetime + 1)
    assert (periods >= 2, rest) == (True, 0)
    assert len(played.now) - 1 - last <= lifetime + 1, "no other whole period would have fitted"


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=30).map(sorted), st.lists(st.floats(0.0, 12.0)).map(sorted))
def test_schedule_never_sends_early(times, looks):
    schedule, sent = SchedulePacer(times), []
    for now in [*looks, 12.0]:
        for _ in range(schedule.users_due(now)):
            number = schedule.next_request()
            assert times[number] <= now
            assert schedule.sent_s(number, now) == times[number]
            sent.append(number)
        assert schedule.next_request() is None, "nothing else is due"
        assert schedule.next_s is None or schedule.next_s > now
        assert schedule.phase == ("over" if len(sent) == len(times) else "window"), "not before its last request"
    assert sent == list(range(len(times))) and schedule.window is None


@given(
    st.sampled_from(["none", "static", "dynamic"]), st.lists(st.floats(0, 10), min_size=1, max_size=30).map(sorted),
    st.integers(1, 8), st.floats(0.0, 2.0), st.floats(0.01, 3.0),
)  # fmt: skip
def test_batches_keep_arrival_order(batching, times, most, wait_s, lasts_s):
    free = 0.0

    def serve(starts, rows, tokens, first):
        nonlocal free
        count = len(rows)
        assert rows == [n % 7 for n in range(first, first + count)] and tokens == 1 + max(rows)
        assert 1 <= count <= (1 if batching == "none" else most)
        assert starts >= max(free, times[first + count - 1]), "all of it have come"
        if batching == "static":
            assert count == min(most, len(times) - first), "it is full, or the last"
        if batching == "dynamic":
            assert starts <= max(free, times[first] + wait_s), "and the first has not waited for longer"
            full = count == most
            assert full or first + count == len(times) or times[first + count] > starts, "who has come is in it"
        free = starts + lasts_s
        return starts, [starts + lasts_s / 2] * tokens, free

    way = {"batching": batching, "batch": most, "wait_s": wait_s}
    samples, steps = serve_batches(way, times, [(5, 1 + row) for row in range(7)], serve)
    assert [(row[0], row[1]) for row in samples] == [(n % 7, at) for n, at in enumerate(times)]
    assert sum(row[3] for row in steps) == sum(row[6] for row in samples)
    with pytest.raises(ValueError, match="'odd'"):
        serve_batches({"batching": "odd", "batch": 2, "wait_s": 0.0}, [0.0], [(1, 1)], None)


@given(concurrencies, st.integers(1, 9), st.integers(1, 80), st.randoms())
def test_user_thinks_between_turns(users, turns, requests, chance):
    """Whoever ends next; and the users begin at different turns."""
    loop = ClosedLoopPacer(users, 1.0, requests=requests, turns=turns, think_s=2.0)
    last = dict.fromkeys(range(users))
    dealt = []
    while (number := loop.next_request(last[user := chance.randrange(users)])) is not None:
        goes_on = last[user] is not None and loop.rest_s(last[user]) > 0
        assert number == last[user] + 1 if goes_on else number // turns not in {n // turns for n in dealt}
        last[user] = number
        dealt.append(number)
    assert len(dealt) == len({*dealt}) == requests
    begun = {n // turns: n % turns for n in reversed(dealt) if n - 1 not in dealt or n % turns == 0}
    assert sorted(begun) == list(range(len(begun))), "one after the other"
    assert all(turn == (number % turns if number < users else 0) for number, turn in begun.items())
    loop = ClosedLoopPacer(1, 1.0, turns=4, think_s=2.0)
    rests = [loop.rest_s(number) for number in range(4000)]
    assert set(rests[3::4]) == {0.0} and rests == [loop.rest_s(number) for number in range(4000)]
    thought = [rest for number, rest in enumerate(rests) if number % 4 != 3]
    assert sum(thought) / len(thought) == pytest.approx(2.0, rel=0.05) and min(thought) > 0
    assert sum(rest > 4.0 for rest in thought) / len(thought) == pytest.approx(math.exp(-2), rel=0.15), "exponential"
    assert not any(ClosedLoopPacer(1, 1.0, turns=turns).rest_s(5) for turns in (1, 4))
