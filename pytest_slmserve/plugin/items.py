"""Test items of a run that measures: parameters, needed engines, order, and the objects that fixtures return."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from functools import partial, wraps
from itertools import chain, product
from pathlib import Path
from textwrap import dedent
from typing import Any, TypeVar, get_args

import pytest

from pytest_slmserve.analysis import points
from pytest_slmserve.analysis.advice import subjects
from pytest_slmserve.analysis.claims.table import claim_of, models_read
from pytest_slmserve.analysis.gate.launch_pairs import BLOCKS, ENDPOINTS, EVERY_ENDPOINT, OUTPUTS
from pytest_slmserve.analysis.metrics.gpu_figures import DeviceFigures, device_figures
from pytest_slmserve.analysis.metrics.validity import CheckResult, health, trustworthy
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.engines.base import check_fits
from pytest_slmserve.engines.pool import cannot_share
from pytest_slmserve.options.table import takes_gpus
from pytest_slmserve.plan import planner as planning
from pytest_slmserve.plan.cases import Case, engine_title
from pytest_slmserve.plugin import PARAMETRISED, PLAN, is_measured
from pytest_slmserve.report.sweeps import skip_note
from pytest_slmserve.run.gate import check_gate, not_told, of_start
from pytest_slmserve.run.judge import Question
from pytest_slmserve.run.one_gate import is_short
from pytest_slmserve.run.session import Rounds, Session, Sweeps
from pytest_slmserve.schema.errors import BadUsage, DoesNotFit, RampUp, Sharing, Suite, naming
from pytest_slmserve.schema.kv_cache import predicted_blocks
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement, Run, Samples, Steps, Telemetry, differences
from pytest_slmserve.schema.specs import ClosedLoop, Engines, EngineSpec, ReplicaSpec, Workload, check_told, load_facts
from pytest_slmserve.telemetry.sampler import Sampler
from pytest_slmserve.workload.arrivals import job

# Figures of a point in the JUnit file.
JUNIT = ("output_tokens_per_s", "requests_per_s", "ttft_p99_s", "tpot_s", "e2e_s", "valid")
# Keyword arguments of the slm marker that do not choose the engine.
NOT_OF_THE_ENGINE = (
    *planning.COMPARED,
    *("claim", "models", "points", "lengths", "lora", "ramp_up", "needs", "gpus", "jobs", "gate"),
)
# Calls that return a verdict. A test that does not assert it always passes.
VERDICTS = {"slm_gate", "slm_claim", "slm_against_baseline"}
VERDICTS |= {"meets", "pareto_plateau", "latency_keeps_rising", "pareto_up_to_plateau"}
READERS = frozenset({"slm_model", "slm_advice"})  # fixtures of tests that read what others measured
# Fixtures whose measurements only the body of a test determines.
AS_IT_GOES = frozenset({"slm_engine", "slm_measure", "slm_sweep", "slm_job", "slm_replicas", "slm_gpu_sampler", "dcgm"})
# Fixtures that read the keyword arguments `COMPARED`, and the option that sets each for the whole run.
COMPARING = frozenset({"slm_engine", "slm_measure", "slm_point", "slm_sweep"})
ASKED = {
    "prefix_share": "--slm-prefix-share",
    "speculation": "--slm-engine-arg",
    "response_format": "-o slm_response_format",
}
# Reasons to skip an item at an endpoint, by the marker's `needs`.
NEEDS: dict[str, str] = {
    "gpu": "reads a GPU's counters: needs --slm-gpu or --slm-simulate",
    "own-engine": "asks an engine for what an endpoint does not tell: needs --slm-gpu or --slm-cpu",
}
HINT = ": --slm"  # at the end of a reason to skip a test, an option with which it runs
WITHOUT_THE_OPTION = ("simulated", "cpu")  # platforms on which a marker may say that a gate needs no --slm-gate
PACKAGE = Path(__file__).parents[1]
SHIPPED_MODULE = "pytest_slmserve.benchmarks"
LOOKED_AT = 100  # kinds of measurements, and cases, that are compared to find differences
CLAUSES = 3
NOBODY, NOTHING = Samples(*[()] * 8), Steps(*[()] * 7)
Carry = Callable[[Sequence[Measurement]], None]  # shows measurements to another plugin
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """Plan of a test item: what it measures or reads. It is made once, when all items are collected."""

    name: str
    skipped: bool = False  # it does not run, and has none of the following
    case: Case | None = None  # to measure, from its parameter
    engine: Engines | None = None  # needed, or the one whose measurements it reads; None for a model that is not swept
    model: str | None = None  # whose measurements it reads, from its parameter
    gate: str | None = None  # model whose gate it runs, from its parameter
    claim: Question | None = None  # on its model, to evaluate
    swept: bool = False  # its case is measured with its curve; a marker's point of a planned sweep is not
    compares: bool = False  # compares two sides
    reads: bool = False  # reads measurements of other items
    starts: bool = False  # needs a running engine even without a case; an item that only reads does not
    open: bool = False  # only its body determines what it measures


def plans_of(items: Sequence[Any]) -> list[ItemPlan]:
    """Return the plan of each item, an empty one for an item that measures nothing."""
    return [item.stash[PLAN] if PLAN in item.stash else ItemPlan(item.name) for item in items]


def cases_of_items(plans: Sequence[ItemPlan]) -> list[Case]:
    """Return the distinct cases of items, in the order of the items."""
    return list({plan.case.key: plan.case for plan in plans if plan.case}.values())


# Keyword arguments of markers


def words_of(item: Any) -> dict[str, Any]:
    """Return the keyword arguments of an item's slm marker, and of those of its parameters."""
    words: dict[str, Any] = {}
    for mark in (item.get_closest_marker("slm"), *getattr(item, "own_markers", ())):
        words |= mark.kwargs if mark and mark.name == "slm" else {}
    return words


def spec_from_marker(session: Session, words: Mapping[str, Any]) -> EngineSpec:
    """Return the engine that a marker describes. Raise BadUsage if it is impossible."""
    own = {word: value for word, value in words.items() if word not in ("model", *NOT_OF_THE_ENGINE)}
    model = words.get("model") or session.planner.models[0]
    options = planning.engine_options(words, session.options.engine_arg)
    planned = session.planner.spec(model, words.get("tensor_parallel_size"), **options)
    spec = replace(planned, **own)
    check_told(spec)
    return spec


def values_of(given: Any) -> Sequence[Any]:
    """Return the values of a keyword argument, which may be one value or several."""
    return given if isinstance(given, list | tuple) and given else [given]


def check_item(item: Any) -> None:
    """Raise BadUsage if an item's slm marker is wrong or has no effect, or if its body does not assert a verdict."""
    marker, words = item.get_closest_marker("slm"), words_of(item)
    if marker and marker.args:
        given = ", ".join(map(repr, marker.args))
        why = f"@pytest.mark.slm({given}) has values without a name"
        raise BadUsage(why, f"@pytest.mark.slm(model={marker.args[0]!r})")
    engine = {field.name for field in fields(EngineSpec)} - {"model", "platform"}
    known = ["model", *sorted(engine), *NOT_OF_THE_ENGINE]
    if unknown := set(words) - set(known):
        raise BadUsage(f"@pytest.mark.slm has no {', '.join(sorted(unknown))}", "Use one of " + ", ".join(known) + ".")
    chosen = sorted(words.keys() - NOT_OF_THE_ENGINE)
    if chosen and hasattr(item, "callspec") and item.callspec.params.keys() & PARAMETRISED:
        why = f"@pytest.mark.slm({chosen[0]}=...): this test runs for all models of the run, on the options' engine"
        raise BadUsage(why, "Use --slm-models=MODEL and --slm-engine-arg NAME=JSON.")
    if "lengths" in words:
        planning.checked_lengths(words["lengths"])
    planning.engine_options(words)  # which raises BadUsage for wrong adapters
    model, ramp_up, gpus, gate, needs = map(words.get, ("model", "ramp_up", "gpus", "gate", "needs"))
    shares = values_of(words.get("prefix_share"))
    is_share = all(isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one < 1 for one in shares)
    turns, switches = words.get("turns"), values_of(words.get("cached"))
    drafts, of_points = words.get("speculation"), "slm_point" in item.fixturenames
    sides = values_of(drafts) if of_points else [drafts]
    checks = {  # by argument: whether its value is right, else the problem and the hint
        "model": (isinstance(model, str), "is not a name of a model", 'model="opt-125m"'),
        "prefix_share": (
            is_share,
            "is not a share of prompts",
            "Use prefix_share=0.5, or (0, 0.5, 0.9) with slm_point.",
        ),
        "turns": (
            type(turns) is int and turns > 1,
            "is not a number of turns",
            "Use turns=4, or another number from 2 on.",
        ),
        "cached": (
            "turns" in words and all(type(one) is bool for one in switches),
            "says nothing of a cache of conversations",
            "Use turns=4, cached=True, or cached=(False, True) with slm_point.",
        ),
        "speculation": (
            {*map(type, sides)} == {bool},
            "is not True or False",
            "Use True, or (False, True) with slm_point.",
        ),
        "ramp_up": (ramp_up in get_args(RampUp), "is not a ramp-up", f"Use {' or '.join(get_args(RampUp))}."),
        "gpus": (isinstance(gpus, int) and gpus > 0, "is not a number of GPUs", "gpus=2"),
        "gate": (
            gate in WITHOUT_THE_OPTION,
            "is not a gate without --slm-gate",
            f"Use {' or '.join(WITHOUT_THE_OPTION)}.",
        ),
        "needs": (
            needs in [*NEEDS],
            "needs what is not known",
            f"Use one of {', '.join(f'needs={name!r}' for name in NEEDS)}.",
        ),
    }
    for word, (is_one, problem, hint) in checks.items():
        if word in words and not is_one:
            raise BadUsage(f"@pytest.mark.slm({word}={words[word]!r}) {problem}", hint)
    for word in sorted(words.keys() & planning.COMPARED):
        may = COMPARING | ({"slm_job"} if word == "response_format" else set())
        if not may & {*item.fixturenames}:
            problem = f"@pytest.mark.slm({word}={words[word]!r}): none of this test's fixtures reads it"
            raise BadUsage(problem, f"Use one of {', '.join(sorted(may))}, or {ASKED.get(word, '--slm-turns')}.")
    for own in ("extra", "env"):
        try:
            names = [name for name, _ in words.get(own, ())]
        except (TypeError, ValueError):
            problem = f"@pytest.mark.slm({own}={words[own]!r}) is not a list of pairs"
            raise BadUsage(problem, f'{own}=(("NAME", VALUE),)') from None
        if past := next(filter(takes_gpus, names), None):
            why = f"@pytest.mark.slm({own}=...): no lock and no sensor would hear of the GPUs that {past} asks for"
            raise BadUsage(why, "Use tensor_parallel_size=2, or set CUDA_VISIBLE_DEVICES before pytest.")
    if not any(name.startswith("slm_") for name in item.fixturenames):
        return
    try:
        body = ast.walk(ast.parse(dedent(inspect.getsource(item.function))))
    except (AttributeError, OSError, SyntaxError, TypeError):  # without source code, or not a function
        return
    for each in body:
        match each:
            case ast.Expr(ast.Call(ast.Name(name) | ast.Attribute(attr=name))) if name in VERDICTS:
                raise BadUsage(f"{item.nodeid}: {name}() gives a verdict, and nothing asserts it", f"assert {name}()")


# Parameters

# The only parameter of an item if none of its models was chosen, or none fits.
NONE_THERE = pytest.param(None, id="-", marks=pytest.mark.skip(reason="none of its models is measured in this run"))


class Clock:
    """Timer for pytest-benchmark that advances by the time of an engine, not by that of the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def __repr__(self) -> str:
        return "<the engine's clock>"


CLOCK = Clock()


def carries_out_gates(session: Session, words: Mapping[str, Any]) -> bool:
    """Return whether a test of a gate runs: with `--slm-gate`, or on the platform that its marker names."""
    return session.options.gate or (words.get("gate") == session.platform and not session.options.ray)


def parameters_of(fixture: str, session: Session, words: Mapping[str, Any]) -> list[Any]:
    """Return the parameters of a fixture: cases, or for `slm_gate` models with endpoints, and for `slm_model` models.

    Without a gate, the only parameter of `slm_gate` is None. The models are those of the sweep, of the marker, or of
    its jobs.

    Raises:
        BadUsage: if the marker does not fit the options, or a gate could not be carried out.
    """
    planner, claim, found = session.planner, words.get("claim"), list[Any]()
    match fixture:
        case "slm_gate":
            if not carries_out_gates(session, words):
                return [pytest.param(None, id="-")]
            real, short = session.options.load_format != "dummy", is_short(session)  # a short gate decides one endpoint
            endpoints = (BLOCKS,) if short else tuple(each for each in EVERY_ENDPOINT if real or each != OUTPUTS)
            for model in planner.models[:1] if short else planner.models:
                check_gate(session, model)
                reasons = not_told(session, model)
                for each in endpoints:
                    marks = [pytest.mark.skip(reason=reasons[each])] if each in reasons else []
                    # Dropped are endpoints that only sides at once have, and all others in a gate of the start.
                    if not marks or (each in ENDPOINTS and not of_start(session)):
                        found.append(pytest.param((model, each), id=f"{short_name(model)}-{each}", marks=marks))
            return found or [NONE_THERE]
        case "slm_model":
            named = words.get("models")
            if "jobs" in words:
                jobs = (job.model for job in planning.job_cases(planner, words) if not job.skip_reason)
                named = [model for model in dict.fromkeys(jobs) if named is None or model in named]
            of_blocks = session.platform != "remote" and claim == subjects.KV_BLOCKS
            for model in named_models(session, claim, named):
                why = ""
                if of_blocks and predicted_blocks(planner.spec(model)) is None:
                    why = "what its layers keep is not known beforehand: the engine's own KV blocks count"
                elif claim and claim_of(claim).of_tokens and planner.kind(model) != "generate":
                    why = f"the claim is on generating text, and requests ask this model to {planner.kind(model)}"
                marks = [pytest.mark.skip(reason=why)] if why else []
                found.append(pytest.param(model, id=short_name(model), marks=marks))
            return found or [NONE_THERE]
        case "slm_point":
            cases = planning.point_cases(planner, words)
        case "slm_replica_point":
            cases = planning.replica_cases(planner)
        case "slm_gpus_point":
            cases = planning.gpus_cases(planner, named_models(session, None, words.get("models")))
        case _ if "jobs" not in words:
            raise BadUsage(
                "the fixture slm_job_point needs fixed-size workloads in the marker",
                f"@pytest.mark.slm(jobs=[{planning.A_JOB}])",
            )
        case _:
            cases = planning.job_cases(planner, words)
    for case in cases:
        marks = [pytest.mark.skip(reason=case.skip_reason)] if case.skip_reason else []
        if fixture in ("slm_point", "slm_job_point"):  # pytest-benchmark shows them by the engine's clock
            marks = [pytest.mark.benchmark(timer=CLOCK, group=case.model), *marks]
        found.append(pytest.param(case, id=case.id, marks=marks))
    return found or [NONE_THERE]


def check_judged(gates: Sequence[Any]) -> None:
    """Raise BadUsage if every remaining test of a gate is for an endpoint that it does not judge (`not_told`)."""
    marks = [item.get_closest_marker("skip") for item in gates]
    reasons = [str(mark.kwargs.get("reason", "")).partition(HINT) if mark else ("", "", "") for mark in marks]
    if gates and all(hint for _, _, hint in reasons):
        problem, _, hint = reasons[0]
        raise BadUsage(f"{gates[0].name}: {problem}", f"{HINT[2:]}{hint}")


def named_models(session: Session, claim: str | None, named: Sequence[str] | None) -> Sequence[str]:
    """Return the models of the sweep, or those of a marker that can be evaluated here.

    All models that the claim reads must be chosen by the options, or else fit on the device.
    """
    if named is None:
        return session.planner.models
    if not isinstance(named, list | tuple) or not all(isinstance(model, str) for model in named):
        given = named if isinstance(named, str) else "opt-125m"
        raise BadUsage(f"@pytest.mark.slm(models={named!r}) is not a list of models", f"models=[{given!r}]")

    def there(model: str) -> bool:
        return session.planner.swept(model) if session.options.models else session.planner.misfit(model) is None

    return [model for model in named if all(map(there, models_read(claim_of(claim), model) if claim else (model,)))]


# Items of this run


def shipped_folder() -> Path:
    """Return the folder of the built-in benchmarks: in a wheel inside the package, in a checkout next to it."""
    in_the_wheel = PACKAGE / "benchmarks"
    return in_the_wheel if in_the_wheel.is_dir() else PACKAGE.parent / "benchmarks"


def path_of(arg: str) -> str:
    """Return an argument of `pytest --pyargs`, as a path if it names benchmarks that are not a module here."""
    module, colons, test = arg.partition("::")
    folder = shipped_folder()
    if folder.parent == PACKAGE or not f"{module}.".startswith(f"{SHIPPED_MODULE}."):
        return arg
    names = module.removeprefix(SHIPPED_MODULE).split(".")[1:]
    path = folder.joinpath(*names).with_suffix(".py") if names else folder
    return f"{path}{colons}{test}"


def left_out_reason(session: Session, item: Any, named: bool) -> str | None:
    """Return why an item is deselected, or None.

    Args:
        named: whether a path was given.
    """
    options, words = session.options, words_of(item)
    if not is_measured(item):
        return None if named else "without a path only tests that measure run (`pytest .` runs all)"
    if options.gate and "slm_gates" not in item.fixturenames:
        return "a gate runs alone"
    if marker := item.get_closest_marker("slm_suite"):
        suites = get_args(Suite)
        if len(marker.args) != 1 or marker.args[0] not in suites:
            given = ", ".join(map(repr, marker.args))
            raise BadUsage(f"@pytest.mark.slm_suite({given}) names no suite", "Use " + " or ".join(suites) + ".")
        files = (arg.partition("::")[0].removesuffix(".py") for arg in item.config.args)  # or modules
        by_path = any(re.split(r"[/\\.]", name)[-1] == item.path.stem for name in files)
        within = suites.index(marker.args[0]) <= suites.index(options.suite)
        if not (within or (by_path and options.source["suite"] == "default")):
            return f"--slm-suite {marker.args[0]} runs them, or their own path"
    if session.platform == "cpu" and (words.get("needs") == "gpu" or words.get("gpus", 1) != 1):
        return "they run only on a GPU (--slm-gpu)"
    if session.platform == "simulated" and not options.strict and "slm_claim" in item.fixturenames:
        # A checkout and an installed wheel both have the benchmarks. Claims that are arithmetic run.
        shipped = item.path.parent.name == "benchmarks" and (shipped_folder() / item.path.name).exists()
        if shipped and not item.get_closest_marker("skip") and claim_of(words.get("claim", "")).of != "arithmetic":
            return "simulated numbers prove no claim of the papers (-o slm_strict=1 judges them)"
    return None


def skip_reason(session: Session, item: Any) -> str | None:
    """Return why an item cannot run in this mode, or None."""
    words, fixtures = words_of(item), set(item.fixturenames)
    if session.platform == "remote" and "needs" in words:
        return NEEDS[words["needs"]]
    if (there := len(session.host.gpus)) and words.get("gpus", 1) > there:
        return f"needs {words['gpus']} GPUs, and {there} visible"
    if session.options.ray and (own := sorted(AS_IT_GOES & fixtures)):
        return f"{own[0]} asks as the test goes, and Ray is told beforehand: leave out --slm-ray"
    if "slm_gates" in fixtures and not carries_out_gates(session, words):
        return "compares two sides: needs --slm-gate"
    if "slm_alone" in fixtures and not session.options.on_all_gpus:
        return "compares what was measured beside others with the same alone: needs --slm-ray local"
    if session.platform != "remote":
        return None
    if chosen := sorted(words.keys() - {"model", *NOT_OF_THE_ENGINE}):
        return f"sets {', '.join(chosen)} of its engine, and an endpoint has limits of its own"
    if "model" in words and not session.planner.swept(words["model"]):
        return f"measures {short_name(words['model'])}, which this endpoint was not said to serve: --slm-models"
    return None


def item_plan(session: Session, item: Any) -> ItemPlan:
    """Return the plan of an item. Raise BadUsage if its engine, its requests or its claim are impossible."""
    if item.get_closest_marker("skip"):
        return ItemPlan(item.name, skipped=True)
    words, planner, fixtures = words_of(item), session.planner, set(item.fixturenames)
    if "slm_claim" in fixtures and "claim" not in words:
        raise BadUsage(f"{item.nodeid}: slm_claim needs a claim", '@pytest.mark.slm(claim="throughput-plateau")')
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    case = next((value for value in parameters.values() if isinstance(value, Case)), None)
    model, sides = parameters.get("slm_model"), parameters.get("slm_gate")
    engine: Engines | None = None
    if case:
        engine = case.engine
    elif sides:
        engine = planner.spec(sides[0])
    elif model:
        engine = planner.spec(model) if planner.swept(model) else None
    elif not parameters.keys() & PARAMETRISED:
        engine = spec_from_marker(session, words)
    if session.platform != "remote" and isinstance(engine, EngineSpec) and fixtures & {"slm_measure", "slm_sweep"}:
        # A test that overrides these fixtures measures something else than its marker says.
        defined = item._fixtureinfo.name2fixturedefs
        if all(len(defined[name]) == 1 for name in ("slm_spec", "sharegpt")):
            with naming(item.nodeid):
                check_fits(engine, workload := planner.workload(engine.model, words))
                planning.check_prefixes(engine, workload)
    own, reads = AS_IT_GOES & fixtures, not READERS.isdisjoint(fixtures)
    return ItemPlan(
        name=item.name,
        case=case,
        engine=engine,
        model=model,
        gate=sides[0] if sides else None,
        claim=session.verdicts.question(words["claim"], model, words) if model and "slm_claim" in fixtures else None,
        swept="slm_point" in fixtures and case is not None and not ("points" in words and planner.in_sweep(case)),
        compares="slm_gates" in fixtures,
        reads=reads,
        starts=own != {"slm_replicas"} and bool(own or not reads),
        open=bool(own) and case is None,
    )


def in_running_order(session: Session, items: Sequence[Any]) -> list[Any]:
    """Give each item its plan, skip items that cannot run in this mode, and return all in the order in which they run.

    Items follow the first use of their engines, and claims and advice follow their points. Last are readers of several
    engines, gates, which end the engine of others, and skipped items. If cases are measured again alone at the end, all
    readers wait.

    Raises:
        BadUsage: if a marker is wrong, or a verdict is not asserted.
    """
    for item in items:
        check_item(item)
        if why := skip_reason(session, item):
            item.add_marker(pytest.mark.skip(reason=why), append=False)
        item.stash[PLAN] = item_plan(session, item)
    alone = {item for item in items if "slm_alone" in item.fixturenames}
    readers_wait = any(not item.stash[PLAN].skipped for item in alone)
    order: dict[Engines | None, int] = {}

    def rank(item: Any) -> tuple[bool, bool, int, bool]:
        plan, words, reads = item.stash[PLAN], words_of(item), not READERS.isdisjoint(item.fixturenames)
        late = plan.skipped or plan.compares or (reads and readers_wait)
        if reads and not late:  # a baseline, claims that name their models, and those of replicas and of jobs
            of_several = "claim" in words and claim_of(words["claim"]).of in ("replicas", "jobs", "speculation")
            late = "slm_baseline" in item.fixturenames or "models" in words or of_several
        return late, late and item not in alone, order.setdefault(plan.engine, len(order)), reads

    return sorted(items, key=rank)


# What a run resumes from


def fits(session: Session, plans: Sequence[ItemPlan]) -> str:
    """Return a sentence about the resumed measurements.

    Raises:
        BadUsage: if a named file has none for this run, so that a wrong path is not ignored.
    """
    asked = [plan for plan in plans if not plan.reads and not plan.compares]
    cases = [plan.case for plan in asked if plan.case]
    # If only a test's body determines the case, its engine is still known.
    wanted = dict.fromkeys(plan.engine for plan in asked if plan.engine and not plan.case)
    engines = [Case(engine, environment=session.planner.environment(engine)) for engine in wanted]
    path, stored, why = session.source, session.stored, ""
    known, kinds = {case.key for case in cases}, {(case.each[0].key, case.environment.key) for case in engines}
    certain = [m for group in points.all_groups(stored) if points.group_key(group) in known for m in group]
    others = [m for m in stored if kinds and (m.spec.key, m.environment.key) in kinds]
    answering = {m.id: m for m in (*certain, *others)}.values()
    if not stored:
        why = f"{path} holds no measurement"
    elif (cases or engines) and not answering:
        why = f"{path} answers nothing of this run: {difference(stored, [*cases, *engines])}"
    if why and isinstance(session.options.resume, str):
        raise BadUsage(f"--slm-resume: {why}", "Use the options of the run that wrote it, or remove --slm-resume.")
    if why:
        return f"nothing is resumed: {why}"
    valid = sum(m.id in session.reused for m in answering)
    sure = sum(m.id in session.reused for m in certain)
    told = [f"{sure} measurements for this run"]
    told += [f"{valid - sure} of engines that its own tests use"] if valid > sure else []
    told += [f"{len(answering) - valid} that are not valid"] if len(answering) > valid else []
    return f"{path} holds {', and '.join(told)}"


def difference(stored: Sequence[Measurement], cases: Sequence[Case]) -> str:
    """Return up to three differences between the most similar measurement ("there") and case ("here").

    Args:
        cases: without workload and load if only the body of a test determines them.
    """
    kinds = list({m.key: m for m in stored}.values())
    clauses: list[list[str]] = []
    for m, case in product(kinds[:LOOKED_AT], cases[:LOOKED_AT]):
        spec = case.each[0]  # equal for all replicas of a planned set
        found = differences(m.environment.kind, case.environment.kind)
        if short_name(m.spec.model) != short_name(spec.model):  # other differences of the engine follow from it
            found.append(f"model {short_name(m.spec.model)} there, {short_name(spec.model)} here")
        else:
            found += differences(m.spec.facts, spec.facts)
        for workload, load in zip(case.workloads[:1], case.loads):
            if m.workload.hash != workload.hash:
                there, here = m.workload, workload.reference()
                lengths = [f"{w.mean_prompt_tokens:.0f}/{w.mean_output_tokens:.0f}" for w in (there, here)]
                made = ", ".join(differences(asdict(there.spec), asdict(here.spec)))
                if lengths[0] != lengths[1]:
                    found.append(f"requests of {lengths[0]} tokens there, {lengths[1]} here")
                else:
                    found.append(f"other requests ({made})" if made else "other requests of the same lengths")
            found += differences(load_facts(m.load), load_facts(load))
        clauses.append(found)
    fewest = min(clauses, key=len)
    more = [f"and {len(fewest) - CLAUSES} more"] if len(fewest) > CLAUSES else []
    return "; ".join(fewest[:CLAUSES] + more)


# Objects for tests


def checked(name: str, function: Callable[..., T], *given: object) -> Callable[..., T]:
    """Return a function that tests call as `name`, whose first arguments are `given`, and that checks the others.

    It raises BadUsage for unknown and missing arguments, and for wrong `repeats`. `**load` takes fields of ClosedLoop.
    """
    signature = inspect.signature(partial(function, *given))
    known = [word for word in signature.parameters if word not in ("self", "load")]
    if "load" in signature.parameters:
        known += [field.name for field in fields(ClosedLoop) if field.name != "concurrency"]

    @wraps(function)
    def call(*values: object, **words: object) -> T:
        if unknown := [word for word in words if word not in known]:
            raise BadUsage(f"{name} takes no {unknown[0]!r}", f"Use {nearest(unknown[0], known)}.")
        try:
            signature.bind(*values, **words)
        except TypeError as error:
            raise BadUsage(f"{name}: {error}", "Use one of " + ", ".join(known) + ".") from None
        repeats = words.get("repeats")
        if repeats is not None and not (isinstance(repeats, int) and repeats > 0):
            raise BadUsage(f"{name}: repeats={repeats!r} is not a number of repeats", "repeats=3")
        return function(*given, *values, **words)

    return call


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known words that are most similar to a word, or all of them."""
    near = get_close_matches(word, names := list(known), cutoff=0.7)
    return " or ".join(near) or ", ".join(names)


@dataclass(frozen=True, repr=False)
class PlannedCase:
    """Case that a test measures. `sweeps` are the curves of the run if it belongs to one."""

    session: Session
    case: Case
    carry: Carry = lambda measurements: None
    sweeps: Sweeps | None = None

    def measure(self) -> Verdict:
        """Measure missing repeats, and return whether the measurements can be trusted.

        The test is skipped if an adaptive sweep does not need this point, or the engine has no room for it.
        """
        case, wanted = self.case, self.session.options.repeats
        try:
            if self.sweeps:
                repeats = self.sweeps.repeats(case)
                if repeats is None:
                    pytest.skip(skip_note(self.session.verdicts.curve(case.model), case.concurrency))
                wanted = repeats
            groups = self.session.executor.measure(case, wanted)
        except DoesNotFit as error:
            pytest.skip(error.problem)
        self.carry([*chain.from_iterable(groups)])
        return trustworthy(repr(self), groups, wanted)

    def __repr__(self) -> str:
        return self.case.id


@dataclass(frozen=True, repr=False)
class OwnEngine:
    """Engine that the marker of a test describes.

    Attributes:
        properties: of the test, for the JUnit file.
    """

    session: Session
    spec: EngineSpec
    workload: Workload
    words: planning.Words
    properties: list[tuple[str, object]]

    def case(self, concurrency: int, own: Mapping[str, Any]) -> Case:
        """Return the case of a closed loop with own fields. Raise BadUsage if it has no window."""
        planner = self.session.planner
        load = replace(planner.load(concurrency, self.words), **own)
        if load.requests is not None:
            raise BadUsage("a load of a fixed number of requests has no window to measure", "slm_engine.run(...)")
        return planner.case(self.spec, [self.workload], [load])

    @partial(checked, "slm_measure")
    def measure(self, concurrency: int, *, repeats: int | None = None, **load: Any) -> points.Point:
        groups = self.session.executor.measure(self.case(concurrency, load), repeats)
        return self.told(points.points_of(chain.from_iterable(groups))[0])

    @partial(checked, "slm_sweep")
    def sweep(self, concurrency: Sequence[int], *, repeats: int | None = None, **load: Any) -> Curve:
        """Measure points in rounds, without `repeats` until it is decided whether there is a plateau."""
        session = self.session
        if isinstance(concurrency, str | int):
            raise BadUsage(f"slm_sweep(concurrency={concurrency!r}) is not a list of numbers", "concurrency=[1, 2, 4]")
        cases = {n: self.case(n, load) for n in concurrency}
        if not cases:
            raise BadUsage("slm_sweep(concurrency=[]) names no load", "concurrency=[1, 2, 4]")
        session.executor.ask([cases[n] for n in sorted(cases)], repeats)  # the order in which they are measured
        rounds = Rounds(session, cases)
        for number in range(1, (repeats or session.options.repeats) + 1):
            rounds.round(number, cases)

        def curve(over: bool) -> Curve:
            found = session.results.measurements(case.key for case in cases.values())
            looks = () if repeats else session.looks
            return curve_of(short_name(self.spec.model), found, planned=[*cases], looks=looks, over=over)

        if repeats is None:
            rounds.until_decided(lambda: [curve(False).pareto_plateau()])
        for error in rounds.failed.values():
            raise error
        found = curve(True)
        return replace(found, points=tuple(map(self.told, found.points)))

    def told(self, point: points.Point) -> points.Point:
        """Add the figures of a point to the JUnit file.

        Return a point whose verdicts are added to it and to the report.
        """

        def tell(verdict: Verdict) -> None:
            self.session.verdicts.add(verdict)
            told = f"{verdict.state.value}: {verdict.why}"
            self.properties.append((f"slm_{verdict.claim} [{verdict.subject}]", told))

        for name in JUNIT:
            self.properties.append((f"slm_{name} [concurrency {point.concurrency}]", getattr(point, name)))
        return replace(point, told=tell)


def own_job(
    session: Session,
    spec: EngineSpec,
    marked: planning.Words,
    requests: int,
    rate: float = math.inf,
    *,
    lengths: tuple[int, int] | None = None,
    burstiness: float = 1.0,
    repeats: int | None = None,
) -> points.JobPoint:
    """Serve one job on the engine of a test.

    Args:
        marked: keyword arguments of its marker, of which a job uses `lora` and `response_format`.
    """
    words = {name: value for name, value in marked.items() if name in ("lora", "response_format")}
    words |= {} if lengths is None else {"lengths": lengths}
    workload = session.planner.workload(spec.model, words, requests)
    load = job(requests, rate, session.options.seed, burstiness=burstiness)
    groups = session.executor.measure(session.planner.case(spec, [workload], [load]), repeats)
    return points.job_points(chain.from_iterable(groups))[0]


def planned_sweeps(session: Session, plans: Sequence[ItemPlan]) -> Sweeps:
    """Return the curves of a run, with the loads and the claims of its items."""
    cases, claims = defaultdict[str, dict[int, Case]](dict), defaultdict[str, list[Question]](list)
    for plan in plans:
        if plan.case and plan.swept:
            cases[plan.case.series][plan.case.concurrency] = plan.case
        if plan.claim and plan.claim.series:
            claims[plan.claim.series].append(plan.claim)
    return Sweeps(session, cases, claims)


def shared_engines(
    session: Session,
    n: int = 2,
    *,
    sharing: Sharing | None = None,
    model: str | None = None,
    models: Sequence[str] | None = None,
    pinned: bool | None = None,
    thread_percentage: int | None = None,
) -> SharedEngines:
    """Return engines on one device, or skip the test if they cannot share it."""
    planner = session.planner
    if not models and n < 2:
        raise BadUsage(f"{n} replica is an engine like any other", "Use slm_measure, or two and more replicas.")
    spec = planner.replicas(models or [model or planner.models[0]] * n, sharing, pinned, thread_percentage)
    if why := cannot_share(spec, planner.host.device):
        pytest.skip(why)
    return SharedEngines(session, spec)


@dataclass(frozen=True, repr=False)
class SharedEngines:
    """Several engines on one device, which start when they are first measured."""

    session: Session
    spec: ReplicaSpec

    @partial(checked, "slm_replicas(...).measure")
    def measure(self, concurrency: int, *, repeats: int | None = None, **load: Any) -> points.ReplicaPoint:
        """Measure `concurrency` requests in total, spread evenly. Other arguments are fields of ClosedLoop."""
        case = self.session.planner.replicas_case(self.spec, concurrency, load)
        return points.shared_points(chain.from_iterable(self.session.executor.measure(case, repeats)))[0]

    def __repr__(self) -> str:
        return f"{len(self.spec)} replicas ({engine_title(self.spec)})"


@dataclass(repr=False)
class SampledBlock:
    """Sensor readings during a block. Before the block has ended, reading them raises BadUsage."""

    environment: Environment
    run: Run | None = None

    @property
    def seen(self) -> Run:
        if self.run is None:
            raise BadUsage("the block that is watched has not ended", "Ask after the with statement.")
        return self.run

    @property
    def telemetry(self) -> Telemetry:
        """Sensor readings, with times in seconds since the block began."""
        assert self.seen.telemetry is not None
        return self.seen.telemetry

    @property
    def figures(self) -> DeviceFigures:
        return device_figures(self.seen)

    @property
    def health(self) -> CheckResult:
        return health(self.seen, self.environment)


Watching = Callable[[], AbstractContextManager[SampledBlock]]


@contextmanager
def watching(sampler: Sampler, environment: Environment) -> Iterator[SampledBlock]:
    """Read the sensors until the context ends, also by an exception."""
    watched = SampledBlock(environment)
    with sampler.recording() as recording:
        began_s = recording.clock()
        try:
            yield watched
        finally:
            window_s = 0.0, recording.clock() - began_s
    watched.run = Run(NOBODY, NOTHING, window_s, began_s=began_s, telemetry=recording.telemetry(began_s, window_s))
