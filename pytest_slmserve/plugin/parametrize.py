"""Parameters of tests: cases, sides of a gate and models, by the options and the words of a marker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pytest_slmserve.analysis.advice import verification
from pytest_slmserve.analysis.claims.table import claim_of, models_read
from pytest_slmserve.analysis.gate.launch_pairs import BLOCKS, ENDPOINTS, OUTPUTS
from pytest_slmserve.plan.case_lists import A_JOB, gpus_cases, job_cases, point_cases, replica_cases
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.plugin.items import compares
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import predicted_blocks

ONLY_THE_ENGINE = "what its layers keep is not known beforehand: the engine's own KV blocks count"
# The one parameter of an item where models were chosen that are none of its own, or where none fits.
NONE_THERE = pytest.param(None, id="-", marks=pytest.mark.skip(reason="none of its models is measured in this run"))


def parameters_of(fixture: str, session: Session, marker: pytest.Mark | None) -> list[Any]:
    """Parameters of a fixture that the options parametrise. Raises BadUsage for a marker that does not fit the
    options."""
    words: Mapping[str, Any] = marker.kwargs if marker else {}
    match fixture:
        case "slm_gate":
            return gate_parameters(session, words)
        case "slm_model":
            return model_parameters(session, words)
    return [_parameter(fixture, case) for case in cases_of(fixture, session, words)] or [NONE_THERE]


def cases_of(fixture: str, session: Session, words: Mapping[str, Any]) -> list[Case]:
    """The cases that the tests of a fixture measure. Raises BadUsage."""
    planner = session.planner
    match fixture:
        case "slm_point":
            return point_cases(planner, words)
        case "slm_replica_point":
            return replica_cases(planner)
        case "slm_gpus_point":
            models = named_models(session, None, words["models"]) if "models" in words else planner.models
            return gpus_cases(planner, models)
        case _:
            if "jobs" not in words:
                raise BadUsage("slm_job_point without jobs", f"@pytest.mark.slm(jobs=[{A_JOB}])")
            return job_cases(planner, words)


def _parameter(fixture: str, case: Case) -> Any:
    """A case, marked so that pytest-benchmark reads the engine's clock where it is shown there."""
    marks = [pytest.mark.skip(reason=case.skip_reason)] if case.skip_reason else []
    if fixture in ("slm_point", "slm_job_point"):
        marks = [pytest.mark.benchmark(timer=CLOCK, group=case.model), *marks]
    return pytest.param(case, id=case.id, marks=marks)


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


def gate_parameters(session: Session, words: Mapping[str, Any]) -> list[Any]:
    """Parameters of `slm_gate`: each model of the run with each endpoint that a gate compares, or the first with what
    a short gate decides; a single None where no gate was requested. Raises BadUsage for a gate that could not be
    carried out."""
    from pytest_slmserve.run.gate import check_gate, is_short

    if not compares(session, words):
        return [pytest.param(None, id="-")]
    real = session.options.load_format != "dummy"
    models, endpoints = session.planner.models, tuple(each for each in ENDPOINTS if real or each != OUTPUTS)
    if is_short(session):
        models, endpoints = models[:1], (BLOCKS,)
    for model in models:
        check_gate(session, model)
    sides = [(model, endpoint) for model in models for endpoint in endpoints]
    return [pytest.param(each, id=f"{short_name(each[0])}-{each[1]}") for each in sides] or [NONE_THERE]


def model_parameters(session: Session, words: Mapping[str, Any]) -> list[Any]:
    """A parameter per model: those of the sweep, those that the claim's own marker names, or those of its jobs that can
    be measured here; where it names models too, of those."""
    named = words.get("models")
    if "jobs" in words:
        models = dict.fromkeys(case.model for case in job_cases(session.planner, words) if not case.skip_reason)
        named = [model for model in models if named is None or model in named]
    chosen = session.planner.models if named is None else named_models(session, words.get("claim"), named)
    of_blocks, found = session.platform != "remote" and words.get("claim") == verification.KV_BLOCKS, []
    for model in chosen:
        unknown = of_blocks and predicted_blocks(session.planner.spec(model)) is None
        marks = [pytest.mark.skip(reason=ONLY_THE_ENGINE)] if unknown else []
        found.append(pytest.param(model, id=short_name(model), marks=marks))
    return found or [NONE_THERE]


def named_models(session: Session, claim: str | None, named: Sequence[str]) -> list[str]:
    """Models that a claim's marker names and that can be judged here. Where models were chosen, all that the claim
    reads must be among them; else all must fit. Raises BadUsage for an unknown claim or model, and for no list."""
    if not isinstance(named, list | tuple) or not all(isinstance(model, str) for model in named):
        given = named if isinstance(named, str) else "opt-125m"
        raise BadUsage(f"@pytest.mark.slm(models={named!r}) is no list of models", f"models=[{given!r}]")

    def there(model: str) -> bool:
        return session.planner.swept(model) if session.options.models else session.planner.misfit(model) is None

    return [model for model in named if all(map(there, models_read(claim_of(claim), model) if claim else (model,)))]
