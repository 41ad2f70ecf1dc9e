"""Shared builders and hypothesis strategies: measurements and points whose numbers are planted, not measured."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean
from typing import Any

from hypothesis import strategies as st

from pytest_slmserve.analysis.claims.table import ClaimRow, claim_of, judge_row
from pytest_slmserve.analysis.metrics.gpu_figures import Work, work_of_workload
from pytest_slmserve.analysis.points import JobPoint, JobSummary, Point, ReplicaPoint, ReplicaSummary, Summary
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.schema import records, sensors
from pytest_slmserve.schema.errors import Sharing
from pytest_slmserve.schema.models import Model
from pytest_slmserve.schema.records import Environment, Measurement, Resolved, Run, Samples, Steps, Telemetry
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, Load, OpenLoop, WorkloadReference, WorkloadSpec

H200 = Environment(platform="cuda", gpu_name="NVIDIA H200", gpu_memory_bytes=150_754_820_096, vllm="0.26.0")

PASSES, FAILS, INCONCLUSIVE = State.PASSES, State.FAILS, State.INCONCLUSIVE

RESOLVED = Resolved(kv_blocks=1365, block_size=16, weight_bytes=2_631_516_160, max_num_seqs=1024, dtype="float16")

NO_SAMPLES, NO_STEPS = Samples(*[()] * 8), Steps(*[()] * 7)


def workload(prompt_tokens: int = 64, output_tokens: int = 32) -> WorkloadReference:
    spec = WorkloadSpec(prompt_tokens=prompt_tokens, output_tokens=output_tokens, requests=64)
    longest = prompt_tokens + output_tokens
    return WorkloadReference("0123456789ab", spec, 64, prompt_tokens, output_tokens, longest, "planted")


def work_of_model(
    model: Model, prompt_tokens: int, output_tokens: int, *, weight_bytes=None, cache="auto", gpus=1
) -> Work | None:
    """Work of a request on an engine of this model. cache: data type of the KV cache."""
    spec = EngineSpec("planted", tensor_parallel_size=gpus, extra=(("kv_cache_dtype", cache),), model_facts=model)
    return work_of_workload(spec, Resolved(weight_bytes=weight_bytes), workload(prompt_tokens, output_tokens))


def planted_run(
    concurrency: int, tokens_per_s: float, *, output_tokens=32, steps=100, idle_steps=0,
    slow_from: int | None = None, slow_factor=1.0, preempted=0, failures=0, first_early=0.0,
) -> Run:  # fmt: skip
    """A closed loop on an engine with steps of equal length, whose users start staggered over one request.

    The window holds `steps` whole steps after the ramp, all with the full batch. idle_steps: a user pauses so many
    steps between two requests. slow_from: window step from which steps take `slow_factor` as long. preempted: in the
    middle of the window. first_early: every request claims that its first token came so many of its lifetimes before
    it did.
    """
    ramp, period = output_tokens, output_tokens + idle_steps
    step_s = concurrency / tokens_per_s
    slow = ramp + slow_from if slow_from is not None else ramp + steps
    times = [0.0]
    for number in range(ramp + steps):
        times.append(times[-1] + step_s * (slow_factor if number >= slow else 1.0))
    last = len(times) - 1
    rows, tokens, ended = [], [0] * last, [0] * last
    for user in range(concurrency):
        for start in range(user * ramp // concurrency, last, period):
            end = min(start + output_tokens, last)
            done, early = end - start == output_tokens, first_early * output_tokens * step_s
            rows.append((times[start], times[start], times[start + 1] - early, times[end], end - start, done))
            for step in range(start, end):
                tokens[step] += 1
            ended[end - 1] += done
    rows.sort()
    *stamps, out, finished = (tuple(column) for column in zip(*rows, strict=True))
    running = tuple(t - e for t, e in zip(tokens, ended, strict=True))
    usage = tuple(t / (2 * concurrency) for t in tokens)
    thrown_out = tuple(preempted if i == ramp + steps // 2 else 0 for i in range(last))
    return Run(
        samples=Samples(tuple(range(len(rows))), *stamps, (64,) * len(rows), out, finished),
        steps=Steps(tuple(times[1:]), running, (0,) * last, tuple(tokens), (0,) * last, usage, thrown_out),
        window_s=(times[ramp], times[-1]),
        failures=failures,
        first_failure="Planted: as it was told to" if failures else None,
    )


def measurement(
    concurrency: int = 8, tokens_per_s: float = 1000.0, *, model="opt-1.3b", environment=H200, load: Load | None = None,
    repeat=0, launch="launch-1", output_tokens=32, resolved=RESOLVED, **run: object,
) -> Measurement:  # fmt: skip
    """A consistent measurement of a planted throughput; keyword arguments of `planted_run` make it less so."""
    spec = EngineSpec(model, platform="simulated" if environment.platform == "simulated" else "cuda")
    made = planted_run(concurrency, tokens_per_s, output_tokens=output_tokens, **run)  # type: ignore[arg-type]
    at, requests = f"2026-01-01T00:00:{repeat:02d}.000+00:00", workload(output_tokens=output_tokens)
    return Measurement(spec, resolved, environment, requests, load or ClosedLoop(concurrency), made, launch, at)


def together(
    *rates: float, concurrency=8, group="one", sharing: Sharing = "mps", models: Sequence[str] | None = None, repeat=0,
    began_s: Sequence[float] | None = None, **how: object,
) -> list[Measurement]:  # fmt: skip
    """One run of engines that share a device, of a rate each. began_s: on the common clock."""
    names, starts = models or ["opt-1.3b"] * len(rates), began_s or [None] * len(rates)
    asked, made = f"{sharing} {names} {concurrency} {how.get('output_tokens')}", []
    for index, (rate, model) in enumerate(zip(rates, names)):
        m = measurement(concurrency, rate, model=model, launch=f"{group}-{index}", repeat=repeat, **how)  # type: ignore[arg-type]
        part = records.Replica(f"{group}-{repeat}", index, len(rates), asked, sharing)
        made.append(replace(changed(m, "run", began_s=starts[index]), replica=part))
    return made


def changed(record: Any, *parts: str, **values: object) -> Any:
    """The record with other values in a part of it: "run", or "run", "samples"."""
    if not parts:
        return replace(record, **values)
    return replace(record, **{parts[0]: changed(getattr(record, parts[0]), *parts[1:], **values)})


def law(batch: float, t_inf: float = 10_000.0, b_half: float = 45.0) -> float:
    """Output tokens/s of the saturation model."""
    return t_inf * batch / (batch + b_half)


def plateau_batch(b_half: float, tolerance: float = 0.10) -> float:
    """Batch from which the law's doublings gain less than `tolerance`: a doubling of B gains b_half/(2B + b_half)."""
    return b_half * (1 - tolerance) / (2 * tolerance)


def point(concurrency: int, repeats: Sequence[float], e2e_repeats: Sequence[float] | None = None) -> Point:
    """A point of planted throughputs; its latency is Little's, for requests of 256 tokens, unless given."""
    waits = tuple(e2e_repeats) if e2e_repeats is not None else tuple(256 * concurrency / rate for rate in repeats)
    rate, batch, wait = fmean(repeats) if repeats else None, float(concurrency), fmean(waits) if waits else None
    made = Point(
        concurrency=concurrency, batch=batch, output_tokens_per_s=rate, requests_per_s=rate and rate / 256, e2e_s=wait,
        repeats=tuple(repeats), e2e_repeats=waits, batch_repeats=(batch,) * len(repeats),
        records=tuple(f"{concurrency}-{i}" for i in range(len(repeats))),
    )  # fmt: skip
    return made if repeats else replace(made, left_out=1, problems=("planted: invalid",))


def shared_point(
    count: int, repeats: Sequence[float], *, model="opt-1.3b", sharing: Sharing = "mps", concurrency=96, **figures
) -> ReplicaPoint:
    """Replicas of one model with planted throughputs; their latency is Little's, for requests of 256 tokens."""
    waits = [256 * concurrency / rate for rate in repeats]
    rate, wait = (fmean(values) if values else None for values in (repeats, waits))
    each = (ReplicaSummary(output_tokens_per_s=r, largest_e2e_s=w, e2e_p99_s=w) for r, w in zip(repeats, waits))
    made = ReplicaPoint(
        models=(model,) * count, families=frozenset({EngineSpec(model).family}), sharing=sharing,
        concurrency=concurrency, loads=(concurrency // count,) * count, environment=H200, workload=workload().hash,
        output_tokens_per_s=rate, largest_e2e_s=wait, e2e_p99_s=wait, repeats=tuple(repeats), each=tuple(each),
        records=tuple(f"{model}-{count}-{sharing}-{concurrency}-{i}" for i in range(len(repeats))),
    )  # fmt: skip
    return replace(made, **figures)


def job_point(
    requests_per_s: Sequence[float] = (10.0, 10.1), *, model="opt-6.7b", output_tokens=256, rate: float | None = None,
    e2e_s: Sequence[float] = (2.0, 2.02), spec: EngineSpec | None = None, requests=500, kv_blocks=100_000, **figures,
) -> JobPoint:  # fmt: skip
    """A job of planted requests/s, one for each repeat, whose requests came at exactly its rate."""
    each, served = workload(512, output_tokens), tuple(each * output_tokens for each in requests_per_s)
    mean, wait = (fmean(values) if values else None for values in (requests_per_s, e2e_s))
    summaries = tuple(
        JobSummary(requests_per_s=per_s, output_tokens_per_s=tokens, e2e_s=lasted, rate=rate)
        for per_s, tokens, lasted in zip(requests_per_s, served, e2e_s)
    )
    made = JobPoint(
        spec=spec or EngineSpec(model), resolved=replace(RESOLVED, kv_blocks=kv_blocks), environment=H200,
        workload=replace(each, hash=f"{output_tokens:012d}", requests=requests),
        load=OpenLoop(requests=requests, rate=rate or math.inf), rate=rate, requests_per_s=mean,
        output_tokens_per_s=mean and mean * output_tokens, e2e_s=wait, each=summaries,
        repeats=served[: len(summaries)], e2e_repeats=tuple(s.e2e_s or 0.0 for s in summaries),
        records=tuple(f"{model}-{output_tokens}-{rate}-{kv_blocks}-{i}" for i in range(len(summaries))),
    )  # fmt: skip
    lost = {} if summaries else {"left_out": 1, "problems": ("planted: invalid",)}
    return replace(made, **{**lost, **figures})


def at_share(
    share: float | None,
    rates: Sequence[float],
    ttft_s: Sequence[float] = (0.1, 0.101),
    *,
    hits: float | None = None,
    concurrency: int = 64,
    **asked: Any,
) -> Curve:
    """A curve of one point of prompts of 64 tokens that have a share in common. hits: share that came from the cache,
    if it is another one. asked: other fields of the workload's specification. TPOT is that of the rate."""
    made, cached = [], round(64 * ((share or 0) if hits is None else hits))
    for repeat, rate in enumerate(rates):
        m = measurement(concurrency, rate, repeat=repeat)
        m = changed(m, "run", "samples", cached_tokens=(cached,) * len(m.run.samples))
        spec = replace(m.workload.spec, prefix_share=share, **asked)
        made.append(changed(m, "workload", hash=f"share {share}{asked}", spec=spec))
    busy = [{"tokens_per_busy_s": 2 * r, "engine_active": 0.5, "tpot_s": concurrency / r} for r in rates]
    each = tuple(Summary(output_tokens_per_s=r, ttft_s=first, **more) for r, first, more in zip(rates, ttft_s, busy))
    seen = replace(point(concurrency, rates), each=each, ttft_s=fmean(ttft_s) if rates else None)
    return Curve(subject="opt-1.3b", points=(replace(seen, used=tuple((m,) for m in made)),), measurements=tuple(made))


def judge(claim: str, curve: Curve, others: Sequence[Curve] = (), **parameters: object) -> Verdict:
    """The verdict on a claim by the parameters that it has for any model, or by these."""
    row = ClaimRow(claim, parameters={**claim_of(claim).parameters, **parameters})
    return judge_row(row, curve, others)


def noisy_curve(rates: Mapping[int, float], *, noise=0.01, repeats=3, seed=0, subject="opt-1.3b") -> Curve:
    """A curve whose true throughputs are `rates`, each repeat off by a relative Gaussian `noise`."""
    chance = random.Random(seed)
    loads = sorted(rates.items())
    points = [point(c, [rate * (1 + chance.gauss(0, noise)) for _ in range(repeats)]) for c, rate in loads]
    return Curve(subject=subject, points=tuple(points))


def without(curve: Curve, concurrency: int) -> Curve:
    """The curve with that point made invalid."""
    points = (point(concurrency, ()) if p.concurrency == concurrency else p for p in curve.points)
    return replace(curve, points=tuple(points))


def rates(low: float = 1.0, high: float = 1e6) -> st.SearchStrategy[float]:
    """Throughputs in output tokens/s."""
    return st.floats(low, high, allow_nan=False, allow_infinity=False)


@st.composite
def curves(draw: st.DrawFn, fewest: int = 1, repeats: int = 2) -> Curve:
    """Any curve of valid points: throughputs and latencies need make no sense together."""
    knobs = draw(st.lists(st.integers(1, 4096), min_size=fewest, max_size=8, unique=True).map(sorted))
    values = st.lists(rates(), min_size=repeats, max_size=repeats)
    return Curve(subject="opt-1.3b", points=tuple(point(k, draw(values), draw(values)) for k in knobs))


COUNTS, NONE = st.integers(0, 2**20), st.none()
STAMPS = st.integers(0, 10**10).map(lambda us: us / 1e6)  # to the microsecond, as engines report them
SHARES = st.integers(0, 10**6).map(lambda ppm: ppm / 1e6)
# A terminal obeys the others: reading an archive writes such characters out.
NAMES = st.text(st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp")), max_size=8)


def loads() -> st.SearchStrategy[Load]:
    closed = st.builds(ClosedLoop, st.integers(1, 1024), window_s=st.floats(0.1, 60), requests=NONE | COUNTS)
    rates, uneven = st.floats(0.1, 1000), st.just(math.inf) | st.floats(0.01, 100)
    number = {"requests": st.integers(1, 1024), "seed": COUNTS, "max_concurrency": NONE | st.integers(1, 64)}
    times = {"window_s": st.floats(0.1, 60), "settle_s": st.floats(0, 5)}
    windows = st.builds(OpenLoop, rate=rates, arrivals=NAMES, steps=st.just(((4.0, 9.0),)) | st.just(()), **times)
    at_once, jobs = st.builds(OpenLoop, **number), st.builds(OpenLoop, rate=rates, burstiness=uneven, **number)
    return closed | at_once | jobs | windows


def tables(row: st.SearchStrategy[tuple[object, ...]], width: int) -> st.SearchStrategy[list[tuple[object, ...]]]:
    """Columns of a table of at most six rows."""
    return st.lists(row, max_size=6).map(lambda rows: [*zip(*rows)] or [()] * width)


def replicas() -> st.SearchStrategy[records.Replica]:
    sharing, part = st.sampled_from(["time-slicing", "mps", "mig"]), st.integers(0, 4)
    return st.builds(records.Replica, NAMES, part, part, NAMES, sharing, st.booleans(), NONE | st.integers(1, 100))


def places_in_a_gate() -> st.SearchStrategy[records.GateLaunch]:
    side = st.sampled_from(["baseline", "candidate"])
    return st.builds(records.GateLaunch, NAMES, st.integers(1, 24), side, st.booleans())


def measurements() -> st.SearchStrategy[Measurement]:
    """Any values, to the microsecond: for what must hold of every record, sensible or not. Rows come in any order, with
    counts of cached tokens, and of drafts, or without."""
    late, maybe, stamps = NONE | STAMPS, NONE | COUNTS, (NONE | STAMPS,) * 3
    samples = tables(st.tuples(COUNTS, STAMPS, *stamps, COUNTS, COUNTS, st.booleans(), maybe), 9)
    width, step = (
        st.sampled_from([8, 9]),
        (STAMPS, maybe, maybe, COUNTS, COUNTS, NONE | SHARES, st.integers(0, 2), COUNTS, COUNTS),
    )
    lengths, count, requests = (
        st.floats(1, 2000),
        st.integers(1, 2**20),
        st.builds(WorkloadSpec, seed=COUNTS, prefix_share=NONE | st.floats(0, 0.99), prefix_groups=st.integers(1, 9)),
    )
    sizes = NONE | st.lists(COUNTS, max_size=3).map(tuple)
    return st.builds(
        Measurement,
        spec=st.builds(
            EngineSpec, model=NAMES, max_num_seqs=COUNTS, gpu_memory_utilization=st.floats(0.1, 1),
            enforce_eager=st.booleans(), env=st.lists(st.tuples(NAMES, NAMES), max_size=2).map(tuple),
            extra=st.lists(st.tuples(NAMES, COUNTS | NAMES | st.booleans()), max_size=2).map(tuple),
        ),
        resolved=st.builds(Resolved, kv_blocks=maybe, capture_sizes=sizes, ready_s=late),
        environment=st.builds(Environment, gpu_name=NONE | NAMES, cores=maybe, vllm=NONE | NAMES),
        workload=st.builds(WorkloadReference, NAMES, requests, count, lengths, lengths, count, NAMES),
        run=st.builds(
            Run, st.tuples(samples, width).map(lambda drawn: Samples(*drawn[0][: drawn[1]])),
            st.tuples(tables(st.tuples(*step), 9), st.sampled_from([7, 9])).map(lambda t: Steps(*t[0][: t[1]])),
            st.tuples(STAMPS, STAMPS), COUNTS,
            NONE | NAMES,
        ),
        load=loads(), launch=st.sampled_from(["first", "second"]), replica=NONE | replicas(),
        measured_at=st.datetimes().map(lambda moment: moment.isoformat(timespec="milliseconds")),
        paired=NONE | places_in_a_gate(),
    )  # fmt: skip


Column = float | None | Callable[[float], float | None]  # of readings: a value, or a function of the time of each
TICK_S = 1 / 64  # a power of 2: sums and differences of times are exact


def _columns(rows: Sequence[tuple[object, ...]], width: int) -> list[tuple[object, ...]]:
    return [*zip(*rows)] if rows else [()] * width


@st.composite
def drawn_runs(draw: st.DrawFn, steps: int = 30) -> Run:
    """Runs that begin at any time, with gaps and ties; requests come in any order and need not get far. steps: at most.
    All times are whole ticks."""
    long, share = st.integers(0, 40), st.none() | st.integers(0, 64).map(lambda k: k / 64)
    gap, few = st.sampled_from([0, 1, 1, 2, 9, 40]), st.sampled_from([0, 0, 1, 2])
    step = st.tuples(gap, st.integers(0, 9), st.sampled_from([0, 0, 1, 64]), share, few)
    trace = draw(st.lists(step, max_size=steps))
    gaps, tokens, prompts, usage, preempted = _columns(trace, 5)
    origin = draw(st.integers(0, 4096))
    ends = [*accumulate(gaps, initial=origin)][1:]
    until = max(ends, default=origin) + 8
    opens = draw(st.integers(origin - 1, origin + (until - origin) // 3))
    closes, sent = draw(st.integers(opens, until)), st.integers(origin, until)

    def seconds(times: Sequence[int | None]) -> tuple[float | None, ...]:
        return tuple(None if at is None else at * TICK_S for at in times)

    stage = st.sampled_from([0, 1, 2, *[3] * 7])  # that a request came to: sent, admitted, its first token, its last
    whole = st.sampled_from([True, True, True, False])
    request = st.tuples(sent, long, long, long, stage, whole, st.integers(1, 99), st.sampled_from([0, 1, 1, 2, 9]))
    rows = draw(st.lists(request, min_size=draw(st.sampled_from([0, 6])), max_size=14))
    lives = [[*accumulate(row[:4])] for row in rows]
    reached = [[at if i <= row[4] else None for i, at in enumerate(life)] for row, life in zip(rows, lives)]
    done = tuple(row[4] == 3 and row[5] for row in rows)
    lost = _columns([(at, at + took) for at, took in draw(st.lists(st.tuples(sent, long), max_size=3))], 2)
    n, count, failures = len(rows), len(ends), len(lost[0])
    return Run(
        samples=Samples(tuple(range(n)), *map(seconds, _columns(reached, 4)), *_columns(rows, 8)[6:], done),
        steps=Steps(seconds(ends), (None,) * count, (0,) * count, tokens, prompts, usage, preempted),
        window_s=(opens * TICK_S, closes * TICK_S),
        failures=failures,
        failed=records.Failures((0,) * failures, *map(seconds, lost), ("timeout",) * failures),
    )


@st.composite
def drawn_readings(draw: st.DrawFn, begins_s: float, gpus: int = 0) -> Telemetry:
    """Any readings of sensors, from a quarter of a second before `begins_s` on: some tell of a span, some are missing.
    gpus: 0 for one without columns of its own. Times are whole ticks."""
    row = st.tuples(st.sampled_from([1, 8, 16]), st.sampled_from([None, 0, 4, 8, 8]))
    rows = draw(st.lists(row, min_size=2, max_size=16))
    times = [begins_s - 0.25 + TICK_S * at for at in accumulate(row[0] for row in rows)]
    one = st.lists(st.integers(0, 64), min_size=len(rows), max_size=len(rows))

    def columns() -> dict[int, list[float | None]]:
        known, level = draw(one), draw(one)
        counted = [(0, 0, 1, 8, 40, 60, 61)[k % 7] for k in draw(one)]
        made: dict[int, list[float | None]] = {}
        for i, number in enumerate((sensors.GPU_UTIL, *sensors.PROFILED)):
            made[number] = [None if (k + i) % 7 == 0 else ((k + 9 * i) % 65) / 64 for k in known]
        for i, number in enumerate((sensors.ENERGY, sensors.CAPPED_POWER)):
            made[number] = [None if k == 60 + i else v / 64 for k, v in zip(counted, accumulate(counted))]
        for i, number in enumerate((sensors.POWER, sensors.POWER_INSTANT)):
            made[number] = [None if k > 60 - i or known[0] == i else 100.0 + k + i for k in level]
        made[sensors.POWER_LIMIT] = [700.0 - (k == 64) for k in level]
        made[sensors.SM_CLOCK] = [1e9 + 2**20 * k for k in known]
        return made | {sensors.MEMORY_USED: [1e9 * k for k in known]}

    host = {sensors.OWN_CORES: draw(one), sensors.HOST_CORES: draw(one), sensors.STOLEN_CORES: draw(one)}
    each = tuple(columns() for _ in range(gpus))
    spans = [None if span is None else span * TICK_S for _, span in rows]
    return Telemetry(("drawn",), 0.25, times, spans, host if gpus else {**columns(), **host}, gpus=each)


def sensed(made: Measurement, interval_s: float = 0.01, **columns: Column) -> Measurement:
    """The measurement with the sensors of a GPU that is well beside it. columns: by the name of their number."""
    planted = {**WELL, **{getattr(sensors, name): value for name, value in columns.items()}}
    readings = planted_telemetry(planted, until_s=made.run.window_s[1] + 2 * interval_s, interval_s=interval_s)
    return replace(made, run=replace(made.run, telemetry=readings))


# A GPU that is well, and busy; the host too.
WELL: dict[int, Column] = {
    sensors.GPU_UTIL: 1.0, sensors.ENGINE_ACTIVE: 0.95, sensors.SM_ACTIVE: 0.8, sensors.SM_OCCUPANCY: 0.2,
    sensors.TENSOR_ACTIVE: 0.1, sensors.DRAM_ACTIVE: 0.6, sensors.POWER: 400.0, sensors.POWER_INSTANT: 400.0,
    sensors.ENERGY: lambda at: 1e6 + 400.0 * at, sensors.POWER_LIMIT: 700.0, sensors.CAPPED_POWER: 3.0,
    sensors.SM_CLOCK: 1980e6, sensors.CLOCK_REASONS: 0.0, sensors.TEMPERATURE: 55.0, sensors.MEMORY_USED: 60e9,
    sensors.XID: 0.0, sensors.ECC_DOUBLE_BIT: 0.0, sensors.REMAPPED_ROWS: 0.0,
    sensors.GPU_PROCESSES: 1.0, sensors.FOREIGN_PROCESSES: 0.0,
    sensors.OWN_CORES: 2.0, sensors.HOST_CORES: 2.5, sensors.STOLEN_CORES: 0.0, sensors.CPU_THROTTLED: 0.0,
    sensors.PROBE: 0.004, sensors.PROBE_CPU: 0.0039,
}  # fmt: skip


def planted_telemetry(
    columns: Mapping[int, Column] = WELL, *, until_s=12.0, interval_s=0.25, spans=True, notes: tuple[str, ...] = ()
) -> Telemetry:
    """A reading every interval, from the first one on; with spans, each tells of the whole interval before it."""
    times = tuple(interval_s * (i + 1) for i in range(round(until_s / interval_s)))
    told = {n: tuple(c(at) if callable(c) else c for at in times) for n, c in columns.items()}
    lengths = (interval_s if spans else None,) * len(times)
    return Telemetry(("planted",), interval_s, times, lengths, told, notes=notes)


def watched_run(telemetry: Telemetry | None, window_s: tuple[float, float] = (2.0, 12.0)) -> Run:
    """A run of which nothing but its telemetry is known."""
    return Run(NO_SAMPLES, NO_STEPS, window_s, telemetry=telemetry)


@st.composite
def any_telemetry(draw: st.DrawFn) -> Telemetry:
    """Any values but NaN, at any times: for what must hold of every telemetry, sensible or not."""
    rows, numbers = draw(st.integers(0, 8)), st.sampled_from([*sensors.SENSORS, 1, 9999])
    values = st.none() | st.sampled_from([0.0, 1.0, 0.5]) | st.floats(allow_nan=False)
    times = st.floats(0, 10) | st.floats(allow_nan=False, allow_infinity=False)
    column, spans = (st.lists(each, min_size=rows, max_size=rows) for each in (values, st.none() | times))
    order = draw(st.sampled_from([sorted, list]))
    interval_s, notes = st.sampled_from([0.0, 0.1, 0.25, 5.0]), ("planted failed after 3 readings: as it was told to",)
    at, told = order(draw(st.lists(times, min_size=rows, max_size=rows))), draw(st.sampled_from([(), notes]))
    columns = draw(st.dictionaries(numbers, column, max_size=12))
    return Telemetry(("planted",), draw(interval_s), at, draw(spans), columns, notes=told)
