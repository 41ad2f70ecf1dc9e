"""One way to plant a fault, and one judge: did it end in time, with the right status and one sentence, was nothing
lost, is nothing left, and was the key told to nobody?"""

import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from processes import alive

from pytest_slmserve.archive.store import read
from pytest_slmserve.schema.errors import SlmError

KEY = "sk-FAULT-9f8e7d6c5b4a"
MARK = "SLM_FAULT_CASE"  # in the environment of whatever a case starts
BOUND_S = 60.0  # of a case that takes some seconds where nobody else is busy
GONE_S = 30.0  # until nothing of it lives
ENDED_BY_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\x1b(?!\[[0-9;]*m|\[K)")  # but for pytest's colours
OURS = re.compile(r"Traceback \(most recent call last\)|INTERNALERROR|(?<!ran )MemoryError|RecursionError")
WORDS = r"(error|ERROR|note|EngineFailed|BadUsage|BadArchive): |::error::|INVALID|\"notes\"|valid|[iI]nterrupt|passed"
SENTENCE = re.compile(WORDS + "|skipped")
PLANTED: Counter[str] = Counter()
ANSWERED: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a case. status: None where it did not end in time, below 0 where a signal ended it."""

    status: int | None
    text: str
    seconds: float


@dataclass(slots=True)
class Case:
    """A folder with nothing in it, a folder for temporary files, and a mark by which its processes are known."""

    folder: Path
    within_s: float = BOUND_S
    records: str = ".slm/records.jsonl"
    temporary: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="slm-")))  # sockets need short paths
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def environment(self) -> dict[str, str]:
        others = ("SLM_", "PYTEST_", "CI", "BUILD_NUMBER", "COV_", "GITHUB_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        own = {"TMPDIR": str(self.temporary), "XDG_RUNTIME_DIR": str(self.temporary), MARK: self.mark}
        return kept | own | {"SLM_ENDPOINT_KEY": KEY, "COLUMNS": "150", "PYTHONUNBUFFERED": "1"}

    def fork(self, work: Callable[[], int], memory: int | None = None) -> Seen:
        """The work in a process of its own, which need not import anything anew. memory: bytes beyond what it has."""
        log, began = self.folder / "seen.log", time.monotonic()
        with warnings.catch_warnings():  # of the threads of a runner, which hold nothing that is needed
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            self._child(work, log, memory)
        status = waited_for(pid, self.within_s)
        return Seen(status, log.read_text("utf-8", errors="surrogateescape"), time.monotonic() - began)

    def _child(self, work: Callable[[], int], log: Path, memory: int | None) -> None:
        status = 70
        try:
            os.setsid()
            for number in ENDED_BY_US:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for place, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), out, out)):
                os.dup2(descriptor, place)
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = [
                open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
                for number in (1, 2)
            ]
            environment = self.environment
            os.environ.clear()
            os.environ.update(environment)
            tempfile.tempdir = None
            os.chdir(self.folder)
            if memory:
                now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
            status = work()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
            with suppress(BaseException):
                sys.stderr.flush()
        finally:
            os._exit(status)

    def judge(
        self, category: str, seen: Seen, statuses: Collection[int], said: str = "", kept: int = 0,
        may_stay: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Counts the case, and raises AssertionError with each question that was not answered well.

        statuses: those that are right. said: a pattern that its text has. kept: measurements that its archive has at
        least. may_stay: patterns of names of temporary files that are meant to.
        """
        PLANTED[category] += 1
        wrong = [*self._wrong(seen, statuses, said, kept), *self._left(may_stay)]
        assert not wrong, "\n".join([*wrong, f"status {seen.status} after {seen.seconds:.1f} s", seen.text[-6000:]])
        ANSWERED[category] += 1

    def _wrong(self, seen: Seen, statuses: Collection[int], said: str, kept: int) -> Iterator[str]:
        if seen.status is None:
            yield f"it did not end within {self.within_s:g} s"
        elif seen.status not in statuses:
            yield f"status {seen.status}, not {sorted(statuses)}"
        if found := OURS.search(seen.text):
            yield f"{found[0]} on the screen"
        if found := CONTROL.search(seen.text):
            yield f"{found[0]!r} on the screen"
        if seen.status and seen.status > 0 and not SENTENCE.search(seen.text):
            yield "no sentence says why"
        if not re.search(said, seen.text):
            yield f"it does not say {said!r}"
        if KEY in seen.text:
            yield "the key is on the screen"
        for path in self.folder.rglob("*"):
            with suppress(OSError):
                if path.is_file() and path.stat().st_size < 1 << 24 and KEY.encode() in path.read_bytes():
                    yield f"the key is in {path.name}"
        try:
            there = len(read(self.folder / self.records).measurements) if (self.folder / self.records).exists() else 0
        except SlmError as error:
            yield f"the archive cannot be read: {error}"
            return
        if there < kept:
            yield f"{there} measurements are kept, not {kept}"

    def _left(self, may_stay: Collection[str]) -> Iterator[str]:
        """A lock that nobody holds stays for the next to take, as does compiled code."""
        named = ("*.lock", "pytest-slmserve", "pytest-of-*", "torchinductor_*", *may_stay)

        def files() -> list[str]:
            return [path.name for path in self.temporary.iterdir() if not any(map(path.match, named))]

        until = time.monotonic() + GONE_S
        while (left := [*self._processes()] or files()) and time.monotonic() < until:
            time.sleep(0.02)
        if left:
            yield f"processes or temporary files are left: {left}"
            self.stop()

    def _processes(self) -> Iterator[str]:
        for pid in self._pids():
            with suppress(OSError):
                yield Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")

    def _pids(self) -> Iterator[int]:
        """Whatever has the mark, or works in the folder: an engine core overwrites its environment."""
        for pid, _, _ in alive():
            with suppress(OSError):
                where = str(Path(f"/proc/{pid}/cwd").readlink())
                told = Path(f"/proc/{pid}/environ").read_bytes()
                if pid != os.getpid() and (f"{MARK}={self.mark}".encode() in told or where == str(self.folder)):
                    yield pid

    def stop(self) -> None:
        """End whatever is left of it."""
        for pid in list(self._pids()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path)
    yield made
    made.stop()
    shutil.rmtree(made.temporary, ignore_errors=True)


def waited_for(pid: int, within_s: float) -> int | None:
    """The exit status of a child; None where it does not end in time, and is killed with its group."""
    until, pause_s = time.monotonic() + within_s, 0.005
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause_s)
        pause_s = min(0.05, 1.5 * pause_s)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def command(words: Sequence[str]) -> Callable[[], int]:
    """`slmserve WORDS`, as its own process runs it."""
    from pytest_slmserve import __main__ as ours

    def work() -> int:
        sys.argv = ["slmserve", *words]
        return ours.run()

    return work


def pytest_run(words: Sequence[str]) -> Callable[[], int]:
    """`pytest WORDS`."""
    return lambda: int(pytest.main(["-p", "no:cacheprovider", *words]))


def table() -> list[str]:
    """Faults that were injected and handled, by category, as rows of Markdown."""
    rows = [("faults", "injected", "handled"), ("---", "---:", "---:")]
    rows += [(name, f"{PLANTED[name]:,}", f"{ANSWERED[name]:,}") for name in sorted(PLANTED)]
    rows.append(("**all**", f"{PLANTED.total():,}", f"{ANSWERED.total():,}"))
    return [f"| {' | '.join(row)} |" for row in rows]
