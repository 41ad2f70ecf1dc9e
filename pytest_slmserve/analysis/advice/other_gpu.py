"""Prediction of a sweep for another GPU: the fitted law of saturation, carried over by the data sheets of both.

A step has a part that no batch changes, with the reading of the weights, and a part for each sequence, with the reading
of its context and its share of a prompt. These change with the GPU. The rest, the host and the launching of kernels,
stays. Measurements on that GPU, none of them in the fit, tell how far this is true.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import mul
from statistics import fmean

from pytest_slmserve.analysis.estimates import TAIL, Interval, ends, factor, percent, percent_interval
from pytest_slmserve.analysis.metrics import gpu_figures
from pytest_slmserve.analysis.metrics.gpu_figures import REACHABLE_DRAM, REACHABLE_TENSOR, Peaks
from pytest_slmserve.analysis.points import Point, job_points, limit_groups, point_differences
from pytest_slmserve.analysis.sweep.batching import LatencyLaw
from pytest_slmserve.analysis.sweep.curve import Axes, Curve
from pytest_slmserve.analysis.sweep.plateau import Fit, fit, fit_law, with_batches
from pytest_slmserve.analysis.verdict import Verdict, every
from pytest_slmserve.schema.errors import BadUsage, TooFewPoints
from pytest_slmserve.schema.records import Measurement

CLAIM = "law-carries-to-another-gpu"
BOUND = 0.10  # of the throughput measured there
STEP = 1e-3  # of a point's throughput: how far the law moves with it
LIMIT = Axes("max_num_seqs")


@dataclass(frozen=True, slots=True)
class CarriedLaw:
    """Law of a sweep on another GPU. law: as fitted to the sweep. step: seconds of a step there."""

    curve: Curve
    law: Fit
    gpu: Peaks
    step: LatencyLaw

    def tokens_per_s(self, batch: float) -> float:
        return batch / self.step.seconds(batch)


def gpu_named(name: str) -> Peaks:
    """Return the data sheet of a family ("H200") or of a name as NVML has it. Raises BadUsage if it is not listed."""
    families = {gpu.family.lower(): gpu for gpu in gpu_figures.GPUS}
    if found := families.get(name.lower()) or gpu_figures.peaks_of(name):
        return found
    known = ", ".join(gpu.family for gpu in families.values())
    raise BadUsage(f"the data sheet of {name} is not known", f"one of {known}")


def predicted_elsewhere(curve: Curve, gpu: Peaks) -> CarriedLaw:
    """Prediction for one GPU of that kind, by the bandwidth and the peak rate of both data sheets. Raises TooFewPoints
    if no law describes the sweep, or its work or its own data sheet is unknown."""
    work, here = curve.work, curve.peaks
    if not (work and here) or curve.spec is None or curve.spec.tensor_parallel_size > 1:
        raise TooFewPoints(
            "it needs a sweep on one GPU whose data sheet is known, of a model whose shape is", "another"
        )
    law = fit(curve.points)
    if not (law.describes and law.identified):
        raise TooFewPoints(
            f"the law of saturation does not describe it: off by {percent(law.error_max)} at most", "more repeats"
        )
    there = gpu_figures.peaks_for(curve.spec, gpu)
    fixed_s, sequence_s = law.b_half.value / law.t_inf.value, 1 / law.t_inf.value
    bandwidth, rate = here.bytes_per_s / there.bytes_per_s, here.flops_per_s / there.flops_per_s
    weights = min(fixed_s, work.weight_bytes / (REACHABLE_DRAM * here.bytes_per_s))
    context = min(sequence_s, work.context * work.kv_bytes_per_token / (REACHABLE_DRAM * here.bytes_per_s))
    prompt_s = work.prefill_flops / work.output_tokens / (REACHABLE_TENSOR * here.flops_per_s)
    prompt = min(sequence_s - context, prompt_s)
    fixed_s += (bandwidth - 1) * weights
    sequence_s += (bandwidth - 1) * context + (rate - 1) * prompt
    return CarriedLaw(curve, law, gpu, LatencyLaw(1 / sequence_s, fixed_s / sequence_s))


def limit_sweeps(measurements: Sequence[Measurement]) -> list[Curve]:
    """Jobs whose requests come at once and that differ only in `max_num_seqs`, as a sweep of it: figure 1 of
    arXiv:2404.03353."""
    found = []
    for jobs in limit_groups(job for job in job_points(measurements) if job.valid):
        if len(jobs) < 2:
            continue
        batches = [tuple(one.batch or 0.0 for one in job.each) for job in jobs]
        points = [replace(j, concurrency=j.spec.max_num_seqs, batch_repeats=b) for j, b in zip(jobs, batches)]
        records = {record for point in points for record in point.records}
        used = tuple(m for m in measurements if m.id in records)
        subject = f"{jobs[0].model}, {jobs[0].requests} at once"
        found.append(Curve(subject=subject, axes=LIMIT, points=tuple(points), measurements=used))
    return found


def measured_there(prediction: CarriedLaw, curves: Iterable[Curve]) -> list[Curve]:
    """Sweeps of the same engine, workload and release on a GPU of the predicted kind."""

    def measured(curve: Curve) -> tuple[object, ...]:
        where, load, workload, spec = curve.environment, curve.load, curve.workload, curve.spec
        limit = 1 if spec is None or curve.axes == LIMIT else spec.max_num_seqs
        # The memory of a GPU of another size leaves another cache.
        engine = spec and replace(spec, kv_cache_bytes=0, max_num_seqs=limit)
        return where and where.vllm, load and load.ramp_up, workload and workload.hash, engine, curve.axes

    wanted = measured(prediction.curve)
    alike = [c for c in curves if c is not prediction.curve and c.valid and measured(c) == wanted]
    return [c for c in alike if c.environment and gpu_figures.peaks_of(c.environment.gpu_name) == prediction.gpu]


def errors(prediction: CarriedLaw, there: Curve, several: int = 1) -> list[tuple[Interval, Point]]:
    """Predicted throughput over the measured one, at each load. The intervals have the noise of the measurement there,
    and that of the fitted points as far as the law at this batch depends on it. several: number of loads whose
    intervals hold together."""
    tail, fitted = TAIL / several, with_batches(prediction.curve.points)
    here, own = point_differences(fitted), point_differences(there.valid)
    logs = [here.mean(i, tail) for i in range(len(fitted))]
    halves = [ends(log)[1] - log.value for log in logs]
    pairs = [(fmean(p.batch_repeats), fmean(p.repeats)) for p in fitted]
    # T_inf and b_half of the law if the throughput of one point is larger by STEP, point by point.
    laws = [fit_law([*pairs[:i], (b, rate * (1 + STEP)), *pairs[i + 1 :]]) for i, (b, rate) in enumerate(pairs)]
    found = []
    for i, point in enumerate(there.valid):
        batch = fmean(point.batch_repeats)
        log = math.log(prediction.tokens_per_s(batch) / fmean(point.repeats))
        moved = (t_inf * batch / (batch + b_half) for t_inf, b_half in laws)
        shares = [math.log(rate / prediction.law.tokens_per_s(batch)) / math.log1p(STEP) for rate in moved]
        noise = own.mean(i, tail)
        half = math.hypot(ends(noise)[1] - noise.value, *map(mul, shares, halves))
        known = here.known and own.known
        found.append((factor(Interval(log, log - half, log + half) if known else Interval(log)), point))
    return found


def carries(prediction: CarriedLaw, there: Curve) -> Verdict:
    """Verdict on whether the prediction is within `BOUND` of what is measured, at every load."""
    state, seen, at = every(lambda several: errors(prediction, there, several), 1 - BOUND, 1 + BOUND)
    why = (
        f"{prediction.gpu.family}, {there.subject}: predicted is {percent_interval(seen)} of measured at "
        f"{there.axes.at(at.concurrency)}, where they are farthest apart (limit {percent(BOUND)} more or less)"
    )
    return Verdict.from_interval(CLAIM, there.subject, state, why, seen, BOUND, *there.valid)
