"""The shipped benchmark of several GPUs on the simulated engine, in full: what is planted is found, and found again."""

from inner_runs import QUIET
from shipped import put

from pytest_slmserve.__main__ import main
from pytest_slmserve.archive.store import read

WORDS = f"""--slm-simulate --slm-models=opt-125m,opt-13b --slm-concurrency=1,16,64,256 --slm-window=12
    --slm-input-len=64 --slm-output-len=32 --slm-engine-arg=t_inf=4000 --slm-engine-arg=b_half=64
    --slm-engine-arg=all_reduce_s=0.005 --slm-engine-arg=imbalance=0.2 -o slm_report=tables
    --slm-records=.slm/records.jsonl {QUIET}"""
CLAIMS = ("loses-per-gpu", "serves-less-in-all", "still-gains", "replicas-per-gpu-beat")


def words(line):
    """The first of them: names are as wide as the longest there is, so lines break where they like."""
    return " ".join(line.split()[:16])


def test_slow_all_reduces_are_found_and_replicas_recommended(pytester, monkeypatch, capsys):
    """24 all-reduces of 5 ms in a step of OPT-125M, which takes 80 ms on one GPU: 20 + 120 ms on four."""
    monkeypatch.setenv("COLUMNS", "400")
    put(pytester.path, "test_tensor_parallel")
    result = pytester.runpytest_inprocess(*WORDS.split())
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
    made = read(pytester.path / ".slm/records.jsonl").measurements
    assert {m.spec.tensor_parallel_size for m in made} == {1, 2, 4}
    assert {(m.replica.count, m.replica.sharing) for m in made if m.replica} == {(2, "gpus"), (4, "gpus")}
    capsys.readouterr()
    main(["report", ".slm/records.jsonl"])
    again, told = ([*map(words, lines)] for lines in (capsys.readouterr().out.splitlines(), result.outlines))
    for claim in CLAIMS:
        at = next(i for i, line in enumerate(told) if line.startswith(f"tensor-parallel-{claim}: ") or claim in line)
        assert told[at + 1].startswith("passes opt-")
        assert told[at : at + 2] == again[(i := again.index(told[at])) : i + 2]
    assert not any(line.startswith("throughput-plateau") for line in again), "they are no sweeps"
