"""The session's engines: one at a time on a device, or one set of replicas; one start per specification; and a lock on
the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pytest_slmserve.engines.base import Engine
from pytest_slmserve.engines.endpoint import EndpointEngine
from pytest_slmserve.engines.hf_generate import BatchedEngine, SimulatedBatches
from pytest_slmserve.engines.launch.child_process import waiting_for_engine
from pytest_slmserve.engines.launch.vllm_arguments import NOWHERE_ELSE
from pytest_slmserve.engines.load_client import TIMEOUT_S
from pytest_slmserve.engines.offline import OfflineEngine
from pytest_slmserve.engines.replicas.replica_set import ReplicaEngines, start_replicas
from pytest_slmserve.engines.server import ServerEngine
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec

Spec = TypeVar("Spec", EngineSpec, ReplicaSpec)
Started = TypeVar("Started", Engine, ReplicaEngines)
Launch = tuple[EngineSpec, Mapping[str, str]]  # and variables of this launch alone
Waiting = OfflineEngine | ServerEngine  # those that can wait for their turn


def start(spec: EngineSpec, extra_env: Mapping[str, str] = NOWHERE_ELSE, timeout_s: float = TIMEOUT_S) -> Engine:
    """Start the engine that `spec` asks for. extra_env: variables of this start alone. timeout_s: the longest that a
    request to an endpoint may last."""
    match spec.platform:
        case "simulated":
            return (SimulatedBatches if spec.interface == "transformers" else SimulatedEngine)(
                spec, extra_env=extra_env
            )
        case _ if spec.interface == "transformers":
            return BatchedEngine(spec, extra_env=extra_env)
        case "remote":
            return EndpointEngine(spec, timeout_s=timeout_s)
        case _ if spec.interface == "server":
            return ServerEngine(spec, extra_env=extra_env)
        case _:
            return OfflineEngine(spec, extra_env=extra_env)


def hold(spec: EngineSpec, extra_env: Mapping[str, str] = NOWHERE_ELSE) -> Waiting | None:
    """Launch the engine that `spec` asks for: it waits for its turn. None: it is of a kind that cannot wait."""
    if spec.platform not in ("cuda", "cpu") or spec.interface not in ("engine", "server"):
        return None
    return (ServerEngine if spec.interface == "server" else OfflineEngine)(spec, extra_env=extra_env, held=True)


class Pool:
    """Engines by specification; asking for another on a device stops what is there.

    on_wait: called while one is not ready yet, with its log. on_started: called when it is, with the seconds that it
    took.
    """

    def __init__(
        self,
        start_engine: Callable[..., Engine] = start,
        start_replicas: Callable[[ReplicaSpec], ReplicaEngines] = start_replicas,
        hold_engine: Callable[..., Waiting | None] = hold,
    ) -> None:
        self._start, self._start_replicas, self._hold = start_engine, start_replicas, hold_engine
        self._there: Any = None  # an engine, or replicas
        self._failed: tuple[EngineSpec | ReplicaSpec, EngineFailed] | None = None
        self.starts: list[EngineSpec | ReplicaSpec] = []
        self.on_wait: Callable[[EngineSpec | ReplicaSpec, Path], None] = lambda spec, log: None
        self.on_started: Callable[[EngineSpec | ReplicaSpec, float], None] = lambda spec, seconds: None

    @property
    def current(self) -> EngineSpec | ReplicaSpec | None:
        return self._there.spec if self._there else None

    def engine(self, spec: EngineSpec, extra_env: Mapping[str, str] = NOWHERE_ELSE) -> Engine:
        """A running engine for `spec`, started if it is not what runs, or if that has failed. extra_env: variables of
        that start alone.

        Raises EngineFailed where it does not start; one that did not is not tried again.
        """
        return self._held(partial(self._start, extra_env=extra_env) if extra_env else self._start, spec)

    def hold(self, spec: EngineSpec, extra_env: Mapping[str, str] = NOWHERE_ELSE) -> Waiting | None:
        """Launched beside what runs, for whoever asks to close it, or to let the pool `take` it when it is its turn.
        None: it is of a kind that cannot wait."""
        return self._hold(spec, extra_env)

    def take(self, engine: Waiting) -> Engine:
        """Start an engine that was launched before, for it is its turn; it is the pool's from now on, in place of what
        ran. Raises EngineFailed."""

        def started(spec: EngineSpec) -> Engine:
            engine.start()
            return engine

        self.close()
        self._there = self._started(started, engine.spec)
        return engine

    def replicas(self, spec: ReplicaSpec) -> ReplicaEngines:
        """The running replicas for `spec`, started if they are not what runs, or if one of them has failed.

        Raises EngineFailed where they do not start; those that did not are not tried again."""
        return self._held(self._start_replicas, spec)

    def _held(self, start: Callable[[Spec], Started], spec: Spec) -> Started:
        if not self._there or self._there.spec != spec or not self._there.ready:
            self.close()
            self._there = self._started(start, spec)
        held: Started = self._there  # of an equal specification, so of the same kind
        return held

    def check(self, spec: EngineSpec | ReplicaSpec) -> None:
        """Raises EngineFailed for what did not start: it is not tried again."""
        if self._failed and self._failed[0] == spec:
            raise EngineFailed(f"not tried again: {self._failed[1].cause}", self._failed[1].hint)

    def _started(self, start: Callable[[Spec], Started], spec: Spec) -> Started:
        self.check(spec)
        self.starts.append(spec)
        began = time.monotonic()
        try:
            with waiting_for_engine(partial(self.on_wait, spec)):
                started = start(spec)
        except EngineFailed as error:
            self._failed = spec, error
            raise
        self.on_started(spec, time.monotonic() - began)
        return started

    def close(self) -> None:
        there, self._there = self._there, None
        if there:
            there.close()


@contextmanager
def abreast(pool: Pool, launches: Sequence[Launch]) -> Iterator[list[Callable[[], Engine]]]:
    """Engines launched at once, which then have a device one after the other.

    All have been launched and have imported what they need, which is half of a start: all under the same conditions,
    and while nothing is measured. Each is then started in its turn, which ends the one before it; in the end all end.

    One that cannot wait for its turn is launched when it comes: the simulated engine, and that of Transformers.
    """

    def turn(launch: Launch, engine: Waiting | None) -> Engine:
        if engine:
            return pool.take(engine)
        pool.close()  # else one of the same specification would serve on
        return pool.engine(*launch)

    with ExitStack() as undo:
        undo.callback(pool.close)
        pool.close()
        starts = list[Callable[[], Engine]]()
        held = list[Waiting]()
        for launch in launches:
            if engine := pool.hold(*launch):
                undo.callback(engine.close)
                held.append(engine)
            starts.append(partial(turn, launch, engine))
        for engine in held:
            with waiting_for_engine(partial(pool.on_wait, engine.spec)):
                engine.await_turn()
        yield starts
