"""The script that chooses the release of vLLM to gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts import loaded, needs_checkout

SCRIPT = Path(__file__).parents[3] / ".github" / "scripts" / "next_release.py"
PIN = SCRIPT.parents[1] / "vllm-baseline.txt"
needs_checkout()
WHEEL, YANKED = ({"packagetype": "bdist_wheel", "yanked": yanked} for yanked in (False, True))
SDIST = {"packagetype": "sdist", "yanked": False}


@pytest.fixture(scope="module")
def script():
    with loaded(SCRIPT) as module:
        yield module


def index(*versions, **others):
    return {"releases": {**{version: [WHEEL] for version in versions}, **others}}


def titles(*versions):
    return [f"vLLM {version}: gate" for version in versions]


@pytest.mark.parametrize(
    ("known", "done", "chosen"),
    [
        (index("0.9.2", "0.26.0", "0.100.0", "0.27.1", "0.27.0.post1"), [], "0.100.0"),  # by number and not by text
        (index("0.26.0", "0.26.0.post1", "0.26.0.post2"), [], "0.26.0.post2"),
        (index("0.25.0", "0.26.0", "0.27.0", "0.27.1", "0.28.0"), [], "0.28.0"),
        (index("0.25.0", "0.26.0", "0.27.0", "0.27.1", "0.28.0"), ["0.28.0"], "0.27.1"),
        (index("0.25.0", "0.26.0", "0.27.0", "0.27.1", "0.28.0"), ["0.28.0", "0.27.1", "0.27.0"], ""),
        (index("0.26", "0.26.0.0"), [], ""),  # zeros at the end make no other release
        (index("0.27.0"), ["0.27"], ""),
        ({"releases": {"0.27.0": [YANKED, WHEEL]}}, [], "0.27.0"),
    ],
)
def test_the_newest_release_without_a_result_is_chosen(script, known, done, chosen):
    assert script.choose(known, "0.26.0", titles(*done)) == chosen
    assert script.choose(known, "0.100.0", titles(*done)) == "", "none is newer"


@pytest.mark.parametrize("version", ["0.27.0rc1", "0.27.0a1", "0.27.0.dev3", "0.27.0+cu129", "1!0.1", "nonsense", ""])
def test_what_is_no_final_release_is_left_out(script, version):
    assert script.choose(index("0.26.1", version), "0.26.0", []) == "0.26.1"


@pytest.mark.parametrize("files", [[], [YANKED], [YANKED, YANKED], [SDIST]])
def test_what_cannot_be_installed_is_left_out(script, files):
    assert script.choose(index("0.26.1", **{"0.27.0": files}), "0.26.0", []) == "0.26.1"


@pytest.mark.parametrize(
    "title", ["vLLM 0.27.0: gate it", "re: vLLM 0.27.0: gate", "vllm 0.27.0: gate", "vLLM 0.27.01x: gate", "0.27.0"]
)
def test_another_title_is_no_result(script, title):
    assert script.choose(index("0.27.0"), "0.26.0", [title]) == "0.27.0"


@pytest.mark.parametrize("known", [{}, {"releases": {}}, {"releases": []}, {"message": "not found"}])
def test_an_index_without_releases_is_no_index_without_news(script, known):
    with pytest.raises(ValueError, match="names no releases"):
        script.choose(known, "0.26.0", [])


@pytest.mark.parametrize("baseline", ["", "0.26.0rc1", "newest", "0.26.0; true"])
def test_a_baseline_that_is_no_release_is_told_and_the_one_in_use_is_one(script, baseline):
    with pytest.raises(ValueError, match="no final release"):
        script.choose(index("0.27.0"), baseline, [])
    assert script.key(PIN.read_text("utf-8").strip()) is not None


NUMBERS = st.lists(st.integers(0, 300), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))


@given(st.lists(NUMBERS, min_size=1, max_size=8), NUMBERS, st.data())
def test_what_is_chosen_is_newer_without_a_result_and_the_newest_such(script, versions, pin, data):
    done = data.draw(st.sets(st.sampled_from(versions)))
    found = script.choose(index(*versions), pin, titles(*done))
    left = {script.key(version) for version in versions} - {script.key(version) for version in done}
    newer = [each for each in left if each > script.key(pin)]
    assert (script.key(found) if found else None) == max(newer, default=None)


@given(st.text(max_size=30) | st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){2}(\.post[0-9])?", fullmatch=True))
def test_any_name_is_a_release_or_none(script, text):
    """Also other scripts' digits, and what a shell or a path would take for something else."""
    named = script.key(text) is not None
    assert not named or (set(text) <= set("0123456789.post") and script.by_name(text) == text)


@pytest.fixture
def command(script, tmp_path, capsys):
    def run(*arguments, of=None, done="", pin="0.26.0\n"):
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


def test_the_command_writes_outputs_and_takes_versions_by_name_as_they_are(command):
    named = ("--baseline", "0.20.2", "--candidate", "0.33.0rc1")
    for words, done, told in (
        ((), "", ("0.26.0", "0.27.0")),
        ((), "Another\nvLLM 0.27.0: gate\n", ("0.26.0", "")),
        (("--baseline", "", "--candidate", ""), "", ("0.26.0", "0.27.0")),
        (named, "vLLM 0.33.0rc1: gate", ("0.20.2", "0.33.0rc1")),
        (("--candidate", "0.25.0"), "", ("0.26.0", "0.25.0")),
    ):
        assert command(*words, done=done) == (0, f"baseline={told[0]}\ncandidate={told[1]}\n", "")


@pytest.mark.parametrize(
    "version", ["0.27.0;true", "$(true)", "../0.27.0", "0.27.0 --pre", "v0.27.0", "0.27\ncandidate=1"]
)
def test_a_name_that_is_no_version_is_refused(command, version):
    status, out, err = command("--candidate", version)
    assert (status, out) == (2, "") and "is no version such as 0.26.0" in err


def test_problems_are_told_and_nothing_is_written(command):
    assert command(of={"message": "not found"}) == (4, "", "error: the index names no releases\n")
    assert command("--candidate", "0.26.0") == (4, "", "error: 0.26.0 on both sides\n")
    assert command("--index", "nowhere.json")[:2] == (4, "")
    two = command("--candidate", "0.27.0", pin="0.26.0\nstatus=0\n")
    assert two == (4, "", "error: the baseline '0.26.0\\nstatus=0' is no final release\n")
