"""The text at the end of a run, and of `slmserve report`: the same for both. With the cost of the serving stack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any, Literal

from pytest_slmserve.analysis.claims.claim import ClaimRow, Expected
from pytest_slmserve.analysis.claims.table import CLAIMS
from pytest_slmserve.analysis.compare.deployments import AtBothInterfaces, at_both_interfaces
from pytest_slmserve.analysis.device.gpu_figures import Place, fastest_pieces
from pytest_slmserve.analysis.metrics.latency import Slo
from pytest_slmserve.analysis.points import Point
from pytest_slmserve.analysis.sweep.curve import TOLERANCE, Curve, front_ends, labels
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.findings import Findings, Judged
from pytest_slmserve.report.loads import chunks, further, without
from pytest_slmserve.report.tables import sensors
from pytest_slmserve.report.tables.findings import (
    amount,
    findings,
    hosts,
    reasons,
    relative_range,
    remark,
    served_on,
    valid_cell,
)
from pytest_slmserve.report.tables.jobs import job_report, slo_report
from pytest_slmserve.report.tables.replicas import gpus_report, replica_report
from pytest_slmserve.report.text_table import (
    ABSENT,
    Column,
    change,
    change_interval,
    counted,
    figure,
    hanging,
    hundredths,
    listed,
    milliseconds,
    named_lines,
    table,
)
from pytest_slmserve.schema.loads import WorkloadReference
from pytest_slmserve.schema.records import Resolved
from pytest_slmserve.schema.specs import EngineSpec

Colour = Literal["green", "red", "yellow"]
Outcome = Literal["as expected", "unexpected", "inconclusive"]
COLOURS: dict[Outcome, Colour] = {"as expected": "green", "unexpected": "red", "inconclusive": "yellow"}
EITHER = "either expected: "
PLURALS = {  # of the words for an outcome
    "passes": "pass",
    "fails, as expected": "fail as expected",
    "FAILS": "FAIL",
    "PASSES, UNEXPECTED": "PASS, UNEXPECTED",
    "inconclusive": "inconclusive",
    "fails": "fail",
}

STATES = len("fails, as expected")
LEGEND = (
    "batch: mean sequences of an engine step (requests in flight, where a server does not report steps). tokens: of "
    "output. spread: (largest - smallest repeat) / mean. ms/token: E2E over output tokens. gain: of tokens/s since the "
    "row above, per doubling of the load. roofline: share of what the data sheet allows at this batch. -: not measured."
)
INTERFACES = (
    "Interfaces: the same engine, requests and load, without HTTP and through the server. change: of output tokens/s. "
    "prompt steps: steps that processed a prompt: the fewer there are, the more prompts came together. own "
    "cores: CPU time of engine, server and client per second. A launch has luck of its own, so what one launch of each "
    "interface shows is of these launches."
)


def sweep_report(
    curve: Curve, *, tolerance: float = TOLERANCE, slo: Slo | None = None, fastest: Mapping[Place, float] | None = None
) -> str:
    """Heading, table and findings of one sweep. tolerance: gain per doubling below which throughput counts as flat.
    slo: adds how many requests met it. fastest: what the speed of a host is relative to; None: its best in this
    sweep."""
    further = [sensors.sensor_table(curve, fastest), sensors.step_table(curve), slo_report(curve, slo) if slo else ""]
    lines = [*heading(curve), *(["", point_table(curve)] if curve.points else []), *remarks(curve)]
    lines += [line for table in further if table for line in ("", table)]
    seen = list(findings(curve, tolerance))
    return "\n".join([*lines, *(["", named_lines(seen)] if seen else [])])


def run_lines(found: Findings) -> Iterator[tuple[str, Colour | None]]:
    """All there is to say at the end of a run: sweeps, how to read them, verdicts. Pieces of text with a colour."""
    curves = found.curves
    # What has nothing but an engine alone, to compare replicas with, or jobs, stands in a table of those.
    labelled = [
        (curve, label)
        for curve, label in zip(curves, labels(curves), strict=True)
        if curve.points or not (curve.alone or curve.jobs)
    ]
    fastest = fastest_pieces(m for curve in curves for m in curve.measurements)
    for curve, label in labelled:
        report = sweep_report(curve, tolerance=found.tolerance(curve, label), slo=found.slo, fastest=fastest)
        yield f"{report}\n", None
    if labelled:
        yield f"{hanging(LEGEND, 0)}\n", None
    if read := sensors.legend(curves):
        yield f"{hanging(read, 0)}\n", None
    if any(map(sensors.step_rows, curves)):
        yield f"{hanging(sensors.STEP_LEGEND, 0)}\n", None
    others = (gpus_report(curves), interfaces_report(curves), job_report(found.jobs), sensors.energy_report(curves))
    for text in chain(replica_report(curves, found.shared), *others):
        yield f"{text}\n", None
    if found.judged:
        yield from verdict_lines(found.judged, strict=found.strict)


def heading(curve: Curve) -> Iterator[str]:
    """Lines on the measured subject, the hardware and the number of measurements."""
    spec, where = curve.spec, curve.environment
    if spec is None or where is None:
        yield f"{curve.subject}: nothing was measured"
        return
    if spec.interface == "endpoint":
        yield f"{curve.subject} at {spec.url}, endpoint interface"
        if first := curve.first:
            yield from (f"  {text}" for text in (*further(first), *without(first), *chunks(first)))
    else:
        vllm = "no vLLM" if spec.platform == "simulated" else f"vLLM {where.vllm or ABSENT}"
        dtype = next((r.dtype for r in curve.resolved if r.dtype), spec.dtype)
        several, title = spec.tensor_parallel_size, where.title
        place = f" on {title}" if several == 1 else f" on {several} x {title}"
        if several > 1 and spec.platform != "cuda":  # what is no device is not counted
            place = f", TP {several}, on {title}"
        yield f"{curve.subject}{place}"
        yield f"  {vllm}, {spec.interface} interface{front_ends(spec)}, {dtype}, load format {spec.load_format}"
    if curve.workload:
        yield hanging(f"  workload: {workload_text(curve.workload)}", 4)
    if load := curve.load:
        settled = f"{load.settle_lifetimes:g} lifetime{'' if load.settle_lifetimes == 1 else 's'} of a request"
        yield f"  load: closed loop, ramp-up {load.ramp_up}, window {load.window_s:g} s after a warm-up of {settled}"
    if spec.interface != "endpoint":
        capacity = ""
        if curve.kv_capacity is not None and curve.workload:
            capacity = f"; room for {curve.kv_capacity:,} requests of {curve.workload.longest:,} tokens"
        yield hanging(f"  engine: {_limits(spec, curve.resolved)}{capacity}", 4)
    yield f"  measured: {_amount(curve)}"


def workload_text(workload: WorkloadReference) -> str:
    """ "512/256 tokens, 1,024 requests, synthetic token ids, hash 0123456789ab" """
    spec = workload.spec
    fixed = spec.prompt_tokens is not None
    natural = f"natural lengths, {workload.mean_prompt_tokens:.0f}/{workload.mean_output_tokens:.0f} tokens in the mean"
    lengths = f"{spec.prompt_tokens}/{spec.output_tokens} tokens" if fixed else natural
    return f"{lengths}, {workload.requests:,} requests, {workload.source}, hash {workload.hash}"


def _limits(spec: EngineSpec, resolved: Sequence[Resolved]) -> str:
    """The engine's limits as the engines report them; several values where launches differ."""

    def each(name: str) -> str:
        values = {getattr(r, name) for r in resolved}
        return " or ".join(sorted(ABSENT if v is None else f"{v:,}" if isinstance(v, int) else str(v) for v in values))

    if not resolved:
        return f"max_num_seqs {spec.max_num_seqs:,} asked for"
    return (
        f"max_num_seqs {each('max_num_seqs')}, max_num_batched_tokens {each('max_num_batched_tokens')}, "
        f"KV {each('kv_blocks')} blocks x {each('block_size')} tokens, attention {each('attention_backend')}, "
        f"event loop {each('event_loop')}"
    )


def _amount(curve: Curve) -> str:
    """Points, repeats, launches, and hosts where known."""
    repeats = sorted({len(p.repeats) for p in curve.valid})
    each = "no valid repeat" if not repeats else f"{repeats[0]} to {counted(repeats[-1], 'repeat')} each"
    if len(repeats) == 1:
        each = f"{counted(repeats[0], 'repeat')} each"
    launches = counted(len({m.launch for m in curve.trusted}), "launch")
    on_hosts = f", {counted(known, 'host')}" if (known := hosts(curve)) else ""
    return f"{amount(curve)}, {each}, {launches}{on_hosts}"


def point_table(curve: Curve) -> str:
    """One row per point, valid or not."""
    return table(curve.points, point_columns(curve))


def point_columns(curve: Curve) -> tuple[Column[Point], ...]:
    """Columns for the points of a sweep."""
    gains = {gain.end: gain.value for gain in curve.gains()}
    front = {point.concurrency for point in curve.pareto_front()}
    return (
        Column("in\nflight", lambda p: str(p.concurrency)),
        Column("\nbatch", lambda p: figure(p.batch, 4), rank=5),
        Column("requests\n/s", lambda p: figure(p.requests_per_s, 4), rank=2),
        Column("tokens\n/s", lambda p: figure(p.output_tokens_per_s, 4)),
        Column("spread\n%", lambda p: hundredths(relative_range(p)), rank=8),
        Column("E2E s\nmean", lambda p: figure(p.e2e_s)),
        Column("E2E s\np50", lambda p: figure(p.e2e_p50_s), rank=9),
        Column("E2E s\np99", lambda p: figure(p.e2e_p99_s), rank=1),
        Column("ms/\ntoken", lambda p: milliseconds(p.normalized_latency_s), rank=10),
        Column("TTFT\nms", lambda p: milliseconds(p.ttft_s), rank=3),
        Column("TPOT\nms", lambda p: milliseconds(p.tpot_s), rank=3),
        Column("step\nms", lambda p: milliseconds(p.step_s), rank=7),
        Column("gain\n%", lambda p: hundredths(gains.get(p.concurrency), signed=True), rank=4),
        Column("roof-\nline %", lambda p: hundredths(p.roofline_fraction), rank=6),
        Column("\nPareto", lambda p: "*" if p.concurrency in front else "", "center", rank=5),
        Column("\nvalid", valid_cell, "left"),
    )


def remarks(curve: Curve) -> Iterator[str]:
    """Remarks on points that the table does not show, with reasons."""
    for reason in dict.fromkeys(why for _, why in curve.cut):
        loads = listed(concurrency for concurrency, why in curve.cut if why == reason)
        yield hanging(f"cut: {loads} in flight: {reason}", 2)
    if unneeded := remark(curve):
        yield hanging(unneeded, 2)
    if curve.missing:
        yield hanging(f"not measured, though planned: {listed(curve.missing)} in flight", 2)
    for point in curve.points:
        used = f"{len(point.repeats)} of {len(point.repeats) + point.left_out} measurements are used"
        yield from reasons(point, f"{point.concurrency} in flight", used)


def expectation(row: ClaimRow | None, *, strict: bool) -> Expected:
    """What is expected: that a claim holds, unless its row knows better. strict: always that it holds."""
    return row.expected if row is not None and not strict else "passes"


def outcome(verdict: Verdict, row: ClaimRow | None, *, strict: bool = False) -> Outcome:
    """Against what was expected; of either nothing is."""
    expected = expectation(row, strict=strict)
    if verdict.state is State.INCONCLUSIVE and expected != "either":
        return "inconclusive"
    return "as expected" if expected in (verdict.state.value, "either") else "unexpected"


def verdict_facts(verdict: Verdict, row: ClaimRow | None, *, strict: bool) -> dict[str, Any]:
    """A verdict for JSON, with what is expected and whether it is so."""
    expected = expectation(row, strict=strict)
    return {**facts(verdict), "expected": expected, "outcome": outcome(verdict, row, strict=strict)}


def verdict_lines(judged: Iterable[Judged], *, strict: bool = False) -> Iterator[tuple[str, Colour | None]]:
    """A line per judged claim, grouped by claim, and how many of each kind there are; each with its colour."""
    pairs = in_order_of_claims(judged)
    width = max((len(v.subject) for v, _ in pairs), default=0)
    for claim, group in groupby(pairs, key=lambda pair: pair[0].claim):
        statement = next((c.statement for c in CLAIMS if c.name == claim), "")
        yield f"{claim}: {statement}".rstrip(": "), None
        for verdict, row in group:
            words, why = (tell(verdict, row, strict=strict) for tell in (outcome_words, verdict_reason))
            line = hanging(f"  {words:<{STATES}}  {verdict.subject:<{width}}  {why}", 6 + STATES + width)
            yield line, COLOURS[outcome(verdict, row, strict=strict)]
    told = f"{counted(len(pairs), 'verdict')}: {tally(by_outcome(pairs, strict=strict))}"
    yield told if pairs else "no claim was judged", None


def outcome_words(verdict: Verdict, row: ClaimRow | None, *, strict: bool) -> str:
    """ "passes", "fails, as expected", "fails" where it may, "FAILS", "PASSES, UNEXPECTED" or "inconclusive" """
    fails = verdict.state is State.FAILS
    match outcome(verdict, row, strict=strict):
        case "as expected":
            return "fails, as expected" if fails and row and row.expected == "fails" else verdict.state.value
        case "unexpected":
            return "FAILS" if fails else "PASSES, UNEXPECTED"
    return "inconclusive"


def verdict_reason(verdict: Verdict, row: ClaimRow | None, *, strict: bool = False) -> str:
    """The reason of a verdict; of one that is not as expected with the evidence for what was."""
    if outcome(verdict, row, strict=strict) != "unexpected" or row is None or not row.evidence:
        return verdict.why
    expected = "does not know" if row.expected == "either" else f"expects that it {row.expected}"
    return f"{verdict.why}; the claims table {expected}: {row.evidence}"


def in_order_of_claims(judged: Iterable[Judged]) -> list[Judged]:
    """Verdicts as the claims table has their claims."""
    order = {claim.name: number for number, claim in enumerate(CLAIMS)}
    return sorted(judged, key=lambda pair: order.get(pair[0].claim, len(order)))


def by_outcome(judged: Iterable[Judged], *, strict: bool = False) -> dict[str, list[Verdict]]:
    """Verdicts by the words for their outcome: each is in one list, and of those behind EITHER nothing is expected."""
    either = "" if strict else EITHER
    kinds = (*PLURALS.values(), *(f"{EITHER}{PLURALS[state.value]}" for state in State))
    found: dict[str, list[Verdict]] = {kind: [] for kind in kinds}
    for verdict, row in judged:
        words = PLURALS[outcome_words(verdict, row, strict=strict)]
        found[f"{either}{words}" if row is not None and row.expected == "either" else words].append(verdict)
    return found


def tally(kinds: Mapping[str, Sequence[Verdict]]) -> str:
    """ "16 hold, 5 fail as expected; either expected: 2 fail" """
    counts = {words: f"{len(each)} {words.removeprefix(EITHER)}" for words, each in kinds.items() if each}
    expected = ", ".join(text for words, text in counts.items() if not words.startswith(EITHER))
    either = ", ".join(text for words, text in counts.items() if words.startswith(EITHER))
    return "; ".join(filter(None, (expected, either and f"{EITHER}{either}")))


COLUMNS: tuple[Column[AtBothInterfaces], ...] = (
    Column("in\nflight", lambda at: str(at.concurrency)),
    Column("tokens/s\nengine", lambda at: figure(at.engine.output_tokens_per_s, 4)),
    Column("tokens/s\nserver", lambda at: figure(at.server.output_tokens_per_s, 4)),
    Column("change\n%", lambda at: change(at.ratio)),
    Column("95 %\n", lambda at: change_interval(at.ratio), rank=1),
    Column("TTFT ms\nengine", lambda at: milliseconds(at.engine.ttft_s), rank=2),
    Column("TTFT ms\nserver", lambda at: milliseconds(at.server.ttft_s), rank=2),
    Column("TPOT ms\nengine", lambda at: milliseconds(at.engine.tpot_s), rank=3),
    Column("TPOT ms\nserver", lambda at: milliseconds(at.server.tpot_s), rank=3),
    Column("step ms\nengine", lambda at: milliseconds(at.engine.step_s), rank=5),
    Column("step ms\nserver", lambda at: milliseconds(at.server.step_s), rank=5),
    Column("prompt steps\n% engine", lambda at: hundredths(at.prompt_steps[0]), rank=6),
    Column("prompt steps\n% server", lambda at: hundredths(at.prompt_steps[1]), rank=6),
    Column("own cores\nengine", lambda at: figure(at.engine.own_cores), rank=4),
    Column("own cores\nserver", lambda at: figure(at.server.own_cores), rank=4),
)


def interfaces_report(curves: Sequence[Curve]) -> Iterator[str]:
    """A table for each model that was measured by both interfaces, and how to read it."""
    found = at_both_interfaces(curves)
    for each in found:
        server = each.server
        launches = " and ".join(counted(len(curve.resolved), "launch") for curve in (each.engine, server))
        through = f"{server.subject} through the server{front_ends(server.spec)} beside the engine"
        title = hanging(f"{through}: {served_on(server.environment)}, {launches}", 2)
        yield "\n".join([title, "", table(each.loads, COLUMNS)])
    if found:
        yield hanging(INTERFACES, 0)
