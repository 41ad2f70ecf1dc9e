"""Predictions for the engines beside the measured results: as text, and as facts for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_slmserve.analysis.advice.verification import Verification, Verified, VerifiedTogether
from pytest_slmserve.analysis.points.replica_points import engines
from pytest_slmserve.analysis.stats.estimates import Interval, percent, times
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.numbers import (
    ABSENT,
    between,
    counted,
    ends,
    figure,
    gib,
    hundredths,
    listed,
    milliseconds,
    whole,
)
from pytest_slmserve.report.tables.run import verdict_lines
from pytest_slmserve.report.text_table import Column, hanging, table

COLUMNS: tuple[Column[Verified], ...] = (
    Column("\nmodel", lambda v: v.advice.subject.name, "left"),
    Column("\nbatch", lambda v: str(v.advice.batch)),
    Column("tokens/s\npredicted", lambda v: _rate(v.advice.advised.tokens_per_s if v.advice.advised else None)),
    Column("tokens/s\nmeasured", lambda v: _rate(v.tokens_per_s)),
    Column("of it\n%", lambda v: hundredths(v.ratio.value if v.ratio else None)),
    Column("95 %\n", lambda v: ends(v.ratio, hundredths), "left", rank=2),
    Column("ms/token\npredicted", lambda v: _latency(v.advice.advised.latency_s if v.advice.advised else None), rank=1),
    Column("ms/token\nmeasured", lambda v: _latency(v.latency_s), rank=1),
    Column(
        "ms/token\nat most",
        lambda v: milliseconds(v.advice.decision.limit.seconds if v.advice.decision.limit else None),
        rank=3,
    ),
    Column("KV blocks\npredicted", lambda v: whole(v.kv_blocks[0]), rank=5),
    Column("KV blocks\nreported", lambda v: whole(v.kv_blocks[1]), rank=5),
    Column("GiB\npredicted", lambda v: gib(v.advice.needs.total_bytes if v.advice.needs else None), rank=6),
    Column("GiB\nin use", lambda v: gib(v.memory_bytes), rank=6),
    Column("pre-\nempted", lambda v: str(v.preemptions) if v.point else ABSENT, rank=4),
)
ALWAYS = 4  # columns that are shown even where nothing is known
LEGEND = (
    "of it: measured over predicted tokens/s. ms/token: between output tokens; at most: the latency wanted. KV blocks: "
    "of the cache that this engine was given. in use: of the device's memory at most, by anybody, where sensors tell."
)
JOINT = ("models", "loads", "sharing", "gain", "bound", "latency_s", "preemptions", "verdicts")
ONE_BY_ONE = "1 is what serving one after the other would give"


def text(seen: Verification, notes: Sequence[str] = ()) -> str:
    """Table, what several engines served together, verdicts, notes."""
    engines = "the engine" if len(seen.alone) == 1 else "each engine"
    heading = f"verified: {engines} as advised, measured anew, {counted(seen.repeats, 'repeat')} each"
    pieces = [heading, table(seen.alone, COLUMNS, ALWAYS), hanging(LEGEND, 0)]
    if seen.together and seen.together.point:
        pieces.append(hanging(_together(seen.together, seen.alone), 2))
    pieces.append("\n".join(line for line, _ in verdict_lines([(verdict, None) for verdict in seen.verdicts])))
    if notes:
        pieces.append("\n".join(hanging(f"note: {note}", 2) for note in notes))
    return "\n\n".join(pieces)


def _rate(seen: Interval | None) -> str:
    return figure(seen.value if seen else None, 4)


def _latency(seen: Interval | None) -> str:
    return milliseconds(seen.value if seen else None)


def _together(seen: VerifiedTogether, alone: Sequence[Verified]) -> str:
    """Throughput of several engines that served at once, compared with one engine alone and with the bound."""
    point = seen.point
    said = f"together, by {seen.sharing}: {engines(seen.models)} at {listed(seen.loads)} in flight"
    if point is None or not point.valid:
        return said
    said = f"{said} serve {figure(point.output_tokens_per_s, 4)} tokens/s"
    if len(set(seen.models)) > 1:
        own = {each.advice.subject.name: each.tokens_per_s for each in alone}
        parts = zip(seen.models, point.each_tokens_per_s, (own.get(model) for model in seen.models))
        each = (f"{model}: {percent(rate / of.value) if of else ABSENT} of its own" for model, rate, of in parts)
        said += f" ({', '.join(each)})"
    if seen.gain:
        shares = f"the sum of their shares of what each has alone is {figure(seen.gain.value)}{between(seen.gain)}"
        what = f"{shares}, {ONE_BY_ONE}"
        said += f"; {what}" if len(set(seen.models)) > 1 else f", {times(seen.gain)} what the one engine does"
        said += "; nothing bounds it" if seen.bound is None else f"; the bound is {figure(seen.bound)}"
    if seen.latency_s is not None:
        said += f"; the slowest takes {milliseconds(seen.latency_s)} ms per output token"
    return said


def verification_facts(seen: Verification, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Facts on what was measured; what was predicted is in those of the advice."""
    return {
        **facts(seen, "state", "margin", "repeats"),
        "models": [_model(each) for each in seen.alone],
        "together": seen.together
        and {
            **facts(seen.together, *JOINT),
            **facts(seen.together.point, "output_tokens_per_s", "each_tokens_per_s", "records"),
        },
        "notes": notes,
    }


def _model(seen: Verified) -> dict[str, Any]:
    return {
        "model": seen.advice.subject.name,
        "batch": seen.advice.batch,
        **facts(seen, "tokens_per_s", "latency_s", "ratio", "memory_bytes", "preemptions", "verdicts"),
        "kv_blocks": dict(zip(("predicted", "reported"), seen.kv_blocks)),
        **facts(seen.point, "records"),
    }
