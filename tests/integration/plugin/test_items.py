"""Items in a run: one for each point, job and claim, each engine started once, each case measured once; the same again
where it is resumed; and what a run without a mode, or with other models, makes of them."""

from __future__ import annotations

import re

import pytest
from inner_runs import QUIET
from inside import outcomes, usage_error

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read
from pytest_slmserve.options.table import OPTS
from pytest_slmserve.plugin import SESSION
from pytest_slmserve.schema.errors import DoesNotFit

MIXED = """
    import pytest

    two = [pytest.param(n, marks=pytest.mark.slm(max_num_seqs=n)) for n in (8, 16)]

    @pytest.mark.slm(model="opt-1.3b")
    def test_first(slm_measure): assert slm_measure(2).valid

    @pytest.mark.slm(model="opt-125m", max_num_seqs=4)
    @pytest.mark.parametrize("limit", two)
    def test_limited(slm_engine, limit):
        assert (slm_engine.spec.model, slm_engine.spec.max_num_seqs) == ("opt-125m", limit)

    @pytest.mark.slm(model="opt-1.3b")
    def test_again(slm_engine, sharegpt): assert slm_engine.spec.model == "opt-1.3b" and len(sharegpt.requests) == 1024

    def test_sweep(slm_point): assert slm_point.measure()

    POINTS = [("opt-125m", 16), ("opt-350m", 4), ("opt-1.3b", 4)]

    @pytest.mark.slm(points=POINTS)
    def test_named(slm_point): assert slm_point.measure()

    @pytest.mark.slm(points=[("opt-1.3b", 4)])
    def test_of_others(slm_point): assert False

    SHORT = dict(lengths=(16, 32), ramp_up="burst")

    @pytest.mark.slm(points=[("opt-125m", n) for n in (1, 4, 8)], **SHORT)
    def test_short(slm_point): assert slm_point.measure()

    @pytest.mark.slm(claim="decode-stays-memory-bound", models=["opt-125m"], **SHORT)
    def test_claim(slm_claim):
        verdict = slm_claim()
        assert verdict.n == 6

    @pytest.mark.slm(model="opt-125m", lengths=(8, 32), ramp_up="burst")
    def test_own(sharegpt, slm_measure):
        assert (sharegpt.mean_prompt_tokens, sharegpt.mean_output_tokens) == (8, 32)
        assert slm_measure(8).valid

    @pytest.mark.slm(model="opt-350m", max_num_seqs=4)
    def test_narrow(slm_measure): assert slm_measure(2).valid

    @pytest.mark.slm(claim="kv-blocks-as-predicted", models=["opt-350m"])
    def test_of_the_options_engine(slm_claim):
        verdict = slm_claim()
        assert verdict and verdict.n == 4
"""
JOBS = """
    import pytest

    JOBS = {
        "gpu": [
            {"model": "opt-125m", "requests": 100, "lengths": (32, tokens), "rate": rate}
            for tokens in (8, 64)
            for rate in (float("inf"), 5)
        ]
    }
    HELD = [{"model": "opt-125m", "requests": 64, "lengths": (32, 32), "kv_requests": n} for n in (4, 64, None)]
    BOUND = [
        {"model": "opt-350m", "requests": 64, "lengths": (64, 16), "max_num_seqs": n, "gpu_memory": "40GiB"}
        for n in (16, 64)
    ]

    @pytest.mark.slm(jobs=JOBS)
    def test_job(slm_job_point): assert slm_job_point.measure()

    @pytest.mark.slm(jobs=JOBS)
    def test_job_again(slm_job_point): assert slm_job_point.measure()

    @pytest.mark.slm(claim="longer-outputs-fewer-requests", jobs=JOBS)
    def test_longer(slm_claim): assert slm_claim()

    @pytest.mark.slm(claim="throughput-follows-arrivals", jobs=JOBS)
    def test_follows(slm_claim): assert slm_claim()

    @pytest.mark.slm(jobs=HELD)
    def test_held(slm_job_point): assert slm_job_point.measure()

    @pytest.mark.slm(claim="throughput-grows-with-kv-blocks", jobs=HELD)
    def test_grows(slm_claim): assert slm_claim()

    @pytest.mark.slm(jobs=BOUND)
    def test_bound(slm_job_point): assert slm_job_point.measure()
"""
NO_FUNCTION = """
    import pytest

    def pytest_collect_file(parent, file_path):
        if file_path.suffix == ".txt":
            return OneItem.from_parent(parent, path=file_path)

    class OneItem(pytest.File):
        def collect(self):
            item = NoFunction.from_parent(self, name="checked")
            item.add_marker(pytest.mark.slm(model="opt-125m"))
            yield item

    class NoFunction(pytest.Item):
        def runtest(self): pass
        def reportinfo(self): return self.path, 0, self.name
"""
CHOSEN = ("--slm-models=opt-125m,opt-350m", "--slm-concurrency=4,16")
FEW = ("--slm-simulate", "--slm-window=1", "--slm-input-len=64", "--slm-output-len=32", "-v", "-rs", *QUIET)
FEW = (*FEW, "--slm-engine-arg=t_inf=4000", "--slm-engine-arg=b_half=16")
RECORDS = ".slm/records.jsonl"


class Starts:
    """Keeps what the session's pool has started."""

    def pytest_sessionfinish(self, session):
        self.specs = list(session.config.stash[SESSION].devices.pool.starts)


@pytest.fixture(scope="module")
def first(inner):
    """The run of all, and what it started."""
    inner.makeconftest(NO_FUNCTION)
    inner.maketxtfile("")
    inner.makepyfile(test_mixed=MIXED, test_jobs=JOBS)
    starts = Starts()
    result = inner.runpytest_inprocess(*FEW, *CHOSEN, ".", plugins=[starts])
    result.starts, result.measured = starts.specs, read(inner.path / RECORDS).measurements
    return result


@pytest.fixture(scope="module")
def again(inner, first):
    return inner.runpytest_inprocess(*FEW, *CHOSEN, ".", "--slm-resume")


def test_all_items_pass_in_an_order_that_starts_each_engine_once(first):
    assert [name for name, found in outcomes(first).items() if found != "PASSED"] == ["test_of_others[-]"]
    assert first.ret == 0 and len(first.starts) == len(set(first.starts))
    assert [spec.max_num_seqs for spec in first.starts if spec.model == "opt-1.3b"] == [1024]
    assert "checked PASSED" in first.stdout.str(), "an item without fixtures measures nothing"


def test_what_reads_comes_after_what_is_read(first):
    order = list(outcomes(first))
    assert order.index("test_claim[opt-125m]") > max(order.index(f"test_short[opt-125m-{n}]") for n in (1, 4, 8))
    assert set(order[-6:]) >= {"test_longer[opt-125m]", "test_follows[opt-125m]", "test_grows[opt-125m]"}


def test_each_case_is_measured_once_though_several_items_ask_for_it(first):
    loops = [
        (m.spec.model, m.load.concurrency)
        for m in first.measured
        if m.load.max_concurrency and m.workload.mean_prompt_tokens == 64
    ]
    planned = [(model, n) for model in ("opt-125m", "opt-350m") for n in (4, 16)]
    assert sorted(loops) == sorted([*planned, ("opt-1.3b", 2), ("opt-350m", 2)] * 2)
    jobs = [m for m in first.measured if not m.load.max_concurrency]
    assert len(jobs) == 2 * (4 + 3 + 2) and len({m.key for m in jobs}) == 9


def test_requests_of_a_marker_have_their_own_lengths_and_starts(first):
    seen = {(m.workload.mean_prompt_tokens, m.load.ramp_up) for m in first.measured if m.load.max_concurrency}
    assert seen == {(64, "staggered"), (16, "burst"), (8, "burst")}


def test_jobs_have_the_kv_cache_and_the_memory_that_they_name(first):
    assert {m.resolved.kv_blocks for m in first.measured if m.workload.mean_prompt_tokens == 32} > {17, 257}
    bound = [m.spec for m in first.measured if m.spec.model == "opt-350m" and not m.load.max_concurrency]
    assert {spec.max_num_seqs for spec in bound} == {16, 64}
    assert all(spec.kv_cache_bytes < 36 << 30 for spec in bound)
    assert "test_bound[opt-350m-16-64-at-once-most-64-in-40GiB]" in outcomes(first)


def test_items_of_models_that_were_not_chosen_are_skipped_or_told(first):
    first.stdout.fnmatch_lines(["*none of its models is measured in this run*"])
    assert "test_named[opt-1.3b-4]" not in outcomes(first)
    first.stdout.fnmatch_lines(["slmserve: 2 tests of opt-1.3b, as the marker has it:*"])


def test_resumed_nothing_is_measured_again_and_all_is_judged_as_it_was(first, again, inner):
    assert outcomes(again) == outcomes(first) and again.ret == 0
    assert len(read(inner.path / RECORDS).measurements) == len(first.measured)


def test_the_report_on_the_archive_says_what_the_run_said_of_jobs(first, inner, monkeypatch, capsys):
    monkeypatch.chdir(inner.path)
    main(["report", RECORDS])
    text = capsys.readouterr().out
    assert "Jobs on simulated" in text and "longer-outputs-fewer-requests" in text


def test_a_plan_has_each_price_and_each_engine_once(inner, first):
    tests = [f"test_jobs.py::test_{name}" for name in ("job", "job_again", "longer")]
    text = inner.runpytest_inprocess(*FEW, "--slm-plan", *CHOSEN, *tests).stdout.str()
    assert text.count("start opt-125m") == 1 and "test_longer[opt-125m] (measures nothing)" in text
    again = re.findall(r"test_job_again\[opt-125m-8-100-at-once\] \((.+)\)", text)
    assert again in (["0 s"], ["measures nothing"])


def test_without_a_mode_what_measures_is_skipped_or_where_one_must_be_an_error(inner, first, monkeypatch):
    result = inner.runpytest_inprocess("-rs", *QUIET, "test_mixed.py", "test_jobs.py")
    assert set(result.parseoutcomes()) == {"skipped"}
    result.stdout.fnmatch_lines(["SKIPPED*--slm-gpu, --slm-cpu, --slm-simulate or --slm-endpoint*"])
    monkeypatch.setenv("SLM_REQUIRE_GPU", "1")
    assert "SLM_REQUIRE_GPU=1" in usage_error(inner.runpytest_inprocess(*QUIET, "test_mixed.py"))


def test_what_needs_a_gpu_is_left_out_on_a_cpu_and_the_number_is_told_once(pytester):
    class OnACpu:
        def pytest_sessionstart(self, session):
            session.config.stash[SESSION].platform = session.config.stash[SESSION].planner.platform = "cpu"

    pytester.makepyfile("""
        import pytest

        @pytest.mark.slm(points=[("opt-125m", 512), ("opt-13b", 16)], needs="gpu")
        def test_named(slm_point): assert False

        @pytest.mark.slm(claim="gpu-util-saturates-first", needs="gpu")
        def test_claim(slm_claim): assert False

        @pytest.mark.slm(gpus=2)
        def test_wide(slm_engine): assert False

        def test_else(slm_session): assert slm_session.platform == "cpu"
    """)
    result = pytester.runpytest_inprocess("--slm-simulate", *QUIET, plugins=[OnACpu()])
    result.assert_outcomes(passed=1, deselected=4)
    text = result.stdout.str()
    assert result.ret == 0 and text.count("slmserve leaves out 4 tests") == 1 and "KV cache" not in text


def test_errors_of_markers_are_usage_errors_before_anything_runs(pytester):
    """That of a parameter, of a word, of a test whose verdict nothing asserts."""
    for words, fixture, body, fact in (
        ("points=64", "slm_point", "pass", "points=64"),
        ("modle='opt-125m'", "slm_engine", "pass", "modle"),
        ("claim='throughput-plateau'", "slm_claim", "slm_claim()", "assert slm_claim()"),
    ):
        pytester.makepyfile(f"import pytest\n@pytest.mark.slm({words})\ndef test_it({fixture}):\n    {body}")
        assert fact in usage_error(pytester.runpytest_inprocess("--slm-simulate", *QUIET))


def test_an_engine_that_turns_out_to_have_no_room_skips_the_point(pytester, monkeypatch):
    from pytest_slmserve.run.executor import Executor

    def refuses(self, case, *given):
        raise DoesNotFit("the engine says that it has no room", "less")

    monkeypatch.setattr(Executor, "measure_once", refuses)
    pytester.makepyfile("def test_it(slm_point): slm_point.measure()")
    result = pytester.runpytest_inprocess(*FEW, "--slm-models=opt-125m", "--slm-concurrency=4", "--slm-budget=0")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*it has no room"])


def test_a_long_run_says_how_long_before_it_begins_and_a_plan_begins_with_it(inner, first, monkeypatch):
    from pytest_slmserve.plugin import session_hooks

    def lengths(*args):
        lines = inner.runpytest_inprocess(*FEW, *CHOSEN, "-k", "test_sweep", *args).outlines
        return [line for line in lines if line.startswith("slmserve: ") and "engine start" in line], lines

    assert lengths()[0] == [], "a short run says nothing"
    monkeypatch.setattr(session_hooks, "LONG_S", 0.0)
    [line], _ = lengths()
    assert "2 engine starts, 2 models" in line and line.endswith("--slm-plan lists them")
    told, lines = lengths("--slm-plan")
    assert told == [] and any("2 engine starts" in line for line in lines)


def test_options_come_from_environment_and_ini_too_and_the_header_says_so(pytester, monkeypatch):
    pytester.makeini("[pytest]\nslm_repeats = 3\nslm_window = 9\n")
    pytester.makepyfile("def test_it(slm_point): pass")
    monkeypatch.setenv("SLM_REPEATS", "2")
    result = pytester.runpytest_inprocess(*FEW, "--slm-plan")
    result.stdout.fnmatch_lines(
        ["slmserve: simulated, *sensors: simulated; *window (command line), *repeats (environment)*"]
    )


def test_help_has_the_options_in_groups_in_few_words_with_their_defaults(pytester, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = pytester.runpytest_inprocess("--help").stdout.str()
    groups = re.findall(r"^slmserve: (.+):$", text, re.MULTILINE)
    assert groups == ["what to run", "load", "engine", "replicas", "gate", "telemetry", "records", "cluster"]
    assert all(opt.flag in text for opt in OPTS if not opt.ini_only) and "slm_gate_pairs" in text
    assert max(len(opt.help.split()) for opt in OPTS) <= 25
    assert "share of the GPU's memory that the engine may take; default: 0.9" in " ".join(text.split())


def test_pyargs_names_the_shipped_tests_wherever_they_are(pytester):
    module = "pytest_slmserve.benchmarks.test_gate"
    result = pytester.runpytest_inprocess("--pyargs", module, "--slm-simulate", "--slm-gate", "--slm-plan", *QUIET)
    result.stdout.fnmatch_lines(["*test_no_worse?opt-125m-throughput?*"])
