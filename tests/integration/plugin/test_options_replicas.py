"""Options of replicas: how many engines share the device, and how."""

from __future__ import annotations

# replicas


def test_each_number_is_measured(gain, archive):
    gain("--slm-replicas=2,4", "--slm-sharing=mps", "-k", "point_of_replicas").assert_outcomes(passed=3)
    counts = [m.replica.count for m in archive().measurements if m.replica.index == 0]
    assert counts == [1, 1, 2, 2, 4, 4]


def test_one_engine_alone_is_always_measured(gain, archive):
    gain("--slm-replicas=1", "-k", "point_of_replicas").assert_outcomes(passed=1)
    assert [m.replica.count for m in archive().measurements] == [1, 1], "to compare with, no point of a sweep"


def test_what_cannot_be_shared_is_skipped_with_the_reason(gain):
    result = gain("--slm-models=opt-13b", "--slm-gpu-memory-utilization=0.3", "-rs", "-k", "point_of_replicas")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED*weights and reserve take * no room for a KV cache*"])
    uneven = gain("--slm-replicas=5", "-rs", "-k", "point_of_replicas")
    uneven.stdout.fnmatch_lines(["SKIPPED*384 concurrent requests cannot be divided evenly among 5 replicas*"])


# sharing


def test_each_way_is_measured(gain, archive):
    gain("--slm-sharing=mps,mig", "-k", "point_of_replicas").assert_outcomes(passed=3)
    assert {m.replica.sharing for m in archive().measurements if m.replica.count > 1} == {"mps", "mig"}


# pin_cores


def test_cores_are_pinned_when_asked(gain, archive):
    gain("--slm-sharing=time-slicing", "-k", "point_of_replicas")
    gain("--override-ini=slm_pin_cores=1", "--slm-sharing=time-slicing", "-k", "point_of_replicas")
    assert [m.replica.pinned for m in archive().measurements if m.replica.count > 1] == [False] * 4 + [True] * 4
