"""What the sensors add to a run: points and claims of a marker, health, and the fixture that watches a block."""

from __future__ import annotations

import re
import threading

import pytest
from inside import SMALL, usage_error

from pytest_slmserve.options.read import read_options
from pytest_slmserve.plugin import SESSION
from pytest_slmserve.plugin.items import named_models
from pytest_slmserve.plugin.session_hooks import EXIT_INCONCLUSIVE
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.sensors import GPU_UTIL, POWER, SM_ACTIVE
from pytest_slmserve.telemetry.host import Reading
from pytest_slmserve.telemetry.sampler import Sampler

NAMED = """
    import pytest

    @pytest.mark.slm(claim="energy-per-token-grows-with-model", models=["opt-1.3b"], needs="gpu")
    def test_larger(slm_claim):
        assert slm_claim()

    @pytest.mark.slm(points=[("opt-1.3b", 256), ("opt-125m", 512)], needs="gpu")
    def test_named(slm_point):
        assert slm_point.measure()

    def test_point(slm_point):
        assert slm_point.measure()

    @pytest.mark.slm(claim="throughput-plateau")
    def test_plateau(slm_claim):
        assert slm_claim()
"""
TWO_MODELS = ("--slm-simulate", "--slm-models=opt-125m,opt-1.3b", "--slm-concurrency=64,256,512", "--slm-window=2")


@pytest.fixture
def named(pytester):
    pytester.makepyfile(NAMED)
    return lambda *args: pytester.runpytest_inprocess(*args, "-p", "no:cacheprovider")


def ran(result):
    """The items in the order in which they ran, by their names."""
    return re.findall(r"::(\S+) ", result.stdout.str())


# Points and models of a marker


def test_a_point_of_a_marker_and_of_a_sweep_is_measured_once(named, archive):
    result = named(*TWO_MODELS, "-v")
    result.assert_outcomes(passed=2 + 6 + 2 + 1)
    loads = [(m.spec.model, m.load.concurrency) for m in archive().measurements]
    assert sorted(loads) == sorted([(m, c) for m in ("opt-125m", "opt-1.3b") for c in (64, 256, 512)] * 2)


def test_claims_that_name_models_come_after_all_points(named):
    order = ran(named(*TWO_MODELS, "-v"))
    assert order[-1] == "test_larger[opt-1.3b]"
    engines = ["1.3b" in name for name in order[:-1]]
    assert sorted(engines, reverse=True) == engines, "each engine's items are together, in the order first met"


def test_points_and_claims_of_models_that_were_not_chosen_are_left_out(named):
    result = named(*SMALL, "-v", "-rs")
    assert [name for name in ran(result) if "test_named" in name] == ["test_named[opt-125m-512]"]
    result.assert_outcomes(passed=7, skipped=1)
    result.stdout.fnmatch_lines(["*none of its models is measured in this run*"])
    assert result.ret == pytest.ExitCode.OK, "the claim about opt-1.3b is no question of this run"


def test_a_marker_of_which_no_point_is_left_is_skipped(named):
    result = named("--slm-simulate", "--slm-models=opt-350m", "--slm-concurrency=64,256,512", "--slm-window=2")
    result.assert_outcomes(passed=4, skipped=2)


def test_a_point_that_does_not_fit_is_skipped_with_its_reason(pytester):
    pytester.makepyfile(NAMED.replace('("opt-1.3b", 256)', '("opt-1.3b", 100000)'))
    result = pytester.runpytest_inprocess("--slm-simulate", "-rs", "-k", "named", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*the KV cache holds * requests of 768 tokens"])


def test_an_unknown_model_in_a_marker_is_wrong_usage(pytester):
    pytester.makepyfile(NAMED.replace("opt-1.3b", "gpt-5"))
    assert "unknown model 'gpt-5'" in usage_error(pytester.runpytest_inprocess("--slm-simulate"))


def test_a_plan_counts_a_point_once_and_leaves_out_what_is_skipped(named):
    text = named(*SMALL, "--slm-plan").stdout.str()
    seconds = [int(found) for found in re.findall(r"\((\d+) s\)", text)]
    assert re.search(r"end: 7 items", text) and "test_larger" not in text and seconds
    gpu = named("--slm-gpu", "--slm-models=opt-125m", "--slm-concurrency=256,512", "--slm-plan").stdout.str()
    first, again = re.findall(r"\[opt-125m-512\] \((\d+) s\)", gpu)
    assert int(first) > 0 == int(again)


def test_requests_of_a_marker_may_have_their_own_lengths_and_starts(pytester, archive):
    pytester.makepyfile(
        """
        import pytest

        SHORT = pytest.mark.slm(points=[("opt-125m", n) for n in (1, 8, 64)], lengths=(64, 128), ramp_up="burst")

        @SHORT
        def test_named(slm_point):
            assert slm_point.measure()

        def test_point(slm_point):
            assert slm_point.measure()

        @pytest.mark.slm(
            claim="decode-stays-memory-bound", models=["opt-125m"], lengths=(64, 128), ramp_up="burst"
        )
        def test_claim(slm_claim):
            verdict = slm_claim()
            assert verdict and verdict.n == 6

        @pytest.mark.slm(model="opt-125m", lengths=(16, 32), ramp_up="burst")
        def test_own(sharegpt, slm_measure):
            assert (sharegpt.mean_prompt_tokens, sharegpt.mean_output_tokens) == (16, 32)
            assert slm_measure(8).valid
        """
    )
    result = pytester.runpytest_inprocess(
        "--slm-simulate", "--slm-models=opt-125m", "--slm-concurrency=8,64", "-p", "no:cacheprovider"
    )
    result.assert_outcomes(passed=3 + 2 + 1 + 1)
    seen = {(m.workload.mean_prompt_tokens, m.workload.mean_output_tokens) for m in archive().measurements}
    assert seen == {(64, 128), (512, 256), (16, 32)}
    starts = {(m.workload.mean_output_tokens, m.load.ramp_up) for m in archive().measurements}
    assert starts == {(128, "burst"), (256, "staggered"), (32, "burst")}
    assert len(archive().measurements) == 2 * (3 + 2 + 1)


def test_a_claim_reads_the_engine_of_the_options_not_of_another_test(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.slm(model="opt-350m", max_num_seqs=4)
        def test_mine(slm_measure):
            assert slm_measure(2).valid

        @pytest.mark.slm(points=[("opt-350m", n) for n in (1, 8, 64)])
        def test_named(slm_point):
            assert slm_point.measure()

        @pytest.mark.slm(claim="kv-blocks-as-predicted", models=["opt-350m"])
        def test_claim(slm_claim):
            verdict = slm_claim()
            assert verdict and verdict.n == 6
        """
    )
    pytester.runpytest_inprocess("--slm-simulate", "-p", "no:cacheprovider").assert_outcomes(passed=5)


# Words of a marker


@pytest.mark.parametrize(
    ("words", "test", "problem"),
    [
        ("model='opt-125m', pionts=[]", "slm_engine", "has no pionts"),
        ("claim='throughput-plateau', modles=['opt-125m']", "slm_claim", "has no modles"),
        (
            "points=[('opt-125m', 8)], max_num_seqs=8",
            "slm_point",
            "slm(max_num_seqs=...): this test runs for all models",
        ),
        ("model='opt-125m'", "slm_gate", "slm(model=...): this test runs for all models"),
        ("points=[('opt-125m', 8)], needs='tpu'", "slm_point", "needs='tpu'"),
        ("points=[('opt-125m', 8)], ramp_up='late'", "slm_point", "ramp_up='late'"),
        ("claim='flying', models=['opt-125m']", "slm_claim", "unknown claim 'flying'"),
    ],
)
def test_a_marker_that_says_nothing_is_refused(pytester, words, test, problem):
    pytester.makepyfile(f"import pytest\n@pytest.mark.slm({words})\ndef test_it({test}): pass")
    assert problem in usage_error(pytester.runpytest_inprocess("--slm-simulate"))


@pytest.mark.parametrize(
    ("fixture", "body", "name"),
    [
        ("slm_gate", "slm_gate()", "slm_gate"),
        ("slm_claim", "slm_claim()", "slm_claim"),
        ("slm_sweep", "if True: slm_sweep(concurrency=[1, 2]).pareto_plateau()", "pareto_plateau"),
    ],
)
def test_a_verdict_that_nothing_asserts_is_refused(pytester, fixture, body, name):
    test = "import pytest\n@pytest.mark.slm({})\ndef test_it({}):\n    {}\n"
    words = "claim='throughput-plateau', models=['opt-125m']" if fixture == "slm_claim" else ""
    options = ("--slm-simulate", "--slm-gate") if fixture == "slm_gate" else ("--slm-simulate", "--slm-strict")
    pytester.makepyfile(test.format(words, fixture, body))
    text = usage_error(pytester.runpytest_inprocess(*options))
    assert f"{name}() gives a verdict, and nothing asserts it" in text and f"assert {name}()" in text


class AsIf:
    """Changes the session before anything is collected."""

    def __init__(self, **facts):
        self.facts = facts

    def pytest_sessionstart(self, session):
        slm = session.config.stash[SESSION]
        for name, value in self.facts.items():
            for owner in (slm, slm.planner, slm.devices):
                if hasattr(owner, name):
                    setattr(owner, name, value)


def test_what_needs_a_gpu_is_left_out_on_a_cpu(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.slm(points=[("opt-125m", 512), ("opt-13b", 16)], needs="gpu")
        def test_named(slm_point): assert False

        @pytest.mark.slm(claim="gpu-util-saturates-first", needs="gpu")
        def test_claim(slm_claim): assert False

        @pytest.mark.slm(gpus=2)
        def test_wide(slm_engine): assert False

        def test_else(slm_session): assert slm_session.platform == "cpu"
        """
    )
    result = pytester.runpytest_inprocess("--slm-simulate", "-p", "no:cacheprovider", plugins=[AsIf(platform="cpu")])
    assert result.ret == 0
    result.assert_outcomes(passed=1, deselected=4)
    text = result.stdout.str()
    assert text.count("slmserve leaves out 4 tests: they run only on a GPU (--slm-gpu)") == 1 and "KV cache" not in text


def test_what_needs_a_gpu_is_simulated(pytester):
    pytester.makepyfile(
        "import pytest\n@pytest.mark.slm(points=[('opt-125m', 8)], needs='gpu')\n"
        "def test_it(slm_point): assert slm_point.measure()"
    )
    pytester.runpytest_inprocess("--slm-simulate", "-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_models_of_a_claim_that_can_be_judged_here(tmp_path):
    def left(claim, *named, **given):
        session = Session.from_options(read_options({"simulate": True, **given}, {}, {}), tmp_path)
        return named_models(session, claim, named)

    larger, table = "energy-per-token-grows-with-model", "table-1-batch-fits"
    assert left(larger, "opt-1.3b", "opt-13b") == ["opt-1.3b", "opt-13b"]
    assert left(larger, "opt-1.3b", "opt-2.7b", models="opt-125m,facebook/opt-1.3b") == ["opt-1.3b"]
    assert left(larger, "opt-1.3b", models="opt-1.3b") == [], "there is nothing to compare it with"
    assert left(table, "opt-1.3b", "opt-13b", models="opt-125m") == ["opt-1.3b", "opt-13b"], "arithmetic"
    assert left("decode-stays-memory-bound", "opt-13b", gpu_memory_utilization="0.1") == [], "its weights do not fit"
    assert left(None, "opt-13b", "opt-125m", models="opt-125m") == ["opt-125m"]


# Health


def with_sensors(sweep, *args):
    return sweep("--slm-engine-arg=noise=0.001", *args)


def repeats(archive, concurrency):
    return [m for m in archive().measurements if m.load.concurrency == concurrency]


def test_a_degraded_point_is_measured_once_more_shown_and_no_failure(sweep, archive):
    result = with_sensors(sweep, "--slm-engine-arg=lost_from=256")
    result.assert_outcomes(passed=6)
    assert result.ret == pytest.ExitCode.OK
    assert [len(repeats(archive, c)) for c in (1, 16, 64, 128, 256)] == [2, 2, 2, 2, 3]
    result.stdout.fnmatch_lines(["*256 *degraded", "*degraded: concurrency 256: a sensor was lost: simulated failed*"])


def test_a_noisy_point_is_not_measured_again_and_is_shown(sweep, archive):
    result = with_sensors(sweep, "--slm-engine-arg=slow_clock_from=256")
    result.assert_outcomes(passed=6)
    assert result.ret == pytest.ExitCode.OK
    assert [len(repeats(archive, c)) for c in (1, 16, 64, 128, 256)] == [2, 2, 2, 2, 2]
    result.stdout.fnmatch_lines(["*256 *noisy", "noisy, kept: concurrency 256: the SM clock fell to 1600 MHz*"])
    assert "left out" not in result.stdout.str()


def test_an_invalid_point_is_measured_once_more_and_fails(sweep, archive):
    result = with_sensors(sweep, "--slm-engine-arg=hot_from=256")
    assert [len(repeats(archive, c)) for c in (128, 256)] == [2, 3]
    result.stdout.fnmatch_lines(
        ["*0 of 3 measurements are valid, 2 are wanted: hardware thermal slowdown*", "*INVALID: concurrency 256*"]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=4, failed=1)
    assert "1 inconclusive" in result.stdout.str()


SENSED = """
    import pytest

    def test_point(slm_point):
        assert slm_point.measure()

    @pytest.mark.slm(claim="occupancy-below-a-saturated-kernel", needs="gpu")
    def test_underused(slm_claim):
        assert slm_claim()

    @pytest.mark.slm(claim="energy-per-token-falls-with-load", needs="gpu")
    def test_cheaper(slm_claim):
        assert slm_claim()
"""


@pytest.mark.parametrize(
    ("argument", "ret"),
    [("sensors=true", 0), ("sensors=false", EXIT_INCONCLUSIVE), ("sm_occupancy=0.8", 0)],
)
def test_claims_on_sensors_are_judged_by_what_they_say(pytester, argument, ret):
    pytester.makepyfile(SENSED)
    result = pytester.runpytest_inprocess(*SMALL, f"--slm-engine-arg={argument}", "-p", "no:cacheprovider")
    assert result.ret == ret
    if ret == EXIT_INCONCLUSIVE:
        result.stdout.fnmatch_lines(
            ["*inconclusive*no sensor gave the profiling counters*", "*inconclusive*no sensor gave power or energy*"]
        )


def test_the_header_says_who_is_asked(sweep):
    sweep("--slm-plan").stdout.fnmatch_lines(["slmserve: *; sensors: simulated; *"])


# The fixture


class Planted:
    """A sensor that counts."""

    name = "planted"

    def __init__(self):
        self.asked = 0

    def read(self, now_s):
        self.asked += 1
        return Reading({GPU_UTIL: 1.0, SM_ACTIVE: 0.25, POWER: 300.0}, 0.1 if self.asked > 1 else None)

    def close(self):
        pass


@pytest.fixture
def watch(pytester):
    """Runs the body of a test that watches, on a session with a sampler: `watch("...")`."""
    source = Planted()

    def run(body, *args, sampler=True):
        pytester.makepyfile(f"import time\nimport pytest\n{body}")
        planted = AsIf(sampler=Sampler([source], 0.1)) if sampler else AsIf()
        return pytester.runpytest_inprocess("--slm-simulate", "-p", "no:cacheprovider", *args, plugins=[planted])

    return run


@pytest.mark.parametrize("name", ["slm_gpu_sampler", "dcgm"])
def test_a_block_is_watched(watch, name):
    result = watch(
        f"""
def test_it({name}):
    with {name}() as watched:
        time.sleep(0.45)
    assert watched.figures.sm_active == 0.25 and watched.figures.gpu_util == 1.0
    assert 0.4 < watched.seen.window_s[1] < 2 and watched.telemetry.sources == ("planted",)
    assert all(-0.2 < at < 2 for at in watched.telemetry.time_s)
    assert watched.health.state in ("ok", "degraded", "invalid")
"""
    )
    result.assert_outcomes(passed=1)


def test_figures_before_the_end_of_the_block_are_wrong_usage(watch):
    result = watch(
        """
def test_it(slm_gpu_sampler):
    with slm_gpu_sampler() as watched:
        watched.figures
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*BadUsage: the block that is watched has not ended*", "*after the with statement*"])


def test_an_exception_in_the_block_ends_the_watch(watch):
    result = watch(
        """
import threading

def test_it(slm_gpu_sampler):
    with pytest.raises(ZeroDivisionError), slm_gpu_sampler():
        1 / 0
    assert "slm-telemetry" not in {thread.name for thread in threading.enumerate()}
    with slm_gpu_sampler() as watched:
        time.sleep(0.25)
    assert watched.figures.sm_active == 0.25
"""
    )
    result.assert_outcomes(passed=1)
    assert "slm-telemetry" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("name", ["slm_gpu_sampler", "dcgm"])
def test_without_sensors_there_is_nothing_to_watch(watch, name):
    result = watch(f"def test_it({name}): pass", "--slm-telemetry=off", sampler=False)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*BadUsage: no sensors are read in this run*", "*--slm-telemetry off*"])


def test_beside_a_simulated_engine_imagined_sensors_are_watched(watch):
    result = watch(
        """
def test_it(slm_gpu_sampler):
    with slm_gpu_sampler() as watched:
        time.sleep(0.6)
    assert watched.telemetry.sources == ("simulated",)
    assert watched.figures.power_w == pytest.approx(350.0, rel=1e-3)
    assert watched.health.state == "ok", watched.health.reasons
""",
        sampler=False,
    )
    result.assert_outcomes(passed=1)


def test_without_a_mode_a_watching_test_is_skipped(pytester):
    pytester.makepyfile("def test_it(dcgm): pass")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(skipped=1)
