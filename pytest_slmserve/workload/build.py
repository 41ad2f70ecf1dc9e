"""A workload from its specification: the same specification, the same requests, on every machine.

Prompts are the ids that the text gives, without special tokens: not the </s> that OPT's tokenizer puts first. So a
prompt of 512 tokens is 512 ids, and natural lengths are those of the text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from pytest_slmserve.errors import BadDataset, BadUsage
from pytest_slmserve.models import Shape
from pytest_slmserve.records import Request, Workload
from pytest_slmserve.spec import WorkloadSpec
from pytest_slmserve.workload.lengths import shipped_lengths, within_vllm_limits
from pytest_slmserve.workload.seeding import first_in_order
from pytest_slmserve.workload.sharegpt import Conversation, dataset_path, pick
from pytest_slmserve.workload.tokens import Tokenize, opt_tokenizer, synthetic_prompts

BLOCK = 256  # texts tokenised at once: enough for all cores, few enough to stop soon after the last one needed
FIRST_GUESS = 8  # conversations looked at per request before the file is read again for more


def build_workload(spec: WorkloadSpec, shape: Shape, *, tokenizer: Tokenize | None = None) -> Workload:
    """The requests of `spec` for a model of `shape`.

    Source "lengths" needs no text: synthetic ids, different for every request, of the fixed lengths, or of lengths
    drawn from the shipped table under the rule and vLLM's length filter. Source "sharegpt" takes conversations of a
    file in seeded order, as text for `tokenizer` (None: GPT-2's BPE, for models with OPT's vocabulary). Fixed lengths:
    a prompt is cut at `prompt_tokens`, and one that is shorter goes on with the prompts of the next conversations.
    Natural lengths: first turn and length of the second, where vLLM's length filter keeps them.

    Raises BadDataset for a file that is missing, damaged or not ShareGPT, or has too few conversations (none is used
    twice), BadUsage for a package that is missing or a tokenizer of another model.
    """
    match spec.source:
        case "trace":
            raise BadUsage("the lengths of a trace are read with its arrivals", "measure --trace")
        case "lengths":
            requests, source = requests_of_lengths(spec, shape.vocabulary)
        case "sharegpt":
            requests, source = _from_conversations(spec, tokenizer or opt_tokenizer(shape))
            _check_ids(requests, shape)
    return Workload(spec, tuple(requests), source)


def requests_of_lengths(spec: WorkloadSpec, vocabulary: int) -> tuple[list[Request], str]:
    """Requests of synthetic ids below `vocabulary`, and where their lengths came from."""
    match spec.prompt_tokens, spec.output_tokens:
        case int(prompt), int(output):
            lengths, source = [(prompt, output)] * spec.requests, "synthetic token ids"
        case _:
            lengths = _natural_lengths(spec)
            source = f"synthetic token ids, lengths of ShareGPT ({spec.rule})"
    return synthetic_requests(lengths, vocabulary, spec.seed), source


def synthetic_requests(lengths: Sequence[tuple[int, int]], vocabulary: int, seed: int) -> list[Request]:
    """A request of ids below `vocabulary` for each pair of prompt and output tokens."""
    prompts = synthetic_prompts([prompt for prompt, _ in lengths], vocabulary, seed)
    return [Request(ids, output) for ids, (_, output) in zip(prompts, lengths, strict=True)]


def _natural_lengths(spec: WorkloadSpec) -> list[tuple[int, int]]:
    rows = shipped_lengths(spec.rule)
    shuffled = ((row.prompt_tokens, row.reply_tokens) for row in first_in_order(rows, spec.seed, len(rows)))
    kept = [lengths for lengths in shuffled if within_vllm_limits(*lengths)]
    if len(kept) < spec.requests:
        raise _too_few(spec, len(kept), "the shipped table")
    return kept[: spec.requests]


def _from_conversations(spec: WorkloadSpec, tokenize: Tokenize) -> tuple[list[Request], str]:
    path = dataset_path(spec.path)
    make = _maker(spec, tokenize)
    limit = FIRST_GUESS * spec.requests
    while True:
        picked, note = pick(path, spec.rule, seed=spec.seed, limit=limit, accept_truncated=spec.accept_truncated)
        requests = list(islice(make(picked), spec.requests))
        if len(requests) == spec.requests:
            return requests, f"{path.name} ({spec.rule}{note})"
        if len(picked) < limit:
            raise _too_few(spec, len(requests), str(path))
        limit *= FIRST_GUESS


def _maker(spec: WorkloadSpec, tokenize: Tokenize) -> Callable[[Sequence[Conversation]], Iterator[Request]]:
    """How conversations, in their order, become requests; lazily, since tokenising is what costs time."""
    match spec.prompt_tokens, spec.output_tokens:
        case int(prompt), int(output):
            return lambda picked: (Request(ids, output) for ids in _joined(_tokens(picked, 0, tokenize), prompt))
        case _:
            return lambda picked: _natural(_tokens(picked, 0, tokenize), _tokens(picked, 1, tokenize))


def _tokens(conversations: Sequence[Conversation], turn: int, tokenize: Tokenize) -> Iterator[list[int]]:
    """Ids of one turn of each conversation, a block at a time."""
    for start in range(0, len(conversations), BLOCK):
        yield from tokenize([conversation[turn].text for conversation in conversations[start : start + BLOCK]])


def _joined(prompts: Iterable[list[int]], length: int) -> Iterator[tuple[int, ...]]:
    """Prompts of exactly `length` ids: cut where one is longer, gone on with the next where it is shorter."""
    ids: list[int] = []
    for prompt in prompts:
        ids += prompt
        if len(ids) >= length:
            yield tuple(ids[:length])
            ids = []


def _natural(prompts: Iterable[list[int]], replies: Iterable[list[int]]) -> Iterator[Request]:
    for prompt, reply in zip(prompts, replies, strict=True):
        if within_vllm_limits(len(prompt), len(reply)):
            yield Request(tuple(prompt), len(reply))


def _check_ids(requests: Iterable[Request], shape: Shape) -> None:
    largest = max(max(request.prompt) for request in requests)
    if largest >= shape.vocabulary:
        raise BadUsage(
            f"the tokenizer gives id {largest}, but {shape.name} has only {shape.vocabulary} ids",
            "the model's own tokenizer",
        )


def _too_few(spec: WorkloadSpec, possible: int, where: str) -> BadDataset:
    kind = "natural length" if spec.prompt_tokens is None else f"{spec.prompt_tokens} prompt tokens"
    return BadDataset(
        f"{where} is enough for {possible} requests of {kind} under the rule {spec.rule}, not for {spec.requests}",
        f"at most {possible} requests, another rule, or another seed" if possible else "a larger dataset",
    )
