"""The gate as a user sees it: an item for each endpoint, exit status, the report, what is kept for others, that a
report on the archive repeats it, and that what broke off or compared nothing is neither a pass nor a verdict."""

from __future__ import annotations

import html
import json
import math
import random
import shlex
import shutil
from contextlib import redirect_stdout
from io import StringIO
from itertools import islice
from xml.etree import ElementTree

import pytest
from inner_runs import QUIET
from inside import ENDPOINTS, GATE, SMALL, SWEEP, outcomes, usage_error
from sealed_lines import reseal
from shipped import BENCHMARKS, put

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines import pool
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.run.gate import OneGate
from pytest_slmserve.schema.models import CATALOGUE

SLOWER = ("--slm-side=baseline:arg=t_inf=10000", "--slm-side=candidate:arg=t_inf=9000")
FASTER = ("--slm-side=baseline:arg=t_inf=9000", "--slm-side=candidate:arg=t_inf=10000")
SLOWER_START = ("--slm-side=baseline:arg=start_s=20", "--slm-side=candidate:arg=start_s=30")
FOUR = "--override-ini=slm_gate_pairs=4"
REAL = "--slm-load-format=auto"
GATED = (*GATE, "-p", "no:benchmark", "-v", "-rs")


def verdict_of(lines):
    """From the title to the line after which others write: what was found, and why."""
    begin = next(i for i, line in enumerate(lines) if line.startswith("opt-125m: "))
    ends = ("written: ", "note: ")
    end = next((i for i, line in enumerate(lines) if i > begin and line.startswith(ends)), len(lines))
    return [line for line in lines[begin:end] if line]


def report(path):
    """Exit status and lines of the report on an archive."""
    out = StringIO()
    with redirect_stdout(out):
        status = main(["report", str(path)])
    return status, out.getvalue().splitlines()


@pytest.fixture(scope="module")
def gated(inner):
    """Runs the shipped gate, each of these in a folder of its own: with its outcomes by endpoint, and its folder."""
    put(inner.path, "test_gate")

    def run(name, *args, noise=0.0):
        with pytest.MonkeyPatch.context() as patch:
            chance = random.Random(1)
            if noise:
                drawn = lambda spec, **_: SimulatedEngine(spec, math.exp(chance.gauss(0, noise)))  # noqa: E731
                patch.setattr(pool, "SimulatedEngine", drawn)
            files = f"--slm-records={name}/r.jsonl", f"--junitxml={name}.xml"
            result = inner.runpytest_inprocess(*GATED, *files, "test_gate_shipped.py", *args)
        result.folder, result.states = inner.path / name, states(inner.path / f"{name}.xml")
        return result

    return run


def states(path):
    """Of each item in a JUnit file: passed, skipped, or the message of its failure."""
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        told = [each for kind in ("failure", "error", "skipped") for each in case.findall(kind)]
        name = case.attrib["name"].removeprefix("test_no_worse[opt-125m-").removesuffix("]")
        found[name] = told[0].attrib["message"] if told else "passed"
    return found


SCENARIOS = {  # arguments, exit status, endpoints that do not pass, and a fact of the report
    "equal": ((), 0, {}, "opt-125m: PASS after 4 pairs*"),
    "faster": (FASTER, 0, {}, "opt-125m: PASS after 4 pairs*"),
    "wide-margin": ((*SLOWER, "--slm-gate-margin=0.3"), 0, {}, "opt-125m: PASS*"),
    "slower-start": (SLOWER_START, 1, {"start": "50 % higher"}, "opt-125m: FAIL*"),
    "memory": (
        ("--slm-side=candidate:arg=memory_used=9e9", "--override-ini=slm_gate_caches=cold"),
        1,
        {"memory": "8.38 GiB"},
        "device memory: fail, 8.38 GiB *7.45 GiB*",
    ),
    "noise": ((FOUR,), 10, dict.fromkeys(ENDPOINTS[:3], "Inconclusive"), "opt-125m: INCONCLUSIVE after 4 pairs*"),
    "noise-and-failure": ((FOUR, *SLOWER_START), 1, {"start": "50 %"}, "opt-125m: FAIL*"),
    "nothing-counts": (
        ("--slm-side=candidate:arg=lost_from=4",),
        10,
        dict.fromkeys(ENDPOINTS, "Inconclusive"),
        "left out: pair 4: a sensor was lost*",
    ),
    "noisy-host": (("--slm-side=candidate:arg=slow_clock_from=4",), 0, {}, "opt-125m: PASS after 4 pairs*"),
    "no-sensors": (("--slm-engine-arg=sensors=false",), 0, {"energy": "energy", "memory": "memory"}, "*SKIPPED*energy"),
    "real-weights": ((REAL,), 0, {}, "outputs: pass, *64 of 64 *"),
    "wrong-tokens": (
        (REAL, *FASTER, "--slm-side=candidate:arg=other_token_at=3"),
        1,
        {"outputs": "fails"},
        "outputs: fail*",
    ),
    "unlikely": ((REAL, "--slm-side=candidate:arg=logprob_drift=0.2"), 1, {"outputs": "fails"}, "outputs: fail*"),
    "dummy": (("--slm-side=candidate:arg=logprob_drift=0.2",), 0, {}, "outputs: *dummy weights*"),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_status_items_and_report_say_the_same_and_the_archive_says_it_again(gated, name):
    arguments, status, others, line = SCENARIOS[name]
    result = gated(name, *arguments, noise=0.1 if "noise" in name else 0.0)
    assert result.ret == status
    result.stdout.fnmatch_lines([line])
    found = {endpoint: state for endpoint, state in result.states.items() if state != "passed"}
    assert set(others) <= set(found) and (set(found) == set(others) or name == "noise-and-failure")
    assert all(fact in found[endpoint] for endpoint, fact in others.items())
    assert set(result.states) == {*ENDPOINTS, *(["outputs"] if REAL in arguments else [])}
    seen, lines = report(result.folder / "r.jsonl")
    assert seen == status and verdict_of(lines) == verdict_of(result.outlines)
    assert not any("no sweep was measured" in line for line in lines)


# A slower candidate


@pytest.fixture(scope="module")
def slower(gated, inner):
    """Its run, beside which a page of a workflow's step is."""
    page = inner.path / "summary.md"
    page.write_text("# Before\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GITHUB_STEP_SUMMARY", str(page))
        return gated("slower", *SLOWER)


def test_a_slower_candidate_fails_where_it_is_slower_and_junit_has_the_figures(slower, inner):
    assert slower.ret == 1 and list(slower.states) == list(ENDPOINTS)
    assert [slower.states[each] for each in ("start", "kv-blocks", "memory")] == ["passed"] * 3
    for endpoint, change in (("throughput", "10 % lower"), ("latency", "11.1 % higher"), ("energy", "11.1 % higher")):
        assert f"no-worse-{endpoint} [opt-125m]" in slower.states[endpoint] and change in slower.states[endpoint]
    suite = ElementTree.parse(inner.path / "slower.xml").getroot()[0]
    told = {p.attrib["name"]: p.attrib["value"] for p in next(suite.iter("testcase")).iter("property")}
    assert told["slm_gate"] == "fails" and float(told["slm_ratio"]) == pytest.approx(0.9, abs=0.01)


def test_its_report_has_the_table_the_sides_and_the_number_of_pairs(slower):
    slower.stdout.fnmatch_lines(
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
            "device memory: pass, 7.45 GiB *7.45 GiB *7.70 GiB)",
            "note: the gate of opt-125m took * s, 4 pairs count",
        ]
    )


def test_its_archive_holds_every_launch_in_its_place(slower):
    found = read(slower.folder / "r.jsonl").measurements
    assert len(found) == 16 and len({m.launch for m in found}) == 8
    assert "".join(m.paired.side[0] for m in found[::2]) == "bc" + "cb" + "cb" + "bc"
    assert [m.paired.pair for m in found] == [n for n in range(1, 5) for _ in range(4)]
    sides = {(m.paired.side, m.spec.arguments["t_inf"], m.spec.arguments["b_half"]) for m in found}
    assert sides == {("baseline", 10000, 16), ("candidate", 9000, 16)}


def test_what_was_found_is_there_for_others(slower, inner):
    (found,) = json.loads((slower.folder / "gate.json").read_text("utf-8"))
    assert (found["model"], found["outcome"], found["pairs"]) == ("opt-125m", "fail", 4)
    speed = found["gated"][0]
    assert speed["outcome"] == "fail" and speed["ratio"]["value"] == pytest.approx(0.9, abs=0.01)
    assert found["answers"]["differs"] is None
    markdown = (slower.folder / "gate.md").read_text("utf-8")
    assert "### opt-125m: FAIL after 4 pairs" in markdown and "| s to start | lower | 4 |" in markdown
    told = (inner.path / "summary.md").read_text("utf-8")
    assert told.startswith(f"# Before\n{markdown}\n") and "```sh\npytest " in told
    assert "::test_no_worse[opt-125m-throughput]: assert <fails: no-worse-throughput" in told


def test_an_archive_that_did_not_store_its_terms_is_judged_by_the_defaults(slower):
    path = slower.folder / "without.jsonl"
    first, rest = (slower.folder / "r.jsonl").read_text("utf-8").split("\n", 1)
    session = json.loads(first)
    del session["plan"]["gate"]
    path.write_text(json.dumps(session, separators=(",", ":")) + "\n" + rest, "utf-8")
    reseal(path)
    seen, lines = report(path)
    assert seen == 1 and any(line.startswith("opt-125m: FAIL after 4 pairs") for line in lines)
    assert any(line.startswith("note: ") and "3 %" in line and "12 pairs" in line for line in lines)


def test_an_archive_given_twice_tells_of_its_gate_once(slower):
    path, out = str(slower.folder / "r.jsonl"), StringIO()
    with redirect_stdout(out):
        main(["report", path, path])
    assert out.getvalue().count("opt-125m: FAIL") == 1


def test_a_sweep_beside_a_gate_is_reported_too_and_makes_no_gate_cheaper(slower, inner):
    inner.makepyfile(test_sweep=SWEEP)
    path = slower.folder / "both.jsonl"
    shutil.copy(slower.folder / "r.jsonl", path)
    few = ("--slm-concurrency=4,8,16", "--slm-engine-arg=t_inf=2000", "--slm-input-len=64", "--slm-output-len=32")
    inner.runpytest_inprocess(*SMALL, *QUIET, *few, f"--slm-records={path}", "--slm-budget=0", "test_sweep.py")
    seen, lines = report(path)
    text = "\n".join(lines)
    assert seen == 1 and "opt-125m: FAIL" in text and "throughput-plateau" in text
    plan = inner.runpytest_inprocess(
        *GATED, f"--slm-records={path}", "test_gate_shipped.py", "--slm-plan", "--slm-resume"
    )
    plan.stdout.fnmatch_lines(["*test_no_worse?opt-125m-throughput? (2 s)"])


# What is broken off, or does not come about


def test_a_candidate_that_dies_is_named_and_later_items_say_that_it_broke_off(gated, inner):
    result = gated("dies", "--slm-side=candidate:arg=die_at=16")
    assert result.ret == 3
    result.assert_outcomes(errors=6)
    properties = ElementTree.parse(inner.path / "dies.xml").iter("property")
    assert [p.attrib["value"] for p in properties] == ["broken off"] * 6
    text = "\n".join(line for line in result.outlines if not line.startswith("ERROR"))  # CI repeats all there
    died = "the candidate, pair 1: the simulated engine died at concurrency 16"
    assert text.count(f"EngineFailed: {died}") == 1 and text.count(f"broken off: {died}") == 5
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [((), 3, {"passed": 6, "errors": 6}), (SLOWER, 1, {"failed": 3, "passed": 3, "errors": 6})],
    ids=["the other passes", "the other fails"],
)
def test_a_gate_that_broke_off_is_no_failure_and_hides_none(gated, monkeypatch, arguments, status, told):
    run = OneGate.run

    def one_breaks(self):
        if self.model == "opt-350m":
            raise OSError("No space left on device")
        return run(self)

    monkeypatch.setattr(OneGate, "run", one_breaks)
    result = gated(f"breaks-{status}", "--slm-models=opt-125m,opt-350m", FOUR, *arguments)
    assert result.ret == status
    result.assert_outcomes(**told)
    result.stdout.fnmatch_lines(["*OSError: No space left*", "EngineFailed: *broken off: OSError: No space*"])


def test_an_assertion_of_our_own_is_no_verdict(gated, monkeypatch):
    def breaks(self):
        raise AssertionError("what cannot be")

    monkeypatch.setattr(OneGate, "run", breaks)
    result = gated("assertion")
    assert result.ret == 3
    result.assert_outcomes(errors=6)
    result.stdout.fnmatch_lines(["*AssertionError: what cannot be*", "*RuntimeError: *"])


def test_an_interrupted_gate_says_how_far_it_came_and_goes_on(inner, gated, monkeypatch):
    launched = OneGate.launch_in_turn

    def broken_off(self, launches):
        yield from islice(launched(self, launches), 6)
        raise KeyboardInterrupt

    words = (*GATED, "--slm-records=interrupted.jsonl", "test_gate_shipped.py")
    with monkeypatch.context() as patch:
        patch.setattr(OneGate, "launch_in_turn", broken_off)
        result = inner.runpytest_inprocess(*words, no_reraise_ctrlc=True)
    assert result.ret == 2
    result.stdout.fnmatch_lines(["opt-125m: speed NOT JUDGED after 3 pairs*", "  next: 1 more pair*--slm-resume*"])
    assert report(inner.path / "interrupted.jsonl")[0] == 10
    again = inner.runpytest_inprocess(*words, "--slm-resume")
    again.stdout.fnmatch_lines(["opt-125m: PASS after 4 pairs*", "note: *goes on from 3 pairs*"])


def test_a_gate_that_was_asked_for_and_did_not_come_about_is_no_pass(pytester):
    pytester.makepyfile("""
        import pytest

        def test_plain(): pass

        @pytest.mark.skip(reason="not today")
        def test_gate(slm_gate): pass
    """)
    result = pytester.runpytest_inprocess(*GATED, ".")
    assert result.ret == 10
    result.assert_outcomes(passed=1, skipped=6)
    result.stdout.fnmatch_lines(["note: --slm-gate: nothing was compared*"])


def test_a_gate_that_cannot_be_carried_out_is_an_error_before_anything_starts(gate, pytester, kept):
    assert "opt-125m at concurrency 900000" in usage_error(gate(*QUIET, "--slm-concurrency=4,900000"))
    assert not (pytester.path / ".slm").exists()


def test_where_it_cannot_be_written_for_others_the_run_goes_on(gate, pytester, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "no" / "such" / "page.md"))
    result = gate(*QUIET)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["not written for others: *"])


# Which items run


def test_with_a_gate_nothing_else_is_measured_even_where_the_whole_folder_is_given(pytester, kept):
    folder = pytester.path / "all_of_them"  # of another name: their modules may be imported already
    shutil.copytree(BENCHMARKS, folder, ignore=shutil.ignore_patterns("__pycache__", "asv", "baselines"))
    result = pytester.runpytest_inprocess(folder.name, *GATED)
    found, archive = result.parseoutcomes(), read(pytester.path / ".slm/records.jsonl")
    assert result.ret == 0 and found["passed"] == 6 and found["deselected"] > 20
    assert found.keys() == {"passed", "deselected"} and all(m.paired for m in archive.measurements)
    assert archive.sessions[-1].plan["sweeps"] == {}, "what was not to be measured is not missing"


def test_each_model_has_its_gate(gated):
    result = gated(
        "two", "--slm-models=opt-125m,opt-350m", "--slm-side=candidate:arg=die_at=16", "--slm-concurrency=4,8"
    )
    result.assert_outcomes(passed=12)
    result.stdout.fnmatch_lines(["opt-125m: PASS*", "opt-350m: PASS*"])
    assert len({m.paired.gate for m in read(result.folder / "r.jsonl").measurements}) == 2


def test_without_a_gate_or_a_mode_its_items_are_skipped_with_the_reason(gated, inner):
    for words, why in ((["--slm-simulate"], "--slm-gate"), ([], "--slm-simulate or --slm-endpoint")):
        result = inner.runpytest_inprocess("-rs", *QUIET, "test_gate_shipped.py", *words)
        assert set(result.parseoutcomes()) == {"skipped"}
        result.stdout.fnmatch_lines([f"*SKIPPED*needs *{why}*"])


def test_a_plan_estimates_a_clear_case_once_for_each_model(gate, pytester, kept):
    result = gate("--slm-plan", *QUIET)
    assert result.ret == 0 and not (pytester.path / ".slm").exists()
    result.stdout.fnmatch_lines(
        [
            "*0:00    test_no_worse?opt-125m-throughput? (2 s)",
            "*0:02    test_no_worse?opt-125m-latency? (measures nothing)",
            "*end: 6 items",
            "note: a gate is estimated as a clear case, 4 pairs*12",
        ]
    )


OWN = """
    import pytest
    from pytest_slmserve.analysis.verdict import State

    @pytest.fixture
    def broken(slm_gates):
        raise OSError("no file")

    def test_it(broken): pass

    def test_mine(slm_gates):
        gated = slm_gates.of("opt-125m")
        assert gated.outcome is State.PASSES and len(gated.pairs) == 4
        assert gated.verdict("throughput") and slm_gates.of("opt-125m") is gated

    def test_wrong(slm_gates):
        assert slm_gates.of("opt-125m").pairs == ()

    def test_nothing_of_mine(slm_measure):
        assert False, "measures something else"
"""


def test_a_user_s_own_test_reads_the_same_gate_and_its_assertion_fails(pytester):
    """An error before it is none."""
    pytester.makepyfile(OWN)
    result = pytester.runpytest_inprocess(*GATED)
    assert result.ret == 1
    assert outcomes(result) == {"test_it": "ERROR", "test_mine": "PASSED", "test_wrong": "FAILED"}
    result.stdout.fnmatch_lines(["opt-125m: PASS after 4 pairs of launches"])
    assert pytester.runpytest_inprocess(*GATED, "-k", "test_it").ret == 3
    waits = pytester.runpytest_inprocess("--slm-simulate", "-rs", "-k", "test_mine", *QUIET)
    waits.stdout.fnmatch_lines(["*SKIPPED*needs --slm-gate"])


# The noise that is known


def test_a_model_given_as_a_path_has_its_gate_and_the_noise_of_its_calibration(pytester, gate, kept):
    """Of which a report knows too: where it hides a margin, nothing passes."""
    folder = pytester.path / "models" / "Mine-1B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(CATALOGUE["opt-125m"].config)))
    words = ("--slm-models=models/Mine-1B", *QUIET)
    assert gate(*words, "--slm-calibrate").ret == 0
    path = pytester.path / ".slm" / "calibration.json"
    (known,) = json.loads(path.read_text("utf-8"))
    assert known["model"] == "mine-1b"
    (pytester.path / ".slm/records.jsonl").unlink()
    result = gate(*words)
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["mine-1b: PASS after 4 pairs*", "note: mine-1b, by 12 pairs*"])
    known["worse"]["s to start"]["fail"] = 0.4
    path.write_text(json.dumps([known]), "utf-8")
    status, lines = report(pytester.path / ".slm/records.jsonl")
    assert status == 10 and any("15 %" in line and "40 %" in line for line in lines)
    assert any(line.startswith("next: ") and "slm_gate_pairs=24" in line for line in lines), "it has ended"


# Pages, and how to repeat a run


def test_a_failure_says_how_to_repeat_it_in_the_terminal_and_on_the_page(gate, pytester, monkeypatch, kept):
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


def command_on(page):
    return html.unescape(page.read_text("utf-8").split('aria-labelledby="reproduce">')[1].partition("</code>")[0])


def test_a_sweep_s_page_has_the_path_and_each_option(pytester):
    pytest.importorskip("jinja2", reason="a page needs Jinja2")
    pytester.makepyfile(SWEEP)
    few = ("--slm-concurrency=1,4,16", "--slm-records=r.jsonl", "--slm-output-len=32")
    result = pytester.runpytest_inprocess(*SMALL, *few, "--slm-html=out.html", "--slm-resume", *QUIET)
    assert main(["report", "r.jsonl", "--html", "again.html"]) == result.ret
    command = command_on(pytester.path / "out.html")
    assert command == command_on(pytester.path / "again.html") and {"--slm-window=1", *few} < {*command.split()}
    assert "--slm-html" not in command and "--slm-resume" not in command


def test_shipped_tests_are_named_as_they_were_typed(pytester):
    pytest.importorskip("jinja2", reason="a page needs Jinja2")
    shipped = ("--pyargs", "pytest_slmserve.quickstart", "--slm-simulate")
    pytester.runpytest_inprocess(*shipped, "--slm-html=out.html", "-k", "slo", *QUIET)
    said = (pytester.path / "out.html").read_text("utf-8")
    assert ">pytest --pyargs pytest_slmserve.quickstart -k slo --slm-simulate</code>" in said


# Engines with processes


def test_two_pairs_run_on_the_cpu_and_the_option_goes_on_with_them(pytester, stand_in_here, archive, monkeypatch):
    """Engine, worker and process are real; behind them is a stand-in for vLLM."""
    put(pytester.path, "test_gate")
    monkeypatch.setenv("SLM_GATE_PAIRS", "4")
    words = ("--slm-cpu", "--slm-models=opt-tiny", "--slm-input-len=16", "--slm-output-len=8", "--slm-window=1.5")
    words = (*words, "--slm-concurrency=2,4", "--slm-telemetry=off", stand_in_here, *QUIET)
    result = pytester.runpytest_inprocess(*words)
    assert result.ret == 0
    result.assert_outcomes(passed=1)
    goes_on = "--slm-gate --slm-resume --slm-concurrency=4"
    result.stdout.fnmatch_lines(
        ["opt-tiny: speed NOT JUDGED after 2 pairs*", f"  next: 2 more pairs*{goes_on}", "kv-blocks: pass, *"]
    )
    result.stdout.no_fnmatch_line("output tokens/s*")
    assert len({m.launch for m in archive().measurements}) == 4
    result = pytester.runpytest_inprocess(*words, *goes_on.split())
    result.stdout.fnmatch_lines(["opt-tiny: * after 4 pairs*", "note: *goes on from 2 pairs*"])
    found = archive().measurements
    assert len({m.launch for m in found}) == 8 and len({m.paired.gate for m in found}) == 1
