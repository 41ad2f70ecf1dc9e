"""Which request is sent when, and how several processes share a load."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_slmserve.engines.loadgen.load_run import AHEAD_S, LoadRun, parts_of


def of_schedule(schedule, window=None, most=None):
    load = {"kind": "open_loop", "schedule": schedule, "window": window, "most": most}
    return LoadRun({"load": load}, None, [1], SimpleNamespace(timeout_s=1.0, in_flight={}, read=None), None)


schedules = st.lists(st.floats(0, 100), min_size=1, max_size=50).map(sorted)


@given(schedules, st.lists(st.floats(0, 100), max_size=20).map(sorted))
def test_each_request_is_due_once_and_never_before_its_time(schedule, looks):
    loop, sent = of_schedule(schedule, (0.0, 1.0)), []
    for now in [*looks, 100.0]:
        due = loop.due(now)
        assert all(schedule[number] == at <= now for number, at in due)
        assert loop.next_due > now
        sent += [number for number, _ in due]
    assert sent == list(range(len(schedule))) and loop.waited_s == []


@given(schedules, st.integers(1, 5), st.lists(st.tuples(st.floats(0, 300), st.booleans()), max_size=60))
def test_a_request_that_is_held_back_is_due_when_another_has_ended(schedule, most, looks):
    """First come, first served: none before its time, none while as many as may be are in flight, none later."""
    loop, sent, free = of_schedule(schedule, None, most), [], [0.0] * most
    for now, one_ends in sorted(looks):
        if one_ends and loop.loop.sent > len(free) - most:
            free.append(now)
            loop.release(now)
        sent += loop.due(now)
        assert loop.loop.sent == len(schedule) or loop.loop.sent == len(free) or schedule[loop.loop.sent] > now
    assert [number for number, _ in sent] == list(range(len(sent)))
    assert [at for _, at in sent] == [max(schedule[i], free[i]) for i in range(len(sent))]
    assert loop.waited_s == [at - schedule[number] for number, at in sent]


def test_nobody_knows_when_the_next_is_due_while_all_places_are_taken():
    loop = of_schedule([0.0, 1.0], None, 1)
    assert loop.due(5.0) == [(0, 0.0)] and loop.next_due == float("inf")
    loop.release(7.0)
    assert loop.next_due == 1.0 and loop.due(7.0) == [(1, 7.0)] and loop.next_due == float("inf")
    assert loop.loop.phase == "over"


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 6))
def test_parts_of_a_job_share_the_places(requests, most, processes):
    load = {"kind": "open_loop", "schedule": [0.0] * requests, "window": None, "most": most}
    parts = parts_of(load, processes)
    assert len(parts) == min(processes, requests, most) and sum(part["most"] for part in parts) == most


@given(schedules, st.none() | st.integers(1, 5))
def test_connections_wait_for_the_most_requests_within_a_second(schedule, most):
    busiest = max(sum(at <= other <= at + AHEAD_S for other in schedule) for at in schedule)
    assert of_schedule(schedule, None, most).connections == min(busiest, most or busiest)


def test_the_phases_of_a_schedule():
    loop = of_schedule([0.0], (2.0, 3.0))
    assert [loop.phase(at) for at in (0.0, 2.0, 3.0)] == ["settle", "window", "over"]


def numbers(load):
    index, count = load["part"]
    sent = load["requests"] if load["kind"] != "open_loop" else len(load["schedule"])
    return [index + count * i for i in range(sent)]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 6))
def test_parts_send_every_request_once_and_share_the_users(requests, concurrency, processes):
    parts = parts_of({"kind": "closed_loop", "requests": requests, "concurrency": concurrency}, processes)
    assert len(parts) == min(processes, requests, concurrency)
    assert sorted(n for part in parts for n in numbers(part)) == list(range(requests))
    users = [part["concurrency"] for part in parts]
    assert sum(users) == concurrency and max(users) - min(users) <= 1 and min(users) >= 1


@given(schedules, st.integers(1, 6))
def test_parts_of_a_schedule_keep_each_requests_time(schedule, processes):
    parts = parts_of({"kind": "open_loop", "schedule": schedule, "window": [0, 1]}, processes)
    found = {n: at for part in parts for n, at in zip(numbers(part), part["schedule"])}
    assert [found[n] for n in sorted(found)] == schedule


@pytest.mark.parametrize("load", [{"schedule": [0.0] * 3}, {"requests": 3, "concurrency": 3}, {"concurrency": 3}])
def test_no_part_is_without_work(load):
    assert len(parts_of(load, 8)) == 3
