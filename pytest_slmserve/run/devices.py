"""What engines run on: the devices with their locks and sensors, and the one engine, or set of replicas, that runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from pytest_slmserve.engines.base import Engine
from pytest_slmserve.engines.endpoint import check_endpoints
from pytest_slmserve.engines.launch.device_lock import DeviceLock
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.replicas.gpu_sharing import start_replicas
from pytest_slmserve.engines.replicas.replica_set import Replicas
from pytest_slmserve.plan.planner import Agenda, url_lock
from pytest_slmserve.run.gpu_slots import Desk
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec
from pytest_slmserve.telemetry.host_probe import Host, memory_used
from pytest_slmserve.telemetry.sampler import INTERVAL_S, Sampler
from pytest_slmserve.telemetry.source import open_sampler


@dataclass(repr=False)
class Devices:
    """Held from `hold` until `close`. desk: of a worker, whose devices its controller holds. sampler: of the first
    device. Where a cluster measures, nothing here is held."""

    agenda: Agenda
    pool: Pool = field(default_factory=Pool)
    desk: Desk | None = None
    sampler: Sampler | None = None
    _samplers: dict[tuple[str, ...], Sampler | None] = field(default_factory=dict)  # of others
    _locked: set[str] = field(default_factory=set)
    _undo: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def of(cls, agenda: Agenda, desk: Desk | None = None) -> Devices:
        """With sensors, where there are any to be read. Raises SensorFailed or BadUsage where those that were asked for
        are not there."""
        found = cls(agenda, Pool(start_replicas=partial(_start_replicas, host=agenda.host)), desk)
        if agenda.backend == "remote":
            agenda.notes.append("no sensors are read: on which device an endpoint runs is not known")
        elif agenda.backend != "fake" and not (agenda.options.plan or agenda.options.ray):
            found.open_sensors()  # the simulated engine simulates its own
        return found

    def hold(self) -> None:
        """Take the first device, or the endpoints. Raises BadUsage where no endpoint answers, DeviceBusy."""
        if self.desk:
            self._undo.callback(self.desk.leave)
        elif urls := self.agenda.options.endpoint:
            self.lock([url_lock(url) for url in urls])
            check_endpoints(urls, self.agenda.models)
        else:
            self.lock((self.agenda.host.device,))
        self._undo.callback(self.pool.close)

    def take(self, spec: EngineSpec | ReplicaSpec) -> None:
        """The GPUs that it runs on are ours until the session ends, as the first is since it was opened. Raises
        BadUsage where they are not there, DeviceBusy where another run has one of them."""
        devices = [device for device in self.agenda.devices(spec) if device != self.agenda.host.device]
        if not self.desk:
            self.lock(devices)

    def lock(self, devices: Sequence[str]) -> None:
        """Until the session ends. Raises DeviceBusy."""
        if self.agenda.backend == "fake" or self.agenda.options.ray:  # a formula disturbs nobody, a cluster none here
            return
        for device in devices:
            if device not in self._locked:
                lock = DeviceLock(device)
                lock.acquire()
                self._locked.add(device)
                self._undo.callback(lock.release)

    def close(self) -> None:
        self._undo.close()

    # Engines

    def engine(self, spec: EngineSpec) -> Engine:
        """The one that runs, or one that is started. Raises BadUsage, DeviceBusy, EngineFailed."""
        with self._room_for(spec):
            return self.pool.engine(spec)

    def replicas(self, spec: ReplicaSpec) -> Replicas:
        """The same of several at once."""
        with self._room_for(spec):
            return self.pool.replicas(spec)

    @contextmanager
    def _room_for(self, spec: EngineSpec | ReplicaSpec) -> Iterator[None]:
        """A worker waits until no other has the GPUs that this takes. They are free again if it does not start."""
        self.take(spec)
        self.pool.check(spec)
        if self.desk and self.pool.current != spec:
            self.stop()
            self.desk.take(len(spec.gpus) if self.agenda.host.gpus else 1)
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """The engine that runs, if one does; its GPUs are free for other workers."""
        self.pool.close()
        if self.desk:
            self.desk.leave()

    @property
    def neighbours(self) -> int:
        """Devices of other workers on which an engine runs now."""
        return self.desk.neighbours if self.desk else 0

    # Sensors

    def open_sensors(self) -> None:
        """Raises SensorFailed or BadUsage where those that were asked for are not there."""
        self.sampler = self._opened((self.agenda.host.device,))

    def _opened(self, devices: Sequence[str]) -> Sampler | None:
        options, notes = self.agenda.options, self.agenda.notes
        interval_s = options.telemetry_interval or INTERVAL_S
        sampler, said = open_sampler(options.telemetry, devices[0], interval_s, devices[1:])
        notes.extend(note for note in said if note not in notes)
        if sampler:
            self._undo.callback(sampler.close)
        return sampler

    def sampler_of(self, spec: EngineSpec | ReplicaSpec) -> Sampler | None:
        """The sensors of the GPUs that it runs on, opened once for each set of them."""
        held = self.desk.held if self.desk and self.agenda.host.gpus else ()
        return self._sampler_on(held or self.agenda.devices(spec))

    def _sampler_on(self, devices: tuple[str, ...]) -> Sampler | None:
        if self.sampler is None or devices == (self.agenda.host.device,):
            return self.sampler
        if devices not in self._samplers:
            self._samplers[devices] = self._opened(devices)
        return self._samplers[devices]

    def own_sampler(self) -> Sampler | None:
        """For blocks of a user's tests: what is read beside engines, or imagined sensors beside a simulated one."""
        options = self.agenda.options
        if self.sampler or self.agenda.backend != "fake" or options.telemetry == "off":
            gpus = self.agenda.host.gpus[: options.tensor_parallel[0]]
            return self._sampler_on(tuple(gpu.uuid for gpu in gpus)) if len(gpus) > 1 else self.sampler
        from pytest_slmserve.telemetry.simulated import SimulatedSource

        return Sampler([SimulatedSource()], options.telemetry_interval or INTERVAL_S)


def _start_replicas(spec: ReplicaSpec, host: Host) -> Replicas:
    used = partial(memory_used, host.device) if spec.backend == "cuda" else None
    return start_replicas(spec, host.device, used)
