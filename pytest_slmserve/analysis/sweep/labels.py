"""Labels that tell curves of one model apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_slmserve.analysis.metrics.roofline import Peaks, Work, peaks_of_engine, work_of_workload
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.schema.specs import EngineSpec


def labels(curves: Sequence[Curve]) -> list[str]:
    """The subject of each curve, with what tells it from others of the same subject."""
    return [", ".join([curve.subject, *_distinction(curve, curves)]) for curve in curves]


def _distinction(curve: Curve, curves: Sequence[Curve]) -> list[str]:
    rivals = [_facts(other) for other in curves if other.subject == curve.subject]
    own = _facts(curve)
    return [fact for i, fact in enumerate(own) if any(rival[i : i + 1] != [fact] for rival in rivals)]


def _facts(curve: Curve) -> list[str]:
    """All that can differ between two curves of one model, the plainest first; empty where nothing was measured."""
    first, load = curve.first, curve.load
    if first is None or load is None:
        return []
    where = first.environment
    return [
        f"{first.spec.interface} interface{front_ends(first.spec)}",
        f"TP {first.spec.tensor_parallel_size}",
        f"ramp-up {load.ramp_up}",
        f"window {load.window_s:g} s",
        f"warm-up {load.settle_lifetimes:g}",
        where.url or where.gpu_name or where.cpu or "unknown device",
        f"vLLM {where.vllm or '-'}",
        f"workload {first.workload.hash[:6]}",
        f"engine {_limits(first.spec)[:6]}",
    ]


def _limits(spec: EngineSpec) -> str:
    """Key of the engine's specification, without the facts that a label names separately: server, front ends, GPUs."""
    return replace(spec.without_http if spec.interface == "server" else spec, tensor_parallel_size=1).key


def front_ends(spec: EngineSpec | None) -> str:
    """ " with 4 front ends"; empty for one."""
    return f" with {spec.front_ends} front ends" if spec and spec.front_ends > 1 else ""


def work_of_curve(curve: Curve) -> Work | None:
    """Work of a request of this sweep on a GPU; None where shape or data type are unknown."""
    if curve.spec is None or curve.workload is None or not curve.resolved:
        return None
    return work_of_workload(curve.spec, curve.resolved[0], curve.workload)


def peaks_of_curve(curve: Curve) -> Peaks | None:
    return peaks_of_engine(curve.spec, curve.environment) if curve.spec and curve.environment else None
