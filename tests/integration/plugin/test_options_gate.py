"""A gate's sides, margin, pairs, caches, traces and waivers: each option reaches both sides, or one, as it says.

Which options go together is told in tests/unit/options; what a decision rests on, in tests/unit/analysis/gate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from inside import GATE as WORDS
from inside import SWEEP

from pytest_slmserve.engines import pool
from pytest_slmserve.engines.base import PROFILE_FOLDER
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.telemetry import host

NO_WORSE = "def test_no_worse(slm_gate): assert slm_gate()\n"
GATE = tuple(word for word in WORDS if word not in ("-p", "no:cacheprovider"))
GATE += ("--slm-window=0.4", "--slm-input-len=16", "--slm-output-len=8")
SLOWER = ("--slm-side=baseline:arg=t_inf=10000", "--slm-side=candidate:arg=t_inf=9000")
SIDES = "baseline", "candidate"
TRACES = "--override-ini=slm_profile=traces"


def side_words(side, *entries):
    return tuple(f"--slm-side={side}:{entry}" for entry in entries)


def refuses(ran, *facts):
    """Whether it is wrong usage that names these facts, and nothing was written."""
    assert ran.ret == pytest.ExitCode.USAGE_ERROR and "Traceback" not in ran.err and not (ran.folder / ".slm").exists()
    assert [fact for fact in facts if fact not in ran.err] == []
    return True


def page(ran, name="gate.json"):
    (found,) = json.loads((ran.folder / ".slm" / name).read_text("utf-8"))
    return found


@pytest.fixture
def run(runs):
    """One gate that is not shared, because something is planted: `run("--slm-gate-margin=10%")`."""
    return lambda *words, **more: runs.anew(NO_WORSE, *GATE, *words, **more)


@pytest.fixture
def equal(runs):
    """A gate of two equal sides."""
    return runs(NO_WORSE, *GATE)


# Which tests it runs


def test_it_runs_alone_and_tells_what_it_leaves_out(runs):
    both = runs(NO_WORSE + SWEEP.replace("\n    ", "\n"), *GATE)
    assert both.ret == 0 and both.counts == {"passed": 6, "deselected": 3}
    [told] = [line for line in both.out.splitlines() if line.startswith("slmserve leaves out")]
    assert " 3 tests" in told
    words = [word for word in GATE if word != "--slm-gate"]
    ungated = runs(NO_WORSE + SWEEP.replace("\n    ", "\n"), *words, "-k", "not plateau")
    assert ungated.counts == {"passed": 2, "skipped": 1, "deselected": 1}


def test_an_ini_file_may_wait_for_a_mode_and_the_environment_may_not(pytester, monkeypatch):
    pytester.makepyfile(NO_WORSE)
    ini = pytester.makeini("[pytest]\nslm_gate = 1\nslm_side = baseline:python=/my/python\n")
    pytester.runpytest_inprocess("-p", "no:benchmark").assert_outcomes(skipped=1)
    ini.unlink()
    monkeypatch.setenv("SLM_GATE", "1")
    assert pytester.runpytest_inprocess("-p", "no:benchmark").ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize("flag", ["--slm-gate", "--slm-calibrate"])
def test_no_item_to_gate_is_an_error_that_says_where_there_are_some(runs, flag):
    assert refuses(runs(SWEEP, *GATE, flag), f"{flag}:", "slm_gate", "--pyargs pytest_slmserve.benchmarks")


def test_a_file_that_cannot_be_imported_is_told_and_not_that_no_test_gates(runs):
    broken = runs("import nothing_of_that_name", *GATE)
    assert broken.ret == pytest.ExitCode.INTERRUPTED
    assert "nothing_of_that_name" in broken.out and "slm_gate" not in broken.err


# Sides


@pytest.fixture
def unequal(runs):
    """A gate with words for both sides, and for each."""
    common = "--slm-engine-arg=power_w=300", "--slm-engine-arg=max_num_seqs=64", "--slm-env=A=1", "--slm-env=B=1"
    own = ("max_num_batched_tokens=2048", "max_num_seqs=32", "enforce_eager=true", "dtype=bfloat16", "seed=3")
    baseline = ("python=/my/python", "env=A=2", "env=PYTHONPATH=/x:/y", *(f"arg={each}" for each in own))
    candidate = ("arg=power_w=200", "env=A=3")
    words = "--slm-python=/both/python", *side_words("baseline", *baseline), *side_words("candidate", *candidate)
    return runs(NO_WORSE, *GATE, *common, *words)


def test_words_of_a_side_go_over_those_of_both(unequal):
    specs = {m.paired.side: m.spec for m in unequal.measured()}
    mine, other = (specs[side] for side in SIDES)
    assert (mine.python, other.python) == ("/my/python", "/both/python")
    assert mine.env == (("A", "2"), ("B", "1"), ("PYTHONPATH", "/x:/y")) and other.env == (("A", "3"), ("B", "1"))
    assert (dict(mine.extra)["power_w"], dict(other.extra)["power_w"]) == (300, 200)


def test_limits_that_a_specification_names_are_set_there(unequal):
    specs = {m.paired.side: m.spec for m in unequal.measured()}
    mine, other = (specs[side] for side in SIDES)
    assert (mine.max_num_batched_tokens, mine.max_num_seqs, mine.enforce_eager) == (2048, 32, True)
    assert (mine.dtype, mine.seed) == ("bfloat16", 3)
    assert (other.max_num_batched_tokens, other.max_num_seqs, other.enforce_eager) == (8192, 64, False)
    assert not {"max_num_seqs", "max_num_batched_tokens"} & {name for name, _ in (*mine.extra, *other.extra)}


def test_what_differs_is_told_of_each_side(unequal, equal):
    [mine] = [line for line in unequal.out.splitlines() if "baseline: " in line and "/my/python" in line]
    [other] = [line for line in unequal.out.splitlines() if "candidate: " in line and "/both/python" in line]
    assert "32" in mine and "2,048" in mine and "64" in other
    unequal.lines.no_fnmatch_line("*both sides*are the same*")
    equal.lines.fnmatch_lines(["*both sides*are the same*"])


@pytest.mark.parametrize(
    ("side", "argument", "facts"),
    [
        ("baseline", "max_num_seqs=many", "max_num_seqs 'many'"),
        ("baseline", "max_model_len=20", "24 max_model_len 20"),
        ("candidate", "enforce_eager=yes", "'yes' enforce_eager=false"),
    ],
    ids=["a word", "too short", "no truth"],
)
def test_nonsense_of_a_side_is_refused_before_anything_starts(runs, side, argument, facts):
    assert refuses(runs(NO_WORSE, *GATE, *side_words(side, f"arg={argument}")), side, *facts.split())


def test_an_argument_that_the_engine_does_not_know_breaks_the_gate_off_and_names_the_side(runs):
    broken = runs(NO_WORSE, *GATE, *side_words("baseline", "arg=t_half=3"))
    assert broken.ret == 3, "broken off is no verdict"
    broken.lines.fnmatch_lines(["*BadUsage: *baseline, pair 1: *t_half*"])


@pytest.fixture
def releases(monkeypatch):
    """What interpreters hold; pytest's own has no vLLM."""

    def hold(python, env):
        vllm = {"/old/python": "0.31.0", "/new/python": "0.32.0"}.get(python)
        if vllm is None and python != sys.executable:
            raise host.BadUsage(f"{python} is not a Python interpreter that runs", "--slm-python")
        return {"python": "3.11.7", "vllm": vllm, "torch": "2.13.0"}

    monkeypatch.setattr(host, "interpreter", hold)


def test_with_an_interpreter_for_each_side_that_of_pytest_needs_no_vllm(runs, releases):
    chosen = "--slm-side=baseline:python=/old/python", "--slm-side=candidate:python=/new/python"
    ran = runs.anew(NO_WORSE, "--slm-cpu", "--slm-gate", "--collect-only", *chosen)
    assert ran.ret == 0
    ran.lines.fnmatch_lines(["slmserve: *0.32.0*", "*test_no_worse?opt-tiny-throughput?*"])


@pytest.mark.parametrize("side", SIDES)
def test_an_interpreter_that_does_not_run_is_refused_before_anything_starts(runs, releases, side):
    words = "--slm-cpu", "--slm-gate", "--slm-python=/new/python", f"--slm-side={side}:python=/no/such/python"
    assert refuses(runs.anew(NO_WORSE, *words), "/no/such/python")


# Margin and pairs


def test_what_is_worse_by_half_of_the_margin_fails_and_by_less_passes(runs):
    """4 % slower costs 4.2 % more."""
    slower = "--slm-side=baseline:arg=t_inf=10000", "--slm-side=candidate:arg=t_inf=9600"
    assert runs(NO_WORSE, *GATE, *slower).ret == 1
    wide = runs(NO_WORSE, *GATE, *slower, "--slm-gate-margin=10%")
    assert wide.ret == 0
    wide.lines.fnmatch_lines(["mean E2E, small load*1.0417 *10 *pass"])


def test_a_start_keeps_its_own_margin(runs):
    starts = "--slm-side=baseline:arg=start_s=20", "--slm-side=candidate:arg=start_s=30"
    ran = runs(NO_WORSE, *GATE, *starts, "--slm-gate-margin=0.5")
    assert ran.ret == 1
    ran.lines.fnmatch_lines(["s to start*1.5000 *15 *fail"])


def test_a_clear_case_takes_fewer_pairs_than_it_may(runs):
    ran = runs(NO_WORSE, *GATE, "--override-ini=slm_gate_pairs=24")
    ran.lines.fnmatch_lines(["opt-125m: PASS after 4 pairs*"])
    assert len({m.launch for m in ran.measured()}) == 8
    plan = runs(NO_WORSE, *GATE, "--override-ini=slm_gate_pairs=20", "--slm-plan")
    plan.lines.fnmatch_lines(["note: *20"])


# Caches


NAMES = {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


@pytest.fixture
def launches(monkeypatch):
    """The variables that each launch was given; where they name folders, that above stands and each gets a file."""
    seen = []

    def start(spec, extra_env, **_):
        for value in extra_env.values() if extra_env.keys() == NAMES else ():
            assert Path(value).parent.is_dir() and not Path(value).exists()
            Path(value).mkdir()
            (Path(value) / "compiled").touch()
        seen.append(dict(extra_env))
        return SimulatedEngine(spec, extra_env=extra_env)

    monkeypatch.setattr(pool, "SimulatedEngine", start)
    return seen


def test_each_cold_launch_has_an_empty_folder_of_its_own_which_is_gone_afterwards(run, launches):
    ran = run("--override-ini=slm_gate_caches=cold")
    assert ran.ret == 0 and len(launches) == 8 and all(given.keys() == NAMES for given in launches)
    folders = {Path(value) for given in launches for value in given.values()}
    assert len(folders) == 24 and len({folder.parent for folder in folders}) == 8
    assert not any(folder.parent.exists() for folder in folders)
    found = ran.measured()
    assert {m.paired.caches for m in found} == {page(ran)["caches"]} == {"cold"} and all(
        m.spec.env == () for m in found
    )
    assert len({m.spec.key for m in found}) == 1, "no part of the key"
    launches.clear()
    assert run("--override-ini=slm_gate_caches=cold", "--slm-side=candidate:arg=die_at=16").ret == 3
    assert launches and not any(Path(value).parent.exists() for given in launches for value in given.values())


def test_warm_caches_are_those_of_everybody_unless_a_side_may_run_other_code(run, launches, monkeypatch):
    """vLLM keeps what it knows of a model's class for one version of its file: releases would displace each other's."""
    ran = run("--slm-side=candidate:arg=max_num_batched_tokens=2048")
    assert launches == [{}] * 8 and {m.paired.caches for m in ran.measured()} == {page(ran)["caches"]} == {"warm"}
    for variable, place, words in (
        ("VLLM_CACHE_ROOT", "/somewhere", ()),
        ("XDG_CACHE_HOME", "/elsewhere", ("--slm-side=baseline:env=VLLM_CACHE_ROOT=/mine",)),
    ):
        launches.clear()
        monkeypatch.setenv(variable, place)
        assert run("--slm-side=candidate:env=PYTHONPATH=/opt/other", *words).ret == 0
        monkeypatch.delenv(variable)
        folder = place if variable == "VLLM_CACHE_ROOT" else f"{place}/pytest-slmserve"
        baseline, candidate = ({"VLLM_CACHE_ROOT": f"{folder}/gate-{side}"} for side in SIDES)
        baseline = {} if words else baseline  # which has said where
        assert launches[:4] == [baseline, candidate, candidate, baseline] and len(launches) == 8


# A calibration


@pytest.fixture
def calibrated(runs):
    return runs(NO_WORSE, *GATE, "--slm-calibrate", TRACES)


def test_a_calibration_makes_all_pairs_and_keeps_their_noise(calibrated):
    assert calibrated.ret == 0 and calibrated.counts == {"passed": 6}
    calibrated.lines.fnmatch_lines(["opt-125m: PASS after 12 pairs*", "note: opt-125m, by 12 pairs *100 %*"])
    assert len({m.launch for m in calibrated.measured()}) == 24
    kept = page(calibrated, "calibration.json")
    assert kept["model"] == "opt-125m" and len(kept["noise"]["costs"]) == 12
    assert set(kept["worse"]) == set(kept["noise"]["names"]) and kept["unchanged"]["fail"] == 0.0
    assert not (calibrated.folder / "traces").exists(), "it is not profiled"


def test_a_later_gate_knows_what_it_can_find_and_passes_nothing_that_the_noise_hides(run, calibrated, equal):
    """One of other loads knows nothing of it."""
    known = "note: *by 12 pairs of equal sides*"
    equal.lines.no_fnmatch_line(known)
    run(folder=calibrated.folder).lines.fnmatch_lines(["opt-125m: PASS after 4 pairs*", known])
    run("--slm-ramp-up=burst", folder=calibrated.folder).lines.no_fnmatch_line(known)
    kept = page(calibrated, "calibration.json")
    kept["worse"]["s to start"]["fail"] = 0.4
    (calibrated.folder / ".slm" / "calibration.json").write_text(json.dumps([kept]), "utf-8")
    noisy = run(folder=calibrated.folder)
    assert noisy.ret == 10
    noisy.lines.fnmatch_lines(["*s to start*inconclusive*15 %*40 %*"])


# A rehearsal


@pytest.mark.parametrize(
    ("slowdown", "status", "state"), [([], 0, "passes"), (["1.5%"], 10, "inconclusive"), (["5%"], 1, "fails")]
)
def test_each_end_of_a_gate_can_be_seen(runs, monkeypatch, tmp_path, slowdown, status, state):
    """By the default margin, pairs and loads, where a workflow would run it."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "page.md"))
    words = [f"--slm-simulate-slowdown={share}" for share in slowdown]
    ran = runs.anew(NO_WORSE, "--slm-simulate", "--slm-gate", "--slm-models=opt-1.3b", "--junitxml=out.xml", *words)
    found = page(ran)
    word = found["outcome"].upper()
    assert ran.ret == status and word == {0: "PASS", 10: "INCONCLUSIVE", 1: "FAIL"}[status]
    ran.lines.fnmatch_lines([f"opt-1.3b: {word} after * pairs of launches"])
    assert all(each["ratio"]["low"] < each["ratio"]["value"] < each["ratio"]["high"] for each in found["gated"])
    assert f"### opt-1.3b: {word} after" in (tmp_path / "page.md").read_text("utf-8")
    cases = ElementTree.parse(ran.folder / "out.xml").getroot().iter("testcase")
    (case,) = (case for case in cases if case.attrib["name"] == "test_no_worse[opt-1.3b-throughput]")
    assert {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}["slm_gate"] == state


def test_a_candidate_whose_argument_costs_something_fails(runs):
    words = "--slm-simulate", "--slm-gate", "--slm-models=opt-125m", "--slm-side=candidate:arg=max_num_seqs=64"
    ran = runs(NO_WORSE, *words)
    assert ran.ret == 1
    ran.lines.fnmatch_lines(["output tokens/s *fail", "mean E2E *pass"])


def test_a_slowdown_is_of_the_candidate_alone_and_of_no_start(runs):
    ran = runs(NO_WORSE, *GATE, "--slm-simulate-slowdown=0.05")
    figures = ("tokens/s, large load*0.952*fail", "E2E, small load*1.0500*fail", "to start*1.0000*pass")
    ran.lines.fnmatch_lines(["*candidate: *slowdown=0.05*", *(f"*{each}" for each in figures)])
    ran.lines.fnmatch_lines(["to repeat it: pytest* --slm-simulate-slowdown=0.05 *"])
    told = {(m.paired.side, dict(m.spec.extra).get("slowdown")) for m in ran.measured()}
    assert told == {("baseline", None), ("candidate", 0.05)}


# Traces of a gate that failed


@pytest.fixture
def profiled(monkeypatch):
    """The loads that were served under a profiler, and which launches could have been."""
    loads, places = [], []

    class Engine(SimulatedEngine):
        def __init__(self, spec, extra_env, **_):
            super().__init__(spec, extra_env=extra_env)
            places.append(PROFILE_FOLDER in extra_env)

        def profile(self, workload, load):
            loads.append(load.concurrency)
            return super().profile(workload, load)

    monkeypatch.setattr(pool, "SimulatedEngine", Engine)
    return loads, places


def traces_of(ran):
    return sorted((ran.folder / "traces").rglob("*.trace.json"))


def test_a_failed_gate_names_a_new_trace_of_each_side(run, profiled):
    loads, places = profiled
    ran = run(*SLOWER, TRACES)
    first = traces_of(ran)
    assert ran.ret == 1 and [path.parent.name for path in first] == [*SIDES] and loads == [16, 16], "of the throughput"
    [note] = [line for line in ran.out.splitlines() if line.startswith("note: traces of opt-125m at 16")]
    assert all(path.name in note for path in first)
    assert places == [False] * 8 + [True] * 2, "no measured launch can be profiled"
    assert len({m.launch for m in ran.measured()}) == 8
    again = run(*SLOWER, TRACES, folder=ran.folder)
    [note] = [line for line in again.out.splitlines() if line.startswith("note: traces of")]
    assert note.count(".trace.json") == 2 and not any(path.name in note for path in first)
    assert len(traces_of(again)) == 4


@pytest.mark.parametrize(
    "words",
    [(TRACES,), (TRACES, "--slm-side=candidate:arg=start_s=60"), (TRACES, "--slm-side=candidate:arg=lost_from=4"),
     SLOWER],
    ids=["passes", "start alone", "nothing counts", "not asked for"],
)  # fmt: skip
def test_nothing_is_profiled_where_no_load_fails_or_nobody_asks(run, profiled, words):
    ran = run(*words)
    assert profiled[1] and not any(profiled[1]) and not (ran.folder / "traces").exists()


LOST = {
    "no profiler": (None, ("--slm-side=candidate:arg=profiler=false", TRACES), 1),
    "it died": (EngineFailed("it died; its log ends with\nmany lines"), (TRACES,), 2),
    "a bug": (KeyError("problem"), (TRACES,), 2),
    "no folder": (None, ("--override-ini=slm_profile=test_inner.py",), 2),
}


@pytest.mark.parametrize("case", LOST)
def test_a_trace_that_cannot_be_had_is_said_and_spoils_nothing(run, monkeypatch, case):
    error, words, lost = LOST[case]

    def fail(self, workload, load):
        raise error

    if error:
        monkeypatch.setattr(SimulatedEngine, "profile", fail)
    ran = run(*SLOWER, *words)
    [note] = [line for line in ran.out.splitlines() if line.startswith("note: traces of")]
    assert ran.counts == {"failed": 3, "passed": 3} and note.count("none (") == lost and "many lines" not in ran.out


# Waivers


ROW = {"model": "opt-125m", "device": "*", "owner": "Ada", "reason": "fixed in 0.27", "until": "2999-12-31"}
COSTS = "throughput", "latency", "energy"


@pytest.fixture
def waive(run, tmp_path):
    """Runs a gate of a slower candidate with a waiver for each endpoint named."""

    def waived(*endpoints, **other):
        rows = [{**ROW, "endpoint": endpoint, **other} for endpoint in endpoints]
        (tmp_path / "known.json").write_text(json.dumps(rows), "utf-8")
        return run(*SLOWER, f"--override-ini=slm_waivers={tmp_path}/known.json", "-rxX")

    return waived


def test_a_waived_regression_is_an_expected_failure_that_names_its_owner(waive):
    all_of_them = waive(*COSTS)
    assert all_of_them.ret == 0 and all_of_them.counts == {"passed": 3, "xfailed": 3}
    all_of_them.lines.fnmatch_lines(["XFAIL *throughput of opt-125m on *2999-12-31*Ada*fixed in 0.27*"])
    one = waive("throughput")
    assert one.ret == 1 and one.counts == {"passed": 3, "xfailed": 1, "failed": 2}


def test_an_expired_waiver_and_one_of_another_model_excuse_nothing(waive):
    expired = waive("throughput", until="2020-01-31")
    assert expired.counts == {"passed": 3, "failed": 3}
    expired.lines.fnmatch_lines(["*throughput of opt-125m on *2020-01-31*Ada*"])
    assert waive(*COSTS, model="opt-13b").counts == {"passed": 3, "failed": 3}


def test_a_waiver_of_what_no_gate_compares_and_no_file_are_refused(waive, run):
    assert refuses(waive("requests_per_s"), "known.json", "'requests_per_s'")
    assert refuses(run("--override-ini=slm_waivers=nowhere.json"), "nowhere.json")
