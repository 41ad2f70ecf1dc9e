"""Golden files: the output of `report` and `advise` for each committed archive, and their exit statuses.

    python tests/golden/write.py [NAME ...]

This rewrites the golden files of the archives whose name contains a NAME, or all of them, and prints the lines that
change. Floats of JSON are kept with eleven digits.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from difflib import unified_diff
from functools import cache
from math import isclose
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts import BASELINES

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive import store

HERE = Path(__file__).parent
SUFFIX = ".jsonl.xz"
# Words of a command, and columns of its terminal.
OUTPUTS = {
    "report --json": (("report", "--json"), 80),
    "report, 80 columns": (("report", "--show=all"), 80),
    "report, 160 columns": (("report", "--show=all"), 160),
    "advise": (("advise",), 80),
    "advise --json": (("advise", "--json"), 80),
}
CLOSE = 1e-9  # relative difference of two floats that are taken for one
Outputs = dict[str, dict[str, Any]]  # `status` and `out` by the name of the output


def archive_names() -> list[str]:
    return sorted(path.name.removesuffix(SUFFIX) for path in BASELINES.glob(f"*{SUFFIX}"))


def golden_file(name: str) -> Path:
    return HERE / f"{name}.json.xz"


def printed(name: str) -> Outputs:
    """Return the outputs and exit statuses of the commands for that archive, which is read once. JSON is parsed."""
    found: Outputs = {}
    with _nothing_around() as path, patch.object(store, "read_each", cache(store.read_each)):
        for output, (words, columns) in OUTPUTS.items():
            out = io.StringIO()
            with patch.dict(os.environ, COLUMNS=str(columns)), redirect_stdout(out), redirect_stderr(out):
                status = main([*words, str(path / f"{name}{SUFFIX}")])
            text = out.getvalue()
            found[output] = {"status": status, "out": json.loads(text) if text.startswith("{") else text}
    return found


@contextmanager
def _nothing_around() -> Iterator[Path]:
    """Work in an empty folder without a home, a cache of models or settings of ours. Yields the archives' folder, by a
    name that is the same in every checkout; a link, because the calibration beside an archive belongs to it."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder), patch.dict(os.environ):
        for variable in [each for each in os.environ if each.startswith(("HF_", "SLM_", "VLLM_", "XDG_", "GITHUB_"))]:
            del os.environ[variable]
        os.environ["HOME"] = str(Path(folder, "home"))
        Path("baselines").symlink_to(BASELINES)
        yield Path("baselines")


def kept(name: str) -> Outputs:
    """Return the outputs as the golden file has them; empty if there is none."""
    path = golden_file(name)
    return json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}


def write(name: str, outputs: Outputs) -> None:
    text = json.dumps(_rounded(outputs), ensure_ascii=False)
    golden_file(name).write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def changes(before: Outputs, after: Outputs) -> Iterator[str]:
    """Yield the lines of a unified diff, with a heading for each output that differs. Keys may be in any order."""
    for output in {**before, **after}:
        old, new = before.get(output, {}), after.get(output, {})
        sides = _lines(old), _lines(_settled(old, new))
        yield from unified_diff(*sides, f"golden: {output}", f"now: {output}", lineterm="", n=1)


def _lines(output: Mapping[str, Any]) -> list[str]:
    out = output.get("out", "")
    text = out if isinstance(out, str) else json.dumps(out, indent=1, sort_keys=True, ensure_ascii=False)
    return [f"exit status {output.get('status')}", *text.split("\n")]


def _settled(old: Any, new: Any) -> Any:
    """The new value, with the old float in place of each that is close to it."""
    match old, new:
        case dict(), dict():
            return {key: _settled(old.get(key), value) for key, value in new.items()}
        case list(), list():
            return [*map(_settled, old, new), *new[len(old) :]]
        case (float(), float() | int()) | (int(), float()) if not {type(old), type(new)} & {bool}:
            return old if isclose(old, new, rel_tol=CLOSE) else new
    return new


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.11g}")
        case dict():
            return {key: _rounded(each) for key, each in value.items()}
        case list():
            return [*map(_rounded, value)]
    return value


def rewrite(names: list[str]) -> None:
    archives = archive_names()
    for path in HERE.glob("*.json.xz"):
        if path.name.removesuffix(".json.xz") not in archives:
            path.unlink()
            print(f"{path.name}: removed, because its archive is not there")
    for name in archives:
        if names and not any(each in name for each in names):
            continue
        before, after = kept(name), printed(name)
        if lines := list(changes(before, after)):
            write(name, after)
            print("\n".join([f"{name}: changed", *lines] if before else [f"{name}: new"]), flush=True)


if __name__ == "__main__":
    rewrite(sys.argv[1:])
