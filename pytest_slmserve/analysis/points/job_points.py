"""Jobs: so many requests, arriving at a rate, served to the end. What one of them found.

Throughput is over the whole job, from its beginning to its last answer, as `vllm bench serve` has it: at a low rate it
is the rate, and the last requests' time counts too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pytest_slmserve.analysis.device.gpu_figures import sensed
from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.summary import Summary, rates_of_all, summarize
from pytest_slmserve.analysis.points.sweep_points import Repeats, mean_figures, repeat_fields
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.kv_cache import kv_capacity
from pytest_slmserve.schema.loads import OpenLoop, is_job
from pytest_slmserve.schema.records import Measurement, Resolved, measurement_key
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.schema.workloads import WorkloadReference

CONTINUOUS = "continuous"  # how vLLM batches: a request joins at the next step, and leaves when it has ended

AT_ONCE_S = 0.05  # a client needs a moment to send hundreds of requests


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary(Summary):
    """Figures of one job, its rates over the whole of it. batch: at a rate, where the engine idles at times, the mean
    number of admitted requests.

    rate: at which its requests arrived, in fact; None where they came all at once. preemptions: over the whole job.
    waste: share of what its batches computed for sequences that had ended, or for padding; None where batches are made
    anew at every step.
    """

    rate: float | None = None
    seconds: float | None = None
    preemptions: float | None = None
    waste: float | None = None


@dataclass(frozen=True, kw_only=True)
class JobPoint(JobSummary, Repeats[JobSummary]):
    """One job, and the means over its repeats used."""

    spec: EngineSpec
    resolved: Resolved
    environment: Environment
    workload: WorkloadReference
    load: OpenLoop

    @property
    def model(self) -> str:
        return short_name(self.spec.model)

    @property
    def asked(self) -> tuple[str, str]:
        """Equal for jobs of the same requests, which come alike."""
        return self.workload.hash, repr(self.load)

    @property
    def requests(self) -> int:
        return self.load.requests or 0

    @property
    def output_tokens(self) -> float:
        return self.workload.mean_output_tokens

    @property
    def kv_blocks(self) -> int | None:
        return self.resolved.kv_blocks

    @property
    def capacity(self) -> int | None:
        """Longest requests that fit into the KV cache at once."""
        return kv_capacity(self.spec, self.workload.longest, self.resolved)

    @property
    def fits(self) -> bool:
        """Is there room for all of its requests at once?"""
        return self.capacity is not None and self.capacity >= min(self.requests, self.spec.max_num_seqs)

    @property
    def batching(self) -> str:
        """Batching mode of its engine: "none", "static", "dynamic", or "continuous"."""
        return str(dict(self.spec.extra).get("batching", CONTINUOUS))


def job_points(measurements: Iterable[Measurement]) -> tuple[JobPoint, ...]:
    """One for each case, in the order first requested; other loads are left out."""
    jobs = (m for m in measurements if is_job(m.load) and m.alone and m.paired is None)
    cases = grouped(jobs, lambda m: measurement_key(m.spec, m.workload.hash, m.load, m.environment))
    return tuple(map(job_point, cases.values()))


def job_point(measurements: Sequence[Measurement]) -> JobPoint:
    """Point of repeats of one job."""
    repeats, first = repeat_fields(((m,) for m in measurements), lambda group: job_summary(group[0])), measurements[0]
    assert is_job(first.load)
    return JobPoint(
        spec=first.spec,
        resolved=repeats["used"][0][0].resolved if repeats["used"] else first.resolved,
        environment=first.environment,
        workload=first.workload,
        load=first.load,
        **repeats,
        **mean_figures(repeats["each"], JobSummary),
    )


def summary_of(measurement: Measurement) -> Summary:
    """Summary of a measurement: of a job over all of it, of any other load over its window."""
    return job_summary(measurement) if is_job(measurement.load) else summarize(measurement)


def job_summary(measurement: Measurement) -> JobSummary:
    """All figures of one job."""
    run, plain = measurement.run, summarize(measurement)
    began, ended = run.window_s
    seconds, last = ended - began, max(run.samples.sent_s, default=0.0)
    rate = len(run.samples) / last if last > AT_ONCE_S else None
    requests_per_s, tokens_per_s = rates_of_all(run)
    figures = {name: getattr(plain, name) for name in Summary.__dataclass_fields__}
    figures |= {
        "batch": plain.batch if rate is None else window.requests_in_flight(run) or plain.batch,
        "requests_per_s": requests_per_s,
        "output_tokens_per_s": tokens_per_s,
        **sensed(JobSummary, run, tokens_per_s),
    }
    batched = "batching" in dict(measurement.spec.extra)
    return JobSummary(
        **figures,
        rate=rate,
        seconds=seconds,
        preemptions=sum(run.steps.preempted) if len(run.steps) else None,
        waste=_waste(measurement) if batched else None,
    )


def _waste(measurement: Measurement) -> float | None:
    """Share of the tokens that batches computed, prompts and outputs, that nobody requested; 0 where all were and
    more. None where none was computed."""
    steps, samples = measurement.run.steps, measurement.run.samples
    computed = sum(steps.prompt_tokens) + sum(n for n in steps.running if n is not None)
    wanted = sum(samples.prompt_tokens) + sum(steps.new_tokens)
    return max(0.0, 1 - wanted / computed) if computed else None


def limit_groups(jobs: Iterable[JobPoint]) -> list[list[JobPoint]]:
    """Jobs whose requests come all at once and that differ in `max_num_seqs` alone, in groups, each ascending."""
    served = [p for p in jobs if p.batching == CONTINUOUS and p.load.at_once]
    alike = grouped(served, lambda p: (*p.asked, p.environment.key, replace(p.spec, max_num_seqs=1).key))
    return [sorted(group, key=lambda p: p.spec.max_num_seqs) for group in alike.values()]
