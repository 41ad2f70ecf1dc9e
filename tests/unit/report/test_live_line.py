"""The line that is written over: what is on it, and that it fits."""

from __future__ import annotations

import io
import os
import pty

import pytest
from terminals import Screen, set_columns

from pytest_slmserve.report import live_line
from pytest_slmserve.report.live_line import LiveLine, Status, TimeLeft, terminal_columns
from pytest_slmserve.schema.records import Progress

PLANNED = Status("case 7 of 33", "3:40 left", "opt-1.3b at 64, repeat 1")
MEASURING = PLANNED.measuring(Progress("window", 3.21, 1412, 64, 9830.4))


def test_a_wide_line_has_place_time_left_subject_phase_requests_and_rate():
    told = "case 7 of 33 | 3:40 left | opt-1.3b at 64, repeat 1 | window 3.2 s | 1,412 done | 9,830 tokens/s"
    assert MEASURING.within(160) == told


def test_no_line_is_longer_and_the_cursor_stays_on_it():
    assert all(len(MEASURING.within(columns)) < columns for columns in range(1, 161))


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


@pytest.mark.parametrize(
    ("left", "elapsed_s", "text"),
    [
        *((TimeLeft(rest_s=s), 0.0, text) for s, text in ((0.0, "0:01"), (0.4, "0:01"), (59.6, "1:00"), (220, "3:40"))),
        *((TimeLeft(20.0, 40.0), s, text) for s, text in ((0.0, "1:00"), (5.0, "0:55"), (20.0, "0:40"))),
        (TimeLeft(20.0, 40.0), 90.0, "0:40+ left, longer than planned"),
        (TimeLeft(140.0), 130.0, "0:10"),
        *((TimeLeft(140.0, more=more), 141.0, "longer than planned") for more in (False, True)),
        (TimeLeft(rest_s=0.4), 2.0, "longer than planned"),
        (TimeLeft(more=True), 0.5, "0:01+"),  # what takes no second is no longer than planned
    ],
)
def test_the_time_left_is_never_nothing_and_falls_until_it_is_used_up(left, elapsed_s, text):
    assert left.text(elapsed_s) == (text if "planned" in text else f"{text} left")


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
    log, now, line = tmp_path / "engine.log", [100.0], LiveLine(Screen())
    monkeypatch.setattr(live_line.time, "monotonic", lambda: now[0])
    assert line.stage(log) == "importing vLLM 0 s"
    now[0] = 100.1
    assert line.stage(log) == ""
    now[0] = 107.0
    log.write_text("Starting to load model /m...")
    assert line.stage(log) == "loading weights 7 s"
    assert line.stage(tmp_path / "other.log") == "importing vLLM 0 s", "another start begins at 0"


def test_a_command_writes_over_one_line_of_a_terminal_and_clears_it():
    screen = Screen()
    line = LiveLine(screen)
    line.begin(PLANNED)
    line.show(MEASURING)
    line.show(None)
    assert screen.getvalue() == f"\r{MEASURING.within(80)}\x1b[K\r\x1b[K"


def test_a_pipe_sees_what_begins_and_none_of_the_line():
    pipe = io.StringIO()
    line = LiveLine(pipe)
    line.begin(PLANNED)
    line.show(MEASURING)
    line.show(None)
    assert pipe.getvalue() == f"slmserve: {PLANNED.within(80)}\n"
