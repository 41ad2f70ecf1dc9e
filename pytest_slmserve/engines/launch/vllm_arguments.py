"""Arguments and environment of a vLLM process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from pytest_slmserve.engines.launch.child_process import Child, still_waiting
from pytest_slmserve.schema.errors import Caches, Side
from pytest_slmserve.schema.files import own_cache
from pytest_slmserve.schema.secret_words import passed_on
from pytest_slmserve.schema.specs import GIB, EngineSpec
from pytest_slmserve.telemetry.host import own_cores

LOOK_S = 0.05
START_S = 900.0  # a first start compiles; a large model is read from a slow disk


class StartTurn:
    """Begins when made, which is when the engine is launched. A file in `folder` says that the turn has come; beside it
    each process of a held engine puts one of its own when it has imported all, and waits (`worker/slm_facts.py`)."""

    def __init__(self, folder: Path, processes: int, held: bool) -> None:
        self._file, self._processes = folder / "turn", processes
        self._began, self._waited_s = time.monotonic(), 0.0
        self.extra_env: Mapping[str, str] = {"SLM_TURN": str(self._file)} if held else {}

    def give(self) -> None:
        """Give the engine its turn: what it has waited for that until now is no part of its start."""
        if since := self._waiting_since():
            self._waited_s = max(0.0, time.time() - since)
        self._file.touch()

    def await_import(self, child: Child, within_s: float) -> None:
        """Wait until all processes of the engine wait for their turn, or it has ended, which its start will report.
        Raises EngineFailed after `within_s` seconds."""
        until = time.monotonic() + within_s
        while not self._waiting_since() and child.process.poll() is None:
            if time.monotonic() > until:
                raise child.failed(f"had not imported vLLM after {within_s:.0f} s")
            still_waiting(child.log)
            time.sleep(LOOK_S)

    @property
    def start_s(self) -> float:
        """Seconds since the engine was launched, less what it waited for its turn."""
        return time.monotonic() - self._began - self._waited_s

    def _waiting_since(self) -> float | None:
        """The time of day when the last of its processes began to wait; None: not all do."""
        stamps = [path.stat().st_mtime for path in self._file.parent.glob(f"{self._file.name}.*")]
        return max(stamps) if len(stamps) >= self._processes else None


class StaggeredEngine:
    """The base of an engine that can be launched before its turn: the wait for the turn, and the start."""

    child: Child
    _turn: StartTurn

    def await_turn(self) -> None:
        """Wait until an engine that was held has imported what it needs, or has ended. Raises EngineFailed where it
        takes more than START_S seconds."""
        self._turn.await_import(self.child, START_S)

    def start(self) -> None:
        """The turn of one that was held: it takes the device, and is ready for a load when this returns."""
        self._turn.give()
        self._finish_start()

    def _finish_start(self) -> None:
        """Wait until it is ready for a load. Raises EngineFailed where it does not start."""
        raise NotImplementedError


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
    """Objects come as their JSON text (see `options.table.argument`)."""
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
