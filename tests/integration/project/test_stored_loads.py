"""Loads: what a record keeps of them, in every format, and what a key is made of."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from strategies import loads

from pytest_slmserve.archive.codec import converted
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop, is_job, is_steady, load_facts, load_of

WINDOW = {"rate": 4.0, "settle_s": 5.0, "window_s": 10.0, "arrivals": "gamma 1, 4/s, seed 0"}
STORED = [  # as archives hold them, and their keys with them
    (
        {"kind": "closed_loop", "concurrency": 8, "window_s": 5.0, "settle_lifetimes": 1.0, "requests": None},
        ClosedLoop(8),
    ),
    ({"kind": "job", "requests": 500, "rate": None, "seed": 0}, OpenLoop(requests=500)),
    ({"kind": "job", "requests": 500, "rate": 10, "seed": 3}, OpenLoop(requests=500, rate=10, seed=3)),
    (
        {"kind": "job", "requests": 9, "rate": 2.0, "seed": 0, "burstiness": None, "max_concurrency": 4},
        OpenLoop(requests=9, rate=2.0, burstiness=math.inf, max_concurrency=4),
    ),
    ({"kind": "open_loop", **WINDOW}, OpenLoop(**WINDOW)),
    ({"kind": "open_loop", **WINDOW, "steps": [[4.0, 15.0]]}, OpenLoop(**WINDOW, steps=((4.0, 15.0),))),
]


@pytest.mark.parametrize(("facts", "load"), STORED)
def test_a_stored_load_is_read_and_its_key_is_that_of_its_facts(facts, load):
    ramp_up = {"ramp_up": "staggered"} if facts["kind"] == "closed_loop" else {}
    assert load_of(facts, converted) == load
    assert json.dumps(load_facts(load), sort_keys=True) == json.dumps(facts | ramp_up, sort_keys=True)


def test_an_unknown_kind_of_load_is_refused():
    with pytest.raises(ValueError, match="unknown kind of load 'wave'"):
        load_of({"kind": "wave", "requests": 16}, converted)


@given(loads())
def test_every_load_comes_back_from_its_facts(load):
    facts = json.loads(json.dumps(load_facts(load), allow_nan=False))
    assert load_of(facts, converted) == load and load_facts(load_of(facts, converted)) == load_facts(load)


@given(loads(), loads())
def test_loads_that_differ_have_other_facts(one, other):
    assert (load_facts(one) == load_facts(other)) is (one == other)


def test_a_schedule_is_no_part_of_what_is_kept():
    load = OpenLoop(**WINDOW)
    assert load_facts(replace(load, schedule_s=(1.0, 2.0))) == load_facts(load)


@pytest.mark.parametrize(
    ("load", "title", "judged_by", "steady", "job"),
    [
        (ClosedLoop(64), "concurrency 64", "ended", True, False),
        (ClosedLoop(64, requests=500), "concurrency 64, 500 requests", "ended", False, False),
        (OpenLoop(**WINDOW), "4 requests/s", "sent", False, False),
        (OpenLoop(requests=500), "500 requests, all at once", "ended", False, True),
        (
            OpenLoop(requests=1500, rate=2.5, seed=1, burstiness=0.5, max_concurrency=64),
            "1,500 requests, 2.5/s, seed 1, burstiness 0.5, at most 64 concurrent requests",
            "ended",
            False,
            True,
        ),
        (
            OpenLoop(requests=5, rate=1, burstiness=math.inf),
            "5 requests, 1/s, seed 0, at constant gaps",
            "ended",
            False,
            True,
        ),
    ],
)
def test_what_a_load_says_of_itself(load, title, judged_by, steady, job):
    assert (load.title, load.judged_by, is_steady(load), is_job(load)) == (title, judged_by, steady, job)
