"""Verdicts on claims: what was expected, how it came out, the reasons, and what would resolve the inconclusive ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pytest_slmserve.analysis.claims.claim import ClaimRow
from pytest_slmserve.analysis.claims.table import CLAIMS
from pytest_slmserve.analysis.stats.estimates import grouped
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.as_json import facts
from pytest_slmserve.report.findings import Judged
from pytest_slmserve.report.text_table import counted, hanging

Colour = Literal["green", "red", "yellow"]
Outcome = Literal["as expected", "unexpected", "inconclusive"]
EITHER = "either expected: "
PLURALS = {  # of the words for an outcome
    "passes": "pass",
    "fails, as expected": "fail as expected",
    "FAILS": "FAIL",
    "PASSES, UNEXPECTED": "PASS, UNEXPECTED",
    "inconclusive": "inconclusive",
    "fails": "fail",
}
STATES = len("fails, as expected")


def outcome(verdict: Verdict, row: ClaimRow | None, *, strict: bool = False) -> Outcome:
    """Return how a verdict compares with what its row of the claims table expects: that the claim passes, if there is
    no row. If either is expected, each state is as expected. strict: a pass is expected of each claim."""
    expected = "passes" if strict or row is None else row.expected
    if verdict.state is State.INCONCLUSIVE and expected != "either":
        return "inconclusive"
    return "as expected" if expected in (verdict.state.value, "either") else "unexpected"


def verdict_facts(verdict: Verdict, row: ClaimRow | None, *, strict: bool) -> dict[str, Any]:
    """Return a verdict for JSON, with what was expected and how it came out."""
    expected = "passes" if strict or row is None else row.expected
    return {**facts(verdict), "expected": expected, "outcome": outcome(verdict, row, strict=strict)}


def outcome_words(verdict: Verdict, row: ClaimRow | None, *, strict: bool) -> str:
    """Return "passes", "fails, as expected", "fails" if either is expected, "FAILS", "PASSES, UNEXPECTED" or
    "inconclusive"."""
    fails = verdict.state is State.FAILS
    match outcome(verdict, row, strict=strict):
        case "as expected":
            return "fails, as expected" if fails and row and row.expected == "fails" else verdict.state.value
        case "unexpected":
            return "FAILS" if fails else "PASSES, UNEXPECTED"
    return "inconclusive"


def verdict_reason(verdict: Verdict, row: ClaimRow | None, *, strict: bool = False) -> str:
    """Return the reason of a verdict, and if it is unexpected the evidence for what was expected."""
    if outcome(verdict, row, strict=strict) != "unexpected" or row is None or not row.evidence:
        return verdict.why
    expected = "does not know" if row.expected == "either" else f"expects that it {row.expected}"
    return f"{verdict.why}; the claims table {expected}: {row.evidence}"


def by_claim(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    """Return the verdicts of each claim, in the order of the claims table."""
    order = {claim.name: number for number, claim in enumerate(CLAIMS)}
    pairs = sorted(judged, key=lambda pair: order.get(pair[0].claim, len(order)))
    return grouped(pairs, lambda pair: pair[0].claim)


def verdict_lines(judged: Sequence[Judged], *, strict: bool = False) -> Iterator[tuple[str, Colour | None]]:
    """Yield a line for each verdict below the statement of its claim, and how many of each kind there are; each with
    its colour."""
    colours: dict[Outcome, Colour] = {"as expected": "green", "unexpected": "red", "inconclusive": "yellow"}
    width = max((len(v.subject) for v, _ in judged), default=0)
    for claim, pairs in by_claim(judged).items():
        statement = next((c.statement for c in CLAIMS if c.name == claim), "")
        yield f"{claim}: {statement}".rstrip(": "), None
        for verdict, row in pairs:
            words, why = (tell(verdict, row, strict=strict) for tell in (outcome_words, verdict_reason))
            line = hanging(f"  {words:<{STATES}}  {verdict.subject:<{width}}  {why}", 6 + STATES + width)
            yield line, colours[outcome(verdict, row, strict=strict)]
    counts = f"{counted(len(judged), 'verdict')}: {tally(by_outcome(judged, strict=strict))}"
    yield counts if judged else "no claim was judged", None


def by_outcome(judged: Iterable[Judged], *, strict: bool = False) -> dict[str, list[Verdict]]:
    """Return the verdicts by the words for their outcome, each in one list. Those of which either is expected have
    words that begin with EITHER."""
    kinds = (*PLURALS.values(), *(f"{EITHER}{PLURALS[state.value]}" for state in State))
    found: dict[str, list[Verdict]] = {kind: [] for kind in kinds}
    for verdict, row in judged:
        words = PLURALS[outcome_words(verdict, row, strict=strict)]
        either = row is not None and row.expected == "either" and not strict
        found[f"{EITHER}{words}" if either else words].append(verdict)
    return found


def tally(kinds: Mapping[str, Sequence[Verdict]]) -> str:
    """Return how many verdicts of each kind there are: "16 pass, 5 fail as expected; either expected: 2 fail"."""
    counts = {words: f"{len(each)} {words.removeprefix(EITHER)}" for words, each in kinds.items() if each}
    expected = ", ".join(text for words, text in counts.items() if not words.startswith(EITHER))
    either = ", ".join(text for words, text in counts.items() if words.startswith(EITHER))
    return "; ".join(filter(None, (expected, either and f"{EITHER}{either}")))


def unexpected(kinds: Mapping[str, Sequence[Verdict]]) -> list[str]:
    """Return a sentence on each verdict that is not as expected."""
    words = {"FAIL": "FAILS", "PASS, UNEXPECTED": "PASSES, UNEXPECTED"}
    return [f"{word} {v.claim}, {v.subject}: {v.why}" for kind, word in words.items() for v in kinds[kind]]


def inconclusive(kinds: Mapping[str, Sequence[Verdict]], curves: Sequence[Curve]) -> Iterator[str]:
    """Yield a sentence for each reason, or for what would resolve it, with its claims: "throughput-plateau (opt-125m;
    opt-1.3b), energy-per-token (5 verdicts)"."""
    for what, verdicts in grouped(kinds["inconclusive"], lambda verdict: remedy(verdict, curves)).items():
        subjects = grouped(verdicts, lambda verdict: verdict.claim)
        each = (
            f"{claim} ({f'{len(of)} verdicts' if len(of) > 2 else '; '.join(v.subject for v in of)})"
            for claim, of in subjects.items()
        )
        yield f"inconclusive: {what}: {', '.join(each)}"


def remedy(verdict: Verdict, curves: Sequence[Curve]) -> str:
    """Return what would decide an inconclusive verdict, or the reason if no measurement of the same kind would."""
    repeats = max((len(point.repeats) for curve in curves for point in curve.points), default=1)
    mode = next((f"{curve.environment.mode} " for curve in curves if curve.environment), "")
    if verdict.remedy:
        return verdict.remedy
    if verdict.low is not None:
        return f"{mode}--slm-resume --slm-repeats {2 * repeats} or a longer --slm-window may decide"
    if verdict.why.startswith(("not measured at", "invalid at")):
        return f"{mode}--slm-resume measures what is missing or invalid"
    if "one repeat" in verdict.why:
        return f"{mode}--slm-resume --slm-repeats 2 tells the noise"
    return verdict.why
