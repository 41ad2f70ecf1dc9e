"""Plain values of vLLM's steps and limits. Every field may be missing, because vLLM's classes are not stable between
releases."""

import asyncio
import time
from contextlib import suppress
from typing import Any


def step_row(scheduler_stats: Any, iteration_stats: Any) -> tuple[Any, ...] | None:
    """Time, running, waiting, new tokens, prompt tokens, KV usage and preemptions of one engine step. None if nothing
    was computed, because the scheduler reports again when it runs dry."""
    new_tokens = getattr(iteration_stats, "num_generation_tokens", 0)
    if not new_tokens:
        return None
    return (
        time.monotonic(),
        getattr(scheduler_stats, "num_running_reqs", None),
        getattr(scheduler_stats, "num_waiting_reqs", None),
        new_tokens,
        getattr(iteration_stats, "num_prompt_tokens", 0),
        getattr(scheduler_stats, "kv_cache_usage", None),
        getattr(iteration_stats, "num_preempted_reqs", 0),
    )


def resolved(config: Any) -> dict[str, Any]:
    """The limits that an engine really runs with, and the package of the front end's event loop, if there is one."""
    cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
    capture = getattr(config.compilation_config, "cudagraph_capture_sizes", None)
    event_loop = None
    with suppress(RuntimeError):
        event_loop = type(asyncio.get_running_loop()).__module__.split(".")[0]
    return {
        "kv_blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_model_len": model.max_model_len,
        "capture_sizes": None if capture is None else list(capture),
        "chunked_prefill": getattr(scheduler, "enable_chunked_prefill", None),
        "prefix_caching": cache.enable_prefix_caching,
        "async_scheduling": getattr(scheduler, "async_scheduling", None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "event_loop": event_loop,
    }
