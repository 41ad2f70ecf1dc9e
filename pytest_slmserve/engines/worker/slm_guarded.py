"""A guardian for as long as a process of ours works: it kills the process group when the parent or we are gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def guarded(parent: str) -> Iterator[None]:
    """parent: its process id."""
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py")), parent, str(os.getpid())],
        stdin=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        guardian.terminate()  # where the parent is gone it removes our folder, and ends us
        guardian.wait()
