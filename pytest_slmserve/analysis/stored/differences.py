"""What differs between what an archive holds and what a run asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment, differences
from pytest_slmserve.schema.loads import Load, load_facts
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.schema.stored_names import from_stored
from pytest_slmserve.schema.workloads import WorkloadReference

LOOKED_AT = 100  # kinds of questions and of measurements that are compared to say what differs


CLAUSES = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run asks of one engine. workload, load: None where only the test that asks knows them."""

    spec: EngineSpec
    environment: Environment
    workload: WorkloadReference | None = None
    load: Load | None = None


def _question(
    spec: EngineSpec, environment: Environment, workload: str | None, load: Load | None
) -> tuple[str | None, ...]:
    return _key(spec), _key(environment), workload, str(load_facts(load)) if load else None


@lru_cache(maxsize=1024)
def _key(of: EngineSpec | Environment) -> str:
    return of.key


def difference(stored: Sequence[Measurement], questions: Sequence[Asked]) -> str:
    """What differs between the two that are most alike. "There" is the archive, "here" the run."""
    kinds = list({_question(m.spec, m.environment, m.workload.hash, m.load): m for m in stored}.values())
    pairs = [(m, q) for m in kinds[:LOOKED_AT] for q in questions[:LOOKED_AT]]
    fewest = min((clauses(m, q) for m, q in pairs), key=len)
    more = [f"and {len(fewest) - CLAUSES} more"] if len(fewest) > CLAUSES else []
    return "; ".join(fewest[:CLAUSES] + more)


def clauses(m: Measurement, question: Asked) -> list[str]:
    """A short clause for each thing that differs; of another model no more of its engine, which follows from it."""
    found = differences(m.environment.kind, question.environment.kind)
    if short_name(m.spec.model) != short_name(question.spec.model):
        found.append(f"model {short_name(m.spec.model)} there, {short_name(question.spec.model)} here")
    else:
        found += differences(from_stored(m.spec.facts), from_stored(question.spec.facts))
    if question.workload and m.workload.hash != question.workload.hash:
        found.append(_requests(m.workload, question.workload))
    if question.load:
        found += differences(from_stored(load_facts(m.load)), from_stored(load_facts(question.load)))
    return found


def _requests(there: WorkloadReference, here: WorkloadReference) -> str:
    """How the requests of two workloads differ: their lengths, or what they were made of."""
    lengths = [f"{w.mean_prompt_tokens:.0f}/{w.mean_output_tokens:.0f}" for w in (there, here)]
    if lengths[0] != lengths[1]:
        return f"requests of {lengths[0]} tokens there, {lengths[1]} here"
    made = differences(asdict(there.spec), asdict(here.spec))
    return f"other requests ({', '.join(made)})" if made else "other requests of the same lengths"
