"""Report on several engines on one device, of external results: a table and findings, as text or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from pytest_slmserve.analysis.compare.external_replicas import Compared, EngineSet, ReplicaComparison
from pytest_slmserve.analysis.stats.estimates import Interval, percent
from pytest_slmserve.archive.external import Columns
from pytest_slmserve.report.as_json import as_json as json_text
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.external.sweep import external_figures, stem
from pytest_slmserve.report.numbers import ABSENT, ends, figure, hundredths, milliseconds
from pytest_slmserve.report.text_table import Column, named, table

MOST_OTHERS = 3  # other baselines that the text names
SIGNED = partial(hundredths, signed=True)


def text(found: ReplicaComparison, columns: Columns, notes: Sequence[str] = ()) -> str:
    """Table and findings. notes: what is known beside."""
    pairs = [*findings(found, columns), *(("note", note) for note in (*_notes(found, columns), *notes))]
    if any(row.at_equal_total for row in found.rows):
        pairs.append(("note", f"at equal total: over one engine whose {columns.knob} is the total of all engines"))
    return "\n".join([table(found.rows, table_columns(found, columns)), "", named(pairs)])


def table_columns(found: ReplicaComparison, columns: Columns) -> tuple[Column[Compared], ...]:
    """Columns of the table, named as the file has them."""

    def setting(name: str) -> Column[Compared]:
        return Column(name, lambda row: dict(row.engines.settings)[name], "left")

    return (
        Column(columns.replicas or "engines", lambda row: str(row.engines.replicas)),
        Column(columns.knob, lambda row: str(row.engines.limit)),
        Column("total", lambda row: str(row.engines.total), rank=4),
        *map(setting, _settings(found)),
        Column(columns.throughput, lambda row: figure(row.engines.rate, 4)),
        Column("gain %", lambda row: _share(row.gain)),
        Column("95 %", lambda row: ends(row.gain, SIGNED), "left", rank=1),
        Column("at equal\ntotal %", lambda row: _share(row.at_equal_total), rank=5),
        Column(f"{stem(columns.latency)}\nms", lambda row: milliseconds(row.engines.point.e2e_s), rank=2),
        Column("latency\nfactor", lambda row: figure(row.latency.value if row.latency else None), rank=6),
        Column("power\nW", lambda row: figure(row.engines.point.power_w), rank=7),
        Column("mJ/\ntoken", lambda row: milliseconds(row.engines.point.energy_per_token_j), rank=3),
        Column("note", lambda row: _mark(row, found), "left"),
    )


def _settings(found: ReplicaComparison) -> list[str]:
    """Names of settings in which sets differ."""
    names = [name for name, _ in {pair for row in found.rows for pair in row.engines.settings}]
    return sorted({name for name in names if names.count(name) > 1})


def _share(gain: Interval | None) -> str:
    return ABSENT if gain is None else SIGNED(gain.value)


def _mark(row: Compared, found: ReplicaComparison) -> str:
    best = "<-- best" if row is found.best else ""
    return "; ".join(row.engines.point.problems) or ("baseline" if row.engines is found.baseline else best)


def findings(found: ReplicaComparison, columns: Columns) -> Iterator[tuple[str, str]]:
    """Pairs of what is looked at and what was found."""
    one = f"{called(found.baseline, found)} with {figure(found.baseline.rate, 4)} {columns.throughput}"
    if found.best is None or found.best.gain is None:
        yield "baseline", one
        yield "best", "none: every row of several engines preempted"
        return
    best = found.best.engines
    rate = f"{called(best, found)} with {figure(best.rate, 4)} {columns.throughput}"
    yield "best", "; ".join([f"{rate}, {_gain(found.best.gain)} over {one}", *_costs(found.best, found, columns)])
    if why := "; ".join(_not_chosen(found, best)):
        yield "not chosen", why
    for other, gain in found.others[:MOST_OTHERS]:
        over = f"over {called(other, found)} with {figure(other.rate, 4)}"
        yield "other baseline", f"{over} the gain would be {_gain(gain)}"
    if len(found.others) > MOST_OTHERS:
        yield "other baseline", f"and {len(found.others) - MOST_OTHERS} more; --json has all"


def called(engines: EngineSet, found: ReplicaComparison) -> str:
    """ "2 engines of 256 (chunked_prefill=False)" """
    shown = _settings(found)
    settings = ", ".join(f"{name}={value}" for name, value in engines.settings if name in shown)
    number = "one engine" if engines.replicas == 1 else f"{engines.replicas} engines"
    return f"{number} of {engines.limit}" + (f" ({settings})" if settings else "")


def _gain(gain: Interval) -> str:
    """ "+33.7 % (95 %: +30.1 to +37.4 %)", and whether that may be no gain"""
    low, high = (gain.value if end is None else end for end in (gain.low, gain.high))
    doubt = ", which is a loss" if high < 0 else ", which may be nothing" if low <= 0 else ""
    known = "" if gain.low is None or gain.high is None else f" (95 %: {ends(gain, SIGNED)} %)"
    return f"{_share(gain)} %{known}{doubt}"


def _costs(best: Compared, found: ReplicaComparison, columns: Columns) -> Iterator[str]:
    """Latency, and energy where power is known, beside the baseline's."""
    if best.latency:
        yield f"{figure(best.latency.value)} times its {columns.latency}"
    ours, theirs = best.engines.point.energy_per_token_j, found.baseline.point.energy_per_token_j
    if ours is not None and theirs is not None:
        yield f"{milliseconds(ours)} instead of {milliseconds(theirs)} mJ per token"


def _not_chosen(found: ReplicaComparison, best: EngineSet) -> Iterator[str]:
    """Rejected alternatives: sets that served more but preempted, the runner-up, and those within noise of the best."""
    for engines in (row.engines for row in found.rows if row.engines.preempted):
        rival = best if engines.replicas > 1 else found.baseline
        if engines.rate > rival.rate and (engines.replicas > 1 or engines.eligible):
            had = "; ".join(engines.point.problems)
            yield f"{figure(engines.rate, 4)} by {called(engines, found)}, which had {had}"
    several = [row.engines for row in found.rows if row.engines.replicas > 1 and not row.engines.preempted]
    if rest := [engines for engines in several if engines is not best]:
        second = max(rest, key=lambda engines: engines.rate)
        yield f"next come {called(second, found)}, {percent(1 - second.rate / best.rate)} below the best"
    if found.alike:
        yield f"the noise does not tell the best from {', '.join(called(one, found) for one in found.alike)}"


def _notes(found: ReplicaComparison, columns: Columns) -> Iterator[str]:
    """Caveats for a reader of the numbers alone."""
    if found.baseline.limit == max(row.engines.limit for row in found.rows if row.engines.replicas == 1):
        yield f"no larger {columns.knob} of one engine was tried: the best of one may be more, and the gain less"
    if columns.power and any(row.engines.point.power_w is None for row in found.rows):
        yield f"{columns.power} is not known everywhere: energy is told where it is"
    if found.gain and found.gain.low is None:
        yield "nothing was repeated: the noise is not known, and there are no intervals"


def as_json(found: ReplicaComparison, columns: Columns, notes: Sequence[str] = ()) -> str:
    """One object. Seconds, joules and shares, nothing rounded; null is what is not known."""
    rows = entries(found)
    record = {
        "columns": columns,
        "baseline": next(row for row in rows if row["baseline"]),
        "best": next((row for row in rows if row["chosen"]), None),
        "gain": found.gain,
        "rows": rows,
        "other_baselines": [{**_facts(other), "gain": gain} for other, gain in found.others],
        "alike": [_facts(engines) for engines in found.alike],
        "notes": [*_notes(found, columns), *notes],
    }
    return json_text(record)


def entries(found: ReplicaComparison) -> list[dict[str, Any]]:
    """Rows, one for each set of engines, invalid ones too."""
    return [
        {
            **_facts(row.engines),
            "gain": row.gain,
            "gain_at_equal_concurrency": row.at_equal_total,
            "latency_factor": row.latency,
            "baseline": row.engines is found.baseline,
            "chosen": row is found.best,
        }
        for row in found.rows
    ]


def _facts(engines: EngineSet) -> dict[str, Any]:
    """Means over the repeats."""
    return {
        "replicas": engines.replicas,
        "concurrency": engines.total,
        "concurrency_per_replica": engines.limit,
        "settings": dict(engines.settings),
        **external_figures(engines.point),
        **facts(engines.point, "power_w", "energy_per_token_j"),
    }
