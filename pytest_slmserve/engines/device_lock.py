"""A lock that lets one run at a time use a device of this host."""

import errno
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from pytest_slmserve.schema.errors import UNUSABLE, BadUsage, DeviceBusy, json_value, single, try_lock
from pytest_slmserve.schema.printable import printable

ALL_MAY = 0o666  # every user may write the note of the holder
LONGEST = 10_000  # characters of a note


def open_lock(path: Path, *, make: bool = True) -> IO[str]:
    """Open the lock file that the users of a host share, at least for reading, which is enough to lock it.

    Other users may put anything into its folder. Therefore only a regular file with a single name is opened, no link is
    followed, and an existing file is not changed.

    Args:
        make: create the file if it is missing.

    Raises:
        OSError: if the file cannot be opened, or is of another kind.
    """
    for access in (os.O_RDWR, os.O_RDONLY):
        try:
            descriptor = single(str(path), access)
        except FileNotFoundError:
            if not make:
                raise
            try:
                descriptor = single(str(path), access | os.O_CREAT | os.O_EXCL)
                os.fchmod(descriptor, ALL_MAY)  # whatever our umask: the file is new, and ours
            except (FileExistsError, PermissionError):
                continue
        except PermissionError:
            continue
        return os.fdopen(descriptor, "r+" if access == os.O_RDWR else "r", encoding="utf-8", errors="replace")
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def lock_path(device: str, folder: Path | None = None) -> Path:
    """Return the path of a device's lock file, by default in the folder of temporary files."""
    return (folder or Path(tempfile.gettempdir())) / f"pytest-slmserve-{device}.lock"


@contextmanager
def lock_device(device: str, folder: Path | None = None) -> Iterator[None]:
    """Hold the lock of a device, which one process at a time can hold.

    The kernel releases the lock when the process ends. The file stays, because otherwise a third process could lock a
    new file while a second one still holds the old file.

    Raises:
        DeviceBusy: if another run has the lock.
        BadUsage: if the file cannot be locked.
    """
    path, hint = lock_path(device, folder), "remove it, or TMPDIR with a folder of your own"
    with ExitStack() as undo:
        try:
            file = undo.enter_context(open_lock(path))
            hint = "Set TMPDIR to a folder on a file system that has locks."
            locked = try_lock(file)
        except OSError as error:
            raise BadUsage(f"the lock of this device, {path}, cannot be taken ({error.strerror})", hint) from None
        if not locked:
            holder = holder_of(file.read(LONGEST))
            why = f"this device is being measured by another run ({holder}): two at once would measure each other"
            is_gpu = device.startswith(("GPU-", "MIG-"))
            hint = f"Wait until it ends{', or choose another GPU with CUDA_VISIBLE_DEVICES' if is_gpu else ''}."
            raise DeviceBusy(why, hint)
        if file.writable():
            file.truncate(0)
            undo.callback(file.truncate, 0)
            json.dump({"pid": os.getpid(), "since": time.strftime("%H:%M:%S"), "folder": str(Path.cwd())}, file)
            file.flush()
        yield


def holder_of(text: str) -> str:
    """Return the process that holds a lock, by the note in its file, which any user may have written."""
    try:
        facts = json_value(text)
        return printable(f"process {facts['pid']}, since {facts['since']}, in {facts['folder']}", layout="")
    except UNUSABLE:
        return "it has not said which"
