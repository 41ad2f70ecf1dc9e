"""Advice as facts for JSON: what the advisor says of each model, and of all of them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pytest_slmserve.analysis.advice.advisor import Advice, Plan
from pytest_slmserve.analysis.advice.headroom import Ceiling
from pytest_slmserve.analysis.advice.subjects import ResultSource
from pytest_slmserve.analysis.compare.deployments import deployments, on_several_gpus
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.report.advice.deploy_commands import line, starts
from pytest_slmserve.report.advice.text import general, no_memory, objective, why
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.tables.several_gpus import best_on_several, name_of

FOOTPRINT = ("longest", "block_size", "weight_bytes", "allowance_bytes", "allowance_seen")
NEEDS = ("kv_blocks", "kv_bytes", "total_bytes", "utilization", "freed_bytes", "freed_share")


def advice_facts(plan: Plan, source: ResultSource, curves: Sequence[Curve] | None = None) -> dict[str, Any]:
    """Facts on a plan and each of its models. curves: of these models, on whatever GPUs; None: nobody looked."""
    wish = plan.wish
    return {
        **facts(source, "device", "latency"),
        **facts(wish, "gpu_bytes", "gpu_memory_utilization", "threshold", "price_per_hour"),
        "objective": wish.slo and objective(wish.slo),
        "models": [_model(advice) for advice in plan.advices],
        "together": plan.together,
        "several_gpus": None if curves is None else [one for curve in curves for one in _on_several(curve)],
        "starts": [{**facts(start, "what", "mps"), "commands": map(line, start.commands)} for start in starts(plan)],
        "notes": general(plan, source),
    }


def _model(advice: Advice) -> dict[str, Any]:
    seen, footprint, gains = advice.decision, advice.subject.footprint, advice.gains
    return {
        "model": advice.subject.name,
        **facts(advice, "batch", "advised", "largest", "single", "replicas"),
        "b_opt": {"value": seen.batch, **facts(seen, "low", "high")},
        **facts(seen, "predicted", "reason", "caps"),
        "limit_s": seen.limit and seen.limit.seconds,
        "memory": advice.needs and {**facts(footprint, *FOOTPRINT), **facts(advice.needs, *NEEDS)},
        "no_memory": None if footprint else no_memory(advice),
        "gains": gains
        and {**facts(gains, "at", "power_share"), "time_slicing": _bound(gains.time_slicing), "mps": _bound(gains.mps)},
        "notes": (*seen.notes, *advice.subject.notes),
    }


def _bound(seen: Ceiling | None) -> dict[str, Any] | None:
    return None if seen is None else {**facts(seen), "why": why(seen)}


def _on_several(curve: Curve) -> Iterator[dict[str, Any]]:
    """The best deployments for each number of GPUs and concurrency, a dict each; nothing without a choice."""
    for gpus, load, best in best_on_several(curve, deployments(curve) if on_several_gpus(curve) else ()):
        chosen = {
            f"best_{wish}": {"deployment": name_of(one), **facts(one, "engines", "tensor_parallel_size"), wish: value}
            for wish, (one, value) in best.items()
        }
        yield {"model": curve.subject, "gpus": gpus, "concurrency": load, **chosen}
