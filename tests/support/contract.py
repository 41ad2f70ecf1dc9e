"""One contract for every engine: the simulated one, our worker and our server with a stand-in for vLLM, and real vLLM.

    class TestSimulated(Contract):
        spec = SIMULATED

Each load is run once for all the looks at it. A module that has an engine of its own gives it as the fixture `engine`.
"""

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

    def test_every_request_is_there_exactly_once_with_its_tokens_and_stamps(self, engine, served, load):
        run = served(load)
        samples, cut = run.samples, run.samples.finished.count(False)
        assert Counter(samples.request) == Counter(n % len(WORKLOAD.requests) for n in range(len(samples)))
        assert set(samples.request[:USERS]) == set(range(USERS)) and list(samples.sent_s) == sorted(samples.sent_s)
        assert (run.failures, run.first_failure) == (0, None)
        assert cut <= (0 if load in (COUNTED, JOB) else USERS), "only what is in flight at the end is cut off"
        most = 7 if engine.spec.interface == "engine" else 8  # a stream's end comes after its last token
        assert set(samples.prompt_tokens) == {16}
        for tokens, finished in zip(samples.output_tokens, samples.finished):
            assert tokens == 8 if finished else 0 <= tokens <= most
        rows = zip(samples.sent_s, samples.admitted_s, samples.first_token_s, samples.last_token_s)
        for sent, admitted, first, last in (row for row, done in zip(rows, samples.finished) if done):
            admitted = sent if admitted is None else admitted  # which a client does not see
            assert 0 <= sent <= admitted + STAMP_S <= first + 2 * STAMP_S
            # They came together, as it says.
            assert first < last or (run.stream and run.stream.stamp_uncertainty_s[1] > 0)

    def test_steps_carry_the_tokens_of_the_requests_in_the_window_of_the_load(self, engine, served, load):
        run = served(load)
        samples, times = run.samples, run.steps.time_s
        assert len(times) > 8 and all(a < b for a, b in pairwise(times))
        exact = run.stream is None or run.stream.tokens_per_chunk == 1  # else tokens of those cut off are an estimate
        received = sum(tokens for tokens, done in zip(samples.output_tokens, samples.finished) if done or exact)
        late = LATE_TOKENS[engine.spec.interface] * samples.finished.count(False)
        assert received <= sum(run.steps.new_tokens) <= received + late
        most = min(load.max_concurrency or load.requests, engine.spec.max_num_seqs)
        assert max(run.steps.new_tokens) == most and max(run.steps.running) <= most
        assert sum(run.steps.preempted) == 0
        opened, closed = run.window_s
        if load in (WINDOW, TOGETHER):
            assert opened >= times[0] and closed - opened >= load.window_s
            assert closed <= times[-1] + WAY_S[engine.spec.interface]
        else:
            assert opened == 0 and closed >= times[-1] - STAMP_S

    def test_in_the_window_the_load_is_held(self, served):
        """By the concurrent requests, not by the batch: an engine on a busy host takes them late, yet they are
        there."""
        run = served(WINDOW)
        opened, closed = run.window_s
        rows = zip(run.samples.sent_s, run.samples.last_token_s, run.samples.finished)
        ends = [(sent, last if finished else closed) for sent, last, finished in rows]
        held_s = sum(max(0.0, min(end, closed) - max(sent, opened)) for sent, end in ends)
        assert 0.6 * USERS < held_s / (closed - opened) <= USERS * (1 + 1e-3)  # a user pauses between two requests

    def test_counted_loops_and_jobs_are_served_to_the_end_as_they_come(self, engine, served):
        for wanted in (1, 7):
            assert list(engine.run(WORKLOAD, ClosedLoop(USERS, requests=wanted)).samples.finished) == [True] * wanted
        at_once, asked = served(JOB), job(30, rate=25.0, seed=3)
        assert max(at_once.samples.sent_s) < min(at_once.samples.last_token_s)
        assert max(at_once.steps.waiting) > 0  # the engine takes eight of the twenty
        run = engine.run(WORKLOAD, asked)
        assert list(run.samples.finished) == [True] * 30
        late = [sent - due for sent, due in zip(run.samples.sent_s, asked.schedule_s)]  # of a server: sent in fact
        assert min(late) >= -1e-6, "none comes before its time"
        assert run.window_s == (0, pytest.approx(max(run.samples.last_token_s), abs=0.1))

    def test_what_it_cannot_serve_is_refused_and_it_lives(self, engine):
        with pytest.raises(BadUsage):
            engine.run(WORKLOAD, OpenLoop(requests=3, rate=10.0))
        with pytest.raises(BadUsage) as caught:
            engine.run(small_workload(requests=1, output_tokens=engine.spec.max_model_len), OpenLoop(requests=1))
        assert f"{engine.spec.max_model_len + 16}" in caught.value.problem and engine.ready

    def test_a_second_run_and_another_workload_start_afresh(self, engine):
        first = engine.run(WORKLOAD, COUNTED)
        second = engine.run(small_workload(requests=6, output_tokens=3), ClosedLoop(2, requests=6))
        assert list(second.samples.output_tokens) == [3] * 6 and sum(second.steps.new_tokens) == 18
        assert second.steps.time_s[0] < first.steps.time_s[-1] + 1
        assert engine.run(WORKLOAD, COUNTED).samples.request == first.samples.request

    def test_it_says_what_it_is(self, engine):
        resolved = engine.resolved
        assert abs(resolved.kv_blocks - predicted_blocks(engine.spec, resolved)) <= BLOCK_TOLERANCE
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype", "prefix_caching"):
            assert getattr(resolved, name) == getattr(engine.spec, name), name
        assert resolved.attention_backend and resolved.ready_s is not None and engine.ready

    def test_it_tells_how_far_it_is(self, engine):
        heard = []
        engine.run(WORKLOAD, ClosedLoop(USERS, window_s=1.0), heard.append)
        ranks = [["ramp", "settle", "window", "over"].index(progress.phase) for progress in heard]
        assert heard and ranks == sorted(ranks)
        assert heard[-1].elapsed_s > 0 and heard[-1].done > 0 and heard[-1].tokens_per_s > 0
        assert all(progress.in_flight <= USERS for progress in heard)

    def test_the_same_requests_get_the_same_greedy_tokens_which_are_likelier_than_others(self, engine):
        own = engine.outputs(WORKLOAD, 3, 5)
        assert [len(tokens) for tokens in own] == [5, 5, 5] and engine.outputs(WORKLOAD, 3, 5) == own
        assert engine.outputs(WORKLOAD, 1, 3) == (own[0][:3],)
        others = tuple(tuple(token + 1 for token in tokens) for tokens in own)
        likely, less = engine.scores(WORKLOAD, own), engine.scores(WORKLOAD, others)
        assert len(likely) == len(less) == 3 and all(-100 < score < 0 for score in (*likely, *less))
        assert all(more > other for more, other in zip(likely, less)), (likely, less)
        assert engine.scores(WORKLOAD, own) == pytest.approx(likely, abs=0.01)
        assert engine.ready, "and it serves on"
