"""Whatever answers at a URL as OpenAI's server does, with streaming: another vLLM, SGLang, TGI, llama.cpp ..."""

from __future__ import annotations

import http.client
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from pytest_slmserve.engines.base import Gate, Outputs, Tell, silent
from pytest_slmserve.engines.client import Client, ask_once, completion, run_of
from pytest_slmserve.errors import BadUsage, EngineFailed
from pytest_slmserve.records import Request, Resolved, Run, Workload
from pytest_slmserve.spec import EngineSpec, Load
from pytest_slmserve.urls import KEY

CHAT = "/chat/completions"
ANSWER_S = 60.0
TOKEN_IDS = "token ids"
LESS = (("ignore_eos",), (TOKEN_IDS,), ("ignore_eos", TOKEN_IDS), ("ignore_eos", TOKEN_IDS, "stream_options"))
NOT_SO = (400, 422)  # of a body that a server does not take
TOLD = 200  # characters of an answer that is no stream
HINTS = {
    401: f"{KEY}=... in the environment",
    403: f"{KEY}=... in the environment",
    404: "the URL with its path, /v1/completions, and --model as the server calls it",
}
COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea kid body information"
)
WORDS = COMMON.split()


class EndpointEngine:
    """Somebody else's server: nothing is started, and its limits are not known. One request is sent first, so that a
    wrong key, an unknown model or a server without streaming is an error, and not a measurement.

    without: what its server refuses of what we ask for: "ignore_eos", prompts in "token ids" (then they are words).
    """

    without: tuple[str, ...] = ()

    def __init__(self, spec: EngineSpec, key: str | None = None, further: Mapping[str, Any] | None = None) -> None:
        """key: sent as a bearer token, and told to nobody else; None: that of the environment. further: fields of every
        request's body beside ours; None takes one of ours away."""
        self.spec = spec
        self.launch = uuid.uuid4().hex[:12]
        self.resolved = Resolved()
        self.ready = True
        self._further = dict(further or {})
        self._key = usable(os.environ.get(KEY, "") if key is None else key)
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._check()
        self._client = Client(spec.url, self._headers)

    def _check(self) -> None:
        """Ask for two tokens, the way that servers take which know most; where that is refused, without what some do
        not know. Raises BadUsage where none of it gets a stream, with what is said to the least of it."""
        status, kind, text = self._asked_without(())
        for without in LESS:
            if status not in NOT_SO:
                break
            status, kind, text = self._asked_without(without)
        if status != 200:
            hint = HINTS.get(status, "--extra-body with what this server wants otherwise")
            raise BadUsage(f"{self.spec.url} answered {status}: {self._told(text)}", hint)
        if "event-stream" not in kind:
            raise BadUsage(f"{self.spec.url} does not stream: it answered {kind or 'something'}", "a server that does")
        if error := error_in(text):
            raise BadUsage(f"{self.spec.url} said in its stream: {self._told(error)}", "its log")

    def _asked_without(self, without: tuple[str, ...]) -> tuple[int, str, str]:
        self.without = without
        return self._asked(self.body(Request((5, 6, 7), 2)))

    def _told(self, text: str) -> str:
        """Some repeat the key that they refuse."""
        return (text.replace(self._key, "[hidden]") if self._key else text)[:TOLD]

    def _asked(self, body: str) -> tuple[int, str, str]:
        """Status, content type and text of one answer."""
        try:
            return ask_once("POST", self.spec.url, self._headers, body, ANSWER_S)
        except (OSError, http.client.HTTPException) as error:
            raise BadUsage(f"{self.spec.url} does not answer: {error}", "the URL of a server that runs") from None

    def body(self, request: Request) -> str:
        """Of one request, in the words of the URL's interface: its text where it has one; else ids for completions, and
        words for a chat."""
        asked = completion(request, self.spec.model)
        if urlsplit(self.spec.url).path.endswith(CHAT):
            del asked["prompt"]
            asked["messages"] = [{"role": "user", "content": request.text or text_of(request)}]
        elif request.text or TOKEN_IDS in self.without:
            asked["prompt"] = request.text or text_of(request)
        for name in self.without:
            asked.pop(name, None)
        asked |= self._further
        return json.dumps({name: value for name, value in asked.items() if value is not None})

    def start(self) -> None:
        """Somebody else has started it."""

    def hand_over(self, workload: Workload) -> None:
        self._client.hand_over(workload, self.body)

    def run(self, workload: Workload, load: Load, tell: Tell = silent, gate: Gate | None = None) -> Run:
        self.hand_over(workload)
        run = run_of(self._client.run(load, tell, gate), workload)
        return replace(run, stream=run.stream and replace(run.stream, without=self.without))

    def outputs(self, workload: Workload, requests: int, length: int) -> Outputs:
        raise EngineFailed("an endpoint is not asked for its tokens", "the server door")

    def close(self) -> None:
        self.ready = False
        self._client.kill()


def usable(key: str) -> str:
    """A key without blanks around it. Raises BadUsage, which does not repeat it, where no header could hold it."""
    key = key.strip()
    if not (key.isascii() and key.isprintable()):
        raise BadUsage(f"{KEY} holds what no header may hold", "the key alone, in one line of ASCII")
    return key


def check_endpoints(urls: Sequence[str], models: Sequence[str]) -> None:
    """Raises BadUsage where one of `models` gets no stream at one of `urls`."""
    for url in urls:
        for model in models:
            EndpointEngine(EngineSpec(model, backend="remote", door="endpoint", url=url)).close()


def error_in(stream: str) -> str | None:
    """What a server that has begun to stream says against it."""
    lines = (line.removeprefix("data:").strip() for line in stream.splitlines() if line.startswith("data:"))
    return next((line for line in lines if '"error"' in line), None)


def text_of(request: Request) -> str:
    """About as many tokens of text: common words, one token each for most tokenizers. The server counts them."""
    return " ".join(WORDS[token % len(WORDS)] for token in request.prompt)
