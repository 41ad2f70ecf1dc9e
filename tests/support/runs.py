"""pytest as a process of its own, with an engine on the CPU, that a test may interrupt or kill."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from processes import GONE_S, alive, gone, kill_group, until, workers_of

from pytest_slmserve.archive.store import read
from pytest_slmserve.schema.records import Measurement

START_S = 300.0  # a start takes 15 to 35 s on two cores, 120 s and more where six workers share them
POINTS = """
    def test_point(slm_point):
        assert slm_point.measure()
"""
STEADY = ("--slm-cpu", "--slm-repeats=1", "--slm-models=opt-tiny", "-p", "no:cacheprovider", "-v")


@dataclass
class PytestRun:
    """`python -m pytest` in a folder. Leave it with `stop`: then nothing of it lives.

    tmp: for its lock and the logs of its engines, so that no other run on this machine is in its way. Its name must be
    short, because vLLM makes sockets in it.
    """

    folder: Path
    tmp: Path
    arguments: Sequence[str]
    engines: list[int] = field(default_factory=list)  # process groups seen

    def __post_init__(self) -> None:
        self.log = self.folder / "pytest.log"
        others = ("SLM_", "PYTEST_", "CI", "BUILD_NUMBER")  # where it sees CI, pytest's summary repeats whole messages
        env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *self.arguments],
                cwd=self.folder,
                env=env | {"PYTHONUNBUFFERED": "1", "TMPDIR": str(self.tmp)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.log.read_text("utf-8", errors="replace")

    def engine(self) -> int:
        """Wait for an engine that was not seen yet; returns its process group, which is its worker's process id."""

        def new() -> list[int]:
            assert self.process.poll() is None, self.text
            return [pid for pid in workers_of(self.process.pid) if pid not in self.engines]

        self.engines += until(new, START_S, "an engine's process")
        return self.engines[-1]

    def measured(self, count: int, launches: int = 1) -> list[Measurement]:
        """Wait until the archive has so many measurements of so many starts of an engine."""

        def enough() -> list[Measurement]:
            assert self.process.poll() is None, self.text
            found = self.archived()
            return found if len(found) >= count and len({m.launch for m in found}) >= launches else []

        return until(enough, START_S, f"{count} measurements of {launches} launches in the archive")

    def archived(self) -> list[Measurement]:
        path = self.folder / ".slm" / "records.jsonl"
        return list(read(path, skip_damaged=False).measurements) if path.exists() else []

    def interrupt(self) -> None:
        """What Ctrl-C sends to pytest."""
        os.kill(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def end(self, within_s: float) -> int:
        """Its exit status; every engine seen must be gone soon after."""
        status = self.process.wait(within_s)
        assert all(gone(number) for number in self.engines)
        return status

    def stop(self) -> None:
        """Whatever happened: engines first, for pytest is their parent."""
        for number in {*self.engines, *workers_of(self.process.pid)}:
            kill_group(number)
        kill_group(self.process.pid)
        self.process.wait(10)


def nothing_left_of(folder: Path, within_s: float = GONE_S) -> bool:
    """Processes, engines and all, that were started in `folder` or for it have ended."""

    def left() -> list[list[str]]:
        found = []
        for pid, _, words in alive():
            with suppress(OSError):
                if str(Path(f"/proc/{pid}/cwd").readlink()).startswith(str(folder)):
                    found.append(words)
        return found

    return until(lambda: not left(), within_s, left)
