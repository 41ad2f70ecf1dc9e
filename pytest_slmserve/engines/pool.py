"""The session's engines: one at a time on a device, one start per specification, and a lock on the device."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

from pytest_slmserve.engines.base import Engine
from pytest_slmserve.engines.fake import FakeEngine
from pytest_slmserve.engines.offline import OfflineEngine
from pytest_slmserve.errors import DeviceBusy, EngineFailed
from pytest_slmserve.spec import EngineSpec


def start(spec: EngineSpec) -> Engine:
    """Start the engine that `spec` asks for."""
    match spec.backend:
        case "fake":
            return FakeEngine(spec)
        case _:
            return OfflineEngine(spec)


class DeviceLock:
    """Held by one process at a time; the kernel lets go of it when that process ends, however it ends."""

    def __init__(self, device: str, folder: Path | None = None) -> None:
        self.path = (folder or Path(tempfile.gettempdir())) / f"pytest-slmserve-{device}.lock"
        self.is_gpu = device.startswith(("GPU-", "MIG-"))
        self.file: IO[str] | None = None

    def acquire(self) -> None:
        """Raises DeviceBusy, naming the holder, when another run has it."""
        file = self._open()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _holder(file.read())
            file.close()
            raise DeviceBusy(
                f"this device is being measured by another run ({holder}): two at once would measure each other",
                "wait until it ends" + (", or choose another GPU with CUDA_VISIBLE_DEVICES" if self.is_gpu else ""),
            ) from None
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


class Pool:
    """Engines by specification; asking for another on a device stops the one that is there."""

    def __init__(self, start_engine: Callable[[EngineSpec], Engine] = start) -> None:
        self._start = start_engine
        self._engine: Engine | None = None
        self._failed: tuple[EngineSpec, EngineFailed] | None = None
        self.starts: list[EngineSpec] = []

    @property
    def current(self) -> EngineSpec | None:
        return self._engine.spec if self._engine else None

    def engine(self, spec: EngineSpec) -> Engine:
        """A running engine for `spec`, started if it is not the one that runs, or if that one has failed.

        Raises EngineFailed where it does not start; one that did not is not tried again.
        """
        if self._engine and (self._engine.spec != spec or not self._engine.ready):
            self.close()
        if self._engine is None:
            self._engine = self._started(spec)
        return self._engine

    def _started(self, spec: EngineSpec) -> Engine:
        if self._failed and self._failed[0] == spec:
            cause = self._failed[1].problem.partition(" ends with\n")[0]  # the log's end was shown once
            raise EngineFailed(f"not tried again: {cause}", self._failed[1].hint)
        self.starts.append(spec)
        try:
            return self._start(spec)
        except EngineFailed as error:
            self._failed = spec, error
            raise

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine:
            engine.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
