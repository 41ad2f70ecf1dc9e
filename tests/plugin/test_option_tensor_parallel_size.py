"""--slm-tensor-parallel-size is how many GPUs an engine takes; tests of tensor parallelism measure each number."""

import pytest
from inside import ONE, SWEEP, usage_error

from pytest_slmserve.run import session
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.telemetry.host_probe import Gpu, Host


@pytest.fixture
def point(pytester):
    pytester.makepyfile(SWEEP)
    return lambda *args: pytester.runpytest_inprocess(*ONE, "--slm-concurrency=4", "-k", "point", *args)


def test_the_first_number_is_that_of_every_engine(point, archive):
    point("--slm-tensor-parallel-size=2,4").assert_outcomes(passed=1)
    first, again = archive().measurements
    assert first.spec.tensor_parallel_size == again.spec.tensor_parallel_size == 2
    assert len(first.run.telemetry.gpus) == 2, "each GPU is read"


def test_one_gpu_is_the_default(point, archive):
    point().assert_outcomes(passed=1)
    assert {m.spec.tensor_parallel_size for m in archive().measurements} == {1}


def test_a_marker_chooses_for_its_own_engine(pytester, archive):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.slm(tensor_parallel_size=4)
        def test_it(slm_measure, slm_spec):
            assert slm_measure(concurrency=4, repeats=1).valid
    """)
    pytester.runpytest_inprocess(*ONE).assert_outcomes(passed=1)
    (made,) = archive().measurements
    whole = made.spec.kv_cache_bytes * 4
    assert made.spec.tensor_parallel_size == 4 and made.resolved.kv_blocks == whole // (16 * 36_864)


def test_more_gpus_than_there_are_is_wrong_usage_before_anything_starts(point):
    assert "16 GPUs are asked for, and 8 GPUs are visible" in usage_error(point("--slm-tensor-parallel-size=1,16"))


def test_a_model_that_cannot_be_divided_is_wrong_usage(point):
    text = usage_error(point("--slm-tensor-parallel-size=5"))
    assert "opt-125m has 12 heads, which 5 GPUs cannot divide evenly" in text
    assert "try: --slm-tensor-parallel-size" in text


def test_gpus_of_different_kinds_are_not_compared(point, monkeypatch):
    gpus = tuple(Gpu(f"GPU-{i}", name, 80 << 30, "1", "12.8") for i, name in enumerate(["NVIDIA L4", "NVIDIA H200"]))
    monkeypatch.setattr(session, "probe", lambda *_: Host(Environment(platform="simulated"), "simulated", gpus=gpus))
    text = usage_error(point("--slm-tensor-parallel-size=2"))
    assert "GPUs of different kinds are visible (NVIDIA L4, 80 GiB; NVIDIA H200, 80 GiB)" in text
    point().assert_outcomes(passed=1)


def test_other_words_are_refused(point):
    assert "'2,1' is not positive whole numbers in ascending order" in usage_error(
        point("--slm-tensor-parallel-size=2,1")
    )
