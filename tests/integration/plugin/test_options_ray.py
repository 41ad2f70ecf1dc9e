"""Options of Ray, as far as no cluster is needed; tests/nightly/ray has runs on one."""

from __future__ import annotations

import sys
import time

import pytest
from inner_runs import FEW
from inside import SWEEP
from refusals import refused

from pytest_slmserve.options.read import read_options
from pytest_slmserve.run import cluster

NOBODY = "--slm-ray=127.0.0.1:9"


def refuses(ran, *facts):
    assert ran.ret == pytest.ExitCode.USAGE_ERROR and "Traceback" not in ran.err
    return [fact for fact in facts if fact not in ran.err] == []


@pytest.mark.parametrize("words", [(), ("--slm-plan",), ("--slm-ray=local",)], ids=["run", "plan", "ray"])
def test_processes_of_xdist_are_refused(runs, words):
    pytest.importorskip("xdist")
    assert refuses(runs(SWEEP, *FEW, "-n2", *words), "-n", "--slm-ray local")


def test_a_plan_says_what_begins_on_which_gpu_and_asks_no_cluster(runs):
    ran = runs(SWEEP, *FEW, "--slm-ray=local:2", "--slm-plan")
    ran.lines.fnmatch_lines(["GPU 0: *", "GPU 1: *", "spread by engine: *"])
    runs(SWEEP, *FEW, NOBODY, "--slm-plan").lines.fnmatch_lines(["*end: 6 items"])


def test_more_gpus_than_there_are_and_no_ray_are_refused(runs, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(99)))
    assert refuses(runs.anew(SWEEP, *FEW, "--slm-ray=local:9"), "--slm-ray local:9", "8 GPUs")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refuses(runs.anew(SWEEP, *FEW, NOBODY), "--slm-ray", "pytest-slmserve[ray]")


def test_an_address_that_does_not_answer_is_told_in_time(runs, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(cluster, "ANSWER_S", 1.0)
    began = time.monotonic()
    assert refuses(runs.anew(SWEEP, *FEW, NOBODY), "--slm-ray 127.0.0.1:9", "1 s", "ray status")
    assert time.monotonic() - began < 20


def test_why_it_does_not_answer_is_told(monkeypatch):
    monkeypatch.setattr(cluster, "ASK", "raise SystemExit('Version mismatch: 2.9 there, 2.60 here')")
    with refused("Version mismatch: 2.9 there, 2.60 here"):
        cluster.join_cluster(read_options({"simulate": True, "ray": "127.0.0.1:9"}, {}, {}))


@pytest.mark.parametrize("text", [None, "pip: vllm", "[]"], ids=["none", "no JSON", "no object"])
def test_a_file_of_an_environment_that_holds_none_is_told_before_anybody_is_asked(runs, tmp_path, text):
    if text is not None:
        (tmp_path / "env.json").write_text(text)
    ran = runs.anew(SWEEP, *FEW, NOBODY, f"--override-ini=slm_ray_env={tmp_path}/env.json")
    assert refuses(ran, "env.json")
