"""A gate through engines, workers and processes: behind them a stand-in for vLLM takes longer for a step."""

from inner_runs import QUIET
from interfaces import STAND_IN
from shipped import put

from pytest_slmserve.archive.store import read
from pytest_slmserve.telemetry import host

WORDS = f"""--slm-cpu --slm-gate --slm-models=opt-tiny --slm-concurrency=4 --slm-window=1.2 --slm-input-len=16
    --slm-output-len=8 --slm-telemetry=off --slm-engine-arg=step_s=0.006 --slm-side=candidate:arg=step_s=0.03
    --slm-records=r.jsonl {QUIET}"""


def test_a_slower_engine_is_found_through_its_own_processes(pytester, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "interpreter", lambda *_: {"python": "3.11.7", "vllm": "0.32.0", "torch": "2.13.0"})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # other runs on this machine have their own lock
    monkeypatch.setenv("COLUMNS", "400")
    put(pytester.path, "test_gate")
    result = pytester.runpytest_inprocess(*WORDS.split(), f"--slm-env=PYTHONPATH={STAND_IN}")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*<fails: no-worse-throughput ?opt-tiny?*", "opt-tiny: FAIL after * pairs of launches"]
    )
    found = read(pytester.path / "r.jsonl").measurements
    assert len({m.launch for m in found}) >= 8 and all(m.environment.vllm == "0.32.0" for m in found)
