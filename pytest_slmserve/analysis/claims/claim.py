"""Claims of the papers: what they state, which verdict is expected of them where, and how most of them are judged.

A claim that is known not to hold somewhere has a row that expects it to fail, with the evidence. The most specific row
that fits a model and an environment rules. Its parameters are plain, so that a record can hold them and a report can
repeat the judgement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from pytest_slmserve.analysis.estimates import percent, percent_interval, times
from pytest_slmserve.analysis.points import Figure, Point, output_rate, ratio
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import Seen, State, Verdict, above, below, every, every_within, unsure
from pytest_slmserve.schema.kv_cache import NULL_BLOCKS
from pytest_slmserve.schema.models import CATALOGUE, short_name
from pytest_slmserve.schema.specs import GIB

Expected = Literal["passes", "fails", "either"]
Reads = Literal["sweeps", "replicas", "gpus", "jobs", "arithmetic"]
Side = Literal["below", "above", "within"]
AnyRampUp = Literal["*", "staggered", "burst"]
AnyInterface = Literal["*", "engine", "server", "endpoint"]
Parameters = Mapping[str, Any]
Others = Sequence[Curve]
ANY: Literal["*"] = "*"
ANY_RELEASE = ("", "")


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement that measurements can refute, as `claims.toml` has it.

    name: as items and records have it. kind: the same for all ways of sharing. of: the measurements that it reads:
    sweeps; replicas, with one engine alone under the same load; engines on several numbers of GPUs; jobs; or none, for
    arithmetic. models: those that the statement speaks of; empty for any. passes: the side of the threshold on which
    all estimates of its `Evidence` lie if it passes ("within": between the threshold, a factor, and its inverse); None
    if a function of its own judges it. parameters, expected, evidence: of its row for any model anywhere; "either" is
    for a statement that hosts and models decide, so that it is a finding and no failure.
    """

    name: str
    kind: str
    statement: str
    source: str
    of: Reads = "sweeps"
    models: tuple[str, ...] = ()
    passes: Side | None = None
    parameters: Parameters = field(default_factory=dict)
    expected: Expected = "passes"
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
    expected: Expected = "passes"
    evidence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a claim is judged by: estimates that must all lie on one side of its threshold.

    estimates: returns the estimates, each with an interval that holds together with so many, and a sentence on it, in
    which "{}" stands for the estimate. points: those that the verdict rests on. in_percent: estimates are shares, not
    factors. qualifier: clause on the threshold. remark: clause on all. sparse: loads that an adaptive sweep left out
    may decide otherwise, so that the claim cannot pass.
    """

    estimates: Callable[[int], Sequence[Seen[str]]]
    points: Sequence[Point]
    in_percent: bool = False
    qualifier: str = ""
    remark: str = ""
    sparse: bool = False

    @classmethod
    def of_ratios(
        cls,
        ratios: Sequence[tuple[Point, Point, str]],
        points: Sequence[Point],
        what: Figure = output_rate,
        among: Sequence[Point] = (),
        several: int = 1,
        qualifier: str = "",
    ) -> Evidence:
        """Return the evidence of ratios of one figure.

        Args:
            ratios: A point, the point that it is compared with, and the sentence, of each ratio.
            among, several: See `points.ratio`.
        """

        def estimates(number: int) -> list[Seen[str]]:
            return [(ratio(of, to, among, what, max(number, several)), sentence) for of, to, sentence in ratios]

        return cls(estimates=estimates, points=points, qualifier=qualifier)

    def verdict(self, claim: Claim, subject: str, threshold: float) -> Verdict:
        """Return the verdict on the claim. Its reason is the sentence on the estimate that decides."""
        match claim.passes:
            case "below":
                state, seen, sentence = every(below, threshold, self.estimates)
            case "above":
                state, seen, sentence = every(above, threshold, self.estimates)
            case _:
                state, seen, sentence = every_within(1 / threshold, threshold, self.estimates)
        if self.sparse and state is State.PASSES:
            state = State.INCONCLUSIVE
        told, limit = times(seen), f"{threshold:g}"
        if self.in_percent:
            told, limit = percent_interval(seen), percent(threshold)
        why = f"{sentence.replace('{}', told)} (threshold {limit}{self.qualifier}){self.remark}{unsure(seen)}"
        return Verdict.from_interval(claim.name, subject, state, why, seen, threshold, *self.points)


# Table 1 of arXiv:2404.03353, by arithmetic: an A100 with 40 GiB, and requests of 512 and 256 tokens.
BUDGET_BYTES = 9 * 40 * GIB // 10
LONGEST = 2048  # positions of OPT
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256
KNOWN = PROMPT_TOKENS + OUTPUT_TOKENS
MEAN = PROMPT_TOKENS + OUTPUT_TOKENS // 2  # of requests whose phases are spread evenly
BLOCK_SIZE = 16
PUBLISHED = {"opt-125m": 512, "opt-1.3b": 256, "opt-2.7b": 128, "opt-6.7b": 64, "opt-13b": 16}  # largest batches
NEXT_SMALLER = {larger: model for model, larger in pairwise(PUBLISHED)}
REQUEST_MODEL = "opt-1.3b"
PUBLISHED_REQUEST_BYTES = 50_000_000  # "OPT-1.3B ... requires 50 MB"
BATCH, PUBLISHED_BATCH_BYTES = 512, 25_600_000_000  # "demands at most 25.6 GB"
HUNDREDS = 500


def request_bytes(model: str, tokens: int = KNOWN) -> int:
    """Return the bytes of the keys and values of one request of a catalogue model."""
    return tokens * (CATALOGUE[model].kv_bytes_per_token() or 0)


def largest_batch(model: str, tokens: int = KNOWN, budget_bytes: int = BUDGET_BYTES) -> int:
    """Return the requests of a catalogue model that fit into the budget less the weights, each allocated for so many
    tokens."""
    return (budget_bytes - (CATALOGUE[model].weight_bytes() or 0)) // request_bytes(model, tokens)


def paged_batch(model: str, tokens: int, budget_bytes: int = BUDGET_BYTES) -> int:
    """Return the requests that fit in pages of 16 tokens: at the `MEAN` length what an engine holds at one moment."""
    blocks = (budget_bytes - (CATALOGUE[model].weight_bytes() or 0)) // (BLOCK_SIZE * request_bytes(model, 1))
    return max(0, (blocks - NULL_BLOCKS) // -(-tokens // BLOCK_SIZE))


def judge_arithmetic(claim: str, model: str) -> Verdict:
    """Return the verdict on a claim by arithmetic for a model.

    A batch of the paper that does not fit at full length ran only because not all requests are long at once. The
    paper's size of a request is that of its 256 output tokens.
    """
    subject, of_table = short_name(model), claim in ("table-1-batch-fits", "larger-models-cannot-hold-500")
    if of_table and subject not in PUBLISHED:
        return Verdict.inconclusive(claim, subject, "the paper's Table 1 does not have this model")
    if not of_table and subject != REQUEST_MODEL:
        return Verdict.inconclusive(claim, subject, f"the paper gives the size for {REQUEST_MODEL} only")
    each, fit = request_bytes(subject), largest_batch(subject)
    value, threshold = fit, HUNDREDS
    match claim:
        case "table-1-batch-fits":
            threshold = PUBLISHED[subject]
            passes = threshold <= fit
            why = f"{fit} requests of {KNOWN} tokens ({each / 1e6:.1f} MB each) fit into 0.9 x 40 GiB less the weights"
            why += f", the paper has {threshold}"
            why += "" if passes else f"; {paged_batch(subject, MEAN)} fit at their mean length of {MEAN}"
        case "table-1-request-size":
            value, threshold = each, PUBLISHED_REQUEST_BYTES
            passes = abs(each / threshold - 1) < 0.05
            why = f"a request of {KNOWN} tokens takes {each / 1e6:.0f} MB, {each / threshold:.1f} times the paper's "
            why += f"50 MB; {OUTPUT_TOKENS} tokens take {request_bytes(subject, OUTPUT_TOKENS) / 1e6:.1f} MB"
        case "table-1-batch-size":
            value, threshold = BATCH * each, PUBLISHED_BATCH_BYTES
            passes = value <= threshold
            why = f"{BATCH} requests of {KNOWN} tokens take {value / 1e9:.1f} GB, the paper has 25.6"
        case _:
            passes = fit < HUNDREDS
            why = f"{fit} requests of {KNOWN} tokens fit into 0.9 x 40 GiB less the weights, the paper sends {HUNDREDS}"
    return Verdict(claim, subject, State.PASSES if passes else State.FAILS, why, value=value, threshold=threshold)
