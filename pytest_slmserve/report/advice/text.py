"""The advice as text (a table, the reasons, the commands) and as facts for JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.advice.advisor import Advice, Ceiling, Gains, Plan, ReplicaAdvice, least_latency_s
from pytest_slmserve.analysis.advice.batch_choice import Decision, ServedEngine, conditions, utilization
from pytest_slmserve.analysis.advice.other_gpu import CarriedLaw, carries, errors
from pytest_slmserve.analysis.advice.subjects import ResultSource
from pytest_slmserve.analysis.advice.verification import Verification, Verified, VerifiedTogether
from pytest_slmserve.analysis.compare.deployments import deployments, on_several_gpus
from pytest_slmserve.analysis.metrics.roofline import REACHABLE_DRAM, REACHABLE_TENSOR
from pytest_slmserve.analysis.points import Point, engines
from pytest_slmserve.analysis.stats.estimates import Interval, percent, times
from pytest_slmserve.analysis.sweep.batching import RelativeSlo, Slo
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.deployments import best_on_several, deployment_name
from pytest_slmserve.report.points import served_on
from pytest_slmserve.report.text_table import (
    ABSENT,
    Column,
    between,
    counted,
    figure,
    folded,
    gib,
    hanging,
    hundredths,
    interval_text,
    laid_out,
    layout,
    listed,
    milliseconds,
    named_lines,
    table,
    whole,
)
from pytest_slmserve.report.verdicts import verdict_lines

FIRST_PORT = 8000  # of vLLM's server, if nothing else is said
INDENT = "    "
CONTINUED = " \\"


@dataclass(frozen=True, slots=True)
class Start:
    """Engines to be started one after the other. what: for people. mps: whether they should share the GPU by MPS."""

    what: str
    commands: tuple[tuple[str, ...], ...]
    mps: bool = False


def starts(plan: Plan) -> Iterator[Start]:
    """Ways to serve: one engine for each model that fits beside the others, one alone for each whose memory is not
    known, and where more of a single model are worth a trial, these."""
    serving = [(advice, advice.batch) for advice in plan.advices if advice.batch is not None and advice.subject.engine]
    placed = [row for row in serving if len(serving) == 1 or (plan.together and row[0].needs)]
    if placed:
        what = "one engine" if len(placed) == 1 else f"{len(placed)} engines that fit on the GPU together"
        yield Start(what, _commands(placed, plan.wish.gpu_bytes))
    for row in (row for row in serving if row not in placed):
        what = f"one engine of {row[0].subject.name}, alone: it is not known to fit beside others"
        yield Start(what, _commands([row], plan.wish.gpu_bytes))
    for advice, _ in serving:
        if advice.replicas and advice.replicas.advised > 1:
            count, each = advice.replicas.advised, advice.replicas.each
            several = _commands([(advice, each)] * count, plan.wish.gpu_bytes)
            yield Start(f"{count} engines of {each} requests each, for a trial", several, mps=True)


def _commands(serving: Sequence[tuple[Advice, int]], gpu_bytes: int | None) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (*serve_words(advice.subject.engine, batch, gpu_bytes), "--port", str(port))
        for port, (advice, batch) in enumerate(serving, FIRST_PORT)
        if advice.subject.engine
    )


def serve_words(engine: ServedEngine, batch: int, gpu_bytes: int | None) -> tuple[str, ...]:
    """The words of one command. What is not known of the engine is left to vLLM."""
    words = ["env", *engine.env] if engine.env else []
    words += ["vllm", "serve", engine.model, "--dtype", engine.dtype, "--max-num-seqs", str(batch)]
    if engine.max_num_batched_tokens is not None:
        words += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    if footprint := engine.footprint:
        words += ["--max-model-len", str(footprint.longest), "--kv-cache-memory-bytes", str(footprint.kv_bytes(batch))]
        if gpu_bytes is not None:
            words += ["--gpu-memory-utilization", f"{utilization(footprint.total_bytes(batch), gpu_bytes):.3f}"]
    return (*words, *engine.arguments)


def shell_lines(words: Sequence[str], width: int) -> str:
    """One command on several lines of a terminal, continued for a shell and broken only before an option."""
    groups: list[list[str]] = [[]]  # the command, and each option with what follows it
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    rows: list[str] = []
    for option in map(shlex.join, groups):
        if rows and len(rows[-1]) + len(option) + len(CONTINUED) < width:
            rows[-1] += f" {option}"
        else:
            rows.append(f"{INDENT if rows else ''}{option}")
    return f"{CONTINUED}\n".join(rows)


COLUMNS: tuple[Column[Advice], ...] = (
    Column("\nmodel", lambda a: a.subject.name, "left"),
    Column("\nbatch", lambda a: ABSENT if a.batch is None else str(a.batch)),
    Column("tokens\n/s", lambda a: figure(a.advised.tokens_per_s.value if a.advised else None, 4)),
    Column("ms/\ntoken", lambda a: milliseconds(getattr(a.advised and a.advised.latency_s, "value", None)), rank=1),
    Column("of peak\n%", lambda a: hundredths(a.advised.share if a.advised else None), rank=6),
    Column("eff.\n%", lambda a: hundredths(a.advised.efficiency if a.advised else None), rank=4),
    Column("KV\nGiB", lambda a: gib(a.needs.kv_bytes if a.needs else None), rank=3),
    Column("freed\nGiB", lambda a: gib(a.needs.freed_bytes if a.needs else None), rank=8),
    Column("engine\nGiB", lambda a: gib(a.needs.total_bytes if a.needs else None), rank=2),
    Column("full-batch\nengines", lambda a: whole(a.replicas.at_batch if a.replicas else None), rank=5),
    Column("split-batch\nengines", lambda a: whole(a.replicas.split if a.replicas else None), rank=9),
    Column("time-slicing\ngain", lambda a: _bound(a.gains.time_slicing if a.gains else None), rank=7),
    Column("MPS\ngain", lambda a: _bound(a.gains.mps if a.gains else None), rank=7),
    Column("cost/M\ntokens", lambda a: figure(a.advised.cost.value if a.advised and a.advised.cost else None), rank=3),
    Column("\n", lambda a: _mark(a), "left"),
)
NEAR_LIMIT = 0.9  # share of the power limit that a reader is warned of
ALWAYS = 3  # columns that are shown even where nothing is known
LEGEND = (
    "batch: what max_num_seqs should be. ms/token: between output tokens. of peak: of the largest throughput measured. "
    "eff.: T(B)/(B T(1)). KV: for the batch at full length; freed: what the engine had beyond that. engine: with "
    "weights, activations, graphs and context. engines: how many fit on this GPU, each with the full batch or "
    "part of it. gain: upper bound of the throughput of several engines over that of one, by time slicing or MPS."
)
ALONE = (
    "Tokens/s are those that each had alone: they share the GPU's time as well as its memory, so expect less where "
    "they work at once."
)
ORDER = (
    "start one after the other, each when the one before answers /health: engines that start at once count each "
    "other's memory as their own"
)
MPS_FIRST = "start the MPS daemon before them (nvidia-cuda-mps-control -d), else the GPU is time-sliced"
FOOTPRINT = ("longest", "block_size", "weight_bytes", "allowance_bytes", "allowance_seen")
NEEDS = ("kv_blocks", "kv_bytes", "total_bytes", "utilization", "freed_bytes", "freed_share")


def advice_text(plan: Plan, source: ResultSource) -> str:
    """Heading, table, reasons, commands."""
    pieces = [folded(advice_heading(plan, source))]
    if plan.possible:
        with laid_out(every_column=True):  # what is asked for must not be what a narrow terminal leaves out
            pieces += [table(plan.advices, COLUMNS, ALWAYS), hanging(LEGEND, 0)]
    pieces += [advice_reasons(advice, plan) for advice in plan.advices]
    if remarks := list(general(plan, source)):
        pieces.append("\n".join(hanging(remark, 2) for remark in remarks))
    return "\n\n".join([*pieces, *commands(plan)])


def advice_heading(plan: Plan, source: ResultSource) -> str:
    wish, memory = plan.wish, ""
    if wish.gpu_bytes is not None:
        memory = (
            f", {gib(wish.gpu_bytes)} GiB of memory, of which engines may take {percent(wish.gpu_memory_utilization)}"
        )
    asked = f"wanted: an efficiency above {percent(wish.threshold)}"
    slo = "" if wish.slo is None else f", and {objective(wish.slo)} ({source.latency})"
    return f"{source.device}{memory}\n{asked}{slo}"


def objective(slo: Slo) -> str:
    if isinstance(slo, RelativeSlo):
        return f"at most {slo.factor:g} times the latency at {slo.at}"
    return f"a latency of at most {milliseconds(slo.seconds)} ms"


def _bound(ceiling: Ceiling | None) -> str:
    return ABSENT if ceiling is None else f"x {figure(ceiling.factor)}"


def _mark(advice: Advice) -> str:
    best, fit = advice.decision.batch, advice.replicas
    if advice.batch is None:
        return "does not fit" if best else "no advice"
    lowered = f"not {best}" if advice.batch != best else ""
    trial = f"try {fit.advised} of {fit.each}" if fit and fit.advised > 1 else ""
    return ", ".join(word for word in ("predicted" if advice.decision.predicted else "", lowered, trial) if word)


def advice_reasons(advice: Advice, plan: Plan) -> str:
    notes = [("note", note) for note in (*advice.decision.notes, *advice.subject.notes)]
    pairs = [(f"  {name}", said) for name, said in (*_findings(advice, plan), *notes)]
    return f"{advice.subject.name}\n{named_lines(pairs)}"


def _findings(advice: Advice, plan: Plan) -> Iterator[tuple[str, str]]:
    """Pairs of what is looked at and what was found."""
    yield "batch", batch_text(advice, plan)
    if allowed := caps_text(advice.decision):
        yield "law", allowed
    if advice.batch is None:
        return
    yield "memory", _memory(advice)
    if advice.gains and (advice.gains.ceilings or advice.replicas):
        yield "gain", _gain(advice.gains)
    if advice.replicas:
        yield "engines", _replicas(advice.replicas, advice)
    if costs := _costs(advice):
        yield "cost", costs


def batch_text(advice: Advice, plan: Plan) -> str:
    """B_opt, its conditions and what it serves; or why there is none."""
    seen = advice.decision
    if seen.batch is None:
        return f"none: {seen.reason}"
    interval = f" (95 %: {seen.low or 'none'} to {seen.high or 'none'})" if seen.known else ""
    how = "predicted as the largest" if seen.predicted else "the largest measured"
    said = f"B_opt is {seen.batch} in flight{interval}, {how} with {conditions(plan.wish, seen.limit)}"
    if advice.batch is None:
        return f"{said}; but the memory does not even hold one request of each model"
    said += "" if advice.batch == seen.batch else f"; the memory does not hold that, so {advice.batch}"
    if offer := advice.advised:
        rate = f"{figure(offer.tokens_per_s.value, 4)} tokens/s{between(offer.tokens_per_s)}"
        said += f": {rate}, {percent(offer.share)} of the most that was measured"
    return said


def caps_text(seen: Decision) -> str:
    """The largest batches that the laws allow; empty where there is no law."""
    pairs = (("efficiency", seen.caps.efficiency), ("latency", seen.caps.slo))
    said = [f"{figure(cap)} by {name}" for name, cap in pairs if cap is not None]
    return f"by the saturation law alone the batch could be up to {', '.join(said)}" if said else ""


def _memory(advice: Advice) -> str:
    footprint, seen = advice.subject.footprint, advice.needs
    if footprint is None or seen is None:
        return f"not known: {no_memory(advice)}"
    blocks = f"{seen.kv_blocks:,} blocks of {footprint.block_size} tokens"
    said = f"{seen.batch} requests of {footprint.longest:,} tokens take {blocks}, {gib(seen.kv_bytes)} GiB of KV cache"
    how = "as the sensors saw" if footprint.allowance_seen else "assumed"
    rest = f"{gib(footprint.allowance_bytes)} for activations, graphs and context ({how})"
    said += f"; with {gib(footprint.weight_bytes)} of weights and {rest} it is {gib(seen.total_bytes)} GiB"
    if seen.freed_bytes is None:
        return said
    said += f"; the engine had {gib(seen.freed_bytes + seen.kv_bytes)} GiB of KV cache"
    if seen.freed_bytes <= 0:
        return f"{said}, which is no more"
    share = "" if seen.freed_share is None else f" ({percent(seen.freed_share)} of the GPU)"
    return f"{said}, so {gib(seen.freed_bytes)} GiB{share} are freed"


def no_memory(advice: Advice) -> str:
    """The reason why the memory that a model needs is unknown."""
    return advice.subject.engine.no_footprint if advice.subject.engine else "the model is not known: --model NAME"


def _gain(gains: Gains) -> str:
    sliced, overlap = gains.time_slicing, gains.mps
    if sliced is None:
        return "of several engines: not bounded by any sensor or data sheet"
    if overlap is None or sliced is overlap:
        said = f"several engines have at most {_times(sliced)}, however they share the GPU"
    else:
        said = f"several engines have by time slicing at most {_times(sliced)}; under MPS at most {_times(overlap)}"
    power = gains.power_share
    if power is not None and power >= NEAR_LIMIT:
        said += f"; but power is at {percent(power)} of its limit, where the clock falls"
    return f"{said}; seen at {gains.at} in flight"


def _times(bound: Ceiling) -> str:
    return f"{figure(bound.factor)} times the throughput of one ({why(bound)})"


def why(bound: Ceiling) -> str:
    """The resource that a bound rests on, with its measured value."""
    if bound.unit == "host":
        return f"the host: no kernel runs for {percent(max(0.0, 1 - bound.busy))} of the time"
    if bound.unit == "roofline":
        return f"the roofline: {percent(bound.busy)} of what the data sheet allows is reached"
    what, most = ("memory", REACHABLE_DRAM) if bound.unit == "dram" else ("tensor cores", REACHABLE_TENSOR)
    return f"the {what}: active {percent(bound.busy * most)} of the time, of {percent(most)} that can be reached"


def _replicas(fit: ReplicaAdvice, advice: Advice) -> str:
    said = f"memory for {fit.at_batch:,} at batch {advice.batch} each, or {fit.split:,} that share it"
    if fit.advised == 1:
        return f"{said}; one is advised: {fit.why}"
    limit, least = advice.decision.limit, least_latency_s(advice, fit.advised)
    over = ""
    if limit is not None and least is not None and least > limit.seconds:
        over = f" (not {advice.batch}: that would take {milliseconds(least)} ms per output token at the least)"
    return f"{said}; try {fit.advised} at batch {fit.each}{over}: {fit.why}"


def _costs(advice: Advice) -> str:
    """Cost of a million output tokens at the advised batch, the largest and one; empty where none is known."""
    offers = {o.batch: o for o in (advice.advised, advice.largest, advice.single) if o is not None and o.cost}
    what = {advice.subject.usable[-1].concurrency: ", the largest measured", 1: ", alone"} if offers else {}
    said = [
        f"{figure(offer.cost.value)}{between(offer.cost)} at {batch}{what.get(batch, '')}"
        for batch, offer in offers.items()
        if offer.cost
    ]
    return f"of a million output tokens: {'; '.join(said)}" if said else ""


def general(plan: Plan, source: ResultSource) -> Iterator[str]:
    """Notes that concern all models of a plan."""
    yield from (f"note: {note}" for note in source.notes)
    if not plan.advices:
        yield "note: no sweep was measured"
    if plan.wish.slo is None:
        yield "note: no latency limit was given (--slo-itl): the batch is by efficiency alone"
    if source.gpu_bytes not in (None, plan.wish.gpu_bytes):
        yield f"note: speeds are those of the GPU that was measured on, which has {gib(source.gpu_bytes or 0)} GiB"
    if plan.wish.gpu_bytes is None and any(advice.subject.footprint for advice in plan.advices):
        yield "note: the memory of the GPU is not known, so nothing was fitted into it: --gpu-memory 80GiB"
    if plan.wish.price_per_hour is not None and any(a.subject.output_share is None for a in plan.advices):
        yield "note: no cost: how many of the tokens are output is not known: --output-throughput NAME"
    yield from _together(plan)


def _together(plan: Plan) -> Iterator[str]:
    seen, many = plan.together, sum(advice.needs is not None for advice in plan.advices)
    if seen is None:
        return
    total, budget = gib(seen.total_bytes), gib(seen.budget_bytes)
    if not seen.fits:
        larger = "a larger GPU, or a larger --gpu-memory-utilization"
        way_out = "fewer of them (--model)" if len(plan.advices) > 1 else larger
        yield f"note: nothing fits: with one request each it takes {total} GiB, of {budget} GiB: {way_out}"
    elif many > 1:
        least = "with less than B_opt, there where the least throughput is lost per byte"
        each = f"; {', '.join(seen.lowered)} {least}" if seen.lowered else ", each with its B_opt"
        yield f"together: these {many} models take {total} of the {budget} GiB that engines may take{each}. {ALONE}"


def commands(plan: Plan) -> Iterator[str]:
    """Each way to start engines, broken for a terminal."""
    for start in starts(plan):
        sentences = [start.what, *((ORDER,) if len(start.commands) > 1 else ()), *((MPS_FIRST,) if start.mps else ())]
        commands = [shell_lines(words, layout().width) for words in start.commands]
        yield "\n".join([hanging("; ".join(sentences), 2), *commands])


def advice_facts(plan: Plan, source: ResultSource, curves: Sequence[Curve] | None = None) -> dict[str, Any]:
    """Facts on a plan and each of its models. curves: of these models, on whatever GPUs; None: nobody looked."""
    wish = plan.wish
    return {
        **facts(source, "device", "latency"),
        **facts(wish, "gpu_bytes", "gpu_memory_utilization", "threshold", "price_per_hour"),
        "objective": wish.slo and objective(wish.slo),
        "models": [_model(advice) for advice in plan.advices],
        "together": plan.together,
        "several_gpus": None if curves is None else [one for curve in curves for one in _on_several(curve)],
        "starts": [
            {**facts(start, "what", "mps"), "commands": map(shlex.join, start.commands)} for start in starts(plan)
        ],
        "notes": general(plan, source),
    }


def _model(advice: Advice) -> dict[str, Any]:
    seen, footprint, gains = advice.decision, advice.subject.footprint, advice.gains
    if bounds := gains and facts(gains, "at", "power_share"):
        for how, bound in (("time_slicing", gains.time_slicing), ("mps", gains.mps)) if gains else ():
            bounds[how] = None if bound is None else {**facts(bound), "why": why(bound)}
    return {
        "model": advice.subject.name,
        **facts(advice, "batch", "advised", "largest", "single", "replicas"),
        "b_opt": {"value": seen.batch, **facts(seen, "low", "high")},
        **facts(seen, "predicted", "reason", "caps"),
        "limit_s": seen.limit and seen.limit.seconds,
        "memory": advice.needs and {**facts(footprint, *FOOTPRINT), **facts(advice.needs, *NEEDS)},
        "no_memory": None if footprint else no_memory(advice),
        "gains": bounds,
        "notes": (*seen.notes, *advice.subject.notes),
    }


def _on_several(curve: Curve) -> Iterator[dict[str, Any]]:
    """The best deployments for each number of GPUs and concurrency, a dict each; nothing without a choice."""
    for gpus, load, best in best_on_several(curve, deployments(curve) if on_several_gpus(curve) else ()):
        chosen = {
            f"best_{wish}": {
                "deployment": deployment_name(one),
                **facts(one, "engines", "tensor_parallel_size"),
                wish: value,
            }
            for wish, (one, value) in best.items()
        }
        yield {"model": curve.subject, "gpus": gpus, "concurrency": load, **chosen}


VERIFICATION_COLUMNS: tuple[Column[Verified], ...] = (
    Column("\nmodel", lambda v: v.advice.subject.name, "left"),
    Column("\nbatch", lambda v: str(v.advice.batch)),
    Column("tokens/s\npredicted", lambda v: _rate(v.advice.advised.tokens_per_s if v.advice.advised else None)),
    Column("tokens/s\nmeasured", lambda v: _rate(v.tokens_per_s)),
    Column("of it\n%", lambda v: hundredths(v.ratio.value if v.ratio else None)),
    Column("95 %\n", lambda v: interval_text(v.ratio, hundredths), "left", rank=2),
    Column("ms/token\npredicted", lambda v: _latency(v.advice.advised.latency_s if v.advice.advised else None), rank=1),
    Column("ms/token\nmeasured", lambda v: _latency(v.latency_s), rank=1),
    Column(
        "ms/token\nat most",
        lambda v: milliseconds(v.advice.decision.limit.seconds if v.advice.decision.limit else None),
        rank=3,
    ),
    Column("KV blocks\npredicted", lambda v: whole(v.kv_blocks[0]), rank=5),
    Column("KV blocks\nreported", lambda v: whole(v.kv_blocks[1]), rank=5),
    Column("GiB\npredicted", lambda v: gib(v.advice.needs.total_bytes if v.advice.needs else None), rank=6),
    Column("GiB\nin use", lambda v: gib(v.memory_bytes), rank=6),
    Column("pre-\nempted", lambda v: str(v.preemptions) if v.point else ABSENT, rank=4),
)
VERIFICATION_ALWAYS = 4  # columns that are shown even where nothing is known
VERIFICATION_LEGEND = (
    "of it: measured over predicted tokens/s. ms/token: between output tokens; at most: the latency wanted. KV blocks: "
    "of the cache that this engine was given. in use: of the device's memory at most, by anybody, where sensors tell."
)
JOINT = ("models", "loads", "sharing", "gain", "bound", "latency_s", "preemptions", "verdicts")
ONE_BY_ONE = "1 is what serving one after the other would give"


def verification_text(seen: Verification, notes: Sequence[str] = ()) -> str:
    """Table, what several engines served together, verdicts, notes."""
    engines = "the engine" if len(seen.alone) == 1 else "each engine"
    heading = f"verified: {engines} as advised, measured anew, {counted(seen.repeats, 'repeat')} each"
    pieces = [heading, table(seen.alone, VERIFICATION_COLUMNS, VERIFICATION_ALWAYS), hanging(VERIFICATION_LEGEND, 0)]
    if seen.together and seen.together.point:
        pieces.append(hanging(_verification_together(seen.together, seen.alone), 2))
    pieces.append("\n".join(line for line, _ in verdict_lines([(verdict, None) for verdict in seen.verdicts])))
    if notes:
        pieces.append("\n".join(hanging(f"note: {note}", 2) for note in notes))
    return "\n\n".join(pieces)


def _rate(seen: Interval | None) -> str:
    return figure(seen.value if seen else None, 4)


def _latency(seen: Interval | None) -> str:
    return milliseconds(seen.value if seen else None)


def _verification_together(seen: VerifiedTogether, alone: Sequence[Verified]) -> str:
    """Throughput of several engines that served at once, compared with one engine alone and with the bound."""
    point = seen.point
    said = f"together, by {seen.sharing}: {engines(seen.models)} at {listed(seen.loads)} in flight"
    if point is None or not point.valid:
        return said
    said = f"{said} serve {figure(point.output_tokens_per_s, 4)} tokens/s"
    if len(set(seen.models)) > 1:
        own = {each.advice.subject.name: each.tokens_per_s for each in alone}
        parts = zip(seen.models, point.each_tokens_per_s, (own.get(model) for model in seen.models))
        each = (f"{model}: {percent(rate / of.value) if of else ABSENT} of its own" for model, rate, of in parts)
        said += f" ({', '.join(each)})"
    if seen.gain:
        shares = f"the sum of their shares of what each has alone is {figure(seen.gain.value)}{between(seen.gain)}"
        what = f"{shares}, {ONE_BY_ONE}"
        said += f"; {what}" if len(set(seen.models)) > 1 else f", {times(seen.gain)} what the one engine does"
        said += "; nothing bounds it" if seen.bound is None else f"; the bound is {figure(seen.bound)}"
    if seen.latency_s is not None:
        said += f"; the slowest takes {milliseconds(seen.latency_s)} ms per output token"
    return said


def verification_facts(seen: Verification, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Facts on what was measured; what was predicted is in those of the advice."""
    return {
        **facts(seen, "state", "margin", "repeats"),
        "models": [_verification_model(each) for each in seen.alone],
        "together": seen.together
        and {
            **facts(seen.together, *JOINT),
            **facts(seen.together.point, "output_tokens_per_s", "each_tokens_per_s", "records"),
        },
        "notes": notes,
    }


def _verification_model(seen: Verified) -> dict[str, Any]:
    return {
        "model": seen.advice.subject.name,
        "batch": seen.advice.batch,
        **facts(seen, "tokens_per_s", "latency_s", "ratio", "memory_bytes", "preemptions", "verdicts"),
        "kv_blocks": dict(zip(("predicted", "reported"), seen.kv_blocks)),
        **facts(seen.point, "records"),
    }


@dataclass(frozen=True, slots=True)
class PredictedSweep:
    """A prediction under the label of its sweep. there: sweeps measured on that GPU."""

    name: str
    prediction: CarriedLaw
    there: Sequence[Curve]

    @property
    def verdicts(self) -> list[Verdict]:
        return [carries(self.prediction, each) for each in self.there]


Row = dict[str, Any]  # a load; output_tokens_per_s: as measured here, None where only the other GPU has it


def predicted_loads(one: PredictedSweep, there: Curve | None) -> list[Row]:
    """Loads of the sweep and of the one there, ascending."""
    here = {p.concurrency: fmean(p.repeats) for p in one.prediction.curve.valid}
    seen: dict[int, tuple[Interval | None, Point]] = {p.concurrency: (None, p) for p in one.prediction.curve.valid}
    for error, point in errors(one.prediction, there) if there else ():
        seen[point.concurrency] = (error, point)
    return [
        {
            "subject": one.name,
            "gpu": one.prediction.gpu.family,
            "concurrency": load,
            "output_tokens_per_s": here.get(load),
            "predicted_tokens_per_s": one.prediction.tokens_per_s(fmean(point.batch_repeats)),
            "measured_tokens_per_s": error and fmean(point.repeats),
            "predicted_over_measured": error and error.value,
            "low": error and error.low,
            "high": error and error.high,
        }
        for load, (error, point) in sorted(seen.items())
    ]


def _ends(row: Row) -> str:
    known = row["low"] is not None and row["high"] is not None
    return f"{hundredths(row['low'])} to {hundredths(row['high'])}" if known else ABSENT


OTHER_GPU_COLUMNS: tuple[Column[Row], ...] = (
    Column("tokens/s\nmeasured", lambda row: figure(row["output_tokens_per_s"], 4)),
    Column("predicted\nthere", lambda row: figure(row["predicted_tokens_per_s"], 4)),
    Column("measured\nthere", lambda row: figure(row["measured_tokens_per_s"], 4)),
    Column("predicted %\nof measured", lambda row: hundredths(row["predicted_over_measured"])),
    Column("95 %", _ends, "left"),
)


def prediction_text(one: PredictedSweep) -> Iterator[str]:
    """A table for each sweep there, or one without; then the law of both GPUs."""
    curve, law, gpu = one.prediction.curve, one.prediction.law, one.prediction.gpu.family
    yield hanging(f"{one.name}, measured on {served_on(curve.environment)}, predicted for {gpu}", 2)
    for there in one.there or (None,):
        load: Column[Row] = Column(curve.axes.knob or "in\nflight", lambda row: str(row["concurrency"]))
        yield table(predicted_loads(one, there), (load, *OTHER_GPU_COLUMNS))
    here = f"T_inf {figure(law.t_inf.value, 4)} tokens/s, b_half {figure(law.b_half.value)} in flight"
    beyond = f"T_inf {figure(one.prediction.t_inf, 4)}, b_half {figure(one.prediction.b_half)}"
    yield hanging(f"law: here {here}; on {gpu} {beyond}", 2)
    for verdict in one.verdicts:
        yield hanging(f"{verdict.state.value}: {verdict.why}", 2)
    if not one.there:
        yield hanging(f"not checked: no archive has this sweep on {gpu}", 2)


def prediction_facts(one: PredictedSweep) -> dict[str, Any]:
    """Everything that the text tells, for JSON."""
    law = one.prediction.law
    return {
        "subject": one.name,
        "gpu": one.prediction.gpu.family,
        "t_inf": law.t_inf.value,
        "b_half": law.b_half.value,
        "predicted_t_inf": one.prediction.t_inf,
        "predicted_b_half": one.prediction.b_half,
        "loads": list(prediction_rows(one)),
        "verdicts": one.verdicts,
    }


def prediction_rows(one: PredictedSweep) -> Iterator[Row]:
    """A row for each load of each sweep there, or of the prediction alone."""
    for there in one.there or (None,):
        yield from predicted_loads(one, there)
