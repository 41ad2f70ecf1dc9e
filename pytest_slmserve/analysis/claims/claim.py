"""Claims of the papers, and the verdict that is expected of each claim in an environment. Data first; the functions
only look up and judge.

A claim that is known not to hold somewhere has a row that expects it to fail, with the evidence. The most specific row
that fits a model and an environment rules. Its parameters are plain, so that a record can hold them and a report can
repeat the judgement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.schema.catalog import CATALOGUE, short_name
from pytest_slmserve.schema.kv_cache import kv_blocks, requests_that_fit
from pytest_slmserve.schema.specs import GIB

Expected = Literal["passes", "fails", "either"]
Reads = Literal["sweeps", "replicas", "gpus", "jobs", "arithmetic"]
AnyRampUp = Literal["*", "staggered", "burst"]
AnyInterface = Literal["*", "engine", "server", "endpoint"]
Parameters = Mapping[str, Any]
Others = Sequence[Curve]
ANY: Literal["*"] = "*"
ANY_RELEASE = ("", "")


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement that measurements can refute, as `claims.toml` has it.

    name: as items and records have it. kind: the same for all ways of sharing. of: the measurements that it reads:
    sweeps; replicas, with one engine alone under the same load; engines on several numbers of GPUs; jobs; or none, for
    arithmetic. parameters, expected, evidence: of its row for any model anywhere; "either" is for a statement that
    hosts and models decide, so that it is a finding and no failure."""

    name: str
    kind: str
    statement: str
    source: str
    of: Reads = "sweeps"
    parameters: Parameters = field(default_factory=dict)
    expected: Expected = "passes"
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """Expectation of a claim for a model on a device, by an interface, in a closed loop of one ramp-up, under a vLLM.

    model: a short name or "*". device: a platform ("cuda", "cpu", "simulated"), a GPU family of `roofline.GPUS`
    ("H200") or "*". interface: how the requests come in, or "*". ramp_up: of the closed loop, or "*". vllm: first
    release, and the one it ends before; "" for no end. parameters: numbers of the judgement, plain.
    """

    claim: str
    model: str = ANY
    device: str = ANY
    interface: AnyInterface = ANY
    ramp_up: AnyRampUp = ANY
    vllm: tuple[str, str] = ANY_RELEASE
    parameters: Parameters = field(default_factory=dict)
    expected: Expected = "passes"
    evidence: str = ""


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


def table_1_budget_bytes(model: str, budget_bytes: int = BUDGET_BYTES) -> int:
    """Bytes of the budget that the weights of a catalogue model leave for its KV cache."""
    return budget_bytes - (CATALOGUE[model].weight_bytes() or 0)


def request_bytes(model: str, tokens: int = KNOWN) -> int:
    """Keys and values of one request of a catalogue model."""
    return tokens * (CATALOGUE[model].kv_bytes_per_token() or 0)


def largest_batch(model: str, tokens: int = KNOWN, budget_bytes: int = BUDGET_BYTES) -> int:
    """Requests of a catalogue model that fit into the budget less the weights, each allocated for so many tokens."""
    return table_1_budget_bytes(model, budget_bytes) // request_bytes(model, tokens)


def paged_batch(model: str, tokens: int, budget_bytes: int = BUDGET_BYTES) -> int:
    """Requests that fit in pages of 16 tokens: at the `MEAN` length what an engine holds at one moment."""
    blocks = kv_blocks(table_1_budget_bytes(model, budget_bytes), BLOCK_SIZE, request_bytes(model, 1))
    return requests_that_fit(blocks, BLOCK_SIZE, tokens)


def published_batch_fits(model: str) -> Verdict:
    """Does the paper's batch fit at full length? Where not, it ran only as not all requests are long at once."""
    subject = short_name(model)
    published = PUBLISHED.get(subject)
    if published is None:
        return Verdict.inconclusive(CLAIM, subject, "the paper's Table 1 does not have this model")
    fit = largest_batch(subject)
    each = request_bytes(subject) / 1e6
    why = (
        f"{fit} requests of {KNOWN} tokens ({each:.1f} MB each) fit into 0.9 x 40 GiB less the weights, "
        f"the paper has {published}"
    )
    if published > fit:
        why += f"; {paged_batch(subject, MEAN)} fit at their mean length of {MEAN}"
    state = State.PASSES if published <= fit else State.FAILS
    return Verdict(CLAIM, subject, state, why, value=fit, threshold=published)


def published_request_size(model: str) -> Verdict:
    """Does a request of OPT-1.3B take the 50 MB that the paper's text gives? It is that of its 256 output tokens."""
    subject = short_name(model)
    if subject != REQUEST_MODEL:
        return Verdict.inconclusive(REQUEST_CLAIM, subject, f"the paper gives the size for {REQUEST_MODEL} only")
    seen = request_bytes(REQUEST_MODEL)
    why = (
        f"a request of {KNOWN} tokens takes {seen / 1e6:.0f} MB, {seen / PUBLISHED_REQUEST_BYTES:.1f} times "
        f"the paper's 50 MB; {OUTPUT_TOKENS} tokens take {request_bytes(REQUEST_MODEL, OUTPUT_TOKENS) / 1e6:.1f} MB"
    )
    state = State.PASSES if abs(seen / PUBLISHED_REQUEST_BYTES - 1) < 0.05 else State.FAILS
    return Verdict(REQUEST_CLAIM, subject, state, why, value=seen, threshold=PUBLISHED_REQUEST_BYTES)


def published_batch_size(model: str) -> Verdict:
    """Do 512 requests of OPT-1.3B take at most the 25.6 GB that the paper's text gives?"""
    subject = short_name(model)
    if subject != REQUEST_MODEL:
        return Verdict.inconclusive(BATCH_CLAIM, subject, f"the paper gives the size for {REQUEST_MODEL} only")
    seen = BATCH * request_bytes(REQUEST_MODEL)
    why = f"{BATCH} requests of {KNOWN} tokens take {seen / 1e9:.1f} GB, the paper has 25.6"
    state = State.PASSES if seen <= PUBLISHED_BATCH_BYTES else State.FAILS
    return Verdict(BATCH_CLAIM, subject, state, why, value=seen, threshold=PUBLISHED_BATCH_BYTES)


def cannot_hold_hundreds(model: str) -> Verdict:
    """Do fewer than the paper's 500 requests fit at full length? It says so of each model larger than OPT-125M."""
    subject = short_name(model)
    if subject not in PUBLISHED:
        return Verdict.inconclusive(HUNDREDS_CLAIM, subject, "the paper's Table 1 does not have this model")
    fit = largest_batch(subject)
    why = f"{fit} requests of {KNOWN} tokens fit into 0.9 x 40 GiB less the weights, the paper sends {HUNDREDS}"
    state = State.PASSES if fit < HUNDREDS else State.FAILS
    return Verdict(HUNDREDS_CLAIM, subject, state, why, value=fit, threshold=HUNDREDS)
