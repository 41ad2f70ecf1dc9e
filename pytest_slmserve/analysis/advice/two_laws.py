"""A small model on a GPU and a host that are not here, by two laws that are fitted to all committed archives.

The law of the card: seconds of a step in which kernels run, from the model's shape, the load and the data sheet. The
law of the host: seconds in which a step is prepared, from the sequences, the prompts, the layers that are launched one
by one, and the speed of the host. vLLM prepares a step while the one before runs, so a step takes about the longer of
both: (card^q + host^q)^(1/q). `studies/two_laws.py` fits them, writes `two_laws.json`, and prints how far they hold.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal

from pytest_slmserve.analysis.estimates import Interval, grouped, percent, percentile
from pytest_slmserve.analysis.metrics import gpu_figures
from pytest_slmserve.analysis.metrics.gpu_figures import Peaks, Work, peaks_for, work_of_workload
from pytest_slmserve.analysis.points import Point, point_of
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.schema import sensors
from pytest_slmserve.schema.errors import BadUsage, read_json
from pytest_slmserve.schema.kv_cache import given_limit, kv_capacity
from pytest_slmserve.schema.models import Model, short_name
from pytest_slmserve.schema.records import Measurement, Resolved
from pytest_slmserve.schema.specs import (
    ClosedLoop,
    EngineSpec,
    Load,
    WorkloadReference,
    WorkloadSpec,
    is_job,
    is_steady,
)

TILE = 64  # rows that an attention kernel computes at least, whatever it has to
HEAD_SIZES = (64, 96, 128, 192, 256)  # that attention kernels are made for; others are computed as the next larger
# Normalisations of a layer beyond two, by architecture: each is a kernel, or the end of one.
MORE_NORMS = {"Gemma3ForCausalLM": 4, "Gemma2ForCausalLM": 2, "Qwen3ForCausalLM": 2, "Olmo2ForCausalLM": 2}
GRAPHS = 512  # sequences or tokens up to which vLLM captures graphs, unless told
PYTHON = "3.12"  # whose readings the archives have; other builds are faster or slower by themselves
FEW = {"card": 0.3, "host": 1.0}  # records, and hosts, that weigh as much as the law itself

Limit = Literal["memory", "compute", "launches", "host"]


@dataclass(frozen=True, slots=True)
class StepKind:
    """Steps of one kind. count: how many, among all kinds of a load. sequences: that decode in each. prompts: that each
    processes, whole or in parts."""

    count: float
    sequences: float
    prompts: float = 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """A model under a load on a GPU, as far as the two laws see it. gpu: its data sheet, with the rates of the engine's
    arithmetic. steps: all kinds. together: requests start together. captured: tokens of a step up to which it is
    replayed from a CUDA graph."""

    model: Model
    work: Work
    gpu: Peaks
    steps: tuple[StepKind, ...]
    load: int
    together: bool
    captured: int = GRAPHS

    @property
    def tokens(self) -> float:
        """Output tokens of all its steps."""
        return self.work.output_tokens * sum(s.count * s.prompts for s in self.steps)

    def away(self, other: "Setting") -> float:
        """Distance to another load of the same model, in powers of e."""
        each = ((s.load, s.work.prompt_tokens, s.work.output_tokens, s.work.weight_bytes) for s in (self, other))
        return sum(abs(math.log(a / b)) for a, b in zip(*each)) + (self.together is not other.together)


def step_kinds(
    work: Work, load: int, *, together: bool, requests: int | None = None, batched_tokens: int = 8192
) -> tuple[StepKind, ...]:
    """Return the steps of a lifetime of `load` concurrent requests, or of a job of so many `requests`.

    Of a steady load prompts come one by one, so that a step has load/output of them in the mean. Requests that start
    together are prefilled in as few steps as their tokens allow, decode side by side, and end together."""
    prompt, output = work.prompt_tokens, work.output_tokens
    if not together:
        share = min(1.0, load / output)
        kinds = StepKind((1 - share) * output, load), StepKind(share * output, load, load / output / share)
        return tuple(kind for kind in kinds if kind.count > 0)
    waves = [load] if requests is None else [load] * (requests // load) + [requests % load] * (requests % load > 0)
    found = []
    for wave in waves:
        chunks = math.ceil(wave * prompt / batched_tokens)
        found += [StepKind(chunks, wave / 2, wave / chunks), StepKind(output - 1, wave)]
    return tuple(found)


def setting_of(
    spec: EngineSpec, workload: WorkloadReference, load: Load, gpu: Peaks, resolved: Resolved | None = None
) -> Setting | None:
    """Return the setting of an engine under a load on a GPU of this data sheet; None if the shape of the model is not
    known, or the load is neither a point of a sweep nor a job that comes at once."""
    resolved = resolved or Resolved()
    work, model = work_of_workload(spec, resolved, workload), spec.model_facts
    at_once = is_job(load) and load.at_once
    if work is None or model is None or not (is_steady(load) or at_once) or workload.kind != "generate":
        return None
    limits = load.max_concurrency, load.requests, resolved.max_num_seqs or spec.max_num_seqs
    capacity = kv_capacity(spec, workload.longest, resolved)
    held = max(1, min(limit for limit in (*limits, capacity) if limit is not None))
    together = at_once or getattr(load, "ramp_up", "") == "burst"
    tokens = resolved.max_num_batched_tokens or given_limit(spec, "max_num_batched_tokens")
    steps = step_kinds(work, held, together=together, requests=load.requests, batched_tokens=tokens)
    captured = max(resolved.capture_sizes or (spec.arguments.get("max_cudagraph_capture_size", GRAPHS),))
    return Setting(model, work, peaks_for(spec, gpu), steps, held, together, 0 if spec.enforce_eager else captured)


LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def steady_settings(spec: EngineSpec, prompt: int, output: int, gpu: Peaks) -> list[Setting]:
    """Return the settings of the steady LOADS of requests of these lengths, ascending, up to what the KV cache holds.
    Raises BadUsage if the shape of the model is not known."""
    requests = WorkloadSpec(prompt_tokens=prompt, output_tokens=output)
    workload = WorkloadReference("", requests, 1, prompt, output, prompt + output, "")
    found = (setting_of(spec, workload, ClosedLoop(load), gpu) for load in LOADS)
    by_load = {setting.load: setting for setting in found if setting}
    if not by_load:
        problem = f"{spec.model}: how many weights it has, or what its layers keep, is not known"
        raise BadUsage(problem, "Use a model of the catalogue, or a folder with its safetensors.")
    return [*by_load.values()]


def card_work(s: Setting, step: StepKind) -> dict[str, float]:
    """Return what the kernels of a step do: seconds that the data sheet needs for it, or microseconds that each of so
    many kernels takes at least. The law multiplies each with its coefficient.

    tiles, rows: attention computes TILE rows for each KV head, at the size of its heads or of a usual one: small models
    are limited by this and not by the bytes of their cache. mixed: the same of steps with prompts. odd, wide: of head
    sizes that are no multiple of 64, and above 128."""
    work, model, gpu = s.work, s.model, s.gpu
    size = next((each for each in HEAD_SIZES if each >= model.head_size), model.head_size)
    tokens = step.sequences * work.context
    heads = tokens * work.kv_bytes_per_token / 4 / model.head_size  # KV heads of all layers that are read
    rows, tiles = (heads * 4 * TILE * each / gpu.flops_per_s for each in (TILE, size))
    return {
        "weights": work.weights_read(step.sequences + step.prompts * work.prompt_tokens) / gpu.bytes_per_s,
        "kv": tokens * work.kv_bytes_per_token / gpu.bytes_per_s,
        "rows": rows,
        "tiles": tiles,
        "mixed": rows * (step.prompts > 0),
        "odd": rows * (model.head_size % TILE > 0),
        "wide": tiles * (model.head_size > 128),
        "decode": 2 * work.parameters * step.sequences / gpu.flops_per_s,
        "prompts": step.prompts * work.prefill_flops / gpu.flops_per_s,
        "logits": 4 * model.vocabulary * (step.sequences + step.prompts) / gpu.bytes_per_s,
        "layers": 1e-6 * model.layers,
        "norms": 1e-6 * model.layers * MORE_NORMS.get(model.architecture, 0),
    }


def host_work(s: Setting, step: StepKind) -> dict[str, float]:
    """Return what the host does for a step, of which the law tells the milliseconds: the step, its sequences, hundreds
    of tokens of its prompts, layers launched one by one with graphs for their parts ("captured") or without, and for
    each further group of layers with a cache of its own the sequences and the prompts again."""
    prompt_tokens = step.prompts * s.work.prompt_tokens
    fits, layers = step.sequences + prompt_tokens <= s.captured, s.model.layers
    more = len(s.model.kv_groups[1]) - 1 if s.model.kv_groups else 0
    amounts = {
        "step": 1.0,
        "sequences": step.sequences,
        "prompt_tokens": prompt_tokens / 100,
        "captured": layers * (fits and step.prompts > 0),
        "launched": layers * (not fits),
        "group_sequences": more * step.sequences,
        "group_prompts": more * (step.prompts > 0),
    }
    return {name: amount / 1000 for name, amount in amounts.items()}


@dataclass(frozen=True, slots=True)
class HostCost:
    """Speed of a host by the host-speed probe, whose pieces of Python are those of the records. fast_s, middle_s: CPU
    time of a piece, its 10th percentile and its median."""

    fast_s: float
    middle_s: float


def host_cost(pieces_s: Iterable[float]) -> HostCost | None:
    """Return the cost of a host whose pieces took so long; None without any."""
    known = sorted(pieces_s)
    fast, middle = percentile(known, 0.1), percentile(known, 0.5)
    return HostCost(fast, middle) if fast and middle else None


@dataclass(frozen=True, slots=True)
class Laws:
    """Both laws, as fitted. card, host: coefficients by what they multiply; card in times of the data sheet or
    microseconds, host in milliseconds on the usual host. sharpness: q. usual: the cost of the usual host. slowness:
    powers by which a host is slower whose cost is above the usual. latency: "wait", mean steps that a new request waits
    for, and by how much TTFT and TPOT are less certain than tokens/s.

    spread: half-widths of intervals of 95% of the logarithm of a step's time that only the card, or only the host
    would limit, with "records" of the model or its "shape" alone, and for the host without its cost ("unknown"). cards:
    families that the rows are of; nothing tested the intervals on any other."""

    card: Mapping[str, float]
    host: Mapping[str, float]
    sharpness: float
    usual: HostCost
    slowness: tuple[float, float]
    latency: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cards: Sequence[str] = ()

    def slower(self, cost: HostCost | None) -> float:
        """Factor by which this host takes longer than the usual one; 1 if nobody measured it."""
        if cost is None:
            return 1.0
        ratios = cost.fast_s / self.usual.fast_s, cost.middle_s / self.usual.middle_s
        return math.exp(sum(power * math.log(ratio) for ratio, power in zip(ratios, self.slowness)))


def gpu_named(name: str) -> Peaks:
    """Return the data sheet of a family ("H200") or of a name as NVML has it. Raises BadUsage if it is not listed."""
    families = {gpu.family.lower(): gpu for gpu in gpu_figures.GPUS}
    if found := families.get(name.lower()) or gpu_figures.peaks_of(name):
        return found
    known = ", ".join(gpu.family for gpu in families.values())
    raise BadUsage(f"the data sheet of {name} is not known", f"Use one of {known}.")


# As `studies/two_laws.py` wrote it.
_FITTED = read_json(Path(__file__).with_name("two_laws.json"), "pip install --force-reinstall pytest-slmserve")
LAWS = Laws(**{**_FITTED, "usual": HostCost(**_FITTED["usual"]), "slowness": tuple(_FITTED["slowness"])})


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of all steps of a setting: in which kernels run, and that pass. host_share: how much of a change of the
    host's time they follow, 0 to 1. each: seconds of a step of each kind."""

    card_s: float
    seconds: float
    host_share: float
    each: tuple[float, ...]


def step_times(s: Setting, laws: Laws = LAWS, card: float = 1.0, host: float = 1.0) -> Times:
    """Return the times by both laws. card, host: factors of either."""
    rows = []
    for step in s.steps:
        run, prepare = (
            factor * sum(law[name] * amount for name, amount in work.items())
            for law, work, factor in ((laws.card, card_work(s, step), card), (laws.host, host_work(s, step), host))
        )
        powers = run**laws.sharpness, prepare**laws.sharpness
        seconds = sum(powers) ** (1 / laws.sharpness)
        rows.append((step.count * run, step.count * seconds, step.count * seconds * powers[1] / sum(powers), seconds))
    card_s, seconds, of_host = (sum(row[i] for row in rows) for i in range(3))
    return Times(card_s, seconds, of_host / seconds, tuple(row[3] for row in rows))


@dataclass(frozen=True, slots=True)
class Seen:
    """A point of a sweep, or a job, as measured on one host: what the laws are fitted to, or corrected by. busy: share
    of the time in which a kernel ran. host: equal on one boot of one host. cost: None without a probe."""

    setting: Setting
    tokens_per_s: float
    busy: float
    model: str
    gpu: str
    host: str
    cost: HostCost | None
    point: Point = field(repr=False)

    @property
    def seconds(self) -> float:
        """Seconds of all its steps."""
        return self.setting.tokens / self.tokens_per_s


# Arguments that change how much a step does, which settings tell; with any other a step is another.
TOLD = {"max_cudagraph_capture_size", "quantization", "max_num_batched_tokens"}


def seen_in(measurements: Sequence[Measurement]) -> list[Seen]:
    """Return the valid points and jobs of one engine alone on one GPU, host by host, in the order measured. Without
    profiling counters, with a cache of prefixes, adapters, drafts or grammars there is none."""
    costs = {
        host: host_cost(chain.from_iterable(map(_pieces, group)))
        for host, group in grouped(measurements, lambda m: m.environment.host).items()
    }
    found = []
    for group in grouped(filter(_counts, measurements), lambda m: (m.key, m.environment.host)).values():
        first, gpu = group[0], gpu_figures.peaks_of(group[0].environment.gpu_name)
        setting = gpu and setting_of(first.spec, first.workload, first.load, gpu, first.resolved)
        point = point_of([(m,) for m in group])
        rate, busy, host = point.output_tokens_per_s, point.engine_active, first.environment.host
        if gpu and setting and point.valid and rate and busy:
            names = short_name(first.spec.model), gpu.family, host or ""
            found.append(Seen(setting, rate, busy, *names, costs[host], point))
    return found


def _pieces(m: Measurement) -> list[float]:
    """CPU seconds of the pieces of a probe that ran the Python of the laws."""
    watch = gpu_figures.watched(m.run)
    usual = watch and f"{sensors.SPEED_PROBE} (Python {PYTHON})" in watch.telemetry.sources
    return watch.values(sensors.PROBE_CPU) if watch and usual else []


def _counts(m: Measurement) -> bool:
    """Check that a measurement is of one engine alone that does nothing but what settings tell."""
    spec, asked = m.spec, m.workload.spec
    waits = isinstance(m.load, ClosedLoop) and m.load.think_s
    plain = not (spec.caches_prefixes or asked.adapters or asked.response_format or waits)
    alone = m.replica is None and m.paired is None and spec.tensor_parallel_size == 1 and spec.interface == "engine"
    return alone and plain and spec.arguments.keys() <= TOLD and spec.platform == "cuda"


def factors(s: Setting, records: Iterable[Seen], laws: Laws = LAWS) -> tuple[float, float]:
    """Return how many times as long the card, and the host, take for this model as the laws say, by its records on any
    card and host; few records count little."""
    card, hosts = [(FEW["card"], 0.0)], dict[tuple[str, HostCost | None], list[tuple[float, float]]]()
    for seen in records:
        off = seen.seconds * seen.busy / step_times(seen.setting, laws).card_s
        card.append((math.exp(-s.away(seen.setting)), math.log(off)))
        by_law = step_times(seen.setting, laws, off, laws.slower(seen.cost))
        hosts.setdefault((seen.host, seen.cost), []).append(
            (by_law.host_share, math.log(seen.seconds / by_law.seconds))
        )
    host = [(FEW["host"], 0.0)]
    for (_, cost), each in hosts.items():
        weight = sum(share**2 for share, _ in each)
        if weight > FEW["card"]:  # else nothing that it served tells of hosts
            of_host = sum(share * rest for share, rest in each) / (weight + FEW["card"])
            host.append((1.0 if cost else 0.5, of_host))
    means = (sum(w * value for w, value in rows) / sum(w for w, _ in rows) for rows in (card, host))
    by_card, by_host = map(math.exp, means)
    return by_card, by_host


@dataclass(frozen=True, slots=True)
class Predicted:
    """A load on a GPU and a host that are not here, with intervals of 95%. ttft_s, tpot_s: None if requests start
    together. card_share: of what the card alone would serve. limit: of most of a step. half_widths: of the logarithm of
    the tokens/s, as they are and if one thing more was measured, by its name."""

    setting: Setting
    tokens_per_s: Interval
    ttft_s: Interval | None
    tpot_s: Interval | None
    card_share: float
    limit: Limit
    half_widths: Mapping[str, float]


RECORDS, COST = "a sweep of this model, on any GPU", "the cost of that host"


def half_width(spread: Mapping[str, Mapping[str, float]], host_share: float, records: bool, cost: bool) -> float:
    """Return the half-width of the logarithm of a step's time. spread: of `Laws`. records, cost: whether records of the
    model, and the cost of the host, are known."""
    mine = spread["records" if records else "shape"]
    return (1 - host_share) * mine["card"] + host_share * mine["host" if cost else "unknown"]


def predict_load(s: Setting, records: Sequence[Seen] = (), cost: HostCost | None = None) -> Predicted:
    """Return what both laws say of a setting. records: of this model, on other GPUs or hosts. cost: of the host; None
    if nobody measured it."""
    card, host = factors(s, records)
    found = step_times(s, LAWS, card, host * LAWS.slower(cost))
    share = found.host_share
    half = partial(half_width, LAWS.spread, share)

    def around(value: float, times: float = 1.0) -> Interval:
        reach = math.exp(now * times)
        return Interval(value, value / reach, value * reach)

    now = half(bool(records), cost is not None)
    others = {RECORDS: half(True, cost is not None), COST: half(bool(records), True)}
    mean = found.seconds / s.work.output_tokens
    ttft = found.each[-1] + LAWS.latency["wait"] * mean * (1 - 1 / s.load)
    parts: dict[Limit, float] = dict.fromkeys(("memory", "compute", "launches"), 0.0)
    for step in s.steps:
        for name, amount in card_work(s, step).items():
            parts[KINDS.get(name, "compute")] += step.count * LAWS.card[name] * amount
    return Predicted(
        s,
        around(s.tokens / found.seconds),
        None if s.together else around(ttft, LAWS.latency["ttft"]),
        None if s.together else around(mean, LAWS.latency["tpot"]),
        found.card_s / found.seconds,
        "host" if share > 0.5 else max(parts, key=parts.__getitem__),
        {"": now, **others},
    )


KINDS: dict[str, Limit] = {
    **dict.fromkeys(("weights", "kv", "logits"), "memory"),
    **dict.fromkeys(("layers", "norms"), "launches"),
}
CLAIM = "two-laws-hold"
GAIN = 0.10  # of throughput, for which a doubling of the batch is worth its latency


def batch_to_choose(
    settings: Sequence[Setting], records: Sequence[Seen] = (), cost: HostCost | None = None
) -> Interval:
    """Return the load, of these in ascending order, beyond which no doubling gains GAIN; and those that it would be if
    one law is off by its half-width."""
    off_card, off_host = (half_width(LAWS.spread, share, bool(records), cost is not None) for share in (0.0, 1.0))
    each = [(s, *factors(s, records)) for s in settings]

    def chosen(off: float) -> int:
        card_off, host_off = math.exp(off * off_card), LAWS.slower(cost) * math.exp(-off * off_host)
        laps = [(s.load, s.tokens / step_times(s, LAWS, c * card_off, h * host_off).seconds) for s, c, h in each]
        gains = [(math.log(b / a) / math.log2(n / m), n) for (m, a), (n, b) in pairwise(laps)]
        return next((n for gain, n in reversed(gains) if gain >= math.log1p(GAIN)), laps[0][0])

    batches = [chosen(off) for off in (0.0, 1.0, -1.0)]
    return Interval(batches[0], min(batches), max(batches))


def interval_verdicts(there: Iterable[Seen], records: Sequence[Seen]) -> list[Verdict]:
    """Return for each sweep, or job, of a host whether what was measured is inside the intervals of the prediction at
    all loads. records: those that may correct the laws, none of these among them."""
    found = []
    for (host, together, _), each in grouped(there, lambda r: (r.host, r.setting.together, r.setting.captured)).items():
        pairs = [(row, predict_load(row.setting, records, row.cost)) for row in each]
        ratios = [(row.tokens_per_s / p.tokens_per_s.value, math.exp(p.half_widths[""]), row) for row, p in pairs]
        ratio, reach, row = max(ratios, key=lambda one: abs(math.log(one[0])) / math.log(one[1]))
        inside = sum(1 / most <= each_ratio <= most for each_ratio, most, _ in ratios)
        why = (
            f"{row.gpu}, host {host or 'not known'}, {'together' if together else 'steady'}: {inside} of {len(each)} "
            f"loads measured are inside; at {row.setting.load} measured is {percent(ratio)} of predicted, and "
            f"{percent(1 / reach)} to {percent(reach)} is inside"
        )
        state, points = State.PASSES if inside == len(each) else State.FAILS, (one.point for one in each)
        found.append(Verdict.from_interval(CLAIM, row.model, state, why, Interval(ratio), reach, *points))
    return found
