"""What a user writes in a repository of their own: the fixtures in tests, a wrong word of theirs, which is one error
with the right word and shows nothing of our code, and the shipped test of an advice."""

import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import pytest
from inner_runs import RECORDS
from shipped import shipped
from stepwise import CountedSource

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.advice import advisor
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.plugin import SESSION
from pytest_slmserve.schema.sensors import GPU_UTIL, POWER, SM_ACTIVE
from pytest_slmserve.schema.specs import GIB
from pytest_slmserve.telemetry.sampler import Sampler

FEW = """--slm-simulate --slm-models=opt-125m --slm-window=1 --slm-input-len=64 --slm-output-len=32 -v -rs
    --slm-engine-arg=t_inf=4000 --slm-engine-arg=b_half=1"""
OWN = """
    from dataclasses import replace
    from pathlib import Path
    import pytest
    from pytest_slmserve import ClosedLoop

    @pytest.mark.slm(model="facebook/opt-125m")
    def test_plateau(slm_sweep):  # five lines
        sweep = slm_sweep(concurrency=[1, 2, 4, 8, 16])
        assert sweep.pareto_plateau(tolerance=0.10)

    def test_engine(slm_engine, sharegpt):
        run = slm_engine.run(sharegpt, ClosedLoop(4, requests=12))
        assert len(run.samples) == 12 and all(run.samples.finished)

    class TestOfAnotherSpecification:
        @pytest.fixture
        def slm_spec(self, slm_spec):
            return replace(slm_spec, seed=7, max_model_len=2048)

        @pytest.mark.slm(max_model_len=20)
        def test_seed(self, slm_engine, slm_measure):
            assert slm_engine.spec.seed == 7 and slm_measure(4).valid, "which is believed"

    def test_job(slm_job):
        slow, fast = slm_job(20, rate=2, lengths=(16, 8)), slm_job(20, lengths=(16, 8))
        assert slow.requests_per_s < fast.requests_per_s

    def test_replicas(slm_replicas, slm_measure):
        shared = slm_replicas(2, sharing="mps").measure(8)
        assert shared.valid and shared.loads == (4, 4)
        assert shared.output_tokens_per_s > slm_measure(8).output_tokens_per_s

    def test_pair(slm_replicas):
        assert slm_replicas(models=["opt-125m", "opt-1.3b"]).measure(8, repeats=1).models == ("opt-125m", "opt-1.3b")

    def test_advice(slm_advice, slm_session):
        started = len(slm_session.devices.pool.starts)
        advice = slm_advice("2x@1", efficiency=0.1)
        tokens_per_s = advice.advised.tokens_per_s
        Path("said").write_text(f"{advice.batch} {tokens_per_s.value!r} {advice.needs.kv_blocks}")
        assert slm_advice().batch == 16 and slm_advice("0.001ms").batch is None
        assert len(slm_session.devices.pool.starts) == started
        with pytest.raises(Exception, match="opt-350m"):
            slm_advice(model="facebook/opt-350m")
"""


def test_fixtures_work_in_user_tests(runs, monkeypatch):
    ran = runs(OWN, FEW)
    assert set(ran.outcomes.values()) == {"PASSED"} and len(ran.outcomes) == 7 and ran.ret == 0
    ran.says("SIMULATED ENGINE: *", "opt-125m *")
    monkeypatch.chdir(ran.folder)
    with redirect_stdout(StringIO()) as out:
        assert main(["advise", RECORDS, "--model", "opt-125m", "--slo-itl", "2x@1", "--json"]) == 0
    [model] = json.loads(out.getvalue())["models"]
    batch, tokens_per_s, blocks = (ran.folder / "said").read_text().split()
    assert (int(batch), int(blocks)) == (model["batch"], model["memory"]["kv_blocks"])
    assert abs(float(tokens_per_s) / model["advised"]["tokens_per_s"]["value"] - 1) < 1e-3, "whole microseconds"


# Wrong words: a fixture, what is called of it, a fact of the problem, and one of the hint; and attributes that are not
# there, with what is named in their place.
CALLS = {
    "measure": ("slm_measure", "(4, windo_s=3)", "'windo_s'", "window_s"),
    "measure_endless": ("slm_measure", "(4, window_s=float('inf'))", "window_s=inf", "window_s=10"),
    "sweep": ("slm_sweep", "([1, 2], repeat=3)", "'repeat'", "repeats"),
    "job": ("slm_job", "(request=4)", "'request'", "requests"),
    "replicas": ("slm_replicas", "(2, shareing='mps')", "'shareing'", "sharing"),
    "advice": ("slm_advice", "(tpot='2x@32')", "'tpot'", "slo_itl, efficiency, model"),
    "sampler": ("slm_gpu_sampler", "().__enter__().figures", "block", "with statement"),
}  # fmt: skip
ATTRIBUTES = {
    "figure_near": ("slm_measure", "(4).ttft_p95", "'ttft_p95'", "ttft_p95_s or ttft_p99_s or ttft_p90_s"),
    "figure_far": ("slm_sweep", "([1, 2]).watts", "'watts'", "gains, "),
    "of_the_session": ("slm_session", ".devics", "'devics'", "devices"),
}  # fmt: skip


def told(ran, name):
    """What the failing test of this name prints."""
    return re.split(r"\n_{3,} ", ran.out.split(f" test_{name} ___", 1)[1])[0]


def test_wrong_word_names_right_one(runs):
    calls = {**CALLS, **ATTRIBUTES}
    tests = [f"def test_{name}({own}): {own}{call}\n" for name, (own, call, *_) in calls.items()]
    ran = runs("".join([*tests, "def test_nonsense(slm_measure): 'text'.nonsense\n"]), FEW)
    assert (set(ran.outcomes.values()), len(ran.outcomes), ran.ret) == ({"FAILED"}, len(calls) + 1, 1)
    for name, (*_, fact, right) in calls.items():
        kind = r"(?m)^BadUsage: .*\n  (?:try: .*|[A-Z].*\.)" if name in CALLS else r"(?m)^E .*"
        [problem] = re.findall(kind, told(ran, name))
        assert fact in problem.partition("\n")[0] and right in problem and "plugin/" not in told(ran, name)
    assert "'nonsense'" in told(ran, "nonsense") and "it has" not in told(ran, "nonsense"), "somebody else's value"


UNDECIDED = """
    def test_nothing(slm_advice): slm_advice("2x@32", model="opt-350m")

    def test_failing(slm_sweep, slm_advice):
        slm_sweep(concurrency=[8, 16])
        slm_advice()
"""
LATE = """
    def test_late(request): assert request.getfixturevalue("slm_measure")(1)
    def test_advice(slm_advice): slm_advice()
    def test_watch(dcgm): pass
"""


def test_unmeasured_fixture_is_inconclusive(runs):
    ran = runs(UNDECIDED, FEW, "--slm-engine-arg=fail_at=16")
    assert ran.ret == 10 and set(ran.outcomes.values()) == {"INCONCLUSIVE"}
    ran.says("*no advice on opt-350m: *", "*no advice on opt-125m: *left out*requests failed*")
    late = runs(LATE, "-rs")
    assert late.counts == {"skipped": 3}
    assert late.out.count("--slm-simulate or --slm-endpoint") == 2, "in three places"


# Sensors beside a block


class WithSampler:
    def pytest_sessionstart(self, session):
        values = {GPU_UTIL: 1.0, SM_ACTIVE: 0.25, POWER: 300.0}
        session.config.stash[SESSION].devices.sampler = Sampler([CountedSource(lambda number: values)], 0.1)


WATCHED = """
    import threading
    import time
    import pytest

    @pytest.mark.parametrize("name", ["slm_gpu_sampler", "dcgm"])
    def test_it(request, slm_session, name):
        watch = request.getfixturevalue(name)
        with pytest.raises(ZeroDivisionError), watch():
            1 / 0
        assert "slm-telemetry" not in {thread.name for thread in threading.enumerate()}
        with watch() as watched:
            rows = slm_session.devices.own_sampler()._under_way.rows
            while len(rows) < 4:
                time.sleep(0.01)
        assert watched.figures.sm_active == 0.25 and watched.figures.gpu_util == 1.0
        assert watched.telemetry.sources == ("planted",) and watched.health.state in ("ok", "degraded", "invalid")
        assert all(-0.2 < at < watched.seen.window_s[1] + 0.2 for at in watched.telemetry.time_s)
"""
IMAGINED = """
    import time

    def test_it(slm_gpu_sampler):
        with slm_gpu_sampler() as watched:
            time.sleep(0.6)  # two readings of the imagined device
        assert watched.telemetry.sources == ("simulated",)
        assert abs(watched.figures.power_w / 350 - 1) < 1e-3
        assert watched.health.state == "ok", watched.health.reasons
"""


def test_sampler_fixture_watches_block(runs):
    assert runs.anew(WATCHED, FEW, plugins=[WithSampler()]).counts == {"passed": 2}
    assert runs(IMAGINED, FEW).counts == {"passed": 1}
    off = runs("def test_it(slm_gpu_sampler): pass\ndef test_too(dcgm): pass", FEW, "--slm-telemetry=off")
    assert off.counts == {"errors": 2}
    off.says("*BadUsage: *", "*--slm-telemetry off*")


@pytest.fixture
def in_use(runs):
    """The shipped test of an advice: a sweep of the simulated engine, and what it measured on the engine as advised."""
    words = "--slm-simulate --slm-models=opt-1.3b --slm-window=2 -rs"
    return lambda loads, more="": runs.anew(shipped("test_advice"), words, f"--slm-concurrency={loads}", more)


def test_advised_engine_serves_as_predicted(in_use, monkeypatch):
    ran = in_use("1,8,32,64")
    assert ran.counts == {"passed": 8, "skipped": 2}
    advised = [m for m in ran.measured() if m.spec.max_num_seqs != 1024]
    [place] = {(m.load.concurrency, m.spec.max_num_seqs, m.spec.max_model_len) for m in advised}
    assert place[0] == place[1] and place[2] == 768 and len(advised) == 2
    assert in_use("32").ret == 10
    plan = advisor.plan
    monkeypatch.setattr(advisor, "plan", lambda sweeps, wish: plan(sweeps, replace(wish, gpu_bytes=140 * GIB)))
    idle = "--slm-engine-arg=dram_active=0.3 --slm-engine-arg=engine_active=0.6 -o slm_pin_cores=1"
    ran = in_use("1,8,32,64,128", idle)
    assert ran.counts == {"passed": 11}
    shared = [m for m in ran.measured() if m.replica]
    assert [(m.spec.max_num_seqs, m.load.concurrency) for m in shared] == [(32, 32)] * 8, "two of 32, twice, each way"
    assert all(m.replica.pinned for m in shared)


@pytest.mark.parametrize(("words", "failed", "why"), [
    ("preempt_from=40", 1, "*<fails: no-request-preempted *"),  # the sweep does not go there
    ("die_at=40", 4, "*EngineFailed: *"),
    ("slower", 1, "*<fails: throughput-as-predicted *: 69.?% *"),
])  # fmt: skip
def test_missed_advice_prediction_fails(in_use, monkeypatch, words, failed, why):
    law, slower = SimulatedEngine.law, words == "slower"

    def planted(self, work):
        t_inf, b_half = law(self, work)
        return (0.7 if slower and self.spec.max_num_seqs < 1024 else 1.0) * t_inf, b_half

    monkeypatch.setattr(SimulatedEngine, "law", planted)
    ran = in_use("1,8,32,64") if slower else in_use("1,32", f"--slm-engine-arg={words}")
    assert (ran.ret, ran.counts["failed"]) == (1, failed)
    ran.says(why)
