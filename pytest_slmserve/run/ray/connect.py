"""The way into Ray: a cluster that answers, with what its nodes say of themselves, or a Ray of this host's own."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

from pytest_slmserve.engines.launch.child_process import FOLDER, GUARDIAN
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import Engines
from pytest_slmserve.report.text_table import counted
from pytest_slmserve.run.ray.remote import look_around
from pytest_slmserve.schema.environment import Environment, differences
from pytest_slmserve.schema.errors import BadUsage, Platform, SlmError
from pytest_slmserve.telemetry.host import Host

ANSWER_S = 30.0  # seen: 2 s
LOOK_S = 120.0  # a node starts an interpreter, and looks at another
INSTALL_S = 1800.0  # if it has to install packages first
# Ray waits two minutes for an address that does not answer, and then ends the process that asked.
ASK = "import logging, sys, ray; ray.init(sys.argv[1], log_to_driver=False, logging_level=logging.CRITICAL)"
# A Ray that only this run uses reports to nobody, and only a process that has its token may connect.
OWN = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)}
STORE_BYTES = 256 * 2**20
# Engines may keep all cores busy for minutes, which Ray would take for the death of the node.
PATIENT = {"health_check_timeout_ms": 600_000, "health_check_failure_threshold": 100}


# Nodes


@dataclass(frozen=True, slots=True)
class Node:
    """A living node. gpus, cpus: as Ray counts them. name: for people."""

    id: str
    name: str
    gpus: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Need:
    """The resources that an engine takes of its node while it runs. resource: "" or one that the node must have."""

    gpus: int
    cpus: int
    resource: str = ""

    def __str__(self) -> str:
        what = counted(self.gpus, "GPU") if self.gpus else f"{self.cpus} CPUs"
        return f"{what} and {self.resource}" if self.resource else what

    def fits(self, node: Node) -> bool:
        return self.gpus <= node.gpus and self.cpus <= node.cpus


def nodes_of(rows: Iterable[Mapping[str, Any]], resource: str = "") -> list[Node]:
    """Living nodes by what `ray.nodes()` says, those with GPUs first. resource: one that they must have."""
    found = []
    for row in rows:
        has = row["Resources"]
        if row["Alive"] and (not resource or has.get(resource)):
            name = f"{row.get('NodeName') or row['NodeManagerAddress']} ({row['NodeID'][:8]})"
            found.append(Node(row["NodeID"], name, int(has.get("GPU", 0)), int(has.get("CPU", 0))))
    return sorted(found, key=lambda node: (-node.gpus, node.name))


def measuring(nodes: Sequence[Node], platform: Platform) -> list[Node]:
    """The nodes on which cases are measured. The simulated engine takes the GPUs of a cluster that has some, to try out
    how cases spread. Raises BadUsage if there is no such node."""
    with_gpus, with_cpus = [n for n in nodes if n.gpus], [n for n in nodes if n.cpus]
    found = {"cuda": with_gpus, "simulated": with_gpus or with_cpus}.get(platform, with_cpus)
    if not found:
        what = "a GPU" if platform == "cuda" else "a CPU"
        looked = f"no node of this cluster offers {what} (looked at {len(nodes)})"
        raise BadUsage(looked, "ray status tells what it has")
    return found


def need_of(engine: Engines, nodes: Sequence[Node], resource: str = "") -> Need:
    """nodes: those that measure. An engine on the CPU takes all cores that there are, so a node has one at a time.
    Raises BadUsage if none of them has room for it."""
    if engine.platform == "cpu":
        return Need(0, min(node.cpus for node in nodes), resource)
    on_gpus = any(node.gpus for node in nodes)
    need = Need(len(engine.gpus) if on_gpus else 0, min(1, *(node.cpus for node in nodes), 1), resource)
    if not any(map(need.fits, nodes)):
        most = max(node.gpus for node in nodes)
        raise BadUsage(f"an engine takes {need}, and no node of this cluster has more than {most}", f"{most} or fewer")
    return need


def one_host(found: Mapping[Node, Host], mine: Environment) -> Host:
    """The nodes as one host, with the GPUs of the widest of them. mine: that of the session's process.

    Raises BadUsage if they are of different kinds, or have another release of this package.
    """
    first = next(iter(found))
    for node, host in found.items():
        if host.environment.pytest_slmserve != mine.pytest_slmserve:
            there = host.environment.pytest_slmserve
            why = f"{node.name} has pytest-slmserve {there}, and {mine.pytest_slmserve} asks"
            raise BadUsage(why, "the same release on every node")
        sides = f"on {first.name}", f"on {node.name}"
        if unlike := differences(found[first].environment.kind, host.environment.kind, sides):
            raise BadUsage(
                f"the nodes are of different kinds ({'; '.join(unlike)}): what they serve cannot be compared",
                "-o slm_ray_resource=NAME with one that only nodes of one kind have, such as accelerator_type:H200",
            )
    widest = max(found, key=lambda node: node.gpus)
    host = found[widest]
    environment = replace(host.environment, git_commit=mine.git_commit)
    return replace(host, environment=environment, gpus=host.gpus[: widest.gpus] if widest.gpus else host.gpus)


def node_hosts(ray: Any, options: Options, nodes: Sequence[Node]) -> dict[Node, Host]:
    """The host that each node reports, without the nodes that Ray still lists although they are gone. Raises BadUsage
    if a node cannot measure, or does not answer."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(max_calls=1, num_cpus=0, max_retries=0)(look_around)
    there = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes]
    asked = [task.options(scheduling_strategy=at).remote(options) for at in there]
    ray.wait(asked, num_returns=len(asked), timeout=INSTALL_S if options.ray_env else LOOK_S)
    found = {node: node_host(ray, node, answer) for node, answer in zip(nodes, asked)}
    return {node: host for node, host in found.items() if host is not None}


def node_host(ray: Any, node: Node, answer: Any) -> Host | None:
    """The host that a node reports by the task `answer`; None if the node is gone. Raises BadUsage as `node_hosts`
    does."""
    gone = (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError, ray.exceptions.LocalRayletDiedError)
    try:
        host: Host | SlmError = ray.get(answer, timeout=0)
    except gone:
        return None
    except ray.exceptions.GetTimeoutError:
        raise BadUsage(f"{node.name} does not answer", "ray status, or a run without slm_ray_resource") from None
    except Exception as error:
        last = str(error).strip().splitlines()[-1].strip()  # the end of what Ray tells is the reason
        if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
            why = f"{node.name} cannot make the environment of slm_ray_env ({last})"
            raise BadUsage(why, "packages that the index of the nodes has") from None
        hint = "pytest-slmserve installed there, or named in slm_ray_env, and the same Python"
        raise BadUsage(f"{node.name} cannot run what it is sent ({last})", hint) from None
    if isinstance(host, SlmError):
        raise type(host)(f"{node.name}: {host.problem}", host.hint)
    return host


# Connections


def join_cluster(options: Options) -> Any:
    """Ray, connected to the cluster of the options. Raises BadUsage if nobody answers there. A process of its own asks
    first, because such a process can be ended."""
    environment, address = runtime_env(options.ray_env) if options.ray_env else None, options.ray
    told = ""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", ASK, address],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        if asked.returncode == 0:
            return _ray_at(address, runtime_env=environment)
        told = asked.stderr
    except subprocess.TimeoutExpired:
        told = f"no answer within {ANSWER_S:.0f} s"
    except Exception as error:  # what Ray raises here is of many kinds, and the user's affair
        told = str(error)
    lines = [line for line in told.strip().splitlines() if line.strip()] or ["it did not say why"]
    raise BadUsage(
        f"--slm-ray {address}: no Ray cluster answers there ({lines[-1].strip()})",
        "ray status on a node of the cluster, and pytest on one of its nodes",
    )


def runtime_env(path: str) -> dict[str, Any]:
    """The environment of what runs on the nodes. Raises BadUsage if the file holds no JSON object."""
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise BadUsage(f"slm_ray_env: cannot read {path}: {error.strerror}", "another path") from None
    except ValueError as error:
        raise BadUsage(f"slm_ray_env: {path} is not JSON ({error})", '{"pip": ["vllm==0.26.0"]}') from None
    if not isinstance(found, dict):
        raise BadUsage(f"slm_ray_env: {path} holds no JSON object", '{"pip": ["vllm==0.26.0"]}')
    return found


def _ray_at(address: str, **words: Any) -> Any:
    """Ray, connected to an address, with its own warnings silent, which a run with -W error must survive. SIGTERM does
    what it did before: Ray would have it end the process with nothing told."""
    before = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **words)
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)
    return ray


@contextmanager
def start_here(tasks: int) -> Iterator[Any]:
    """Ray on this host alone, for so many engines at a time, until the context ends. Its processes and its files do not
    outlive this process, however it ends: Ray's agents are children of a child of ours, and end a minute after it."""
    with ExitStack() as undo:
        undo.callback(os.environ.update, {name: os.environ[name] for name in OWN if name in os.environ})
        for name in OWN:
            undo.callback(os.environ.pop, name)
        os.environ |= OWN  # read when Ray is imported
        folder = undo.enter_context(TemporaryDirectory(prefix="slm-", ignore_cleanup_errors=True))
        guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARDIAN), str(os.getpid())],
            env={**os.environ, FOLDER: folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us, and the group of pytest is not to be killed
        )
        undo.callback(guardian.wait)
        undo.callback(guardian.terminate)
        ray = _ray_at(
            "local",
            num_cpus=tasks,
            num_gpus=0,  # the slots say which an engine has
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _system_config=PATIENT,
            _temp_dir=folder,
        )
        undo.callback(ray.shutdown)
        yield ray
