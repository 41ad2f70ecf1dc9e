"""As vLLM's, which reads the folder when the engine loads the adapter."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str
