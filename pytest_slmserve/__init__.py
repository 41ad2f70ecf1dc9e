"""pytest-slmserve: benchmarks, gates and recommendations for small language models served with vLLM.

Public names are imported on first use, because pytest imports this package in every session.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Claim": "pytest_slmserve.analysis.claims.table",
    "ClosedLoop": "pytest_slmserve.schema.specs",
    "Curve": "pytest_slmserve.analysis.sweep.curve",
    "Engine": "pytest_slmserve.engines.base",
    "Adapters": "pytest_slmserve.schema.specs",
    "EngineSpec": "pytest_slmserve.schema.specs",
    "SimulatedEngine": "pytest_slmserve.engines.simulated",
    "Model": "pytest_slmserve.schema.models",
    "Measurement": "pytest_slmserve.schema.records",
    "OpenLoop": "pytest_slmserve.schema.specs",
    "SlmError": "pytest_slmserve.schema.errors",
    "State": "pytest_slmserve.analysis.verdict",
    "Inconclusive": "pytest_slmserve.analysis.verdict",
    "Verdict": "pytest_slmserve.analysis.verdict",
    "Workload": "pytest_slmserve.schema.specs",
    "WorkloadSpec": "pytest_slmserve.schema.specs",
    "model_of": "pytest_slmserve.plan.models",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("pytest-slmserve")
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, "__version__"})
