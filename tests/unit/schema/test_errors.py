"""An error says what was seen and what to type, and a terminal obeys neither; commands name their own options; files
are opened only if they are files, and locked by one at a time."""

import ast
import errno
import os
import re
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from pathlib import Path

import pytest
from campaign import LINKS
from refusals import refused
from shipped import PACKAGE

from pytest_slmserve.schema import errors
from pytest_slmserve.schema.errors import BadArchive, BadUsage, DeviceBusy, EngineFailed, SlmError, to_install

# What `single` and `write_file` do where such a thing is: the number of an error, or None for a file of their own.
PLACES = {"nothing": (None, None), "file": (None, None), "link": (errno.ELOOP, None), "dangling": (errno.ELOOP, None),
          "hard-link": (errno.EINVAL, None), "pipe": (errno.ENXIO, errno.EINVAL), "folder": (errno.EISDIR,) * 2,
          "device": (errno.ELOOP, None)}  # fmt: skip


def test_error_shows_problem_with_hint():
    error, bare = SlmError("a\n::error::it said \x1b[2J", "not \x07"), SlmError("a")
    assert (error.problem, error.hint) == (r"a\n::error::it said \x1b[2J", r"not \x07")
    assert str(SlmError("a", "Use b.")) == "a\n  Use b."
    assert str(error) == f"{error.problem}\n  try: not \\x07" and (str(bare), bare.hint, bare.cause) == ("a", "", "a")
    assert EngineFailed(f"/a/log{errors.ENDS_WITH}line{errors.ENDS_WITH}more").cause == "/a/log"
    extras = {"asv", "benchmark", "hub", "ray", "report", "sharegpt", "vllm"}
    told = {extra: to_install(extra).removeprefix("pip install ") for extra in extras}
    assert told["ray"].startswith("'ray>=") and "'jinja2>=" in told["report"] and "'vl-convert" in told["report"]
    assert all(command.count("'") >= 2 and "slmserve" not in command for command in told.values())


@pytest.mark.parametrize(("kind", "only", "problem"), [
    (DeviceBusy, BadUsage, "engine 2: a"), (BadArchive, SlmError, "engine 2: a"), (BadArchive, BadUsage, "a"),
])  # fmt: skip
def test_error_is_prefixed_with_name(kind, only, problem):
    with refused(kind=kind, hint="wait") as caught, errors.naming("engine 2", only):
        raise kind("a", "wait")
    assert caught.value.problem == problem


@pytest.mark.parametrize(("hint", "said"), [
    ("--slm-records with another path", "--out with another path"),
    ("--slm-window 5, --slm-cpu", "--window 5, --cpu"),
    ("-o slm_accept_truncated=1, to go on", "--accept-truncated=1, to go on"),
    ("nothing of ours", "nothing of ours"),
])  # fmt: skip
def test_command_hint_uses_its_options(hint, said):
    others = (BadUsage, (BadUsage,), {}, said.replace("--out", "--records")), (BadArchive, (BadUsage,), {}, hint)
    for raised, taken, told, expected in ((BadUsage, (BadArchive, BadUsage), {"records": "--out"}, said), *others):
        with pytest.raises(raised) as caught, errors.of_a_command(*taken, **told):
            raise raised("p", hint)
        assert (caught.value.problem, caught.value.hint) == ("p", expected)


def test_content_reads_only_files(tmp_path, monkeypatch):
    path, pipe = tmp_path / "a", tmp_path / "pipe"
    path.write_bytes(b"\0abc")
    assert errors.content(path) == b"\0abc"
    os.mkfifo(pipe)
    before = len([*Path("/proc/self/fd").iterdir()])
    for other, number in ((pipe, errno.EINVAL), (Path("/dev/zero"), errno.EINVAL), (tmp_path, errno.EISDIR)):
        with pytest.raises(OSError) as caught:
            errors.content(other)
        assert (caught.value.errno, caught.value.filename) == (number, str(other)) and caught.value.strerror
    assert len([*Path("/proc/self/fd").iterdir()]) == before, "none stays open"
    for error in (MemoryError, OverflowError):

        def too_large(*_, error=error, **__):
            raise error

        monkeypatch.setattr("builtins.open", too_large)
        with pytest.raises(OSError) as caught:
            errors.content(tmp_path / "a")
        monkeypatch.undo()
        assert (caught.value.errno, caught.value.filename) == (errno.ENOMEM, str(tmp_path / "a")), error
        assert caught.value.strerror


def test_new_files_obey_umask(tmp_path):
    mask = os.umask(0)
    try:
        with open(tmp_path / "a", "wb", opener=errors.regular), open(tmp_path / "b", "wb", opener=errors.single):
            errors.write_file(tmp_path / "c", "")
            assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o666] * 3
    finally:
        os.umask(mask)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    append(tmp_path / "link", "x", errors.regular)
    assert (tmp_path / "a").read_text() == "x" and (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a file"):
        append(tmp_path / "pipe", "x", errors.regular)


def append(path: Path, text: str, opener=errors.single, mode="a") -> None:
    with open(path, mode, encoding="utf-8", opener=opener) as file:
        file.write(text)


@pytest.mark.parametrize("mode", ["a", "w", "whole"])
@pytest.mark.parametrize("kind", PLACES)
def test_write_never_follows_links(tmp_path, kind, mode):
    victim, path, wrong = tmp_path / "victim", tmp_path / "a", PLACES[kind][mode == "whole"]
    victim.write_text("PRECIOUS", "utf-8")
    more = {"file": lambda path, _: path.write_text("old "), "device": lambda path, _: path.symlink_to("/dev/null")}
    if kind != "nothing":
        (LINKS | more)[kind](path, victim)
    names = {each.name for each in tmp_path.iterdir()} | {"a"}
    try:
        errors.write_file(path, "é") if mode == "whole" else append(path, "é", mode=mode)
    except OSError as error:
        assert (error.errno, error.filename) == (wrong, str(path)) and error.strerror
    else:
        text = path.read_text("utf-8")
        assert wrong is None and text == ("old é" if (kind, mode) == ("file", "a") else "é") and not path.is_symlink()
    assert victim.read_text("utf-8") == "PRECIOUS" and {each.name for each in tmp_path.iterdir()} == names


def test_concurrent_writes_never_mix(tmp_path):
    path, texts = tmp_path / "a", [letter * 300_000 for letter in "abcd"]
    path.write_text(texts[0])
    seen = set()
    with ThreadPoolExecutor(4) as pool:
        written = [pool.submit(errors.write_file, path, text) for _ in range(20) for text in texts]
        while not all(each.done() for each in written):
            seen.add(path.read_text())
    assert [each.result() for each in written] == [None] * 80 and seen <= {*texts} and [*tmp_path.iterdir()] == [path]
    path.unlink()
    path = tmp_path / ("a" * 255)  # as long as a name can be
    errors.write_file(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError) as caught:
            errors.write_file(path, b"x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_lock_sharing_needs_both_sides(tmp_path, monkeypatch):
    for first, second in product((False, True), repeat=2):
        path = tmp_path / "lock"
        with path.open("w") as one, path.open() as other:
            assert errors.try_lock(one, shared=True) if first else errors.try_lock(one)
            assert errors.try_lock(other, shared=second) is (first and second)
        with path.open() as later:
            assert errors.try_lock(later), "it is free once it is closed"
    (tmp_path / "a").touch()
    assert [errors.is_file(tmp_path / name) for name in ("a", "", "b", "n" * 5000, "\0")] == [True, *[False] * 4]
    monkeypatch.setenv("HOME", "/h")
    for told, cache in (("/x", "/x"), ("", "/h/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", told)
        found = errors.user_cache(), errors.user_cache("vllm")
        assert found == (Path(cache, "pytest-slmserve"), Path(cache, "vllm"))


KINDS = {"SlmError", *(kind.__name__ for kind in SlmError.__subclasses__()), "DeviceBusy"}
COMMANDS = {"slmserve", "pip", "rm", "unset", "assert", "nvidia-smi", "systemctl", "slm_engine.run(...)"}
NOT_A_VERB = {"A", "An", "The", "One", "No", "Another", "More", "Other", "Its", "It", "They", "This", "That", "There"}


def hints_of(source: str) -> Iterator[str]:
    """Literal hints of errors, with "{}" in place of values."""
    for call in ast.walk(ast.parse(source)):
        match call:
            case ast.Call(ast.Name(name), [_, ast.Constant(str(text))]) if name in KINDS:
                yield text
            case ast.Call(ast.Name(name), [_, ast.JoinedStr(parts)]) if name in KINDS:
                yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)


def test_hints_are_sentences_or_commands():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "other_gpu.py"]
    found = list(chain.from_iterable(map(hints_of, sources)))
    assert len(found) > 200
    wrong = []
    for hint in found:
        first = hint.split()[0]
        is_sentence = hint.endswith(".") and first.isalpha() and first.istitle() and first not in NOT_A_VERB
        if not is_sentence and not re.search(r"[-={}\[(:/@`]", first) and first not in COMMANDS:
            wrong.append(hint)
    assert wrong == []
