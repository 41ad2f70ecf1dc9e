"""GPU performance monitoring by NVML: activity of SMs, tensor cores and DRAM."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pytest_slmserve.schema import sensors as of
from pytest_slmserve.telemetry import nvml_calls as calls
from pytest_slmserve.telemetry.base import MIN_SPAN_S, known

GPM = {1: of.ENGINE_ACTIVE, 2: of.SM_ACTIVE, 3: of.SM_OCCUPANCY, 5: of.TENSOR_ACTIVE, 10: of.DRAM_ACTIVE}


class Gpm:
    """Ratios over the time between two samples of the GPU's counters. metrics: GPM's id of each of our numbers."""

    def __init__(self, nv: Any, take: Callable[[Any], object]) -> None:
        self.metrics = dict(GPM)
        self._nv, self._take = nv, take
        self._samples: deque[tuple[float, Any]] = deque()  # the baseline, and those that are still too young for one

    def leave_out_refused(self) -> dict[int, str]:
        """Drops the metrics that the GPU refuses, and returns the reason for each number. Samples over no time at all:
        values mean nothing then, refusals do."""
        held: list[Any] = []
        try:
            held += [self._sample()]
            held += [self._sample()]
            answers = self._ask(*held)
        except self._nv.NVMLError as error:
            if error.value in calls.UNABLE | calls.LOST:
                raise
            return {}  # what fails over no time may work over some
        finally:
            for sample in held:
                self._free(sample)
        codes = [(metric, answer.nvmlReturn) for metric, answer in zip(self.metrics, answers)]
        return {
            self.metrics.pop(metric): calls.reason(self._nv, code) for metric, code in codes if code in calls.UNABLE
        }

    def ratios(self, now_s: float, missing: list[str]) -> tuple[dict[int, float | None], float | None]:
        """All ratios from one pair of samples, and the length of the time between them in seconds."""
        try:
            newest = self._sample()
            self._samples.append((now_s, newest))
            span_s, baseline = self._baseline(now_s)
            if span_s < MIN_SPAN_S:
                why = f"no sample of the counters is {MIN_SPAN_S:g} s old yet"
                return calls.unknown(self.metrics.values(), why, missing), None
            answers = self._ask(baseline, newest)
        except self._nv.NVMLError as error:
            return calls.unknown(self.metrics.values(), calls.said(error), missing), None
        return {n: self._ratio(n, answer, missing) for n, answer in zip(self.metrics.values(), answers)}, span_s

    def close(self) -> None:
        while self._samples:
            self._free(self._samples.popleft()[1])

    def _sample(self) -> Any:
        sample = self._nv.nvmlGpmSampleAlloc()
        try:
            self._take(sample)
        except self._nv.NVMLError:
            self._free(sample)
            raise
        return sample

    def _free(self, sample: Any) -> None:
        calls.quietly(self._nv, self._nv.nvmlGpmSampleFree, sample)

    def _baseline(self, now_s: float) -> tuple[float, Any]:
        """Age and handle of the newest sample that is old enough, or else of the oldest; older ones are freed."""
        while len(self._samples) > 1 and now_s - self._samples[1][0] >= MIN_SPAN_S:
            self._free(self._samples.popleft()[1])
        at_s, sample = self._samples[0]
        return now_s - at_s, sample

    def _ask(self, first: Any, second: Any) -> list[Any]:
        """Answers to all metrics, in one call."""
        request = self._nv.c_nvmlGpmMetricsGet_t(version=1, numMetrics=len(self.metrics), sample1=first, sample2=second)
        for metric, place in zip(self.metrics, request.metrics):
            place.metricId, place.nvmlReturn = metric, calls.UNKNOWN  # until NVML says otherwise
        self._nv.nvmlGpmMetricsGet(request)
        return list(request.metrics[: len(self.metrics)])

    def _ratio(self, number: int, answer: Any, missing: list[str]) -> float | None:
        if answer.nvmlReturn:
            missing.append(f"{number}: {calls.reason(self._nv, answer.nvmlReturn)}")
            return None
        return known(number, answer.value * calls.PERCENT, missing)
