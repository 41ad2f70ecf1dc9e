"""The engine worker with vLLM's synchronous engine in it, asked as `vllm bench latency` asks (for harness_cost.py)."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

from slm_facts import Facts  # the package's worker folder is on the path
from slm_steps import resolved
from vllm_worker import Server, main

BATCHED_TOKENS = 16384  # vLLM's own limit for its synchronous engine, on a GPU of 70 GiB or more


class Limited(Facts):
    """One engine for both limits: its buffers are made for the larger, and its scheduler is told which one to keep."""

    def limit(self, tokens: int) -> int:
        """The number of schedulers told; they live in the process of the model."""
        told = [found for found in gc.get_objects() if type(found).__name__.endswith("Scheduler")]
        told = [scheduler for scheduler in told if hasattr(scheduler, "max_num_scheduled_tokens")]
        for scheduler in told:
            scheduler.max_num_scheduled_tokens = tokens
        return len(told)


class LatencyServer(Server):
    async def start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        from vllm import LLM

        changes = {"worker_extension_cls": "latency_worker.Limited", "disable_log_stats": True}
        self.engine = LLM(**arguments | changes | {"max_num_batched_tokens": BATCHED_TOKENS})
        self.engine.shutdown = self.engine.llm_engine.engine_core.shutdown
        return {**resolved(self.engine.llm_engine.vllm_config), "parts": self.engine.collective_rpc("slm_facts")}

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message.pop("op") == "load":
            return self.load(**message)
        return self.batch(**message)

    def batch(
        self, requests: int, output_tokens: int, temperature: float, batched_tokens: int, own: bool
    ) -> dict[str, Any]:
        """Seconds of one call for so many requests. own: with prompts as vLLM's benchmark makes them, not with ours."""
        from vllm import SamplingParams

        prompts = self.prompts[:requests]
        if own:
            draw, length = random.Random(0), len(prompts[0]["prompt_token_ids"])
            prompts = [{"prompt_token_ids": draw.choices(range(10_000), k=length)} for _ in prompts]
        told = self.engine.collective_rpc("limit", args=(batched_tokens,))
        parameters = SamplingParams(
            temperature=temperature, top_p=1.0, ignore_eos=True, max_tokens=output_tokens, detokenize=False
        )
        began = time.perf_counter()
        self.engine.generate(prompts, parameters, use_tqdm=False)
        return {"event": "batch", "seconds": time.perf_counter() - began, "limited": sum(told)}


if __name__ == "__main__":
    main(LatencyServer)
