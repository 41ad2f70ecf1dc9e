"""Verdicts on claims: expected result, outcome, reason and remedy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_slmserve.analysis.claims.evidence import Expected
from pytest_slmserve.analysis.claims.table import CLAIMS, Judged
from pytest_slmserve.analysis.estimates import grouped
from pytest_slmserve.analysis.sweep.curve import Curve
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.section import Look
from pytest_slmserve.report.text_table import counted, hanging, layout

Colour = Literal["green", "red", "yellow"]
COLOURS: dict[Look, Colour] = {"good": "green", "bad": "red", "open": "yellow"}
Outcome = Literal["as expected", "unexpected", "inconclusive"]
OUTCOMES: dict[Outcome, Colour] = {"as expected": "green", "unexpected": "red", "inconclusive": "yellow"}
INFORMATIONAL = "informational: "  # in front of the state of a claim without an expected result
WORDS = {State.PASSES: "passed", State.FAILS: "failed", State.INCONCLUSIVE: "inconclusive"}
SURPRISES = ("failed", "unexpected pass")  # words of outcomes that fail a run
KINDS = (
    "passed",
    "expected failure",
    *SURPRISES,
    "inconclusive",
    *(f"{INFORMATIONAL}{word}" for word in WORDS.values()),
)


@dataclass(frozen=True, slots=True)
class ClaimOutcome:
    """Verdict with its expected result.

    Attributes:
        words: one of KINDS. Only SURPRISES fail a run.
        why: the reason; for an unexpected verdict also the evidence for the expected one.
    """

    verdict: Verdict
    expected: Expected
    outcome: Outcome
    words: str
    why: str


def claim_outcomes(judged: Iterable[Judged], *, strict: bool = False) -> list[ClaimOutcome]:
    """Return the verdicts with the results that the claims table expects.

    Without a row, or if `strict`, a claim is expected to pass. The expectation "either" accepts each state.
    """
    found = []
    for verdict, row in judged:
        expected: Expected = "passes" if strict or row is None else row.expected
        outcome: Outcome = "as expected"
        words, why = WORDS[verdict.state], verdict.why
        if expected != "either" and verdict.state is State.INCONCLUSIVE:
            outcome = "inconclusive"
        elif expected not in ("either", verdict.state.value):
            outcome, words = "unexpected", SURPRISES[verdict.state is State.PASSES]
            if row is not None and row.evidence:
                wanted = {"either": "either result", "passes": "a pass", "fails": "a failure"}[row.expected]
                why += f"; the claims table expects {wanted}: {row.evidence}"
        elif expected == "fails":
            words = "expected failure"
        elif expected == "either":
            words = f"{INFORMATIONAL}{words}"
        found.append(ClaimOutcome(verdict, expected, outcome, words, why))
    return found


def by_claim(outcomes: Iterable[ClaimOutcome]) -> dict[str, list[ClaimOutcome]]:
    """Return the verdicts by claim, in the order of the claims table."""
    order = {name: number for number, name in enumerate(CLAIMS)}
    found = sorted(outcomes, key=lambda each: order.get(each.verdict.claim, len(order)))
    return grouped(found, lambda each: each.verdict.claim)


def verdict_lines(outcomes: Sequence[ClaimOutcome]) -> Iterator[tuple[str, Colour | None]]:
    """Yield colored lines: the verdicts below their claims, then the tally."""
    longest = max((len(each.verdict.subject) for each in outcomes), default=0)
    width = min(longest, layout().width // 3)  # so that a long subject leaves room for its reason
    states = max((len(each.words) for each in outcomes), default=0)
    for claim, group in by_claim(outcomes).items():
        yield f"{claim}: {CLAIMS[claim].statement}" if claim in CLAIMS else claim, None
        for each in group:
            line = f"  {each.words:<{states}}  {each.verdict.subject:<{width}}  {each.why}"
            yield hanging(line, 6 + states + width), OUTCOMES[each.outcome]
    counts = f"{counted(len(outcomes), 'verdict')}: {tally(by_outcome(outcomes))}"
    yield counts if outcomes else "no claim was judged", None


def by_outcome(outcomes: Iterable[ClaimOutcome]) -> dict[str, list[Verdict]]:
    found: dict[str, list[Verdict]] = {kind: [] for kind in KINDS}
    for each in outcomes:
        found[each.words].append(each.verdict)
    return found


def plural(words: str, count: int) -> str:
    """Return the words for one or several outcomes: "unexpected passes"."""
    ending = {"expected failure": "s", "unexpected pass": "es"}.get(words, "")
    return f"{words}{ending if count > 1 else ''}"


def tally(kinds: Mapping[str, Sequence[Verdict]]) -> str:
    """Return the number of verdicts by kind: "16 passed, 5 expected failures; informational: 2 failed"."""
    counts = {kind: plural(kind.removeprefix(INFORMATIONAL), len(each)) for kind, each in kinds.items() if each}
    told = {kind: f"{len(kinds[kind])} {words}" for kind, words in counts.items()}
    expected = ", ".join(text for kind, text in told.items() if not kind.startswith(INFORMATIONAL))
    informational = ", ".join(text for kind, text in told.items() if kind.startswith(INFORMATIONAL))
    return "; ".join(filter(None, (expected, informational and f"{INFORMATIONAL}{informational}")))


def unexpected(kinds: Mapping[str, Sequence[Verdict]]) -> list[str]:
    return [f"{word}: {v.claim}, {v.subject}: {v.why}" for word in SURPRISES for v in kinds[word]]


def inconclusive(kinds: Mapping[str, Sequence[Verdict]], curves: Sequence[Curve]) -> Iterator[str]:
    """Yield a sentence for each remedy, with the claims first because a narrow terminal cuts the end.

    For example "throughput-plateau (opt-125m), energy-per-token (5 verdicts): inconclusive, ...".
    """
    for what, verdicts in grouped(kinds["inconclusive"], lambda verdict: remedy(verdict, curves)).items():
        subjects = grouped(verdicts, lambda verdict: verdict.claim)
        each = (
            f"{claim} ({f'{len(of)} verdicts' if len(of) > 2 else '; '.join(v.subject for v in of)})"
            for claim, of in subjects.items()
        )
        yield f"{', '.join(each)}: inconclusive, {what}"


def remedy(verdict: Verdict, curves: Sequence[Curve]) -> str:
    """Return how to resolve an inconclusive verdict, or its reason if repeats would not help."""
    repeats = max((len(point.repeats) for curve in curves for point in curve.points), default=1)
    mode = next((f"{curve.environment.mode} " for curve in curves if curve.environment), "")
    if verdict.remedy:
        return verdict.remedy
    if verdict.low is not None:
        return f"{mode}--slm-resume --slm-repeats {2 * repeats} or a longer --slm-window may decide"
    if verdict.why.startswith(("not measured at", "invalid at")):
        return f"{mode}--slm-resume measures what is missing or invalid"
    if "one repeat" in verdict.why:
        return f"{mode}--slm-resume --slm-repeats 2 measures the noise"
    return verdict.why
