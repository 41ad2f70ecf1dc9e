"""The script that chooses the release of vLLM to gate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import loaded, needs_checkout

SCRIPT = Path(__file__).parents[3] / ".github" / "scripts" / "next_release.py"
PIN = SCRIPT.parents[1] / "vllm-baseline.txt"
needs_checkout()


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with loaded(SCRIPT) as module:
        yield module


def wheel(yanked: bool = False) -> dict[str, Any]:
    return {"packagetype": "bdist_wheel", "yanked": yanked}


def index(*versions: str, **others: list[dict[str, Any]]) -> dict[str, Any]:
    return {"releases": {**{version: [wheel()] for version in versions}, **others}}


def titles(*versions: str) -> list[str]:
    return [f"vLLM {version}: gate" for version in versions]


def test_the_newest_by_number_and_not_by_text(script: ModuleType) -> None:
    assert script.choose(index("0.9.2", "0.26.0", "0.100.0", "0.27.1", "0.27.0.post1"), "0.26.0", []) == "0.100.0"


@pytest.mark.parametrize("version", ["0.27.0rc1", "0.27.0a1", "0.27.0.dev3", "0.27.0+cu129", "1!0.1", "nonsense", ""])
def test_what_is_no_final_release_is_left_out(script: ModuleType, version: str) -> None:
    assert script.choose(index("0.26.1", version), "0.26.0", []) == "0.26.1"


@pytest.mark.parametrize(
    "files",
    [[], [wheel(yanked=True)], [wheel(yanked=True), wheel(yanked=True)], [{"packagetype": "sdist", "yanked": False}]],
)
def test_what_cannot_be_installed_is_left_out(script: ModuleType, files: list[dict[str, Any]]) -> None:
    assert script.choose({"releases": {"0.26.1": [wheel()], "0.27.0": files}}, "0.26.0", []) == "0.26.1"


def test_one_wheel_that_is_not_yanked_is_enough(script: ModuleType) -> None:
    assert script.choose({"releases": {"0.27.0": [wheel(yanked=True), wheel()]}}, "0.26.0", []) == "0.27.0"


def test_each_release_once_the_newest_first(script: ModuleType) -> None:
    known, order = index("0.25.0", "0.26.0", "0.27.0", "0.27.1", "0.28.0"), list[str]()
    while found := script.choose(known, "0.26.0", titles(*order)):
        order.append(found)
    assert order == ["0.28.0", "0.27.1", "0.27.0"]


def test_a_post_release_is_newer_than_what_it_mends(script: ModuleType) -> None:
    known = index("0.26.0", "0.26.0.post1", "0.26.0.post2")
    assert script.choose(known, "0.26.0", []) == "0.26.0.post2"
    assert script.choose(known, "0.26.0.post2", []) == ""


def test_zeros_at_the_end_make_no_other_release(script: ModuleType) -> None:
    assert script.choose(index("0.26", "0.26.0.0"), "0.26.0", []) == ""
    assert script.choose(index("0.27.0"), "0.26.0", titles("0.27")) == ""


@pytest.mark.parametrize(
    "title", ["vLLM 0.27.0: gate it", "re: vLLM 0.27.0: gate", "vllm 0.27.0: gate", "vLLM 0.27.01x: gate", "0.27.0"]
)
def test_another_title_is_no_result(script: ModuleType, title: str) -> None:
    assert script.choose(index("0.27.0"), "0.26.0", [title]) == "0.27.0"


@pytest.mark.parametrize("known", [{}, {"releases": {}}, {"releases": []}, {"message": "not found"}])
def test_an_index_without_releases_is_no_index_without_news(script: ModuleType, known: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="names no releases"):
        script.choose(known, "0.26.0", [])


@pytest.mark.parametrize("baseline", ["", "0.26.0rc1", "newest", "0.26.0; true"])
def test_a_baseline_that_is_no_release_is_told(script: ModuleType, baseline: str) -> None:
    with pytest.raises(ValueError, match="no final release"):
        script.choose(index("0.27.0"), baseline, [])


numbers = st.lists(st.integers(0, 300), min_size=1, max_size=4).map(tuple)


@given(st.lists(numbers, min_size=1, max_size=8), numbers, st.data())
def test_what_is_chosen_is_newer_without_a_result_and_the_newest_such(
    script: ModuleType, releases: list[tuple[int, ...]], pin: tuple[int, ...], data: st.DataObject
) -> None:
    versions = [".".join(map(str, release)) for release in releases]
    done = data.draw(st.sets(st.sampled_from(versions)))
    found = script.choose(index(*versions), ".".join(map(str, pin)), titles(*done))
    oldest, known = script.key(".".join(map(str, pin))), {script.key(version) for version in versions}
    left = {each for each in known if each > oldest} - {script.key(version) for version in done}
    assert (script.key(found) if found else None) == (max(left) if left else None)


@given(st.text(max_size=30) | st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){2}(\.post[0-9])?", fullmatch=True))
def test_any_name_is_a_release_or_none(script: ModuleType, text: str) -> None:
    """Also other scripts' digits, and what a shell or a path would take for something else."""
    named = script.key(text) is not None
    assert not named or (set(text) <= set("0123456789.post") and script.by_name(text) == text)


@pytest.fixture
def command(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str, of: object = None, done: str = "", pin: str = "0.26.0\n") -> tuple[int, str, str]:
        texts = {"index": json.dumps(of or index("0.26.0", "0.27.0")), "titles": done, "pin": pin}
        for name, text in texts.items():
            (tmp_path / name).write_text(text, "utf-8")
        files = [word for name in texts for word in (f"--{name}", str(tmp_path / name))]
        try:
            status = script.main([*files, *arguments])
        except SystemExit as stop:
            status = stop.code
        return (status, *capsys.readouterr())

    return run


def test_the_command_writes_outputs(command: Any) -> None:
    assert command() == (0, "baseline=0.26.0\ncandidate=0.27.0\n", "")
    assert command(done="Another\nvLLM 0.27.0: gate\n")[:2] == (0, "baseline=0.26.0\ncandidate=\n")


def test_versions_by_name_are_taken_as_they_are(command: Any) -> None:
    empty = command("--baseline", "", "--candidate", "")
    assert empty == command()
    named = command("--baseline", "0.20.2", "--candidate", "0.33.0rc1", done="vLLM 0.33.0rc1: gate")
    assert named[:2] == (0, "baseline=0.20.2\ncandidate=0.33.0rc1\n")
    assert command("--candidate", "0.25.0")[1] == "baseline=0.26.0\ncandidate=0.25.0\n"


@pytest.mark.parametrize(
    "version", ["0.27.0;true", "$(true)", "../0.27.0", "0.27.0 --pre", "v0.27.0", "0.27\ncandidate=1"]
)
def test_a_name_that_is_no_version_is_refused(command: Any, version: str) -> None:
    status, out, err = command("--candidate", version)
    assert (status, out) == (2, "") and "is no version such as 0.26.0" in err


def test_problems_are_told_and_nothing_is_written(command: Any) -> None:
    assert command(of={"message": "not found"}) == (4, "", "error: the index names no releases\n")
    assert command("--candidate", "0.26.0") == (4, "", "error: 0.26.0 on both sides\n")
    assert command("--index", "nowhere.json")[:2] == (4, "")
    two = command("--candidate", "0.27.0", pin="0.26.0\nstatus=0\n")
    assert two == (4, "", "error: the baseline '0.26.0\\nstatus=0' is no final release\n")
    assert command(pin="newest\n") == (4, "", "error: the baseline 'newest' is no final release\n")


def test_the_release_in_use_is_a_final_one(script: ModuleType) -> None:
    assert script.key(PIN.read_text("utf-8").strip()) is not None
