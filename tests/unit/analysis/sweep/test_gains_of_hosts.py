"""Intervals of gains hold from host to host: what two hosts with the same GPU measured, from the committed archives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from scripts import BASELINES, needs_checkout

from pytest_slmserve.analysis.claims.table import stored_curves
from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.sweep.plateau import Gain
from pytest_slmserve.archive.store import read

needs_checkout()

HOSTS = {
    "h200-vllm-0.26.0": ("staggered", "core", "core-opt-2.7b"),
    "h100-vllm-0.26.0": (
        "core-opt-125m",
        "core-next-host",
        "core-third-host",
        "core-fourth-host",
        "core-fifth-host",
        "core-sixth-host",
    ),
}


def gains_of_hosts() -> Iterator[tuple[tuple[str, str, int, int], Gain]]:
    """Each gain with the kind of GPU, the model and the loads; those without an interval are left out."""
    for kind, names in HOSTS.items():
        for name in names:
            for curve in stored_curves(read(BASELINES / f"{kind}-{name}.jsonl.xz").measurements, []):
                if curve.load and curve.load.ramp_up == "staggered":
                    known = (g for g in curve.gains() if g.low is not None and g.low > -1)
                    yield from (((kind, curve.subject, g.start, g.end), g) for g in known)


def log_and_reach(gain: Gain) -> tuple[float, float]:
    assert gain.low is not None and gain.high is not None
    low, high = math.log1p(gain.low), math.log1p(gain.high)
    return math.log1p(gain.value), (high - low) / 2


def test_two_hosts_agree_on_a_doubling_within_their_intervals():
    """In 95 % of the cases, as the intervals say, or nearly: docs/results.md has the count."""
    alike = grouped(gains_of_hosts(), lambda found: found[0]).values()
    pairs = [(log_and_reach(a), log_and_reach(b)) for same in alike for (_, a), (_, b) in combinations(same, 2)]
    agreed = sum(abs(one - other) <= math.hypot(reach, far) for (one, reach), (other, far) in pairs)
    assert (agreed, len(pairs)) == (132, 135)
