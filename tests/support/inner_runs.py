"""Runs of pytest inside pytest that several tests look at: each is made once, in a folder of its own."""

import re
import shlex
from collections.abc import Mapping
from contextlib import ExitStack, chdir, redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import StringIO
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import Contents, read
from pytest_slmserve.schema.records import Measurement

RECORDS = ".slm/records.jsonl"
QUIET = "-p no:cacheprovider -p no:benchmark"  # pytest-benchmark asks git and hg where it is
SWEEP = """
    import pytest

    def test_point(slm_point):
        assert slm_point.measure()

    @pytest.mark.slm(claim="throughput-plateau")
    def test_plateau(slm_claim):
        assert slm_claim()
"""
# Steps of some milliseconds, at most 16 users: a plateau from concurrency 4 on, in a few thousand stamps.
FEW = """--slm-simulate --slm-models=opt-125m --slm-concurrency=1,2,4,8,16 --slm-window=0.25 --slm-input-len=16
    --slm-output-len=8 --slm-engine-arg=t_inf=2000 --slm-engine-arg=b_half=0.5 --slm-repeats=2
    -o slm_report=tables"""


@dataclass(frozen=True)
class Ran:
    """What a run of pytest left. out, err: what it printed. counts: of its items, by how they ended."""

    folder: Path
    ret: int
    out: str
    err: str
    counts: dict[str, int]

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def outcomes(self) -> dict[str, str]:
        """How each item of a run with `-v` ended, by its name, in the order in which they ran."""
        found = (re.match(r"\S+::(\S+) ([A-Z]+)", line) for line in self.lines)
        return {each[1]: each[2] for each in found if each}

    def says(self, *patterns: str) -> None:
        """A line of the output must match each of these, in which a question mark is for any character."""
        assert [each for each in patterns if not any(fnmatchcase(line, each) for line in self.lines)] == [], self.out

    def refuses(self, *facts: str) -> None:
        """It must have ended as wrong usage, whose error names these facts."""
        assert self.ret == pytest.ExitCode.USAGE_ERROR, self.out + self.err
        assert [fact for fact in facts if fact not in self.err] == [], self.err
        assert "Traceback" not in self.err

    def archive(self, name: str = RECORDS) -> Contents:
        return read(self.folder / name)

    def measured(self, name: str = RECORDS) -> tuple[Measurement, ...]:
        return self.archive(name).measurements

    def loads(self, name: str = RECORDS) -> list[int]:
        return [m.load.concurrency for m in self.measured(name)]

    def report(self, *words: str, of: str = RECORDS) -> tuple[int, str]:
        """Exit status and output of the report on its archive, on a terminal as wide."""
        with chdir(self.folder), redirect_stdout(StringIO()) as out, pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "400")
            return main(["report", of, *words]), out.getvalue()


class InnerRuns:
    """Runs pytest in process: `runs(SWEEP, FEW, "--slm-repeats=3")` is made once for equal words, `anew` each time."""

    def __init__(self, config: pytest.Config, folders: pytest.TempPathFactory) -> None:
        self.config, self.folders = config, folders
        self._kept: dict[object, Ran] = {}

    def __call__(self, source: str | Mapping[str, str], *words: str) -> Ran:
        key = str(source), words
        if key not in self._kept:
            self._kept[key] = self.anew(source, *words)
        return self._kept[key]

    def anew(
        self,
        source: str | Mapping[str, str],
        *words: str,
        folder: Path | None = None,
        columns: int = 400,
        records: str = RECORDS,
        quiet: str = QUIET,
        process: bool = False,
        **how: Any,
    ) -> Ran:
        """One that is not shared. source: a file of tests, or texts of files by their names. folder: of an earlier run,
        to go on in. columns: so many that no sentence is broken. process: it runs in one of its own."""
        with pytest.MonkeyPatch.context() as patch, ExitStack() as ends:
            patch.setenv("COLUMNS", str(columns))
            if records:
                patch.setenv("SLM_RECORDS", records)
            asking = SimpleNamespace(function=None, node=SimpleNamespace(name="inner"), config=self.config)
            asking.addfinalizer = ends.callback
            inner = pytest.Pytester(asking, self.folders, patch, _ispytest=True)
            run = inner.runpytest_subprocess if process else inner.runpytest_inprocess
            with chdir(folder or inner.path):
                for name, text in ({"test_inner.py": source} if isinstance(source, str) else source).items():
                    Path(name).parent.mkdir(parents=True, exist_ok=True)
                    Path(name).write_text(dedent(text), "utf-8")
                result = run(*shlex.split(" ".join([*words, quiet])), **how)
                counts = result.parseoutcomes() if any(" in " in line for line in result.outlines[-1:]) else {}
                return Ran(Path.cwd(), result.ret, result.stdout.str(), result.stderr.str(), counts)
