"""Options of a gate: its sides, margin, pairs, caches, traces and waivers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from inside import GATE, SWEEP, usage_error
from shipped import put

from pytest_slmserve.analysis.estimates import FIRST_LOOKS
from pytest_slmserve.analysis.gate.decision import GateCriteria
from pytest_slmserve.engines import pool
from pytest_slmserve.engines.base import PROFILE_FOLDER
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.options.table import FEWEST_PAIRS, OPTS
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.telemetry import host

# gate


def test_it_needs_a_mode_for_nothing_measured_is_no_pass(gate, pytester):
    gate("--collect-only")
    text = usage_error(pytester.runpytest_inprocess("--slm-gate"))
    assert "--slm-gate needs an engine to measure" in text
    assert "with --slm-gpu, --slm-cpu or --slm-simulate" in text


def test_the_environment_needs_one_too(gate, pytester, monkeypatch):
    gate("--collect-only")
    monkeypatch.setenv("SLM_GATE", "1")
    usage_error(pytester.runpytest_inprocess())
    pytester.runpytest_inprocess(*GATE[2:], "--slm-simulate").assert_outcomes(passed=6)


def test_an_ini_file_may_wait_for_one(gate, pytester):
    gate("--collect-only")
    pytester.makeini("[pytest]\nslm_gate = 1\n")
    pytester.runpytest_inprocess().assert_outcomes(skipped=1)


def test_without_it_the_same_file_measures_its_points(pytester, gate):
    gate("--collect-only")
    pytester.makepyfile(test_sweep=SWEEP)
    words = [word for word in GATE if word != "--slm-gate"]
    pytester.runpytest_inprocess(*words, "-k", "not plateau").assert_outcomes(passed=2, skipped=1, deselected=1)
    pytester.runpytest_inprocess(*GATE).assert_outcomes(passed=6, deselected=3)


@pytest.mark.parametrize("flag", ["--slm-gate", "--slm-calibrate"])
def test_no_item_to_gate_is_an_error_that_says_where_there_are_some(pytester, flag):
    pytester.makepyfile(SWEEP)
    words = [flag if word == "--slm-gate" else word for word in GATE]
    text = usage_error(pytester.runpytest_inprocess(*words))
    assert f"{flag}: no test uses slm_gate\n  try: --pyargs pytest_slmserve.benchmarks" in text


def test_a_file_that_cannot_be_imported_is_told_and_not_that_no_test_gates(pytester):
    pytester.makepyfile("import nothing_of_that_name")
    result = pytester.runpytest_inprocess(*GATE)
    assert result.ret == pytest.ExitCode.INTERRUPTED and "no test uses" not in result.stderr.str()
    result.stdout.fnmatch_lines(["*nothing_of_that_name*"])


def test_what_is_left_out_for_it_is_told(pytester, gate):
    gate("--collect-only")
    pytester.makepyfile(test_sweep=SWEEP)
    pytester.runpytest_inprocess(*GATE).stdout.fnmatch_lines(["slmserve leaves out 3 tests: a gate runs alone"])


# baseline_engine_arg


def specs(archive):
    return {m.paired.side: m.spec for m in archive().measurements}


def test_it_reaches_that_side_over_what_both_have(gate, archive):
    gate("--slm-engine-arg=power_w=300", "--slm-side=baseline:arg=power_w=200")
    found = specs(archive)
    assert dict(found["baseline"].extra)["power_w"] == 200
    assert dict(found["candidate"].extra)["power_w"] == 300


def test_the_limits_that_a_specification_names_are_set_there(gate, archive):
    arguments = ("max_num_batched_tokens=2048", "max_num_seqs=32", "enforce_eager=true", "dtype=bfloat16", "seed=3")
    result = gate("--slm-engine-arg=max_num_seqs=64", *(f"--slm-side=baseline:arg={each}" for each in arguments))
    found = specs(archive)
    mine, other = found["baseline"], found["candidate"]
    assert (mine.max_num_batched_tokens, mine.max_num_seqs, mine.enforce_eager) == (2048, 32, True)
    assert (mine.dtype, mine.seed) == ("bfloat16", 3)
    assert (other.max_num_batched_tokens, other.max_num_seqs, other.enforce_eager) == (8192, 64, False)
    assert not {"max_num_seqs", "max_num_batched_tokens"} & {name for name, _ in (*mine.extra, *other.extra)}
    result.stdout.fnmatch_lines(["*baseline: *max_num_seqs 32, max_num_batched_tokens 2,048*"])


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("max_num_seqs=many", "the baseline: max_num_seqs is a whole number, not 'many'"),
        ("max_model_len=64", "the baseline: requests of 96 tokens do not fit max_model_len 64"),
        ("eager", "--slm-side: 'baseline:arg=eager' is not NAME=VALUE"),
    ],
)
def test_nonsense_is_refused_before_anything_starts(gate, pytester, argument, problem):
    assert problem in usage_error(gate(f"--slm-side=baseline:arg={argument}"))
    assert not (pytester.path / ".slm").exists()


def test_an_argument_that_the_engine_does_not_know_breaks_the_gate_off_and_names_the_side(gate):
    result = gate("--slm-side=baseline:arg=t_half=3")
    assert result.ret == 3, "broken off is no verdict"
    result.stdout.fnmatch_lines(["*BadUsage: the baseline, pair 1: the simulated engine has no such argument*t_half*"])


# baseline_env


def test_it_goes_over_that_of_both(gate, archive):
    result = gate(
        "--slm-env=A=1", "--slm-env=B=1", "--slm-side=baseline:env=A=2", "--slm-side=baseline:env=PYTHONPATH=/x:/y"
    )
    result.stdout.no_fnmatch_line("*both sides*are the same*")
    env = {m.paired.side: m.spec.env for m in archive().measurements}
    assert env["baseline"] == (("A", "2"), ("B", "1"), ("PYTHONPATH", "/x:/y"))
    assert env["candidate"] == (("A", "1"), ("B", "1"))


# baseline_python


@pytest.fixture
def releases(monkeypatch):
    """What interpreters hold; pytest's own has no vLLM."""

    def hold(python, env):
        vllm = {"/old/python": "0.31.0", "/new/python": "0.32.0"}.get(python)
        if vllm is None and python != sys.executable:
            raise host.BadUsage(f"{python} is not a Python interpreter that runs", "--slm-python")
        return {"python": "3.11.7", "vllm": vllm, "torch": "2.13.0"}

    monkeypatch.setattr(host, "interpreter", hold)


def test_it_is_that_side_s_alone(gate, archive):
    assert gate("--slm-python=/both/python", "--slm-side=baseline:python=/my/python").ret == 0
    python = {m.paired.side: m.spec.python for m in archive().measurements}
    assert python == {"baseline": "/my/python", "candidate": "/both/python"}


def test_with_one_for_each_side_that_of_pytest_needs_no_vllm(gate, pytester, releases):
    gate("--collect-only")
    chosen = ("--slm-side=baseline:python=/old/python", "--slm-side=candidate:python=/new/python")
    result = pytester.runpytest_inprocess("--slm-cpu", "--slm-gate", "--collect-only", *chosen)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["slmserve: *, vLLM 0.32.0; *", "*test_no_worse?opt-tiny-throughput?*"])


def test_one_that_does_not_run_is_refused_before_anything_starts(gate, pytester, releases):
    gate("--collect-only")
    words = ("--slm-cpu", "--slm-gate", "--slm-python=/new/python", "--slm-side=baseline:python=/no/such/python")
    assert "/no/such/python is not a Python interpreter that runs" in usage_error(pytester.runpytest_inprocess(*words))
    assert not (pytester.path / ".slm").exists()


def test_an_ini_file_may_hold_it_for_other_runs(pytester, sweep):
    pytester.makeini("[pytest]\nslm_baseline_python = /my/python\n")
    assert sweep("--slm-plan").ret == 0


# candidate_engine_arg


def test_candidate_engine_arg_it_reaches_that_side_over_what_both_have(gate, archive):
    gate("--slm-engine-arg=power_w=300", "--slm-side=candidate:arg=power_w=200", "--slm-side=candidate:arg=seed=3")
    found = {m.paired.side: (dict(m.spec.extra)["power_w"], m.spec.seed) for m in archive().measurements}
    assert found == {"baseline": (300, 0), "candidate": (200, 3)}


def test_candidate_engine_arg_nonsense_is_refused_before_anything_starts(gate, pytester):
    text = usage_error(gate("--slm-side=candidate:arg=enforce_eager=yes"))
    assert "the candidate: enforce_eager is true or false, not 'yes'\n  try: enforce_eager=false" in text
    assert not (pytester.path / ".slm").exists()


# candidate_env


def test_candidate_env_it_goes_over_that_of_both(gate, archive):
    assert gate("--slm-env=A=1", "--slm-side=candidate:env=A=2", "--slm-side=candidate:env=PYTHONPATH=/x:/y").ret == 0
    env = {m.paired.side: m.spec.env for m in archive().measurements}
    assert env == {"baseline": (("A", "1"),), "candidate": (("A", "2"), ("PYTHONPATH", "/x:/y"))}


# candidate_python


def test_it_is_that_side_s_alone_and_the_report_says_it(gate, archive):
    result = gate("--slm-python=/both/python", "--slm-side=candidate:python=/my/python")
    python = {m.paired.side: m.spec.python for m in archive().measurements}
    assert python == {"candidate": "/my/python", "baseline": "/both/python"}
    result.stdout.fnmatch_lines(["*baseline: *, /both/python, *", "*candidate: *, /my/python, *"])


def test_candidate_python_one_that_does_not_run_is_refused_before_anything_starts(gate, pytester):
    words = ("--slm-cpu", "--slm-gate", "--slm-side=candidate:python=/no/such/python")
    gate("--collect-only")
    assert "/no/such/python is not a Python interpreter that runs" in usage_error(pytester.runpytest_inprocess(*words))
    assert not (pytester.path / ".slm").exists()


# gate_margin


SLOWER = ("--slm-side=baseline:arg=t_inf=10000", "--slm-side=candidate:arg=t_inf=9600")


def test_what_is_worse_by_half_of_it_fails_and_by_less_passes(gate):
    """4 % slower costs 4.2 % more."""
    assert gate(*SLOWER).ret == 1
    result = gate(*SLOWER, "--slm-gate-margin=10%")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["mean E2E, small load*1.0417 *10 *pass"])


def test_a_start_keeps_its_own(gate):
    starts = ("--slm-side=baseline:arg=start_s=20", "--slm-side=candidate:arg=start_s=30")
    result = gate(*starts, "--slm-gate-margin=0.5")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["s to start*1.5000 *15 *fail"])


def test_the_default_is_that_of_the_analysis():
    assert next(opt.default for opt in OPTS if opt.name == "gate_margin") == GateCriteria().margin


# gate_pairs


def test_a_clear_case_takes_fewer(gate, archive):
    gate("--override-ini=slm_gate_pairs=24").stdout.fnmatch_lines(["opt-125m: PASS after 4 pairs of launches"])
    assert len({m.launch for m in archive().measurements}) == 8


def test_it_is_told_with_the_price(gate):
    gate("--override-ini=slm_gate_pairs=20", "--slm-plan").stdout.fnmatch_lines(["note: *takes up to 20"])


def test_the_fewest_and_the_default_are_those_of_the_analysis():
    assert FIRST_LOOKS[0] == FEWEST_PAIRS
    assert next(opt.default for opt in OPTS if opt.name == "gate_pairs") == GateCriteria().pairs


# gate_caches


NAMES = {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


@pytest.fixture
def launches(monkeypatch):
    """The variables that each launch was given; a folder that does not stand is an error, and each gets a file."""
    seen = []

    def start(spec, extra_env, **_):
        for value in extra_env.values():
            assert Path(value).parent.is_dir() and not Path(value).exists()
            Path(value).mkdir()
            (Path(value) / "compiled").touch()
        seen.append(dict(extra_env))
        return SimulatedEngine(spec, extra_env=extra_env)

    monkeypatch.setattr(pool, "SimulatedEngine", start)
    return seen


def test_each_cold_launch_has_an_empty_folder_of_its_own_which_is_gone_afterwards(gate, launches, archive):
    result = gate("--override-ini=slm_gate_caches=cold")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["  compile caches were cold: each launch had empty ones"])
    assert len(launches) == 8 and all(given.keys() == NAMES for given in launches)
    folders = {Path(value) for given in launches for value in given.values()}
    assert len(folders) == 24 and len({folder.parent for folder in folders}) == 8
    assert not any(folder.parent.exists() for folder in folders)
    found = archive().measurements
    assert {m.paired.caches for m in found} == {"cold"} and len({m.spec.key for m in found}) == 1, "no part of the key"
    assert all(m.spec.env == () for m in found)


def test_a_launch_that_dies_leaves_no_folder_either(gate, launches):
    assert gate("--override-ini=slm_gate_caches=cold", "--slm-side=candidate:arg=die_at=16").ret == 3
    assert launches and not any(Path(value).parent.exists() for given in launches for value in given.values())


def test_warm_ones_are_those_of_everybody(gate, launches, archive, pytester):
    gate().stdout.fnmatch_lines(["  compile caches were warm: each side was launched before the first pair"])
    assert launches == [{}] * 8 and {m.paired.caches for m in archive().measurements} == {"warm"}
    (found,) = json.loads((pytester.path / ".slm" / "gate.json").read_text("utf-8"))
    assert (
        found["caches"] == "warm" and "- compile caches were warm" in (pytester.path / ".slm" / "gate.md").read_text()
    )


def test_sides_that_may_run_other_code_have_warm_ones_of_their_own(gate, monkeypatch, pytester):
    """vLLM keeps what it knows of a model's class for one version of its file: releases would displace each other's."""
    seen = []
    monkeypatch.setattr(
        pool,
        "SimulatedEngine",
        lambda spec, extra_env, **_: seen.append(dict(extra_env)) or SimulatedEngine(spec, extra_env=extra_env),
    )
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere")
    assert gate("--slm-side=candidate:env=PYTHONPATH=/opt/other").ret == 0
    sides = {"VLLM_CACHE_ROOT": "/somewhere/gate-baseline"}, {"VLLM_CACHE_ROOT": "/somewhere/gate-candidate"}
    assert len(seen) == 8 and [given in sides for given in seen] == [True] * 8
    assert seen[:4] == [sides[0], sides[1], sides[1], sides[0]]
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    seen.clear()
    assert (
        gate("--slm-side=baseline:env=VLLM_CACHE_ROOT=/mine", "--slm-side=candidate:env=PYTHONPATH=/opt/other").ret == 0
    )
    assert seen[:2] == [{}, {"VLLM_CACHE_ROOT": "/elsewhere/pytest-slmserve/gate-candidate"}], "one has said where"


def test_sides_that_differ_in_arguments_share_theirs(gate, launches):
    assert gate("--slm-side=candidate:arg=max_num_batched_tokens=2048").ret == 0
    assert launches == [{}] * 8


# calibrate


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


# simulate_slowdown


REHEARSAL = ("--slm-simulate", "--slm-gate", "-p", "no:cacheprovider")  # all else as by default


@pytest.fixture
def rehearse(pytester, monkeypatch):
    """Runs the shipped gate where a workflow would."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "page.md"))
    put(pytester.path, "test_gate")
    return lambda *args: pytester.runpytest_inprocess(*REHEARSAL, "--junitxml=out.xml", *args)


@pytest.mark.parametrize(
    ("slowdown", "status", "word", "state"),
    [([], 0, "PASS", "passes"), (["1.5%"], 10, "INCONCLUSIVE", "inconclusive"), (["5%"], 1, "FAIL", "fails")],
)
def test_each_end_of_a_gate_can_be_seen(rehearse, pytester, slowdown, status, word, state):
    """By the default margin, pairs and loads; of a model whatever, for launches are drawn alike."""
    result = rehearse("--slm-models=opt-1.3b", *[f"--slm-simulate-slowdown={share}" for share in slowdown])
    assert result.ret == status
    result.stdout.fnmatch_lines([f"opt-1.3b: {word} after * pairs of launches"])
    (found,) = json.loads((pytester.path / ".slm" / "gate.json").read_text("utf-8"))
    assert found["outcome"].upper() == word
    for endpoint in found["gated"]:
        assert endpoint["ratio"]["low"] < endpoint["ratio"]["value"] < endpoint["ratio"]["high"], "no point"
    assert f"### opt-1.3b: {word} after" in (pytester.path / "page.md").read_text("utf-8")
    cases = ElementTree.parse(pytester.path / "out.xml").getroot().iter("testcase")
    (case,) = (case for case in cases if case.attrib["name"] == "test_no_worse[opt-1.3b-throughput]")
    assert {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}["slm_gate"] == state


def test_a_candidate_whose_argument_costs_something_fails(rehearse):
    result = rehearse("--slm-models=opt-125m", "--slm-side=candidate:arg=max_num_seqs=64")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["output tokens/s *fail", "mean E2E *pass"])


def test_it_is_of_the_candidate_alone_and_of_no_start(gate, archive):
    result = gate("--slm-simulate-slowdown=0.05")
    result.stdout.fnmatch_lines(
        [
            "*candidate: *slowdown=0.05*",
            "output tokens/s, large load*0.952*fail",
            "mean E2E, small load*1.0500*fail",
            "s to start*1.0000*pass",
            "to repeat it: pytest* --slm-simulate-slowdown=0.05 *",
        ]
    )
    told = {(m.paired.side, dict(m.spec.extra).get("slowdown")) for m in archive().measurements}
    assert told == {("baseline", None), ("candidate", 0.05)}


def test_an_ini_file_may_hold_it_for_a_simulation(pytester, gate, holds):
    holds("0.32.0")
    pytester.makeini("[pytest]\nslm_simulate_slowdown = 5%\n")
    assert gate().ret == 1
    words = ["--slm-cpu" if word == "--slm-simulate" else word for word in GATE]
    assert pytester.runpytest_inprocess(*words, "--slm-models=opt-tiny", "--slm-plan").ret == 0


# profile


SLOWER_PROFILE = ("--slm-side=baseline:arg=t_inf=10000", "--slm-side=candidate:arg=t_inf=9000")


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


def test_a_failed_gate_names_a_trace_of_each_side(gate, pytester, profiled, archive):
    result = gate(*SLOWER_PROFILE, "--override-ini=slm_profile=traces")
    assert result.ret == 1
    files = {side: list((pytester.path / "traces" / "opt-125m" / side).iterdir()) for side in ("baseline", "candidate")}
    (baseline,), (candidate,) = files.values()
    result.stdout.fnmatch_lines([f"note: traces of opt-125m at 16: baseline: {baseline}; candidate: {candidate}"])
    loads, places = profiled
    assert loads == [16, 16], "that of the throughput"
    assert places == [False] * 8 + [True] * 2, "no measured launch can be profiled"
    assert len({m.launch for m in archive().measurements}) == 8


def test_earlier_traces_are_not_taken_for_new_ones(gate, pytester):
    gate(*SLOWER_PROFILE, "--override-ini=slm_profile=traces")
    text = gate(*SLOWER_PROFILE, "--override-ini=slm_profile=traces").stdout.str()
    assert text.partition("note: traces of")[2].partition("\n")[0].count(".trace.json") == 2
    assert len(list((pytester.path / "traces").rglob("*.trace.json"))) == 4


@pytest.mark.parametrize(
    "arguments", [(), ("--slm-side=candidate:arg=start_s=60",), ("--slm-side=candidate:arg=lost_from=4",)]
)
def test_nothing_is_started_where_no_load_fails(gate, pytester, profiled, arguments):
    """It passes, its start alone fails, or nothing counts."""
    gate(*arguments, "--override-ini=slm_profile=traces")
    assert not any(profiled[1]) and not (pytester.path / "traces").exists()


def test_without_the_option_nothing_is_started(gate, profiled):
    assert gate(*SLOWER_PROFILE).ret == 1
    assert profiled[1] == [False] * 8


def test_a_release_without_a_profiler_is_said_and_spoils_nothing(gate):
    result = gate(*SLOWER_PROFILE, "--slm-side=candidate:arg=profiler=false", "--override-ini=slm_profile=traces")
    result.assert_outcomes(failed=3, passed=3)
    result.stdout.fnmatch_lines(["note: traces *; candidate: none (the simulated engine has no profiler, *)"])


@pytest.mark.parametrize("error", [EngineFailed("it died; its log ends with\nmany lines"), KeyError("problem")])
def test_whatever_happens_to_it_is_said_and_spoils_nothing(gate, monkeypatch, error):
    def fail(self, workload, load):
        raise error

    monkeypatch.setattr(SimulatedEngine, "profile", fail)
    result = gate(*SLOWER_PROFILE, "--override-ini=slm_profile=traces")
    result.assert_outcomes(failed=3, passed=3)
    [note] = [line for line in result.outlines if line.startswith("note: traces of")]
    assert note.count("none (") == 2 and "many lines" not in result.stdout.str()


def test_a_folder_that_cannot_be_made_is_said_and_spoils_nothing(gate, pytester):
    (pytester.path / "file").touch()
    result = gate(*SLOWER_PROFILE, "--override-ini=slm_profile=file")
    result.assert_outcomes(failed=3, passed=3)
    result.stdout.fnmatch_lines(["note: traces *baseline: none (*Not a directory*"])


def test_a_calibration_is_not_profiled(gate, profiled):
    gate("--slm-calibrate", "--override-ini=slm_profile=traces")
    assert not any(profiled[1])


# waivers


SLOWER_WAIVERS = ("--slm-side=baseline:arg=t_inf=10000", "--slm-side=candidate:arg=t_inf=9000")


ROW = {"model": "opt-125m", "device": "*", "owner": "Ada", "reason": "fixed in 0.27", "until": "2999-12-31"}


@pytest.fixture
def waive(pytester, gate):
    """Runs a gate of a slower candidate with a waiver for each endpoint named."""

    def run(*endpoints, **other):
        rows = [{**ROW, "endpoint": endpoint, **other} for endpoint in endpoints]
        (pytester.path / "known.json").write_text(json.dumps(rows), "utf-8")
        return gate(*SLOWER_WAIVERS, "--override-ini=slm_waivers=known.json", "-rxX")

    return run


def test_a_waived_regression_is_an_expected_failure_that_names_its_owner(waive):
    result = waive("throughput", "latency", "energy")
    result.assert_outcomes(passed=3, xfailed=3)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["XFAIL *throughput of opt-125m on * is waived until 2999-12-31 by Ada: fixed in 0.27*"]
    )


def test_what_is_not_waived_fails(waive):
    result = waive("throughput")
    result.assert_outcomes(passed=3, xfailed=1, failed=2)
    assert result.ret == 1


def test_an_expired_waiver_excuses_nothing_and_says_whose_it_was(waive):
    result = waive("throughput", until="2020-01-31")
    result.assert_outcomes(passed=3, failed=3)
    result.stdout.fnmatch_lines(["*the waiver of throughput of opt-125m on * expired on 2020-01-31; its owner is Ada*"])


def test_a_waiver_of_another_model_is_none(waive):
    waive("throughput", "latency", "energy", model="opt-13b").assert_outcomes(passed=3, failed=3)


def test_what_no_gate_compares_is_refused(waive):
    assert "known.json: no gate compares 'requests_per_s'" in usage_error(waive("requests_per_s"))


def test_a_file_that_is_not_there_is_an_error_before_anything_starts(gate):
    assert "nowhere.json" in usage_error(gate("--override-ini=slm_waivers=nowhere.json"))
