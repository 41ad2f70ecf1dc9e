"""Vectors, classes and scores of pairs by vLLM's CPU backend, through the engine and through its server."""

from contextlib import closing
from dataclasses import replace

import pytest
from measured import measure
from real_engine import SPEC

from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.points import summarize
from pytest_slmserve.engines.pool import launch_engine
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.specs import ClosedLoop, WorkloadSpec
from pytest_slmserve.telemetry.host import probe
from pytest_slmserve.workload.requests import build_workload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]
POOLING = replace(SPEC, max_num_batched_tokens=256, extra=(("runner", "pooling"),))
USERS, PROMPT = 6, 48
ASKED = [
    ("bert-tiny", "engine", ["embed"]),
    ("bert-tiny-reranker", "server", ["rerank", "classify"]),
    ("opt-tiny", "server", ["embed"]),  # a decoder, of which vLLM makes an embedding model
]


@pytest.mark.parametrize(("model", "interface", "kinds"), ASKED, ids=[f"{m}-{i}" for m, i, _ in ASKED])
def test_results_are_served_at_the_rate_that_the_steps_tell_and_each_has_one_latency(model, interface, kinds):
    spec = replace(POOLING, model=model, model_facts=model_of(model), interface=interface)
    with closing(launch_engine(spec).start()) as engine:
        for kind in kinds:
            workload = build_workload(
                WorkloadSpec(kind=kind, prompt_tokens=PROMPT, output_tokens=1, requests=64), model_of(model)
            )
            made = measure(engine, workload, ClosedLoop(USERS, window_s=2.0), probe("cpu").environment)
            assert problems(made) == () and {*made.run.samples.prompt_tokens} == {PROMPT}
            seen, rows = (
                summarize(made),
                [row for row in range(len(made.run.samples)) if made.run.samples.finished[row]],
            )
            assert all(made.run.samples.first_token_s[row] == made.run.samples.last_token_s[row] for row in rows)
            # What the steps tell and what the requests tell are counts of the same results.
            assert seen.output_tokens_per_s == pytest.approx(USERS / seen.e2e_s, rel=0.3)
            assert 1 <= seen.batch <= 5 and seen.ttft_s is None and seen.tpot_s is None, "five prompts fit in a step"
