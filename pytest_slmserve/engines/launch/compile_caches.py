"""Caches of compiled code: where a launch of a gate finds such code, and leaves it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pytest_slmserve.engines.launch.vllm_arguments import NOWHERE_ELSE
from pytest_slmserve.schema.catalog import own_cache
from pytest_slmserve.schema.literals import Caches, Side
from pytest_slmserve.schema.specs import EngineSpec

ROOT = "VLLM_CACHE_ROOT"
COLD = (ROOT, "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@contextmanager
def caches(how: Caches, side: Side, specs: Mapping[Side, EngineSpec]) -> Iterator[Mapping[str, str]]:
    """Variables of a launch of that side.

    Cold: a folder that is empty, and ends with it. vLLM 0.32 keeps what it compiles in VLLM_CACHE_ROOT
    (`vllm/envs.py`), and inductor's part of it too; Triton's unless TRITON_CACHE_DIR is set
    (`vllm/compilation/compiler_interface.py`). What is compiled beside that is kept where TORCHINDUCTOR_CACHE_DIR
    (`torch/_inductor/runtime/cache_dir_utils.py`) and TRITON_CACHE_DIR say.

    Warm: the caches of everybody. Where the sides may run different code, for they differ in interpreter or variables,
    each has a folder of its own, which stays:
    vLLM keeps what it knows of a model's class for one version of its file (`vllm/model_executor/models/registry.py`),
    so of two releases that take turns in one folder each would import vLLM once more, in a process beside it. A side
    that says itself where its caches are has them there.
    """
    if how == "cold":
        with TemporaryDirectory(prefix="pytest-slmserve-cold-", ignore_cleanup_errors=True) as folder:
            yield {name: str(Path(folder) / name.lower()) for name in COLD}
    elif len({(spec.python, spec.env) for spec in specs.values()}) > 1 and ROOT not in dict(specs[side].env):
        yield {ROOT: str(Path(os.environ.get(ROOT) or own_cache()) / f"gate-{side}")}
    else:
        yield NOWHERE_ELSE
