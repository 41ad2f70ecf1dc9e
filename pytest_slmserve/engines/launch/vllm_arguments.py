"""Arguments and environment of a vLLM process."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pytest_slmserve.engines.launch.staggered_start import StartTurn
from pytest_slmserve.schema.child_environment import passed_on
from pytest_slmserve.schema.specs import GIB, EngineSpec
from pytest_slmserve.telemetry.host_probe import own_cores

WORKER = Path(__file__).parent.parent / "worker" / "vllm_worker.py"
PATIENCE_S = 86_400  # of vLLM with its own core, which may wait for its turn; how long a start may take, we say
NOWHERE_ELSE: Mapping[str, str] = MappingProxyType({})
# Of an engine on several GPUs. NVLink's multicast needs a fabric manager that containers may not reach, and then an
# engine hangs in its first all-reduce; whoever has it says so with --slm-env, which the records then tell.
WITHOUT_MULTICAST: Mapping[str, str] = MappingProxyType(
    {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
)


def engine_arguments(spec: EngineSpec, model: str) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs for `spec`, with `model` a folder or a Hub name."""
    arguments: dict[str, Any] = {
        "model": model,
        "load_format": spec.load_format,
        "skip_tokenizer_init": True,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "enforce_eager": spec.enforce_eager,
        "enable_prefix_caching": spec.prefix_caching,
        "seed": spec.seed,
        "worker_extension_cls": "slm_facts.Facts",
        "disable_log_stats": False,
    }
    if spec.platform == "cuda":
        arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
        if spec.kv_cache_bytes:
            arguments["kv_cache_memory_bytes"] = spec.kv_cache_bytes
    if spec.tensor_parallel_size > 1:
        arguments["tensor_parallel_size"] = spec.tensor_parallel_size
    return arguments | {name: _argument(value) for name, value in spec.extra}


def _argument(value: Any) -> Any:
    """Objects come as their JSON text (see `options.parsers.argument`)."""
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


def engine_environment(spec: EngineSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: the part of ours that an engine may see, what its platform needs, and last what the
    specification says. A token of the Hub is only there where weights are loaded."""
    env = passed_on(inherited, hub=spec.load_format == "auto")
    env |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    env["VLLM_ENGINE_READY_TIMEOUT_S"] = f"{PATIENCE_S}"  # of all: it is in the hash of what is compiled
    if spec.load_format == "dummy":
        env["HF_HUB_OFFLINE"] = "1"
    if spec.platform == "cpu":
        env["VLLM_CPU_KVCACHE_SPACE"] = str(spec.kv_cache_bytes // GIB)
        if spec.tensor_parallel_size > 1:
            env["VLLM_CPU_OMP_THREADS_BIND"] = bound_to(
                own_cores() or range(os.cpu_count() or 1), spec.tensor_parallel_size
            )
    if spec.platform == "cuda":
        env |= visible_to(spec, env.get("CUDA_VISIBLE_DEVICES", ""))
    if spec.tensor_parallel_size > 1:
        env |= WITHOUT_MULTICAST
    env |= dict(spec.env)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(WORKER.parent), env.get("PYTHONPATH", "")]))
    return env


def visible_to(spec: EngineSpec, visible: str) -> dict[str, str]:
    """Variables by which an engine sees its own GPUs. visible: ours, "" for all. By the order of the bus, which is
    NVML's, where there is a choice: CUDA's own order puts the fastest first."""
    several = spec.tensor_parallel_size > 1 or spec.gpu > 0
    if not (several or visible):
        return {}
    ours = [device.strip() for device in visible.split(",") if device.strip()]
    seen = ",".join(ours[i] if ours else str(i) for i in spec.gpus)
    return {"CUDA_VISIBLE_DEVICES": seen} | ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if several else {})


def placement_env(
    spec: EngineSpec, extra_env: Mapping[str, str], cores: Collection[int], turn: StartTurn
) -> dict[str, str]:
    """Variables that say where, and when, an engine runs beside others."""
    env = {**extra_env, **turn.extra_env}
    if cores and spec.platform == "cpu":
        env["VLLM_CPU_OMP_THREADS_BIND"] = bound_to(cores, spec.tensor_parallel_size)
    return env


def bound_to(cores: Collection[int], processes: int) -> str:
    """The CPU cores of each of an engine's processes, in the syntax of vLLM's CPU backend: as many for each, neighbours
    together."""
    there, each = sorted(cores), max(1, len(cores) // processes)
    return "|".join(",".join(map(str, there[i * each : (i + 1) * each])) for i in range(processes))
