"""The shipped benchmark of several GPUs on the simulated engine: what is planted is found, printed, and found again."""

import sys

import pytest
from inside import ALL_OF_IT, usage_error
from shipped import put

from pytest_slmserve.run import session
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.telemetry.host import IMAGINED_GPUS, Host

SMALL = (
    "--slm-simulate",
    "--slm-window=3",
    "--slm-input-len=64",
    "--slm-output-len=32",
    "--slm-models=opt-125m,opt-13b",
    "--slm-engine-arg=t_inf=4000",
    "--slm-engine-arg=b_half=64",
    ALL_OF_IT,
    "-p",
    "no:cacheprovider",
)
CLAIMS = ("loses-per-gpu", "serves-less-in-all", "still-gains", "replicas-per-gpu-beat")


def words(line):
    """The first of them: names are as wide as the longest there is, so lines break where they like."""
    return " ".join(line.split()[:16])


@pytest.fixture
def parallel(pytester):
    """Runs it: `parallel("--slm-tensor-parallel-size=1,2")`."""
    put(pytester.path, "test_tensor_parallel")
    return lambda *args: pytester.runpytest_inprocess(*SMALL, *args)


def test_slow_all_reduces_are_found_and_replicas_recommended(parallel, archive, pytester):
    """24 all-reduces of 5 ms in a step of OPT-125M, which takes 80 ms on one GPU: 20 + 120 ms on four."""
    slow = ("--slm-engine-arg=all_reduce_s=0.005", "--slm-engine-arg=imbalance=0.2", "--slm-window=12")
    result = parallel(*slow, "--slm-concurrency=1,16,64,256")
    result.assert_outcomes(passed=2 * (12 + 3) + 2 + 1 + 2, xpassed=1)
    result.stdout.fnmatch_lines(
        [
            "*opt-125m on several GPUs: simulated*",
            "*256 * 2  one engine, TP 2 * 630 * 22.2 * yes",
            "*256 * 2  2 replicas, a GPU each * 630 * 22.2 * yes",
            "*TP 2, concurrency 256: GPU 0 350 W*; GPU 1 280 W*",
            "*2 GPUs, concurrency 256: most requests/s: 2 replicas, a GPU each*lowest E2E: 2 replicas*",
            "*passes*opt-125m*on 4 GPUs it serves 0.57* times*what it does on 1 GPU*",
            "*passes*opt-13b*on 4 GPUs it serves 1.05 times*what it does on 2 GPUs*",
        ]
    )
    made = archive().measurements
    assert {m.spec.tensor_parallel_size for m in made} == {1, 2, 4}
    assert {(m.replica.count, m.replica.sharing) for m in made if m.replica} == {(2, "gpus"), (4, "gpus")}
    report = pytester.run(sys.executable, "-m", "pytest_slmserve", "report", ".slm/records.jsonl")
    again = [*map(words, report.stdout.lines)]
    told = [*map(words, result.stdout.lines)]
    for claim in CLAIMS:
        at = next(i for i, line in enumerate(told) if line.startswith(f"tensor-parallel-{claim}: ") or claim in line)
        assert told[at + 1].startswith("passes opt-")
        assert told[at : at + 2] == again[(i := again.index(told[at])) : i + 2]
    assert not any(line.startswith("throughput-plateau") for line in again), "they are no sweeps"


def test_fast_ones_are_not_called_slow(parallel):
    result = parallel(
        "--slm-engine-arg=all_reduce_s=0.0001", "-k", "not replicas and not replica", "--slm-models=opt-13b"
    )
    result.assert_outcomes(passed=12 + 2, skipped=1)


def test_numbers_of_gpus_and_loads_are_those_asked_for(parallel):
    result = parallel("--slm-tensor-parallel-size=1,2", "--slm-concurrency=64", "--slm-models=opt-125m", "--slm-plan")
    names = [line.split()[1] for line in result.stdout.lines if "test_point" in line]
    assert names == [f"test_point_on_gpus[opt-125m-64-{how}]" for how in ("tp1", "tp2", "replicas2")]
    result.stdout.fnmatch_lines(
        ["*start opt-125m on 2 GPUs (simulated*", "*start 2 x opt-125m, a GPU each (simulated*"]
    )


def test_all_ways_to_deploy_a_model_stand_side_by_side(parallel, pytester):
    put(pytester.path, "test_replication_gain")
    result = parallel("--slm-models=opt-1.3b", "--slm-replicas=2", "--slm-tensor-parallel-size=1,2", "-k", "point")
    result.stdout.fnmatch_lines(
        [
            "*opt-1.3b on several GPUs: simulated*",
            "*192 * 1  one engine * yes",
            "*192 * 1  2 replicas, time-slicing * yes",
            "*192 * 2  one engine, TP 2 * yes",
            "*192 * 2  2 replicas, a GPU each * yes",
        ]
    )


def test_what_the_host_has_not_is_skipped_with_the_reason(parallel, monkeypatch):
    one = Host(Environment(platform="simulated", gpu_name="simulated"), "simulated", gpus=IMAGINED_GPUS[:1])
    monkeypatch.setattr(session, "probe", lambda *_: one)
    result = parallel("-rs", "--slm-concurrency=64", "--slm-models=opt-125m", "--slm-engine-arg=noise=0.001")
    result.assert_outcomes(passed=1, skipped=2 + 1 + 4)
    result.stdout.fnmatch_lines(
        ["SKIPPED*2 GPUs are asked for, and 1 GPU is visible*", "SKIPPED*needs 2 GPUs, and 1 visible*"]
    )
    assert "2 GPUs are asked for, and 1 GPU is visible" in usage_error(parallel("--slm-tensor-parallel-size=1,2"))


def test_a_load_that_waits_for_memory_is_said_to(parallel):
    result = parallel(
        "--slm-gpu-memory-utilization=0.25",
        "--slm-input-len=512",
        "--slm-output-len=64",
        "--slm-models=opt-13b",
        "--slm-concurrency=4,64",
    )
    result.stdout.fnmatch_lines(
        ["*64 concurrent requests do not fit into the KV memory of 1 GPU: * ran at once*memory, not*"]
    )


def test_replicas_of_a_users_own_test(pytester):
    pytester.makepyfile("""
        def test_it(slm_replicas):
            found = slm_replicas(4, sharing="gpus").measure(64, repeats=1)
            assert found.valid and found.sharing == "gpus" and found.count == 4
            assert found.power_w > 1000
    """)
    pytester.runpytest_inprocess(*SMALL).assert_outcomes(passed=1)


WRONG = {
    "gpus='two'": "gpus='two') is no number of GPUs",
    "extra=(('tensor-parallel-size', 2),)": "no sensor would hear of the GPUs that tensor-parallel-size asks for",
    "extra=('tensor_parallel_size',)": "extra=('tensor_parallel_size',)) is no list of pairs",
    "env=(('CUDA_VISIBLE_DEVICES', '1'),)": "no sensor would hear of the GPUs that CUDA_VISIBLE_DEVICES asks for",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_marker_that_asks_for_gpus_in_a_wrong_way(pytester, words):
    pytester.makepyfile(f"""
        import pytest

        @pytest.mark.slm({words})
        def test_it(slm_measure):
            assert slm_measure(4)
    """)
    assert WRONG[words] in usage_error(pytester.runpytest_inprocess(*SMALL))
