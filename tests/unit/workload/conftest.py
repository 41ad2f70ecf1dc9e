from __future__ import annotations

import pytest

from pytest_slmserve.plan.models import model_of
from pytest_slmserve.schema.models import Model


@pytest.fixture(scope="session")
def opt() -> Model:
    return model_of("opt-125m")
