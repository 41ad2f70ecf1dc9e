"""An idle plugin costs nothing: nothing heavy is imported over the whole session, summary included."""

from __future__ import annotations

import pytest

HEAVY = (
    *("vllm", "torch", "numpy", "msgspec", "psutil", "pynvml", "prometheus_client", "transformers", "vl_convert"),
    *("tabulate", "ijson", "ray"),
)
LOOK = f"""
    import atexit, sys

    def look():
        ours = [m for m in sys.modules if m.startswith("pytest_slmserve")]
        print("HEAVY", [m for m in {HEAVY!r} if m in sys.modules], "OURS", sorted(ours))

    atexit.register(look)
"""
IDLE = ["", ".options", ".options.table", ".plugin", ".plugin.fixtures", ".plugin.hooks"]
IDLE += [".schema", ".schema.errors"]


@pytest.fixture
def imported(pytester):
    """Modules of a session in a process of its own, seen as pytest exits."""
    pytester.makeconftest(LOOK)

    def run(test, *args):
        pytester.makepyfile(test)
        result = pytester.runpytest_subprocess("-p", "no:benchmark", *args)
        return next(line for line in result.outlines if "HEAVY" in line)

    return run


def test_an_idle_session_imports_nothing_heavy_and_little_of_ours(imported):
    """One with a test that passes, one that fails, and some that would measure."""
    plain = "def test_it(): pass\ndef test_bad(): assert 0\n"
    line = imported(f"{plain}def test_engine(slm_engine): ...\ndef test_point(slm_point): ...")
    assert "HEAVY [] OURS" in line and line.endswith(str([f"pytest_slmserve{name}" for name in IDLE]))


def test_the_engine_stays_out_of_pytest_while_measuring(imported):
    line = imported("def test_it(slm_measure): assert slm_measure(4).valid", "--slm-simulate", "--slm-window=1")
    for heavy in ("vllm", "torch", "transformers", "pynvml", "vl_convert"):
        assert f"'{heavy}'" not in line
