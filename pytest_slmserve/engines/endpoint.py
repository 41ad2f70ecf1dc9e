"""Endpoints that answer at a URL as OpenAI's server does, with streaming: another vLLM, SGLang, TGI, llama.cpp ..."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from urllib.parse import urlsplit, urlunsplit

from pytest_slmserve.engines.base import Outputs, ProgressCallback, Scores, WindowBarrier, ignore_progress, message_of
from pytest_slmserve.engines.load_client import TIMEOUT_S, LoadClient, completion, run_of
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.loads import Load, Request, Workload
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.records import Resolved, Run
from pytest_slmserve.schema.secret_words import hidden
from pytest_slmserve.schema.specs import KEY, EngineSpec
from pytest_slmserve.telemetry.dcgm_exporter import ask_once, samples

COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body information"
)
WORDS = COMMON.split()
MARK = "slm-round"
ROUNDS = 4096  # through all requests, before the first comes again
FRESH = 3  # ids that differ: two from hand-over to hand-over, one from round to round
LEAST_ID = 4  # below it are special tokens
PAGE_S = 5.0
# vLLM's names (`vllm/v1/metrics/loggers.py`); before 0.11 they began with gpu_.
COUNTER = re.compile(r"vllm:(?:gpu_)?prefix_cache_(queries|hits)(?:_total)?")


@dataclass(frozen=True, slots=True)
class Fresh:
    """The ids that make each prompt new: after its first come `salt`, drawn for these requests, and the number of the
    round. A cache keeps what begins alike, so all that follows is new to it.

    words: prompts are common words, two for each id. largest: id of the requests."""

    salt: tuple[int, int]
    words: bool
    largest: int

    @property
    def mark(self) -> str:
        """The placeholder of these ids in a body; in quotes where prompts are lists of ids."""
        return MARK if self.words else f'"{MARK}"'

    @property
    def rounds(self) -> list[str]:
        span = max(1, self.largest - LEAST_ID)
        return [self._text((*self.salt, LEAST_ID + number % span)) for number in range(ROUNDS)]

    def prompt(self, ids: tuple[int, ...]) -> list[int | str] | str | None:
        """The prompt with the mark in it, as words or as a list of ids; None for one that is too short."""
        place = FRESH * (2 if self.words else 1)
        if len(ids) <= place + 1:
            return None
        if self.words:
            return " ".join((prompt_words(ids[:1]), MARK, prompt_words(ids[1 + place :])))
        return [ids[0], MARK, *ids[1 + place :]]

    def _text(self, ids: tuple[int, ...]) -> str:
        return " ".join(f"{_word(i // len(WORDS))} {_word(i)}" for i in ids) if self.words else ", ".join(map(str, ids))


def fresh(workload: Workload, words: bool) -> Fresh:
    """The fresh ids for one hand-over of these requests, with a salt that is drawn for it."""
    largest = max(max(request.prompt, default=0) for request in workload.requests)
    span = max(1, largest - LEAST_ID)
    return Fresh((LEAST_ID + secrets.randbelow(span), LEAST_ID + secrets.randbelow(span)), words, largest)


def prompt_words(ids: tuple[int, ...]) -> str:
    """Text of about as many tokens as there are ids: common words, one token each for most tokenizers."""
    return " ".join(map(_word, ids))


def _word(number: int) -> str:
    return WORDS[number % len(WORDS)]


def lookups(url: str, headers: Mapping[str, str]) -> tuple[int, int] | None:
    """Prompt tokens looked up in an endpoint's prefix cache, and found, since it began; None without such counters."""
    parts = urlsplit(url)
    page = urlunsplit((parts.scheme, parts.netloc, f"{parts.path.partition('/v1/')[0]}/metrics", "", ""))
    try:
        status, _, text = ask_once("GET", page, headers, None, PAGE_S)
    except (OSError, http.client.HTTPException):
        return None
    return cache_lookups_in(text) if status == 200 else None


def cache_lookups_in(page: str) -> tuple[int, int] | None:
    """Tokens looked up and found, by the text of such a page, of all its engines; None where it has no counters."""
    totals: dict[str, float] = {}
    try:
        for row in samples(page, ["vllm:"]):
            if counter := COUNTER.fullmatch(row.name):
                totals[counter[1]] = totals.get(counter[1], 0.0) + row.value
        return (round(totals.get("queries", 0.0)), round(totals.get("hits", 0.0))) if totals else None
    except (ValueError, OverflowError):  # another format, or a counter that is no number
        return None


CHAT = "/chat/completions"
ANSWER_S = 60.0
TOKEN_IDS = "token ids"
OPTIONAL = ("stream_options", "ignore_eos", TOKEN_IDS)  # what some servers refuse: a load is whole without the first
LESS = tuple(chain.from_iterable(combinations(OPTIONAL, number) for number in (1, 2, 3)))
NOT_SO = (400, 422)  # of a body that a server does not take
TOLD = 200  # characters of an answer that is no stream
HINTS = {
    401: f"{KEY}=... in the environment",
    403: f"{KEY}=... in the environment",
    404: "a URL that ends in /v1/completions or /v1/chat/completions, and the model as the server calls it",
}


class EndpointEngine:
    """Somebody else's server: nothing is started, and its limits are not known. One request is sent first, so that a
    wrong key, an unknown model or a server without streaming is an error, and not a measurement.

    without: what its server refuses of what we ask for, and no more: "stream_options", "ignore_eos", prompts in "token
    ids" (then they are words).
    """

    without: tuple[str, ...] = ()
    _fresh: Fresh | None = None

    def __init__(
        self,
        spec: EngineSpec,
        key: str | None = None,
        own_prompts: bool = True,
        timeout_s: float = TIMEOUT_S,
        processes: int = 1,
    ) -> None:
        """key: sent as a bearer token, and told to nobody else; None: that of the environment. own_prompts: no two
        requests begin alike, of one load or of several; what the specification allows to come from a cache, and text,
        is sent as it is. timeout_s, processes: as of the `LoadClient`."""
        self.spec = spec
        self.launch = uuid.uuid4().hex[:12]
        self.resolved = Resolved()
        self.ready = True
        self._timeout_s = timeout_s
        self._further = {name: json.loads(value) for name, value in spec.extra}
        self._own_prompts = own_prompts and not spec.allow_prefix_cache
        self._counts = True
        self._key = usable(os.environ.get(KEY, "") if key is None else key)
        self._headers = headers_of(self._key)
        self._check()
        self._client = LoadClient(spec.url, self._headers, timeout_s=timeout_s, processes=processes)

    def _check(self) -> None:
        """Ask for two tokens, the way that servers take which know most; where that is refused, without what some do
        not know. Raises BadUsage where none of it gets a stream, with what is said to the least of it."""
        status, kind, text = self._asked_without(())
        for without in LESS:
            if status not in NOT_SO:
                break
            status, kind, text = self._asked_without(without)
        if status != 200:
            raise BadUsage(f"{self.spec.url} answered {status}: {self._told(text)}", hint_of(status))
        if "event-stream" not in kind:
            told = self._told(kind) or "something"
            raise BadUsage(f"{self.spec.url} does not stream: it answered {told}", "a server that does")
        if error := error_in(text):
            raise BadUsage(f"{self.spec.url} said in its stream: {self._told(error)}", "its log")

    def _asked_without(self, without: tuple[str, ...]) -> tuple[int, str, str]:
        self.without = without
        return self._asked(self.body(Request((5, 6, 7), 2)))

    def _told(self, text: str) -> str:
        return told_by_server(text, self._key)

    def _asked(self, body: str) -> tuple[int, str, str]:
        """Status, content type and text of one answer."""
        try:
            return ask_once("POST", self.spec.url, self._headers, body, min(ANSWER_S, self._timeout_s))
        except (OSError, http.client.HTTPException) as error:
            why = self._told(f"{error}")
            raise BadUsage(f"{self.spec.url} does not answer: {why}", "the URL of a server that runs") from None

    @property
    def _chats(self) -> bool:
        return urlsplit(self.spec.url).path.endswith(CHAT)

    @property
    def _in_words(self) -> bool:
        return self._chats or TOKEN_IDS in self.without

    def body(self, request: Request) -> str:
        """The JSON body of one request, for the URL's interface. The prompt is the request's text where it has one;
        else token ids for completions, words for a chat or a server that refuses ids."""
        asked = completion(request, self.spec.model)
        own = self._fresh.prompt(request.prompt) if self._fresh and not request.text else None
        asked["prompt"] = (
            own or request.text or (prompt_words(request.prompt) if self._in_words else list(request.prompt))
        )
        if self._chats:
            asked["messages"] = [{"role": "user", "content": asked.pop("prompt")}]
        for name in self.without:
            asked.pop(name, None)
        asked |= self._further
        return json.dumps({name: value for name, value in asked.items() if value is not None})

    def start(self) -> None:
        """Do nothing: somebody else has started the server."""

    def load_requests(self, workload: Workload) -> None:
        if self._client.has(workload):
            return
        own = self._own_prompts and not any(request.text for request in workload.requests)
        self._fresh = fresh(workload, self._in_words) if own else None
        said = (self._fresh.mark, self._fresh.rounds) if self._fresh else ("", ())
        self._client.load_requests(workload, self.body, *said)

    def run(
        self,
        workload: Workload,
        load: Load,
        on_progress: ProgressCallback = ignore_progress,
        barrier: WindowBarrier | None = None,
    ) -> Run:
        self.load_requests(workload)
        before = self._lookups()
        run = run_of(self._client.run(message_of(load), on_progress, barrier), workload)
        after = self._lookups()
        seen = (after[0] - before[0], after[1] - before[1]) if before and after else None
        salt = self._fresh.salt if self._fresh else None
        assert run.stream, "there was a client"
        return replace(run, stream=replace(run.stream, refused=self.without, salt=salt, cache_lookups=seen))

    def _lookups(self) -> tuple[int, int] | None:
        """Prompt tokens looked up in the server's prefix cache, and found, so far; None once it reports none."""
        found = lookups(self.spec.url, self._headers) if self._counts else None
        self._counts = found is not None
        return found

    def outputs(self, workload: Workload, requests: int, length: int) -> Outputs:
        raise EngineFailed("an endpoint is not asked for its tokens", "the server interface")

    def scores(self, workload: Workload, outputs: Outputs) -> Scores:
        raise EngineFailed("an endpoint is not asked for its tokens", "the server interface")

    def close(self) -> None:
        self.ready = False
        self._client.kill()


def headers_of(key: str) -> dict[str, str]:
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


def told_by_server(text: str, key: str) -> str:
    """The first characters of a server's text, without our key: some servers repeat the key that they refuse."""
    return printable(hidden(text, [key]))[:TOLD]


def only_model(url: str, timeout_s: float) -> str:
    """The model that the server of `url` lists at /models beside its completions. Raises BadUsage where no server
    answers, and where it lists none or several."""
    parts, key = urlsplit(url), usable(os.environ.get(KEY, ""))
    path = parts.path.removesuffix("/completions").removesuffix("/chat")
    listed = urlunsplit(parts._replace(path=f"{path}/models"))
    try:
        _, _, text = ask_once("GET", listed, headers_of(key), None, min(ANSWER_S, timeout_s))
        names = [told_by_server(str(each["id"]), key) for each in json.loads(text)["data"]]
    except ConnectionRefusedError as error:
        raise BadUsage(f"{url} does not answer: {error}", "the URL of a server that runs") from None
    except (OSError, http.client.HTTPException, ValueError, TypeError, LookupError):
        names = []
    if len(names) != 1:
        seen = f"lists {len(names)} models: {', '.join(names)}" if names else "does not list its models"
        raise BadUsage(f"no model was named, and {listed} {seen}", f"--model {names[0] if names else 'NAME'}")
    return names[0]


def hint_of(status: int) -> str:
    """The hint for an answer whose HTTP status is not 200: what the user can change."""
    match status // 100:
        case 3:
            return "the URL that it leads to: requests do not follow"
        case 5:
            return "the server's own log"
    return HINTS.get(status, "--extra-body with what this server wants otherwise")


def usable(key: str) -> str:
    """A key without blanks around it. Raises BadUsage, which does not repeat it, where no header could hold it."""
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise BadUsage(f"{KEY} holds what no header may hold", "the key alone, in one line of ASCII")
    return key


def check_endpoints(urls: Sequence[str], models: Sequence[str], timeout_s: float) -> None:
    """Raises BadUsage where one of `models` gets no stream at one of `urls` within `timeout_s` seconds."""
    for url in urls:
        for model in models:
            spec = EngineSpec(model, platform="remote", interface="endpoint", url=url)
            EndpointEngine(spec, timeout_s=timeout_s).close()


def error_in(stream: str) -> str | None:
    """The first line of data with an "error" in a stream's beginning, without its prefix; None where there is none."""
    lines = (line.removeprefix("data:").strip() for line in stream.splitlines() if line.startswith("data:"))
    return next((line for line in lines if '"error"' in line), None)
