"""A wrong word in a test of one's own is one error with the right one, and shows nothing of our code.

One run has a test for each wrong call; what a marker may say is looked at before anything runs."""

from __future__ import annotations

import re

import pytest
from inner_runs import FEW, InnerRuns

from pytest_slmserve.plugin.items import nearest

# A fixture, what is called of it, the facts of the problem, and those of the hint.
CALLS = {
    "measure_typo": ("slm_measure", "(concurency=4)", "'concurency'", "concurrency"),
    "measure_near": ("slm_measure", "(4, windo_s=3)", "'windo_s'", "window_s"),
    "measure_nothing": ("slm_measure", "()", "'concurrency'", "concurrency, repeats"),
    "measure_text": ("slm_measure", "('4')", "'4'", "concurrency=64"),
    "measure_window": ("slm_measure", "(4, window_s='3s')", "window_s='3s'", "window_s=10"),
    "measure_endless": ("slm_measure", "(4, window_s=float('inf'))", "window_s=inf", "window_s=10"),
    "measure_nan": ("slm_measure", "(4, settle_lifetimes=float('nan'))", "settle_lifetimes=nan", "=10"),
    "measure_true": ("slm_measure", "(True)", "True", "concurrency=64"),
    "measure_ramp": ("slm_measure", "(4, ramp_up='brust')", "ramp_up='brust'", "staggered or burst"),
    "measure_repeats": ("slm_measure", "(4, repeats='2')", "repeats='2'", "repeats=3"),
    "measure_never": ("slm_measure", "(4, repeats=0)", "repeats=0", "repeats=3"),
    "sweep_text": ("slm_sweep", "('1,2,4')", "concurrency='1,2,4'", "concurrency=[1, 2, 4]"),
    "sweep_empty": ("slm_sweep", "([])", "concurrency=[]", "concurrency=[1, 2, 4]"),
    "sweep_number": ("slm_sweep", "(4)", "concurrency=4", "concurrency=[1, 2, 4]"),
    "sweep_repeat": ("slm_sweep", "([1, 2], repeat=3)", "'repeat'", "repeats"),
    "job_half": ("slm_job", "(500 / 2)", "250.0", "requests=1024"),
    "job_request": ("slm_job", "(request=4)", "'request'", "requests"),
    "job_lengths": ("slm_job", "(4, lengths=512)", "lengths=512", "lengths=(512, 64)"),
    "replicas_typo": ("slm_replicas", "(2, shareing='mps')", "'shareing'", "sharing"),
    "replicas_measure": ("slm_replicas", "(2).measure(concurency=4)", "'concurency'", "concurrency"),
    "advice_word": ("slm_advice", "(tpot='2x@32')", "'tpot'", "slo_itl, efficiency, model"),
}
FIGURES = {  # attributes that are not there, and what is named in their place
    "figure_near": ("slm_measure", "(4).ttft_p95", "'ttft_p95'", "ttft_p95_s or ttft_p99_s or ttft_p90_s"),
    "figure_far": ("slm_sweep", "([1, 2]).watts", "'watts'", "gains, "),
}
OWN = """
    import pytest
    from dataclasses import replace

    pytestmark = pytest.mark.slm(model="opt-125m")

    def test_nonsense(slm_measure): "text".nonsense

    def test_read_once(slm_sweep): assert len(slm_sweep(n for n in (1, 2)).points) == 2

    def test_order(slm_sweep, slm_session):
        slm_sweep([16, 8], repeats=1)
        assert [m.load.concurrency for m in slm_session.results.measurements()][-2:] == [8, 16]

    class TestOwnSpecification:
        @pytest.fixture
        def slm_spec(self, slm_spec): return replace(slm_spec, max_model_len=2048)

        @pytest.mark.slm(max_model_len=20)
        def test_longer(self, slm_measure): assert slm_measure(4).valid
"""


@pytest.fixture(scope="module")
def ran(runs):
    calls = {**CALLS, **FIGURES}.items()
    body = "".join(f"\n    def test_{name}({own}): {own}{call}\n" for name, (own, call, *_) in calls)
    return runs(OWN + body, *FEW)


def told(ran, name):
    """What the failing test of this name prints."""
    return re.split(r"\n_{3,} ", ran.out.split(f" test_{name} ___", 1)[1])[0]


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_word_of_a_call_is_named_with_the_right_one(ran, name):
    *_, fact, right = CALLS[name]
    [problem] = re.findall(r"(?m)^BadUsage: .*\n  try: .*", told(ran, name))
    problem, hint = problem.split("\n")
    assert fact in problem and right in hint and "plugin/" not in told(ran, name), "no line of ours"


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_that_there_are_are_named_where_one_is_not(ran, name):
    *_, fact, right = FIGURES[name]
    [problem] = [line for line in told(ran, name).splitlines() if line.startswith("E ")]
    assert fact in problem and right in problem and "plugin/" not in told(ran, name)


def test_an_attribute_of_somebody_elses_value_is_left_alone(ran):
    assert "'nonsense'" in told(ran, "nonsense") and "it has" not in told(ran, "nonsense")


def test_what_is_right_passes(ran):
    """Loads that are read once, their order, and a specification that is overridden, which is believed."""
    assert ran.counts == {"passed": 3, "failed": len(CALLS) + len(FIGURES) + 1}


def test_the_nearest_words_come_first_and_all_where_none_is_near():
    assert nearest("modle", ["model", "seed"]) == "model" and nearest("x", ["model", "seed"]) == "model, seed"


@pytest.mark.parametrize(
    ("marker", "fixture", "facts"),
    [
        ('model="opt-125m", max_model_len=20', "slm_measure", "test_it 24 20"),
        ('model="opt-125m", lengths=(3000, 200)', "slm_sweep", "test_it opt-125m 3200 2048"),
        ('points=["opt-125m"]', "slm_point", "'opt-125m' points=["),
        ('models="opt-125m", claim="throughput-plateau"', "slm_claim", "models='opt-125m'"),
    ],
    ids=["context", "lengths", "points", "models"],
)
def test_a_marker_that_cannot_be_carried_out_ends_the_run_before_it_begins(runs: InnerRuns, marker, fixture, facts):
    ran = runs(f"import pytest\n@pytest.mark.slm({marker})\ndef test_it({fixture}): pass\n", *FEW)
    assert ran.ret == pytest.ExitCode.USAGE_ERROR and "Traceback" not in ran.err
    assert all(fact in ran.err for fact in facts.split())
