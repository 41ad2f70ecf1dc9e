"""What holds of all committed archives: no verdict tells a run from its twin, the constants of `compare`, histories of
many hosts, and how many sweeps the tokens of a busy second decide."""

import math
from dataclasses import replace
from functools import cache
from itertools import chain, combinations

import pytest
from committed import archive, names_of
from gate_sessions import fewest
from scripts import BASELINES

from pytest_slmserve.analysis.claims.table import CLAIMS, ROWS, judge_all, stored_curves
from pytest_slmserve.analysis.compare import changes
from pytest_slmserve.analysis.compare.changes import TOLERANCE, Judgement, against_stored, compare, release_histories
from pytest_slmserve.analysis.estimates import Differences, grouped
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import SIDES, judge_gate
from pytest_slmserve.analysis.metrics.validity import health
from pytest_slmserve.analysis.points import busy_rate, by_series, output_rate, point_differences, points_of
from pytest_slmserve.analysis.sweep import plateau
from pytest_slmserve.analysis.sweep.curve import QUICKEST, is_main_sweep
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.store import read
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.specs import is_steady

RELEASES = ("h100-vllm-0.26.0", "h200-vllm-0.26.0", "cpu-vllm-0.32.0")


def twins():
    """Pairs of archives of one release on one kind of device."""
    for kind in RELEASES:
        yield from combinations(names_of(f"{kind}*"), 2)


def alike(one, other):
    """What both archives measured of the engines that both have."""
    engines = {m.spec.key for m in archive(one)} & {m.spec.key for m in archive(other)}
    return [[m for m in archive(name) if m.spec.key in engines and not m.paired] for name in (one, other)]


# Each verdict on a run beside its twin: of what, and whether it tells them apart.


def by_compare(one, other):
    for each in compare(*alike(one, other), TOLERANCE).changes:
        yield f"{each.subject} at {each.load}: {each.metric}", each.verdict in (Judgement.BETTER, Judgement.WORSE)


def by_stored_baseline(one, other):
    there, here = alike(one, other)
    for sides in ((there, here), (here, there)):
        for v in against_stored(*sides, TOLERANCE)[0]:
            if v.value is not None:
                yield f"{v.subject}: {v.claim}", v.state is State.FAILS


@cache
def claims_of(name):
    """States of the claims on sweeps that no host or model is expected to decide, by claim, engine, requests and
    loads."""
    found = {}
    for curve in stored_curves([m for m in archive(name) if not m.paired], []):
        if curve.spec and curve.workload and curve.load:
            loads = tuple(p.concurrency for p in curve.points)
            where = curve.spec.key, curve.workload.hash, replace(curve.load, concurrency=1), loads
            for verdict, row in judge_all([curve], ROWS):
                if row and row.expected != "either" and CLAIMS[verdict.claim].of != "arithmetic":
                    found[verdict.claim, *where] = verdict.state
    return found


def by_claims(one, other):
    """Of the claims that both decide."""
    there, here = claims_of(one), claims_of(other)
    for claim in there.keys() & here.keys():
        if State.INCONCLUSIVE not in (there[claim], here[claim]):
            yield str(claim), there[claim] is not here[claim]


def by_gate(name):
    """Launches of one side of a gate, each held against the next of the same side, in both directions."""
    for side in SIDES:
        measured = [m for m in archive(name) if m.paired and m.paired.side == side]
        for gate in grouped(measured, lambda m: (m.paired.gate, m.spec.model)).values():
            launches = [*enumerate(grouped(gate, lambda m: m.paired.pair).values())]
            for order in (SIDES, SIDES[::-1]):
                places = [(launch, {"pair": n // 2 + 1, "side": order[n % 2]}) for n, launch in launches]
                made = [replace(m, paired=replace(m.paired, **place)) for launch, place in places for m in launch]
                yield f"{name}: {side}", judge_gate(made, GateCriteria()).outcome is State.FAILS


@pytest.mark.parametrize(("judged", "cases", "rate"), [
    (by_compare, twins, 0.003), (by_stored_baseline, twins, 0.01), (by_claims, twins, 0.075),
    (by_gate, lambda: zip(names_of()), 0.2),
])  # fmt: skip
def test_twin_runs_show_no_difference(judged, cases, rate):
    """If this share of the verdicts were wrong, one of them would have been seen, but for one in 1000."""
    said = [verdict for case in cases() for verdict in judged(*case)]
    assert [what for what, is_wrong in said if is_wrong] == [] and fewest(len(said), rate) > 0, len(said)


def test_twins_have_differing_metrics():
    """Metrics of the twins are up to two and a half times apart."""
    found = (compare(*alike(*pair), TOLERANCE).changes for pair in twins())
    assert max(abs(math.log(each.ratio.value)) for pair in found for each in pair) > math.log(2)


def test_compare_constants_cover_hosts():
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


def test_committed_histories_show_no_step():
    """Release 0.26.0 was measured on ten further hosts; the one that has all releases is held against itself."""
    ledgers = [archive(name) for name in names_of("h200-vllm-*-history")]
    others = [m for name in names_of("h200-vllm-0.26.0-*") for m in archive(name)]
    few = release_histories([m for each in ledgers for m in each])
    many = release_histories([*others, *(m for each in ledgers[:-1] for m in each)])
    steps = [[[each.step and each.step.verdict for each in found.releases] for found in side] for side in (few, many)]
    assert len({m.environment.host for m in others}) > 5 and steps[0] == steps[1]
    assert not {verdict for each in steps[1] for verdict in each} & {Judgement.BETTER, Judgement.WORSE}


def test_average_power_matches_energy_counter():
    """Instant power misses what is between readings. No window of any committed archive is left out by average power.
    By instant power some would be, and quiet ones too."""
    far = dict.fromkeys((sensors.POWER, sensors.POWER_INSTANT), 0)
    for m in chain.from_iterable(map(archive, names_of("h?00*"))):
        columns = m.run.telemetry.columns if m.run.telemetry else {}
        for number, other in ((number, other) for number in far for other in far if other != number):
            read_alone = {each: column for each, column in columns.items() if each != other}
            if number in columns:
                alone = replace(m.run, telemetry=replace(m.run.telemetry, columns=read_alone))
                far[number] += any("energy counter" in told for told in health(alone).degradations)
    assert far[sensors.POWER] == 0 < far[sensors.POWER_INSTANT]


def test_smallest_loads_tell_gpu_noise():
    """The gain of the last doubling in a second window lies within the interval around that in the first window, which
    has the noise of the smallest loads alone."""
    inside = []
    for name in names_of("h[12]00-*"):
        steady = [m for m in archive(name) if is_steady(m.load) and m.alone and not m.paired]
        for one in by_series(steady).values():
            samples = point_differences([p for p in points_of(one) if p.valid], busy_rate).samples
            quick, rest = samples[:QUICKEST], samples[QUICKEST:]
            if len(rest) > 1 and all(samples) and min(map(len, rest[-2:])) > 1 and max(map(len, quick)) > 1:
                known = Differences((*quick, *(each[:1] for each in rest)))
                gain = known.between(len(samples) - 2, len(samples) - 1)
                second = math.log(rest[-1][1].value / rest[-2][1].value)
                inside.append(abs(second - gain.value) < math.sqrt(2) * (gain.high - gain.value))
    assert len(inside) > 30 and sum(inside) > 0.88 * len(inside), "of 95% intervals"


@pytest.mark.parametrize(("kind", "sweeps", "seen", "of_gpu", "at_any_clock"), [
    ("core", 24, 6, 14, 15), ("today", 22, 6, 8, 9),
])  # fmt: skip
def test_decided_doublings_match_docs(kind, sweeps, seen, of_gpu, at_any_clock, monkeypatch):
    """By throughput as seen, and by tokens per busy second with and without the allowance for clocks: the numbers that
    docs/statistics.md tells."""
    contents = [read(BASELINES / f"{name}.jsonl.xz") for name in names_of(f"h[12]00-*-{kind}*")]
    curves = [c for each in contents for c in stored_curves(each.measurements, each.plans) if is_main_sweep(c)]
    alike = grouped(curves, lambda c: (c.spec.key, c.environment.gpu_name)).values()
    assert len(alike) < len(curves) == sweeps, "several hosts measured one engine"

    def decided(figure):
        found = [[c.pareto_plateau(figure=figure).state for c in each] for each in alike]
        contradictions = [states for states in found if {State.PASSES, State.FAILS} <= {*states}]
        assert figure is output_rate or contradictions == []
        return sum(state is not State.INCONCLUSIVE for states in found for state in states)

    assert (decided(output_rate), decided(busy_rate)) == (seen, of_gpu)
    monkeypatch.setattr(plateau, "CLOCKS", 0.0)
    assert decided(busy_rate) == at_any_clock
