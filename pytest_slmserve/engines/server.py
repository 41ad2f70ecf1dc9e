"""vLLM's OpenAI-compatible server, and our client before it: this interface shows the serving stack.

The server is a process of its own, on loopback, with a random key. A plugin of ours (vLLM's entry point group
`vllm.stat_logger_plugins`) tells its steps in a file, by the clock that the client reads.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_slmserve.engines.base import (
    Outputs,
    ProgressCallback,
    Scores,
    WindowBarrier,
    check_fits,
    ignore_progress,
    message_of,
    scored,
)
from pytest_slmserve.engines.launch.child_process import Child, resolved_from, still_waiting
from pytest_slmserve.engines.launch.model_files import model_for
from pytest_slmserve.engines.launch.vllm_arguments import (
    NOWHERE_ELSE,
    START_S,
    WORKER,
    StaggeredEngine,
    StartTurn,
    engine_arguments,
    engine_environment,
    placement_env,
)
from pytest_slmserve.engines.load_client import LoadClient, completion, run_of
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.loads import Load, Request, Workload
from pytest_slmserve.schema.records import Run
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.telemetry.dcgm_exporter import ask_once

SERVE = WORKER.with_name("vllm_serve.py")
ONE_FRONT_END, VLLM_SERVE = "vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"
HOST = "127.0.0.1"
NAME = "slm"  # of the model, as requests call it
GUARD = "slm_auth.Guard"  # of the worker's folder, which is on the server's path
LOOK_S = 0.1  # between two looks whether it is ready
ANSWER_S = 60.0  # a first request with log probabilities compiles, on cores that others may use
REST_S = 10.0
IDLE_S = 0.2  # without a step; a long one of many prompts takes as much
FIRST_PORT, TRIES = 20_000, 20
OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
NOT_OF_A_SERVER = {"skip_tokenizer_init", "disable_log_stats"}


class ServerEngine(StaggeredEngine):
    """Starts when made; raises EngineFailed with the cause and the end of the log when it cannot."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        extra_env: Mapping[str, str] = NOWHERE_ELSE,
        cores: Collection[int] = (),
        held: bool = False,
    ) -> None:
        """extra_env, cores, held: as of an `OfflineEngine`. The client runs where its server may."""
        self.spec = spec
        self.ready = False
        self.launch = uuid.uuid4().hex[:12]
        self._key = secrets.token_hex(16)
        self._extra_env, self._cores = extra_env, cores
        self._client: LoadClient | None = None
        self._launched(held)
        if not held:
            self._finish_start()

    def _launched(self, held: bool) -> None:
        self.port, folder = free_port(), Path(tempfile.mkdtemp(prefix="pytest-slmserve-"))
        self._turn = StartTurn(folder, self.spec.tensor_parallel_size, held)
        extra_env = placement_env(self.spec, self._extra_env, self._cores, self._turn)
        self.child = start_server(self.spec, self.port, self._key, folder, extra_env, self._cores)

    def _finish_start(self) -> None:
        try:
            self._await_health()
            self.resolved = resolved_from(self._facts(), self._turn.start_s)
            self._client = LoadClient(f"http://{HOST}:{self.port}/v1/completions", self._headers, self._cores)
        except BaseException:
            self.close()
            raise
        self.ready = True

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}

    @property
    def client(self) -> LoadClient:
        assert self._client is not None, "it is there as soon as the server is ready"
        return self._client

    def _await_health(self) -> None:
        until = time.monotonic() + START_S
        while not self._healthy():
            if self.child.process.poll() is not None:
                raise self.child.failed("did not start")
            if time.monotonic() > until:
                raise self.child.failed(f"was not ready after {START_S:.0f} s")
            still_waiting(self.child.log)
            time.sleep(LOOK_S)

    def _healthy(self) -> bool:
        """Report whether the server is ready: it answers, and each of several front ends has reported its limits. Only
        one of them answers, which says nothing of the others."""
        try:
            answered = self._asked("GET", "/health")[0] == 200
        except (OSError, http.client.HTTPException):
            return False
        return answered and (self.spec.front_ends == 1 or tellers(self.child.folder) >= self.spec.front_ends)

    def _asked(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        asked = None if body is None else json.dumps(body)
        status, _, text = ask_once(method, f"http://{HOST}:{self.port}{path}", self._headers, asked, ANSWER_S)
        return status, text

    def _facts(self) -> dict[str, Any]:
        """The server's limits, by our plugin; and what its model process reports, where vLLM's developer endpoint is
        there. Raises EngineFailed where the plugin has written nothing."""
        try:
            told: dict[str, Any] = trace_lines(self.child.folder)[0]
        except (OSError, IndexError):
            raise self.child.failed(
                "did not tell its steps: vLLM did not load our plugin", "--slm-interface engine"
            ) from None
        status, answer = self._asked("POST", "/collective_rpc", {"method": "slm_facts"})
        with suppress(ValueError, LookupError, TypeError):
            told |= {"parts": json.loads(answer)["results"]} if status == 200 else {}
        return told

    def load_requests(self, workload: Workload) -> None:
        check_fits(self.spec, workload)
        self.client.load_requests(workload, lambda request: json.dumps(completion(request, NAME)))

    def run(
        self,
        workload: Workload,
        load: Load,
        on_progress: ProgressCallback = ignore_progress,
        barrier: WindowBarrier | None = None,
    ) -> Run:
        message = message_of(load)
        self.load_requests(workload)
        self.ready = False
        before = trace_file(self.child.folder).stat().st_size
        told = self.client.run(message, on_progress, barrier)
        self._await_idle()
        if self.child.process.poll() is not None:
            raise self.child.failed(f"died while it served ({told['first_failure']})")
        self.ready = True
        return run_of(told, workload, self._steps(before, told["began"]))

    def _steps(self, after: int, began_s: float) -> list[Any]:
        """None where several tell: each knows of the tokens that went through it, no row is a whole step."""
        if tellers(self.child.folder) > 1:
            return []
        return [row for row in trace_lines(self.child.folder, after) if row[0] >= began_s]

    def _await_idle(self) -> None:
        """Wait until the server makes no more steps, at most REST_S seconds. It serves requests that the load's end
        cut off until it notices; that must be over when the next load begins."""
        seen, until = -1, time.monotonic() + REST_S
        while (size := trace_file(self.child.folder).stat().st_size) != seen and time.monotonic() < until:
            seen = size
            time.sleep(IDLE_S)

    def outputs(self, workload: Workload, requests: int, length: int) -> Outputs:
        asked = {"max_tokens": length, "return_token_ids": True}
        return tuple(tuple(self._answer(each, asked)["token_ids"]) for each in workload.requests[:requests])

    def scores(self, workload: Workload, outputs: Outputs) -> Scores:
        found = []
        for request, tokens in zip(workload.requests, outputs):
            longer = Request((*request.prompt, *tokens), 1)
            table = self._answer(longer, {"max_tokens": 1, "prompt_logprobs": 0})["prompt_logprobs"]
            found.append([row[str(token)]["logprob"] for row, token in zip(table[-len(tokens) :], tokens)])
        return scored(found)

    def _answer(self, request: Request, more: Mapping[str, Any]) -> dict[str, Any]:
        asked = {**completion(request, NAME), **more, "stream": False}
        del asked["stream_options"]
        try:
            status, answer = self._asked("POST", "/v1/completions", asked)
        except OSError as error:
            raise self.child.failed(f"did not answer: {error}") from None
        if status != 200:
            raise self.child.failed(f"answered {status}: {answer[:200]}")
        choice: dict[str, Any] = json.loads(answer)["choices"][0]
        return choice

    def close(self) -> None:
        self.ready = False
        if self._client:
            self._client.kill()
        self.child.kill()


def start_server(
    spec: EngineSpec, port: int, key: str, folder: Path, extra_env: Mapping[str, str], cores: Collection[int]
) -> Child:
    """The server's process, starting. Its key is in its environment, never among its arguments, which all can read."""
    model = model_for(spec)
    write_plugin(folder)
    environment = engine_environment(spec, os.environ) | dict(extra_env)
    environment |= {"SLM_TRACE": str(trace_file(folder)), "SLM_KEY": key, "VLLM_SERVER_DEV_MODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment["PYTHONPATH"]])
    if allowed := environment.get("VLLM_PLUGINS"):
        environment["VLLM_PLUGINS"] = f"{allowed},slm_trace"
    arguments = server_arguments(spec, model) | {"host": HOST, "port": port}
    command = [spec.python or sys.executable, "-u", str(SERVE), *started_by(spec, arguments)]
    return Child(command, environment, folder, cores, name="the server")


def server_arguments(spec: EngineSpec, model: str) -> dict[str, Any]:
    """The server's arguments: those of the engine without HTTP, so that the interfaces can be compared, and its own."""
    engine = {name: value for name, value in engine_arguments(spec, model).items() if name not in NOT_OF_A_SERVER}
    counted = {"enable_prompt_tokens_details": True} if spec.caches_prefixes else {}
    ours = {"served_model_name": NAME, "disable_uvicorn_access_log": True, "middleware": GUARD}
    return {**counted, **engine, **ours}


def started_by(spec: EngineSpec, arguments: Mapping[str, Any]) -> list[str]:
    """Module and command line. Only `vllm serve` heeds how many front ends are asked for; but it wants a distribution
    named vllm, which builds for a CPU need not be."""
    if spec.front_ends == 1:
        return [ONE_FRONT_END, *flags(arguments)]
    others = {name: value for name, value in arguments.items() if name != "model"}
    return [VLLM_SERVE, "serve", arguments["model"], *flags(others)]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM's engine as its command line has them."""
    found: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        match value:
            case True:
                found.append(f"--{flag}")
            case False:
                found.append(f"--no-{flag}")
            case dict() | list():
                found += [f"--{flag}", json.dumps(value)]
            case _:
                found += [f"--{flag}", str(value)]
    return found


def free_port() -> int:
    """One that the system gives to no connection, where there are such: until its server listens there a minute may
    pass, in which the client of another opens hundreds."""
    try:
        lowest = int(OF_CONNECTIONS.read_text().split()[0])
    except OSError:  # not Linux
        lowest = FIRST_PORT
    ours = range(FIRST_PORT, lowest)
    chance = secrets.SystemRandom()  # not that of a seed, which others may have too
    for port in (*chance.sample(ours, min(TRIES, len(ours))), 0):
        with suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    raise EngineFailed("no port is free", "an end to what holds them: ss -tan")


def write_plugin(folder: Path) -> None:
    """Write into `folder`, which is on vLLM's path, a distribution whose entry point makes vLLM find our plugin."""
    found = folder / "slm_trace-0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: slm-trace\nVersion: 0\n", "utf-8")
    (found / "entry_points.txt").write_text("[vllm.stat_logger_plugins]\nslm_trace = slm_trace:TraceWriter\n", "utf-8")


def trace_file(folder: Path) -> Path:
    return folder / "steps.jsonl"


def tellers(folder: Path) -> int:
    """The number of front ends, or of engines behind one, that have reported their limits."""
    with suppress(OSError), trace_file(folder).open("rb") as file:
        return sum(line.startswith(b"{") for line in file)
    return 0


def trace_lines(folder: Path, after: int = 0) -> list[Any]:
    """The lines that the plugin wrote from byte `after` on, as values: its limits, then a row for each step."""
    with trace_file(folder).open("rb") as file:
        file.seek(after)
        return [json.loads(line) for line in file if line.endswith(b"\n")]
