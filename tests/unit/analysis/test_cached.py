from __future__ import annotations

from dataclasses import replace

from strategies import planted_run

from pytest_slmserve.analysis.estimates import once
from pytest_slmserve.analysis.metrics.window import window_trace
from pytest_slmserve.schema.records import Run

asked: list[Run] = []


@once
def steps(run: Run) -> int:
    """How many there were."""
    asked.append(run)
    return len(run.steps)


@once
def nothing(run: Run) -> None:
    asked.append(run)


def test_a_quantity_of_a_run_is_computed_once():
    asked.clear()
    run = planted_run(4, 100.0)
    assert steps(run) == steps(run) == len(run.steps)
    assert nothing(run) is nothing(run) is None, "that there is nothing is an answer too"
    assert asked == [run, run]
    assert steps.__doc__ == "How many there were."


def test_another_run_has_its_own():
    asked.clear()
    run = planted_run(4, 100.0)
    assert steps(run) > 0
    none = replace(run, steps=replace(run.steps, **dict.fromkeys(run.steps.__slots__, ())))
    assert steps(none) == 0 and len(asked) == 2


def test_what_is_kept_makes_no_other_run():
    run = planted_run(4, 100.0)
    assert window_trace(run) is window_trace(run)
    assert run.derived and run == planted_run(4, 100.0) and "derived" not in repr(run)
