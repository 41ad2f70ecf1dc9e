"""Jobs in tests: a marker names them, a fixture serves them; what is known is not served again."""

from __future__ import annotations

import pytest
from inside import ONE, usage_error

FILE = """
    import pytest

    JOBS = {
        "gpu": [
            {"model": "opt-125m", "requests": 300, "lengths": (32, tokens), "rate": rate}
            for tokens in (8, 64)
            for rate in (float("inf"), 5)
        ]
    }

    @pytest.mark.slm(jobs=JOBS)
    def test_job(slm_job_point): assert slm_job_point.measure()

    @pytest.mark.slm(claim="longer-outputs-fewer-requests", jobs=JOBS)
    def test_longer(slm_claim): assert slm_claim()

    @pytest.mark.slm(claim="throughput-follows-arrivals", jobs=JOBS)
    def test_follows(slm_claim): assert slm_claim()
"""


@pytest.fixture
def jobs(pytester):
    pytester.makepyfile(FILE)
    return lambda *args: pytester.runpytest_inprocess(*ONE, *args)


def test_jobs_are_items_and_claims_read_them(jobs, archive):
    result = jobs("-v")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(
        ["*test_job?opt-125m-64-5-per-s? PASSED*", "Jobs on simulated: SIMULATED, NOT MEASURED"]
    )
    result.stdout.fnmatch_lines(["*passes*opt-125m*all at once, requests of 64 output tokens are served*"])
    kept = archive().measurements
    assert [m.load.title.partition(",")[2] for m in kept[:3]] == [" all at once", " all at once", " 5/s, seed 0"]
    assert len(kept) == 8


def test_resumed_jobs_are_not_served_again_and_a_report_says_the_same(jobs, archive, capsys):
    from pytest_slmserve.__main__ import main

    jobs().assert_outcomes(passed=6)
    jobs("--slm-resume").assert_outcomes(passed=6)
    assert len(archive().measurements) == 8
    capsys.readouterr()
    assert main(["report", ".slm/records.jsonl"]) == 0
    text = capsys.readouterr().out
    assert "Jobs on simulated" in text and "longer-outputs-fewer-requests" in text and "no sweep" not in text


def test_a_plan_has_their_prices_and_their_engine_once(jobs):
    text = jobs("--slm-plan").stdout.str()
    assert text.count("start opt-125m") == 1 and "test_job[opt-125m-8-300-at-once] (0 s)" in text
    assert "test_longer[opt-125m] (measures nothing)" in text


def test_jobs_of_models_that_were_not_chosen_are_left_out(jobs):
    result = jobs("--slm-models=opt-350m")
    result.assert_outcomes(skipped=3)


def test_one_that_does_not_fit_is_skipped_with_the_reason(pytester):
    pytester.makepyfile(FILE.replace("(32, tokens)", "(2000, tokens)"))
    result = pytester.runpytest_inprocess(*ONE, "-rs", "-k", "test_job")
    result.stdout.fnmatch_lines(["*requests of 2064 tokens do not fit its 2048 positions*"])


@pytest.mark.parametrize(
    ("marker", "told"),
    [
        ('jobs={"gpu": [{"model": "opt-125m", "request": 3}]}', "a job has no request"),
        ('jobs=[{"model": "opt-125m"}]', "is no job: a model and a number of requests"),
        ('jobs={"gpus": []}', "jobs for 'gpus', which is no mode"),
        ('points=[("opt-125m", 4)]', "slm_job_point without jobs"),
    ],
)
def test_a_marker_that_says_nothing_is_refused(pytester, marker, told):
    pytester.makepyfile(f"import pytest\n@pytest.mark.slm({marker})\ndef test_it(slm_job_point): pass")
    assert told in usage_error(pytester.runpytest_inprocess(*ONE))


@pytest.mark.parametrize("jobs", ["[JOB]", '{"gpu": [JOB]}'])
def test_a_list_of_jobs_is_for_any_mode(pytester, jobs):
    pytester.makepyfile(f"""
        import pytest

        JOB = {{"model": "opt-125m", "requests": 5, "lengths": (16, 8)}}

        @pytest.mark.slm(jobs={jobs})
        def test_it(slm_job_point): assert slm_job_point.measure()
    """)
    pytester.runpytest_inprocess(*ONE).assert_outcomes(passed=1)


def test_a_job_in_a_test_of_ones_own(pytester):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.slm(model="opt-125m")
        def test_mine(slm_job):
            slow, fast = slm_job(20, rate=2, lengths=(16, 8)), slm_job(20, lengths=(16, 8))
            assert slow.valid and slow.requests_per_s < fast.requests_per_s
            assert slm_job(20, lengths=(16, 8)).records == fast.records, "what is known is not served again"
            uneven = slm_job(20, rate=2, lengths=(16, 8), burstiness=0.25)
            assert uneven.load.burstiness == 0.25 and uneven.records != slow.records
    """)
    pytester.runpytest_inprocess(*ONE).assert_outcomes(passed=1)


KV = """
    import pytest

    JOBS = {
        "gpu": [
            {"model": "opt-125m", "requests": 64, "lengths": (32, 32), "kv_requests": held} for held in (4, 64, None)
        ]
    }

    @pytest.mark.slm(jobs=JOBS)
    def test_job(slm_job_point): assert slm_job_point.measure()

    @pytest.mark.slm(claim="throughput-grows-with-kv-blocks", jobs=JOBS)
    def test_grows(slm_claim): assert slm_claim()
"""


def test_each_size_of_a_kv_cache_is_an_engine(pytester, archive):
    pytester.makepyfile(KV)
    result = pytester.runpytest_inprocess(*ONE, "--slm-engine-arg=b_half=10")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["*passes*opt-125m*257 blocks, which hold all 64 requests, serve*what 17 do*"])
    assert {m.resolved.kv_blocks for m in archive().measurements} > {17, 257}


def test_a_kv_cache_that_there_is_no_memory_for_is_skipped(pytester):
    pytester.makepyfile(KV.replace("(4, 64, None)", "(10**6,)").replace("(32, 32)", "(1024, 1024)"))
    result = pytester.runpytest_inprocess(*ONE, "-rs", "-k", "test_job")
    result.stdout.fnmatch_lines(["*the KV cache holds * requests of 2048 tokens*"])


def test_a_job_that_two_tests_ask_for_is_paid_once(pytester):
    pytester.makepyfile(test_a=FILE, test_b=FILE)
    text = pytester.runpytest_inprocess(*ONE, "--slm-plan", "-k", "test_job").stdout.str()
    assert text.count("test_job[opt-125m-8-300-at-once] (0 s)") == 2 and text.count("start opt-125m") == 1


def test_a_job_may_bound_its_batch_and_its_gpu_memory(pytester, archive):
    pytester.makepyfile("""
        import pytest

        JOBS = [
            {"model": "opt-2.7b", "requests": 200, "lengths": (512, 16), "max_num_seqs": n, "gpu_memory": "40GiB"}
            for n in (16, 64)
        ]

        @pytest.mark.slm(jobs=JOBS)
        def test_job(slm_job_point): assert slm_job_point.measure()
    """)
    result = pytester.runpytest_inprocess("--slm-simulate", "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_job?opt-2.7b-16-200-at-once-most-64-in-40GiB? PASSED*"])
    first = archive().measurements[0].spec
    assert first.max_num_seqs == 16 and first.kv_cache_bytes < 36 << 30


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ("much", "'much' is no memory of a GPU"),
        ("1000GiB", "1000.0 GiB are wanted"),
        ("5GiB", "no room for a KV cache"),
    ],
)
def test_gpu_memory_that_says_nothing_or_is_not_there(pytester, memory, words):
    pytester.makepyfile(f"""
        import pytest

        @pytest.mark.slm(jobs=[{{"model": "opt-2.7b", "requests": 20, "lengths": (512, 16), "gpu_memory": "{memory}"}}])
        def test_job(slm_job_point): assert slm_job_point.measure()
    """)
    result = pytester.runpytest_inprocess("--slm-simulate", "-rs")
    assert words in result.stdout.str() + result.stderr.str()
