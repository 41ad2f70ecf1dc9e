"""What tables and charts of points share: where they were measured, how far they are valid, and why."""

import re
from collections.abc import Iterator, Sequence

from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.points import Point
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
