"""The way into a Ray cluster: does it answer, and what do its nodes say of themselves?"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

from pytest_slmserve.engines.launch.child_process import FOLDER, GUARDIAN
from pytest_slmserve.options.table import Options
from pytest_slmserve.run.ray.nodes import Node
from pytest_slmserve.run.ray.task import look_around
from pytest_slmserve.schema.errors import BadUsage, SlmError, named
from pytest_slmserve.telemetry.host_probe import Host

ANSWER_S = 30.0  # seen: 2 s
LOOK_S = 120.0  # a node starts an interpreter, and looks at another
INSTALL_S = 1800.0  # where it has to install packages first
# Ray waits two minutes for an address that does not answer, and then ends the process that asked.
ASK = "import logging, sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level=logging.CRITICAL)"

# Of a Ray that only this run uses: it reports to nobody, and only who has its token may connect.
OWN = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)}
STORE_BYTES = 256 * 2**20
# Engines may keep all cores busy for minutes, which Ray would take for the death of the node.
PATIENT = {"health_check_timeout_ms": 600_000, "health_check_failure_threshold": 100}


def connect(options: Options) -> Any:
    """Ray, connected. Raises BadUsage where it is not installed, or the address does not answer."""
    environment = runtime_env(options.ray_env) if options.ray_env else None
    with _imported() as ray:
        check_answers(options.ray)
        try:
            with _own_signals():
                ray.init(options.ray, runtime_env=environment, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # what Ray raises here is of many kinds, and the user's affair
            raise _unreachable(options.ray, str(error)) from None
    return ray


@contextmanager
def _own_signals() -> Iterator[None]:
    """Context after which SIGTERM does what it did before: Ray would have it end the process with nothing told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def start_here(tasks: int) -> Iterator[Any]:
    """Ray on this host alone, for so many tasks at a time, until the context ends; its files go with it. Raises
    BadUsage where it is not installed, or does not start."""
    before = {name: os.environ.get(name) for name in OWN}
    os.environ |= OWN  # read when Ray is imported
    try:
        with (
            TemporaryDirectory(prefix="slm-", ignore_cleanup_errors=True) as folder,
            _guarded(folder),
            _imported() as ray,
        ):
            with _own_signals():
                ray.init(
                    "local",
                    num_cpus=tasks,
                    num_gpus=0,  # the tasks are told which they have
                    include_dashboard=False,
                    object_store_memory=STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address="127.0.0.1",
                    _system_config=PATIENT,
                    _temp_dir=folder,
                )
            try:
                yield ray
            finally:
                ray.shutdown()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ |= {} if value is None else {name: value}


@contextmanager
def _guarded(folder: str) -> Iterator[None]:
    """Context in which Ray's processes and its folder do not outlive this process, however it ends. Ray's agents are
    children of a child of ours, and end a minute after it."""
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", str(GUARDIAN), str(os.getpid())],
        env={**os.environ, FOLDER: folder},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for us, and the group of pytest is not to be killed
    )
    try:
        yield
    finally:
        guardian.terminate()
        guardian.wait()


@contextmanager
def _imported() -> Iterator[Any]:
    """Ray, with its warnings silent. Raises BadUsage where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, which a run with -W error must survive
        try:
            import ray
        except ImportError:
            raise BadUsage(
                "--slm-ray needs Ray, which is not installed", "pip install 'pytest-slmserve[ray]'"
            ) from None
        yield ray


def runtime_env(path: str) -> dict[str, Any]:
    """Raises BadUsage where the file holds no JSON object."""
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise BadUsage(f"--slm-ray-env: cannot read {path}: {error.strerror}", "another path") from None
    except ValueError as error:
        raise BadUsage(f"--slm-ray-env: {path} is not JSON ({error})", '{"pip": ["vllm==0.26.0"]}') from None
    if not isinstance(found, dict):
        raise BadUsage(f"--slm-ray-env: {path} holds no JSON object", '{"pip": ["vllm==0.26.0"]}')
    return found


def check_answers(address: str) -> None:
    """Raises BadUsage where nobody lets a process in. A process of its own asks, which can be ended."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", ASK, address],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
    except subprocess.TimeoutExpired:
        raise _unreachable(address, f"no answer within {ANSWER_S:.0f} s") from None
    if asked.returncode:
        raise _unreachable(address, asked.stderr)


def _unreachable(address: str, told: str) -> BadUsage:
    lines = [line for line in told.strip().splitlines() if line.strip()] or ["it did not say why"]
    why = lines[-1].strip()
    return BadUsage(
        f"--slm-ray {address}: no Ray cluster answers there ({why})",
        "ray status on a node of the cluster, and pytest on one of its nodes",
    )


def hosts_of(ray: Any, options: Options, nodes: Sequence[Node]) -> dict[Node, Host]:
    """The host that each node reports, without the nodes that Ray still lists although they are gone. Raises BadUsage
    where a node cannot measure, or does not answer."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(max_calls=1, num_cpus=0, max_retries=0)(look_around)
    there = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes]
    asked = [task.options(scheduling_strategy=at).remote(options) for at in there]
    ray.wait(asked, num_returns=len(asked), timeout=INSTALL_S if options.ray_env else LOOK_S)
    said = {node: _said(ray, node, answer) for node, answer in zip(nodes, asked)}
    return {node: host for node, host in said.items() if host is not None}


def _said(ray: Any, node: Node, answer: Any) -> Host | None:
    gone = (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError, ray.exceptions.LocalRayletDiedError)
    try:
        host: Host | SlmError = ray.get(answer, timeout=0)
    except gone:
        return None
    except ray.exceptions.GetTimeoutError:
        raise BadUsage(f"{node.name} does not answer", "ray status, or --slm-ray-resource without it") from None
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise BadUsage(
            f"{node.name} cannot make the environment of --slm-ray-env ({_last(error)})",
            "packages that the index of the nodes has",
        ) from None
    except Exception as error:
        raise BadUsage(
            f"{node.name} cannot run what it is sent ({_last(error)})",
            "pytest-slmserve installed there, or named in --slm-ray-env, and the same Python",
        ) from None
    if isinstance(host, SlmError):
        raise named(node.name, host)
    return host


def _last(error: Exception) -> str:
    """The end of what Ray tells, which is the reason."""
    return str(error).strip().splitlines()[-1].strip()
