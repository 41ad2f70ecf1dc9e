"""A process that is killed while it appends loses no measurement that it had added."""

import os
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
def test_killed_writer_keeps_added_measurements(tmp_path, name):
    paths = os.pathsep.join(filter(None, [str(TESTS / "support"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", WRITER, str(tmp_path / name)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}) as writer:
        told = [int(writer.stdout.readline()) for _ in range(20)]
        writer.kill()
        told += [int(line) for line in writer.stdout if line.endswith(b"\n")]
    found = [m.load.concurrency for m in read(tmp_path / name).measurements]
    assert found[: len(told)] == told and len(found) <= len(told) + 1
