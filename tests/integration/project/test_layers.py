"""The rules of the house that `lint-imports` cannot say: who reads records does not look at the machine, what a process
of its own may need, names that can be searched for, sizes, and first words of docstrings; and every module with logic
has its tests. Each finds a planted violation, and none in the package. Who may import whom is in .importlinter."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles

import pytest
from scripts import CHECKOUT, TESTS, in_checkout

import pytest_slmserve

ROOT = "pytest_slmserve"
FOLDER = Path(pytest_slmserve.__file__).parent
WORKER, LOADGEN = "engines.worker", "engines.loadgen"
# They need the standard library alone, so that every process of ours may use them: pacing, guarding, hiding secrets.
PURE = {f"{WORKER}.slm_pacing", f"{WORKER}.slm_process", "schema.printable"}
# The worker runs in an interpreter that has not our package; uvloop and huggingface_hub come with vLLM.
WITH_VLLM = {"huggingface_hub", "torch", "transformers", "uvloop", "vllm"}

# Rooms that read records. A record is read alike everywhere, so the machine of its reader tells them nothing.
READERS = ("analysis", "report", "archive")
# But for files of the package, archives, pages, GITHUB_STEP_SUMMARY, and results that `vllm bench serve` would write.
MAY_OPEN_FILES = {
    "analysis.claims.table", "analysis.metrics.gpu_figures", "archive.store", "archive.lines", "archive.external",
    "report.page.writer", "report.screen",
}  # fmt: skip
# The writers themselves, /dev/null, and the worker's trace, in a folder of its own.
MAY_WRITE = {"schema.errors", "__main__", f"{WORKER}.slm_trace"}
TELLS = {"open", "read_text", "read_bytes", "environ", "getenv", "home", "expanduser"}
# JSON that is read without `schema.errors.json_value`, which bounds that of others: by itself, of files of the package,
# of messages between processes of ours, of our own lines of an archive, and of a stream, whose events are bounded.
DECODES = {"load", "loads", "JSONDecoder", "decode", "Decoder"}
NOT_OF_OTHERS = {
    "schema.errors": {"json.JSONDecoder()"},
    "schema.models": {f"json.loads((Path(__file__).parent / '{n}.json').read_text('utf-8'))"
                      for n in ("architectures", "models")},
    "engines.worker.slm_process": {"json.loads(line)"},
    "engines.worker.vllm_worker": {"json.loads(line)", "json.loads(await self.reader.readline())"},
    "engines.server": {"json.loads(line)"},
    "run.cluster": {"json.loads(gzip.decompress(data))"},
    "archive.lines": {"msgspec.json.decode(line)"},
    "engines.loadgen.response": {"json.JSONDecoder()", "json.loads(text)"},
}  # fmt: skip
# First words of docstrings that say nothing of what is returned: prepositions, pronouns, words of a question.
NO_SUBJECT = re.compile(
    r"(?i)\W*(the same|the other|after|among|as|at|because|before|beside|between|by|for|from|how|if|in|into|it|its|"
    r"like|of|on|our|so|than|that|their|these|they|this|those|to|under|until|upon|what|when|where|whether|which|while|"
    r"who|why|with|without)\b"
)

Trees = Mapping[str, ast.Module]  # of each module by its name below the root, "" being the root itself
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Tests that users run are no part of the package: the quick start, and the benchmarks, which a wheel puts there.
PACKAGE: Trees = {
    ".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix("__init__").rstrip("."): ast.parse(
        path.read_text("utf-8")
    )
    for path in FOLDER.rglob("*.py")
    if path.relative_to(FOLDER).parts[0] not in ("benchmarks", "quickstart")
}
walked = cache(lambda tree: [*ast.walk(tree)])


def nodes(trees: Trees) -> Iterator[tuple[str, ast.AST]]:
    yield from ((name, node) for name, tree in trees.items() for node in walked(tree))


def inside(module: str, folder: str) -> bool:
    return f"{module}.".startswith(f"{folder}.")


def imports(trees: Trees) -> Iterator[tuple[str, str]]:
    """Pairs of a module and what it imports, inside functions and for type checkers too; ours below the root."""
    for module, node in nodes(trees):
        match node:
            case ast.Import(names=names):
                yield from ((module, alias.name.removeprefix(f"{ROOT}.")) for alias in names)
            case ast.ImportFrom(module=str(origin), names=names) if origin.partition(".")[0] == ROOT:
                below = origin[len(ROOT) + 1 :]
                deeper = (f"{below}.{alias.name}".strip(".") for alias in names)
                yield from ((module, each if each in trees else below) for each in deeper)
            case ast.ImportFrom(module=str(origin)):
                yield module, origin


def looks_at_the_machine(trees: Trees) -> list[str]:
    readers = {n: tree for n, tree in trees.items() if n.partition(".")[0] in READERS and n not in MAY_OPEN_FILES}
    asked = (each for each in nodes(readers) if getattr(each[1], "attr", getattr(each[1], "id", "")) in TELLS)
    return [f"{module}: {text}" for module, node in asked if (text := ast.unparse(node)) != "Archive.open"]


def needs_more(trees: Trees) -> list[str]:
    """Imports of a process of its own beside those that it may have: it must start fast, or has not our package."""
    beside, found = WITH_VLLM | {name.rpartition(".")[2] for name in trees if inside(name, WORKER)}, []
    for module, name in imports(trees):
        top = name.partition(".")[0]
        if inside(module, LOADGEN):
            helps = name in PURE or inside(name, LOADGEN)
        else:
            helps = module not in PURE and (top in beside or not inside(module, WORKER))
        if not helps and top not in sys.stdlib_module_names:
            found.append(f"{module}: {name}")
    return found


def reads_json_itself(trees: Trees) -> list[str]:
    """Calls of the decoders of json and msgspec, and names of them that an import hides."""
    found = []
    for module, node in nodes(trees):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("json"), attr=name)) if name in DECODES:
                found.append((module, ast.unparse(node)))
            case ast.Call(func=ast.Attribute(value=ast.Attribute(ast.Name("msgspec"), "json"), attr=name)):
                found += [(module, ast.unparse(node))] if name in DECODES else []
            case ast.ImportFrom(module="json" | "json.decoder" | "msgspec" | "msgspec.json"):
                found.append((module, ast.unparse(node)))
            case ast.Import(names=names) if any(a.name.startswith(("json", "msgspec")) and a.asname for a in names):
                found.append((module, ast.unparse(node)))
    return [f"{module}: {text}" for module, text in found if text not in NOT_OF_OTHERS.get(module, ())]


def imports_in_a_circle(trees: Trees) -> list[str]:
    """Importing a module imports the folders above it as well."""
    graph: dict[str, set[str]] = {name: set() for name in trees}
    for module, name in imports(trees):
        graph[module] |= {name, name.rpartition(".")[0]} & trees.keys() - {module, ""}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as found:
        return list(found.args[1])
    return []


def named_twice(trees: Trees) -> list[str]:
    """Names of classes and of public functions of modules that nobody can search for."""
    names = [node.name for _, node in nodes(trees) if isinstance(node, ast.ClassDef)]
    names += [node.name for tree in trees.values() for node in tree.body if isinstance(node, Function)]
    return sorted(name for name, count in Counter(names).items() if count > 1 and name[0] != "_")


def writes_by_itself(trees: Trees) -> list[str]:
    """Files opened for writing without an opener that follows no link, or waits for no pipe."""
    found = []
    for module, node in ((m, n) for m, n in nodes(trees) if m not in MAY_WRITE and isinstance(n, ast.Call)):
        name, words = getattr(node.func, "attr", getattr(node.func, "id", "")), [k.arg for k in node.keywords]
        modes = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
        writes = name == "open" and any(re.fullmatch("[rbt]*[wax+][bt+]*", mode) for mode in modes)
        if name in ("write_text", "write_bytes", "copyfile") or (writes and "opener" not in words):
            found.append(f"{module}: {ast.unparse(node)}")
    return found


def prints_by_itself(trees: Trees) -> list[str]:
    """Commands print by `cli.say`, which writes out control characters; `doctor` has colours of its own."""
    others = [(m, n) for m, n in nodes(trees) if inside(m, "commands") and m not in ("commands.cli", "commands.doctor")]
    return [f"{m}: {ast.unparse(n)}" for m, n in others if isinstance(n, ast.Call) and ast.unparse(n.func) == "print"]


def takes_a_session(trees: Trees) -> list[str]:
    """Functions below the rooms that run pytest's items and know what a session is."""
    below = [each for each in nodes(trees) if each[0].partition(".")[0] not in ("plugin", "run")]
    functions = [(module, node) for module, node in below if isinstance(node, Function)]
    return [f"{m}: {f.name}" for m, f in functions if "session" in {a.arg for a in (*f.args.args, *f.args.kwonlyargs)}]


RULES: dict[Callable[[Trees], list[str]], Sequence[Mapping[str, str]]] = {
    looks_at_the_machine: [
        {"analysis.a": "import os\nHOME = os.environ['HOME']"}, {"report.a": "def f(path): return path.read_text()"},
        {"archive.a": "def f(path): return open(path)"},
    ],
    needs_more: [
        {f"{WORKER}.vllm_worker": "import numpy as np"},
        {f"{WORKER}.vllm_worker": "import pytest_slmserve.schema.errors"},
        {f"{LOADGEN}.streams": "import psutil"}, {f"{LOADGEN}.run": "from pytest_slmserve.schema import errors"},
        {f"{WORKER}.slm_pacing": "def admit():\n    from torch import Tensor"},
        {"schema.printable": "from pytest_slmserve.schema import errors"},
    ],
    reads_json_itself: [
        {"plan.models": text} for text in (
            "import json\njson.loads(text)", "import json\njson.load(file)", "from json import loads",
            "import json as j", "import json\njson.JSONDecoder().raw_decode(text)", "import msgspec.json as m",
            "import msgspec\nmsgspec.json.decode(text)", "import msgspec\nmsgspec.json.Decoder(dict)",
        )
    ] + [{"archive.store": "json.loads(line)"}, {"run.cluster": "json.loads(path.read_text())"}],
    imports_in_a_circle: [
        {"a": "from pytest_slmserve.b import x", "b": "def f():\n    from pytest_slmserve import a"},
        {"a": "from pytest_slmserve.a.b import x", "a.b": "import pytest_slmserve.a"},
    ],
    named_twice: [{"schema.errors": text, "engines.base": text} for text in ("def a(): ...", "class A: ...")],
    writes_by_itself: [
        {"run.a": "def f(path): path.write_text('')"}, {"run.a": "def f(path): path.open('ab', buffering=0)"},
        {"report.a": "def f(path): return open(path, 'w')"}, {"run.a": "import shutil\nshutil.copyfile('a', 'b')"},
    ],
    prints_by_itself: [{"commands.a": "print('a')"}],
    takes_a_session: [{"report.a": "def f(session): ..."}, {"plan.a": "class A:\n    def f(self, *, session): ..."}],
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_each_rule(rule) -> None:
    assert rule(PACKAGE) == [] and {"", "schema.errors", *PURE} <= PACKAGE.keys()
    for sources in RULES[rule]:
        assert rule({name: ast.parse(text) for name, text in sources.items()}) != [], sources


def test_functions_stay_short() -> None:
    found = [node for _, node in nodes(PACKAGE) if isinstance(node, Function)]
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in found]
    assert median(lengths) >= 6, "a thought is split over many functions"
    assert quantiles(lengths, n=10)[-1] <= 35
    assert [name for name in PACKAGE if name.count(".") > 2] == []
    documented = (ast.Module, ast.ClassDef, Function)
    texts = [text for _, node in nodes(PACKAGE) if isinstance(node, documented) and (text := ast.get_docstring(node))]
    assert len(texts) > 1000 and sum(map(bool, map(NO_SUBJECT.match, texts))) <= 0.03 * len(texts)
    assert all(map(NO_SUBJECT.match, ("Of a job.", "What it takes.", "The same of several.", "`Which` of them.")))
    assert not any(map(NO_SUBJECT.match, ("Seconds of a step.", "The step.", "Format of it.")))


@in_checkout
def test_names_imported_by_studies_exist() -> None:
    text = (FOLDER / "quickstart" / "test_quickstart.py").read_text("utf-8")
    assert list(imports({"": ast.parse(text)})) == [("", "pytest")]
    paths = [path for name in ("benchmarks", "studies") for path in (CHECKOUT / name).rglob("*.py")]
    nodes_of = (node for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    asked = [node for node in nodes_of if isinstance(node, ast.ImportFrom) and inside(node.module or "", ROOT)]
    wanted = {(str(node.module), alias.name) for node in asked for alias in node.names}
    assert len(wanted) > 50
    without = [pair for pair in wanted if not hasattr(import_module(pair[0]), pair[1])]
    assert [f"{module}.{name}" for module, name in without if find_spec(f"{module}.{name}") is None] == []
    rooms = {name: tree for name, tree in PACKAGE.items() if name and "." not in name and name != "__main__"}
    assert len(rooms) == 12 and [name for name, tree in rooms.items() if not ast.get_docstring(tree)] == []
    _, _, table = (CHECKOUT / "CONTRIBUTING.md").read_text("utf-8").partition("## Where to look")
    rows = [line for line in table.partition("\n## ")[0].splitlines() if line.startswith("| ") and "?" in line]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(rows) >= 20 and [name for name in named if not (FOLDER / name).exists()] == []


# Modules whose tests need more than functions: a process, vLLM's interpreter, or pytest inside pytest.
IN_INTEGRATION = {
    *(f"engines.worker.{name}" for name in ("guardian", "hf_worker", "interpreter", "slm_process", "slm_trace")),
    *(f"plugin.{name}" for name in ("fixtures", "hooks", "session_hooks")),
}


def test_each_module_has_test_file() -> None:
    """So who changes a module finds its tests. Logic is a function with a statement beside its docstring."""
    functions = ((name, node) for name, node in nodes(PACKAGE) if isinstance(node, ast.FunctionDef))
    logic = {name for name, node in functions if len(node.body) > 1 or not isinstance(node.body[0], ast.Expr)}
    found = {name for name in logic if not (FOLDER / name.replace(".", "/")).is_dir()}
    paths = {name: TESTS / "unit" / name.replace(".", "/") for name in found}
    tested = {name for name, path in paths.items() if path.with_name(f"test_{path.name.strip('_')}.py").is_file()}
    assert len(found) > 80 and found - tested == IN_INTEGRATION
    folders = {path.parent.relative_to(TESTS / "unit") for path in (TESTS / "unit").rglob("test_*.py")}
    assert len(folders) > 10 and [name for name in folders if not (FOLDER / name).is_dir()] == []
