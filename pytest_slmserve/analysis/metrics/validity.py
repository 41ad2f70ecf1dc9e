"""Findings on a measurement, one sentence each: what makes it invalid or questionable, and what disturbed it.

Only a known cause that is not noise makes a measurement invalid or questionable. Windows on a slow or shared host
count, and their interval contains that noise, because excluding them would keep only the good moments.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Literal, NamedTuple, get_args

from pytest_slmserve.analysis.estimates import grouped, percent
from pytest_slmserve.analysis.metrics import gpu_figures, window
from pytest_slmserve.analysis.metrics.gpu_figures import DeviceFigures, SensorWindow
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.schema import sensors as of
from pytest_slmserve.schema.kv_cache import kv_capacity
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Environment, Measurement, Replica, ReplicaGroup, Run
from pytest_slmserve.schema.specs import is_burst, is_job, is_steady

Kind = Literal["invalid", "degraded"]

COVERAGE = 0.95  # a ratio may be anything in the rest, so the mean of the window is known to 0.05
GAP_INTERVALS, GAP_S = 5, 2.0  # one or two late readings are usual; in two seconds a load can change and change back
MISSING = 0.20  # a missing fifth moves the mean by a fifth of its difference from the rest
CAPPED = 0.01  # of the window: the cap then lowers throughput by less than a repeat's noise
CLOCK_DROP = 0.05  # clocks move in steps of 15 MHz, below 1%; flashinfer issue 2899: 20% lower was 15% slower
ENERGY_APART = 0.05  # the two methods agree within 1% under load where both work (ml-energy/zeus issue 12)
ENERGY_WINDOW_S = 10.0  # power lags by its average over 1 s, so the ends of a shorter time may differ by more
ENERGY_ENDS_S = 0.6  # seconds by which they may differ: 6.9% over 8 s were seen, and 7.6% over 5 s
STILL_S = 1.0  # the energy counter moves about every 0.1 s (ml-energy/zeus), whatever the load
DEAD_READINGS, BUSY = 5, 0.5  # a pause can make one or two readings 0, but not five on a busy GPU
RATIO_END = 1.05  # the ends of spans are rounded; a reading of 1.29 was wrong (NVIDIA/DCGM issue 152)
STOLEN = 0.02  # of the CPU time used: on a CPU-bound engine throughput falls by as much, which is a repeat's noise
THROTTLED = 0.01  # Linux assigns CPU quota every 0.1 s, so a used-up quota is a pause of several steps
OTHERS, IDLE = 0.10, 0.10  # of all cores: other processes disturb if they use many and few are left

# Bits of the clock event reasons (NVIDIA, nvml.h) and the counter of the same cause. The power limit is not among them,
# because on an H200 every large batch of a model of 1.3 billion parameters or more reaches it. Its effect is a figure
# (`DeviceFigures.power_capped`), and only a change of the clock within a window is a finding.
SLOWDOWNS: tuple[tuple[int, int | None, str], ...] = (
    (0x08, None, "hardware slowdown"),
    (0x20, of.CAPPED_SW_THERMAL, "software thermal slowdown"),
    (0x40, of.CAPPED_HW_THERMAL, "hardware thermal slowdown"),
    (0x80, of.CAPPED_BRAKE, "hardware power brake"),
)
GPU_IDLE = 0x01  # a clock falls because nothing runs


class CheckResult(NamedTuple):
    """Findings on a measurement, one sentence each.

    Attributes:
        problems: they make the measurement invalid.
        degradations: sensor warnings, with which the measurement is valid but not used by a gate.
        noise: disturbances of the host, which the interval covers.
        starved: other processes used the CPU cores, which explains the problems.
        unknown: why there is no sensor data.
    """

    problems: tuple[str, ...] = ()
    degradations: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    starved: bool = False
    unknown: tuple[str, ...] = ()

    @property
    def state(self) -> Literal["invalid", "degraded", "unknown", "ok"]:
        """Worst kind of finding."""
        return "invalid" if self.problems else "degraded" if self.degradations else "unknown" if self.unknown else "ok"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Sentences on the state; none if it is "ok"."""
        return self.problems or self.degradations or self.unknown


def health(
    run: Run,
    environment: Environment | None = None,
    replica: Replica | None = None,
    even: bool = True,
    beside: bool = False,
) -> CheckResult:
    """Return the findings of the sensors over one run's window; of several GPUs the worst counts.

    If they make the run invalid, sensor warnings are problems too.

    Args:
        environment: has the number of cores, without which a busy host is not noticed.
        replica: the engine's part in a run of several engines, whose processes also use the GPU.
        even: whether the load is constant during the window.
        beside: whether another, idle engine of this run is on the GPU.
    """
    if gpus := gpu_figures.runs_of_each_gpu(run):
        found = [health(one, environment, replica, even, beside) for one in gpus]
        reasons = tuple(f"GPU {i}: {text}" for i, one in enumerate(found) for text in one.reasons)
        noise = tuple(f"GPU {i}: {text}" for i, one in enumerate(found) for text in one.noise)
        states, starved = {one.state for one in found}, any(one.starved for one in found)
        worst = "problems" if "invalid" in states else "degradations" if "degraded" in states else "unknown"
        return CheckResult(noise=noise, starved=starved, **{worst: reasons})
    watch = gpu_figures.watched(run)
    if watch is None:
        return CheckResult(unknown=("no telemetry was taken in the window",))
    if not any(watch.values(number) for number in watch.telemetry.columns):
        return CheckResult(unknown=("no sensor said anything in the window",))
    figures = gpu_figures.device_figures(run)
    own = 1 + beside  # vLLM computes in one process per GPU; under MPS there is a server as well
    if replica and replica.sharing != "gpus":
        own = replica.count + (replica.sharing == "mps")
    starving = tuple(_busy_host(watch, figures, environment.cores if environment else None))
    findings = [*_gpu_events(watch, own), *_wrong_readings(watch, figures)]
    invalid, degraded = (tuple(text for kind, text in findings if kind == wanted) for wanted in get_args(Kind))
    noise = (*_unseen_or_uneven(watch, figures, even), *starving)
    if invalid:
        invalid, degraded = (*invalid, *degraded), ()
    return CheckResult(invalid, degraded, noise, starved=bool(starving))


def _unseen_or_uneven(watch: SensorWindow, figures: DeviceFigures, even: bool) -> Iterator[str]:
    """Yield a finding for missing readings, and for a change of the SM clock."""
    telemetry, (opens, closes), share = watch.telemetry, watch.window_s, figures.coverage
    # One interval may always be missing: the one that the end of the run cuts off.
    missing_s, allowed_s = (1 - (share or 0.0)) * (closes - opens), (1 - COVERAGE) * (closes - opens)
    profiled = any(number in telemetry.columns for number in of.PROFILED)
    if share is not None and profiled and missing_s > max(allowed_s, telemetry.interval_s):
        yield f"profiled counters cover {percent(share)} of the window (limit {percent(COVERAGE)})"
    if any(number < of.OURS for number in telemetry.columns):
        moments = [opens, *sorted(at for at in telemetry.time_s if opens < at < closes), closes]
        longest = max(after - before for before, after in pairwise(moments))
        bound = max(GAP_INTERVALS * telemetry.interval_s, GAP_S)
        if longest > bound:
            yield f"no reading for {longest:.1f} s of the window (limit {bound:.1f} s)"
    rows = []
    for row in watch.rows:
        clock, reasons = watch.value(of.SM_CLOCK, row) or 0, int(watch.value(of.CLOCK_REASONS, row) or 0)
        if clock > 0 and not reasons & GPU_IDLE:  # an unknown reason counts as none
            rows.append((clock, reasons))
    if any(reasons & gpu_figures.POWER_CAP for _, reasons in rows) and len(rows) > 1:
        # Under the power limit the clock dithers from reading to reading, so the halves of the window are compared.
        half = len(rows) // 2
        then, now = (fmean(clock for clock, _ in part) for part in (rows[:half], rows[half:]))
        if even and abs(now / then - 1) > CLOCK_DROP:
            yield (
                f"under the power limit the mean SM clock moved from {then / 1e6:.0f} MHz in the first half of the "
                f"window to {now / 1e6:.0f} MHz ({percent(now / then - 1)}, limit {percent(CLOCK_DROP)})"
            )
    elif rows and (lowest := min(rows)[0]) < (1 - CLOCK_DROP) * (middle := median(clock for clock, _ in rows)):
        yield (
            f"the SM clock fell to {lowest / 1e6:.0f} MHz from a median of {middle / 1e6:.0f} MHz "
            f"({percent(1 - lowest / middle)} lower, limit {percent(CLOCK_DROP)})"
        )


def _gpu_events(watch: SensorWindow, own_processes: int) -> Iterator[tuple[Kind, str]]:
    bits = [int(value) for value in watch.values(of.CLOCK_REASONS)]
    for bit, counter, name in SLOWDOWNS:
        told = sum(bool(each & bit) for each in bits)
        share = watch.share_grown(counter) if counter else None
        if told:
            yield "invalid", f"{name}: in {told} of {len(bits)} readings of the clock reasons (limit 0)"
        elif share is not None and share > CAPPED:
            yield "invalid", f"{name}: {percent(share)} of the window by its counter (limit {percent(CAPPED)})"
    foreign, processes = watch.values(of.FOREIGN_PROCESSES), max(watch.values(of.GPU_PROCESSES), default=0)
    if foreign and max(foreign) > 0:
        yield "invalid", f"{max(foreign):.0f} processes of others computed on the GPU (limit 0)"
    elif not foreign and processes > own_processes:
        what = f"{processes:.0f} processes computed on the GPU, and whose they are is not known"
        yield "degraded", f"{what} (limit {own_processes})"
    # The Xid of the last error stays, so only a change is an error.
    for before, now in pairwise(watch.with_before(of.XID)):
        if now not in (before, 0):
            yield "invalid", f"the GPU reported Xid {now:.0f} (before: {before:.0f})"
    broken = {of.ECC_DOUBLE_BIT: "memory errors beyond repair", of.REMAPPED_ROWS: "remapped memory rows"}
    for number, what in broken.items():
        values = watch.with_before(number)
        if values and max(values) > values[0]:
            yield "invalid", f"{what} grew from {values[0]:.0f} to {max(values):.0f} (limit: no growth)"
    limits = watch.with_before(of.POWER_LIMIT)
    if limits and min(limits) < max(limits):
        yield "invalid", f"the power limit moved between {min(limits):.0f} W and {max(limits):.0f} W (limit: no change)"


def _wrong_readings(watch: SensorWindow, figures: DeviceFigures) -> Iterator[tuple[Kind, str]]:
    """Yield a finding for each failed source, missing counter and impossible reading."""
    (times, joules), apart, (opens, closes) = watch.readings(of.ENERGY), figures.energy_deviation, watch.window_s
    seconds = times[-1] - times[0] if times else 0.0
    fall = next(((before, after) for before, after in pairwise(joules) if after < before), None)
    if fall:
        yield "invalid", f"the energy counter fell from {fall[0]:.0f} J to {fall[1]:.0f} J (limit: no fall)"
    elif seconds >= STILL_S and joules[-1] == joules[0]:
        yield "invalid", f"the energy counter stood still for {seconds:.1f} s (limit {STILL_S:.1f} s)"
    limit = ENERGY_APART
    if closes - opens < ENERGY_WINDOW_S:
        limit = ENERGY_ENDS_S / seconds if seconds > 0 else math.inf
    if not fall and apart is not None and abs(apart) > limit:
        what = f"integrated power is {percent(apart)} apart from the energy counter"
        yield "degraded", f"{what} (limit {percent(limit)})"
    busy = max(figures.gpu_util or 0.0, figures.engine_active or 0.0)
    for number in (of.SM_ACTIVE, of.DRAM_ACTIVE):
        values = watch.values(number)
        if busy > BUSY and len(values) >= DEAD_READINGS and not any(values):
            what = f"{of.SENSORS[number].names[0]} is 0 in all {len(values)} readings while the GPU is busy"
            yield "invalid", f"{what} for {percent(busy)} of the time (limit {percent(BUSY)})"
    # Not the host's ratios: Linux adds up pressure every two seconds, so a reading may contain that of the one before.
    for number in (n for n in watch.telemetry.columns if n < of.OURS and n in of.SENSORS):
        wrong = [v for v in watch.values(number) if not 0 <= v <= RATIO_END]
        if of.SENSORS[number].unit == "ratio" and wrong:
            what = f"{of.SENSORS[number].names[0]} was {max(wrong, key=abs):.3g}, which is no ratio"
            yield "invalid", f"{what} (limits 0 and {RATIO_END})"
    rows = len(watch.rows)
    for number in (n for n in of.PROFILED if n in watch.telemetry.columns):
        lost = rows - len(watch.values(number))
        if lost > MISSING * rows:
            name = of.SENSORS[number].names[0]
            yield "degraded", f"{name} is missing in {lost} of {rows} readings (limit {percent(MISSING)})"
    for note in watch.telemetry.notes:
        yield "degraded", f"a sensor was lost: {note}"


def _busy_host(watch: SensorWindow, figures: DeviceFigures, cores: int | None) -> Iterator[str]:
    own, used, stolen = figures.own_cores, figures.host_cores, figures.stolen_cores
    if stolen is not None and (base := own or used) and stolen > STOLEN * base:
        what = f"the hypervisor took {stolen:.2f} cores where {base:.2f} were used"
        yield f"{what} ({percent(stolen / base)}, limit {percent(STOLEN)})"
    share = watch.mean(of.CPU_THROTTLED)
    if share is not None and share > THROTTLED:
        yield f"the CPU quota was used up for {percent(share)} of the time (limit {percent(THROTTLED)})"
    if own is not None and used is not None and cores:
        others, idle = (used - own) / cores, 1 - used / cores
        if others > OTHERS and idle < IDLE:
            what = f"others used {used - own:.1f} of {cores} cores (limit {percent(OTHERS)})"
            yield f"{what} and {percent(max(idle, 0.0))} were idle (limit {percent(IDLE)})"


# A failed request spares the server work, so a single one is too many unless you allow more.
FAILED_SHARE = 0.0
MIN_STEPS = 20  # fewer make a rate of one odd step in twenty wrong by 5%
MIN_STEPS_PER_HALF = 20
LONGER_WINDOW = "a longer window"  # would make the measurement valid
LITTLE_TOLERANCE = 0.05  # both counts are of the same run, so they differ only by the window's ends
LITTLE_STEPS = 2  # the stamps of the first and last token may each be one step off
LOAD_TOLERANCE = 0.05
LOAD_STEPS = 3  # between two requests a user waits for the running step, the next step, and its own
TOKENS_TOLERANCE = 0.01  # the tokens of a preempted request may be counted twice
EARLY_SHARE = 0.01  # share of the requests that may end early
CONVOY_TOLERANCE = 0.05  # of a lockstep cycle: a missing part may be prefill or decode only
STEADY_TOLERANCE = 0.10  # the noise of a repeat is a few percent on a shared host
# Of the prompt tokens. Prompts are at most about half of the work at the usual lengths, so this share changes
# throughput by less than repeats differ. A chat template that begins every prompt stays below it.
MOST_CACHED = 0.05
LARGEST_BLOCK = 128  # tokens, of vLLM's CPU backend; the default on GPUs is 16
BY_COUNTERS = "server metrics"


def problems(measurement: Measurement, failed_share: float = FAILED_SHARE) -> tuple[str, ...]:
    """Return why a measurement is invalid; `failed_share` of its requests may fail."""
    return check(measurement, failed_share=failed_share).problems


def is_clean(group: ReplicaGroup) -> bool:
    """Return whether a repeat is neither invalid nor questionable."""
    found = check(*group)
    return not found.problems and not found.degradations


def check(*group: Measurement, failed_share: float = FAILED_SHARE) -> CheckResult:
    """Return the findings on one measurement, or on engines that were measured at the same time.

    The throughput of engines of one model is checked as a sum, because one engine may lose what another one gains.
    """
    if len(group) == 1:
        return _check_one(group[0], failed_share)
    each = [_check_one(m, failed_share) for m in group]
    problems, degraded, noise = (
        tuple(f"replica {number}: {text}" for number, texts in enumerate(kind, 1) for text in texts)
        for kind in zip(*(found[:3] for found in each), strict=True)
    )
    starved = all(found.starved for found in each if found.problems)
    runs = window.common_span(group)
    if not problems and not all(window.window_trace(run).seconds for run in runs):
        problems, starved = ("the windows of the replicas have no time in common",), False
    if not problems:
        within = (replace(m, run=run) for m, run in zip(group, runs, strict=True))
        by_model = grouped(within, lambda m: short_name(m.spec.model))
        noise += tuple(f"{model}: {text}" for model, same in by_model.items() for text in not_steady(same))
    return CheckResult(problems, degraded, noise, starved and problems != ())


def _check_one(measurement: Measurement, failed_share: float) -> CheckResult:
    stream = measurement.run.stream
    even, its = measurement.load.requests is None, measurement.paired
    beside = its is not None and its.window is not None
    seen = health(measurement.run, measurement.environment, measurement.replica, even, beside)
    broken = tuple(_broken(measurement, failed_share))
    if broken:
        starved = seen.starved and all(LONGER_WINDOW in text for text in broken)
        return CheckResult(broken, seen.degradations, seen.noise, starved)
    others = (*_implausible(measurement), *seen.problems)
    unheld = tuple(_load_not_held(measurement))  # a client without a core sends late
    late = []
    if stream and stream.stamp_uncertainty_s:
        doubt_s = stream.stamp_uncertainty_s[0]
        harmless_s = window.harmless_s(window.latencies_of(measurement).ttft_s.p50)
        if doubt_s > harmless_s:
            what = f"the client was held up: its stamps can be {doubt_s * 1e3:.1f} ms late in the mean"
            late.append(f"{what}, {harmless_s * 1e3:.1f} ms are harmless")
    steadiness = not_steady([measurement]) if measurement.alone else ()
    noise = (*late, *steadiness, *seen.noise)
    return CheckResult((*others, *unheld), seen.degradations, noise, seen.starved and not others and unheld != ())


def _broken(measurement: Measurement, failed_share: float) -> Iterator[str]:
    """Yield the problems after which no other check makes sense."""
    run, judged = measurement.run, window.judged_requests(measurement)
    counts = (run.failures, len(run.samples)), (judged.failures, len(judged.rows))
    share = max(failed / max(1, failed + others) for failed, others in counts)
    if share > failed_share:
        borne = f" ({percent(share)} of the requests, {percent(failed_share)} may)" if failed_share else ""
        unsent = len(run.stream.unsent_s) if run.stream else 0
        given_up = f"; the load was given up, {unsent} requests were not sent any more" if unsent else ""
        first = run.first_failure or "no reason given"
        yield f"{run.failures} requests failed, the first with {first}{borne}{given_up}"
    served = sum(run.samples.finished)
    ended = window.finished_in_window(run)
    blind = all(run.samples.first_token_s[row] is None for row in ended)
    if is_job(measurement.load):  # its preemptions are allowed, because a small KV cache may be the question
        asked = measurement.load.requests or 0
        if served + run.failures < asked:
            yield f"{served} of {asked} requests were served"
        elif blind:
            yield "no finished request says when its first token came"
        return
    if run.failures and not served:  # no window would be long enough
        return
    if preempted := window.preemptions(run):
        yield f"{preempted} preemptions in the window: the KV cache is too small for this load"
    trace = window.window_trace(run)
    if (steps := len(trace.steps)) < MIN_STEPS or not trace.seconds:
        told = f"{steps} engine steps in the window, {MIN_STEPS} are needed"
        if run.stream and not len(run.steps):  # the steps are spans of time in the client
            bin_s = run.stream.bin_s
            told = f"tokens came for {steps * bin_s:g} s of the window, {MIN_STEPS * bin_s:g} s are needed"
        yield f"{told}: {LONGER_WINDOW}, or more requests"
    if not ended:
        yield f"no request finished in the window: {LONGER_WINDOW}"
    elif blind:
        yield "no finished request says when its first token came"


def _implausible(measurement: Measurement) -> Iterator[str]:
    """Yield a problem for each sign of wrong numbers."""
    run, load, environment = measurement.run, measurement.load, measurement.environment
    rate, batch = window.output_tokens_per_s(run), window.mean_batch(run)
    fraction = gpu_figures.roofline_fraction(measurement, rate, batch, overlap=True)
    if rate is not None and fraction is not None and fraction > 1:
        what = f"{rate:.0f} output tokens/s at batch {batch:.1f} is {fraction:.2f} times"
        yield f"{what} what {environment.gpu_name} can do at most"
    if is_burst(load) and any(run.steps.accepted):
        yield "drafts give each request other steps, so those that start together drift apart: ramp-up staggered"
    elif is_burst(load) and len(run.steps) and measurement.workload.kind == "generate":
        # Prefill and decode alternate. Windows within one lockstep cycle had 0.4 to 1.1 times its throughput.
        period = round(measurement.workload.mean_output_tokens + 1)  # engine steps
        periods = (len(window.window_trace(run).steps) - 1) / period
        if abs(periods - max(1, round(periods))) > CONVOY_TOLERANCE:
            yield f"the window holds {periods:.2f} periods of a convoy, not a whole number, and their parts differ"
    asked, made = sum(run.samples.output_tokens), sum(run.steps.new_tokens)
    if is_job(load) and len(run.steps) and abs(made / max(1, asked) - 1) > TOKENS_TOLERANCE:
        yield f"the requests have {asked} output tokens, the trace of the steps {made}"
    came, wanted = window.finished_output_tokens(run), tokens_asked_for(measurement)
    if wanted and (early := sum(tokens < wanted for tokens in came)) > EARLY_SHARE * len(came):
        why, hint = "although ignore_eos was asked for", "the server's log; or, if it does not know that, --extra-body "
        hint += "'{\"ignore_eos\": null}'"
        if measurement.workload.spec.response_format:
            why, hint = "because their JSON was complete", "a schema that goes on for longer, or fewer tokens"
        told = f"{early} of {len(came)} requests ended before their {wanted} output tokens"
        yield f"{told}, {why} ({fmean(came):,.4g} in the mean): {hint}"
    delay = window.delay_of(run)
    if delay and (late := window.late_sends(delay, window.latencies_of(measurement).ttft_s.p50)):
        yield late
    cached = cache_hit_share(run)
    if measurement.workload.spec.finds_prefixes:
        yield from _other_hit_rate(measurement)
    elif cached and cached.share > MOST_CACHED and not measurement.spec.allow_prefix_cache:
        yield (
            f"{percent(cached.share)} of the prompt tokens came from a prefix cache, {cached.told_by} (limit "
            f"{percent(MOST_CACHED)}): prompts that it has not seen, or -o slm_allow_prefix_cache=1 (measure: "
            "--allow-prefix-cache)"
        )


def _other_hit_rate(measurement: Measurement) -> Iterator[str]:
    """Yield a problem if the prefix cache served an unexpected share of the prompt tokens, or an unknown one."""
    run, spec, cached = measurement.run, measurement.workload.spec, cache_hit_share(measurement.run)
    turns, without = spec.turns, f"without --slm-{'turns' if spec.turns > 1 else 'prefix-share'}"
    serves = measurement.spec.caches_prefixes or measurement.spec.interface == "endpoint"
    if cached is None and turns > 1 and not serves:
        return
    if cached is None:
        why = "the hit rate that was asked for is not known, because no prompt tokens from a prefix cache are reported"
        yield f"{why}: a server that counts them (vllm serve --enable-prompt-tokens-details), or {without}"
        return
    samples, block, first = run.samples, measurement.resolved.block_size, dict[int, int]()
    rows = range(len(samples)) if cached.told_by == BY_COUNTERS else window.finished_in_window(run)
    for row in sorted(range(len(samples)), key=lambda row: samples.sent_s[row]):
        # The first prompt of a group finds nothing if the cache is empty.
        first.setdefault(samples.request[row] // turns if turns > 1 else samples.request[row] % spec.prefix_groups, row)
    if turns > 1:
        length, before = dict(zip(samples.request, samples.prompt_tokens)), {}
        for row in rows:  # if a stored turn has lost the one before it, its length follows from the fixed lengths
            adds = (spec.longest or 0) // turns or samples.prompt_tokens[row]
            left, number = samples.prompt_tokens[row] - adds, samples.request[row]
            before[row] = length.get(number - 1, left) if number % turns else 0
        shared = before if serves else dict.fromkeys(rows, 0)
    else:
        shared = {row: spec.shared_of(samples.prompt_tokens[row]) for row in rows}
    tokens = max(1, prompt_tokens(run, rows))
    sizes = (block, block) if block else (LARGEST_BLOCK, 1)
    least, most = (sum(n // size * size for n in shared.values()) / tokens for size in sizes)
    users = measurement.load.max_concurrency or 0  # each begins with one of the first conversations
    missed = sum(shared.get(row, 0) for n, row in first.items() if turns == 1 or n < users) / tokens
    # The limit is on the remaining work: the prompt tokens that the engine computes.
    low = max(0.0, least - missed - MOST_CACHED * (1 - least))
    high = most + MOST_CACHED * (1 - most)
    if not low <= cached.share <= high:
        within = f"of {block} tokens" if block else "of a size that is not known"
        asked = percent(most) if least == most else f"{percent(least)} to {percent(most)}"
        asks = f"{turns} turns give" if turns > 1 else f"a prefix share of {spec.prefix_share:g} gives"
        yield (
            f"{percent(cached.share)} of the prompt tokens came from a prefix cache, {cached.told_by}, not the {asked} "
            f"that {asks} in whole blocks {within} (limits {percent(low)} and {percent(high)}): a KV cache with more "
            f"room, or a server that nobody else uses, or {without}"
        )


def tokens_asked_for(measurement: Measurement) -> int | None:
    """Return the output tokens that each request must have, or None if it may have fewer."""
    spec, stream = measurement.spec, measurement.run.stream
    if measurement.workload.spec.response_format and spec.interface != "endpoint":
        return measurement.workload.spec.output_tokens
    if spec.interface != "endpoint" or stream is None or stream.tokens_per_chunk is None:
        return None
    unlike = {"ignore_eos", "max_tokens", "max_completion_tokens", "stop", "stop_token_ids"}
    if "ignore_eos" in stream.refused or unlike & {name for name, _ in spec.extra}:
        return None
    return measurement.workload.spec.output_tokens


def _load_not_held(measurement: Measurement) -> Iterator[str]:
    """Yield a problem if the engine did not have the requested concurrency."""
    run, load, output_tokens = measurement.run, measurement.load, measurement.workload.mean_output_tokens
    # A client of a server does not see when requests were admitted, and vLLM stamps no interval of pooling requests.
    if measurement.spec.interface != "engine" or is_job(load) or measurement.workload.kind != "generate":
        return
    apart, tolerance = window.littles_law(run), max(LITTLE_TOLERANCE, LITTLE_STEPS / output_tokens)
    if apart is None:
        yield "no request says when its first token came: Little's law cannot be checked"
    elif abs(apart) > tolerance:
        decoding, batch = window.requests_in_flight(run, "first_token_s"), window.mean_batch(run)
        yield (
            f"Little's law: {decoding:.1f} requests made tokens by their own intervals, {batch:.1f} by the step trace "
            f"({percent(abs(apart))} apart, limit {percent(tolerance)})"
        )
    if not is_steady(load):
        return
    sent, held = window.requests_in_flight(run, "sent_s"), window.requests_in_flight(run)
    least = 1 - max(LOAD_TOLERANCE, LOAD_STEPS / (LOAD_STEPS + output_tokens))
    users = load.concurrency - window.thinking_users(measurement)
    if sent is not None and sent < least * users:
        what = f"{sent:.1f} requests were active on average, not the {users:.4g} that were asked for"
        yield f"{what} (limit {percent(least)} of them)"
    elif held is not None:
        # Requests may wait because of the limits of sequences or tokens in a step, but not for lack of KV cache.
        wanted = min(users, measurement.resolved.max_num_seqs or measurement.spec.max_num_seqs)
        if held >= least * wanted:
            return
        room = kv_capacity(measurement.spec, measurement.workload.longest, measurement.resolved)
        if room is None or room < wanted:
            why = "its KV cache is not known" if room is None else f"its KV cache has room for {room}"
            what = f"the engine held {held:.1f} requests in the mean, not the {wanted:.4g} asked for"
            yield f"{what} (limit {percent(least)} of them): {why}"


def trustworthy(subject: str, repeats: Sequence[ReplicaGroup], wanted: int = 1) -> Verdict:
    """Return the verdict that at least `wanted` repeats of a case are valid.

    It is inconclusive if all problems come from other processes that used the CPU cores.
    """
    wrong = [found for group in repeats if (found := check(*group)).problems]
    valid = len(repeats) - len(wrong)
    what = "runs" if any(len(group) > 1 for group in repeats) else "measurements"
    told = "; ".join(dict.fromkeys(text for found in wrong for text in found.problems))
    why = ": ".join(filter(None, [f"{valid} of {len(repeats)} {what} are valid, {wanted} are wanted", told]))
    starved = bool(wrong) and all(found.starved for found in wrong)
    state = State.PASSES if valid >= wanted else State.INCONCLUSIVE if starved else State.FAILS
    records = tuple(m.id for group in repeats for m in group)
    return Verdict("valid-point", subject, state, why, value=valid, threshold=wanted, n=len(repeats), records=records)


def not_steady(together: Sequence[Measurement]) -> Iterator[str]:
    """Yield a finding if the throughput of concurrent engines changed within the window.

    There is none if an engine has a load that is not steady, or too few steps.
    """
    first = second = 0.0  # output tokens/s at both ends of the window
    for measurement in together:
        load, run, trace = measurement.load, measurement.run, window.window_trace(measurement.run)
        if not is_steady(load) or not trace.seconds:
            return
        ends, n = trace.ends_s, len(trace.steps)
        if load.ramp_up == "staggered":
            middle = bisect_left(ends, (ends[0] + ends[-1]) / 2, 0, n - 1)
            halves = range(middle + 1), range(middle, n)
        else:
            # Parts of a lockstep cycle differ, so compare equal numbers of whole cycles.
            period = round(measurement.workload.mean_output_tokens + 1)  # engine steps
            each = min(round(n / period) // 2 * period, n - 1) if len(run.steps) else 0
            halves = range(each + 1), range(n - 1 - each, n)
        begin, end = (window.output_tokens_per_s(run, half.start, half.stop) for half in halves)
        if min(map(len, halves)) <= MIN_STEPS_PER_HALF or not begin or not end:
            return
        first, second = first + begin, second + end
    if abs(second / first - 1) > STEADY_TOLERANCE:
        yield (
            f"not steady: {first:.0f} output tokens/s in the first half of the window, {second:.0f} in the second "
            f"({percent(abs(second / first - 1))} apart, limit {percent(STEADY_TOLERANCE)})"
        )


@dataclass(frozen=True, slots=True)
class Cached:
    """A prefix cache's share of the prompt tokens, and the source of that count."""

    share: float
    told_by: str


def prompt_tokens(run: Run, rows: Iterable[int]) -> int:
    return sum(run.samples.prompt_tokens[row] for row in rows)


def cache_hit_share(run: Run) -> Cached | None:
    """Return the share of the prompt tokens that a prefix cache served, if known.

    It is counted over the requests that ended in the window, or else by the server's counters, which include other
    users.
    """
    found, ended = run.samples.cached_tokens, window.finished_in_window(run)
    if any(count is not None for count in found) and ended:  # some servers omit a count of 0
        return Cached(sum(found[i] or 0 for i in ended) / prompt_tokens(run, ended), "counted for each request")
    looked_up, hits = (run.stream and run.stream.cache_lookups) or (0, 0)
    return Cached(hits / looked_up, BY_COUNTERS) if looked_up else None
