"""The ledger has a section for each two releases, the oldest first, with every endpoint that was judged and why others
were not."""

import re
from dataclasses import replace

import pytest
from launches import launch_of_both, pair_of_launches, pairs
from planted import gated
from sections import tables_of
from strategies import sensed

from pytest_slmserve.analysis.verdict import State, Verdict
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.gate import five_lines, told_of
from pytest_slmserve.report.ledger import ledger_sections
from pytest_slmserve.report.section import section_markdown
from pytest_slmserve.report.text_table import figure


def between(baseline, candidate, measured):
    sides = {"baseline": baseline, "candidate": candidate}
    return gated([replace(m, environment=replace(m.environment, vllm=sides[m.paired.side])) for m in measured])


def rows(section):
    """By endpoint: the model, if it stands there, the ratio and the verdict."""
    (table,) = tables_of(section.parts)
    cells = (dict(zip(table.cells.heads, row)) for row in table.cells.rows)
    return {row["endpoint"]: (row["model"], row["candidate / baseline"], row["verdict"]) for row in cells}


def at_once(**planted):
    return [m for n in (1, 2) for m in launch_of_both(n, **planted)]


def test_ledger_orders_release_verdicts():
    old = between("0.9.2", "0.10.0", pairs(4, speed=0.9))
    new = between("0.24.0", "0.25.1", pairs(4, speed=0.99))
    first, second = ledger_sections([new, old])
    assert (first.title, first.look) == ("vLLM 0.9.2 -> 0.10.0: fail with opt-1.3b", "bad")
    assert second.title == "vLLM 0.24.0 -> 0.25.1: pass, at most 1% worse (95%) in all that is judged"
    assert second.look == "good" and first.parts[-1] == "other recorded settings that differ: none"
    assert rows(first)["output tokens/s at 64"] == ("opt-1.3b", "0.9000", "fail, slower in: kernels")
    assert rows(first)["mean E2E at 8"] == ("", "1.1111", "fail, slower in: kernels")
    assert rows(second)["s to start"][2] == "pass"
    assert "| output tokens/s at 64 | 0.9000 |" in section_markdown(first)


def test_ledger_verdict_names_slower_layer():
    slow = between("0.24.0", "0.25.1", at_once(seconds=1.1, kernels=1.1))
    hosted = between("0.25.1", "0.26.0", at_once(share=0.5))
    noisy = between(
        "0.26.0", "0.27.0", [m for n in range(1, 13) for m in pair_of_launches(n, speed=1.2 if n % 2 else 0.8)]
    )
    first, second, third = ledger_sections([slow, hosted, noisy])
    assert third.title == "vLLM 0.26.0 -> 0.27.0: inconclusive with opt-1.3b"
    assert rows(first)["tokens per busy second at 64"][1:] == ("0.9091", "fail, slower in: kernels")
    assert rows(second)["output tokens/s at 64"][2] == "not judged: a kernel runs for 50% of the time"
    assert rows(second)["tokens per busy second at 8"][2] == "pass"
    assert re.fullmatch(r"inconclusive \(can detect a slowdown of \d+(\.\d)?%\)", rows(third)["mean E2E at 8"][2])


def test_ledger_says_why_what_seems_worse_is_open():
    hosted = between("0.24.0", "0.25.1", at_once(seconds=1.2, share=0.5))
    first, _ = ledger_sections([hosted, between("0.25.1", "0.26.0", pairs(4))])
    seen = rows(first)["output tokens/s at 64"]
    assert seen[1:] == ("0.8333", "inconclusive (seems worse, but a kernel runs for 50% of the time)")


def test_ledger_names_other_differing_settings():
    steps = [between("0.24.0", "0.25.1", pairs(4)), between("0.25.1", "0.26.0", eager(pairs(4)))]
    *_, last = ledger_sections(steps)
    assert last.parts[-1] == "other recorded settings that differ: enforce_eager False -> True"


def test_ledger_names_models_of_differences():
    steps = [between("0.24.0", "0.25.1", made) for made in (pairs(4), eager(of("opt-125m", pairs(4))))]
    first, _ = ledger_sections([*steps, between("0.25.1", "0.26.0", pairs(4))])
    assert first.parts[-1] == "other recorded settings that differ: enforce_eager False -> True with opt-125m"


def test_ledger_counts_failing_gates():
    gates = [between("0.24.0", "0.25.1", pairs(4, speed=speed)) for speed in (0.9, 1.0)]
    first, _ = ledger_sections([*gates, between("0.25.1", "0.26.0", pairs(4))])
    assert first.title == "vLLM 0.24.0 -> 0.25.1: fail with opt-1.3b in 1 of 2 gates"


@pytest.mark.parametrize(("cores", "more"), [
    (2.4, ""), (9.0, ", with 4.5 times the own cores"), (0.5, ", with 0.25 times the own cores"),
])  # fmt: skip
def test_ledger_tells_changed_own_cores(cores, more):
    measured = [sensed(m, OWN_CORES=cores if m.paired.side == "candidate" else 2.0) for m in pairs(4)]
    one = between("0.24.0", "0.25.1", measured)
    first, _ = ledger_sections([one, between("0.25.1", "0.26.0", pairs(4))])
    assert rows(first)["output tokens/s at 64"][2] == f"pass{more}"
    text = f"a run keeps {figure(cores, 2)} cores of the host busy with the candidate, and 2.0 with the baseline"
    assert told_of(one) == ([text] if more else [])
    assert (text in five_lines([one], Findings()).why) is bool(more)


def of(model, measured):
    return [replace(m, spec=replace(m.spec, model=model)) for m in measured]


def eager(measured):
    return [replace(m, spec=replace(m.spec, enforce_eager=m.paired.side == "candidate")) for m in measured]


@pytest.mark.parametrize(("asked", "name"), [
    ({"response_format": "json"}, ("opt-1.3b, JSON", "output tokens/s at 64")),
    ({"kind": "embed"}, ("opt-1.3b, embed", "texts/s at 64")),
])  # fmt: skip
def test_ledger_names_unusual_requests(asked, name):
    kind = asked.get("kind", "generate")
    measured = [
        replace(m, workload=replace(m.workload, spec=replace(m.workload.spec, **asked), kind=kind)) for m in pairs(4)
    ]
    first, _ = ledger_sections([between("0.24.0", "0.25.1", measured), between("0.25.1", "0.26.0", pairs(4))])
    endpoint, (model, *_) = next(iter(rows(first).items()))
    assert (model, endpoint) == name


def test_ledger_keeps_gate_without_pairs():
    counts = between("0.24.0", "0.25.1", at_once())
    none, alone = (
        between(*sides, of("opt-125m", launch_of_both(windows=5)))
        for sides in (("0.24.0", "0.25.1"), ("0.25.1", "0.26.0"))
    )
    first, second = ledger_sections([counts, none, alone])
    assert first.title == "vLLM 0.24.0 -> 0.25.1: inconclusive with opt-125m"
    assert len(rows(first)) == 5 and rows(first)["output tokens/s at 64"][0] == "opt-1.3b"
    assert second.title == "vLLM 0.25.1 -> 0.26.0: inconclusive with opt-125m"
    ((_, _, said),) = rows(second).values()
    assert said.startswith("inconclusive (no pair of launches counts; launch 1: 3 pairs of its windows count")


def test_newest_release_of_passing_gates_is_advised():
    gates = [between("0.24.0", "0.25.1", pairs(4)), between("0.25.1", "0.26.0", pairs(4))]
    for made in (gates, gates[::-1]):
        five = five_lines(made, Findings())
        assert five.do_this == "pip install vllm==0.26.0" and five.answer.endswith("; 2 of 2 gates pass")
    slow = between("0.26.0", "0.28.0", pairs(4, speed=0.9))
    commands = {slow.gate: "pytest --slm-gpu -o slm_response_format=json --slm-gate --slm-side=candidate:env=A=b"}
    assert five_lines([*gates, slow], Findings(gate_commands=commands)).do_this == (
        "slmserve bisect --good 0.26.0 --bad 0.28.0 -- --slm-gpu -o slm_response_format=json"
    )


def test_gate_of_bisection_neither_bisects_nor_installs():
    slow = between("0.24.0", "0.26.0", pairs(4, speed=0.9))
    found = Findings(command="pytest --slm-gpu --slm-gate --slm-records=r.jsonl", bisects=True)
    assert five_lines([slow], found).do_this == f"{found.command} -o slm_profile=traces"
    passes = between("0.24.0", "0.25.1", pairs(4))
    assert five_lines([passes], found).do_this == "nothing: the candidate may replace the baseline"


def test_evidence_is_in_file_of_worst_gate():
    """If all pass, it is in all files."""
    passes, slow = between("0.24.0", "0.25.1", pairs(4)), between("0.25.1", "0.26.0", pairs(4, speed=0.9))
    found = Findings(archives=["a.jsonl", "b.jsonl"], gate_archives={"p": "a.jsonl", "s": "b.jsonl"})
    passes, slow = replace(passes, gate="p"), replace(slow, gate="s")
    told = [five_lines(gates, found).where for gates in ([passes, slow], [passes], [passes, replace(passes, gate="s")])]
    assert told == [f"slmserve report {names}" for names in ("b.jsonl", "a.jsonl", "a.jsonl b.jsonl")]


def test_failure_without_pairs_is_told():
    """Outputs are compared even if no pair of launches counts."""
    wrong = (Verdict("outputs", "opt-1.3b", State.FAILS, "the tokens have another probability"),)
    one = replace(between("0.24.0", "0.25.1", pairs(4)), pairs=(), gated=(), exact=wrong)
    five = five_lines([one], Findings())
    assert five.answer.startswith("FAILS: opt-1.3b: outputs: the tokens") and "bisect" not in five.do_this


def test_single_step_has_no_ledger():
    same = between("0.24.0", "0.25.1", pairs(4))
    assert not [*ledger_sections([same, same])] and not [*ledger_sections([gated(pairs(4))])]
