"""A stand-in for vLLM with the names that our worker uses: each sequence gets one token per step.

So the worker, its process, the interface and what ends them are tested without vLLM. `EngineSpec.extra` plants faults.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BLOCK_SIZE = 128
CACHED_BLOCK = 4  # tokens
STAMPS = ("scheduled_ts", "first_token_ts", "last_token_ts", "num_generation_tokens")


class EngineDeadError(Exception):
    """Named as vLLM's own."""


@dataclass
class AsyncEngineArgs:
    """What our interface hands over, then what a test plants.

    step_s: seconds per step. fault: "" or what happens - "raise", "exit" or "sleep" at the start; with
    `fault_at` requests having come "exit", "dead" (every request from then on raises), "refuse" (so many raise, the
    rest is served), "unanswered"; "sleepless": it is not put to sleep.
    """

    model: str
    load_format: str
    skip_tokenizer_init: bool
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enforce_eager: bool
    enable_prefix_caching: bool
    seed: int
    worker_extension_cls: str
    disable_log_stats: bool
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int = 1
    step_s: float = 0.002
    fault: str = ""
    fault_at: int = 0

    def create_engine_config(self) -> SimpleNamespace:
        """Called as vLLM's is, once, before it has any process."""
        device, parallel = SimpleNamespace(device_type="stand-in"), SimpleNamespace(distributed_executor_backend="uni")
        return SimpleNamespace(device_config=device, parallel_config=parallel)


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    ignore_eos: bool
    detokenize: bool
    output_kind: str


def likely(token: int) -> float:
    """Log probability of a token: it says 7 and nothing else."""
    return -0.5 if token == 7 else -2.0


@dataclass
class Sequence:
    prompt: list[int]
    wanted: int
    tokens: list[int] = field(default_factory=list)
    stamps: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(**dict.fromkeys(STAMPS, 0)))
    cached: int = 0
    reason: str | None = None
    stepped: asyncio.Event = field(default_factory=asyncio.Event)

    def step(self, began: float, now: float) -> None:
        stamps = self.stamps
        stamps.scheduled_ts, stamps.first_token_ts = stamps.scheduled_ts or began, stamps.first_token_ts or now
        stamps.last_token_ts = now
        stamps.num_generation_tokens += 1
        self.tokens.append(7)
        self.end("length" if len(self.tokens) == self.wanted else None)

    def end(self, reason: str | None) -> None:
        self.reason = self.reason or reason
        self.stepped.set()

    async def step_made(self) -> None:
        self.stepped.clear()
        await self.stepped.wait()

    def output(self) -> SimpleNamespace:
        completion = SimpleNamespace(finish_reason=self.reason, token_ids=self.tokens)
        told = {"prompt_token_ids": self.prompt, "num_cached_tokens": self.cached}
        told["prompt_logprobs"] = [None, *({t: SimpleNamespace(logprob=likely(t))} for t in self.prompt[1:])]
        return SimpleNamespace(outputs=[completion], metrics=self.stamps, **told)


class AsyncLLMEngine:
    """Has a process of its own, as vLLM's engine core is one: it must not be left behind."""

    @classmethod
    def from_engine_args(cls, arguments: AsyncEngineArgs, stat_loggers: list[Any]) -> AsyncLLMEngine:
        print("INFO all is imported", flush=True)
        arguments.create_engine_config()
        importlib.import_module(arguments.worker_extension_cls.partition(".")[0])
        print("INFO the stand-in starts", flush=True)
        match arguments.fault, arguments.fault_at:
            case "raise", _:
                raise ValueError("max_model_len is larger than\nthe model allows")
            case "exit", 0:
                print("FATAL out of memory", flush=True)
                os._exit(3)
            case "sleep", _:
                time.sleep(600)
        return cls(arguments, stat_loggers[0](None, 0))

    def __init__(self, arguments: AsyncEngineArgs, trace: Any) -> None:
        self.arguments, self.trace = arguments, trace
        self.core = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        self.sequences: dict[str, Sequence] = {}
        self.came = self.looked_up = self.found = 0
        self.prefixes: set[tuple[int, ...]] = set()
        self.adapters: set[str] = set()
        self.stepping: asyncio.Task[None] | None = None
        of = SimpleNamespace
        cache = {"num_gpu_blocks": blocks(arguments.model), "block_size": BLOCK_SIZE}
        limits = {"max_num_seqs": arguments.max_num_seqs, "max_num_batched_tokens": arguments.max_num_batched_tokens}
        model = of(max_model_len=arguments.max_model_len, dtype=f"torch.{arguments.dtype}")
        self.vllm_config = of(
            cache_config=of(**cache, enable_prefix_caching=arguments.enable_prefix_caching), model_config=model,
            scheduler_config=of(**limits), compilation_config=of(),
        )  # fmt: skip

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        assert method == "slm_facts"
        stages = {"imported_s": importlib.import_module("slm_facts").imported_s, "stages": {"device": 0.0}}
        return [{"weight_bytes": None, "attention_backend": "stand-in", **stages}]

    def admitted(self, prompt: dict[str, list[int]], parameters: SamplingParams, name: str) -> Sequence:
        self.came += 1
        if self.arguments.fault == "refuse" and self.came <= self.arguments.fault_at:
            raise ValueError("refused, as planted")
        if self.hit("exit"):
            os._exit(5)
        if self.hit("dead"):
            raise EngineDeadError("EngineCore encountered an issue")
        ids = prompt["prompt_token_ids"]
        sequence = self.sequences[name] = Sequence(ids, parameters.max_tokens, cached=self.kept(ids))
        self.stepping = self.stepping or asyncio.create_task(self.step_for_ever())
        return sequence

    def kept(self, ids: list[int]) -> int:
        """Tokens of the prompt in the cache of prefixes, in whole blocks, of which the last is always computed."""
        begins = [tuple(ids[:end]) for end in range(CACHED_BLOCK, len(ids), CACHED_BLOCK)]
        found = sum(begin in self.prefixes for begin in begins) * CACHED_BLOCK
        if self.arguments.enable_prefix_caching:
            self.prefixes.update(begins)
        self.looked_up, self.found = self.looked_up + len(ids), self.found + found
        return found

    async def tokens(self, prompt: dict[str, list[int]], parameters: SamplingParams, name: str) -> Any:
        """Each token as soon as it is there, for a server."""
        sequence, told = self.admitted(prompt, parameters, name), 0
        while told < len(sequence.tokens) or not sequence.reason:
            if told == len(sequence.tokens):
                await sequence.step_made()
            for token in sequence.tokens[told:]:
                told += 1
                yield token
        del self.sequences[name]

    async def add_lora(self, request: Any) -> bool:
        """Load an adapter from its folder, if it is of a rank that there are slots for."""
        told = json.loads((Path(request.lora_path) / "adapter_config.json").read_text("utf-8"))
        if not self.arguments.enable_lora or told["r"] > self.arguments.max_lora_rank:
            raise ValueError(f"no slot for an adapter of rank {told['r']}")
        self.adapters.add(request.lora_name)
        return True

    async def sleep(self, level: int) -> None:
        if self.arguments.fault == "sleepless":
            raise ValueError("Sleep mode is not enabled in the model config")
        await asyncio.sleep(0.02 * level)

    async def wake_up(self) -> None:
        await asyncio.sleep(0.05)

    async def generate(
        self, prompt: dict[str, list[int]], parameters: SamplingParams, name: str, lora_request: Any = None
    ) -> Any:
        if lora_request and lora_request.lora_name not in self.adapters:
            raise ValueError(f"{lora_request.lora_name} was not loaded")
        sequence = self.admitted(prompt, parameters, name)
        while not sequence.reason:
            await sequence.step_made()
        del self.sequences[name]
        if not self.hit("unanswered"):
            yield sequence.output()

    def hit(self, fault: str) -> bool:
        return fault == self.arguments.fault and self.came >= self.arguments.fault_at

    async def step_for_ever(self) -> None:
        while True:
            began = time.monotonic()
            wanted = [s for s in self.sequences.values() if not s.reason]
            await asyncio.sleep(self.arguments.step_s)
            if batch := [s for s in wanted[: self.arguments.max_num_seqs] if not s.reason]:
                self.step(batch, len(wanted), began)

    def step(self, batch: list[Sequence], waiting: int, began: float) -> None:
        prompts = sum(len(s.prompt) for s in batch if not s.tokens)
        for sequence in batch:
            sequence.step(began, time.monotonic())
        running = sum(not s.reason for s in batch)
        self.trace.record(
            SimpleNamespace(num_running_reqs=running, num_waiting_reqs=waiting - len(batch), kv_cache_usage=0.1),
            SimpleNamespace(num_generation_tokens=len(batch), num_prompt_tokens=prompts, num_preempted_reqs=0),
        )

    async def abort(self, names: list[str]) -> None:
        for name in self.sequences.keys() & names:
            self.sequences[name].end("abort")

    def shutdown(self) -> None:
        self.core.kill()
        self.core.wait()


def blocks(model: str) -> int:
    """KV blocks of a two-byte type, as vLLM's CPU backend counts them."""
    config = json.loads((Path(model) / "config.json").read_text("utf-8"))
    per_token = 2 * 2 * config["num_hidden_layers"] * config["hidden_size"]
    return (int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) << 30) // (BLOCK_SIZE * per_token)
