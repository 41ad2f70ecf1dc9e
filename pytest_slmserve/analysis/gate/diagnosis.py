"""Diagnosis of a difference between two sides: how their requests spend time, and how their engines differ.

Two views divide the same time:

    seconds per request = prefill + decode = host gap + kernels

decode is the number of steps times the mean step without a prompt. prefill is the rest, because steps with a prompt
decode as well. host gap is the time without a kernel on the GPU, by its counters.

A step only decodes if neither its row of the trace nor the next one names a prompt: with asynchronous scheduling, the
launch of a prompt's kernels delays the row before the one that names the prompt. The last step of a prompt names it, so
as many more rows before it are excluded as the longest prompt can fill. docs/roofline.md gives the reason.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date
from statistics import fmean
from typing import Any

from pytest_slmserve.analysis.estimates import ends, grouped, mean_of_known
from pytest_slmserve.analysis.gate.decision import Comparison
from pytest_slmserve.analysis.gate.launch_pairs import EXACT, Gated
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.gpu_figures import device_figures, idle_share, peaks_of
from pytest_slmserve.analysis.points import choose
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import Load

FEWEST_ALONE = 50  # steps of a side that only decode: each varies by a tenth, and the mean of so many by 1.4%
LEFT_OUT = {  # it differs at every start, and older records have no kv_windows
    *((1, name) for name in ("compile_s", "ready_s", "stages", "kv_windows")),
    *((2, name) for name in ("model", "python", "gpu", "interface")),  # they name the model and its place
}


@dataclass(frozen=True, slots=True)
class Change:
    """Quantity of both sides."""

    name: str
    baseline: float
    candidate: float

    @property
    def absolute(self) -> float:
        return self.candidate - self.baseline

    @property
    def relative(self) -> float | None:
        """Change as a share of the baseline; None if that is not positive, because prefill may be noise."""
        return self.absolute / self.baseline if self.baseline > 0 else None


BY_STEP, BY_DEVICE = ("prefill", "decode"), ("host gap", "kernels")  # parts that add up to the total
PROBE = ("host-speed probe", "its CPU time")


@dataclass(frozen=True, slots=True)
class Windows:
    """All windows of one side at one load.

    Attributes:
        with_prompt, alone: numbers of steps whose row names a prompt, and that only decode.
        figures: known figures by name. "total" and its parts are engine seconds per request, not a user's waiting time.
            Prefill and decode need `FEWEST_ALONE` steps that only decode; host gap and kernels need sensors.
    """

    measurements: int
    with_prompt: int
    alone: int
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Split:
    """Time of a model's requests on both sides, at one load of one workload."""

    model: str
    load: Load
    baseline: Windows
    candidate: Windows

    def known(self, names: Sequence[str]) -> list[Change]:
        """Return the changes of the figures that both sides have."""
        before, after = self.baseline.figures, self.candidate.figures
        return [Change(name, before[name], after[name]) for name in names if name in before and name in after]


@dataclass(frozen=True, slots=True)
class Difference:
    """Fact that differs between the sides, with all values of each as text."""

    field: str
    baseline: tuple[str | None, ...]
    candidate: tuple[str | None, ...]


def splits(baseline: Sequence[Measurement], candidate: Sequence[Measurement]) -> tuple[Split, ...]:
    """Return a split for each model, workload and load that both sides have measured validly.

    Degraded measurements count if a side has no clean one, but engines that shared their device do not.
    """
    sides = []
    for measurements in (baseline, candidate):
        usable = (m for m in measurements if m.alone and window.output_tokens_per_s(m.run))
        groups = grouped(usable, lambda m: (short_name(m.spec.model), m.workload.hash, m.load))
        sides.append({key: [m for (m,), _ in choose((m,) for m in group)[0]] for key, group in groups.items()})
    found = []
    for key, members in sides[0].items():
        if not members or not sides[1].get(key):
            continue
        # Number of rows that a prompt may delay before the row that names it: the row that was seen late, and a row for
        # each further step of the longest prompt. The decoded tokens of a step leave less room for the prompt.
        lag = 1
        for m in (*members, *sides[1][key]):
            tokens = m.resolved.max_num_batched_tokens or m.spec.max_num_batched_tokens
            room = max(1, tokens - (m.load.max_concurrency or 0))
            lag = max(lag, math.ceil(max(m.run.samples.prompt_tokens, default=0) / room))
        found.append(Split(key[0], key[2], *(_windows(side[key], lag) for side in sides)))
    return tuple(found)


def _windows(measurements: Sequence[Measurement], lag: int) -> Windows:
    requests, seconds, with_prompt, alone_s = [], [], 0, []
    for m in measurements:
        trace, rows = m.run.steps, window.window_trace(m.run).steps[1:]
        requests.append(sum(trace.new_tokens[i] for i in rows) / m.workload.mean_output_tokens)  # not a whole number
        for i in rows:
            seconds.append(trace.time_s[i] - trace.time_s[i - 1])
            with_prompt += bool(trace.prompt_tokens[i])
            following = trace.prompt_tokens[i : i + lag + 1]  # at the end of a trace the next rows are unknown
            if len(following) == lag + 1 and not any(following):
                alone_s.append(seconds[-1])
    steps = len(seconds)
    total_s, seen = math.fsum(seconds) / math.fsum(requests), [device_figures(m.run) for m in measurements]
    figures = {
        "total": total_s,
        "steps per request": steps / math.fsum(requests),
        "step": math.fsum(seconds) / steps,
        PROBE[0]: mean_of_known(each.probe_s for each in seen),
        PROBE[1]: mean_of_known(each.probe_cpu_s for each in seen),
    }
    if len(alone_s) >= FEWEST_ALONE and with_prompt:
        decode_s = steps * math.fsum(alone_s) / len(alone_s) / math.fsum(requests)
        figures |= {"prefill": total_s - decode_s, "decode": decode_s}
    idle = mean_of_known(idle_share(each.engine_active) for each in seen)
    if idle is not None:
        figures |= {"host gap": idle * total_s, "kernels": total_s - idle * total_s}
    known = {name: value for name, value in figures.items() if value is not None}
    return Windows(len(measurements), with_prompt, len(alone_s), known)


LAYERS = {
    "tokens per busy second": "kernels",
    "share of time with a kernel": "host",
    "s to start": "start",
    "s to wake": "wake",
}

CHANGED = 1.2  # times the own cores, or its inverse; gates of equal sides measure 0.98 to 1.03 times


def layers(compared: Iterable[Comparison]) -> list[tuple[str, Comparison]]:
    """Return the layers (kernels, host, start) in which a candidate seems worse, each with its endpoint."""
    named = ((LAYERS.get(each.name.partition(",")[0]), each) for each in compared if each.seems_worse)
    return [(layer, each) for layer, each in named if layer]


def worse_layers(gated: Gated) -> list[str]:
    """Return the layers in which a failing candidate is worse: also memory and outputs."""
    if gated.outcome is not State.FAILS:
        return []
    exact = ("memory" if each.claim in EXACT else each.claim for each in gated.exact if each.state is State.FAILS)
    return [*dict.fromkeys((*(layer for layer, _ in layers(gated.compared)), *exact))]


def is_of_cores(seen: Comparison) -> bool:
    return seen.name.partition(",")[0] == "own cores"


def changed_cores(compared: Iterable[Comparison]) -> Comparison | None:
    """Return the own cores of both sides if the candidate clearly keeps more or fewer of them busy, or None.

    A host with idle cores hides a regression of this kind: the throughput is the same until engines share the host.
    """
    for each in filter(is_of_cores, compared):
        if each.ratio:
            low, high = ends(each.ratio)
            return each if low > CHANGED or high < 1 / CHANGED else None
    return None


def explaining(parts: Sequence[Change]) -> tuple[Change, float] | None:
    """Return the part that changed most in the direction of the total, with its share of the total change, or None.

    The share exceeds 1 if other parts compensate.
    """
    whole = math.fsum(part.absolute for part in parts)
    if whole == 0:
        return None
    largest = max(parts, key=lambda part: part.absolute / whole)
    return largest, largest.absolute / whole


def start_ups(baseline: Sequence[Measurement], candidate: Sequence[Measurement]) -> tuple[Change, ...]:
    """Return the mean seconds to start of each model that was launched on both sides."""
    means = []
    for side in (baseline, candidate):
        launches = {(short_name(m.spec.model), m.launch): m.resolved.ready_s for m in side}
        by_model = grouped(launches, lambda launch: launch[0])
        found = {model: mean_of_known(launches[each] for each in same) for model, same in by_model.items()}
        means.append({model: mean for model, mean in found.items() if mean is not None})
    before, after = means
    return tuple(Change(model, old, after[model]) for model, old in before.items() if model in after)


STAGES = ("import", "device", "weights", "profile", "compile", "kv cache", "capture")  # of a start, in order
REST = "rest"  # of the seconds to start: the front end, and messages between processes


def stage_changes(baseline: Sequence[Measurement], candidate: Sequence[Measurement]) -> tuple[Change, ...]:
    """Return the stages of a start, which add up to the seconds to start, as means over launches.

    There are none if an engine did not report its stages. A stage without time on both sides is left out.
    """
    means = []
    for side in (baseline, candidate):
        resolved = {m.launch: m.resolved for m in side}.values()
        launches, starts = [dict(each.stages) for each in resolved], [each.ready_s for each in resolved]
        if not launches or not all(launches) or None in starts:
            return ()
        means.append({name: fmean(each.get(name, 0.0) for each in launches) for name in STAGES})
        means[-1][REST] = fmean(start or 0.0 for start in starts) - math.fsum(means[-1].values())
    took = (name for name in STAGES if means[0][name] or means[1][name])
    return tuple(Change(name, means[0][name], means[1][name]) for name in (*took, REST))


def fact_differences(baseline: Sequence[Measurement], candidate: Sequence[Measurement]) -> tuple[Difference, ...]:
    """Return differences of environments, resolved configurations and specifications, once for each name.

    Only models of both sides count. Fields that differ at every start are excluded.
    """
    shared = {short_name(m.spec.model) for m in baseline} & {short_name(m.spec.model) for m in candidate}
    sides = [[_facts(m) for m in side if short_name(m.spec.model) in shared] for side in (baseline, candidate)]
    found: dict[str, Difference] = {}
    for key in dict.fromkeys(key for side in sides for facts in side for key in facts):
        values = [[facts.get(key) for facts in side] for side in sides]
        short, whole = ([_texts(side, short) for side in values] for short in (key[1] == "capture_sizes", False))
        texts = short if short[0] != short[1] else whole  # different sizes may have equal summaries
        if texts[0] != texts[1]:
            found.setdefault(key[1], Difference(key[1], *texts))
    return tuple(found.values())


def _facts(measurement: Measurement) -> dict[tuple[int, str], Any]:
    parts: list[Any] = [measurement.environment, measurement.resolved, measurement.spec]
    facts = {(i, f.name): getattr(part, f.name) for i, part in enumerate(parts) for f in fields(part)}
    pairs = {(2, f"{kind}.{name}"): value for kind in ("extra", "env") for name, value in facts.pop((2, kind))}
    return {key: value for key, value in (facts | pairs).items() if key not in LEFT_OUT}


def _texts(values: Iterable[Any], short: bool = False) -> tuple[str | None, ...]:
    texts = set[str | None]()
    for value in values:
        if value is None or not short:
            texts.add(None if value is None else str(value))
        else:
            texts.add(f"{len(value)} up to {max(value)}" if value else "none")
    return tuple(sorted(texts, key=lambda each: (each is None, each or "")))


ANY = "*"


@dataclass(frozen=True, slots=True)
class Waiver:
    """Permission for an endpoint to fail.

    Attributes:
        model: a short name or "*".
        device: a platform ("cuda"), a GPU family ("H200"), the driver's name of a GPU, or "*".
        until: last day.
    """

    endpoint: str
    model: str
    device: str
    owner: str
    reason: str
    until: date


def waiver_for(waivers: Iterable[Waiver], model: str, endpoint: str, device: str) -> Waiver | None:
    """Return the most specific waiver that fits, expired or not, or None.

    A named model counts more than a named device, and a device more than a late end.
    """
    peaks = peaks_of(device)
    devices, models = {ANY, device, peaks.family if peaks else ANY}, {ANY, short_name(model)}
    fitting = [w for w in waivers if w.endpoint == endpoint and w.model in models and w.device in devices]
    return max(fitting, key=lambda w: (w.model != ANY, w.device != ANY, w.until), default=None)


def explained(waiver: Waiver, today: date) -> str:
    """Return who waived a regression, until when and why, or that the waiver expired."""
    waived = f"{waiver.endpoint} of {waiver.model} on {waiver.device}"
    if today > waiver.until:
        return f"the waiver of {waived} expired on {waiver.until}; its owner is {waiver.owner} ({waiver.reason})"
    return f"{waived} is waived until {waiver.until} by {waiver.owner}: {waiver.reason}"
