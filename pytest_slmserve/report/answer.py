"""Five lines on a run: answer, reason, next command, basis, and place of the evidence."""

import math
import re
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter

from pytest_slmserve.analysis.points import JobPoint, Point, engines, point_differences
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.options.table import OPTS
from pytest_slmserve.report import gate
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.section import FiveLines
from pytest_slmserve.report.text_table import counted, figure
from pytest_slmserve.report.verdicts import SURPRISES, by_outcome, inconclusive, tally, unexpected
from pytest_slmserve.schema.records import SIMULATED

VERDICT = re.compile(r"<(?:fails|inconclusive): (.*?)(?:>|$)")  # in the message of an assertion
ERROR = re.compile(r"(\w+): ")
OPTION = re.compile(r"(--slm-[a-z-]+)(?: (full|\d+)\b)?")
WITHOUT_VALUE = {opt.flag for opt in OPTS if opt.is_flag or opt.bare}
OPEN = "inconclusive"


def answer_of(found: Findings) -> FiveLines | None:
    """Return the five lines of the gates or of the rest, whichever is worse; None if there is neither.

    A gate among other tests has too few pairs to judge speed, so the rest is the answer.
    """
    rest = rest_lines(found)
    if not found.gates:
        return rest
    worst = gate.worst_of(gate.answering(found.gates))
    is_worse = gate.WORST.index(state_of(found) or State.PASSES) < gate.WORST.index(worst.outcome)
    if rest and (is_worse or gate.has_few_pairs(worst)):
        return rest
    return gate.five_lines(found.gates, found)


def state_of(found: Findings) -> State | None:
    """Return the worst outcome of claims and tests, or None if nothing was judged.

    A regression in a history of releases is inconclusive, because they were measured at different times.
    """
    outcomes = {each.outcome for each in found.outcomes}
    if found.failed or "unexpected" in outcomes:
        return State.FAILS
    if found.inconclusive or OPEN in outcomes or found.regression:
        return State.INCONCLUSIVE
    return State.PASSES if found.judged else None


def rest_lines(found: Findings) -> FiveLines | None:
    """Return the five lines of a run without its gates, or None if there is nothing else."""
    points: list[Point] = [*chain.from_iterable(curve.points for curve in found.curves), *found.shared, *found.jobs]
    state, kinds = state_of(found), by_outcome(found.outcomes)
    if state is None and not points:
        return None
    best = measured_text(found)
    judged = f"claims: {tally(kinds)}" if found.judged else ""
    if state is State.FAILS:
        first = next(iter([*unexpected(kinds), *map(failure_text, sorted(found.failed, key=is_error))])).removeprefix(
            "failed: "
        )
        surprises = sum(len(kinds[words]) for words in SURPRISES)
        count = max(len(found.failed), surprises)
        broken = "unexpected" not in {each.outcome for each in found.outcomes} and all(map(is_error, found.failed))
        word = "ERROR" if broken else "FAILS"  # an error is not a verdict
        answer = f"{word}: {first}{f'; the first of {count} failures' if count > 1 else ''}"
    elif state is State.INCONCLUSIVE:
        regressed = [found.regression[0]] if found.regression else []
        first = next(iter([*map(failure_text, found.inconclusive), *regressed, *inconclusive(kinds, found.curves)]))
        answer = f"INCONCLUSIVE: {first.replace(': inconclusive, ', ': ')}"
    else:
        answer = f"{'PASSES' if state else 'MEASURED'}: {best or 'all is as expected'}"
    why = "; ".join(filter(None, (judged, best if state in (State.FAILS, State.INCONCLUSIVE) else "")))
    look = gate.LOOKS[state] if state else "open"
    return gate.until_now(
        FiveLines(answer, why, next_command(found, state), trust_text(found, points), found.where, look), found
    )


def is_error(failed: str) -> bool:
    """Return whether a test failed with an error other than an assertion or `pytest.fail`."""
    kind = ERROR.match(failed.partition(": ")[2])
    return kind is not None and kind[1] not in ("AssertionError", "Failed")


def failure_text(failed: str) -> str:
    name, _, message = failed.partition(": ")
    verdict = VERDICT.search(message)
    return f"{name.rpartition('::')[2]}: {verdict[1] if verdict else message}"


def measured_text(found: Findings) -> str:
    """Return the highest measured throughput in a sentence; empty if none is known."""
    series: list[tuple[str, Sequence[Point]]] = [(label, curve.valid) for curve, label in found.labelled if curve.valid]
    series = series or [(engines(p.models), [p]) for p in found.shared if p.valid]
    series = series or [(p.model, [p]) for p in found.jobs if p.valid]
    known = [(label, point, rate, of) for label, of in series for point in of if (rate := point.output_tokens_per_s)]
    if not known:
        return ""
    label, point, rate, of = max(known, key=itemgetter(2))
    load = f"at concurrency {point.concurrency}"
    if isinstance(point, JobPoint):
        load = f"for {point.requests:,} requests"
    seen = point_differences(of).mean(of.index(point)).mapped(math.exp)
    sure = "" if seen.low is None else f" (95%: {figure(seen.low)} to {figure(seen.high)})"
    several = f", the most of {counted(len(known), 'point')}" if len(known) > 1 else ""
    return f"{label} reaches {figure(rate)} {found.unit}s/s{sure} {load}{several}"


def next_command(found: Findings, state: State | None) -> str:
    """Return the command that repeats a failure, resumes what is inconclusive, or uses a pass."""
    if state is State.INCONCLUSIVE and not found.inconclusive and found.regression:
        return found.regression[1] or found.shown_again
    if state is State.INCONCLUSIVE and found.command:
        first = next(inconclusive(by_outcome(found.outcomes), found.curves), "")  # names options that resolve it
        named = [(name, value) for name, value in OPTION.findall(first) if value or name in WITHOUT_VALUE]
        more = {name: f"{name}={value}" if value else name for name, value in named}
        more = more or {"--slm-resume": "--slm-resume"}
        if not found.archives and len(more) > 1:  # a simulated run keeps nothing that could be resumed
            more.pop("--slm-resume", None)
        return gate.with_options(found.command, " ".join(more.values()))
    if state is not State.FAILS and "--slm-simulate" in found.command:
        return found.command.replace("--slm-simulate", "--slm-gpu")
    if state is not State.FAILS and found.curves and found.archives:
        return f"{found.shown_again.replace(' report ', ' compare ', 1)} --save"
    if state is State.FAILS and found.command:
        return f"{found.command} -v"
    return found.shown_again or "rerun with -v to see all tables"


def trust_text(found: Findings, points: Sequence[Point]) -> str:
    """Return the numbers of points, repeats, hosts and disturbed points."""
    used = [m for point in points for group in point.used for m in group]
    if not used:
        return "" if points else "nothing was measured for it"
    simulated = any(m.environment.platform == "simulated" for m in used)
    repeats = sorted({len(point.repeats) for point in points})
    each = " to ".join(map(str, dict.fromkeys([repeats[0], repeats[-1]])))
    made = f"{counted(len(points), 'point')} of {each} repeat{'s' * (repeats[-1] != 1)} each"
    hosts = counted(len({m.environment.host for m in used}), "host")
    disturbed = sum(bool(point.noise or point.degraded or not point.valid or point.left_out) for point in points)
    texts = [*([SIMULATED] if simulated else []), f"{made}, on {hosts}", f"{disturbed} of them disturbed"]
    return "; ".join(texts)
