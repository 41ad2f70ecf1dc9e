"""The claim that an engine has as many KV blocks as its memory and shapes predict."""

from __future__ import annotations

from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.kv_cache import block_size_of, predicted_blocks
from pytest_slmserve.schema.records import Resolved
from pytest_slmserve.schema.specs import EngineSpec

BLOCK_TOLERANCE = 2  # the engine may round its bytes to pages and share them between layers
CLAIM = "kv-blocks-as-predicted"


def kv_blocks_as_predicted(
    spec: EngineSpec, resolved: Resolved, tolerance: int = BLOCK_TOLERANCE, records: tuple[str, ...] = ()
) -> Verdict:
    """Does the engine have the KV blocks that shapes predict, within `tolerance` blocks?"""
    subject, predicted, seen = short_name(spec.model), predicted_blocks(spec, resolved), resolved.kv_blocks
    if predicted is None or seen is None:
        unknown = "the engine did not report its KV blocks" if seen is None else "its shape or data type is unknown"
        return Verdict(CLAIM, subject, State.UNDECIDED, unknown, records=records)
    size = block_size_of(spec, resolved)
    why = f"{seen:,} blocks of {size} tokens, {predicted:,} predicted from shapes (bound {tolerance} apart)"
    state = State.HOLDS if abs(seen - predicted) <= tolerance else State.FAILS
    return Verdict(
        CLAIM, subject, state, why, value=seen - predicted, bound=tolerance, n=max(1, len(records)), records=records
    )
