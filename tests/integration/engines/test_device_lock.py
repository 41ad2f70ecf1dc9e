"""A lock of another process: who holds it is told until the kernel lets go."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_slmserve.engines.device_lock import lock_device, lock_path
from pytest_slmserve.schema.errors import DeviceBusy

HOLD = """
import sys, time
from pathlib import Path
from pytest_slmserve.engines.device_lock import lock_device
with lock_device("GPU-0", Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_busy_device_names_lock_holder(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DeviceBusy) as caught, lock_device("GPU-0", tmp_path):
            pass
        with lock_device("GPU-1", tmp_path):
            pass
        holder.kill()
    assert {f"{holder.pid}", f"{Path.cwd()}"} <= {*re.split(r"[ ,)]+", caught.value.problem)}
    assert "CUDA_VISIBLE_DEVICES" in caught.value.hint
    with lock_device("GPU-0", tmp_path):
        assert f'"pid": {os.getpid()}' in lock_path("GPU-0", tmp_path).read_text("utf-8")
