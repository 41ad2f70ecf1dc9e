"""--slm-simulate runs the same benchmarks on a simulated engine, and says so."""

from inside import usage_error


def test_points_and_claims_pass_and_the_summary_shouts_that_it_is_simulated(sweep):
    result = sweep()
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*SIMULATED*"])


def test_it_takes_no_lock_so_that_simulations_may_run_beside_each_other(sweep, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "locks"))
    (tmp_path / "locks").mkdir()
    sweep().assert_outcomes(passed=6)
    assert not list((tmp_path / "locks").glob("*.lock"))


def test_modes_exclude_each_other(sweep):
    assert "exclude each other" in usage_error(sweep("--slm-cpu"))


def test_without_a_mode_what_measures_is_skipped_with_the_reason(pytester):
    pytester.makepyfile(
        """
        import pytest

        def test_plain(): pass
        def test_sweep(slm_sweep): raise AssertionError("must not run")
        @pytest.mark.slm(model="opt-125m")
        def test_marked(): raise AssertionError("must not run")
        def test_point(slm_point): raise AssertionError("must not run")
        """
    )
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(passed=1, skipped=3)
    result.stdout.fnmatch_lines(["*SKIPPED*measures: needs --slm-gpu, --slm-cpu, --slm-simulate or --slm-endpoint*"])


def test_with_a_mode_and_no_path_only_what_measures_runs(pytester):
    pytester.makepyfile("def test_plain(): raise AssertionError\ndef test_engine(slm_engine): assert slm_engine.launch")
    result = pytester.runpytest_inprocess("--slm-simulate")
    result.assert_outcomes(passed=1, deselected=1)


def test_with_a_path_everything_in_it_runs(pytester):
    path = pytester.makepyfile("def test_plain(): pass\ndef test_engine(slm_engine): assert slm_engine.launch")
    pytester.runpytest_inprocess("--slm-simulate", path).assert_outcomes(passed=2)
