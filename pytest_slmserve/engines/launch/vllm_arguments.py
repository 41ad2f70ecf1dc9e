"""Arguments, model files and environment of a vLLM process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from pytest_slmserve.schema.errors import BadUsage, Caches, Side, user_cache
from pytest_slmserve.schema.models import Model, hub_name, short_name
from pytest_slmserve.schema.printable import passed_on
from pytest_slmserve.schema.specs import GIB, OWN_FIELDS, EngineSpec, short_hash
from pytest_slmserve.telemetry.host import own_cores

WORKER = Path(__file__).parent.parent / "worker" / "vllm_worker.py"
PATIENCE_S = 86_400  # of vLLM with its own core, which may wait for its turn: we limit how long a start may take
# NVLink's multicast needs a fabric manager that containers may not reach, and without it an engine on several GPUs
# hangs in its first all-reduce. Users who have it say so with --slm-env, which the records then show.
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


def engine_arguments(spec: EngineSpec, model: str) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs for `spec`, with `model` a folder or a Hub name."""
    arguments = {
        "model": model,
        "load_format": spec.load_format,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": spec.prefix_caching,
        "worker_extension_cls": "slm_facts.Facts",
        "disable_log_stats": False,
        **{name: getattr(spec, name) for name in sorted(OWN_FIELDS)},
    }
    if spec.platform == "cuda":
        arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
        if spec.kv_cache_bytes:
            arguments["kv_cache_memory_bytes"] = spec.kv_cache_bytes
    if spec.tensor_parallel_size > 1:
        arguments["tensor_parallel_size"] = spec.tensor_parallel_size
    for name, value in spec.extra:  # objects come as their JSON text (`options.table.argument`)
        arguments[name] = json.loads(value) if isinstance(value, str) and value.startswith("{") else value
    return arguments


def engine_environment(spec: EngineSpec, inherited: Mapping[str, str], cores: Collection[int] = ()) -> dict[str, str]:
    """The environment of an engine: the part of ours that an engine may see, what its platform needs, and last what the
    specification says. A token of the Hub is passed on only if real weights are loaded.

    Args:
        cores: The CPU cores of an engine that is pinned. Each of its processes gets as many, neighbors together.
    """
    env = passed_on(inherited, hub=spec.load_format == "auto")
    env |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    env["VLLM_ENGINE_READY_TIMEOUT_S"] = f"{PATIENCE_S}"  # of all engines: it is in the hash of what is compiled
    if spec.load_format == "dummy":
        env["HF_HUB_OFFLINE"] = "1"
    several = spec.tensor_parallel_size > 1
    ours = sorted(cores or own_cores() or range(os.cpu_count() or 1))
    each = max(1, len(ours) // spec.tensor_parallel_size)
    parts = [ours[i * each : (i + 1) * each] for i in range(spec.tensor_parallel_size)]
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}
    if spec.platform == "cpu":
        env |= {"VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_bytes // GIB)} | (bound if several else {})
    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    if spec.platform == "cuda" and (several or spec.gpu > 0 or visible):
        devices = [device.strip() for device in visible.split(",") if device.strip()]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[i] if devices else str(i) for i in spec.gpus)
        if several or spec.gpu > 0:  # by the order of the bus, which is NVML's: CUDA's own puts the fastest first
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    env |= {**(WITHOUT_MULTICAST if several else {}), **dict(spec.env)}
    if cores and spec.platform == "cpu":
        env |= bound
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(WORKER.parent), env.get("PYTHONPATH", "")]))
    return env


def model_for(spec: EngineSpec) -> str:
    """The name or folder by which the engine loads its model: with dummy weights a folder of ours with its
    configuration and a tokenizer. Raises BadUsage if that folder cannot be made."""
    if spec.load_format == "auto":
        return hub_name(spec.model)
    model = spec.known_model
    files = {"config.json": json.dumps(dict(model.config)), **tokenizer_files(model)}
    return str(kept(short_name(spec.model), files))


def kept(name: str, files: Mapping[str, str]) -> Path:
    """A folder of the user's cache with these files, made if it does not exist. Its name depends on their content.
    Raises BadUsage if it cannot be made, or holds something else, because then another model would be measured."""
    folder = user_cache() / f"{name}-{short_hash(dict(files))}"
    try:
        if not folder.is_dir():
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = Path(mkdtemp(prefix=".new-", dir=folder.parent))
            for file, text in files.items():
                (made / file).write_text(text, "utf-8")
            try:
                made.rename(folder)
            except OSError:  # another start made it meanwhile
                shutil.rmtree(made)
                if not folder.is_dir():
                    raise
    except OSError as error:
        why = f"cannot describe {name} in {folder.parent}: {error.strerror}"
        raise BadUsage(why, "XDG_CACHE_HOME=FOLDER that can be written to") from None
    try:
        same = all((folder / file).read_text("utf-8") == text for file, text in files.items())
    except (OSError, ValueError):
        same = False
    if not same:
        raise BadUsage(f"{folder} does not hold what it was made with: somebody changed it", f"rm -r '{folder}'")
    return folder


def tokenizer_files(model: Model) -> dict[str, str]:
    """The files of a tokenizer with a word for each token, because a server turns tokens into text and with dummy
    weights there is no tokenizer. No token is special, because special tokens have no text, and a server does not send
    a token without text."""
    words = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(model.vocabulary)}, "unk_token": "t0"}
    described: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": words,
    }
    described |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return {"tokenizer.json": json.dumps(described), "tokenizer_config.json": json.dumps(named)}


ROOT = "VLLM_CACHE_ROOT"
COLD = (ROOT, "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@contextmanager
def caches(how: Caches, side: Side, specs: Mapping[Side, EngineSpec]) -> Iterator[Mapping[str, str]]:
    """Environment variables with the caches of compiled code, for a launch of that side of a gate.

    Cold: an empty folder, which is removed afterwards. vLLM 0.32 keeps what it compiles in VLLM_CACHE_ROOT
    (`vllm/envs.py`), and inductor's part of it too; Triton's unless TRITON_CACHE_DIR is set
    (`vllm/compilation/compiler_interface.py`). Other compiled code is kept in TORCHINDUCTOR_CACHE_DIR
    (`torch/_inductor/runtime/cache_dir_utils.py`) and TRITON_CACHE_DIR.

    Warm: the usual caches. If the sides may run different code, because they differ in interpreter or variables, each
    side has a folder of its own, which stays. vLLM keeps what it knows of a model's class for one version of its file
    (`vllm/model_executor/models/registry.py`), so two releases that take turns in one folder would each import vLLM
    again, in one more process. A side whose variables name a cache keeps that cache.
    """
    if how == "cold":
        with TemporaryDirectory(prefix="pytest-slmserve-cold-", ignore_cleanup_errors=True) as folder:
            yield {name: str(Path(folder) / name.lower()) for name in COLD}
    elif len({(spec.python, spec.env) for spec in specs.values()}) > 1 and ROOT not in dict(specs[side].env):
        yield {ROOT: str(Path(os.environ.get(ROOT) or user_cache()) / f"gate-{side}")}
    else:
        yield {}
