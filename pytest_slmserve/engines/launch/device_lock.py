"""A lock on a device, held by one run of this host."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from pathlib import Path
from typing import IO

from pytest_slmserve.engines.launch.file_lock import open_lock, try_lock
from pytest_slmserve.schema.errors import BadUsage, DeviceBusy
from pytest_slmserve.schema.printable import printable

LONGEST = 10_000  # characters of a note


class DeviceLock:
    """Held by one process at a time; the kernel lets go of it when that process ends, however it ends."""

    def __init__(self, device: str, folder: Path | None = None) -> None:
        self.path = (folder or Path(tempfile.gettempdir())) / f"pytest-slmserve-{device}.lock"
        self.is_gpu = device.startswith(("GPU-", "MIG-"))
        self.file: IO[str] | None = None

    def acquire(self) -> None:
        """Raises DeviceBusy, naming the holder, when another run has it, and BadUsage where files cannot be locked."""
        try:
            file = open_lock(self.path)
        except OSError as error:
            why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise self._not_taken(f"{why}", "remove it, or TMPDIR with a folder of your own") from None
        try:
            locked = try_lock(file)
        except OSError as error:
            file.close()
            raise self._not_taken(f"{error.strerror}", "TMPDIR with a folder on a file system that has locks") from None
        if not locked:
            holder = holder_of(file.read(LONGEST))
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

    def _not_taken(self, why: str, hint: str) -> BadUsage:
        return BadUsage(f"the lock of this device, {self.path}, cannot be taken ({why})", hint)

    def release(self) -> None:
        """The file is never removed, for then a third process could lock a new file of the same name while a second
        still holds the old one."""
        if self.file:
            if self.file.writable():
                self.file.truncate(0)
            self.file.close()
            self.file = None


def holder_of(text: str) -> str:
    """The process that holds a lock, by the note in its file, which anybody may have written."""
    try:
        facts = json.loads(text)
        return printable(f"process {facts['pid']}, since {facts['since']}, in {facts['folder']}", layout="")
    except (ValueError, KeyError, TypeError, RecursionError):
        return "it has not said which"
