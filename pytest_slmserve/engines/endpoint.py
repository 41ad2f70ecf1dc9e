"""Engines behind the URL of an OpenAI-compatible server, and the processes that send loads to it."""

import http.client
import json
import os
import re
import secrets
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, combinations
from operator import itemgetter
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pytest_slmserve.engines.base import Engine, Message, ProgressCallback, WindowBarrier
from pytest_slmserve.engines.child import Child, converse, run_from, undone_on_error
from pytest_slmserve.engines.loadgen.load_run import BIN_S, GROWTH, LEAST_S, parts_of
from pytest_slmserve.engines.loadgen.response import STREAMS, error_in, is_stream
from pytest_slmserve.schema.errors import UNUSABLE, BadUsage, Kind, json_value
from pytest_slmserve.schema.printable import hidden, printable
from pytest_slmserve.schema.records import Progress, Resolved, Run, Stream
from pytest_slmserve.schema.secrecy import passed_on
from pytest_slmserve.schema.specs import FRESH, KEY, EngineSpec, Request, Workload, WorkloadSpec, handed_over, kind_of
from pytest_slmserve.telemetry.gpu import ask_once, samples
from pytest_slmserve.telemetry.host import own_cores

CLIENT = Path(__file__).parent / "loadgen" / "load_run.py"
PACKAGES = Path(__file__).parents[2]  # the folder of our package
READY_S = 30.0
TIMEOUT_S = 120.0  # of a request, by default
REQUEST, SENT, PROMPT_TOKENS, SCHEDULED = 0, 1, 5, -1  # columns of the samples
PHASES = ("ramp", "settle", "window", "over")

COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body information"
)
WORDS = COMMON.split()
MARK = "slm-round"
ROUNDS = 4096  # through all requests, until the first round comes again
QUERY = 8  # one token in 8 of a pair is of the query: a passage of MS MARCO has ten words for each word of its query
LEAST_ID = 4  # smaller ids are special tokens

PAGE_S = 5.0
# vLLM's names (`vllm/v1/metrics/loggers.py`); before 0.11 they began with gpu_.
COUNTERS = ("vllm:prefix_cache_", "vllm:gpu_prefix_cache_")
COUNTER = re.compile(r"vllm:(?:gpu_)?prefix_cache_(queries|hits)(?:_total)?")

CHAT = "/chat/completions"
ANSWER_S = 60.0
TOKEN_IDS = "token ids"
# Parts of a request that some servers refuse. A load is complete without the first one, which shows tokens of a chat
# that have no text.
OPTIONAL = ("return_token_ids", "stream_options", "ignore_eos", TOKEN_IDS)
LESS = tuple(chain.from_iterable(combinations(OPTIONAL, number) for number in range(len(OPTIONAL) + 1)))
NOT_SO = (400, 422)  # for a body that a server refuses
TOLD = 200  # characters of an answer that is not a stream
SHOWN = 8  # models of a long list
OTHER_FILES = 16  # open files of a client process that are not connections, at most
LENGTHENS = {"max_tokens", "max_completion_tokens", "n", "best_of", "echo"}  # fields that can lengthen an answer
A_SERVER = "Check that the server is running, and check host and port."
HINTS = {  # by the status of an answer, or its first digit
    3: "Use the URL that it leads to, because requests do not follow it.",
    5: "Read the server's log.",
    401: f"Set {KEY}=... in the environment.",
    403: f"Set {KEY}=... in the environment.",
    404: "Use a URL that ends in /v1/completions or /v1/chat/completions, and the model as the server calls it.",
    429: "Wait, or use a key that may send more: the server limits the rate of requests.",
}


class LoadClient:
    """The processes of a load generator.

    Args:
        headers: of every request, with the key. Only the processes get them.
        cores: CPU cores for the processes; empty: all.
        timeout_s: time limit of one request.
        processes: number of processes that share a load, and the cores if there are enough.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        cores: Collection[int] = (),
        timeout_s: float = TIMEOUT_S,
        processes: int = 1,
    ) -> None:
        # It imports our package from its folder, and nothing from the working directory.
        env = passed_on(os.environ) | {"PYTHONPATH": str(PACKAGES)}
        command, ours = [sys.executable, str(CLIENT)], sorted(cores or own_cores())
        parts = [ours[i::processes] if len(ours) >= processes > 1 else cores for i in range(processes)]
        self.children = [Child(command, env, cores=part, name="the load generator") for part in parts]
        with undone_on_error(self.kill):
            for child in self.children:
                child.send(url=url, headers=dict(headers), timeout_s=timeout_s)
            for child in self.children:
                ready = child.receive(READY_S, "starting")
                if ready["event"] == "failed":
                    raise BadUsage(ready["cause"], "http://HOST:PORT/v1/completions")

    def load(
        self,
        workload: Workload,
        bodies: Sequence[str],
        mark: str = "",
        rounds: Sequence[str] = (),
        *,
        bounded: bool = True,
    ) -> None:
        """Send the requests to the processes.

        Args:
            bodies: JSON of each request.
            mark: placeholder in the bodies for the text of a round (`loadgen.streams.Bodies`).
            rounds: text of each round.
            bounded: whether no answer can have more tokens than its request asks for.
        """
        told = {"output_tokens": [request.output_tokens for request in workload.requests], "bounded": bounded}
        told["streamed"] = workload.spec.kind == "generate"
        for child in self.children:
            converse(child, op="load", bodies=bodies, mark=mark, rounds=rounds, **told)

    def run(self, load: Message, on_progress: ProgressCallback, barrier: WindowBarrier | None) -> list[Message]:
        """Run a load, and return the results of each process. All processes have one beginning and one window.

        Raises:
            EngineFailed: if a process died. All are stopped.
            BadUsage: if the limit on open files is too low for the load.
        """
        parts = parts_of(load, len(self.children))
        needed, (_, most) = max(part.get("concurrency") or 0 for part in parts), getrlimit(RLIMIT_NOFILE)
        if needed and needed + OTHER_FILES > most != RLIM_INFINITY:
            problem = f"a process may have {most:,} files open, and {needed:,} connections are needed"
            raise BadUsage(problem, f"Run `ulimit -n {needed + OTHER_FILES}` first, or use fewer concurrent requests.")
        if len(parts) == 1:
            return [converse(self.children[0], on_progress, barrier, op="run", load=load)]
        assert barrier is None, "one engine of several has one process"
        together = WindowBarrier([load] * len(parts) if load["kind"] == "closed_loop" else [])
        progress: dict[int, Progress] = {}
        left = set(range(len(parts)))

        def measured(index: int) -> dict[str, Any]:
            def show(told: Progress) -> None:
                progress[index] = told
                if on_progress and index == min(left):
                    each = list(progress.values())
                    phase = min((one.phase for one in each), key=PHASES.index)
                    done, in_flight = sum(one.done for one in each), sum(one.in_flight for one in each)
                    tokens_per_s = sum(one.tokens_per_s or 0.0 for one in each)
                    on_progress(Progress(phase, told.elapsed_s, done, in_flight, tokens_per_s))

            found = converse(self.children[index], show, together, op="run", load=parts[index])
            left.discard(index)
            return found

        return together.run_together(measured, len(parts), self.kill)

    def kill(self) -> None:
        for child in self.children:
            child.kill()


def token_words(ids: Sequence[int]) -> str:
    """Return the text of exactly these tokens, for models with dummy weights (`server.tokenizer_files`)."""
    return " ".join(f"t{token}" for token in ids)


def body_of(
    request: Request, model: str, kind: Kind = "generate", say: Callable[[Sequence[int]], str] = token_words
) -> dict[str, Any]:
    """Return the body of a streamed, greedy request for exactly its output tokens, or of a request for a result.

    Vectors come in base64, as OpenAI's client requests them. The first eighth of a pair is the query.

    Args:
        say: makes text from ids, because servers take a pair only as text.
    """
    match kind:
        case "embed":
            return {"model": model, "input": list(request.prompt), "encoding_format": "base64"}
        case "classify":
            return {"model": model, "input": list(request.prompt)}
        case "rerank":
            query = max(1, len(request.prompt) // QUERY)
            return {"model": model, "query": say(request.prompt[:query]), "documents": [say(request.prompt[query:])]}
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def format_fields(spec: WorkloadSpec) -> dict[str, Any]:
    """Return the fields of a body for structured output in OpenAI's format; empty for free text.

    The end of the text is not ignored, because vLLM fails a request that continues after its complete JSON.
    """
    if not spec.schema:
        return {}
    named = {"name": "slm", "schema": json_value(spec.schema)}
    return {"ignore_eos": False, "response_format": {"type": "json_schema", "json_schema": named}}


def run_of(told: Sequence[Mapping[str, Any]], workload: Workload, steps: Sequence[Sequence[Any]] = ()) -> Run:
    """Return the results of the client's processes as a Run.

    Prompt tokens are the workload's, if a request was cut off before the server's count.

    Args:
        steps: rows of the server's trace, if there is one.
    """
    rows = sorted((row for part in told for row in part["samples"]), key=itemgetter(SENT))
    for row in rows:
        if row[PROMPT_TOKENS] is None:
            row[PROMPT_TOKENS] = len(workload.requests[row[REQUEST]].prompt)
    run = run_from(told, steps)
    began, closes = told[0]["began"], max(part["window"][1] for part in told)
    bins: Counter[int] = Counter()
    for part in told:
        bins.update({int(index): tokens for index, tokens in part["bins"].items()})
    first, last = min(bins, default=0), max(bins, default=-1)
    if bins:  # up to the window's end, even without a token
        last = max(last, first + int((closes - first * BIN_S) / BIN_S) - 1)
    chunks, on_schedule = sum(part["chunks"] for part in told), told[0]["on_schedule"]
    histograms = []  # of the gaps in the window, and in the window of each step
    for parts in zip(*(part["gaps"] for part in told)):
        counts: Counter[int] = Counter()
        for part in parts:
            counts.update({int(index): count for index, count in part["counts"].items()})
        named = {str(index): counts[index] for index in sorted(counts)}
        sum_s = round(sum(part["sum_s"] for part in parts), 6)
        histograms.append({"growth": GROWTH, "least_s": LEAST_S, "counts": named, "sum_s": sum_s})
    stream = Stream(
        bin_s=BIN_S,
        begins_s=round(first * BIN_S - began, 6),
        tokens=tuple(round(bins[index], 3) for index in range(first, last + 1)),
        gaps=histograms[0],
        step_gaps=tuple(histograms[1:]),
        tokens_per_chunk=sum(part["told"] for part in told) / chunks if chunks else None,
        scheduled_s=tuple(round(row[SCHEDULED] - began, 6) for row in rows) if on_schedule else None,
        unsent_s=tuple(round(at - began, 6) for at in sorted(at for part in told for at in part["unsent"])),
        waited_s=tuple(round(seconds, 6) for seconds in sorted(s for part in told for s in part["waited"])),
        cpu_s=sum(part["client_cpu_s"] for part in told),
        stamp_uncertainty_s=(max(part["doubt_s"][0] for part in told), max(part["doubt_s"][1] for part in told)),
    )
    return replace(run, stream=stream)


def prompt_words(ids: Sequence[int]) -> str:
    """Return text of about one token per id: common words, each of which is one token for most tokenizers."""
    return " ".join(WORDS[number % len(WORDS)] for number in ids)


class FreshPrompts:
    """Prompts of which a prefix cache can serve only the part that they share.

    Each prompt has a mark after the first token that it does not share. The client replaces the mark by fresh ids in
    each round. A cache keeps prefixes, so all that follows the mark is new to it.

    Args:
        words: whether prompts are common words, two for each fresh id, and not lists of ids.

    Attributes:
        mark: the placeholder as it stands in a JSON body.
        salt: two ids that are drawn for one hand-over of the requests.
        ids: replacement of the mark in each round: the number of the round, so that no cached block is found again, and
            the salt.
        rounds: text of each replacement.
    """

    def __init__(self, workload: Workload, words: bool) -> None:
        """Draw the salt for the prompts of a workload."""
        self.words, self.mark = words, MARK if words else f'"{MARK}"'
        span = max(1, max(max(request.prompt, default=0) for request in workload.requests) - LEAST_ID)
        self.salt = LEAST_ID + secrets.randbelow(span), LEAST_ID + secrets.randbelow(span)
        self.ids = [(LEAST_ID + number % span, *self.salt) for number in range(ROUNDS)]
        self._fresh = FRESH * (2 if words else 1)

    @cached_property
    def rounds(self) -> list[str]:
        if not self.words:
            return [", ".join(map(str, ids)) for ids in self.ids]
        return [prompt_words([n for i in ids for n in (i // len(WORDS), i)]) for ids in self.ids]

    def place(self, request: Request) -> int | None:
        """Return the position of the mark in a prompt, or None if the prompt is too short."""
        at = request.shared + 1
        return at if len(request.prompt) > at + self._fresh else None

    def prompt(self, request: Request) -> list[int | str] | str | None:
        """Return the prompt with the mark, as words or as ids, or None if the prompt is too short."""
        ids, at = request.prompt, self.place(request)
        if at is None:
            return None
        before, after = ids[:at], ids[at + self._fresh :]
        return " ".join((prompt_words(before), MARK, prompt_words(after))) if self.words else [*before, MARK, *after]


def cache_lookups(url: str, headers: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the prompt tokens that an endpoint's prefix caches have looked up and found since its start.

    None if its page of metrics has no such counters.
    """
    parts = urlsplit(url)
    page = urlunsplit((parts.scheme, parts.netloc, f"{parts.path.partition('/v1/')[0]}/metrics", "", ""))
    totals: dict[str, float] = {}
    try:
        status, _, text = ask_once("GET", page, headers, None, PAGE_S)
        for row in samples(text, COUNTERS) if status == 200 else ():
            if counter := COUNTER.fullmatch(row.name):
                totals[counter[1]] = totals.get(counter[1], 0.0) + row.value
        return (round(totals.get("queries", 0.0)), round(totals.get("hits", 0.0))) if totals else None
    except (OSError, http.client.HTTPException, ValueError, OverflowError):  # or another format
        return None


class EndpointEngine(Engine):
    """A server that somebody else has started, with unknown limits.

    One request is sent first, so that a wrong key, an unknown model or a server without streaming is an error.

    Attributes:
        without: the entries of `OPTIONAL` that the server refuses. If it refuses "token ids", prompts are words.
    """

    windows_of_schedules = True
    without: tuple[str, ...] = ()
    _fresh: FreshPrompts | None = None
    _format: Mapping[str, Any] = MappingProxyType({})  # fields of the bodies for structured output

    def __init__(
        self, spec: EngineSpec, own_prompts: bool = True, timeout_s: float = TIMEOUT_S, processes: int = 1
    ) -> None:
        """Check the endpoint and start the client.

        Args:
            own_prompts: make prompts differ within and between loads, apart from their shared prefix. Text is not
                changed, and prompts that may come from a cache only if they share a prefix.
            timeout_s: time limit of one request.
            processes: of the load generator.

        Raises:
            BadUsage: if the server does not answer or does not stream, with its answer.
        """
        super().__init__(spec)
        self.resolved = Resolved()
        self._is_chat, self._kind = urlsplit(spec.url).path.endswith(CHAT), kind_of(spec.url)
        self._further = {name: handed_over(value) for name, value in spec.extra}
        self._own_prompts = own_prompts and not spec.allow_prefix_cache and self._kind == "generate"
        self._counts = True
        self._key, self._headers = own_headers()
        within_s = min(ANSWER_S, timeout_s)
        try:
            for without in LESS:
                self.without = without
                body = self.body(Request((5, 6, 7), 2))
                status, kind, text = ask_once("POST", spec.url, self._headers, body, within_s)
                if status not in NOT_SO:
                    break
        except (OSError, http.client.HTTPException) as error:
            why = told_by_server(f"{error}", self._key)
            certificate = isinstance(error, ssl.SSLCertVerificationError)
            hint = "Set SSL_CERT_FILE=PATH to the certificates that sign it." if certificate else A_SERVER
            raise BadUsage(f"{spec.url} does not answer: {why}", hint) from None
        if status not in STREAMS:
            hint = HINTS.get(status) or HINTS.get(status // 100, "Change the request with --extra-body.")
            raise BadUsage(f"{spec.url} answered {status}: {told_by_server(text, self._key)}", hint)
        if self._kind == "generate" and not is_stream(kind):
            told = told_by_server(kind, self._key) or "something"
            raise BadUsage(f"{spec.url} does not stream: it answered {told}", "Use a server that streams.")
        if failed := error_in(text.encode(), streamed=self._kind == "generate"):
            raise BadUsage(f"{spec.url}: {told_by_server(failed, self._key)}", "Read the server's log.")
        self._client = LoadClient(spec.url, self._headers, timeout_s=timeout_s, processes=processes)

    def body(self, request: Request) -> str:
        """Return the JSON body of a request in the format of the URL.

        The prompt is the request's text if it has one. Otherwise it is token ids for completions, and words for a chat
        or a server that refuses ids.
        """
        body = body_of(request, self.spec.model, self._kind, prompt_words)
        if self._kind != "generate":
            if "input" in body and (request.text or self._in_words):
                body["input"] = request.text or prompt_words(request.prompt)
            body |= self._further
            return json.dumps({name: value for name, value in body.items() if value is not None})
        body |= {"return_token_ids": True, **self._format}
        fresh = self._fresh.prompt(request) if self._fresh and not request.text else None
        ids = prompt_words(request.prompt) if self._in_words else list(request.prompt)
        body["prompt"] = fresh or request.text or ids
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        for name in self.without:
            body.pop(name, None)
        body |= self._further
        return json.dumps({name: value for name, value in body.items() if value is not None})

    @property
    def _in_words(self) -> bool:
        return self._is_chat or TOKEN_IDS in self.without

    def _hand_over(self, workload: Workload) -> None:
        self._format = format_fields(workload.spec)
        own = self._own_prompts or workload.spec.finds_prefixes
        texts = any(request.text for request in workload.requests)
        self._fresh = FreshPrompts(workload, self._in_words) if own and not texts else None
        mark, rounds = (self._fresh.mark, self._fresh.rounds) if self._fresh else ("", [])
        # A field with fields may have any meaning.
        bounded = not any(name in LENGTHENS or isinstance(value, dict) for name, value in self._further.items())
        bodies = [self.body(request) for request in workload.requests]
        self._client.load(workload, bodies, mark, rounds, bounded=bounded)

    def _run(self, workload: Workload, load: Message, progress: ProgressCallback, barrier: WindowBarrier | None) -> Run:
        before = cache_lookups(self.spec.url, self._headers) if self._counts else None
        run = run_of(self._client.run(load, progress, barrier), workload)
        after = cache_lookups(self.spec.url, self._headers) if before else None
        self._counts = after is not None  # a server without such counters is not asked again
        seen = (after[0] - before[0], after[1] - before[1]) if before and after else None
        salt = self._fresh.salt if self._fresh else None
        assert run.stream, "there was a client"
        return replace(run, stream=replace(run.stream, refused=self.without, salt=salt, cache_lookups=seen))

    def close(self) -> None:
        self.ready = False
        self._client.kill()


def own_headers() -> tuple[str, dict[str, str]]:
    """Return the key of the environment, and the headers of a request with the key as a bearer token.

    Raises:
        BadUsage: if a header cannot hold the key. The error does not show the key.
    """
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise BadUsage(f"{KEY} holds what no header may hold", "Set it to the key only, in one line of ASCII.")
    return key, {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def told_by_server(text: str, key: str) -> str:
    """Return the first characters of a server's text without our key, which some servers repeat."""
    return printable(hidden(text, [key]))[:TOLD]


def only_model(url: str, timeout_s: float) -> str:
    """Return the only model that the server of `url` lists at /models.

    Raises:
        BadUsage: if no server answers, or if it lists no model or several models.
    """
    parts, (key, headers) = urlsplit(url), own_headers()
    path = parts.path.removesuffix("/completions").removesuffix("/chat")
    listed = urlunsplit(parts._replace(path=f"{path}/models"))
    try:
        _, _, text = ask_once("GET", listed, headers, None, min(ANSWER_S, timeout_s))
        found = [each["id"] for each in json_value(text)["data"]]
    except ConnectionRefusedError as error:
        raise BadUsage(f"cannot connect to {url}: {error}", A_SERVER) from None
    except (OSError, http.client.HTTPException, *UNUSABLE):
        found = []
    names = [told_by_server(str(name), key) for name in found[:SHOWN]]
    if len(found) != 1:
        more = ", ..." if len(found) > SHOWN else ""
        seen = f"lists {len(found)} models: {', '.join(names)}{more}" if names else "does not list its models"
        raise BadUsage(f"no model was named, and {listed} {seen}", f"--model {names[0] if names else 'NAME'}")
    return names[0]
