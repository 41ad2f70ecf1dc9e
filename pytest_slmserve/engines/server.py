"""Engines in their own process: vLLM without HTTP, Transformers, and vLLM's server with our client.

The server listens on loopback with a random key. A plugin of ours (vLLM's entry point group
`vllm.stat_logger_plugins`) writes its steps into a file, by the clock that the client reads.
"""

import json
import os
import random
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self

import psutil

from pytest_slmserve.engines.base import Engine, Message, Outputs, ProgressCallback, StartCallback, WindowBarrier
from pytest_slmserve.engines.child import Child, converse, resolved_from, run_from, undone_on_error
from pytest_slmserve.engines.endpoint import FreshPrompts, LoadClient, body_of, format_fields, run_of
from pytest_slmserve.engines.interrupts import held
from pytest_slmserve.schema.errors import (
    UNUSABLE,
    BadUsage,
    Caches,
    EngineFailed,
    Kind,
    Side,
    json_value,
    user_cache,
    write_file,
)
from pytest_slmserve.schema.models import Model, hub_name, short_name
from pytest_slmserve.schema.records import Run
from pytest_slmserve.schema.secrecy import passed_on
from pytest_slmserve.schema.specs import (
    GIB,
    MOST_ADAPTERS,
    OWN_FIELDS,
    PATHS,
    EngineSpec,
    Request,
    Workload,
    command_words,
    handed_over,
    short_hash,
)
from pytest_slmserve.telemetry.gpu import ask_once
from pytest_slmserve.telemetry.host import own_cores

START_S = 900.0  # a first start compiles; a large model is read from a slow disk
WORKER = Path(__file__).parent / "worker" / "vllm_worker.py"
PATIENCE_S = 86_400  # of vLLM with its own core, which may wait for its turn; START_S limits a start
# NVLink's multicast needs a fabric manager that containers may not reach, and without it an engine on several GPUs
# hangs in its first all-reduce. Users who have one turn multicast on with --slm-env, which the records then show.
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
ROOT = "VLLM_CACHE_ROOT"
COLD = (ROOT, "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

SERVE = WORKER.with_name("vllm_serve.py")
ONE_FRONT_END, VLLM_SERVE = "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"
HOST = "127.0.0.1"
NAME = "slm"  # of the model in requests
GUARD = "vllm_serve.Guard"  # in the worker's folder, which is on the server's path
ANSWER_S = 60.0  # a first request with log probabilities compiles, on cores that other processes may use
REST_S = 10.0
IDLE_S = 0.2  # without a step; a long step of many prompts takes as much
FIRST_PORT, TRIES = 20_000, 20
OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
DRAWN_WEIGHTS = 9973  # of adapters
# Words of a made tokenizer: visible ASCII characters, and names by which grammars know a token that ends a text. With a
# blank among them, a model with dummy weights could put blanks between the parts of JSON forever.
SPELLING, ENDS = [*map(chr, range(33, 127))], ("</s>", "<|end_of_text|>", "<|eot_id|>")
NOT_OF_A_SERVER = {"skip_tokenizer_init", "disable_log_stats"}
# The entry point by which vLLM finds our plugin, in a distribution on its path.
PLUGIN = {
    "METADATA": "Metadata-Version: 2.1\nName: slm-trace\nVersion: 0\n",
    "entry_points.txt": "[vllm.stat_logger_plugins]\nslm_trace = slm_trace:TraceWriter\n",
}


class ProcessEngine(Engine):
    """An engine in its own process, which imports its packages at launch and then waits for `start`.

    A file in its folder signals its turn. Each of its processes makes a file beside it when its imports are complete,
    and waits (`worker/slm_facts.py`).
    """

    child: Child

    def __init__(
        self, spec: EngineSpec, *, extra_env: Mapping[str, str] | None = None, cores: Collection[int] = ()
    ) -> None:
        """Launch the engine.

        Args:
            extra_env: environment variables of this launch only, which change no measurement.
            cores: CPU cores for the engine; empty: all.

        Raises:
            BadUsage: if its model cannot be described.
        """
        super().__init__(spec)
        self.ready = False
        self._cores = cores
        model = model_for(spec)
        with undone_on_error(self._unlaunch), held():
            folder = Path(tempfile.mkdtemp(prefix="pytest-slmserve-"))
            self._turn = folder / "turn"
            self._began = time.monotonic()
            environment = engine_environment(spec, os.environ, cores) | dict(extra_env or {})
            self._launch(model, folder, environment | {"SLM_TURN": str(self._turn)})

    def _launch(self, model: str, folder: Path, environment: dict[str, str]) -> None:
        raise NotImplementedError

    def _unlaunch(self) -> None:
        if hasattr(self, "child"):
            self.child.kill()

    def _await_ready(self, on_wait: StartCallback | None) -> Mapping[str, Any]:
        raise NotImplementedError

    def await_turn(self, on_wait: StartCallback | None = None) -> None:
        late = f"had not imported vLLM after {START_S:.0f} s"
        self.child.wait_until(lambda: self._waiting_since() is not None, START_S, late, on_wait)

    def _waiting_since(self) -> float | None:
        """Return the time of day at which the last process began to wait, or None unless all processes wait."""
        stamps = [path.stat().st_mtime for path in self._turn.parent.glob(f"{self._turn.name}.*")]
        return max(stamps) if len(stamps) >= self.spec.tensor_parallel_size else None

    def start(self, on_wait: StartCallback | None = None) -> Self:
        since = self._waiting_since()
        waited_s = max(0.0, time.time() - since) if since else 0.0  # not a part of its start
        self._turn.touch()
        with undone_on_error(self.child.kill):
            facts = self._await_ready(on_wait)
        self.resolved = resolved_from(facts, time.monotonic() - self._began - waited_s, self._began)
        self.ready = True
        return self

    def processes(self) -> set[int]:
        try:
            worker = psutil.Process(self.child.process.pid)
            return {worker.pid, *(child.pid for child in worker.children(recursive=True))}
        except psutil.NoSuchProcess:
            return set()


class OfflineEngine(ProcessEngine):
    """vLLM's asynchronous engine, or another engine whose worker answers the same messages."""

    worker = WORKER

    def _launch(self, model: str, folder: Path, environment: dict[str, str]) -> None:
        command = [self.spec.python or sys.executable, "-u", str(self.worker)]
        self.child = Child(command, environment, folder, self._cores)
        with undone_on_error(self.child.kill):
            self.child.send(**self.arguments(model))

    def arguments(self, model: str) -> Message:
        """Return the first message to the worker: the arguments of its engine, with a folder or a Hub name as model."""
        return engine_arguments(self.spec, model)

    def _await_ready(self, on_wait: StartCallback | None) -> Mapping[str, Any]:
        ready = self.child.receive(START_S, "starting", on_wait)
        if ready["event"] == "failed":
            raise self.child.failed(f"did not start: {ready['cause']}")
        return ready

    def ask(
        self, progress: ProgressCallback = None, barrier: WindowBarrier | None = None, /, **message: Any
    ) -> Message:
        """Send a message to the worker and return its answer."""
        self.ready = False
        answer = converse(self.child, progress, barrier, **message)
        self.ready = True
        return answer

    def _hand_over(self, workload: Workload) -> None:
        super()._hand_over(workload)
        prompts, kind = [request.prompt for request in workload.requests], workload.spec.kind
        further: Message = {}
        if workload.spec.finds_prefixes:
            own = FreshPrompts(workload, words=False)
            further |= {"places": [own.place(each) for each in workload.requests], "rounds": own.ids}
        if adapters := workload.spec.adapters:
            name, path = adapter_name(adapters.rank), adapter_folder(self.spec, adapters.rank)
            asked = [request.adapter for request in workload.requests]
            first = MOST_ADAPTERS * adapters.rank  # adapters of another rank have other numbers in the engine
            further |= {"adapters": {"asked": asked, "name": name, "first": first, "path": path}}
        if workload.spec.schema:
            further |= {"schema": workload.spec.schema}
        tokens = [request.output_tokens for request in workload.requests]
        self.ask(op="load", prompts=prompts, output_tokens=tokens, kind=kind, **further)

    def _run(self, workload: Workload, load: Message, progress: ProgressCallback, barrier: WindowBarrier | None) -> Run:
        run = run_from([self.ask(progress, barrier, op="run", load=load)])
        if run.first_failure and "EngineDead" in run.first_failure:
            self.ready = False  # although it answers
            raise self.child.failed(f"died while it served ({run.first_failure})")
        return run

    def outputs(self, workload: Workload, requests: int, length: int) -> Outputs:
        self.load_requests(workload)
        return tuple(map(tuple, self.ask(op="tokens", requests=requests, length=length)["tokens"]))

    def _logprobs(self, workload: Workload, outputs: Outputs) -> Sequence[Sequence[float]]:
        self.load_requests(workload)
        scores: list[list[float]] = self.ask(op="scores", outputs=outputs)["scores"]
        return scores

    def nap(self) -> tuple[float, float]:
        slept = self.ask(op="nap")
        return slept["sleep_s"], slept["wake_s"]

    def _profile(self, load: Message) -> str | None:
        problem: str | None = self.ask(op="profile", load=load)["problem"]
        return problem

    def close(self) -> None:
        """Stop the process: by a message if it waits for one, and by a signal during a load."""
        polite, self.ready = self.ready, False
        if not polite:
            return self.child.kill()
        with suppress(EngineFailed):
            self.child.send(op="close")
        self.child.end()


class BatchedEngine(OfflineEngine):
    """Transformers' generate() on batches, one after the other."""

    worker = WORKER.with_name("hf_worker.py")
    jobs_only = True

    def arguments(self, model: str) -> Message:
        device = "cuda" if self.spec.platform == "cuda" else "cpu"
        same = {name: getattr(self.spec, name) for name in ("load_format", "dtype", "max_model_len", "seed")}
        return {"model": model, "device": device, **same, **self.batching}

    def _logprobs(self, workload: Workload, outputs: Outputs) -> Sequence[Sequence[float]]:
        raise EngineFailed("Transformers' generate() is not asked how likely tokens are", "Use the engine interface.")


class ServerEngine(ProcessEngine):
    """vLLM's own server. Our client runs on the CPU cores of the server."""

    windows_of_schedules = True
    client: LoadClient | None = None  # started as soon as the server is ready
    _path = ""  # of the client's URL
    _fresh: FreshPrompts | None = None  # if a cache may serve only a given part of the prompts
    _writers = 0  # of its trace

    def _launch(self, model: str, folder: Path, environment: dict[str, str]) -> None:
        self.port, self.trace = free_port(), folder / "steps.jsonl"
        self._key = secrets.token_hex(16)  # in the environment, never among the arguments, which all users can read
        self._headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        (folder / "slm_trace-0.dist-info").mkdir()
        for name, text in PLUGIN.items():
            write_file(folder / "slm_trace-0.dist-info" / name, text)
        environment |= {"SLM_TRACE": str(self.trace), "SLM_KEY": self._key, "VLLM_SERVER_DEV_MODE": "1"}
        environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if self.spec.arguments.get("enable_lora") else {}
        self._adapters = set[str]()  # that it has loaded
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment["PYTHONPATH"]])
        if allowed := environment.get("VLLM_PLUGINS"):
            environment["VLLM_PLUGINS"] = f"{allowed},slm_trace"
        command = [self.spec.python or sys.executable, "-u", str(SERVE), *server_command(self.spec, model, self.port)]
        self.child = Child(command, environment, folder, self._cores, name="the server")

    def start(self, on_wait: StartCallback | None = None) -> Self:
        super().start(on_wait)
        with undone_on_error(self.close):
            self._speak("embed" if self.spec.arguments.get("runner") == "pooling" else "generate")
        return self

    def _speak(self, kind: Kind) -> None:
        if self._path != PATHS[kind]:
            if self.client:
                self.client.kill()
            self._path = PATHS[kind]
            self.client = LoadClient(f"http://{HOST}:{self.port}{self._path}", self._headers, self._cores)

    def _await_ready(self, on_wait: StartCallback | None) -> Mapping[str, Any]:

        # All HTTP processes must have reported their limits, because an answer of one does not show that others are
        # ready.
        def limits() -> list[dict[str, Any]]:
            return [line for line in trace_lines(self.trace) if isinstance(line, dict)]

        def answers() -> bool:
            with suppress(OSError, HTTPException):
                front_ends = self.spec.front_ends
                return self._ask("GET", "/health")[0] == 200 and (front_ends == 1 or len(limits()) >= front_ends)
            return False

        self.child.wait_until(answers, START_S, f"was not ready after {START_S:.0f} s", on_wait)
        if self.child.process.poll() is not None:
            raise self.child.failed("did not start")
        try:
            told = limits()
            self._writers, facts = len(told), told[0]
        except (OSError, IndexError):
            problem = "did not tell its steps: vLLM did not load our plugin"
            raise self.child.failed(problem, "--slm-interface engine") from None
        status, answer = self._ask("POST", "/collective_rpc", {"method": "slm_facts"})
        with suppress(ValueError, LookupError, TypeError):
            facts |= {"parts": json_value(answer)["results"]} if status == 200 else {}
        return facts

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Return status and text of the server's answer."""
        text = None if body is None else json.dumps(body)
        status, _, answer = ask_once(method, f"http://{HOST}:{self.port}{path}", self._headers, text, ANSWER_S)
        return status, answer

    def _hand_over(self, workload: Workload) -> None:
        super()._hand_over(workload)
        kind = workload.spec.kind
        self._speak(kind)
        assert self.client, "it has been started"
        self._load_adapters(workload)
        self._fresh = own = FreshPrompts(workload, words=False) if workload.spec.finds_prefixes else None
        form = format_fields(workload.spec)
        bodies = [body_of(each, asked_for(each, workload), kind) | form for each in workload.requests]
        if own:
            bodies = [body | {"prompt": own.prompt(r) or body["prompt"]} for body, r in zip(bodies, workload.requests)]
        self.client.load(workload, [*map(json.dumps, bodies)], *((own.mark, own.rounds) if own else ()))

    def _load_adapters(self, workload: Workload) -> None:
        if adapters := workload.spec.adapters:
            names = {asked_for(request, workload) for request in workload.requests} - self._adapters
            path = adapter_folder(self.spec, adapters.rank) if names else ""
            for name in sorted(names):
                body = {"lora_name": name, "lora_path": path}
                status, answer = self._ask("POST", "/v1/load_lora_adapter", body)
                if status != 200:
                    raise self.child.failed(f"did not load an adapter ({status}): {answer[:200]}")
                self._adapters.add(name)

    def _run(self, workload: Workload, load: Message, progress: ProgressCallback, barrier: WindowBarrier | None) -> Run:
        assert self.client, "it has been started"
        before = self.trace.stat().st_size
        found = self.client.run(load, progress, barrier)
        # The server serves the requests that the load's end has cut off until it notices, and the next load must begin
        # after that.
        seen, until = -1, time.monotonic() + REST_S
        while (size := self.trace.stat().st_size) != seen and time.monotonic() < until:
            seen = size
            time.sleep(IDLE_S)
        if self.child.process.poll() is not None:
            raise self.child.failed(f"died while it served ({found[0]['first_failure']})")
        # Each of several writers sees only its own tokens, so no row is a whole step.
        rows = trace_lines(self.trace, before) if self._writers <= 1 else []
        run = run_of(found, workload, [row for row in rows if row[0] >= found[0]["began"]])
        assert run.stream, "there was a client"
        return replace(run, stream=replace(run.stream, salt=self._fresh.salt)) if self._fresh else run

    def outputs(self, workload: Workload, requests: int, length: int) -> Outputs:
        more = {"max_tokens": length, "return_token_ids": True, **format_fields(workload.spec)}
        self._load_adapters(workload)
        asked = [(each, {**more, "model": asked_for(each, workload)}) for each in workload.requests[:requests]]
        return tuple(tuple(self._complete(*each)["token_ids"]) for each in asked)

    def _logprobs(self, workload: Workload, outputs: Outputs) -> list[list[float]]:
        self._load_adapters(workload)
        found = []
        for request, tokens in zip(workload.requests, outputs):
            longer = Request((*request.prompt, *tokens), 1)
            more = {"max_tokens": 1, "prompt_logprobs": 0, "model": asked_for(request, workload)}
            table = self._complete(longer, more)["prompt_logprobs"]
            found.append([row[str(token)]["logprob"] for row, token in zip(table[-len(tokens) :], tokens)])
        return found

    def _complete(self, request: Request, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one request without streaming, whose body has further fields."""
        body = {**body_of(request, NAME), **more, "stream": False}
        del body["stream_options"]
        try:
            status, answer = self._ask("POST", "/v1/completions", body)
        except (OSError, HTTPException) as error:
            raise self.child.failed(f"did not answer: {error}") from None
        if status != 200:
            raise self.child.failed(f"answered {status}: {answer[:200]}")
        try:
            choice: dict[str, Any] = json_value(answer)["choices"][0]
        except UNUSABLE:
            raise self.child.failed(f"answered no completion: {answer[:200]}") from None
        return choice

    def close(self) -> None:
        self.ready = False
        if self.client:
            self.client.kill()
        self.child.kill()


def server_command(spec: EngineSpec, model: str, port: int) -> list[str]:
    """Return the module and the command line of vLLM's server.

    It has the arguments of the engine without HTTP, so that the interfaces can be compared. Only several HTTP processes
    use `vllm serve`, because it needs a distribution named vllm, and builds for a CPU may have another name.
    """
    arguments = {name: value for name, value in engine_arguments(spec, model).items() if name not in NOT_OF_A_SERVER}
    if spec.caches_prefixes:
        arguments = {"enable_prompt_tokens_details": True, **arguments}
    arguments |= {"served_model_name": NAME, "disable_uvicorn_access_log": True, "middleware": GUARD}
    arguments |= {"host": HOST, "port": port}
    words = [ONE_FRONT_END] if spec.front_ends == 1 else [VLLM_SERVE, "serve", str(arguments.pop("model"))]
    return [*words, *command_words(arguments)]


def free_port() -> int:
    """Return a free port, outside the range of ports that the system gives to connections if possible.

    Until the server listens there, a minute may pass in which the client of another server opens hundreds of
    connections.

    Raises:
        EngineFailed: if no port is free.
    """
    try:
        lowest = int(OF_CONNECTIONS.read_text().split()[0])
    except OSError:  # not Linux
        lowest = FIRST_PORT
    ours = range(FIRST_PORT, lowest)
    chance = secrets.SystemRandom()  # without a seed, which other runs may have too
    for port in (*chance.sample(ours, min(TRIES, len(ours))), 0):
        with suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    raise EngineFailed(
        "no TCP port is free", "List the sockets in use with `ss -tan`, and end the programs that hold them."
    )


def trace_lines(trace: Path, after: int = 0) -> list[Any]:
    """Return the complete lines that the plugin wrote from byte `after` on, as JSON values.

    They are the limits of each HTTP process, or of each engine behind it, and a row for each step.
    """
    with trace.open("rb") as file:
        file.seek(after)
        return [json.loads(line) for line in file if line.endswith(b"\n")]


def engine_arguments(spec: EngineSpec, model: str) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs for `spec`, with a folder or a Hub name as model."""
    arguments = {
        "model": model,
        "load_format": spec.load_format,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": spec.prefix_caching,
        "worker_extension_cls": "slm_facts.Facts",
        "disable_log_stats": False,
        **{name: getattr(spec, name) for name in sorted(OWN_FIELDS)},
    }
    if spec.platform == "cuda" or not spec.kv_cache_bytes:
        arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
    if spec.platform == "cuda" and spec.kv_cache_bytes:
        arguments["kv_cache_memory_bytes"] = spec.kv_cache_bytes
    if spec.tensor_parallel_size > 1:
        arguments["tensor_parallel_size"] = spec.tensor_parallel_size
    for name, value in spec.extra:  # objects come as their JSON text (`options.table.argument`)
        arguments[name] = handed_over(value) if isinstance(value, str) and value.startswith("{") else value
    return arguments


def engine_environment(spec: EngineSpec, inherited: Mapping[str, str], cores: Collection[int] = ()) -> dict[str, str]:
    """Return an engine's environment: the part of ours that it may see, and variables of platform and specification.

    A token of the Hub is passed on only if real weights are loaded.

    Args:
        cores: CPU cores of a pinned engine, which are divided among its processes.
    """
    env = passed_on(inherited, hub=spec.load_format == "auto")
    env |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    env["VLLM_ENGINE_READY_TIMEOUT_S"] = f"{PATIENCE_S}"  # equal for all engines, because the compile cache hashes it
    if spec.load_format == "dummy":
        env["HF_HUB_OFFLINE"] = "1"
    several = spec.tensor_parallel_size > 1
    ours = sorted(cores or own_cores() or range(os.cpu_count() or 1))
    each = max(1, len(ours) // spec.tensor_parallel_size)
    parts = [ours[i * each : (i + 1) * each] for i in range(spec.tensor_parallel_size)]
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}
    if spec.platform == "cpu":
        kv_cache = {"VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_bytes // GIB)} if spec.kv_cache_bytes else {}
        env |= kv_cache | (bound if several else {})
    visible = env.get("CUDA_VISIBLE_DEVICES", "")
    if spec.platform == "cuda" and (several or spec.gpu > 0 or visible):
        devices = [device.strip() for device in visible.split(",") if device.strip()]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[i] if devices else str(i) for i in spec.gpus)
        if several or spec.gpu > 0:  # NVML's order, because CUDA's own order puts the fastest GPU first
            env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    env |= {**(WITHOUT_MULTICAST if several else {}), **dict(spec.env)}
    if cores and spec.platform == "cpu":
        env |= bound
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(WORKER.parent), env.get("PYTHONPATH", "")]))
    return env


def model_for(spec: EngineSpec) -> str:
    """Return the name or the folder by which the engine loads its model.

    With dummy weights, this is a folder in the user's cache with the model's configuration and a tokenizer.

    Raises:
        BadUsage: as in `kept_folder`.
    """
    if spec.load_format == "auto":
        return hub_name(spec.model)
    model, name = spec.known_model, short_name(spec.model)
    files = {"config.json": json.dumps(dict(model.config)), **tokenizer_files(model)}
    return kept_folder(name, short_hash(files), {file: text.encode() for file, text in files.items()})


def asked_for(request: Request, workload: Workload) -> str:
    """Return the name of the model or the adapter that a request asks our server for."""
    adapters = workload.spec.adapters
    return f"{adapter_name(adapters.rank)}-{request.adapter}" if adapters and request.adapter else NAME


def adapter_name(rank: int) -> str:
    return f"{NAME}-rank{rank}"


def adapter_folder(spec: EngineSpec, rank: int) -> str:
    """Return the folder of a LoRA adapter in PEFT's format, with made weights for all linear layers of the model.

    One folder serves for all adapters of a rank, because vLLM loads an adapter by its number.

    Raises:
        BadUsage: as in `kept_folder`.
    """
    layers = spec.known_model.adapted
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    described = json.dumps({**told, "target_modules": sorted({name.rpartition(".")[2] for name in layers})})
    shapes: dict[str, tuple[int, int]] = {}
    for name, (inputs, outputs) in layers.items():
        shapes[f"base_model.model.{name}.lora_A.weight"] = rank, inputs
        shapes[f"base_model.model.{name}.lora_B.weight"] = outputs, rank
    files = {"adapter_config.json": described.encode(), "adapter_model.safetensors": safetensors(shapes)}
    named = f"{short_name(spec.model)}-lora-{rank}"
    return kept_folder(named, short_hash([described, list(shapes.items())]), files)


def safetensors(shapes: Mapping[str, tuple[int, int]]) -> bytes:
    """Return a file of float16 matrices of these shapes, in safetensors' format.

    The values are small, drawn once, and repeated. Their number is prime, so that no two rows are alike.
    """
    header, at = {}, 0
    for name, (rows, columns) in shapes.items():
        header[name] = {"dtype": "F16", "shape": [rows, columns], "data_offsets": [at, at := at + 2 * rows * columns]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    chance = random.Random(0)
    drawn = struct.pack(f"<{DRAWN_WEIGHTS}e", *(chance.uniform(-0.01, 0.01) for _ in range(DRAWN_WEIGHTS)))
    return struct.pack("<Q", len(text)) + text + (drawn * (at // len(drawn) + 1))[:at]


def kept_folder(name: str, content: str, files: Mapping[str, bytes]) -> str:
    """Return the folder of these files in the user's cache, which is made if it does not exist.

    Args:
        content: hash of the content, for the folder's name.

    Raises:
        BadUsage: if the folder cannot be made, or holds something else, because then another model would be measured.
    """
    folder = user_cache() / f"{name}-{content}"
    try:
        if not folder.is_dir():
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
            try:
                for file, data in files.items():
                    write_file(made / file, data)
                made.rename(folder)
            except OSError:  # another start made it meanwhile
                shutil.rmtree(made)
                if not folder.is_dir():
                    raise
    except OSError as error:
        why = f"cannot describe {name} in {folder.parent}: {error.strerror}"
        raise BadUsage(why, "Set XDG_CACHE_HOME to a folder that you can write to.") from None
    with suppress(OSError, ValueError):
        if all((folder / file).read_bytes() == data for file, data in files.items()):
            return str(folder)
    raise BadUsage(f"{folder} does not hold what it was made with: somebody changed it", f"rm -r '{folder}'")


def tokenizer_files(model: Model) -> dict[str, str]:
    """Return the files of a tokenizer with a word for each token, for the server of a model with dummy weights.

    No token is special, because a server does not send special tokens, which have no text. A model that generates can
    spell JSON: the words in the middle are `SPELLING`, and the tokens that end its text have the names of `ENDS`.
    """
    named = [f"t{i}" for i in range(model.vocabulary)]
    if "generate" in model.kinds and (middle := model.vocabulary // 2) > len(SPELLING):
        named[middle : middle + len(SPELLING)] = SPELLING
        ends = dict(model.config).get("eos_token_id") or 0
        for token, name in zip(ends if isinstance(ends, list | tuple) else [ends], ENDS):
            if isinstance(token, int) and 0 <= token < len(named):  # a configuration may say anything
                named[token] = name
    words = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(named)}, "unk_token": named[0]}
    described = dict[str, Any](version="1.0", added_tokens=[], pre_tokenizer={"type": "WhitespaceSplit"}, model=words)
    described |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    classed = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return {"tokenizer.json": json.dumps(described), "tokenizer_config.json": json.dumps(classed)}


@contextmanager
def caches(how: Caches, side: Side, specs: Mapping[Side, EngineSpec]) -> Iterator[Mapping[str, str]]:
    """Yield the environment variables of the compile caches for a launch of one side of a gate.

    Cold caches are an empty folder, which is removed afterwards. vLLM 0.32 keeps its compiled code in VLLM_CACHE_ROOT
    (`vllm/envs.py`), with inductor's, and with Triton's unless TRITON_CACHE_DIR is set
    (`vllm/compilation/compiler_interface.py`). Other code is in TORCHINDUCTOR_CACHE_DIR
    (`torch/_inductor/runtime/cache_dir_utils.py`) and TRITON_CACHE_DIR.

    Warm caches are the usual ones. If interpreter or variables of the sides differ, each side has its own lasting
    folder, unless its variables name one. In a common folder, two releases would import vLLM again at each start,
    because vLLM keeps its facts of a model's class for one version (`vllm/model_executor/models/registry.py`).
    """
    if how == "cold":
        with tempfile.TemporaryDirectory(prefix="pytest-slmserve-cold-", ignore_cleanup_errors=True) as folder:
            yield {name: str(Path(folder) / name.lower()) for name in COLD}
    elif len({(spec.python, spec.env) for spec in specs.values()}) > 1 and ROOT not in dict(specs[side].env):
        yield {ROOT: str(Path(os.environ.get(ROOT) or user_cache()) / f"gate-{side}")}
    else:
        yield {}
