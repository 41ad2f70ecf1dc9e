"""A run's points are held against a stored baseline: the cheaper way than a gate, and the weaker one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pytest_slmserve.analysis.comparability import warnings
from pytest_slmserve.analysis.stored import WARNING, against_stored, cells, on_one_side
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.baselines import FOLDER, baseline
from pytest_slmserve.errors import BadUsage
from pytest_slmserve.models import short_name
from pytest_slmserve.records import Measurement
from pytest_slmserve.session import Judged, Session
from pytest_slmserve.store import read

CLAIM = "no-worse-than-the-baseline"


@dataclass
class StoredBaseline:
    """What `--slm-baseline` names: an archive, or a baseline that was kept."""

    session: Session

    @cached_property
    def measurements(self) -> tuple[Measurement, ...]:
        """Raises BadUsage or BadArchive where there is none."""
        named, session = self.session.options.baseline, self.session
        there = read(Path(named)) if Path(named).is_file() else baseline(FOLDER, named)
        session.notes.extend([*there.notes, WARNING])
        return tuple(there.measurements)

    def judge(self, model: str) -> Verdict:
        """Every load of one model that both have; the verdicts on each stand in the report. Measures nothing."""
        there = [m for m in self.measurements if short_name(m.spec.model) == short_name(model)]
        here = [m for curve in self.session.curves() if curve.subject == short_name(model) for m in curve.measurements]
        self._tell(there, here)
        found = against_stored(there, here, self.session.options.gate_margin)
        self.session.judged.extend(Judged(verdict) for verdict in sorted(found, key=lambda v: v.claim))
        return _together(short_name(model), found)

    def _tell(self, there: Sequence[Measurement], here: Sequence[Measurement]) -> None:
        """What a reader has to know of both, each sentence once."""
        both = cells(there).keys() & cells(here).keys()
        pairs = ((cells(there)[cell][0], cells(here)[cell][0]) for cell in both)
        said = [*on_one_side(there, here), *(text for pair in pairs for text in warnings(*pair))]
        self.session.notes.extend(text for text in dict.fromkeys(said) if text not in self.session.notes)


def check_baseline(session: Session) -> None:
    """Raises BadUsage where there is no such baseline: before anything is started."""
    named = session.options.baseline
    if not Path(named).is_file():
        try:
            baseline(FOLDER, named)
        except BadUsage as error:
            raise BadUsage(f"--slm-baseline {named}: {error.problem}, and no such file", error.hint) from None


def _together(model: str, found: Sequence[Verdict]) -> Verdict:
    """Fails where one fails, holds where all hold."""
    states = [verdict.state for verdict in found]
    state = State.FAILS if State.FAILS in states else State.HOLDS if set(states) == {State.HOLDS} else State.UNDECIDED
    why = "; ".join(f"{v.subject}: {v.why}" for v in found if v.state is state)
    return Verdict(CLAIM, model, state, why, n=len(found))
