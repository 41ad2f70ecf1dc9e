"""How far a run is, where pytest writes: one line on a terminal, as wide as that is, also while output is captured; in
a log a line for each case and each start, apart from pytest's dots."""

import os
import re
import sys

import pytest
from inner_runs import QUIET, SWEEP
from terminals import WRITTEN_OVER, shown_on

from pytest_slmserve.plugin import progress

FEW = f"""--slm-simulate --slm-models=opt-125m --slm-concurrency=1,16 --slm-window=1 --slm-engine-arg=t_inf=4000
    --slm-engine-arg=b_half=2 --slm-output-len=32 --slm-repeats=2 {QUIET}"""


@pytest.mark.parametrize("columns", [40, 160])
def test_progress_line_fits_terminal(pytester, columns):
    command = [sys.executable, "-m", "pytest", *FEW.split(), pytester.makepyfile(SWEEP).name]
    written = shown_on(columns, command, {**os.environ, "TERM": "xterm", "COLUMNS": "400"})
    over = WRITTEN_OVER.findall(written)
    lines = list(filter(None, over))
    assert len(lines) == 4 and all(len(line) < columns for line in lines), written
    numbers = [re.match(r"case (\d) of 2 \| \d:\d\d\+? left \| ", line)[1] for line in lines]
    assert numbers == ["1", "2", "1", "2"], "a sweep goes in rounds"
    assert not any("0:00" in line for line in lines) and all("| over " in line for line in lines)
    if columns == 160:
        assert all(line.endswith(" tokens/s") for line in lines) and "| opt-125m at 16, repeat 2 |" in lines[-1]
    assert over[-1] == "", "the line is gone when a test has ended"
    assert "slmserve: case" not in written


def test_log_has_line_per_case(runs, monkeypatch):
    monkeypatch.setattr(progress, "LEAST_S", 0.0)  # also on what took no time
    coloured = runs.anew(SWEEP, FEW, "--color=yes").out
    text = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert "\x1b[K" not in coloured, "colours make no terminal"
    told = [re.sub(r"\b\d+ s\b", "N s", line) for line in text.splitlines() if line.startswith("slmserve: case ")]
    assert told == [
        "slmserve: case 1 of 2, opt-125m at 1, repeat 1: N s, 0:01 left",
        "slmserve: case 2 of 2, opt-125m at 16, repeat 1: N s, 0:01 left",
        "slmserve: case 1 of 2, opt-125m at 1, repeat 2: N s, 0:01 left",
        "slmserve: case 2 of 2, opt-125m at 16, repeat 2: N s",
    ]
    assert re.search(r"^slmserve: opt-125m started in 0 s$", text, re.MULTILINE)
    assert re.search(r"^\S+\.py \.\.", text, re.MULTILINE), "pytest's dots have a line of their own"
    assert "\n\nslmserve: " not in text.partition("collected")[2].partition("=====")[0]
    names = runs.anew(SWEEP, FEW, "-v")
    assert names.out.count("slmserve: case ") == 4
    assert [name for name in names.outcomes if "point" in name] == ["test_point[opt-125m-1]", "test_point[opt-125m-16]"]
    quiet = runs.anew(SWEEP, FEW, "-q").out
    assert "slmserve: case" not in quiet and " started in " not in quiet
