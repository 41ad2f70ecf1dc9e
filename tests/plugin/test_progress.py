"""The line that shows how far a run is: on a terminal only, and gone when the point has ended."""

from __future__ import annotations

from pytest_slmserve.plugin.progress import progress_line
from pytest_slmserve.schema.records import Progress


def test_it_says_item_point_phase_requests_rate_and_time_left():
    progress = Progress("window", 3.21, 1412, 64, 9830.4)
    line = progress_line(7, 33, "opt-1.3b at 64, repeat 1", progress, 220.0)
    assert line == "item 7 of 33 | 3:40 left | opt-1.3b at 64, repeat 1 | window 3.2 s | 1,412 done | 9,830 tokens/s"


def test_without_steps_there_is_no_rate():
    assert progress_line(1, 1, "x", Progress("ramp", 0.1, 0, 1, None), 1.0).endswith("| 0 done | - tokens/s")


def test_a_pipe_sees_none_of_it(sweep):
    assert "\x1b" not in sweep("--color=no").stdout.str()


def test_a_terminal_sees_each_repeat_below_pytests_line_and_then_a_clean_one(sweep):
    text = sweep("--color=yes").stdout.str()
    for number, batch in enumerate((1, 16, 64, 128, 256), start=1):
        assert f"item {number} of 6 | 0:00 left | opt-125m at {batch}, repeat 1 | over" in text
    last = text.rindex("item 5 of 6")
    assert "\n\x1b[K\x1b[1A" in text[last:]
