"""--slm-plan-gpus is how many GPUs a plan is spread over, on paper."""

from inside import usage_error


def test_engines_are_spread_over_so_many_gpus(sweep):
    models = ("--slm-models=opt-125m,opt-350m,opt-1.3b", "--slm-concurrency=1,2")
    result = sweep("--slm-plan", *models, "--slm-plan-gpus=2")
    result.stdout.fnmatch_lines(
        [
            "*end: 9 items",
            "GPU 0: opt-* from 0:00 (2 items, 0:00 min), opt-1.3b from 0:00 (1 of 2 items, 0:00 min)",
            "GPU 1: opt-* from 0:00 (2 items, 0:00 min), opt-1.3b from 0:00 (1 of 2 items, 0:00 min)",
            "spread by engine: 0:0? min on 2 GPUs, no order takes less than 0:0? min; *after the other: 0:01 min",
        ]
    )


def test_what_asks_nothing_of_an_engine_does_not_keep_it_whole(pytester):
    pytester.makepyfile("""
        import pytest

        def test_point(slm_point):
            assert slm_point.measure()

        def test_advice(slm_advice):
            assert slm_advice()

        def test_two(slm_replicas):
            assert slm_replicas(2)
    """)
    words = ("--slm-simulate", "--slm-plan", "--slm-models=opt-125m", "--slm-concurrency=1,2", "--slm-plan-gpus=2")
    pytester.runpytest_inprocess(*words).stdout.fnmatch_lines(["GPU 0: opt-125m from 0:00 (1 of 2 items, 0:00 min)"])


def test_without_it_nothing_is_spread(sweep):
    assert "spread by engine" not in sweep("--slm-plan").stdout.str()


def test_an_engine_that_needs_more_of_them_is_wrong_usage(sweep):
    text = usage_error(sweep("--slm-plan", "--slm-tensor-parallel-size=4", "--slm-plan-gpus=2"))
    assert "an engine takes 4 GPUs, and the plan has 2" in text


def test_other_words_are_refused(sweep):
    assert "'none' is not a whole number, 1 or more" in usage_error(sweep("--slm-plan-gpus=none"))
