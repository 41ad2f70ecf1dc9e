"""Facts that only vLLM's model process has, requested through `worker_extension_cls`.

vLLM imports this module in that process after all others, before it uses the device. This module therefore also times
the stages of the start, and makes an engine that shares its device wait for its turn.
"""

import gc
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

LOOK_S = 0.05
# Tokens that caches of a kind look back: None for all, 0 for a state of one size.
KINDS = {"FullAttentionSpec": None, "MLAAttentionSpec": None, "MambaSpec": 0}
WORKERS = {"vllm.v1.worker.gpu_worker": "Worker", "vllm.v1.worker.cpu_worker": "CPUWorker"}
STAGES = {  # of a start, by the worker's methods; compiling in a method is a separate stage
    "init_device": "device",
    "load_model": "weights",
    "determine_available_memory": "profile",
    "initialize_from_config": "kv cache",
    "compile_or_warm_up_model": "capture",
}
imported_s = time.monotonic()  # on our parent's clock
took_s = defaultdict[str, float](float)  # of each stage
running: list[str] = []  # the timed stage, because a method may call the one of its base class


def compiled_s(worker: Any) -> float:
    """Return the seconds of compiling so far, by vLLM's count."""
    config = getattr(worker, "compilation_config", None)
    return sum(getattr(config, f"{of}compilation_time", 0.0) for of in ("", "encoder_"))


def as_stage(method: Callable[..., Any], stage: str) -> Callable[..., Any]:
    """Return a method of vLLM's worker whose seconds are added to a stage."""

    @wraps(method)
    def timed_method(worker: Any, *args: Any, **kwargs: Any) -> Any:
        if running:
            return method(worker, *args, **kwargs)
        began, compiled = time.monotonic(), compiled_s(worker)
        running.append(stage)
        try:
            return method(worker, *args, **kwargs)
        finally:
            running.clear()
            compiling = max(0.0, compiled_s(worker) - compiled)
            took_s["compile"] += compiling
            took_s[stage] += max(0.0, time.monotonic() - began - compiling)

    return timed_method


for module, name in WORKERS.items():
    kind = getattr(sys.modules.get(module), name, None)
    for method, stage in STAGES.items():
        if kind and (own := vars(kind).get(method)):  # a release may lack it
            with suppress(Exception):  # an engine starts, whatever a release has in its place
                setattr(kind, method, as_stage(own, stage))

if not gc.isenabled():  # for the imports, by `vllm_worker`
    gc.enable()
    gc.collect()  # now, and not in the middle of a window
if turn := os.environ.get("SLM_TURN"):  # a file that exists as soon as it is our turn; our guardian ends the wait
    Path(f"{turn}.{os.getpid()}").touch()  # shows that this process waits, and since when
    while not Path(turn).exists():
        time.sleep(LOOK_S)


class Facts:
    """A part of vLLM's worker, whose `model_runner` holds the model."""

    def slm_facts(self) -> dict[str, Any]:
        model = self.model_runner.model  # type: ignore[attr-defined]
        weights = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}  # tied weights count once
        packed = any(p.device.type == "cpu" for p in model.parameters())  # oneDNN's matrices cannot be counted
        backends = set()
        for module in model.modules():
            if type(module).__name__ in ("Attention", "EncoderOnlyAttention") and hasattr(module, "impl"):
                flash = getattr(module.impl, "vllm_flash_attn_version", None)
                backends.add(type(module.impl).__name__.removesuffix("Impl") + (f" {flash}" if flash else ""))
        config = getattr(self, "compilation_config", None)
        return {
            "weight_bytes": None if packed else sum(weights.values()),
            "attention_backend": ", ".join(sorted(backends)) or None,
            "kv_windows": group_windows(getattr(self.model_runner, "kv_cache_config", None)),  # type: ignore[attr-defined]
            "compile_s": getattr(config, "compilation_time", None),
            "model_runner": type(self.model_runner).__module__.removeprefix("vllm.v1.worker."),  # type: ignore[attr-defined]
            "cudagraph_mode": getattr(getattr(config, "cudagraph_mode", None), "name", None),
            "imported_s": imported_s,
            "stages": dict(took_s),
        }


def group_windows(config: Any) -> list[int | None] | None:
    """Return the number of tokens that each group of layers looks back: None for all, 0 for a state of one size.

    None if a group is of an unknown kind, or if the blocks of the groups differ in length.
    """
    windows, sizes = [], set()
    for group in getattr(config, "kv_cache_groups", None) or ():
        spec = group.kv_cache_spec
        spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)  # of one kind, but of different heads
        kind = type(spec).__name__
        if kind not in KINDS and kind != "SlidingWindowSpec":
            return None
        windows.append(KINDS[kind] if kind in KINDS else int(spec.sliding_window))
        sizes |= {spec.block_size} if windows[-1] != 0 else set()
    return windows if windows and len(sizes) <= 1 else None
