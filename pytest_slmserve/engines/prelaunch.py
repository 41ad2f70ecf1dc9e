"""Engines that are launched at once, and then have a device one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from pytest_slmserve.engines.base import Engine
from pytest_slmserve.engines.launch.start_stages import waiting
from pytest_slmserve.engines.pool import Pool, Waiting
from pytest_slmserve.schema.specs import EngineSpec

Launch = tuple[EngineSpec, Mapping[str, str]]  # and variables of this launch alone
Start = Callable[[], Engine]


@contextmanager
def abreast(pool: Pool, launches: Sequence[Launch]) -> Iterator[list[Start]]:
    """All have been launched and have imported what they need, which is half of a start: all under the same conditions,
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
        starts = list[Start]()
        held = list[Waiting]()
        for launch in launches:
            if engine := pool.hold(*launch):
                undo.callback(engine.close)
                held.append(engine)
            starts.append(partial(turn, launch, engine))
        for engine in held:
            with waiting(partial(pool.on_wait, engine.spec)):
                engine.await_turn()
        yield starts
