"""Engines at a URL: what another's server is asked, what is refused before anything is measured and without the key,
and prompts that no prefix cache has seen. The server's answers are planted, and no client is started."""

import http.client
import json
import ssl
from base64 import b64encode
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from hypothesis import given, strategies as st
from interfaces import engine_with
from refusals import refused

from pytest_slmserve.engines import endpoint
from pytest_slmserve.engines.endpoint import FRESH, LEAST_ID, MARK, FreshPrompts, only_model, prompt_words
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.specs import EngineSpec, Request, Workload, WorkloadSpec

LOAD_CLIENT = endpoint.LoadClient


@pytest.fixture(autouse=True)
def no_process(monkeypatch):
    monkeypatch.setattr(endpoint, "LoadClient", lambda *_, **__: SimpleNamespace(kill=lambda: None))


@pytest.mark.parametrize(("processes", "may", "needed"), [(1, 115, 116), (3, 49, 50), (1, 116, None)])
def test_excess_connections_are_refused(monkeypatch, processes, may, needed):
    client, load = SimpleNamespace(children=["child"] * processes), {"kind": "closed_loop", "concurrency": 100}
    monkeypatch.setattr(endpoint, "getrlimit", lambda _: (0, may))
    monkeypatch.setattr(endpoint, "converse", lambda *_, **asked: asked["load"])
    if needed is None:
        assert LOAD_CLIENT.run(client, load, None, None) == [load]
        return
    with refused(str(may), f"{needed - 16}", hint=f"ulimit -n {needed}"):
        LOAD_CLIENT.run(client, load, None, None)


@pytest.fixture
def answered(monkeypatch):
    """Plants what a server answers: `answered(status, kind, text)`, or a function of what it is asked."""

    def plant(*answer):
        monkeypatch.setattr(endpoint, "ask_once", answer[0] if callable(answer[0]) else lambda *_: answer)

    return plant


def raising(error):
    def ask(*_):
        raise error

    return ask


def spec_of(path="/v1/completions"):
    return EngineSpec("slm", platform="remote", interface="endpoint", url=f"http://127.0.0.1:1{path}")


@pytest.mark.parametrize("text", ["", "two words"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_form_follows_endpoint_path(answered, path, text):
    answered(Refusing())
    engine = engine_with("key", replace(spec_of(path), extra=(("ignore_eos", "null"), ("top_k", "1"))))
    engine.close()
    asked = json.loads(engine.body(Request((5, 6, 7), 9, text)))
    if path == "/v1/completions":
        assert asked["prompt"] == (text or [5, 6, 7])
    else:
        assert asked["messages"] == [{"role": "user", "content": text or prompt_words((5, 6, 7))}]
        assert len(prompt_words((5, 6, 7)).split()) == 3 and "prompt" not in asked
    assert asked["top_k"] == 1 and "ignore_eos" not in asked


@pytest.mark.parametrize("where", ["text", "type", "status line", "stream"])
@pytest.mark.parametrize("encode", [
    str, quote, lambda key: b64encode(key.encode()).decode(), lambda key: key.encode().hex(),
], ids=["plain", "quoted", "base64", "hex"])  # fmt: skip
def test_echoed_key_is_hidden(answered, where, encode):
    key = "sk/FAULT+9f8e7d6c5b4a"
    echo = f"\x1b[2J k={encode(key)} end"
    answered(*{
        "text": (401, "text/plain", echo),
        "type": (200, echo, ""),
        "stream": (200, "text/event-stream", f'data: {{"error": "{echo}"}}\n\n'),
        "status line": (raising(http.client.BadStatusLine(echo)),),
    }[where])  # fmt: skip
    with pytest.raises(BadUsage, match=r"k=\[hidden\]=* end") as caught:
        engine_with(key, spec_of())
    assert encode(key)[:8] not in str(caught.value) and "\x1b" not in str(caught.value)


class Refusing:
    """A server that takes no body with certain words in it."""

    def __init__(self, *words):
        self.words, self.asked = words, []

    def __call__(self, method, url, headers, body, within_s):
        self.asked.append(json.loads(body))
        if found := [word for word in self.words if word in body]:
            return 422, "application/json", f"no {found[0]} here, {headers.get('Authorization')}"
        return 200, "text/event-stream", 'data: {"choices": []}\n\n'


IDS = '"prompt": ['


@pytest.mark.parametrize(("words", "without"), [
    ((), ()),
    (("ignore_eos",), ("ignore_eos",)),
    (("return_token_ids",), ("return_token_ids",)),
    (("return_token_ids", "ignore_eos"), ("return_token_ids", "ignore_eos")),
    ((IDS,), ("token ids",)),
    (("stream_options",), ("stream_options",)),
    (("ignore_eos", IDS), ("ignore_eos", "token ids")),
    (("stream_options", IDS), ("stream_options", "token ids")),
    (("ignore_eos", IDS, "stream_options"), ("stream_options", "ignore_eos", "token ids")),
])  # fmt: skip
def test_refused_field_is_left_out(answered, words, without):
    answered(server := Refusing(*words))
    engine = engine_with("key-of-somebody", spec_of())
    engine.close()
    assert engine.without == without
    assert isinstance(server.asked[-1]["prompt"], str if "token ids" in without else list)
    assert server.asked[-1]["stream"] is True and "max_tokens" in server.asked[-1]


@pytest.mark.parametrize(("answer", "told", "hint"), [
    ([Refusing("ignore_eos", '"model"')], r'422: no "model" here, Bearer \[hidden\]', "--extra-body"),
    ((500, "text/plain", "no"), "500: no", "the server's log"),
    ((413, "text/plain", "no"), "413: no", "--extra-body"),
    ((401, "text/plain", "no"), "401: no", "SLM_ENDPOINT"),
    ((403, "text/plain", "no"), "403: no", "SLM_ENDPOINT"),
    ((404, "text/plain", "no"), "404: no", "the model as the server calls it"),
    ((307, "text/plain", "no"), "307: no", "the URL that it leads to"),
    ((429, "text/plain", "no"), "429: no", "limits the rate"),
    ([raising(ssl.SSLCertVerificationError("self-signed"))], "does not answer: .*self-signed", "SSL_CERT_FILE=PATH"),
    ([raising(ssl.SSLError("WRONG_VERSION_NUMBER"))], "does not answer: .*WRONG", "the server is running"),
    ((200, "text/event-stream", 'data: {"error": "out of memory"}\n\n'), "out of memory", "log"),
])  # fmt: skip
def test_refused_request_suggests_remedy(answered, answer, told, hint):
    answered(*answer)
    with pytest.raises(BadUsage, match=told) as raised:
        engine_with("key-of-somebody", spec_of())
    assert hint in raised.value.hint


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
@pytest.mark.parametrize(("models", "key", "told"), [
    (["me/mine"], "sesame", None),
    (["base", "tuned"], "sesame", r"2 .*: base, tuned\n.*--model base"),
    (["me/mine"], "wrong", r"/v1/models .*\n.*--model NAME"),
    (None, "sesame", r"cannot connect to http://host/v1/.*completions: refused"),  # nobody answers
])  # fmt: skip
def test_only_served_model_is_found(monkeypatch, answered, path, models, key, told):
    def ask(method, url, headers, body, within_s):
        assert (method, url, body, within_s) == ("GET", "http://host/v1/models", None, 10)
        if models is None:
            raise ConnectionRefusedError("refused")
        may = headers["Authorization"] == "Bearer sesame"
        return 200, "application/json", json.dumps({"data": [{"id": name} for name in models]} if may else {})

    monkeypatch.setenv("SLM_ENDPOINT_KEY", f" {key}\n")
    answered(ask)
    with pytest.raises(BadUsage, match=told) if told else nullcontext():
        assert only_model(f"http://host/v1{path}", 10) == "me/mine"


def requests_of(*prompts):
    return Workload(WorkloadSpec(), tuple(Request(prompt, 2) for prompt in prompts), "here")


@given(st.lists(st.integers(4, 999), min_size=8, max_size=20).map(tuple), st.booleans(), st.integers(0, 12))
def test_fresh_prompts_keep_their_length(ids, words, shared):
    own, place = FreshPrompts(requests_of(ids), words), FRESH * (2 if words else 1)
    request = Request(ids, 2, shared=min(shared, len(ids) - place - 2))
    prompt, at = own.prompt(request), request.shared + 1
    parts = prompt.split() if words else prompt
    assert own.place(request) == at and parts[at] == MARK and len(parts) - 1 + place == len(ids)
    assert parts[:at] == (endpoint.prompt_words(ids[:at]).split() if words else [*ids[:at]])
    for text in (own.rounds[0], own.rounds[-1]):
        assert len(text.split() if words else text.split(", ")) == place
    workload = requests_of(tuple(range(4, 5000)))
    first, second = (FreshPrompts(workload, words=False) for _ in range(2))
    assert len({*first.rounds, *second.rounds}) == 2 * len(first.rounds)
    assert all(LEAST_ID <= int(part) < 5000 for text in first.rounds for part in text.split(", "))
    assert first.prompt(Request((5, 6, 7, 8), 2)) is None


@pytest.mark.parametrize(("extra", "bounded"), [
    ((), True), ((("ignore_eos", "null"), ("top_k", "1")), True), ((("max_tokens", "500"),), False),
    ((("n", "2"),), False), ((("options", '{"num_predict": 9}'),), False),
])  # fmt: skip
def test_further_fields_allow_longer_answers(answered, monkeypatch, extra, bounded):
    told = []
    client = SimpleNamespace(load=lambda *_, **words: told.append(words))
    monkeypatch.setattr(endpoint, "LoadClient", lambda *_, **__: client)
    answered(200, "text/event-stream; charset=utf-8", "")
    endpoint.EndpointEngine(replace(spec_of(), extra=extra)).load_requests(requests_of((5, 6, 7)))
    assert told == [{"bounded": bounded}]
    fields = endpoint.format_fields(WorkloadSpec(response_format='{"type": "object"}'))
    named = {"name": "slm", "schema": {"type": "object"}}
    assert fields == {"ignore_eos": False, "response_format": {"type": "json_schema", "json_schema": named}}
    assert endpoint.format_fields(WorkloadSpec()) == {}


SEVERAL = """vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_queries_total{engine="1"} 50.0
vllm:prefix_cache_hits_total{engine="0"} 3e1
vllm:prefix_cache_hits_created{engine="0"} 1.7e9
"""


@pytest.mark.parametrize(("page", "found"), [
    (SEVERAL, (150, 30)),
    ('vllm:gpu_prefix_cache_queries_total{m="x"} 5\nvllm:gpu_prefix_cache_hits_total{m="x"} 2', (5, 2)),
    ("llamacpp:prompt_tokens_total 5\n", None),
    ("", None),
    ("<html>", None),
    ("vllm:prefix_cache_queries_total " + "9" * 6000, None),
    ("vllm:prefix_cache_queries_total{" * 5000, None),
    ("vllm:prefix_cache_queries_total NaN\n", None),
])  # fmt: skip
def test_prefix_cache_counters_are_summed(answered, page, found):
    answered(200, "text/plain", page)
    assert endpoint.cache_lookups("http://host/v1/completions", {}) == found


@pytest.mark.parametrize(("path", "wanted"), [
    ("/v1/embeddings", {"input": [5, 6, 7], "encoding_format": "base64"}),
    ("/classify", {"input": [5, 6, 7]}),
    ("/v1/rerank", {"query": prompt_words((5,)), "documents": [prompt_words((6, 7))]}),
])  # fmt: skip
def test_pooling_endpoint_gets_its_fields(answered, path, wanted):
    result = {"data": [{"embedding": "AAAA"}], "usage": {"prompt_tokens": 3}}
    answered(200, "application/json", json.dumps(result))
    engine = engine_with("key", spec_of(path))
    workload = Workload(WorkloadSpec(kind="embed"), (Request((5, 6, 7), 1),), "planted")
    engine._client = SimpleNamespace(load=lambda _, bodies, mark, rounds, **how: given.append((bodies, mark, rounds)))
    given = []
    engine._hand_over(workload)
    [([body], mark, rounds)] = given
    assert json.loads(body) == {"model": "slm", **wanted} and (mark, rounds) == ("", [])
    for text, fact in (('{"error": "no such model"}', '"erro'), ('{"data": []}', "esult"), ("hello", "ello")):
        answered(200, "application/json", text)
        with refused("/v1/embeddings", fact):
            engine_with("key", spec_of("/v1/embeddings"))
