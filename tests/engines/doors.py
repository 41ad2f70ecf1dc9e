"""Specifications of engines that are no vLLM, and a small workload for any of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from real_engine import SPEC

from pytest_slmserve.models import shape_of
from pytest_slmserve.records import Workload
from pytest_slmserve.spec import EngineSpec, WorkloadSpec
from pytest_slmserve.workload.build import build_workload

STAND_IN = Path(__file__).parent / "stand_in"
FAKE = replace(SPEC, backend="fake")


def stand_in(**extra: Any) -> EngineSpec:
    """Our door and our worker in their own process, with a stand-in for vLLM that has the faults in `extra`."""
    return replace(SPEC, env=(("PYTHONPATH", str(STAND_IN)),), extra=tuple(extra.items()))


def small_workload(requests: int = 32, output_tokens: int = 8) -> Workload:
    spec = WorkloadSpec(prompt_tokens=16, output_tokens=output_tokens, requests=requests)
    return build_workload(spec, shape_of(SPEC.model))
