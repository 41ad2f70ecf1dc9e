"""What the hooks and the fixtures need to know of a test item: what it measures, and on which engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_args

import pytest

if TYPE_CHECKING:
    from pytest_slmserve.agenda import Variant
    from pytest_slmserve.holding import StoredBaseline
    from pytest_slmserve.jobs import JobPlan
    from pytest_slmserve.kinds import Sharing
    from pytest_slmserve.options import Options
    from pytest_slmserve.session import Session
    from pytest_slmserve.spec import ClosedLoop, EngineSpec, ReplicaSpec

    MarkedPoint = tuple[str, ClosedLoop, list[pytest.MarkDecorator]]

SESSION = pytest.StashKey["Session"]()
PROBLEM = pytest.StashKey[str]()  # why the options cannot be carried out, found while items were made
LATE = pytest.StashKey[bool]()  # of an item: it comes when all others are through
BASELINE: pytest.StashKey[StoredBaseline] = pytest.StashKey()  # where there is one to be held against
# Words of the slm marker that do not choose the engine.
NOT_OF_THE_ENGINE = ("claim", "models", "points", "lengths", "starts", "needs", "gpus", "jobs")
# Fixtures whose parameters come from the options.
PARAMETRISED = frozenset({"slm_point", "slm_model", "slm_replica_point", "slm_gate", "slm_gpus_point", "slm_job_point"})
READERS = frozenset({"slm_model", "slm_advice"})  # fixtures of tests that read what others measured
USUAL_GPUS, USUAL_LOADS = (1, 2, 4), (1, 16, 64, 256)  # of tests of tensor parallelism
ENOUGH_FOR_A_REPLICA = 32  # requests in flight
# What a marker says that its item needs: modes that do not have it, and what the item is skipped with then.
NEEDS: dict[str | None, tuple[tuple[str, ...], str]] = {
    "gpu": (("cpu", "remote"), "reads a GPU's counters: needs --slm-gpu or --slm-fake"),
    "own-engine": (("remote",), "asks an engine for what an endpoint does not tell: needs --slm-gpu or --slm-cpu"),
}
NEEDS_WORKERS = "compares what was measured beside others with the same alone: needs -n"
# Fixtures that measure what the body of a test asks for, or an engine's own words.
AS_IT_GOES = frozenset({"slm_engine", "slm_measure", "slm_sweep", "slm_job", "slm_replicas", "slm_gpu_sampler", "dcgm"})
NEEDS_A_GATE = "compares two sides: needs --slm-gate"
# The one parameter of an item where models were chosen that are none of its own, or where none fits.
NONE_THERE = pytest.param(None, id="-", marks=pytest.mark.skip(reason="none of its models is measured in this run"))


def is_measured(item: pytest.Item) -> bool:
    """Does this item need an engine, or what one measured?"""
    names = getattr(item, "fixturenames", ())
    return item.get_closest_marker("slm") is not None or any(name.startswith("slm_") for name in names)


def is_gate(item: pytest.Item) -> bool:
    """Does it compare two sides?"""
    return "slm_gates" in getattr(item, "fixturenames", ())


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


def point_id(model: str, load: ClosedLoop) -> str:
    from pytest_slmserve.models import short_name

    return f"{short_name(model)}-{load.concurrency}"


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
    return [(model, load, []) for model in session.agenda.models for load in session.agenda.sweep(model).loads]


def named_points(session: Session, words: Mapping[str, Any]) -> list[MarkedPoint]:
    """The points that a marker names, of the models that were chosen; all where none was chosen. Those that do not fit
    this device are skipped: it is no fault of theirs. Raises BadUsage for an unknown model."""
    chosen, variant, found = session.options.models, variant_of(words), []
    for model, concurrency in words["points"]:
        if not chosen or session.agenda.swept(model):
            load = session.agenda.load(concurrency, variant)
            why = session.agenda.misfit(model) or session.agenda.overload(model, load, variant)
            found.append((model, load, [pytest.mark.skip(reason=why)] if why else []))
    return found


def is_named_point(item: Any) -> bool:
    """Does its marker name the points, that the options would plan otherwise?"""
    marker = item.get_closest_marker("slm")
    return bool(marker and "points" in marker.kwargs)


def variant_asked_for(item: Any) -> Variant:
    """The requests and the starts that an item's marker asks for."""
    marker = item.get_closest_marker("slm")
    return variant_of(marker.kwargs if marker else {})


def variant_of(words: Mapping[str, Any]) -> Variant:
    from pytest_slmserve.agenda import Variant

    return Variant(words.get("lengths"), words.get("starts"))


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """So many engines of a model on the device, and the requests in flight in all; one is an engine alone."""

    model: str
    count: int
    sharing: Sharing
    concurrency: int

    def __str__(self) -> str:
        from pytest_slmserve.models import short_name

        how = f"-{self.sharing}" if self.count > 1 else ""
        return f"{short_name(self.model)}-{self.concurrency}-x{self.count}{how}"


def replica_parameters(session: Session) -> list[Any]:
    """For each model of the run one engine alone, then the numbers of replicas by each way of sharing; those that this
    device cannot have are skipped."""
    from pytest_slmserve.agenda import replica_load

    plans = list[ReplicaPlan]()
    for model in session.agenda.models:
        load, ways = replica_load(model), ways_to_replicate(session.options)
        if urls := len(session.options.endpoint):
            load -= load % urls
        plans += [ReplicaPlan(model, 1, session.options.sharing[0], load)]
        plans += [ReplicaPlan(model, n, how, load) for how, n in ways]
    return [pytest.param(plan, id=str(plan), marks=_unless_shareable(session, plan)) for plan in plans] or [NONE_THERE]


def ways_to_replicate(options: Options) -> list[tuple[Sharing, int]]:
    """How, and how many engines: by the options, or all URLs of an endpoint (two of one are told to be missing)."""
    if options.endpoint:
        return [("urls", max(2, len(options.endpoint)))]
    return [(how, n) for how in options.sharing for n in options.replicas if n > 1]


def _unless_shareable(session: Session, plan: ReplicaPlan) -> list[pytest.MarkDecorator]:
    alone = plan.count == 1
    if alone:
        why = session.agenda.overload(plan.model, session.agenda.load(plan.concurrency))
    else:
        why = session.agenda.unshareable([plan.model] * plan.count, plan.sharing, plan.concurrency)
    return [pytest.mark.skip(reason=why)] if why else []


@dataclass(frozen=True, slots=True)
class GpusPlan:
    """A model on so many GPUs, and the requests in flight in all: one engine over them, or a replica on each. largest:
    of the loads that its engine is measured under."""

    model: str
    gpus: int
    replicas: bool
    concurrency: int
    largest: int

    def __str__(self) -> str:
        from pytest_slmserve.models import short_name

        how = "replicas" if self.replicas else "tp"
        return f"{short_name(self.model)}-{self.concurrency}-{how}{self.gpus}"


def gpus_parameters(session: Session, marker: pytest.Mark | None) -> list[Any]:
    """For each model that the marker names one engine on each number of GPUs under each load, then replicas with a GPU
    each under the loads that give them enough to do. What this host cannot have is skipped."""
    options, words = session.options, marker.kwargs if marker else {}
    if options.endpoint:
        return [NONE_THERE]
    models = named_models(session, None, words["models"]) if "models" in words else session.agenda.models
    given = options.source["tensor_parallel"] != "default"
    degrees = options.tensor_parallel if given else USUAL_GPUS
    loads = options.batches or USUAL_LOADS
    plans = [GpusPlan(m, n, False, load, loads[-1]) for m in models for n in degrees for load in loads]
    plans += [
        GpusPlan(m, n, True, load, loads[-1])
        for m in models
        for n in degrees
        for load in loads
        if n > degrees[0] and load >= n * ENOUGH_FOR_A_REPLICA
    ]
    return [pytest.param(plan, id=str(plan), marks=_unless_there(session, plan)) for plan in plans] or [NONE_THERE]


def _unless_there(session: Session, plan: GpusPlan) -> list[pytest.MarkDecorator]:
    from pytest_slmserve.errors import BadUsage

    try:
        if plan.replicas:
            why = session.agenda.unshareable([plan.model] * replicas_of(session, plan), "gpus", plan.concurrency)
        else:
            engine, load = gpus_engine(session, plan)
            session.agenda.compares(engine_alone(engine), load)
            why = None
    except BadUsage as error:
        why = error.problem
    return [pytest.mark.skip(reason=why)] if why else []


def replicas_of(session: Session, plan: GpusPlan) -> int:
    """Replicas that the GPUs of a plan have room for, each on as many as the options give an engine."""
    return plan.gpus // session.options.tensor_parallel[0]


def gpus_engine(session: Session, plan: GpusPlan) -> tuple[EngineSpec | ReplicaSpec, ClosedLoop]:
    """What runs on the GPUs of a plan, and the load of each engine. Raises BadUsage where it cannot be had."""
    agenda = session.agenda
    if plan.replicas:
        replicas = replicas_of(session, plan)
        return agenda.replicas([plan.model] * replicas, "gpus"), agenda.load(plan.concurrency // replicas)
    spec = agenda.spec_on(plan.model, plan.gpus, plan.largest)
    return spec, agenda.load_on(spec, plan.concurrency, plan.largest)


def engine_alone(engine: EngineSpec | ReplicaSpec) -> EngineSpec:
    """One of several that are alike, which stands for each of them."""
    from pytest_slmserve.spec import ReplicaSpec

    return engine.engines[0] if isinstance(engine, ReplicaSpec) else engine


def job_parameters(session: Session, marker: pytest.Mark | None) -> list[Any]:
    """A parameter per job that the marker names for this mode, of the models that were chosen; those that this device
    cannot have are skipped. Raises BadUsage."""
    from pytest_slmserve.jobs import why_not

    if marker is None or "jobs" not in marker.kwargs:
        raise _no_jobs()
    unused = pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # a job may have nothing to show
    found = []
    for plan in marked_jobs(session, marker.kwargs):
        skips = [pytest.mark.skip(reason=why)] if (why := why_not(session.agenda, plan)) else []
        found.append(pytest.param(plan, id=str(plan), marks=[benchmark(plan.model), unused, *skips]))
    return found or [NONE_THERE]


def marked_jobs(session: Session, words: Mapping[str, Any]) -> list[JobPlan]:
    """The jobs of a marker for this mode and the chosen models; the simulated engine has those of a GPU."""
    from pytest_slmserve.jobs import plans_of

    plans = plans_of(words, "cpu" if session.backend == "cpu" else "gpu")
    return [plan for plan in plans if not session.options.models or session.agenda.swept(plan.model)]


def _no_jobs() -> Exception:
    from pytest_slmserve.errors import BadUsage

    hint = '@pytest.mark.slm(jobs={"gpu": [{"model": "opt-125m", "requests": 500, "rate": 10, "lengths": (512, 256)}]})'
    return BadUsage("slm_job_point without jobs", hint)


def gate_parameters(session: Session) -> list[Any]:
    """For each model of the run what a gate compares, where one was asked for. Raises BadUsage for a gate that could
    not be carried out."""
    from pytest_slmserve.analysis.paired import ENDPOINTS
    from pytest_slmserve.gating import check_gate
    from pytest_slmserve.models import short_name

    if not session.options.gate:
        return [pytest.param(None, id="-")]
    for model in session.agenda.models:
        check_gate(session, model)
    return [
        pytest.param((model, endpoint), id=f"{short_name(model)}-{endpoint}")
        for model in session.agenda.models
        for endpoint in ENDPOINTS
    ] or [NONE_THERE]


def benchmark(model: str) -> pytest.MarkDecorator:
    return pytest.mark.benchmark(timer=CLOCK, group=model)


def model_parameters(session: Session, marker: pytest.Mark | None) -> list[Any]:
    """A parameter per model: those of the sweep, or those that the claim's own marker names."""
    from pytest_slmserve.models import short_name

    words = marker.kwargs if marker else {}
    named = job_models(session, words) if "jobs" in words else words.get("models")
    models = session.agenda.models if named is None else named_models(session, words.get("claim"), named)
    return [pytest.param(model, id=short_name(model)) for model in models] or [NONE_THERE]


def job_models(session: Session, words: Mapping[str, Any]) -> list[str]:
    """The models of a marker's jobs that can be measured here; where it names models too, of those."""
    from pytest_slmserve.jobs import why_not

    plans = [plan for plan in marked_jobs(session, words) if not why_not(session.agenda, plan)]
    return [model for model in dict.fromkeys(plan.model for plan in plans) if model in words.get("models", (model,))]


def named_models(session: Session, claim: str | None, named: Sequence[str]) -> list[str]:
    """Of the models that a claim's marker names, those that can be judged here: where models were chosen, all that the
    claim reads must be among them; else all must fit. Raises BadUsage for an unknown claim or model."""
    from pytest_slmserve.analysis.claims import claim_of

    def there(model: str) -> bool:
        return session.agenda.swept(model) if session.options.models else session.agenda.misfit(model) is None

    return [model for model in named if all(map(there, claim_of(claim).reads(model) if claim else (model,)))]


def load_for(session: Session, spec: EngineSpec, concurrency: int, variant: Variant) -> ClosedLoop:
    from pytest_slmserve.plan import load_of

    return load_of(session.options, spec.backend, concurrency, variant.starts)


def replica_engine(session: Session, plan: ReplicaPlan) -> EngineSpec | ReplicaSpec:
    if plan.count == 1:
        return session.agenda.spec(plan.model)
    return session.agenda.replicas([plan.model] * plan.count, plan.sharing)


def job_engine(session: Session, plan: JobPlan) -> EngineSpec:
    from pytest_slmserve.jobs import spec_of

    return spec_of(session.agenda, plan)


def engine_of(session: Session, item: Any) -> EngineSpec | ReplicaSpec | None:
    """The engine that an item needs, or whose measurements it reads; None where it is about a model that is not swept
    here, and where it is skipped. Raises BadUsage for an impossible marker."""
    marker = item.get_closest_marker("slm")
    words = dict(marker.kwargs) if marker else {}
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    parametrised = bool(parameters.keys() & PARAMETRISED)
    check_words(words, parametrised)
    if is_skipped(item):
        return None
    if plan := parameters.get("slm_replica_point"):
        return replica_engine(session, plan)
    if gpus := parameters.get("slm_gpus_point"):
        return gpus_engine(session, gpus)[0]
    if job := parameters.get("slm_job_point"):
        return job_engine(session, job)
    if sides := parameters.get("slm_gate"):
        return session.agenda.spec(sides[0])
    if model := parameters.get("slm_model"):
        return session.agenda.spec(model) if session.agenda.swept(model) else None
    return session.agenda.spec(parameters["slm_point"][0]) if parametrised else spec_from_marker(session, words)


def reads_several(item: Any) -> bool:
    """Does an item read what more than one engine measured? So do claims that name their models, those of replicas, of
    several GPUs and of jobs, and what holds a run against a baseline. Raises BadUsage for an unknown claim."""
    from pytest_slmserve.analysis.claims import claim_of

    marker = item.get_closest_marker("slm")
    words = marker.kwargs if marker else {}
    if "slm_baseline" in item.fixturenames:
        return True
    return "models" in words or ("claim" in words and claim_of(words["claim"]).of in ("replicas", "jobs"))


def is_reader(item: Any) -> bool:
    """Does it read what others have measured?"""
    return not READERS.isdisjoint(getattr(item, "fixturenames", ()))


def call_late(items: Sequence[Any]) -> None:
    """Those that read what more than one engine measured come when all have. Where cells are measured once more, alone,
    in the end, every reader waits for that: what it judges would change behind it. Raises BadUsage for an unknown
    claim."""
    there = [item for item in items if is_reader(item) and not is_skipped(item)]
    alone = any(map(measures_alone, there))
    for item in there:
        item.stash[LATE] = alone or reads_several(item)


def is_late(item: Any) -> bool:
    """Was it called late?"""
    return bool(item.stash.get(LATE, False))


def measures_alone(item: Any) -> bool:
    """Does it measure when all others are through?"""
    return "slm_alone" in item.fixturenames


def is_skipped(item: Any) -> bool:
    return item.get_closest_marker("skip") is not None


def why_not(session: Session, item: Any) -> str | None:
    """Why an item cannot be carried out in this mode; None if it can."""
    from pytest_slmserve.models import short_name

    marker = item.get_closest_marker("slm")
    words = marker.kwargs if marker else {}
    modes, why = NEEDS.get(words.get("needs"), ((), ""))
    if session.backend in modes:
        return why
    if (there := len(session.host.gpus)) and words.get("gpus", 1) > there:
        return f"needs {words['gpus']} GPUs, and {there} visible"
    if session.options.ray and (own := sorted(AS_IT_GOES & set(item.fixturenames))):
        return f"{own[0]} asks as the test goes, and a cluster is told beforehand: leave out --slm-ray"
    if is_gate(item) and not session.options.gate:
        return NEEDS_A_GATE
    if measures_alone(item) and not session.desk:
        return NEEDS_WORKERS
    if session.backend != "remote":
        return None
    if own := sorted(words.keys() - {"model", *NOT_OF_THE_ENGINE}):
        return f"sets {', '.join(own)} of its engine, and an endpoint has limits of its own"
    if "model" in words and not session.agenda.swept(words["model"]):
        return f"measures {short_name(words['model'])}, which this endpoint was not said to serve: --slm-models"
    return None


def check_words(words: dict[str, Any], parametrised: bool) -> None:
    """Raises BadUsage for words of a marker that say nothing. A point or claim that is parametrised has the engine of
    the options, so words that choose one say nothing there."""
    from pytest_slmserve.errors import BadUsage
    from pytest_slmserve.kinds import Starts
    from pytest_slmserve.spec import EngineSpec

    engine = {field.name for field in fields(EngineSpec)} - {"model", "backend"}
    known = [*NOT_OF_THE_ENGINE] if parametrised else ["model", *sorted(engine), *NOT_OF_THE_ENGINE]
    if unknown := set(words) - set(known):
        where = " where slm_point or slm_model is asked for" if parametrised else ""
        raise BadUsage(f"@pytest.mark.slm has no {', '.join(sorted(unknown))}{where}", ", ".join(known))
    if words.get("starts", "spread") not in get_args(Starts):
        raise BadUsage(
            f"@pytest.mark.slm(starts={words['starts']!r}) is no way to start", " or ".join(get_args(Starts))
        )
    if not isinstance(words.get("gpus", 1), int) or words.get("gpus", 1) < 1:
        raise BadUsage(f"@pytest.mark.slm(gpus={words['gpus']!r}) is no number of GPUs", "gpus=2")
    if words.get("needs", "gpu") not in NEEDS:
        known_needs = " or ".join(f'needs="{name}"' for name in NEEDS)
        raise BadUsage(f"@pytest.mark.slm(needs={words['needs']!r}) needs what is not known", known_needs)


def spec_from_marker(session: Session, words: dict[str, Any]) -> EngineSpec:
    words = {word: value for word, value in words.items() if word not in NOT_OF_THE_ENGINE}
    model = words.pop("model", None) or session.agenda.models[0]
    return replace(session.agenda.spec(model, words.get("tensor_parallel")), **words)
