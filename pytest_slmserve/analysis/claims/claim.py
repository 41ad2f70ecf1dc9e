"""Claims of the papers, and the verdict that is expected of each claim in an environment. Data first; the functions
only look up and judge.

A claim that is known not to hold somewhere has a row that expects it to fail, with the evidence. The most specific row
that fits a model and an environment rules. Its parameters are plain, so that a record can hold them and a report can
repeat the judgement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_slmserve.analysis.sweep.curve import Curve, is_main_sweep
from pytest_slmserve.analysis.verdict import Verdict

Expected = Literal["holds", "fails", "either"]
AnyRampUp = Literal["*", "staggered", "burst"]
AnyInterface = Literal["*", "engine", "server", "endpoint"]
Parameters = Mapping[str, Any]
Others = Sequence[Curve]
Judge = Callable[[Curve, Parameters, Others], Verdict]
ANY: Literal["*"] = "*"
ANY_RELEASE = ("", "")


@dataclass(frozen=True, slots=True)
class Claim:
    """name: as items and records have it. judge: from a curve, the row's parameters and the other curves there are,
    total. applies: whether there is anything to judge, for a report on whatever was measured. reads: the models whose
    measurements it takes to judge one; none for arithmetic. of: what it reads: sweeps; replicas, and of an engine alone
    no sweep but the same load; what an engine served on several numbers of GPUs; or jobs. parameters, expected,
    evidence: of its row for any model anywhere; either is for a statement that hosts and models decide, so that it is a
    finding and no failure."""

    name: str
    statement: str
    source: str
    judge: Judge
    applies: Callable[[Curve], bool] = is_main_sweep
    reads: Callable[[str], tuple[str, ...]] = lambda model: (model,)
    of: Literal["sweeps", "replicas", "gpus", "jobs"] = "sweeps"
    parameters: Parameters = field(default_factory=dict)
    expected: Expected = "holds"
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """Expectation of a claim for a model on a device, by an interface, in a closed loop of one ramp-up, under a vLLM.

    model: a short name or "*". device: a platform ("cuda", "cpu", "simulated"), a GPU family of `roofline.GPUS`
    ("H200") or "*". interface: how the requests come in, or "*". ramp_up: of the closed loop, or "*". vllm: first
    release, and the one it ends before; "" for no end. parameters: numbers of the judgement, plain.
    """

    claim: str
    model: str = ANY
    device: str = ANY
    interface: AnyInterface = ANY
    ramp_up: AnyRampUp = ANY
    vllm: tuple[str, str] = ANY_RELEASE
    parameters: Parameters = field(default_factory=dict)
    expected: Expected = "holds"
    evidence: str = ""
