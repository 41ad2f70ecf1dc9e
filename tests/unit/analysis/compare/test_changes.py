"""Two runs side by side: what is better and worse for certain, and all that nobody can know."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest
from scripts import BASELINES, needs_checkout
from stored_records import BASELINE, BUSY, KNOWN, LIMITS, NEW, candidate, engine_alone, repeats

from pytest_slmserve.analysis.compare.changes import (
    FEW_LAUNCHES,
    HOSTS,
    LAUNCHES,
    METRICS,
    NOISE,
    ONE_REPEAT,
    TOLERANCE,
    Judgement,
    compare,
)
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.records import GateLaunch, Measurement, Replica
from pytest_slmserve.schema.specs import OpenLoop

BOUNDED = [name for name, metric in METRICS.items() if metric.bounded]
RATES = ("output_tokens_per_s", "requests_per_s")


def launched(rate: float, side: str, launches: int = LAUNCHES, **facts: object) -> list[Measurement]:
    """One repeat of each launch, 0.1 % apart."""
    each = [(f"{side}-{n}", rate * (1 + 0.001 * n)) for n in range(launches)]
    return [engine_alone(r, launch=name, repeat=n, **facts) for n, (name, r) in enumerate(each)]


def by_name(found):
    return {each.metric: each for each in found.changes}


def verdicts(found, *names):
    return {each.verdict for each in found.changes if not names or each.metric in names}


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.0, Judgement.SAME),
        (1.02, Judgement.SAME),
        (1.03, Judgement.INCONCLUSIVE),
        (1.05, Judgement.WORSE),
        (0.97, Judgement.NO_WORSE),
        (0.9, Judgement.BETTER),
    ],
)
def test_where_a_sensor_bounds_how_launches_differ_repeats_decide(factor, verdict):
    found = compare(BASELINE, candidate(factor), TOLERANCE)
    assert verdicts(found, *BOUNDED) == {verdict}
    assert {each.metric for each in found.changes} >= {*BOUNDED, "ttft_s", "tpot_p99_s", "energy_per_token_j"}
    rate = by_name(found)["output_tokens_per_s"]
    assert (rate.subject, rate.load, rate.launches) == ("opt-1.3b", "concurrency 8", (1, 1))
    assert rate.ratio.value == pytest.approx(1 / factor) == pytest.approx(rate.candidate / rate.baseline)
    assert rate.ratio.low < rate.ratio.value < rate.ratio.high
    assert rate.why == ("" if verdict is not Judgement.INCONCLUSIVE else NOISE)
    assert by_name(found)["e2e_s"].ratio.value == pytest.approx(factor)


def test_of_latencies_and_energy_nothing_is_claimed_by_one_launch():
    found = compare(BASELINE, candidate(2.0), TOLERANCE)
    others = [each for each in found.changes if each.metric not in BOUNDED]
    assert len(others) >= 5
    for each in others:
        assert (each.verdict, each.why, each.ratio.low) == (Judgement.INCONCLUSIVE, FEW_LAUNCHES, None)


@pytest.mark.parametrize("sensed", [True, False])
@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, Judgement.SAME), (1.1, Judgement.WORSE), (0.9, Judgement.BETTER)]
)
def test_four_launches_on_each_side_decide_every_metric(sensed, factor, verdict):
    facts = {} if sensed else {"environment": replace(KNOWN, platform="cpu", gpu_name=None), "sensed": False}
    found = compare(launched(1000, "a", **facts), launched(1000 / factor, "b", **facts), TOLERANCE)
    assert verdicts(found, *RATES, "ttft_s", "ttft_p99_s", "e2e_p99_s") == {verdict}


def test_without_a_sensor_one_launch_decides_nothing_however_large_the_difference():
    facts = {"sensed": False, "environment": replace(KNOWN, platform="cpu", gpu_name=None)}
    found = compare(repeats([1000, 1001], **facts), repeats([100, 101], launch="b", **facts), TOLERANCE)
    assert {(each.verdict, each.why) for each in found.changes} == {(Judgement.INCONCLUSIVE, FEW_LAUNCHES)}
    fewer = compare(launched(1000, "a", **facts), launched(100, "b", LAUNCHES - 1, **facts), TOLERANCE)
    assert verdicts(fewer) == {Judgement.INCONCLUSIVE}


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("launches", [1, LAUNCHES])
@pytest.mark.parametrize("host", ["two", None])
def test_on_another_host_nothing_is_better_or_worse(factor, launches, host):
    there = launched(1000, "a", launches)
    here = launched(1000 / factor, "b", launches, environment=replace(KNOWN, host=host))
    found = compare(there, here, TOLERANCE)
    assert verdicts(found) <= {Judgement.INCONCLUSIVE, Judgement.NO_WORSE}
    assert {each.why for each in found.changes if each.verdict is Judgement.INCONCLUSIVE} <= {HOSTS}
    assert "host" in {each.field for each in found.differences}
    assert any("another host" in note or "of this host" in note for note in found.notes)
    if factor == 1.0 and launches == LAUNCHES:
        assert verdicts(compare(there, here, 0.15), *BOUNDED) == {Judgement.SAME}, "a large tolerance"


def test_one_repeat_on_each_side_has_a_ratio_and_no_interval():
    found = compare(BASELINE[:1], candidate(2.0)[:1], TOLERANCE)
    rate = by_name(found)["output_tokens_per_s"]
    assert (rate.verdict, rate.why, rate.ratio.low) == (Judgement.INCONCLUSIVE, ONE_REPEAT, None)
    assert rate.ratio.value == pytest.approx(0.5)


def test_a_gpu_that_waits_for_its_host_widens():
    waits = {**BUSY, sensors.ENGINE_ACTIVE: 0.64}
    there, here = (repeats([r, 1.001 * r], columns=waits, launch=str(r)) for r in (1000, 900))
    assert verdicts(compare(there, here, TOLERANCE), *BOUNDED) == {Judgement.INCONCLUSIVE}


def test_another_machine_is_an_obstacle_and_other_arguments_are_what_is_compared():
    other = compare(BASELINE, candidate(1.5, environment=replace(NEW, cores=8)), TOLERANCE)
    assert {each.why for each in other.changes} == {"cores 16 there, 8 here"} and verdicts(other) == {
        Judgement.INCONCLUSIVE
    }
    fewer = replace(LIMITS, max_num_batched_tokens=2048)
    asked = [
        replace(m, spec=replace(m.spec, max_num_batched_tokens=2048, extra=(("block_size", 32),)))
        for m in candidate(1.5, resolved=fewer, environment=KNOWN)
    ]
    found = compare(BASELINE, asked, TOLERANCE)
    assert verdicts(found, *BOUNDED) == {Judgement.WORSE}
    told = {each.field: (each.baseline, each.candidate) for each in found.differences}
    assert told == {"max_num_batched_tokens": (("8192",), ("2048",)), "extra.block_size": ((None,), ("32",))}


def test_environments_differ_in_what_is_told():
    found = compare(BASELINE, candidate(1.0, environment=replace(NEW, driver="600.1")), TOLERANCE)
    told = {each.field: (each.baseline, each.candidate) for each in found.differences}
    assert told["vllm"] == ((KNOWN.vllm,), ("0.27.0",)) and told["driver"] == (("580.159.04",), ("600.1",))
    assert {each.why for each in found.changes} == {"driver 580.159.04 there, 600.1 here"}


def test_an_invalid_side_decides_nothing():
    broken = [replace(m, run=replace(m.run, failures=1)) for m in candidate(1.0)]
    found = compare(BASELINE, broken, TOLERANCE)
    assert found.changes == () and found.baseline_only == () == found.candidate_only


def test_what_one_side_has_alone_is_named():
    found = compare([*BASELINE, engine_alone(500, 4)], [*candidate(1.0), engine_alone(900, 64)], TOLERANCE)
    assert {each.load for each in found.changes} == {"concurrency 8"}
    assert [text.partition(" (")[0] for text in found.baseline_only] == ["opt-1.3b at concurrency 4"]
    assert [text.partition(" (")[0] for text in found.candidate_only] == ["opt-1.3b at concurrency 64"]


def test_engines_are_held_against_those_of_their_own_arguments():
    """Each side has two engines: one is asked for by both, the others are held against each other."""
    eager = [replace(m, spec=replace(m.spec, enforce_eager=True)) for m in repeats([500, 501], launch="e")]
    seeded = [replace(m, spec=replace(m.spec, seed=7)) for m in repeats([800, 801], launch="s")]
    found = compare([*BASELINE, *eager], [*seeded, *candidate(1.0)], TOLERANCE, ["output_tokens_per_s"])
    assert [each.ratio.value for each in found.changes] == pytest.approx([1.0, 800.5 / 500.5])
    third = [replace(m, spec=replace(m.spec, seed=8)) for m in repeats([800, 801], launch="t")]
    found = compare([*BASELINE, *eager], [*seeded, *third, *candidate(1.0)], TOLERANCE, ["output_tokens_per_s"])
    assert len(found.changes) == 1 and len(found.baseline_only) == 1 and len(found.candidate_only) == 2


def test_launches_of_a_gate_are_left_out():
    gated = [replace(m, paired=GateLaunch("g", 1, "baseline", False)) for m in BASELINE]
    found = compare([*gated, *BASELINE], candidate(1.0), TOLERANCE)
    assert by_name(found)["output_tokens_per_s"].launches == (1, 1)
    assert "launches of gates are left out (3 measurements): `report` judges them" in found.notes
    assert compare(gated, gated, TOLERANCE).changes == ()


def test_jobs_are_compared_too():
    def job(m: Measurement) -> Measurement:
        return replace(m, load=OpenLoop(requests=sum(m.run.samples.finished)))

    there, here = ([job(m) for m in launched(rate, side)] for rate, side in ((1000, "a"), (500, "b")))
    found = compare(there, here, TOLERANCE)
    assert verdicts(found) == {Judgement.WORSE} and {each.load for each in found.changes} == {there[0].load.title}


def test_several_engines_on_one_device_are_one_case():
    def pair(rate: float, launch: str) -> list[Measurement]:
        part = Replica(launch, 0, 2, "asked", "mps")
        each = [engine_alone(rate, launch=f"{launch}-{i}") for i in range(2)]
        return [replace(m, replica=replace(part, index=i)) for i, m in enumerate(each)]

    there, here = ([m for n in range(LAUNCHES) for m in pair(r + n, f"{r}{n}")] for r in (1000, 800))
    found = compare(there, here, TOLERANCE)
    assert {(each.subject, each.load) for each in found.changes} == {("2 x opt-1.3b by mps", "concurrency 16")}
    assert by_name(found)["output_tokens_per_s"].ratio.value == pytest.approx(0.8, rel=0.01)
    assert verdicts(found, "output_tokens_per_s") == {Judgement.WORSE}


def test_only_wanted_metrics_are_compared():
    found = compare(BASELINE, candidate(1.5), TOLERANCE, ["e2e_s", "ttft_s"])
    assert [each.metric for each in found.changes] == ["ttft_s", "e2e_s"]
    assert {verdict: n for verdict, n in found.counts.items() if n} == {Judgement.WORSE: 1, Judgement.INCONCLUSIVE: 1}


NAMES = ("adaptive", "adaptive-next-host", "interfaces-15-s", "history", "sensors", "staggered", "verify")


@pytest.fixture(scope="module")
def committed():
    needs_checkout()
    return {name: read(BASELINES / f"h200-vllm-0.26.0-{name}.jsonl.xz").measurements for name in NAMES}


def test_one_release_on_two_hosts_is_no_regression(committed):
    """Every pair of them differs in its host, and no metric of any is called better or worse."""
    compared = farthest = 0
    for there, here in permutations(NAMES, 2):
        found = compare(committed[there], committed[here], TOLERANCE)
        hosts = [{m.environment.host for m in committed[name]} for name in (there, here)]
        if found.changes and not hosts[0] & hosts[1]:
            compared += len(found.changes)
            farthest = max(farthest, *(abs(math.log(each.ratio.value)) for each in found.changes))
            assert verdicts(found).isdisjoint({Judgement.BETTER, Judgement.WORSE}), (there, here)
            assert "host" in {each.field for each in found.differences}
    assert compared > 1000 and farthest > math.log(2), "there is something to be wrong about"


def test_launches_of_one_host_are_no_regression_of_each_other(committed):
    """Runs of one release, minutes apart: one launch differs from the next, and nothing has changed."""
    launches: dict[str, list[Measurement]] = {}
    for m in committed["staggered"]:
        launches.setdefault(m.launch, []).append(m)
    pairs = [compare(there, here, TOLERANCE) for there, here in permutations(launches.values(), 2)]
    assert sum(len(found.changes) for found in pairs) > 100
    assert not [
        each for found in pairs for each in found.changes if each.verdict in (Judgement.BETTER, Judgement.WORSE)
    ]
