"""The very requests that `vllm bench serve --dataset-name sharegpt` sends, for numbers to be held beside its own.

Its sampling is `ShareGPTDataset` in vllm/benchmarks/datasets/datasets.py (the same from release 0.26 to 0.32): shuffle
by seed, walk, keep what is neither too short nor too long, and draw again from what was kept where that is too few. It
differs from what other rules make of a file (`build`): there the seeded order is one that Python guarantees for ever,
special tokens are not counted, and no conversation is used twice.

Here the order is `random.Random.shuffle` and `choice`, as in vLLM: the same as vLLM's on the same Python, and on every
other whose shuffle is the same. vLLM seeds the global stream for it; that one is left alone here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pytest_slmserve.schema.errors import BadDataset, BadUsage
from pytest_slmserve.workload.sharegpt import Conversation, follows
from pytest_slmserve.workload.tokens import Tokenize

BLOCK = 256  # texts tokenised at once


@dataclass(frozen=True, slots=True)
class Sampled:
    """A prompt as text, its ids as the model's tokenizer gives them, and the output tokens to ask for."""

    prompt: str
    prompt_ids: tuple[int, ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)


def sample_as_vllm(
    conversations: Iterable[Conversation],
    tokenize: Tokenize,
    requests: int,
    *,
    seed: int = 0,
    output_tokens: int | None = None,
    shuffle: bool = True,
    oversample: bool = True,
) -> list[Sampled]:
    """The requests that vLLM takes of all `conversations` of a file, in the order of the file.

    tokenize: the model's own tokenizer with its special tokens, which vLLM counts in prompts and in replies.
    output_tokens: what to ask for instead of the reply's length (vLLM's --sharegpt-output-len; it lifts the lower bound
    on replies). shuffle, oversample: False is --disable-shuffle, --no-oversample; without the latter there may be fewer
    than `requests`, with it the last ones are repeats.

    Raises BadDataset where no conversation is within vLLM's bounds, of which vLLM makes an IndexError.
    """
    if requests < 1:
        raise BadUsage(f"a sample of {requests} requests", "1 or more")
    pairs = [conversation[:2] for conversation in conversations if follows("vllm", conversation)]
    if shuffle:
        random.Random(seed).shuffle(pairs)
    kept = list(islice(_kept(pairs, tokenize, output_tokens), requests))
    if not kept:
        raise BadDataset(
            f"none of {len(pairs)} conversations is within vLLM's bounds", "a larger dataset, or fewer output tokens"
        )
    again = random.Random(seed)
    return kept + [again.choice(kept) for _ in range(requests - len(kept)) if oversample]


def within_bounds(prompt_tokens: int, output_tokens: int, *, overridden: bool) -> bool:
    """vLLM's `is_valid_sequence`: 4 tokens or more each way (of the output only where it is the reply's own length), up
    to 1024 in the prompt, up to 2048 together."""
    long_enough = prompt_tokens >= 4 and (overridden or output_tokens >= 4)
    return long_enough and prompt_tokens <= 1024 and prompt_tokens + output_tokens <= 2048


def _kept(pairs: Sequence[Conversation], tokenize: Tokenize, output_tokens: int | None) -> Iterator[Sampled]:
    """Lazily: no more is tokenised than is asked for, but for the rest of a block."""
    for start in range(0, len(pairs), BLOCK):
        block = pairs[start : start + BLOCK]
        prompts = tokenize([prompt.text for prompt, _ in block])
        replies = tokenize([reply.text for _, reply in block]) if output_tokens is None else [[]] * len(block)
        for (prompt, _), ids, reply in zip(block, prompts, replies, strict=True):
            wanted = len(reply) if output_tokens is None else output_tokens
            if within_bounds(len(ids), wanted, overridden=output_tokens is not None):
                yield Sampled(prompt.text, tuple(ids), wanted)
