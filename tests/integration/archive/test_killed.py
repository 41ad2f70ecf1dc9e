"""A process that is killed while it appends loses no measurement that it had added."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from archives import EACH
from scripts import TESTS

from pytest_slmserve.archive.store import read

WRITER = """
import sys
from archives import Archive, example
with Archive.open(sys.argv[1]) as archive:
    for concurrency in range(1, 10**6):
        archive.add(example(concurrency))
        print(concurrency, flush=True)
"""


@EACH
def test_killed_while_it_appends(tmp_path, name):
    path = tmp_path / name
    paths = os.pathsep.join(filter(None, [str(TESTS / "support"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}) as writer:
        assert writer.stdout
        told = [int(writer.stdout.readline()) for _ in range(20)]
        writer.send_signal(signal.SIGKILL)
        told += [int(line) for line in writer.stdout if line.endswith(b"\n")]
    found = [m.load.concurrency for m in read(path).measurements]
    assert found[: len(told)] == told
    assert len(found) <= len(told) + 1
