"""What a user writes in a repository of their own: the fixtures in tests, their errors in the terminal, and the shipped
test of an advice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from inner_runs import QUIET
from inside import outcomes
from shipped import put

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.advice import advisor
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.plugin import SESSION
from pytest_slmserve.schema.sensors import GPU_UTIL, POWER, SM_ACTIVE
from pytest_slmserve.schema.specs import GIB
from pytest_slmserve.telemetry.host import Reading
from pytest_slmserve.telemetry.sampler import Sampler

RECORDS = ".slm/records.jsonl"
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

    class TestOfAnotherSeed:
        @pytest.fixture
        def slm_spec(self, slm_spec):
            return replace(slm_spec, seed=7)

        def test_seed(self, slm_engine):
            assert slm_engine.spec.seed == 7

    def test_job(slm_job):
        slow, fast = slm_job(20, rate=2, lengths=(16, 8)), slm_job(20, lengths=(16, 8))
        assert slow.requests_per_s < fast.requests_per_s

    def test_replicas(slm_replicas, slm_measure):
        two, alone = slm_replicas(2, sharing="mps"), slm_measure(8)
        shared = two.measure(8)
        assert shared.valid and shared.loads == (4, 4)
        assert shared.output_tokens_per_s > alone.output_tokens_per_s

    def test_pair(slm_replicas):
        assert slm_replicas(models=["opt-125m", "opt-1.3b"]).measure(8, repeats=1).models == ("opt-125m", "opt-1.3b")

    def test_advice(slm_advice, slm_session):
        started = len(slm_session.devices.pool.starts)
        advice = slm_advice("2x@1", efficiency=0.1)
        tokens_per_s = advice.advised.tokens_per_s
        Path("said").write_text(f"{advice.batch} {tokens_per_s.value!r} {advice.needs.kv_blocks}")
        assert slm_advice().batch == 16 and slm_advice("0.001ms").batch is None
        assert len(slm_session.devices.pool.starts) == started

    def test_advice_by_name(slm_advice):
        with pytest.raises(Exception, match="opt-350m"):
            slm_advice(model="facebook/opt-350m")
"""
WRONG = """
    import pytest

    def test_objective(slm_advice): slm_advice("twice")
    def test_share(slm_advice): slm_advice("2x@32", efficiency=10)
    def test_uneven(slm_replicas): slm_replicas(3).measure(64)
    def test_one(slm_replicas): slm_replicas(1)
    def test_word(slm_measure): slm_measure(8, windw_s=3)
    def test_attribute(slm_session): slm_session.devics
    def test_block(slm_gpu_sampler):
        with slm_gpu_sampler() as watched:
            watched.figures
"""
FEW = ("--slm-simulate", "--slm-models=opt-125m", "--slm-window=1", "--slm-engine-arg=t_inf=4000", *QUIET, "-v", "-rs")
FEW = (*FEW, "--slm-engine-arg=b_half=1", "--slm-input-len=64", "--slm-output-len=32")


@pytest.fixture(scope="module")
def own(inner):
    """The run of a user's tests."""
    inner.makepyfile(test_own=OWN, test_wrong=WRONG)
    return inner.runpytest_inprocess(*FEW, "test_own.py")


@pytest.fixture(scope="module")
def wrong(inner, own):
    return inner.runpytest_inprocess(*FEW, "test_wrong.py")


def test_each_fixture_does_in_a_test_what_it_says(own):
    assert set(outcomes(own).values()) == {"PASSED"} and len(outcomes(own)) == 8 and own.ret == 0
    own.stdout.fnmatch_lines(["SIMULATED ENGINE: *", "opt-125m *"])


def test_the_advice_is_that_of_the_command(own, inner, capsys):
    capsys.readouterr()
    words = ["--model", "opt-125m", "--slo-itl", "2x@1", "--json"]
    assert main(["advise", str(inner.path / RECORDS), *words]) == 0
    [model] = json.loads(capsys.readouterr().out)["models"]
    batch, tokens_per_s, blocks = (inner.path / "said").read_text().split()
    assert (int(batch), int(blocks)) == (model["batch"], model["memory"]["kv_blocks"])
    assert abs(float(tokens_per_s) / model["advised"]["tokens_per_s"]["value"] - 1) < 1e-3, "whole microseconds"


def test_wrong_words_fail_with_what_to_type_and_no_way_through_our_code(wrong):
    assert set(outcomes(wrong).values()) == {"FAILED"} and wrong.ret == 1
    text = wrong.stdout.str()
    for fact in ("'twice'", "efficiency=0.1", "96, 192 or 384", "slm_measure", "window_s", "devices", "with statement"):
        assert fact in text, fact
    assert "BadUsage: " in text and "Traceback" not in text and "pytest_slmserve/plugin" not in text


def test_nothing_measured_is_inconclusive_and_invalid_points_are_no_ground(pytester):
    pytester.makepyfile("""
        def test_nothing(slm_advice): slm_advice("2x@32", model="opt-350m")

        def test_too_little(slm_measure, slm_advice):
            slm_measure(concurrency=8)
            slm_advice("2x@32")

        def test_failing(slm_sweep, slm_advice):
            slm_sweep(concurrency=[8, 16])
            slm_advice()
    """)
    result = pytester.runpytest_inprocess(*FEW, "--slm-engine-arg=fail_at=16")
    assert result.ret == 10 and set(outcomes(result).values()) == {"INCONCLUSIVE"}
    result.stdout.fnmatch_lines(["*no advice on opt-350m: *", "*no advice on opt-125m: *concurrency 8*"])
    result.stdout.fnmatch_lines(["*no advice on opt-125m: *left out*requests failed*"])


def test_without_a_mode_what_a_test_asks_for_as_it_goes_skips_it(pytester):
    pytester.makepyfile("""
        def test_late(request): assert request.getfixturevalue("slm_measure")(1)
        def test_advice(slm_advice): slm_advice()
        def test_watch(dcgm): pass
    """)
    result = pytester.runpytest_inprocess("-rs", *QUIET)
    result.assert_outcomes(skipped=3)
    assert result.stdout.str().count("--slm-simulate or --slm-endpoint") == 2, "in three places"


# Sensors beside a block


class Counting:
    """A sensor that counts."""

    name = "counting"
    asked = 0

    def read(self, now_s):
        self.asked += 1
        return Reading({GPU_UTIL: 1.0, SM_ACTIVE: 0.25, POWER: 300.0}, 0.1 if self.asked > 1 else None)

    def close(self):
        pass


class WithSampler:
    def pytest_sessionstart(self, session):
        session.config.stash[SESSION].devices.sampler = Sampler([Counting()], 0.1)


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
        assert watched.telemetry.sources == ("counting",) and watched.health.state in ("ok", "degraded", "invalid")
        assert all(-0.2 < at < watched.seen.window_s[1] + 0.2 for at in watched.telemetry.time_s)
"""


def test_a_block_is_watched_under_either_name(pytester):
    pytester.makepyfile(WATCHED)
    pytester.runpytest_inprocess(*FEW, plugins=[WithSampler()]).assert_outcomes(passed=2)


def test_beside_a_simulated_engine_imagined_sensors_are_watched(pytester):
    pytester.makepyfile("""
        import time

        def test_it(slm_gpu_sampler):
            with slm_gpu_sampler() as watched:
                time.sleep(0.6)  # two readings of the imagined device
            assert watched.telemetry.sources == ("simulated",)
            assert abs(watched.figures.power_w / 350 - 1) < 1e-3
            assert watched.health.state == "ok", watched.health.reasons
    """)
    pytester.runpytest_inprocess(*FEW).assert_outcomes(passed=1)


def test_without_sensors_there_is_nothing_to_watch(pytester):
    pytester.makepyfile("def test_it(slm_gpu_sampler): pass\ndef test_too(dcgm): pass")
    result = pytester.runpytest_inprocess(*FEW, "--slm-telemetry=off")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*BadUsage: *", "*--slm-telemetry off*"])


# The shipped test of an advice


@pytest.fixture
def in_use(pytester, kept):
    """Runs the shipped test of the advice on a sweep of the simulated engine."""
    put(pytester.path, "test_advice")
    arguments = ("--slm-simulate", "--slm-models=opt-1.3b", "--slm-window=2", *QUIET, "-rs")
    return lambda *words, loads="1,8,32,64": pytester.runpytest_inprocess(
        *arguments, f"--slm-concurrency={loads}", *words
    )


def advised(pytester):
    return [m for m in read(pytester.path / RECORDS).measurements if m.spec.max_num_seqs != 1024]


def test_the_engine_as_advised_serves_what_was_predicted(in_use, pytester):
    in_use().assert_outcomes(passed=8, skipped=2)
    [place] = {(m.load.concurrency, m.spec.max_num_seqs, m.spec.max_model_len) for m in advised(pytester)}
    assert place[0] == place[1] and place[2] == 768 and len(advised(pytester)) == 2


@pytest.mark.parametrize(
    ("words", "failed", "why"),
    [
        ("preempt_from=40", 1, "*<fails: no-request-preempted *"),
        ("die_at=40", 4, "*EngineFailed: *"),
    ],
)
def test_what_two_loads_predict_fails_if_it_preempts_or_dies(in_use, words, failed, why):
    """Planted from concurrency 40 on, where the sweep does not go."""
    result = in_use(f"--slm-engine-arg={words}", loads="1,32")
    assert result.ret == 1 and result.parseoutcomes()["failed"] == failed
    result.stdout.fnmatch_lines([why])


def test_an_engine_that_is_slower_than_predicted_fails(in_use, monkeypatch):
    law = SimulatedEngine.law

    def slower(self, work):
        t_inf, b_half = law(self, work)
        return (0.7 if self.spec.max_num_seqs < 1024 else 1.0) * t_inf, b_half

    monkeypatch.setattr(SimulatedEngine, "law", slower)
    result = in_use()
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*<fails: throughput-as-predicted *: 69.? % *"])


def test_several_engines_gain_no_more_than_their_bound(in_use, pytester, monkeypatch):
    plan = advisor.plan
    monkeypatch.setattr(advisor, "plan", lambda sweeps, wish: plan(sweeps, replace(wish, gpu_bytes=140 * GIB)))
    idle = ("--slm-engine-arg=dram_active=0.3", "--slm-engine-arg=engine_active=0.6")
    in_use(*idle, "--override-ini=slm_pin_cores=1", loads="1,8,32,64,128").assert_outcomes(passed=11)
    shared = [m for m in read(pytester.path / RECORDS).measurements if m.replica]
    assert [(m.spec.max_num_seqs, m.load.concurrency) for m in shared] == [(32, 32)] * 8, "two of 32, twice, each way"
    assert all(m.replica.pinned for m in shared)


def test_without_enough_loads_nothing_is_decided(in_use):
    assert in_use(loads="32").ret == 10
