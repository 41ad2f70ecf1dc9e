"""The engine, or the set of replicas, that has the devices of a session: one at a time, and one start for each
specification."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from pytest_slmserve.engines.base import Engine
from pytest_slmserve.engines.endpoint import TIMEOUT_S, EndpointEngine
from pytest_slmserve.engines.replicas import ReplicaEngines, cannot_share
from pytest_slmserve.engines.server import BatchedEngine, OfflineEngine, ServerEngine
from pytest_slmserve.engines.simulated import SimulatedBatches, SimulatedEngine
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec

Engines = EngineSpec | ReplicaSpec
Launched = TypeVar("Launched", Engine, ReplicaEngines)
PROCESSES = {"cuda", "cpu"}  # platforms whose engines are processes of this host


def launch_engine(
    spec: EngineSpec,
    *,
    extra_env: Mapping[str, str] | None = None,
    cores: Collection[int] = (),
    timeout_s: float = TIMEOUT_S,
    speed: float = 1.0,
    gpus: int = 0,
) -> Engine:
    """Launch the engine of a specification. It does not touch its device before its `start`.

    Args:
        extra_env: Environment variables of this launch only.
        cores: CPU cores that it may use. Defaults to all.
        timeout_s: The longest that a request to an endpoint may last.
        speed, gpus: Of a simulated engine, its share of the device's speed, and the number of GPUs that it reports.
    """
    batches = spec.interface == "transformers"
    match spec.platform:
        case "simulated":
            kind = SimulatedBatches if batches else SimulatedEngine
            return kind(spec, speed=speed, extra_env=extra_env, gpus=gpus)
        case "remote":
            return EndpointEngine(spec, timeout_s=timeout_s)
        case "cuda" | "cpu":
            served = ServerEngine if spec.interface == "server" else OfflineEngine
            return (BatchedEngine if batches else served)(spec, extra_env=extra_env, cores=cores)


class Pool:
    """The engine or the replicas that run. A request for another specification stops them first.

    Attributes:
        launch: Launches an engine, as `launch_engine` does.
        starts: The specification of each start, in order.
        on_wait: Called while an engine starts, with its specification and its log.
        on_started: Called when an engine is ready, with its specification and the seconds that its start took.
    """

    def __init__(
        self, launch: Callable[..., Engine] = launch_engine, device: str = "none", timeout_s: float = TIMEOUT_S
    ) -> None:
        """device: UUID of the device that replicas share. timeout_s: The longest that a request to an endpoint may
        last."""
        self.launch, self.device = partial(launch, timeout_s=timeout_s), device
        self.starts: list[Engines] = []
        self.on_wait: Callable[[Engines, Path], None] | None = None
        self.on_started: Callable[[Engines, float], None] | None = None
        self._running: Engine | ReplicaEngines | None = None
        self._failed: tuple[Engines, EngineFailed] | None = None

    @property
    def current(self) -> Engines | None:
        return self._running.spec if self._running else None

    def engine(self, spec: EngineSpec) -> Engine:
        """The engine of `spec`: the one that runs if it is ready, or one that is started. Raises EngineFailed if it
        does not start; an engine that did not start is not tried again."""
        if isinstance(self._running, Engine) and self._running.spec == spec and self._running.ready:
            return self._running
        return self.start(spec, partial(self.launch, spec))

    def replicas(self, spec: ReplicaSpec) -> ReplicaEngines:
        """The replicas of `spec`: those that run if all of them are ready, or those that are started. Raises BadUsage
        if they cannot share the device in this way (`cannot_share` says it beforehand), and EngineFailed if one of them
        does not start; replicas that did not start are not tried again."""
        if isinstance(self._running, ReplicaEngines) and self._running.spec == spec and self._running.ready:
            return self._running
        if why := cannot_share(spec, self.device):
            raise BadUsage(why, "another way of sharing: time-slicing")
        return self.start(spec, partial(ReplicaEngines, spec, self.launch, self.device))

    def start(self, spec: Engines, launch: Callable[[], Launched]) -> Launched:
        """Stop what runs, and start what `launch` returns in its place. Raises EngineFailed."""
        self.close()
        self.check(spec)
        self.starts.append(spec)
        began = time.monotonic()
        try:
            running = launch().start(partial(self.on_wait, spec) if self.on_wait else None)
        except EngineFailed as error:
            self._failed = spec, error
            raise
        self._running = running
        if self.on_started:
            self.on_started(spec, time.monotonic() - began)
        return running

    def check(self, spec: Engines) -> None:
        """Raise EngineFailed if this specification was the last one that did not start."""
        if self._failed and self._failed[0] == spec:
            raise EngineFailed(f"not tried again: {self._failed[1].cause}", self._failed[1].hint)

    def close(self) -> None:
        """Stop what runs."""
        running, self._running = self._running, None
        if running:
            running.close()


@contextmanager
def abreast(
    pool: Pool, launches: Sequence[tuple[EngineSpec, Mapping[str, str]]]
) -> Iterator[list[Callable[[], Engine]]]:
    """Start functions of engines that are launched at once and then have a device one after the other.

    All have imported what they need, which is half of a start, before the first of them starts: all under the same
    conditions, and while nothing is measured. A start ends the engine before it, and in the end all engines end. An
    engine without a process here is launched when it starts.

    launches: The specification and the environment variables of each launch.
    """

    def take(spec: EngineSpec, extra_env: Mapping[str, str], launched: Engine | None) -> Engine:
        return pool.start(spec, lambda: launched or pool.launch(spec, extra_env=extra_env))

    with ExitStack() as undo:
        undo.callback(pool.close)
        pool.close()
        engines: list[Engine | None] = []
        for spec, extra_env in launches:
            engines.append(pool.launch(spec, extra_env=extra_env) if spec.platform in PROCESSES else None)
            if engine := engines[-1]:
                undo.callback(engine.close)
        for engine in filter(None, engines):
            engine.await_turn(partial(pool.on_wait, engine.spec) if pool.on_wait else None)
        yield [partial(take, *launch, engine) for launch, engine in zip(launches, engines)]
