"""The engine's interpreter, which pytest may take for another project's root; and prompts from a prefix cache."""

from __future__ import annotations

import os
import sys

import pytest
from inner_runs import QUIET
from inside import SWEEP, usage_error
from interfaces import problems_of, somebodys_server, url_of

from pytest_slmserve.analysis.metrics.validity import cache_hit_share
from pytest_slmserve.telemetry import host

# python


def test_what_is_no_interpreter_is_refused(pytester):
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess("--slm-cpu", "--slm-python=/no/such/python", *QUIET)
    assert "/no/such/python" in usage_error(result)


def test_an_interpreter_is_asked_for_what_it_holds():
    facts = host.interpreter(sys.executable, {})
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(facts) == {"python", "vllm", "torch", "executable"}


@pytest.fixture
def two_projects(pytester):
    """A project with a test, the current folder, and the interpreter of another one with settings of its own."""
    mine, other = pytester.mkdir("mine"), pytester.mkdir("other")
    (mine / "test_mine.py").write_text("def test_it(slm_spec): assert slm_spec", "utf-8")
    (other / "pytest.ini").write_text("[pytest]\nslm_repeats = 3\n", "utf-8")
    for folder in (mine, other):
        (folder / "python").symlink_to(sys.executable)
    os.chdir(mine)
    return mine, other


def test_a_path_by_which_pytest_takes_another_project_for_the_root_is_warned_of(pytester, two_projects):
    _, other = two_projects
    result = pytester.runpytest_inprocess("--slm-simulate", "--slm-python", f"{other}/python", *QUIET)
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines([f"*PytestConfigWarning: *{other} *--slm-python={other}/python"])


def test_where_that_project_makes_warnings_errors_it_is_one_of_usage(pytester, two_projects):
    _, other = two_projects
    (other / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", "utf-8")
    text = usage_error(pytester.runpytest_inprocess("--slm-simulate", "--slm-python", f"{other}/python", *QUIET))
    assert f"type --slm-python={other}/python" in text and "INTERNALERROR" not in text


@pytest.mark.parametrize("ini", [False, True])
def test_a_path_after_the_sign_is_not_warned_of_nor_one_in_the_project(pytester, two_projects, ini):
    mine, other = two_projects
    if ini:
        (mine / "pytest.ini").touch()
    for words in ([f"--slm-python={other}/python"], ["--slm-python", "python"], ["--slm-python", f"{mine}/python"]):
        pytester.runpytest_inprocess("--slm-simulate", *words, *QUIET).assert_outcomes(passed=1, warnings=0)


# allow_prefix_cache


POINT = (
    "--slm-concurrency=4",
    "--slm-input-len=16",
    "--slm-output-len=8",
    "--slm-window=0.6",
    "-k",
    "test_point",
    *QUIET,
)


def test_an_endpoint_that_caches_gets_prompts_of_their_own_unless_it_is_given(pytester, monkeypatch, archive):
    pytester.makepyfile(SWEEP)
    with somebodys_server(enable_prefix_caching=True, enable_prompt_tokens_details=True) as server:
        monkeypatch.setenv("SLM_ENDPOINT_KEY", server._key)
        for name, words in (("own", []), ("allowed", ["--override-ini=slm_allow_prefix_cache=1"])):
            there = f"--slm-endpoint={url_of(server)}", "--slm-models=slm", f"--slm-records={name}.jsonl"
            pytester.runpytest_inprocess(*there, *POINT, *words, *QUIET).assert_outcomes(passed=1, deselected=1)
    own, allowed = (archive(f"{name}.jsonl").measurements for name in ("own", "allowed"))
    assert problems_of([*own, *allowed]) == [] and own[0].key != allowed[0].key
    # The first has filled the cache, where it may be used.
    assert cache_hit_share(own[-1].run).share == 0 and cache_hit_share(allowed[-1].run).share > 0.3


def test_an_engine_of_ours_that_caches_is_found_out(pytester, archive, stand_in_here):
    """On the command line nothing warms the cache but what was measured before."""
    pytester.makepyfile(SWEEP)
    caches = "--slm-engine-arg=enable_prefix_caching=true"
    result = pytester.runpytest_inprocess("--slm-cpu", "--slm-models=opt-tiny", stand_in_here, caches, *POINT, *QUIET)
    assert [text for text in problems_of(archive().measurements) if "from a prefix cache" in text]
    result.assert_outcomes(failed=1, deselected=1)
