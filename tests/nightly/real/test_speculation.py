"""Speculative decoding by vLLM's CPU backend: its steps make several tokens of a sequence, and are told as such."""

from contextlib import closing
from dataclasses import replace

import pytest
from measured import measure
from real_engine import SPEC

from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.points import summarize
from pytest_slmserve.engines.pool import launch_engine
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop, WorkloadSpec
from pytest_slmserve.telemetry.host import probe
from pytest_slmserve.workload.requests import build_workload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]
DRAFTED, USERS, TOKENS = 3, 4, 48
# Made weights repeat themselves, so what came before is a good draft.
NGRAM = f'{{"method": "ngram", "num_speculative_tokens": {DRAFTED}, "prompt_lookup_min": 1, "prompt_lookup_max": 3}}'


def test_the_batch_is_that_of_the_sequences_and_steps_and_requests_agree():
    spec = replace(SPEC, extra=(("speculative_config", NGRAM),))
    workload = build_workload(WorkloadSpec(prompt_tokens=32, output_tokens=TOKENS, requests=16), model_of(SPEC.model))
    with closing(launch_engine(spec).start()) as engine:
        swept, job = (
            measure(engine, workload, load, probe("cpu").environment)
            for load in (ClosedLoop(USERS, window_s=2.0), OpenLoop(requests=16))
        )
    assert problems(swept) == problems(job) == ()
    seen, steps = summarize(swept), job.run.steps
    assert seen.batch == pytest.approx(USERS, rel=0.1) and abs(seen.little) < 0.05
    assert 1.5 < seen.acceptance_length <= 1 + DRAFTED and seen.roofline_fraction is None
    # Every token of a request is one of a step, and each sequence has one of a step that no draft brought.
    assert sum(steps.new_tokens) == sum(job.run.samples.output_tokens) == 16 * TOKENS
    held = [made - further for made, further in zip(steps.new_tokens, steps.accepted, strict=True)]
    assert max(steps.new_tokens) > SPEC.max_num_seqs == max(held)
    assert all(further <= DRAFTED * drafts for further, drafts in zip(steps.accepted, steps.drafts, strict=True))
