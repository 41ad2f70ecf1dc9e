"""The engine worker with vLLM's synchronous engine in it, asked as `vllm bench latency` asks (for harness_cost.py)."""

from __future__ import annotations

import random
import time
from typing import Any

from vllm_worker import Server, resolved, run_worker  # the package's worker folder is on the path


class LatencyServer(Server):
    async def start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        from vllm import LLM

        self.engine = LLM(**arguments | {"disable_log_stats": True, "max_num_batched_tokens": None})  # its own limit
        self.engine.shutdown = self.engine.llm_engine.engine_core.shutdown
        return {**resolved(self.engine.llm_engine.vllm_config), "parts": self.engine.collective_rpc("slm_facts")}

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        del message["op"]
        return self.batch(**message)

    def batch(self, requests: int, output_tokens: int, temperature: float, own: bool) -> dict[str, Any]:
        """Seconds of one call for so many requests. own: with prompts as vLLM's benchmark makes them, not with ours."""
        from vllm import SamplingParams

        prompts = self.prompts[:requests]
        if own:
            draw, length = random.Random(0), len(prompts[0]["prompt_token_ids"])
            prompts = [{"prompt_token_ids": draw.choices(range(10_000), k=length)} for _ in prompts]
        parameters = SamplingParams(
            temperature=temperature, top_p=1.0, ignore_eos=True, max_tokens=output_tokens, detokenize=False
        )
        began = time.perf_counter()
        self.engine.generate(prompts, parameters, use_tqdm=False)
        return {"event": "batch", "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    run_worker(LatencyServer)
