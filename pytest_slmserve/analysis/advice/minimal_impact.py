"""The claim on the batching advisor: the batch that it chooses costs little throughput, and frees memory."""

from __future__ import annotations

from pytest_slmserve.analysis.advice.advisor import needs
from pytest_slmserve.analysis.advice.batch_choice import Objectives, decide
from pytest_slmserve.analysis.advice.subjects import of_curve
from pytest_slmserve.analysis.points.sweep_points import ratio
from pytest_slmserve.analysis.stats.estimates import percent_interval
from pytest_slmserve.analysis.sweep.batching import RelativeSlo
from pytest_slmserve.analysis.sweep.curve import Curve, is_main_sweep
from pytest_slmserve.analysis.verdict import Verdict, above, every
from pytest_slmserve.schema.specs import GIB

CLAIM = "advised-batch-costs-little"
OBJECTIVE = RelativeSlo(2.0, 32)  # of the paper: twice the latency at 32


def advised_batch_costs_little(curve: Curve, bound: float) -> Verdict:
    """Does the batch that the advisor of arXiv:2503.08311 chooses serve at least `bound` of what any other load does?
    value: the share that decides. Its objective is twice the time per output token at 32 in flight."""
    subject, wish = of_curve(curve, None), Objectives(slo=OBJECTIVE)
    found = decide(subject, wish)
    points = {p.concurrency: p for p in subject.usable}
    if found.batch not in points:
        why = found.reason or f"{found.batch} in flight was predicted, not measured"
        return Verdict.undecided(CLAIM, curve.subject, why, bound)
    chosen = points.pop(found.batch)
    state, seen, most = every(
        above, bound, lambda several: [(ratio(chosen, p, subject.usable, several=several), p) for p in points.values()]
    )
    memory = needs(subject, chosen.concurrency, wish)
    freed = f", and frees {memory.freed_bytes / GIB:.0f} GiB" if memory and memory.freed_bytes is not None else ""
    why = (
        f"{chosen.concurrency} in flight, chosen for twice the latency at 32, serves {percent_interval(seen)} of what "
        f"{most.concurrency} does{freed} (bound {bound:.0%})"
    )
    return Verdict.from_interval(CLAIM, curve.subject, state, why, seen, bound, chosen, most)


def has_objective(curve: Curve) -> bool:
    """A sweep on one GPU that has the loads of the objective and of the efficiency, and more of them."""
    loads = {p.concurrency for p in curve.valid}
    alone = curve.spec is not None and curve.spec.tensor_parallel_size == 1
    return is_main_sweep(curve) and alone and {1, OBJECTIVE.at} <= loads and len(loads) > 2
