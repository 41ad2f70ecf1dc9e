"""--slm-allow-prefix-cache: prompts that come from a cache of prefixes are measured too."""

from __future__ import annotations

import pytest
from inside import SWEEP
from interfaces import problems_of, somebodys_server, url_of

from pytest_slmserve.analysis.metrics.validity import cache_hit_share

POINT = (
    "--slm-models=slm",
    "--slm-concurrency=4",
    "--slm-input-len=16",
    "--slm-output-len=8",
    "--slm-window=0.6",
    "-p",
    "no:cacheprovider",
)


def test_it_is_part_of_what_is_asked_for(sweep, archive):
    sweep("--slm-concurrency=4").assert_outcomes(passed=1)
    sweep("--slm-concurrency=4", "--slm-allow-prefix-cache", "--slm-resume").assert_outcomes(passed=1)
    without, *_, allowed = archive().measurements
    assert (without.spec.allow_prefix_cache, allowed.spec.allow_prefix_cache) == (False, True)
    assert without.key != allowed.key and len(archive().measurements) == 4


@pytest.mark.parametrize("allowed", [False, True])
def test_an_endpoint_that_caches_gets_prompts_of_their_own_unless_it_is_given(pytester, monkeypatch, archive, allowed):
    pytester.makepyfile(SWEEP)
    with somebodys_server(enable_prefix_caching=True, enable_prompt_tokens_details=True) as server:
        monkeypatch.setenv("SLM_ENDPOINT_KEY", server._key)
        further = ["--slm-allow-prefix-cache"] if allowed else []
        pytester.runpytest_inprocess(f"--slm-endpoint={url_of(server)}", *POINT, *further, "-k", "point")
    found = archive().measurements
    assert problems_of(found) == []
    last = cache_hit_share(found[-1].run).share  # the first has filled the cache, where it may be used
    assert last > 0.3 if allowed else last == 0


def test_an_engine_of_ours_that_caches_is_found_out(pytester, archive, stand_in_here):
    """On the command line nothing warms the cache but what was measured before."""
    pytester.makepyfile(SWEEP)
    words = (
        "--slm-cpu",
        "--slm-models=opt-tiny",
        "--slm-concurrency=4",
        "--slm-input-len=16",
        "--slm-output-len=8",
        "--slm-window=0.6",
    )
    caches = "--slm-engine-arg=enable_prefix_caching=true"
    result = pytester.runpytest_inprocess(*words, stand_in_here, caches, "-k", "point", "-p", "no:cacheprovider")
    assert [text for text in problems_of(archive().measurements) if "from a prefix cache" in text]
    result.assert_outcomes(failed=1, deselected=1)
