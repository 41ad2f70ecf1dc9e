"""Functions that read the options once into one frozen value with the source of each entry."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pytest_slmserve.options.table import OPTS, Opt, Options, side, urls, variable
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.secrecy import EXPORTED, WITH_A_KEY, secret_in

OF_A_SIDE = ("side", "simulate_slowdown")
OF_A_GATE = (*OF_A_SIDE, "gate_margin", "gate_launches")  # options without effect if there is no gate
EXAMPLES = {  # values for options without a default, by the placeholder in the help
    "N": "8",
    "S": "5",
    "SHARE": "0.05",
    "SIZE": "40GiB",
    "SIDE:ENTRY": "candidate:python=PATH",
    "tflops=N,gbps=N": "tflops=989,gbps=3350",
    "NAME=JSON": "max_num_seqs=256",
}
LONGEST = 200  # printed characters of a wrong value
OWN_MODES = "--slm-gpu, --slm-cpu or --slm-simulate"
BESIDE_THE_RECORDS = ("gate.json", "gate.md", "calibration.json")  # files that a gate writes


def read_options(
    command_line: Mapping[str, Any], ini: Mapping[str, Any], env: Mapping[str, str] = os.environ
) -> Options:
    """Return the options: command line before environment before ini file before default.

    Args:
        ini: texts, or TOML's lists, numbers and booleans.

    Raises:
        BadUsage: with option, source and text.
    """
    values, texts, source = dict[str, Any](), dict[str, Sequence[str]](), dict[str, str]()
    for opt in OPTS:
        given, of_toml = command_line.get(opt.name), ini.get(opt.key)
        found: tuple[Any, Sequence[str], str] = opt.default, (), "default"
        if given is not None and (opt.is_flag or given is True):
            found = True, (), "command line"
        elif given is not None:
            found = *_value(opt, given, opt.flag), "command line"
        elif text := env.get(opt.variable):
            found = *_value(opt, text, opt.variable), "environment"
        elif of_toml not in (None, "", []):
            found = *_value(opt, of_toml, opt.key), "ini"
        values[opt.name], texts[opt.name], source[opt.name] = found
    if values["calibrate"]:
        values["gate"] = True  # of two equal sides
    options = Options(**values, source=source, texts=texts)
    _check(options)
    return options


def _value(opt: Opt, given: Any, where: str) -> tuple[Any, Sequence[str]]:
    """Return the value and its texts. Raise BadUsage also for a secret, because all options may go into the records."""
    parts = [str(part) for part in given] if isinstance(given, list) else None
    if opt.many:
        texts = str(given).split() if parts is None else parts
    else:
        texts = [str(given) if parts is None else ",".join(parts)]
    if found := next(filter(None, map(secret_in, parts or [str(given)])), ""):
        hint = WITH_A_KEY if opt.read is urls else EXPORTED
        raise BadUsage(f"{where} holds {found} and it goes into records", hint)
    try:
        for text in texts:
            if opt.choices and text not in opt.choices:
                raise ValueError(" or ".join(opt.choices))
        values = tuple(map(opt.read, texts))
        return values if opt.many else values[0], texts
    except ValueError as wanted:
        shown = texts
        if opt.read is variable:  # a value may be a secret, so an error shows the name only
            shown = [re.sub("=.*", "=...", text, flags=re.DOTALL) for text in texts]
        elif opt.read is side:
            shown = [re.sub(r"((?::|,)env=[^=]*=).*", r"\1...", text, flags=re.DOTALL) for text in texts]
        said = " ".join(repr(text if len(text) <= LONGEST else f"{text[:LONGEST]}...") for text in shown)
        raise BadUsage(f"{where}: {said} is not {wanted}", _to_type(opt, " ".join(texts))) from None


def _check(options: Options) -> None:
    """Raise BadUsage if options do not go together, or if one on the command line has no use in this run."""
    typed = [opt for opt in OPTS if options.source[opt.name] == "command line"]
    if options.gpu + options.cpu + options.simulate + bool(options.endpoint) > 1:
        raise BadUsage(
            "--slm-gpu, --slm-cpu, --slm-simulate and --slm-endpoint cannot be combined", "Use only one of them."
        )
    if (name := Path(options.records).name) in BESIDE_THE_RECORDS:
        raise BadUsage(
            f"--slm-records={options.records}: a gate writes {name} beside its records",
            "Choose a name that ends in .jsonl.",
        )
    if options.export and Path(options.export.partition("=")[2]) == Path(options.records):
        raise BadUsage(f"slm_export={options.export} would write into the records", "-o slm_export=WHAT=ELSEWHERE")
    own = [opt.flag for opt in typed if opt.name.startswith(OF_A_GATE)]
    if own and not options.gate and not (options.baseline and own[0] == "--slm-gate-margin"):
        raise BadUsage(f"{own[0]} applies only to a gate", f"--slm-gate {own[0]} ...")
    if options.gate and isinstance(options.resume, str):
        why = "--slm-gate: a gate resumes only in the results file that has its pairs"
        raise BadUsage(why, f"--slm-records={options.resume} --slm-resume")
    flag = "calibrate" if options.calibrate else "gate"
    if options.gate and options.source[flag] != "ini" and options.platform is None:
        raise BadUsage(f"--slm-{flag} needs an engine to measure", f"Add {OWN_MODES} to --slm-{flag}.")
    if options.simulate_slowdown and not options.simulate and options.source["simulate_slowdown"] == "command line":
        raise BadUsage("--slm-simulate-slowdown slows only a simulated candidate", "Add --slm-simulate.")
    given = [opt.flag for opt in OPTS if opt.name.startswith(OF_A_SIDE) and getattr(options, opt.name)]
    if options.calibrate and given:
        why = f"{given[0]} would make the sides of a calibration differ"
        raise BadUsage(why, f"Run --slm-calibrate without {given[0]}.")
    if options.calibrate and options.gate_launches == "start":
        why = "a calibration measures loads, and a gate of start-up has none"
        raise BadUsage(why, "--slm-gate --slm-gate-launches=start")
    # Options of engines that the plugin starts have no effect on a server that already runs.
    if options.endpoint and options.gate:
        why = "needs to launch engines, and an endpoint runs already"
        raise BadUsage(f"--slm-{flag} {why}", f"Replace --slm-endpoint with {OWN_MODES}.")
    if options.endpoint and options.baseline:
        why = "a server does not report its limits, so two runs of it cannot be compared"
        raise BadUsage(f"--slm-baseline: {why}", "Use --slm-endpoint without --slm-baseline.")
    lost = next((opt.flag for opt in typed if opt.own and getattr(options, opt.name) != "off"), None)
    if options.endpoint and lost:
        why = f"{lost} applies only to engines that are started here, not to an endpoint"
        raise BadUsage(why, f"Remove {lost}.")
    if options.ray and options.platform is None and options.source["ray"] == "command line":
        raise BadUsage("--slm-ray needs an engine to measure", f"Add {OWN_MODES}.")
    if options.ray and options.endpoint:
        raise BadUsage("--slm-ray starts engines on its nodes, and an endpoint runs already", "Use only one of them.")
    if options.ray and options.gate:  # a task cannot decide which launches come next
        why = "its pairs of launches decide as they go, and belong on one GPU"
        raise BadUsage(f"--slm-gate is not sent to Ray: {why}", "Run --slm-gate without --slm-ray, on a GPU host.")
    if options.ray and options.sweep == "adaptive":
        why = "it decides as it goes what to measure next, and a task is told beforehand"
        raise BadUsage(f"--slm-sweep adaptive is not sent to Ray: {why}", "--slm-sweep full")


def near_option(flag: str) -> str:
    """Return the end of the error about an unknown option: the most similar one and how to set it, or ""."""
    opts = {opt.name.replace("_", "-"): opt for opt in OPTS}
    near = get_close_matches(flag.removeprefix("--slm-"), opts, 1)
    if near and (opt := opts[near[0]]).ini_only:
        return f"\n  try: {_to_type(opt, '')}, or {opt.key} in the ini file, or {opt.variable} in the environment"
    return f", did you mean {opts[near[0]].flag}?" if near else ""


def _to_type(opt: Opt, text: str) -> str:
    """Return the option with a valid value: the most similar choice or the last one, the default, or an example."""
    if opt.choices:
        near = get_close_matches(text, opt.choices, 1)
        return f"{opt.flag}={near[0] if near else opt.choices[-1]}"
    value = opt.default_text or EXAMPLES.get(opt.metavar or "", opt.metavar)
    return f"{opt.flag}={value}" if value else opt.flag


def as_words(options: Options, leave_out: Collection[str] = ()) -> list[str]:
    """Return the options that are not their default as words of a command line."""
    words: list[str] = []
    for opt in OPTS:
        value = getattr(options, opt.name)
        if options.source[opt.name] == "default" or opt.name in leave_out:
            continue
        if (opt.is_flag and not opt.ini_only) or (opt.bare and isinstance(value, bool)):
            words += [opt.flag] if value else []
        elif opt.ini_only:
            words += [word for text in options.texts[opt.name] for word in ("-o", f"{opt.key}={text}")]
        else:
            words += [f"{opt.flag}={text}" for text in options.texts[opt.name]]
    return words
