"""An engine that is a formula on a virtual clock, so that a test knows its plateau in advance.

It paces loads like the real worker and makes the same records, with "simulated" as platform and device.
"""

import math
import random
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_slmserve.engines.base import PROFILE_FOLDER, Engine, Message, Outputs, ProgressCallback, WindowBarrier
from pytest_slmserve.engines.worker.slm_pacing import ClosedLoopPacer, SchedulePacer, pacer_of, serve_batches
from pytest_slmserve.schema import kv_cache, sensors as of
from pytest_slmserve.schema.errors import BadUsage, EngineFailed, write_file
from pytest_slmserve.schema.records import Progress, Resolved, Run, Samples, Steps, Telemetry
from pytest_slmserve.schema.specs import OF_ADAPTERS, SLEEP_MODE, SPECULATIVE, EngineSpec, Workload
from pytest_slmserve.telemetry import sampler
from pytest_slmserve.telemetry.host import Reading

TICK_S = 0.25  # in which the speed of a noisy host is constant


class HostNoise:
    """The factor of a host's speed over time: the exponential of an Ornstein-Uhlenbeck process.

    Args:
        sd: standard deviation of the process.
        seconds: time constant.
    """

    def __init__(self, sd: float, seconds: float, seed: str) -> None:
        self._sd, self._keeps, self._chance = sd, math.exp(-TICK_S / seconds), random.Random(seed)
        self._values = [self._chance.gauss(0, sd)]  # of each tick so far

    def __call__(self, at_s: float) -> float:
        while len(self._values) <= at_s / TICK_S:
            drawn = math.sqrt(1 - self._keeps**2) * self._chance.gauss(0, self._sd)
            self._values.append(self._keeps * self._values[-1] + drawn)
        return math.exp(self._values[int(at_s / TICK_S)])


BLOCK_SIZE = 16
BYTES_PER_S = 1e12  # memory bandwidth; reading is all that the imagined device does while it generates
FLOPS_PER_S = 1e14  # for results, and for prompts that a cache may serve in part; other prompts are free
LEAST_READ_S = 1e-4  # of all weights, because a window of a tiny model would have a million steps
LAYOUT_UNKNOWN = 1 << 17  # bytes per token, a guess, if only a real engine knows the model's cache
MAX_STEPS = 2_000_000
LAYER_LAUNCH_S = 0.5e-3  # host time to launch a layer's kernels, for which a step waits without captured graphs
DRAWN = 2736  # seed of launches, with which a gate by default ends as docs/gate-an-upgrade.md says
BESIDE = 0.2  # share of the scatter that real launches keep if both sides run at the same time
SAME_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype")  # of a specification and its engine
SLOW_HZ, HW_THERMAL_SLOWDOWN = 1.6e9, 0x40  # the latter is one of NVML's clock event reasons
# Shares by which a step takes longer with adapters, and with each adapter of rank 8 in a slot, and bytes/s of a copy
# into a slot (PCI Express 4.0 x16), during which all requests wait.
ADAPTED_SHARE, SLOT_SHARE, COPIED_PER_S = 0.1, 0.002, 25e9
NO_FAULTS = {"batching", "wait_s", "quantization", "kv_cache_dtype", SPECULATIVE, *OF_ADAPTERS}
NO_FAULTS |= {"skip_tokenizer_init", "num_gpu_blocks_override", SLEEP_MODE}
START_S, COLD_S = 20.0, 30.0  # of a start with warm caches, and of further compiling with cold caches
# Of a start of START_S. A longer start only compiles for longer, and a shorter one is shorter in all stages.
STAGES = {"import": 9.0, "device": 0.5, "weights": 1.5, "profile": 1.0, "kv cache": 0.5, "capture": 2.5, "rest": 1.0}


@dataclass(frozen=True, slots=True)
class Faults:
    """Injected behavior, from `EngineSpec.extra` (`--slm-engine-arg NAME=VALUE`).

    Attributes:
        t_inf, b_half: output tokens/s and sequences of T(B) = t_inf*B/(B + b_half). Default to those of the model.
        noise: relative standard deviation of the speed between runs.
        preempt_from: batch from which a step preempts.
        die_at, fail_at: concurrency at which the engine dies, or its requests fail.
        sensors, profiler: whether the device has sensors, and the release a profiler.
        engine_active, dram_active, tensor_active, sm_occupancy, power_w, memory_used: values of the sensors. By default
            the memory in use, in bytes, is not reported.
        start_s: seconds of a start with warm caches; compiling takes those beyond 20.
        wake_s: seconds to wake up. Falling asleep takes half of it.
        other_token_at: position from which the outputs differ from the formula.
        logprob_drift: nats that are subtracted from each score.
        slow_clock_from, lost_from, hot_from: concurrency from which the SM clock is low at times, a sensor is lost, or
            heat slows the clock.
        all_reduce_s: seconds of each of a layer's two all-reduces on several GPUs.
        imbalance: share by which the last of several GPUs takes less power than the first.
        scatter: relative standard deviation of the speed between launches of a gate; for starts three times as large.
        slowdown: share by which a step takes longer.
        acceptance: with a `speculative_config`, mean number of draft tokens accepted per sequence and step.
        draft_cost: with a `speculative_config`, share by which each sequence of a step costs more.
        structured_cost: share by which a step takes longer with structured output.
        host_s: host seconds in a step. The step takes the longer of these and its kernels, and only the host is noisy.
        host_noise, host_noise_s: relative standard deviation of the speed over time, and its time constant.
        lasts_s: least real seconds of a run, during which a test can do other things.
    """

    t_inf: float | None = None
    b_half: float | None = None
    noise: float = 0.002
    preempt_from: float = math.inf
    die_at: float = math.inf
    fail_at: float = math.inf
    sensors: bool = True
    profiler: bool = True
    engine_active: float = sampler.STEADY[of.ENGINE_ACTIVE]
    dram_active: float = sampler.BUSY[of.DRAM_ACTIVE]
    tensor_active: float = sampler.BUSY[of.TENSOR_ACTIVE]
    sm_occupancy: float = sampler.BUSY[of.SM_OCCUPANCY]
    power_w: float = sampler.POWER_W
    memory_used: float | None = None
    start_s: float = START_S
    wake_s: float = 0.4
    other_token_at: float = math.inf
    logprob_drift: float = 0.0
    slow_clock_from: float = math.inf
    lost_from: float = math.inf
    hot_from: float = math.inf
    all_reduce_s: float = 10e-6
    imbalance: float = 0.0
    scatter: float = 0.016
    slowdown: float = 0.0
    acceptance: float = 0.7
    draft_cost: float = 1.5
    structured_cost: float = 0.05
    host_s: float = 0.0
    host_noise: float = 0.0
    host_noise_s: float = 1.0
    lasts_s: float = 0.0


@dataclass(slots=True)
class _Sequence:
    request: int
    sent_s: float
    prompt: int
    wanted: int
    cached: int = 0  # prompt tokens from a cache
    admitted_s: float | None = None
    first_step: int | None = None  # the step of its first token
    steps: int = 0  # until its last token, if it is served to its end
    number: int = 0  # in the load


def made_after(steps: int, acceptance: float) -> int:
    """Return the tokens of a sequence after this many steps, of which all but the first accept drafts."""
    return steps + int((steps - 1) * acceptance + 1e-9) if steps > 0 else 0


class SimulatedEngine(Engine):
    """An engine with the throughput T(B) = t_inf*B/(B + b_half) at batch B.

    By default both numbers follow from the model's configuration at 1 TB/s, or more slowly if all weights would be read
    in less than 0.1 ms. Several GPUs each do a part of a step, and then wait for each other. If prefixes are cached,
    whole blocks of a group's shared prefix come from the cache after its first request, and the rest takes time.

    Args:
        speed: share of the device's speed that other engines leave to it.
        extra_env: environment variables of this launch.
        gpus: number of GPUs whose sensors it reports; 0: its own.
    """

    def __init__(
        self, spec: EngineSpec, speed: float = 1.0, extra_env: Mapping[str, str] | None = None, gpus: int = 0
    ) -> None:
        super().__init__(spec)
        self.limits = spec.with_arguments(())
        given = {name: value for name, value in self.limits.extra if name not in NO_FAULTS}
        if name := next((name for name, value in given.items() if isinstance(value, str)), ""):
            raise BadUsage(f"{name}={given[name]}, which is not a number", f"--slm-engine-arg {name}=0.1")
        try:
            self.faults = Faults(**given)
        except TypeError as error:
            raise BadUsage(
                f"the simulated engine has no such argument: {error}",
                "Use one of t_inf, b_half, noise, and the other arguments of the simulated engine.",
            ) from None
        self.speed, self.extra_env = speed, dict(extra_env or {})
        self.gpus = gpus or spec.tensor_parallel_size
        self.model = spec.known_model
        self.random = random.Random(f"{spec.seed}")
        noise = self.faults.host_noise, self.faults.host_noise_s
        self.host = HostNoise(*noise, f"host {spec.seed}") if noise[0] else None
        self._kept: dict[tuple[str, int], int] = {}  # tokens of the longest prefix, by workload and group
        self.ran_s = 0.0  # in all runs, because the host's noise continues from run to run
        layout = kv_cache.kv_layout(spec)
        blocks = kv_cache.predicted_blocks(spec)
        if blocks is None:
            blocks = spec.kv_cache_bytes * spec.tensor_parallel_size // (BLOCK_SIZE * LAYOUT_UNKNOWN)
        self.resolved = Resolved(
            kv_blocks=None if self.jobs_only else blocks,
            block_size=BLOCK_SIZE,
            kv_windows=layout.windows or (None,),
            weight_bytes=kv_cache.weight_bytes(spec, 2),
            attention_backend="simulated",
            capture_sizes=(),
            chunked_prefill=True,
            prefix_caching=spec.prefix_caching,
            async_scheduling=False,
            event_loop="simulated",
            **self.start_of(1.0),
            **{name: getattr(self.limits, name) for name in SAME_LIMITS},
        )

    def start_of(self, pace: float, cold: bool = False) -> dict[str, Any]:
        """Return the seconds of a start and of its stages, which take `pace` times as long as by the formula."""
        start_s = pace * self.faults.start_s
        stages = {name: seconds * min(1.0, self.faults.start_s / START_S) * pace for name, seconds in STAGES.items()}
        more_s = pace * COLD_S * cold
        stages["compile"] = start_s - math.fsum(stages.values()) + more_s
        del stages["rest"]
        return {"ready_s": start_s + more_s, "stages": tuple(stages.items())}

    def law(self, workload: Workload) -> tuple[float, float]:
        """Return t_inf in outputs/s and b_half in sequences, of one GPU.

        A result, for example an embedding, costs the arithmetic of its whole text.
        """
        weights: float = self.resolved.weight_bytes or 0
        if workload.spec.kind != "generate":
            operations = 2 * (self.model.active or LAYOUT_UNKNOWN) * workload.mean_prompt_tokens
            each_s = max(operations / FLOPS_PER_S, LEAST_READ_S)
            return self.faults.t_inf or 1 / each_s, self.faults.b_half or weights / BYTES_PER_S / each_s
        context = workload.mean_prompt_tokens + workload.mean_output_tokens / 2
        each = kv_cache.kv_layout(self.spec).value_bytes or 2
        per_sequence = self.model.kv_read_bytes(context, each) or context * LAYOUT_UNKNOWN
        weights = weights or per_sequence
        speed = min(BYTES_PER_S, weights / LEAST_READ_S)
        return self.faults.t_inf or speed / per_sequence, self.faults.b_half or weights / per_sequence

    def drawn_law(self, workload: Workload) -> tuple[float, float]:
        """Return t_inf in output tokens/s and b_half in sequences for all GPUs in one run, with the noise of the run.

        The waits of the GPUs for each other are not included.
        """
        t_inf, b_half = self.law(workload)
        t_inf *= self.speed * math.exp(self.random.gauss(0.0, self.faults.noise)) / (1 + self.faults.slowdown)
        if workload.spec.response_format:
            t_inf /= 1 + self.faults.structured_cost
        if adapters := workload.spec.adapters:
            there = min(adapters.count, self._slots) * adapters.rank / 8
            t_inf /= 1 + ADAPTED_SHARE + SLOT_SHARE * there
        return t_inf * self.spec.tensor_parallel_size, b_half

    @property
    def _slots(self) -> int:
        return int(self.spec.arguments.get("max_loras", 0))

    def differ(self, launch: str, beside: bool = False, cold: bool = False, resumed: bool = False) -> None:
        chance = random.Random(f"{DRAWN} {self.spec.seed} {launch}")
        if beside or resumed:  # the windows of two sides, or of two launches, have no noise in common
            self.random.seed(f"{self.spec.seed} {launch}")
        self.speed /= math.exp(chance.gauss(0.0, self.faults.scatter * (BESIDE if beside else 1.0)))
        pace = math.exp(chance.gauss(0.0, 3 * self.faults.scatter))
        self.resolved = replace(self.resolved, **self.start_of(pace, cold))

    def nap(self) -> tuple[float, float]:
        # It scatters between launches as starts do.
        pace = math.exp(random.Random(f"{self.resolved.ready_s}").gauss(0.0, 3 * self.faults.scatter))
        return pace * self.faults.wake_s / 2, pace * self.faults.wake_s

    def _run(self, workload: Workload, load: Message, progress: ProgressCallback, barrier: WindowBarrier | None) -> Run:
        # It needs no barrier, because equal engines settle at the same time of their virtual clocks.
        faults = self.faults
        loop = pacer_of(load, [request.output_tokens for request in workload.requests])
        if loop.concurrency >= faults.die_at:
            raise EngineFailed(f"the simulated engine died at concurrency {loop.concurrency}, as it was told to")
        time.sleep(faults.lasts_s)
        samples, steps, kernels_s, in_flight = self._served(loop, workload)
        now, done = (steps.time_s[-1] if len(steps) else 0.0), len(samples) - in_flight
        self.ran_s += now
        if progress:
            progress(Progress("over", now, done, in_flight, sum(steps.new_tokens) / now if now else None))
        failed = done if loop.concurrency >= faults.fail_at else 0
        window = loop.window or (0.0, now)
        why = "PlantedFailure: as it was told to" if failed else None
        telemetry = None
        if faults.sensors:
            inside = [i for i, at in enumerate(steps.time_s) if i and window[0] <= at <= window[1]]
            seconds = math.fsum(steps.time_s[i] - steps.time_s[i - 1] for i in inside)
            busy = math.fsum(kernels_s[i] for i in inside) / seconds if seconds else 1.0
            telemetry = self.sensed(window, loop.concurrency, busy)
        return Run(samples, steps, window, failed, why, telemetry=telemetry)

    def sensed(self, window_s: tuple[float, float], concurrency: float, busy: float) -> Telemetry:
        """Return equal sensor readings through the window and one interval around it, apart from injected faults.

        Args:
            busy: share of the time in which a kernel ran.
        """
        faults, (opens, closes) = self.faults, window_s
        planted = {
            of.ENGINE_ACTIVE: busy * faults.engine_active,
            of.DRAM_ACTIVE: busy * faults.dram_active,
            of.TENSOR_ACTIVE: busy * faults.tensor_active,
            of.SM_OCCUPANCY: busy * faults.sm_occupancy,
        }
        if faults.memory_used is not None:
            planted[of.MEMORY_USED] = faults.memory_used
        if concurrency >= faults.hot_from:
            planted[of.CLOCK_REASONS] = HW_THERMAL_SLOWDOWN
        watts = [faults.power_w * (1 - faults.imbalance * gpu / max(1, self.gpus - 1)) for gpu in range(self.gpus)]
        found = sampler.Recording([sampler.SimulatedSource()], sampler.INTERVAL_S)
        for i in range(int((closes - opens) / sampler.INTERVAL_S) + 3):
            at_s = opens + (i - 1) * sampler.INTERVAL_S
            slow = {of.SM_CLOCK: SLOW_HZ} if concurrency >= faults.slow_clock_from and i % 4 == 0 else {}
            each = tuple({**sampler.simulated_values(at_s, power_w), **planted, **slow} for power_w in watts)
            reading = (
                Reading({}, sampler.INTERVAL_S, gpus=each) if len(each) > 1 else Reading(each[0], sampler.INTERVAL_S)
            )
            found.rows.append((at_s, reading))
        if concurrency >= faults.lost_from:
            found.failed["simulated"] = f"simulated failed after {len(found.rows)} readings: as it was told to"
        return found.telemetry(0.0)

    def _from_cache(self, workload: Workload, request: int, follows: bool) -> int:
        if workload.spec.turns > 1:
            return len(workload.requests[request - 1].prompt) // BLOCK_SIZE * BLOCK_SIZE if follows else 0
        group, shared = (workload.hash, request % workload.spec.prefix_groups), workload.requests[request].shared
        kept, self._kept[group] = self._kept.get(group, 0), max(self._kept.get(group, 0), shared)
        return min(kept, shared) // BLOCK_SIZE * BLOCK_SIZE

    def _served(self, loop: ClosedLoopPacer, workload: Workload) -> tuple[Samples, Steps, list[float], int]:
        """Return samples, steps, kernel seconds of each step, and the number of requests that have not ended."""
        # As many sequences run as the limit and the KV cache allow at full length, so the engine never preempts. The
        # end of a sequence is known at its admission, so the work here per step depends only on sequences that begin
        # or end with it.
        (t_inf, b_half), limits = self.drawn_law(workload), self.limits
        windows = self.resolved.kv_windows or (None,)
        blocks = kv_cache.request_blocks(limits, windows, BLOCK_SIZE, workload.longest)
        fits = max(1, min(limits.max_num_seqs, (self.resolved.kv_blocks or 0) // blocks))
        # All-reduces after attention and feed-forward of each layer.
        waits_s = 0.0 if self.spec.tensor_parallel_size == 1 else 2 * self.model.layers * self.faults.all_reduce_s
        launches_s = LAYER_LAUNCH_S * self.model.layers if limits.enforce_eager else 0.0
        caches = self.spec.caches_prefixes and workload.spec.finds_prefixes
        speed = FLOPS_PER_S * self.speed * self.spec.tensor_parallel_size
        prompt_s = 2 * (self.model.active or 0) / speed if workload.spec.finds_prefixes else 0.0  # of a token
        kernels = list[float]()  # seconds of each step
        asked = workload.spec.adapters
        # The adapters in a slot, the most recently used last.
        slots = dict.fromkeys(range(1, 1 + min(asked.count, self._slots))) if asked else {}
        copy_s = self.model.adapter_slot_bytes(asked.rank) / COPIED_PER_S if asked else 0.0
        drafts = bool(self.spec.speculation)
        acceptance, cost = (self.faults.acceptance, 1 + self.faults.draft_cost) if drafts else (0.0, 1.0)
        lives = {  # steps by the tokens wanted
            n: next(steps for steps in range(int(n / (1 + acceptance)), n + 1) if made_after(steps, acceptance) >= n)
            for n in {request.output_tokens for request in workload.requests}
        }
        now, admitted, ended, prompted = 0.0, 0, 0, 0  # prompted: computed tokens of the next prompt
        sent, steps = list[_Sequence](), list[tuple[Any, ...]]()
        ends = defaultdict[int, list[int]](list)  # by step, the numbers of the requests
        for number in range(MAX_STEPS):
            if len(sent) == ended:  # idle until the next request
                coming = loop.next_s if isinstance(loop, SchedulePacer) else loop.next_free
                now = max(now, coming or now)
            loop.join(now, now)
            while (own := loop.free_request(now)) is not None:
                request = workload.requests[index := own % len(workload.requests)]
                at_s, wanted = loop.sent_s(own, now), request.output_tokens
                sent.append(_Sequence(index, at_s, len(request.prompt), wanted, number=own))
            if len(sent) == ended:
                break
            budget = max(0, limits.max_num_batched_tokens - (admitted - ended))
            computed, left, prompted, copies = -prompted, prompted + budget, 0, 0
            for sequence in sent[admitted : ended + fits]:
                if left and sequence.admitted_s is None:
                    sequence.admitted_s = now
                    talk, turn = divmod(sequence.number, loop.turns)
                    follows = turn > loop.first_turn(talk)
                    sequence.cached = self._from_cache(workload, sequence.request, follows) if caches else 0
                if (needed := sequence.prompt - sequence.cached) > left:
                    prompted = left
                    break
                left -= needed
                computed += needed
                sequence.first_step = number
                sequence.steps = lives[sequence.wanted]
                ends[number + sequence.steps - 1].append(sequence.number)
                if adapter := workload.requests[sequence.request].adapter:
                    copies += adapter not in slots
                    slots.pop(adapter, None)
                    slots[adapter] = None
                    if len(slots) > self._slots:
                        del slots[next(iter(slots))]
                admitted += 1
            batch, pace = admitted - ended, self.host(self.ran_s + now) if self.host else 1.0
            prompts_s = (computed + prompted) * prompt_s
            kernels_s = (b_half + cost * batch) / t_inf + waits_s + prompts_s + copies * copy_s
            if not self.faults.host_s:
                kernels_s, pace = kernels_s / pace, 1.0
            kernels.append(kernels_s)
            now += max(kernels_s, (self.faults.host_s + launches_s) / pace)
            over = ends.pop(number, [])
            ended += len(over)
            for last in over:
                loop.come_back(now + loop.rest_s(last), last)
            running = min(len(sent) - ended, fits)
            preempted = int(batch >= self.faults.preempt_from)
            steps.append((now, running, len(sent) - ended - running, batch, 0, None, preempted))
            loop.stepped(now)
            if loop.phase == "over" and loop.requests is None:
                break
        rows, accepted, drafted = [], [0] * len(steps), [0] * len(steps)
        for sequence in sent:
            first_s = last_s = None
            made = 0
            if (first := sequence.first_step) is not None:
                took = min(sequence.steps, len(steps) - first)
                made = min(sequence.wanted, made_after(took, acceptance))
                first_s, last_s = steps[first][0], steps[first + took - 1][0]
                for step in range(1, took) if drafts else ():
                    before, after = (min(sequence.wanted, made_after(n, acceptance)) for n in (step, step + 1))
                    drafted[first + step] += 1
                    accepted[first + step] += after - before - 1
            told: list[int | None] = [sequence.prompt, made, made == sequence.wanted]
            if workload.spec.finds_prefixes:
                told.append(sequence.cached if made == sequence.wanted else None)
            rows.append((sequence.request, sequence.sent_s, sequence.admitted_s, first_s, last_s, *told))
        samples = Samples(*zip(*rows)) if rows else Samples(*[()] * 8)
        if not steps:
            return samples, Steps(*[()] * 7), kernels, len(sent) - ended
        trace = Steps(*zip(*steps))
        if drafts:
            tokens = tuple(map(sum, zip(trace.new_tokens, accepted)))
            trace = replace(trace, new_tokens=tokens, drafts=tuple(drafted), accepted=tuple(accepted))
        return samples, trace, kernels, len(sent) - ended

    def outputs(self, workload: Workload, requests: int, length: int) -> Outputs:
        drawn = [random.Random(f"{self.spec.seed} {number}") for number in range(min(requests, len(workload.requests)))]
        tokens = [[each.randrange(self.model.vocabulary) for _ in range(length)] for each in drawn]
        return tuple(tuple(t + (at >= self.faults.other_token_at) for at, t in enumerate(row)) for row in tokens)

    def scores(self, workload: Workload, outputs: Outputs) -> tuple[float, ...]:
        # Its own tokens are likely and other tokens less so, with the scatter of a launch's roundings.
        chance = random.Random(self.launch)
        own = self.outputs(workload, len(outputs), max(map(len, outputs), default=0))
        likely = (-0.5 if tokens == mine[: len(tokens)] else -2.0 for tokens, mine in zip(outputs, own))
        return tuple(chance.gauss(each - self.faults.logprob_drift, 1e-3) for each in likely)

    def _profile(self, load: Message) -> str | None:
        if not self.faults.profiler:
            return "the simulated engine has no profiler, as it was told to"
        write_file(Path(self.extra_env[PROFILE_FOLDER]) / f"{self.launch}.trace.json", "{}\n")
        return None


class SimulatedBatches(SimulatedEngine):
    """A simulated engine that serves static batches, one after the other.

    A step of B slots takes (b_half + B)/t_inf seconds, as in `SimulatedEngine`, even if their requests have ended.
    """

    jobs_only = True

    def _run(self, workload: Workload, load: Message, progress: ProgressCallback, barrier: WindowBarrier | None) -> Run:
        t_inf, b_half = self.drawn_law(workload)

        def serve(at: float, rows: list[int], tokens: int, done: int) -> tuple[float, list[float], float]:
            step_s = (b_half + len(rows)) / t_inf
            stamps = [at + step_s * (number + 1) for number in range(tokens)]
            return at, stamps, stamps[-1]

        lengths = [(len(request.prompt), request.output_tokens) for request in workload.requests]
        samples, steps = serve_batches(self.batching, load["schedule"], lengths, serve)
        *columns, _ = zip(*samples)  # no prompt comes from a cache
        return Run(Samples(*columns), Steps(*zip(*steps)), (0.0, samples[-1][4]))
