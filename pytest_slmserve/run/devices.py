"""Devices with their locks and sensors, and the one engine, or set of replicas, that runs on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from pytest_slmserve.engines.base import Engine
from pytest_slmserve.engines.endpoint import check_endpoints
from pytest_slmserve.engines.launch.device_lock import DeviceLock
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.engines.replicas.replica_set import ReplicaEngines
from pytest_slmserve.plan.planner import Planner, url_lock
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec
from pytest_slmserve.telemetry.sampler import INTERVAL_S, Sampler
from pytest_slmserve.telemetry.source import open_sampler


@dataclass(repr=False)
class Devices:
    """Locks, sensors and the running engine of a session, held from `hold` until `close`.

    Attributes:
        locked_for_us: Whether the process that started this one has locked the devices.
        sampler: Sensors of the first device.
    """

    planner: Planner
    pool: Pool = field(default_factory=Pool)
    locked_for_us: bool = False
    sampler: Sampler | None = None
    _samplers: dict[tuple[str, ...], Sampler | None] = field(default_factory=dict)  # of others
    _locked: set[str] = field(default_factory=set)
    _undo: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def from_options(cls, planner: Planner) -> Devices:
        """The devices of a run, with sensors if any can be read. Raises SensorFailed or BadUsage if requested sensors
        are missing."""
        found = cls(planner, Pool(device=planner.host.device, timeout_s=planner.options.timeout))
        if planner.platform == "remote":
            planner.notes.append("no sensors are read: on which device an endpoint runs is not known")
        elif planner.platform != "simulated" and not (planner.options.plan or planner.options.ray):
            found.sampler = found._opened((planner.host.device,))  # the simulated engine simulates its own
        return found

    def hold(self) -> None:
        """Take the first device, or the endpoints. Raises BadUsage if no endpoint answers, DeviceBusy."""
        if urls := self.planner.options.endpoint:
            self.lock([url_lock(url) for url in urls])
            check_endpoints(urls, self.planner.models, self.planner.options.timeout)
        else:
            self.lock((self.planner.host.device,))
        self._undo.callback(self.pool.close)

    def take(self, spec: EngineSpec | ReplicaSpec) -> None:
        """Lock the GPUs that it runs on until the session ends; the first is locked since the session was opened.
        Raises BadUsage if they are not there, DeviceBusy if another run has one of them."""
        self.lock([device for device in self.planner.devices(spec) if device != self.planner.host.device])

    def lock(self, devices: Sequence[str]) -> None:
        """Lock devices until the session ends. A simulated run locks none, because a formula disturbs nobody; nor does
        a run whose engines are on a cluster. Raises DeviceBusy."""
        options = self.planner.options
        on_a_cluster = options.ray and not options.on_all_gpus
        if self.locked_for_us or self.planner.platform == "simulated" or on_a_cluster:
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

    def start(self, spec: EngineSpec | ReplicaSpec) -> Engine | ReplicaEngines:
        """The engine, or the set of replicas, of `spec`: what runs, or what is started. What runs is stopped if `spec`
        does not start. Raises BadUsage, DeviceBusy, EngineFailed."""
        self.take(spec)
        self.pool.check(spec)
        try:
            return self.pool.replicas(spec) if isinstance(spec, ReplicaSpec) else self.pool.engine(spec)
        except BaseException:
            self.pool.close()
            raise

    # Sensors

    def _opened(self, devices: Sequence[str]) -> Sampler | None:
        """Raises SensorFailed or BadUsage if sensors that were asked for are not there."""
        options, notes = self.planner.options, self.planner.notes
        interval_s = options.telemetry_interval or INTERVAL_S
        sampler, said = open_sampler(options.telemetry, devices[0], interval_s, devices[1:])
        notes.extend(note for note in said if note not in notes)
        if sampler:
            self._undo.callback(sampler.close)
        return sampler

    def sampler_on(self, devices: tuple[str, ...]) -> Sampler | None:
        """The sensors of GPUs on which an engine runs, opened once for each set of them."""
        if self.sampler is None or devices == (self.planner.host.device,):
            return self.sampler
        if devices not in self._samplers:
            self._samplers[devices] = self._opened(devices)
        return self._samplers[devices]

    def own_sampler(self) -> Sampler | None:
        """A sampler for blocks of a user's tests: the sensors of the engines, or simulated ones for a simulated engine.
        None if the run reads no sensors."""
        options = self.planner.options
        if self.sampler or self.planner.platform != "simulated" or options.telemetry == "off":
            gpus = self.planner.host.gpus[: options.tensor_parallel_size[0]]
            return self.sampler_on(tuple(gpu.uuid for gpu in gpus)) if len(gpus) > 1 else self.sampler
        from pytest_slmserve.telemetry.source import SimulatedSource

        return Sampler([SimulatedSource()], options.telemetry_interval or INTERVAL_S)
