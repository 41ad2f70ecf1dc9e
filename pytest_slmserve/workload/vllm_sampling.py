"""The very requests that `vllm bench serve --dataset-name sharegpt` sends, for numbers to be held beside its own.

Its sampling is `ShareGPTDataset` in vllm/benchmarks/datasets/datasets.py (the same from release 0.26 to 0.32): shuffle
by seed, walk, keep what is neither too short nor too long, and draw again from what was kept where that is too few. It
differs from what other rules make of a file (`requests.build_workload`): there the seeded order is one that Python
guarantees for ever, special tokens are not counted, and no conversation is used twice.

Here the order is `random.Random.shuffle` and `choice`, as in vLLM: the same as vLLM's on the same Python, and on every
other whose shuffle is the same. vLLM seeds the global stream for it; that one is left alone here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat

from pytest_slmserve.schema.errors import BadDataset, BadUsage
from pytest_slmserve.schema.workloads import Request
from pytest_slmserve.workload.lengths import within_vllm_limits
from pytest_slmserve.workload.sharegpt import Conversation, follows
from pytest_slmserve.workload.tokens import Tokenize, in_blocks


def sample_as_vllm(
    conversations: Iterable[Conversation],
    tokenize: Tokenize,
    requests: int,
    *,
    seed: int = 0,
    output_tokens: int | None = None,
    shuffle: bool = True,
    oversample: bool = True,
) -> list[Request]:
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


def _kept(pairs: Sequence[Conversation], tokenize: Tokenize, output_tokens: int | None) -> Iterator[Request]:
    """Lazily: no more is tokenised than is asked for, but for the rest of a block."""
    prompts = in_blocks((prompt.text for prompt, _ in pairs), tokenize)
    replies = in_blocks((reply.text for _, reply in pairs), tokenize) if output_tokens is None else repeat([])
    for (prompt, _), ids, reply in zip(pairs, prompts, replies):
        wanted = len(reply) if output_tokens is None else output_tokens
        if within_vllm_limits(len(ids), wanted, overridden=output_tokens is not None):
            yield Request(tuple(ids), wanted, prompt.text)
