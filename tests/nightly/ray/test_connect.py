"""What a node says of itself, and what is made of it where it cannot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_slmserve.run.cluster import Node, node_host
from pytest_slmserve.schema.errors import BadUsage

NODE = Node("0" * 56, "10.0.0.2 (00000000)", 1, 8)
PROBLEMS = (
    "TaskUnschedulableError",
    "NodeDiedError",
    "LocalRayletDiedError",
    "GetTimeoutError",
    "RuntimeEnvSetupError",
)


def ray_that(name: str, text: str = ""):
    """Ray, whose answers raise this."""
    kinds = {problem: type(problem, (Exception,), {}) for problem in PROBLEMS}

    def get(answer: object, timeout: float) -> object:
        raise kinds.get(name, ModuleNotFoundError)(text)

    return SimpleNamespace(exceptions=SimpleNamespace(**kinds), get=get)


@pytest.mark.parametrize(
    ("name", "text", "says", "hint"),
    [
        (
            "RuntimeEnvSetupError",
            "Failed to set up runtime environment.\n\n    ERROR: No matching distribution found for vllm==99.0\n",
            "10.0.0.2 (00000000) cannot make the environment of slm_ray_env "
            "(ERROR: No matching distribution found for vllm==99.0)",
            "packages that the index of the nodes has",
        ),
        (
            "another",
            "Traceback ...\nNo module named 'pytest_slmserve'",
            "10.0.0.2 (00000000) cannot run what it is sent (No module named 'pytest_slmserve')",
            "pytest-slmserve installed there, or named in slm_ray_env, and the same Python",
        ),
        ("GetTimeoutError", "", "10.0.0.2 (00000000) does not answer", "ray status, or a run without slm_ray_resource"),
    ],
)
def test_a_node_that_cannot_answer_is_named_with_the_reason(name, text, says, hint):
    with pytest.raises(BadUsage) as told:
        node_host(ray_that(name, text), NODE, object())
    assert (told.value.problem, told.value.hint) == (says, hint)


def test_a_node_that_is_gone_says_nothing():
    assert node_host(ray_that("NodeDiedError"), NODE, object()) is None
