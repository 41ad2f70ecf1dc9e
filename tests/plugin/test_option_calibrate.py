"""--slm-calibrate tells what a gate can find on this runner, from pairs of which nothing differs."""

import json

from inside import usage_error


def calibrate(gate, *args):
    """On the simulated engine; GATE is given `--slm-gate` too, which says nothing more."""
    return gate("--slm-calibrate", *args)


def test_all_pairs_are_made_and_their_noise_is_kept(pytester, gate, archive):
    result = calibrate(gate)
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["opt-125m: PASS after 12 pairs*", "note: opt-125m, by 12 pairs of equal sides*100 %*"])
    assert len({m.launch for m in archive().measurements}) == 24
    (kept,) = json.loads((pytester.path / ".slm" / "calibration.json").read_text("utf-8"))
    assert kept["model"] == "opt-125m" and len(kept["noise"]["costs"]) == 12
    assert set(kept["worse"]) == set(kept["noise"]["names"]) and kept["unchanged"]["fail"] == 0.0


def test_a_later_gate_knows_what_it_can_find(pytester, gate):
    gate().stdout.no_fnmatch_line("note: no calibration of *")
    calibrate(gate)
    gate().stdout.fnmatch_lines(["opt-125m: PASS after 4 pairs*", "note: opt-125m, by 12 pairs of equal sides*"])
    gate("--slm-ramp-up=burst").stdout.no_fnmatch_line("note: *by 12 pairs of equal sides*")


def test_where_the_noise_hides_the_margin_nothing_passes(pytester, gate):
    calibrate(gate)
    path = pytester.path / ".slm" / "calibration.json"
    (kept,) = json.loads(path.read_text("utf-8"))
    kept["worse"]["s to start"]["fail"] = 0.4
    path.write_text(json.dumps([kept]), "utf-8")
    result = gate()
    assert result.ret == 10
    result.stdout.fnmatch_lines(
        ["*s to start*inconclusive: this runner is too noisy to pass: 15 % worse would fail in 40 %*"]
    )


def test_sides_that_differ_are_refused(gate):
    assert "--slm-candidate-engine-arg would make the sides of a calibration differ" in usage_error(
        gate("--slm-calibrate", "--slm-candidate-engine-arg", "noise=0.1")
    )


def test_it_needs_a_mode(pytester):
    assert "--slm-calibrate measures, and no mode says on what" in usage_error(
        pytester.runpytest_inprocess("--slm-calibrate")
    )
