"""`slm_advice` in a user's test: what this run has measured, as the command would have it from the archive."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from shipped import put

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.advice import advisor
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.specs import GIB

ARGUMENTS = ("--slm-simulate", "--slm-models=opt-1.3b", "--slm-window=2", "-p", "no:cacheprovider")


def test_the_advice_is_that_of_the_command(pytester, capsys, kept):
    pytester.makepyfile(
        """
        from pathlib import Path

        def test_what_to_deploy(slm_sweep, slm_advice):
            slm_sweep(concurrency=[1, 8, 32, 64, 128])
            advice = slm_advice("2x@32", efficiency=0.1)
            tokens_per_s = advice.advised.tokens_per_s
            Path("said").write_text(f"{advice.batch} {tokens_per_s.value!r} {advice.needs.kv_blocks}")
            assert slm_advice().batch == 128, "without an objective"
        """
    )
    pytester.runpytest_inprocess(*ARGUMENTS).assert_outcomes(passed=1)
    capsys.readouterr()
    assert main(["advise", str(pytester.path / ".slm/records.jsonl"), "--slo-itl", "2x@32", "--json"]) == 0
    [model] = json.loads(capsys.readouterr().out)["models"]
    batch, tokens_per_s, blocks = (pytester.path / "said").read_text().split()
    assert (int(batch), int(blocks)) == (model["batch"], model["memory"]["kv_blocks"])
    assert abs(float(tokens_per_s) / model["advised"]["tokens_per_s"]["value"] - 1) < 1e-3, "whole microseconds"


def test_it_comes_after_the_planned_points_and_starts_no_engine(pytester):
    pytester.makepyfile(
        """
        def test_what_to_deploy(slm_advice, slm_session):
            assert slm_advice("2x@32").batch == 64
            assert len(slm_session.devices.pool.starts) == 1

        def test_point(slm_point):
            assert slm_point.measure()
        """
    )
    result = pytester.runpytest_inprocess(*ARGUMENTS, "--slm-concurrency=1,8,32,64,128", "-v")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*test_point?opt-1.3b-128?*", "*test_what_to_deploy*"])


def test_another_model_is_asked_for_by_name(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.slm(model="opt-125m")
        def test_sweep(slm_sweep, slm_advice):
            slm_sweep(concurrency=[1, 8, 32, 64])
            assert slm_advice("4x@32").subject.name == "opt-125m"

        def test_advice(slm_advice):
            assert slm_advice("4x@32", model="facebook/opt-125m").batch == 64
        """
    )
    pytester.runpytest_inprocess(*ARGUMENTS).assert_outcomes(passed=2)


def test_nothing_measured_is_inconclusive(pytester):
    pytester.makepyfile(
        """
        def test_nothing(slm_advice):
            slm_advice("2x@32")

        def test_too_little(slm_measure, slm_advice):
            slm_measure(concurrency=8)
            slm_advice("2x@32")
        """
    )
    result = pytester.runpytest_inprocess(*ARGUMENTS)
    result.assert_outcomes()
    assert result.ret == 10
    result.stdout.fnmatch_lines(
        [
            "*no advice on opt-1.3b: nothing of it was measured in this run*",
            "*no advice on opt-1.3b: 1 load to judge by (concurrency 8): two are needed*",
        ]
    )


def test_invalid_points_are_no_ground(pytester):
    pytester.makepyfile(
        """
        def test_failing(slm_sweep, slm_advice):
            slm_sweep(concurrency=[8, 16])
            slm_advice()
        """
    )
    result = pytester.runpytest_inprocess(*ARGUMENTS, "--slm-engine-arg=fail_at=1")
    assert result.ret == 10
    result.stdout.fnmatch_lines(
        ["*no advice on opt-1.3b: 0 loads to judge by: two are needed; left out*requests failed*"]
    )


def test_a_wish_that_no_load_fulfils_is_an_answer(pytester):
    pytester.makepyfile(
        """
        def test_sweep(slm_sweep, slm_advice):
            slm_sweep(concurrency=[1, 8, 32])
            advice = slm_advice("0.001ms")
            assert advice.batch is None and "no load that was measured has" in advice.decision.reason
        """
    )
    pytester.runpytest_inprocess(*ARGUMENTS).assert_outcomes(passed=1)


def test_wrong_words(pytester):
    pytester.makepyfile(
        """
        def test_objective(slm_advice):
            slm_advice("twice")

        def test_share(slm_advice):
            slm_advice("2x@32", efficiency=10)
        """
    )
    result = pytester.runpytest_inprocess(*ARGUMENTS)
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    assert "BadUsage: 'twice' is no latency objective" in text and "an efficiency of 10 is no share" in text
    assert "Traceback" not in text


def test_without_a_mode_it_is_skipped(pytester):
    pytester.makepyfile("def test_advice(slm_advice):\n    slm_advice()")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(skipped=1)


# The shipped test of an advice


@pytest.fixture
def in_use(pytester, kept):
    """Runs the shipped test of the advice on a sweep of the simulated engine."""
    put(pytester.path, "test_advice")
    return lambda *words, loads="1,8,32,64,128": pytester.runpytest_inprocess(
        *ARGUMENTS, f"--slm-concurrency={loads}", "-rs", *words
    )


def test_the_engine_as_advised_serves_what_was_predicted(in_use, pytester):
    in_use().assert_outcomes(passed=9, skipped=2)
    advised = [m for m in read(pytester.path / ".slm/records.jsonl").measurements if m.spec.max_num_seqs == 64]
    assert [(m.load.concurrency, m.spec.max_model_len) for m in advised] == [(64, 768)] * 2


@pytest.mark.parametrize(
    ("words", "failed", "why"),
    [
        ("preempt_from=40", 1, "*<fails: no-request-preempted *preemptions, though its KV cache was to hold all*"),
        ("die_at=40", 4, "*EngineFailed: *the simulated engine died at*"),
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
        return (0.7 if self.spec.max_num_seqs == 64 else 1.0) * t_inf, b_half

    monkeypatch.setattr(SimulatedEngine, "law", slower)
    result = in_use()
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*<fails: throughput-as-predicted *: 69.9 % * of what was predicted*"])


def test_several_engines_gain_no_more_than_their_bound(in_use, pytester, monkeypatch):
    plan = advisor.plan
    monkeypatch.setattr(advisor, "plan", lambda sweeps, wish: plan(sweeps, replace(wish, gpu_bytes=140 * GIB)))
    idle = ("--slm-engine-arg=dram_active=0.3", "--slm-engine-arg=engine_active=0.6")
    in_use(*idle, "--override-ini=slm_pin_cores=1").assert_outcomes(passed=11)
    shared = [m for m in read(pytester.path / ".slm/records.jsonl").measurements if m.replica]
    assert [(m.spec.max_num_seqs, m.load.concurrency) for m in shared] == [(32, 32)] * 8, "two of 32, twice, each way"
    assert all(m.replica.pinned for m in shared)


def test_without_enough_loads_nothing_is_decided(in_use):
    assert in_use(loads="32").ret == 10
