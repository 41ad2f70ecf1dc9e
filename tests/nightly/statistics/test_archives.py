"""What holds of all committed archives: twins of one release, the constants of `compare`, histories of many hosts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest
from committed import archive, names_of
from gate_sessions import fewest
from twins import alike, by_claims, by_compare, by_gate, by_stored_baseline, together, twins

from pytest_slmserve.analysis.compare import changes
from pytest_slmserve.analysis.compare.changes import Judgement, release_histories


@pytest.mark.parametrize(("judged", "rate"), [(by_compare, 0.003), (by_stored_baseline, 0.01), (by_claims, 0.075)])
def test_no_run_is_better_or_worse_than_its_twin(judged, rate):
    """None is; and if this share of the verdicts were wrong, one of them would have been seen, but for one in 1000."""
    found = together(judged(*pair) for pair in twins(names_of()))
    assert found.wrong == () and fewest(found.said, rate) > 0, found.said


def test_no_launch_of_a_gate_is_slower_than_the_next_of_its_side():
    found = together(map(by_gate, names_of()))
    assert found.wrong == () and fewest(found.said, 0.2) > 0, found.said


def test_there_is_something_to_be_wrong_about():
    """Metrics of the twins are up to two and a half times apart."""
    found = (changes.compare(*alike(*pair), changes.TOLERANCE).changes for pair in twins(names_of()))
    assert max(abs(math.log(each.ratio.value)) for pair in found for each in pair) > math.log(2)


def test_the_constants_hold_of_what_was_measured_on_three_hosts():
    """The same engine and load on two H200 hosts is never farther apart than is allowed for."""
    apart = []
    measured = [changes.compared_cases(archive(name), steady=True) for name in names_of("h200-vllm-0.26.0-*")]
    for there, here in combinations(measured, 2):
        for case in there.keys() & here.keys():
            if case.sharing == "alone" and len({m.spec.key for m in (*there[case], *here[case])}) == 1:
                pair = replace(changes.compared_pair(case, case.load, there[case], here[case]), same_boot=False)
                sides = pair.baseline, pair.candidate
                if all(side.valid for side in sides) and pair.idle_share is not None:
                    logs = math.log(sides[1].output_tokens_per_s / sides[0].output_tokens_per_s)
                    apart.append((abs(logs), pair.unseen, f"{case.engines} at {case.load}"))
    assert len(apart) > 30 and max(apart)[0] > 5 * changes.HOST, "there is something to allow for"
    assert [row for row in apart if row[0] > row[1]] == []


def test_committed_archives_of_many_hosts_show_no_step():
    """Release 0.26.0 was measured on ten further hosts; the one that has all releases is held against itself."""
    ledgers = [archive(name) for name in names_of("h200-vllm-*-history")]
    others = [m for name in names_of("h200-vllm-0.26.0-*") for m in archive(name)]
    few = release_histories([m for each in ledgers for m in each])
    many = release_histories([*others, *(m for each in ledgers[:-1] for m in each)])
    steps = [[[each.step and each.step.verdict for each in found.releases] for found in side] for side in (few, many)]
    assert len({m.environment.host for m in others}) > 5 and steps[0] == steps[1]
    assert not {verdict for each in steps[1] for verdict in each} & {Judgement.BETTER, Judgement.WORSE}
