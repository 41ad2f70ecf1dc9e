"""GPUs of this host that serve at the same time, each with an equal part of the CPU cores."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from pytest_slmserve.options.table import Options
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.telemetry.host import Host, near_cores, numa_nodes, own_cores, visible_names


@dataclass(frozen=True, slots=True)
class GpuSlots:
    """Slots of a host. A slot is a GPU, or a part of the CPU if there are no GPUs, and serves one engine at a time.

    devices: in the order of the host. visible: their names in CUDA_VISIBLE_DEVICES, none on a simulated host. cores:
    of each slot, equally many.
    """

    devices: tuple[str, ...]
    visible: tuple[str, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def from_host(cls, host: Host, count: int, widest: int = 1) -> GpuSlots:
        """The first `count` slots. widest: GPUs of an engine, or its processes on the CPU. Raises BadUsage for more
        slots than GPUs or cores, and for an engine that is wider than they are."""
        if host.gpus and count > len(host.gpus):
            there = f"{len(host.gpus)} GPU{'s are' if len(host.gpus) > 1 else ' is'}"
            raise BadUsage(f"--slm-ray local:{count}: {there} visible", f"--slm-ray local:{len(host.gpus)}")
        ours = own_cores()
        if 0 < len(ours) < count:
            why = f"each engine needs a core, and there are {len(ours)}"
            raise BadUsage(f"--slm-ray local:{count}: {why}", f"--slm-ray local:{len(ours)}")
        near = [near_cores(gpu) & ours or ours for gpu in host.gpus[:count]] or [ours] * count
        devices = [gpu.uuid for gpu in host.gpus[:count]] or [f"{host.device}-{i}" for i in range(count)]
        visible = visible_names()[:count] if host.environment.platform == "cuda" else []
        cores = equal_parts(near, sorted(ours))
        if host.gpus and count < widest:
            raise BadUsage(f"--slm-ray local:{count}: an engine takes {widest} GPUs", f"--slm-ray local:{widest}")
        if not host.gpus and 0 < len(cores[0]) < widest:
            why = f"an engine of {widest} processes needs a core for each, and has {len(cores[0])}"
            raise BadUsage(f"--slm-ray local:{count}: {why}", f"--slm-ray local:{len(ours) // widest or 1}")
        return cls(tuple(devices), tuple(visible), tuple(cores))

    def block(self, count: int, free: Set[int]) -> tuple[int, ...] | None:
        """The first of `free` for one GPU; for several, GPUs next to each other, in the order of the host: how
        they reach each other is then found out by vLLM once. None if none are free."""
        if count == 1:
            return (min(free),) if free else None
        blocks = (range(first, first + count) for first in range(0, len(self.devices) - count + 1, count))
        return next((tuple(block) for block in blocks if free >= set(block)), None)

    def pin(self, at: Sequence[int]) -> None:
        """Pins this process, and all that it starts, to the cores of the slots `at`, and shows it only their GPUs."""
        if any(self.cores) and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core for slot in at for core in self.cores[slot]})
        if self.visible:  # by their numbers if those were given: not every vLLM understands a UUID
            names = ",".join(self.visible[slot] for slot in at)
            os.environ |= {"CUDA_VISIBLE_DEVICES": names, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def host(self, host: Host, at: Sequence[int]) -> Host:
        """The host as an engine on the slots `at` finds it: their GPUs, and for each the cores of one slot."""
        by_name = {gpu.uuid: gpu for gpu in host.gpus}
        gpus = tuple(by_name[self.devices[slot]] for slot in at if self.devices[slot] in by_name)
        cores = len(self.cores[0]) if any(self.cores) else host.environment.cores
        environment = replace(host.environment, cores=cores, of_gpus=1 if gpus else None)
        return replace(host, environment=environment, gpus=gpus)


def slot_count(options: Options, host: Host) -> int:
    """The number of slots that `--slm-ray local` asks for: as many as it names, else all visible GPUs, simulated GPUs
    (no more than cores), or the NUMA nodes of a CPU."""
    if named := options.ray.partition(":")[2]:
        return int(named)
    match host.environment.platform:
        case "cuda":
            return len(host.gpus)
        case "simulated":
            return min(len(host.gpus), len(own_cores()) or 1)
        case _:
            return numa_nodes()


def equal_parts(near: Sequence[frozenset[int]], ours: Sequence[int]) -> list[tuple[int, ...]]:
    """Parts of the cores, one for each slot: equally many, near its GPU, adjacent, none for two slots. Measurements on
    different numbers of cores are not compared. If the cores near some GPU are too few, the parts are taken from all
    cores."""
    sharers = [sum(not here.isdisjoint(there) for there in near) for here in near]
    each = min((len(cores) // sharing for cores, sharing in zip(near, sharers)), default=0)
    if each == 0:
        near, each = [frozenset(ours)] * len(near), len(ours) // max(1, len(near))
    taken, parts = set[int](), []
    for cores in near:
        part = tuple(sorted(cores - taken)[:each])
        taken |= set(part)
        parts.append(part)
    return parts
