"""--slm-gpu-memory: engines are planned for a GPU with that much memory."""

import pytest
from inside import SWEEP, usage_error

from pytest_slmserve.plan.engine_specs import planned_memory
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.specs import GIB


def largest(pytester, *words):
    pytester.makepyfile(SWEEP)
    result = pytester.runpytest_inprocess("--slm-simulate", "--slm-models=opt-2.7b", "--slm-plan", *words)
    assert result.ret == 0
    lines = [line for line in result.outlines if "test_point[" in line]
    return int(lines[-1].split("opt-2.7b-")[1].split("]")[0])


def test_less_memory_cuts_the_sweep(pytester):
    assert largest(pytester) == 256
    assert largest(pytester, "--slm-gpu-memory=40GiB") == 64


def test_more_than_the_gpu_has_is_refused(sweep):
    assert "the GPU has 140.0 GiB of memory, and 200.0 GiB are wanted" in usage_error(sweep("--slm-gpu-memory=200GiB"))


def test_what_a_gpu_keeps_for_itself_is_not_missed():
    assert planned_memory(40 * GIB, int(39.4 * GIB)) == int(39.4 * GIB) and planned_memory(None, GIB) == GIB
    with pytest.raises(BadUsage, match="39.4 GiB"):
        planned_memory(48 * GIB, int(39.4 * GIB))


@pytest.mark.parametrize("text", ["", "GiB", "40", "0GiB", "-1GiB", "40TiB"])
def test_what_is_no_memory_is_refused(sweep, text):
    assert "a memory of a GPU, such as 40GiB" in usage_error(sweep(f"--slm-gpu-memory={text}"))
