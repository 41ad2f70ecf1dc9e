"""The script that chooses the release of vLLM to gate."""

import json

import pytest
from hypothesis import given, strategies as st
from packaging.version import Version
from scripts import CHECKOUT, checkout_script, loaded

SCRIPT = checkout_script(".github/scripts/next_release.py")
WHEEL, YANKED = ({"packagetype": "bdist_wheel", "yanked": yanked} for yanked in (False, True))
SDIST = {"packagetype": "sdist", "yanked": False}


@pytest.fixture(scope="module")
def script():
    with loaded(SCRIPT) as module:
        yield module


def index(*versions, **others):
    return {"releases": {**{version: [WHEEL] for version in versions}, **others}}


NUMBERS = st.lists(st.integers(0, 300), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))


@given(st.lists(NUMBERS, min_size=1, max_size=8), NUMBERS, st.data())
def test_newest_ungated_release_is_chosen(script, versions, pin, data):
    done = data.draw(st.sets(st.sampled_from(versions)))
    found = script.choose(index(*versions), pin, [f"vLLM {version}: gate" for version in done])
    left = [each for each in map(Version, versions) if each > Version(pin) and each not in map(Version, done)]
    assert Version(found) == max(left) if left else found == ""


NO_FINAL = ("0.27.0rc1", "0.27.0a1", "0.27.0.dev3", "0.27.0+cu129", "1!0.1", "nonsense", "")
NO_TITLE = ("vLLM 0.27.0: gate it", "re: vLLM 0.27.0: gate", "vllm 0.27.0: gate", "vLLM 0.27.01x: gate", "0.27.0")


@pytest.mark.parametrize(("known", "titles", "chosen"), [
    (index("0.9.2", "0.26.0", "0.100.0", "0.27.1", "0.27.0.post1"), [], "0.100.0"),  # by number and not by text
    (index("0.26.0", "0.26.0.post1", "0.26.0.post2"), [], "0.26.0.post2"),
    (index("0.27.0"), ["vLLM 0.27: gate"], ""),
    (index("0.27.0"), NO_TITLE, "0.27.0"),
    (index("0.26.1", *NO_FINAL), [], "0.26.1"),
    (index(**{"0.27.0": [YANKED, WHEEL]}), [], "0.27.0"),
    *((index("0.26.1", **{"0.27.0": files}), [], "0.26.1") for files in ([], [YANKED, YANKED], [SDIST])),
])  # fmt: skip
def test_uninstallable_releases_are_left_out(script, known, titles, chosen):
    assert script.choose(known, "0.26.0", titles) == chosen


def test_index_without_releases_is_refused(script):
    for known in ({}, {"releases": {}}, {"releases": []}, {"message": "not found"}):
        with pytest.raises(ValueError, match="names no releases"):
            script.choose(known, "0.26.0", [])
    for baseline in ("", "0.26.0rc1", "newest", "0.26.0; true"):
        with pytest.raises(ValueError, match="no final release"):
            script.choose(index("0.27.0"), baseline, [])
    assert script.key((CHECKOUT / ".github/vllm-baseline.txt").read_text("utf-8").strip()) is not None


@given(st.text(max_size=30) | st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){2}(\.post[0-9])?", fullmatch=True))
def test_accepted_release_names_are_safe(script, text):
    """Other scripts' digits, and what a shell or a path would take for something else, are in no such name."""
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


def test_script_writes_workflow_outputs(command):
    named = ("--baseline", "0.20.2", "--candidate", "0.33.0rc1")
    for words, done, told in (
        ((), "Another\nvLLM 0.27.0: gate\n", ("0.26.0", "")),
        (("--baseline", "", "--candidate", ""), "", ("0.26.0", "0.27.0")),
        (named, "vLLM 0.33.0rc1: gate", ("0.20.2", "0.33.0rc1")),
        (("--candidate", "0.25.0"), "", ("0.26.0", "0.25.0")),
    ):
        assert command(*words, done=done) == (0, f"baseline={told[0]}\ncandidate={told[1]}\n", "")
    for name in ("0.27.0;true", "$(true)", "../0.27.0", "0.27.0 --pre", "v0.27.0", "0.27\ncandidate=1"):
        status, out, err = command("--candidate", name)
        assert (status, out) == (2, "") and "is no version such as 0.26.0" in err
    assert command(of={"message": "not found"}) == (4, "", "error: the index names no releases\n")
    assert command("--candidate", "0.26.0") == (4, "", "error: 0.26.0 on both sides\n")
    assert command("--index", "nowhere.json")[:2] == (4, "")
    two = command("--candidate", "0.27.0", pin="0.26.0\nstatus=0\n")
    assert two == (4, "", "error: the baseline '0.26.0\\nstatus=0' is no final release\n")
