"""What all engines share: whether requests fit, the load as a message, what an engine is never asked, scores that a
record can hold, and the barrier of engines that are measured together, by a clock of the test."""

import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from interfaces import SIMULATED, small_workload
from refusals import refused

from pytest_slmserve.engines import base
from pytest_slmserve.engines.base import IMPOSSIBLE, Engine, WindowBarrier, check_fits, message_of
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.models import CATALOGUE
from pytest_slmserve.schema.specs import ClosedLoop, EngineSpec, OpenLoop

LOAD = ClosedLoop(4, window_s=0.5)
WORKLOAD = small_workload()

# Requests and loads


def test_oversized_request_is_refused():
    check_fits(SIMULATED, small_workload(1, 240))
    with refused(257, 256, hint="max_model_len=257"):
        check_fits(SIMULATED, small_workload(1, 241))
    shape = CATALOGUE["opt-tiny"]
    with refused() as caught:
        check_fits(replace(SIMULATED, model_facts=shape), small_workload(1, shape.positions))
    assert "max_model_len" not in caught.value.hint
    counted = {"kind": "closed_loop", "concurrency": 4, "requests": 3}
    scheduled = OpenLoop(rate=2.0, settle_s=0.5, window_s=1.0, schedule_s=(0.0, 0.5))
    assert message_of(replace(LOAD, requests=3)).items() >= counted.items()
    assert message_of(scheduled).items() >= {"window": (0.5, 1.5), "schedule": (0.0, 0.5)}.items()
    assert message_of(OpenLoop(requests=2))["window"] is None
    for rate in ({"requests": 3}, {"window_s": 1.0}):
        with refused():
            message_of(OpenLoop(rate=10.0, **rate))


@pytest.mark.parametrize(("interface", "extra", "fact"), [
    ("engine", (), "tokenizer"), ("engine", (("skip_tokenizer_init", False),), None), ("server", (), None),
    ("transformers", (("skip_tokenizer_init", False),), "Transformers"),
])  # fmt: skip
def test_structured_output_needs_vllm_tokenizer(interface, extra, fact):
    workload = small_workload(response_format="json")
    spec = EngineSpec("opt-125m", interface=interface, extra=extra)
    with refused(fact, hint="") if fact else nullcontext():
        check_fits(spec, workload)
    check_fits(spec, small_workload())


class Told(Engine):
    """An engine whose tokens are as likely as it is told."""

    def __init__(self, likely=()):
        super().__init__(SIMULATED)
        self.likely, self.handed = likely, []

    def _logprobs(self, workload, outputs):
        return self.likely

    def _hand_over(self, workload):
        super()._hand_over(workload)
        self.handed.append(workload)

    def _run(self, workload, load, progress, barrier):
        if load.get("requests") == 13:
            raise EngineFailed("died")
        return load


def test_engine_loads_each_workload_once():
    engine, other = Told(), small_workload(5)
    for workload in (WORKLOAD, WORKLOAD, other, WORKLOAD):
        engine.run(workload, LOAD)
    assert engine.handed == [WORKLOAD, other, WORKLOAD]
    with refused():
        engine.run(WORKLOAD, OpenLoop(rate=10.0, requests=3))
    assert engine.ready, "a load that is refused leaves it so"
    with pytest.raises(EngineFailed):
        engine.run(WORKLOAD, replace(LOAD, requests=13))
    assert not engine.ready
    engine = Told()
    for load in (OpenLoop(rate=10.0, window_s=1.0, schedule_s=(0.0,)), OpenLoop(requests=4, max_concurrency=2)):
        with refused(hint="server"):
            engine.run(WORKLOAD, load)
    engine.jobs_only = True
    with refused(hint="slm_job"):  # users who wait for answers
        engine.run(WORKLOAD, LOAD)


@pytest.mark.parametrize("broken", [float("nan"), float("-inf"), -1e9])
def test_unsettled_engine_is_given_up(monkeypatch, broken):
    engine, barrier = Engine(SIMULATED), WindowBarrier([message_of(LOAD)] * 2)
    monkeypatch.setattr(base, "SETTLE_S", 0.01)
    for asked in (lambda: engine.outputs(WORKLOAD, 1, 1), lambda: engine.scores(WORKLOAD, ((1,),)), barrier.settled):
        with pytest.raises(EngineFailed):
            asked()
    assert engine.profile(WORKLOAD, LOAD) and engine.processes() == set()
    with refused(hint="batching"):
        _ = engine.batching
    assert Told([[broken, 0.0], [-1.0, -2.0, -6.0]]).scores(WORKLOAD, ()) == (IMPOSSIBLE / 2, -3.0)


@pytest.mark.parametrize(("loads", "after_s", "opens_s", "lasts_s"), [
    ([LOAD], 4.3, 4.5, 2.0),  # a lifetime, of 2 s
    ([LOAD], 15.3, 15.5, 5.0),  # of 7.5 s
    ([LOAD], 24.3, 24.5, 6.0),  # half of 12 s
    ([replace(LOAD, ramp_up="burst")], 2.3, 2.5, 5.0),  # they began 2 s before: two periods of the slowest
    ([replace(LOAD, ramp_up="burst", settle_lifetimes=2.0)], 4.3, 4.5, 5.0),
    ([replace(LOAD, window_s=s) for s in (0.5, 2.0, 1.0)], 0.0, 0.2, 2.0),  # the longest counts for all
])  # fmt: skip
def test_window_opens_once_all_settled(monkeypatch, loads, after_s, opens_s, lasts_s):
    clock = iter([100.0, *[100.0 + after_s] * 9])
    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    barrier = WindowBarrier([message_of(load) for load in loads])
    assert barrier.begins_s == 100.5
    for _ in loads[1:]:
        barrier.ended()
    opens, closes = barrier.settled()
    assert (opens - 100, closes - opens) == (pytest.approx(opens_s), pytest.approx(lasts_s))


def test_settled_engines_share_last_window():
    barrier = WindowBarrier([message_of(LOAD)] * 3)
    found = barrier.run_together(lambda index: barrier.settled() if index else None, 3, pytest.fail)
    assert found[0] is None and found[1] == found[2] and found[1][0] >= barrier.begins_s - base.BEGIN_S
    barrier, stopped, waits = WindowBarrier([message_of(LOAD)] * 2), [], threading.Event()

    def fail():
        assert waits.wait(20)
        raise EngineFailed("was killed")

    def settle():
        waits.set()
        with pytest.raises(EngineFailed):
            barrier.settled()
        stopped.append("too")

    with pytest.raises(EngineFailed) as caught:
        barrier.run_together(lambda index: [settle, fail][index](), 2, lambda: stopped.append("all"))
    assert sorted(stopped) == ["all", "too"] and caught.value.problem == "was killed"
