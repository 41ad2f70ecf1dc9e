"""What a user writes in a repository of their own."""

from __future__ import annotations


def test_the_five_lines(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.slm(model="facebook/opt-125m")
        def test_plateau(slm_sweep):
            sweep = slm_sweep(concurrency=[1, 4, 16, 64, 128, 256])
            assert sweep.pareto_plateau(tolerance=0.10)
        """
    )
    result = pytester.runpytest_inprocess("--slm-simulate", "--slm-window=1")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["SIMULATED ENGINE: *", "opt-125m *from 64 * 64 *"])


def test_a_point_has_its_figures_and_is_measured_once(pytester):
    pytester.makepyfile(
        """
        def test_point(slm_measure, slm_session):
            point = slm_measure(concurrency=16)
            assert point.valid and len(point.repeats) == 2
            assert point.requests_per_s > 50
            assert abs(point.e2e_s - 16 / point.requests_per_s) < 0.02 * point.e2e_s
            assert slm_measure(concurrency=16).records == point.records
            assert len(slm_session.results.repeats) == 1
            assert slm_measure(concurrency=16, ramp_up="burst").records != point.records
        """
    )
    pytester.runpytest_inprocess("--slm-simulate", "--slm-models=opt-125m").assert_outcomes(passed=1)


def test_the_specification_can_be_overridden(pytester):
    pytester.makepyfile(
        """
        from dataclasses import replace
        import pytest

        @pytest.fixture
        def slm_spec(slm_spec):
            return replace(slm_spec, seed=7)

        def test_engine(slm_engine):
            assert slm_engine.spec.seed == 7
        """
    )
    pytester.runpytest_inprocess("--slm-simulate").assert_outcomes(passed=1)


def test_a_request_goes_through_the_engine_itself(pytester):
    pytester.makepyfile(
        """
        from pytest_slmserve import ClosedLoop

        def test_engine(slm_engine, sharegpt):
            run = slm_engine.run(sharegpt, ClosedLoop(4, requests=12))
            assert len(run.samples) == 12 and all(run.samples.finished)
        """
    )
    pytester.runpytest_inprocess("--slm-simulate").assert_outcomes(passed=1)


def test_everything_works_without_pytest_benchmark(sweep):
    sweep("-p", "no:benchmark").assert_outcomes(passed=6)


def test_a_fixture_that_a_test_asks_for_as_it_goes_skips_it_without_a_mode(pytester):
    pytester.makepyfile("def test_it(request): assert request.getfixturevalue('slm_measure')(1)")
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*measures: needs --slm-gpu, --slm-cpu, --slm-simulate or --slm-endpoint"])
