"""Objectives of a user: the share of the requests that keep an SLO, its interval, and what a verdict on it tells."""

from dataclasses import replace

import pytest
from facts import tells
from refusals import refused
from scipy.stats import binomtest
from strategies import FAILS, INCONCLUSIVE, PASSES, changed, measurement, point as planted

from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import Inconclusive
from pytest_slmserve.schema.records import Samples


def point(load, *late, requests=100, failures=0):
    """A repeat for each number of `late` requests: their first token takes 0.9 s, that of the others 0.1 s."""
    groups, sent, n = [], [*map(float, range(requests))], requests
    for repeat, number in enumerate(late):
        first, ended = [at + (0.9 if at < number else 0.1) for at in sent], [at + 1 for at in sent]
        samples = Samples(range(n), sent, sent, first, ended, (8,) * n, (11,) * n, (True,) * n)
        facts = {"samples": samples, "window_s": (0.5, n + 0.5), "failures": failures}
        groups.append((changed(measurement(load, repeat=repeat), "run", **facts),))
    return replace(planted(load, [100.0] * len(groups)), used=tuple(groups))


@pytest.mark.parametrize(("late", "state"), [(0, PASSES), (2, INCONCLUSIVE), (5, INCONCLUSIVE), (12, FAILS)])
def test_slo_share_has_wilson_interval(late, state):
    verdict = point(16, late).meets("ttft:200ms")
    by_scipy = binomtest(100 - late, 100).proportion_ci(method="wilson")
    assert (verdict.low, verdict.high) == pytest.approx((by_scipy.low, by_scipy.high), abs=1e-9)
    assert (verdict.state, verdict.value, verdict.threshold, verdict.n) == (state, 1 - late / 100, 0.95, 100)
    assert verdict.claim == "slo ttft:200ms" and verdict.subject == "opt-1.3b at concurrency 16"
    if state is INCONCLUSIVE:
        with pytest.raises(Inconclusive):
            assert verdict


def test_differing_windows_widen_slo_interval():
    together, apart = point(16, 4, 4), point(16, 0, 8)
    alike, differ = (each.meets("ttft:200ms", share=0.9) for each in (together, apart))
    assert alike.value == differ.value == 0.96 and differ.high - differ.low > 2 * (alike.high - alike.low)
    assert (alike.state, differ.state, alike.n) == (PASSES, INCONCLUSIVE, 200)
    failed = point(16, 0, failures=50).meets("ttft:200ms")
    assert (failed.state, failed.n) == (FAILS, 150) and failed.value == pytest.approx(2 / 3)
    assert tells(failed.why, "fewer than 95%"), "a failed request has no first token at all"
    broken = point(16, 30).meets("e2e:2s,ttft:200ms,tpot:300ms", share=0.8)
    assert broken.state is FAILS and tells(broken.why, "TTFT", "900 ms", "350% above", "80%", "of 100 requests")
    assert tells(point(16, 3).meets("ttft:200ms").why, "50% below", "too few"), "noise leaves it open"
    assert "limit" not in point(16, 0).meets("ttft:200ms").why
    for share in (0, 1, 1.5, -0.1, True, "95%", None):
        with refused(repr(share), hint="share=0.99"):
            point(16, 0).meets("ttft:200ms", share=share)
        with refused("soon"):
            point(16, 0).meets("ttft:soon")
    told = []
    points = (replace(point(load, late), told=told.append) for load, late in ((8, 0), (16, 0), (32, 40)))
    curve = Curve(subject="opt-1.3b", points=tuple(points))
    kept, broken, unknown = (curve.meets("ttft:200ms", at=load) for load in (16, None, 64))
    assert told == [kept, broken, unknown] and [v.state for v in told] == [PASSES, FAILS, INCONCLUSIVE]
    assert all(tells(v.why, "kept up to concurrency 16") for v in told)
    assert (broken.subject, broken.again, unknown.again) == ("opt-1.3b at concurrency 32", (32,), (64,))
    never = Curve(subject="opt-1.3b", points=(point(8, 40),)).meets("ttft:200ms")
    assert never.state is FAILS and tells(never.why, "kept for sure at no load")
