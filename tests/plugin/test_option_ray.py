"""--slm-ray measures on the nodes of a Ray cluster; tests/run/ray_cluster has runs on one. Here is what is refused."""

from __future__ import annotations

import time

import pytest
from inside import usage_error

from pytest_slmserve.run.ray import connect
from pytest_slmserve.schema.errors import BadUsage

NOBODY = "--slm-ray=127.0.0.1:9"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--slm-gate"], "--slm-gate is not sent to Ray"),
        (["--slm-calibrate"], "--slm-gate is not sent to Ray"),
        (["--slm-sweep=adaptive"], "--slm-sweep adaptive is not sent to Ray"),
        (["--slm-ray-resource=quiet", "--slm-ray=local"], "--slm-ray-resource is for the nodes of a Ray cluster"),
    ],
)
def test_what_decides_as_it_goes_and_other_processes_are_refused(sweep, words, told):
    assert told in usage_error(sweep(NOBODY, *words))


def test_an_endpoint_is_no_node(pytester):
    pytester.makepyfile("def test_point(slm_point): pass")
    result = pytester.runpytest_inprocess("--slm-endpoint=http://127.0.0.1:1/v1/completions", NOBODY)
    assert "an endpoint runs already" in usage_error(result)


def test_it_needs_a_mode(pytester):
    assert "no mode says on what" in usage_error(pytester.runpytest_inprocess(NOBODY))


def test_another_address_is_refused(sweep):
    assert "HOST:PORT of a cluster that this host is a node of" in usage_error(sweep("--slm-ray=ray://127.0.0.1:10001"))


@pytest.mark.parametrize("words", [[], ["--slm-plan"], ["--slm-ray=local"]])
def test_processes_of_xdist_are_refused(sweep, words):
    pytest.importorskip("xdist")
    text = usage_error(sweep("-n2", *words))
    assert "-n starts processes that would measure against each other" in text and "--slm-ray local" in text


def test_a_plan_for_all_gpus_says_what_begins_where(sweep):
    sweep("--slm-ray=local:2", "--slm-plan").stdout.fnmatch_lines(["GPU 0: *", "GPU 1: *", "spread by engine: *"])


def test_more_gpus_than_there_are_is_one_sentence(sweep, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(99)))
    assert "--slm-ray local:9: 8 GPUs are visible" in usage_error(sweep("--slm-ray=local:9"))


def test_a_plan_asks_no_cluster(sweep):
    sweep(NOBODY, "--slm-plan").stdout.fnmatch_lines(["*end: 6 items"])


def test_without_ray_it_says_what_to_install(sweep, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    text = usage_error(sweep(NOBODY))
    assert "--slm-ray needs Ray, which is not installed" in text and "pytest-slmserve[ray]" in text


def test_an_address_that_does_not_answer_is_one_sentence_in_time(sweep, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(connect, "ANSWER_S", 3.0)
    began = time.monotonic()
    text = usage_error(sweep(NOBODY))
    assert "--slm-ray 127.0.0.1:9: no Ray cluster answers there (no answer within 3 s)" in text
    assert "ray status" in text and time.monotonic() - began < 20


def test_why_it_does_not_is_told(monkeypatch):
    monkeypatch.setattr(connect, "ASK", "raise SystemExit('Version mismatch: 2.9 there, 2.60 here')")
    with pytest.raises(BadUsage, match="no Ray cluster answers there .Version mismatch: 2.9 there, 2.60 here."):
        connect.check_answers("127.0.0.1:9")
