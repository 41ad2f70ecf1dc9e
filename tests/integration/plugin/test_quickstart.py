"""The quick start: three tests that a new user runs first, on a simulated engine; and that an idle plugin costs
nothing: nothing heavy is imported over the whole session, summary included."""

import os

import pytest
from scripts import CHECKOUT

QUICKSTART = "--pyargs pytest_slmserve.quickstart"


def test_quickstart_passes_in_seconds(runs, monkeypatch, tmp_path):
    """In a checkout, where pytest reads tests/conftest.py, and Hypothesis is not installed."""
    support = [*(CHECKOUT / "tests/support").glob("*.py")]
    paths = [CHECKOUT / "conftest.py", CHECKOUT / "tests/conftest.py", CHECKOUT / "tests/skips.toml", *support]
    files = {str(path.relative_to(CHECKOUT)): path.read_text("utf-8") for path in paths}
    hidden = {"hidden/hypothesis.py": "raise ModuleNotFoundError('hypothesis')"}
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/hidden{os.pathsep}{tmp_path}/tests/support", prepend=os.pathsep)
    words, before = "-p no:hypothesispytest --slm-simulate -v", os.times()
    ran = runs.anew({**files, **hidden}, QUICKSTART, words, folder=tmp_path, process=True)
    after = os.times()
    assert (ran.ret, ran.counts) == (0, {"passed": 3})
    assert ran.outcomes == dict.fromkeys(["test_slo", "test_plateau", "test_gate"], "PASSED")
    assert after.children_user - before.children_user < 8, "seconds, whatever else the cores do meanwhile"
    told = next(line for line in ran.lines if line.startswith("opt-125m: PASS after "))
    assert ran.report()[0] == 0 and told in ran.report()[1]
    (session,) = ran.archive().sessions
    assert session.plan["gate"]["pairs"] == 12, "the terms, without which a report would assume some"


def test_quickstart_without_mode_is_skipped(runs, holds):
    ran = runs({}, QUICKSTART, "-rs")
    assert ran.counts == {"skipped": 3}
    ran.says("*--slm-gpu, --slm-cpu, --slm-simulate or --slm-endpoint*")
    holds("0.32.0")
    plan = runs.anew({}, QUICKSTART, "--slm-cpu --slm-plan")
    plan.says("*test_slo*", "*test_plateau*")
    assert "test_gate" not in plan.out


# An idle plugin

HEAVY = ("vllm", "torch", "numpy", "msgspec", "psutil", "pynvml", "prometheus_client", "transformers", "vl_convert")
HEAVY += ("tabulate", "ijson", "ray")
LOOK = f"""
    import atexit, sys

    def look():
        ours = [m for m in sys.modules if m.startswith("pytest_slmserve")]
        print("HEAVY", [m for m in {HEAVY!r} if m in sys.modules], "OURS", sorted(ours))

    atexit.register(look)
"""
IDLE = ("", ".options", ".options.table", ".plugin", ".plugin.fixtures", ".plugin.hooks", ".schema", ".schema.errors")
UNMEASURED = """
    def test_it(): pass
    def test_bad(): assert 0
    def test_engine(slm_engine): ...
    def test_point(slm_point): ...
"""


@pytest.mark.parametrize("measures", [False, True], ids=["idle", "measuring"])
def test_plugin_imports_nothing_heavy(runs, measures):
    """In a process of its own, seen as pytest exits."""
    test = "def test_it(slm_measure): assert slm_measure(4).valid" if measures else UNMEASURED
    words = "--slm-simulate --slm-window=1" if measures else ""
    ran = runs.anew({"conftest.py": LOOK, "test_it.py": test}, words, process=True, records="")
    line = next(line for line in ran.lines if "HEAVY" in line)
    if measures:
        engines = ("vllm", "torch", "transformers", "pynvml", "vl_convert")
        assert [name for name in engines if f"'{name}'" in line] == []
    else:
        assert "HEAVY [] OURS" in line and line.endswith(str([f"pytest_slmserve{name}" for name in IDLE]))
