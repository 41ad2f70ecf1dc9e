"""Claims on replicas: when they pay, answer sooner and keep the tail, held against one engine at its best load on their
host, and corrected for having been chosen; which jobs are compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from facts import numbers
from strategies import H200, job_point, judge, measurement, point

from pytest_slmserve.analysis.claims.evidence import most_varied
from pytest_slmserve.analysis.claims.table import applies, claim_of
from pytest_slmserve.analysis.points import ratio, shared_points
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of, with_shared
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.records import Replica
from pytest_slmserve.schema.specs import EngineSpec

PAY, SOONER, TAIL = "replicas-pay-mps", "replicas-answer-sooner-mps", "replicas-keep-the-tail-mps"
PASSES, FAILS, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE


def together(*rates, concurrency=8, group="one", models=None, repeat=0, **how):
    """One run of an engine for each rate, under MPS."""
    names = models or ["opt-1.3b"] * len(rates)
    asked = f"{names} {concurrency} {how.get('output_tokens')}"
    made = (measurement(concurrency, rate, model=model, launch=f"{group}-{i}", repeat=repeat, **how)
            for i, (rate, model) in enumerate(zip(rates, names)))  # fmt: skip
    return [replace(m, replica=Replica(f"{group}-{repeat}", i, len(rates), asked, "mps")) for i, m in enumerate(made)]


def alone(*rates, concurrency=16):
    return [measurement(concurrency, rate, repeat=i) for i, rate in enumerate(rates)]


def curve(rates, shared):
    return with_shared([curve_of("opt-1.3b", alone(*rates))], shared_points(shared))[0]


def test_replicas_are_no_points_of_a_sweep():
    swept = curve_of("opt-1.3b", [*alone(1000.0, 1010.0), *together(400.0, 400.0)])
    assert [p.concurrency for p in swept.points] == [16] and swept.shared == ()


def test_a_curve_has_the_replicas_of_its_own_model_host_and_requests():
    mine = together(400.0, 400.0)
    other = replace(mine[0].workload, hash="of other requests")
    others = [
        *together(400.0, 400.0, group="a", models=["opt-125m"] * 2),
        *together(400.0, 400.0, group="b", environment=replace(H200, driver="1")),
        *(replace(m, workload=other) for m in together(400.0, 400.0, group="c", output_tokens=64)),
    ]
    found = with_shared([curve_of("opt-1.3b", alone(1000.0)), Curve(subject="x")], shared_points([*mine, *others]))
    assert [[s.records for s in c.shared] for c in found] == [[tuple(m.id for m in mine)], []]


def test_one_engine_measured_for_comparison_is_no_point_of_a_sweep():
    swept = [measurement(c, 100.0 * c) for c in (8, 32)]
    one = replace(measurement(16, 990.0), replica=Replica("g", 0, 1, "one", "time-slicing"))
    found = curve_of("opt-1.3b", [*swept, one])
    assert [p.concurrency for p in found.points] == [8, 32] and len(found.measurements) == 3
    assert found.one_engine(16).repeats == pytest.approx((990.0,))
    assert found.one_engine(8).repeats == pytest.approx((800.0,)) and found.one_engine(64) is None


def test_the_gain_by_hand():
    (shared,) = shared_points([*together(600.0, 600.0), *together(610.0, 610.0, repeat=1)])
    gain = ratio(shared, point(16, [1000.0, 1000.0]))
    assert gain.value == pytest.approx(1210 / 1000) and gain.low < 1.21 < gain.high
    assert ratio(shared_points(together(600.0, 600.0))[0], point(16, [1000.0])).low is None


def test_of_groups_that_are_alike_the_most_varied_counts():
    grid = [job_point(output_tokens=n) for n in (32, 64)]
    single = job_point(output_tokens=32, spec=EngineSpec("opt-6.7b", max_num_seqs=8))
    assert most_varied([grid, [single]], lambda p: p.output_tokens) == grid
    assert most_varied([], lambda p: p.output_tokens) == []


@pytest.mark.parametrize(
    ("rates", "state"), [((620.0, 624.0), PASSES), ((450.0, 452.0), FAILS), ((400.0, 620.0), INCONCLUSIVE)]
)
def test_do_replicas_pay(rates, state):
    runs = [m for i, rate in enumerate(rates) for m in together(rate, rate, repeat=i)]
    verdict = judge(PAY, curve((1000.0, 1004.0), runs))
    assert (verdict.claim, verdict.state) == (PAY, state)
    assert {2, 16} <= {*numbers(verdict.why)}
    assert verdict.n == 6 and verdict.value == pytest.approx(2 * sum(rates) / 2 / 1002)


@pytest.mark.parametrize("claim", [PAY, SOONER])
def test_the_best_of_several_numbers_of_replicas_is_corrected_for_having_been_chosen(claim):
    two = [m for i in range(2) for m in together(600.0 + i, 600.0, repeat=i)]
    four = [m for i in range(2) for m in together(*[250.0 + i] * 4, repeat=i, concurrency=4, group="four")]
    alone, best = (judge(claim, curve((1000.0, 1004.0), runs)) for runs in (two, [*two, *four]))
    assert alone.value == best.value and best.low < alone.low < alone.high < best.high


def test_the_best_load_of_one_engine_is_corrected_for_having_been_chosen():
    """Three loads of one engine serve as much as the set: the largest mean of them is larger by chance."""
    shared = shared_points([m for i in range(2) for m in together(500.0 + i, 500.0, repeat=i)])
    single = [measurement(load, 1000.0 + load + i, repeat=i) for load in (4, 8, 16) for i in range(2)]
    one, three = (judge(PAY, with_shared([curve_of("opt-1.3b", of)], shared)[0]) for of in (single[-2:], single))
    assert one.value == three.value and three.low < one.low < one.high < three.high


def test_the_best_number_of_replicas_decides_and_the_others_are_told():
    runs = [m for i in range(2) for m in together(600.0 + i, 600.0 + i, repeat=i)]
    runs += [m for i in range(2) for m in together(*[260.0 + i] * 4, group="four", concurrency=4, repeat=i)]
    verdict = judge(PAY, curve((1000.0, 1004.0), runs))
    assert verdict and {2, 4, 1.04} <= {*numbers(verdict.why)}


def test_one_engine_is_held_against_them_at_its_best_load():
    """It serves more at concurrency 32 than at the 16 of the replicas, who then do not pay."""
    runs = [m for i in range(2) for m in together(600.0 + i, 600.0 + i, repeat=i)]
    single = [
        measurement(load, rate, repeat=i) for i in range(2) for load, rate in ((16, 1000.0 + i), (32, 1300.0 + i))
    ]
    verdict = judge(PAY, with_shared([curve_of("opt-1.3b", single)], shared_points(runs))[0])
    assert verdict.state is FAILS and verdict.value == pytest.approx(1201 / 1300.5, rel=1e-3)
    assert {16, 32} <= {*numbers(verdict.why)}


def test_one_engine_of_another_host_says_nothing_of_them():
    """Hosts of one kind, in one archive: on the other host one engine serves more at 32, and at concurrency 16."""
    here, there = (replace(H200, host=host) for host in ("here", "there"))
    runs = [m for i in range(2) for m in together(600.0 + i, 600.0 + i, repeat=i, environment=here)]
    mine = [measurement(16, 1000.0 + i, repeat=i, environment=here) for i in range(2)]
    theirs = [measurement(load, 1300.0 + i, repeat=i, environment=there) for i in range(2) for load in (16, 32)]

    def judged(single, claim=PAY):
        return judge(claim, with_shared([curve_of("opt-1.3b", single)], shared_points(runs))[0])

    assert judged([*mine, *theirs]).state is PASSES
    assert judged([*mine, *theirs]).value == judged(mine).value == pytest.approx(1201 / 1000.5)
    for claim in (PAY, TAIL):
        assert judged(theirs, claim).state is INCONCLUSIVE and numbers(judged(theirs, claim).why) == [16]


@pytest.mark.parametrize(("bound", "state"), [(1.1, PASSES), (0.5, FAILS)])
def test_the_tail(bound, state):
    runs = [m for i in range(2) for m in together(520.0 + i, 520.0 + i, repeat=i)]
    verdict = judge(TAIL, curve((1000.0, 1004.0), runs), threshold=bound)
    assert (verdict.claim, verdict.state) == (TAIL, state)
    assert verdict.value == pytest.approx(1002 / 1041, rel=0.03)


def test_what_is_missing_is_said():
    runs = together(600.0, 600.0)
    for claim in (PAY, TAIL):
        none = judge(claim.replace("mps", "time-slicing"), curve((1000.0,), runs))
        assert (none.state, none.value) == (INCONCLUSIVE, None)
        elsewhere = with_shared([curve_of("opt-1.3b", [measurement(8, 900.0)])], shared_points(runs))[0]
        assert judge(claim, elsewhere).state is INCONCLUSIVE and numbers(judge(claim, elsewhere).why) == [16]
        broken = judge(claim, curve((1000.0,), together(600.0, 600.0, failures=2)))
        assert broken.state is INCONCLUSIVE and {2, 1} <= {*numbers(broken.why)}
    once = judge(PAY, curve((1000.0,), runs))
    assert once.state is INCONCLUSIVE and "--slm-repeats 2" in once.why
    there = {how: applies(claim_of(f"replicas-pay-{how}"), curve((1.0,), runs)) for how in ("mps", "mig")}
    assert there == {"mps": True, "mig": False}
