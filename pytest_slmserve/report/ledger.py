"""The history of releases: results of gates between each two vLLM releases."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_slmserve.analysis.estimates import grouped, percent
from pytest_slmserve.analysis.gate import diagnosis
from pytest_slmserve.analysis.gate.decision import THIS_GATE, Comparison
from pytest_slmserve.analysis.gate.launch_pairs import SIDES, Gated, nothing_counts
from pytest_slmserve.analysis.verdict import State, all_of
from pytest_slmserve.report.gate import (
    LOOKS,
    WORDS,
    compared_releases,
    ends_text,
    margin_text,
    ratio_text,
    times_the_cores,
)
from pytest_slmserve.report.section import Part, Section, Table, renamed
from pytest_slmserve.report.text_table import ABSENT, Column
from pytest_slmserve.schema.records import release

SET_BY_SIDES = {"vllm", "env.PYTHONPATH"}  # facts that differ in every gate of two releases


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """Endpoint of a gate.

    Attributes:
        model: empty after the first row of a gate, like `host`.
        endpoint: name with its concurrency; empty for a gate without pairs, which has this row alone.
        said: the verdict with the slower layer, or why it is not judged.
    """

    model: str
    host: str
    endpoint: str
    compared: Comparison | None
    said: str

    def told(self, text: Callable[[Comparison], str]) -> str:
        return text(self.compared) if self.compared else ABSENT


COLUMNS: tuple[Column[LedgerRow], ...] = (
    Column("model", lambda row: row.model, "left"),
    Column("host", lambda row: row.host, "left", rank=3),
    Column("endpoint", lambda row: row.endpoint, "left"),
    Column("candidate /\nbaseline", lambda row: row.told(ratio_text)),
    Column("95%", lambda row: row.told(ends_text), "left", rank=2),
    Column("margin\n%", lambda row: row.told(margin_text), rank=4),
    Column("verdict", lambda row: row.said, "left"),
)


def ledger_sections(gates: Sequence[Gated]) -> Iterator[Section]:
    """Yield a section for each two compared releases, the oldest first; none if all gates compared the same two."""
    found = dict[tuple[str, ...], list[Gated]]()
    for gated in gates:
        if sides := tuple(compared_releases(gated)):
            found.setdefault(sides, []).append(gated)
    for sides in sorted(found, key=lambda each: [*map(release, each)]) if len(found) > 1 else ():
        rows = [row for gated in found[sides] for row in ledger_rows(gated)]
        outcome = all_of(gated.outcome for gated in found[sides])
        judged = [row.compared for row in rows if row.compared and row.compared.gated]
        ends = [end for each in judged if (end := most_worse(each)) is not None]
        title = f"vLLM {sides[0]} -> {sides[1]}: {WORDS[outcome]}"
        if outcome is State.PASSES and ends:
            title += f", at most {percent(max(ends))} worse (95%) in all that is judged"
        elif outcome is not State.PASSES:
            every = Counter(map(served, found[sides]))
            those = Counter(served(gated) for gated in found[sides] if gated.outcome is outcome)
            some = (f"{what} in {n} of {every[what]} gates" if n < every[what] else what for what, n in those.items())
            title += f" with {' and with '.join(some)}"
        parts: list[Part] = [Table(rows, COLUMNS, caption=title, always=len(COLUMNS))]
        parts.append(f"other recorded settings that differ: {'; '.join(_differences(found[sides])) or 'none'}")
        yield Section(title, parts, LOOKS[outcome], unit="token")  # rows name their own


def _differences(gates: Iterable[Gated]) -> Iterator[str]:
    """Yield what differs between the sides apart from the release, with the models that it concerns if not all."""
    models, told = grouped(gates, served), dict[str, list[str]]()
    for model, same in models.items():
        measured = ([m for gated in same for m in gated.measurements(side)] for side in SIDES)
        for each in diagnosis.fact_differences(*measured):
            if each.field not in SET_BY_SIDES:
                told.setdefault(f"{each.field} {_either(each.baseline)} -> {_either(each.candidate)}", []).append(model)
    for text, those in told.items():
        yield text if len(those) == len(models) else f"{text} with {' and with '.join(those)}"


def _either(values: Iterable[str | None]) -> str:
    return " or ".join(ABSENT if value is None else value for value in values)


def served(gated: Gated) -> str:
    """Return the model, with the kind of its requests if they are not for free text."""
    asked = gated.firsts["baseline"].workload.spec
    special = asked.kind if asked.kind != "generate" else asked.output if asked.response_format else ""
    return ", ".join(filter(None, (gated.model, special)))


def ledger_rows(gated: Gated) -> Iterator[LedgerRow]:
    """Yield a row for each endpoint that is gated, or not judged because the host decides it; one without pairs."""
    first = gated.firsts["baseline"]
    hosts = dict.fromkeys(m.environment.host for m in gated.measurements("baseline") or [first])
    device = first.environment.gpu_name or first.environment.cpu
    model, host = served(gated), ", ".join(filter(None, (device, *hosts)))
    if not gated.pairs:
        nothing = f"{WORDS[gated.outcome]} ({nothing_counts(gated.dropped, gated.lost)})"
        yield LedgerRow(model, host, "", None, nothing)
        return
    each = gated.pairs[0].baseline.at_each_load
    ends = dict(zip((", small load", ", large load"), (f" at {m.load.max_concurrency}" for m in (each[0], each[-1]))))
    slower = {one.name: layer for layer, one in diagnosis.layers(gated.compared)}
    cores = times_the_cores(gated)
    for one in gated.compared:
        name, refused = one.name, gated.refused.get(one.name, "")
        if not one.gated and not refused:
            continue
        for words, at in ends.items():
            name = name.replace(words, at)
        if len(each) == 1 and not name.startswith("s to start"):
            name += ends[", large load"]
        reason = refused.partition(" (")[0]  # without the limit
        said = [WORDS[one.outcome] if one.gated else f"not judged: {reason}"]
        if one.outcome is State.FAILS and slower:  # the share of time with a kernel names the host, and has no row
            said.append(f"slower in: {slower.get(one.name, ' and '.join(slower.values()))}")
        elif one.outcome is State.INCONCLUSIVE and not refused:
            said[0] += f" ({one.why.rpartition(THIS_GATE)[2]})"
        elif one.outcome is State.INCONCLUSIVE and one.gated:
            said[0] += f" ({'seems worse, but ' * one.seems_worse}{reason})"
        if cores and model:
            said.append(f"with {cores}")
        yield LedgerRow(model, host, renamed(name, each[0].workload.unit), one, ", ".join(said))
        model = host = ""


def most_worse(compared: Comparison) -> float | None:
    """Return the share by which the candidate may be worse, by its 95% interval; None if unknown."""
    if not (ratio := compared.ratio):
        return None
    end = ratio.low if compared.better == "higher" else ratio.high
    return None if end is None else (1 / end - 1 if compared.better == "higher" else end - 1)
