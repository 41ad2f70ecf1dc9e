"""The line that is written over: which fields it has at which width, that it is never longer, what it tells of the time
left, and what a terminal and a pipe get of it."""

import io
import os
import pty
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st
from terminals import Screen, set_columns

from pytest_slmserve.report import live_line
from pytest_slmserve.report.live_line import LOOK_S, LiveLine, Status, TimeLeft
from pytest_slmserve.schema.records import Progress

PLANNED = Status("case 7 of 33", "3:40 left", "opt-1.3b at 64, repeat 1")
MEASURING = PLANNED.measuring(Progress("window", 3.21, 1412, 64, 9830.4))
FIELDS = ["case 7 of 33", "3:40 left", "opt-1.3b at 64, repeat 1", "window 3.2 s", "1,412 done", "9,830 tokens/s"]
IMPORTANT = [3, 1, 0, 2, 5, 4]  # fields, the most important first


@given(st.integers(1, 160))
def test_narrow_line_drops_whole_fields(columns):
    assert MEASURING.within(160) == " | ".join(FIELDS)
    assert PLANNED.measuring(Progress("ramp", 0.1, 0, 1, None)).within(160).endswith("| ramp 0.1 s | 0 done")
    line = MEASURING.within(columns)
    assert len(line) < columns
    shown = [FIELDS.index(field) for field in line.split(" | ") if field in FIELDS]
    assert shown == sorted(shown) and (shown or FIELDS[3].startswith(line))
    for place in set(range(6)) - set(shown):  # it has no room beside those that are more important
        before = [field for field in IMPORTANT[: IMPORTANT.index(place)] if field in shown]
        assert len(" | ".join(FIELDS[field] for field in [*before, place])) >= columns


@pytest.mark.parametrize(("left", "elapsed_s", "text"), [
    *((TimeLeft(rest_s=s), 0.0, text) for s, text in ((0.0, "0:01"), (0.4, "0:01"), (59.6, "1:00"), (220, "3:40"))),
    *((TimeLeft(20.0, 40.0), s, text) for s, text in ((0.0, "1:00"), (5.0, "0:55"), (20.0, "0:40"))),
    (TimeLeft(20.0, 40.0), 90.0, "0:40+ left, longer than planned"),
    (TimeLeft(140.0), 130.0, "0:10"),
    *((TimeLeft(140.0, more=more), 141.0, "longer than planned") for more in (False, True)),
    (TimeLeft(rest_s=0.4), 2.0, "longer than planned"),
    (TimeLeft(more=True), 0.5, "0:01+"),  # what takes no second is no longer than planned
])  # fmt: skip
def test_time_left_is_never_zero(left, elapsed_s, text):
    assert left.text(elapsed_s) == (text if "planned" in text else f"{text} left")
    assert not TimeLeft() and TimeLeft(1) and TimeLeft(rest_s=1) and TimeLeft(more=True)


def test_live_line_fits_terminal_width(monkeypatch, tmp_path):
    for columns, expected in ((40, 40), (160, 160), (0, 80)):
        monkeypatch.setenv("COLUMNS", "400")
        ours, theirs = pty.openpty()
        set_columns(theirs, columns)
        with os.fdopen(theirs, "w") as stream:
            assert live_line.terminal_columns(stream) == expected
        os.close(ours)
        assert live_line.terminal_columns(io.StringIO()) == 80
    log, now, line = tmp_path / "engine.log", [100.0], LiveLine(Screen())
    monkeypatch.setattr(live_line, "time", SimpleNamespace(monotonic=lambda: now[0]))
    told = []
    for moment in (100.0, 100.1, 107.0, 107.0 + LOOK_S / 2, 107.0 + LOOK_S):
        now[0] = moment
        told.append(line.stage(log))
        log.write_text("Starting to load model /m...")
    first, _, later, _, last = told
    assert (told[1], told[3]) == ("", "") and last != "", "that was a moment ago"
    assert first.endswith(" 0 s") and later.endswith(" 7 s") and later.split(" 7")[0] != first.split(" 0")[0]
    assert line.stage(tmp_path / "other.log") == first, "another start begins at 0"
    said = f"\r{MEASURING.within(80)}\x1b[K\r\x1b[K", f"slmserve: {PLANNED.within(80)}\n"
    for stream, wanted in zip((Screen(), io.StringIO()), said):
        line = LiveLine(stream)
        line.show(None)
        line.begin(PLANNED)
        for shown in (MEASURING, None, None):
            line.show(shown)
        assert stream.getvalue() == wanted
    LiveLine(below := Screen(), used=lambda: 85).show(PLANNED)
    assert below.getvalue() == f"\n{PLANNED.within(80)}\x1b[K\x1b[1A\x1b[6G", "back to the place of another writer"
