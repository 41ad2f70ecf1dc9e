"""Runs of pytest inside pytest that several tests look at: each is made once, in a folder of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest

from pytest_slmserve.archive.store import Contents, read
from pytest_slmserve.schema.records import Measurement

RECORDS = ".slm/records.jsonl"
# No pytest-benchmark, which asks git and hg where it is, unless it is the subject.
QUIET = ("-p", "no:cacheprovider", "-p", "no:benchmark")
# Steps of some milliseconds, at most 16 users: a plateau from concurrency 4 on, in a few thousand stamps.
FEW = (
    "--slm-simulate",
    "--slm-models=opt-125m",
    "--slm-concurrency=1,2,4,8,16",
    "--slm-window=0.5",
    "--slm-input-len=16",
    "--slm-output-len=8",
    "--slm-engine-arg=t_inf=2000",
    "--slm-engine-arg=b_half=0.5",
    "--slm-report=tables",
)


@contextmanager
def inner_pytester(
    name: str, config: pytest.Config, folders: pytest.TempPathFactory, records: str = RECORDS
) -> Iterator[pytest.Pytester]:
    """A `pytester` of no single test, in a folder of its own, where it keeps records. It has no options from outside,
    nor the words of tests that run side by side, with which pytest-benchmark would switch itself off; and no sentence
    is broken, so that a test can match it."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as ends:
        without_options(patch)
        patch.setenv("COLUMNS", "400")
        patch.setenv("SLM_RECORDS", records)
        asking = SimpleNamespace(function=None, node=SimpleNamespace(name=name), config=config)
        asking.addfinalizer = ends.callback
        yield pytest.Pytester(asking, folders, patch, _ispytest=True)


def without_options(patch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLM_", "PYTEST_XDIST"))]:
        patch.delenv(name)


@dataclass(frozen=True)
class Ran:
    """What a run of pytest left. out, err: what it printed."""

    folder: Path
    ret: int
    out: str
    err: str
    counts: dict[str, int]

    @property
    def lines(self) -> pytest.LineMatcher:
        return pytest.LineMatcher(self.out.splitlines())

    @property
    def words(self) -> str:
        """All that was printed, however its lines were broken."""
        return " ".join(self.out.split())

    def archive(self, name: str = RECORDS) -> Contents:
        return read(self.folder / name)

    def measured(self, name: str = RECORDS) -> tuple[Measurement, ...]:
        return self.archive(name).measurements

    def loads(self, name: str = RECORDS) -> list[int]:
        return [m.load.concurrency for m in self.measured(name)]


class InnerRuns:
    """Runs pytest in process: `runs(SOURCE, *FEW)` is made once for equal words."""

    def __init__(self, config: pytest.Config, folders: pytest.TempPathFactory) -> None:
        self.config, self.folders = config, folders
        self._kept: dict[object, Ran] = {}

    def __call__(self, source: str, *words: str) -> Ran:
        key = source, words
        if key not in self._kept:
            self._kept[key] = self.anew(source, *words)
        return self._kept[key]

    def anew(self, source: str, *words: str, folder: Path | None = None, records: str = RECORDS) -> Ran:
        """One that is not shared. folder: of an earlier one, to go on in."""
        with inner_pytester("inner", self.config, self.folders, records) as inner, chdir(folder or inner.path):
            Path("test_inner.py").write_text(dedent(source), "utf-8")
            result = inner.runpytest_inprocess(*words, *QUIET)
            counts = result.parseoutcomes() if any(" in " in line for line in result.outlines[-1:]) else {}
            return Ran(Path.cwd(), result.ret, result.stdout.str(), result.stderr.str(), counts)
