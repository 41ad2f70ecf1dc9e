"""Compare a run with a stored baseline: cheaper than a gate, and weaker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_slmserve.analysis.compare.changes import against_stored, of_model
from pytest_slmserve.analysis.verdict import Verdict, all_of
from pytest_slmserve.archive.baselines import FOLDER, baseline
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.models import short_name
from pytest_slmserve.schema.records import Measurement

CLAIM = "no-worse-than-the-baseline"
WARNING = (
    "a stored baseline was measured at another time: drift of the machine, noise between hosts and launches, and the "
    "order of measuring cannot be told from a change of the software. What matters is decided by measuring both sides "
    "in turns: --slm-gate"
)


@dataclass
class StoredBaseline:
    """The archive or the stored baseline that `--slm-baseline` names. notes: what a reader has to know of it."""

    session: Session
    measurements: Sequence[Measurement]
    notes: Sequence[str]

    @classmethod
    def from_session(cls, session: Session) -> StoredBaseline:
        """Return the baseline, before anything is started. Raises BadUsage if there is none, BadArchive if it cannot be
        read."""
        named = session.options.baseline
        try:
            there = baseline(FOLDER, named)
        except BadUsage as error:
            raise BadUsage(f"--slm-baseline {named}: {error.problem}, and no such file", error.hint) from None
        return cls(session, there.measurements, (*there.notes, WARNING))

    def judge(self, model: str) -> Verdict:
        """Return the verdict on all cases of one model that both sides have, and add the verdict on each to the report.
        It fails if one of them fails, and passes if all pass. Nothing is measured."""
        alone = (m for curve in self.session.verdicts.curves() for m in curve.measurements)
        shared = (m for m in self.session.results.measurements() if not m.alone)
        here = of_model((*alone, *shared), short_name(model))
        there = of_model(self.measurements, short_name(model))
        found, notes = against_stored(there, here, self.session.options.gate_margin)
        self.session.note(*self.notes, *notes)
        self.session.verdicts.judged.extend((verdict, None) for verdict in sorted(found, key=lambda v: v.claim))
        state = all_of(verdict.state for verdict in found)
        why = "; ".join(f"{v.subject}: {v.why}" for v in found if v.state is state)
        return Verdict(CLAIM, short_name(model), state, why, n=len(found))
