"""A run's points are held against a stored baseline: the cheaper way than a gate, and the weaker one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_slmserve.analysis.compare.baseline import WARNING, against_stored, cells, of_model, on_one_side
from pytest_slmserve.analysis.compare.comparability import warnings
from pytest_slmserve.analysis.verdict import Verdict, all_of
from pytest_slmserve.archive.baselines import FOLDER, baseline
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.catalog import short_name
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Measurement

CLAIM = "no-worse-than-the-baseline"


@dataclass
class StoredBaseline:
    """The archive or the stored baseline that `--slm-baseline` names. notes: what a reader has to know of it."""

    session: Session
    measurements: Sequence[Measurement]
    notes: Sequence[str]

    @classmethod
    def from_session(cls, session: Session) -> StoredBaseline:
        """Raises BadUsage where there is none, BadArchive where it cannot be read: before anything is started."""
        named = session.options.baseline
        try:
            there = baseline(FOLDER, named)
        except BadUsage as error:
            raise BadUsage(f"--slm-baseline {named}: {error.problem}, and no such file", error.hint) from None
        return cls(session, there.measurements, (*there.notes, WARNING))

    def judge(self, model: str) -> Verdict:
        """The verdict on every load of one model that both sides have; the verdicts on each stand in the report.
        Measures nothing."""
        alone = (m for curve in self.session.verdicts.curves() for m in curve.measurements)
        shared = (m for m in self.session.results.measurements() if not m.alone)
        there = of_model(self.measurements, short_name(model))
        here = of_model((*alone, *shared), short_name(model))
        self._tell(there, here)
        found = against_stored(there, here, self.session.options.gate_margin)
        self.session.verdicts.judged.extend((verdict, None) for verdict in sorted(found, key=lambda v: v.claim))
        return _together(short_name(model), found)

    def _tell(self, there: Sequence[Measurement], here: Sequence[Measurement]) -> None:
        """Adds notes to the session: on the baseline, on cells that only one side has, and warnings on cells of both.
        Each sentence appears once."""
        before, now = cells(there), cells(here)
        pairs = ((before[cell][0], now[cell][0]) for cell in before if cell in now)
        self.session.note(*self.notes, *on_one_side(there, here), *(text for pair in pairs for text in warnings(*pair)))


def _together(model: str, found: Sequence[Verdict]) -> Verdict:
    """Fails where one fails, holds where all hold."""
    state = all_of(verdict.state for verdict in found)
    why = "; ".join(f"{v.subject}: {v.why}" for v in found if v.state is state)
    return Verdict(CLAIM, model, state, why, n=len(found))
