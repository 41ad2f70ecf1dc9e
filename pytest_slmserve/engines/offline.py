"""vLLM's asynchronous engine without HTTP: this door shows the GPU."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pytest_slmserve.engines.base import Gate, Outputs, Tell, check_fits, check_load, silent
from pytest_slmserve.engines.described import model_for
from pytest_slmserve.engines.process import Child, converse
from pytest_slmserve.engines.turn import START_S, Held, Turn
from pytest_slmserve.schema.catalog import shape_of
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.loads import Load
from pytest_slmserve.schema.records import Failures, Resolved, Run, Samples, Steps, known_fields
from pytest_slmserve.schema.specs import GIB, EngineSpec
from pytest_slmserve.schema.workloads import Workload

WORKER = Path(__file__).parent.parent / "worker" / "worker.py"
PATIENCE_S = 86_400  # of vLLM with its own core, which may wait for its turn; how long a start may take, we say
NOWHERE_ELSE: Mapping[str, str] = MappingProxyType({})
# Of an engine on several GPUs. NVLink's multicast needs a fabric manager that containers may not reach, and then an
# engine hangs in its first all-reduce; whoever has it says so with --slm-env, which the records then tell.
WITHOUT_MULTICAST: Mapping[str, str] = MappingProxyType(
    {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
)


def engine_arguments(spec: EngineSpec, model: str) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs for `spec`, with `model` a folder or a Hub name."""
    arguments: dict[str, Any] = {
        "model": model,
        "load_format": "dummy" if spec.weights == "dummy" else "auto",
        "skip_tokenizer_init": True,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "enforce_eager": spec.enforce_eager,
        "enable_prefix_caching": spec.prefix_caching,
        "seed": spec.seed,
        "worker_extension_cls": "slm_facts.Facts",
        "disable_log_stats": False,
    }
    if spec.backend == "cuda":
        arguments |= {"gpu_memory_utilization": spec.memory_share, "kv_cache_memory_bytes": spec.kv_cache_bytes}
    if spec.tensor_parallel > 1:
        arguments["tensor_parallel_size"] = spec.tensor_parallel
    return arguments | {name: _argument(value) for name, value in spec.extra}


def _argument(value: Any) -> Any:
    """Objects come as their JSON text (see `options.argument`)."""
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


def engine_environment(spec: EngineSpec, inherited: dict[str, str]) -> dict[str, str]:
    """The engine's environment: ours, what its backend needs, and last what the specification says."""
    env = dict(inherited)
    env |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    env["VLLM_ENGINE_READY_TIMEOUT_S"] = f"{PATIENCE_S}"  # of all: it is in the hash of what is compiled
    if spec.weights == "dummy":
        env["HF_HUB_OFFLINE"] = "1"
    if spec.backend == "cpu":
        env["VLLM_CPU_KVCACHE_SPACE"] = str(spec.kv_cache_bytes // GIB)
        if spec.tensor_parallel > 1:
            env["VLLM_CPU_OMP_THREADS_BIND"] = bound_to(own_cores(), spec.tensor_parallel)
    if spec.backend == "cuda":
        env |= visible_to(spec, env.get("CUDA_VISIBLE_DEVICES", ""))
    if spec.tensor_parallel > 1:
        env |= WITHOUT_MULTICAST
    env |= dict(spec.env)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(WORKER.parent), env.get("PYTHONPATH", "")]))
    return env


def visible_to(spec: EngineSpec, visible: str) -> dict[str, str]:
    """Variables by which an engine sees its own GPUs. visible: ours, "" for all. By the order of the bus, which is
    NVML's, where there is a choice: CUDA's own order puts the fastest first."""
    several = spec.tensor_parallel > 1 or spec.gpu > 0
    if not (several or visible):
        return {}
    ours = [device.strip() for device in visible.split(",") if device.strip()]
    seen = ",".join(ours[i] if ours else str(i) for i in spec.gpus)
    return {"CUDA_VISIBLE_DEVICES": seen} | ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if several else {})


def place_of(spec: EngineSpec, place: Mapping[str, str], cores: Collection[int], turn: Turn) -> dict[str, str]:
    """Variables that say where, and when, an engine runs beside others."""
    env = {**place, **turn.place}
    if cores and spec.backend == "cpu":
        env["VLLM_CPU_OMP_THREADS_BIND"] = bound_to(cores, spec.tensor_parallel)
    return env


def bound_to(cores: Collection[int], processes: int) -> str:
    """As many cores for each of an engine's processes, neighbours together, in the words of vLLM's CPU backend."""
    there, each = sorted(cores), max(1, len(cores) // processes)
    return "|".join(",".join(map(str, there[i * each : (i + 1) * each])) for i in range(processes))


def own_cores() -> Collection[int]:
    """Those that we may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


class OfflineEngine(Held):
    """Starts when made, unless held; raises EngineFailed with the cause and the end of the log when it cannot."""

    worker = WORKER

    def __init__(
        self,
        spec: EngineSpec,
        *,
        place: Mapping[str, str] = NOWHERE_ELSE,
        cores: Collection[int] = (),
        held: bool = False,
    ) -> None:
        """place: variables that say where it runs beside others, which change no measurement of an engine alone. cores:
        the CPU cores that it may use; none: all. held: it imports what it needs, and waits for `start` before it
        touches the device."""
        self.spec = spec
        self.ready = False
        self.launch = uuid.uuid4().hex[:12]
        self._loaded: str | None = None
        model = model_for(spec, shape_of(spec.model))
        folder = Path(tempfile.mkdtemp(prefix="pytest-slmserve-"))
        self._turn = Turn(folder, spec.tensor_parallel, held)
        environment = engine_environment(spec, dict(os.environ)) | place_of(spec, place, cores, self._turn)
        self.child = Child([spec.python or sys.executable, "-u", str(self.worker)], environment, folder, cores)
        with self._or_killed():
            self.child.send(**self.arguments(model))
        if not held:
            self._finish_start()

    def arguments(self, model: str) -> dict[str, Any]:
        """What its process is told first. model: a folder or a Hub name."""
        return engine_arguments(self.spec, model)

    def _finish_start(self) -> None:
        with self._or_killed():
            ready = self.child.receive(START_S, "starting")
            if ready["event"] == "failed":
                raise self.child.failed(f"did not start: {ready['cause']}")
        self.resolved = resolved_from(ready, self._turn.start_s)
        self.ready = True

    @contextmanager
    def _or_killed(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.child.kill()
            raise

    def run(self, workload: Workload, load: Load, tell: Tell = silent, gate: Gate | None = None) -> Run:
        check_load(load)
        self.hand_over(workload)
        at = {"at": gate.begins_s} if gate else {}
        run = run_from(self.ask(tell, gate, op="run", load=asdict(load), **at))
        if run.first_failure and "EngineDead" in run.first_failure:
            self.ready = False
            raise self.child.failed(f"died while it served ({run.first_failure})")
        return run

    def ask(self, tell: Tell = silent, gate: Gate | None = None, /, **message: Any) -> dict[str, Any]:
        """One message there, its answer back; also for a worker that answers more than ours does."""
        self.ready = False
        answer = converse(self.child, tell, gate, **message)
        self.ready = True
        return answer

    def hand_over(self, workload: Workload) -> None:
        if self._loaded == workload.hash:
            return
        check_fits(self.spec, workload)
        prompts = [r.prompt for r in workload.requests]
        self.ask(op="load", prompts=prompts, output_tokens=[r.output_tokens for r in workload.requests])
        self._loaded = workload.hash

    def outputs(self, workload: Workload, requests: int, length: int) -> Outputs:
        self.hand_over(workload)
        return tuple(map(tuple, self.ask(op="tokens", requests=requests, length=length)["tokens"]))

    def profile(self, workload: Workload, load: Load) -> str | None:
        self.hand_over(workload)
        problem: str | None = self.ask(op="profile", load=asdict(load))["problem"]
        return problem

    def close(self) -> None:
        """Politely where it waits for us; in the middle of a load it would not hear that before the load's end."""
        polite, self.ready = self.ready, False
        if not polite:
            return self.child.kill()
        with suppress(EngineFailed):
            self.child.send(op="close")
        self.child.end()


def resolved_from(ready: dict[str, Any], ready_s: float) -> Resolved:
    """ready: its limits, and what each of its processes knows of the model, which is a part of it."""
    parts = ready.get("parts") or [{}]
    weights = [part.get("weight_bytes") for part in parts]
    known = {"weight_bytes": None if None in weights else sum(weights)}
    facts = known_fields(Resolved, {**ready, **parts[0], **known})
    sizes = facts.get("capture_sizes")
    return Resolved(**{**facts, "capture_sizes": None if sizes is None else tuple(sizes), "ready_s": ready_s})


def run_from(message: dict[str, Any]) -> Run:
    """The worker's columns as a Run, its clock set to zero where the run began and its rows in the order sent."""
    began = message["began"]

    def since(stamps: Sequence[float | None]) -> tuple[float | None, ...]:
        return tuple(None if s is None else round(s - began, 6) for s in stamps)

    rows = sorted(zip(*message["samples"]), key=lambda row: row[1])
    request, sent, admitted, first, last, prompt, output, finished, cached = zip(*rows) if rows else [()] * 9
    time_s, running, waiting, new, prefilled, kv, preempted = message["steps"] or [()] * 7
    start, stop = message["window"]
    return Run(
        samples=Samples(
            tuple(request),
            since(sent),  # type: ignore[arg-type]
            since(admitted),
            since(first),
            since(last),
            tuple(prompt),
            tuple(output),
            tuple(finished),
            () if all(count is None for count in cached) else tuple(cached),
        ),
        steps=Steps(since(time_s), *map(tuple, (running, waiting, new, prefilled, kv, preempted))),  # type: ignore[arg-type]
        window_s=(round(start - began, 6), round(stop - began, 6)),
        failures=message["failures"],
        first_failure=message["first_failure"],
        began_s=round(began, 6),
        failed=_failures(message["failed"], since) if message["failures"] else None,
    )


def _failures(told: dict[str, Any], since: Callable[[Sequence[Any]], tuple[Any, ...]]) -> Failures:
    scheduled = told.get("scheduled", [None])
    return Failures(
        request=tuple(told["request"]),
        sent_s=since(told["sent"]),
        ended_s=since(told["ended"]),
        kind=tuple(told["kind"]),
        scheduled_s=None if None in scheduled else since(scheduled),
    )
