"""Differences between what an archive holds and what a run requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache

from pytest_slmserve.plan.cases import Case
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment, differences
from pytest_slmserve.schema.loads import Load, load_facts
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.schema.stored_names import from_stored
from pytest_slmserve.schema.workloads import WorkloadReference

LOOKED_AT = 100  # kinds of measurements, and cases, that are compared to say what differs
CLAUSES = 3


def kind_of(
    spec: EngineSpec, environment: Environment, workload: str | None, load: Load | None
) -> tuple[str | None, ...]:
    """A key that is equal where one engine is measured in the same way. workload, load: None where only a test's body
    determines them."""
    return _key(spec), _key(environment), workload, str(load_facts(load)) if load else None


@lru_cache(maxsize=1024)
def _key(of: EngineSpec | Environment) -> str:
    return of.key


def difference(stored: Sequence[Measurement], cases: Sequence[Case]) -> str:
    """The differences between the measurement and the case that are most alike: three clauses at most, and the number
    of further ones. "There" is the archive, "here" the run. cases: of one engine each, without a workload and a load
    where only a test's body determines them."""
    kinds = list({kind_of(m.spec, m.environment, m.workload.hash, m.load): m for m in stored}.values())
    pairs = [(m, case) for m in kinds[:LOOKED_AT] for case in cases[:LOOKED_AT]]
    fewest = min((clauses(m, q) for m, q in pairs), key=len)
    more = [f"and {len(fewest) - CLAUSES} more"] if len(fewest) > CLAUSES else []
    return "; ".join(fewest[:CLAUSES] + more)


def clauses(m: Measurement, case: Case) -> list[str]:
    """A short clause for each thing that differs; of another model no more of its engine, which follows from it."""
    [spec], environment = case.each, case.environment
    found = differences(m.environment.kind, environment.kind)
    if short_name(m.spec.model) != short_name(spec.model):
        found.append(f"model {short_name(m.spec.model)} there, {short_name(spec.model)} here")
    else:
        found += differences(from_stored(m.spec.facts), from_stored(spec.facts))
    for workload, load in zip(case.workloads, case.loads):
        if m.workload.hash != workload.hash:
            found.append(_requests(m.workload, workload.reference()))
        found += differences(from_stored(load_facts(m.load)), from_stored(load_facts(load)))
    return found


def _requests(there: WorkloadReference, here: WorkloadReference) -> str:
    """A clause on how the requests of two workloads differ: their mean lengths in tokens, or what they were made of."""
    lengths = [f"{w.mean_prompt_tokens:.0f}/{w.mean_output_tokens:.0f}" for w in (there, here)]
    if lengths[0] != lengths[1]:
        return f"requests of {lengths[0]} tokens there, {lengths[1]} here"
    made = differences(asdict(there.spec), asdict(here.spec))
    return f"other requests ({', '.join(made)})" if made else "other requests of the same lengths"
