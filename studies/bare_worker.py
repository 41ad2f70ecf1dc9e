"""The engine worker with one more answer: the same load by a loop that measures nothing (for harness_cost.py); a signal
stops the garbage collector, of the engine core too, and another starts it (for noise_sources.py)."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from typing import Any

from vllm_worker import Server, StepTrace, greedy, run_worker  # the package's worker folder is on the path

signal.signal(signal.SIGUSR1, lambda *_: gc.disable())  # the engine core is forked, or imports this module
signal.signal(signal.SIGUSR2, lambda *_: gc.enable())


class BareServer(Server):
    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["op"] != "bare":
            return await super().answer(message)
        return await self.bare(message["concurrency"], message["requests"])

    async def bare(self, concurrency: int, requests: int) -> dict[str, Any]:
        """No trace, no stamps, no progress: `concurrency` loops over one iterator of requests."""
        self.runs += 1
        numbers, parameters = iter(range(requests)), {tokens: greedy(tokens) for tokens in set(self.output_tokens)}
        record, StepTrace.record = StepTrace.record, lambda *_, **__: None  # type: ignore[method-assign]
        gc.collect()
        gc.freeze()

        async def user() -> None:
            for number in numbers:
                index = number % len(self.prompts)
                chosen = parameters[self.output_tokens[index]]
                async for _ in self.engine.generate(self.prompts[index], chosen, f"bare{self.runs}-{number}"):
                    pass

        began = time.monotonic()
        await asyncio.gather(*(user() for _ in range(concurrency)))
        seconds = time.monotonic() - began
        gc.unfreeze()
        StepTrace.record = record  # type: ignore[method-assign]
        return {"event": "bare", "seconds": seconds}


if __name__ == "__main__":
    run_worker(BareServer)
