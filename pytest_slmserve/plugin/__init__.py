"""pytest plugin, the only package that imports pytest. This module has the names that its modules share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_slmserve.run.cluster import RayEngines
    from pytest_slmserve.run.judge import StoredBaseline
    from pytest_slmserve.run.session import Session

SESSION: pytest.StashKey[Session] = pytest.StashKey()
ELSEWHERE: pytest.StashKey[RayEngines] = pytest.StashKey()  # engines that Ray runs for the session
BASELINE: pytest.StashKey[StoredBaseline] = pytest.StashKey()  # of `--slm-baseline`
PLAN = pytest.StashKey[Any]()  # the `items.ItemPlan` of an item that measures
NEEDS_A_MODE = "measures: needs --slm-gpu, --slm-cpu, --slm-simulate or --slm-endpoint"
# Fixtures whose parameters come from the options.
PARAMETRISED = frozenset({"slm_point", "slm_model", "slm_replica_point", "slm_gate", "slm_gpus_point", "slm_job_point"})
OUR_KEY = "records"  # in the `extra_info` of a benchmark that shows one of our points


def is_measured(item: Any) -> bool:
    """Return whether an item needs an engine, or measurements of one.

    An item without fixtures, for example a file that another plugin checks, needs none, even if its package has a
    marker.
    """
    if not hasattr(item, "fixturenames"):
        return False
    return item.get_closest_marker("slm") is not None or any(name.startswith("slm_") for name in item.fixturenames)
