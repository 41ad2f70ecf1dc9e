"""The sensors beside any block of a user's test: the rows, the figures over the block, and whether to believe them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pytest_slmserve.analysis.device.gpu_figures import DeviceFigures, device_figures
from pytest_slmserve.analysis.device.sensor_health import Health, health
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Run, Samples, Steps, Telemetry
from pytest_slmserve.telemetry.sampler import Sampler

NOBODY, NOTHING = Samples(*[()] * 8), Steps(*[()] * 7)


@dataclass(repr=False)
class SampledBlock:
    """Sensor readings over a block; there are none before the block has ended, and reading them raises BadUsage."""

    environment: Environment
    run: Run | None = None

    @property
    def seen(self) -> Run:
        if self.run is None:
            raise BadUsage("the block that is watched has not ended", "ask after the with statement")
        return self.run

    @property
    def telemetry(self) -> Telemetry:
        """Rows; their times are seconds since the block began."""
        assert self.seen.telemetry is not None
        return self.seen.telemetry

    @property
    def figures(self) -> DeviceFigures:
        return device_figures(self.seen)

    @property
    def health(self) -> Health:
        return health(self.seen, self.environment)


@contextmanager
def watching(sampler: Sampler, environment: Environment) -> Iterator[SampledBlock]:
    """Reads the sensors until the block ends, by an exception too."""
    watched = SampledBlock(environment)
    with sampler.recording() as recording:
        began_s = recording.clock()
        try:
            yield watched
        finally:
            window_s = 0.0, recording.clock() - began_s
    watched.run = Run(NOBODY, NOTHING, window_s, began_s=began_s, telemetry=recording.telemetry(began_s, window_s))
