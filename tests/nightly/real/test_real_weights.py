"""Real weights, served end to end on the CPU: what is said means something, and ends by itself."""

import json
from dataclasses import replace
from statistics import fmean

import pytest
from interfaces import engine_with, url_of
from real_engine import SPEC
from smollm2 import missing, written

from pytest_slmserve.engines.server import NAME, ServerEngine
from pytest_slmserve.plan.models import model_of, stored_parameters
from pytest_slmserve.schema.kv_cache import kv_capacity, predicted_blocks
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, Request, Workload, WorkloadSpec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Germany": "Berlin", "Egypt": "Cairo"}
CAPITALS |= {"Spain": "Madrid"}
LONGER = ["Who are you?", "Name three colours."]
MOST = 128  # tokens of an answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    return written(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def server(folder):
    found = ServerEngine(
        replace(SPEC, model=str(folder), model_facts=model_of(str(folder)), interface="server", load_format="auto")
    ).start()
    yield found
    found.close()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def questions(tokenizer):
    asked = [f"What is the capital of {country}?" for country in CAPITALS] + LONGER
    texts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in asked]
    prompts = [tuple(tokenizer.encode(text).ids) for text in texts]
    requests = tuple(Request(ids, MOST) for ids in prompts)
    return Workload(WorkloadSpec(requests=len(requests)), requests, "questions")


def test_predicted_sizes_match_files(folder, server):
    assert stored_parameters(folder, tied=True) == model_of(str(folder)).parameters == 134_515_008
    assert abs(predicted_blocks(server.spec) - server.resolved.kv_blocks) <= 2
    assert server.resolved.kv_windows == (None,)
    assert kv_capacity(server.spec, 256, server.resolved) == (server.resolved.kv_blocks - 1) // 2


def test_answers_name_right_capitals(server, tokenizer, questions):
    outputs = server.outputs(questions, len(CAPITALS), 12)
    told = [tokenizer.decode(list(ids)) for ids in outputs]
    right = [city in text for city, text in zip(CAPITALS.values(), told, strict=True)]
    assert right[0] and sum(right) >= 4, told


def test_own_answers_score_higher(server, questions):
    own = server.outputs(questions, len(CAPITALS), 12)
    others = (*own[1:], own[0])
    right, wrong = server.scores(questions, own), server.scores(questions, others)
    assert all(-100 < score < 0 for score in (*right, *wrong)) and min(right) > -2
    assert fmean(right) > fmean(wrong) + 0.5 and server.scores(questions, own) == pytest.approx(right, abs=0.01)


def test_texts_end_by_themselves(server, questions):
    """Without ignore_eos a request has as many tokens as its answer."""
    further = (("ignore_eos", json.dumps(None)),)
    spec = EngineSpec(NAME, platform="remote", interface="endpoint", url=url_of(server), extra=further)
    engine = engine_with(server._key, spec, own_prompts=False)
    try:
        run = engine.run(questions, ClosedLoop(2, requests=len(questions.requests), settle_lifetimes=0))
    finally:
        engine.close()
    lengths = run.samples.output_tokens
    assert run.failures == 0 and all(run.samples.finished) and len(lengths) == len(questions.requests)
    assert min(lengths) > 1 and sum(length < MOST for length in lengths) >= len(CAPITALS), lengths
    assert len(set(lengths)) > 1, lengths
