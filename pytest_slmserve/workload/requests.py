"""A workload from its specification: the same specification, the same requests, on every machine.

Prompts are the ids that the text gives, without special tokens: not the </s> that OPT's tokenizer puts first. So a
prompt of 512 tokens is 512 ids, and natural lengths are those of the text alone. The requests of vLLM's own benchmark
are the exception: they have the ids, and are counted, as vLLM does it.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from pytest_slmserve.schema.errors import BadDataset, BadUsage
from pytest_slmserve.schema.models import Model
from pytest_slmserve.schema.specs import Request, Workload, WorkloadSpec
from pytest_slmserve.workload import sharegpt, tokens
from pytest_slmserve.workload.arrivals import load_trace, sample_lengths
from pytest_slmserve.workload.tokens import SPECIAL_IDS, Tokenize, in_blocks, within_vllm_limits

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
    if tokenizer is None and spec.source == "sharegpt" and not spec.tokenizer:
        if spec.as_vllm:
            raise BadUsage(
                f"vLLM samples by the model's own tokenizer, and none is known for {model.name}",
                "-o slm_tokenizer=PATH, a folder that holds one, or its name on the Hub",
            )
        tokenizer = tokens.opt_tokenizer(model)
    requests, source = requests_of(spec, model.vocabulary, model.context, tokenizer)
    largest = max((max(request.prompt) for request in requests if spec.source == "sharegpt"), default=0)
    if largest >= model.vocabulary:
        problem = f"the tokenizer gives id {largest}, but {model.name} has only {model.vocabulary} ids"
        raise BadUsage(problem, "the model's own tokenizer")
    if (possible := len(requests)) < spec.requests:
        where = "the shipped table" if spec.source == "lengths" else str(sharegpt.dataset_path(spec.path))
        kind = "natural length" if spec.prompt_tokens is None else f"{spec.prompt_tokens} prompt tokens"
        raise BadDataset(
            f"{where} is enough for {possible} requests of {kind} under the rule {spec.rule}, not for {spec.requests}",
            f"at most {possible} requests, another rule, or another seed" if possible else "a larger dataset",
        )
    return Workload(spec, tuple(requests), source)


def requests_of(
    spec: WorkloadSpec, vocabulary: int, longest: int, tokenizer: Tokenize | None = None
) -> tuple[list[Request], str]:
    """The requests of a specification, or as many as there are, and where they came from. Raises BadDataset for a file
    that is missing, damaged or of another kind.

    vocabulary: Number of token ids; synthetic ids are below it. longest: Tokens of the longest request that is taken
    from a trace. tokenizer: Tokenizes text, with special tokens if the requests are to be vLLM's own. Defaults to the
    tokenizer that the specification names.
    """
    match spec.source:
        case "trace":
            raise BadUsage("the lengths of a trace are read with its arrivals", "measure --trace")
        case "trace-lengths":
            hint = "a trace of shorter requests, or, of measure, more --max-model-len"
            trace = load_trace(Path(spec.path), max_model_len=longest, hint=hint)
            lengths = sample_lengths(trace, spec.requests, spec.seed)
            source = f"synthetic token ids, lengths drawn from {trace.source}, {trace.left_out} left out as too long"
        case "lengths" if spec.prompt_tokens and spec.output_tokens:
            lengths, source = [(spec.prompt_tokens, spec.output_tokens)] * spec.requests, "synthetic token ids"
        case "lengths":
            rows = tokens.shipped_lengths(spec.rule)
            shuffled = tokens.first_in_order(rows, spec.seed, len(rows))
            lengths = [pair for pair in shuffled if within_vllm_limits(*pair)][: spec.requests]
            source = f"synthetic token ids, lengths of ShareGPT ({spec.rule})"
        case "sharegpt":
            tokenize = tokenizer or tokens.hub_tokenizer(spec.tokenizer, special_tokens=spec.as_vllm)
            return _requests_of_a_file(spec, tokenize)
    return synthetic_requests(lengths, vocabulary, spec.seed), source


def synthetic_requests(lengths: Sequence[tuple[int, int]], vocabulary: int, seed: int) -> list[Request]:
    """A request of ids in [4, vocabulary) for each pair of prompt and output tokens.

    The first id goes up by one from prompt to prompt: while there are ids enough, no two prompts share even one token
    of prefix, so no cache of prefixes can serve one from the other.
    """
    usable, stream = vocabulary - SPECIAL_IDS, tokens.draws(seed, "ids")
    start = int(next(stream) * usable)
    requests = []
    for index, (prompt, output) in enumerate(lengths):
        others = [SPECIAL_IDS + int(draw * usable) for draw in islice(stream, prompt - 1)]
        requests.append(Request((SPECIAL_IDS + (start + index) % usable, *others), output))
    return requests


def _requests_of_a_file(spec: WorkloadSpec, tokenize: Tokenize) -> tuple[list[Request], str]:
    """The requests of a ShareGPT file, and where they came from: vLLM's own sample, or conversations in seeded order,
    of which more are looked at until there are requests enough. Fixed lengths: prompts are cut where one is longer, and
    go on with the next where one is shorter."""
    path, limit = sharegpt.dataset_path(spec.path), FIRST_GUESS * spec.requests
    while True:
        damages: list[sharegpt.DamagedDataset] = []
        read = sharegpt.read_conversations(path, damages if spec.accept_truncated else None)
        if spec.as_vllm:
            how_many, seed = spec.requests, spec.seed
            found = sharegpt.sample_as_vllm(read, tokenize, how_many, seed=seed, output_tokens=spec.output_tokens)
            repeats = len(found) - len({each.text for each in found})
            how = f"as vLLM samples it by {spec.tokenizer or 'this tokenizer'}"
            how += f", {repeats} of them repeats" if repeats else ""
            is_all = True
        else:
            counted = (each[:2] for each in read if sharegpt.follows(spec.rule, each))
            picked = tokens.first_in_order(counted, spec.seed, limit)
            if spec.prompt_tokens is None or spec.output_tokens is None:
                made = sharegpt.natural_requests(picked, tokenize)
            else:
                made = _cut_requests(picked, tokenize, spec.prompt_tokens, spec.output_tokens)
            found, how = list(islice(made, spec.requests)), spec.rule
            is_all = len(picked) < limit
        if is_all or len(found) == spec.requests:
            how += "".join(f", the {d.conversations} conversations before byte {d.byte}" for d in damages)
            return found, f"{path.name} ({how})"
        limit *= FIRST_GUESS


def _cut_requests(
    picked: Sequence[sharegpt.Conversation], tokenize: Tokenize, prompt_tokens: int, output_tokens: int
) -> Iterator[Request]:
    """Requests of exactly these lengths, lazily, because tokenising is what costs time."""
    ids: list[int] = []
    for prompt in in_blocks((conversation[0].text for conversation in picked), tokenize):
        ids += prompt
        if len(ids) >= prompt_tokens:
            yield Request(tuple(ids[:prompt_tokens]), output_tokens)
            ids = []
