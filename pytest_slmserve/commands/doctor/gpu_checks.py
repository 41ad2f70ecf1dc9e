"""The GPU that would be measured: what it is, who may use it and who does, and what slows it down."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_slmserve.commands.doctor.finding import Finding, Places, first_of, gib
from pytest_slmserve.options.table import Options
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.specs import GIB
from pytest_slmserve.telemetry.host_probe import Gpu, first_gpu

Ask = Callable[..., Any]  # a function of NVML by name and what follows the device; None where NVML does not say
UNSAID = "NVML does not say"

SHARE = Options().gpu_memory_utilization
GPU_MEMORY_AT_REST = 2 * GIB  # what a driver may hold with nobody there
MARGIN_C = 10
MODES = {None: "not known", 0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
SM, MEMORY_CLOCK = 1, 2  # NVML's kinds of clocks
SLOWED = {0x8: "hardware", 0x20: "temperature, by the driver", 0x40: "temperature", 0x80: "power brake"}  # nvml.h


def of_gpu(look: Callable[[], Gpu] = first_gpu) -> tuple[Gpu | None, Finding]:
    """The GPU that would be measured. None is no problem: vLLM's CPU backend may be there."""
    try:
        gpu = look()
    except BadUsage as error:
        needs = "--slm-gpu needs a GPU and its driver; --slm-cpu runs with vLLM's CPU backend"
        return None, Finding("GPU", "warning", error.problem, needs)
    words = f"{gpu.name}, {gib(gpu.memory_bytes)}, driver {gpu.driver}, CUDA {gpu.cuda}, {gpu.uuid}"
    count = asking(gpu.uuid, of_device=False)("nvmlDeviceGetCount") or 1
    others = f" (one of {count}: CUDA_VISIBLE_DEVICES chooses)" if count > 1 else ""
    return gpu, Finding("GPU", "ok", f"{words}{others}")


def asking(uuid: str, *, of_device: bool = True) -> Ask:
    """Ask NVML; None where it does not know, has not the function, or may not say."""
    import pynvml

    def ask(function: str, *arguments: object) -> Any:
        try:
            device = [pynvml.nvmlDeviceGetHandleByUUID(uuid)] if of_device else []
            return getattr(pynvml, function)(*device, *arguments)
        except (pynvml.NVMLError, AttributeError):
            return None

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
    return ask


def of_card(ask: Ask) -> list[Finding]:
    checks = (of_sharing, of_users, of_gpu_memory, of_power, of_clocks, of_temperature, of_persistence, of_errors)
    return [check(ask) for check in checks]


def of_sharing(ask: Ask) -> Finding:
    """MIG and the compute mode: who may use the card, and how much of it."""
    mig, mode = ask("nvmlDeviceGetMigMode"), ask("nvmlDeviceGetComputeMode")
    found = f"MIG {_on(mig and mig[0])}, compute mode {MODES.get(mode, mode)}"
    return first_of(
        "sharing",
        found,
        (mode == 2, "problem", "an administrator: nvidia-smi -c DEFAULT"),
        (mig and mig[0], "warning", "a part of a GPU has fewer counters and no energy of its own"),
        (mode, "warning", "two engines cannot share this GPU, unless through MPS"),
    )


def _on(value: int | None) -> str:
    return "not known" if value is None else "on" if value else "off"


def of_users(ask: Ask) -> Finding:
    """Processes that compute on the GPU. In a container NVML may name none, or by numbers of the host."""
    kinds = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
    lists = [found for kind in kinds if (found := ask(kind)) is not None]
    pids = sorted({process.pid for processes in lists for process in processes})
    found = f"processes {', '.join(map(str, pids))}" if pids else "nobody computes on it" if lists else UNSAID
    return first_of("GPU users", found, (pids, "warning", "they share what is measured: wait, or end them"))


def of_gpu_memory(ask: Ask, share: float = SHARE) -> Finding:
    """share: of the memory, that an engine asks for by default."""
    memory = ask("nvmlDeviceGetMemoryInfo")
    if memory is None:
        return Finding("GPU memory", "ok", UNSAID)
    fits = int(100 * (1 - memory.used / memory.total)) / 100
    lacks = memory.total - memory.used < share * memory.total
    return first_of(
        "GPU memory",
        f"{gib(memory.used)} of {gib(memory.total)} used",
        (lacks, "problem", f"free it, or --slm-gpu-memory-utilization {fits:g}"),
        (memory.used > GPU_MEMORY_AT_REST, "warning", "somebody is there, perhaps idle: nvidia-smi"),
    )


def of_power(ask: Ask) -> Finding:
    limit, default = ask("nvmlDeviceGetEnforcedPowerLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    most = (ask("nvmlDeviceGetPowerManagementLimitConstraints") or [None, None])[1]
    if limit is None:
        return Finding("power limit", "ok", UNSAID)
    known = {"": limit, "default ": default, "at most ": most}
    found = ", ".join(f"{words}{milliwatts / 1000:g} W" for words, milliwatts in known.items() if milliwatts)
    other = default and limit != default
    return first_of("power limit", found, (other, "warning", "compare only with records of the same limit"))


def of_clocks(ask: Ask) -> Finding:
    """Clocks that an administrator locked cannot be asked for: under load they show as a low maximum."""
    found, lowered = [], False
    for name, kind in (("SM", SM), ("memory", MEMORY_CLOCK)):
        now, most = ask("nvmlDeviceGetClockInfo", kind), ask("nvmlDeviceGetMaxClockInfo", kind)
        clocks = ("nvmlDeviceGetApplicationsClock", "nvmlDeviceGetDefaultApplicationsClock")
        set_to, default = (ask(clock, kind) for clock in clocks)
        found.append(f"{name} {now or '?'} of at most {most or '?'} MHz" + (f", set to {set_to}" if set_to else ""))
        lowered |= bool(set_to and default and set_to < default)
    bits = _either(ask, "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    slowed = [name for bit, name in SLOWED.items() if bits & bit]
    return first_of(
        "clocks",
        "; ".join([*found, *(f"slowed down: {name}" for name in slowed)]),
        (slowed, "warning", "let it cool, and look at its cooling and power supply"),
        (lowered, "warning", "set below the default; an administrator: nvidia-smi -rac"),
    )


def of_temperature(ask: Ask) -> Finding:
    now = _either(ask, "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV", 0)
    slowdown = ask("nvmlDeviceGetTemperatureThreshold", 1)
    if now is None:
        return Finding("temperature", "ok", UNSAID)
    found = f"{now} °C" + (f", slows down at {slowdown} °C" if slowdown else "")
    hot = slowdown and now > slowdown - MARGIN_C
    return first_of("temperature", found, (hot, "warning", "let it cool first"))


def of_persistence(ask: Ask) -> Finding:
    mode = ask("nvmlDeviceGetPersistenceMode")
    found = UNSAID if mode is None else _on(mode)
    advice = "the first start is slower, counters may begin anew; an administrator: nvidia-smi -pm 1"
    return first_of("persistence", found, (mode == 0, "warning", advice))


def of_errors(ask: Ask) -> Finding:
    """Uncorrected ECC errors since the driver was loaded, and rows of memory that were or must be replaced."""
    ecc, count = ask("nvmlDeviceGetEccMode"), ask("nvmlDeviceGetTotalEccErrors", 1, 0)
    rows = ask("nvmlDeviceGetRemappedRows")
    _, remapped, pending, failed = rows or (0, 0, 0, 0)
    known = f"{count} uncorrected errors" if count is not None else "errors not known"
    found = f"ECC {_on(ecc and ecc[0])}, {known}, {remapped if rows else '?'} rows remapped"
    found += ", remapping failed" if failed else ", more pending" if pending and not count else ""
    return first_of(
        "GPU errors",
        found,
        (count or failed, "problem", "do not measure on it"),
        (pending, "warning", "an administrator should reset it when idle"),
    )


def _either(ask: Ask, one: str, other: str, *arguments: object) -> Any:
    answer = ask(one, *arguments)
    return ask(other, *arguments) if answer is None else answer


def of_mps(places: Places) -> Finding:
    """A control daemon writes its process id where its pipes are; one that has ended may leave them behind."""
    folder = Path(places.env.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    with suppress(OSError, ValueError):
        pid = int((folder / "nvidia-cuda-mps-control.pid").read_text("utf-8"))
        if (places.proc / str(pid)).exists():
            advice = "an engine becomes its client; to end it: echo quit | nvidia-cuda-mps-control"
            return Finding("MPS", "warning", f"a control daemon, process {pid}, in {folder}", advice)
    return Finding("MPS", "ok", f"no control daemon in {folder}")
