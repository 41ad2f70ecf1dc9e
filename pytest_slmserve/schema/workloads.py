"""Requests, and the workload that they make."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from pytest_slmserve.schema.specs import WorkloadSpec, short_hash


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids in, a fixed number of tokens out (greedy, the end-of-text token ignored). text: what the ids say, of a
    prompt that was text; for servers that are somebody else's."""

    prompt: tuple[int, ...]
    output_tokens: int
    text: str = field(default="", repr=False)


@dataclass(frozen=True)  # no slots: what is told of all requests is kept once it is known
class Workload:
    """A seeded set of requests, and the hash of its content: equal hash, equal requests, on every machine."""

    spec: WorkloadSpec
    requests: tuple[Request, ...]
    source: str  # where the conversations came from, for people

    @cached_property
    def hash(self) -> str:
        return short_hash([[list(r.prompt), r.output_tokens] for r in self.requests])

    @cached_property
    def mean_prompt_tokens(self) -> float:
        return sum(len(r.prompt) for r in self.requests) / len(self.requests)

    @cached_property
    def mean_output_tokens(self) -> float:
        return sum(r.output_tokens for r in self.requests) / len(self.requests)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(r.prompt) + r.output_tokens for r in self.requests)

    def reference(self) -> WorkloadReference:
        return WorkloadReference(
            self.hash,
            self.spec,
            len(self.requests),
            self.mean_prompt_tokens,
            self.mean_output_tokens,
            self.longest,
            self.source,
        )


@dataclass(frozen=True, slots=True)
class WorkloadReference:
    """The part of a workload that a record keeps: enough to judge by, and the hash that identifies its requests."""

    hash: str
    spec: WorkloadSpec
    requests: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    longest: int
    source: str
