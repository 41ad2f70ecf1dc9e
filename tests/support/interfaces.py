"""Specifications of engines that are no vLLM, and a small workload for any of them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_engine import SPEC

from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.engines.endpoint import EndpointEngine
from pytest_slmserve.engines.server import ServerEngine
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import EngineSpec, Workload, WorkloadSpec
from pytest_slmserve.workload.requests import build_workload

STAND_IN = Path(__file__).with_name("stand_in")
SIMULATED = replace(SPEC, platform="simulated", enforce_eager=False)  # as the options make it


def stand_in(**extra: Any) -> EngineSpec:
    """Our interface and our worker in their own process, with a stand-in for vLLM that has the faults in `extra`."""
    return replace(SPEC, env=(("PYTHONPATH", str(STAND_IN)),), extra=tuple(extra.items()))


@contextmanager
def somebodys_server(**extra: Any) -> Iterator[ServerEngine]:
    """A server that somebody else has started, as far as a test goes: the stand-in behind a URL, with a key."""
    server = ServerEngine(replace(stand_in(**extra), interface="server")).start()
    try:
        yield server
    finally:
        server.close()


def engine_with(key: str, spec: EngineSpec, **options: Any) -> EndpointEngine:
    """The engine at an endpoint, for a user whose environment has this key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLM_ENDPOINT_KEY", key)
        return EndpointEngine(spec, **options)


def url_of(server: ServerEngine, path: str = "/v1/completions") -> str:
    return f"http://127.0.0.1:{server.port}{path}"


def problems_of(measurements: Iterable[Measurement]) -> list[str]:
    """What makes them invalid, but for what a busy machine does."""
    return [text for m in measurements for text in problems(m) if "the client lagged" not in text]


def batching_spec(batching: str, base: EngineSpec = SIMULATED, **extra: Any) -> EngineSpec:
    """An engine that makes batches of four in this way, one after the other."""
    how = tuple({**extra, "batching": batching, "wait_s": 0.1}.items())
    return replace(base, interface="transformers", max_num_seqs=4, max_model_len=2048, extra=how)


def natural_workload() -> Workload:
    """Twelve requests of different lengths."""
    spec = WorkloadSpec(prompt_tokens=None, output_tokens=None, requests=12)
    made = build_workload(spec, model_of("opt-tiny"))
    return replace(made, requests=tuple(replace(r, output_tokens=max(1, r.output_tokens // 16)) for r in made.requests))


def small_workload(requests: int = 32, output_tokens: int = 8, response_format: str = "") -> Workload:
    asked = {"requests": requests, "response_format": response_format}
    spec = WorkloadSpec(prompt_tokens=16, output_tokens=output_tokens, **asked)
    return build_workload(spec, model_of(SPEC.model))
