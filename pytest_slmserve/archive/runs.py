"""Runs of an archive: which measurement belongs to which, and which runs are read as one.

A run has an id. A run that resumes goes on with all that the archive held. Any other run stands for itself: where it
measured a case that an earlier one measured, its repeats are not repeats of the earlier ones, for something may have
been changed between them on purpose.

Archives of older releases have no ids, and do not say what resumed what. Their sessions may be one run that went on, or
workers of one run, so they are read as one, and a note says it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from pytest_slmserve.analysis.grouping import grouped
from pytest_slmserve.analysis.stored.comparability import moment
from pytest_slmserve.archive.store import Contents
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import short_hash

ID_DIGITS = 8
LEFT_OUT = (
    "several runs measured the same cases, and only the last run counts: `report --list` names the runs, --run all "
    "pools them"
)
POOLED = (
    "several runs measured the same cases and are pooled: this older archive does not tell which resumed; "
    "`report --list` names them, --run ID separates"
)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One run of an archive. id: its own, or made of its start, where `known` says that it has none. resumes: it went
    on with all that was in the archive before it."""

    id: str
    started: str
    pytest_slmserve: str | None
    known: bool
    resumes: bool
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True, slots=True)
class RunChoice:
    """Runs that are wanted. run: an id or its beginning, "last", "all"; "": of each case the last run that measured it.
    since: only what was measured from then on, as ISO 8601; "": all."""

    run: str = ""
    since: str = ""


def runs_of(contents: Contents) -> tuple[RecordedRun, ...]:
    """Runs in the order written, also those that measured nothing; what stands before all is one without a start."""
    orphans = [RecordedRun(_made_id(""), "", None, False, False, ())] if -1 in contents.written_by else []
    found = {run.id: run for run in orphans}
    ids = {-1: _made_id("")}
    for index, session in enumerate(contents.sessions):
        ids[index] = session.id or _made_id(session.started)
        made = RecordedRun(ids[index], session.started, session.pytest_slmserve, bool(session.id), session.resumes, ())
        found.setdefault(made.id, made)
    measured = grouped(zip(contents.measurements, contents.written_by, strict=True), lambda pair: ids[pair[1]])
    return tuple(replace(run, measurements=tuple(m for m, _ in measured.get(run.id, ()))) for run in found.values())


def _made_id(started: str) -> str:
    return short_hash([started])[:ID_DIGITS]


def chosen(contents: Contents, wanted: RunChoice) -> Contents:
    """The part of an archive that is wanted, with a note where runs of the same cases were left out, or pooled. Raises
    BadUsage for a run that it does not have, or a time that is none."""
    runs = runs_of(contents)
    notes: list[str] = []
    match wanted.run:
        case "":
            kept, notes = _of_each_case(_continued(runs))
        case "all":
            kept = list(contents.measurements)
        case name:
            last = runs.index(run_named(runs, name)) if runs else 0
            first = 0 if runs and runs[last].resumes else last  # it goes on with all before it
            kept = [m for run in runs[first : last + 1] for m in run.measurements]
    if wanted.since:
        begin = _moment(wanted.since)
        kept = [m for m in kept if _moment(m.measured_at) >= begin]
    ids = set(map(id, kept))
    pairs = [pair for pair in zip(contents.measurements, contents.written_by) if id(pair[0]) in ids]
    return replace(
        contents,
        measurements=tuple(m for m, _ in pairs),
        written_by=tuple(index for _, index in pairs),
        notes=(*contents.notes, *notes),
    )


def run_named(runs: Sequence[RecordedRun], name: str) -> RecordedRun:
    """The run whose id begins so; "last" is the last that measured or resumed something. Raises BadUsage if not one."""
    if name == "last":
        return next((run for run in reversed(runs) if run.measurements or run.resumes), runs[-1])
    found = [run for run in runs if run.id.startswith(name)]
    if len(found) != 1:
        problem = f"--run {name}: {len(found)} runs have ids that begin so" if found else f"there is no run {name}"
        raise BadUsage(problem, f"one of {', '.join(run.id for run in runs)}" if runs else "an archive with runs")
    return found[0]


def _continued(runs: Sequence[RecordedRun]) -> list[list[RecordedRun]]:
    """Runs that are read as one: one that resumes with all before it, and neighbours of which nothing is known."""
    groups: list[list[RecordedRun]] = []
    for run in runs:
        if run.resumes:
            groups = [[*(each for group in groups for each in group), run]]
        elif groups and not run.known and not groups[-1][-1].known:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _of_each_case(groups: Sequence[Sequence[RecordedRun]]) -> tuple[list[Measurement], list[str]]:
    """Of each case the measurements of the last group that has it, and notes. A gate is a case of its own."""
    measured = [(number, run, m) for number, group in enumerate(groups) for run in group for m in run.measurements]
    last: dict[str, int] = {}
    first: dict[str, str] = {}  # run of the group that counts
    pooled = False
    for number, run, m in measured:
        if m.paired is None:
            if last.get(m.key) != number:
                last[m.key], first[m.key] = number, run.id
            pooled |= not run.known and first[m.key] != run.id
    kept = [m for number, _, m in measured if m.paired is not None or last[m.key] == number]
    notes = [LEFT_OUT] if len(kept) < len(measured) else []
    return kept, notes + ([POOLED] if pooled else [])


def _moment(text: str) -> datetime:
    try:
        return moment(text)
    except ValueError:
        raise BadUsage(f"{text!r} is no date", "--since 2026-01-31, or 2026-01-31T12:00") from None
