"""Deployment advice from what a run has measured so far, and `advise --verify`: engines started as advised and loaded
as the records were, held against what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_slmserve.analysis.advice.advisor import Advice, Plan, plan
from pytest_slmserve.analysis.advice.batch_choice import Footprint, Objectives, utilization
from pytest_slmserve.analysis.advice.subjects import ADVISED, of_curves
from pytest_slmserve.analysis.advice.verification import (
    MARGIN,
    Verification,
    Verified,
    VerifiedTogether,
    not_started,
    together_failed,
    verified,
    verified_together,
)
from pytest_slmserve.analysis.sweep.batching import parse_relative_slo
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import Inconclusive
from pytest_slmserve.engines.replicas.replica_set import cannot_share
from pytest_slmserve.options.read import read_options
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.models import model_of
from pytest_slmserve.plan.planner import requests_for
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment, differences
from pytest_slmserve.schema.errors import BadArchive, BadUsage, EngineFailed, Sharing, of_a_command
from pytest_slmserve.schema.kv_cache import block_size_of, kv_bytes_per_token, kv_windows
from pytest_slmserve.schema.loads import ClosedLoop, Workload
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import GIB, EngineSpec, ReplicaSpec

FEWEST_LOADS = 2  # the law of a step has two parameters


def advice_of(session: Session, model: str, slo_itl: str | None, efficiency: float) -> Advice:
    """The advice on one model, as `slmserve advise --model` would give it from the run's archive.

    Raises Inconclusive where fewer than two loads are usable, BadUsage where `slo_itl` or `efficiency` is invalid.
    """
    if not 0 < efficiency < 1:
        raise BadUsage(f"an efficiency of {efficiency:g} is no share between 0 and 1", "efficiency=0.1")
    slo, name = None if slo_itl is None else parse_relative_slo(slo_itl), short_name(model)
    curves = [curve for curve in session.verdicts.curves() if curve.subject == name]
    if not curves:
        raise _inconclusive(session, name, "nothing of it was measured in this run (slm_sweep, or a planned sweep)")
    asked = of_curves(curves, None, None)
    [advice] = plan(asked.subjects, Objectives(slo=slo, threshold=efficiency, gpu_bytes=asked.source.gpu_bytes)).advices
    if len(advice.subject.usable) < FEWEST_LOADS:
        why = [advice.decision.reason, *advice.subject.notes, *(text for p in curves[0].points for text in p.problems)]
        raise _inconclusive(session, name, "; ".join(dict.fromkeys(why)))
    return advice


def _inconclusive(session: Session, name: str, why: str) -> Inconclusive:
    """An Inconclusive error; its reason is noted for the end of the run: pytest shows no reason for such a test."""
    said = f"no advice on {name}: {why}"
    session.note(said)
    return Inconclusive(said)


RECORDS = ".slm/verify.jsonl"
MODES = {"cuda": "gpu", "cpu": "cpu", "simulated": "simulate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Options of a verification. margin: the share by which a measured value may differ from its prediction and still
    agree. sharing: of the device by several engines. records: the archive to append to. python: an interpreter in place
    of the records'."""

    repeats: int = 2
    margin: float = MARGIN
    sharing: Sharing = "time-slicing"
    records: str = RECORDS
    python: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCase:
    """One model's engine as advised, with the requests and the load that the records have, but for its concurrency.
    source: any of the measurements that the advice rests on."""

    advice: Advice
    source: Measurement
    spec: EngineSpec
    load: ClosedLoop
    workload: Workload


@dataclass(frozen=True, slots=True)
class SharedVerifyCase:
    """Engines that are to share the device: `trials` has the model of each."""

    spec: ReplicaSpec
    trials: tuple[VerifyCase, ...]

    @property
    def loads(self) -> list[ClosedLoop]:
        return [replace(t.load, concurrency=e.max_num_seqs) for t, e in zip(self.trials, self.spec.engines)]

    @property
    def workloads(self) -> list[Workload]:
        return [trial.workload for trial in self.trials]


# What is to be measured


def trials(plan: Plan, curves: Sequence[Curve], python: str = "") -> list[VerifyCase]:
    """One for each model that got an advice. Raises BadUsage or BadDataset where its requests cannot be made again, or
    are longer than was advised for."""
    found = []
    if any(curve.spec and curve.spec.platform == "remote" for curve in curves):
        raise BadUsage(
            "an endpoint's engine cannot be started as advised: it is not ours", "records of our own engines"
        )
    for advice in plan.advices:
        curve = _curve_of(advice, curves)
        if advice.batch is not None and curve and curve.first and curve.load:
            spec = as_advised(advice, curve.first, advice.batch, plan.wish.gpu_bytes, python)
            if curve.first.workload.longest > spec.max_model_len:
                longest = curve.first.workload.longest
                raise BadUsage(f"the records have requests of {longest} tokens", f"--max-model-len {longest}")
            load, workload = replace(curve.load, concurrency=advice.batch), same_requests(curve.first)
            found.append(VerifyCase(advice=advice, source=curve.first, spec=spec, load=load, workload=workload))
    return found


def _curve_of(advice: Advice, curves: Sequence[Curve]) -> Curve | None:
    """The sweep that an advice rests on."""
    records = [point.records for point in advice.subject.points]
    return next((curve for curve in curves if [point.records for point in curve.points] == records), None)


def same_requests(source: Measurement) -> Workload:
    """The requests of a record, made again. Raises BadUsage where they are others."""
    spec, kept = source.spec, source.workload
    made = requests_for(kept.spec, spec.model, model_of(spec.model), spec.load_format)
    if made.hash != kept.hash:
        raise BadUsage(
            f"the requests of {short_name(spec.model)} cannot be made again here: the records have the hash "
            f"{kept.hash}, their specification now gives {made.hash}",
            "the release of pytest-slmserve and the dataset that the records were measured with",
        )
    return made


def as_advised(
    advice: Advice, source: Measurement, batch: int, gpu_bytes: int | None = None, python: str = ""
) -> EngineSpec:
    """The engine of a sweep with the limits that are advised for `batch` requests. gpu_bytes: of the GPU that the
    advice is for."""
    spec, footprint = source.spec, advice.subject.footprint
    limited = replace(
        spec,
        max_num_seqs=batch,
        python=python or spec.python,
        model_facts=model_of(spec.model),  # an engine is started: it gets the configuration that is here
        extra=tuple(pair for pair in spec.extra if pair[0] not in ADVISED),
    )
    if spec.platform == "cpu":
        return replace(limited, kv_cache_bytes=_whole_gib(source, batch))
    if footprint is None:
        return limited
    total, gpus = footprint.total_bytes(batch), (gpu_bytes, source.environment.gpu_memory_bytes)
    shares = [utilization(total, gpu) for gpu in gpus if gpu is not None]
    return replace(
        limited,
        max_model_len=footprint.longest,
        kv_cache_bytes=footprint.kv_bytes(batch),
        # vLLM checks at its start that as much is free: less than its own total would check nothing.
        gpu_memory_utilization=max(shares, default=spec.gpu_memory_utilization),
    )


def _whole_gib(source: Measurement, batch: int) -> int:
    """KV cache for the batch on vLLM's CPU backend; that of the sweep where the shape is not known."""
    spec, resolved, longest = source.spec, source.resolved, source.workload.longest
    per_token, windows = kv_bytes_per_token(spec, resolved), kv_windows(spec, resolved)
    if per_token is None or windows is None:
        return spec.kv_cache_bytes
    needed = Footprint(
        weight_bytes=0,
        kv_bytes_per_token=per_token,
        longest=longest,
        groups=len(windows),
        block_size=block_size_of(spec, resolved),
    ).kv_bytes(batch)
    return max(1, -(-needed // GIB)) * GIB


def joint_of(plan: Plan, alone: Sequence[VerifyCase], sharing: Sharing) -> SharedVerifyCase | None:
    """The engines that are advised to share the device: one of each model, or several of a single one; None where one
    engine is all that is advised."""
    placed = [trial for trial in alone if trial.advice.needs]
    if plan.together and plan.together.fits and len(placed) > 1:
        return SharedVerifyCase(ReplicaSpec(tuple(trial.spec for trial in placed), sharing), tuple(placed))
    for trial in placed:
        fit = trial.advice.replicas
        if fit and fit.advised > 1:
            python = trial.spec.python
            each = as_advised(trial.advice, trial.source, fit.each, plan.wish.gpu_bytes, python)
            return SharedVerifyCase(ReplicaSpec((each,) * fit.advised, sharing), (trial,) * fit.advised)
    return None


# Measuring


@contextmanager
def opened(alone: Sequence[VerifyCase], joint: SharedVerifyCase | None, terms: VerifyOptions) -> Iterator[Session]:
    """A session that holds the device and the archive; whatever happens, it lets go of both and stops its engines.

    Raises BadUsage where this is another kind of host than that of the records, or the device cannot be shared so,
    DeviceBusy where another run measures.
    """
    session = _session_for(alone[0], terms)
    try:
        for trial in alone:
            check_host(trial, session.planner.environment(trial.spec))
        if joint and (why := cannot_share(joint.spec, session.host.device)):
            raise BadUsage(why, "--sharing time-slicing")
        with of_a_command(BadUsage, BadArchive):
            session.open()
        session.begin()
        yield session
    finally:
        session.close()


def _session_for(trial: VerifyCase, terms: VerifyOptions) -> Session:
    """Raises BadUsage where the platform cannot run here."""
    try:
        return Session.from_options(_options(trial.spec, terms), Path.cwd())
    except BadUsage as error:
        there = trial.source.environment
        where = there.gpu_name or there.cpu or there.platform
        raise BadUsage(error.problem, f"the kind of host that was measured on: {where}; or --python") from None


def _options(spec: EngineSpec, terms: VerifyOptions) -> Options:
    """Options that measure `spec` as the records say; they take nothing from the environment or the ini file."""
    given = {
        MODES[spec.platform]: True,
        "python": spec.python,
        "env": [f"{name}={value}" for name, value in spec.env],
        "repeats": str(terms.repeats),
        "records": terms.records,
    }
    return read_options(given, {}, {})


def check_host(trial: VerifyCase, here: Environment) -> None:
    """Raises BadUsage where the records are of another kind of host, with all that differs."""
    there = trial.source.environment
    if differ := "; ".join(differences(there.kind, here.kind)):
        raise BadUsage(
            f"the records of {short_name(trial.spec.model)} are of another kind of host ({differ})",
            "records of this one, or that host",
        )


def verify(
    session: Session, alone: Sequence[VerifyCase], joint: SharedVerifyCase | None, terms: VerifyOptions
) -> Verification:
    """The verification of each model alone, then of all that are to share the device."""
    seen = [_alone(session, trial, terms) for trial in alone]
    started = all(each.point for each in seen)
    together = _together(session, joint, seen, terms) if joint and started else None
    return Verification(terms.margin, terms.repeats, tuple(seen), together)


def _alone(session: Session, trial: VerifyCase, terms: VerifyOptions) -> Verified:
    try:
        case = session.planner.case(trial.spec, [trial.workload], [trial.load])
        found = session.executor.measure(case, terms.repeats)
    except EngineFailed as error:
        return not_started(trial.advice, error.problem)
    return verified(trial.advice, trial.spec, [m for group in found for m in group], terms.margin)


def _together(
    session: Session, joint: SharedVerifyCase, alone: Sequence[Verified], terms: VerifyOptions
) -> VerifiedTogether:
    try:
        runs = session.executor.measure(session.planner.case(joint.spec, joint.workloads, joint.loads), terms.repeats)
    except EngineFailed as error:
        names = [engine.model for engine in joint.spec.engines]
        return together_failed(names, [load.concurrency for load in joint.loads], terms.sharing, error.problem)
    models = {each.advice.subject.name: each for each in alone}
    by_itself = [models[trial.advice.subject.name] for trial in joint.trials]
    return verified_together(runs, by_itself, terms.sharing, terms.margin)
