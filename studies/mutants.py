"""How many planted faults do the unit tests of a room notice?

    python studies/mutants.py plan archive --count 100 --seed 1

mutmut changes one operator, number, argument or return value at a time. The study draws `--count` of its mutants of
each room by `--seed`, runs `tests/unit` of that room on each, and prints the share that was noticed, and the survivors.
A mutant that changes the words of a text alone is not drawn, because tests do not hold sentences. Those that behave as
the original does are listed in studies/equivalent_mutants.toml, each with the reason, and are not drawn either.
The exit status is 1 if a room is below `--least`. A room takes one to ten minutes on two cores.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import CHECKOUT, parser_of

PACKAGE = "pytest_slmserve"
# A room of the package, and the folder of tests/unit that answers for it.
ROOMS = ("analysis", "plan", "workload", "archive", "telemetry", "schema", "options", "report", "engines/loadgen")
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
FOLDER = CHECKOUT / ".mutants"
SETUP = """[mutmut]
source_paths = {package}
only_mutate = {package}/{room}/*
pytest_add_cli_args =
    -p
    no:cacheprovider
    -p
    no:xdist
    --hypothesis-seed=0
pytest_add_cli_args_test_selection = tests/unit/{room}
also_copy =
    conftest.py
    benchmarks
    docs
    studies
track_dependencies = false
use_git_change_detection = false
"""
SURVIVED = 0, 33  # exit statuses that mutmut keeps: the tests passed, or there was no test


class Words(ast.NodeTransformer):
    """Makes all texts equal."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node


def skeleton(function: ast.AST) -> str:
    """Return the code of a function without its name and texts."""
    tree = ast.parse(ast.unparse(function))
    tree.body[0].name = "f"
    return ast.dump(Words().visit(tree))


def change(original: ast.AST, mutant: ast.AST) -> str:
    """Return the first line of the original that the mutant has otherwise, and what becomes of it."""
    lines = ast.unparse(original).splitlines()[1:], ast.unparse(mutant).splitlines()[1:]
    old, new = next((pair for pair in zip(*lines) if pair[0] != pair[1]), ("", lines[1][-1]))
    return f"{old.strip()} -> {new.strip()}"


def functions(path: Path) -> dict[str, ast.AST]:
    """Return each mutant and original in a file that mutmut wrote, by its name there."""
    tree = ast.parse(path.read_text("utf-8"))
    return {
        node.name: node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "__mutmut_" in node.name
    }


def drawable(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the full names of mutants that change more than words, and their changes: the function's place, and the
    line of it that is another."""
    for meta in sorted(folder.rglob("*.py.meta")):
        if not (names := json.loads(meta.read_text("utf-8"))["exit_code_by_key"]):
            continue
        made = functions(meta.with_suffix(""))
        skeletons = {name: skeleton(node) for name, node in made.items()}
        for name in sorted(names):
            module, _, short = name.rpartition(".")
            function, _, _ = short.rpartition("__mutmut_")
            original = f"{function}__mutmut_orig"
            if skeletons[short] != skeletons[original]:
                place = f"{module.removeprefix(PACKAGE + '.')}.{re.sub('^x_|^xǁ', '', function).replace('ǁ', '.')}"
                yield name, f"{place}: {change(made[original], made[short])}"


def run(words: Sequence[str], folder: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLM_", "PYTEST_"))}
    with (folder / "mutmut.log").open("a") as log:
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=env | {"PYTHONPATH": ""}, stdout=log, stderr=log
        )
    if done.returncode:
        raise SystemExit(f"mutmut failed: see {folder / 'mutmut.log'}")


GENERATE = """
import os
from mutmut import __main__ as made
os.makedirs("mutants", exist_ok=True)
made.set_mutant_under_test("mutant_generation")
made.copy_src_dir(); made.copy_also_copy_files(); made.setup_source_paths(); made.create_mutants(2)
"""


def results(folder: Path) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for meta in folder.rglob("*.py.meta"):
        found |= json.loads(meta.read_text("utf-8"))["exit_code_by_key"]
    return found


def planted(room: str, count: int, seed: int, equivalent: set[str]) -> tuple[int, list[str]]:
    """Return how many mutants were drawn of a room, and the changes of those that survived."""
    folder = FOLDER / room.replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in (PACKAGE, "tests", "benchmarks", "docs", "studies", "conftest.py", "pyproject.toml"):
        (folder / name).symlink_to(CHECKOUT / name)
    (folder / "setup.cfg").write_text(SETUP.format(package=PACKAGE, room=room), "utf-8")
    run(["-c", GENERATE], folder)
    mutants = {name: told for name, told in drawable(folder / "mutants") if told not in equivalent}
    drawn = random.Random(seed).sample(list(mutants), min(count, len(mutants)))
    run(["-m", "mutmut", "run", *drawn], folder)
    status = results(folder / "mutants")
    return len(drawn), [mutants[name] for name in drawn if status[name] in SURVIVED]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("rooms", nargs="*", default=list(ROOMS), metavar="ROOM", help=f"of {', '.join(ROOMS)}")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=float, default=0.85, help="the share of them that each room must notice")
    given = parser.parse_args()
    equivalent = {mutant["change"] for mutant in tomllib.loads(EQUIVALENT.read_text("utf-8")).get("mutant", ())}
    worst = 1.0
    for room in given.rooms:
        drawn, survivors = planted(room, given.count, given.seed, equivalent)
        share = 1 - len(survivors) / drawn
        worst = min(worst, share)
        print(f"{room}: {drawn - len(survivors)} of {drawn} mutants noticed ({share:.0%})", flush=True)
        for told in survivors:
            print(f"  survived: {told}", flush=True)
    shutil.rmtree(FOLDER)  # its links lead back here, and a build would follow them
    return int(worst < given.least)


if __name__ == "__main__":
    raise SystemExit(main())
