"""`slmserve report` on an archive of a gate gives what its run gave."""

import json
from itertools import islice

import pytest
from inside import GATE
from sealed_lines import reseal

from pytest_slmserve.__main__ import main
from pytest_slmserve.run import gate as gate_run

pytestmark = pytest.mark.usefixtures("kept")
SLOWER = ("--slm-side=baseline:arg=t_inf=10000", "--slm-side=candidate:arg=t_inf=9000")
RECORDS = ".slm/records.jsonl"


def verdict_of(lines):
    """From the title to the line after which others write: what was found, and why."""
    begin = next(i for i, line in enumerate(lines) if line.startswith("opt-125m: "))
    end = next(i for i, line in enumerate(lines) if i > begin and line.startswith(("written: ", "note: ")))
    return [line for line in lines[begin:end] if line]


@pytest.fixture
def again(capsys):
    """Exit status and lines of the report on an archive."""

    def report(*paths):
        capsys.readouterr()
        status = main(["report", *(paths or (RECORDS,))])
        return status, capsys.readouterr().out.splitlines()

    return report


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ((), 0),
        (SLOWER, 1),
        ((*SLOWER, "--slm-gate-margin=0.3"), 0),
        (("--slm-side=candidate:arg=memory_used=9e9", "--override-ini=slm_gate_caches=cold"), 1),
        (("--slm-side=candidate:arg=lost_from=4",), 10),
        (("--slm-side=candidate:arg=slow_clock_from=4",), 0),
    ],
    ids=["equal", "slower", "wide margin", "memory, cold", "nothing counts", "noisy"],
)
def test_the_report_repeats_the_verdict_of_the_run(gate, again, arguments, status):
    result = gate(*arguments)
    assert result.ret == status
    seen, lines = again()
    assert seen == status and verdict_of([*lines, "note: end"]) == verdict_of(result.outlines)
    assert not any("no sweep was measured" in line for line in lines)


def test_the_noise_that_is_known_beside_the_archive_counts_there_too(gate, again, pytester):
    gate("--slm-calibrate")
    path = pytester.path / ".slm" / "calibration.json"
    (kept,) = json.loads(path.read_text("utf-8"))
    kept["worse"]["s to start"]["fail"] = 0.4
    path.write_text(json.dumps([kept]), "utf-8")
    (pytester.path / RECORDS).unlink()
    result = gate()
    status, lines = again()
    assert result.ret == status == 10 and verdict_of(lines) == verdict_of(result.outlines)
    assert any("this runner is too noisy to pass: 15 % worse would fail in 40 %" in line for line in lines)
    assert any(line.startswith("note: opt-125m, by 12 pairs of equal sides") for line in lines)
    assert any(line.startswith("next: a new gate with -o slm_gate_pairs=24") for line in lines), "it has ended"


def test_an_archive_that_did_not_store_its_terms_is_judged_by_the_defaults(gate, again, pytester):
    gate("--slm-gate-margin=0.3", *SLOWER)
    path = pytester.path / RECORDS
    first, rest = path.read_text("utf-8").split("\n", 1)
    session = json.loads(first)
    del session["plan"]["gate"]
    path.write_text(json.dumps(session, separators=(",", ":")) + "\n" + rest, "utf-8")
    reseal(path)
    seen, lines = again()
    assert seen == 1 and any(line.startswith("opt-125m: FAIL after 4 pairs") for line in lines)
    assert (
        "note: the terms of the gate of opt-125m were not stored: judged by a margin of 3 %, and 12 pairs at most"
        in lines
    )


def test_a_sweep_beside_a_gate_is_reported_too(gate, sweep, again):
    gate(*SLOWER)
    sweep("--slm-repeats=2")
    seen, lines = again()
    assert seen == 1
    assert any(line.startswith("opt-125m: FAIL") for line in lines) and any(
        "throughput-plateau" in line for line in lines
    )


def test_an_archive_given_twice_tells_of_its_gate_once(gate, again):
    gate()
    _, lines = again(RECORDS, RECORDS)
    assert sum(line.startswith("opt-125m: PASS") for line in lines) == 1


def test_an_interrupted_gate_says_how_far_it_came_and_goes_on(gate, again, pytester, monkeypatch):
    launched = gate_run.OneGate.launch_in_turn

    def broken_off(self, launches):
        yield from islice(launched(self, launches), 6)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gate_run.OneGate, "launch_in_turn", broken_off)
        result = pytester.runpytest_inprocess(*GATE, no_reraise_ctrlc=True)
    assert result.ret == 2
    result.stdout.fnmatch_lines(
        ["opt-125m: speed NOT JUDGED after 3 pairs of launches", "  next: 1 more pair, about *--slm-gate --slm-resume*"]
    )
    assert again()[0] == 10
    gate("--slm-resume").stdout.fnmatch_lines(["opt-125m: PASS after 4 pairs*", "note: *goes on from 3 pairs*"])
