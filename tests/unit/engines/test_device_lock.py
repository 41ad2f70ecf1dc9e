"""A lock that the kernel lets go of. It lies where others may put what they like: nothing of theirs is followed,
changed or obeyed."""

import errno
import json
import os
import stat
from unittest.mock import Mock

import pytest

from pytest_slmserve.commands.doctor import of_lock
from pytest_slmserve.engines import device_lock
from pytest_slmserve.engines.device_lock import lock_device, lock_path
from pytest_slmserve.schema.errors import BadUsage, DeviceBusy


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return lock_path("cpu", folder)


def held(path):
    return lock_device("cpu", path.parent)


def refused(path, error=DeviceBusy, match=None):
    with pytest.raises(error, match=match) as caught, held(path):
        pytest.fail("it was taken")
    return caught.value


PLANTED = {
    "symlink": lambda path, victim: path.symlink_to(victim),
    "dangling": lambda path, victim: path.symlink_to(victim.with_name("made")),
    "hard link": lambda path, victim: path.hardlink_to(victim),
    "FIFO": lambda path, victim: os.mkfifo(path),
    "folder": lambda path, victim: path.mkdir(),
    "device": lambda path, victim: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_lock_path_is_refused(path, tmp_path, kind):
    victim = tmp_path / "victim"
    victim.write_text("PRECIOUS DATA", "utf-8")
    victim.chmod(0o600)
    PLANTED[kind](path, victim)
    before = sorted(tmp_path.iterdir())
    told = refused(path, BadUsage, r"cpu\.lock")
    assert "TMPDIR" in told.hint and len(told.problem.splitlines()) == 1 and of_lock(path).state == "problem"
    assert sorted(tmp_path.iterdir()) == before, "nothing was made"
    assert (victim.read_text("utf-8"), stat.S_IMODE(victim.stat().st_mode)) == ("PRECIOUS DATA", 0o600)


@pytest.mark.parametrize("mode", [None, 0o644, 0o600, 0o664])
def test_new_lock_serves_every_user(path, mode):
    before, owner = os.umask(0o077), 65534 if mode and os.geteuid() == 0 else os.geteuid()  # only root gives files away
    try:
        if mode:
            path.touch()
            path.chmod(mode)
            os.chown(path, owner, -1)
        with held(path):
            refused(path)
    finally:
        os.umask(before)
    assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_uid) == (mode or 0o666, owner)


def test_lock_note_is_escaped(path):
    path.write_text("x" * 10_000, "utf-8")
    with held(path):
        note = path.read_text("utf-8")
        assert note.startswith('{"pid": ') and "x" * 100 not in note
        path.write_text("", "utf-8")
        refused(path)
        path.write_text(note, "utf-8")
    assert path.read_text("utf-8") == ""
    with held(path):
        note = {"pid": 1, "since": "\x1b]0;pwned\x07", "folder": "\x1b[2J\u202e/home"}
        path.write_text(json.dumps(note), "utf-8")
        told = str(refused(path))
        assert r"\x1b[2J" in told and not {"\x1b", "\x07", "\u202e"} & {*told, *of_lock(path).found}
        path.write_text("[" * 100_000, "utf-8")
        refused(path)


def test_read_only_lock_is_taken(path, monkeypatch):
    path.write_text("the note of somebody", "utf-8")
    path.chmod(0o444)
    if os.geteuid() == 0:  # who may write to every file
        monkeypatch.setattr(device_lock, "open_lock", lambda path: path.open("r"))
    with held(path):
        refused(path)
    monkeypatch.undo()
    path.chmod(0o666)
    monkeypatch.setattr(device_lock, "try_lock", lambda file: False)
    refused(path)
    assert path.read_text("utf-8") == "the note of somebody"
    monkeypatch.undo()
    path.unlink()
    # It is not there, then it is: nothing that appears is followed, and a plain file is locked.

    def late(path, flags, *mode, really=os.open):
        if flags & os.O_CREAT:
            os.close(really(path, os.O_CREAT | os.O_WRONLY))
        return really(path, flags, *mode)

    monkeypatch.setattr(os, "open", late)
    with held(path):
        monkeypatch.undo()
        refused(path)
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    assert "TMPDIR" in refused(path, BadUsage, "No locks available").hint
