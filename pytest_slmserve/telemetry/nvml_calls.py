"""Calls of NVML: its error codes, units, and the reason for a value that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from pytest_slmserve.schema.errors import SensorFailed

PERCENT, MILLI, NANO, MEGA = 1e-2, 1e-3, 1e-9, 1e6
# Numbers are written out where releases of nvidia-ml-py from 12 to 13 do not all have the name.
NOT_SUPPORTED, NO_PERMISSION, TIMEOUT, FUNCTION_NOT_FOUND, UNKNOWN = 3, 4, 10, 13, 999
UNABLE = {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND}
REFUSED = UNABLE | {2, 25, 26}  # argument, version, deprecated: another call or field may do
LOST = {1, 9, 15, 16, 28}  # uninitialized, no driver, GPU lost, reset required, GPU not found: nothing will answer now


def bindings() -> Any:
    """The module pynvml of nvidia-ml-py; there is another distribution that has a module of that name."""
    hint = "python -m pip uninstall -y pynvml; python -m pip install --force-reinstall nvidia-ml-py"
    try:
        import pynvml
    except ImportError:
        raise SensorFailed("there is no module pynvml, which nvidia-ml-py has", hint) from None
    if not hasattr(pynvml, "_nvmlGetFunctionPointer"):
        raise SensorFailed("the module pynvml that is imported here is not the one of nvidia-ml-py", hint)
    return pynvml


def place(nv: Any, device: Any, device_uuid: str) -> tuple[Any, Callable[[Any], object]]:
    """The GPU that has the counters, and what fills a sample with those of this device only."""
    if not device_uuid.startswith("MIG-"):
        return device, partial(call, nv, "nvmlGpmSampleGet", device)
    parent = call(nv, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device)
    instance = call(nv, "nvmlDeviceGetGpuInstanceId", device)
    return parent, partial(call, nv, "nvmlGpmMigSampleGet", parent, instance)


def call(nv: Any, function: str, *arguments: Any) -> Any:
    """Call it; bindings too old to have it and drivers too old to have it raise the same NVMLError."""
    if not hasattr(nv, function):
        raise nv.NVMLError(FUNCTION_NOT_FOUND)
    return getattr(nv, function)(*arguments)


def said(error: Any) -> str:
    """Text of NVML's error for a call. Raises SensorFailed where it means that the GPU will not answer any more."""
    if error.value in LOST:
        raise SensorFailed(
            f"the GPU does not answer any more: {error}", "nvidia-smi, and the kernel's log for an Xid"
        ) from error
    return f"NVML says {error}"


def reason(nv: Any, code: int) -> str:
    """Text of NVML's error code for one value among several."""
    return f"NVML says {nv.NVMLError(code)}"


def refusal(nv: Any, function: str, *arguments: Any) -> str | None:
    """The reason why NVML refuses the call for good; None where it answers, or fails in a way that may pass."""
    try:
        call(nv, function, *arguments)
    except nv.NVMLError as error:
        why = said(error)
        return why if error.value in REFUSED else None
    return None


def unknown(numbers: Iterable[int], why: str, missing: list[str]) -> dict[int, float | None]:
    """None for each number, and the reason for each."""
    found: dict[int, float | None] = dict.fromkeys(numbers)
    missing.extend(f"{number}: {why}" for number in found)
    return found


def quietly(nv: Any, function: Callable[..., object], *arguments: Any) -> None:
    """Call on the way out, when nothing can be done about an error any more."""
    with suppress(nv.NVMLError):
        function(*arguments)
