"""Loads on a server by a clock of the test, over played connections: who sends what and when, what a run says, how it
ends. And results: tokens in bins, gaps in a histogram, parts of a load that several processes send."""

import json
import math
import socket
from array import array
from bisect import insort
from collections import Counter, deque
from contextlib import nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import example, given, strategies as st
from interfaces import small_workload

from pytest_slmserve.engines.endpoint import run_of
from pytest_slmserve.engines.loadgen import load_run
from pytest_slmserve.engines.loadgen.load_run import BIN_S, GROWTH, LEAST_S, LoadRun, gaps, parts_of, results_of
from pytest_slmserve.engines.loadgen.streams import Bodies, RequestStream
from pytest_slmserve.engines.worker.slm_pacing import ClosedLoopPacer

WORKLOAD = small_workload()
REST = {"began": 999.0, "failed": [], "unsent": [], "waited": [], "first_failure": None, "client_cpu_s": 0.5}
REST |= {"doubt_s": [0.0, 0.0], "on_schedule": False, "window": (1000.0, 1003.0)}
stamps = st.lists(st.floats(1000, 1003), min_size=1, max_size=30).map(sorted)
schedules = st.lists(st.floats(0, 100), min_size=1, max_size=50).map(sorted)

# Results


def row(times, usage=(None, None), tokens=None, sent=999.0, scheduled=None, finished=True, asked=99):
    stream = RequestStream(0, asked, b"", scheduled, sent=sent, cut=not finished)
    stream.answer.times, stream.answer.tokens = array("d", times), array("I", tokens or [1] * len(times))
    stream.answer.usage = usage
    return stream


def run(*parts, steps=(), **more):
    shared = {**REST, **more}
    told = [{**shared, **results_of(rows, shared["window"], steps)} for rows in parts]
    return run_of(json.loads(json.dumps(told)), WORKLOAD)


@given(st.lists(stamps, min_size=1, max_size=5))
def test_token_bins_cover_window(streams):
    found = run([row(times) for times in streams]).stream
    first = round((found.begins_s + 999.0) / BIN_S)
    wanted = Counter(int(at / BIN_S) - first for times in streams for at in times)
    assert {i: n for i, n in enumerate(found.tokens) if n} == wanted and min(wanted) == 0
    assert abs(len(found.tokens) - (1003.0 / BIN_S - first)) <= 1


@given(st.lists(st.floats(LEAST_S, 50), min_size=1, max_size=200), st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_gap_percentiles_are_accurate(values, share):
    counts = Counter()
    for value in values:
        counts.update(gaps([[0.0, value]], (0.0, 60.0))["counts"])
    rank = round(share * (len(values) - 1))
    index = [i for i in sorted(counts) for _ in range(counts[i])][rank]
    assert LEAST_S * GROWTH**index == pytest.approx(sorted(values)[rank], rel=0.0101)


@pytest.mark.parametrize(("rows", "per_chunk", "outputs"), [
    ([row([1001.0, 1002.0], (7, 4)), row([1001.0], finished=False)], 2.0, (4, 2)),
    ([row([1001.0, 1002.0], (7, 4)), row([1001.0], finished=False, asked=1)], 2.0, (4, 1)),
    ([row([1001.0, 1002.0], tokens=[1, 3])], None, (4,)),  # without any usage nobody knows
])  # fmt: skip
def test_usage_reveals_hidden_tokens(rows, per_chunk, outputs):
    """Two tokens a chunk by the server's count: so it is with those that were cut off, too, up to those requested."""
    found = run(rows)
    assert (found.stream.tokens_per_chunk, found.samples.output_tokens) == (per_chunk, outputs)
    assert sum(found.stream.tokens) == pytest.approx(sum(outputs), abs=0.01)


@given(st.lists(stamps, min_size=2, max_size=6), st.booleans())
def test_split_load_equals_whole_load(streams, on_schedule):
    sent = [(times, float(i)) for i, times in enumerate(streams)]
    rows = [row(times, (3, len(times)), sent=at, scheduled=at if on_schedule else None) for times, at in sent]
    found = partial(run, window=(1000.5, 1002.5), steps=[(1000.5, 1001.5), (1002.0, 1002.5)], on_schedule=on_schedule)
    whole, both = found(rows), found(rows[::2], rows[1::2])
    assert both.samples == whole.samples and both.stream.tokens == whole.stream.tokens
    for one, other in zip((both.stream.gaps, *both.stream.step_gaps), (whole.stream.gaps, *whole.stream.step_gaps)):
        assert one == {**other, "sum_s": pytest.approx(other["sum_s"], abs=1e-5)}
    assert (both.stream.scheduled_s, both.stream.tokens_per_chunk) == (whole.stream.scheduled_s, 1.0)
    assert (both.stream.cpu_s, whole.stream.cpu_s, len(whole.stream.step_gaps)) == (1.0, 0.5, 2)


@pytest.mark.parametrize(("parts", "on_schedule", "scheduled"), [(1, True, ()), (2, True, ()), (2, False, None)])
def test_empty_load_gives_empty_run(parts, on_schedule, scheduled):
    found = run(*[[]] * parts, on_schedule=on_schedule)
    assert (len(found.samples), found.stream.tokens, found.stream.gaps["counts"]) == (0, (), {})
    assert found.stream.scheduled_s == scheduled
    lost = [[i, float(9 - i), None if i % 2 else 1.5, 20.0, "timeout"] for i in range(5)]
    told = [{**REST, **results_of([], (0.0, 1.0)), "failed": rows} for rows in (lost[:2], lost[2:])]
    found = run_of(json.loads(json.dumps(told)), WORKLOAD)
    assert (found.failures, found.failed.request, found.failed.scheduled_s) == (5, (4, 3, 2, 1, 0), None)
    rows = [row([5.0, 6.0], (7, 2), sent=2.0), row([4.0], sent=1.0, finished=False), row([], sent=3.0, finished=False)]
    samples = run(rows, began=0.0).samples
    stamped = [*zip(samples.sent_s, samples.first_token_s, samples.last_token_s)]
    assert stamped == [(1.0, 4.0, 4.0), (2.0, 5.0, 6.0), (3.0, None, None)]
    assert samples.prompt_tokens == (16, 7, 16), "by the workload if it was cut off before the server's count"
    assert (samples.output_tokens, samples.finished) == ((1, 2, 0), (False, True, False))


# Which request is due


def of_schedule(schedule, window=None, most=None):
    load = {"kind": "open_loop", "schedule": schedule, "window": window, "most": most}
    return LoadRun({"load": load}, None, [1], SimpleNamespace(timeout_s=1.0, in_flight={}, read=None), None)


@given(schedules, st.none() | st.integers(1, 5), st.lists(st.tuples(st.floats(0, 300), st.booleans()), max_size=60))
@example([0.0] * 1200, None, [])
@example([0.0] * 1200, 1100, [])
def test_scheduled_request_is_due_once(schedule, most, looks):
    loop, sent, free = of_schedule(schedule, None, most), [], [0.0] * (most or len(schedule))
    for now, one_ends in [*sorted(looks), (300.0, False)]:
        if most and one_ends and len(sent) > len(free) - most:
            free.append(now)
            loop.release(now)
        sent += loop.due(now)
        nobody_knows = len(sent) in (len(schedule), len(free))  # when the next is due: all places are taken
        assert nobody_knows or schedule[len(sent)] > now
        assert loop.next_due == (math.inf if nobody_knows else schedule[len(sent)])
    assert sent == [(i, max(schedule[i], free[i])) for i in range(len(sent))]
    assert loop.waited_s == ([at - schedule[number] for number, at in sent] if most else [])
    assert loop.loop.phase == ("over" if len(sent) == len(schedule) else "window")
    busiest = max(sum(at <= other <= at + load_run.AHEAD_S for other in schedule) for at in {*schedule})
    assert of_schedule(schedule, None, most).connections == min(busiest, most or busiest, 1000)


# Parts of a load


@given(schedules, st.integers(1, 40), st.integers(1, 6))
def test_split_load_sends_every_request(schedule, users, processes):
    number = len(schedule)
    scheduled = {"kind": "open_loop", "schedule": schedule, "window": None}
    for load, name in (({"kind": "closed_loop", "requests": number}, "concurrency"), (scheduled, "most")):
        parts = parts_of({**load, name: users}, processes)
        assert len(parts) == min(processes, number, users)
        counts = [part["requests"] if "requests" in part else len(part["schedule"]) for part in parts]
        numbers = [[part["part"][0] + part["part"][1] * i for i in range(sent)] for part, sent in zip(parts, counts)]
        assert sorted(each for part in numbers for each in part) == list(range(number))
        shares = [part[name] for part in parts]
        assert sum(shares) == users and max(shares) - min(shares) <= 1 and min(shares) >= 1
    assert parts_of(scheduled, 0) == [{**scheduled, "part": [0, 1]}], "one at least"
    assert len(parts_of({"concurrency": users}, processes)) == min(users, processes)
    times = {n: at for part, of in zip(parts, numbers) for n, at in zip(of, part["schedule"], strict=True)}
    assert times == dict(enumerate(schedule))


# A run, on connections whose clock is the test's


class Played:
    """A server and the connections to it. A request gets its first token `ttft_s` after it was sent and each further
    one `itl_s` later; `fault` names requests, by their place in the workload, that fail, or never hear of an end.

    now: the clock, which goes on with each look. counts: tokens by the server's count; None: as many as were asked for;
    0: it has none. unread: pieces beside each that is read. most: the largest number in flight so far.
    """

    ttft_s, itl_s, fault, timeout_s, now, counts, unread, one_piece = 0.02, 0.005, {}, 20.0, 50.0, None, 0, False

    def __init__(self, **planted):
        vars(self).update(planted)
        self.in_flight, self.ended, self.coming, self.order, self.most = {}, deque(), [], count(), 0
        self.sent, self.doubt_s, self.most_doubt_s, self.heard = [], 0.25, 0.125, 0.0

    def begin_anew(self, number):
        self.opened, self.pieces, self.pieces_read, self.tokens_read = number, 0, 0, 0
        self.now += 1.0  # which takes its time

    def send(self, stream):
        stream.asked = stream.sent = self.now
        self.in_flight[stream] = None
        self.sent.append(stream)
        self.most = max(self.most, len(self.in_flight))
        for token in range(stream.wanted):
            at = self.now + self.ttft_s + self.itl_s * (stream.wanted - 1 if self.one_piece else token)
            insort(self.coming, (at, next(self.order), stream, token + 1))

    def turn(self, wait_s):
        self.now = min(self.now + wait_s, self.coming[0][0] if self.coming else math.inf) + 1e-6
        while self.coming and self.coming[0][0] <= self.now:
            at, _, stream, token = self.coming.pop(0)
            fault = self.fault.get(stream.index)
            if stream in self.in_flight and fault is None:
                self.arrive(stream, at, token)
            elif stream in self.in_flight and fault != "hangs":
                self.fail(stream, at, fault)

    def arrive(self, stream, at, token):
        self.heard = stream.read_until = at
        self.pieces += 1 + self.unread
        self.pieces_read += 1
        self.tokens_read += 1
        if not self.one_piece or token == stream.wanted:
            stream.answer.times.append(at)
            stream.answer.tokens.append(1)
        if token == stream.wanted:
            stream.answer.usage = 3, stream.wanted if self.counts is None else self.counts or None
            self.end(stream)

    def fail(self, stream, at, kind):
        stream.failure, stream.failed = (kind, f"{kind} of {stream.index}"), at
        self.end(stream)

    def end(self, stream):
        del self.in_flight[stream]
        self.ended.append(stream)

    def read(self, stream):
        pass

    def expire(self, now):
        for stream in [each for each in self.in_flight if each.asked + self.timeout_s <= now]:
            self.fail(stream, now, "timeout")

    def cut_off(self):
        """One was never sent: of it nothing is told."""
        cut = list(self.in_flight)
        for stream in cut:
            stream.cut = True
        self.in_flight.clear()
        return [*cut, RequestStream(0, 8, b"")]


def serve(patch, load, lengths=(8,) * 4, at=None, window_s=None, listens=True, bounded=True, **played):
    """Serve a load on played connections, by their clock: what came of it, what was played, the numbers of the bodies
    that were asked for, and what was said to a parent, with its time, who tells a run of several its window."""
    played, bodies, anew, said, answers = Played(**played), [], [], [], deque()

    def say(**message):
        said.append((played.now, message))
        if message["event"] == "settled":
            answers.append({"op": "open", "window": [played.now + 0.5, played.now + window_s]})

    def hear(wait_s):
        assert wait_s == 0.0, "streams would be held up"
        return answers.popleft() if answers else None

    asked = SimpleNamespace(begin_anew=lambda: anew.append(1), of=lambda number: bodies.append(number) or b"body")
    clock = SimpleNamespace(monotonic=lambda: played.now, process_time=lambda: played.now / 4)
    patch.setattr(load_run, "time", clock)
    patch.setattr(load_run, "gc", Mock())
    patch.setattr(load_run, "select", SimpleNamespace(select=lambda r, w, x, wait_s: ([], w if listens else [], [])))
    message = {"load": load} | ({} if at is None else {"at": at})
    lines = SimpleNamespace(end=None, say=say, hear=hear)
    done = LoadRun(message, asked, lengths, played, lines, bounded).result()
    json.dumps(done)
    noted = [stream for stream in played.sent if not hasattr(stream.answer, "response")]
    assert anew == [1] and not any(stream.body for stream in noted), "what was sent is let go"
    sent = [stream.sent for stream in played.sent]
    return SimpleNamespace(**done, sent=sent, played=played, bodies=bodies, said=said)


def said_of(done, event):
    return [(at, message) for at, message in done.said if message["event"] == event]


@pytest.fixture
def play(monkeypatch):
    return partial(serve, monkeypatch)


def closed(concurrency, requests=None, window_s=0.4, ramp_up="staggered", settle=1.0, **more):
    load = {"kind": "closed_loop", "concurrency": concurrency, "window_s": window_s, "settle_lifetimes": settle}
    return load | {"requests": requests, "ramp_up": ramp_up, **more}


def opened(schedule, window=None, **more):
    return {"kind": "open_loop", "schedule": schedule, "window": window, **more}


@pytest.mark.parametrize("part", [(0, 1), (1, 3)])
def test_turn_waits_for_previous_turn(play, part):
    done = play(closed(2, requests=18, turns=3, think_s=0.5, part=part), lengths=(8,) * 30)
    at = dict(zip(done.bodies, done.played.sent))
    assert len(at) == 18 and {number // 3 % part[1] for number in at} == {part[0]}
    followed = [(at[n], at[n + 1]) for n in at if (n + 1) % 3 and n + 1 in at]
    assert len(followed) >= 10
    for before, after in followed:
        rest = ClosedLoopPacer(2, 1.0, turns=3, think_s=0.5).rest_s(done.bodies[done.played.sent.index(before)])
        assert after.sent - before.read_until == pytest.approx(rest, abs=1e-4)


@pytest.mark.parametrize("concurrency", [1, 3, 40])
def test_counted_load_sends_requests_once(play, concurrency):
    done = play(closed(concurrency, requests=25))
    assert done.bodies == list(range(25)) and [s.index for s in done.played.sent] == [i % 4 for i in range(25)]
    assert (done.played.most, done.played.opened) == (min(concurrency, 25), concurrency)
    assert len(done.samples) == 25 and all(row[-3] for row in done.samples)
    lifetime_s, rounds = 0.02 + 7 * 0.005, math.ceil(25 / min(concurrency, 25))
    assert done.window == (done.began, pytest.approx(done.began + rounds * lifetime_s, abs=1e-3))
    assert (done.event, done.began, done.on_schedule, done.first_failure) == ("done", 51.0, False, None)
    assert (done.failed, done.unsent, done.waited, len(done.gaps)) == ([], [], [], 1)
    assert (done.told, done.chunks, sum(done.bins.values())) == (200, 200, 200)
    assert done.doubt_s == [0.25 / 200, 0.125] and done.client_cpu_s == pytest.approx((done.played.now - 50) / 4)
    part = play(closed(concurrency, requests=10, part=[1, 2]))
    assert part.bodies == [*range(1, 20, 2)] and [s.index for s in part.played.sent] == [1, 3] * 5


@given(st.integers(1, 9), st.integers(2, 12), st.floats(0.2, 1.0), st.sampled_from([1e-3, 7e-3]), st.floats(0, 1e4))
def test_window_holds_its_concurrency(concurrency, tokens, window_s, itl_s, now):
    with pytest.MonkeyPatch.context() as patch:
        load = closed(concurrency, window_s=window_s)
        done = serve(patch, load, (tokens,) * 4, ttft_s=0.01, itl_s=itl_s, now=now)
    opens, closes = done.window
    assert window_s <= closes - opens <= window_s + 0.01 + 2 * itl_s and done.played.most == concurrency
    assert sum(not row[-3] for row in done.samples) <= concurrency and done.bodies == list(range(len(done.bodies)))
    assert all(row[1] > 0 for row in done.samples) and len(done.samples) == len(done.sent)
    ends = [row[4] for row in done.samples if row[-3]]
    begun_s, ended_s = (sum(closes - min(max(at, opens), closes) for at in times) for times in (done.sent, ends))
    held = (begun_s - ended_s) / (closes - opens)
    assert 0.9 * concurrency <= held <= concurrency + 1e-9, "the next one is sent soon after the last one has ended"
    assert opens - done.began >= 2 * tokens * itl_s * 0.5, "a lifetime of the ramp, and one of settling"


@pytest.mark.parametrize(("ttft_s", "most", "late_s"), [(0.001, 1, 0.005), (3.0, 2, 0.0)])
def test_schedule_ignores_slow_server(play, ttft_s, most, late_s):
    schedule = [0.002 * i for i in range(100)]
    done = play(opened(schedule, (0.05, 0.15)), ttft_s=ttft_s)
    assert [at - done.began for at in done.sent] == pytest.approx(schedule, abs=1e-4)
    assert [row[-1] - done.began for row in sorted(done.samples, key=lambda row: row[1])] == pytest.approx(schedule)
    assert done.on_schedule and done.window == pytest.approx((done.began + 0.05, done.began + 0.15))
    assert (done.waited, len(done.samples)) == ([], 100), "all are served to their end"
    # Twenty a second, each of which lives for 55 ms: where only one may be in flight it is late by more and more.
    done = play(opened([0.05 * i for i in range(20)], most=most))
    assert (done.played.most, done.played.opened, done.waited[0]) == (most, most, 0)
    assert done.waited == pytest.approx([late_s * i for i in range(20)], abs=1e-3 if late_s else 0)


def test_ramp_step_gaps_stay_apart(play):
    done = play(opened([0.1 * i for i in range(20)], (0.5, 2.0), steps=[[0.5, 1.0], [1.0, 2.0]]))
    assert [sum(each["counts"].values()) for each in done.gaps] == [15 * 7, 5 * 7, 10 * 7]
    found = gaps([[0.0, 1.0, 2.0, 3.0, 3.00001], [2.5], []], (1.0, 3.5))
    assert found["counts"] == {-1: 1, 925: 2} and LEAST_S * GROWTH**925 <= 1.0 < LEAST_S * GROWTH**926
    assert found["sum_s"] == pytest.approx(2.00001)
    loop, endless = of_schedule([0.0], (2.0, 3.0)), of_schedule([0.0])
    assert [loop.phase(at) for at in (0.0, 2.0, 3.0)] == ["settle", "window", "over"]
    assert endless.due(5.0) and endless.phase(5.0) == "window", "until the last has ended"


def test_load_run_uses_given_window(play):
    done = play(closed(4), at=60.0, window_s=1.5)
    assert 0 <= done.began - 60.0 < 1e-3
    [(settled, _)] = said_of(done, "settled")
    assert settled - done.began >= 2 * 8 * 0.005
    assert done.window == (pytest.approx(settled + 0.5, abs=0.01), pytest.approx(settled + 1.5, abs=0.01))
    counted = play(closed(4, requests=12), at=60.0)
    assert said_of(counted, "settled") == [] and len(counted.samples) == 12 and counted.began >= 60.0
    for counts in (None, 0):
        done = play(closed(4), one_piece=True, counts=counts)
        opens, closes = done.window
        assert 0.4 <= closes - opens < 0.6 and 2 * 0.05 < opens - done.began < 1.0, counts


@pytest.mark.parametrize("unread", [0, 1])
def test_progress_comes_twice_per_second(play, unread):
    done = play(closed(4, window_s=2.6), unread=unread)
    told = said_of(done, "progress")
    assert [at - done.began for at, _ in told] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5], abs=0.02)
    for at, message in told[1:]:
        assert message["tokens_per_s"] == pytest.approx((1 + unread) * 4 * 8 / 0.055, rel=0.15)
        assert message["elapsed_s"] == pytest.approx(at - done.began, abs=1e-3) and message["in_flight"] == 4
        assert message["done"] == pytest.approx(sum(row[4] <= at for row in done.samples if row[-3]), abs=1)
    assert {message["phase"] for _, message in told} <= {"settle", "window"}
    deaf = play(closed(4, window_s=2.6), listens=False)
    assert deaf.said == [], "who does not listen holds up no request"
    assert len(deaf.samples) == pytest.approx(len(done.samples), abs=1)


# Requests that fail


def test_failing_load_is_given_up(play):
    done = play(closed(3, requests=100_000), fault=dict.fromkeys(range(4), "HTTP 500"))
    assert not any(row[-3] for row in done.samples) and done.first_failure == "HTTP 500 of 0"
    assert [kind for *_, kind in done.failed] == ["HTTP 500"] * 6
    assert all(done.began <= sent < ended for _, sent, _, ended, _ in done.failed)
    # One has failed, so it is no wait for a slow answer; a schedule goes on, for its requests come whatever is.
    done = play(closed(3, requests=3), (8,) * 3, fault={1: "hangs", 2: "hangs"}, timeout_s=0.8)
    assert [(row[0], row[4]) for row in done.failed] == [(1, "timeout"), (2, "timeout")] and len(done.samples) == 1
    assert all(0.8 <= ended - sent <= 0.8 + load_run.PROGRESS_S + 0.01 for _, sent, _, ended, _ in done.failed)
    hangs = {0: "HTTP 500", **dict.fromkeys(range(1, 200), "hangs")}
    done = play(closed(2, requests=1000), (1,) * 200, fault=hangs, timeout_s=3.0)
    assert len(done.failed) <= 3 and done.played.now - done.began < 7
    done = play(opened([4.0 * i for i in range(4)]), (1,) * 4, fault={0: "HTTP 500", 1: "hangs"}, timeout_s=3.0)
    assert [row[0] for row in done.failed] == [0, 1] and len(done.samples) == 2
    # One of `share` fails: of four hundred requests twenty, or one too many; of forty five.
    for requests, share, given_up in ((400, 20, False), (400, 19, True), (40, 8, False)):
        done = play(closed(2, requests=requests), (1,) * share, fault={share - 1: "broke off"})
        assert (len(done.samples) + len(done.failed) < requests) == given_up, (requests, share)
        assert len(done.failed) == requests // share or given_up, (requests, share)


@pytest.mark.parametrize(("number", "faulty", "failed", "served"), [
    (500, range(10), 6, 0),  # given up: what was in flight then is cut off, and the rest is told, too
    (30, [9], 3, 27),
])  # fmt: skip
def test_lost_requests_keep_due_times(play, number, faulty, failed, served):
    schedule = [0.02 * i for i in range(number)]
    done = play(opened(schedule, (0.0, 0.02 * number)), (1,) * 10, fault=dict.fromkeys(faulty, "HTTP 500"))
    asked = sorted([*(row[2] for row in done.failed), *(row[-1] for row in done.samples), *done.unsent])
    assert [at - done.began for at in asked] == pytest.approx(schedule, abs=1e-6)
    assert len(done.failed) == failed and served <= len(done.samples) <= served + 1
    for index, sent, due, ended, kind in done.failed:
        assert (index in faulty, kind) == (True, "HTTP 500") and due <= sent <= ended
        assert (due - done.began) / 0.02 % 10 == pytest.approx(index)


@pytest.mark.parametrize(("asked", "lost"), [(8, 0), (7, 4)])
def test_surplus_tokens_fail_request(play, asked, lost):
    done = play(closed(2, requests=4), (asked,) * 4, counts=8)
    assert [row[4] for row in done.failed] == ["malformed"] * lost
    assert done.first_failure is None or {"8", "7"} <= set(done.first_failure.split())
    assert all(row[3] == stream.read_until for row, stream in zip(done.failed, done.played.sent))
    for bounded, most in ((True, 16 * 8 + 64), (False, 1 << 20)):
        done = play(closed(2, requests=4), (8,) * 4, bounded=bounded)
        assert {stream.answer._most for stream in done.played.sent} == {most}


@pytest.mark.parametrize("ramp_up", ["staggered", "burst"])
def test_stalled_load_still_has_window(play, monkeypatch, ramp_up):
    """Of requests that hang for ever no token is a step: lifetimes of four seconds pass, the ramp's if they start one
    after the other, that of settling, and one more."""
    monkeypatch.setattr(Played, "expire", lambda self, now: None)
    hangs = dict.fromkeys(range(2), "hangs")
    done = play(closed(2, ramp_up=ramp_up, settle=1.0, window_s=1.0), (8,) * 2, fault=hangs, timeout_s=4.0)
    opens, closes = done.window
    passes = 12 if ramp_up == "staggered" else 8
    assert passes <= opens - done.began < passes + 1 and 1.0 + 4.0 <= closes - opens < 1.0 + 4.0 + 1
    assert [row[4] for row in done.samples] == [None, None]


# Its messages


@pytest.fixture
def client(monkeypatch):
    """Runs the process's loop in this one, over messages that are all there: `client(message, ...)` is what it said."""

    def run(*messages):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
            ours.shutdown(socket.SHUT_WR)
            monkeypatch.setattr(load_run.sys, "argv", ["load_run.py", str(theirs.fileno()), "1"])
            monkeypatch.setattr(load_run, "socket", SimpleNamespace(socket=lambda fileno: theirs))
            monkeypatch.setattr(load_run, "guarded", lambda parent: nullcontext())
            load_run._main()
            theirs.shutdown(socket.SHUT_WR)
            with ours.makefile() as lines:
                return [json.loads(line) for line in lines]

    return run


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of sockets that end with a process
def test_load_client_serves_loads_successively(client, monkeypatch):
    made = []
    monkeypatch.setattr(load_run, "Bodies", lambda to, *given: made.append((to.port, *given)) or Bodies(to, *given))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # at which nobody listens
    greeting = {"url": f"http://127.0.0.1:{port}/v1/completions", "headers": {}, "timeout_s": 1.0}
    load, run = {"op": "load", "bodies": ["<>"], "output_tokens": [8]}, {"op": "run", "load": closed(2)}
    marked = {**load, "mark": "<>", "rounds": ["1", "2"]}
    late = {"op": "open", "window": [0, 1]}  # of a run that ended before it heard of it
    said = client(greeting, load, run, late, marked, run, {"op": "close"}, run)
    assert [message["event"] for message in said] == ["ready", "loaded", "done", "loaded", "done"]
    assert made == [(port, ["<>"], "", ()), (port, ["<>"], "<>", ["1", "2"])]
    for done in (said[2], said[4]):
        assert len(done["failed"]) >= 6 and done["failed"][0][-1] == "no connection"
        assert min(sent for _, sent, *_ in done["failed"]) >= done["began"], "when it would have been sent"
    assert client() == [] and [each["event"] for each in client(greeting)] == ["ready"]
    for url, headers in (("ftp://x/", {}), ("http://h/", {"A": "b\r\nsecret: d"})):
        [said] = client({"url": url, "headers": headers, "timeout_s": 1.0}, {"op": "close"})
        assert said["event"] == "failed" and said["cause"] and "secret" not in said["cause"], url
