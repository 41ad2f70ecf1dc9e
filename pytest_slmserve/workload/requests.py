"""A workload from its specification: the same specification, the same requests, on every machine.

Prompts are the ids that the text gives, without special tokens: not the </s> that OPT's tokenizer puts first. So a
prompt of 512 tokens is 512 ids, and natural lengths are those of the text alone. The requests of vLLM's own benchmark
are the exception: they have the ids, and are counted, as vLLM does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from pytest_slmserve.schema.errors import BadDataset, BadUsage
from pytest_slmserve.schema.loads import Request, Workload
from pytest_slmserve.schema.models import Model
from pytest_slmserve.schema.specs import WorkloadSpec
from pytest_slmserve.workload.arrivals import load_trace, read_trace, sample_lengths
from pytest_slmserve.workload.sharegpt import (
    Conversation,
    DamagedDataset,
    dataset_path,
    pick,
    readable,
    sample_as_vllm,
    unread,
)
from pytest_slmserve.workload.tokens import (
    Tokenize,
    first_in_order,
    hub_tokenizer,
    in_blocks,
    opt_tokenizer,
    shipped_lengths,
    synthetic_prompts,
    within_vllm_limits,
)

FIRST_GUESS = 8  # conversations looked at per request before the file is read again for more


def build_workload(spec: WorkloadSpec, model: Model, *, tokenizer: Tokenize | None = None) -> Workload:
    """The requests of `spec` for a model.

    Source "lengths" needs no text: synthetic ids, different for every request, of the fixed lengths, or of lengths
    drawn from the shipped table under the rule and vLLM's length filter. Source "sharegpt" takes conversations of a
    file in seeded order, as text for `tokenizer` (None: that of the specification, or GPT-2's BPE, for models with
    OPT's vocabulary). Fixed lengths: a prompt is cut at `prompt_tokens`, and one that is shorter goes on with the
    prompts of the next conversations. Natural lengths: first turn and length of the second, where vLLM's length filter
    keeps them; under the rule vllm they are the very requests that vLLM's own benchmark makes of the file. Source
    "trace-lengths": synthetic ids, of lengths drawn from those requests of a trace that fit the model.

    Raises BadDataset for a file that is missing, damaged or not ShareGPT, or has too few conversations (none is used
    twice, but by vLLM), BadUsage for a package that is missing or a tokenizer of another model.
    """
    tokenize = partial(tokenizer_of, spec, model) if tokenizer is None else lambda: tokenizer
    requests, source = requests_of(spec, model.vocabulary, model.context, tokenize)
    if spec.source == "sharegpt":
        _check_ids(requests, model)
    if len(requests) < spec.requests:
        raise _too_few(spec, len(requests))
    return Workload(spec, tuple(requests), source)


def tokenizer_of(spec: WorkloadSpec, model: Model) -> Tokenize:
    """The tokenizer that cuts the text of a specification. Raises BadUsage where there is none."""
    if spec.tokenizer:
        return named_tokenizer(spec)
    if spec.as_vllm:
        raise BadUsage(
            f"vLLM samples by the model's own tokenizer, and none is known for {model.name}",
            "-o slm_tokenizer=PATH, a folder that holds one, or its name on the Hub",
        )
    return opt_tokenizer(model)


def named_tokenizer(spec: WorkloadSpec) -> Tokenize:
    """The tokenizer that the specification names, with special tokens where its requests are vLLM's own."""
    return hub_tokenizer(spec.tokenizer, special_tokens=spec.as_vllm)


def check_source(spec: WorkloadSpec) -> None:
    """Raises BadDataset where the file of a specification is not there, or is no trace."""
    match spec.source:
        case "sharegpt":
            dataset_path(spec.path)
        case "trace-lengths":
            next(read_trace(Path(spec.path)), None)


def requests_of(
    spec: WorkloadSpec, vocabulary: int, longest: int, tokenizer: Callable[[], Tokenize]
) -> tuple[list[Request], str]:
    """The requests of a specification, or as many as there are, and where they came from.

    vocabulary: synthetic ids are below it. longest: tokens of the longest request of a trace. tokenizer: asked for only
    where text is to be cut; with the special tokens where the requests are to be vLLM's own. Raises BadDataset for a
    file that is missing, damaged or of another kind.
    """
    match spec.source:
        case "trace":
            raise BadUsage("the lengths of a trace are read with its arrivals", "measure --trace")
        case "trace-lengths":
            return requests_of_trace(spec, vocabulary, longest)
        case "lengths":
            return requests_of_lengths(spec, vocabulary)
        case "sharegpt":
            return (_sampled if spec.as_vllm else _from_conversations)(spec, tokenizer())


def requests_of_lengths(spec: WorkloadSpec, vocabulary: int) -> tuple[list[Request], str]:
    """Requests of synthetic ids, no more than the shipped table has, and where their lengths came from."""
    match spec.prompt_tokens, spec.output_tokens:
        case int(prompt), int(output):
            lengths, source = [(prompt, output)] * spec.requests, "synthetic token ids"
        case _:
            rows = shipped_lengths(spec.rule)
            shuffled = ((row.prompt_tokens, row.reply_tokens) for row in first_in_order(rows, spec.seed, len(rows)))
            lengths = list(islice((pair for pair in shuffled if within_vllm_limits(*pair)), spec.requests))
            source = f"synthetic token ids, lengths of ShareGPT ({spec.rule})"
    return synthetic_requests(lengths, vocabulary, spec.seed), source


def requests_of_trace(spec: WorkloadSpec, vocabulary: int, longest: int) -> tuple[list[Request], str]:
    """Requests of synthetic ids below `vocabulary`, with the lengths of requests of a trace that have no more than
    `longest` tokens, drawn with replacement. Raises BadDataset where it has none."""
    hint = "a trace of shorter requests, or, of measure, more --max-model-len"
    trace = load_trace(Path(spec.path), max_model_len=longest, hint=hint)
    lengths = sample_lengths(trace, spec.requests, spec.seed)
    source = f"synthetic token ids, lengths drawn from {trace.source}, {trace.left_out} left out as too long"
    return synthetic_requests(lengths, vocabulary, spec.seed), source


def synthetic_requests(lengths: Sequence[tuple[int, int]], vocabulary: int, seed: int) -> list[Request]:
    """A request of ids below `vocabulary` for each pair of prompt and output tokens."""
    prompts = synthetic_prompts([prompt for prompt, _ in lengths], vocabulary, seed)
    return [Request(ids, output) for ids, (_, output) in zip(prompts, lengths, strict=True)]


def _from_conversations(spec: WorkloadSpec, tokenize: Tokenize) -> tuple[list[Request], str]:
    path = dataset_path(spec.path)
    make = _maker(spec, tokenize)
    limit = FIRST_GUESS * spec.requests
    while True:
        picked, note = pick(path, spec.rule, seed=spec.seed, limit=limit, accept_truncated=spec.accept_truncated)
        requests = list(islice(make(picked), spec.requests))
        if len(requests) == spec.requests or len(picked) < limit:
            return requests, f"{path.name} ({spec.rule}{note})"
        limit *= FIRST_GUESS


def _sampled(spec: WorkloadSpec, tokenize: Tokenize) -> tuple[list[Request], str]:
    path = dataset_path(spec.path)
    damages: list[DamagedDataset] = []
    conversations = readable(path, damages.append if spec.accept_truncated else None)
    drawn = sample_as_vllm(conversations, tokenize, spec.requests, seed=spec.seed, output_tokens=spec.output_tokens)
    repeats = len(drawn) - len({each.text for each in drawn})
    again = f", {repeats} of them repeats" if repeats else ""
    source = f"{path.name} (as vLLM samples it by {spec.tokenizer or 'this tokenizer'}{again}{unread(damages)})"
    return drawn, source


def _maker(spec: WorkloadSpec, tokenize: Tokenize) -> Callable[[Sequence[Conversation]], Iterator[Request]]:
    """A function that makes requests of conversations, in their order; lazily, since tokenising is what costs time."""
    match spec.prompt_tokens, spec.output_tokens:
        case int(prompt), int(output):
            return lambda picked: (Request(ids, output) for ids in _joined(_tokens(picked, 0, tokenize), prompt))
        case _:
            return lambda picked: _natural(picked, _tokens(picked, 0, tokenize), _tokens(picked, 1, tokenize))


def _tokens(conversations: Sequence[Conversation], turn: int, tokenize: Tokenize) -> Iterator[list[int]]:
    """Ids of one turn of each conversation, a block at a time."""
    return in_blocks((conversation[turn].text for conversation in conversations), tokenize)


def _joined(prompts: Iterable[list[int]], length: int) -> Iterator[tuple[int, ...]]:
    """Prompts of exactly `length` ids: cut where one is longer, gone on with the next where it is shorter."""
    ids: list[int] = []
    for prompt in prompts:
        ids += prompt
        if len(ids) >= length:
            yield tuple(ids[:length])
            ids = []


def _natural(
    picked: Iterable[Conversation], prompts: Iterable[list[int]], replies: Iterable[list[int]]
) -> Iterator[Request]:
    for conversation, prompt, reply in zip(picked, prompts, replies, strict=True):
        if within_vllm_limits(len(prompt), len(reply)):
            yield Request(tuple(prompt), len(reply), conversation[0].text)


def _check_ids(requests: Iterable[Request], model: Model) -> None:
    largest = max((max(request.prompt) for request in requests), default=0)
    if largest >= model.vocabulary:
        raise BadUsage(
            f"the tokenizer gives id {largest}, but {model.name} has only {model.vocabulary} ids",
            "the model's own tokenizer",
        )


def _too_few(spec: WorkloadSpec, possible: int) -> BadDataset:
    where = "the shipped table" if spec.source == "lengths" else str(dataset_path(spec.path))
    kind = "natural length" if spec.prompt_tokens is None else f"{spec.prompt_tokens} prompt tokens"
    return BadDataset(
        f"{where} is enough for {possible} requests of {kind} under the rule {spec.rule}, not for {spec.requests}",
        f"at most {possible} requests, another rule, or another seed" if possible else "a larger dataset",
    )
