"""Imports point one way, and the house stays small: the rules as data, each tried on a planted violation."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median, quantiles

import pytest

import pytest_slmserve

ROOT = "pytest_slmserve"
FOLDER = Path(pytest_slmserve.__file__).parent

# Each room, and the rooms to its left whose door it knows; what those know is allowed too.
LEFT: dict[str, set[str]] = {
    "errors": set(),
    "kinds": set(),
    "urls": {"errors"},
    "sensors": {"errors"},
    "models": {"errors"},
    "spec": {"errors", "kinds", "urls"},
    "records": {"models", "spec"},
    "environment": {"records"},
    "codec": {"records", "sensors"},
    "store": {"codec"},
    "merging": {"store"},
    "workload": {"records"},
    "engines": {"records", "sensors"},
    "telemetry": {"records", "sensors"},
    "measure": {"environment", "store", "workload", "engines", "telemetry"},
    "option_table": {"errors", "kinds", "urls"},
    "options": {"option_table"},
    "plan": {"measure", "options"},
    "groups": {"plan"},
    "makespan": {"groups"},
    "analysis": {"records", "sensors"},
    "baselines": {"store", "analysis"},
    "foreign": {"analysis"},
    "waivers": {"analysis"},
    "calibrations": {"analysis"},
    "foreign_replicas": {"foreign"},
    "report": {"analysis", "foreign", "foreign_replicas"},
    "worker": set(),
    "client": set(),
}
# May import all, also each other.
TOP = {
    "ahead",
    "cluster",
    "shared_engines",
    "commands",
    "agenda",
    "advising",
    "devices",
    "gathering",
    "scheduling",
    "spreading",
    "workers",
    "gating",
    "holding",
    "resuming",
    "session",
    "sweeping",
    "verdicts",
    "verifying",
    "items",
    "ordering",
    "parameters",
    "planned",
    "jobs",
    "pricing",
    "known",
    "watched",
    "fixtures",
    "plugin",
    "doctor",
    "__main__",
}
ADMISSION = "worker.admission"
EXCEPTIONS = {
    ("engines", "telemetry.simulated"),  # pure, and an imagined engine has an imagined device
    ("engines", ADMISSION),  # pure, so that the fake engine admits requests by the same rule as the worker
    ("client", ADMISSION),  # likewise, over HTTP
    ("plan", "analysis.kv_cache"),  # arithmetic over shapes: what a plan is cut by, before anything is measured
}
MAY_IMPORT_RAY = {"cluster"}
MAY_IMPORT_PYTEST = {"plugin", "fixtures", "items", "ordering", "parameters", "planned", "spreading"}
# It runs in an interpreter that has not our package; uvloop comes with vLLM.
WORKER_MAY_IMPORT = sys.stdlib_module_names | {"torch", "transformers", "uvloop", "vllm"}

Sources = Mapping[str, str]  # text of each module by its name below the root, "" being the root itself


def package() -> Sources:
    """Every module of the package; the benchmarks, which a wheel puts into its folder, are not part of it."""
    paths = [p for p in FOLDER.rglob("*.py") if p.relative_to(FOLDER).parts[0] != "benchmarks"]
    return {name_of(path): path.read_text(encoding="utf-8") for path in paths}


def name_of(path: Path) -> str:
    parts = path.relative_to(FOLDER).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    return module.partition(".")[0]


def imports(text: str) -> Iterator[str]:
    """All that is imported, as module or module:name, inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield from (f"{'.' * level}{module or ''}:{alias.name}" for alias in names)


def own_imports(sources: Sources) -> Iterator[tuple[str, str]]:
    """Pairs of modules (importer, imported) below the root; `from x import y` means x.y where that is a module."""
    for importer, text in sources.items():
        for name in imports(text):
            module, _, attribute = name.partition(":")
            if module == ROOT or module.startswith(f"{ROOT}."):
                below = module[len(ROOT) + 1 :]
                deeper = f"{below}.{attribute}".strip(".")
                yield importer, deeper if deeper in sources else below


def allowed(importer: str) -> set[str]:
    """Rooms that a room may import: its own, and all that lie to its left."""
    if importer in TOP:
        return TOP | LEFT.keys()
    found = {importer}
    while more := {left for name in found for left in LEFT.get(name, ())} - found:
        found |= more
    return found


def unknown_rooms(sources: Sources) -> list[str]:
    return sorted({room(name) for name in sources} - LEFT.keys() - TOP - {""})


def imports_to_the_right(sources: Sources) -> list[tuple[str, str]]:
    pairs = {(a, b) for a, b in own_imports(sources) if a and b and room(b) not in allowed(room(a))}
    return sorted((a, b) for a, b in pairs if (room(a), b) not in EXCEPTIONS)


def imports_of_the_root(sources: Sources) -> list[str]:
    return sorted({a for a, b in own_imports(sources) if b == ""})


def relative_imports(sources: Sources) -> list[str]:
    return sorted(name for name, text in sources.items() if any(i.startswith(".") for i in imports(text)))


def imports_of_pytest(sources: Sources) -> list[str]:
    users = {name for name, text in sources.items() if {"pytest", "_pytest"} & {top_of(i) for i in imports(text)}}
    return sorted(users - MAY_IMPORT_PYTEST)


def imports_of_ray(sources: Sources) -> list[str]:
    users = {name for name, text in sources.items() if "ray" in {top_of(i) for i in imports(text)}}
    return sorted(name for name in users if room(name) not in MAY_IMPORT_RAY)


def top_of(imported: str) -> str:
    return imported.partition(":")[0].partition(".")[0]


def foreign_to_the_worker(sources: Sources) -> list[tuple[str, str]]:
    """What the worker imports beside the standard library, vLLM, torch and the files of its own folder."""
    siblings = {name.rpartition(".")[2] for name in sources if room(name) == "worker"}
    known = WORKER_MAY_IMPORT | siblings - {"worker"}
    worker = [(name, text) for name, text in sources.items() if room(name) == "worker"]
    return [(name, top_of(i)) for name, text in worker for i in imports(text) if top_of(i) not in known]


def foreign_to_the_client(sources: Sources) -> list[tuple[str, str]]:
    """It is a process of its own, which must start fast and do nothing beside: the standard library alone."""
    client = [(name, text) for name, text in sources.items() if room(name) == "client"]
    known = sys.stdlib_module_names | {ROOT}
    return [(name, top_of(i)) for name, text in client for i in imports(text) if top_of(i) not in known]


def impure_admission(sources: Sources) -> list[str]:
    return sorted({top_of(i) for i in imports(sources[ADMISSION])} - sys.stdlib_module_names)


def cycle(sources: Sources) -> list[str]:
    """One cycle of imports, or nothing. Importing a module imports the folders above it as well."""
    graph: dict[str, set[str]] = {name: set() for name in sources}
    for importer, imported in own_imports(sources):
        graph[importer] |= {imported, imported.rpartition(".")[0]} - {importer, ""}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as found:
        return list(found.args[1])
    return []


def function_lengths(sources: Sources) -> list[int]:
    """Lines of every function, docstring included."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for text in sources.values() for node in ast.walk(ast.parse(text)) if isinstance(node, functions)]
    return [(node.end_lineno or 0) - node.lineno + 1 for node in nodes]


RULES: dict[str, Callable[[Sources], Sequence[object]]] = {
    "every room stands in the table": unknown_rooms,
    "imports point left": imports_to_the_right,
    "nothing inside imports the root": imports_of_the_root,
    "imports are absolute": relative_imports,
    "only plugin, fixtures and items import pytest": imports_of_pytest,
    "only the cluster imports ray": imports_of_ray,
    "the worker needs only the standard library and vLLM": foreign_to_the_worker,
    "the client needs only the standard library": foreign_to_the_client,
    "admission is pure": impure_admission,
    "no cycles": cycle,
}
SOUND = {"errors": "", "records": "", "engines": "", "engines.base": "", "worker": "", ADMISSION: "import heapq"}
PLANTED = [
    ("every room stands in the table", {"helpers": ""}),
    ("imports point left", {"records": "from pytest_slmserve.analysis.curve import Curve"}),
    ("imports point left", {"records": "from pytest_slmserve import engines"}),
    ("imports point left", {"engines.base": "def later():\n    import pytest_slmserve.workload.build"}),
    ("imports point left", {"analysis": "from pytest_slmserve.measure import measure"}),
    ("imports point left", {"measure": "from pytest_slmserve.analysis import verdict"}),
    ("imports point left", {"records": f"from pytest_slmserve.{ADMISSION} import ClosedLoop"}),
    ("imports point left", {"worker.worker": "from pytest_slmserve.errors import SlmError"}),
    ("imports point left", {"plan": "from pytest_slmserve.analysis import claims"}),
    ("imports point left", {"spec": "from pytest_slmserve.options import Options"}),
    ("imports point left", {"report": "from pytest_slmserve.engines.base import Engine"}),
    ("imports point left", {"analysis.batching": "from pytest_slmserve.foreign import Setting"}),
    ("imports point left", {"foreign": "from pytest_slmserve.report.judging import judge"}),
    ("nothing inside imports the root", {"records": "from pytest_slmserve import EngineSpec"}),
    ("nothing inside imports the root", {"plugin": "import pytest_slmserve"}),
    ("imports are absolute", {"engines.base": "from . import pool"}),
    ("imports are absolute", {"engines.base": "from ..errors import SlmError"}),
    ("only plugin, fixtures and items import pytest", {"session": "from typing import TYPE_CHECKING\nimport pytest"}),
    ("only plugin, fixtures and items import pytest", {"session": "from _pytest.config import Config"}),
    ("only the cluster imports ray", {"plugin": "def connect():\n    import ray"}),
    ("only the cluster imports ray", {"session": "from ray.util import scheduling_strategies"}),
    ("the worker needs only the standard library and vLLM", {"worker.worker": "import numpy as np"}),
    ("the worker needs only the standard library and vLLM", {"worker.worker": "from pytest_slmserve import errors"}),
    ("the client needs only the standard library", {"client.streams": "import psutil"}),
    ("imports point left", {"client.run": "from pytest_slmserve.errors import SlmError"}),
    ("imports point left", {"client.run": "from pytest_slmserve.worker.worker import Server"}),
    ("admission is pure", {ADMISSION: "def admit():\n    from torch import Tensor"}),
    ("no cycles", {"a": "from pytest_slmserve.b import x", "b": "def f():\n    from pytest_slmserve import a"}),
    ("no cycles", {"a": "from pytest_slmserve.a.b import x", "a.b": "import pytest_slmserve.a"}),
]


def test_the_whole_package_is_read() -> None:
    assert {"", "errors", "records", "analysis.verdict", ADMISSION, "worker.worker", "plugin"} <= package().keys()


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule: str) -> None:
    assert RULES[rule](package()) == []


@pytest.mark.parametrize(("rule", "planted"), PLANTED)
def test_a_planted_violation_is_found(rule: str, planted: Sources) -> None:
    assert RULES[rule](SOUND) == []
    assert RULES[rule]({**SOUND, **planted}) != []


def test_every_rule_was_tried() -> None:
    assert {rule for rule, _ in PLANTED} == RULES.keys()


def test_allowed_imports_are_not_found() -> None:
    allowed_here = {
        "engines.base": f"from pytest_slmserve.errors import SlmError\nfrom pytest_slmserve.{ADMISSION} import Closed",
        "plan": "from pytest_slmserve.options import Options\nfrom pytest_slmserve.engines.base import Engine",
        "analysis.kv_cache": "from pytest_slmserve.models import Shape",
        "plan.cut": "def cut():\n    from pytest_slmserve.analysis.kv_cache import kv_capacity",
        "report.tables": "from pytest_slmserve.analysis.curve import Curve\nfrom pytest_slmserve import records",
        "worker.worker": "import asyncio\nfrom admission import ClosedLoop\nfrom vllm import SamplingParams",
        "client.run": f"import gc\nfrom pytest_slmserve.{ADMISSION} import ClosedLoop",
        "plugin": "import pytest\nfrom pytest_slmserve.options import Options",
        "cluster.connection": "import ray",
    }
    assert {rule: find({**SOUND, **allowed_here}) for rule, find in RULES.items()} == {rule: [] for rule in RULES}


def test_functions_stay_small() -> None:
    lengths = function_lengths(package())
    assert median(lengths) <= 10
    assert quantiles(lengths, n=10)[-1] <= 35


def test_folders_are_at_most_two_deep() -> None:
    assert [name for name in package() if name.count(".") > 1] == []
