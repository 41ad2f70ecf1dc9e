"""An engine that is a formula on a virtual clock, so that a test knows the plateau beforehand.

It runs the admission logic of the real worker and makes the same records. Its numbers are simulated and say so:
platform and device are "simulated".
"""

from __future__ import annotations

import math
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pytest_slmserve.engines.base import (
    PROFILE_FOLDER,
    Outputs,
    ProgressCallback,
    Scores,
    WindowBarrier,
    check_fits,
    check_load,
    ignore_progress,
    message_of,
)
from pytest_slmserve.engines.worker.slm_pacing import ClosedLoopPacer, SchedulePacer, closed_loop
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.kv_cache import (
    in_flight,
    kv_bytes_per_token,
    kv_value_bytes,
    kv_windows,
    request_blocks,
    weight_bytes,
)
from pytest_slmserve.schema.loads import Load, OpenLoop, Workload
from pytest_slmserve.schema.records import Progress, Resolved, Run, Samples, Steps, Telemetry
from pytest_slmserve.schema.sensors import DRAM_ACTIVE, ENGINE_ACTIVE, SM_OCCUPANCY, TENSOR_ACTIVE
from pytest_slmserve.schema.specs import EngineSpec
from pytest_slmserve.telemetry.source import BUSY, POWER_W, STEADY, simulated

TICK_S = 0.25  # the factor is constant for so long
BLOCK = 16  # ticks of recorded noise that stay together
OCTAVES = tuple(TICK_S * 2**i for i in range(10))  # time constants of 1/f noise: to two minutes


class HostNoise:
    """Factor of the speed at a time. kind: "white:SD", "ou:SD:SECONDS" (Ornstein-Uhlenbeck with that time constant),
    "pink:SD" (1/f), "slow:SHARE:DEPTH:SECONDS" (slower by DEPTH for a SHARE of the time, so long each), "states:APART"
    (two states, one for a whole launch), several of these with "+", or a sequence of recorded factors, one for each
    tick, which is resampled in blocks. SD is the relative standard deviation of a tick. Raises BadUsage."""

    def __init__(self, kind: str | Sequence[float], seed: str) -> None:
        self._factors: list[float] = []
        self._more = _factors(kind, random.Random(seed))

    def __call__(self, at_s: float) -> float:
        tick = int(at_s / TICK_S)
        if tick >= len(self._factors):
            self._factors += islice(self._more, 2 * tick + 64 - len(self._factors))
        return self._factors[tick]


def _factors(kind: str | Sequence[float], chance: random.Random) -> Iterator[float]:
    if not isinstance(kind, str):
        starts = (chance.randrange(max(1, len(kind) - BLOCK + 1)) for _ in iter(int, 1))
        return chain.from_iterable(kind[start : start + BLOCK] for start in starts)
    if "+" in kind:
        return map(math.prod, zip(*(_factors(part, chance) for part in kind.split("+"))))
    name, *numbers = kind.split(":")
    try:
        match name, [float(number) for number in numbers]:
            case "white", [sd]:
                return (math.exp(chance.gauss(0, sd)) for _ in iter(int, 1))
            case "ou", [sd, seconds]:
                return map(math.exp, _ou(sd, seconds, chance))
            case "pink", [sd]:
                each = [_ou(sd / math.sqrt(len(OCTAVES)), seconds, chance) for seconds in OCTAVES]
                return (math.exp(sum(values)) for values in zip(*each))
            case "slow", [share, depth, seconds]:
                return _slowdowns(share, depth, seconds, chance)
            case "states", [apart]:
                state = math.exp(apart / 2 * chance.choice((-1, 1)))
                return (state for _ in iter(int, 1))
    except ValueError:
        pass
    raise BadUsage(f"host_noise={kind} is no noise of a host", "host_noise=pink:0.12")


def _ou(sd: float, seconds: float, chance: random.Random) -> Iterator[float]:
    value, keeps = chance.gauss(0, sd), math.exp(-TICK_S / seconds)
    while True:
        yield value
        value = keeps * value + math.sqrt(1 - keeps**2) * chance.gauss(0, sd)


def _slowdowns(share: float, depth: float, seconds: float, chance: random.Random) -> Iterator[float]:
    """A Markov chain of two states, which is slow for `share` of the time."""
    slow = chance.random() < share
    ends = {True: TICK_S / seconds, False: TICK_S / seconds * share / (1 - share)}
    while True:
        yield 1 - depth if slow else 1.0
        slow = slow ^ (chance.random() < ends[slow])


BLOCK_SIZE = 16
BYTES_PER_S = 1e12  # the imagined device reads so fast, and does nothing else
LEAST_READ_S = 1e-4  # but no weights in less: of a tiny model a window would have a million steps
LAYOUT_UNKNOWN = 1 << 17  # bytes per token of a model whose cache only a real engine knows: a guess
MAX_STEPS = 2_000_000
LAYER_LAUNCH_S = 0.5e-3  # in which a host launches the kernels of a layer: without captured graphs a step waits for it
DRAWN = 2736  # launches so drawn that, by default, a gate comes out as docs/gate.md says
NO_FAULTS = frozenset({"batching", "wait_s", "quantization", "kv_cache_dtype"})


@dataclass(frozen=True, slots=True)
class Faults:
    """Planted behaviour, taken from `EngineSpec.extra` (`--slm-engine-arg NAME=VALUE`).

    t_inf, b_half: output tokens/s and sequences of T(B) = t_inf*B/(B + b_half); None: from the model's shape.
    noise: relative standard deviation of the speed between runs. preempt_from: batch from which a step preempts.
    die_at, fail_at: concurrency at which the engine dies, or its requests fail. start_s: seconds that a start took.
    other_token_at: position from which its outputs are not those of the formula. logprob_drift: nats by which it finds
    the baseline's tokens less likely.
    sensors: False for a device that has none; the others of this kind are what they say (`telemetry.source`); of
    memory in use, in bytes, they say nothing unless told. profiler: False for a release without.
    slow_clock_from, lost_from, hot_from: concurrency from which the SM clock sinks at times, which is noise, a sensor
    is lost, which degrades, or the heat brakes the clock, which invalidates.
    all_reduce_s: what a step on several GPUs waits for each of its all-reduces, two in a layer. imbalance: share by
    which the last of them takes less power than the first.
    scatter: relative standard deviation of the speed between launches of a gate; their starts scatter three times as
    much. slowdown: share by which a step takes longer.
    host_noise: of the speed over time, as `host_noise.HostNoise` names it.
    lasts_s: seconds of the real time that a run takes at least, for what happens meanwhile.
    """

    t_inf: float | None = None
    b_half: float | None = None
    noise: float = 0.002
    preempt_from: float = math.inf
    die_at: float = math.inf
    fail_at: float = math.inf
    sensors: bool = True
    profiler: bool = True
    engine_active: float = STEADY[ENGINE_ACTIVE]
    dram_active: float = BUSY[DRAM_ACTIVE]
    tensor_active: float = BUSY[TENSOR_ACTIVE]
    sm_occupancy: float = BUSY[SM_OCCUPANCY]
    power_w: float = POWER_W
    memory_used: float | None = None
    start_s: float = 20.0
    other_token_at: float = math.inf
    logprob_drift: float = 0.0
    slow_clock_from: float = math.inf
    lost_from: float = math.inf
    hot_from: float = math.inf
    all_reduce_s: float = 10e-6
    imbalance: float = 0.0
    scatter: float = 0.016
    slowdown: float = 0.0
    host_noise: str | tuple[float, ...] = ""
    lasts_s: float = 0.0


@dataclass(slots=True)
class _Sequence:
    """first_step: which step makes its first token, and from then on each makes one; None while it waits."""

    request: int
    sent_s: float
    prompt: int
    wanted: int
    admitted_s: float | None = None
    first_step: int | None = None


@dataclass(slots=True)
class _Simulation:
    """State of one run: what was sent, and what was noted. When a sequence ends is known as soon as it is admitted, so
    a step costs as much as begins and ends with it, however large the batch is."""

    now: float = 0.0
    sent: list[_Sequence] = field(default_factory=list)
    admitted: int = 0  # of those sent, the first so many
    ended: int = 0
    prompted: int = 0  # tokens done of the prompt that is next
    ends: Counter[int] = field(default_factory=Counter)  # how many end with which step
    steps: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        return len(self.sent) - self.ended

    def admit(self, fits: int, tokens: int) -> int:
        """The next step takes in what waits, as far as it fits; returns its batch. tokens: that a step may process, of
        prompts and outputs together."""
        left = self.prompted + max(0, tokens - (self.admitted - self.ended))
        self.prompted = 0
        for sequence in self.sent[self.admitted : self.ended + fits]:
            if sequence.prompt > left:
                self.prompted = left
                break
            left -= sequence.prompt
            sequence.admitted_s, sequence.first_step = self.now, len(self.steps)
            self.ends[sequence.first_step + sequence.wanted - 1] += 1
            self.admitted += 1
        return self.admitted - self.ended


class SimulatedEngine:
    """Serves T(B) = t_inf*B/(B + b_half); by default with the two numbers that the model's shape gives at 1 TB/s, or
    where that would read all weights in less than 0.1 ms, at the speed that takes so long. On several GPUs each does
    its part of a step, and then waits for the others.

    speed: of that, what the others on its device leave it. gpus: whose sensors tell of it; 0: its own. extra_env:
    variables of this start alone.
    """

    def __init__(
        self, spec: EngineSpec, speed: float = 1.0, extra_env: Mapping[str, str] | None = None, gpus: int = 0
    ) -> None:
        self.limits = spec.with_arguments(())
        try:
            self.faults = Faults(**{name: value for name, value in self.limits.extra if name not in NO_FAULTS})
        except TypeError as error:
            raise BadUsage(f"the simulated engine has no such argument: {error}", "t_inf, b_half, noise, ...") from None
        self.spec, self.speed, self.extra_env = spec, speed, dict(extra_env or {})
        self.gpus = gpus or spec.tensor_parallel_size
        self.ready = True
        self.launch = uuid.uuid4().hex[:12]
        self.model = spec.known_model
        self.random = random.Random(f"{spec.seed}")
        noise = self.faults.host_noise
        self.host: Callable[[float], float] = HostNoise(noise, f"host {spec.seed}") if noise else lambda at_s: 1.0
        self.ran_s = 0.0  # of all runs so far: the host's noise goes on
        per_token = kv_bytes_per_token(spec) or LAYOUT_UNKNOWN
        self.resolved = Resolved(
            kv_blocks=spec.kv_cache_bytes * spec.tensor_parallel_size // (BLOCK_SIZE * per_token),
            block_size=BLOCK_SIZE,
            kv_windows=kv_windows(spec) or (None,),
            weight_bytes=weight_bytes(spec, 2),
            attention_backend="simulated",
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_model_len=self.limits.max_model_len,
            capture_sizes=(),
            chunked_prefill=True,
            prefix_caching=spec.prefix_caching,
            async_scheduling=False,
            dtype=self.limits.dtype,
            event_loop="simulated",
            ready_s=self.faults.start_s,
        )

    @property
    def waits_s(self) -> float:
        """Seconds that a step adds to the work of its GPUs: all-reduces after attention and feed-forward of a layer."""
        return 0.0 if self.spec.tensor_parallel_size == 1 else 2 * self.model.layers * self.faults.all_reduce_s

    def law(self, workload: Workload) -> tuple[float, float]:
        """t_inf in output tokens/s and b_half in sequences, of one GPU."""
        context = workload.mean_prompt_tokens + workload.mean_output_tokens / 2
        per_sequence = self.model.kv_read_bytes(context, kv_value_bytes(self.spec) or 2) or context * LAYOUT_UNKNOWN
        weights = self.resolved.weight_bytes or per_sequence
        speed = min(BYTES_PER_S, weights / LEAST_READ_S)
        return self.faults.t_inf or speed / per_sequence, self.faults.b_half or weights / per_sequence

    def drawn_law(self, workload: Workload) -> tuple[float, float]:
        """The law of all its GPUs in one run, a little off: t_inf in output tokens/s, and b_half in sequences."""
        t_inf, b_half = self.law(workload)
        t_inf *= self.speed * math.exp(self.random.gauss(0.0, self.faults.noise)) / (1 + self.faults.slowdown)
        return t_inf * self.spec.tensor_parallel_size, b_half  # of the work; the wait for others comes on top

    def start(self) -> None:
        """Do nothing: the engine has no device to wait for."""

    def differ(self, launch: str) -> None:
        """Take more or less time than other launches, by chance and yet the same again. launch: its name in a gate."""
        chance = random.Random(f"{DRAWN} {self.spec.seed} {launch}")
        self.speed /= math.exp(chance.gauss(0.0, self.faults.scatter))
        start_s = self.faults.start_s * math.exp(chance.gauss(0.0, 3 * self.faults.scatter))
        self.resolved = replace(self.resolved, ready_s=start_s)

    def load_requests(self, workload: Workload) -> None:
        check_fits(self.limits, workload)

    def run(
        self,
        workload: Workload,
        load: Load,
        on_progress: ProgressCallback = ignore_progress,
        barrier: WindowBarrier | None = None,
    ) -> Run:
        """barrier: its own clock needs none, and all that are alike have settled after the same time."""
        check_load(self.spec, load)
        self.load_requests(workload)
        loop = self._loop(workload, load)
        if loop.concurrency >= self.faults.die_at:
            self.ready = False
            raise EngineFailed(f"the simulated engine died at {loop.concurrency} in flight, as it was told to")
        time.sleep(self.faults.lasts_s)
        t_inf, b_half = self.drawn_law(workload)
        state, fits = _Simulation(), self._fits(workload)
        users = _due(loop, state)
        for _ in range(MAX_STEPS):
            self._send(state, loop, workload, users)
            if not state.in_flight:
                break
            ends = self._step(state, t_inf, b_half, fits)
            loop.stepped(state.now)
            if loop.phase == "over" and loop.requests is None:
                break
            users = ends + _due(loop, state)
        self.ran_s += state.now
        rate = sum(step[3] for step in state.steps) / state.now if state.now else None
        on_progress(Progress("over", state.now, state.ended, state.in_flight, rate))
        failed = state.ended if loop.concurrency >= self.faults.fail_at else 0
        window = loop.window or (0.0, state.now)
        return Run(
            samples=_samples(state),
            steps=Steps(*zip(*state.steps)) if state.steps else Steps(*[()] * 7),
            window_s=window,
            failures=failed,
            first_failure="PlantedFailure: as it was told to" if failed else None,
            telemetry=self._sensed(window, loop.concurrency) if self.faults.sensors else None,
        )

    def _sensed(self, window_s: tuple[float, float], concurrency: int) -> Telemetry:
        faults = self.faults
        ratios = {
            ENGINE_ACTIVE: faults.engine_active,
            DRAM_ACTIVE: faults.dram_active,
            TENSOR_ACTIVE: faults.tensor_active,
            SM_OCCUPANCY: faults.sm_occupancy,
        }
        return simulated(
            window_s,
            ratios,
            power_w=faults.power_w,
            memory_used=faults.memory_used,
            slow_clock=concurrency >= faults.slow_clock_from,
            lost=concurrency >= faults.lost_from,
            hot=concurrency >= faults.hot_from,
            gpus=self.gpus,
            imbalance=faults.imbalance,
        )

    def _fits(self, workload: Workload) -> int:
        """Sequences that its limit and its KV cache allow at once, at full length: it never preempts by itself."""
        windows = self.resolved.kv_windows or (None,)
        each = request_blocks(windows, BLOCK_SIZE, workload.longest, in_flight(self.limits))
        return max(1, min(self.limits.max_num_seqs, (self.resolved.kv_blocks or 0) // each))

    def _loop(self, workload: Workload, load: Load) -> ClosedLoopPacer | SchedulePacer:
        if isinstance(load, OpenLoop):
            return SchedulePacer(load.times)
        return closed_loop(message_of(load), [request.output_tokens for request in workload.requests], gated=False)

    def _send(self, state: _Simulation, loop: ClosedLoopPacer | SchedulePacer, workload: Workload, users: int) -> None:
        for _ in range(users):
            number = loop.next_request()
            if number is None:
                return
            index = number % len(workload.requests)
            request = workload.requests[index]
            sent_s = loop.sent_s(number, state.now)
            state.sent.append(_Sequence(index, sent_s, len(request.prompt), request.output_tokens))

    def _step(self, state: _Simulation, t_inf: float, b_half: float, fits: int) -> int:
        """One token for each running sequence (as many as fit); returns how many ended."""
        batch = state.admit(fits, self.limits.max_num_batched_tokens)
        of_the_host = LAYER_LAUNCH_S * self.model.layers if self.limits.enforce_eager else 0.0
        pace = self.host(self.ran_s + state.now)
        state.now += max((b_half + batch) / t_inf + self.waits_s, of_the_host) / pace
        ended = state.ends.pop(len(state.steps), 0)
        state.ended += ended
        running = min(state.in_flight, fits)
        preempted = int(batch >= self.faults.preempt_from)
        state.steps.append((state.now, running, state.in_flight - running, batch, 0, None, preempted))
        return ended

    def outputs(self, workload: Workload, requests: int, length: int) -> Outputs:
        """Drawn from the seed and the request; from `other_token_at` on, others."""
        drawn = [random.Random(f"{self.spec.seed} {number}") for number in range(min(requests, len(workload.requests)))]
        tokens = [[each.randrange(self.model.vocabulary) for _ in range(length)] for each in drawn]
        return tuple(tuple(t + (at >= self.faults.other_token_at) for at, t in enumerate(row)) for row in tokens)

    def scores(self, workload: Workload, outputs: Outputs) -> Scores:
        """Its own tokens are likely, others less so; with the scatter of a launch's roundings."""
        chance = random.Random(self.launch)
        own = self.outputs(workload, len(outputs), max(map(len, outputs), default=0))
        likely = (-0.5 if tokens == mine[: len(tokens)] else -2.0 for tokens, mine in zip(outputs, own))
        return tuple(chance.gauss(each - self.faults.logprob_drift, 1e-3) for each in likely)

    def profile(self, workload: Workload, load: Load) -> str | None:
        """A file where its traces would lie, with nothing in it."""
        self.load_requests(workload)
        if not self.faults.profiler:
            return "the simulated engine has no profiler, as it was told to"
        (Path(self.extra_env[PROFILE_FOLDER]) / f"{self.launch}.trace.json").write_text("{}\n", "utf-8")
        return None

    def close(self) -> None:
        """Nothing to free."""


def _due(loop: ClosedLoopPacer | SchedulePacer, state: _Simulation) -> int:
    """The number of users to start now. While nothing is in flight the clock moves on to the next one's time first."""
    if isinstance(loop, SchedulePacer):
        if not state.in_flight and loop.next_s is not None:
            state.now = max(state.now, loop.next_s)
        loop.arrive(state.now)
    return loop.users_due()


def _samples(state: _Simulation) -> Samples:
    times = [step[0] for step in state.steps]
    rows = [_sample(sequence, times) for sequence in state.sent]
    return Samples(*zip(*rows)) if rows else Samples(*[()] * 8)


def _sample(sequence: _Sequence, times: list[float]) -> tuple[Any, ...]:
    prompt = sequence.prompt
    if sequence.first_step is None:
        return sequence.request, sequence.sent_s, None, None, None, prompt, 0, False
    made = min(sequence.wanted, len(times) - sequence.first_step)
    first_s, last_s = times[sequence.first_step], times[sequence.first_step + made - 1]
    finished = made == sequence.wanted
    return sequence.request, sequence.sent_s, sequence.admitted_s, first_s, last_s, prompt, made, finished
