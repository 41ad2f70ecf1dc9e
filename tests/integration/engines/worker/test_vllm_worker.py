"""The process of our worker: it needs the standard library alone, and ends with its parent."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from pytest_slmserve.engines.worker import __file__ as package

FOLDER = Path(package).parent


def test_importing_it_brings_in_the_standard_library_only():
    code = "import sys, vllm_worker; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=60, check=True)
    ours = {"vllm_worker", "slm_pacing", "slm_process", "__main__"}
    assert set(done.stdout.split()) - sys.stdlib_module_names == ours


def test_it_ends_when_its_parent_closes_the_line():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-S", str(FOLDER / "vllm_worker.py"), str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], start_new_session=True, stderr=subprocess.DEVNULL
        )
        theirs.close()
        ours.close()
        assert process.wait(20) != 0


FORKS = """
import os, sys
from vllm_worker import run_worker

class Forks:
    def __init__(self, reader, writer):
        self.writer = writer

    async def serve(self):
        if (child := os.fork()) == 0:
            try:
                os.fstat(int(sys.argv[1]))
            except OSError:
                os._exit(7)
            os._exit(0)
        self.writer.write(b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        await self.writer.drain()

run_worker(Forks)
"""


def test_what_is_forked_does_not_hold_our_end_open():
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", FORKS, str(theirs.fileno()), str(os.getpid())]
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": str(FOLDER)}, start_new_session=True
    )
    theirs.close()
    try:
        with ours.makefile() as lines:
            assert lines.readline() == "7\n"
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        ours.close()
