"""No verdict tells a run from its twin: launches of one host, and repeats of one launch; and a history says what
`compare` does. Twins among all archives, and launches of gates, are in `tests/nightly/statistics`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from committed import archive, names_of

from pytest_slmserve.analysis.compare.changes import TOLERANCE, Judgement, against_stored, compare, release_histories
from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.verdict import State


def test_launches_of_one_host_are_no_regression_of_each_other():
    """Runs of one release, minutes apart: one launch differs from the next, and nothing has changed."""
    launches = grouped(archive("h200-vllm-0.26.0-staggered"), lambda m: m.launch).values()
    found = [each for pair in permutations(launches, 2) for each in compare(*pair, TOLERANCE).changes]
    assert len(found) > 100 and not [each for each in found if each.verdict in (Judgement.BETTER, Judgement.WORSE)]


@pytest.mark.parametrize("first", [0, 1])
def test_of_what_was_measured_on_one_host_nothing_fails_against_itself(first):
    """Every other repeat against the rest; some of them are of two launches, 14 % apart."""
    measured = archive("h200-vllm-0.26.0-sensors")
    verdicts, _ = against_stored(measured[first::2], measured[1 - first :: 2], TOLERANCE)
    assert len(verdicts) > 50 and not [v for v in verdicts if v.state is State.FAILS]
    held = {v.subject for v in verdicts if v.state is State.PASSES}
    assert {"opt-1.3b at concurrency 512", "opt-2.7b at concurrency 256"} <= held, "where the GPU is busy"


def test_each_step_of_a_history_is_what_compare_says_of_the_two_releases():
    ledgers = [archive(name) for name in names_of("h200-vllm-*-history")]
    found = release_histories([m for each in ledgers for m in each])
    assert {each.subject for each in found} == {"opt-1.3b at concurrency 512", "opt-125m at concurrency 512"}
    for number, (there, here) in enumerate(pairwise(ledgers), start=1):
        compared = {(c.subject, c.load, c.metric): c for c in compare(there, here, TOLERANCE).changes}
        for release in (each.releases[number] for each in found):
            other = compared[release.step.subject, release.step.load, release.step.metric]
            assert replace(release.step, subject="") == replace(other, subject="")
            assert release.mean.value == other.candidate
