"""What the items of a run range over: points, replicas, GPUs, jobs, sides of a gate and models, by the options and the
words of a marker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pytest_slmserve.analysis.claims.lookup import claim_of
from pytest_slmserve.analysis.gate.launch_pairs import ENDPOINTS
from pytest_slmserve.plan.cases import (
    ENOUGH_FOR_A_REPLICA,
    USUAL_GPUS,
    GpusPlan,
    JobPlan,
    ReplicaPlan,
    gpus_engine,
    misfit_reason,
    plans_of,
    point_id,
    replica_load,
    replicas_of,
    usual_loads,
    variant_of,
    ways_to_replicate,
)
from pytest_slmserve.plan.titles import engine_alone
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import ClosedLoop

MarkedPoint = tuple[str, ClosedLoop, list[pytest.MarkDecorator]]

# The one parameter of an item where models were chosen that are none of its own, or where none fits.
NONE_THERE = pytest.param(None, id="-", marks=pytest.mark.skip(reason="none of its models is measured in this run"))


def parameters_of(fixture: str, session: Session, marker: pytest.Mark | None) -> list[Any]:
    """Those of a fixture that the options parametrise. Raises BadUsage for a marker that they do not fit."""
    match fixture:
        case "slm_point":
            return point_parameters(session, marker)
        case "slm_replica_point":
            return replica_parameters(session)
        case "slm_gpus_point":
            return gpus_parameters(session, marker)
        case "slm_job_point":
            return job_parameters(session, marker)
        case "slm_gate":
            return gate_parameters(session)
        case _:
            return model_parameters(session, marker)


class Clock:
    """A timer for pytest-benchmark that is advanced by what an engine took, not by what the test took."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def __repr__(self) -> str:
        return "<the engine's clock>"


CLOCK = Clock()


def point_parameters(session: Session, marker: pytest.Mark | None) -> list[Any]:
    """A parameter per point, marked so that pytest-benchmark reads the engine's clock."""
    unused = pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # a point may have nothing to show
    words = marker.kwargs if marker else {}
    points = named_points(session, words) if "points" in words else planned_points(session)
    return [
        pytest.param((model, load), id=point_id(model, load), marks=[benchmark(model), unused, *skips])
        for model, load, skips in points
    ] or [NONE_THERE]


def planned_points(session: Session) -> list[MarkedPoint]:
    return [(model, load, []) for model in session.planner.models for load in session.planner.sweep(model).loads]


def named_points(session: Session, words: Mapping[str, Any]) -> list[MarkedPoint]:
    """The points that a marker names, of the models that were chosen; all where none was chosen. Those that do not fit
    this device are skipped: it is no fault of theirs. Raises BadUsage for an unknown model."""
    chosen, variant, found = session.options.models, variant_of(words), []
    for model, concurrency in words["points"]:
        if not chosen or session.planner.swept(model):
            load = session.planner.load(concurrency, variant)
            why = session.planner.misfit(model) or session.planner.overload(model, load, variant)
            found.append((model, load, [pytest.mark.skip(reason=why)] if why else []))
    return found


def replica_parameters(session: Session) -> list[Any]:
    """For each model of the run one engine alone, then the numbers of replicas by each way of sharing; those that this
    device cannot have are skipped."""
    plans = list[ReplicaPlan]()
    for model in session.planner.models:
        load, ways = replica_load(model), ways_to_replicate(session.options)
        if urls := len(session.options.endpoint):
            load -= load % urls
        plans += [ReplicaPlan(model, 1, session.options.sharing[0], load)]
        plans += [ReplicaPlan(model, n, how, load) for how, n in ways]
    return [pytest.param(plan, id=str(plan), marks=_unless_shareable(session, plan)) for plan in plans] or [NONE_THERE]


def _unless_shareable(session: Session, plan: ReplicaPlan) -> list[pytest.MarkDecorator]:
    alone = plan.count == 1
    if alone:
        why = session.planner.overload(plan.model, session.planner.load(plan.concurrency))
    else:
        why = session.planner.unshareable([plan.model] * plan.count, plan.sharing, plan.concurrency)
    return [pytest.mark.skip(reason=why)] if why else []


def gpus_parameters(session: Session, marker: pytest.Mark | None) -> list[Any]:
    """For each model that the marker names one engine on each number of GPUs under each load, then replicas with a GPU
    each under the loads that give them enough to do. What this host cannot have is skipped."""
    options, words = session.options, marker.kwargs if marker else {}
    if options.endpoint:
        return [NONE_THERE]
    models = named_models(session, None, words["models"]) if "models" in words else session.planner.models
    given = options.source["tensor_parallel_size"] != "default"
    most = options.plan_gpus if options.plan else None
    usual = [n for n in USUAL_GPUS if n <= (most or n)]  # a run there would skip the others
    degrees = options.tensor_parallel_size if given else usual
    loads = {model: options.concurrency or usual_loads(model) for model in models}
    plans = [GpusPlan(m, n, False, load, loads[m][-1]) for m in models for n in degrees for load in loads[m]]
    plans += [
        GpusPlan(m, n, True, load, loads[m][-1])
        for m in models
        for n in degrees
        for load in loads[m]
        if n > degrees[0] and load >= n * ENOUGH_FOR_A_REPLICA
    ]
    return [pytest.param(plan, id=str(plan), marks=_unless_there(session, plan)) for plan in plans] or [NONE_THERE]


def _unless_there(session: Session, plan: GpusPlan) -> list[pytest.MarkDecorator]:
    try:
        if plan.replicas:
            why = session.planner.unshareable(
                [plan.model] * replicas_of(session.planner, plan), "gpus", plan.concurrency
            )
        else:
            engine, load = gpus_engine(session.planner, plan)
            session.planner.compares(engine_alone(engine), load)
            why = None
    except BadUsage as error:
        why = error.problem
    return [pytest.mark.skip(reason=why)] if why else []


def job_parameters(session: Session, marker: pytest.Mark | None) -> list[Any]:
    """A parameter per job that the marker names for this mode, of the models that were chosen; those that this device
    cannot have are skipped. Raises BadUsage."""
    if marker is None or "jobs" not in marker.kwargs:
        raise _no_jobs()
    unused = pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # a job may have nothing to show
    found = []
    for plan in marked_jobs(session, marker.kwargs):
        skips = [pytest.mark.skip(reason=why)] if (why := misfit_reason(session.planner, plan)) else []
        found.append(pytest.param(plan, id=str(plan), marks=[benchmark(plan.model), unused, *skips]))
    return found or [NONE_THERE]


def marked_jobs(session: Session, words: Mapping[str, Any]) -> list[JobPlan]:
    """The jobs of a marker for this mode and the chosen models; the simulated engine has those of a GPU."""
    plans = plans_of(words, "cpu" if session.platform == "cpu" else "gpu")
    return [plan for plan in plans if not session.options.models or session.planner.swept(plan.model)]


def _no_jobs() -> Exception:
    hint = '@pytest.mark.slm(jobs={"gpu": [{"model": "opt-125m", "requests": 500, "rate": 10, "lengths": (512, 256)}]})'
    return BadUsage("slm_job_point without jobs", hint)


def gate_parameters(session: Session) -> list[Any]:
    """For each model of the run what a gate compares, where one was asked for. Raises BadUsage for a gate that could
    not be carried out."""
    from pytest_slmserve.run.gate import check_gate

    if not session.options.gate:
        return [pytest.param(None, id="-")]
    for model in session.planner.models:
        check_gate(session, model)
    return [
        pytest.param((model, endpoint), id=f"{short_name(model)}-{endpoint}")
        for model in session.planner.models
        for endpoint in ENDPOINTS
    ] or [NONE_THERE]


def benchmark(model: str) -> pytest.MarkDecorator:
    return pytest.mark.benchmark(timer=CLOCK, group=model)


def model_parameters(session: Session, marker: pytest.Mark | None) -> list[Any]:
    """A parameter per model: those of the sweep, or those that the claim's own marker names."""
    words = marker.kwargs if marker else {}
    named = job_models(session, words) if "jobs" in words else words.get("models")
    models = session.planner.models if named is None else named_models(session, words.get("claim"), named)
    return [pytest.param(model, id=short_name(model)) for model in models] or [NONE_THERE]


def job_models(session: Session, words: Mapping[str, Any]) -> list[str]:
    """The models of a marker's jobs that can be measured here; where it names models too, of those."""
    plans = [plan for plan in marked_jobs(session, words) if not misfit_reason(session.planner, plan)]
    return [model for model in dict.fromkeys(plan.model for plan in plans) if model in words.get("models", (model,))]


def named_models(session: Session, claim: str | None, named: Sequence[str]) -> list[str]:
    """Of the models that a claim's marker names, those that can be judged here: where models were chosen, all that the
    claim reads must be among them; else all must fit. Raises BadUsage for an unknown claim or model."""

    def there(model: str) -> bool:
        return session.planner.swept(model) if session.options.models else session.planner.misfit(model) is None

    return [model for model in named if all(map(there, claim_of(claim).reads(model) if claim else (model,)))]
