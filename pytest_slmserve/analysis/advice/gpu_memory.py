"""GPU memory of engines: the KV cache that a batch needs, how many engines fit, and batches of models that share a GPU.

A batch has room for all of its requests at full length, so that none is ever preempted. The batching advisor of
arXiv:2503.08311 calls the rest of the memory freed, and counts what was in use at most. Full length is the careful side
of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_slmserve.schema.kv_cache import NULL_BLOCKS, RESERVE_BYTES

GPU_MEMORY_UTILIZATION = 0.9  # of the GPU for all engines together
UTILIZATION_STEPS = 1000  # vLLM is told its share of the memory with three decimals


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory that an engine of a model takes, whatever its batch. longest: tokens of a request at full length.

    kv_bytes_per_token: in the layers that share a block. groups: of such layers; each may take blocks for all tokens.
    allowance_bytes: for activations, captured graphs and the context. allowance_seen: whether sensors measured it, as
    memory used less weights less KV cache; else it is the reserve of our plans.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    longest: int
    groups: int = 1
    block_size: int = 16
    allowance_bytes: int = RESERVE_BYTES
    allowance_seen: bool = False

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.kv_bytes_per_token

    @property
    def request_bytes(self) -> int:
        """KV of one request at full length, in whole blocks."""
        return self.groups * -(-self.longest // self.block_size) * self.block_bytes

    def kv_blocks(self, batch: int) -> int:
        return self.kv_bytes(batch) // self.block_bytes

    def kv_bytes(self, batch: int) -> int:
        """KV of so many requests at full length, and of the block that no request ever gets."""
        return batch * self.request_bytes + NULL_BLOCKS * self.block_bytes

    def total_bytes(self, batch: int) -> int:
        return self.weight_bytes + self.allowance_bytes + self.kv_bytes(batch)


@dataclass(frozen=True, slots=True)
class BatchOption:
    """A batch that a model may be given, and the tokens/s it serves then."""

    batch: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """A model that shares a GPU: its rungs ascend by their batch, and the last one is what it should have."""

    footprint: Footprint
    rungs: tuple[BatchOption, ...]

    def bytes_at(self, height: int) -> int:
        return self.footprint.total_bytes(self.rungs[height].batch)

    def worth(self, height: int) -> float:
        """Share of the last rung's throughput that the step up to this one adds, per byte that it takes."""
        more = self.rungs[height].tokens_per_s - self.rungs[height - 1].tokens_per_s
        return more / self.rungs[-1].tokens_per_s / (self.bytes_at(height) - self.bytes_at(height - 1))


def replicas_that_fit(footprint: Footprint, batch: int, budget: int) -> int:
    """Engines of `batch` each."""
    return max(0, budget) // footprint.total_bytes(batch)


def replicas_that_split(footprint: Footprint, batch: int, budget: int) -> int:
    """The most engines that fit where `batch` is divided among them, each with at least one request."""
    fixed = footprint.total_bytes(0)
    most = min(batch, max(0, budget - batch * footprint.request_bytes) // fixed)
    return next((n for n in range(most, 0, -1) if n * footprint.total_bytes(-(-batch // n)) <= budget), 0)


def utilization(total_bytes: int, gpu_bytes: int) -> float:
    """The share to tell vLLM, three decimals, rounded up. With the KV bytes given, only its check at the start uses it:
    as much must be free."""
    return min(1.0, math.ceil(total_bytes * UTILIZATION_STEPS / gpu_bytes) / UTILIZATION_STEPS)


def freed_share(had_bytes: float, needed_bytes: float, gpu_bytes: float) -> float:
    """KV cache that is not needed, as a share of the GPU's memory (arXiv:2503.08311)."""
    return (had_bytes - needed_bytes) / gpu_bytes


def divide(ladders: Sequence[BatchOptions], budget: int) -> tuple[int, ...] | None:
    """The height on each ladder, so that all engines fit; None where not even the lowest rungs do.

    From the last rungs, the step down is taken that loses the least of its model's throughput per byte; what the last
    step freed too much may let others up again.
    """
    heights = [len(ladder.rungs) - 1 for ladder in ladders]
    while _total(ladders, heights) > budget:
        steps = [(ladder.worth(h), i) for i, (ladder, h) in enumerate(zip(ladders, heights, strict=True)) if h]
        if not steps:
            return None
        heights[min(steps)[1]] -= 1
    while up := max(_affordable(ladders, heights, budget), default=None):
        heights[up[1]] += 1
    return tuple(heights)


def _total(ladders: Sequence[BatchOptions], heights: Sequence[int]) -> int:
    return sum(ladder.bytes_at(h) for ladder, h in zip(ladders, heights, strict=True))


def _affordable(ladders: Sequence[BatchOptions], heights: Sequence[int], budget: int) -> Iterator[tuple[float, int]]:
    """Worth and place of each step up that adds throughput and fits."""
    left = budget - _total(ladders, heights)
    for i, (ladder, h) in enumerate(zip(ladders, heights, strict=True)):
        if h + 1 < len(ladder.rungs) and ladder.bytes_at(h + 1) - ladder.bytes_at(h) <= left:
            worth = ladder.worth(h + 1)
            if worth > 0:
                yield worth, i
