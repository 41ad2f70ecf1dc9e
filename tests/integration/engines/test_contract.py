"""One contract for every engine: the simulated one, our worker with a stand-in for vLLM, and real vLLM on the CPU."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest
from interfaces import SIMULATED, small_workload, stand_in
from real_engine import SPEC

from pytest_slmserve.analysis.advice.subjects import BLOCK_TOLERANCE
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import predicted_blocks
from pytest_slmserve.schema.specs import ClosedLoop, OpenLoop
from pytest_slmserve.workload.arrivals import job

WORKLOAD = small_workload()
USERS = 5
WINDOW = ClosedLoop(USERS, window_s=0.6)
TOGETHER = ClosedLoop(USERS, window_s=0.6, ramp_up="burst")
COUNTED = ClosedLoop(USERS, requests=45)
JOB = OpenLoop(requests=20)
LOADS = [WINDOW, TOGETHER, COUNTED, JOB]
NAMES = ["window", "burst", "counted", "job"]
SERVER = {"interface": "server"}
SPECS = {
    "simulated": SIMULATED,
    "stand-in": stand_in(),
    "stand-in server": replace(stand_in(), **SERVER),
    "cpu": SPEC,
    "cpu server": replace(SPEC, **SERVER),
}
LATE_TOKENS = {
    "engine": 2,
    "server": 8,
}  # of each request cut off: made before the engine heard of that, by its interface
STAMP_S = 1e-3  # vLLM's front end and its core read one clock, but not at one moment
WAY_S = {"engine": STAMP_S, "server": 0.1}  # from a step to who hears of it


@pytest.fixture(scope="module")
def pools():
    with closing(Pool()) as fake, closing(Pool()) as with_stand_in, closing(Pool()) as served:
        yield {"simulated": fake, "stand-in": with_stand_in, "stand-in server": served}


@pytest.fixture(scope="module")
def real_pools(vllm_here):
    """Both engines start at once: a start is mostly an import, which one core does while the other is idle."""
    with closing(Pool()) as offline, closing(Pool()) as served, ThreadPoolExecutor() as at_once:
        pools = {"cpu": offline, "cpu server": served}
        list(at_once.map(lambda name: pools[name].engine(SPECS[name]), pools))
        yield pools


REAL = [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.alone]) for name in ("cpu server", "cpu")]


@pytest.fixture(
    scope="module", params=["simulated", "stand-in", "stand-in server", *REAL]
)  # one engine after the other
def engine(request, pools):
    there = pools if request.param in pools else request.getfixturevalue("real_pools")
    return there[request.param].engine(SPECS[request.param])


@pytest.fixture
def served(engine, pools):
    """What a load did to the engine; run once for all the tests that look at it."""
    kept = pools.setdefault("served", {})

    def serve(load):
        key = (engine.launch, load)
        if key not in kept:
            kept[key] = engine.run(WORKLOAD, load)
        return kept[key]

    return serve


@pytest.fixture(params=LOADS, ids=NAMES)
def load(request):
    return request.param


@pytest.fixture
def run(served, load):
    return served(load)


def test_every_request_sent_is_there_exactly_once(run):
    sent = range(len(run.samples))
    assert len(sent) > 0
    assert Counter(run.samples.request) == Counter(number % len(WORKLOAD.requests) for number in sent)


def test_requests_are_sent_in_the_order_of_the_workload_and_listed_so(run):
    assert list(run.samples.sent_s) == sorted(run.samples.sent_s)
    assert set(run.samples.request[:USERS]) == set(range(USERS))


def test_those_finished_have_all_their_tokens_and_those_cut_off_have_fewer(engine, run):
    most = 7 if engine.spec.interface == "engine" else 8  # a stream's end comes after its last token
    for tokens, finished in zip(run.samples.output_tokens, run.samples.finished):
        assert tokens == 8 if finished else 0 <= tokens <= most


def test_prompts_are_counted(run):
    assert set(run.samples.prompt_tokens) == {16}


def test_stamps_are_in_order(run):
    rows = zip(run.samples.sent_s, run.samples.admitted_s, run.samples.first_token_s, run.samples.last_token_s)
    finished = [row for row, done in zip(rows, run.samples.finished) if done]
    assert finished
    for sent, admitted, first, last in finished:
        admitted = sent if admitted is None else admitted  # which a client does not see
        assert 0 <= sent <= admitted + STAMP_S <= first + 2 * STAMP_S
        assert first < last or (run.stream and run.stream.stamp_uncertainty_s[1] > 0)  # they came together, as it says


def test_no_failures(run):
    assert (run.failures, run.first_failure) == (0, None)


def test_only_those_still_in_flight_are_cut_off(run, load):
    cut = [sent for sent, done in zip(run.samples.sent_s, run.samples.finished) if not done]
    whole = load in (COUNTED, JOB)
    assert len(cut) == 0 if whole else len(cut) <= USERS


def test_steps_ascend_and_carry_the_tokens_of_the_requests(engine, run):
    times = run.steps.time_s
    assert len(times) > 8
    assert all(a < b for a, b in pairwise(times))
    samples, made = run.samples, sum(run.steps.new_tokens)
    exact = run.stream is None or run.stream.tokens_per_chunk == 1  # else tokens of those cut off are an estimate
    received = sum(tokens for tokens, done in zip(samples.output_tokens, samples.finished) if done or exact)
    cut = samples.finished.count(False)
    assert received <= made <= received + LATE_TOKENS[engine.spec.interface] * cut


def test_no_batch_is_larger_than_the_load_or_the_engines_limit(run, load):
    wanted = load.max_concurrency or load.requests
    assert max(run.steps.new_tokens) == min(wanted, SPEC.max_num_seqs)
    assert max(run.steps.running) <= min(wanted, SPEC.max_num_seqs)


def test_nothing_is_preempted(run):
    assert sum(run.steps.preempted) == 0


def test_the_window_lies_in_the_run_and_is_long_enough(engine, run, load):
    opened, closed = run.window_s
    assert 0 <= opened < closed
    if load in (WINDOW, TOGETHER):
        assert closed - opened >= load.window_s
        assert opened >= run.steps.time_s[0]
        assert closed <= run.steps.time_s[-1] + WAY_S[engine.spec.interface]
    else:
        assert opened == 0
        assert closed >= run.steps.time_s[-1] - STAMP_S


def test_in_the_window_the_load_is_held(served):
    """By the concurrent requests, not by the batch: an engine on a busy host takes them late, yet they are there."""
    run = served(WINDOW)
    opened, closed = run.window_s
    rows = zip(run.samples.sent_s, run.samples.last_token_s, run.samples.finished)
    ends = [(sent, last if finished else closed) for sent, last, finished in rows]
    held_s = sum(max(0.0, min(end, closed) - max(sent, opened)) for sent, end in ends)
    assert 0.6 * USERS < held_s / (closed - opened) <= USERS * (1 + 1e-3)  # a user pauses between two requests


@pytest.mark.parametrize("wanted", [1, 7, 45])
def test_a_counted_loop_serves_exactly_so_many(engine, wanted):
    run = engine.run(WORKLOAD, ClosedLoop(USERS, requests=wanted))
    assert list(run.samples.finished) == [True] * wanted


def test_a_job_without_a_rate_comes_all_at_once(served):
    run = served(JOB)
    assert list(run.samples.finished) == [True] * JOB.requests
    assert max(run.samples.sent_s) < min(run.samples.last_token_s)
    assert max(run.steps.waiting) > 0  # the engine takes eight of the twenty


def test_a_job_is_served_as_it_comes_and_to_the_end(engine):
    asked = job(30, rate=25.0, seed=3)
    run = engine.run(WORKLOAD, asked)
    assert list(run.samples.finished) == [True] * 30
    late = sorted(sent - due for sent, due in zip(run.samples.sent_s, asked.schedule_s))  # of a server: sent in fact
    assert late[0] >= -1e-6, "none comes before its time"
    assert late[len(late) // 2] < 0.1, "a busy machine may hold up some, never most"
    assert run.window_s[0] == 0
    assert run.window_s[1] == pytest.approx(max(run.samples.last_token_s), abs=0.1)


def test_a_job_without_its_schedule_is_refused(engine):
    with pytest.raises(BadUsage, match="an open loop without its schedule"):
        engine.run(WORKLOAD, OpenLoop(requests=3, rate=10.0))
    assert engine.ready


def test_a_second_run_and_another_workload_start_afresh(engine):
    first = engine.run(WORKLOAD, COUNTED)
    other = small_workload(requests=6, output_tokens=3)
    second = engine.run(other, ClosedLoop(2, requests=6))
    assert list(second.samples.output_tokens) == [3] * 6
    assert sum(second.steps.new_tokens) == 18
    assert second.steps.time_s[0] < first.steps.time_s[-1] + 1
    assert engine.run(WORKLOAD, COUNTED).samples.request == first.samples.request


def test_it_says_what_it_is(engine):
    resolved = engine.resolved
    assert abs(resolved.kv_blocks - predicted_blocks(engine.spec, resolved)) <= BLOCK_TOLERANCE
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == (8, 1024)
    assert (resolved.max_model_len, resolved.dtype) == (256, "bfloat16")
    assert resolved.prefix_caching is False
    assert resolved.attention_backend
    assert resolved.ready_s is not None
    assert engine.ready


def test_it_tells_how_far_it_is(engine):
    heard = []
    engine.run(WORKLOAD, ClosedLoop(USERS, window_s=1.5), heard.append)
    assert heard
    phases = [progress.phase for progress in heard]
    assert phases == sorted(phases, key=["ramp", "settle", "window", "over"].index)
    assert heard[-1].elapsed_s > 0
    assert heard[-1].done > 0
    assert heard[-1].tokens_per_s > 0
    assert all(progress.in_flight <= USERS for progress in heard)


@pytest.mark.parametrize("spec", [SIMULATED, stand_in()], ids=["simulated", "stand-in"])
def test_it_may_be_closed_twice(spec):
    with closing(Pool()) as pool:
        engine = pool.engine(spec)
        engine.run(WORKLOAD, OpenLoop(requests=2))
        engine.close()
        engine.close()
        assert pool.engine(spec).ready


def test_requests_that_do_not_fit_are_refused_and_the_engine_lives(engine):
    with pytest.raises(BadUsage, match="requests of 260 tokens do not fit max_model_len 256"):
        engine.run(small_workload(requests=1, output_tokens=244), OpenLoop(requests=1))
    assert engine.ready


def test_the_same_requests_get_the_same_greedy_tokens(engine):
    first, second = engine.outputs(WORKLOAD, 3, 5), engine.outputs(WORKLOAD, 3, 5)
    assert [len(tokens) for tokens in first] == [5, 5, 5] and first == second
    assert engine.outputs(WORKLOAD, 1, 3) == (first[0][:3],)
    assert engine.ready, "and it serves on"


def test_its_own_greedy_tokens_are_likelier_than_others(engine):
    own = engine.outputs(WORKLOAD, 3, 5)
    others = tuple(tuple(token + 1 for token in tokens) for tokens in own)
    likely, less = engine.scores(WORKLOAD, own), engine.scores(WORKLOAD, others)
    assert len(likely) == len(less) == 3 and all(-100 < score < 0 for score in (*likely, *less))
    assert all(more > other for more, other in zip(likely, less)), (likely, less)
    assert engine.scores(WORKLOAD, own) == pytest.approx(likely, abs=0.01) and engine.ready
