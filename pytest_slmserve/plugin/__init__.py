"""The shell between pytest and the rest: the only room that imports pytest. Its modules share these names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_slmserve.run.cluster import RayEngines
    from pytest_slmserve.run.judge import StoredBaseline
    from pytest_slmserve.run.session import Session

SESSION: pytest.StashKey[Session] = pytest.StashKey()
ELSEWHERE: pytest.StashKey[RayEngines] = pytest.StashKey()  # what measures for the session, if Ray does
BASELINE: pytest.StashKey[StoredBaseline] = pytest.StashKey()  # that this run is compared with, if one was named
PLAN = pytest.StashKey[Any]()  # the `ItemPlan` of an item that measures, a type of the module `items`
NEEDS_A_MODE = "measures: needs --slm-gpu, --slm-cpu, --slm-simulate or --slm-endpoint"
# Fixtures whose parameters come from the options.
PARAMETRISED = frozenset({"slm_point", "slm_model", "slm_replica_point", "slm_gate", "slm_gpus_point", "slm_job_point"})
OUR_KEY = "records"  # in the `extra_info` of a benchmark that shows a point of ours


def is_measured(item: Any) -> bool:
    """Decide whether an item needs an engine, or what one has measured. An item without fixtures, such as a file that
    another plugin checks, needs none, even if its package has a marker."""
    if not hasattr(item, "fixturenames"):
        return False
    return item.get_closest_marker("slm") is not None or any(name.startswith("slm_") for name in item.fixturenames)
