"""Options of the engine: its interpreter, limits, weights, memory and further arguments."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from inside import ONE, SWEEP, usage_error
from interfaces import problems_of, somebodys_server, url_of

from pytest_slmserve.analysis.metrics.validity import cache_hit_share
from pytest_slmserve.engines.server import engine_arguments, engine_environment, model_for
from pytest_slmserve.options.read import read_options
from pytest_slmserve.options.table import argument
from pytest_slmserve.plan.planner import engine_spec
from pytest_slmserve.run import session
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import predicted_blocks
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB, EngineSpec
from pytest_slmserve.telemetry import host
from pytest_slmserve.telemetry.host import Gpu, Host

# interface


def test_by_default_it_is_the_engine_itself(sweep, archive):
    sweep("--slm-concurrency=4").assert_outcomes(passed=1)
    assert {m.spec.interface for m in archive().measurements} == {"engine"}


# load_format


def test_it_is_recorded(sweep, archive):
    sweep("--slm-load-format=auto", "--slm-concurrency=1,2")
    assert {m.spec.load_format for m in archive().measurements} == {"auto"}


def test_dummy_weights_need_a_config_and_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = EngineSpec("opt-125m")
    folder = model_for(spec)
    assert json.loads(Path(folder, "config.json").read_text())["hidden_size"] == 768
    assert engine_arguments(spec, folder)["load_format"] == "dummy"
    assert engine_environment(spec, {})["HF_HUB_OFFLINE"] == "1"


def test_real_weights_come_by_the_hubs_name():
    spec = EngineSpec("opt-125m", load_format="auto")
    assert model_for(spec) == "facebook/opt-125m"
    assert engine_arguments(spec, "facebook/opt-125m")["load_format"] == "auto"
    assert "HF_HUB_OFFLINE" not in engine_environment(spec, {})


def test_a_licence_that_restricts_the_use_of_real_weights_is_noted(sweep):
    said = "the licence of its weights restricts their use: Llama 3.2 Community License"
    options = ("--slm-models=llama-3.2-1b", "--slm-concurrency=1,2")
    assert said in sweep("--slm-load-format=auto", *options).stdout.str()
    assert said not in sweep(*options).stdout.str()


# quantization


MODEL = ("--slm-models=qwen3-0.6b", "--slm-concurrency=1,2")


def test_it_is_an_argument_of_the_engine_and_leaves_room_for_the_kv_cache(sweep, archive):
    for options in (MODEL, (*MODEL, "--slm-quantization=fp8")):
        sweep(*options)
    plain, fp8 = (
        next(m.spec for m in archive().measurements if bool(m.spec.extra) is asked) for asked in (False, True)
    )
    assert engine_arguments(fp8, "x")["quantization"] == "fp8" and "quantization" not in engine_arguments(plain, "x")
    shape = CATALOGUE["qwen3-0.6b"]
    assert fp8.kv_cache_bytes - plain.kv_cache_bytes == shape.parameters - shape.lm_head


def test_a_method_that_needs_other_weights_is_one_sentence(sweep):
    assert "awq weights are loaded, not made" in usage_error(sweep(*MODEL, "--slm-quantization=awq"))


# kv_cache_dtype


def test_twice_as_many_blocks_fit_in_fp8(sweep, archive):
    for options in (MODEL, (*MODEL, "--slm-kv-cache-dtype=fp8")):
        sweep(*options)
    plain, fp8 = (next(m for m in archive().measurements if bool(m.spec.extra) is asked) for asked in (False, True))
    assert engine_arguments(fp8.spec, "x")["kv_cache_dtype"] == "fp8"
    assert predicted_blocks(fp8.spec) == fp8.resolved.kv_blocks
    assert 2 * plain.resolved.kv_blocks <= fp8.resolved.kv_blocks <= 2 * plain.resolved.kv_blocks + 1


# gpu_memory, gpu_memory_utilization


def largest(pytester, *words):
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess("--slm-simulate", "--slm-models=opt-2.7b", "--slm-plan", *words)
    assert result.ret == 0
    lines = [line for line in result.outlines if "test_point[" in line]
    return int(lines[-1].split("opt-2.7b-")[1].split("]")[0])


@pytest.mark.parametrize(
    ("words", "load"),
    [((), 256), (("--slm-gpu-memory=40GiB",), 64), (("--slm-gpu-memory-utilization=0.2",), 64)],
)
def test_less_memory_cuts_the_sweep(pytester, words, load):
    assert largest(pytester, *words) == load


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--slm-gpu-memory=200GiB", "the GPU has 140.0 GiB of memory, and 200.0 GiB are wanted"),
        ("--slm-gpu-memory-utilization=0.01", "no room for a KV cache"),
        ("--slm-interface=server", "the simulated engine has no server"),
    ],
)
def test_what_there_is_no_room_or_no_server_for_is_refused(sweep, word, said):
    assert said in usage_error(sweep(word))


def test_what_a_gpu_keeps_for_itself_is_not_missed():
    def kv_cache_bytes(*given: str) -> int:
        there = Environment(gpu_memory_bytes=int(39.4 * GIB))
        return engine_spec(
            read_options({"gpu_memory": given[0]} if given else {}, {}, {}), "cuda", "opt-125m", there
        ).kv_cache_bytes

    assert kv_cache_bytes("40GiB") == kv_cache_bytes()
    with pytest.raises(BadUsage, match="39.4 GiB"):
        kv_cache_bytes("48GiB")


# tensor_parallel_size


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


# python


def test_what_is_no_interpreter_is_refused(pytester):
    pytester.makepyfile(SWEEP)
    text = usage_error(pytester.runpytest_inprocess("--slm-cpu", "--slm-python=/no/such/python"))
    assert "/no/such/python is not a Python interpreter that runs" in text


def test_an_interpreter_is_asked_for_what_it_holds():
    facts = host.interpreter(sys.executable, {})
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(facts) == {"python", "vllm", "torch", "executable"}


def test_an_interpreter_without_vllm_is_named(tmp_path):
    with pytest.raises(host.BadUsage, match=r"/opt/old/python has no vLLM"):
        host.check_vllm("cuda", None, "/opt/old/python")


@pytest.fixture
def two_projects(pytester):
    """A project with a test, the current folder, and the interpreter of another one with settings of its own."""
    mine, other = pytester.mkdir("mine"), pytester.mkdir("other")
    (mine / "test_mine.py").write_text("def test_it(slm_measure): assert slm_measure(4).valid", "utf-8")
    (other / "pytest.ini").write_text("[pytest]\nslm_repeats = 3\n", "utf-8")
    (other / "python").symlink_to(sys.executable)
    os.chdir(mine)
    return mine, other


def test_a_path_by_which_pytest_takes_another_project_for_the_root_is_warned_of(pytester, two_projects):
    _, other = two_projects
    result = pytester.runpytest_inprocess("--slm-simulate", "--slm-python", f"{other}/python")
    result.assert_outcomes(passed=1, warnings=1)
    sentence = f"slmserve: --slm-python {other}/python made {other} the root of this run, with its settings: type "
    result.stdout.fnmatch_lines([f"*PytestConfigWarning: {sentence}--slm-python={other}/python"])


def test_where_that_project_makes_warnings_errors_it_is_one_of_usage(pytester, two_projects):
    _, other = two_projects
    (other / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", "utf-8")
    text = usage_error(pytester.runpytest_inprocess("--slm-simulate", "--slm-python", f"{other}/python"))
    assert f"type --slm-python={other}/python" in text and "INTERNALERROR" not in text


@pytest.mark.parametrize("ini", [False, True])
def test_a_path_after_the_sign_is_not_warned_of_nor_one_in_the_project(pytester, two_projects, ini):
    mine, other = two_projects
    if ini:
        (mine / "pytest.ini").touch()
    (mine / "python").symlink_to(sys.executable)
    for words in ([f"--slm-python={other}/python"], ["--slm-python", "python"], ["--slm-python", f"{mine}/python"]):
        pytester.runpytest_inprocess("--slm-simulate", *words).assert_outcomes(passed=1, warnings=0)


# max_num_seqs


def test_the_most_sequences_of_a_step_are_those_that_were_asked_for(sweep, archive):
    sweep("--slm-max-num-seqs=32", "--slm-concurrency=1,16", "-k", "point").assert_outcomes(passed=2)
    assert {m.spec.max_num_seqs for m in archive().measurements} == {32}


# env


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


# engine_arg


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
        ["*preemptions in the window: the KV cache is too small*", "*inconclusive*invalid at concurrency 128, 256*"]
    )


def test_a_planted_death_fails_its_points_only_and_leaves_the_rest(sweep, archive):
    result = sweep("--slm-engine-arg=die_at=128")
    result.stdout.fnmatch_lines(["*the simulated engine died at concurrency 128*"])
    assert [m.load.concurrency for m in archive().measurements] == [1, 16, 64, 1, 16, 64]


# allow_prefix_cache


POINT = (
    "--slm-models=slm",
    "--slm-concurrency=4",
    "--slm-input-len=16",
    "--slm-output-len=8",
    "--slm-window=0.6",
    "-p",
    "no:cacheprovider",
)


def test_it_is_part_of_what_is_asked_for(sweep, archive):
    sweep("--slm-concurrency=4").assert_outcomes(passed=1)
    sweep("--slm-concurrency=4", "--override-ini=slm_allow_prefix_cache=1", "--slm-resume").assert_outcomes(passed=1)
    without, *_, allowed = archive().measurements
    assert (without.spec.allow_prefix_cache, allowed.spec.allow_prefix_cache) == (False, True)
    assert without.key != allowed.key and len(archive().measurements) == 4


@pytest.mark.parametrize("allowed", [False, True])
def test_an_endpoint_that_caches_gets_prompts_of_their_own_unless_it_is_given(pytester, monkeypatch, archive, allowed):
    pytester.makepyfile(SWEEP)
    with somebodys_server(enable_prefix_caching=True, enable_prompt_tokens_details=True) as server:
        monkeypatch.setenv("SLM_ENDPOINT_KEY", server._key)
        further = ["--override-ini=slm_allow_prefix_cache=1"] if allowed else []
        pytester.runpytest_inprocess(f"--slm-endpoint={url_of(server)}", *POINT, *further, "-k", "point")
    found = archive().measurements
    assert problems_of(found) == []
    last = cache_hit_share(found[-1].run).share  # the first has filled the cache, where it may be used
    assert last > 0.3 if allowed else last == 0


def test_an_engine_of_ours_that_caches_is_found_out(pytester, archive, stand_in_here):
    """On the command line nothing warms the cache but what was measured before."""
    pytester.makepyfile(SWEEP)
    words = (
        "--slm-cpu",
        "--slm-models=opt-tiny",
        "--slm-concurrency=4",
        "--slm-input-len=16",
        "--slm-output-len=8",
        "--slm-window=0.6",
    )
    caches = "--slm-engine-arg=enable_prefix_caching=true"
    result = pytester.runpytest_inprocess(*words, stand_in_here, caches, "-k", "point", "-p", "no:cacheprovider")
    assert [text for text in problems_of(archive().measurements) if "from a prefix cache" in text]
    result.assert_outcomes(failed=1, deselected=1)
