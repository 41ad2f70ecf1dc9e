"""A child that speaks JSON lines: what it says, how it ends, and that nothing of it is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from processes import gone, group, kill_group, until

from pytest_slmserve.engines import child as child_process
from pytest_slmserve.engines.child import Child, converse
from pytest_slmserve.engines.worker import __file__ as worker_package
from pytest_slmserve.engines.worker.slm_process import Lines
from pytest_slmserve.schema.errors import EngineFailed

GUARDIAN = Path(worker_package).with_name("guardian.py")
SPEAK = """
    import json, os, socket, subprocess, sys, time
    end = socket.socket(fileno=int(sys.argv[1]))
    lines = end.makefile("r")

    def say(**message):
        end.sendall(json.dumps({"event": "said", **message}).encode() + b"\\n")
"""


@pytest.fixture
def child(tmp_path):
    """Starts a child that runs `code`; its group is killed at the end, whatever happened."""
    started = []

    def start(code):
        script = tmp_path / f"child{len(started)}.py"
        script.write_text(textwrap.dedent(SPEAK) + textwrap.dedent(code), "utf-8")
        started.append(Child([sys.executable, "-S", str(script)], dict(os.environ)))
        return started[-1]

    yield start
    for each in started:
        each.keep_log = False
        each.kill()


def test_lines_go_there_and_come_back_however_long(child):
    echo = child("for line in lines: say(**json.loads(line))")
    echo.send(prompts=list(range(300_000)))
    assert echo.receive(20, "echoing") == {"event": "said", "prompts": list(range(300_000))}
    echo.send(event="a")
    echo.send(event="b")
    assert [echo.receive(20, "echoing") for _ in "ab"] == [{"event": "a"}, {"event": "b"}]


def test_an_end_without_an_answer_tells_status_and_the_end_of_the_log(child):
    crash = child("for n in range(40): print('line', n)\nsys.exit(7)")
    with pytest.raises(EngineFailed, match=r"\b7\b") as caught:
        crash.receive(20, "starting")
    lines = caught.value.problem.splitlines()
    assert str(crash.log) in lines[0]
    assert lines[1:] == [f"  | line {n}" for n in range(15, 40)]
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    "line", [r"garbage\n", r"{\n", r"[1]\n", r"{}\n", r"null\n", r"\xff\xfe\n", "[" * 100_000 + r"\n"]
)
def test_what_is_no_message_is_a_sentence(child, line):
    odd = child(f"end.sendall(b'{line}'); time.sleep(60)")
    with pytest.raises(EngineFailed):
        odd.receive(20, "starting")


def test_a_message_without_an_end_is_a_sentence_within_its_bound(child, monkeypatch):
    monkeypatch.setattr(Lines, "longest", 1 << 20)
    endless = child("while True: end.sendall(b'x' * 65536)")
    with pytest.raises(EngineFailed, match="1 MiB"):
        endless.receive(20, "starting")


def test_an_engine_that_stalls_is_a_sentence(child):
    odd = child("for line in lines: say(**json.loads(line)['answer'])")
    with pytest.raises(EngineFailed, match="60 s"):
        converse(odd, answer={"event": "stalled", "cause": "no engine step for 60 s"})


def test_a_kill_is_named_by_its_signal(child):
    sleeper = child("say(pid=os.getpid()); time.sleep(60)")
    os.kill(sleeper.receive(20, "starting")["pid"], signal.SIGKILL)
    with pytest.raises(EngineFailed, match="SIGKILL"):
        sleeper.receive(20, "serving")


def test_a_child_that_closes_its_end_but_lives_is_told_apart(child, monkeypatch):
    monkeypatch.setattr(child_process.subprocess.Popen, "wait", impatient(child_process.subprocess.Popen.wait))
    mute = child("end.shutdown(socket.SHUT_RDWR); time.sleep(60)")
    with pytest.raises(EngineFailed, match="closed"):
        mute.receive(20, "serving")


def impatient(wait):
    return lambda self, timeout=None: wait(self, None if timeout is None else min(timeout, 0.2))


def test_silence_is_a_failure_after_the_time_given(child):
    silent = child("print('thinking', flush=True); say(up=True); time.sleep(60)")
    silent.receive(20, "starting")
    began = time.monotonic()
    with pytest.raises(EngineFailed, match=r"1 s (.|\n)*measuring(.|\n)*thinking"):
        silent.receive(0.7, "measuring")
    assert 0.7 <= time.monotonic() - began < 5


def test_speaking_to_one_that_is_gone_is_a_failure(child):
    dead = child("sys.exit(0)")
    dead.process.wait(20)
    with pytest.raises(EngineFailed, match=r"\b0\b"):
        for _ in range(3):
            dead.send(op="run", text="x" * 1_000_000)


def test_its_process_group_is_its_own_and_is_killed_with_it(child):
    parent = child(
        """
        core = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        say(core=core.pid)
        lines.readline()
        """
    )
    core = parent.receive(20, "starting")["core"]
    assert group(parent.process.pid) == sorted([parent.process.pid, core])
    assert os.getpgrp() != parent.process.pid
    assert os.getsid(core) == os.getsid(0), "cores may be shared by session"
    parent.end(within_s=5)
    assert gone(parent.process.pid)


def test_one_that_will_not_leave_is_killed(child):
    stubborn = child("say(up=True); time.sleep(60)")
    stubborn.receive(20, "starting")
    began = time.monotonic()
    stubborn.end(within_s=0.3)
    assert time.monotonic() - began < 5
    assert stubborn.process.returncode == -signal.SIGKILL


def test_who_interrupts_the_wait_for_its_end_waits_no_more_and_leaves_nothing(child, monkeypatch):
    stubborn = child("say(up=True); time.sleep(60)")
    stubborn.receive(20, "starting")
    waits = iter([KeyboardInterrupt])

    def wait(self, timeout=None, really=subprocess.Popen.wait):
        for interrupt in waits:
            raise interrupt
        return really(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        stubborn.end()
    assert stubborn.process.returncode == -signal.SIGKILL and not stubborn.folder.exists()


def test_nobody_waits_long_for_one_that_will_not_leave():
    """An engine that is idle is asked to end; after an interrupt pytest must be gone before somebody kills it."""
    assert child_process.ENDS_S <= 5


def test_its_folder_is_removed_unless_an_error_named_its_log(child):
    quiet, failed = child("sys.exit(0)"), child("sys.exit(1)")
    with pytest.raises(EngineFailed):
        failed.receive(20, "starting")
    for each in (quiet, failed):
        each.end()
    assert (quiet.folder.exists(), failed.log.exists()) == (False, True)
    failed.log.unlink()
    failed.folder.rmdir()


def test_ending_twice_is_fine(child):
    done = child("sys.exit(0)")
    done.end()
    done.end()
    assert done.process.returncode == 0


LEADER = """
    import os, subprocess, sys, time
    guardian, parent = sys.argv[1:]
    subprocess.Popen([sys.executable, "-I", "-S", guardian, parent, str(os.getpid())])
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    time.sleep(60)
"""
PARENT = """
    import json, os, subprocess, sys, time
    leader = subprocess.Popen([sys.executable, "-S", "-c", {leader!r}, {guardian!r}, str(os.getpid())],
                              start_new_session=True)
    print(leader.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def guarded():
    """Process ids of a parent, and of the leader of the group that a guardian watches."""
    code = textwrap.dedent(PARENT).format(leader=textwrap.dedent(LEADER), guardian=str(GUARDIAN))
    parent = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
    leader = int(parent.stdout.readline())
    try:
        until(lambda: len(group(leader)) == 3, 20, "a guardian, its leader and one more")
        time.sleep(0.3)  # the guardian is there, and now it watches
        yield parent.pid, leader
    finally:
        kill_group(leader)
        parent.kill()
        parent.wait()
        parent.stdout.close()


@pytest.mark.parametrize("victim", ["parent", "leader"])
def test_the_guardian_kills_its_group_when_one_of_those_it_watches_is_gone(guarded, victim):
    parent, leader = guarded
    os.kill(parent if victim == "parent" else leader, signal.SIGKILL)
    assert gone(leader, within_s=3)


def test_the_guardian_leaves_the_group_alone_while_both_live(guarded):
    time.sleep(0.5)
    assert len(group(guarded[1])) == 3


def test_a_guardian_that_comes_too_late_kills_at_once():
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    words = [sys.executable, "-I", "-S", str(GUARDIAN), str(ended.pid)]
    done = subprocess.run(["sh", "-c", '"$@"; true', "sh", *words], start_new_session=True, timeout=20)
    assert done.returncode == -signal.SIGKILL, "of its group, which it does not lead"


ENDS = """
import subprocess, sys
from slm_process import guarded
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
with guarded(sys.argv[1]):
    pass  # and ends before its guardian has begun
"""


@pytest.mark.parametrize("parent_is_gone", [True, False])
def test_a_guardian_that_is_ended_before_it_has_begun_looks_first_whether_the_parent_is_gone(parent_is_gone):
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    command = [sys.executable, "-c", ENDS, str(ended.pid if parent_is_gone else os.getpid())]
    worker = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(GUARDIAN.parent)}, start_new_session=True)
    try:
        assert worker.wait(20) == (-signal.SIGKILL if parent_is_gone else 0)
        assert len(group(worker.pid)) == (0 if parent_is_gone and gone(worker.pid) else 1)
    finally:
        kill_group(worker.pid)


def test_a_guardian_of_a_folder_kills_who_has_a_file_of_it_open(tmp_path):
    folder, beside = tmp_path / "slm-a", tmp_path / "slm-ab"
    for each in (folder, beside):
        each.mkdir()
    sleeping = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    parent = subprocess.Popen(sleeping)
    with (folder / "log").open("wb") as log, (beside / "log").open("wb") as other:
        theirs = subprocess.Popen(sleeping, stdout=log, start_new_session=True)
        stranger = subprocess.Popen(sleeping, stdout=other, start_new_session=True)
        guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARDIAN), str(parent.pid)],
            env={**os.environ, "SLM_FOLDER": str(folder)},
            stdout=log,  # as an engine's has, of which it is no reason to end itself
            start_new_session=True,
        )
    try:
        parent.kill()
        assert (guardian.wait(20), theirs.wait(20)) == (0, -signal.SIGKILL)
        assert not folder.exists() and beside.exists() and stranger.poll() is None
    finally:
        for each in (parent, theirs, stranger, guardian):
            each.kill()
            each.wait()


def test_a_guardian_that_removes_a_folder_is_not_ended_by_who_it_guards(tmp_path):
    """A worker sees that its parent is gone, too, ends, and ends its guardian: the folder stayed then."""
    folder = tmp_path / "slm-a"  # a file, which is not removed: so the guardian tries on
    sleeping = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    with folder.open("wb") as file:
        parent, user = subprocess.Popen(sleeping), subprocess.Popen(sleeping, stdout=file)
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", str(GUARDIAN), str(parent.pid)],
        env={**os.environ, "SLM_FOLDER": str(folder)},
        start_new_session=True,
    )
    try:
        parent.kill()
        assert user.wait(20) == -signal.SIGKILL, "it has begun"
        guardian.terminate()
        time.sleep(0.1)
        folder.unlink()
        assert guardian.wait(20) == 0
    finally:
        for each in (parent, user, guardian):
            each.kill()
            each.wait()


def test_the_log_tail_survives_bytes_that_are_no_text(child):
    noisy = child("sys.stdout.buffer.write(b'caf\\xe9\\n')")
    noisy.process.wait(20)
    assert str(noisy.failed("ended")).endswith("  | caf\ufffd")


# Stages of a start

# As vLLM 0.32 logs them on a CPU, and 0.26 on a GPU.


def test_a_child_that_says_nothing_is_reported_until_it_ends():
    child = Child([sys.executable, "-c", "import time; print('so far', flush=True); time.sleep(1.3)"], {})
    heard = []
    with pytest.raises(EngineFailed):
        child.receive(20.0, "starting", lambda log: heard.append(log.read_text()))
    child.keep_log = False
    child.kill()
    assert heard and heard[-1] in ("", "so far\n")
