"""Facts that only vLLM's model process knows, asked through `worker_extension_cls`.

vLLM imports this module in that process when all else is imported and the device is not yet touched. So this is the
place for an engine that shares its device to wait for its turn.
"""

import gc
import os
import time
from pathlib import Path
from typing import Any

LOOK_S = 0.05
# How far caches of a kind look back: None for all tokens, 0 for a state of one size.
KINDS = {"FullAttentionSpec": None, "MLAAttentionSpec": None, "MambaSpec": 0}

if not gc.isenabled():  # for the imports, by `vllm_worker`
    gc.enable()
    gc.collect()  # now, and not in the middle of a window
if turn := os.environ.get("SLM_TURN"):  # a file that is there as soon as it is our turn; our guardian ends the wait
    Path(f"{turn}.{os.getpid()}").touch()  # says that this process waits, and since when
    while not Path(turn).exists():
        time.sleep(LOOK_S)


class Facts:
    """Mixed into vLLM's worker, whose `model_runner` holds the model."""

    def slm_facts(self) -> dict[str, Any]:
        model = self.model_runner.model  # type: ignore[attr-defined]
        weights = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}  # tied weights count once
        packed = any(p.device.type == "cpu" for p in model.parameters())  # oneDNN keeps matrices where we cannot count
        backends = set()
        for module in model.modules():
            if type(module).__name__ in ("Attention", "EncoderOnlyAttention") and hasattr(module, "impl"):
                flash = getattr(module.impl, "vllm_flash_attn_version", None)
                backends.add(type(module.impl).__name__.removesuffix("Impl") + (f" {flash}" if flash else ""))
        return {
            "weight_bytes": None if packed else sum(weights.values()),
            "attention_backend": ", ".join(sorted(backends)) or None,
            "kv_windows": group_windows(getattr(self.model_runner, "kv_cache_config", None)),  # type: ignore[attr-defined]
            "compile_s": getattr(getattr(self, "compilation_config", None), "compilation_time", None),
        }


def group_windows(config: Any) -> list[int | None] | None:
    """Tokens that each group of layers looks back: None for all tokens, 0 for a state of one size. None if a group is
    of an unknown kind, or if the blocks of the groups are not equally long."""
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
