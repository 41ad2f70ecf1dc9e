"""The gate as a user sees it: an item for each endpoint, exit status, JUnit, what is kept for others, its options, that
a report on the archive says it again, and that what broke off or compared nothing is neither a pass nor a verdict.

What a decision rests on is told in tests/unit/analysis/gate, what a gate launches in tests/unit/run."""

import html
import json
import math
import random
import shlex
from functools import partial
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from inner_runs import FEW, SWEEP
from sealed_lines import reseal
from shipped import shipped

from pytest_slmserve.analysis.gate import decision
from pytest_slmserve.engines import pool
from pytest_slmserve.engines.base import PROFILE_FOLDER
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.run.gate import OneGate
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.models import CATALOGUE

NO_WORSE = shipped("test_gate")
ENDPOINTS = ("throughput", "latency", "energy", "start", "kv-blocks", "memory")
# Steps of some 10 ms, and equal launches are equal.
GATE = """--slm-simulate --slm-gate --slm-gate-launches=apart --slm-models=opt-125m --slm-concurrency=4,16
    --slm-window=0.4 --slm-input-len=16 --slm-output-len=8 --slm-engine-arg=t_inf=2000 --slm-engine-arg=b_half=16
    --slm-engine-arg=memory_used=8e9 --slm-engine-arg=scatter=0 -o slm_report=tables -v -rsxX --junitxml=out.xml"""
SLOWER = "--slm-side=baseline:arg=t_inf=10000 --slm-side=candidate:arg=t_inf=9000"
SLOWER_START = "--slm-side=baseline:arg=start_s=20 --slm-side=candidate:arg=start_s=30"
FOUR, DIES, REAL = "-o slm_gate_pairs=4", "--slm-side=candidate:arg=die_at=16", "--slm-load-format=auto"


def cases(ran):
    return ElementTree.parse(ran.folder / "out.xml").getroot().iter("testcase")


def states(ran):
    """Of each endpoint in the JUnit file: passed, or why it did not."""
    found = {}
    for case in cases(ran):
        told = [each.attrib["message"] for each in case if each.tag in ("failure", "error", "skipped")]
        found[case.attrib["name"].rpartition("opt-125m-")[2][:-1]] = told[0] if told else "passed"
    return found


def properties(case):
    return {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}


def kept(ran, name="gate.json"):
    """What a gate of one model has written for others."""
    (found,) = json.loads((ran.folder / ".slm" / name).read_text("utf-8"))
    return found


def verdict_of(lines):
    """What was found, and why: from the title to the line after which others write."""
    found = dropwhile(lambda line: not line.startswith("opt-125m: "), lines)
    return [*filter(None, takewhile(lambda line: not line.startswith(("written: ", "note: ")), found))]


def judged(ran, status, line):
    """What each endpoint that did not pass says. Run and report must end with this status, and say the same."""
    assert ran.ret == status
    ran.says(line)
    seen, text = ran.report()
    assert seen == status and verdict_of(text.splitlines()) == verdict_of(ran.lines)
    assert "no sweep was measured" not in text
    return {endpoint: state for endpoint, state in states(ran).items() if state != "passed"}


@pytest.fixture
def gate(runs):
    """One gate that is not shared, because something is planted: `gate("--slm-gate-margin=10%")`."""
    return lambda *words, **how: runs.anew(NO_WORSE, GATE, *words, **how)


# Words, exit status, what is told of the endpoints that do not pass, and a line of the report.
SCENARIOS = {
    "equal": ("", 0, {}, "outputs: *dummy weights*"),
    "slower": (SLOWER, 1, {"throughput": "10% lower", "latency": "11.1% higher", "energy": "11.1% higher"},
               "opt-125m: FAIL after 4 pairs*"),
    "wide-margin": (f"{SLOWER} --slm-gate-margin=0.3", 0, {}, "mean E2E, small load*1.1111 *30 *pass"),
    "slower-start": (f"{SLOWER_START} --slm-gate-margin=0.5", 1, {"start": "50% higher"}, "s to start*1.5000 *15 *"),
    "memory": ("--slm-side=candidate:arg=memory_used=9e9", 1, {"memory": "8.38 GiB"},
               "device memory: fail, 8.38 GiB *7.45 GiB*"),
    "noise": (FOUR, 10, dict.fromkeys(ENDPOINTS[:3], "Inconclusive"), "opt-125m: INCONCLUSIVE after 4 pairs*"),
    "noise-and-failure": (f"{FOUR} {SLOWER_START}", 1, {"start": "50%"}, "opt-125m: FAIL*"),
    "nothing-counts": ("--slm-side=candidate:arg=lost_from=4", 10, dict.fromkeys(ENDPOINTS, "Inconclusive"),
                       "*measurements of the candidate, and none of the other side*"),
    "no-sensors": ("--slm-engine-arg=sensors=false", 0, {"energy": "energy", "memory": "memory"}, "*SKIPPED*energy"),
    "wrong-tokens": (f"{REAL} --slm-side=candidate:arg=other_token_at=3", 1, {"outputs": "fails"}, "outputs: fail*"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_gate_status_matches_report(runs, monkeypatch, name):
    words, status, others, line = SCENARIOS[name]
    if "noise" in name:
        chance = random.Random(1)
        drawn = lambda spec, **_: SimulatedEngine(spec, math.exp(chance.gauss(0, 0.1)))  # noqa: E731
        monkeypatch.setattr(pool, "SimulatedEngine", drawn)
    ran = runs(NO_WORSE, GATE, words)
    found = judged(ran, status, line)
    assert [*states(ran)] == [*ENDPOINTS, *(["outputs"] if REAL in words else [])]
    assert others.keys() <= found.keys() and (others.keys() == found.keys() or name == "noise-and-failure")
    assert all(fact in found[endpoint] for endpoint, fact in others.items())


AT_ONCE = GATE.replace(" --slm-gate-launches=apart", "")
ALONE = dict.fromkeys(("energy", "start", "kv-blocks", "memory"), "--slm-gate-launches=apart")
AT_ONCE_SCENARIOS = {
    "equal": ("", 0, {}, "opt-125m: PASS after 2 launches of both sides at once"),
    "slower": (SLOWER, 1, dict.fromkeys(("throughput", "busy", "busy-small"), "10% lower") | {"latency": "11"},
               "*slower in: kernels (tokens per busy second*"),
    "slower-host": ("--slm-side=candidate:arg=host_s=0.03", 1, {"throughput": "lower", "latency": "higher"},
                    "*slower in: host (share of time with a kernel*"),
    "slow-host": ("--slm-engine-arg=host_s=0.03", 0, dict.fromkeys(("throughput", "latency"), "a kernel runs for"),
                  "*output tokens/s, large load is not judged*"),
    "no-sensors": ("--slm-engine-arg=sensors=false", 0, dict.fromkeys(("busy", "busy-small"), "no launch told"),
                   "*PASS after*"),
    "wrong-tokens": (f"{REAL} --slm-side=candidate:arg=other_token_at=3", 1, {"outputs": "fails"}, "outputs: fail*"),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_ONCE_SCENARIOS)
def test_simultaneous_gate_names_slow_layer(runs, name):
    words, status, others, line = AT_ONCE_SCENARIOS[name]
    ran = runs(NO_WORSE, AT_ONCE, words)
    found = judged(ran, status, line)
    assert found.keys() == others.keys() | ALONE.keys() and len(states(ran)) == 8 + (REAL in words)
    assert all(fact in found[endpoint] for endpoint, fact in (others | ALONE).items())
    layers = {"slower": ["kernels"], "slower-host": ["host"], "wrong-tokens": ["outputs"]}
    assert kept(ran)["layers"] == layers.get(name, [])
    five = kept(ran)["five"]
    assert five["answer"].startswith("FAILS: " if status else "PASSES: ") and "both sides at once" in five["trust"]
    assert five["where"] == "slmserve report .slm/records.jsonl" and ("slm_profile" in five["do_this"]) is (
        "slower" in name
    )


OF_STARTS = GATE.replace("launches=apart", "launches=start")
SLEEPS = "--slm-engine-arg=enable_sleep_mode=true"
START_SCENARIOS = {
    "equal": ("", 0, {}, "a warm start of the baseline, s (and the change): import 9.0 (+0.0), *"),
    "slower": ("--slm-simulate-slowdown=50%", 1, {"start": "50% higher", "start-cold": "20% higher"},
               "slower in: start (s to start, warm caches 50% higher: compile +10.0 s; s to start, cold *"),
    "one-state": ("-o slm_gate_caches=warm", 0, {}, "*one start at a time, with warm compile caches*"),
    "noise": ("--slm-engine-arg=scatter=0.08", 10, {"start": "Inconclusive"}, "*INCONCLUSIVE after 5 pairs*"),
    "slower-wake": (f"{SLEEPS} --slm-side=candidate:arg=wake_s=0.6", 1, {"wake": "50% higher"}, "slower in: wake*"),
}  # fmt: skip


@pytest.mark.parametrize("name", START_SCENARIOS)
def test_start_gate_names_slow_stage(runs, name):
    words, status, others, line = START_SCENARIOS[name]
    ran = runs(NO_WORSE, OF_STARTS, words)
    found = judged(ran, status, line)
    judges = [
        "start",
        "kv-blocks",
        *(["start-cold"] if name != "one-state" else []),
        *(["wake"] if SLEEPS in words else []),
    ]
    assert found.keys() == others.keys() and [*states(ran)] == judges
    assert all(fact in found[endpoint] for endpoint, fact in others.items())
    facts = kept(ran)
    assert facts["launches"] == "start" and facts["caches"] == " and ".join(facts["stages"])
    warm = {each["name"]: each["baseline"] for each in facts["stages"]["warm"]}
    assert sum(warm.values()) == pytest.approx(20, rel=0.5) and warm["compile"] > 3


def test_slower_candidate_is_told_once(runs, monkeypatch, tmp_path):
    page = tmp_path / "summary.md"
    page.write_text("# Before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    ran = runs.anew(NO_WORSE, GATE, SLOWER)
    told, found = properties(next(cases(ran))), kept(ran)
    assert told["slm_gate"] == "fails" and float(told["slm_ratio"]) == pytest.approx(0.9, abs=0.01)
    speed = found["gated"][0]
    assert (found["model"], found["pairs"], found["answers"]["differs"]) == ("opt-125m", 4, None)
    assert found["outcome"] == "fail" == speed["outcome"] and speed["ratio"]["value"] == pytest.approx(0.9, abs=0.01)
    summary, markdown = page.read_text("utf-8"), (ran.folder / ".slm/gate.md").read_text("utf-8")
    assert summary.startswith(f"# Before\n{markdown}\n") and markdown.startswith("### FAILS: the candidate serves")
    assert markdown.count("### opt-125m: FAIL after 4 pairs") == 1
    assert "::test_no_worse[opt-125m-throughput]: assert <fails: no-worse-throughput" in summary
    twice = ran.report(f"{ran.folder}/.slm/records.jsonl")[1]
    assert twice.count("opt-125m: FAIL") == 1, "of an archive that is given twice too"
    path = ran.folder / ".slm/records.jsonl"
    session, *rest = path.read_text("utf-8").split("\n")
    session = json.loads(session)
    del session["plan"]["gate"]
    path.write_text("\n".join([json.dumps(session, separators=(",", ":")), *rest]), "utf-8")
    reseal(path)
    status, text = ran.report()
    assert status == 1 and "opt-125m: FAIL after 4 pairs" in text
    assert any(line.startswith("note: ") and "3%" in line and "12 pairs" in line for line in text.splitlines())


# What is broken off, or does not come about


def test_broken_gate_names_its_side(runs):
    ran = runs(NO_WORSE, GATE, DIES)
    assert (ran.ret, ran.counts) == (3, {"errors": 6})
    assert [properties(case)["slm_state"] for case in cases(ran)] == ["broken off"] * 6
    text = "\n".join(line for line in ran.lines if not line.startswith("ERROR"))  # CI repeats all there
    died = "the candidate, pair 1: the simulated engine died at concurrency 16"
    assert text.count(f"EngineFailed: {died}") == 1 and text.count("EngineFailed: the gate of opt-125m was broken") == 5
    assert any(line.startswith("ERROR: ") and died in line for line in ran.lines), "the answer of the summary"
    first = next(line for line in ran.lines if line.startswith("note: "))
    assert first.startswith(f"note: the gate of opt-125m was broken off: {died}"), "once more on the last screen"
    assert "Traceback" not in text
    nonsense = runs(NO_WORSE, GATE, "--slm-side=baseline:arg=t_half=3")
    assert nonsense.ret == 3
    nonsense.says("*BadUsage: *baseline, pair 1: *t_half*")


NO_SPACE = OSError("No space left on device")
BROKEN = {
    "the other passes": (NO_SPACE, "opt-350m", "", 3, {"passed": 6, "errors": 6}, "note: *broken off: OSErr*"),
    "the other fails": (NO_SPACE, "opt-350m", SLOWER, 1, {"failed": 3, "passed": 3, "errors": 6}, "note: *: OSErr*"),
    "of our own": (AssertionError("what cannot be"), "opt-125m", "", 3, {"errors": 6}, "*RuntimeError: *"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_gate_is_no_failure(gate, monkeypatch, case):
    error, model, words, status, counts, line = BROKEN[case]
    run = OneGate.run

    def broken(self):
        if self.model == model:
            raise error
        return run(self)

    monkeypatch.setattr(OneGate, "run", broken)
    ran = gate(f"--slm-models={','.join(dict.fromkeys([model, 'opt-125m']))}", FOUR, words)
    assert (ran.ret, ran.counts) == (status, counts)
    ran.says(line, f"*{type(error).__name__}: {error}*")


@pytest.mark.parametrize(("count", "goes_on"), [(6, "1 more pair*can decide"), (1, "*can go on")])
def test_interrupted_gate_can_be_resumed(gate, monkeypatch, count, goes_on):
    launched = OneGate.launch_in_turn

    def broken_off(self, launches):
        yield from islice(launched(self, launches), count)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(OneGate, "launch_in_turn", broken_off)
        ran = gate(no_reraise_ctrlc=True)
    status, told = ran.report()
    assert (ran.ret, status) == (2, 10) and "--slm-resume" in told
    ran.says("INTERRUPTED, INCONCLUSIVE so far: *", f"  why: *{goes_on}*", "  do this: *--slm-resume*")
    again = gate("--slm-resume", folder=ran.folder)
    again.says("opt-125m: PASS after 4 pairs*", f"note: *continues from {count // 2} pairs*")


SKIPPED = """
    import pytest

    def test_plain(): pass

    @pytest.mark.skip(reason="not today")
    def test_gate(slm_gate): pass
"""


def test_gate_without_comparison_is_inconclusive(runs, gate):
    ran = runs(SKIPPED, GATE, ".")
    assert (ran.ret, ran.counts) == (10, {"passed": 1, "skipped": 6})
    ran.says("note: --slm-gate: nothing was compared*")
    for flag in ("--slm-gate", "--slm-calibrate"):
        none = runs(SWEEP, GATE, flag)
        none.refuses(f"{flag}:", "slm_gate", "--pyargs pytest_slmserve.benchmarks")
    full = gate("--slm-concurrency=4,900000")
    full.refuses("opt-125m at concurrency 900000")
    assert not (full.folder / ".slm").exists() and not (none.folder / ".slm").exists()
    broken = runs("import nothing_of_that_name", GATE)
    assert broken.ret == pytest.ExitCode.INTERRUPTED and "slm_gate" not in broken.err, "it is not said to have no gate"
    both = {**NO_WORSE, "test_sweep.py": SWEEP}
    ran = runs(both, GATE, ".")
    assert (ran.ret, ran.counts) == (0, {"passed": 6, "deselected": 3}) and all(m.paired for m in ran.measured())
    ran.says("slmserve: deselected 3 tests: *")
    assert ran.archive().sessions[-1].plan["sweeps"] == {}, "what was not to be measured is not missing"
    for words, why in (("--slm-simulate", "--slm-gate"), ("", "--slm-simulate or --slm-endpoint")):
        ran = runs(NO_WORSE, "-rs", words)
        assert ran.counts.keys() == {"skipped"}
        ran.says(f"*SKIPPED*needs *{why}*")
    plan = runs(NO_WORSE, GATE, "--slm-plan -o slm_gate_pairs=20")
    assert plan.ret == 0 and not (plan.folder / ".slm").exists()
    plan.says("*0:00    test_no_worse?opt-125m-throughput? (2 s)")
    plan.says("*0:02    test_no_worse?*-latency? (measures nothing)", "*end: 6 items", "note: a gate *4 pairs*20")


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
"""


def test_own_test_reads_same_gate(runs):
    ran = runs(OWN, GATE)
    assert ran.ret == 1 and ran.outcomes == {"test_it": "ERROR", "test_mine": "PASSED", "test_wrong": "FAILED"}
    ran.says("opt-125m: PASS after 4 pairs of launches")
    assert runs(OWN, GATE, "-k test_it").ret == 3, "an error before it is none"


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


def test_cold_launches_get_empty_folders(gate, launches):
    cold = "-o slm_gate_caches=cold"
    ran = gate(cold)
    folders = {Path(value) for given in launches for value in given.values()}
    assert ran.ret == 0 and len(launches) == 8 and len(folders) == 24 and len({each.parent for each in folders}) == 8
    assert {(m.paired.caches, m.spec.env) for m in ran.measured()} == {("cold", ())} and kept(ran)["caches"] == "cold"
    assert len({m.spec.key for m in ran.measured()}) == 1, "no part of the key"
    assert gate(cold, DIES).ret == 3 and len(launches) > 8
    assert not any(Path(value).parent.exists() for given in launches for value in given.values())


# A variable of the host, and of a side with other code; words; and the folder in which each side has its own.
OTHER_CODE = "--slm-side=candidate:env=PYTHONPATH=/opt/other"
WARM = {
    "equal code": ({}, "--slm-side=candidate:arg=max_num_batched_tokens=2048", None, None),
    "other code": ({"VLLM_CACHE_ROOT": "/there"}, OTHER_CODE, "/there/gate-baseline", "/there/gate-candidate"),
    "a place of its own": ({"XDG_CACHE_HOME": "/elsewhere"},
                           f"{OTHER_CODE} --slm-side=baseline:env=VLLM_CACHE_ROOT=/mine", None,
                           "/elsewhere/pytest-slmserve/gate-candidate"),
}  # fmt: skip


@pytest.mark.parametrize("case", WARM)
def test_other_code_separates_warm_caches(gate, launches, monkeypatch, case):
    """vLLM keeps what it knows of a model's class for one version of its file: releases would displace each other's."""
    variables, words, *folders = WARM[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ran = gate(words)
    baseline, candidate = ({"VLLM_CACHE_ROOT": folder} if folder else {} for folder in folders)
    assert ran.ret == 0 and launches[:4] == [baseline, candidate, candidate, baseline] and len(launches) == 8
    assert {m.paired.caches for m in ran.measured()} == {kept(ran)["caches"]} == {"warm"}


def test_calibrated_noise_prevents_pass(runs, gate, monkeypatch):
    """The model is given as a path, and the later gate is told what a report knows too."""
    monkeypatch.setattr(decision, "calibrate", partial(decision.calibrate, gates=100))  # of the noise, drawn
    folder, config = "models/Mine-1B", {"models/Mine-1B/config.json": json.dumps(dict(CATALOGUE["opt-125m"].config))}
    words = f"{GATE} --slm-models={folder} -o slm_gate_pairs=6"
    ran = runs.anew({**NO_WORSE, **config}, words, "--slm-calibrate")
    assert (ran.ret, ran.counts) == (0, {"passed": 6})
    ran.says("mine-1b: PASS after 6 pairs*", "note: mine-1b, by 6 pairs *100%*")
    known = kept(ran, "calibration.json")
    assert len({m.launch for m in ran.measured()}) == 12 == 2 * len(known["noise"]["costs"])
    assert known["model"] == "mine-1b" and known["unchanged"]["fail"] == 0.0
    assert set(known["worse"]) == set(known["noise"]["names"])

    def later(name, *more):
        return runs.anew(NO_WORSE, words, *more, folder=ran.folder, records=f".slm/{name}.jsonl")

    quiet = later("quiet")
    assert quiet.counts == {"passed": 6}
    quiet.says("mine-1b: PASS after 4 pairs*", "note: *by 6 pairs*")
    known["worse"]["s to start"]["fail"] = 0.4
    (ran.folder / ".slm/calibration.json").write_text(json.dumps([known]), "utf-8")
    status, text = quiet.report(of=".slm/quiet.jsonl")
    assert status == 10 == later("noisy").ret and any("15%" in line and "40%" in line for line in text.splitlines())
    assert "\nnext: " in text and "slm_gate_pairs=12" in text, "it has ended"
    others = later("other", "--slm-ramp-up=burst")
    assert others.ret == 0 and "by 6 pairs" not in others.out, "one of other loads knows nothing of it"


TRACES = "-o slm_profile=traces"


def note_of_traces(ran):
    (note,) = [line for line in ran.lines if line.startswith("note: traces of")]
    return note


def command_on(page):
    return html.unescape(page.read_text("utf-8").split('aria-labelledby="reproduce">')[1].partition("</code>")[0])


def test_failed_gate_names_new_traces(gate, monkeypatch):
    may_be_profiled = []

    class Engine(SimulatedEngine):
        def __init__(self, spec, extra_env, **_):
            super().__init__(spec, extra_env=extra_env)
            may_be_profiled.append(PROFILE_FOLDER in extra_env)

    monkeypatch.setattr(pool, "SimulatedEngine", Engine)
    ran = gate(SLOWER, TRACES)
    first = sorted((ran.folder / "traces").rglob("*.trace.json"))
    assert ran.ret == 1 and [path.parent.name for path in first] == ["baseline", "candidate"]
    assert note_of_traces(ran).startswith("note: traces of opt-125m at 16"), "the load of the throughput"
    assert all(path.name in note_of_traces(ran) for path in first)
    assert may_be_profiled == [False] * 8 + [True] * 2 and len({m.launch for m in ran.measured()}) == 8
    again = note_of_traces(gate(SLOWER, TRACES, folder=ran.folder))
    assert again.count(".trace.json") == 2 and not any(path.name in again for path in first)
    may_be_profiled.clear()
    for words in (f"{TRACES} --slm-side=candidate:arg=start_s=60", SLOWER):
        gate(words)
    assert may_be_profiled == [False] * 16, "no load fails, or nobody asks"


ERRORS = {"dies": EngineFailed("its log ends with\nmany lines"), "bug": KeyError("problem")}


@pytest.mark.parametrize("error", ERRORS)
def test_missing_trace_spoils_no_gate(gate, monkeypatch, error):
    def fail(self, workload, load):
        raise ERRORS[error]

    monkeypatch.setattr(SimulatedEngine, "profile", fail)
    ran = gate(SLOWER, TRACES)
    assert ran.counts == {"failed": 3, "passed": 3}
    assert note_of_traces(ran).count("none (") == 2 and "many lines" not in ran.out


@pytest.mark.parametrize(("waived", "until", "counts"), [
    (3, "2999-12-31", {"passed": 3, "xfailed": 3}),
    (1, "2999-12-31", {"passed": 3, "xfailed": 1, "failed": 2}),
    (1, "2020-01-31", {"passed": 3, "failed": 3}),
])  # fmt: skip
def test_waived_regression_names_owner(gate, tmp_path, waived, until, counts):
    waiver = {"model": "opt-125m", "device": "*", "owner": "Ada", "reason": "fixed in 0.27"}
    rows = [{**waiver, "endpoint": endpoint, "until": until} for endpoint in ENDPOINTS[:waived]]
    (tmp_path / "known.json").write_text(json.dumps(rows), "utf-8")
    ran = gate(SLOWER, f"-o slm_waivers={tmp_path}/known.json")
    assert (ran.ret, ran.counts) == (int("failed" in counts), counts)
    ran.says(f"*throughput of opt-125m on *{until}*Ada*")
    gate("-o slm_waivers=nowhere.json").refuses("nowhere.json")


def test_failure_shows_command_to_repeat(runs, gate, monkeypatch):
    """The command has the tests and each option, from wherever it came, and ends in the same way. Where a summary
    cannot be written, the run goes on."""
    pytest.importorskip("jinja2", reason="a page needs Jinja2")
    monkeypatch.setenv("SLM_GATE_PAIRS", "6")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/no/such/page.md")
    test = "test_gate_shipped.py"
    ran = gate(test, f"{SLOWER} --slm-html=out.html --slm-resume -k 'throughput or start'", columns=80)
    rest = [*dropwhile(lambda line: not line.startswith("to repeat it: pytest "), ran.lines)]
    broken = [*takewhile(lambda line: line.endswith("\\"), rest)]
    said = rest[: len(broken) + 1]
    typed = shlex.split("".join(line.removesuffix("\\") for line in said))[4:]
    assert typed[:3] == [test, "-k", "throughput or start"] and "slm_gate_pairs=6" in typed
    assert broken and max(map(len, said)) <= 80
    assert ran.ret == 1 and "not written for others: " in ran.out
    page = html.unescape((ran.folder / "out.html").read_text("utf-8"))
    assert f">pytest {shlex.join(typed)}</code>" in page
    monkeypatch.delenv("SLM_GATE_PAIRS")
    again = runs.anew(NO_WORSE, shlex.join(typed))
    assert again.ret == 1 and "\nto repeat it: pytest " in again.out
    few = {"--slm-concurrency=1,4,16", "--slm-output-len=32"}
    ran = runs(SWEEP, FEW, *sorted(few), "--slm-html=out.html --slm-resume")
    assert ran.report("--html", "again.html")[0] == ran.ret
    command = command_on(ran.folder / "out.html")
    assert command == command_on(ran.folder / "again.html") and {"--slm-window=0.25", *few} < {*command.split()}
    assert "--slm-html" not in command and "--slm-resume" not in command
    quick = runs({}, "--pyargs pytest_slmserve.quickstart --slm-simulate --slm-html=out.html -k slo")
    typed = command_on(quick.folder / "out.html")
    assert "pytest --pyargs pytest_slmserve.quickstart -k slo --slm-simulate" in typed


def test_short_cpu_gate_can_continue(runs, stand_in_here, monkeypatch):
    """Engine, worker and process are real; behind them is a stand-in for vLLM."""
    monkeypatch.setenv("SLM_GATE_PAIRS", "4")
    words = f"--slm-models=opt-tiny --slm-input-len=16 --slm-output-len=8 --slm-window=0.4 {stand_in_here}"
    ran = runs.anew(NO_WORSE, words, "--slm-concurrency=2,4")
    assert (ran.ret, ran.counts) == (0, {"passed": 1}) and "output tokens/s" not in ran.out
    goes_on = "--slm-gate --slm-resume --slm-gate-launches=apart --slm-concurrency=4"
    ran.says("  why: *2 more pairs*", f"  do this: *{goes_on}", "opt-tiny: speed NOT JUDGED after 2 pairs*", "kv-bl*")
    assert len({m.launch for m in ran.measured()}) == 4
    again = runs.anew(NO_WORSE, words, goes_on, folder=ran.folder)
    again.says("opt-tiny: * after 4 pairs*", "note: *continues from 2 pairs*")
    found = again.measured()
    assert len({m.launch for m in found}) == 8 and len({m.paired.gate for m in found}) == 1
