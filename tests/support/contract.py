"""One contract for every engine: the simulated one, our worker and our server with a stand-in for vLLM, and real vLLM.

    class TestSimulated(Contract):
        spec = SIMULATED

Each load is run once for all the looks at it. A module that has an engine of its own gives it as the fixture `engine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from typing import ClassVar

import pytest
from interfaces import small_workload

from pytest_slmserve.analysis.advice.subjects import BLOCK_TOLERANCE
from pytest_slmserve.engines.base import Engine
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import predicted_blocks
from pytest_slmserve.schema.records import Run
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, Load, OpenLoop
from pytest_slmserve.workload.arrivals import job

WORKLOAD = small_workload()
USERS = 5
WINDOW = ClosedLoop(USERS, window_s=0.6)
TOGETHER = ClosedLoop(USERS, window_s=0.6, ramp_up="burst")
COUNTED = ClosedLoop(USERS, requests=45)
JOB = OpenLoop(requests=20)
LOADS = {"window": WINDOW, "burst": TOGETHER, "counted": COUNTED, "job": JOB}
# Tokens of each request cut off that were made before the engine heard of that, by its interface.
LATE_TOKENS = {"engine": 2, "server": 8}
STAMP_S = 1e-3  # vLLM's front end and its core read one clock, but not at one moment
WAY_S = {"engine": STAMP_S, "server": 0.1}  # from a step to who hears of it


class Contract:
    """What holds for every engine. spec: of the engine that is started for the class."""

    spec: ClassVar[EngineSpec]

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        with closing(Pool()) as pool:
            yield pool.engine(cls.spec)

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls, engine: Engine) -> Callable[[Load], Run]:
        """What a load did to the engine; run once for all the tests that look at it."""
        kept: dict[Load, Run] = {}

        def serve(load: Load) -> Run:
            if load not in kept:
                kept[load] = engine.run(WORKLOAD, load)
            return kept[load]

        return serve

    @pytest.fixture(params=LOADS)
    def load(self, request):
        return LOADS[request.param]

    @pytest.fixture
    def run(self, served, load):
        return served(load)

    def test_every_request_sent_is_there_exactly_once_in_the_order_of_the_workload(self, run):
        number = len(run.samples)
        assert number > 0
        assert Counter(run.samples.request) == Counter(n % len(WORKLOAD.requests) for n in range(number))
        assert list(run.samples.sent_s) == sorted(run.samples.sent_s)
        assert set(run.samples.request[:USERS]) == set(range(USERS))

    def test_tokens_are_all_of_those_finished_and_fewer_of_those_cut_off(self, engine, run):
        most = 7 if engine.spec.interface == "engine" else 8  # a stream's end comes after its last token
        assert set(run.samples.prompt_tokens) == {16}
        for tokens, finished in zip(run.samples.output_tokens, run.samples.finished):
            assert tokens == 8 if finished else 0 <= tokens <= most

    def test_stamps_are_in_order(self, run):
        rows = zip(run.samples.sent_s, run.samples.admitted_s, run.samples.first_token_s, run.samples.last_token_s)
        finished = [row for row, done in zip(rows, run.samples.finished) if done]
        assert finished
        for sent, admitted, first, last in finished:
            admitted = sent if admitted is None else admitted  # which a client does not see
            assert 0 <= sent <= admitted + STAMP_S <= first + 2 * STAMP_S
            # They came together, as it says.
            assert first < last or (run.stream and run.stream.stamp_uncertainty_s[1] > 0)

    def test_nothing_fails_and_only_what_is_in_flight_at_the_end_is_cut_off(self, run, load):
        cut = run.samples.finished.count(False)
        assert (run.failures, run.first_failure) == (0, None)
        assert cut == 0 if load in (COUNTED, JOB) else cut <= USERS

    def test_steps_ascend_and_carry_the_tokens_of_the_requests(self, engine, run):
        times = run.steps.time_s
        assert len(times) > 8
        assert all(a < b for a, b in pairwise(times))
        samples, made = run.samples, sum(run.steps.new_tokens)
        exact = run.stream is None or run.stream.tokens_per_chunk == 1  # else tokens of those cut off are an estimate
        received = sum(tokens for tokens, done in zip(samples.output_tokens, samples.finished) if done or exact)
        cut = samples.finished.count(False)
        assert received <= made <= received + LATE_TOKENS[engine.spec.interface] * cut

    def test_no_batch_is_larger_than_the_load_or_the_limit_and_nothing_is_preempted(self, engine, run, load):
        most = min(load.max_concurrency or load.requests, engine.spec.max_num_seqs)
        assert max(run.steps.new_tokens) == most and max(run.steps.running) <= most
        assert sum(run.steps.preempted) == 0

    def test_the_window_lies_in_the_run_and_is_long_enough(self, engine, run, load):
        opened, closed = run.window_s
        assert 0 <= opened < closed
        if load in (WINDOW, TOGETHER):
            assert closed - opened >= load.window_s
            assert opened >= run.steps.time_s[0]
            assert closed <= run.steps.time_s[-1] + WAY_S[engine.spec.interface]
        else:
            assert opened == 0
            assert closed >= run.steps.time_s[-1] - STAMP_S

    def test_in_the_window_the_load_is_held(self, served):
        """By the concurrent requests, not by the batch: an engine on a busy host takes them late, yet they are
        there."""
        run = served(WINDOW)
        opened, closed = run.window_s
        rows = zip(run.samples.sent_s, run.samples.last_token_s, run.samples.finished)
        ends = [(sent, last if finished else closed) for sent, last, finished in rows]
        held_s = sum(max(0.0, min(end, closed) - max(sent, opened)) for sent, end in ends)
        assert 0.6 * USERS < held_s / (closed - opened) <= USERS * (1 + 1e-3)  # a user pauses between two requests

    @pytest.mark.parametrize("wanted", [1, 7])
    def test_a_counted_loop_serves_exactly_so_many(self, engine, wanted):
        run = engine.run(WORKLOAD, ClosedLoop(USERS, requests=wanted))
        assert list(run.samples.finished) == [True] * wanted

    def test_a_job_without_a_rate_comes_all_at_once(self, served):
        run = served(JOB)
        assert max(run.samples.sent_s) < min(run.samples.last_token_s)
        assert max(run.steps.waiting) > 0  # the engine takes eight of the twenty

    def test_a_job_is_served_as_it_comes_and_to_the_end(self, engine):
        asked = job(30, rate=25.0, seed=3)
        run = engine.run(WORKLOAD, asked)
        assert list(run.samples.finished) == [True] * 30
        late = [sent - due for sent, due in zip(run.samples.sent_s, asked.schedule_s)]  # of a server: sent in fact
        assert min(late) >= -1e-6, "none comes before its time"
        assert run.window_s[0] == 0
        assert run.window_s[1] == pytest.approx(max(run.samples.last_token_s), abs=0.1)

    def test_what_it_cannot_serve_is_refused_and_it_lives(self, engine):
        with pytest.raises(BadUsage):
            engine.run(WORKLOAD, OpenLoop(requests=3, rate=10.0))
        with pytest.raises(BadUsage) as caught:
            engine.run(small_workload(requests=1, output_tokens=engine.spec.max_model_len), OpenLoop(requests=1))
        assert f"{engine.spec.max_model_len + 16}" in caught.value.problem and engine.ready

    def test_a_second_run_and_another_workload_start_afresh(self, engine):
        first = engine.run(WORKLOAD, COUNTED)
        other = small_workload(requests=6, output_tokens=3)
        second = engine.run(other, ClosedLoop(2, requests=6))
        assert list(second.samples.output_tokens) == [3] * 6
        assert sum(second.steps.new_tokens) == 18
        assert second.steps.time_s[0] < first.steps.time_s[-1] + 1
        assert engine.run(WORKLOAD, COUNTED).samples.request == first.samples.request

    def test_it_says_what_it_is(self, engine):
        resolved = engine.resolved
        assert abs(resolved.kv_blocks - predicted_blocks(engine.spec, resolved)) <= BLOCK_TOLERANCE
        names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype")
        assert {name: getattr(resolved, name) for name in names} == {name: getattr(engine.spec, name) for name in names}
        assert resolved.prefix_caching is engine.spec.prefix_caching
        assert resolved.attention_backend
        assert resolved.ready_s is not None
        assert engine.ready

    def test_it_tells_how_far_it_is(self, engine):
        heard = []
        engine.run(WORKLOAD, ClosedLoop(USERS, window_s=1.5), heard.append)
        assert heard
        phases = [progress.phase for progress in heard]
        assert phases == sorted(phases, key=["ramp", "settle", "window", "over"].index)
        assert heard[-1].elapsed_s > 0
        assert heard[-1].done > 0
        assert heard[-1].tokens_per_s > 0
        assert all(progress.in_flight <= USERS for progress in heard)

    def test_the_same_requests_get_the_same_greedy_tokens(self, engine):
        first, second = engine.outputs(WORKLOAD, 3, 5), engine.outputs(WORKLOAD, 3, 5)
        assert [len(tokens) for tokens in first] == [5, 5, 5] and first == second
        assert engine.outputs(WORKLOAD, 1, 3) == (first[0][:3],)
        assert engine.ready, "and it serves on"

    def test_its_own_greedy_tokens_are_likelier_than_others(self, engine):
        own = engine.outputs(WORKLOAD, 3, 5)
        others = tuple(tuple(token + 1 for token in tokens) for tokens in own)
        likely, less = engine.scores(WORKLOAD, own), engine.scores(WORKLOAD, others)
        assert len(likely) == len(less) == 3 and all(-100 < score < 0 for score in (*likely, *less))
        assert all(more > other for more, other in zip(likely, less)), (likely, less)
        assert engine.scores(WORKLOAD, own) == pytest.approx(likely, abs=0.01) and engine.ready
