"""Runs of one release on one kind of device, and what each kind of verdict makes of one beside its twin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, combinations

from committed import archive

from pytest_slmserve.analysis.claims.table import CLAIMS, ROWS, judge_all, stored_curves
from pytest_slmserve.analysis.compare.changes import TOLERANCE, Judgement, against_stored, compare
from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.launch_pairs import SIDES, judge_gate
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.records import Measurement

RELEASES = ("h100-vllm-0.26.0", "h200-vllm-0.26.0", "cpu-vllm-0.32.0")


@dataclass(frozen=True, slots=True)
class Words:
    """said: how many verdicts could have been wrong. wrong: those that tell a run from its twin."""

    said: int
    wrong: tuple[str, ...]


def together(found: Iterable[Words]) -> Words:
    said, wrong = zip(*((words.said, words.wrong) for words in found))
    return Words(sum(said), tuple(chain.from_iterable(wrong)))


def twins(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of archives of one release on one kind of device."""
    for kind in RELEASES:
        yield from combinations(sorted(name for name in names if name.startswith(kind)), 2)


def alike(one: str, other: str) -> tuple[list[Measurement], list[Measurement]]:
    """What both archives measured of the engines that both have."""
    engines = {m.spec.key for m in archive(one)} & {m.spec.key for m in archive(other)}
    there, here = ([m for m in archive(name) if m.spec.key in engines and not m.paired] for name in (one, other))
    return there, here


def by_compare(one: str, other: str) -> Words:
    found = compare(*alike(one, other), TOLERANCE).changes
    wrong = [each for each in found if each.verdict in (Judgement.BETTER, Judgement.WORSE)]
    return Words(len(found), tuple(f"{each.subject} at {each.load}: {each.metric}" for each in wrong))


def by_stored_baseline(one: str, other: str) -> Words:
    there, here = alike(one, other)
    both_ways = ((there, here), (here, there))
    found = [v for sides in both_ways for v in against_stored(*sides, TOLERANCE)[0] if v.value is not None]
    return Words(len(found), tuple(f"{v.subject}: {v.claim}" for v in found if v.state is State.FAILS))


@cache
def claims_of(name: str) -> dict[tuple[object, ...], State]:
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


def by_claims(one: str, other: str) -> Words:
    """Of the claims that both decide."""
    there, here = claims_of(one), claims_of(other)
    decided = [each for each in there if State.INCONCLUSIVE not in (there[each], here.get(each, State.INCONCLUSIVE))]
    return Words(len(decided), tuple(str(each) for each in decided if there[each] is not here[each]))


def by_gate(name: str) -> Words:
    """Launches of one side of a gate, each held against the next of the same side, in both directions."""
    said, wrong = 0, []
    for side in SIDES:
        measured = [m for m in archive(name) if m.paired and m.paired.side == side]
        for gate in grouped(measured, lambda m: (m.paired.gate, m.spec.model)).values():
            launches = [*grouped(gate, lambda m: m.paired.pair).values()]
            for order in (SIDES, SIDES[::-1]):
                made = [
                    replace(m, paired=replace(m.paired, pair=number // 2 + 1, side=order[number % 2]))
                    for number, launch in enumerate(launches)
                    for m in launch
                ]
                said += 1
                wrong += [f"{name}: {side}"] * (judge_gate(made, GateCriteria()).outcome is State.FAILS)
    return Words(said, tuple(wrong))
