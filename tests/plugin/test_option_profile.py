"""--slm-profile is where traces go of what failed in a gate: one more launch of each side, under its own profiler."""

import pytest
from inside import usage_error

from pytest_slmserve.engines import pool
from pytest_slmserve.engines.base import PROFILE_FOLDER
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.errors import EngineFailed

SLOWER = ("--slm-baseline-engine-arg=t_inf=10000", "--slm-candidate-engine-arg=t_inf=9000")


@pytest.fixture
def profiled(monkeypatch):
    """The loads that were served under a profiler, and which launches could have been."""
    loads, places = [], []

    class Engine(SimulatedEngine):
        def __init__(self, spec, extra_env):
            super().__init__(spec, extra_env=extra_env)
            places.append(PROFILE_FOLDER in extra_env)

        def profile(self, workload, load):
            loads.append(load.concurrency)
            return super().profile(workload, load)

    monkeypatch.setattr(pool, "SimulatedEngine", Engine)
    return loads, places


def test_a_failed_gate_names_a_trace_of_each_side(gate, pytester, profiled, archive):
    result = gate(*SLOWER, "--slm-profile=traces")
    assert result.ret == 1
    files = {side: list((pytester.path / "traces" / "opt-125m" / side).iterdir()) for side in ("baseline", "candidate")}
    (baseline,), (candidate,) = files.values()
    result.stdout.fnmatch_lines([f"note: traces of opt-125m at 16: baseline: {baseline}; candidate: {candidate}"])
    loads, places = profiled
    assert loads == [16, 16], "that of the throughput"
    assert places == [False] * 8 + [True] * 2, "no measured launch can be profiled"
    assert len({m.launch for m in archive().measurements}) == 8


def test_earlier_traces_are_not_taken_for_new_ones(gate, pytester):
    gate(*SLOWER, "--slm-profile=traces")
    text = gate(*SLOWER, "--slm-profile=traces").stdout.str()
    assert text.partition("note: traces of")[2].partition("\n")[0].count(".trace.json") == 2
    assert len(list((pytester.path / "traces").rglob("*.trace.json"))) == 4


@pytest.mark.parametrize(
    "arguments", [(), ("--slm-candidate-engine-arg=start_s=60",), ("--slm-candidate-engine-arg=lost_from=4",)]
)
def test_nothing_is_started_where_no_load_fails(gate, pytester, profiled, arguments):
    """It passes, its start alone fails, or nothing counts."""
    gate(*arguments, "--slm-profile=traces")
    assert not any(profiled[1]) and not (pytester.path / "traces").exists()


def test_without_the_option_nothing_is_started(gate, profiled):
    assert gate(*SLOWER).ret == 1
    assert profiled[1] == [False] * 8


def test_a_release_without_a_profiler_is_said_and_spoils_nothing(gate):
    result = gate(*SLOWER, "--slm-candidate-engine-arg=profiler=false", "--slm-profile=traces")
    result.assert_outcomes(failed=3, passed=3)
    result.stdout.fnmatch_lines(["note: traces *; candidate: none (the simulated engine has no profiler, *)"])


@pytest.mark.parametrize("error", [EngineFailed("it died; its log ends with\nmany lines"), KeyError("problem")])
def test_whatever_happens_to_it_is_said_and_spoils_nothing(gate, monkeypatch, error):
    def fail(self, workload, load):
        raise error

    monkeypatch.setattr(SimulatedEngine, "profile", fail)
    result = gate(*SLOWER, "--slm-profile=traces")
    result.assert_outcomes(failed=3, passed=3)
    [note] = [line for line in result.outlines if line.startswith("note: traces of")]
    assert note.count("none (") == 2 and "many lines" not in result.stdout.str()


def test_a_folder_that_cannot_be_made_is_said_and_spoils_nothing(gate, pytester):
    (pytester.path / "file").touch()
    result = gate(*SLOWER, "--slm-profile=file")
    result.assert_outcomes(failed=3, passed=3)
    result.stdout.fnmatch_lines(["note: traces *baseline: none (*Not a directory*"])


def test_a_calibration_is_not_profiled(gate, profiled):
    gate("--slm-calibrate", "--slm-profile=traces")
    assert not any(profiled[1])


def test_without_a_gate_it_says_nothing(sweep):
    assert "--slm-profile says what a gate compares, and no gate was asked for" in usage_error(
        sweep("--slm-profile=traces")
    )
