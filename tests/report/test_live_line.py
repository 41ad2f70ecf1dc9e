"""The line that is written over: what is on it, and that it fits."""

from __future__ import annotations

import io
import os
import pty

import pytest
from interfaces import SIMULATED
from terminals import Screen, set_columns

from pytest_slmserve.report import live_line
from pytest_slmserve.report.live_line import LiveLine, StartWatch, Status, left_text, terminal_columns
from pytest_slmserve.schema.records import Progress

PLANNED = Status("case 7 of 33", "3:40 left", "opt-1.3b at 64, repeat 1")
MEASURING = PLANNED.measuring(Progress("window", 3.21, 1412, 64, 9830.4))


def test_a_wide_line_has_place_time_left_subject_phase_requests_and_rate():
    told = "case 7 of 33 | 3:40 left | opt-1.3b at 64, repeat 1 | window 3.2 s | 1,412 done | 9,830 tokens/s"
    assert MEASURING.within(160) == told


@pytest.mark.parametrize("columns", range(1, 161))
def test_no_line_is_longer_and_the_cursor_stays_on_it(columns):
    assert len(MEASURING.within(columns)) < columns


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (80, "case 7 of 33 | 3:40 left | opt-1.3b at 64, repeat 1 | window 3.2 s | 1,412 done"),
        (40, "case 7 of 33 | 3:40 left | window 3.2 s"),
        (30, "3:40 left | window 3.2 s"),
        (8, "window "),
    ],
)
def test_a_narrow_line_leaves_out_whole_fields_and_keeps_what_happens_and_how_long(columns, text):
    assert MEASURING.within(columns) == text


def test_without_steps_there_is_no_rate():
    assert PLANNED.measuring(Progress("ramp", 0.1, 0, 1, None)).within(160).endswith("| ramp 0.1 s | 0 done")


def test_while_something_is_left_it_is_never_nothing():
    assert [left_text(seconds) for seconds in (0.0, 0.4, 59.6, 220.0)] == [
        "0:01 left",
        "0:01 left",
        "1:00 left",
        "3:40 left",
    ]
    assert left_text(0.0, more=True) == "0:01+ left"


def test_where_the_estimate_is_used_up_the_line_says_so():
    assert left_text(0.0, over=True) == left_text(0.4, more=True, over=True) == "longer than planned"
    assert left_text(40.0, over=True) == "0:40+ left, longer than planned"


@pytest.mark.parametrize(("columns", "expected"), [(40, 40), (160, 160), (0, 80)])
def test_the_width_is_that_of_the_terminal_and_not_of_the_environment(monkeypatch, columns, expected):
    monkeypatch.setenv("COLUMNS", "400")
    ours, theirs = pty.openpty()
    set_columns(theirs, columns)
    with os.fdopen(theirs, "w") as stream:
        assert terminal_columns(stream) == expected
    os.close(ours)
    assert terminal_columns(io.StringIO()) == 80


def test_stages_are_looked_up_now_and_then(tmp_path, monkeypatch):
    log, now, starts = tmp_path / "engine.log", [100.0], StartWatch()
    monkeypatch.setattr(live_line.time, "monotonic", lambda: now[0])
    assert starts.phase(log) == "importing vLLM 0 s"
    now[0] = 100.1
    assert starts.phase(log) is None
    now[0] = 107.0
    log.write_text("Starting to load model /m...")
    assert starts.phase(log) == "loading weights 7 s"
    assert starts.phase(tmp_path / "other.log") == "importing vLLM 0 s", "another start begins at 0"


def test_a_command_writes_over_one_line_of_a_terminal_and_clears_it(tmp_path):
    screen = Screen()
    line = LiveLine(screen)
    line.on_wait(SIMULATED, tmp_path / "engine.log")
    line.show(MEASURING)
    line.clear()
    first, second, last = screen.getvalue().split("\r")[1:]
    assert first == f"{SIMULATED.model} | importing vLLM 0 s\x1b[K"
    assert second == f"{MEASURING.within(80)}\x1b[K" and last == "\x1b[K"


def test_a_pipe_sees_none_of_it():
    pipe = io.StringIO()
    line = LiveLine(pipe)
    line.show(MEASURING)
    line.clear()
    assert pipe.getvalue() == ""
