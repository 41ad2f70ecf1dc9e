"""Facts that only vLLM's model process knows, asked through `worker_extension_cls`."""

from __future__ import annotations

from typing import Any


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
        }


def backend_name(implementation: Any) -> str:
    name = type(implementation).__name__.removesuffix("Impl")
    version = getattr(implementation, "vllm_flash_attn_version", None)
    return f"{name} {version}" if version else name
