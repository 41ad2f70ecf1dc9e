"""Section and JSON facts of a recommendation, and predictions for another GPU."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_slmserve.analysis.advice.advisor import (
    OF_BOUND,
    Advice,
    Decision,
    Plan,
    ServedEngine,
    batch_ends,
    conditions,
    second_engine,
    utilization,
)
from pytest_slmserve.analysis.advice.subjects import ADVISED, ResultSource
from pytest_slmserve.analysis.advice.two_laws import Predicted
from pytest_slmserve.analysis.claims.table import judge_row, row_for
from pytest_slmserve.analysis.estimates import Interval, percent, percent_interval
from pytest_slmserve.analysis.sweep.batching import RelativeSlo, Slo
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.sweep.plateau import gains, plateau
from pytest_slmserve.analysis.verdict import Verdict
from pytest_slmserve.report import text_table
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.deployments import answers, best_on_several, deployment_name, several_gpus
from pytest_slmserve.report.section import Legend, Part, Section, Table
from pytest_slmserve.report.text_table import ABSENT, Column, figure, gib, hundredths, milliseconds
from pytest_slmserve.schema.kv_cache import adapter_bytes
from pytest_slmserve.schema.models import hub_name
from pytest_slmserve.schema.specs import command_words

TOLD_APART = {*ADVISED, "dtype", "max_num_batched_tokens"}  # arguments that `serve_words` sets or replaces
FIRST_PORT = 8000  # of vLLM's server by default
INDENT = "    "
CONTINUED = " \\"


@dataclass(frozen=True, slots=True)
class Start:
    """Engines to start one after the other.

    Attributes:
        what: description for people.
        mps: whether the engines should share the GPU by MPS.
    """

    what: str
    commands: tuple[tuple[str, ...], ...]
    mps: bool = False


def starts(plan: Plan) -> Iterator[Start]:
    """Yield ways to serve: one engine of each model, together if they fit, then several engines for a trial."""
    engines = ((advice, advice.subject.engine, advice.batch) for advice in plan.advices)
    serving = [(advice, engine, batch) for advice, engine, batch in engines if engine and batch is not None]
    placed = [row for row in serving if plan.together and row[0].needs]
    ways = [(f"{len(placed)} engines that fit on the GPU together", [row[1:] for row in placed], False)]
    if len(placed) < 2:
        ways, placed = [], []
    alone = f"one engine{' of {}' if len(serving) > 1 else ''}"
    alone += ", alone: it is not known to fit beside others" if placed else ""
    ways += [(alone.format(row[0].subject.name), [row[1:]], False) for row in serving if row not in placed]
    for advice, engine, _ in serving:
        if (fit := advice.replicas) and fit.advised > 1:
            name = f" of {advice.subject.name}" if len(serving) > 1 else ""
            what = f"{fit.advised} engines{name} of {fit.each} requests each, for a trial"
            ways.append((what, [(engine, fit.each)] * fit.advised, True))
    for what, rows, mps in ways:
        served = enumerate((serve_words(*row, plan.wish.gpu_bytes) for row in rows), FIRST_PORT)
        yield Start(what, tuple((*words, "--port", str(port)) for port, words in served), mps)


def serve_words(engine: ServedEngine, batch: int, gpu_bytes: int | None) -> tuple[str, ...]:
    """Return the words of a `vllm serve` command. Unknown settings of the engine are left to vLLM."""
    spec = engine.spec
    variables = [f"{name}={value}" for name, value in spec.env if name != "PYTHONPATH"]
    words = ["env", *variables] if variables else []
    words += ["vllm", "serve", hub_name(spec.model), "--dtype", engine.dtype, "--max-num-seqs", str(batch)]
    if engine.max_num_batched_tokens is not None:
        words += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    if (footprint := engine.footprint) and not engine.no_footprint:
        words += ["--max-model-len", str(footprint.longest), "--kv-cache-memory-bytes", str(footprint.kv_bytes(batch))]
        if gpu_bytes is not None:
            words += ["--gpu-memory-utilization", f"{utilization(footprint.total_bytes(batch), gpu_bytes):.3f}"]
    eager = ["--enforce-eager"] if spec.enforce_eager else []
    return *words, *eager, *command_words({name: value for name, value in spec.extra if name not in TOLD_APART})


def shell_lines(words: Sequence[str], width: int) -> str:
    """Return a shell command on several lines, broken before options."""
    groups: list[list[str]] = [[]]  # the command, and each option with its values
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
    Column("full-batch\nengines", lambda a: text_table.whole(a.replicas.at_batch if a.replicas else None), rank=5),
    Column("split-batch\nengines", lambda a: text_table.whole(a.replicas.split if a.replicas else None), rank=9),
    Column("time-slicing\ngain", lambda a: _factor(a, "time_slicing"), rank=7),
    Column("MPS\ngain", lambda a: _factor(a, "mps"), rank=7),
    Column("cost/M\ntokens", lambda a: figure(a.advised.cost.value if a.advised and a.advised.cost else None), rank=3),
    Column("\n", lambda a: _mark(a), "left"),
)
NEAR_LIMIT = 0.9  # share of the power limit from which a reader is warned
ALWAYS = 3  # columns that are shown even if nothing is known
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


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickRun:
    """One engine, measured for a minute.

    Attributes:
        start_s: seconds until it took requests, None if unknown.
        measured_s: seconds of all windows with ramps, at most budget_s.
        all_s: seconds of the command.
        trial: command that measures two engines.
    """

    start_s: float | None
    measured_s: float
    budget_s: float
    all_s: float
    records: str
    trial: str


def may_pay(advice: Advice) -> bool:
    """Return whether a second engine may pay, also if no sensor tells."""
    gain, fit = second_engine(advice.gains), advice.replicas
    return gain is None or (gain.value > 1 and (fit is None or fit.advised > 1))


def quick_answer(advice: Advice) -> str:
    """Return batch, memory share, and whether a second engine pays, in one sentence."""
    if advice.batch is None:
        return f"{advice.subject.name}: no batch can be advised: {advice.decision.reason or 'the memory holds none'}"
    (least, above), choice = batch_ends(advice), advice.decision.choice
    sure = f"{'95%: ' if choice.known else ''}{least or 1} {f'to below {above}' if above else 'or more'}"
    share = advice.needs and advice.needs.utilization
    memory = "unknown" if share is None else f"{share:.3f}"
    pays = "cannot be told to pay: no sensor says what one leaves"
    if gain := second_engine(advice.gains):
        worth = ("pays" if (gain.low or 0) > 1 else "may pay") if may_pay(advice) else "is not worth it"
        pays = f"{worth}, {figure(gain.value)} times ({figure(gain.low)} to {figure(gain.high)}) predicted"
    said = f"max_num_seqs {advice.batch} ({'predicted' if advice.decision.predicted else sure}), memory share {memory}"
    return f"{advice.subject.name}: {said}; a second engine {pays}"


def quick_reasons(advice: Advice, run: QuickRun) -> Iterator[tuple[str, str]]:
    """Yield pairs of subject and sentence on a quick measurement."""
    loads = advice.subject.usable
    if steps := gains(loads):
        found = plateau(loads)
        last = next((step for step in steps if step.start == found.value), steps[-1])
        begins = f"from {found.value} concurrent requests" if found.value else f"past {last.end}, the most measured"
        yield "plateau", f"{begins}: from {last.start} to {last.end} a doubling gains {percent_interval(last)}"
    if gain := second_engine(advice.gains):
        ends = f"{percent(OF_BOUND.value)} ({percent(OF_BOUND.low or 0)} to {percent(OF_BOUND.high or 0)})"
        known = f"38 published sets of two served {ends} of the bound on it, or of 2 if that is less"
        yield "second", f"{figure(gain.value)} times is predicted; measured: no, for that takes two engines: {known}"
    windows = ", ".join(f"{len(p.repeats)} at {p.concurrency}" for p in loads)
    yield "trust", f"one launch on one host: what differs between them is in no interval; windows: {windows}"
    start = "" if run.start_s is None else f"started in {run.start_s:.0f} s and "
    took = f"{start}measured for {run.measured_s:.0f} s of at most {run.budget_s:.0f}"
    yield "time", f"the command took {run.all_s:.0f} s; by its own clock, the engine {took}"
    yield "records", f"{run.records}, for slmserve report and advise"
    if may_pay(advice):
        yield "next", f"measure two engines: {run.trial}"


def advice_section(
    plan: Plan, source: ResultSource, curves: Sequence[Curve] = (), quick: QuickRun | None = None
) -> Section:
    """Return the section of a recommendation.

    Args:
        curves: of these models; their best deployments on several GPUs are added.
        quick: measurement of the model made just now; its answer comes first, without a table.
    """
    wish, memory = plan.wish, ""
    if wish.gpu_bytes is not None:
        most = percent(wish.gpu_memory_utilization)
        memory = f", {gib(wish.gpu_bytes)} GiB of memory, of which engines may take {most}"
    slo = "" if wish.slo is None else f", and {objective(wish.slo)} ({source.latency})"
    answers_first = "".join(f"{text_table.folded(quick_answer(advice))}\n" for advice in plan.advices if quick)
    heading = f"{answers_first}{source.device}{memory}\nwanted: an efficiency above {percent(wish.threshold)}{slo}"
    parts: list[Part] = []
    width = text_table.layout().width
    for start in starts(plan):
        sentences = [start.what, *((ORDER,) if len(start.commands) > 1 else ()), *((MPS_FIRST,) if start.mps else ())]
        parts += ["", "; ".join(sentences), *(shell_lines(words, width) for words in start.commands)]
    parts += [Table(plan.advices, COLUMNS, always=ALWAYS), "", Legend(LEGEND)] if plan.possible and not quick else []
    for advice in plan.advices:
        own = [curve for curve in curves if curve.subject == advice.subject.name]
        told = (*advice_reasons(advice, plan), *adapters_told(advice, plan, own))
        told += tuple(quick_reasons(advice, quick)) if quick else ()
        pairs = [(f"  {name}", said) for name, said in told]
        parts += ["", f"{advice.subject.name}\n{text_table.named_lines(pairs)}"]
    if remarks := list(general(plan, source)):
        parts += ["", *remarks]
    parts += [f"{curve.subject} on {text}" for curve, found in several_gpus(curves) for text in answers(curve, found)]
    return Section(heading, parts, "good" if plan.possible else "open")


def objective(slo: Slo) -> str:
    if isinstance(slo, RelativeSlo):
        return f"at most {slo.factor:g} times the latency at {slo.at}"
    return f"a latency of at most {milliseconds(slo.seconds)} ms"


def _factor(advice: Advice, how: str) -> str:
    bound = getattr(advice.gains, how, None)
    return ABSENT if bound is None else f"x {figure(bound.factor)}"


def _mark(advice: Advice) -> str:
    best, fit = advice.decision.batch, advice.replicas
    if advice.batch is None:
        return "does not fit" if best else "no advice"
    lowered = f"not {best}" if advice.batch != best else ""
    trial = f"try {fit.advised} of {fit.each}" if fit and fit.advised > 1 else ""
    return ", ".join(word for word in ("predicted" if advice.decision.predicted else "", lowered, trial) if word)


def advice_reasons(advice: Advice, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield pairs of subject and sentence that explain a recommendation."""
    yield "batch", batch_text(advice, plan)
    if allowed := caps_text(advice.decision):
        yield "model", allowed
    if advice.batch is not None:
        yield "memory", _memory(advice)
        if (gains := advice.gains) and (gains.time_slicing or advice.replicas):
            sliced, overlap, power = gains.time_slicing, gains.mps, gains.power_share
            said = "of several engines: not bounded by any sensor or data sheet"
            if sliced is not None:
                bounds = [f"{figure(c.factor)} times the throughput of one ({c.why})" for c in (sliced, overlap) if c]
                said = f"several engines have by time slicing at most {bounds[0]}; under MPS at most {bounds[-1]}"
                if overlap is None or sliced is overlap:
                    said = f"several engines have at most {bounds[0]}, however they share the GPU"
                if power is not None and power >= NEAR_LIMIT:
                    said += f"; but power is at {percent(power)} of its limit, where the clock falls"
                said += f"; seen at concurrency {gains.at}"
            yield "gain", said
        if fit := advice.replicas:
            said = (
                f"memory for {fit.at_batch:,} at batch {advice.batch} each, or for {fit.split:,} that split the batch"
            )
            limit, over = advice.decision.limit, ""
            if limit and advice.gains and (bound := advice.gains.mps) and advice.advised and advice.advised.latency_s:
                # Little's law, with this many times the requests at no more than the bound times the throughput.
                least = fit.advised / bound.factor * advice.advised.latency_s.value
                if least > limit.seconds:
                    least_ms = milliseconds(least)
                    over = f" (not {advice.batch}: that would take {least_ms} ms per output token at the least)"
            several = f"try {fit.advised} at batch {fit.each}{over}: {fit.why}"
            yield "engines", f"{said}; {several if fit.advised > 1 else f'one is advised: {fit.why}'}"
        costs = []
        for offer in {o.batch: o for o in (advice.advised, advice.largest, advice.single) if o}.values():
            if offer.cost:
                known = {advice.subject.usable[-1].concurrency: ", the largest measured", 1: ", alone"}
                where = f"{offer.batch}{known.get(offer.batch, '')}"
                costs.append(f"{figure(offer.cost.value)}{text_table.between(offer.cost)} at {where}")
        if costs:
            yield "cost", f"of a million output tokens: {'; '.join(costs)}"
    for note in (*advice.decision.notes, *advice.subject.notes):
        yield "note", note


def adapter_slots(advice: Advice, plan: Plan) -> dict[str, int | None] | None:
    """Return slots, bytes and room for adapters; None if none are wanted. Unknown room is None."""
    engine, budget = advice.subject.engine, plan.wish.budget_bytes
    if plan.wish.adapters is None or engine is None:
        return None
    slots, taken, room = engine.spec.arguments["max_loras"], adapter_bytes(engine.spec), None
    if advice.needs and budget is not None:
        room = slots + max(0, budget - advice.needs.total_bytes) * slots // taken
    return {"slots": slots, "rank": plan.wish.adapters.rank, "slot_bytes": taken, "room": room}


def adapters_told(advice: Advice, plan: Plan, curves: Sequence[Curve]) -> Iterator[tuple[str, str]]:
    """Yield the memory of the adapters' slots, and measured effects of too few."""
    if (held := adapter_slots(advice, plan)) is None:
        return
    said = f"{held['slots']} slots of rank {held['rank']} take {gib(held['slot_bytes'] or 0)} GiB"
    if held["room"] is not None:
        said += f"; beside this batch there is room for {held['room']:,}"
    yield "adapters", f"{said}: an adapter without a slot waits for one, so max_loras is to be their number"
    for name in ("more-adapters-serve-less", "too-few-slots-starve-requests"):
        verdicts = (judge_row(row_for(name, curve.subject), curve) for curve in curves)
        yield from dict.fromkeys(("measured", verdict.why) for verdict in verdicts if verdict.value is not None)


def batch_text(advice: Advice, plan: Plan) -> str:
    """Return B_opt with conditions and throughput, or why there is none."""
    seen = advice.decision
    if seen.batch is None:
        return f"none: {seen.reason}"
    chosen = seen.choice
    interval = f" (95%: {chosen.low or 'none'} to {chosen.high or 'none'})" if chosen.known else ""
    how = "predicted as the largest" if seen.predicted else "the largest measured"
    said = f"B_opt is {seen.batch} concurrent requests{interval}, {how} with {conditions(plan.wish, seen.limit)}"
    if advice.batch is None:
        each = " of each model" if plan.together and len(plan.advices) > 1 else ""
        return f"{said}; but the memory does not even hold one request{each}"
    if advice.batch != seen.batch:
        beside = " beside the other models" if plan.together and len(plan.advices) > 1 else ""
        said += f"; the memory does not hold that{beside}, so {advice.batch}"
    if offer := advice.advised:
        rate = f"{figure(offer.tokens_per_s.value, 4)} tokens/s{text_table.between(offer.tokens_per_s)}"
        said += f": {rate}, {percent(offer.share)} of the most that was measured"
    return said


def caps_text(seen: Decision) -> str:
    """Return the largest batches by the saturation model; empty without one."""
    pairs = (("efficiency", seen.caps.efficiency), ("latency", seen.caps.slo))
    said = [f"{figure(cap)} by {name}" for name, cap in pairs if cap is not None]
    return f"by the saturation model alone the batch could be up to {', '.join(said)}" if said else ""


def _memory(advice: Advice) -> str:
    footprint, seen = advice.subject.footprint, advice.needs
    if footprint is None or seen is None:
        return f"not known: {no_memory(advice)}"
    blocks = f"{seen.kv_blocks:,} blocks of {footprint.block_size} tokens, {gib(seen.kv_bytes)} GiB of KV cache"
    said = f"{advice.batch} requests of {footprint.longest:,} tokens take {blocks}"
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
    return advice.subject.engine.no_footprint if advice.subject.engine else "the model is not known: --model NAME"


def general(plan: Plan, source: ResultSource) -> Iterator[str]:
    """Yield notes on all models, and how they fit on the GPU together."""
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


def advice_facts(
    plan: Plan, source: ResultSource, curves: Sequence[Curve], quick: QuickRun | None = None
) -> dict[str, Any]:
    """Return a plan for JSON.

    Args:
        curves: of these models; their best deployments on several GPUs are added.
        quick: measurement of the model made just now.
    """
    wish, models, several = plan.wish, [], []
    for advice in plan.advices:
        seen, footprint = advice.decision, advice.subject.footprint
        model = {
            "model": advice.subject.name,
            **facts(advice, "batch", "advised", "largest", "single", "replicas"),
            "b_opt": facts(seen.choice, "value", "low", "high"),
            **facts(seen, "predicted", "reason", "caps"),
            "limit_s": seen.limit and seen.limit.seconds,
            "memory": advice.needs and {**facts(footprint, *FOOTPRINT), **facts(advice.needs)},
            "no_memory": None if footprint else no_memory(advice),
            "gains": advice.gains,
            **({"adapters": held} if (held := adapter_slots(advice, plan)) else {}),
            "notes": (*seen.notes, *advice.subject.notes),
        }
        if quick:
            model["answer"], model["second_engine"] = quick_answer(advice), second_engine(advice.gains)
            model["b_opt_least"], model["b_opt_below"] = batch_ends(advice)
        models.append(model)
    for curve, found in several_gpus(curves):
        for gpus, load, best in best_on_several(curve, found):
            row = {"model": curve.subject, "gpus": gpus, "concurrency": load}
            for goal, (one, value) in best.items():
                made_of = facts(one, "engines", "tensor_parallel_size")
                row[f"best_{goal}"] = {"deployment": deployment_name(one), **made_of, goal: value}
            several.append(row)
    return {
        **facts(source, "device", "latency"),
        **facts(wish, "gpu_bytes", "gpu_memory_utilization", "threshold", "price_per_hour"),
        "objective": wish.slo and objective(wish.slo),
        "models": models,
        "together": plan.together,
        "several_gpus": several,
        "starts": [{**facts(way, "what", "mps"), "commands": map(shlex.join, way.commands)} for way in starts(plan)],
        "notes": general(plan, source),
        **({"quick": quick} if quick else {}),
    }


PREDICTED: tuple[Column[Predicted], ...] = (
    Column("concur-\nrency", lambda row: str(row.setting.load)),
    Column("tokens/s", lambda row: figure(row.tokens_per_s.value, 4)),
    Column("95%", lambda row: text_table.interval_text(row.tokens_per_s, figure), "left"),
    Column("TTFT\nms", lambda row: milliseconds(None if row.ttft_s is None else row.ttft_s.value)),
    Column("95%", lambda row: text_table.interval_text(row.ttft_s, milliseconds), "left", 1),
    Column("TPOT\nms", lambda row: milliseconds(None if row.tpot_s is None else row.tpot_s.value)),
    Column("95%", lambda row: text_table.interval_text(row.tpot_s, milliseconds), "left", 1),
    Column("% of what the\ncard can", lambda row: hundredths(row.card_share)),
    Column("limited\nby", lambda row: row.limit, "left"),
)


def prediction_report(
    title: str, loads: Sequence[Predicted], batch: Interval, checks: Sequence[Verdict], beside: Mapping[int, float]
) -> tuple[dict[str, Any], Section]:
    """Return facts and section of predictions for another GPU.

    Args:
        loads: in ascending order.
        batch: recommended batch.
        checks: verdicts on measurements from that GPU.
        beside: tokens/s by AIConfigurator, by load.
    """
    rows = [
        {
            "concurrency": one.setting.load,
            "gpu": one.setting.gpu.family,
            **{name: getattr(one, name) for name in ("tokens_per_s", "ttft_s", "tpot_s", "card_share", "limit")},
            "aiconfigurator_tokens_per_s": beside.get(one.setting.load),
        }
        for one in loads
    ]
    at = min(loads, key=lambda one: abs(one.setting.load - batch.value))
    range_of = "" if batch.low == batch.high else f" ({batch.low:g} to {batch.high:g}, if a model is off)"
    why = "the largest here" if at is loads[-1] else "the next doubling gains less than 10%"
    said = [f"batch: {batch.value:g}{range_of}: {why}"]
    lets = "this host lets the card serve" if at.limit == "host" else "with this host the card serves"
    said.append(f"host: {lets} {at.card_share:.2f} of what it can at {at.setting.load}")
    gains = [(one.half_widths[""] - width, one, name) for one in loads for name, width in one.half_widths.items()]
    gain, where, name = max(gains, key=lambda each: each[0])
    if gain > 0:
        now = where.half_widths[""]
        width = f"at {where.setting.load} within x {math.exp(now - gain):.2f} instead of {math.exp(now):.2f}"
        said.append(f"most would be gained by {name}: {width}")
    said += [f"{verdict.state.value}: {verdict.why}" for verdict in checks]
    columns = PREDICTED
    if beside:
        columns = (*columns, Column("AIConfi-\ngurator", lambda row: figure(beside.get(row.setting.load), 4)))
    told = {"subject": title, "loads": rows, "batch": batch, "would_gain_most": name, "verdicts": checks}
    return told, Section(title, [Table(loads, columns), "", *said])
