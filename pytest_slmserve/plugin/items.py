"""Properties of a test item that the hooks and the fixtures need: what it measures, and on which engine."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import pytest

from pytest_slmserve.schema.errors import BadUsage, RampUp, Suite, naming

if TYPE_CHECKING:
    from pytest_slmserve.plan.cases import Case
    from pytest_slmserve.plan.planner import MarkerOverrides
    from pytest_slmserve.run.baseline import StoredBaseline
    from pytest_slmserve.run.session import Session
    from pytest_slmserve.schema.errors import Detail
    from pytest_slmserve.schema.loads import ClosedLoop
    from pytest_slmserve.schema.specs import EngineSpec, ReplicaSpec


SESSION = pytest.StashKey["Session"]()
PROBLEM = pytest.StashKey[str]()  # why the options cannot be carried out, found while items were made
COLLECTED = pytest.StashKey[list[str]]()  # sentences on the tests that are no part of the run, and on its length
BASELINE: pytest.StashKey[StoredBaseline] = pytest.StashKey()  # where there is one to be held against
# Words of the slm marker that do not choose the engine.
NOT_OF_THE_ENGINE = ("claim", "models", "points", "lengths", "ramp_up", "needs", "gpus", "jobs", "gate")
# Calls that give a verdict. A test that does not assert it passes whatever was found.
VERDICTS = {"slm_gate", "slm_claim", "slm_against_baseline"}
VERDICTS |= {"pareto_plateau", "latency_keeps_rising", "pareto_up_to_plateau"}
# Fixtures whose parameters come from the options.
PARAMETRISED = frozenset({"slm_point", "slm_model", "slm_replica_point", "slm_gate", "slm_gpus_point", "slm_job_point"})
READERS = frozenset({"slm_model", "slm_advice"})  # fixtures of tests that read what others measured
# What a marker says that its item needs: modes that do not have it, and what the item is skipped with then.
NEEDS: dict[str | None, tuple[tuple[str, ...], str]] = {
    "gpu": (("remote",), "reads a GPU's counters: needs --slm-gpu or --slm-simulate"),
    "own-engine": (("remote",), "asks an engine for what an endpoint does not tell: needs --slm-gpu or --slm-cpu"),
}
NEEDS_SEVERAL = "compares what was measured beside others with the same alone: needs --slm-ray local"
# Fixtures that measure what the body of a test asks for, or an engine's own words.
AS_IT_GOES = frozenset({"slm_engine", "slm_measure", "slm_sweep", "slm_job", "slm_replicas", "slm_gpu_sampler", "dcgm"})
NEEDS_A_MODE = "measures: needs --slm-gpu, --slm-cpu, --slm-simulate or --slm-endpoint"
NEEDS_A_GATE = "compares two sides: needs --slm-gate"
WITHOUT_THE_OPTION = ("simulated", "cpu")  # platforms where a marker may say that a gate needs no --slm-gate
# Why tests are left out of a run.
GATE_ALONE = "a gate runs alone"
ON_A_GPU_ONLY = "they run only on a GPU (--slm-gpu)"
NO_PATH = "without a path only tests that measure run (`pytest .` runs all)"
IN_A_SUITE = "--slm-suite {} runs them, or their own path"
PROVES_NOTHING = "simulated numbers prove no claim of the papers (--slm-strict judges them)"
PACKAGE = Path(__file__).parents[1]
SHIPPED_MODULE = "pytest_slmserve.benchmarks"


def detail_of(config: pytest.Config) -> Detail:
    """How much is printed at the end: as the command line asks; else by pytest's -v and -q, or as other options say."""
    options, verbose = config.stash[SESSION].options, config.option.verbose
    if options.source["report"] == "command line" or not verbose:
        return options.report
    if verbose < 0:
        return "summary"
    return "all" if verbose > 1 or options.report == "all" else "tables"


def is_measured(item: pytest.Item) -> bool:
    """Does this item need an engine, or what one measured? What has no fixtures, such as a file that another plugin
    checks, needs none, though a marker of its package is its own too."""
    if not hasattr(item, "fixturenames"):
        return False
    return item.get_closest_marker("slm") is not None or any(name.startswith("slm_") for name in item.fixturenames)


def is_gate(item: pytest.Item) -> bool:
    """Does it compare two sides?"""
    return "slm_gates" in getattr(item, "fixturenames", ())


def words_of(item: Any) -> dict[str, Any]:
    """Words of the item's slm marker and of those that its parameters have; none without one."""
    marker = item.get_closest_marker("slm")
    words: dict[str, Any] = {}
    for mark in (marker, *getattr(item, "own_markers", ())):
        words |= mark.kwargs if mark and mark.name == "slm" else {}
    return words


def chosen_parameters(item: Any) -> Mapping[str, Any]:
    """Parameters of a parametrised item, by name; none of any other."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def compares(session: Session, words: Mapping[str, Any]) -> bool:
    """Does a test of a gate with these words of its marker run? Its `gate` stands in for `--slm-gate` on the platform
    that it names."""
    return session.options.gate or (words.get("gate") == session.platform and not session.options.ray)


def is_planned_point(item: Any) -> bool:
    """Is it a point of a sweep that the options plan, and not one that its marker names?"""
    return "slm_point" in item.fixturenames and "points" not in words_of(item)


def planned_loads(items: Sequence[Any]) -> dict[str, list[int]]:
    """The loads that items of planned sweeps measure, by model."""
    found: dict[str, list[int]] = {}
    for item in items:
        if is_planned_point(item) and not is_skipped(item) and (case := case_of(item)):
            found.setdefault(case.model, []).append(case.concurrency)
    return found


def planned_claims(items: Sequence[Any]) -> dict[str, list[str]]:
    """The claims on planned sweeps that items judge, by model."""
    from pytest_slmserve.analysis.claims.table import claim_of

    found: dict[str, list[str]] = {}
    for item in items:
        if (claim := judged_claim(item)) and claim_of(claim).of == "sweeps":
            found.setdefault(item.callspec.params["slm_model"], []).append(claim)
    return found


def judged_claim(item: Any) -> str | None:
    """The name of the claim that an item judges; None where it judges none, or is skipped."""
    if "slm_claim" not in getattr(item, "fixturenames", ()) or is_skipped(item):
        return None
    return str(words_of(item)["claim"])


def marker_overrides(item: Any) -> MarkerOverrides:
    """The requests and the ramp-up that an item's marker asks for."""
    from pytest_slmserve.plan.case_lists import overrides_of

    return overrides_of(words_of(item))


def load_for(
    session: Session, spec: EngineSpec, concurrency: int, overrides: MarkerOverrides, own: Mapping[str, Any]
) -> ClosedLoop:
    """The closed loop of a point. own: fields of it, other than the options and the marker say. Raises BadUsage for one
    without a window."""
    from pytest_slmserve.plan.planner import closed_loop_of

    load = replace(closed_loop_of(session.options, spec.platform, concurrency, overrides.ramp_up), **own)
    if load.requests is not None:
        raise BadUsage("a load of a fixed number of requests has no window to measure", "slm_engine.run(...)")
    return load


def engine_of(session: Session, item: Any) -> EngineSpec | ReplicaSpec | None:
    """The engine that an item needs, or whose measurements it reads; None where it is about a model that is not swept
    here, and where it is skipped. Raises BadUsage for an impossible engine."""
    words, parameters = words_of(item), chosen_parameters(item)
    if is_skipped(item):
        return None
    if case := case_of(item):
        return case.engine
    if sides := parameters.get("slm_gate"):
        return session.planner.spec(sides[0])
    if model := parameters.get("slm_model"):
        return session.planner.spec(model) if session.planner.swept(model) else None
    return None if parameters.keys() & PARAMETRISED else spec_from_marker(session, words)


def check_marker(item: Any) -> None:
    """Raises BadUsage for an slm marker that says nothing."""
    marker = item.get_closest_marker("slm")
    if marker and marker.args:
        given = ", ".join(map(repr, marker.args))
        why = f"@pytest.mark.slm({given}) has values without a name"
        raise BadUsage(why, f"@pytest.mark.slm(model={marker.args[0]!r})")
    check_words(words_of(item), bool(chosen_parameters(item).keys() & PARAMETRISED))


def check_asserted(item: Any) -> None:
    """Raises BadUsage where the body of a test drops a verdict."""
    if not any(name.startswith("slm_") for name in item.fixturenames):
        return
    try:
        body = ast.walk(ast.parse(dedent(inspect.getsource(item.function))))
    except (AttributeError, OSError, SyntaxError, TypeError):  # made by code, or no function
        return
    for each in body:
        match each:
            case ast.Expr(ast.Call(ast.Name(name) | ast.Attribute(attr=name))) if name in VERDICTS:
                raise BadUsage(f"{item.nodeid}: {name}() gives a verdict, and nothing asserts it", f"assert {name}()")


def check_requests_fit(session: Session, item: Any) -> None:
    """Raises BadUsage where `slm_measure` would send requests that are longer than the engine of the item takes."""
    from pytest_slmserve.engines.base import check_fits
    from pytest_slmserve.schema.specs import EngineSpec

    if {"slm_measure", "slm_sweep"}.isdisjoint(item.fixturenames) or is_skipped(item) or session.platform == "remote":
        return
    # Who overrides these fixtures measures something else than the marker says.
    found = item._fixtureinfo.name2fixturedefs
    if any(len(found[name]) > 1 for name in ("slm_spec", "sharegpt")):
        return
    if isinstance(spec := engine_of(session, item), EngineSpec):
        with naming(item.nodeid):
            check_fits(spec, session.planner.workload(spec.model, marker_overrides(item)))


def reads_several(item: Any) -> bool:
    """Does an item read what more than one engine measured? So do claims that name their models, those of replicas, of
    several GPUs and of jobs, and what holds a run against a baseline. Raises BadUsage for an unknown claim."""
    from pytest_slmserve.analysis.claims.table import claim_of

    words = words_of(item)
    if "slm_baseline" in item.fixturenames:
        return True
    return "models" in words or ("claim" in words and claim_of(words["claim"]).of in ("replicas", "jobs"))


def is_reader(item: Any) -> bool:
    """Does it read what others have measured?"""
    return not READERS.isdisjoint(getattr(item, "fixturenames", ()))


def asks_as_it_goes(item: Any) -> bool:
    """May its body ask an engine for more than its parameter says, or look at what others have measured?"""
    own = inspect.signature(item.function).parameters if hasattr(item, "function") else ()
    return not AS_IT_GOES.isdisjoint(item.fixturenames) or "slm_session" in own


def asks_the_engine(item: Any) -> bool:
    """Decides whether an item without a parameter that says what it measures needs the engine of its marker for itself.
    An item that only reads does not, nor one that makes up replicas."""
    asked = AS_IT_GOES & set(item.fixturenames)
    return asked != {"slm_replicas"} and bool(asked or not is_reader(item))


def measures_alone(item: Any) -> bool:
    """Does it measure when all others are through?"""
    return "slm_alone" in item.fixturenames


def is_skipped(item: Any) -> bool:
    return item.get_closest_marker("skip") is not None


def shipped_folder() -> Path:
    """The folder of the shipped tests: a module of the wheel, and in a checkout a folder beside the package."""
    in_the_wheel = PACKAGE / "benchmarks"
    return in_the_wheel if in_the_wheel.is_dir() else PACKAGE.parent / "benchmarks"


def path_of(arg: str) -> str:
    """An argument of `pytest --pyargs`, where it names shipped tests that are no module here by their path."""
    module, colons, test = arg.partition("::")
    folder = shipped_folder()
    if folder.parent == PACKAGE or not f"{module}.".startswith(f"{SHIPPED_MODULE}."):
        return arg
    names = module.removeprefix(SHIPPED_MODULE).split(".")[1:]
    path = folder.joinpath(*names).with_suffix(".py") if names else folder
    return f"{path}{colons}{test}"


def judges_the_papers(item: Any) -> bool:
    """Does it judge, in the shipped suite, a claim of the papers on what was measured? Some claims are arithmetic. A
    checkout has a suite of its own beside that of an installed wheel."""
    from pytest_slmserve.analysis.claims.table import claim_of

    shipped = item.path.parent.name == "benchmarks" and (shipped_folder() / item.path.name).exists()
    claim = judged_claim(item) if shipped else None
    return claim is not None and claim_of(claim).of != "arithmetic"


def larger_suite(session: Session, item: Any) -> str | None:
    """The suite that an item needs, by its `slm_suite` marker; None where this run's has it, and where the command line
    names the item's file and no suite. Raises BadUsage for an unknown one."""
    marker, options, suites = item.get_closest_marker("slm_suite"), session.options, get_args(Suite)
    if marker is None:
        return None
    if len(marker.args) != 1 or marker.args[0] not in suites:
        given = ", ".join(map(repr, marker.args))
        raise BadUsage(f"@pytest.mark.slm_suite({given}) names no suite", " or ".join(suites))
    needed: str = marker.args[0]
    files = (arg.partition("::")[0].removesuffix(".py") for arg in item.config.args)  # or modules
    named = any(re.split(r"[/\\.]", name)[-1] == item.path.stem for name in files)
    within = suites.index(needed) <= suites.index(options.suite) or (options.source["suite"] == "default" and named)
    return None if within else needed


def left_out_reason(session: Session, item: Any, named: bool) -> str | None:
    """The reason why an item is no part of this run; None where it is. named: whether a path was given."""
    if not is_measured(item):
        return None if named else NO_PATH
    if session.options.gate and not is_gate(item):
        return GATE_ALONE
    if suite := larger_suite(session, item):
        return IN_A_SUITE.format(suite)
    words = words_of(item)
    if session.platform == "cpu" and (words.get("needs") == "gpu" or words.get("gpus", 1) != 1):
        return ON_A_GPU_ONLY
    if session.platform == "simulated" and not session.options.strict and judges_the_papers(item):
        return PROVES_NOTHING
    return None


def models_of_markers(session: Session, items: Sequence[Any]) -> str | None:
    """A sentence on the items whose marker names a model that the options do not; None where there is none, and of an
    endpoint, which skips them."""
    from pytest_slmserve.report.text_table import counted

    named = [words["model"] for item in items if not is_skipped(item) and "model" in (words := words_of(item))]
    others = [model for model in named if session.options.models and not session.planner.swept(model)]
    if not others or session.platform == "remote":
        return None
    tests = f"{counted(len(others), 'test')} of {', '.join(dict.fromkeys(others))}"
    return f"slmserve: {tests}, as the marker has it: --slm-models does not change that"


def skip_reason(session: Session, item: Any) -> str | None:
    """The reason why an item cannot be carried out in this mode; None if it can."""
    from pytest_slmserve.schema.catalog import short_name

    words = words_of(item)
    modes, why = NEEDS.get(words.get("needs"), ((), ""))
    if session.platform in modes:
        return why
    if (there := len(session.host.gpus)) and words.get("gpus", 1) > there:
        return f"needs {words['gpus']} GPUs, and {there} visible"
    if session.options.ray and (own := sorted(AS_IT_GOES & set(item.fixturenames))):
        return f"{own[0]} asks as the test goes, and Ray is told beforehand: leave out --slm-ray"
    if is_gate(item) and not compares(session, words):
        return NEEDS_A_GATE
    if measures_alone(item) and not session.options.on_all_gpus:
        return NEEDS_SEVERAL
    if session.platform != "remote":
        return None
    if own := sorted(words.keys() - {"model", *NOT_OF_THE_ENGINE}):
        return f"sets {', '.join(own)} of its engine, and an endpoint has limits of its own"
    if "model" in words and not session.planner.swept(words["model"]):
        return f"measures {short_name(words['model'])}, which this endpoint was not said to serve: --slm-models"
    return None


def check_words(words: Mapping[str, Any], parametrised: bool) -> None:
    """Raises BadUsage for words of a marker that say nothing. What is parametrised has the models and the engine of the
    options, so words that choose one say nothing there."""
    from pytest_slmserve.options.table import takes_gpus
    from pytest_slmserve.plan.case_lists import checked_lengths
    from pytest_slmserve.schema.specs import EngineSpec

    engine = {field.name for field in fields(EngineSpec)} - {"model", "platform"}
    known = ["model", *sorted(engine), *NOT_OF_THE_ENGINE]
    if unknown := set(words) - set(known):
        raise BadUsage(f"@pytest.mark.slm has no {', '.join(sorted(unknown))}", ", ".join(known))
    if parametrised and (chosen := sorted(words.keys() - NOT_OF_THE_ENGINE)):
        why = f"@pytest.mark.slm({chosen[0]}=...): this test runs for all models of the run, on the options' engine"
        raise BadUsage(why, "--slm-models=MODEL and --slm-engine-arg NAME=JSON")
    if not isinstance(words.get("model", ""), str):
        raise BadUsage(f"@pytest.mark.slm(model={words['model']!r}) is no name of a model", 'model="opt-125m"')
    if "lengths" in words:
        checked_lengths(words["lengths"])
    if words.get("ramp_up", "staggered") not in get_args(RampUp):
        raise BadUsage(f"@pytest.mark.slm(ramp_up={words['ramp_up']!r}) is no ramp-up", " or ".join(get_args(RampUp)))
    if not isinstance(words.get("gpus", 1), int) or words.get("gpus", 1) < 1:
        raise BadUsage(f"@pytest.mark.slm(gpus={words['gpus']!r}) is no number of GPUs", "gpus=2")
    if words.get("gate", "cpu") not in WITHOUT_THE_OPTION:
        raise BadUsage(
            f"@pytest.mark.slm(gate={words['gate']!r}) is no gate without --slm-gate", " or ".join(WITHOUT_THE_OPTION)
        )
    for own in ("extra", "env"):
        if past := next(filter(takes_gpus, _names(own, words.get(own, ()))), None):
            why = f"@pytest.mark.slm({own}=...): no lock and no sensor would hear of the GPUs that {past} asks for"
            raise BadUsage(why, "tensor_parallel_size=2, or CUDA_VISIBLE_DEVICES before pytest")
    if words.get("needs", "gpu") not in NEEDS:
        known_needs = " or ".join(f'needs="{name}"' for name in NEEDS)
        raise BadUsage(f"@pytest.mark.slm(needs={words['needs']!r}) needs what is not known", known_needs)


def _names(word: str, pairs: Any) -> list[str]:
    """Names of the pairs that a marker gives an engine as `word`. Raises BadUsage where they are no pairs."""
    try:
        return [name for name, _ in pairs]
    except (TypeError, ValueError):
        problem = f"@pytest.mark.slm({word}={pairs!r}) is no list of pairs"
        raise BadUsage(problem, f'{word}=(("NAME", VALUE),)') from None


def spec_from_marker(session: Session, words: Mapping[str, Any]) -> EngineSpec:
    own = {word: value for word, value in words.items() if word not in ("model", *NOT_OF_THE_ENGINE)}
    model = words.get("model") or session.planner.models[0]
    return replace(session.planner.spec(model, words.get("tensor_parallel_size")), **own)


def cases_of_items(items: Sequence[Any]) -> list[Case]:
    """The distinct cases of the items that are not skipped, in the order of the items."""
    found = (case_of(item) for item in items if not is_skipped(item))
    return list({case.key: case for case in found if case}.values())


def case_of(item: Any) -> Case | None:
    """The case that an item's parameter has it measure; None where it measures nothing, or only its body determines
    what."""
    from pytest_slmserve.plan.cases import Case

    return next((value for value in chosen_parameters(item).values() if isinstance(value, Case)), None)


def in_running_order(session: Session, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Sorts the items into the order in which they run, and skips those that cannot be carried out in this mode. Raises
    BadUsage for markers that say nothing, verdicts that nothing asserts, and requests too long for their engine.

    Engines come in the order of their first item. Claims and advice come after the points they read. Items that read
    more than one engine's points come last, when what is measured alone has been. So do gates, which end the engine of
    the others, and what is skipped: no engine ends for it. Where cells are measured once more, alone, in the end, every
    reader waits for that: its inputs would change after its verdict.
    """
    for item in items:
        check_marker(item)
        if why := skip_reason(session, item):
            item.add_marker(pytest.mark.skip(reason=why), append=False)
        check_asserted(item)
        check_requests_fit(session, item)
    alone = any(measures_alone(item) and not is_skipped(item) for item in items)
    order: dict[Any, int] = {}

    def rank(item: pytest.Item) -> tuple[bool, bool, int, bool]:
        reads = is_reader(item)
        late = is_skipped(item) or is_gate(item) or (reads and (alone or reads_several(item)))
        which = order.setdefault(engine_of(session, item), len(order))
        return late, late and not measures_alone(item), which, reads

    return sorted(items, key=rank)


T = TypeVar("T")


def checked(name: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator of what tests call as `name`. It raises BadUsage for a word that the function does not have, for one
    that is missing, and for repeats that are no number. Words that it takes as `**load` are fields of ClosedLoop."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        signature = inspect.signature(function)
        known = [word for word in signature.parameters if word not in ("self", "load")]
        if "load" in signature.parameters:
            from pytest_slmserve.schema.loads import ClosedLoop

            known += [field.name for field in fields(ClosedLoop) if field.name != "concurrency"]

        @wraps(function)
        def call(*values: object, **words: object) -> T:
            if unknown := [word for word in words if word not in known]:
                raise BadUsage(f"{name} takes no {unknown[0]!r}", nearest(unknown[0], known))
            try:
                signature.bind(*values, **words)
            except TypeError as error:
                raise BadUsage(f"{name}: {error}", ", ".join(known)) from None
            repeats = words.get("repeats")
            if repeats is not None and not (isinstance(repeats, int) and repeats > 0):
                raise BadUsage(f"{name}: repeats={repeats!r} is no number of repeats", "repeats=3")
            return function(*values, **words)

        return call

    return decorate


def nearest(word: str, known: Iterable[str]) -> str:
    """The known words that are most like this one, or all of them where none is."""
    names = list(known)
    near = get_close_matches(word, names, cutoff=0.7)
    return " or ".join(near) if near else ", ".join(names)


def name_the_figures(error: AttributeError) -> None:
    """Add to the message of an unknown attribute of ours which ones there are: the nearest, or all."""
    kind = type(error.obj)
    if not error.name or kind.__module__.partition(".")[0] != "pytest_slmserve":
        return
    public = [name for name in dir(error.obj) if not name.startswith("_")]
    error.args = (f"{error}; it has {nearest(error.name, public)}",)
