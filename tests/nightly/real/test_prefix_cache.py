"""The prefix cache of vLLM's CPU backend, whose blocks are of 128 tokens: what is asked for is what comes from it, to
the token, and in no later round more."""

from collections import Counter
from contextlib import closing
from dataclasses import replace
from typing import get_args

import pytest
from interfaces import problems_of
from measured import measure
from real_engine import SPEC

from pytest_slmserve.analysis.metrics.validity import cache_hit_share
from pytest_slmserve.engines.pool import launch_engine
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.errors import OwnInterface
from pytest_slmserve.schema.specs import ClosedLoop, WorkloadSpec
from pytest_slmserve.telemetry.host import probe
from pytest_slmserve.workload.requests import build_workload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]

CACHES = replace(SPEC, max_model_len=1024, prefix_caching=True, allow_prefix_cache=True)
GROUPS, REQUESTS = 3, 10
TWICE = ClosedLoop(4, requests=2 * REQUESTS)  # so that each prompt comes again
WHOLE = {0: 0, 0.5: 256, 0.9: 384}  # tokens in whole blocks of those that 512 tokens share


@pytest.mark.parametrize("interface", get_args(OwnInterface))
def test_the_measured_hit_rate_is_the_asked_one(interface):
    with closing(launch_engine(replace(CACHES, interface=interface)).start()) as engine:
        for share, whole in WHOLE.items():
            asked = WorkloadSpec(
                prompt_tokens=512, output_tokens=8, requests=REQUESTS, seed=9, prefix_share=share, prefix_groups=GROUPS
            )
            workload = build_workload(asked, model_of(SPEC.model))
            first, warm = (measure(engine, workload, TWICE, probe("cpu").environment) for _ in range(2))
            assert first.resolved.block_size == 128 and problems_of([first, warm]) == []
            assert Counter(warm.run.samples.cached_tokens) == {whole: 2 * REQUESTS}
            assert cache_hit_share(warm.run).share == whole / 512
            # The first of each group finds nothing, or what a smaller share has left there.
            cold = [tokens for tokens in first.run.samples.cached_tokens if tokens != whole]
            assert cold == [{0.5: 0, 0.9: 256}[share]] * GROUPS if share else cold == []


@pytest.mark.parametrize("interface", get_args(OwnInterface))
def test_a_turn_finds_the_prompt_of_the_turn_before_it(interface):
    turns = WorkloadSpec(prompt_tokens=128, output_tokens=8, requests=12, seed=9, turns=3)
    workload, talk = build_workload(turns, model_of(SPEC.model)), ClosedLoop(2, requests=24, think_s=0.05)
    with closing(launch_engine(replace(CACHES, interface=interface)).start()) as engine:
        for _ in range(2):  # in no later round more
            samples = (m := measure(engine, workload, talk, probe("cpu").environment)).run.samples
            assert problems_of([m]) == []
            # Of prompts of 128, 264 and 400 tokens; the second user begins with a second turn.
            found = Counter(zip((n % 3 for n in samples.request), samples.cached_tokens))
            assert found.keys() == {(0, 0), (1, 128), (1, 0), (2, 256)} and found[1, 0] == 1
            rows = {n: samples.request.index(n) for n in range(12)}  # of its first time
            assert all(samples.last_token_s[rows[n]] < samples.sent_s[rows[n + 1]] for n in (0, 1, 4, 6, 7, 9, 10))
