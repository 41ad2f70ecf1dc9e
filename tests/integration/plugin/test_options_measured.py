"""All that is typed reaches what is measured and its records: one run with every option of engine and load that a
simulation has, beside one without; and what the simulated engine is told to do wrong.

What each option means is told in tests/unit/plan."""

from __future__ import annotations

import json

import pytest
from inner_runs import FEW
from inside import SWEEP

from pytest_slmserve.analysis.metrics.gpu_figures import roofline_fraction
from pytest_slmserve.analysis.metrics.window import window_trace
from pytest_slmserve.run import session
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.records import Environment, GpuPeaks
from pytest_slmserve.telemetry.host import Gpu, Host

PLAIN = "--slm-simulate", "--slm-models=opt-125m", "--slm-concurrency=4", "--slm-repeats=1", "-k", "test_point"
ALL = (
    "--slm-simulate",
    "--slm-models=opt-125m,facebook/opt-350m",
    "--slm-concurrency=8,16",
    "--slm-repeats=3",
    "--slm-window=1",
    "--slm-input-len=100",
    "--slm-output-len=20",
    "--slm-ramp-up=burst",
    "--slm-load-format=auto",
    "--slm-kv-cache-dtype=fp8",
    "--slm-quantization=fp8",
    "--slm-max-num-seqs=32",
    "--slm-gpu-memory=80GiB",
    "--slm-gpu-memory-utilization=0.5",
    "--slm-tensor-parallel-size=2,4",
    "--slm-engine-arg=t_inf=20000",
    "--slm-engine-arg=b_half=10",
    "--slm-env=VLLM_LOGGING_LEVEL=ERROR",
    "--slm-env=OMP_NUM_THREADS=1",
    "--override-ini=slm_seed=7",
    "--override-ini=slm_allow_prefix_cache=1",
    "--override-ini=slm_sharegpt_rule=vllm",
    "--override-ini=slm_gpu_peaks=tflops=989,gbps=4800",
    "-k",
    "test_point",
)


@pytest.fixture
def plain(runs):
    return runs(SWEEP, *PLAIN)


@pytest.fixture
def told(runs):
    return runs(SWEEP, *ALL)


def test_without_words_a_measurement_is_as_by_default(plain):
    [found] = plain.measured()
    spec, load = found.spec, found.load
    assert (spec.model, spec.interface, spec.load_format, spec.tensor_parallel_size) == (
        "opt-125m",
        "engine",
        "dummy",
        1,
    )
    assert (spec.max_num_seqs, spec.gpu_memory_utilization, spec.seed, spec.extra, spec.env) == (1024, 0.9, 0, (), ())
    assert (load.concurrency, load.window_s, load.ramp_up) == (4, 5.0, "staggered") and not spec.allow_prefix_cache
    asked = found.workload.spec
    assert (asked.prompt_tokens, asked.output_tokens, asked.source, asked.rule) == (512, 256, "lengths", "human-first")
    assert found.environment.gpu_peaks is None and found.run.telemetry.sources == ("simulated",)


def test_every_model_has_its_points_on_its_own_engine_in_rounds(told):
    assert told.counts == {"passed": 4, "deselected": 2}
    rounds = [(model, load) for model in ("opt-125m", "opt-350m") for _ in range(3) for load in (8, 16)]
    assert [(m.spec.model, m.load.concurrency) for m in told.measured()] == rounds


def test_what_is_typed_is_measured_and_recorded(told, plain):
    for found in told.measured():
        spec, load, asked = found.spec, found.load, found.workload.spec
        assert (spec.load_format, spec.max_num_seqs, spec.gpu_memory_utilization) == ("auto", 32, 0.5)
        assert (spec.tensor_parallel_size, spec.seed, spec.allow_prefix_cache) == (2, 7, True)
        assert dict(spec.extra) == {"quantization": "fp8", "kv_cache_dtype": "fp8", "t_inf": 20000, "b_half": 10}
        assert spec.env == (("VLLM_LOGGING_LEVEL", "ERROR"), ("OMP_NUM_THREADS", "1"))
        assert (load.window_s, load.ramp_up) == (1.0, "burst")
        assert (asked.prompt_tokens, asked.output_tokens, asked.seed, asked.rule) == (100, 20, 7, "vllm")
    assert {m.workload.hash for m in told.measured()}.isdisjoint({m.workload.hash for m in plain.measured()})


def test_what_was_served_is_what_was_asked_for(told):
    for found in told.measured():
        assert {*found.run.samples.prompt_tokens} == {100} and max(found.run.samples.output_tokens) == 20
        assert len(found.run.telemetry.gpus) == 2, "each GPU is read"
        opens, closes = found.run.window_s
        assert 1.0 <= closes - opens < 1.2


def test_the_cache_of_smaller_numbers_holds_more_blocks(runs):
    words = (), ("--slm-kv-cache-dtype=fp8",)
    plain, fp8 = (runs(SWEEP, *PLAIN, *more).measured()[0] for more in words)
    assert 2 * plain.resolved.kv_blocks <= fp8.resolved.kv_blocks <= 2 * plain.resolved.kv_blocks + 1


def test_a_data_sheet_makes_a_roofline_and_no_other_gpu(told, plain):
    without, given = plain.measured()[0], told.measured()[0]
    assert given.environment.gpu_peaks == GpuPeaks(989, 4800) and given.environment.key == without.environment.key
    assert roofline_fraction(without, 10.0, 1.0) is None and 0 < roofline_fraction(given, 10.0, 1.0) < 1


def sent_within_a_step(measurement):
    """Requests sent before the first step ended."""
    first = measurement.run.steps.time_s[0]
    return sum(sent < first for sent in measurement.run.samples.sent_s)


def test_a_staggered_load_starts_one_at_a_time_and_a_burst_all_and_whole_periods(told, plain):
    assert [sent_within_a_step(m) for m in plain.measured()] == [1]
    for found in told.measured():
        assert sent_within_a_step(found) == found.load.concurrency
        assert (len(window_trace(found.run).steps) - 1) % 21 == 0


def test_natural_lengths_differ_from_request_to_request(runs):
    for word in ("--slm-input-len=natural", "--slm-output-len=natural"):
        [found] = runs(SWEEP, *PLAIN, word).measured()
        assert (found.workload.spec.prompt_tokens, found.workload.spec.output_tokens) == (None, None)
    assert len({*found.run.samples.prompt_tokens}) > 10


# Engines of a marker, a folder, and several GPUs


OWN = """
    import pytest

    @pytest.mark.slm(tensor_parallel_size=4)
    def test_wide(slm_measure, slm_spec): assert slm_measure(concurrency=4, repeats=1).valid

    @pytest.mark.slm(model="opt-1.3b")
    def test_other(slm_measure, slm_spec): assert slm_measure(4, repeats=1) and slm_spec.model == "opt-1.3b"

    @pytest.mark.slm(model="facebook/opt-125m")
    def test_same(slm_measure): assert slm_measure(4, repeats=1)
"""


def test_a_marker_chooses_for_its_own_engine_and_the_run_says_so(runs):
    ran = runs(OWN, *FEW)
    assert ran.counts == {"passed": 3}
    ran.lines.fnmatch_lines(["slmserve: 1 test of opt-1.3b*--slm-models*"])
    wide = next(m for m in ran.measured() if m.spec.tensor_parallel_size == 4)
    assert wide.resolved.kv_blocks == wide.spec.kv_cache_bytes * 4 // (16 * 36_864)
    without = runs(OWN, "--slm-simulate", "--slm-window=1", "--slm-input-len=16", "--slm-output-len=8")
    assert without.ret == 0 and "--slm-models does" not in without.words


def test_gpus_that_are_too_few_or_of_different_kinds_are_refused(runs, monkeypatch):
    many = runs(SWEEP, *PLAIN, "--slm-tensor-parallel-size=1,16")
    assert many.ret == 4 and "16 GPUs" in many.err and "8 GPUs" in many.err
    gpus = tuple(Gpu(f"GPU-{i}", name, 80 << 30, "1", "12.8") for i, name in enumerate(["NVIDIA L4", "NVIDIA H200"]))
    monkeypatch.setattr(session, "probe", lambda *_: Host(Environment(platform="simulated"), "simulated", gpus=gpus))
    mixed = runs.anew(SWEEP, *PLAIN, "--slm-tensor-parallel-size=2")
    assert mixed.ret == 4 and "NVIDIA L4, 80 GiB" in mixed.err and "NVIDIA H200, 80 GiB" in mixed.err
    assert runs.anew(SWEEP, *PLAIN).counts["passed"] == 1


def test_every_model_of_the_catalogue_is_planned(runs):
    words = ("--slm-simulate", "--slm-plan", "--slm-concurrency=64", "--slm-input-len=8", "--slm-output-len=8")
    ran = runs(SWEEP, *words, f"--slm-models={','.join(CATALOGUE)}")
    assert ran.ret == 0 and [name for name in CATALOGUE if f"[{name}-64]" not in ran.out] == []


def test_a_folder_is_a_model_counted_or_not(pytester, archive, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))
    config = dict(CATALOGUE["opt-125m"].config)
    other = {**dict(CATALOGUE["llama-tiny"].config), "architectures": ["OtherForCausalLM"], "model_type": "other"}
    for name, own in (("mine", config), ("other", other)):
        (pytester.mkdir(name) / "config.json").write_text(json.dumps(own))
    pytester.makepyfile(SWEEP)
    run = lambda *words: pytester.runpytest_inprocess(*FEW, *words, "-p", "no:benchmark", "-p", "no:cacheprovider")  # noqa: E731
    run("--slm-models=mine", "--slm-concurrency=1,8")
    assert [m.spec.model for m in archive().measurements] == ["mine"] * 4
    plan = run("--slm-models=other", "--slm-python=/nowhere", "--slm-plan")
    assert plan.ret == 0
    plan.stdout.fnmatch_lines(["note: other: *(/nowhere *"])
    pytester.mkdir("empty")
    pytester.makepyfile("def test_plain(): pass")
    for wrong, fact in (("opt-1.4b", "opt-1.3b"), ("empty", "config.json"), ("me/mine", "hf download me/mine")):
        result = run(f"--slm-models={wrong}", "--slm-python=/nowhere")
        assert result.ret == 4 and fact in result.stderr.str(), "even where no test uses it"


HYBRID = """
    import pytest

    @pytest.mark.slm(claim="kv-blocks-as-predicted")
    def test_blocks(slm_claim): assert slm_claim()

    @pytest.mark.slm(jobs=[{"model": "lfm2-350m", "requests": 8, "lengths": (8, 8), "kv_requests": 4}])
    def test_job(slm_job_point): assert slm_job_point.measure()
"""


def test_what_the_plan_cannot_know_of_a_hybrid_model_is_skipped_with_a_reason(runs):
    skipped = runs(HYBRID, "--slm-simulate", "--slm-strict", "--slm-models=lfm2-350m", "-rs")
    assert skipped.counts == {"skipped": 2}
    full = runs(
        SWEEP, *FEW, "--slm-models=granite-4.0-h-350m", "--slm-concurrency=1,9000", "--slm-input-len=512", "-rs"
    )
    assert {*full.loads()} == {1}
    full.lines.fnmatch_lines(["SKIPPED*KV cache holds * requests of 520 tokens*"])


def test_by_default_loads_without_room_are_cut_and_said(runs):
    ran = runs(SWEEP, "--slm-simulate", "--slm-models=opt-13b", "--slm-plan")
    assert ran.ret == 0 and "[opt-13b-128]" in ran.out and "[opt-13b-256]" not in ran.out
    for word in ("--slm-gpu-memory=40GiB", "--slm-gpu-memory-utilization=0.2"):
        less = runs(SWEEP, "--slm-simulate", "--slm-models=opt-2.7b", "--slm-plan", word)
        assert "[opt-2.7b-64]" in less.out and "[opt-2.7b-128]" not in less.out


# What the simulated engine does wrong when it is told so


def test_a_planted_preemption_makes_points_invalid_and_the_claim_inconclusive(runs):
    ran = runs(SWEEP, *FEW, "--slm-engine-arg=preempt_from=5")
    assert (ran.ret, ran.counts) == (1, {"passed": 3, "failed": 2, "inconclusive": 1})
    ran.lines.fnmatch_lines(["*preemptions in the window*", "*inconclusive*invalid at concurrency 8, 16*"])


def test_a_planted_death_fails_its_points_only_and_leaves_the_rest(runs):
    ran = runs(SWEEP, *FEW, "--slm-engine-arg=die_at=8")
    ran.lines.fnmatch_lines(["*the simulated engine died at concurrency 8*"])
    assert ran.loads() == [1, 2, 4, 1, 2, 4]


def test_an_argument_that_the_engine_does_not_know_fails_the_points(runs):
    ran = runs(SWEEP, *FEW, "--slm-engine-arg=t_half=3")
    assert ran.ret == 1 and "t_half" in ran.out and "Traceback" not in ran.out


# Replicas


def test_each_number_of_replicas_by_each_way_is_measured_beside_one_engine_alone(pytester, gain, archive):
    few = ("-k", "point_of_replicas", "--slm-concurrency=12", "--slm-window=0.2", "-p", "no:benchmark")
    short = ("--slm-input-len=16", "--slm-output-len=8")
    words = ("--slm-replicas=1,2,4", "--slm-sharing=mps,mig", "--override-ini=slm_pin_cores=1")
    gain(*few, *short, *words).assert_outcomes(passed=5)
    found = [m.replica for m in archive().measurements if m.replica.index == 0]
    assert [(r.count, r.sharing) for r in found[::2]] == [
        (1, "time-slicing"), (2, "mps"), (4, "mps"), (2, "mig"), (4, "mig")
    ]  # fmt: skip
    assert {(r.count > 1, r.pinned) for r in found} == {(False, False), (True, True)} and len(found) == 10
    result = gain(*few, *short, "--slm-replicas=5", "--slm-records=r.jsonl", "-rs")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED*12 *5 replicas*"])
