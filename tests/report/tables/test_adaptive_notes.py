"""What is said of the loads that an adaptive sweep left out."""

from __future__ import annotations

from strategies import law, measurement

from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.report.tables.findings import amount, remark, skip_note
from pytest_slmserve.report.tables.run import sweep_report

GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def swept(rates: dict[int, float]) -> Curve:
    made = [measurement(load, rate * (1 + 0.001 * i), repeat=i) for load, rate in rates.items() for i in range(2)]
    return curve_of("opt-1.3b", made, planned=GRID, adaptive=0.1)


LAWFUL = swept({load: law(load) for load in (1, 128, 256, 1024)})
DENTED = swept({1: 665.0, 512: 42274.0, 1024: 53466.0})  # OPT-125M on an H200


def words(text: str) -> str:
    return " ".join(text.split())


def test_predictions_stand_below_the_table_and_in_the_reason_of_a_skip():
    assert remark(LAWFUL).startswith("not measured, predicted: tokens/s 426 at 2, 817 at 4, 1,510 at 8, 2,")
    assert "told the neighbours of a measured load, the saturation law misses it by at most 0" in remark(LAWFUL)
    assert skip_note(LAWFUL, 512).startswith(
        "not needed: the adaptive sweep found the plateau without it; predicted: 9,1"
    )
    assert remark(LAWFUL) in words(sweep_report(LAWFUL))


def test_where_the_law_does_not_describe_the_curve_there_are_none():
    assert remark(DENTED).startswith("not measured, not needed: 2, 4, 8, 16, 32, 64, 128, 256 in flight; no prediction")
    assert skip_note(DENTED, 256).endswith("the saturation law misses it by at most 17.4 % (at 512)")
    assert "predicted" not in skip_note(DENTED, 256)


def test_a_sweep_that_has_not_ended_says_what_was_next():
    early = swept({1: law(1), 1024: law(1024)})
    assert remark(early) == ""
    assert skip_note(early, 4) == "the adaptive sweep ended early: 256 in flight was next"
    assert amount(early) == "2 points (adaptive sweep, not at its end)"


def test_the_amount_tells_what_kind_of_sweep_it_was():
    assert amount(LAWFUL) == "4 points (adaptive sweep, 7 planned loads not needed)"
    assert amount(curve_of("opt-1.3b", [measurement(1)], planned=[1])) == "1 point"
