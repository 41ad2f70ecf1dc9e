"""Nodes of a cluster that can measure, whether they are of one kind, and what an engine needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_slmserve.plan.titles import Engines, gpus_of
from pytest_slmserve.report.numbers import counted
from pytest_slmserve.schema.environment import Environment, differences
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.literals import Platform
from pytest_slmserve.telemetry.host_probe import Host

A_TOUCH = 0.001  # of a resource that only says where to run


@dataclass(frozen=True, slots=True)
class Node:
    """A living node. gpus, cpus: as Ray counts them. name: for people."""

    id: str
    name: str
    gpus: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Need:
    """The resources that a task takes of its node while it runs. resource: "" or one that the node must have."""

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
    found = [_node(row) for row in rows if row["Alive"] and (not resource or row["Resources"].get(resource))]
    return sorted(found, key=lambda node: (-node.gpus, node.name))


def _node(row: Mapping[str, Any]) -> Node:
    has = row["Resources"]
    name = f"{row.get('NodeName') or row['NodeManagerAddress']} ({row['NodeID'][:8]})"
    return Node(row["NodeID"], name, int(has.get("GPU", 0)), int(has.get("CPU", 0)))


def measuring(nodes: Sequence[Node], platform: Platform) -> list[Node]:
    """The nodes on which cells are measured. The simulated engine takes the GPUs of a cluster that has some, to try out
    how cells spread. Raises BadUsage where there is none."""
    with_gpus, with_cpus = [n for n in nodes if n.gpus], [n for n in nodes if n.cpus]
    found = {"cuda": with_gpus, "simulated": with_gpus or with_cpus}.get(platform, with_cpus)
    if not found:
        what = "a GPU" if platform == "cuda" else "a CPU"
        raise BadUsage(
            f"no node of this cluster offers {what} (looked at {len(nodes)})", "ray status tells what it has"
        )
    return found


def need_of(engine: Engines, nodes: Sequence[Node], resource: str = "") -> Need:
    """nodes: those that measure. An engine on the CPU takes all cores that there are, so a node has one at a time.
    Raises BadUsage where none of them has room for it."""
    if engine.platform == "cpu":
        return Need(0, min(node.cpus for node in nodes), resource)
    on_gpus = any(node.gpus for node in nodes)
    need = Need(gpus_of(engine) if on_gpus else 0, min(1, *(node.cpus for node in nodes), 1), resource)
    if not any(map(need.fits, nodes)):
        most = max(node.gpus for node in nodes)
        raise BadUsage(f"an engine takes {need}, and no node of this cluster has more than {most}", f"{most} or fewer")
    return need


def one_host(found: Mapping[Node, Host], mine: Environment) -> Host:
    """The nodes as one host, with the GPUs of the widest of them. mine: of who asks.

    Raises BadUsage where they are of different kinds, or have another release of this package.
    """
    first = next(iter(found))
    for node, host in found.items():
        if host.environment.pytest_slmserve != mine.pytest_slmserve:
            there = host.environment.pytest_slmserve
            raise BadUsage(
                f"{node.name} has pytest-slmserve {there}, and {mine.pytest_slmserve} asks",
                "the same release on every node",
            )
        sides = f"on {first.name}", f"on {node.name}"
        if unlike := differences(found[first].environment.kind, host.environment.kind, sides):
            raise BadUsage(
                f"the nodes are of different kinds ({'; '.join(unlike)}): what they serve cannot be compared",
                "--slm-ray-resource with one that only nodes of one kind have, such as accelerator_type:H200",
            )
    widest = max(found, key=lambda node: node.gpus)
    host = found[widest]
    environment = replace(host.environment, git_commit=mine.git_commit)
    return replace(host, environment=environment, gpus=host.gpus[: widest.gpus] if widest.gpus else host.gpus)
