"""What the advisor says, as one JSON object: units in the keys, nothing rounded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_slmserve.analysis.advice.advisor import (
    Advice,
    CombinedPlacement,
    Needs,
    OperatingPoint,
    Plan,
    ReplicaAdvice,
)
from pytest_slmserve.analysis.advice.headroom import Ceiling, Gains
from pytest_slmserve.analysis.advice.subjects import ResultSource
from pytest_slmserve.analysis.compare.deployments import deployments, on_several_gpus
from pytest_slmserve.analysis.stats.estimates import Interval
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.report.advice.deploy_commands import Start, line, starts
from pytest_slmserve.report.advice.text import general, no_memory, objective, why
from pytest_slmserve.report.tables.several_gpus import best_on_several, name_of


def as_json(plan: Plan, source: ResultSource, curves: Sequence[Curve] | None = None) -> str:
    return json.dumps(record(plan, source, curves), indent=2, allow_nan=False)


def record(plan: Plan, source: ResultSource, curves: Sequence[Curve] | None = None) -> dict[str, Any]:
    """Estimates are objects with "value", "low" and "high" (95 %); null is what is not known. curves: of the models
    asked about, which may have been served on several GPUs; None: nobody looked."""
    wish = plan.wish
    return {
        "device": source.device,
        "gpu_memory_bytes": wish.gpu_bytes,
        "memory_share_ratio": wish.memory_share,
        "efficiency_threshold_ratio": wish.threshold,
        "objective": None if wish.slo is None else objective(wish.slo),
        "latency": source.latency,
        "price_per_hour": wish.price_per_hour,
        "models": [_model(advice) for advice in plan.advices],
        "together": None if plan.together is None else _together(plan.together),
        "several_gpus": None if curves is None else [one for curve in curves for one in _on_several(curve)],
        "starts": [_start(start) for start in starts(plan)],
        "notes": list(general(plan, source)),
    }


def _model(advice: Advice) -> dict[str, Any]:
    seen = advice.decision
    return {
        "model": advice.subject.name,
        "batch_requests": advice.batch,
        "b_opt_requests": {"value": seen.batch, "low": seen.low, "high": seen.high},
        "predicted": seen.predicted,
        "reason": seen.reason or None,
        "latency_limit_s": seen.limit.seconds if seen.limit else None,
        "caps_requests": {"efficiency": _finite(seen.caps.efficiency), "latency": _finite(seen.caps.slo)},
        "advised": None if advice.advised is None else _offer(advice.advised),
        "largest": None if advice.largest is None else _offer(advice.largest),
        "single": None if advice.single is None else _offer(advice.single),
        "memory": None if advice.needs is None else _memory(advice, advice.needs),
        "no_memory": no_memory(advice) if advice.subject.footprint is None else None,
        "engines": None if advice.replicas is None else _engines(advice.replicas),
        "gain": None if advice.gains is None else _gain(advice.gains),
        "notes": [*seen.notes, *advice.subject.notes],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _ends(seen: Interval | None) -> dict[str, float | None]:
    return {end: None if seen is None else _finite(getattr(seen, end)) for end in ("value", "low", "high")}


def _offer(seen: OperatingPoint) -> dict[str, Any]:
    return {
        "batch_requests": seen.batch,
        "tokens_per_s": _ends(seen.tokens_per_s),
        "share_of_largest_ratio": _finite(seen.share),
        "latency_s": _ends(seen.latency_s),
        "efficiency_ratio": _finite(seen.efficiency),
        "cost_per_million_output_tokens": _ends(seen.cost),
        "predicted": seen.predicted,
    }


def _memory(advice: Advice, seen: Needs) -> dict[str, Any]:
    footprint = advice.subject.footprint
    return {
        "request_tokens": footprint.longest if footprint else None,
        "block_tokens": footprint.block_size if footprint else None,
        "kv_blocks": seen.kv_blocks,
        "kv_bytes": seen.kv_bytes,
        "weight_bytes": footprint.weight_bytes if footprint else None,
        "allowance_bytes": footprint.allowance_bytes if footprint else None,
        "allowance_from_sensors": footprint.allowance_seen if footprint else None,
        "total_bytes": seen.total_bytes,
        "gpu_memory_utilization_ratio": seen.utilization,
        "freed_bytes": seen.freed_bytes,
        "freed_of_gpu_ratio": seen.freed_share,
    }


def _engines(seen: ReplicaAdvice) -> dict[str, Any]:
    return {
        "fit_with_batch_each_count": seen.at_batch,
        "fit_with_batch_divided_count": seen.split,
        "advised_count": seen.advised,
        "advised_batch_requests": seen.each,
        "reason": seen.why,
    }


def _gain(seen: Gains) -> dict[str, Any]:
    return {
        "seen_at_requests": seen.at,
        "time_slicing": None if seen.time_slicing is None else _bound(seen.time_slicing),
        "mps": None if seen.mps is None else _bound(seen.mps),
        "power_of_limit_ratio": seen.power_share,
    }


def _bound(seen: Ceiling) -> dict[str, Any]:
    return {"at_most_ratio": seen.factor, "unit": seen.unit, "busy_ratio": seen.busy, "reason": why(seen)}


def _together(seen: CombinedPlacement) -> dict[str, Any]:
    return {
        "fits": seen.fits,
        "total_bytes": seen.total_bytes,
        "budget_bytes": seen.budget_bytes,
        "below_b_opt": list(seen.lowered),
    }


def _on_several(curve: Curve) -> Iterator[dict[str, Any]]:
    """What to deploy there, where there was a choice."""
    for gpus, load, best in best_on_several(curve, deployments(curve) if on_several_gpus(curve) else ()):
        chosen = {
            f"best_{wish}": {
                "deployment": name_of(one),
                "engines_count": one.engines,
                "gpus_per_engine_count": one.tensor_parallel,
                wish: _finite(value),
            }
            for wish, (one, value) in best.items()
        }
        yield {"model": curve.subject, "gpus_count": gpus, "in_flight_requests": load, **chosen}


def _start(start: Start) -> dict[str, Any]:
    return {"what": start.what, "under_mps": start.mps, "commands": [line(words) for words in start.commands]}
