"""Values of the sensors: a row per point of a sweep, the parts of its step, and the energy of a token of each model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_slmserve.analysis.claims.gpu_claims import at_table_1
from pytest_slmserve.analysis.device.gpu_figures import Place, fastest_pieces, host_speed, probe_waiting
from pytest_slmserve.analysis.metrics.roofline import StepParts, step_parts
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.sweep.curve import Curve, labels
from pytest_slmserve.report.text_table import ABSENT, Column, figure, hundredths, milliseconds, table, telling

# What the legend says of columns.
ENERGY_OF_A_TOKEN = "mJ/token: energy of an output token."
OWN_CORES = "own cores: CPU time of this run's processes."
HOST_SPEED = "host speed: of its cores, relative to the fastest seen beside any window, by a fixed piece of Python."
HOST_WAIT = "host wait: share of the time of that piece in which it had no core."
REST = "rest: unexplained share of a step, which neither its bytes nor its FLOPs fill at the data sheet."
BOUND = "bound: the resource nearest to its peak, by the counters."


@dataclass(frozen=True, slots=True)
class SensedPoint:
    """A point that sensors were read beside. host_speed: of the fastest known of its host."""

    point: Point
    host_speed: float | None = None

    @property
    def host_wait(self) -> float | None:
        return probe_waiting(self.point.probe_s, self.point.probe_cpu_s)


def _share(head: str, name: str, rank: int, about: str = "") -> Column[SensedPoint]:
    """Column of a share of time, or of what there is, in per cent."""
    return Column(head, lambda at: hundredths(getattr(at.point, name)), about=about, rank=rank)


COLUMNS: tuple[Column[SensedPoint], ...] = (
    Column("in\nflight", lambda at: str(at.point.concurrency)),
    _share("GPU\nutil %", "gpu_util", 7, "GPU util: time in which any kernel ran, as NVML samples it."),
    _share("busy\n%", "engine_active", 3, "busy: the same by the profiling counters."),
    _share("SM %\nmean", "sm_active", 1, "SM: share of the SMs with work."),
    _share("SM %\nmax", "sm_active_max", 9),
    _share("warp %\nmean", "sm_occupancy", 6, "warp: warps resident, of those that fit (SM occupancy)."),
    _share("warp %\nmax", "sm_occupancy_max", 10),
    _share("DRAM\n%", "dram_active", 1, "DRAM, tensor: share of the time in which they were active."),
    _share("tensor\n%", "tensor_active", 1),
    Column("power\nW", lambda at: figure(at.point.power_w), rank=2),
    Column("mJ/\ntoken", lambda at: milliseconds(at.point.energy_per_token_j), about=ENERGY_OF_A_TOKEN),
    Column("clock\nMHz", lambda at: figure(at.point.sm_clock_hz and at.point.sm_clock_hz / 1e6, 4), rank=8),
    _share("cap\n%", "power_capped", 4, "cap: time in which the power limit held the clock down."),
    Column("own\ncores", lambda at: figure(at.point.own_cores), about=OWN_CORES, rank=5),
    Column("host\nspeed %", lambda at: hundredths(at.host_speed), about=HOST_SPEED, rank=4),
    Column("host\nwait %", lambda at: hundredths(at.host_wait), about=HOST_WAIT, rank=8),
    _share("rest\n%", "unexplained", 5, REST),
    Column("\nbound", lambda at: at.point.bound or ABSENT, "left", BOUND, 3),
    Column("\nsensors", lambda at: "degraded" if at.point.degraded else "ok" if at.point.valid else ABSENT, "left"),
)
STEP_LEGEND = (
    "Parts of a step: weights, KV: to move the weights, and the keys and values, at the data sheet's rate. FLOPs: what "
    "arithmetic takes beyond both. other kernels: the further time in which a kernel ran. no kernel: the GPU waited "
    "for the host. Not known: what the host does then (schedule, sample, hand out) or beside a kernel, and which part "
    "of the kernels is attention."
)


@dataclass(frozen=True, slots=True)
class StepRow:
    """A point with the parts of its mean step."""

    point: Point
    parts: StepParts


def _part(head: str, name: str) -> Column[StepRow]:
    """Column of a part of a step, in per cent; empty where it is nothing."""
    return Column(head, lambda row: hundredths(share) if (share := getattr(row.parts, name)) else "")


STEP_PARTS: dict[str, Column[StepRow]] = {  # by the fields of `StepParts`, in the order of a bar
    "weights": _part("weights\n%", "weights"),
    "kv": _part("KV\n%", "kv"),
    "flops": _part("FLOPs\n%", "flops"),
    "kernels": _part("other\nkernels %", "kernels"),
    "idle": _part("no\nkernel %", "idle"),
    "unsplit": _part("kernels and\nhost %", "unsplit"),
}
STEP: tuple[Column[StepRow], ...] = (
    Column("in\nflight", lambda row: str(row.point.concurrency)),
    Column("step\nms", lambda row: milliseconds(row.point.step_s)),
    *STEP_PARTS.values(),
)
ENERGY: tuple[Column[tuple[str, Point]], ...] = (
    Column("model", lambda row: row[0], "left"),
    Column("in flight", lambda row: str(row[1].concurrency)),
    Column("tokens/s", lambda row: figure(row[1].output_tokens_per_s, 4)),
    Column("power W", lambda row: figure(row[1].power_w)),
    Column("J/token", lambda row: figure(row[1].energy_per_token_j)),
)


def sensor_table(curve: Curve, fastest: Mapping[Place, float] | None = None) -> str:
    """One row per point with its sensors; empty without any. fastest: see `fastest_pieces`; None: of this curve."""
    seen = _sensed(curve, fastest_pieces(curve.measurements) if fastest is None else fastest)
    return table(seen, COLUMNS) if seen else ""


def step_rows(curve: Curve) -> list[StepRow]:
    """Valid points of which the parts of a step are known."""
    each = ((point, step_parts([m for group in point.used for m in group])) for point in curve.valid)
    return [StepRow(point, parts) for point, parts in each if parts]


def step_table(curve: Curve) -> str:
    """One row per point with the parts of its step; empty where none is known."""
    rows = step_rows(curve)
    return table(rows, STEP) if rows else ""


def legend(curves: Sequence[Curve]) -> str:
    """Explanation of the columns in the tables of these sweeps."""
    shown = {
        column for curve in curves for column in telling(_sensed(curve, fastest_pieces(curve.measurements)), COLUMNS)
    }
    return " ".join(column.about for column in COLUMNS if column in shown and column.about)


def _sensed(curve: Curve, fastest: Mapping[Place, float]) -> list[SensedPoint]:
    """Points that were looked at."""
    seen = [p for p in curve.points if any(v is not None for v in (p.gpu_util, p.sm_active, p.power_w, p.own_cores))]
    return [SensedPoint(p, host_speed((m for group in p.used for m in group), fastest)) for p in seen]


def energy_report(curves: Sequence[Curve]) -> Iterator[str]:
    """Energy per output token of each model at its largest batch of the paper's table 1, a table for each power limit:
    figures under different limits are of different cards."""
    named = zip(labels(curves), curves, strict=True)
    found = [(label, point) for label, curve in named if (point := at_table_1(curve))]
    for limit in dict.fromkeys(point.power_limit_w for _, point in found):
        rows = [row for row in found if row[1].power_limit_w == limit]
        under = "an unknown power limit" if limit is None else f"a power limit of {figure(limit)} W"
        title = f"Energy per output token at the largest batch of arXiv:2404.03353, table 1, under {under}"
        yield f"{title}\n\n{table(rows, ENERGY, always=len(ENERGY))}"
