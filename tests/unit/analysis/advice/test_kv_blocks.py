"""The blocks of an engine are those that its specification predicts, up to two that rounding moves."""

from __future__ import annotations

import pytest

from pytest_slmserve.analysis.advice.subjects import kv_blocks_as_predicted
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.records import Resolved
from pytest_slmserve.schema.specs import GIB, EngineSpec


@pytest.mark.parametrize(
    ("seen", "state"),
    [(1365, "passes"), (1363, "passes"), (1367, "passes"), (1362, "fails"), (1368, "fails"), (0, "fails")],
)
def test_blocks_as_predicted(seen, state):
    verdict = kv_blocks_as_predicted(EngineSpec("opt-1.3b", kv_cache_bytes=4 * GIB), [Resolved(kv_blocks=seen)])
    assert verdict.state is State(state) and f"{seen:,}" in verdict.why and "1,365" in verdict.why
    assert verdict.value == seen - 1365 and verdict.threshold == 2


@pytest.mark.parametrize(("model", "resolved"), [("opt-1.3b", Resolved()), ("/somewhere/else", Resolved(kv_blocks=5))])
def test_blocks_of_the_unknown_are_inconclusive(model, resolved):
    assert kv_blocks_as_predicted(EngineSpec(model), [resolved]).state is State.INCONCLUSIVE
