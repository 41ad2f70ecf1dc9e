"""Labels that tell curves of one model apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from pytest_slmserve.analysis.metrics.roofline import Peaks, Work, peaks_of_engine, work_of_workload
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import GIB, EngineSpec

# Fields of an engine's specification that a label names otherwise, or that change no measurement.
NAMED_APART = ("model", "platform", "interface", "url", "tensor_parallel_size", "gpu", "python", "env", "extra")


def labels(curves: Sequence[Curve]) -> list[str]:
    """The subject of each curve, with what tells it from others of the same subject."""
    return [", ".join([curve.subject, *_distinction(curve, curves)]) for curve in curves]


def _distinction(curve: Curve, curves: Sequence[Curve]) -> list[str]:
    alike = [other for other in curves if other.subject == curve.subject]
    rivals, own = list(map(_facts, alike)), _facts(curve)
    plain = [fact for i, fact in enumerate(own) if any(rival[i : i + 1] != [fact] for rival in rivals)]
    measured = [other.first for other in alike if other.first]
    if curve.first is None:
        return plain
    requests = _differing(_requests(curve.first), list(map(_requests, measured)))
    specs = [_of_one_cache(other.spec, curve.first.spec) for other in measured]
    return [*plain, *requests, *_differing(_arguments(curve.first.spec), list(map(_arguments, specs)))]


def _of_one_cache(other: EngineSpec, own: EngineSpec) -> EngineSpec:
    """The other, with the KV cache of `own` where it has another number of GPUs: that number tells them apart."""
    same = other.tensor_parallel_size == own.tensor_parallel_size
    return other if same else replace(other, kv_cache_bytes=own.kv_cache_bytes)


def _facts(curve: Curve) -> list[str]:
    """What can differ between two curves of one model beside requests and engine, the plainest first; empty where
    nothing was measured."""
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
    ]


_Named = tuple[dict[str, str], str]  # settings that a label may name, and the hash of all, for where they are the same


def _differing(own: _Named, others: Sequence[_Named]) -> list[str]:
    """The settings of `own` that are not those of all others; the hash where all have the same words."""
    settings, of_all = own
    if all(its == of_all for _, its in others):
        return []
    told = [text for name, text in settings.items() if any(each.get(name) != text for each, _ in others)]
    elsewhere = dict.fromkeys(name for each, _ in others for name in each if name not in settings)
    return [*told, *(f"{name} unset" for name in elsewhere)] or [of_all]


def _requests(first: Measurement) -> _Named:
    spec = first.workload.spec
    lengths = (
        f"{spec.prompt_tokens or 'natural'}/{spec.output_tokens} tokens" if spec.output_tokens else "natural lengths"
    )
    others = {name: value for name, value in asdict(spec).items() if name not in ("prompt_tokens", "output_tokens")}
    return {"lengths": lengths, **_settings(others)}, f"workload {first.workload.hash[:6]}"


def _arguments(spec: EngineSpec) -> _Named:
    """Limits and arguments of the engine, without those that a label names separately: server, front ends, GPUs."""
    spec = replace(spec.without_http if spec.interface == "server" else spec, tensor_parallel_size=1)
    own = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name not in NAMED_APART}
    settings = _settings({**own, **dict(spec.env), **dict(spec.extra)})
    return settings | {"kv_cache_bytes": f"KV cache {spec.kv_cache_bytes / GIB:.6g} GiB"}, f"engine {spec.key[:6]}"


def _settings(values: Mapping[str, Any]) -> dict[str, str]:
    """A label for each value, by the name that vLLM has for it: "max_num_seqs 256", "no enforce_eager"."""
    return {name: _words(name, value) for name, value in values.items()}


def _words(name: str, value: Any) -> str:
    if isinstance(value, bool) or value == "":
        return name if value else f"no {name}"
    return f"{name} {value}"


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
