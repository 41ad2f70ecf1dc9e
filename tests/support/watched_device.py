"""A simulated device that knows which engines live on it, and whose runs fail or end as planted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import count
from typing import Any

from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.records import Run
from pytest_slmserve.schema.specs import EngineSpec


class Device:
    """Engines that live, and after each event ("+" a start, "-" an end, otherwise a window) how many do. fails: planted
    failures of a run, by the number of the start and of the run. breaks: the run that ends all."""

    def __init__(self, fails: Collection[tuple[int, int]] = (), breaks: tuple[int, ...] = ()) -> None:
        self.fails, self.breaks, self.starts = fails, breaks, 0
        self.living = dict[int, int]()
        self.events = list[tuple[int | str, int]]()

    def launch(self, spec: EngineSpec, **_: object) -> SimulatedEngine:
        device, runs = self, count(1)

        class Watched(SimulatedEngine):
            number = 0

            def start(self, on_wait: Any = None) -> Any:
                device.starts += 1
                self.number = device.starts
                device.living[id(self)] = self.number
                device.events.append(("+", len(device.living)))
                return super().start(on_wait)

            def close(self) -> None:
                if device.living.pop(id(self), None):
                    device.events.append(("-", len(device.living)))
                super().close()

            def run(self, *arguments: Any) -> Run:
                run = self.number, next(runs)
                device.events.append((run[0], len(device.living)))
                if run == device.breaks:
                    raise EngineFailed("planted")
                found = super().run(*arguments)
                return replace(found, failures=1) if run in device.fails else found

        return Watched(spec)
