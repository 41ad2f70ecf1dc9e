"""A session on the simulated engine: what is measured, reused, judged and noted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from simulated_sessions import MODEL, judged, point, sweep

from pytest_slmserve.analysis.metrics.validity import check, problems, trustworthy
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.archive.store import read
from pytest_slmserve.engines.pool import Pool
from pytest_slmserve.options.read import read_options
from pytest_slmserve.plan.planner import check_there
from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.screen import tables
from pytest_slmserve.run import executor
from pytest_slmserve.run import executor as places
from pytest_slmserve.run import session as module
from pytest_slmserve.run.executor import measure_case
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.records import Environment, Measurement, ReplicaGroup
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec
from pytest_slmserve.telemetry.host import Gpu, Host
from pytest_slmserve.telemetry.sampler import Sampler, SimulatedSource


def stored(session: Session) -> list[Measurement]:
    return list(read(session.options.records).measurements)


def broken_at_first(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The first measurements have a failed request."""
    left = [1] * times

    def sometimes(*arguments: object) -> ReplicaGroup:
        [found] = measure_case(*arguments)  # type: ignore[arg-type]
        return (replace(found, run=replace(found.run, failures=left.pop())) if left else found,)

    monkeypatch.setattr(executor, "measure_case", sometimes)


def test_a_point_is_measured_once_on_one_engine_and_on_disk_at_once(opened):
    session = opened()
    first = list(point(session))
    assert len(first) == 2 == len(stored(session))
    assert point(session) == first and len(session.devices.pool.starts) == 1
    assert len(point(session, repeats=3)) == 3 == len(stored(session)), "only the missing one is measured"


def test_an_invalid_measurement_is_kept_and_measured_once_more(opened, monkeypatch):
    broken_at_first(monkeypatch, 1)
    session = opened()
    found = point(session)
    assert [bool(problems(m)) for m in found] == [True, False, False] and len(stored(session)) == 3
    item = trustworthy("opt-125m-8", [(m,) for m in found], 2)
    assert item and item.why.startswith("2 of 3 measurements are valid, 2 are wanted: 1 requests failed")
    [curve] = session.verdicts.curves()
    text = "\n".join(text for text, _ in tables(Findings(curves=[curve])))
    assert "left out: concurrency 8: 2 of 3 measurements are used: 1 requests failed" in text


def test_a_noisy_measurement_is_not_repeated_and_is_reused(opened):
    session = opened(engine_arg=["slow_clock_from=8"])
    found = point(session)
    assert len(found) == 2 == len(stored(session)) and all(check(m).noise for m in found)
    again = opened(engine_arg=["slow_clock_from=8"], resume=True)
    assert [m.id for m in point(again)] == [m.id for m in found] and again.devices.pool.starts == []


def test_there_is_no_third_chance(opened, monkeypatch):
    broken_at_first(monkeypatch, 9)
    found = point(opened())
    assert len(found) == 2 + executor.EXTRA_ATTEMPTS and not trustworthy("opt-125m-8", [(m,) for m in found], 2)


def test_what_was_measured_before_an_engine_died_is_on_disk(opened):
    session = opened(engine_arg=["die_at=64"])
    with pytest.raises(EngineFailed, match="died at concurrency 64"):
        sweep(session)
    assert [m.load.concurrency for m in stored(session)] == [8, 8]
    verdict = judged(session, "throughput-plateau")
    assert verdict.state is State.INCONCLUSIVE and verdict.why == "not measured at concurrency 256, 512"
    assert [p.concurrency for p in session.verdicts.curves()[0].points] == [8]


def test_a_resumed_session_measures_only_what_is_missing(opened):
    sweep(opened(), only=(8, 64))
    again = opened(resume=True)
    sweep(again)
    assert len(stored(again)) == 8 and sum(again.findings().reused.values()) == 4
    spec, workload = again.planner.spec(MODEL), again.planner.workload(MODEL)
    cases = [again.planner.case(spec, [workload], [ClosedLoop(n)]) for n in (8, 128)]
    assert [again.executor.count_missing(case) for case in cases] == [0, 2]
    anew = opened()
    assert anew.results.repeats == {} and sum(anew.findings().reused.values()) == 0


def test_invalid_measurements_are_not_resumed(opened, monkeypatch):
    broken_at_first(monkeypatch, 1)
    point(opened(), repeats=1)
    assert [len(found) for found in opened(resume=True).results.repeats.values()] == [1]


def test_warnings_of_the_host_are_noted_once(opened, tmp_path, monkeypatch):
    host = Host(Environment(platform="simulated"), "simulated-noted", ("vLLM 99 is outside the tested range",))
    monkeypatch.setattr(module, "probe", lambda *_: host)
    session = opened()
    sweep(session)
    assert session.notes == ["vLLM 99 is outside the tested range"]


def test_a_model_that_does_not_fit_is_left_out_once_and_said(opened, monkeypatch):
    host = Host(Environment(platform="simulated", gpu_memory_bytes=9 << 30), "simulated-small")
    monkeypatch.setattr(module, "probe", lambda *_: host)
    session = opened(models=None)
    assert session.planner.models == session.planner.models == (MODEL, "opt-1.3b")
    assert len(session.notes) == 1 and session.notes[0].startswith("opt-2.7b is left out: weights and reserve take")


def test_an_unknown_model_is_wrong_usage(opened):
    with pytest.raises(BadUsage, match="unknown model 'gpt-5'"):
        _ = opened(models="opt-125m,gpt-5").planner.models


def test_a_plan_needs_no_device(tmp_path, monkeypatch):
    def nothing_here(*_: object) -> Host:
        raise BadUsage("no GPU here")

    monkeypatch.setattr(module, "probe", nothing_here)
    planned = Session.from_options(read_options({"gpu": True, "plan": True}, {}, {}), tmp_path)
    assert (
        planned.notes == ["no GPU here: the plan assumes a GPU of 140 GiB"]
        and len(planned.planner.sweep(MODEL).cases) > 9
    )
    with pytest.raises(BadUsage, match="no GPU here"):
        Session.from_options(read_options({"gpu": True}, {}, {}), tmp_path)


def test_how_a_run_is_going_is_told_with_the_name_of_its_point(opened):
    told: list[str] = []
    session = opened()
    session.executor.on_progress = lambda case, title, progress: told.append(title)
    point(session)
    assert list(dict.fromkeys(told)) == ["opt-125m at 8, repeat 1", "opt-125m at 8, repeat 2"]


def test_closing_frees_device_and_archive(opened):
    session = opened()
    point(session)
    session.close()
    assert session.devices.pool.current is None and isinstance(session.devices.pool, Pool)
    opened().close()


@pytest.fixture
def two_gpus(opened, monkeypatch):
    """A session that takes its two GPUs for real ones; what it locks and which sensors it opens."""
    locked, read = [], []

    @contextmanager
    def lock(device: str) -> Iterator[None]:
        locked.append(device)
        yield
        locked.remove(device)

    def opens(choice: str, device: str, interval_s: float, others: Sequence[str] = ()):
        read.append((device, *others))
        return Sampler([SimulatedSource()]), []

    session = opened()
    monkeypatch.setattr(places, "lock_device", lock)
    monkeypatch.setattr(places, "open_sampler", opens)
    gpus = tuple(Gpu(f"GPU-{i}", "NVIDIA H200", 141 << 30, "1", "12.8") for i in range(2))
    session.planner.host = Host(Environment(platform="cuda"), "GPU-0", gpus=gpus)
    session.planner.platform = "cuda"
    return session, locked, read


def test_an_engine_takes_a_lock_and_the_sensors_of_each_of_its_gpus(two_gpus):
    session, locked, read = two_gpus
    devices = session.devices
    one, both = EngineSpec(MODEL), EngineSpec(MODEL, tensor_parallel_size=2)
    devices.take(one)
    assert locked == [], "the first was taken when the session was opened"
    devices.take(both), devices.take(both)
    assert locked == ["GPU-1"], "what is held is not asked for again"
    devices.sampler = devices._opened(("GPU-0",))

    def sampler_of(spec: EngineSpec) -> Sampler | None:
        return devices.sampler_on(session.planner.devices(spec))

    assert sampler_of(one) is devices.sampler
    assert sampler_of(both) is sampler_of(both) is not devices.sampler
    assert sampler_of(replace(one, gpu=1)) not in (devices.sampler, sampler_of(both))
    assert read == [("GPU-0",), ("GPU-0", "GPU-1"), ("GPU-1",)]
    assert devices.own_sampler() is devices.sampler, "engines of this run have one GPU"
    session.planner.options = session.options._replace(tensor_parallel_size=(2,))
    assert devices.own_sampler() is sampler_of(both)
    session.close()
    assert locked == []


def test_processes_of_a_cpu_engine_need_a_core_each():
    host = Host(Environment(platform="cpu", cores=2), "cpu")
    check_there(host, range(2))
    with pytest.raises(BadUsage, match="3 processes of vLLM's CPU backend need a core each, and there are 2"):
        check_there(host, range(3))


def test_a_gpu_that_is_not_there_is_not_taken(two_gpus):
    session, locked, _ = two_gpus
    with pytest.raises(BadUsage, match="3 GPUs are asked for, and 2 GPUs are visible"):
        session.devices.take(EngineSpec(MODEL, gpu=1, tensor_parallel_size=2))
    assert locked == []
