"""--slm-quantization: weights in fewer bits, made at the load or loaded so."""

from inside import usage_error

from pytest_slmserve.engines.launch.vllm_arguments import engine_arguments
from pytest_slmserve.schema.catalog import CATALOGUE

MODEL = ("--slm-models=qwen3-0.6b", "--slm-concurrency=1,2")


def test_it_is_an_argument_of_the_engine_and_leaves_room_for_the_kv_cache(sweep, archive):
    for options in (MODEL, (*MODEL, "--slm-quantization=fp8")):
        sweep(*options)
    plain, fp8 = (
        next(m.spec for m in archive().measurements if bool(m.spec.extra) is asked) for asked in (False, True)
    )
    assert engine_arguments(fp8, "x")["quantization"] == "fp8" and "quantization" not in engine_arguments(plain, "x")
    shape = CATALOGUE["qwen3-0.6b"]
    assert fp8.kv_cache_bytes - plain.kv_cache_bytes == shape.parameters - shape.embeddings


def test_a_method_that_needs_other_weights_is_one_sentence(sweep):
    assert "awq weights are loaded, not made" in usage_error(sweep(*MODEL, "--slm-quantization=awq"))
