"""Reading of the options, once, into one frozen value that knows where each entry came from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pytest_slmserve.options.table import OPTS, OneOf, Opt, Options, argument, side, variable
from pytest_slmserve.schema.errors import BadUsage

OF_A_SIDE = ("side", "simulate_slowdown")
OF_A_GATE = (*OF_A_SIDE, "gate_margin")  # options that say nothing without a gate
OF_OUR_ENGINES = (  # options that say nothing of a server that runs already
    "interface",
    "engine_arg",
    "env",
    "gpu_memory",
    "gpu_memory_utilization",
    "max_num_seqs",
    "python",
    "replicas",
    "sharing",
    "telemetry",
    "tensor_parallel_size",
)
EXAMPLES = {  # values to type for options without a default of their own, by the placeholder in the help
    "N": "8",
    "S": "5",
    "SHARE": "0.05",
    "SIZE": "40GiB",
    "SIDE:ENTRY": "candidate:python=PATH",
    "tflops=N,gbps=N": "tflops=989,gbps=3350",
    "NAME=JSON": "max_num_seqs=256",
}
OWN_MODES = "--slm-gpu, --slm-cpu or --slm-simulate"
BESIDE_THE_RECORDS = ("gate.json", "gate.md", "calibration.json")  # files that a gate writes


def read_options(
    command_line: Mapping[str, Any], ini: Mapping[str, Any], env: Mapping[str, str] = os.environ
) -> Options:
    """Command line before environment before ini before default. ini: texts, or values of TOML: lists, numbers and
    booleans. Raises BadUsage naming option, source and text."""
    values, source = {}, {}
    for opt in OPTS:
        values[opt.name], source[opt.name] = _read(opt, command_line.get(opt.name), env, ini)
    if values["calibrate"]:
        values["gate"] = True  # of two equal sides
    options = Options(**values, source=source)
    if options.gpu + options.cpu + options.simulate + bool(options.endpoint) > 1:
        raise BadUsage("--slm-gpu, --slm-cpu, --slm-simulate and --slm-endpoint cannot be combined", "only one of them")
    if (name := Path(options.records).name) in BESIDE_THE_RECORDS:
        raise BadUsage(f"--slm-records={options.records}: a gate writes {name} beside its records", "a name in .jsonl")
    if options.export and Path(options.export.partition("=")[2]) == Path(options.records):
        raise BadUsage(f"--slm-export={options.export} would write into the records", "--slm-export with another path")
    _check_typed(options)
    if options.endpoint:
        _check_endpoint(options)
    _check_ray(options)
    return options


def near_option(flag: str) -> str:
    """Return the end of the error about an option that does not exist: ", did you mean --slm-gate?", or how an option
    without a place on the command line is set there, or "" if no name is similar."""
    opts = {opt.name.replace("_", "-"): opt for opt in OPTS}
    near = get_close_matches(flag.removeprefix("--slm-"), opts, 1)
    if near and (opt := opts[near[0]]).ini_only:
        return f"\n  try: {_to_type(opt, '')}, or {opt.key} in the ini file, or {opt.variable} in the environment"
    return f", did you mean {opts[near[0]].flag}?" if near else ""


def as_words(options: Options, leave_out: Collection[str] = ()) -> list[str]:
    """Words of a command line that gives these options: all that are not their default, wherever they came from."""
    told = [opt for opt in OPTS if options.source[opt.name] != "default" and opt.name not in leave_out]
    return [word for opt in told for word in _words(opt, getattr(options, opt.name))]


def _words(opt: Opt, value: Any) -> list[str]:
    if (opt.is_flag and not opt.ini_only) or (opt.bare and isinstance(value, bool)):
        return [opt.flag] if value else []
    if opt.read is side:
        texts = []
        for name, entries in value:
            of_kinds = (f"{kind}={each if kind == 'python' else _text(kind, each)}" for kind, each in entries)
            texts.append(f"{name}:{','.join(of_kinds)}")
    elif opt.many:
        texts = [_text("env" if opt.read is variable else "arg", each) for each in value]
    else:
        texts = [",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return [word for text in texts for word in f"{opt.flag}={text}".split(" ", 1 if opt.ini_only else 0)]


def _text(kind: str, pair: tuple[str, Any]) -> str:
    """Text of NAME=VALUE that is read as this value again: "5" as a text is not 5."""
    name, value = pair
    plain = f"{name}={value}"
    return plain if kind == "env" or argument(plain) == pair else f"{name}={json.dumps(value)}"


def _check_typed(options: Options) -> None:
    """Check that what is typed for this run has a use in it; an ini file may serve other runs. Raises BadUsage."""
    typed = [opt for opt in OPTS if options.source[opt.name] == "command line"]
    lost = next((opt.flag for opt in typed if opt.name.startswith(OF_A_GATE)), None)
    if lost and not options.gate and not (options.baseline and lost == "--slm-gate-margin"):
        raise BadUsage(f"{lost} says what a gate compares, and there is no gate", f"--slm-gate {lost} ...")
    if options.gate and isinstance(options.resume, str):
        why = "--slm-gate: a gate stays in one archive, so it goes on only in that which has its pairs"
        raise BadUsage(why, f"--slm-records={options.resume} --slm-resume")
    flag = "calibrate" if options.calibrate else "gate"
    if options.gate and options.source[flag] != "ini" and options.platform is None:
        raise BadUsage(f"--slm-{flag} needs an engine to measure", f"--slm-{flag} with {OWN_MODES}")
    if options.simulate_slowdown and not options.simulate and options.source["simulate_slowdown"] == "command line":
        raise BadUsage("--slm-simulate-slowdown slows a simulated candidate, and no other", "it with --slm-simulate")
    given = [opt.flag for opt in OPTS if opt.name.startswith(OF_A_SIDE) and getattr(options, opt.name)]
    if options.calibrate and given:
        why = f"{given[0]} would make the sides of a calibration differ"
        raise BadUsage(why, f"--slm-calibrate without {given[0]}")


def _check_endpoint(options: Options) -> None:
    """Refuse options of engines started here, which say nothing of a server that runs already. Raises BadUsage."""
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
        why = f"{lost} is for engines that are started here, and an endpoint runs already"
        raise BadUsage(why, f"no {lost} with an endpoint")


def _check_ray(options: Options) -> None:
    """Refuse options that do not fit a run on a Ray cluster. Measurements that decide as they go cannot be sent to it
    beforehand, and an endpoint is not in it. Raises BadUsage."""
    if not options.ray:
        return
    if options.platform is None and options.source["ray"] == "command line":
        raise BadUsage("--slm-ray needs an engine to measure", f"--slm-ray with {OWN_MODES}")
    if options.endpoint:
        raise BadUsage("--slm-ray starts engines on its nodes, and an endpoint runs already", "only one of them")
    if options.gate:
        why = "its pairs of launches decide as they go, and belong on one GPU"
        raise BadUsage(f"--slm-gate is not sent to Ray: {why}", "--slm-gate without --slm-ray, on a GPU host")
    if options.sweep == "adaptive":
        why = "it decides as it goes what to measure next, and a task is told beforehand"
        raise BadUsage(f"--slm-sweep adaptive is not sent to Ray: {why}", "--slm-sweep full")


def _read(opt: Opt, given: Any, env: Mapping[str, str], ini: Mapping[str, Any]) -> tuple[Any, str]:
    if given is not None:
        return (True if opt.is_flag or given is True else _value(opt, given, opt.flag)), "command line"
    if text := env.get(opt.variable):
        return _value(opt, _split(opt, text), opt.variable), "environment"
    if (of_toml := ini.get(opt.key)) not in (None, "", []):
        return _value(opt, _split(opt, of_toml), opt.key), "ini"
    return opt.default, "default"


def _split(opt: Opt, given: Any) -> str | Sequence[str]:
    """What is to be parsed: a text, or several where the option may be given again."""
    parts = [str(part) for part in given] if isinstance(given, list) else None
    if opt.many:
        return str(given).split() if parts is None else parts
    return str(given) if parts is None else ",".join(parts)


def _value(opt: Opt, text: str | Sequence[str], where: str) -> Any:
    try:
        return tuple(opt.read(part) for part in text) if opt.many else opt.read(text)  # type: ignore[arg-type]
    except ValueError as wanted:
        raise BadUsage(f"{where}: {_shown(opt, text)} is not {wanted}", _to_type(opt, text)) from None


def _shown(opt: Opt, text: str | Sequence[str]) -> str:
    """The text, quoted, or each of several; variables without their values, because a value may be a secret."""
    parts = [text] if isinstance(text, str) else list(text)
    if opt.read is variable:
        parts = [re.sub("=.*", "=...", part, flags=re.DOTALL) for part in parts]
    if opt.read is side:
        parts = [re.sub(r"((?::|,)env=[^=]*=).*", r"\1...", part, flags=re.DOTALL) for part in parts]
    return " ".join(map(repr, parts))


def _to_type(opt: Opt, text: str | Sequence[str]) -> str:
    """The option as it may be typed in place of a wrong value: of several words the one that is near, or the last one,
    which is no default; of others the default, or an example."""
    if isinstance(opt.read, OneOf):
        near = get_close_matches(str(text), opt.read.choices, 1)
        return f"{opt.flag}={near[0] if near else opt.read.choices[-1]}"
    value = opt.default_text or EXAMPLES.get(opt.metavar or "", opt.metavar)
    return f"{opt.flag}={value}" if value else opt.flag
