"""The gate as a user sees it: items, exit status, the report, and what is kept."""

from __future__ import annotations

import html
import json
import math
import random
import shlex
import shutil
from xml.etree import ElementTree

import pytest
from inside import ENDPOINTS, GATE, usage_error
from shipped import BENCHMARKS, put

from pytest_slmserve.__main__ import main
from pytest_slmserve.engines import pool
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.run import gate as gates
from pytest_slmserve.schema.models import CATALOGUE

SLOWER = ("--slm-side=baseline:arg=t_inf=10000", "--slm-side=candidate:arg=t_inf=9000")
SLOWER_START = ("--slm-side=baseline:arg=start_s=20", "--slm-side=candidate:arg=start_s=30")


@pytest.fixture
def noisy(monkeypatch):
    """Launches differ by chance, with this standard deviation."""

    def plant(sd):
        chance = random.Random(1)
        monkeypatch.setattr(
            pool, "SimulatedEngine", lambda spec, **_: SimulatedEngine(spec, math.exp(chance.gauss(0, sd)))
        )

    return plant


def states(pytester):
    """Of each item in the JUnit file: passed, or the first line of its failure."""
    cases = ElementTree.parse(pytester.path / "out.xml").getroot().iter("testcase")
    found = {}
    for case in cases:
        failure = case.find("failure")
        found[case.attrib["name"]] = "passed" if failure is None else failure.attrib["message"]
    return {name.removeprefix("test_no_worse[opt-125m-").removesuffix("]"): state for name, state in found.items()}


# The exit status, and the items


def test_two_equal_sides_pass_after_four_pairs(gate):
    result = gate("-v")
    assert result.ret == 0
    result.assert_outcomes(passed=6)
    for endpoint in ENDPOINTS:
        result.stdout.fnmatch_lines([f"*test_no_worse?opt-125m-{endpoint}? PASSED*"])
    result.stdout.fnmatch_lines(["opt-125m: PASS after 4 pairs of launches", "note: both sides *are the same: *"])


def test_a_slower_candidate_fails_and_junit_shows_where(gate, pytester):
    result = gate(*SLOWER, "--junitxml=out.xml")
    assert result.ret == 1
    result.assert_outcomes(failed=3, passed=3)
    found = states(pytester)
    assert list(found) == list(ENDPOINTS)
    assert found["start"] == found["kv-blocks"] == found["memory"] == "passed"
    for endpoint, change in (("throughput", "10 % lower"), ("latency", "11.1 % higher"), ("energy", "11.1 % higher")):
        assert f"<fails: no-worse-{endpoint} [opt-125m]" in found[endpoint] and change in found[endpoint]
    suite = ElementTree.parse(pytester.path / "out.xml").getroot()[0]
    shown = {p.attrib["name"]: p.attrib["value"] for p in next(suite.iter("testcase")).iter("property")}
    assert shown["slm_gate"] == "fails" and float(shown["slm_ratio"]) == pytest.approx(0.9, abs=0.01)


REAL = ("--slm-load-format=auto",)


def test_real_weights_are_asked_what_they_say(gate, archive):
    result = gate(*REAL, "-v")
    assert result.ret == 0
    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines(["*test_no_worse?opt-125m-outputs? PASSED*"])
    result.stdout.re_match_lines(
        [r"outputs: pass, the log probability of the baseline's tokens .* 64 of 64 answers are the"]
    )
    asked = {m.paired.pair: m.paired for m in archive().measurements}
    assert len(asked[1].outputs) == len(asked[1].scores) == len(asked[2].scores) == 64
    assert asked[2].outputs == asked[3].scores == (), "once, and twice, is enough"


@pytest.mark.parametrize("wrong", ["logprob_drift=0.2", "other_token_at=3"])
def test_a_candidate_that_is_faster_and_wrong_fails(gate, wrong):
    faster = ("--slm-side=baseline:arg=t_inf=9000", "--slm-side=candidate:arg=t_inf=10000")
    result = gate(*REAL, *faster, f"--slm-side=candidate:arg={wrong}")
    assert result.ret == 1
    result.assert_outcomes(failed=1, passed=6)
    result.stdout.re_match_lines([r"outputs: fail, the log probability of the baseline's tokens"])


def test_of_dummy_weights_it_is_said_that_they_cannot_tell(gate):
    result = gate("--slm-side=candidate:arg=logprob_drift=0.2")
    assert result.ret == 0
    result.stdout.re_match_lines([r"outputs: .* dummy weights cannot tell"])


def test_a_faster_candidate_passes(gate):
    assert gate("--slm-side=baseline:arg=t_inf=9000", "--slm-side=candidate:arg=t_inf=10000").ret == 0


def test_a_slower_start_fails_the_start_alone(gate, pytester):
    result = gate(*SLOWER_START, "--junitxml=out.xml")
    assert result.ret == 1
    result.assert_outcomes(failed=1, passed=5)
    assert "50 % higher (1.5 times the baseline)" in states(pytester)["start"]


def test_noise_leaves_it_inconclusive(gate, noisy, pytester):
    noisy(0.1)
    result = gate("--override-ini=slm_gate_pairs=4", "--junitxml=out.xml")
    assert result.ret == 10
    result.stdout.fnmatch_lines(["opt-125m: INCONCLUSIVE after 4 pairs of launches", "*3 inconclusive*"])
    found = states(pytester)
    assert (
        "Inconclusive" in found["throughput"]
        and "neither worse for certain nor within the 3 % margin" in found["throughput"]
    )
    assert found["kv-blocks"] == "passed", "no matter of chance"


def test_noise_does_not_hide_a_failure_from_the_exit_status(gate, noisy):
    noisy(0.1)
    assert gate("--override-ini=slm_gate_pairs=4", *SLOWER_START).ret == 1


def test_what_cannot_be_trusted_never_passes(gate):
    result = gate("--slm-side=candidate:arg=lost_from=4")
    assert result.ret == 10
    result.stdout.fnmatch_lines(["*6 inconclusive*"])
    result.stdout.fnmatch_lines(
        ["opt-125m: INCONCLUSIVE after 0 pairs*", "left out: pair 4: a sensor was lost: simulated failed*"]
    )


def test_noise_of_the_host_drops_no_pair(gate):
    result = gate("--slm-side=candidate:arg=slow_clock_from=4")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["opt-125m: PASS after 4 pairs of launches*"])
    assert "left out" not in result.stdout.str()


def test_without_sensors_the_energy_is_skipped(gate):
    result = gate("--slm-engine-arg=sensors=false", "-rs")
    assert result.ret == 0
    result.assert_outcomes(passed=4, skipped=2)
    result.stdout.fnmatch_lines(["*SKIPPED*no launch told its energy", "*SKIPPED*no launch told its memory"])


def test_a_candidate_that_dies_is_named_and_later_items_say_that_the_gate_was_broken_off(gate, pytester):
    result = gate("--slm-side=candidate:arg=die_at=16", "--junitxml=out.xml")
    assert result.ret == 3
    result.assert_outcomes(errors=6)
    states = [p.attrib["value"] for p in ElementTree.parse(pytester.path / "out.xml").iter("property")]
    assert states == ["broken off"] * 6
    text = "\n".join(line for line in result.outlines if not line.startswith("ERROR"))  # CI repeats all there
    died = "the candidate, pair 1: the simulated engine died at concurrency 16, as it was told to"
    assert text.count(f"EngineFailed: {died}") == 1
    assert text.count(f"EngineFailed: the gate of opt-125m was broken off: {died}") == 5
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "status", "outcomes"),
    [
        (("--override-ini=slm_gate_pairs=4",), 3, {"passed": 6, "errors": 6}),
        ((*SLOWER, "--override-ini=slm_gate_pairs=4"), 1, {"failed": 3, "passed": 3, "errors": 6}),
    ],
    ids=["the other passes", "the other fails"],
)
def test_a_gate_that_broke_off_is_no_failure_and_hides_none(gate, monkeypatch, arguments, status, outcomes):
    run = gates.OneGate.run

    def one_breaks(self):
        if self.model == "opt-350m":
            raise OSError("No space left on device")
        return run(self)

    monkeypatch.setattr(gates.OneGate, "run", one_breaks)
    result = gate("--slm-models=opt-125m,opt-350m", *arguments)
    assert result.ret == status
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines(
        ["*OSError: No space left*", "EngineFailed: the gate of opt-350m was broken off: OSError: No space*", "ERROR *"]
    )


def test_an_assertion_of_our_own_is_no_verdict(gate, monkeypatch):
    def breaks(self):
        raise AssertionError("what cannot be")

    monkeypatch.setattr(gates.OneGate, "run", breaks)
    result = gate()
    assert result.ret == 3
    result.assert_outcomes(errors=6)
    result.stdout.fnmatch_lines(["*AssertionError: what cannot be*", "*RuntimeError: the gate of opt-125m was broken*"])


def test_a_user_s_own_assertion_on_a_gate_fails_and_an_error_before_it_is_none(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def broken(slm_gates):
            raise OSError("no file")

        def test_it(broken): pass

        def test_mine(slm_gates):
            assert slm_gates.of("opt-125m").pairs == ()
        """
    )
    assert pytester.runpytest_inprocess(*GATE, "-k", "test_it").ret == 3
    assert pytester.runpytest_inprocess(*GATE).ret == 1


def test_each_model_has_its_gate(gate, archive):
    result = gate("--slm-models=opt-125m,opt-350m", "--slm-side=candidate:arg=die_at=16", "--slm-concurrency=4,8")
    result.assert_outcomes(passed=12)
    result.stdout.fnmatch_lines(["opt-125m: PASS*", "opt-350m: PASS*"])
    assert len({m.paired.gate for m in archive().measurements}) == 2


@pytest.fixture
def folder_of_mine(pytester):
    """A model's folder that lies in another one, so that its path is not its name."""
    folder = pytester.path / "models" / "Mine-1B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(CATALOGUE["opt-125m"].config)))
    return "models/Mine-1B"


def test_a_model_given_as_a_path_has_its_gate_and_its_calibration(gate, pytester, folder_of_mine):
    calibrated = gate(f"--slm-models={folder_of_mine}", "--slm-calibrate")
    assert calibrated.ret == 0
    (kept,) = json.loads((pytester.path / ".slm" / "calibration.json").read_text("utf-8"))
    assert kept["model"] == "mine-1b"
    result = gate(f"--slm-models={folder_of_mine}")
    assert result.ret == 0
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["mine-1b: PASS after 4 pairs*", "note: mine-1b, by 12 pairs of equal sides*"])


# Which items run


@pytest.fixture
def everything(pytester):
    """The whole folder of benchmarks."""
    folder = pytester.path / "all_of_them"  # of another name: their modules may be imported already
    shutil.copytree(BENCHMARKS, folder, ignore=shutil.ignore_patterns("__pycache__", "asv", "baselines"))
    return lambda *args: pytester.runpytest_inprocess(folder.name, "-p", "no:cacheprovider", *args)


def test_with_a_gate_nothing_else_is_measured_even_where_the_whole_folder_is_given(everything, archive):
    result = everything(*GATE)
    assert result.ret == 0
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] == 6 and outcomes["deselected"] > 20 and outcomes.keys() == {"passed", "deselected"}
    assert all(m.paired for m in archive().measurements)
    assert archive().sessions[-1].plan["sweeps"] == {}, "what was not to be measured is not missing"


def test_without_a_gate_its_items_are_skipped_with_the_reason(pytester, gate):
    gate("--collect-only")
    result = pytester.runpytest_inprocess("--slm-simulate", "-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*SKIPPED*compares two sides: needs --slm-gate"])


def test_without_a_mode_they_are_skipped_as_all_that_measures(pytester, gate):
    gate("--collect-only")
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*SKIPPED*measures: needs --slm-gpu, --slm-cpu, --slm-simulate or --slm-endpoint*"])


def test_a_gate_that_was_asked_for_and_did_not_come_about_is_no_pass(pytester):
    path = pytester.makepyfile(
        """
        import pytest

        def test_plain(): pass

        @pytest.mark.skip(reason="not today")
        def test_gate(slm_gate): pass
        """
    )
    result = pytester.runpytest_inprocess(*GATE, path)
    assert result.ret == 10
    result.assert_outcomes(passed=1, skipped=6)
    result.stdout.fnmatch_lines(["note: --slm-gate: nothing was compared, and that is no pass"])


def test_a_plan_estimates_a_clear_case_once_for_each_model(gate, archive, pytester):
    result = gate("--slm-plan")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "*0:00    test_no_worse?opt-125m-throughput? (2 s)",
            "*0:02    test_no_worse?opt-125m-latency? (measures nothing)",
            "*end: 6 items",
            "note: a gate is estimated as a clear case, 4 pairs; one that is not takes up to 12",
        ]
    )
    assert not (pytester.path / ".slm").exists()


def test_what_an_archive_answers_makes_no_gate_cheaper(gate, sweep):
    alike = ("--slm-concurrency=4,16", "--slm-window=1", "--slm-input-len=64", "--slm-output-len=32")
    sweep(*alike, "--slm-engine-arg=t_inf=2000", "--slm-engine-arg=b_half=16", "-k", "test_point")
    gate("--slm-plan", "--slm-resume").stdout.fnmatch_lines(["*test_no_worse?opt-125m-throughput? (2 s)"])


# What is told, and kept


def test_the_report_has_the_table_the_sides_and_the_number_of_pairs(gate):
    result = gate(*SLOWER)
    result.stdout.fnmatch_lines(
        [
            "opt-125m: FAIL after 4 pairs of launches",
            "*baseline: *t_inf=10000*at concurrency 4 and 16",
            "*candidate: *t_inf=9000*at concurrency 4 and 16",
            "  compile caches were warm: *",
            "endpoint *better *pairs *candidate*spread*margin*",
            "output tokens/s, large load *higher *4 *0.9000 *fail",
            "mean E2E, small load *lower *4 *1.1111 *fail",
            "s to start *lower *4 *1.0000 *15 *pass",
            "mean TPOT, large load *lower *4 *1.1111*",
            "output tokens/s, large load *fail: 10 % lower (0.9 times the baseline)*",
            "KV blocks: pass, *",
            "device memory: pass, 7.45 GiB in use where the baseline has 7.45 GiB (margin: up to 7.70 GiB)",
            "note: the gate of opt-125m took * s, 4 pairs count",
        ]
    )


def test_the_archive_holds_every_launch_in_its_place(gate, archive):
    gate(*SLOWER)
    found = archive().measurements
    assert len(found) == 16 and len({m.launch for m in found}) == 8
    assert "".join(m.paired.side[0] for m in found[::2]) == "bc" + "cb" + "cb" + "bc"
    assert [m.paired.pair for m in found] == [n for n in range(1, 5) for _ in range(4)]
    assert {(m.paired.side, dict(m.spec.extra)["t_inf"]) for m in found} == {("baseline", 10000), ("candidate", 9000)}
    assert {dict(m.spec.extra)["b_half"] for m in found} == {16}


def test_a_candidate_that_needs_more_memory_fails_there_alone(gate, pytester):
    result = gate("--slm-side=candidate:arg=memory_used=9e9")
    assert result.ret == 1
    result.assert_outcomes(failed=1, passed=5)
    result.stdout.fnmatch_lines(["device memory: fail, 8.38 GiB in use where the baseline has 7.45 GiB*"])
    (found,) = json.loads((pytester.path / ".slm" / "gate.json").read_text("utf-8"))
    assert found["exact"]["memory"]["state"] == "fails" and found["exact"]["memory"]["value"] == 8583 / 7629  # MiB
    assert "device memory: fail, " in (pytester.path / ".slm" / "gate.md").read_text("utf-8")


# In a user's own tests

OWN = """
    import pytest
    from pytest_slmserve.analysis.verdict import State

    def test_mine(slm_gates):
        gated = slm_gates.of("opt-125m")
        assert gated.outcome is State.PASSES and len(gated.pairs) == 4
        assert gated.verdict("throughput") and slm_gates.of("opt-125m") is gated

    def test_nothing_of_mine(slm_measure):
        assert False, "measures something else"
"""


def test_a_user_s_own_test_reads_the_same_gate(pytester):
    pytester.makepyfile(OWN)
    result = pytester.runpytest_inprocess(*GATE)
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["opt-125m: PASS after 4 pairs of launches"])


def test_a_user_s_own_test_waits_for_a_gate_to_be_asked_for(pytester):
    pytester.makepyfile(OWN)
    result = pytester.runpytest_inprocess("--slm-simulate", "-rs", "-k", "test_mine")
    result.assert_outcomes(skipped=1, deselected=1)
    result.stdout.fnmatch_lines(["*needs --slm-gate"])


def test_a_gate_that_cannot_be_carried_out_is_an_error_before_anything_starts(gate, pytester):
    text = usage_error(gate("--slm-concurrency=4,900000"))
    assert "opt-125m at concurrency 900000: the KV cache holds" in text
    assert not (pytester.path / ".slm").exists()


@pytest.mark.alone
def test_a_slower_engine_is_found_through_its_own_processes(gate, pytester, stand_in_here, archive):
    """Engine, worker and process are real; behind them a stand-in for vLLM takes twice as long for a step."""
    result = pytester.runpytest_inprocess(
        "--slm-cpu",
        "--slm-gate",
        "--slm-models=opt-tiny",
        "--slm-concurrency=4",
        "--slm-window=0.8",
        "--slm-input-len=16",
        "--slm-output-len=8",
        "--slm-telemetry=off",
        stand_in_here,
        "--slm-engine-arg=step_s=0.006",
        "--slm-side=candidate:arg=step_s=0.012",
    )
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*<fails: no-worse-throughput ?opt-tiny?*", "opt-tiny: FAIL after * pairs of launches"]
    )
    found = archive().measurements
    assert len({m.launch for m in found}) >= 8 and all(m.environment.vllm == "0.32.0" for m in found)


def test_two_pairs_run_on_the_cpu_and_the_option_goes_on_with_them(pytester, stand_in_here, archive, monkeypatch):
    put(pytester.path, "test_gate")
    monkeypatch.setenv("SLM_GATE_PAIRS", "4")
    words = ("--slm-cpu", "--slm-models=opt-tiny", "--slm-input-len=16", "--slm-output-len=8", "--slm-window=1.5")
    words = (*words, "--slm-concurrency=2,4", "--slm-telemetry=off", stand_in_here)
    result = pytester.runpytest_inprocess(*words)
    assert result.ret == 0
    result.assert_outcomes(passed=1)
    goes_on = "--slm-gate --slm-resume --slm-concurrency=4"
    result.stdout.fnmatch_lines(
        [
            "opt-tiny: speed NOT JUDGED after 2 pairs of launches",
            f"  next: 2 more pairs, about * s, can decide: --slm-cpu {goes_on}",
            "kv-blocks: pass, *",
        ]
    )
    result.stdout.no_fnmatch_line("output tokens/s*")
    assert len({m.launch for m in archive().measurements}) == 4
    result = pytester.runpytest_inprocess(*words, *goes_on.split())
    result.stdout.fnmatch_lines(
        ["opt-tiny: * after 4 pairs of launches", "note: the gate of opt-tiny goes on from 2 pairs*"]
    )
    found = archive().measurements
    assert len({m.launch for m in found}) == 8 and len({m.paired.gate for m in found}) == 1


def test_what_was_found_is_there_for_others(gate, pytester, monkeypatch):
    page = pytester.path / "summary.md"
    page.write_text("# Before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    gate("--slm-side", "candidate:arg=t_inf=9000", "--slm-side", "baseline:arg=t_inf=10000")
    (found,) = json.loads((pytester.path / ".slm" / "gate.json").read_text("utf-8"))
    assert (found["model"], found["outcome"], found["pairs"]) == ("opt-125m", "fail", 4)
    speed = found["gated"][0]
    assert speed["name"] == "output tokens/s, large load" and speed["outcome"] == "fail"
    assert speed["ratio"]["value"] == pytest.approx(0.9, abs=0.01) and found["answers"]["differs"] is None
    markdown = (pytester.path / ".slm" / "gate.md").read_text("utf-8")
    assert "### opt-125m: FAIL after 4 pairs of launches" in markdown and "| s to start | lower | 4 |" in markdown
    told = page.read_text("utf-8")
    assert "<details>" in markdown and told.startswith(f"# Before\n{markdown}\n### To repeat it\n\n```sh\npytest ")
    assert "::test_no_worse[opt-125m-throughput]: assert <fails: no-worse-throughput" in told


def test_where_it_cannot_be_written_the_run_goes_on(gate, pytester, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "no" / "such" / "page.md"))
    result = gate()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["not written for others: *"])


def test_a_failure_says_how_to_repeat_it_in_the_terminal_and_on_the_page(gate, pytester, monkeypatch):
    """By the tests, from wherever each option came, and it ends in the same way."""
    pytest.importorskip("jinja2", reason="a page needs Jinja2")
    monkeypatch.setenv("SLM_GATE_PAIRS", "6")
    monkeypatch.setenv("COLUMNS", "80")
    test = "test_gate_shipped.py"
    said = gate(test, *SLOWER, "--slm-html=out.html", "--slm-resume", "-k", "throughput or start").outlines
    begins = next(n for n, line in enumerate(said) if line.startswith("to repeat it: pytest "))
    ends = next(n for n in range(begins, len(said)) if not said[n].endswith("\\"))
    typed = "".join(line.removesuffix("\\") for line in said[begins : ends + 1])
    words = shlex.split(typed.removeprefix("to repeat it: pytest"))
    assert words[:3] == [test, "-k", "throughput or start"] and "slm_gate_pairs=6" in words
    assert ends > begins and all(len(line) <= 80 for line in said[begins : ends + 1])
    page = html.unescape((pytester.path / "out.html").read_text("utf-8"))
    assert f">pytest {shlex.join(words)}</code>" in page
    monkeypatch.delenv("SLM_GATE_PAIRS")
    again = pytester.runpytest_inprocess(*words)
    assert again.ret == 1 and any(line.startswith("to repeat it: pytest ") for line in again.outlines)
    assert main(["report", ".slm/records.jsonl"]) == 1
    gate().stdout.no_fnmatch_line("*to repeat it*")


def test_a_sweep_s_page_has_the_path_and_each_option(sweep, pytester):
    pytest.importorskip("jinja2", reason="a page needs Jinja2")
    sweep("--slm-html=out.html", "--slm-records=r.jsonl", "--slm-resume")
    pages = [(pytester.path / "out.html").read_text("utf-8")]
    assert main(["report", "r.jsonl", "--html", "again.html"]) in (0, 10)
    pages.append((pytester.path / "again.html").read_text("utf-8"))
    commands = [html.unescape(page.split('aria-labelledby="reproduce">')[1].partition("</code>")[0]) for page in pages]
    assert commands[0] == commands[1]
    assert {"--slm-window=1", "--slm-concurrency=1,16,64,128,256", "--slm-records=r.jsonl"} < {*commands[0].split()}
    assert "--slm-html" not in commands[0] and "--slm-resume" not in commands[0]


def test_shipped_tests_are_named_as_they_were_typed(pytester):
    pytest.importorskip("jinja2", reason="a page needs Jinja2")
    shipped = ("--pyargs", "pytest_slmserve.quickstart", "--slm-simulate")
    pytester.runpytest_inprocess(*shipped, "--slm-html=out.html", "-k", "slo", "-p", "no:cacheprovider")
    said = (pytester.path / "out.html").read_text("utf-8")
    assert ">pytest --pyargs pytest_slmserve.quickstart -k slo --slm-simulate</code>" in said
