"""Endpoints that answer at a URL as OpenAI's server does, with streaming: another vLLM, SGLang, TGI, llama.cpp ..."""

from __future__ import annotations

import http.client
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations
from urllib.parse import urlsplit, urlunsplit

from pytest_slmserve.engines.base import Outputs, ProgressCallback, Scores, WindowBarrier, ignore_progress, message_of
from pytest_slmserve.engines.load_client import TIMEOUT_S, LoadClient, completion, run_of
from pytest_slmserve.engines.prefix_cache import Fresh, fresh, lookups, words_of
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.loads import Load
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.records import Resolved, Run
from pytest_slmserve.schema.secret_words import hidden
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.schema.urls import KEY
from pytest_slmserve.schema.workloads import Request, Workload
from pytest_slmserve.telemetry.http_once import ask_once

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
        return told(text, self._key)

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
        asked["prompt"] = own or request.text or (words_of(request.prompt) if self._in_words else list(request.prompt))
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
        return replace(run, stream=replace(run.stream, without=self.without, salt=salt, cache_lookups=seen))

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


def told(text: str, key: str) -> str:
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
        names = [told(str(each["id"]), key) for each in json.loads(text)["data"]]
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
