"""Keys of the committed archives: a stored measurement answers a run only as long as both compute the same keys.

And the sizes that a plan counts, beside those that the engines of the archives told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import BASELINES, in_checkout

from pytest_slmserve.analysis.points import all_groups, by_series, group_key, job_points
from pytest_slmserve.archive.store import FORMAT, Contents, read
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.schema.kv_cache import predicted_blocks, weight_bytes
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.records import Measurement, ReplicaGroup, series_key
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, ReplicaSpec, load_facts, short_hash

TESTS = Path(__file__).parent
ARCHIVES = sorted(BASELINES.glob("*.jsonl.xz"))
ARCHIVES += sorted((TESTS / "data").glob(f"archive-format-{FORMAT}.jsonl"))
KEYS = json.loads((TESTS / "data" / "archive-keys.json").read_text("utf-8"))


def told(keys: Iterable[str]) -> list[object]:
    """Number of distinct keys, and 16 digits of a hash over them."""
    distinct = sorted(set(keys))
    return [len(distinct), hashlib.sha256("\n".join(distinct).encode()).hexdigest()[:16]]


def keys_of(contents: Contents) -> dict[str, list[object]]:
    """Every kind of key of an archive; kinds that it has none of are left out."""
    ms: Sequence[Measurement] = contents.measurements
    plans = [session.plan.get(name, ()) for session in contents.sessions for name in ("sweeps", "compared")]
    points = job_points(ms)
    kinds: dict[str, Iterable[str]] = {
        "measurement": (m.key for m in ms),
        "id": (m.id for m in ms),
        "engine": (m.spec.key for m in ms),
        "environment": (m.environment.key for m in ms),
        "environment per GPU": (m.environment.per_gpu_key for m in ms),
        "workload": (m.workload.hash for m in ms),
        "load": (short_hash(load_facts(m.load)) for m in ms),
        "series": (
            series_key(m.spec, m.workload.hash, m.load, m.environment) for m in ms if isinstance(m.load, ClosedLoop)
        ),
        "curves": by_series(ms),
        "job points": (short_hash([p.spec.key, p.workload.hash, p.environment.key]) for p in points),
        "sets": (m.replica.set for m in ms if m.replica),
        "replicas": map(group_key, (group for group in all_groups(ms) if len(group) > 1)),
        "plans": (key for plan in plans for key in plan),
    }
    found = {kind: told(keys) for kind, keys in kinds.items()}
    return {kind: each for kind, each in found.items() if each[0]}


def case_of(group: ReplicaGroup) -> Case:
    """The case that a repeat was measured for. Of its workloads the hashes are enough for a key."""
    part, specs = group[0].replica, tuple(m.spec for m in group)
    engines: EngineSpec | ReplicaSpec = specs[0]
    if part:
        engines = ReplicaSpec(specs, part.sharing, part.pinned, part.thread_percentage)
    workloads = tuple(SimpleNamespace(hash=m.workload.hash) for m in group)
    return Case(engines, workloads, tuple(m.load for m in group), group[0].environment)  # type: ignore[arg-type]


@in_checkout
def test_every_committed_archive_has_its_keys_written_down():
    assert set(KEYS) == {path.name for path in ARCHIVES}


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.partition(".jsonl")[0])
def path(request):
    return request.param


@pytest.fixture(scope="module")
def contents(path):
    return read(path)


def test_the_keys_of_an_archive_are_what_they_were(path, contents):
    assert keys_of(contents) == KEYS[path.name]
    groups = all_groups(contents.measurements)
    assert groups and all(case_of(group).key == group_key(group) for group in groups)


def test_weights_and_kv_blocks_are_as_counted_before_the_start(contents):
    """Within 0.5 and 1 % of what the engine told, for every model of the catalogue, quantized or not."""
    told = {m.spec.key: m for m in contents.measurements if m.spec.platform == "cuda" and m.resolved.weight_bytes}
    for m in told.values():
        if m.spec.model in CATALOGUE and m.spec.tensor_parallel_size == 1:
            assert weight_bytes(m.spec, 2) == pytest.approx(m.resolved.weight_bytes, rel=0.005)
            blocks = predicted_blocks(m.spec, m.resolved)
            assert blocks is None or blocks == pytest.approx(m.resolved.kv_blocks, rel=0.01)
