"""--slm-budget is how long a model's sweep goes on until its claims are decided."""

from collections import Counter

from inside import usage_error

# The last doubling gains 5 %, on a host whose speed drifts.
NOISY = (
    "--slm-input-len=8",
    "--slm-output-len=64",
    "--slm-engine-arg=t_inf=14000",
    "--slm-engine-arg=b_half=14",
    "--slm-engine-arg=host_noise=ou:0.02:1",
)


def repeats(archive):
    return Counter(m.load.concurrency for m in archive().measurements)


def test_the_loads_of_an_inconclusive_claim_are_measured_again_until_it_is_decided(sweep, archive):
    result = sweep(*NOISY, "--slm-budget=600")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*passes*plateau from *"])
    counted = repeats(archive)
    assert counted[1] == counted[16] == counted[64] == 2, "on which it does not depend"
    assert counted[128] == counted[256] > 2


def test_rounds_go_over_all_loads(sweep, archive):
    sweep(*NOISY, "--slm-budget=0")
    assert [m.load.concurrency for m in archive().measurements] == [1, 16, 64, 128, 256] * 2


def test_without_a_budget_it_is_inconclusive_and_what_would_decide_is_told(sweep, archive):
    result = sweep(*NOISY, "--slm-budget=0", "--slm-report=summary")
    assert result.ret == 10 and set(repeats(archive).values()) == {2}
    text = " ".join(result.stdout.str().split())
    would = "s more at 128 and 256 in flight, with an engine start, would decide: --slm-simulate --slm-resume"
    assert would in text or "too near to its bound" in text


def test_a_resumed_sweep_goes_on_at_the_inconclusive_loads(sweep, archive):
    sweep(*NOISY, "--slm-budget=0")
    result = sweep(*NOISY, "--slm-budget=600", "--slm-resume")
    assert result.ret == 0
    counted = repeats(archive)
    assert counted[1] == counted[64] == 2 < counted[256]


def test_a_quiet_host_is_through_after_two_rounds(sweep, archive):
    sweep(*NOISY[:-1])
    assert set(repeats(archive).values()) == {2}


def test_where_no_claim_is_judged_nothing_is_measured_again(sweep, archive):
    sweep(*NOISY, "--slm-budget=600", "-k", "test_point")
    assert set(repeats(archive).values()) == {2}


def test_what_is_no_number_of_seconds_is_refused(sweep):
    assert "is not a whole number" in usage_error(sweep("--slm-budget=long"))
