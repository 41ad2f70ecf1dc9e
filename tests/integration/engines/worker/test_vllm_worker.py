"""The process of our worker: it needs the standard library alone, and ends with its parent."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from pytest_slmserve.engines.worker import __file__ as package

FOLDER = Path(package).parent


def start(script, number, **how):
    command = [sys.executable, *script, str(number), str(os.getpid())]
    return subprocess.Popen(command, pass_fds=[number], start_new_session=True, **how)


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


def test_worker_needs_standard_library_only():
    code = "import sys, vllm_worker; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    told = subprocess.check_output([sys.executable, "-S", "-c", code], cwd=FOLDER, text=True, timeout=60)
    assert set(told.split()) - sys.stdlib_module_names == {"vllm_worker", "slm_pacing", "slm_process", "__main__"}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = start(["-S", str(FOLDER / "vllm_worker.py")], theirs.fileno(), stderr=subprocess.DEVNULL)
        theirs.close()
        ours.close()
        assert process.wait(20) != 0
    ours, theirs = socket.socketpair()
    process = start(["-c", FORKS], theirs.fileno(), env={**os.environ, "PYTHONPATH": str(FOLDER)})
    theirs.close()
    try:
        with ours.makefile() as lines:
            assert lines.readline() == "7\n"
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        ours.close()
