"""`bisect`, `plan` and `advise --quick` with pytest itself, on the simulated engine: it gates releases of which some
are slow, prices what it would run, and measures for an answer. pytest runs in this process, and starts no interpreter.
"""

import io
import json
import math
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import said
from scripts import CHECKOUT, in_checkout
from shipped import BENCHMARKS

from pytest_slmserve.archive.store import read
from pytest_slmserve.commands import bisect, plan
from pytest_slmserve.options.table import OPTS
from pytest_slmserve.plugin import session_hooks  # noqa: F401 - before pytester, which takes back what is imported by it
from pytest_slmserve.run import session  # noqa: F401

GATE = ("--", "--slm-simulate", "--slm-models=opt-1.3b", "-p", "no:cacheprovider", str(BENCHMARKS / "test_gate.py"))
SLOW = {"slowdown": 0.1}


@pytest.fixture
def in_process(pytester, monkeypatch):
    """pytest in this process, in an empty folder, wherever one of the commands would start it."""
    real = bisect.subprocess.run

    def run(command, stdout=None, **options):
        if command[:3] != [sys.executable, "-m", "pytest"]:
            return real(command, stdout=stdout, **options)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            result = pytester.runpytest_inprocess(*command[3:])
        text = result.stdout.str() + result.stderr.str()
        if stdout not in (None, subprocess.PIPE):
            stdout.write(text)
        return SimpleNamespace(returncode=int(result.ret), stdout=text)

    monkeypatch.setattr(bisect.subprocess, "run", run)
    assert plan.subprocess is bisect.subprocess


def searched(capsys, releases, *words):
    rows = [{"release": f"1.{i}", "engine_arg": each} for i, each in enumerate(releases)]
    Path("releases.json").write_text(json.dumps(rows), "utf-8")
    last = f"--bad=1.{len(rows) - 1}"
    return said(capsys, "bisect", "--good=1.0", last, "--releases=releases.json", "--json", *words, *GATE)


def test_bisect_finds_first_slow_release(in_process, capsys):
    seen = searched(capsys, [{}, SLOW, SLOW])
    archives = sorted(Path(".slm/bisect").glob("*/*/records.jsonl"))
    measured = [path.read_bytes().count(b'"kind":"measurement"') for path in archives]
    assert seen.status == 0 and [path.parts[-3] for path in archives] == ["1.1", "1.2"] and min(measured) > 0
    again = searched(capsys, [{}, SLOW, SLOW])
    for found in map(json.loads, (seen.out, again.out)):
        assert found["suspects"] == ["1.1"] and [gate["release"] for gate in found["gates"]] == ["1.2", "1.1"]
        rates = [e for g in found["gates"] for one in g["gates"] for e in one["gated"] if "tokens" in e["name"]]
        assert rates and all(each["ratio"]["value"] == pytest.approx(0.91, abs=0.03) for each in rates)
        for records, told in zip(archives[::-1], found["gates"]):
            five = told["gates"][0]["five"]
            assert f"--slm-records={records}" in five["do_this"] and "slm_profile=traces" in five["do_this"]
            assert five["where"] == f"slmserve report {records}"
    assert [path.read_bytes().count(b'"kind":"measurement"') for path in archives] == measured
    equal = json.loads(searched(capsys, [{}, {}, {}]).out)
    assert equal["suspects"] == [] and len(equal["gates"]) == len(equal["gates"][0]["gates"]) == 1


def test_plan_starts_no_engine(in_process, capsys):
    words = ("--slm-simulate", "--slm-models=opt-13b", "--slm-ray=local:4", BENCHMARKS / "test_tensor_parallel.py")
    seen = said(capsys, "plan", *words)
    assert seen.status == 0 and "test_point_on_gpus[opt-13b-256-tp4]" in seen.out
    for engine in ("opt-13b", "opt-13b on 2 GPUs", "opt-13b on 4 GPUs", "2 x opt-13b, a GPU each"):
        assert f"start {engine} (simulated, 0 s)" in seen.out
    assert not Path(".slm").exists()
    seen = said(capsys, "plan", "--slm-simulate", "--slm-tensor-parallel-size=99", BENCHMARKS / "test_gate.py")
    assert seen.status == 4 and all(fact in seen.out + seen.err for fact in ("99 GPUs", "8 GPUs"))


@in_checkout
def test_core_suite_takes_15_minutes(in_process, capsys):
    minutes, seconds = re.findall(r"(\d+):(\d\d)  end:", said(capsys, "plan", "--slm-gpu", BENCHMARKS).out)[-1]
    assert 300 < 60 * int(minutes) + int(seconds) <= 900
    told = f"planned for {math.ceil(int(minutes) + int(seconds) / 60)} minutes"
    [suite] = [opt for opt in OPTS if opt.name == "suite"]
    assert told in suite.help and told in (CHECKOUT / "README.md").read_text("utf-8")


@pytest.mark.parametrize(("b_half", "words"), [(8.5, []), (44.9, []), (44.9, ["--slo-itl=2x@32"])])
def test_quick_advice_finds_planted_batch(in_process, capsys, b_half, words):
    law = f"--slm-engine-arg=b_half={b_half}"
    asked = ("--quick=opt-1.3b", "--gpu-memory=140GiB", *words, "--", "--slm-simulate", law, "--slm-window=2")
    seen = said(capsys, "advise", *asked[:-4], "--json", *asked[-4:])
    assert seen.status == 0, seen
    found = json.loads(seen.out)
    [model], quick = found["models"], found["quick"]
    [records] = Path(".slm/quick").glob("*.jsonl")
    measured = read(records).measurements
    assert len({m.launch for m in measured}) == 1 and quick["measured_s"] == sum(m.run.window_s[1] for m in measured)
    loads = [m.load.concurrency for m in measured]
    assert quick["measured_s"] <= 60 and len({*loads}) < len(loads), "noise is known by a repeat"
    efficient = (1 + b_half) / 0.1 - b_half
    truth = min(efficient, 2 * (32 + b_half) - b_half) if words else efficient
    above = model["b_opt_below"]
    assert model["b_opt_least"] <= truth and (truth <= above if above else model["batch"] == max(loads))
    for start in found["starts"]:
        for command in start["commands"]:
            serve = shlex.split(command)
            given = dict(zip(serve[3::2], serve[4::2]))
            assert serve[:3] == ["vllm", "serve", "facebook/opt-1.3b"] and all(name.startswith("--") for name in given)
            assert start["mps"] or int(given["--max-num-seqs"]) == model["batch"]
            assert 0 < float(given["--gpu-memory-utilization"]) < 1
