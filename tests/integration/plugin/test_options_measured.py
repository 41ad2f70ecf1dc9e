"""All that is typed reaches what is measured and its records: one run with every option of engine and load that a
simulation has, beside one without; and what the simulated engine is told to do wrong.

What each option means is told in tests/unit/plan."""

import json

import pytest
from inner_runs import FEW, SWEEP

from pytest_slmserve.analysis.metrics.gpu_figures import roofline_fraction
from pytest_slmserve.analysis.metrics.window import window_trace
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.records import GpuPeaks

PLAIN = "--slm-simulate --slm-models=opt-125m --slm-concurrency=4 --slm-repeats=1 -k test_point"
ALL = """--slm-simulate --slm-models=opt-125m,facebook/opt-350m --slm-concurrency=8,16 --slm-repeats=3 --slm-window=1
    --slm-input-len=100 --slm-output-len=20 --slm-ramp-up=burst --slm-load-format=auto -o slm_kv_cache_dtype=fp8
    --slm-quantization=fp8 --slm-max-num-seqs=32 --slm-gpu-memory=80GiB --slm-gpu-memory-utilization=0.5
    --slm-tensor-parallel-size=2,4 --slm-engine-arg=t_inf=20000 --slm-engine-arg=b_half=10
    --slm-env=VLLM_LOGGING_LEVEL=ERROR --slm-env=OMP_NUM_THREADS=1 -o slm_seed=7 -o slm_allow_prefix_cache=1
    -o slm_sharegpt_rule=vllm -o slm_gpu_peaks=tflops=989,gbps=4800 -k test_point"""


def sent_within_a_step(measurement):
    """Requests sent before the first step ended."""
    return sum(sent < measurement.run.steps.time_s[0] for sent in measurement.run.samples.sent_s)


OWN = """
    import pytest

    @pytest.mark.slm(tensor_parallel_size=4)
    def test_wide(slm_measure, slm_spec): assert slm_measure(concurrency=4, repeats=1).valid

    @pytest.mark.slm(model="opt-1.3b")
    def test_other(slm_measure, slm_spec): assert slm_measure(4, repeats=1) and slm_spec.model == "opt-1.3b"

    @pytest.mark.slm(model="facebook/opt-125m")
    def test_same(slm_measure): assert slm_measure(4, repeats=1)
"""


def test_typed_options_reach_records(runs):
    told, [plain] = runs(SWEEP, ALL), runs(SWEEP, PLAIN).measured()
    assert told.counts == {"passed": 4, "deselected": 2}
    rounds = [(model, load) for model in ("opt-125m", "opt-350m") for _ in range(3) for load in (8, 16)]
    assert [(m.spec.model, m.load.concurrency) for m in told.measured()] == rounds
    assert (plain.load.ramp_up, sent_within_a_step(plain)) == ("staggered", 1)
    for found in told.measured():
        spec, load, asked = found.spec, found.load, found.workload.spec
        assert (spec.load_format, spec.max_num_seqs, spec.gpu_memory_utilization) == ("auto", 32, 0.5)
        assert (spec.tensor_parallel_size, spec.seed, spec.allow_prefix_cache) == (2, 7, True)
        assert dict(spec.extra) == {"quantization": "fp8", "kv_cache_dtype": "fp8", "t_inf": 20000, "b_half": 10}
        assert spec.env == (("VLLM_LOGGING_LEVEL", "ERROR"), ("OMP_NUM_THREADS", "1"))
        assert (load.window_s, load.ramp_up, asked.seed, asked.rule) == (1.0, "burst", 7, "vllm")
        assert {*found.run.samples.prompt_tokens} == {100} and max(found.run.samples.output_tokens) == 20
        assert len(found.run.telemetry.gpus) == 2, "each GPU is read"
        assert 1.0 <= found.run.window_s[1] - found.run.window_s[0] < 1.2
        assert (len(window_trace(found.run).steps) - 1) % 21 == 0, "whole periods of a burst"
        assert sent_within_a_step(found) == load.concurrency and found.workload.hash != plain.workload.hash
        assert found.environment.gpu_peaks == GpuPeaks(989, 4800) and found.environment.key == plain.environment.key
        assert roofline_fraction(plain, 10.0, 1.0) is None and 0 < roofline_fraction(found, 10.0, 1.0) < 1
    ran = runs(OWN, FEW)
    assert ran.counts == {"passed": 3}
    ran.says("slmserve: 1 test of opt-1.3b*--slm-models*")
    wide = next(m for m in ran.measured() if m.spec.tensor_parallel_size == 4)
    assert wide.resolved.kv_blocks == wide.spec.kv_cache_bytes * 4 // (16 * 36_864)
    without = runs(OWN, "--slm-simulate --slm-window=1 --slm-input-len=16 --slm-output-len=8")
    assert without.ret == 0 and "--slm-models does" not in without.out
    runs(SWEEP, PLAIN, "--slm-tensor-parallel-size=1,16").refuses("16 GPUs", "8 GPUs")


def test_every_catalogue_model_is_planned(runs, monkeypatch, tmp_path):
    words = "--slm-simulate --slm-plan --slm-concurrency=64 --slm-input-len=8 --slm-output-len=8"
    ran = runs(SWEEP, words, f"--slm-models={','.join(CATALOGUE)}")
    assert ran.ret == 0 and [name for name in CATALOGUE if f"[{name}-64]" not in ran.out] == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mine = dict(CATALOGUE["opt-125m"].config)
    other = {**dict(CATALOGUE["llama-tiny"].config), "architectures": ["OtherForCausalLM"], "model_type": "other"}
    folders = {"mine/config.json": json.dumps(mine), "other/config.json": json.dumps(other), "test_it.py": SWEEP}
    ran = runs.anew(folders, FEW, "--slm-models=mine --slm-concurrency=1,8")
    assert [m.spec.model for m in ran.measured()] == ["mine"] * 4
    plan = runs.anew({}, FEW, "--slm-models=other --slm-python=/nowhere --slm-plan", folder=ran.folder)
    assert plan.ret == 0
    plan.says("note: other: *not counted*")
    plain = runs("def test_plain(): pass", FEW, "--slm-models=opt-1.4b")
    plain.refuses("opt-1.4b", "opt-1.3b")  # even where no test uses it


# What the simulated engine does wrong when it is told so, or has no room for
WRONG = {
    "--slm-engine-arg=preempt_from=5": (1, {"passed": 3, "failed": 2, "inconclusive": 1}, [1, 2, 4, 8, 16],
        ["*preemptions in the window*", "*inconclusive*invalid at concurrency 8, 16*"]),
    "--slm-engine-arg=die_at=8": (1, {"passed": 3, "failed": 2, "inconclusive": 1}, [1, 2, 4],
        ["*the simulated engine died at concurrency 8*"]),
    "--slm-engine-arg=t_half=3": (1, {"failed": 5, "inconclusive": 1}, [], ["*BadUsage*t_half*"]),
    "--slm-models=granite-4.0-h-350m --slm-concurrency=1,9000 --slm-input-len=512": (
        10, {"passed": 1, "skipped": 1, "inconclusive": 1}, [1], ["SKIPPED*KV cache holds * requests of 520 tokens*"]),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_planted_faults_spare_other_points(runs, words):
    status, counts, loads, lines = WRONG[words]
    ran = runs(SWEEP, FEW, "-rs", words)
    assert (ran.ret, ran.counts, sorted({*ran.loads()})) == (status, counts, loads) and "Traceback" not in ran.out
    ran.says(*lines)
