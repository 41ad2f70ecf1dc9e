"""What a release shows and is built from: addresses, the source distribution, the image for a GPU host."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest
from scripts import loaded, needs_checkout

CHECKOUT = Path(__file__).parents[3]
SCRIPT = CHECKOUT / ".github/scripts/set_addresses.py"
needs_checkout()
yaml = pytest.importorskip("yaml", reason="needs pyyaml")
URL, TAG = "https://example.org/owner/name", "v0.1.0"


@pytest.fixture(scope="module")
def addresses():
    with loaded(SCRIPT) as module:
        yield module


@pytest.fixture
def released(addresses, tmp_path: Path) -> Path:
    """A checkout's pages after the step of the release."""
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(CHECKOUT / name, tmp_path)
    assert addresses.main(URL, TAG, tmp_path) == 0
    return tmp_path


def test_the_index_gets_the_addresses_of_the_repository_that_releases(released: Path) -> None:
    project = tomllib.loads((released / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["urls"]["Source"] == URL and set(project["urls"]) >= {"Changelog", "Documentation", "Issues"}
    assert all(address.startswith(URL) for address in project["urls"].values())
    targets = re.findall(r"\]\(([^)\s]+)\)", (released / "README.md").read_text("utf-8"))
    assert f"{URL}/blob/{TAG}/docs/gate.md" in targets and [t for t in targets if ":" not in t] == []


def test_pictures_are_files_and_other_links_stay(addresses) -> None:
    text = "![p](docs/p.png) [d](docs/d.md#part) [a](#here) [w](https://example.org/w) code[0](x)"
    assert addresses.with_addresses(text, URL, TAG) == (
        f"![p]({URL}/raw/{TAG}/docs/p.png) [d]({URL}/blob/{TAG}/docs/d.md#part) [a](#here) [w](https://example.org/w) "
        f"code[0]({URL}/blob/{TAG}/x)"
    )


def test_addresses_are_put_in_once(addresses, released: Path, capsys) -> None:
    before = (released / "pyproject.toml").read_text("utf-8")
    assert addresses.main(URL, TAG, released) == 1 and "nothing was changed" in capsys.readouterr().err
    assert (released / "pyproject.toml").read_text("utf-8") == before


def test_the_citation_names_this_version_and_the_papers() -> None:
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text("utf-8"))
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]
    assert (citation["title"], citation["version"], citation["license"]) == (
        project["name"],
        project["version"],
        project["license"],
    )
    readme = (CHECKOUT / "README.md").read_text("utf-8")
    assert citation["references"] and all(paper["url"] in readme for paper in citation["references"])


FORMS = sorted((CHECKOUT / ".github/ISSUE_TEMPLATE").glob("[0-9]-*.yml"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_of_github(path: Path) -> None:
    form = yaml.safe_load(path.read_text("utf-8"))
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert form["name"] and form["description"] and {f["type"] for f in asked} <= {"textarea", "input", "dropdown"}
    assert len({field["id"] for field in asked}) == len(asked) and all(field["attributes"]["label"] for field in asked)


def test_a_problem_comes_with_the_doctor_and_the_records() -> None:
    asked = {
        path.stem: {field.get("id") for field in yaml.safe_load(path.read_text("utf-8"))["body"]} for path in FORMS
    }
    problems = [ids for name, ids in asked.items() if not name.endswith("proposal")]
    assert len(problems) == 2 and all({"command", "doctor", "records"} <= ids for ids in problems)


def test_dependabot_moves_what_is_pinned() -> None:
    updates = yaml.safe_load((CHECKOUT / ".github/dependabot.yml").read_text("utf-8"))["updates"]
    ecosystems = {update["package-ecosystem"]: update for update in updates}
    lint = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]["lint"]
    pinned = {requirement.partition("==")[0] for requirement in lint if "==" in requirement}
    assert {rule["dependency-name"] for rule in ecosystems["pip"]["allow"]} == pinned
    assert "github-actions" in ecosystems


def built(what: str, source: Path, into: Path) -> Path:
    if find_spec("hatchling") is None:
        pytest.skip("needs hatchling, to build without a network")
    command = [sys.executable, "-m", "hatchling", "build", "-t", what, "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (found,) = into.iterdir()
    return found


def test_the_source_distribution_holds_what_git_knows(tmp_path: Path) -> None:
    """So no record, environment or cache of the machine that builds it, and all that a packager needs to test it."""
    with tarfile.open(built("sdist", CHECKOUT, tmp_path / "dist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        known = subprocess.run(listing, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git, and a clone")
    assert names - {*known, "PKG-INFO"} == set()
    assert {"LICENSE", "CITATION.cff", "conftest.py", "tests/conftest.py", "docs/index.md"} <= names


# The image: no engine of containers is here to build it


DOCKERFILE = CHECKOUT / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text("utf-8"), flags=re.MULTILINE)
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def test_the_image_is_vllms_of_the_release_in_use() -> None:
    in_use = (CHECKOUT / ".github/vllm-baseline.txt").read_text("utf-8").strip()
    first = instructions()[:3]
    assert first == [
        ("ARG", "VLLM_IMAGE=vllm/vllm-openai"),
        ("ARG", f"VLLM_VERSION=v{in_use}"),
        ("FROM", "${VLLM_IMAGE}:${VLLM_VERSION}"),
    ]
    assert ("ENTRYPOINT", "[]") in instructions(), "vLLM's own would start a server"


def test_the_image_has_all_that_the_wheel_is_built_from(tmp_path: Path) -> None:
    """What the file copies gives the wheel that the checkout gives."""
    source = tmp_path / "source"
    for copied in (rest.split() for word, rest in instructions() if word == "COPY"):
        *patterns, target = copied
        for path in (path for pattern in patterns for path in CHECKOUT.glob(pattern)):
            into = source / target
            into.mkdir(parents=True, exist_ok=True) if target.endswith("/") else into.parent.mkdir(exist_ok=True)
            shutil.copytree(path, into) if path.is_dir() else shutil.copy(path, into)
    image, checkout = (built("wheel", folder, tmp_path / name) for name, folder in (("a", source), ("b", CHECKOUT)))
    assert set(ZipFile(image).namelist()) == set(ZipFile(checkout).namelist())
