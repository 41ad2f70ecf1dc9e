"""Kills its own process group as soon as one of the processes named on the command line is gone.

vLLM's EngineCore does not notice that the process which started it was killed; this does, in a fraction of a second.
Where that is the first one, nobody is left who would remove the folder of the engine, named by SLM_FOLDER.
"""

import os
import select
import signal
import sys

try:
    watched = [os.pidfd_open(int(pid)) for pid in sys.argv[1:]]
    gone = watched[0] in select.select(watched, [], [])[0]
except ProcessLookupError:  # before we could look
    gone = True
if gone and (folder := os.environ.get("SLM_FOLDER")):
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
os.killpg(os.getpgrp(), signal.SIGKILL)
