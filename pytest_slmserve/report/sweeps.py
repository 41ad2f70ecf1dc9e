"""Sections of sweeps: setup, points, sensors, goodput, findings and charts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
from statistics import fmean, median

from pytest_slmserve.analysis.claims.evidence import at_table_1, hit_rates, structured_pairs
from pytest_slmserve.analysis.estimates import grouped, mean_of_known, percent
from pytest_slmserve.analysis.metrics.gpu_figures import memory_in_use, probe_waiting, step_parts
from pytest_slmserve.analysis.points import Figure, Point, figure_named, output_rate, ratio
from pytest_slmserve.analysis.sweep import curve as sweep
from pytest_slmserve.analysis.sweep.batching import ATTAINMENT
from pytest_slmserve.analysis.sweep.curve import Curve, is_main_sweep, is_sweep, labels
from pytest_slmserve.analysis.sweep.plateau import DESCRIBES, fit, law_error
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.report.findings import Findings, reasons, served_on, valid_cell
from pytest_slmserve.report.loads import endpoint_notes, goodput_found, goodput_parts, goodput_rows, latency_charts
from pytest_slmserve.report.page import charts
from pytest_slmserve.report.section import Chart, Legend, Named, Part, Section, Table
from pytest_slmserve.report.text_table import (
    ABSENT,
    Column,
    between,
    changed,
    counted,
    figure,
    gib,
    hundredths,
    milliseconds,
)
from pytest_slmserve.schema.errors import TooFewPoints
from pytest_slmserve.schema.kv_cache import made_up_acceptance
from pytest_slmserve.schema.records import SIMULATED, hosts_of
from pytest_slmserve.schema.specs import WorkloadSpec

UNSETTLED = 0.05  # share by which Little's law may miss without a note
FULL = 0.95  # share of the KV blocks above which requests wait in the engine's queue
NO_FACTORS = (None, None)
FED = 0.75  # share of the sent requests; a request is in transit for a few percent of its time
SWEEP_LEGEND = (
    "batch: mean sequences of an engine step (concurrent requests, where a server does not report steps). tokens: of "
    "output. spread: (largest - smallest repeat) / mean. ms/token: E2E over output tokens. gain: of tokens/s since the "
    "row above, per doubling of the load. roofline: share of what the data sheet allows at this batch. -: not measured."
)
STEP_TITLE = "Where a step goes"
STEP_LEGEND = (
    "Parts of a step: weights, KV: to move the weights, and the keys and values, at the data sheet's rate. FLOPs: what "
    "arithmetic takes beyond both. other kernels: the further time in which a kernel ran. no kernel: the GPU waited "
    "for the host. Not known: what the host does then (schedule, sample, hand out) or beside a kernel, and which part "
    "of the kernels is attention."
)
COLUMN_LEGEND = {  # by the name of the column
    "speedup %": "acceptance: tokens that a step gave a sequence with a draft. speedup: more tokens/s than the same "
    "engine has without speculation.",
    "GPU util %": "GPU util: time in which any kernel ran, as NVML samples it.",
    "busy %": "busy: the same by the profiling counters.",
    "tokens /busy s": "tokens/busy s: output tokens per second in which a kernel ran, which is what the GPU does; "
    "the rest of a gain is the host's.",
    "SM % mean": "SM: share of the SMs with work.",
    "warp % mean": "warp: warps resident, of those that fit (SM occupancy).",
    "DRAM %": "DRAM, tensor: share of the time in which they were active.",
    "mJ/token": "mJ/token: energy of an output token.",
    "cap %": "cap: time in which the power limit held the clock down.",
    "own cores": "own cores: CPU time of this run's processes.",
    "host speed %": "host speed: of its cores, relative to the fastest seen beside any window, by a fixed piece of "
    "Python.",
    "host wait %": "host wait: share of the time of that piece in which it had no core.",
    "rest %": "rest: unexplained share of a step, which neither its bytes nor its FLOPs fill at the data sheet.",
    "bound": "bound: the resource nearest to its peak, by the counters.",
}


def sweep_sections(found: Findings) -> Iterator[Section | Legend]:
    """Yield a section for each sweep, then legends.

    Curves that have only jobs, or only engines next to replicas, are in other tables.
    """
    shown = [(curve, label) for curve, label in found.labelled if curve.points or not (curve.alone or curve.jobs)]
    heads = set[str]()
    for curve, label in shown:
        yield (section := sweep_section(curve, label, found))
        for part in section.parts:
            if isinstance(part, Table) and part.rows:
                heads.update((part.caption.partition(",")[0], *part.cells.heads))
    of_columns = " ".join(text for head, text in COLUMN_LEGEND.items() if head in heads)
    legends = (SWEEP_LEGEND if shown else "", of_columns, STEP_LEGEND if STEP_TITLE in heads else "")
    yield from map(Legend, filter(None, legends))


def sweep_section(curve: Curve, label: str, found: Findings) -> Section:
    tolerance = found.tolerance(curve, label)
    title, *head = [curve.subject] if curve.axes.knob else heading(curve)
    parts: list[Part] = [*head, Table(curve.points, point_columns(curve), caption=f"Points of {label}")]
    parts += [*remarks(curve), sensor_table(curve, label, found)]
    parts.append(Table(step_rows(curve), STEP, caption=f"{STEP_TITLE}, {label}"))
    parts += goodput_parts(goodput_rows(curve, found.slo), found.slo) if found.slo else []
    parts.append(Named(list(findings(curve, tolerance, found.b_half))))
    unit = curve.workload.unit if curve.workload else ""
    return Section(title, parts, name=label, charts=partial(sweep_charts, curve, tolerance), unit=unit)


def heading(curve: Curve) -> Iterator[str]:
    """Yield lines on model, hardware, workload, load, engine and measurements."""

    def each(name: str) -> str:  # several values if launches differ
        values = {getattr(r, name) for r in curve.resolved}
        return " or ".join(sorted(ABSENT if v is None else f"{v:,}" if isinstance(v, int) else str(v) for v in values))

    spec, where = curve.spec, curve.environment
    if spec is None or where is None:
        yield f"{curve.subject}: nothing was measured"
        return
    if spec.interface == "endpoint":
        yield f"{curve.subject} at {spec.url}, endpoint interface"
        if curve.first:
            yield from (f"  {text}" for text in endpoint_notes(curve.first))
    else:
        several = spec.tensor_parallel_size
        place = f" on {where.title}" if several == 1 else f" on {several} x {where.title}"
        if several > 1 and spec.platform != "cuda":  # a CPU is not counted
            place = f", TP {several}, on {where.title}"
        yield f"{curve.subject}{place}"
        vllm = "no vLLM" if spec.platform == "simulated" else f"vLLM {where.vllm or ABSENT}"
        dtype = next((r.dtype for r in curve.resolved if r.dtype), spec.dtype)
        yield f"  {vllm}, {spec.interface} interface{sweep.front_ends(spec)}, {dtype}, load format {spec.load_format}"
    if requests := curve.workload:
        lengths = f"{requests.spec.prompt_tokens}/{requests.spec.output_tokens} tokens"
        if requests.kind != "generate":
            lengths = f"{requests.kind}, {requests.each} in the mean"
        elif requests.spec.prompt_tokens is None:
            mean = f"{requests.mean_prompt_tokens:.0f}/{requests.mean_output_tokens:.0f} tokens in the mean"
            lengths = f"natural lengths, {mean}"
        yield f"  workload: {lengths}, {requests.requests:,} requests, {requests.source}, hash {requests.hash}"
    if load := curve.load:
        settled = f"{load.settle_lifetimes:g} lifetime{'' if load.settle_lifetimes == 1 else 's'} of a request"
        yield f"  load: closed loop, ramp-up {load.ramp_up}, window {load.window_s:g} s after a warm-up of {settled}"
    if spec.interface != "endpoint":
        limits = f"max_num_seqs {spec.max_num_seqs:,} asked for"
        if curve.resolved:
            limits = (
                f"max_num_seqs {each('max_num_seqs')}, max_num_batched_tokens {each('max_num_batched_tokens')}, "
                f"KV {each('kv_blocks')} blocks x {each('block_size')} tokens, attention {each('attention_backend')}, "
                f"event loop {each('event_loop')}"
            )
        capacity = ""
        if curve.kv_capacity is not None and curve.workload:
            capacity = f"; room for {curve.kv_capacity:,} requests of {curve.workload.longest:,} tokens"
        yield f"  engine: {limits}{capacity}"
    repeats = sorted({len(p.repeats) for p in curve.valid})
    each_point = "no valid repeat" if not repeats else f"{repeats[0]} to {counted(repeats[-1], 'repeat')} each"
    if len(repeats) == 1:
        each_point = f"{counted(repeats[0], 'repeat')} each"
    launches = counted(len({m.launch for m in curve.trusted}), "launch")
    on_hosts = f", {counted(known, 'host')}" if (known := len(hosts_of(curve.trusted) - {None})) else ""
    points = counted(len(curve.points), "point")
    if curve.adaptive:
        unneeded = f"{counted(len(curve.unneeded), 'planned load')} not needed"
        points += f" (adaptive sweep, {'not at its end' if curve.missing else unneeded})"
    yield f"  measured: {points}, {each_point}, {launches}{on_hosts}"


def relative_range(point: Point) -> float | None:
    """Return the range of output tokens/s of the repeats over their mean; None for one repeat."""
    if len(point.repeats) < 2:
        return None
    return (max(point.repeats) - min(point.repeats)) / fmean(point.repeats)


def point_columns(curve: Curve) -> tuple[Column[Point], ...]:
    gains, axes, workload = {gain.end: gain.value for gain in curve.gains()}, curve.axes, curve.workload
    front = {point.concurrency for point in curve.pareto_front()}
    heads, scale = ("concur-\nrency", "tokens\n/s", "E2E s\nmean"), 1.0
    if axes.knob:  # names of the columns of external results, with the latency in ms
        unitless = axes.latency.removesuffix("_ms").removesuffix("_s")
        heads, scale = (f"\n{axes.knob}", f"\n{axes.throughput}", f"\n{unitless} ms"), 1e3
    requests: Column[Point] = Column("requests\n/s", lambda p: figure(p.requests_per_s, 4), rank=2)
    if workload and workload.kind != "generate":  # each request has one output
        each = workload.mean_prompt_tokens
        requests = Column("prompt\ntokens/s", lambda p: figure(p.requests_per_s and p.requests_per_s * each), rank=2)
    accepted: list[Column[Point]] = []
    if any(p.acceptance_length is not None for p in curve.points):
        accepted.append(Column("accept-\nance", lambda p: figure(p.acceptance_length), rank=1))
    if speedups := {of.concurrency: factor for of, _, factor in curve.speedups}:
        accepted.append(Column("speed-\nup %", lambda p: changed(speedups.get(p.concurrency))[0]))
        accepted.append(Column("95%\n", lambda p: changed(speedups.get(p.concurrency))[1], "left", rank=1))
    return (
        Column(heads[0], lambda p: str(p.concurrency)),
        Column("\nbatch", lambda p: figure(p.batch, 4), rank=5),
        *accepted,
        requests,
        Column(heads[1], lambda p: figure(p.output_tokens_per_s, 4)),
        Column("spread\n%", lambda p: hundredths(relative_range(p)), rank=8),
        Column(heads[2], lambda p: figure(None if p.e2e_s is None else scale * p.e2e_s)),
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


def sensor_table(curve: Curve, label: str, found: Findings) -> Table:
    """Return a row for each point with sensor values."""

    def share(head: str, name: str, rank: int) -> Column[Point]:
        return Column(head, lambda p: hundredths(getattr(p, name)), rank=rank)

    rows = [p for p in curve.points if {p.gpu_util, p.sm_active, p.power_w, p.own_cores} != {None}]
    factors = curve.factors()
    speeds = {p.concurrency: mean_of_known(map(found.host_speeds.get, p.records)) for p in rows}
    columns: tuple[Column[Point], ...] = (
        Column("concur-\nrency", lambda p: str(p.concurrency)),
        share("GPU\nutil %", "gpu_util", 7),
        share("busy\n%", "engine_active", 3),
        Column("tokens\n/busy s", lambda p: figure(p.tokens_per_busy_s, 4), rank=1),
        Column("gain %\nGPU", lambda p: hundredths(factors.get(p.concurrency, NO_FACTORS)[0], signed=True), rank=2),
        Column("gain %\nhost", lambda p: hundredths(factors.get(p.concurrency, NO_FACTORS)[1], signed=True), rank=2),
        share("SM %\nmean", "sm_active", 1),
        share("SM %\nmax", "sm_active_max", 9),
        share("warp %\nmean", "sm_occupancy", 6),
        share("warp %\nmax", "sm_occupancy_max", 10),
        share("DRAM\n%", "dram_active", 1),
        share("tensor\n%", "tensor_active", 1),
        Column("power\nW", lambda p: figure(p.power_w), rank=2),
        Column("mJ/\ntoken", lambda p: milliseconds(p.energy_per_token_j)),
        Column("clock\nMHz", lambda p: figure(p.sm_clock_hz and p.sm_clock_hz / 1e6, 4), rank=8),
        share("cap\n%", "power_capped", 4),
        Column("own\ncores", lambda p: figure(p.own_cores), rank=5),
        Column("host\nspeed %", lambda p: hundredths(speeds[p.concurrency]), rank=4),
        Column("host\nwait %", lambda p: hundredths(probe_waiting(p.probe_s, p.probe_cpu_s)), rank=8),
        share("rest\n%", "unexplained", 5),
        Column("\nbound", lambda p: p.bound or ABSENT, "left", rank=3),
        Column("\nsensors", lambda p: "questionable" if p.degraded else "ok" if p.valid else ABSENT, "left"),
    )
    return Table(rows, columns, caption=f"Sensors of {label}")


StepRow = tuple[Point, Mapping[str, float]]


def _part(head: str, field: str) -> Column[StepRow]:
    """Return the column of a part of a step in percent; parts of 0 are empty."""
    return Column(head, lambda row: hundredths(share) if (share := row[1].get(field)) else "")


STEP_PARTS = {  # by the names in `StepTime.parts`, in the order of a bar, with the color in it
    "weights": (_part("weights\n%", "weights"), charts.BLUE),
    "kv": (_part("KV\n%", "kv"), charts.SKY),
    "flops": (_part("FLOPs\n%", "flops"), charts.RED),
    "kernels": (_part("other\nkernels %", "kernels"), charts.YELLOW),
    "idle": (_part("no\nkernel %", "idle"), charts.GREY),
    "unsplit": (_part("kernels and\nhost %", "unsplit"), charts.PINK),
}
STEP: tuple[Column[StepRow], ...] = (
    Column("concur-\nrency", lambda row: str(row[0].concurrency)),
    Column("step\nms", lambda row: milliseconds(row[0].step_s)),
    *(column for column, _ in STEP_PARTS.values()),
)


def step_rows(curve: Curve) -> list[StepRow]:
    each = ((point, step_parts([m for group in point.used for m in group])) for point in curve.valid)
    return [(point, parts) for point, parts in each if parts]


def step_chart(rows: Sequence[StepRow], subject: str) -> charts.Spec | None:
    """Return stacked bars of the mean step of each load in percent; None without rows."""
    bars: charts.Values = []
    for point, parts in rows:
        for field, (column, _) in STEP_PARTS.items():
            if text := column.cell((point, parts)):
                bar = {"subject": f"concurrency {point.concurrency}", "series": column.name.removesuffix(" %")}
                words = f"{text}% of {milliseconds(point.step_s)} ms"
                bars.append(bar | {"size": 100 * parts[field], "shown": words})
    looks = {column.name.removesuffix(" %"): color for column, color in STEP_PARTS.values()}
    return charts.stacked_bars(bars, looks, "% of the step", f"parts of a step over {charts.CONCURRENCY}, {subject}")


def remarks(curve: Curve) -> Iterator[str]:
    """Yield lines on missing loads, and on points that are not fully valid."""
    if curve.spec and (made_up := made_up_acceptance(curve.spec)):
        yield made_up
    for reason, cut in grouped(curve.cut, itemgetter(1)).items():
        yield f"cut: {curve.axes.at(*(concurrency for concurrency, _ in cut))}: {reason}"
    if predicted := ", ".join(f"{figure(p.tokens_per_s.value)} at {p.concurrency}" for p in curve.predictions):
        yield f"not measured, predicted: tokens/s {predicted} concurrent requests; {_trust(curve)}"
    elif curve.unneeded:
        yield f"not measured, not needed: {curve.axes.at(*curve.unneeded)}; {_trust(curve)}"
    if curve.missing:
        yield f"not measured, though planned: {curve.axes.at(*curve.missing)}"
    for point in curve.points:
        used = f"{len(point.repeats)} of {len(point.repeats) + point.left_out} measurements are used"
        yield from reasons(point, curve.axes.at(point.concurrency), used)


def skip_note(curve: Curve, concurrency: int) -> str:
    """Return why an adaptive sweep skipped a load, and the throughput predicted there."""
    if concurrency not in curve.unneeded:
        return f"the adaptive sweep ended early: {curve.axes.at(*curve.missing)} was next"
    text = "not needed: the adaptive sweep found the plateau without it"
    found = next((p.tokens_per_s for p in curve.predictions if p.concurrency == concurrency), None)
    if found is None:
        return f"{text}; {_trust(curve)}"
    seen = f"{figure(found.value)} tokens/s ({figure(found.low)} to {figure(found.high)})"
    return f"{text}; predicted: {seen}; {_trust(curve)}"


def _trust(curve: Curve) -> str:
    if (missed := law_error(curve.points)) is None:
        return "too few points for a prediction"
    share, where = missed
    off = "told the neighbours of a measured load, the saturation model misses it by at most"
    off = f"{off} {percent(share)} (at {where})"
    return f"no prediction: {off}" if share > DESCRIBES else off


def findings(curve: Curve, tolerance: float, b_half: float | None = None) -> Iterator[tuple[str, str]]:
    """Yield names of findings with a sentence each.

    Args:
        tolerance: gain per doubling below which throughput is flat.
        b_half: half-saturation in sequences; None to fit it.
    """
    yield from _throughput_findings(curve, tolerance)
    yield from _law_findings(curve, b_half)
    if curve.axes.knob is None:  # because external results have no other data
        yield from _own_findings(curve)


def _throughput_findings(curve: Curve, tolerance: float) -> Iterator[tuple[str, str]]:
    gains, flat, axes, valid = curve.gains(), curve.plateau(tolerance), curve.axes, curve.valid
    if gains:
        reason = sweep.obstacle(curve)
        certain = "" if reason is None else f"; not certain: {reason}"
        dip = ""  # a flat stretch after which throughput rises again
        for low, again in pairwise(gains):
            if low.value < tolerance <= again.value:
                flat_text = f"; it is flat from {low.start} to {low.end} ({percent(low.value)}), "
                dip = f"{flat_text}but gains {percent(again.value)} again from {again.start} to {again.end}"
                break
        if flat.value is None:
            chance = "" if not flat.known or flat.low is None else f", so it may be from {axes.at(flat.low)} on"
            last = gains[-1]
            gain = f"still gains {percent(last.value)}{between(last, 100, '%')}"
            said = f"not reached: the last doubling ({last.start} to {last.end}) {gain}{chance}{dip}{certain}"
            if last.end > 2 * last.start:
                mean = f"a doubling between {last.start} and {last.end} {gain} in the mean{chance}{dip}{certain}"
                said = f"perhaps not reached: {mean}"
        else:
            high = "not reached" if flat.high is None else flat.high
            interval = f" (95%: {flat.low} to {high})" if flat.known else ""
            past = f"past it a doubling gains less than {percent(tolerance)}"
            said = f"from {axes.at(flat.value)}{interval}: {past}{dip}{certain}"
        yield "plateau", said
    if valid:
        best, last_point = max(valid, key=lambda p: fmean(p.repeats)), valid[-1]
        text = f"{figure(fmean(best.repeats), 4)} at {axes.at(best.concurrency)}"
        if best is last_point:
            text += f", the largest load {'that fits' if curve.cut else 'measured: throughput may still rise'}"
        else:
            less = 1 - fmean(last_point.repeats) / fmean(best.repeats)
            falls = f"has {percent(less)} less" if less > sweep.MARGIN else "has about the same"
            text += f"; {axes.at(last_point.concurrency)} {falls}"
        yield f"most {axes.throughput}", text
    if len(valid) > 1:
        front = [point.concurrency for point in curve.pareto_front()]
        which = "all points" if len(front) == len(valid) else axes.at(*front)
        yield "Pareto-optimal", f"{which} (from the means of {axes.throughput} and {axes.latency}, ignoring noise)"


def _law_findings(curve: Curve, b_half: float | None) -> Iterator[tuple[str, str]]:
    work, peaks, ours = curve.work, curve.peaks, curve.axes.knob is None
    try:
        law = fit(curve.points, b_half)
    except TooFewPoints:
        law = None
    if law:
        errors = f"off by {percent(law.error_mean)} in the mean, {percent(law.error_max)} at most"
        text = f"T_inf {figure(law.t_inf.value)} {curve.axes.throughput}, b_half {figure(law.b_half.value)} sequences"
        text = f"T(B) = T_inf B/(B + b_half): {text}{between(law.b_half)}; {errors}"
        if not law.describes:
            text = f"T(B) = T_inf B/(B + b_half) does not describe this curve: at its best {errors}"
        elif not law.identified:
            text = f"not identified: the points fit a b_half below 0, which cannot be; {errors}"
        yield "saturation model", text
    if law and law.describes and law.identified and ours:
        seen = f"{milliseconds(law.fixed_s.value)} ms of every step fitted{between(law.fixed_s, 1e3)}"
        shapes = f"b_half from shapes is {figure(work.b_half)} sequences" if work and curve.decodes else ""
        if work and peaks:
            reading = work.weight_bytes / peaks.bytes_per_s
            rate = f"{figure(peaks.bytes_per_s / 1e9, 4)} GB/s"
            seen = f"{seen}, {milliseconds(reading)} ms to read the weights at {rate}{shapes and f' ({shapes})'}"
            more, low = law.fixed_s.value - reading, law.fixed_s.low
            if more <= 0 or (low is not None and low <= reading):
                yield "fixed part", f"{seen}: no time is left for the host that this fit could tell from noise"
            else:
                rest = "the host, the launching of kernels, and memory below its data sheet"
                yield "fixed part", f"{seen}: the other {milliseconds(more)} ms is {rest}"
        else:
            yield "fixed part", "; ".join(filter(None, (seen, shapes)))
    shares = [(p.roofline_fraction, p.concurrency) for p in curve.valid if p.roofline_fraction is not None]
    if shares and ours:
        yield (
            "roofline",
            f"at most {percent(max(shares)[0])} of what the data sheet allows, at concurrency {max(shares)[1]}",
        )
    if work and peaks and ours and curve.decodes:
        bound = "compute" if work.intensity > peaks.ridge else "memory"
        tends = f"decoding tends to {figure(work.intensity)} FLOP/byte as the batch grows"
        yield (
            "regime",
            f"{bound}-bound by the model configuration: {tends}, the ridge of {peaks.family} is {figure(peaks.ridge)}",
        )


def _own_findings(curve: Curve) -> Iterator[tuple[str, str]]:
    # If the largest load has no counters, small loads would mislead.
    decoding = [p for p in curve.valid if p.decode_dram is not None and p.decode_tensor is not None]
    if decoding and decoding[-1] is curve.valid[-1]:
        columns = [[hundredths(getattr(p, name)) for p in decoding] for name in ("decode_dram", "decode_tensor")]
        alike = len(decoding) > 1 and all(len(set(column)) == 1 for column in columns)
        dram, tensor = (column[0] if alike else ", ".join(column) for column in columns)
        loads = "every concurrency" if alike else curve.axes.at(*(p.concurrency for p in decoding))
        active = f"DRAM is active {dram}% of the time, the tensor cores {tensor}%"
        yield "decoding", f"while no prompt is processed, {active}, at {loads}"
    seen = [(p.little, p.concurrency) for p in curve.valid if p.little is not None]
    worst, where = max(seen, key=lambda pair: abs(pair[0]), default=(0.0, 0))
    if percent(abs(worst)) != percent(0.0):  # else the shown digits do not differ
        apart = f"at most {percent(abs(worst))} apart, at concurrency {where}"
        yield "Little's law", f"requests' own intervals and step trace {apart}"
    # E2E covers a whole request: while a load rises, it is the E2E of a smaller load.
    ratios = [
        (p.requests_per_s * p.e2e_s / p.batch - 1, p.concurrency)
        for p in curve.valid
        if p.requests_per_s is not None and p.e2e_s is not None and p.batch
    ]
    off, where = min(ratios, default=(0.0, 0))
    if off <= -UNSETTLED:
        settled = "" if curve.load is None else f" (the load had settled for {curve.load.settle_lifetimes:g} lifetimes)"
        yield (
            "latency",
            f"requests/s x mean E2E is up to {percent(-off)} less than the batch (at concurrency {where}): requests "
            "that ended in the window were sent under a smaller load, so their E2E and TTFT are too low"
            f"{settled}",
        )
    if memory := memory_in_use(group for point in curve.valid for group in point.used):
        (engine,) = memory.engines
        left = f"other and unused {gib(memory.left_bytes)}"
        if memory.used_bytes is not None:
            left = f"other {gib(memory.other_bytes)} at most, free {gib(memory.left_bytes)}"
        parts = f"weights {gib(engine.weight_bytes)}, KV cache {gib(engine.kv_bytes)}, {left}"
        yield "memory", f"{parts}, of {gib(memory.total_bytes)} GiB"
    if curve.spec and curve.spec.interface == "server":
        room = curve.spec.max_num_seqs
        held = [(p.batch, p.concurrency) for p in curve.valid if p.batch is not None and (p.kv_usage or 0.0) < FULL]
        batch, sent = min(held, key=lambda pair: pair[0] / min(pair[1], room), default=(1.0, 1))
        if batch <= FED * min(sent, room):
            yield (
                "front end",
                f"at concurrency {sent} the engine holds {figure(batch, 3)} in the mean, though it has room: the "
                "others are on their way through the server's one front end; --slm-engine-arg api_server_count=4 "
                "starts several",
            )
    ranges = [(share, p.concurrency) for p in curve.valid if (share := relative_range(p)) is not None]
    if ranges:
        worst, where = max(ranges)
        middle = median(share for share, _ in ranges)
        text = f"differ by {percent(middle)} in the median, {percent(worst)} at most (at concurrency {where})"
        several = len(hosts_of(curve.trusted) - {None})
        more = f"; {counted(several, 'host')} took part, whose difference is in it" if several > 1 else ""
        yield "repeats", f"{text}{more}"


THROUGHPUT_NOTE = (
    "Whiskers: 95% interval. Shaded: the plateau. Thin line: the fitted model. Dashed: the roofline, and loads that "
    "are predicted. Hollow: questionable, or predicted."
)
BOTH_RATES_NOTE = " Where both rates part, the GPU waits for its host."


def sweep_charts(curve: Curve, tolerance: float) -> Iterator[Chart]:
    """Yield charts over the load, quantiles of latencies, and the course of one window."""
    if not curve.valid:
        return
    flat = curve.plateau(tolerance).value if is_main_sweep(curve) or curve.axes.knob else None
    throughput = charts.throughputs([(curve.subject, curve)], flat)
    if curve.axes.knob:
        yield Chart(f"{curve.axes.throughput} over the load", throughput)
        return
    both = any(p.tokens_per_busy_s for p in curve.valid)
    yield Chart("Throughput over load", throughput, f"{THROUGHPUT_NOTE}{BOTH_RATES_NOTE if both else ''}")
    yield from charts.load_charts(curve)
    yield Chart(STEP_TITLE, step_chart(step_rows(curve), curve.subject), STEP_LEGEND)
    yield from latency_charts({p.concurrency: [m for group in p.used for m in group] for p in curve.valid})
    largest = curve.valid[-1]
    if largest.used:
        yield from charts.timeline(largest.used[-1][0], f"One window at concurrency {largest.concurrency}")


ENERGY: tuple[Column[tuple[str, Point]], ...] = (
    Column("model", lambda row: row[0], "left"),
    Column("concurrency", lambda row: str(row[1].concurrency)),
    Column("tokens/s", lambda row: figure(row[1].output_tokens_per_s, 4)),
    Column("power W", lambda row: figure(row[1].power_w)),
    Column("J/token", lambda row: figure(row[1].energy_per_token_j)),
)


def energy_sections(found: Findings) -> Iterator[Section]:
    """Yield the energy per output token at the largest batches of table 1 (arXiv:2404.03353).

    Each power limit has a section, because different limits are not comparable.
    """
    shown = [(label, point) for curve, label in found.labelled if (point := at_table_1(curve))]
    for limit, rows in grouped(shown, lambda row: row[1].power_limit_w).items():
        under = "an unknown power limit" if limit is None else f"a power limit of {figure(limit)} W"
        title = f"Energy per output token at the largest batch of arXiv:2404.03353, table 1, under {under}"
        yield Section(title, [Table(rows, ENERGY, caption=title, always=len(ENERGY))])


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A point that is compared with the first under the same load.

    Attributes:
        among: points under the same load.
        rate: share of the prompt tokens that came from the prefix cache.
    """

    point: Point
    among: Sequence[Point]
    rate: float | None = None

    @property
    def requests(self) -> WorkloadSpec:
        return self.point.used[0][0].workload.spec

    def change(self, what: Figure) -> tuple[str, str]:
        """Return the cells of the change in a figure and of its interval."""
        first, *others = self.among
        return changed(None if self.point is first else ratio(self.point, first, self.among, what, len(others)))


def change_columns(what: Figure, name: str = "") -> tuple[Column[ComparedRow], Column[ComparedRow]]:
    change: Column[ComparedRow] = Column(f"change\n% {name}".rstrip(), lambda row: row.change(what)[0])
    return change, Column(f"95%\n{name}", lambda row: row.change(what)[1], "left", rank=1)


HIT_LEGEND = (
    "share: of each prompt, that others of its group begin with too. turns: of a conversation. hit rate: of the prompt "
    "tokens, those from the prefix cache, which keeps whole blocks. tokens: of output. changes: over the lowest hit "
    "rate under this load."
)
FORMAT_LEGEND = (
    "changes: over free text under the same load, by the same engine. tokens: of output. With dummy weights the "
    "tokenizer is made too, with as many words as the model's."
)
HITS: tuple[Column[ComparedRow], ...] = (
    Column("concur-\nrency", lambda row: str(row.point.concurrency)),
    Column("share\n%", lambda row: hundredths(row.requests.prefix_share)),
    Column("\nturns", lambda row: str(row.requests.turns) if row.requests.turns > 1 else ABSENT, rank=1),
    Column("hit rate\n%", lambda row: hundredths(row.rate)),
    Column("tokens\n/s", lambda row: figure(row.point.output_tokens_per_s, 4)),
    *change_columns(output_rate),
    Column("TTFT\nms", lambda row: milliseconds(row.point.ttft_s)),
    *change_columns(figure_named("ttft_s", 0.0), "TTFT"),
    Column("E2E s\nmean", lambda row: figure(row.point.e2e_s), rank=2),
    Column("\nvalid", lambda row: valid_cell(row.point), "left"),
)
FORMATS: tuple[Column[ComparedRow], ...] = (
    HITS[0],
    Column("\noutput", lambda row: row.requests.output, "left"),
    *HITS[4:10],
    Column("TPOT\nms", lambda row: milliseconds(row.point.tpot_s)),
    *change_columns(figure_named("tpot_s", 0.0), "TPOT"),
    HITS[-1],
)


def hit_rate_sections(curves: Sequence[Curve]) -> Iterator[Section | Legend]:
    """Yield each model with several hit rates of its prefix cache, then a legend."""
    known = [(curve, found) for curve in curves if (found := hit_rates(curve))]
    for curve, found in known:
        rows = [ComparedRow(at.point, [at.point for at in each], at.rate) for each in found.values() for at in each]
        title = f"{curve.subject} over the hit rate of its prefix cache: {served_on(curve.environment)}"
        yield Section(title, [Table(rows, HITS, caption=title)])
    if known:
        yield Legend(HIT_LEGEND)


def format_sections(curves: Sequence[Curve]) -> Iterator[Section | Legend]:
    """Yield each model with structured output next to free text, then a legend."""
    known = [(curve, pairs) for curve in curves if (pairs := structured_pairs(curve))]
    for curve, pairs in known:
        groups = ([free, *(p for p, _ in found)] for free, found in grouped(pairs, itemgetter(1)).items())
        rows = [ComparedRow(point, group) for group in groups for point in group]
        title = f"{curve.subject} with structured output against free text: {served_on(curve.environment)}"
        yield Section(title, [Table(rows, FORMATS, caption=title)])
    if known:
        yield Legend(FORMAT_LEGEND)


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A sweep by one point.

    Attributes:
        point: where the plateau begins, or with the highest throughput; None if none is valid.
        good: highest load within the SLO.
    """

    label: str
    point: Point | None
    plateau: str
    good: str


ROWS: tuple[Column[ModelRow], ...] = (
    Column("\nmodel", lambda row: row.label, "left"),
    Column("\nplateau", lambda row: row.plateau, "left"),
    Column("concur-\nrency", lambda row: str(row.point.concurrency) if row.point else ""),
    Column("tokens\n/s", lambda row: figure(row.point.output_tokens_per_s if row.point else None, 4)),
    Column("E2E s\nmean", lambda row: figure(row.point.e2e_s if row.point else None)),
    Column("E2E s\np99", lambda row: figure(row.point.e2e_p99_s if row.point else None), rank=2),
    Column("TTFT\nms", lambda row: milliseconds(row.point.ttft_s if row.point else None), rank=1),
    Column("TPOT\nms", lambda row: milliseconds(row.point.tpot_s if row.point else None), rank=1),
    Column("SLO met\nup to", lambda row: row.good),
    Column("J/\ntoken", lambda row: figure(row.point.energy_per_token_j if row.point else None)),
)


def overview_tables(found: Findings) -> list[Table]:
    """Return a table for each device with a row for each main sweep, or for other curves of models without one."""

    def model(curve: Curve) -> str:
        return curve.spec.model if curve.spec else curve.subject

    def place(pair: tuple[Curve, str]) -> str:
        where = pair[0].environment
        return SIMULATED if where and where.platform == "simulated" else served_on(where)

    measured = [curve for curve in found.curves if curve.points]
    swept = {model(curve) for curve in measured if is_main_sweep(curve)}
    shown = [curve for curve in measured if is_main_sweep(curve) or model(curve) not in swept]
    bounds = f"; SLO {found.slo} of {percent(ATTAINMENT)} of the requests" if found.slo else ""
    return [
        Table([_model_row(curve, label, found) for curve, label in group], ROWS, caption=f"{name}{bounds}")
        for name, group in grouped(zip(shown, labels(shown)), place).items()
    ]


def _model_row(curve: Curve, label: str, found: Findings) -> ModelRow:
    tolerance = found.tolerance(curve, label)
    flat = curve.plateau(tolerance).value
    point = max(curve.valid, key=lambda p: fmean(p.repeats), default=None)
    plateau = ""
    if is_sweep(curve) and len(curve.valid) > 1:
        unsure = sweep.obstacle(curve) or curve.pareto_plateau(tolerance).state is State.INCONCLUSIVE
        plateau = f"past {curve.valid[-1].concurrency}" if flat is None else f"from {flat}"
        plateau += "?" if unsure else ""
        point = next((p for p in curve.valid if p.concurrency == flat), point)
    # "64", "none", or ">=512" if a larger load may be within the SLO, too.
    highest = goodput_found(goodput_rows(curve, found.slo))[1] if found.slo else None
    good = ""
    if highest:
        above, unknown = "" if highest.above else ">=", "?" if highest.unknown else ""
        good = "none" if highest.load is None else f"{above}{highest.load:g}{unknown}"
    return ModelRow(label, point, plateau, good)
