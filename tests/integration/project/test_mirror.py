"""Who changes a module finds its tests: every module with logic has a test file of its name in the same folder of
tests/unit, and every folder of unit tests is one of the package."""

from __future__ import annotations

import ast
from pathlib import Path

from scripts import TESTS

import pytest_slmserve

PACKAGE = Path(pytest_slmserve.__file__).parent
UNIT = TESTS / "unit"
# Modules whose tests need more than functions, and where these are.
ELSEWHERE = {
    "engines/worker/guardian": "a process that ends others: tests/integration/engines",
    "engines/worker/hf_worker": "runs in vLLM's interpreter: tests/integration/engines",
    "engines/worker/interpreter": "runs in vLLM's interpreter: tests/integration/engines",
    "engines/worker/slm_process": "a process and its parent: tests/integration/engines",
    "engines/worker/slm_trace": "runs in vLLM's interpreter: tests/integration/engines",
    "plugin/fixtures": "pytest inside pytest: tests/integration/plugin",
    "plugin/hooks": "pytest inside pytest: tests/integration/plugin",
    "plugin/session_hooks": "pytest inside pytest: tests/integration/plugin",
}


def has_logic(path: Path) -> bool:
    """A function with a statement beside its docstring; a folder's own module and tests of users have none."""
    if path.name == "__init__.py" or path.relative_to(PACKAGE).parts[0] in ("benchmarks", "quickstart"):
        return False
    functions = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef))
    return any(not isinstance(node.body[-1], ast.Expr) or len(node.body) > 1 for node in functions)


def file_of(module: str) -> Path:
    path = UNIT / module
    return path.with_name(f"test_{path.name.strip('_')}.py")


def test_every_module_with_logic_has_a_test_file_of_its_name_and_every_folder_a_room() -> None:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if has_logic(path)]
    found = [path.relative_to(PACKAGE).with_suffix("").as_posix() for path in paths]
    assert len(found) > 80 and ELSEWHERE.keys() <= set(found)
    assert [module for module in found if not file_of(module).is_file() and module not in ELSEWHERE] == []
    assert [module for module in ELSEWHERE if file_of(module).is_file()] == []
    folders = {path.parent.relative_to(UNIT).as_posix() for path in UNIT.rglob("test_*.py")}
    assert len(folders) > 10 and {name for name in folders if not (PACKAGE / name).is_dir()} == set()
