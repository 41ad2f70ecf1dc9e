"""The table of what was served well enough."""

from __future__ import annotations

from strategies import measurement

from pytest_slmserve.analysis.metrics.window import Slo
from pytest_slmserve.analysis.sweep.curve import Curve, curve_of
from pytest_slmserve.report.loads import goodput_parts, goodput_rows
from pytest_slmserve.report.section import Section, section_text

SLO = Slo(ttft_s=10, e2e_s=0.5)  # concurrency 8 at 1,000 tokens/s take 0.256 s for 32 tokens


def slo_report(curve: Curve, slo: Slo) -> str:
    return section_text(Section("", goodput_parts(goodput_rows(curve, slo), slo)))


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()[:1].isdigit() and "%" not in line]


def test_a_row_for_each_point_and_the_failures_of_those_that_do_not_count():
    made = [measurement(8, 1000.0), measurement(32, 1000.0), measurement(64, 1000.0, failures=3)]
    text = slo_report(curve_of("opt-1.3b", made), SLO)
    assert [(row[0], row[3], row[-1]) for row in rows(text)] == [
        ("8", "100.0", "0"),
        ("32", "0.0", "0"),
        ("64", "-", "3"),
    ]
    assert "at concurrency 8, the smallest load with" not in text
    assert "90 % of the requests are good up to 8 concurrent requests (100 %); 0 % are at 32" in text


def test_a_repeat_with_failures_counts_only_as_dropped():
    made = [measurement(8, 1000.0), measurement(8, 1000.0, repeat=1, failures=2)]
    ((_, requests, *_, dropped),) = rows(slo_report(curve_of("opt-1.3b", made), SLO))
    ((_, alone, *_),) = rows(slo_report(curve_of("opt-1.3b", made[:1]), SLO))
    assert requests == alone and dropped == "2"


def test_of_nothing_there_is_no_table():
    assert slo_report(Curve(subject="opt-1.3b"), SLO) == ""
