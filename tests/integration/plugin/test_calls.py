"""A wrong word in a test of one's own is one sentence with the right one, and shows nothing of our code."""

from __future__ import annotations

import pytest
from inside import ONE, usage_error

from pytest_slmserve.plugin.items import nearest


def lines_of(pytester, fixture, body, marker='model="opt-125m"'):
    """What the one failing test prints."""
    pytester.makepyfile(f"import pytest\n@pytest.mark.slm({marker})\ndef test_it({fixture}):\n    {body}\n")
    result = pytester.runpytest_inprocess(*ONE)
    result.assert_outcomes(failed=1)
    assert "plugin/" not in result.stdout.str(), "no line of ours"
    return result.stdout


@pytest.mark.parametrize(
    ("fixture", "call", "problem", "hint"),
    [
        ("slm_measure", "(concurency=4)", "slm_measure takes no 'concurency'", "concurrency"),
        ("slm_measure", "(4, windo_s=3)", "slm_measure takes no 'windo_s'", "window_s"),
        ("slm_measure", "()", "slm_measure: missing a required argument: 'concurrency'", "concurrency, repeats, *"),
        ("slm_measure", "('4')", "concurrency '4' is no whole number", "concurrency=64"),
        ("slm_measure", "(4, window_s='3s')", "window_s='3s' is no finite number", "window_s=10"),
        ("slm_measure", "(4, window_s=float('inf'))", "window_s=inf is no finite number", "window_s=10"),
        ("slm_measure", "(4, settle_lifetimes=float('nan'))", "settle_lifetimes=nan is no finite number", "*=10"),
        ("slm_measure", "(True)", "concurrency True is no whole number", "concurrency=64"),
        ("slm_job", "(500 / 2)", "requests is a whole number, not 250.0", "requests=1024"),
        ("slm_measure", "(4, ramp_up='brust')", "ramp_up='brust' is no ramp-up", "staggered or burst"),
        ("slm_measure", "(4, repeats='2')", "slm_measure: repeats='2' is no number of repeats", "repeats=3"),
        ("slm_measure", "(4, repeats=0)", "slm_measure: repeats=0 is no number of repeats", "repeats=3"),
        ("slm_sweep", "('1,2,4')", "slm_sweep(concurrency='1,2,4') is no list of numbers", "concurrency=[[]1, 2, 4]"),
        ("slm_sweep", "([])", "slm_sweep(concurrency=[[][]]) names no load", "concurrency=[[]1, 2, 4]"),
        ("slm_sweep", "(4)", "slm_sweep(concurrency=4) is no list of numbers", "concurrency=[[]1, 2, 4]"),
        ("slm_sweep", "([1, 2], repeat=3)", "slm_sweep takes no 'repeat'", "repeats"),
        ("slm_job", "(request=4)", "slm_job takes no 'request'", "requests"),
        ("slm_job", "(4, lengths=512)", "lengths=512 is no pair of prompt and output tokens", "lengths=(512, 64)"),
        ("slm_replicas", "(2, shareing='mps')", "slm_replicas takes no 'shareing'", "sharing"),
        ("slm_replicas", "(2).measure(concurency=4)", "slm_replicas(...).measure takes no 'concurency'", "concurrency"),
        ("slm_advice", "(tpot='2x@32')", "slm_advice takes no 'tpot'", "slo_itl, efficiency, model"),
    ],
)
def test_a_wrong_word_of_a_call_is_named_with_the_right_one(pytester, fixture, call, problem, hint):
    lines_of(pytester, fixture, fixture + call).fnmatch_lines([f"BadUsage: {problem}", f"  try: {hint}"])


def test_the_figures_that_there_are_are_named_where_one_is_not(pytester):
    out = lines_of(pytester, "slm_measure", "assert slm_measure(4).ttft_p95 < 1")
    out.fnmatch_lines([">*slm_measure(4).ttft_p95 < 1", "E*'ttft_p95'; it has ttft_p95_s or ttft_p99_s or ttft_p90_s"])


def test_all_figures_are_named_where_none_is_near(pytester):
    out = lines_of(pytester, "slm_sweep", "slm_sweep([1, 2]).watts")
    out.fnmatch_lines(["E*'Curve' object has no attribute 'watts'; it has *gains, *pareto_front, *plateau, *"])


def test_an_attribute_of_somebody_elses_value_is_left_alone(pytester):
    out = lines_of(pytester, "slm_measure", "'text'.nonsense")
    out.fnmatch_lines(["E*AttributeError: 'str' object has no attribute 'nonsense'"])
    out.no_fnmatch_line("*it has*")


def test_a_sweep_may_be_given_by_what_is_read_once(pytester):
    pytester.makepyfile("def test_it(slm_sweep):\n    assert len(slm_sweep(n for n in (1, 2)).points) == 2\n")
    pytester.runpytest_inprocess(*ONE).assert_outcomes(passed=1)


def test_a_sweep_is_known_in_the_order_in_which_it_is_measured(pytester):
    body = "slm_sweep([4, 1], repeats=1)\n    found = slm_session.results.measurements()\n"
    check = "    assert [m.load.concurrency for m in found] == [1, 4]\n"
    pytester.makepyfile(f"def test_it(slm_sweep, slm_session):\n    {body}{check}")
    pytester.runpytest_inprocess(*ONE).assert_outcomes(passed=1)


def test_the_nearest_words_come_first_and_all_where_none_is_near():
    assert nearest("modle", ["model", "seed"]) == "model" and nearest("x", ["model", "seed"]) == "model, seed"


@pytest.mark.parametrize(
    ("marker", "fixture", "told"),
    [
        (
            'model="opt-125m", max_model_len=256',
            "slm_measure",
            "test_it: requests of 768 tokens do not fit*256*768, or",
        ),
        (
            'model="opt-125m", lengths=(3000, 200)',
            "slm_sweep",
            "test_it: opt-125m: requests of 3200 *2048*try: shorter *",
        ),
        ('points=[("opt-125m", 4)], lengths=(3000, 200)', "slm_point", "requests of 3200 tokens do not fit *2048"),
        ('points=["opt-125m"]', "slm_point", "'opt-125m' is no point*try: points=[[]("),
        ('lengths="512/256"', "slm_engine", "lengths='512/256' is no pair of prompt and output tokens"),
        ('models="opt-125m", claim="throughput-plateau"', "slm_claim", "(models='opt-125m') is no list of models"),
    ],
)
def test_a_marker_that_cannot_be_carried_out_ends_the_run_before_it_begins(pytester, marker, fixture, told):
    pytester.makepyfile(f"import pytest\n@pytest.mark.slm({marker})\ndef test_it({fixture}): pass\n")
    text = usage_error(pytester.runpytest_inprocess(*ONE))
    pytest.LineMatcher([" ".join(text.split())]).fnmatch_lines([f"*{told}*"])


def test_whoever_overrides_the_specification_is_believed(pytester):
    pytester.makepyfile(
        """
        from dataclasses import replace
        import pytest

        @pytest.fixture
        def slm_spec(slm_spec):
            return replace(slm_spec, max_model_len=2048)

        @pytest.mark.slm(model="opt-125m", max_model_len=256)
        def test_it(slm_measure):
            assert slm_measure(4).valid
        """
    )
    pytester.runpytest_inprocess(*ONE).assert_outcomes(passed=1)
