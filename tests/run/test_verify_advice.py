"""`advise --verify` on the simulated engine: what is started, what is told, what is refused, what is left."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sealed_lines import reseal
from simulated_sessions import records_of
from strategies import H200, law, measurement
from test_main import run

from pytest_slmserve.analysis.advice.advisor import Plan, plan
from pytest_slmserve.analysis.advice.batch_choice import Objectives, utilization
from pytest_slmserve.analysis.advice.subjects import of_curves
from pytest_slmserve.analysis.metrics.validity import problems
from pytest_slmserve.analysis.sweep.batching import RelativeSlo
from pytest_slmserve.analysis.sweep.curve import curve_of
from pytest_slmserve.archive.store import read
from pytest_slmserve.commands.report import curves_of
from pytest_slmserve.engines.launch.device_lock import DeviceLock
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.cases import Case
from pytest_slmserve.run import advice, executor
from pytest_slmserve.run import session as sessions
from pytest_slmserve.run.advice import (
    VerifyCase,
    VerifyOptions,
    as_advised,
    joint_of,
    opened,
    same_requests,
    trials,
    verify,
)
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.environment import Environment
from pytest_slmserve.schema.errors import BadUsage
from pytest_slmserve.schema.loads import ClosedLoop
from pytest_slmserve.schema.records import Measurement
from pytest_slmserve.schema.specs import GIB, EngineSpec
from pytest_slmserve.telemetry.host import Host

GRID = "1,8,32,64,128"
Make = Callable[..., Path]


@pytest.fixture
def swept(tmp_path, monkeypatch) -> Make:
    """Makes an archive of sweeps on the simulated engine, in the working directory; options go by their names."""
    monkeypatch.chdir(tmp_path)

    def make(name: str = "a.jsonl", **given: Any) -> Path:
        words = {"simulate": True, "models": "opt-1.3b", "concurrency": GRID, "window": "2", "records": name}
        session = Session.from_options(read_options({**words, **given}, {}, {}), tmp_path)
        session.open()
        try:
            for model in session.planner.models:
                sweep = session.planner.sweep(model)
                for load in sweep.loads:
                    records_of(session, sweep.spec, load)
        finally:
            session.close()
        return tmp_path / name

    return make


def found(path: Path, *, slo: float = 2.0, **wish: Any) -> tuple[Plan, Sequence[Any]]:
    """The advice on an archive, and its curves."""
    curves = curves_of(read(path))
    return plan(of_curves(curves, None, None).subjects, Objectives(slo=RelativeSlo(slo, 32), **wish)), curves


def advise(capsys, path: Path, *arguments: object) -> tuple[int, str, str]:
    return run(capsys, "advise", path, "--slo-itl", "2x@32", "--verify", *arguments)


def verification(capsys, path: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    status, out, err = advise(capsys, path, "--json", *arguments)
    assert err == ""
    seen = json.loads(out)
    advised = {model["model"]: model["advised"] for model in seen["models"]}
    for model in seen["verification"]["models"]:
        model["advised"] = advised[model["model"]]
    return status, seen["verification"]


def slower(monkeypatch, factor: float) -> None:
    """From now on engines are so much as fast."""
    law_of = SimulatedEngine.law
    monkeypatch.setattr(
        SimulatedEngine, "law", lambda self, work: (factor * law_of(self, work)[0], law_of(self, work)[1])
    )


# End to end


def test_predicted_and_measured_agree(swept, tmp_path, capsys):
    status, out, err = advise(capsys, swept())
    assert (status, err) == (0, "") and "vllm serve facebook/opt-1.3b" in out
    text = out.partition("verified: ")[2]
    [row] = [line.split() for line in text.splitlines() if line.startswith("opt-1.3b")]
    assert row[1] == "64" and row[11:13] == ["3,073", "3,073"] and row[-1] == "0"
    assert abs(float(row[4]) - 100) < 2 and "4 verdicts: 4 pass" in text
    assert all(len(line) <= 150 and line == line.rstrip() for line in out.splitlines())
    kept = read(tmp_path / ".slm" / "verify.jsonl").measurements
    assert [m.load for m in kept] == [ClosedLoop(64, window_s=2.0)] * 2 and not any(map(problems, kept))
    assert {(m.spec.max_num_seqs, m.spec.max_model_len) for m in kept} == {(64, 768)}


def test_as_json(swept, tmp_path, capsys):
    status, seen = verification(capsys, swept(), "--repeats", 3, "--records", "mine.jsonl", "--verify-margin", 0.1)
    [model] = seen["models"]
    assert (status, seen["state"], seen["margin"], seen["together"]) == (0, "passes", 0.1, None)
    assert len(model["records"]) == 3 == len(read(tmp_path / "mine.jsonl").measurements)
    ratio, predicted = model["ratio"], model["advised"]
    assert ratio["low"] < ratio["value"] < ratio["high"] and abs(ratio["value"] - 1) < 0.02
    assert ratio["value"] == pytest.approx(model["tokens_per_s"]["value"] / predicted["tokens_per_s"]["value"])
    assert model["kv_blocks"] == {"predicted": 3073, "reported": 3073} and model["preemptions"] == 0
    assert model["latency_s"]["value"] == pytest.approx(predicted["latency_s"]["value"], rel=0.02)
    assert {verdict["state"] for verdict in model["verdicts"]} == {"passes"} and len(model["verdicts"]) == 4


def test_a_slower_engine_fails(swept, capsys, monkeypatch):
    path = swept()
    slower(monkeypatch, 0.7)
    status, seen = verification(capsys, path)
    assert (status, seen["state"]) == (1, "fails")
    assert seen["models"][0]["ratio"]["value"] == pytest.approx(0.7, rel=0.02)
    assert "FAILS" in advise(capsys, path)[1]
    assert verification(capsys, path, "--verify-margin", "0.4")[0] == 0, "the margin is an argument"


def test_noise_wider_than_the_margin_is_inconclusive(swept, capsys):
    status, seen = verification(capsys, swept(engine_arg=["noise=0.1"]), "--verify-margin", "0.01")
    assert (status, seen["state"]) == (10, "inconclusive")


def test_one_repeat_of_each_has_no_noise_to_decide_by(swept, capsys):
    status, out, _ = advise(capsys, swept(repeats="1"), "--repeats", "1")
    assert status == 10 and "the noise is not known: --repeats 2" in " ".join(out.split())


def test_what_two_loads_predict_is_verified(swept, capsys):
    status, seen = verification(capsys, swept(concurrency="1,32"))
    [model] = seen["models"]
    assert status == 0 and model["batch"] not in (1, 32)
    assert abs(model["ratio"]["value"] - 1) < 0.03


def test_preemption_breaks_the_promise(swept, capsys):
    """Planted at 64 from the start, it would not be advised: so the sweep does not go so far."""
    status, out, _ = advise(capsys, swept(concurrency="1,32", engine_arg=["preempt_from=40"]))
    assert status == 1 and "preemptions, though its KV cache was to hold all at full length" in out


def test_an_engine_that_dies_fails_and_the_others_go_on(swept, capsys):
    path = swept(models="opt-125m,opt-1.3b", concurrency="1,32", engine_arg=["die_at=40"])
    status, seen = verification(capsys, path)
    assert (status, [m["tokens_per_s"] for m in seen["models"]]) == (1, [None, None])
    [verdict] = seen["models"][0]["verdicts"]
    assert verdict["claim"] == "starts-as-advised" and "the simulated engine died at" in verdict["why"]


# Several engines


def test_several_engines_of_one_model_are_run_together(swept, capsys):
    path = swept(engine_arg=["dram_active=0.3", "engine_active=0.6"])
    _, turns = verification(capsys, path, "--gpu-memory", "140GiB")
    status, mps = verification(capsys, path, "--gpu-memory", "140GiB", "--sharing", "mps")
    assert (status, mps["together"]["loads"]) == (0, [32, 32])
    assert turns["together"]["bound"] == pytest.approx(1 / 0.6), "the host's gaps"
    assert mps["together"]["bound"] == pytest.approx(0.89 / 0.3)
    alone = mps["models"][0]["tokens_per_s"]["value"]
    together = mps["together"]
    assert together["gain"]["value"] == pytest.approx(together["output_tokens_per_s"] / alone, rel=1e-6)
    gain = together["gain"]["value"] / turns["together"]["gain"]["value"]
    assert gain == pytest.approx(1.2, rel=0.02), "what the simulated device has under MPS"
    assert [v["claim"] for v in together["verdicts"]] == ["no-request-preempted", "gain-within-bound"]


def test_several_models_are_run_together(swept, tmp_path, capsys):
    status, out, err = advise(capsys, swept(models="opt-125m,opt-1.3b"), "--gpu-memory", "140GiB")
    said = " ".join(out.partition("verified: ")[2].split())
    assert (status, err) == (0, "") and "together, by time-slicing: opt-125m + opt-1.3b at " in said
    assert "(opt-125m: 50 % of its own, opt-1.3b: 50 % of its own)" in said and "is 1.00 (95 %: " in said
    kept = read(tmp_path / ".slm" / "verify.jsonl").measurements
    assert [m.spec.model for m in kept if m.replica] == ["opt-125m", "opt-1.3b"] * 2
    assert {m.spec for m in kept if m.replica} == {m.spec for m in kept if not m.replica}


def test_more_than_the_bound_fails(swept, capsys, monkeypatch):
    """The simulated device has 1.2 times under MPS, and its counters say that there is next to nothing to be had."""
    path = swept(models="opt-125m,opt-1.3b", engine_arg=["dram_active=0.95"])
    asked = ("--gpu-memory", "140GiB", "--sharing", "mps", "--verify-margin", "0.05")
    status, seen = verification(capsys, path, *asked)
    assert status == 1 and [v["state"] for v in seen["together"]["verdicts"]] == ["passes", "fails"]


# What is started


def h200(**facts: Any) -> list[Measurement]:
    return [measurement(c, law(c) * (1 + 0.001 * i), repeat=i, **facts) for c in (1, 16, 32, 64, 128) for i in (0, 1)]


def advised(made: list[Measurement], batch: int | None = None, **wish: Any) -> EngineSpec:
    curve = curve_of("opt-1.3b", made)
    wanted = Objectives(slo=RelativeSlo(2, 32), **{"gpu_bytes": H200.gpu_memory_bytes, **wish})
    [advice] = plan(of_curves([curve], None, None).subjects, wanted).advices
    return as_advised(advice, made[0], batch or advice.batch or 0, wanted.gpu_bytes)


def test_the_engine_is_that_of_the_records_with_the_limits_advised():
    made = h200()
    spec = advised(made)
    total = spec.kv_cache_bytes + 2_631_516_160 + 4 * GIB
    assert (spec.max_num_seqs, spec.max_model_len) == (64, 96)
    assert spec.kv_cache_bytes == (64 * 6 + 1) * 16 * 196_608
    assert spec.gpu_memory_utilization == utilization(total, H200.gpu_memory_bytes or 0) == 0.054
    limits = ("max_num_seqs", "max_model_len", "kv_cache_bytes", "gpu_memory_utilization")
    assert replace(spec, **{name: getattr(made[0].spec, name) for name in limits}) == made[0].spec


@pytest.mark.parametrize(("gpu", "share"), [(40 * GIB, 0.19), (1000 * GIB, 0.054)])
def test_the_share_is_what_the_check_at_the_start_needs_here(gpu, share):
    assert advised(h200(), gpu_bytes=gpu).gpu_memory_utilization == share


def test_what_was_given_beside_the_limits_does_not_override_them():
    made = h200()
    beside = (("max_num_seqs", 512), ("num_gpu_blocks_override", 99), ("block_size", 16))
    spec = advised([replace(m, spec=replace(m.spec, extra=beside)) for m in made])
    assert spec.max_num_seqs == 64 and spec.extra == (("block_size", 16),)


@pytest.mark.parametrize(("batch", "gib"), [(8, 1), (4096, 73)])
def test_on_the_cpu_the_kv_cache_has_whole_gib(batch, gib):
    environment = Environment(platform="cpu", cpu="some")
    made = [
        replace(m, spec=EngineSpec("opt-1.3b", platform="cpu", kv_cache_bytes=GIB))
        for m in h200(environment=environment)
    ]
    spec = advised(made, batch, gpu_bytes=None)
    assert spec.kv_cache_bytes == gib * GIB and spec.max_num_seqs == batch and spec.max_model_len == 2048


def test_the_load_is_that_of_the_records(swept):
    """Window and ramp-up too."""
    [trial] = trials(*found(swept(ramp_up="burst", window="3")))
    assert trial.load == ClosedLoop(64, window_s=3.0, ramp_up="burst")
    assert trial.workload.hash == trial.source.workload.hash and trial.spec.extra == ()


def test_the_sweep_that_the_advice_rests_on_is_the_one_repeated(swept):
    swept(concurrency="1,32", input_len="64", output_len="32")
    [trial] = trials(*found(swept()))
    assert trial.source.workload.spec.prompt_tokens == 512


def test_one_engine_needs_no_other(swept):
    asked, curves = found(swept(), gpu_bytes=140 * GIB)
    assert joint_of(asked, trials(asked, curves), "time-slicing") is None


# What is refused


def test_requests_that_cannot_be_made_again(swept):
    path = swept()
    made = read(path).measurements[0]
    other = replace(made, workload=replace(made.workload, hash="0123456789ab"))
    with pytest.raises(BadUsage, match=r"cannot be made again here: the records have the hash 0123456789ab"):
        same_requests(other)


def test_records_of_another_kind_of_host(swept, tmp_path, capsys):
    path = swept()
    cores = json.loads(path.read_text("utf-8").splitlines()[1])["environment"]["cores"]
    path.write_text(path.read_text("utf-8").replace(f'"cores":{cores}', '"cores":777'), "utf-8")
    reseal(path)
    status, out, err = advise(capsys, path)
    assert (status, out) == (4, "") and "of another kind of host (cores 777 there, " in err
    assert not (tmp_path / ".slm").exists(), "nothing was begun"


def test_records_of_a_gpu_where_there_is_none(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(advice, "same_requests", lambda source: None)
    monkeypatch.setattr(sessions, "probe", lambda *_: (_ for _ in ()).throw(BadUsage("no GPU here", "--slm-cpu")))
    curve = curve_of("opt-1.3b", h200())
    asked = plan(of_curves([curve], None, None).subjects, Objectives(slo=RelativeSlo(2, 32)))
    with (
        pytest.raises(BadUsage, match=r"^no GPU here\n  try: the kind of host that was measured on: NVIDIA H200"),
        opened(trials(asked, [curve]), None, VerifyOptions()),
    ):
        pytest.fail("it was opened")


def test_a_device_that_another_run_measures(swept, tmp_path, capsys, monkeypatch):
    """Records of the CPU, for a formula disturbs nobody; no engine comes to be started."""
    path = swept()
    text = path.read_text("utf-8").replace('"platform":"simulated"', '"platform":"cpu"')
    path.write_text(re.sub(r'"kv_cache_bytes":\d+', f'"kv_cache_bytes":{GIB}', text), "utf-8")
    reseal(path)
    there = replace(read(path).measurements[0].environment, platform="cpu")
    monkeypatch.setattr(sessions, "probe", lambda *_: Host(there, "cpu"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lock = DeviceLock("cpu", tmp_path)
    lock.acquire()
    try:
        status, out, err = advise(capsys, path)
    finally:
        lock.release()
    assert (status, out) == (4, "") and f"is being measured by another run (process {os.getpid()}, since" in err
    assert not (tmp_path / ".slm").exists()


def test_an_archive_that_another_run_writes(swept, tmp_path, capsys):
    path = swept()
    session = Session.from_options(read_options({"simulate": True, "records": "mine.jsonl"}, {}, {}), tmp_path)
    session.open()
    try:
        status, out, err = advise(capsys, path, "--records", "mine.jsonl")
    finally:
        session.close()
    assert (status, out) == (4, "") and "another run is writing to mine.jsonl" in err and "--records with" in err


def test_longer_requests_than_advised_for(swept, capsys):
    status, out, err = advise(capsys, swept(), "--max-model-len", "512")
    assert (status, out) == (4, "") and "requests of 768 tokens" in err and "--max-model-len 768" in err


def test_results_that_are_not_ours(tmp_path, capsys):
    columns = ("--knob", "a", "--throughput", "b", "--latency", "c_s")
    status, out, err = run(capsys, "advise", tmp_path / "a.csv", *columns, "--verify")
    assert (status, out) == (4, "") and "external results do not tell enough to be verified" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--repeats", "2"), "--repeats says how to verify an advice, and nothing is verified"),
        (("--verify-margin", "0.1"), "--verify-margin says how"),
        (("--verify", "--repeats", "0"), "--repeats 0 is no number of measurements"),
        (("--verify", "--verify-margin", "15"), "--verify-margin 15 is no share"),
        (("--verify", "--sharing", "mig"), "invalid choice: 'mig'"),
    ],
)
def test_wrong_usage(tmp_path, capsys, arguments, words):
    status, out, err = run(capsys, "advise", tmp_path / "none.jsonl", *arguments)
    assert (status, out) == (4, "") and words in err


def test_mps_where_there_is_none_is_said_before_anything_is_measured(swept, tmp_path, capsys, monkeypatch):
    path = swept(models="opt-125m,opt-1.3b")
    monkeypatch.setattr(advice, "cannot_share", lambda *_: "no MPS here")
    status, out, err = advise(capsys, path, "--gpu-memory", "140GiB", "--sharing", "mps")
    assert (status, out) == (4, "") and "no MPS here" in err and "--sharing time-slicing" in err
    assert not (tmp_path / ".slm").exists()


def test_nothing_to_verify(swept, tmp_path, capsys):
    status, out, err = advise(capsys, swept(concurrency="32"))
    assert (status, err) == (10, "") and "1 load to judge by" in out and "verified" not in out
    assert not (tmp_path / ".slm").exists()


# What is left


def test_an_interrupt_leaves_nothing_and_keeps_what_was_measured(swept, tmp_path, capsys, monkeypatch):
    path, closed, run_once = swept(), [], SimulatedEngine.run

    def interrupted(self: SimulatedEngine, *arguments: Any) -> Any:
        if (tmp_path / ".slm" / "verify.jsonl").read_text("utf-8").count('"kind":"measurement"'):
            raise KeyboardInterrupt
        return run_once(self, *arguments)

    monkeypatch.setattr(SimulatedEngine, "run", interrupted)
    monkeypatch.setattr(SimulatedEngine, "close", lambda engine: closed.append(engine))
    status, out, err = advise(capsys, path)
    assert status == 130 and "vllm serve" in out and "verified" not in out
    assert err == "interrupted: nothing runs any more; what was measured is in .slm/verify.jsonl\n"
    assert len(closed) == 1 == len(read(tmp_path / ".slm" / "verify.jsonl").measurements)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert advise(capsys, path)[0] == 0, "device and archive are free"


def test_replicas_are_stopped_when_interrupted(swept, capsys, monkeypatch):
    asked, curves = found(swept(engine_arg=["dram_active=0.3", "engine_active=0.6"]), gpu_bytes=140 * GIB)
    alone = trials(asked, curves)
    joint = joint_of(asked, alone, "mps")
    closed: list[SimulatedEngine] = []

    def interrupted(running: Any, case: Case, *further: Any) -> Any:
        if len(case.loads) > 1:
            raise KeyboardInterrupt
        return measure_case(running, case, *further)

    monkeypatch.setattr(SimulatedEngine, "close", lambda engine: closed.append(engine))
    monkeypatch.setattr(executor, "measure_case", interrupted)
    with pytest.raises(KeyboardInterrupt), opened(alone, joint, VerifyOptions()) as session:
        verify(session, alone, joint, VerifyOptions())
    assert [engine.spec.max_num_seqs for engine in closed] == [64, 32, 32]
    assert isinstance(alone[0], VerifyCase) and session.devices.pool.current is None
