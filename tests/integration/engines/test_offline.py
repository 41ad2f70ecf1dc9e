"""Our interface to vLLM: what it hands over, what it makes of the answer, and how its engine ends."""

import os
import shutil
import signal
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from interfaces import LateWindow, small_workload, stand_in
from processes import gone, group

from pytest_slmserve.engines import child, server
from pytest_slmserve.engines.child import resolved_from, run_from
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.server import OfflineEngine, engine_arguments, engine_environment
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.records import Failures
from pytest_slmserve.schema.specs import GIB, ClosedLoop, EngineSpec, OpenLoop

CUDA = EngineSpec("opt-1.3b", kv_cache_bytes=3 * GIB, gpu_memory_utilization=0.5)
CPU = EngineSpec("opt-tiny", platform="cpu", kv_cache_bytes=2 * GIB, dtype="bfloat16")
LONG = ClosedLoop(4, window_s=30.0)


def test_every_limit_is_handed_over():
    arguments = engine_arguments(CUDA, "/model")
    assert arguments["model"] == "/model"
    assert arguments["load_format"] == "dummy"
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "seed", "dtype")
    assert {name: arguments[name] for name in names} == {name: getattr(CUDA, name) for name in names}
    assert arguments["enable_prefix_caching"] is False
    assert arguments["disable_log_stats"] is False  # without it there is no step trace


def test_memory_is_set_by_argument_on_cuda_and_by_environment_on_the_cpu():
    cuda, cpu = engine_arguments(CUDA, "m"), engine_arguments(CPU, "m")
    assert (cuda["gpu_memory_utilization"], cuda["kv_cache_memory_bytes"]) == (0.5, 3 * GIB)
    assert not {"gpu_memory_utilization", "kv_cache_memory_bytes"} & set(cpu)
    assert engine_environment(CPU, {})["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "VLLM_CPU_KVCACHE_SPACE" not in engine_environment(CUDA, {})


def test_what_the_specification_adds_comes_last():
    spec = replace(
        CUDA, load_format="auto", extra=(("max_num_seqs", 7), ("block_size", 32)), env=(("HF_HOME", "/here"),)
    )
    arguments = engine_arguments(spec, "m")
    assert (arguments["load_format"], arguments["max_num_seqs"], arguments["block_size"]) == ("auto", 7, 32)
    assert engine_environment(spec, {"HF_HOME": "/there"})["HF_HOME"] == "/here"


def test_dummy_weights_need_no_network_and_real_ones_may():
    assert engine_environment(CUDA, {})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in engine_environment(replace(CUDA, load_format="auto"), {})


def test_the_workers_folder_comes_first_on_the_path_and_the_rest_is_kept():
    spec = replace(CUDA, env=(("PYTHONPATH", "/theirs"),))
    path = engine_environment(spec, {"PYTHONPATH": "/inherited", "HOME": "/me"})["PYTHONPATH"]
    assert path.split(os.pathsep) == [str(server.WORKER.parent), "/theirs"]
    assert engine_environment(CUDA, {"PYTHONPATH": "/inherited"})["PYTHONPATH"].endswith(":/inherited")
    assert engine_environment(CUDA, {})["PYTHONPATH"] == str(server.WORKER.parent)


def test_what_is_inherited_is_not_changed():
    inherited = {"HOME": "/me", "PYTHONPATH": "/p"}
    assert engine_environment(CUDA, inherited)["HOME"] == "/me"
    assert inherited == {"HOME": "/me", "PYTHONPATH": "/p"}


@pytest.mark.parametrize(
    ("gpu", "gpus", "visible", "wanted"),
    [
        (0, 1, None, None),
        (1, 1, None, "1"),
        (0, 1, "", ""),
        (0, 1, "3", "3"),
        (0, 1, "2,3", "2"),
        (1, 1, "2,3", "3"),
        (0, 1, "GPU-aa,GPU-bb", "GPU-aa"),
        (1, 1, "GPU-aa,GPU-bb", "GPU-bb"),
        (0, 2, None, "0,1"),
        (2, 2, None, "2,3"),
        (0, 2, "3, 5,7", "3,5"),
        (1, 2, "3,5,7", "5,7"),
    ],
)
def test_an_engine_sees_its_gpus_of_those_visible_by_the_order_of_the_bus(gpu, gpus, visible, wanted):
    spec = replace(CUDA, gpu=gpu, tensor_parallel_size=gpus)
    seen = engine_environment(spec, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert seen.get("CUDA_VISIBLE_DEVICES") == wanted
    assert seen.get("CUDA_DEVICE_ORDER") == ("PCI_BUS_ID" if gpu or gpus > 1 else None)
    assert engine_arguments(spec, "m").get("tensor_parallel_size", 1) == gpus


def test_engines_of_several_gpus_use_no_multicast_unless_the_records_say_so():
    spec, inherited = replace(CUDA, tensor_parallel_size=2), {"NCCL_NVLS_ENABLE": "1", "HOME": "/me"}
    names = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "VLLM_ALLREDUCE_USE_SYMM_MEM")
    seen = engine_environment(spec, inherited)
    assert [seen[name] for name in names] == ["0", "1", "0"], "whatever was inherited"
    assert engine_environment(CUDA, inherited)["NCCL_NVLS_ENABLE"] == "1", "an engine of one GPU reduces nothing"
    asked = replace(spec, env=(("NCCL_NVLS_ENABLE", "1"),))
    assert engine_environment(asked, {})["NCCL_NVLS_ENABLE"] == "1" and asked.key != spec.key


def test_each_process_of_an_engine_on_the_cpu_has_cores_of_its_own(monkeypatch):
    monkeypatch.setattr(server, "own_cores", lambda: {0, 1, 2, 3, 8})
    spec = replace(CPU, tensor_parallel_size=2)
    assert engine_environment(spec, {})["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert engine_environment(spec, {}, (4, 5))["VLLM_CPU_OMP_THREADS_BIND"] == "4|5"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in engine_environment(CPU, {})


def test_the_weights_of_an_engine_are_those_of_all_its_parts():
    parts = [{"weight_bytes": 5, "attention_backend": "FLASH"}, {"weight_bytes": 6, "attention_backend": "FLASH"}]
    seen = resolved_from({"event": "ready", "kv_blocks": 9, "parts": parts}, 1.0)
    assert (seen.weight_bytes, seen.attention_backend, seen.kv_blocks) == (11, "FLASH", 9)
    assert resolved_from({"parts": [*parts, {"weight_bytes": None}]}, 1.0).weight_bytes is None
    assert resolved_from({"kv_blocks": 9}, 1.0).weight_bytes is None


def test_visible_gpus_do_not_matter_to_the_cpu():
    assert engine_environment(CPU, {"CUDA_VISIBLE_DEVICES": "2,3"})["CUDA_VISIBLE_DEVICES"] == "2,3"


MESSAGE = {
    "event": "done",
    "began": 100.0,
    "window": [101.0, 103.5],
    "samples": [  # in the order they ended
        [1, 100.2, 100.3, 100.4, 102.0, 16, 8, True, None],
        [0, 100.1, 100.15, 100.2, 102.5, 16, 8, True, None],
        [2, 103.0, None, None, None, 16, 0, False, None],
    ],
    "steps": [[100.4, 2, 0, 2, 32, 0.1, 0], [102.0, 1, 0, 2, 0, None, 0]],
    "failed": [[3, 100.5, None, 100.75, "ValueError"]],
    "first_failure": "ValueError: no",
}


def test_an_answer_becomes_a_run_on_its_own_clock_in_the_order_sent():
    run = run_from([MESSAGE])
    assert run.samples.request == (0, 1, 2)
    assert run.samples.sent_s == (0.1, 0.2, 3.0)
    assert run.samples.admitted_s == (0.15, 0.3, None)
    assert run.samples.last_token_s == (2.5, 2.0, None)
    assert run.samples.finished == (True, True, False)
    assert (run.began_s, run.window_s) == (100.0, (1.0, 3.5))
    assert (run.steps.time_s, run.steps.new_tokens, run.steps.kv_usage) == ((0.4, 2.0), (2, 2), (0.1, None))
    assert (run.failures, run.first_failure) == (1, "ValueError: no")
    assert run.failed == Failures((3,), (0.5,), (0.75,), ("ValueError",))


def test_an_answer_with_nothing_in_it_is_a_run_too():
    run = run_from([{**MESSAGE, "samples": [], "steps": []}])
    assert (len(run.samples), len(run.steps)) == (0, 0)


def started(**extra):
    return OfflineEngine(stand_in(**extra)).start()


@pytest.fixture
def start():
    """Starts the stand-in with faults; its group is gone at the end, and its log too."""
    engines = []

    def begin(**extra):
        engines.append(started(**extra))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.child.keep_log = False
        engine.child.kill()
        assert gone(engine.child.process.pid)


@pytest.fixture
def failure(monkeypatch, tmp_path):
    """The error of an engine that does not start, and no group left of it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def provoke(**extra):
        made = []
        popen = server.Child.__init__

        def watched(self, *args, **kwargs):
            popen(self, *args, **kwargs)
            made.append(self.process.pid)

        monkeypatch.setattr(server.Child, "__init__", watched)
        with pytest.raises(EngineFailed) as caught:
            started(**extra)
        assert gone(*made)
        return caught.value

    return provoke


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        ({"fault": "raise"}, "did not start: ValueError: max_model_len is larger than\nthe model allows"),
        ({"fault": "raise"}, "  | INFO the stand-in starts"),
        ({"fault": "exit"}, "ended (exit status 3)"),
        ({"fault": "exit"}, "  | FATAL out of memory"),
        ({"block_sise": 3}, "unexpected keyword argument 'block_sise'"),
    ],
)
def test_a_start_that_fails_tells_the_cause_and_the_end_of_the_log(failure, planted, told):
    assert told in failure(**planted).problem


def test_an_engine_sees_no_secret_and_no_file_of_a_workflow(start, monkeypatch):
    """By the kernel's own account of its whole process group."""
    secrets = {"SLM_ENDPOINT_KEY", "GITHUB_OUTPUT", "GITHUB_ENV", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"}
    for name in (*secrets, "HF_HOME", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "fault-9f8e7d6c")
    engine = start()
    for pid in group(engine.child.process.pid):
        seen = dict(e.split("=", 1) for e in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in e)
        assert not secrets & seen.keys()
        assert {name for name, value in seen.items() if "9f8e7d6c" in value} == {"HF_HOME", "OMP_WAIT_POLICY"}
        assert seen["PATH"] == os.environ["PATH"] and seen["HF_HUB_OFFLINE"] == "1"


def test_modules_of_the_working_folder_are_not_imported(start, monkeypatch, tmp_path):
    for name in ("json", "uuid", "socket", "dataclasses", "vllm"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(9)", "utf-8")
    monkeypatch.chdir(tmp_path)
    engine = start()
    assert engine.ready


def test_a_start_that_takes_too_long_is_a_failure(failure, monkeypatch):
    monkeypatch.setattr(server, "START_S", 1.5)
    assert "was silent for 2 s while starting" in failure(fault="sleep").problem


def test_an_interpreter_without_vllm_is_a_failure_with_its_cause(failure, monkeypatch):
    monkeypatch.setattr("interfaces.STAND_IN", Path("/nowhere"))
    monkeypatch.setattr(sys, "executable", bare_python())
    assert "did not start: ModuleNotFoundError: No module named 'vllm'" in failure().problem


def bare_python():
    """The interpreter below this environment; it has no vLLM unless this one is no environment."""
    found = Path(sys.executable).resolve()
    if sys.prefix == sys.base_prefix:
        pytest.skip("needs a virtual environment around this interpreter")
    return str(found)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("exit", r"ended .exit status 5.(.|\n)*the stand-in starts"),
        ("dead", "died while it served .EngineDeadError: EngineCore encountered an issue"),
    ],
)
def test_an_engine_that_dies_in_the_middle_is_a_failure_not_a_measurement(start, fault, told):
    engine = start(fault=fault, fault_at=6)
    with pytest.raises(EngineFailed, match=told):
        engine.run(small_workload(), LONG)
    assert not engine.ready


def test_requests_that_fail_are_counted_and_the_engine_goes_on(start):
    engine = start(fault="refuse", fault_at=3)
    run = engine.run(small_workload(), ClosedLoop(2, requests=10))
    assert (run.failures, run.first_failure) == (3, "ValueError: refused, as planted")
    assert len(run.failed) == 3 and set(run.failed.kind) == {"ValueError"} and run.failed.scheduled_s is None
    assert all(0 <= sent <= ended for sent, ended in zip(run.failed.sent_s, run.failed.ended_s))
    assert list(run.samples.finished) == [True] * 7
    assert engine.run(small_workload(), ClosedLoop(2, requests=10)).failures == 0


def test_a_run_begins_at_a_time_of_the_hosts_clock_which_the_sensors_read_too(start):
    before = time.monotonic()
    run = start().run(small_workload(), OpenLoop(requests=4))
    assert before < run.began_s < run.began_s + run.window_s[1] <= time.monotonic()
    assert run.telemetry is None, "the engine's process reads no sensors"


def test_one_that_gives_its_load_up_before_it_hears_of_its_window_goes_on(start):
    engine, late = start(fault="unanswered", fault_at=60), LateWindow()
    for _ in range(2):
        assert engine.run(small_workload(), ClosedLoop(4, window_s=0.1), barrier=late).failures >= 5


def test_a_hidden_end_of_a_request_is_a_failure_too(start):
    run = start(fault="unanswered", fault_at=1).run(small_workload(), ClosedLoop(1, requests=3))
    assert (run.failures, run.first_failure) == (3, "RuntimeError: the engine ended a request without an answer")


def test_silence_in_the_middle_is_a_failure(start, monkeypatch):
    engine = start()
    monkeypatch.setattr(child, "SILENCE_S", 1.0)
    os.kill(engine.child.process.pid, signal.SIGSTOP)
    with pytest.raises(EngineFailed, match="was silent for 1 s while measuring"):
        engine.run(small_workload(), LONG)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 3  # it is not asked politely


def test_a_killed_worker_is_a_failure_and_leaves_nothing(start):
    engine = start()
    worker = engine.child.process.pid
    assert len(group(worker)) == 3  # the worker, its guardian, and the core

    def kill(progress):
        os.kill(worker, signal.SIGKILL)

    with pytest.raises(EngineFailed, match="was killed by SIGKILL"):
        engine.run(small_workload(), LONG, kill)
    assert gone(worker)


def test_after_a_death_the_pool_starts_another():
    with closing(Pool()) as pool:
        first = pool.engine(stand_in(fault="dead", fault_at=40))
        with pytest.raises(EngineFailed):
            first.run(small_workload(), LONG)
        second = pool.engine(first.spec)
        assert second.launch != first.launch
        assert second.run(small_workload(), OpenLoop(requests=4)).failures == 0
        assert gone(first.child.process.pid)
        shutil.rmtree(first.child.folder)


def test_an_interrupt_in_the_middle_does_not_wait_for_the_window(start):
    engine = start()

    def interrupt(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(small_workload(), LONG, interrupt)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 3
    assert gone(engine.child.process.pid)


def test_closing_is_polite_leaves_nothing_and_may_be_repeated(start):
    engine = start()
    engine.run(small_workload(), OpenLoop(requests=3))
    folder = engine.child.folder
    engine.close()
    engine.close()
    assert engine.child.process.returncode == 0
    assert gone(engine.child.process.pid)
    assert not folder.exists()


def test_prompts_are_handed_over_once_for_each_workload(start, monkeypatch):
    engine, sent = start(), []
    send = engine.child.send
    monkeypatch.setattr(engine.child, "send", lambda **message: (sent.append(message["op"]), send(**message)))
    one, other = small_workload(4), small_workload(5)
    for workload in (one, one, other, one):
        engine.run(workload, OpenLoop(requests=2))
    assert sent == ["load", "run", "run", "load", "run", "load", "run"]


def test_a_release_without_a_profiler_is_said_and_goes_on_serving(start):
    engine = start()
    workload = small_workload()
    assert engine.profile(workload, ClosedLoop(4, window_s=0.2)) == "this vLLM has no profiler by that name"
    assert engine.run(workload, ClosedLoop(4, window_s=0.2)).failures == 0
