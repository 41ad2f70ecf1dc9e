"""Diagnosis of a difference between two sides: where the time of their requests goes, and how their engines differ.

Two sides, two views of the same time, each of which adds up to all of it:

    seconds per request = prefill + decode = host gap + kernels

decode is what the steps would take if none held a prompt: their number times the mean step that only decodes. prefill
is what prompts add to that. (The whole of the steps that hold a prompt would be the wrong answer: those decode as well,
and with more in flight than a quarter of the output's tokens they are most of the steps, so that slower decoding would
look like slower prefill.)
host gap is the time in which no kernel ran on the GPU, by its counters.

A step only decodes if neither its own row of the trace names a prompt nor the next one does. A row has the time at
which its step's output was seen, and with asynchronous scheduling an engine launches a step before it has handed over
the output of the one before: the launch of a prompt's kernels then holds up the row *before* the one that names the
prompt, and the row that names it comes the sooner. Mean ms of a step, in the committed records:

                                                      row before   row that names it   step that only decodes
    H200, vLLM 0.26.0, OPT-1.3B,   4 in flight              13.0                 1.8                      1.8
                                  64 in flight              13.3                 2.5                      4.1
                                   1 in flight               1.7                 8.6                      1.7
      on a GPU shared by three engines, 64 each             15.3                25.6                     14.0
    CPU, vLLM 0.32.0, not asynchronous, 4 in flight          2.8                 3.2                      2.7

So no one lag is right for both sides of every comparison. Counted by rows that name them, prompts at 64 in flight would
take less than no time (-4.6 ms a request); shifted by one row, the steps that only decode would be too short (3.6 ms),
having the hurried ones among them. With both rows left out what remains is 4.1 ms at 64 in flight and 6.9 at 128, and
an engine whose requests start together, which decodes for hundreds of steps without a prompt, says 4.3 and 7.0.

The row after the one that names a prompt is rarely longer than others, and then by a tenth. The row two before is
longer by 0.2 to 0.5 ms, perhaps the front end taking the new request in: that is counted as decode, since with a third
row left out nothing would remain from a third of the output's tokens in flight on.

A prompt that takes several steps is named by the last of them, so as many more rows before it are left out as the
longest prompt can fill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date
from typing import Any

from pytest_slmserve.analysis.device.gpu_figures import device_figures
from pytest_slmserve.analysis.metrics import window
from pytest_slmserve.analysis.metrics.roofline import idle_share, peaks_of
from pytest_slmserve.analysis.metrics.validity import check
from pytest_slmserve.analysis.points import choose
from pytest_slmserve.analysis.stats.estimates import grouped, mean_of_known
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import Load
from pytest_slmserve.schema.records import Measurement, Resolved, Run
from pytest_slmserve.schema.specs import EngineSpec

FEWEST_ALONE = 50  # steps that only decode, of a side: where they are few, each varies by a tenth, their mean by 1.4 %
ALWAYS_DIFFER = {"compile_s", "ready_s", "kv_windows"}  # the last is the model's, and older records have none
NO_LIMITS = {"model", "python", "gpu", "interface"}  # of a specification: what is measured, and where it lies


@dataclass(frozen=True, slots=True)
class Change:
    """One quantity of both sides. unit: of its values."""

    name: str
    baseline: float
    candidate: float
    unit: str = "s"

    @property
    def absolute(self) -> float:
        return self.candidate - self.baseline

    @property
    def relative(self) -> float | None:
        """Change as a share of the baseline; None where the baseline is not positive, since what prompts add may be
        only noise."""
        return self.absolute / self.baseline if self.baseline > 0 else None


@dataclass(frozen=True, slots=True)
class Windows:
    """All windows of one side at one load, together.

    requests: output tokens over those of a request, so no whole number. seconds: from each window's first step boundary
    to its last. steps: in that time. with_prompt: those whose row names a prompt. alone, alone_s: those that only
    decode, and how long they took. idle: share of time in which no kernel ran on the GPU, None where nobody looked.
    probe_s, probe_cpu_s: mean time of a piece of work of the host-speed probe, and its CPU time; None without one.
    """

    measurements: int
    requests: float
    seconds: float
    steps: int
    with_prompt: int
    alone: int
    alone_s: float
    idle: float | None
    probe_s: float | None = None
    probe_cpu_s: float | None = None

    @property
    def total_s(self) -> float:
        """Seconds of the engine per request, as are all below, and not a user's waiting time."""
        return self.seconds / self.requests

    @property
    def decode_s(self) -> float | None:
        """Seconds per request if no step held a prompt: the steps times the mean step that only decodes. None where
        fewer than `FEWEST_ALONE` steps only decode. None too where no row names a prompt, so that steps that only
        decode cannot be recognized."""
        if self.alone < FEWEST_ALONE or not self.with_prompt:
            return None
        return self.steps * self.alone_s / self.alone / self.requests

    @property
    def gap_s(self) -> float | None:
        return None if self.idle is None else self.idle * self.total_s


@dataclass(frozen=True, slots=True)
class Split:
    """The time of a model's requests on both sides, at one load of one workload."""

    model: str
    load: Load
    baseline: Windows
    candidate: Windows

    @property
    def total(self) -> Change:
        return Change("total", self.baseline.total_s, self.candidate.total_s)

    @property
    def by_step(self) -> tuple[Change, ...]:
        """prefill and decode, which add up to `total`; empty where a side cannot tell them apart."""
        return _parts("decode", "prefill", self.total, self.baseline.decode_s, self.candidate.decode_s)[::-1]

    @property
    def by_device(self) -> tuple[Change, ...]:
        """host gap and kernels, which add up to `total`; empty where a side had no sensor that could tell."""
        return _parts("host gap", "kernels", self.total, self.baseline.gap_s, self.candidate.gap_s)

    @property
    def probe(self) -> tuple[Change, ...]:
        """The time of the same piece of Python beside both sides, and its CPU time: what of a change may be the host's.
        Empty where a side had no host-speed probe."""
        before, after = self.baseline, self.candidate
        times = {
            "host-speed probe": (before.probe_s, after.probe_s),
            "its CPU time": (before.probe_cpu_s, after.probe_cpu_s),
        }
        return tuple(Change(name, b, c) for name, (b, c) in times.items() if b is not None and c is not None)

    @property
    def steps(self) -> Change:
        """Steps per request: more of them where the engine holds fewer sequences at once."""
        before, after = self.baseline, self.candidate
        return Change("steps per request", before.steps / before.requests, after.steps / after.requests, "steps")

    @property
    def step(self) -> Change:
        """Seconds per step, which times the steps per request are the total."""
        before, after = self.baseline, self.candidate
        return Change("step", before.seconds / before.steps, after.seconds / after.steps)


@dataclass(frozen=True, slots=True)
class StartUp:
    """Seconds until a model's engine was ready, mean over each side's launches."""

    model: str
    change: Change


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that is not the same on both sides, as text; several values where the launches of a side differ, None
    where it is not known."""

    field: str
    baseline: tuple[str | None, ...]
    candidate: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All there is to say of why. Empty parts: nothing was measured on both sides, or nothing differs."""

    splits: tuple[Split, ...]
    start_ups: tuple[StartUp, ...]
    differences: tuple[Difference, ...]


def diagnose(baseline: Sequence[Measurement], candidate: Sequence[Measurement]) -> Diagnosis:
    """baseline, candidate: all measurements of each side, in any order. Invalid ones tell of their launch alone."""
    return Diagnosis(splits(baseline, candidate), start_ups(baseline, candidate), fact_differences(baseline, candidate))


# Where the time goes


def splits(baseline: Sequence[Measurement], candidate: Sequence[Measurement]) -> tuple[Split, ...]:
    """One for each model, workload and load that both sides have measured validly, in the order first met.

    Degraded measurements count where a side has no clean one. Engines that shared their device are left out.
    """
    before, after = _by_load(baseline), _by_load(candidate)
    return tuple(_split(before[key], after[key]) for key in before if key in after)


def explaining(parts: Sequence[Change]) -> tuple[Change, float] | None:
    """The part that changed most in the direction of the whole, and its share of the whole change, which is more than 1
    where other parts made up for some. None where there is no change."""
    whole = math.fsum(part.absolute for part in parts)
    if whole == 0:
        return None
    largest = max(parts, key=lambda part: part.absolute / whole)
    return largest, largest.absolute / whole


def start_ups(baseline: Sequence[Measurement], candidate: Sequence[Measurement]) -> tuple[StartUp, ...]:
    """Start-up times of each model that was started on both sides, by engines that report how long it took."""
    before, after = _ready_s(baseline), _ready_s(candidate)
    return tuple(StartUp(m, Change("start-up", before[m], after[m])) for m in before if m in after)


def _parts(name: str, rest: str, total: Change, baseline: float | None, candidate: float | None) -> tuple[Change, ...]:
    if baseline is None or candidate is None:
        return ()
    return Change(name, baseline, candidate), Change(rest, total.baseline - baseline, total.candidate - candidate)


def _by_load(measurements: Iterable[Measurement]) -> dict[tuple[str, str, Load], list[Measurement]]:
    """Measurements that may be used, and have a window with steps in it."""
    found = (m for m in measurements if m.alone and window.output_tokens_per_s(m.run))
    groups = grouped(found, lambda m: (short_name(m.spec.model), m.workload.hash, m.load))
    used = {key: [m for m, _ in choose(group, check)[0]] for key, group in groups.items()}
    return {key: group for key, group in used.items() if group}


def _split(before: Sequence[Measurement], after: Sequence[Measurement]) -> Split:
    reach = max(_reach(m) for m in (*before, *after))
    model, load = short_name(before[0].spec.model), before[0].load
    return Split(model, load, _side(before, reach), _side(after, reach))


def _reach(measurement: Measurement) -> int:
    """Number of rows before the row naming a prompt that its work may have delayed. One is the row that was seen late;
    each further step that the longest prompt takes adds one. The room of a step for prompt tokens is less by the
    sequences it decodes."""
    spec, resolved, load = measurement.spec, measurement.resolved, measurement.load
    room = (resolved.max_num_batched_tokens or spec.max_num_batched_tokens) - (load.max_concurrency or 0)
    return max(1, math.ceil(max(measurement.run.samples.prompt_tokens, default=0) / max(1, room)))


def _side(measurements: Sequence[Measurement], reach: int) -> Windows:
    ranges = [(m.run, window.window_steps(m.run)[1:]) for m in measurements]
    alone = [(run, [i for i in steps if _decodes_only(run, i, reach)]) for run, steps in ranges]
    seen = [device_figures(m.run) for m in measurements]
    return Windows(
        measurements=len(measurements),
        requests=math.fsum(_requests(m) for m in measurements),
        seconds=math.fsum(_seconds(run, steps) for run, steps in ranges),
        steps=sum(len(steps) for _, steps in ranges),
        with_prompt=sum(bool(run.steps.prompt_tokens[i]) for run, steps in ranges for i in steps),
        alone=sum(len(steps) for _, steps in alone),
        alone_s=math.fsum(_seconds(run, steps) for run, steps in alone),
        idle=mean_of_known(idle_share(each.engine_active) for each in seen),
        probe_s=mean_of_known(each.probe_s for each in seen),
        probe_cpu_s=mean_of_known(each.probe_cpu_s for each in seen),
    )


def _decodes_only(run: Run, step: int, reach: int) -> bool:
    """True where neither the row of `step` nor the next `reach` rows name a prompt. False at the very end of a trace,
    where the next rows are unknown."""
    rows = run.steps.prompt_tokens[step : step + reach + 1]
    return len(rows) == reach + 1 and not any(rows)


def _seconds(run: Run, steps: Iterable[int]) -> float:
    return math.fsum(run.steps.time_s[i] - run.steps.time_s[i - 1] for i in steps)


def _requests(measurement: Measurement) -> float:
    run = measurement.run
    tokens = sum(run.steps.new_tokens[i] for i in window.window_steps(run)[1:])
    return tokens / measurement.workload.mean_output_tokens


def _ready_s(measurements: Iterable[Measurement]) -> dict[str, float]:
    """Mean seconds until an engine was ready, by model; each launch counts once, however often it was measured. Models
    without a reported time are left out."""
    launches = {(short_name(m.spec.model), m.launch): m.resolved.ready_s for m in measurements}
    by_model = grouped(launches, lambda key: key[0])
    means = {model: mean_of_known(launches[key] for key in keys) for model, keys in by_model.items()}
    return {model: value for model, value in means.items() if value is not None}


# What differs

Facts = Mapping[str, Any]


def fact_differences(baseline: Sequence[Measurement], candidate: Sequence[Measurement]) -> tuple[Difference, ...]:
    """Facts that are not the same: of the environments, of what the engines made of their specifications, and of these.

    Only of models that both sides have measured. What differs in what was resolved is not named a second time as asked
    for. Fields that differ at every start are left out.
    """
    shared = {short_name(m.spec.model) for m in baseline} & {short_name(m.spec.model) for m in candidate}
    before, after = ([m for m in side if short_name(m.spec.model) in shared] for side in (baseline, candidate))
    readers: tuple[Callable[[Measurement], Facts], ...] = (
        lambda m: {f.name: getattr(m.environment, f.name) for f in fields(Environment)},
        lambda m: {f.name: getattr(m.resolved, f.name) for f in fields(Resolved) if f.name not in ALWAYS_DIFFER},
        _of_spec,
    )
    found: dict[str, Difference] = {}
    for read in readers:
        for difference in _differing([read(m) for m in before], [read(m) for m in after]):
            found.setdefault(difference.field, difference)
    return tuple(found.values())


def _of_spec(measurement: Measurement) -> Facts:
    """Fields of the engine specification by name, its pairs by their own names: `extra.block_size`,
    `env.VLLM_LOGGING_LEVEL`."""
    spec = measurement.spec
    names = [f.name for f in fields(EngineSpec) if f.name not in NO_LIMITS | {"env", "extra"}]
    pairs = {f"{kind}.{name}": value for kind in ("extra", "env") for name, value in getattr(spec, kind)}
    return {**{name: getattr(spec, name) for name in names}, **pairs}


def _differing(before: Sequence[Facts], after: Sequence[Facts]) -> Iterator[Difference]:
    for name in dict.fromkeys(name for facts in (*before, *after) for name in facts):
        for text in (_short_sizes, str) if name == "capture_sizes" else (str,):
            first, second = (_values([facts.get(name) for facts in side], text) for side in (before, after))
            if first != second:
                yield Difference(name, first, second)
                break


def _values(values: Iterable[Any], text: Callable[[Any], str]) -> tuple[str | None, ...]:
    """Distinct values as text, in an order that does not depend on who was measured first; the unknown is last."""
    texts = {None if value is None else text(value) for value in values}
    return tuple(sorted(texts, key=lambda each: (each is None, each or "")))


def _short_sizes(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} up to {max(sizes)}" if sizes else "none"


ANY = "*"
EXAMPLE = (
    '[{"endpoint": "throughput", "model": "opt-1.3b", "device": "H200", "owner": "a name", '
    '"reason": "a sentence", "until": "2027-01-31"}]'
)


@dataclass(frozen=True, slots=True)
class Waiver:
    """endpoint: as the gate names it. model: a short name or "*". device: a platform ("cuda", "cpu", "simulated"), a
    GPU family of `roofline.GPUS` ("H200"), a name as the driver has it, or "*". until: the last day on which it
    holds."""

    endpoint: str
    model: str
    device: str
    owner: str
    reason: str
    until: date

    def __str__(self) -> str:
        return f"{self.endpoint} of {self.model} on {self.device}"


NAMES = tuple(f.name for f in fields(Waiver))


def waivers_of(rows: object, where: str) -> tuple[Waiver, ...]:
    """Waivers from plain JSON values: a list of objects that have every field of a waiver as text, and no other.

    where: the source of the values, for messages. Raises BadUsage: which row, which field, what is wrong with it.
    """
    if not isinstance(rows, list):
        raise BadUsage(f"{where} holds no list of waivers", EXAMPLE)
    return tuple(_waiver(row, f"{where}, row {number}") for number, row in enumerate(rows, 1))


def waiver_for(waivers: Iterable[Waiver], model: str, endpoint: str, device: str) -> Waiver | None:
    """The most specific waiver that fits, expired or not; of equals the one that holds longest.

    model: a name or a path. device: a platform, a GPU family or a GPU's name. A named model counts for more than a
    named device.
    """
    peaks = peaks_of(device)
    devices, models = {ANY, device, peaks.family if peaks else ANY}, {ANY, short_name(model)}
    fitting = [w for w in waivers if w.endpoint == endpoint and w.model in models and w.device in devices]
    return max(fitting, key=lambda w: (w.model != ANY, w.device != ANY, w.until), default=None)


def expired(waiver: Waiver, today: date) -> bool:
    """A waiver holds on its last day."""
    return today > waiver.until


def explained(waiver: Waiver, today: date) -> str:
    """One sentence for a verdict: who waived it, until when and why; or that this is over."""
    if expired(waiver, today):
        return f"the waiver of {waiver} expired on {waiver.until}; its owner is {waiver.owner} ({waiver.reason})"
    return f"{waiver} is waived until {waiver.until} by {waiver.owner}: {waiver.reason}"


def _waiver(row: object, where: str) -> Waiver:
    if not isinstance(row, Mapping):
        raise BadUsage(f"{where} is {_kind(row)}, not a waiver", EXAMPLE)
    if unknown := sorted(set(row) - set(NAMES)):
        raise BadUsage(f"{where} has the unknown field {unknown[0]!r}", f"one of {', '.join(NAMES)}")
    endpoint, model, device, owner, reason, until = (_text(row, name, where) for name in NAMES)
    return Waiver(endpoint, short_name(model), device, owner, reason, _day(until, where))


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    if name not in row:
        raise BadUsage(f"{where} has no {name}", EXAMPLE)
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise BadUsage(f"{where}: {name} is {_kind(value)}, not a text", EXAMPLE)
    return value.strip()


def _day(text: str, where: str) -> date:
    """A date from text of the one form YYYY-MM-DD, which every Python release reads. Raises BadUsage for any other
    text."""
    try:
        if (day := date.fromisoformat(text)).isoformat() == text:
            return day
    except ValueError:
        pass
    raise BadUsage(f"{where}: until is {text!r}, not a day", '"until": "2027-01-31"')


def _kind(value: object) -> str:
    return "empty" if isinstance(value, str) and not value.strip() else f"the {type(value).__name__} {value!r}"
