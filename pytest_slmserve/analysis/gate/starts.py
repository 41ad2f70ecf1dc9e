"""Gate of the start only, computed from its records: pairs of launches, each of which serves one request.

A start with empty compile caches fills them for the next start of its side. So a pair has two launches of each side if
both states of the caches are evaluated.
"""

from collections.abc import Sequence
from operator import attrgetter

from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.gate.decision import GateCriteria, PairSeries, compare_sides, gate
from pytest_slmserve.analysis.gate.launch_pairs import (
    BLOCKS,
    SHOWN_OF_STARTS,
    SIDES,
    START_MARGIN,
    STARTS,
    Gated,
    Launch,
    PairOfLaunches,
    exact_verdicts,
    firsts_of,
    nothing_counts,
    series_of,
)
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import SLEEP_MODE, ClosedLoop

FIRST = ClosedLoop(1, requests=1)  # load after a start: one request, which proves that the engine serves


def is_of_start(measurement: Measurement) -> bool:
    """Return whether a measurement belongs to a gate of the start."""
    part = measurement.paired
    return part is not None and part.window is None and measurement.load == FIRST


def judge_starts(measurements: Sequence[Measurement], criteria: GateCriteria) -> Gated:
    """Return the result of a gate of the start. A pair counts if each of its launches has served its request."""
    pairs, dropped, first = list[PairOfLaunches](), list[str](), measurements[0]
    states = {m.paired.caches for m in measurements if m.paired}
    in_time = sorted(measurements, key=attrgetter("measured_at"))
    for number, members in sorted(grouped(in_time, attrgetter("paired.pair")).items()):
        last = {(m.paired.side, m.paired.caches): m for m in members if m.paired}  # if it was repeated
        if len(last) < len(SIDES) * len(states):
            continue
        if failed := [(side, m) for (side, _), m in last.items() if m.run.failures]:
            side, m = failed[0]
            dropped.append(f"pair {number}: {side}: its first request failed: {m.run.first_failure}")
            continue
        sides = ([m for (of, _), m in last.items() if of == side] for side in SIDES)
        pairs.append(PairOfLaunches(number, *(Launch(tuple(side), (), (), (), ()) for side in sides)))
    judged, shown = (series_of(endpoints, pairs, criteria.margin) for endpoints in (STARTS.values(), SHOWN_OF_STARTS))
    wake = STARTS["wake"]
    if all(m.spec.arguments.get(SLEEP_MODE) for m in measurements) and wake.label not in {each.name for each in judged}:
        judged.append(PairSeries(wake.label, wake.better, ((None, None),) * len(pairs), START_MARGIN))  # never passes
    model, nothing = short_name(first.spec.model), nothing_counts(dropped, None)
    return Gated(
        model=model,
        gate=first.paired.gate if first.paired else "",
        terms=criteria,
        pairs=tuple(pairs),
        dropped=tuple(dropped),
        gated=gate(judged, criteria) if judged else (),
        shown=tuple(compare_sides(each, criteria) for each in shown),
        exact=tuple(each for each in exact_verdicts(model, pairs, criteria, nothing) if each.claim == BLOCKS),
        caches=first.paired.caches if first.paired else "warm",
        firsts=firsts_of(measurements),
    )
