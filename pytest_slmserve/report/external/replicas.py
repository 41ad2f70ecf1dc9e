"""What is said of several engines in results that are not ours: a table and findings as text, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_slmserve.analysis.compare.external_replicas import Compared, Comparison, EngineSet
from pytest_slmserve.analysis.stats.estimates import Interval, mean, percent
from pytest_slmserve.archive.external_replicas import ReplicaColumns
from pytest_slmserve.report.external.sweep import ends, stem
from pytest_slmserve.report.numbers import ABSENT, figure, hundredths, milliseconds
from pytest_slmserve.report.text_table import grid, named

MOST_OTHERS = 3  # other baselines that are told in words


def text(found: Comparison, names: ReplicaColumns, notes: Sequence[str] = ()) -> str:
    """Table and findings. notes: what is known beside."""
    if any(seen.at_equal_total for seen in found.rows):
        notes = [*notes, f"at equal total: over one engine whose {names.columns.knob} is the total of all engines"]
    said = [*findings(found, names), *(("note", note) for note in (*_notes(found, names), *notes))]
    return "\n".join([table(found, names), "", named(said)])


# The table


def table(found: Comparison, names: ReplicaColumns) -> str:
    """One row per set of engines; columns with nothing in them are left out."""
    settings, columns = _settings(found), names.columns
    head = [names.replicas, columns.knob, "total", *settings, columns.throughput, "gain %", "95 %", "at equal\ntotal %"]
    head += [f"{stem(columns.latency)}\nms", "latency\nfactor", "power\nW", "mJ/\ntoken", "note"]
    sides = ["right"] * 3 + ["left"] * len(settings) + ["right"] * 2 + ["left"] + ["right"] * 5 + ["left"]
    rows = [_cells(seen, found, settings) for seen in found.rows]
    kept = [i for i in range(len(head)) if any(row[i] != ABSENT for row in rows)]
    return grid([[row[i] for i in kept] for row in rows], [head[i] for i in kept], [sides[i] for i in kept])


def _settings(found: Comparison) -> list[str]:
    """Names of settings in which sets differ."""
    pairs = {pair for seen in found.rows for pair in seen.engines.settings}
    each = [name for name, _ in pairs]
    return sorted({name for name in each if each.count(name) > 1})


def _cells(seen: Compared, found: Comparison, settings: Sequence[str]) -> tuple[str, ...]:
    engines, told = seen.engines, dict(seen.engines.settings)
    return (
        str(engines.replicas),
        str(engines.knob),
        str(engines.total),
        *(told[name] for name in settings),
        figure(engines.rate, 4),
        _share(seen.gain),
        _range(seen.gain) or ABSENT,
        _share(seen.at_equal_total),
        milliseconds(mean(engines.latency_s)),
        figure(seen.latency.value if seen.latency else None),
        figure(_power(engines)),
        milliseconds(engines.energy_per_token_j),
        _mark(seen, found),
    )


def _share(gain: Interval | None) -> str:
    return ABSENT if gain is None else hundredths(gain.value, signed=True)


def _range(gain: Interval | None) -> str:
    if gain is None or gain.low is None or gain.high is None:
        return ""
    return f"{hundredths(gain.low, signed=True)} to {hundredths(gain.high, signed=True)}"


def _power(engines: EngineSet) -> float | None:
    known = [watts for watts in engines.power_w if watts is not None]
    return mean(known) if len(known) == len(engines.throughput) else None


def _mark(seen: Compared, found: Comparison) -> str:
    if seen.engines.preempted:
        return f"preempted {seen.engines.preemptions:g} times"
    return "baseline" if seen.engines is found.baseline else "<-- best" if seen is found.best else ""


# Findings


def findings(found: Comparison, names: ReplicaColumns) -> Iterator[tuple[str, str]]:
    """Pairs of what is looked at and what was found."""
    one = f"{_called(found.baseline, found)} with {figure(found.baseline.rate, 4)} {names.columns.throughput}"
    if found.best is None or found.best.gain is None:
        yield "baseline", one
        yield "best", "none: every row of several engines preempted"
        return
    best = found.best.engines
    rate = f"{_called(best, found)} with {figure(best.rate, 4)} {names.columns.throughput}"
    yield "best", f"{rate}, {_gain(found.best.gain)} over {one}{_costs(found.best, found, names)}"
    if why := "; ".join(_why_not(found, best)):
        yield "not chosen", why
    for other, gain in found.others[:MOST_OTHERS]:
        over = f"over {_called(other, found)} with {figure(other.rate, 4)}"
        yield "other baseline", f"{over} the gain would be {_gain(gain)}"
    if len(found.others) > MOST_OTHERS:
        yield "other baseline", f"and {len(found.others) - MOST_OTHERS} more; --json has all"


def _called(engines: EngineSet, found: Comparison) -> str:
    """ "2 engines of 256 (chunked_prefill=False)" """
    shown = _settings(found)
    told = ", ".join(f"{name}={value}" for name, value in engines.settings if name in shown)
    number = "one engine" if engines.replicas == 1 else f"{engines.replicas} engines"
    return f"{number} of {engines.knob}" + (f" ({told})" if told else "")


def _gain(gain: Interval) -> str:
    """ "+33.7 % (95 %: +30.1 to +37.4 %)" """
    interval = f" (95 %: {_range(gain)} %)" if _range(gain) else ""
    return f"{_share(gain)} %{interval}{_doubt(gain)}"


def _doubt(gain: Interval) -> str:
    low, high = (gain.value if end is None else end for end in (gain.low, gain.high))
    return ", which is a loss" if high < 0 else ", which may be nothing" if low <= 0 else ""


def _costs(best: Compared, found: Comparison, names: ReplicaColumns) -> str:
    """Latency, and energy where power is known, beside the baseline's."""
    parts = []
    if best.latency:
        parts.append(f"{figure(best.latency.value)} times its {names.columns.latency}")
    ours, theirs = best.engines.energy_per_token_j, found.baseline.energy_per_token_j
    if ours is not None and theirs is not None:
        parts.append(f"{milliseconds(ours)} instead of {milliseconds(theirs)} mJ per token")
    return "".join(f"; {part}" for part in parts)


def _why_not(found: Comparison, best: EngineSet) -> Iterator[str]:
    """What has more but preempted, on either side, and what comes next."""
    for engines in (seen.engines for seen in found.rows if seen.engines.preempted):
        rival = best if engines.replicas > 1 else found.baseline
        if engines.rate > rival.rate and (engines.replicas > 1 or engines.eligible):
            rate = figure(engines.rate, 4)
            yield f"{rate} by {_called(engines, found)}, which preempted {engines.preemptions:g} times"
    rest = [s.engines for s in found.rows if s.engines.replicas > 1 and not s.engines.preempted]
    if rest := [s for s in rest if s is not best]:
        second = max(rest, key=lambda s: s.rate)
        yield f"next come {_called(second, found)}, {percent(1 - second.rate / best.rate)} below the best"
    if found.alike:
        yield f"the noise does not tell the best from {', '.join(_called(s, found) for s in found.alike)}"


def _notes(found: Comparison, names: ReplicaColumns) -> Iterator[str]:
    """What a reader of the numbers alone should know."""
    knob, one = names.columns.knob, found.baseline
    tried = {s.engines.knob for s in found.rows if s.engines.replicas == 1}
    if one.knob == max(tried):
        yield f"no larger {knob} of one engine was tried: the best of one may be more, and the gain less"
    if names.power and any(_power(s.engines) is None for s in found.rows):
        yield f"{names.power} is not known everywhere: energy is told where it is"
    if found.gain and found.gain.low is None:
        yield "nothing was repeated: the noise is not known, and there are no intervals"


# JSON


def as_json(found: Comparison, names: ReplicaColumns, notes: Sequence[str] = ()) -> str:
    """One object; "value" with "low" and "high", null where unknown. Seconds, joules and shares, nothing rounded."""
    return json.dumps(record(found, names, notes), indent=2, allow_nan=False)


def record(found: Comparison, names: ReplicaColumns, notes: Sequence[str] = ()) -> dict[str, Any]:
    entries = [_entry(seen, found) for seen in found.rows]
    return {
        "baseline": next(entry for entry in entries if entry["baseline"]),
        "best": next((entry for entry in entries if entry["chosen"]), None),
        "gain": ends(found.gain),
        "rows": entries,
        "other_baselines": [{**_facts(other), "gain": ends(gain)} for other, gain in found.others],
        "notes": [*_notes(found, names), *notes],
    }


def _entry(seen: Compared, found: Comparison) -> dict[str, Any]:
    return {
        **_facts(seen.engines),
        "gain": ends(seen.gain),
        "gain_at_equal_total": ends(seen.at_equal_total),
        "latency_ratio": ends(seen.latency),
        "baseline": seen.engines is found.baseline,
        "chosen": seen is found.best,
    }


def _facts(engines: EngineSet) -> dict[str, Any]:
    """Means over the repeats."""
    return {
        "replicas": engines.replicas,
        "knob": engines.knob,
        "total": engines.total,
        "settings": dict(engines.settings),
        "throughput": engines.rate,
        "latency_s": mean(engines.latency_s),
        "repeats": len(engines.throughput),
        "preemptions": engines.preemptions,
        "preempted": engines.preempted,
        "power_w": _power(engines),
        "energy_per_token_j": engines.energy_per_token_j,
    }
