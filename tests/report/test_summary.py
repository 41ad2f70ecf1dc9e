from __future__ import annotations

from types import SimpleNamespace

from strategies import law, measurement

from pytest_slmserve.analysis.claims import lookup
from pytest_slmserve.analysis.sweep.curve import curve_of
from pytest_slmserve.report.summary import write_summary


class Terminal:
    """Takes what pytest's terminal reporter is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, bool]]] = []

    def write_line(self, text: str, **markup: bool) -> None:
        self.lines.append((text, markup))


def session(strict: bool = False):
    made = [measurement(c, law(c), repeat=i) for c in (128, 256, 512) for i in range(2)]
    curve = curve_of("opt-1.3b", made)
    rows = [lookup.row_for(name, "opt-1.3b") for name in ("throughput-plateau", "table-1-batch-fits")]
    judged = [SimpleNamespace(verdict=lookup.judge_row(row.claim, curve, row), row=row) for row in rows]
    return SimpleNamespace(
        verdicts=SimpleNamespace(curves=lambda: [curve], judged=judged),
        results=SimpleNamespace(job_points=lambda: (), shared_points=lambda: ()),
        gates=[],
        notes=["the line was torn"],
        reused_cells={"opt-1.3b at 128": 3, "opt-1.3b at 256": 1},
        source="some.jsonl",
        slo=None,
        options=SimpleNamespace(strict=strict, records="some.jsonl"),
    )


def test_the_end_of_a_run_in_colours():
    terminal = Terminal()
    write_summary(terminal, session())
    colours = {" ".join(text.split())[:18]: markup for text, markup in terminal.lines}
    assert colours["holds opt-1.3b pla"] == {"green": True} == colours["fails, as expected"]
    assert colours["opt-1.3b on NVIDIA"] == {}
    assert ("note: the line was torn", {"yellow": True}) in terminal.lines
    cells = "opt-1.3b at 128 (3), opt-1.3b at 256 (1)"
    assert terminal.lines[-1][0] == f"4 measurements were reused from some.jsonl: {cells}"


def test_under_strict_an_expected_failure_is_red():
    terminal = Terminal()
    write_summary(terminal, session(strict=True))
    assert [m for text, m in terminal.lines if text.strip().startswith("FAILS")] == [{"red": True}]
