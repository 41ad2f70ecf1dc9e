"""What tables and charts of points share: where they were measured, validity, parts of a step and memory."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.metrics.gpu_figures import GpuMemory, StepParts, step_parts
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.report.text_table import ABSENT, Column, gib, hundredths, milliseconds
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import WorkloadReference


def served_on(where: Environment | None) -> str:
    """Return the device or the URL, and the release of vLLM."""
    device = where and (where.url or where.gpu_name or where.cpu or where.platform)
    vllm = f", vLLM {where.vllm}" if where and where.vllm else ""
    return f"{device or 'unknown device'}{vllm}"


def origin(where: Environment | None, workload: WorkloadReference | None = None) -> str:
    """Return the device, the release of vLLM and the mean lengths of the requests, for the title of a chart."""
    if where and where.platform == "simulated":
        return "SIMULATED, not measured on a device"
    if where is None or workload is None:
        return served_on(where)
    prompt, output = workload.mean_prompt_tokens, workload.mean_output_tokens
    return f"{served_on(where)}, {prompt:.0f} prompt and {output:.0f} output tokens"


def valid_cell(point: Point) -> str:
    """Return how far a point is valid: "NO", "degraded" (all repeats that are left), "partly" (some repeats are left
    out), "noisy" (the host was disturbed; all repeats count) or "yes"."""
    if not point.valid:
        return "NO"
    if point.degraded:
        return "degraded"
    return "partly" if point.left_out else "noisy" if point.noise else "yes"


def reasons(point: Point, name: str, used: str = "") -> Iterator[str]:
    """Yield a line on what was left out, on degradations and on noise. used: how many repeats count."""
    if point.left_out or not point.valid:
        kind = "left out" if point.valid else "INVALID"
        yield ": ".join([f"{kind}: {name}", *filter(None, (used, "; ".join(point.problems)))])
    if point.degraded:
        yield f"degraded: {name}: {'; '.join(point.degraded)}"
    if point.noise:
        yield f"noisy, kept: {name}: {first_of_each_kind(point.noise)}"


def first_of_each_kind(texts: Sequence[str]) -> str:
    """Return the first text of each kind, and how many more texts differ from it only in their figures."""
    kinds = grouped(texts, reason_kind).values()
    return "; ".join(f"{first}{f', and {len(more)} more like it' if more else ''}" for first, *more in kinds)


def reason_kind(text: str) -> str:
    """Return a reason without its figures."""
    return re.split(r":| [-+.\d]+ ", text, maxsplit=1)[0]


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
    """Return the column of a part of a step, in per cent; a part of nothing has an empty cell."""
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


def step_rows(curve: Curve) -> list[StepRow]:
    """Return the valid points of which the parts of a step are known."""
    each = ((point, step_parts([m for group in point.used for m in group])) for point in curve.valid)
    return [StepRow(point, parts) for point, parts in each if parts]


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """A set of engines with the most that their GPUs had in use under any load."""

    engines: str
    sharing: str
    memory: GpuMemory

    def each_gib(self, name: str) -> str:
        """Return a size of each engine in GiB, one of them if all are alike: "2.45", "0.234 + 2.45"."""
        sizes = [getattr(engine, name) for engine in self.memory.engines]
        return " + ".join(map(gib, sizes[:1] if len(set(sizes)) == 1 else sizes))


def memory_names(rows: Sequence[MemoryRow]) -> list[str]:
    """Return names of the rows, with their KV cache if only that tells two apart."""
    names = [f"{row.engines}, {row.sharing}" for row in rows]
    often = Counter(names)
    return [f"{name}, KV {row.each_gib('kv_bytes')} GiB" if often[name] > 1 else name for name, row in zip(names, rows)]


MEMORY: tuple[Column[MemoryRow], ...] = (
    Column("\nengines", lambda r: r.engines, "left"),
    Column("\nsharing", lambda r: r.sharing, "left"),
    Column("weights\nGiB each", lambda r: r.each_gib("weight_bytes")),
    Column("KV cache\nGiB each", lambda r: r.each_gib("kv_bytes")),
    Column("other\nGiB", lambda r: gib(r.memory.other_bytes)),
    Column("free\nGiB", lambda r: ABSENT if r.memory.used_bytes is None else gib(r.memory.left_bytes)),
    Column("other and\nunused GiB", lambda r: gib(r.memory.left_bytes) if r.memory.used_bytes is None else ABSENT),
    Column("of\nGiB", lambda r: gib(r.memory.total_bytes)),
)
