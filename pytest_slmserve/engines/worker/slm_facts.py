"""Facts that only vLLM's model process knows, asked through `worker_extension_cls`.

vLLM imports this module in that process when all else is imported and the device is not yet touched: the place for an
engine that shares its device to wait for its turn.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

LOOK_S = 0.05


def await_turn() -> None:
    """Wait until the file that SLM_TURN names is there; return at once without that variable. A file beside it says
    that we wait, and since when. Our guardian ends the wait."""
    if turn := os.environ.get("SLM_TURN"):
        Path(f"{turn}.{os.getpid()}").touch()
        while not Path(turn).exists():
            time.sleep(LOOK_S)


await_turn()


class Facts:
    """Mixed into vLLM's worker, whose `model_runner` holds the model."""

    def slm_facts(self) -> dict[str, Any]:
        model = self.model_runner.model  # type: ignore[attr-defined]
        weights = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}  # tied weights count once
        packed = any(p.device.type == "cpu" for p in model.parameters())  # oneDNN keeps matrices where we cannot count
        backends = {
            backend_name(m.impl) for m in model.modules() if type(m).__name__ == "Attention" and hasattr(m, "impl")
        }
        return {
            "weight_bytes": None if packed else sum(weights.values()),
            "attention_backend": ", ".join(sorted(backends)) or None,
            "compile_s": getattr(getattr(self, "compilation_config", None), "compilation_time", None),
        }


def backend_name(implementation: Any) -> str:
    name = type(implementation).__name__.removesuffix("Impl")
    version = getattr(implementation, "vllm_flash_attn_version", None)
    return f"{name} {version}" if version else name
