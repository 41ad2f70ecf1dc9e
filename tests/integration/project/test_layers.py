"""Imports point one way, and the house stays small: the rules as data, each tried on a planted violation."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

import pytest

import pytest_slmserve

ROOT = "pytest_slmserve"
FOLDER = Path(pytest_slmserve.__file__).parent

# The rooms, from the top of the house to its ground: each may import itself and what stands below it.
ROOMS = (
    "plugin",
    "commands",
    "run",
    "report",
    "plan",
    "archive",
    "engines",
    "analysis",
    "telemetry",
    "workload",
    "options",
    "schema",
)
WORKER, LOADGEN, PACING = "engines.worker", "engines.loadgen", "engines.worker.slm_pacing"
PROCESS = "engines.worker.slm_process"
# The file of pacing is pure, so that a simulated engine and the load generator send requests by the worker's own rule.
# Who guards a process of ours, and how it speaks to its parent, is the same for every such process.
OUT_OF_THE_WORKER = {PACING, PROCESS}
# They are pure too: what a server says is hidden and written out by the same rules wherever it is told.
TEXTS = {"schema.printable", "schema.secret_words"}
MAY_IMPORT_RAY = "run.cluster"
MAY_IMPORT_PYTEST = "plugin"
# It runs in an interpreter that has not our package; uvloop and huggingface_hub come with vLLM.
WORKER_MAY_IMPORT = sys.stdlib_module_names | {"huggingface_hub", "torch", "transformers", "uvloop", "vllm"}

# Rooms that read records. A record is read alike everywhere, so the machine of its reader tells them nothing.
READERS = ("analysis", "report", "archive")
MAY_OPEN_FILES = {
    "analysis.claims.table": "the expected verdicts, a file of the package",
    "analysis.metrics.gpu_figures": "the data sheets of GPUs, a file of the package",
    "archive.store": "archives, and those inside pages",
    "report.page.writer": "the page, and the templates that it is made of",
    "report.screen": "GITHUB_STEP_SUMMARY",
    "archive.external": "the results that `vllm bench serve` would write",
}
TELL_OF_THE_MACHINE = {"open", "read_text", "read_bytes", "environ", "getenv", "home", "expanduser"}

TESTS_OF_USERS = ("benchmarks", "quickstart")

Sources = Mapping[str, str]  # text of each module by its name below the root, "" being the root itself


def package() -> Sources:
    """Every module of the package. Tests that users run are not part of it: the quick start, which lies in its folder,
    and the benchmarks, which a wheel puts there."""
    paths = [p for p in FOLDER.rglob("*.py") if p.relative_to(FOLDER).parts[0] not in TESTS_OF_USERS]
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


def unknown_rooms(sources: Sources) -> list[str]:
    return sorted({room(name) for name in sources} - {*ROOMS, "", "__main__"})


def imports_upward(sources: Sources) -> list[tuple[str, str]]:
    floor = {name: -height for height, name in enumerate(ROOMS)}
    pairs = {(a, b) for a, b in own_imports(sources) if room(a) in floor and room(b) in floor}
    return sorted((a, b) for a, b in pairs if floor[room(b)] > floor[room(a)])


def looks_at_the_machine(sources: Sources) -> list[tuple[str, str]]:
    """Names by which a module that reads records would see files or the environment of its reader."""
    found = []
    for module, text in sources.items():
        if room(module) in READERS and module not in MAY_OPEN_FILES:
            for node in ast.walk(ast.parse(text)):
                name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
                opens_an_archive = isinstance(node, ast.Attribute) and ast.unparse(node) == "Archive.open"
                if name in TELL_OF_THE_MACHINE and not opens_an_archive:
                    found.append((module, name))
    return found


def imports_of_the_root(sources: Sources) -> list[str]:
    return sorted({a for a, b in own_imports(sources) if b == ""})


def relative_imports(sources: Sources) -> list[str]:
    return sorted(name for name, text in sources.items() if any(i.startswith(".") for i in imports(text)))


def imports_of_pytest(sources: Sources) -> list[str]:
    users = {name for name, text in sources.items() if {"pytest", "_pytest"} & {top_of(i) for i in imports(text)}}
    return sorted(name for name in users if not inside(name, MAY_IMPORT_PYTEST))


def imports_of_ray(sources: Sources) -> list[str]:
    users = {name for name, text in sources.items() if "ray" in {top_of(i) for i in imports(text)}}
    return sorted(users - {MAY_IMPORT_RAY})


def inside(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def top_of(imported: str) -> str:
    return imported.partition(":")[0].partition(".")[0]


def foreign_to_the_worker(sources: Sources) -> list[tuple[str, str]]:
    """What the worker imports beside the standard library, vLLM, torch and the files of its own folder."""
    worker = {name: text for name, text in sources.items() if inside(name, WORKER)}
    known = WORKER_MAY_IMPORT | {name.rpartition(".")[2] for name in worker if name != WORKER}
    return [(name, top_of(i)) for name, text in worker.items() for i in imports(text) if top_of(i) not in known]


def imports_of_the_worker(sources: Sources) -> list[tuple[str, str]]:
    """The worker's folder is no part of the package that runs pytest; all but three pure files stay there."""
    pairs = {(a, b) for a, b in own_imports(sources) if inside(b, WORKER) and not inside(a, WORKER)}
    return sorted((a, b) for a, b in pairs if b not in OUT_OF_THE_WORKER)


def foreign_to_the_load_generator(sources: Sources) -> list[tuple[str, str]]:
    """It is a process of its own, which must start fast and do nothing beside: the standard library alone."""
    own = {name: text for name, text in sources.items() if inside(name, LOADGEN)}
    known = sys.stdlib_module_names | {ROOT}
    found = [(name, top_of(i)) for name, text in own.items() for i in imports(text) if top_of(i) not in known]
    ours = [
        (a, b) for a, b in own_imports(own | dict.fromkeys({*OUT_OF_THE_WORKER, *TEXTS}, "")) if not inside(b, LOADGEN)
    ]
    impure = [(name, top_of(i)) for name in TEXTS & sources.keys() for i in imports(sources[name])]
    found += [(a, b) for a, b in impure if b not in sys.stdlib_module_names]
    return found + [(a, b) for a, b in ours if b not in OUT_OF_THE_WORKER | TEXTS]


def impure_pacing(sources: Sources) -> list[str]:
    found = (imports(sources[name]) for name in OUT_OF_THE_WORKER & sources.keys())
    return sorted({top_of(i) for each in found for i in each} - sys.stdlib_module_names)


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


def classes_of_one_name(sources: Sources) -> list[str]:
    """Names of classes that stand more than once: nobody can search for them."""
    nodes = [node for text in sources.values() for node in ast.walk(ast.parse(text))]
    found = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in found.items() if count > 1)


# First words of docstrings that say nothing of what is returned: prepositions, pronouns, words of a question.
NO_SUBJECT = frozenset(
    [
        "after",
        "among",
        "as",
        "at",
        "because",
        "before",
        "beside",
        "between",
        "by",
        "for",
        "from",
        "how",
        "if",
        "in",
        "into",
        "it",
        "its",
        "like",
        "of",
        "on",
        "our",
        "so",
        "than",
        "that",
        "their",
        "these",
        "they",
        "this",
        "those",
        "to",
        "under",
        "until",
        "upon",
        "what",
        "when",
        "where",
        "whether",
        "which",
        "while",
        "who",
        "why",
        "with",
        "without",
    ]
)


def docstrings(sources: Sources) -> Iterator[tuple[str, str]]:
    """Every docstring, with the module and the line that it is in."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, documented) and (found := ast.get_docstring(node)):
                yield f"{module}:{getattr(node, 'lineno', 1)}", found


def without_a_subject(sources: Sources) -> list[str]:
    """Places of docstrings that begin with no noun and no verb of their own."""
    started = ((place, text.lower().split()) for place, text in docstrings(sources))
    return [
        place
        for place, words in started
        if words[0].strip("`\"'.,:;()") in NO_SUBJECT or words[:2] in (["the", "same"], ["the", "other"])
    ]


def functions_of_one_name(sources: Sources) -> list[str]:
    """Public functions of modules whose name stands more than once in the package."""
    nodes = [node for text in sources.values() for node in ast.parse(text).body]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = Counter(n.name for n in nodes if isinstance(n, functions) and not n.name.startswith("_"))
    return sorted(name for name, count in names.items() if count > 1)


def folders_both_ways(sources: Sources) -> list[tuple[str, str]]:
    """Pairs of folders that import each other; a folder and the one it lies in are no pair."""
    modules = {name for name in sources if not any(other.startswith(f"{name}.") for other in sources)}
    arrows = {(a.rpartition(".")[0], b.rpartition(".")[0]) for a, b in own_imports(sources) if {a, b} <= modules}
    apart = [(a, b) for a, b in arrows if a and b and not inside(a, b) and not inside(b, a)]
    return sorted((a, b) for a, b in apart if a < b and (b, a) in arrows)


def function_lengths(sources: Sources) -> list[int]:
    """Lines of every function, docstring included."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for text in sources.values() for node in ast.walk(ast.parse(text)) if isinstance(node, functions)]
    return [(node.end_lineno or 0) - node.lineno + 1 for node in nodes]


RULES: dict[str, Callable[[Sources], Sequence[object]]] = {
    "every room stands in the list": unknown_rooms,
    "imports point down": imports_upward,
    "who reads records does not look at the machine": looks_at_the_machine,
    "nothing inside imports the root": imports_of_the_root,
    "imports are absolute": relative_imports,
    "only the plugin imports pytest": imports_of_pytest,
    "only the cluster imports ray": imports_of_ray,
    "the worker needs only the standard library and vLLM": foreign_to_the_worker,
    "nobody imports the worker": imports_of_the_worker,
    "the load generator needs only the standard library": foreign_to_the_load_generator,
    "pacing is pure": impure_pacing,
    "no cycles": cycle,
    "no class name stands twice": classes_of_one_name,
    "no public function name stands twice": functions_of_one_name,
    "no two folders import each other": folders_both_ways,
}
SOUND = {"schema": "", "schema.errors": "", "engines.base": "", WORKER: "", PACING: "import heapq"}
PLANTED = [
    ("every room stands in the list", {"helpers": ""}),
    ("nothing inside imports the root", {"schema.records": "from pytest_slmserve import EngineSpec"}),
    ("who reads records does not look at the machine", {"analysis.a": "import os\nHOME = os.environ['HOME']"}),
    ("who reads records does not look at the machine", {"report.a": "def f(path):\n    return path.read_text()"}),
    ("who reads records does not look at the machine", {"archive.a": "def f(path):\n    return open(path)"}),
    ("nothing inside imports the root", {"plugin": "import pytest_slmserve"}),
    ("imports are absolute", {"engines.base": "from . import pool"}),
    ("imports are absolute", {"engines.base": "from ..schema.errors import SlmError"}),
    ("only the plugin imports pytest", {"session": "from typing import TYPE_CHECKING\nimport pytest"}),
    ("only the plugin imports pytest", {"session": "from _pytest.config import Config"}),
    ("only the cluster imports ray", {"plugin": "def connect():\n    import ray"}),
    ("only the cluster imports ray", {"session": "from ray.util import scheduling_strategies"}),
    ("the worker needs only the standard library and vLLM", {f"{WORKER}.vllm_worker": "import numpy as np"}),
    (
        "the worker needs only the standard library and vLLM",
        {f"{WORKER}.vllm_worker": "import pytest_slmserve.schema.errors"},
    ),
    ("nobody imports the worker", {"engines.base": f"from pytest_slmserve.{WORKER} import versions"}),
    ("the load generator needs only the standard library", {f"{LOADGEN}.streams": "import psutil"}),
    (
        "the load generator needs only the standard library",
        {f"{LOADGEN}.run": "from pytest_slmserve.schema import errors"},
    ),
    ("pacing is pure", {PACING: "def admit():\n    from torch import Tensor"}),
    ("pacing is pure", {PROCESS: "import psutil"}),
    ("no cycles", {"a": "from pytest_slmserve.b import x", "b": "def f():\n    from pytest_slmserve import a"}),
    ("no cycles", {"a": "from pytest_slmserve.a.b import x", "a.b": "import pytest_slmserve.a"}),
    ("no public function name stands twice", {"schema.errors": "def a(): ...", "engines.base": "def a(): ..."}),
    (
        "no two folders import each other",
        {
            "analysis.a.x": "from pytest_slmserve.analysis.b import y",
            "analysis.b.y": "",
            "analysis.b.z": "from pytest_slmserve.analysis.a import x",
        },
    ),
    ("no class name stands twice", {"schema.errors": "class A: ...", "engines.base": "class A: ..."}),
    *(
        ("imports point down", {lower: f"from pytest_slmserve.{upper} import x", upper: ""})
        for upper, lower in pairwise(ROOMS)
    ),
]


def test_the_whole_package_is_read() -> None:
    assert {"", "schema.errors", "schema.records", PACING, LOADGEN} <= package().keys()


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
        "engines.base": f"from pytest_slmserve.schema.errors import SlmError\nfrom pytest_slmserve.{PACING} import A",
        f"{WORKER}.vllm_worker": f"import asyncio\nfrom {PACING.rpartition('.')[2]} import A\nfrom vllm import B",
        f"{LOADGEN}.run": f"import gc\nfrom pytest_slmserve.{PACING} import A",
        "plugin": "import pytest\nfrom pytest_slmserve.engines.base import Engine",
        MAY_IMPORT_RAY: "import ray",
    }
    assert {rule: find({**SOUND, **allowed_here}) for rule, find in RULES.items()} == {rule: [] for rule in RULES}


def test_functions_are_as_long_as_their_one_thought() -> None:
    lengths = function_lengths(package())
    assert median(lengths) >= 6, "a thought is split over many functions"
    assert quantiles(lengths, n=10)[-1] <= 35


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    sources = package()
    assert len(without_a_subject(sources)) <= 0.03 * len(list(docstrings(sources)))


@pytest.mark.parametrize("text", ["Of a job.", "What it takes.", "The same of several.", "`Which` of them."])
def test_a_docstring_without_a_subject_is_found(text: str) -> None:
    assert without_a_subject({"a": f'"""{text}"""', "b": '"""Seconds of a step."""'}) == ["a:1"]


def test_the_root_holds_the_rooms_and_nothing_else() -> None:
    entries = {path.name for path in FOLDER.iterdir()} - {"__pycache__", *TESTS_OF_USERS}
    assert entries == {*ROOMS, "__init__.py", "__main__.py", "py.typed"}


def test_the_quick_start_is_a_user_s_own_file():
    """It may be copied as it is: it needs pytest alone, and nothing of the package needs it."""
    text = (FOLDER / "quickstart" / "test_quickstart.py").read_text(encoding="utf-8")
    assert [*imports(text)] == ["pytest"] and len(text.splitlines()) <= 40
    assert [a for a, b in own_imports({**package(), "quickstart": ""}) if inside(b, "quickstart")] == []


def test_what_benchmarks_and_studies_import_of_the_package_is_there() -> None:
    checkout = Path(__file__).parents[3]
    for path in [*(checkout / "benchmarks").rglob("*.py"), *(checkout / "studies").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(ROOT):
                exec(ast.unparse(node), {})


def test_each_room_says_in_one_sentence_or_two_what_lives_there() -> None:
    told = {name: ast.get_docstring(ast.parse(text)) or "" for name, text in package().items() if name in ROOMS}
    assert told.keys() == set(ROOMS)
    assert [name for name, text in told.items() if not 10 <= len(text.split()) <= 40] == []


def test_folders_are_at_most_two_deep() -> None:
    assert [name for name in package() if name.count(".") > 2] == []


def test_each_answer_of_the_architecture_page_is_a_file() -> None:
    page = FOLDER.parent / "docs" / "architecture.md"
    if not page.is_file():
        pytest.skip("no checkout")
    _, _, table = page.read_text("utf-8").partition("## Where to look")
    rows = [line for line in table.partition("\n## ")[0].splitlines() if line.startswith("| ") and "?" in line]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(rows) >= 20 and [name for name in named if not (FOLDER / name).exists()] == []
