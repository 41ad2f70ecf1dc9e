"""The figures of one measurement, as a table, a benchmark file or a point of a curve shows them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from pytest_slmserve.analysis.device.gpu_figures import decode_window, device_figures, sensed
from pytest_slmserve.analysis.metrics import roofline, window
from pytest_slmserve.analysis.metrics.latency import LatencyFigures, latencies_of
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.loads import ClosedLoop
from pytest_slmserve.schema.records import Measurement, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(LatencyFigures):
    """Figures over the steady window; None is "not measured". Definitions in `window`, of the sensors' in `device`;
    latencies are of the requests by which this kind of load is judged (`latency`).

    batch: sequences that a step really held. kv_usage: largest share of the KV blocks in use. roofline_fraction:
    output tokens/s over what the GPU's data sheet allows at this batch. little: deviation of Little's law, relative.
    energy_per_token_j: power over output tokens/s. unexplained, bound: see `step_time`. decode_dram, decode_tensor:
    shares of the time in which those were active while no prompt was processed, and saturation_gap is of them.
    probe_s, probe_cpu_s: time of the host-speed probe's piece of work, and its CPU time.
    """

    batch: float | None = None
    requests_per_s: float | None = None
    output_tokens_per_s: float | None = None
    step_s: float | None = None
    kv_usage: float | None = None
    roofline_fraction: float | None = None
    little: float | None = None
    gpu_util: float | None = None
    engine_active: float | None = None
    sm_active: float | None = None
    sm_active_max: float | None = None
    sm_occupancy: float | None = None
    sm_occupancy_max: float | None = None
    tensor_active: float | None = None
    dram_active: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_per_token_j: float | None = None
    sm_clock_hz: float | None = None
    own_cores: float | None = None
    stolen_cores: float | None = None
    probe_s: float | None = None
    probe_cpu_s: float | None = None
    power_capped: float | None = None
    power_imbalance: float | None = None
    unexplained: float | None = None
    decode_dram: float | None = None
    decode_tensor: float | None = None
    saturation_gap: float | None = None
    bound: roofline.Bound | None = None


def summarize(measurement: Measurement) -> Summary:
    """All figures of one measurement. requests/s is tokens/s over the mean output tokens of a request, None where that
    is 0: as requested, or, where all requests have one output length and some ended early, the lower mean of the
    finished ones. In a closed loop of so many requests both are over all of its time."""
    run, workload = measurement.run, measurement.workload
    tokens_per_s, batch, law = window.output_tokens_per_s(run), window.mean_batch(run), window.littles_law(run)
    each, finished = workload.mean_output_tokens, finished_output_tokens(run)
    if finished and (mean := fmean(finished)) < (workload.spec.output_tokens or 0):
        each = mean
    requests_per_s = tokens_per_s / each if tokens_per_s is not None and each else None
    if isinstance(measurement.load, ClosedLoop) and measurement.load.requests is not None:
        requests_per_s, tokens_per_s = rates_of_all(run)
    seen, decoding = device_figures(run), decode_window(run)
    dram, tensor = (decoding.mean(n) if decoding else None for n in (of.DRAM_ACTIVE, of.TENSOR_ACTIVE))
    step = roofline.step_time(measurement, seen)
    return Summary(
        batch=batch,
        requests_per_s=requests_per_s,
        output_tokens_per_s=tokens_per_s,
        step_s=window.step_s(run),
        kv_usage=window.kv_usage(run),
        roofline_fraction=roofline.roofline_fraction(measurement, tokens_per_s, batch),
        little=None if law is None else law.deviation,
        **latencies_of(measurement).figures,
        unexplained=step.unexplained if step else None,
        decode_dram=dram,
        decode_tensor=tensor,
        saturation_gap=roofline.saturation_gap(dram, tensor),
        bound=step.bound if step else roofline.bound_by_counters(seen),
        **sensed(Summary, run, tokens_per_s),
    )


def rates_of_all(run: Run) -> tuple[float | None, float | None]:
    """Requests/s and output tokens/s of a load that is served to its end: of the finished requests, over all of its
    time. None where that has no extent."""
    (began, ended), served = run.window_s, finished_output_tokens(run)
    seconds = ended - began
    return (len(served) / seconds, sum(served) / seconds) if seconds > 0 else (None, None)


def finished_output_tokens(run: Run) -> list[int]:
    """Output tokens of each request that was served to its end."""
    return [tokens for tokens, done in zip(run.samples.output_tokens, run.samples.finished, strict=True) if done]
