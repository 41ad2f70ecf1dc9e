"""Process that kills the group it was started in as soon as one of the processes on its command line is gone.

vLLM's EngineCore does not notice that the process which started it was killed. If the first process is gone, the
guardian also removes the folder named by SLM_FOLDER, an engine's or Ray's, and kills processes with an open file in it,
because an agent of Ray is in another group and would live on for a minute. SIGTERM, from the process that it guards,
ends only the guardian.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PF_EXITING = 0x4  # of the flags in /proc/PID/stat: a process closes its sockets some time before it is gone
TRIES, PAUSE_S = 500, 0.02  # until the killed processes are gone


def kill_users(folder: Path) -> None:
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or process.name == str(os.getpid()):
            continue
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):  # it was closed
                    if link.readlink().is_relative_to(folder):
                        os.kill(int(process.name), signal.SIGKILL)
                        break


def asked_to_end(*_: object) -> None:
    """End, unless the parent is gone, because then there is work to do."""
    with suppress(OSError):
        flags = int(Path(f"/proc/{sys.argv[1]}/stat").read_text().rpartition(")")[2].split()[6])
        if not flags & PF_EXITING:
            os._exit(0)


signal.signal(signal.SIGTERM, asked_to_end)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
try:
    watched = [os.pidfd_open(int(pid)) for pid in sys.argv[1:]]
    gone = watched[0] in select.select(watched, [], [])[0]
except ProcessLookupError:  # before we could look
    gone = True
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a process that sees the parent's end sends it as we begin
group = os.getpgrp()
with suppress(PermissionError):  # of a guardian that leads a session, and so has no others to outlive
    os.setpgid(0, 0)  # to outlive the others, which would write into the folder while it is removed
if group != os.getpid():  # else nobody is in it, for example if only a folder is guarded
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
if gone and (named := os.environ.get("SLM_FOLDER")):
    import shutil

    folder = Path(named).resolve()  # as /proc shows it
    for _ in range(TRIES):
        kill_users(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(PAUSE_S)
