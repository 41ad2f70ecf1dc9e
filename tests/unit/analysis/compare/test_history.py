"""History over releases: a planted step is marked and noise is not, each by the verdict that `compare` gives."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from scripts import BASELINES, needs_checkout
from stored_records import KNOWN, engine_alone, repeats

from pytest_slmserve.analysis.compare.changes import (
    HOSTS,
    LAUNCHES,
    TOLERANCE,
    Judgement,
    ReleaseHistory,
    compare,
    release_histories,
    release_order,
)
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema.records import GateLaunch, Measurement, Replica
from pytest_slmserve.schema.specs import OpenLoop

RELEASES = ("0.24.0", "0.25.0", "0.26.0", "0.27.0")
DECIDED = (Judgement.BETTER, Judgement.WORSE)


def release(version: str, rates: list[float], concurrency: int = 8, **facts: object) -> list[Measurement]:
    """Repeats of one launch. facts: of the environment."""
    where = replace(KNOWN, vllm=version, **facts)  # type: ignore[arg-type]
    return repeats(rates, concurrency, environment=where, launch=f"{version} on {where.host}")


def noisy(rate: float, generator: random.Random, repeat: int = 5) -> list[float]:
    return [rate * generator.gauss(1.0, 0.002) for _ in range(repeat)]


def verdicts(found: ReleaseHistory) -> list[Judgement | None]:
    return [each.step and each.step.verdict for each in found.releases]


@pytest.mark.parametrize("seed", range(10))
def test_a_release_that_is_slower_by_a_tenth_is_marked_and_noise_is_not(seed):
    generator = random.Random(seed)
    speeds = dict.fromkeys(RELEASES, 1000.0) | {RELEASES[2]: 1000 / 1.1, RELEASES[3]: 1000 / 1.1}
    rate, tpot = release_histories([m for v, r in speeds.items() for m in release(v, noisy(r, generator))])
    assert (rate.metric, tpot.metric) == ("output_tokens_per_s", "tpot_s")
    for found in (rate, tpot):
        assert [each.release for each in found.releases] == list(RELEASES)
        assert verdicts(found) == [None, Judgement.SAME, Judgement.WORSE, Judgement.SAME]
        assert all(each.mean.low < each.mean.value < each.mean.high for each in found.releases)
    assert rate.releases[2].step.ratio.value == pytest.approx(1 / 1.1, rel=0.005)
    assert tpot.releases[2].step.ratio.value == pytest.approx(1.1, rel=0.005)


def test_noise_beyond_the_tolerance_is_inconclusive():
    rows = zip(RELEASES, ([900, 1100], [990, 1010], [800, 1150]))
    found = release_histories([m for version, rates in rows for m in release(version, rates)])
    assert {verdict for each in found for verdict in verdicts(each)} == {None, Judgement.INCONCLUSIVE}


def test_a_faster_release_is_better():
    rate, tpot = release_histories([*release("0.24.0", [1000, 1001]), *release("0.25.0", [1200, 1201])])
    assert verdicts(rate) == verdicts(tpot) == [None, Judgement.BETTER]


def test_releases_are_in_the_order_of_versions():
    wanted = [
        "0.9.2",
        "0.10.0.dev3+gabcdef",
        "0.10.0rc1.dev7",
        "0.10.0rc1",
        "0.10.0rc2",
        "0.10.0rc10",
        "0.10.0+cu130",
        "0.10.0.post1",
        "0.10.1",
        "0.20.0",
    ]
    shuffled = random.Random(1).sample(wanted, len(wanted))
    assert sorted(shuffled, key=release_order) == wanted
    rate, _ = release_histories([m for version in shuffled for m in release(version, [1000, 1001])])
    assert [each.release for each in rate.releases] == wanted


@pytest.mark.parametrize(
    ("facts", "why"), [({"host": "two"}, HOSTS), ({"driver": "600.1"}, "driver 580.159.04 there, 600.1 here")]
)
def test_another_host_or_driver_is_no_step(facts, why):
    found = release_histories([*release("0.24.0", [1000, 1001]), *release("0.25.0", [500, 501], **facts)])
    steps = [each.releases[1].step for each in found]
    assert [(step.verdict, step.why) for step in steps] == [(Judgement.INCONCLUSIVE, why)] * 2


def test_another_kind_of_device_has_no_common_history():
    assert release_histories([*release("0.24.0", [1000]), *release("0.25.0", [500], gpu_name="NVIDIA A100")]) == []


def test_of_several_hosts_the_one_that_most_releases_share_is_shown():
    elsewhere = [m for host in ("two", "three") for m in release("0.25.0", [500, 501, 502, 503], host=host)]
    made = [*release("0.24.0", [1000, 1001]), *elsewhere, *release("0.25.0", [1000, 1001])]
    for measurements in (made, made[::-1]):
        rate, _ = release_histories(measurements)
        assert verdicts(rate) == [None, Judgement.SAME]
        assert rate.releases[1].mean.value == pytest.approx(1000.5)


def test_the_load_is_the_largest_that_most_releases_have():
    loads = {"0.24.0": (8, 64), "0.25.0": (8, 64, 128), "0.26.0": (8, 64), "0.27.0": (8, 128)}
    made = [m for version, each in loads.items() for load in each for m in release(version, [1000, 1001], load)]
    found = release_histories(made)
    assert {(each.subject, len(each.releases)) for each in found} == {("opt-1.3b at concurrency 8", 4)}
    found = release_histories([m for m in made if m.environment.vllm != "0.27.0"])
    assert {(each.subject, len(each.releases)) for each in found} == {("opt-1.3b at concurrency 64", 3)}


def test_an_invalid_release_is_left_out_and_its_neighbours_are_compared():
    broken = [replace(m, run=replace(m.run, failures=1)) for m in release("0.25.0", [500, 501])]
    rate, _ = release_histories([*release("0.24.0", [1000, 1001]), *broken, *release("0.26.0", [1000, 1001])])
    assert [each.release for each in rate.releases] == ["0.24.0", "0.26.0"]
    assert verdicts(rate) == [None, Judgement.SAME]


def test_four_launches_of_each_release_are_the_repeats():
    def launches(version: str, rate: float) -> list[Measurement]:
        where = replace(KNOWN, vllm=version)
        return [
            engine_alone(rate * (1 + 0.001 * n), environment=where, launch=f"{version}-{n}") for n in range(LAUNCHES)
        ]

    rate, _ = release_histories([*launches("0.24.0", 1000), *launches("0.25.0", 900)])
    assert [each.launches for each in rate.releases] == [LAUNCHES, LAUNCHES]
    assert verdicts(rate) == [None, Judgement.WORSE]


def test_what_is_no_engine_alone_under_a_steady_load_is_left_out():
    each = [release(version, [1000, 1001]) for version in RELEASES[:2]]
    flat = [m for group in each for m in group]
    part = Replica("one", 0, 2, "asked", "mps")
    for changed in (
        {"paired": GateLaunch("g", 1, "baseline", False)},
        {"replica": part},
        {"load": OpenLoop(requests=sum(flat[0].run.samples.finished))},
        {"environment": replace(KNOWN, vllm=None)},
    ):
        assert release_histories([replace(m, **changed) for m in flat]) == []
    assert release_histories(each[0]) == [] == release_histories([])


def test_two_engines_have_a_history_each_and_a_new_argument_goes_on_with_the_old():
    def eager(version: str, rate: float, **words: object) -> list[Measurement]:
        return [replace(m, spec=replace(m.spec, **words)) for m in release(version, [rate, rate + 1])]

    both = [m for v in RELEASES[:2] for m in (*release(v, [1000, 1001]), *eager(v, 500, enforce_eager=True))]
    found = [each for each in release_histories(both) if each.metric == "tpot_s"]
    assert len({each.subject for each in found}) == 2 and {len(each.releases) for each in found} == {2}
    rate, _ = release_histories([*release("0.24.0", [1000, 1001]), *eager("0.25.0", 1000, seed=7)])
    assert verdicts(rate) == [None, Judgement.SAME]


@pytest.fixture(scope="module")
def ledgers():
    needs_checkout()
    paths = sorted(BASELINES.glob("h200-vllm-*-history.jsonl.xz"))
    assert len(paths) >= 4
    return [read(path).measurements for path in paths]


def test_each_step_is_what_compare_says_of_the_two_releases(ledgers):
    found = release_histories([m for each in ledgers for m in each])
    assert {each.subject for each in found} == {"opt-1.3b at concurrency 512", "opt-125m at concurrency 512"}
    for number, (there, here) in enumerate(pairwise(ledgers), start=1):
        compared = {(c.subject, c.load, c.metric): c for c in compare(there, here, TOLERANCE).changes}
        for each in found:
            step = each.releases[number].step
            other = compared[step.subject, step.load, step.metric]
            assert replace(step, subject="") == replace(other, subject="")
            assert each.releases[number].mean.value == other.candidate


def test_committed_archives_of_many_hosts_show_no_step(ledgers):
    """Release 0.26.0 was measured on ten further hosts; the one that has all releases is held against itself."""
    others = [m for path in sorted(BASELINES.glob("h200-vllm-0.26.0-*.jsonl.xz")) for m in read(path).measurements]
    few = release_histories([m for each in ledgers for m in each])
    many = release_histories([*others, *(m for each in ledgers[:-1] for m in each)])
    assert len({m.environment.host for m in others}) > 5
    assert [verdicts(each) for each in many] == [verdicts(each) for each in few]
    assert not {verdict for each in many for verdict in verdicts(each)} & set(DECIDED)
