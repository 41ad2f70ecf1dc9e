"""--slm-kv-cache-dtype: keys and values in fewer bits, so that more requests fit."""

from inside import usage_error

from pytest_slmserve.engines.launch.vllm_arguments import engine_arguments
from pytest_slmserve.schema.kv_cache import predicted_blocks

MODEL = ("--slm-models=qwen3-0.6b", "--slm-concurrency=1,2")


def test_twice_as_many_blocks_fit_in_fp8(sweep, archive):
    for options in (MODEL, (*MODEL, "--slm-kv-cache-dtype=fp8")):
        sweep(*options)
    plain, fp8 = (next(m for m in archive().measurements if bool(m.spec.extra) is asked) for asked in (False, True))
    assert engine_arguments(fp8.spec, "x")["kv_cache_dtype"] == "fp8"
    assert predicted_blocks(fp8.spec) == fp8.resolved.kv_blocks
    assert 2 * plain.resolved.kv_blocks <= fp8.resolved.kv_blocks <= 2 * plain.resolved.kv_blocks + 1


def test_other_types_are_refused(sweep):
    assert "auto or fp8 or fp8_e4m3" in usage_error(sweep(*MODEL, "--slm-kv-cache-dtype=int3"))
