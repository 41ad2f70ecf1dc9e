"""Options of Ray, as far as no cluster is needed; tests/run/ray_cluster has runs on one."""

from __future__ import annotations

import time

import pytest
from inside import usage_error

from pytest_slmserve.options.read import read_options
from pytest_slmserve.run import cluster
from pytest_slmserve.schema.errors import BadUsage

# ray


NOBODY = "--slm-ray=127.0.0.1:9"


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
    monkeypatch.setattr(cluster, "ANSWER_S", 3.0)
    began = time.monotonic()
    text = usage_error(sweep(NOBODY))
    assert "--slm-ray 127.0.0.1:9: no Ray cluster answers there (no answer within 3 s)" in text
    assert "ray status" in text and time.monotonic() - began < 20


def test_why_it_does_not_is_told(monkeypatch):
    monkeypatch.setattr(cluster, "ASK", "raise SystemExit('Version mismatch: 2.9 there, 2.60 here')")
    with pytest.raises(BadUsage, match="no Ray cluster answers there .Version mismatch: 2.9 there, 2.60 here."):
        cluster.join_cluster(read_options({"simulate": True, "ray": "127.0.0.1:9"}, {}, {}))


# ray_env


@pytest.mark.parametrize(
    ("text", "told"), [(None, "cannot read env.json"), ("pip: vllm", "env.json is not JSON"), ("[]", "no JSON object")]
)
def test_a_file_that_holds_none_is_told_before_anybody_is_asked(sweep, pytester, text, told):
    if text is not None:
        (pytester.path / "env.json").write_text(text)
    assert told in usage_error(sweep("--slm-ray=127.0.0.1:9", "--override-ini=slm_ray_env=env.json"))
