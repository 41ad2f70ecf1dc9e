"""Write the verdicts of the committed archives into benchmarks/baselines/CLAIMS.md.

    python studies/claims_today.py

Each claim of each model has the verdict of the first archive of `ARCHIVES` that decides it, else of the first that has
it, and the archives that say otherwise. The value, with its 95% interval, is held against the bound.
"""

from __future__ import annotations

from common import BASELINES

from pytest_slmserve.analysis.claims.table import CLAIMS
from pytest_slmserve.analysis.estimates import Interval
from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.archive.store import read
from pytest_slmserve.commands.report import judged_again
from pytest_slmserve.report.text_table import between, figure

PAGE = BASELINES / "CLAIMS.md"
TOP = """# Verdicts of the committed results files

For each [claim](../../docs/claims.md), this table has the verdict on an H200 with vLLM 0.26.0. A name such as
`staggered` is the results file `h200-vllm-0.26.0-staggered.jsonl.xz` in this folder. `python studies/claims_today.py`
writes this page.
"""
HEAD = (
    "| claim | evidence before this run | threshold | verdict, value and 95% interval, by model and results file |",
    "|---|---|---:|---|",
)
ARCHIVES = (
    "staggered",
    "figure-1",
    "burst",
    "sensors",
    "decode",
    "replicas",
    "replicas-opt-125m",
    "replicas-opt-2.7b",
    "replicas-burst",
    "jobs",
    "batching",
    "core-opt-2.7b",
    "several-gpus",
)


def verdicts() -> dict[str, dict[str, list[tuple[Verdict, str]]]]:
    """Verdicts and their archives by claim and model, those that decide before the others."""
    found: dict[str, dict[str, list[tuple[Verdict, str]]]] = {}
    for name in ARCHIVES:
        for verdict, _ in judged_again(read(BASELINES / f"h200-vllm-0.26.0-{name}.jsonl.xz")).judged:
            models = found.setdefault(verdict.claim, {})
            models.setdefault(verdict.subject.split(",")[0], []).append((verdict, name))
    for models in found.values():
        for each in models.values():
            each.sort(key=lambda one: one[0].state is State.INCONCLUSIVE)
    return found


def cell(verdict: Verdict, archive: str, *others: tuple[Verdict, str]) -> str:
    value = "" if verdict.value is None else f" {figure(verdict.value)}"
    seen = Interval(verdict.value or 0.0, verdict.low, verdict.high)
    interval = between(seen) if verdict.low is not None else ""
    source = f", `{archive}`" if verdict.records else ""
    differ = {f"{other.state.value} in `{name}`": None for other, name in others if other.state is not verdict.state}
    otherwise = f" ({', '.join(differ)})" if differ else ""
    return f"{verdict.subject.split(',')[0]}: {verdict.state.value}{value}{interval}{source}{otherwise}"


def page() -> str:
    """Return the page, with a row for each claim that an archive judges."""
    found = verdicts()
    rows = [
        f"| `{claim.name}` | {claim.evidence} | "
        f"{figure(bound) if (bound := told[0][0][0].threshold) is not None else '-'} | "
        f"{'; '.join(cell(*first, *rest) for first, *rest in told)} |"
        for claim in CLAIMS.values()
        if (told := list(found.get(claim.name, {}).values()))
    ]
    return "\n".join([TOP, *HEAD, *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
