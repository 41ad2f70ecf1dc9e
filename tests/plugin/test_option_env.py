"""--slm-env adds variables to the engine's environment, and to what identifies a measurement."""

from inside import usage_error

from pytest_slmserve.engines.launch.vllm_arguments import engine_environment
from pytest_slmserve.schema.specs import EngineSpec


def test_variables_reach_the_specification(sweep, archive):
    sweep("--slm-env=VLLM_LOGGING_LEVEL=ERROR", "--slm-env=OMP_NUM_THREADS=1", "--slm-concurrency=1,2")
    assert archive().measurements[0].spec.env == (("VLLM_LOGGING_LEVEL", "ERROR"), ("OMP_NUM_THREADS", "1"))


def test_they_go_over_ours_and_leave_the_worker_importable():
    env = engine_environment(EngineSpec("opt-125m", env=(("PYTHONPATH", "/site"), ("HF_HUB_OFFLINE", "0"))), {})
    assert env["HF_HUB_OFFLINE"] == "0"
    folder, site = env["PYTHONPATH"].split(":")
    assert folder.endswith("worker")
    assert site == "/site"


def test_a_variable_changes_the_key_but_a_path_to_packages_does_not():
    plain = EngineSpec("opt-125m")
    assert EngineSpec("opt-125m", env=(("PYTHONPATH", "/site"),)).key == plain.key
    assert EngineSpec("opt-125m", env=(("VLLM_ATTENTION_BACKEND", "TRITON_ATTN"),)).key != plain.key


def test_what_is_no_assignment_is_refused(sweep):
    assert "is not NAME=VALUE" in usage_error(sweep("--slm-env=NAME"))


def test_gpus_are_chosen_before_pytest(sweep):
    text = usage_error(sweep("--slm-env=CUDA_VISIBLE_DEVICES=1"))
    assert "'CUDA_VISIBLE_DEVICES=...' is not for one engine: export CUDA_VISIBLE_DEVICES before pytest" in text
