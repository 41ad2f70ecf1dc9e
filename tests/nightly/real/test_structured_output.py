"""Structured output of vLLM's CPU backend, by its default grammars: each output begins a document that its schema
allows, through the engine and through the server, and one that ends early makes no valid measurement."""

import json
import re
from contextlib import closing
from dataclasses import replace
from typing import get_args

import pytest
from interfaces import problems_of
from measured import measure
from real_engine import SPEC

from pytest_slmserve.engines.pool import launch_engine
from pytest_slmserve.engines.server import tokenizer_files
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.errors import OwnInterface
from pytest_slmserve.schema.specs import ClosedLoop, WorkloadSpec
from pytest_slmserve.telemetry.host import probe
from pytest_slmserve.workload.requests import build_workload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]

TOKENIZED = replace(SPEC, extra=(("skip_tokenizer_init", False),))
TOKENS, LOAD = 96, ClosedLoop(4, window_s=2.0)
SHORT = (
    '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}'
)
# A record of "json", whole: what follows it begins the next one.
RECORD = re.compile(r'\{"name":"[^"]{0,40}","kind":"(?:small|medium|large)","count":\d{1,4},"done":(?:true|false)\}')


def asked(response_format):
    spec = WorkloadSpec(prompt_tokens=16, output_tokens=TOKENS, requests=48, response_format=response_format)
    return build_workload(spec, model_of(SPEC.model))


@pytest.mark.parametrize("interface", get_args(OwnInterface))
def test_outputs_follow_their_schema(interface):
    words = json.loads(tokenizer_files(model_of(SPEC.model))["tokenizer.json"])["model"]["vocab"]
    of = {token: word for word, token in words.items()}
    with closing(launch_engine(replace(TOKENIZED, interface=interface)).start()) as engine:
        free, records, short = map(asked, ("", "json", SHORT))
        texts = ["".join(of[token] for token in tokens) for tokens in engine.outputs(records, 4, TOKENS)]
        assert all(text.startswith('[{"name":"') for text in texts)
        for text in texts:
            whole = RECORD.match(text, 1)
            assert whole and json.loads(whole[0]) and text[whole.end() :].startswith(",{"), text
        [ended] = engine.outputs(short, 1, TOKENS)
        assert json.loads("".join(of[token] for token in ended[:-1])).keys() == {"ok"}, "then the end of the text"

        plain, made, early = (measure(engine, each, LOAD, probe("cpu").environment) for each in (free, records, short))
    for each in (plain, made):
        assert problems_of([each]) == [] and each.run.failures == 0
        assert {n for n, done in zip(each.run.samples.output_tokens, each.run.samples.finished) if done} == {TOKENS}
    assert any("their JSON was complete" in text for text in problems_of([early]))
