"""Kills the process group that it was started in as soon as one of the processes named on the command line is gone.

vLLM's EngineCore does not notice that the process which started it was killed; this does, in a fraction of a second.
Where that is the first one, nobody is left who would remove the folder named by SLM_FOLDER, an engine's or Ray's. Who
still has a file of it open is killed: an agent of Ray's is in another group, and would live on for a minute. SIGTERM,
from the process that it guards, ends it alone.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PF_EXITING = 0x4  # of the flags in /proc/PID/stat: a process closes its sockets some time before it is gone
TRIES, PAUSE_S = 500, 0.02  # until those that were killed are gone


def is_ending(pid: str) -> bool:
    try:
        return bool(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]) & PF_EXITING)
    except OSError:
        return True


def target(link: Path) -> Path:
    try:
        return link.readlink()
    except OSError:  # it was closed
        return link


def users_of(folder: Path) -> Iterator[int]:
    """Process ids of others that have a file of the folder open."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != str(os.getpid()):
            with suppress(OSError):
                if any(target(link).is_relative_to(folder) for link in (process / "fd").iterdir()):
                    yield int(process.name)


try:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    watched = [os.pidfd_open(int(pid)) for pid in sys.argv[1:]]
    gone = watched[0] in select.select(watched, [], [])[0]
except ProcessLookupError:  # before we could look
    gone = True
except KeyboardInterrupt:
    gone = is_ending(sys.argv[1])
    if not gone:
        sys.exit()
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # who sees that the parent is gone ends us as we begin
group = os.getpgrp()
with suppress(PermissionError):  # of who leads a session, and so has no others to outlive
    os.setpgid(0, 0)  # to outlive the others, which would write into the folder while it is removed
if group != os.getpid():  # else nobody is in it, as where a folder alone is guarded
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
if gone and (named := os.environ.get("SLM_FOLDER")):
    import shutil

    folder = Path(named).resolve()  # as /proc tells it
    for _ in range(TRIES):
        for pid in users_of(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(PAUSE_S)
