"""Findings of a sweep, one line each: plateau, Pareto front, saturation law, roofline, and how far to trust it. Notes
on loads that an adaptive sweep did not measure: the reason, and the saturation law's prediction."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median

from pytest_slmserve.analysis.device.gpu_figures import memory_in_use
from pytest_slmserve.analysis.metrics.roofline import Peaks, Work, regime
from pytest_slmserve.analysis.metrics.validity import CheckResult
from pytest_slmserve.analysis.points import JobPoint, Point, ReplicaPoint
from pytest_slmserve.analysis.stats.estimates import grouped, percent
from pytest_slmserve.analysis.sweep.adaptive import law_error
from pytest_slmserve.analysis.sweep.curve import MARGIN, Curve, obstacle, peaks_of_curve, work_of_curve
from pytest_slmserve.analysis.sweep.gains import DESCRIBES, Fit, Gain, fit, fixed_s_from_shapes
from pytest_slmserve.report.text_table import between, counted, figure, gib, hanging, hundredths, listed, milliseconds
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import TooFewPoints
from pytest_slmserve.schema.records import hosts_of

UNSETTLED = 0.05  # share by which Little's law may miss before a reader is told
FULL = 0.95  # of the KV blocks: from there on requests wait in the engine's own queue
FED = 0.75  # of what was sent; a request's way in and out takes a few per cent of its life


def served_on(where: Environment | None) -> str:
    """The device, and the release of vLLM."""
    device = where and (where.url or where.gpu_name or where.cpu or where.platform)
    vllm = f", vLLM {where.vllm}" if where and where.vllm else ""
    return f"{device or 'unknown device'}{vllm}"


def hosts(curve: Curve) -> int:
    """Number of known hosts that the valid points were measured on, 0 where none was noted."""
    return len(hosts_of(curve.trusted) - {None})


def relative_range(point: Point) -> float | None:
    """Largest less smallest of the repeats' output tokens/s, over their mean; None for a single one."""
    if len(point.repeats) < 2:
        return None
    return (max(point.repeats) - min(point.repeats)) / fmean(point.repeats)


def findings(curve: Curve, tolerance: float, b_half: float | None = None) -> Iterator[tuple[str, str]]:
    """Pairs of what is looked at and what was found; nothing on what is not there. tolerance: gain per doubling below
    which throughput is flat. b_half: half-saturation where it is known. Of external results there is no more than their
    points."""
    text, law = _law(curve, b_half)
    work, peaks = work_of_curve(curve), peaks_of_curve(curve)
    found = {
        "plateau": _plateau(curve, tolerance),
        f"most {curve.axes.throughput}": _best(curve),
        "Pareto-optimal": _front(curve),
        "saturation law": text,
    }
    if curve.axes.knob is None:
        found |= {
            "fixed part": _fixed_part(law, work, peaks) if law else "",
            "roofline": _roofline(curve),
            "regime": _regime(work, peaks) if work and peaks else "",
            "decoding": _decoding(curve),
            "Little's law": _little(curve),
            "latency": _unsettled(curve),
            "memory": _memory(curve),
            "front end": _outside_the_engine(curve),
            "repeats": _agreement(curve),
        }
    yield from ((name, said) for name, said in found.items() if said)


def _plateau(curve: Curve, tolerance: float) -> str:
    """Empty where there are no two valid points."""
    gains, flat, at = curve.gains(), curve.plateau(tolerance), curve.axes.at
    if not gains:
        return ""
    reason = obstacle(curve)
    certain = "" if reason is None else f"; not certain: {reason}"
    past = f"past it a doubling gains less than {percent(tolerance)}"
    dip = _flat_for_a_while(gains, tolerance)
    if flat.value is None:
        chance = "" if not flat.known or flat.low is None else f", so it may be from {at(flat.low)} on"
        last = gains[-1]
        gain = f"still gains {percent(last.value)}{between(last, 100, ' %')}"
        return f"not reached: the last doubling ({last.start} to {last.end}) {gain}{chance}{dip}{certain}"
    high = "not reached" if flat.high is None else flat.high
    interval = f" (95 %: {flat.low} to {high})" if flat.known else ""
    return f"from {at(flat.value)}{interval}: {past}{dip}{certain}"


def _flat_for_a_while(gains: Sequence[Gain], tolerance: float) -> str:
    """A stretch that looks like a plateau, were it not for what follows."""
    found = next(((a, b) for a, b in pairwise(gains) if a.value < tolerance <= b.value), None)
    if found is None:
        return ""
    flat, again = found
    return (
        f"; it is flat from {flat.start} to {flat.end} ({percent(flat.value)}), "
        f"but gains {percent(again.value)} again from {again.start} to {again.end}"
    )


def _best(curve: Curve) -> str:
    """The largest mean, and what the largest load has less; empty where nothing is valid."""
    if not curve.valid:
        return ""
    best, last = max(curve.valid, key=lambda p: fmean(p.repeats)), curve.valid[-1]
    text = f"{figure(fmean(best.repeats), 4)} at {curve.axes.at(best.concurrency)}"
    if best is last:
        return f"{text}, the largest load {'that fits' if curve.cut else 'measured: throughput may still rise'}"
    less = 1 - fmean(last.repeats) / fmean(best.repeats)
    falls = f"has {percent(less)} less" if less > MARGIN else "has about the same"
    return f"{text}; {curve.axes.at(last.concurrency)} {falls}"


def _front(curve: Curve) -> str:
    """Empty where there is no other point to compare with."""
    if len(curve.valid) < 2:
        return ""
    front = [point.concurrency for point in curve.pareto_front()]
    which = "all points" if len(front) == len(curve.valid) else curve.axes.at(listed(front))
    return f"{which} (from the means of {curve.axes.throughput} and {curve.axes.latency}, ignoring noise)"


def _law(curve: Curve, b_half: float | None) -> tuple[str, Fit | None]:
    """The saturation law's result as text, empty without one; and the law itself where it describes the curve."""
    try:
        law = fit(curve.points, b_half)
    except TooFewPoints:
        return "", None
    errors = f"off by {percent(law.error_mean)} in the mean, {percent(law.error_max)} at most"
    if not law.describes:
        return f"T(B) = T_inf B/(B + b_half) does not describe this curve: at its best {errors}", None
    if not law.identified:
        return f"not identified: the points fit a b_half below 0, which cannot be; {errors}", None
    numbers = f"T_inf {figure(law.t_inf.value)} {curve.axes.throughput}, b_half {figure(law.b_half.value)} sequences"
    return f"T(B) = T_inf B/(B + b_half): {numbers}{between(law.b_half)}; {errors}", law


def _fixed_part(law: Fit, work: Work | None, peaks: Peaks | None) -> str:
    """The part of a step that no batch changes, against the time to read the weights, where that is known."""
    seen = f"{milliseconds(law.fixed_s.value)} ms of every step fitted{between(law.fixed_s, 1e3)}"
    if work is None:
        return seen
    shapes = f"b_half from shapes is {figure(work.b_half)} sequences"
    if peaks is None:
        return f"{seen}; {shapes}"
    reading = fixed_s_from_shapes(work, peaks)
    against = f"{milliseconds(reading)} ms to read the weights at {figure(peaks.bytes_per_s / 1e9, 4)} GB/s ({shapes})"
    more = law.fixed_s.value - reading
    if more <= 0 or (law.fixed_s.low is not None and law.fixed_s.low <= reading):
        return f"{seen}, {against}: no time is left for the host that this fit could tell from noise"
    rest = "the host, the launching of kernels, and memory below its data sheet"
    return f"{seen}, {against}: the other {milliseconds(more)} ms is {rest}"


def _roofline(curve: Curve) -> str:
    shares = [(p.roofline_fraction, p.concurrency) for p in curve.valid if p.roofline_fraction is not None]
    if not shares:
        return ""
    share, where = max(shares)
    return f"at most {percent(share)} of what the data sheet allows, at {where} in flight"


def _regime(work: Work, peaks: Peaks) -> str:
    seen = regime(work, peaks)
    return (
        f"{seen.bound}-bound by shapes: decoding tends to {figure(seen.intensity)} FLOP/byte as the batch grows, "
        f"the ridge of {peaks.family} is {figure(seen.ridge)}"
    )


def _decoding(curve: Curve) -> str:
    """The counters while no prompt was processed; empty where the largest load has none: small ones would mislead."""
    seen = [p for p in curve.valid if p.decode_dram is not None and p.decode_tensor is not None]
    if not seen or seen[-1] is not curve.valid[-1]:
        return ""
    columns = [[hundredths(getattr(p, name)) for p in seen] for name in ("decode_dram", "decode_tensor")]
    alike = len(seen) > 1 and all(len(set(column)) == 1 for column in columns)
    dram, tensor = (column[0] if alike else ", ".join(column) for column in columns)
    loads = "every number" if alike else listed(p.concurrency for p in seen)
    return (
        f"while no prompt is processed, DRAM is active {dram} % of the time, the tensor cores {tensor} %, "
        f"at {loads} in flight"
    )


def _little(curve: Curve) -> str:
    """Empty where nothing deviates, to the digits shown."""
    seen = [(p.little, p.concurrency) for p in curve.valid if p.little is not None]
    worst, where = max(seen, key=lambda pair: abs(pair[0]), default=(0.0, 0))
    if percent(abs(worst)) == percent(0.0):
        return ""
    return f"requests' own intervals and step trace at most {percent(abs(worst))} apart, at {where} in flight"


def _unsettled(curve: Curve) -> str:
    """Warning where requests/s x mean E2E is less than the batch: E2E looks back over a whole request. Else empty."""
    seen = [
        (p.requests_per_s * p.e2e_s / p.batch - 1, p.concurrency)
        for p in curve.valid
        if p.requests_per_s is not None and p.e2e_s is not None and p.batch
    ]
    off, where = min(seen, default=(0.0, 0))
    if off > -UNSETTLED:
        return ""
    settled = "" if curve.load is None else f" (the load had settled for {curve.load.settle_lifetimes:g} lifetimes)"
    return (
        f"requests/s x mean E2E is up to {percent(-off)} less than the batch (at {where} in flight): requests that "
        f"ended in the window were sent under a smaller load, so their E2E and TTFT are too low{settled}"
    )


def _memory(curve: Curve) -> str:
    """Parts of the memory of the engine's GPUs under the load that had the most in use; empty where not known."""
    memory = memory_in_use(group for point in curve.valid for group in point.used)
    if memory is None:
        return ""
    (engine,) = memory.engines
    parts = f"weights {gib(engine.weight_bytes)}, KV cache {gib(engine.kv_bytes)}"
    left = f"other and unused {gib(memory.left_bytes)}"
    if memory.used_bytes is not None:
        left = f"other {gib(memory.other_bytes)} at most, free {gib(memory.left_bytes)}"
    return f"{parts}, {left}, of {gib(memory.total_bytes)} GiB"


def _outside_the_engine(curve: Curve) -> str:
    """Warning where an engine with room holds far less than its server received, which is the limit. Else empty."""
    if curve.spec is None or curve.spec.interface != "server":
        return ""
    room = curve.spec.max_num_seqs
    held = [(p.batch, p.concurrency) for p in curve.valid if p.batch is not None and (p.kv_usage or 0.0) < FULL]
    batch, sent = min(held, key=lambda pair: pair[0] / min(pair[1], room), default=(1.0, 1))
    if batch > FED * min(sent, room):
        return ""
    return (
        f"at {sent} in flight the engine holds {figure(batch, 3)} in the mean, though it has room: the others are on "
        "their way through the server's one front end; --slm-engine-arg api_server_count=4 starts several"
    )


def _agreement(curve: Curve) -> str:
    seen = [(share, p.concurrency) for p in curve.valid if (share := relative_range(p)) is not None]
    if not seen:
        return ""
    worst, where = max(seen)
    middle = median(share for share, _ in seen)
    text = f"differ by {percent(middle)} in the median, {percent(worst)} at most (at {where} in flight)"
    several = hosts(curve)
    return f"{text}; {counted(several, 'host')} took part, whose difference is in it" if several > 1 else text


def amount(curve: Curve) -> str:
    """ "4 points", and of an adaptive sweep how many loads it did without."""
    points = counted(len(curve.points), "point")
    if not curve.adaptive:
        return points
    ended = f"{counted(len(curve.unneeded), 'planned load')} not needed" if not curve.missing else "not at its end"
    return f"{points} (adaptive sweep, {ended})"


def remark(curve: Curve) -> str:
    """A line below the table; empty where nothing was left out."""
    if not curve.unneeded:
        return ""
    rows = [f"{figure(p.tokens_per_s.value)} at {p.concurrency}" for p in curve.predictions]
    if not rows:
        return f"not measured, not needed: {listed(curve.unneeded)} in flight; {_trust(curve)}"
    return f"not measured, predicted: tokens/s {', '.join(rows)} in flight; {_trust(curve)}"


def skip_note(curve: Curve, concurrency: int) -> str:
    """The reason of a skipped item."""
    if concurrency not in curve.unneeded:
        return f"the adaptive sweep ended early: {listed(curve.missing)} in flight was next"
    text = "not needed: the adaptive sweep found the plateau without it"
    found = next((p.tokens_per_s for p in curve.predictions if p.concurrency == concurrency), None)
    if found is None:
        return f"{text}; {_trust(curve)}"
    seen = f"{figure(found.value)} tokens/s ({figure(found.low)} to {figure(found.high)})"
    return f"{text}; predicted: {seen}; {_trust(curve)}"


def _trust(curve: Curve) -> str:
    """The saturation law's largest error at a measured load, given only its neighbours."""
    missed = law_error(curve.points)
    if missed is None:
        return "too few points for a prediction"
    share, where = missed
    off = (
        f"told the neighbours of a measured load, the saturation law misses it by at most {percent(share)} (at {where})"
    )
    return f"no prediction: {off}" if share > DESCRIBES else off


AnyPoint = Point | ReplicaPoint | JobPoint


def valid_cell(point: AnyPoint) -> str:
    """partly: some repeats were left out. degraded: all that are left have something against them. noisy: the host was
    disturbed; all repeats count."""
    if not point.valid:
        return "NO"
    if point.degraded:
        return "degraded"
    return "partly" if point.left_out else "noisy" if point.noise else "yes"


def word_for(found: CheckResult) -> str:
    """The cell of one measurement."""
    return "NO" if found.problems else "degraded" if found.degradations else "noisy" if found.noise else "yes"


def lines_of(found: CheckResult, name: str = "") -> list[str]:
    """Lines on one measurement: a finding each, the worst first."""
    kinds = zip(("INVALID", "degraded", "noisy"), found[:3], strict=True)
    return [f"{kind}: {name}{text}" for kind, texts in kinds for text in texts]


def reasons(point: AnyPoint, name: str, used: str = "") -> Iterator[str]:
    """Lines on what was left out, on what is degraded and on noise. used: how many repeats count."""
    if point.left_out or not point.valid:
        kind = "left out" if point.valid else "INVALID"
        yield hanging(": ".join([f"{kind}: {name}", *filter(None, (used, "; ".join(point.problems)))]), 2)
    if point.degraded:
        yield hanging(f"degraded: {name}: {'; '.join(point.degraded)}", 2)
    if point.noise:
        yield hanging(f"noisy, kept: {name}: {'; '.join(first_of_each_kind(point.noise))}", 2)


def first_of_each_kind(texts: Sequence[str]) -> list[str]:
    """The first of the texts that differ only in their figures, and how many more there are."""
    kinds = grouped(texts, reason_kind).values()
    return [f"{first}{f', and {len(more)} more like it' if more else ''}" for first, *more in kinds]


def reason_kind(text: str) -> str:
    """A reason without its figures."""
    return re.split(r":| [-+.\d]+ ", text, maxsplit=1)[0]
