"""Table 1 of arXiv:2404.03353 by arithmetic: the largest batch per model on an A100 with 40 GiB.

The paper serves 512 prompt and 256 output tokens and gives the KV cache 0.9 of the memory. Its batches are checked
against three ways of allocating: for the longest context the model allows, for the known length, and in pages.
"""

from __future__ import annotations

from itertools import pairwise

from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.schema.catalog import CATALOGUE, short_name
from pytest_slmserve.schema.kv_cache import kv_blocks, requests_that_fit
from pytest_slmserve.schema.specs import GIB

BUDGET_BYTES = 9 * 40 * GIB // 10
LONGEST = 2048  # positions of OPT
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256
KNOWN = PROMPT_TOKENS + OUTPUT_TOKENS
MEAN = PROMPT_TOKENS + OUTPUT_TOKENS // 2  # of requests whose phases are spread evenly
BLOCK_SIZE = 16
REQUEST_MODEL = "opt-1.3b"
PUBLISHED_REQUEST_BYTES = 50_000_000  # "OPT-1.3B ... requires 50 MB"
CLAIM = "table-1-batch-fits"
REQUEST_CLAIM = "table-1-request-size"
BATCH_CLAIM, BATCH, PUBLISHED_BATCH_BYTES = "table-1-batch-size", 512, 25_600_000_000  # "demands at most 25.6 GB"
HUNDREDS_CLAIM, HUNDREDS = "larger-models-cannot-hold-500", 500


# The largest batch of each model, by the paper.
PUBLISHED = {"opt-125m": 512, "opt-1.3b": 256, "opt-2.7b": 128, "opt-6.7b": 64, "opt-13b": 16}
NEXT_SMALLER = {larger: model for model, larger in pairwise(PUBLISHED)}
# Claims that are arithmetic, and for which models: no curve is needed to judge them.
ARITHMETIC: dict[str, tuple[str, ...]] = {CLAIM: tuple(PUBLISHED), REQUEST_CLAIM: (REQUEST_MODEL,)}
ARITHMETIC |= {BATCH_CLAIM: (REQUEST_MODEL,), HUNDREDS_CLAIM: tuple(PUBLISHED)[1:]}


def kv_budget_bytes(model: str, budget_bytes: int = BUDGET_BYTES) -> int:
    """Bytes of the budget that the weights of a catalogue model leave for its KV cache."""
    return budget_bytes - (CATALOGUE[model].weight_bytes() or 0)


def request_bytes(model: str, tokens: int = KNOWN) -> int:
    """Keys and values of one request of a catalogue model."""
    return tokens * (CATALOGUE[model].kv_bytes_per_token() or 0)


def largest_batch(model: str, tokens: int = KNOWN, budget_bytes: int = BUDGET_BYTES) -> int:
    """Requests of a catalogue model that fit into the budget less the weights, each allocated for so many tokens."""
    return kv_budget_bytes(model, budget_bytes) // request_bytes(model, tokens)


def paged_batch(model: str, tokens: int, budget_bytes: int = BUDGET_BYTES) -> int:
    """Requests that fit in pages of 16 tokens: at the `MEAN` length what an engine holds at one moment."""
    blocks = kv_blocks(kv_budget_bytes(model, budget_bytes), BLOCK_SIZE, request_bytes(model, 1))
    return requests_that_fit(blocks, BLOCK_SIZE, tokens)


def published_batch_fits(model: str) -> Verdict:
    """Does the paper's batch fit at full length? Where not, it ran only as not all requests are long at once."""
    subject = short_name(model)
    published = PUBLISHED.get(subject)
    if published is None:
        return Verdict.undecided(CLAIM, subject, "the paper's Table 1 does not have this model")
    fit = largest_batch(subject)
    each = request_bytes(subject) / 1e6
    why = (
        f"{fit} requests of {KNOWN} tokens ({each:.1f} MB each) fit into 0.9 x 40 GiB less the weights, "
        f"the paper has {published}"
    )
    if published > fit:
        why += f"; {paged_batch(subject, MEAN)} fit at their mean length of {MEAN}"
    state = State.HOLDS if published <= fit else State.FAILS
    return Verdict(CLAIM, subject, state, why, value=fit, bound=published)


def published_request_size(model: str) -> Verdict:
    """Does a request of OPT-1.3B take the 50 MB that the paper's text gives? It is that of its 256 output tokens."""
    subject = short_name(model)
    if subject != REQUEST_MODEL:
        return Verdict.undecided(REQUEST_CLAIM, subject, f"the paper gives the size for {REQUEST_MODEL} only")
    seen = request_bytes(REQUEST_MODEL)
    why = (
        f"a request of {KNOWN} tokens takes {seen / 1e6:.0f} MB, {seen / PUBLISHED_REQUEST_BYTES:.1f} times "
        f"the paper's 50 MB; {OUTPUT_TOKENS} tokens take {request_bytes(REQUEST_MODEL, OUTPUT_TOKENS) / 1e6:.1f} MB"
    )
    state = State.HOLDS if abs(seen / PUBLISHED_REQUEST_BYTES - 1) < 0.05 else State.FAILS
    return Verdict(REQUEST_CLAIM, subject, state, why, value=seen, bound=PUBLISHED_REQUEST_BYTES)


def published_batch_size(model: str) -> Verdict:
    """Do 512 requests of OPT-1.3B take at most the 25.6 GB that the paper's text gives?"""
    subject = short_name(model)
    if subject != REQUEST_MODEL:
        return Verdict.undecided(BATCH_CLAIM, subject, f"the paper gives the size for {REQUEST_MODEL} only")
    seen = BATCH * request_bytes(REQUEST_MODEL)
    why = f"{BATCH} requests of {KNOWN} tokens take {seen / 1e9:.1f} GB, the paper has 25.6"
    state = State.HOLDS if seen <= PUBLISHED_BATCH_BYTES else State.FAILS
    return Verdict(BATCH_CLAIM, subject, state, why, value=seen, bound=PUBLISHED_BATCH_BYTES)


def cannot_hold_hundreds(model: str) -> Verdict:
    """Do fewer than the paper's 500 requests fit at full length? It says so of each model larger than OPT-125M."""
    subject = short_name(model)
    if subject not in PUBLISHED:
        return Verdict.undecided(HUNDREDS_CLAIM, subject, "the paper's Table 1 does not have this model")
    fit = largest_batch(subject)
    why = f"{fit} requests of {KNOWN} tokens fit into 0.9 x 40 GiB less the weights, the paper sends {HUNDREDS}"
    state = State.HOLDS if fit < HUNDREDS else State.FAILS
    return Verdict(HUNDREDS_CLAIM, subject, state, why, value=fit, bound=HUNDREDS)
