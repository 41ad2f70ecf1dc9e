"""One run in several processes, a worker for each GPU: where each sits, who has which GPU now, what each has found.

The controller and its workers share a folder beside the archive. In it each worker has an archive and an outcome of its
own, and each GPU has a lock, held while an engine runs there. What a worker has written stays when it is killed.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_slmserve.archive.merge import part_of
from pytest_slmserve.engines.launch.file_lock import locked, try_lock
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.telemetry.host_probe import Host, near_cores, visible_names

LOOK_S = 0.05  # between two looks whether GPUs are free


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """The place of a worker on the host. records: the archive of the run. own: the number of its place. devices: of all
    places, in the order of the host. visible: their names in CUDA_VISIBLE_DEVICES, none on a simulated host. cores: of
    each place, its part of the CPU."""

    records: str
    own: int
    devices: tuple[str, ...]
    visible: tuple[str, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()

    def blocks(self, count: int) -> list[tuple[int, ...]]:
        """Places that an engine may have which takes so many: the own one, or neighbours. Always in their order:
        whatever depends on it, as vLLM's look at how GPUs reach each other does, is then found out once."""
        if count == 1:
            return [(self.own,)]
        last = len(self.devices) - count
        return [tuple(range(first, first + count)) for first in range(0, last + 1, count)]

    def sit(self, at: Sequence[int]) -> None:
        """Pins this process and all that it starts to the cores of these places, and lists their GPUs first in
        CUDA_VISIBLE_DEVICES."""
        if any(self.cores) and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core for place in at for core in self.cores[place]})
        if self.visible:  # by their numbers where those were given: not every vLLM understands a UUID
            names = ",".join(self.visible[place] for place in self.order(at))
            os.environ |= {"CUDA_VISIBLE_DEVICES": names, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def order(self, at: Sequence[int]) -> list[int]:
        """All places, beginning with these."""
        return [*at, *(place for place in range(len(self.devices)) if place not in at)]


def seats(host: Host, count: int, records: Path, widest: int = 1) -> list[GpuSlot]:
    """The place of each worker, in the order of the GPUs. widest: GPUs of an engine, or processes on the CPU. Raises
    BadUsage for more workers than GPUs or cores, and for an engine on more than they have."""
    if host.gpus and count > len(host.gpus):
        there = f"{len(host.gpus)} GPU{'s' if len(host.gpus) > 1 else ''}"
        raise BadUsage(f"-n {count}: each worker has a GPU of its own, and {there} visible", f"-n {len(host.gpus)}")
    devices = [gpu.uuid for gpu in host.gpus[:count]] or [f"{host.device}-{i}" for i in range(count)]
    ours = cores_here()
    near = [near_cores(gpu) & ours or ours for gpu in host.gpus[:count]] or [ours] * count
    if 0 < len(ours) < count:
        raise BadUsage(f"-n {count}: each worker needs a core, and there are {len(ours)}", f"-n {len(ours)} or fewer")
    visible = visible_names()[:count] if host.environment.platform == "cuda" else []
    cores = tuple(equal_parts(near, sorted(ours)))
    found = [GpuSlot(str(records.absolute()), own, tuple(devices), tuple(visible), cores) for own in range(count)]
    _check_width(host, found, widest)
    return found


def _check_width(host: Host, found: Sequence[GpuSlot], widest: int) -> None:
    count, each = len(found), len(found[0].cores[0])
    if host.gpus and count < widest:
        there = f"the workers have {count} in all" if count > 1 else "the worker has one"
        raise BadUsage(f"-n {count}: an engine on {widest} GPUs is asked for, and {there}", f"-n {widest}")
    if not host.gpus and 0 < each < widest:
        wanted = f"an engine of {widest} processes needs a core for each"
        raise BadUsage(f"-n {count}: {wanted}, and a worker has {each}", f"-n {len(cores_here()) // widest}")


def cores_here() -> frozenset[int]:
    """The CPU cores that this process may use; an empty set where the system does not report them."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def equal_parts(near: Sequence[frozenset[int]], ours: Sequence[int]) -> list[tuple[int, ...]]:
    """Parts of the cores, one for each worker: equally many, near its GPU, adjacent, none for two workers. Measurements
    on different numbers of cores are not compared. Where the cores near some GPU are too few, the parts are taken from
    all cores."""
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


@dataclass(slots=True)
class Outcome:
    """A worker's report besides its measurements. requested: keys of its cases. swept: models whose sweeps it has
    planned. reused: ids of measurements that it took from the archive. judged, notes: as of a session."""

    requested: tuple[str, ...] = ()
    swept: tuple[str, ...] = ()
    reused: frozenset[str] = frozenset()
    judged: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""  # why its options cannot be carried out


@dataclass(slots=True)
class GpuLease:
    """A worker's part of the shared folder: its archive, its outcome, and the locks of the GPUs that it holds. name: of
    the worker."""

    slot: GpuSlot
    name: str
    _held: dict[str, int] = field(default_factory=dict)  # descriptors of the GPUs' locks, by device

    @property
    def part(self) -> Path:
        """The path of the worker's own archive."""
        return part_of(Path(self.slot.records), self.name)

    @property
    def folder(self) -> Path:
        return self.part.parent

    @property
    def held(self) -> tuple[str, ...]:
        """The devices that it has."""
        return tuple(self._held)

    def take(self, count: int) -> None:
        """Wait until so many devices are free, and hold them. Whoever waits holds none, and the others wait behind it:
        so nobody waits for ever, and an engine on many GPUs gets them before those behind it take one."""
        if count == len(self._held):
            return
        self.leave()
        with locked(self.folder / "turn.lock"):
            while not (block := next(filter(self._all_of, self.slot.blocks(count)), None)):
                time.sleep(LOOK_S)
        self.slot.sit(block)

    def _all_of(self, block: Sequence[int]) -> bool:
        """Hold these, or none."""
        for device in (self.slot.devices[place] for place in block):
            self._held[device] = os.open(self._path(device), os.O_RDWR | os.O_CREAT, 0o666)
            if not try_lock(self._held[device]):
                self._let_go()
                return False
        return True

    def leave(self) -> None:
        if self._held:
            self._let_go()
            self.slot.sit((self.slot.own,))

    def _let_go(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])

    @property
    def neighbours(self) -> int:
        """Devices of other workers on which an engine runs now."""
        return sum(self._is_taken(device) for device in self.slot.devices if device not in self._held)

    def _is_taken(self, device: str) -> bool:
        with self._path(device).open("ab") as file:
            return not try_lock(file, shared=True)

    def _path(self, device: str) -> Path:
        return self.folder / f"{device}.lock"

    def agreed(self, name: str, decide: Callable[[], Any]) -> Any:
        """The decision of the first worker that requests it, for all workers of the run, as JSON gives it back. A later
        worker might decide differently by then."""
        path = _agreement(self.folder, name)
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                _write(path, json.dumps(decide()).encode())
        return agreed(self.folder, name)

    def save(self, outcome: Outcome) -> None:
        _write(self.folder / f"{self.name}.outcome", pickle.dumps(outcome))


def outcomes_of(folder: Path) -> list[Outcome]:
    """The outcomes that workers of this run have saved. The workers are the run's own processes on this host, so their
    pickles are trusted."""
    return [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("*.outcome"))]


def agreed(folder: Path, name: str) -> Any:
    """The decision `name` that the workers of this run have agreed on, as plain JSON values."""
    return json.loads(_agreement(folder, name).read_text("utf-8"))


def _agreement(folder: Path, name: str) -> Path:
    return folder / f"{name}.agreed"


def _write(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all."""
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").replace(path)


def sweep_up(folder: Path) -> None:
    """Leave nothing but archives."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.suffix in (".outcome", ".new", ".lock", ".agreed"):
            path.unlink()


def as_seen(host: Host, slot: GpuSlot) -> Host:
    """The host as it is for a worker: with the GPUs of all workers, its own first, and its part of the cores."""
    by_name = {gpu.uuid: gpu for gpu in host.gpus}
    devices = [slot.devices[place] for place in slot.order((slot.own,))]
    cores = len(slot.cores[slot.own]) if any(slot.cores) else host.environment.cores
    of_gpus = 1 if host.gpus else None
    return replace(
        host,
        environment=replace(host.environment, cores=cores, of_gpus=of_gpus),
        gpus=tuple(by_name[device] for device in devices if device in by_name),
    )
