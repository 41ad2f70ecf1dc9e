"""Engines of vLLM's CPU backend: prompts of many steps, over two processes as over two GPUs, and two on one host, of
which none is left when one dies; adapters; vectors, classes and scores of pairs; the prefix cache, whose blocks are of
128 tokens: what is asked for is what comes from it, and in no later round more; and speculative decoding, whose steps
make several tokens of a sequence, and are told as such; and the stages of a start."""

import os
import signal
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace
from typing import get_args

import pytest
from interfaces import problems_of
from measured import measure
from processes import gone, group
from real_engine import SPEC
from traces import share_a_window

from pytest_slmserve.analysis.advice.subjects import kv_blocks_as_predicted
from pytest_slmserve.analysis.gate.diagnosis import STAGES
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.validity import cache_hit_share, problems
from pytest_slmserve.analysis.points import summarize, summary_of
from pytest_slmserve.engines.pool import Pool, launch_engine
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.schema.errors import EngineFailed, OwnInterface
from pytest_slmserve.schema.specs import Adapters, ClosedLoop, OpenLoop, ReplicaSpec, WorkloadSpec
from pytest_slmserve.telemetry.host import probe
from pytest_slmserve.workload.requests import build_workload

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]
LOAD = ClosedLoop(4, window_s=2.0)


def workload_of(prompt, output, requests):
    return build_workload(
        WorkloadSpec(prompt_tokens=prompt, output_tokens=output, requests=requests), model_of(SPEC.model)
    )


@pytest.fixture
def two_cores():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("vLLM's CPU engines need a core each")


def wrong(measurement):
    return [text for text in problems(measurement) if "failed" in text or "Little" in text]


@pytest.mark.parametrize("interface", get_args(OwnInterface))
def test_long_prompts_are_valid_load(interface):
    """A prompt takes 14 steps of its engine, and its request, which is not in the batch meanwhile, a token in 32."""
    spec = replace(SPEC, max_model_len=1024, max_num_batched_tokens=64, interface=interface)
    with closing(launch_engine(spec).start()) as engine:
        asked = workload_of(896, 32, 96)
        made = measure(engine, asked, ClosedLoop(8, window_s=4.0), probe("cpu").environment)
        [likely] = engine.scores(asked, engine.outputs(asked, 1, 3))
        assert -100 < likely < 0, "by a function that is compiled here, unlike in the engines of tests/integration"
    sent, batch = window.requests_in_flight(made.run, "sent_s"), window.mean_batch(made.run)
    assert sent > 1.1 * batch, "too few wait for their prompt for this test to tell"
    assert abs(window.littles_law(made.run)) < 0.05 and wrong(made) == []


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("interface", get_args(OwnInterface))
def test_tensor_parallel_doubles_kv_blocks(interface):
    spec = replace(SPEC, tensor_parallel_size=2, interface=interface)
    with closing(launch_engine(spec).start()) as engine:
        made = measure(engine, workload_of(16, 16, 64), LOAD, probe("cpu").environment)
        members = group(engine.child.process.pid)
        assert len(members) >= 3, "the worker, and a process for each part"
    assert kv_blocks_as_predicted(spec, [made.resolved])
    per_block = 128 * model_of(spec.model).kv_bytes_per_token()
    assert made.resolved.kv_blocks == pytest.approx(2 * spec.kv_cache_bytes / per_block, abs=2)
    assert wrong(made) == [] and all(map(gone, members))


@pytest.mark.usefixtures("two_cores")
def test_dead_engine_ends_both_replicas():
    workload, spec = workload_of(16, 16, 64), ReplicaSpec((SPEC, SPEC), pinned=True)
    with closing(Pool().engine(spec)) as replicas:
        found = measure_case(replicas, Case(spec, (workload,) * 2, (LOAD,) * 2, probe("cpu").environment))
        assert [m.replica.index for m in found] == [0, 1] and len({m.launch for m in found}) == 2
        assert share_a_window([m.run for m in found])
        shared = summary_of(*found)
        assert shared.output_tokens_per_s == pytest.approx(sum(shared.each_tokens_per_s))
        assert all(rate > 0 for rate in shared.each_tokens_per_s) and not any(map(wrong, found))

        pids = [engine.child.process.pid for engine in replicas.engines]
        members = [pid for leader in pids for pid in group(leader)]
        killer = threading.Timer(3.0, os.kill, (pids[1], signal.SIGKILL))
        killer.start()
        with pytest.raises(EngineFailed, match=r"^replica 2 of 2 \(opt-tiny\): the engine was killed by SIGKILL"):
            replicas.run([workload] * 2, [ClosedLoop(4, window_s=60.0)] * 2)
        killer.join()
    assert all(map(gone, (*pids, *members)))


def test_adapters_beyond_slots_are_served():
    """Four adapters, two slots: vLLM reads the folder that we make, for every layer that it names, and answers all."""
    adapters = Adapters(4, 8)
    spec = replace(SPEC, interface="server", extra=tuple(adapters.arguments({"max_loras": 2}).items()))
    plain, adapted = (
        build_workload(WorkloadSpec(prompt_tokens=16, output_tokens=16, requests=64, adapters=a), model_of(SPEC.model))
        for a in (None, adapters)
    )
    with closing(launch_engine(spec).start()) as engine:
        found = [measure(engine, w, LOAD, probe("cpu").environment) for w in (plain, adapted)]
        status, listed = engine._ask("GET", "/v1/models")
        log = engine.child.log.read_text("utf-8", "replace")
    assert status == 200 and [f"slm-rank8-{n}" in listed for n in range(6)] == [False, *[True] * 4, False]
    assert [wrong(each) for each in found] == [[], []]
    assert not [line for line in log.splitlines() if "lora" in line.lower() and "ignored" in line]
    assert all(m.run.failures == 0 and len(m.run.samples) > 8 for m in found)


POOLING = replace(SPEC, max_num_batched_tokens=256, extra=(("runner", "pooling"),))
ASKING, ASKED_TOKENS = 6, 48
ASKED = [
    ("bert-tiny", "engine", ["embed"]),
    ("bert-tiny-reranker", "server", ["rerank", "classify"]),
    ("opt-tiny", "server", ["embed"]),  # a decoder, of which vLLM makes an embedding model
]


@pytest.mark.parametrize(("model", "interface", "kinds"), ASKED, ids=[f"{m}-{i}" for m, i, _ in ASKED])
def test_pooling_rate_matches_steps(model, interface, kinds):
    spec = replace(POOLING, model=model, model_facts=model_of(model), interface=interface)
    with closing(launch_engine(spec).start()) as engine:
        for kind in kinds:
            workload = build_workload(
                WorkloadSpec(kind=kind, prompt_tokens=ASKED_TOKENS, output_tokens=1, requests=64), model_of(model)
            )
            made = measure(engine, workload, ClosedLoop(ASKING, window_s=2.0), probe("cpu").environment)
            assert problems(made) == () and {*made.run.samples.prompt_tokens} == {ASKED_TOKENS}
            seen, rows = (
                summarize(made),
                [row for row in range(len(made.run.samples)) if made.run.samples.finished[row]],
            )
            assert all(made.run.samples.first_token_s[row] == made.run.samples.last_token_s[row] for row in rows)
            # What the steps tell and what the requests tell are counts of the same results.
            assert seen.output_tokens_per_s == pytest.approx(ASKING / seen.e2e_s, rel=0.3)
            assert 1 <= seen.batch <= 5 and seen.ttft_s is None and seen.tpot_s is None, "five prompts fit in a step"


CACHES = replace(SPEC, max_model_len=1024, prefix_caching=True, allow_prefix_cache=True)
GROUPS, REQUESTS = 3, 10
TWICE = ClosedLoop(4, requests=2 * REQUESTS)  # so that each prompt comes again
WHOLE = {0: 0, 0.5: 256, 0.9: 384}  # tokens in whole blocks of those that 512 tokens share


@pytest.mark.parametrize("interface", get_args(OwnInterface))
def test_hit_rate_matches_prefix_share(interface):
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
def test_turn_reuses_previous_prompt(interface):
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


DRAFTED, DECODING, TOKENS = 3, 4, 48
# Made weights repeat themselves, so what came before is a good draft.
NGRAM = f'{{"method": "ngram", "num_speculative_tokens": {DRAFTED}, "prompt_lookup_min": 1, "prompt_lookup_max": 3}}'


def test_speculative_steps_agree_with_requests():
    spec = replace(SPEC, extra=(("speculative_config", NGRAM),))
    workload = build_workload(WorkloadSpec(prompt_tokens=32, output_tokens=TOKENS, requests=16), model_of(SPEC.model))
    with closing(launch_engine(spec).start()) as engine:
        swept, job = (
            measure(engine, workload, load, probe("cpu").environment)
            for load in (ClosedLoop(DECODING, window_s=2.0), OpenLoop(requests=16))
        )
    assert problems(swept) == problems(job) == ()
    seen, steps = summarize(swept), job.run.steps
    assert seen.batch == pytest.approx(DECODING, rel=0.1) and abs(seen.little) < 0.05
    assert 1.5 < seen.acceptance_length <= 1 + DRAFTED and seen.roofline_fraction is None
    # Every token of a request is one of a step, and each sequence has one of a step that no draft brought.
    assert sum(steps.new_tokens) == sum(job.run.samples.output_tokens) == 16 * TOKENS
    held = [made - further for made, further in zip(steps.new_tokens, steps.accepted, strict=True)]
    assert max(steps.new_tokens) > SPEC.max_num_seqs == max(held)
    assert all(further <= DRAFTED * drafts for further, drafts in zip(steps.accepted, steps.drafts, strict=True))


@pytest.mark.parametrize("interface", get_args(OwnInterface))
def test_start_stages_fit_start_time(interface):
    """The release has all the methods that are timed. Its CPU backend counts no compiling."""
    with closing(launch_engine(replace(SPEC, interface=interface)).start()) as engine:
        stages, ready_s = dict(engine.resolved.stages), engine.resolved.ready_s
    assert stages.keys() == set(STAGES) and stages.pop("compile") == engine.resolved.compile_s == 0
    assert min(stages.values()) > 0 and stages["import"] > stages["device"]
    assert 0.5 * ready_s < sum(stages.values()) <= ready_s
