"""A gate of the start: which launches make a pair, what of them is judged and shown, in which stage a change lies, and
how often so few pairs are wrong."""

from dataclasses import replace

import gate_sessions as made
import pytest
from launches import launch
from sections import sentences_of, tables_of

from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.analysis.gate.diagnosis import REST, STAGES, stage_changes
from pytest_slmserve.analysis.gate.launch_pairs import BLOCKS, SIDES, STARTS
from pytest_slmserve.analysis.gate.starts import FIRST, is_of_start, judge_starts
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.report import gate
from pytest_slmserve.report.findings import Findings

TERMS = GateCriteria().of_starts
SECONDS = {
    "import": 8.0,
    "device": 0.5,
    "weights": 1.5,
    "profile": 1.0,
    "compile": 4.0,
    "kv cache": 0.5,
    "capture": 2.5,
}
NOISE = 1.02, 0.99, 1.0, 0.98, 1.01  # of the candidate, in each pair


def start(side, pair, how="warm", *, failures=0, naps=(), at=0, **stages):
    """One start of 20 s, of which 2 s are the rest."""
    told = SECONDS | {"compile": 34.0 if how == "cold" else 4.0}
    took = {name: seconds + stages.get(name, 0.0) for name, seconds in told.items()}
    [m] = launch(side, pair, loads=[8], name=f"{pair}-{side}-{how}-{at}", failures=failures)
    resolved = replace(m.resolved, stages=tuple(took.items()), ready_s=sum(took.values()) + 2.0)
    paired = replace(m.paired, caches=how, sleep_s=tuple(nap / 2 for nap in naps), wake_s=tuple(naps))
    late = f"2026-01-01T{at:02d}:{pair:02d}:{10 * (how == 'warm') + 20 * (side == 'candidate'):02d}.000+00:00"
    return replace(m, resolved=resolved, paired=paired, load=FIRST, measured_at=late)


def starts(pairs=3, states=("cold", "warm"), naps=(), **stages):
    """Pairs whose candidate has these seconds more in its stages."""
    found = []
    for pair, noise in zip(range(1, pairs + 1), NOISE):
        for side in SIDES:
            more = {"import": 8.0 * (noise - 1), **stages} if side == "candidate" else {}
            found += [start(side, pair, how, naps=naps, **more) for how in states]
    return found


def test_kv_blocks_are_compared_with_the_same_caches():
    """A first start that compiles has fewer blocks; the candidate has as few in each start."""
    blocks = {("baseline", "warm"): 1000}
    measured = [(m, blocks.get((m.paired.side, m.paired.caches), 900)) for m in starts()]
    made = [replace(m, resolved=replace(m.resolved, kv_blocks=count)) for m, count in measured]
    verdict = judge_starts(made, TERMS).verdict(BLOCKS)
    assert verdict.state is State.FAILS and verdict.value == 0.9 and verdict.why.endswith(", with warm caches")


def test_start_gate_judges_both_caches():
    found = judge_starts(starts(), TERMS)
    assert [(each.name, each.outcome, each.n) for each in found.gated] == [
        (STARTS[name].label, State.PASSES, 3) for name in ("start", "start-cold")
    ]
    assert found.outcome is State.PASSES and found.settled and found.states == ("cold", "warm")
    assert found.verdict("start").value == pytest.approx(1.0, abs=0.01) and found.verdict("wake") is None
    assert judge_starts(starts(2), TERMS).outcome is State.INCONCLUSIVE
    slower = judge_starts(starts(5, compile=8.0), TERMS)
    assert [each.outcome for each in slower.gated] == [State.FAILS, State.FAILS]
    [told] = gate.told_of(slower)
    assert told.startswith("slower in: start (s to start, warm caches 40% higher: compile +8.0 s; s to start, cold")
    ran = Findings(command="pytest --slm-gpu --slm-gate --slm-gate-launches=start", archives=["r.jsonl"])
    assert gate.five_lines([slower], ran).do_this == "slmserve report r.jsonl", "a trace does not show the start"
    [warm, *_] = [t for t in tables_of(gate.stage_parts(slower)) if "warm" in t.caption]
    rows = {name: texts for name, *texts in warm.cells.rows}
    assert rows["compile"] == ["4.00", "12.00", "+8.00", "+40.0"]
    assert rows["s to start"][:2] == ["20.00", "28.00"]
    assert [*rows] == [*STAGES, REST, "s to start"]
    said = " ".join(sentences_of(gate.gate_section(found)))
    assert (
        "a warm start of the baseline" in said
        and "compile 34.0 (+0.0)" in said
        and tables_of(gate.stage_parts(found)) == []
    )
    facts = gate.gate_facts(slower)
    assert (facts["launches"], facts["caches"], facts["layers"]) == ("start", "cold and warm", ["start"])
    assert [each.name for each in facts["stages"]["cold"]] == [*STAGES, REST]


def test_start_pair_needs_both_sides():
    three = starts()
    assert all(map(is_of_start, three)) and not any(map(is_of_start, launch("baseline", 1)))
    assert len(judge_starts(three[:-1], TERMS).pairs) == 2, "the warm start of the last candidate is missing"
    again = start("candidate", 3, "warm", at=1, compile=50.0)
    assert judge_starts([*three, again], TERMS).pairs[2].candidate.measurements[1] == again
    failed = judge_starts([*three, replace(again, run=start("candidate", 3, failures=1).run)], TERMS)
    assert len(failed.pairs) == 2 and "pair 3: candidate: its first request failed" in failed.dropped[0]
    assert judge_starts(starts(3, ["cold"]), TERMS).verdict("start") is None, "nobody started with warm caches"
    untold = [replace(m, resolved=replace(m.resolved, ready_s=None)) for m in three if m.paired.side == "candidate"]
    lost = judge_starts([*(m for m in three if m.paired.side == "baseline"), *untold], TERMS)
    assert lost.outcome is State.INCONCLUSIVE and "no value of the candidate" in lost.gated[0].why


def test_median_wake_decides_start_gate():
    slow = [m if m.paired.side == "baseline" else replace(m, paired=replace(m.paired, wake_s=(0.6, 9.0, 0.6)))
            for m in starts(naps=(0.4, 0.4, 4.0))]  # fmt: skip
    found = judge_starts(slow, TERMS)
    assert found.verdict("wake").value == pytest.approx(1.5) and found.verdict("wake").state is State.FAILS
    assert "slower in: wake (s to wake 50% higher)" in gate.told_of(found)
    shown = {each.name: each.ratio.value for each in found.shown}
    assert shown["s to sleep"] == pytest.approx(1) and len([name for name in shown if "first token" in name]) == 2
    assert judge_starts(starts(3, ["warm"]), TERMS).shown[0].name == "s to the first token, warm caches"


def test_start_stages_sum_to_total():
    sides = [[m for m in starts() if m.paired.side == side] for side in SIDES]
    changes = stage_changes(*sides)
    for side, name in zip(sides, SIDES):
        mean = sum(m.resolved.ready_s for m in side) / len(side)
        assert sum(getattr(each, name) for each in changes) == pytest.approx(mean)
    assert changes[-1].baseline == pytest.approx(2) and changes[-1].name == REST
    untold = replace(sides[1][0], launch="old", resolved=replace(sides[1][0].resolved, stages=()))
    assert stage_changes(sides[0], [*sides[1], untold]) == () == stage_changes([], sides[1])


@pytest.mark.parametrize(("worse", "sd", "fails", "passes"), [
    (0.0, 0.03, (0, 3), (290, 300)), (0.0, 0.05, (0, 3), (280, 300)), (0.3, 0.05, (285, 300), (0, 1)),
])  # fmt: skip
def test_start_gate_errors_stay_rare(worse, sd, fails, passes):
    seen = made.many(made.Planted(sd=sd, worse=(worse, 0.0), margin=0.15), 300, TERMS)
    assert fails[0] <= seen.outcomes[State.FAILS] <= fails[1] and passes[0] <= seen.outcomes[State.PASSES] <= passes[1]
    assert 3 <= seen.pairs <= 5
