"""What the sensors saw: a row per point of a sweep, and the energy of a token over all models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_slmserve.analysis.claims.gpu_claims import at_table_1
from pytest_slmserve.analysis.points.sweep_points import Point
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.labels import labels
from pytest_slmserve.report.numbers import ABSENT, figure, hundredths, milliseconds
from pytest_slmserve.report.text_table import grid

COLUMNS = (
    "in\nflight",
    "GPU\nutil %",
    "busy\n%",
    "SM %\nmean",
    "\nmax",
    "warp %\nmean",
    "\nmax",
    "DRAM\n%",
    "tensor\n%",
    "power\nW",
    "mJ/\ntoken",
    "clock\nMHz",
    "cap\n%",
    "own\ncores",
    "rest\n%",
    "\nbound",
    "\nsensors",
)
LEGEND = {
    "GPU\nutil %": "GPU util: time in which any kernel ran, as NVML samples it.",
    "busy\n%": "busy: the same by the profiling counters.",
    "SM %\nmean": "SM: share of the SMs with work.",
    "warp %\nmean": "warp: warps resident, of those that fit (SM occupancy).",
    "DRAM\n%": "DRAM, tensor: share of the time in which they were active.",
    "mJ/\ntoken": "mJ/token: energy of an output token.",
    "cap\n%": "cap: time in which the power limit held the clock down.",
    "own\ncores": "own cores: CPU time of this run's processes.",
    "rest\n%": "rest: unexplained share of a step, which neither its bytes nor its FLOPs fill at the data sheet.",
    "\nbound": "bound: by what is nearest to its end, by the counters.",
}
ENERGY_COLUMNS = ("model", "in flight", "tokens/s", "power W", "J/token")


def sensor_table(curve: Curve) -> str:
    """One row per point with its sensors; empty where none said anything."""
    rows, kept = _rows(curve)
    return _table([[row[i] for i in kept] for row in rows], [COLUMNS[i] for i in kept]) if rows else ""


def legend(curves: Sequence[Curve]) -> str:
    """How to read the columns that the tables of these sweeps have."""
    shown = {COLUMNS[i] for curve in curves for i in _rows(curve)[1]}
    return " ".join(text for column, text in LEGEND.items() if column in shown)


def _rows(curve: Curve) -> tuple[list[tuple[str, ...]], list[int]]:
    """Rows of the points that were looked at, and the places of the columns in which any of them has something."""
    seen = [p for p in curve.points if any(v is not None for v in (p.gpu_util, p.sm_active, p.power_w, p.own_cores))]
    rows = [_row(p) for p in seen]
    return rows, [i for i in range(len(COLUMNS)) if any(row[i] != ABSENT for row in rows)]


def _row(point: Point) -> tuple[str, ...]:
    return (
        str(point.concurrency),
        hundredths(point.gpu_util),
        hundredths(point.engine_active),
        hundredths(point.sm_active),
        hundredths(point.sm_active_max),
        hundredths(point.sm_occupancy),
        hundredths(point.sm_occupancy_max),
        hundredths(point.dram_active),
        hundredths(point.tensor_active),
        figure(point.power_w),
        milliseconds(point.energy_per_token_j),
        figure(None if point.sm_clock_hz is None else point.sm_clock_hz / 1e6, 4),
        hundredths(point.power_capped),
        figure(point.own_cores),
        hundredths(point.unexplained),
        point.bound or ABSENT,
        "degraded" if point.degraded else "ok" if point.valid else ABSENT,
    )


def _table(rows: Sequence[Sequence[str]], columns: Sequence[str]) -> str:
    words = {"model", "\nbound", "\nsensors"}
    sides = ["left" if name in words else "right" for name in columns]
    return grid(rows, columns, sides)


def energy_report(curves: Sequence[Curve]) -> Iterator[str]:
    """Energy per output token of each model at its largest batch of the paper's table 1, a table for each power limit:
    figures under different limits are of different cards."""
    named = zip(labels(curves), curves, strict=True)
    found = [(label, point) for label, curve in named if (point := at_table_1(curve))]
    for limit in dict.fromkeys(point.power_limit_w for _, point in found):
        rows = [_energy_row(label, point) for label, point in found if point.power_limit_w == limit]
        under = "an unknown power limit" if limit is None else f"a power limit of {figure(limit)} W"
        title = f"Energy per output token at the largest batch of arXiv:2404.03353, table 1, under {under}"
        yield f"{title}\n\n{_table(rows, ENERGY_COLUMNS)}"


def _energy_row(label: str, point: Point) -> tuple[str, ...]:
    return (
        label,
        str(point.concurrency),
        figure(point.output_tokens_per_s, 4),
        figure(point.power_w),
        figure(point.energy_per_token_j),
    )
