"""Real programs and processes: an interpreter and git are asked, and a child's CPU time is found once, whole."""

import os
import subprocess
import sys
import time

import pytest

from pytest_slmserve.schema.sensors import OWN_CORES
from pytest_slmserve.telemetry import host

BURN = "import time\nwhile time.process_time() < 0.3: pass"


def test_the_variables_of_the_engine_hold_for_the_question_too(tmp_path):
    packages = tmp_path / "vllm-0.26.0.dist-info"
    packages.mkdir()
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n", "utf-8")
    assert host.interpreter(sys.executable, {"PYTHONPATH": str(tmp_path)})["vllm"] == "0.26.0"


def git(root, *words):
    command = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def test_a_commit_is_named_and_a_change_is_marked(tmp_path, monkeypatch):
    assert host.git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert host.git_commit(tmp_path) is None, "nothing was committed yet"
    (tmp_path / "a.txt").write_text("one", "utf-8")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-q", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")[:12]
    (tmp_path / "new.txt").write_text("not tracked", "utf-8")
    assert host.git_commit(tmp_path) == commit
    (tmp_path / "a.txt").write_text("two", "utf-8")
    assert host.git_commit(tmp_path) == f"{commit}+"
    monkeypatch.setenv("PATH", "/nowhere")
    assert host.git_commit(tmp_path) is None


@pytest.mark.parametrize("looks", [False, True])
def test_a_child_that_ends_is_found_with_all_it_used_and_not_twice(monkeypatch, looks):
    monkeypatch.setattr(host, "LIST_S", 0.0)
    source = host.HostSource()
    source.read(began := time.monotonic())
    used_s, at = 0.0, began
    with subprocess.Popen([sys.executable, "-S", "-c", BURN]) as child:
        while child.poll() is None:
            time.sleep(0.05)
            if looks:
                last, at = at, time.monotonic()
                used_s += source.read(at).values[OWN_CORES] * (at - last)
    ended = time.monotonic()
    used_s += source.read(ended).values[OWN_CORES] * (ended - at)
    ticks_s = 2 / os.sysconf("SC_CLK_TCK")  # user and system time are whole ticks each
    assert 0.3 - ticks_s <= round(used_s, 6) < 0.55, "with a second count it is above 0.6"
