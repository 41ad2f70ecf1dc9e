"""Several GPUs as one source: what each says stands apart, for a sum would hide the one that lags."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_slmserve.telemetry.base import Reading, SensorSource
from pytest_slmserve.telemetry.sampler import merged


class SeveralGpus:
    """gpus: the sources of each, in the order in which an engine has the GPUs. One that fails ends them all: what is
    left would be taken for the whole."""

    def __init__(self, gpus: Sequence[Sequence[SensorSource]]) -> None:
        names = dict.fromkeys(" + ".join(source.name for source in sources) for sources in gpus)
        self.name = f"{len(gpus)} x {' or '.join(names)}"
        self._gpus = [tuple(sources) for sources in gpus]

    def read(self, now_s: float) -> Reading:
        each = [merged([source.read(now_s) for source in sources]) for sources in self._gpus]
        missing = tuple(f"GPU {i}: {why}" for i, reading in enumerate(each) for why in reading.missing)
        return Reading({}, each[0].span_s, missing, tuple(reading.values for reading in each))

    def close(self) -> None:
        for sources in self._gpus:
            for source in sources:
                source.close()
