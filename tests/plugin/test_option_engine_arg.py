"""--slm-engine-arg hands a further argument to vLLM's engine (or plants behaviour in the simulated one)."""

import pytest
from inside import usage_error

from pytest_slmserve.engines.launch.vllm_arguments import engine_arguments
from pytest_slmserve.options.table import argument
from pytest_slmserve.schema.specs import EngineSpec


def test_it_reaches_the_engine(sweep, archive):
    sweep("--slm-engine-arg=t_inf=20000", "--slm-engine-arg=b_half=10").assert_outcomes(passed=6)
    last = archive().measurements[-1]
    assert last.spec.extra == (("t_inf", 20000), ("b_half", 10))


def test_values_are_json_or_else_text():
    spec = EngineSpec("opt-125m", extra=(("block_size", 32), ("kv_cache_dtype", "fp8")))
    arguments = engine_arguments(spec, "/model")
    assert (arguments["block_size"], arguments["kv_cache_dtype"]) == (32, "fp8")


def test_lists_and_objects_are_carried_by_a_hashable_specification():
    extra = tuple(argument(text) for text in ("sizes=[1,[2,3]]", 'config={"level": 3}', "name=plain"))
    spec = EngineSpec("opt-125m", extra=extra)
    assert hash(spec) == hash(EngineSpec("opt-125m", extra=extra))
    arguments = engine_arguments(spec, "/model")
    assert arguments["sizes"] == (1, (2, 3))
    assert arguments["config"] == {"level": 3}
    assert arguments["name"] == "plain"


def test_an_argument_the_simulated_engine_does_not_know_fails_the_points(sweep):
    result = sweep("--slm-engine-arg=t_half=3")
    result.stdout.fnmatch_lines(["*the simulated engine has no such argument*t_half*"])
    assert "Traceback" not in result.stdout.str()


def test_a_planted_preemption_makes_points_invalid_and_the_claim_inconclusive(sweep):
    result = sweep("--slm-engine-arg=preempt_from=100")
    assert result.ret == 1
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(
        ["*preemptions in the window: the KV cache is too small*", "*inconclusive*invalid at 128, 256*"]
    )


def test_a_planted_death_fails_its_points_only_and_leaves_the_rest(sweep, archive):
    result = sweep("--slm-engine-arg=die_at=128")
    result.stdout.fnmatch_lines(["*the simulated engine died at 128 in flight*"])
    assert [m.load.concurrency for m in archive().measurements] == [1, 16, 64, 1, 16, 64]


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline-parallel-size", "data_parallel_size"])
def test_gpus_are_not_asked_for_past_locks_and_sensors(sweep, name):
    text = usage_error(sweep(f"--slm-engine-arg={name}=2"))
    assert (
        f"--slm-engine-arg: '{name}=2' is not for the engine alone: --slm-tensor-parallel-size 2 gives it more" in text
    )
    assert "--slm-candidate-engine-arg: " in usage_error(sweep("--slm-gate", f"--slm-candidate-engine-arg={name}=2"))


def test_what_is_no_assignment_is_refused(sweep):
    text = usage_error(sweep("--slm-engine-arg=eager"))
    assert "--slm-engine-arg: 'eager' is not NAME=VALUE\n  try: --slm-engine-arg=max_num_seqs=256" in text
