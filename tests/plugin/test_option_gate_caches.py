"""--slm-gate-caches says whether a launch of a gate finds compiled code, or has to make its own."""

import json
from pathlib import Path

import pytest
from inside import usage_error

from pytest_slmserve.engines import pool
from pytest_slmserve.engines.simulated import SimulatedEngine

NAMES = {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


@pytest.fixture
def launches(monkeypatch):
    """The variables that each launch was given; a folder that does not stand is an error, and each gets a file."""
    seen = []

    def start(spec, extra_env):
        for value in extra_env.values():
            assert Path(value).parent.is_dir() and not Path(value).exists()
            Path(value).mkdir()
            (Path(value) / "compiled").touch()
        seen.append(dict(extra_env))
        return SimulatedEngine(spec, extra_env=extra_env)

    monkeypatch.setattr(pool, "SimulatedEngine", start)
    return seen


def test_each_cold_launch_has_an_empty_folder_of_its_own_which_is_gone_afterwards(gate, launches, archive):
    result = gate("--slm-gate-caches=cold")
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
    assert gate("--slm-gate-caches=cold", "--slm-candidate-engine-arg=die_at=16").ret == 3
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
        lambda spec, extra_env: seen.append(dict(extra_env)) or SimulatedEngine(spec, extra_env=extra_env),
    )
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/somewhere")
    assert gate("--slm-candidate-env=PYTHONPATH=/opt/other").ret == 0
    sides = {"VLLM_CACHE_ROOT": "/somewhere/gate-baseline"}, {"VLLM_CACHE_ROOT": "/somewhere/gate-candidate"}
    assert len(seen) == 8 and [given in sides for given in seen] == [True] * 8
    assert seen[:4] == [sides[0], sides[1], sides[1], sides[0]]
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    seen.clear()
    assert gate("--slm-baseline-env=VLLM_CACHE_ROOT=/mine", "--slm-candidate-env=PYTHONPATH=/opt/other").ret == 0
    assert seen[:2] == [{}, {"VLLM_CACHE_ROOT": "/elsewhere/pytest-slmserve/gate-candidate"}], "one has said where"


def test_sides_that_differ_in_arguments_share_theirs(gate, launches):
    assert gate("--slm-candidate-engine-arg=max_num_batched_tokens=2048").ret == 0
    assert launches == [{}] * 8


def test_another_word_is_refused(gate):
    assert "'hot' is not warm or cold" in usage_error(gate("--slm-gate-caches=hot"))


def test_without_a_gate_it_says_nothing(sweep):
    text = usage_error(sweep("--slm-gate-caches=cold"))
    assert "--slm-gate-caches says what a gate compares, and no gate was asked for" in text
