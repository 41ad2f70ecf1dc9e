"""A lock on a device, held by one run of this host."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import IO

from pytest_slmserve.engines.launch.file_lock import try_lock
from pytest_slmserve.schema.errors import BadUsage, DeviceBusy


class DeviceLock:
    """Held by one process at a time; the kernel lets go of it when that process ends, however it ends."""

    def __init__(self, device: str, folder: Path | None = None) -> None:
        self.path = (folder or Path(tempfile.gettempdir())) / f"pytest-slmserve-{device}.lock"
        self.is_gpu = device.startswith(("GPU-", "MIG-"))
        self.file: IO[str] | None = None

    def acquire(self) -> None:
        """Raises DeviceBusy, naming the holder, when another run has it, and BadUsage where files cannot be locked."""
        file = self._open()
        try:
            locked = try_lock(file)
        except OSError as error:
            file.close()
            why = f"the lock of this device, {self.path}, cannot be taken ({error.strerror})"
            raise BadUsage(why, "TMPDIR with a folder on a file system that has locks") from None
        if not locked:
            holder = _holder(file.read())
            file.close()
            raise DeviceBusy(
                f"this device is being measured by another run ({holder}): two at once would measure each other",
                "wait until it ends" + (", or choose another GPU with CUDA_VISIBLE_DEVICES" if self.is_gpu else ""),
            )
        if file.writable():
            file.truncate(0)
            json.dump({"pid": os.getpid(), "since": time.strftime("%H:%M:%S"), "folder": str(Path.cwd())}, file)
            file.flush()
        self.file = file

    def _open(self) -> IO[str]:
        """The file may be another user's: reading it is enough to lock it. It is never removed, for then a third
        process could lock a new file of the same name while a second still holds the old one."""
        try:
            self.path.touch()
            self.path.chmod(0o666)
        except PermissionError:
            pass
        try:
            return self.path.open("r+", encoding="utf-8")
        except PermissionError:
            return self.path.open("r", encoding="utf-8")

    def release(self) -> None:
        if self.file:
            if self.file.writable():
                self.file.truncate(0)
            self.file.close()
            self.file = None


def _holder(text: str) -> str:
    try:
        facts = json.loads(text)
        return f"process {facts['pid']}, since {facts['since']}, in {facts['folder']}"
    except (ValueError, KeyError, TypeError):
        return "it has not said which"
