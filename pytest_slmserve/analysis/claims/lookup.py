"""Look-up of claims and of the rows that hold for a device, a model and a release."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any, get_args

from pytest_slmserve.analysis.claims.claim import ANY, ANY_RELEASE, Claim, ClaimRow, Others
from pytest_slmserve.analysis.claims.table import CLAIMS, ROWS
from pytest_slmserve.analysis.metrics.roofline import peaks_of
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.literals import Interface, Platform, RampUp
from pytest_slmserve.schema.records import known_fields
from pytest_slmserve.schema.stored_names import from_stored, to_stored


def claim_of(name: str) -> Claim:
    """The claim of that name. Raises BadUsage for an unknown one."""
    for claim in CLAIMS:
        if claim.name == name:
            return claim
    known = [claim.name for claim in CLAIMS]
    near = get_close_matches(str(name), known)
    raise BadUsage(f"unknown claim {name!r}", " or ".join(near) or f"one of {', '.join(known)}")


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.26.0rc1+cu130" is (0, 26, 0)."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def row_for(
    claim: str,
    model: str,
    environment: Environment | None = None,
    interface: Interface | None = None,
    ramp_up: RampUp | None = None,
    rows: tuple[ClaimRow, ...] = ROWS,
) -> ClaimRow:
    """The row with the expectation of a claim for this model, environment, interface and ramp-up: the most specific
    that fits.

    The entries of a row count in this order: the model, a GPU family, a platform, the interface, the ramp-up, a range
    of vLLM. An unknown environment, release, interface or ramp-up fits only rows that leave it open. Raises BadUsage
    for an unknown claim.
    """
    claim_of(claim)
    where = environment or Environment()
    fitting = [row for row in rows if row.claim == claim and _fits(row, model, where, interface, ramp_up)]
    if not fitting:
        raise BadUsage(f"no row of the claims table says what to expect of {claim} for {model}", "a row for any model")
    return max(fitting, key=_specific)


def _fits(row: ClaimRow, model: str, where: Environment, interface: Interface | None, ramp_up: RampUp | None) -> bool:
    peaks = peaks_of(where.gpu_name)
    devices = {ANY, where.platform, peaks.family if peaks else None}
    here = row.model in (ANY, short_name(model)) and row.device in devices and _in_range(row.vllm, where.vllm)
    return here and row.interface in (ANY, interface) and row.ramp_up in (ANY, ramp_up)


def _in_range(wanted: tuple[str, str], version: str | None) -> bool:
    """Returns whether a version is in a range, its end excluded. An unknown version is in no range but the open one."""
    first, last = wanted
    if version is None:
        return wanted == ANY_RELEASE
    return release(first) <= release(version) and (not last or release(version) < release(last))


def _specific(row: ClaimRow) -> tuple[int, ...]:
    device = 0 if row.device == ANY else 1 if row.device in get_args(Platform) else 2
    return row.model != ANY, device, row.interface != ANY, row.ramp_up != ANY, row.vllm != ANY_RELEASE


def judge_row(claim: str, curve: Curve, row: ClaimRow, others: Others = ()) -> Verdict:
    """Judge a claim by the row's parameters; undecided for want of data. others: curves measured beside it."""
    return claim_of(claim).judge(curve, row.parameters, others)


def row_to_record(row: ClaimRow) -> dict[str, Any]:
    """A row as plain JSON values."""
    return {**to_stored(asdict(row)), "vllm": list(row.vllm)}


def row_from_record(facts: Mapping[str, Any]) -> ClaimRow:
    """The inverse of `row_to_record`; entries of a later release are left out."""
    known = known_fields(ClaimRow, from_stored(facts))
    return ClaimRow(**{**known, "vllm": tuple(known.get("vllm", ANY_RELEASE))})
