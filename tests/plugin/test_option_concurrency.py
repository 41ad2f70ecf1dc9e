"""--slm-concurrency says how many requests are in flight at each point."""

import pytest
from inside import ALL_OF_IT, SWEEP, usage_error


def test_each_batch_is_a_point(sweep, archive):
    sweep("--slm-concurrency=1,4,64")
    assert [m.load.concurrency for m in archive().measurements] == [1, 4, 64, 1, 4, 64]


@pytest.mark.parametrize("concurrency", ["4,2", "1,1", "0,1", "one", "1,,2", ""])
def test_what_is_not_ascending_is_refused(sweep, concurrency):
    text = usage_error(sweep(f"--slm-concurrency={concurrency}"))
    assert "--slm-concurrency" in text
    assert "ascending order, such as 1,2,4,8" in text


def test_a_batch_over_the_kv_capacity_is_refused_before_any_engine_starts(sweep):
    text = usage_error(sweep("--slm-models=opt-13b", "--slm-concurrency=1,512"))
    assert "512 requests in flight do not fit opt-13b: the KV cache holds 167 requests of 768 tokens" in text


def test_by_default_what_does_not_fit_is_cut_and_said(pytester):
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess("--slm-simulate", "--slm-models=opt-13b", "--slm-window=3", ALL_OF_IT)
    result.stdout.fnmatch_lines(["*cut: 256, 512, 1024*the KV cache holds 167 requests of 768 tokens*"])
