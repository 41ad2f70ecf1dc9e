"""A child that speaks JSON lines: what it says, how it ends, and that nothing of it is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from processes import gone, group, kill_group, until

from pytest_slmserve.engines.child import Child, converse
from pytest_slmserve.engines.worker import __file__ as worker_package
from pytest_slmserve.engines.worker.slm_process import Lines
from pytest_slmserve.schema.errors import EngineFailed

SPEAK = """
import json, os, signal, socket, subprocess, sys, time
end = socket.socket(fileno=int(sys.argv[1]))
lines = end.makefile("r")

def say(**message):
    end.sendall(json.dumps({"event": "said", **message}).encode() + b"\\n")

"""
SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def child(tmp_path):
    """Starts a child that runs `code`; its group is killed at the end, whatever happened."""
    started = []

    def start(code):
        script = tmp_path / f"child{len(started)}.py"
        script.write_text(SPEAK + textwrap.dedent(code), "utf-8")
        started.append(Child([sys.executable, "-S", str(script)], dict(os.environ)))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def stubborn(child):
    found = child("print('thinking', flush=True); say(up=True); time.sleep(60)")
    found.receive(20, "starting")
    return found


def test_child_exchanges_json_lines(child):
    echo = child("for line in lines: say(**json.loads(line))")
    echo.send(prompts=list(range(300_000)))
    assert echo.receive(20, "echoing") == {"event": "said", "prompts": list(range(300_000))}
    echo.send(event="a")
    echo.send(event="b")
    assert [echo.receive(20, "echoing") for _ in "ab"] == [{"event": "a"}, {"event": "b"}]
    with pytest.raises(EngineFailed, match="60 s"):
        converse(echo, event="stalled", cause="no engine step for 60 s")
    parent = child(f"say(core=subprocess.Popen({SLEEPS}).pid)\nlines.readline()")
    core = parent.receive(20, "starting")["core"]
    assert group(parent.process.pid) == sorted([parent.process.pid, core]) and os.getpgrp() != parent.process.pid
    assert os.getsid(core) == os.getsid(0), "cores may be shared by session"
    parent.end(within_s=5)
    assert gone(parent.process.pid)


@pytest.mark.parametrize(("code", "fact"), [
    *((rf"end.sendall(b'{line}\n'); time.sleep(60)", "no message")
      for line in ("garbage", "{", "[1]", "{}", "null", r"\xff\xfe", "[" * 100_000)),
    ("while True: end.sendall(b'x' * 65536)", "1 MiB"),  # a message without an end
    ("end.shutdown(socket.SHUT_RDWR); time.sleep(60)", "closed"),  # it lives
    ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    (r"sys.stdout.buffer.write(b'caf\xe9\n')", "caf\ufffd"),  # in its log
    ("for n in range(40): print('line', n)\nsys.exit(7)", r"\b7\b.*/engine\.log.*\n  \| line 15\n(.*\n){23}.* 39$"),
])  # fmt: skip
def test_broken_child_shows_log_end(child, monkeypatch, code, fact):
    def wait(self, timeout=None, really=subprocess.Popen.wait):
        return really(self, timeout and min(timeout, 0.2))

    if "SHUT" in code:
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
    monkeypatch.setattr(Lines, "longest", 1 << 20)
    with pytest.raises(EngineFailed, match=fact):
        child(code).receive(20, "starting")


def test_silent_child_fails(stubborn, child):
    began, heard = time.monotonic(), []
    with pytest.raises(EngineFailed, match=r"1 s (.|\n)*measuring(.|\n)*thinking"):
        stubborn.receive(0.7, "measuring", lambda log: heard.append(log.read_text()))
    assert 0.7 <= time.monotonic() - began < 5 and set(heard) == {"thinking\n"}
    dead, quiet = child("sys.exit(1)"), child("sys.exit(0)")
    dead.process.wait(20)
    with pytest.raises(EngineFailed, match=r"\b1\b"):
        for _ in range(3):
            dead.send(op="run", text="x" * 1_000_000)
    for each in (quiet, quiet, dead, dead):
        each.end()
    assert (quiet.process.returncode, quiet.folder.exists(), dead.log.exists()) == (0, False, True)


@pytest.mark.parametrize("interrupts", [[], [KeyboardInterrupt]])
def test_stubborn_child_is_killed(stubborn, monkeypatch, interrupts):
    def wait(self, timeout=None, really=subprocess.Popen.wait):
        while interrupts:
            raise interrupts.pop()
        if stubborn.killed:
            stubborn.failed("ended")  # as a thread that listens may say now
        return really(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
        stubborn.end(within_s=60 if interrupts else 0.3)
    assert time.monotonic() - began < 5 and stubborn.process.returncode == -signal.SIGKILL
    assert not stubborn.folder.exists() and "(nothing)" in str(stubborn.failed("ended"))


WORKER = Path(worker_package).parent
GUARDIAN = [sys.executable, "-I", "-S", str(WORKER / "guardian.py")]
LEADER = f"""
import os, subprocess, sys, time
subprocess.Popen([*{GUARDIAN}, sys.argv[1], str(os.getpid())])
subprocess.Popen({SLEEPS})
time.sleep(60)
"""
PARENT = f"""
import os, subprocess, sys, time
words = [sys.executable, "-S", "-c", {LEADER!r}, str(os.getpid())]
print(subprocess.Popen(words, start_new_session=True).pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def begin():
    """Starts processes; whatever happens, nothing of their groups lives."""
    begun = []

    def start(command, **how):
        begun.append(subprocess.Popen(command, start_new_session=True, **how))
        return begun[-1]

    yield start
    for each in begun:
        kill_group(each.pid)
        each.wait()


@pytest.fixture
def ended():
    """The id of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return str(process.pid)


@pytest.mark.parametrize("victim", ["parent", "leader"])
def test_guardian_kills_orphaned_group(begin, victim):
    parent = begin([sys.executable, "-S", "-c", PARENT], stdout=subprocess.PIPE, text=True)
    with parent.stdout:
        leader = int(parent.stdout.readline())
    try:
        until(lambda: len(group(leader)) == 3, 20, "a guardian, its leader and one more")
        time.sleep(0.8)
        assert len(group(leader)) == 3, "it leaves the group alone while both live"
        os.kill(parent.pid if victim == "parent" else leader, signal.SIGKILL)
        assert gone(leader, within_s=3)
    finally:
        kill_group(leader)


ENDS = f"""
import subprocess, sys
from slm_process import guarded
subprocess.Popen({SLEEPS})
with guarded(sys.argv[1]):
    pass  # and ends before its guardian has begun
"""


@pytest.mark.parametrize("parent_is_gone", [True, False])
def test_late_guardian_checks_its_parent(begin, ended, parent_is_gone):
    env = {**os.environ, "PYTHONPATH": str(WORKER)}
    worker = begin([sys.executable, "-c", ENDS, ended if parent_is_gone else str(os.getpid())], env=env)
    assert worker.wait(20) == (-signal.SIGKILL if parent_is_gone else 0)
    assert len(group(worker.pid)) == (0 if parent_is_gone and gone(worker.pid) else 1)
    if parent_is_gone:
        late = begin(["sh", "-c", '"$@"; true', "sh", *GUARDIAN, ended])
        assert late.wait(20) == -signal.SIGKILL, "of its group, which it does not lead: it came too late"


def test_guardian_kills_users_of_folder(begin, tmp_path):
    folder, beside, parent = tmp_path / "slm-a", tmp_path / "slm-ab", begin(SLEEPS)
    env = {**os.environ, "SLM_FOLDER": str(folder)}
    folder.mkdir()
    beside.mkdir()
    with (folder / "log").open("wb") as log, (beside / "log").open("wb") as other:
        theirs, stranger = begin(SLEEPS, stdout=log), begin(SLEEPS, stdout=other)
        guardian = begin([*GUARDIAN, str(parent.pid)], env=env, stdout=log)  # as an engine's has it
    parent.kill()
    assert (guardian.wait(20), theirs.wait(20)) == (0, -signal.SIGKILL)
    assert not folder.exists() and beside.exists() and stranger.poll() is None
    # A worker sees that its parent is gone, too, ends, and ends its guardian: the folder stayed then.
    parent = begin(SLEEPS)  # a file, which is not removed: so the guardian tries on
    with folder.open("wb") as file:
        user = begin(SLEEPS, stdout=file)
    guardian = begin([*GUARDIAN, str(parent.pid)], env=env)
    parent.kill()
    assert user.wait(20) == -signal.SIGKILL, "it has begun"
    guardian.terminate()
    time.sleep(0.1)
    folder.unlink()
    assert guardian.wait(20) == 0
