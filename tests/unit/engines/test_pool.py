"""One engine at a time, and one start per specification."""

from contextlib import closing
from dataclasses import replace

import pytest
from interfaces import SIMULATED, small_workload

from pytest_slmserve.engines import pool as pools
from pytest_slmserve.engines.pool import Pool, launch_engine
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.errors import BadUsage, EngineFailed
from pytest_slmserve.schema.specs import OpenLoop

OTHER = replace(SIMULATED, model="opt-125m", model_facts=None)


class Watched(SimulatedEngine):
    """Notes what happens to it, in the order it happens."""

    def __init__(self, spec, events):
        super().__init__(spec)
        self.events = events
        events.append(f"start {spec.model}")

    def close(self):
        self.events.append(f"close {self.spec.model}")


@pytest.fixture
def events():
    return []


@pytest.fixture
def pool(events):
    with closing(Pool(lambda spec, **_: Watched(spec, events))) as pool:
        yield pool


def test_one_start_per_specification(pool, events):
    assert pool.engine(SIMULATED) is pool.engine(replace(SIMULATED))
    assert events == ["start opt-tiny"]
    assert pool.current == SIMULATED


def test_another_specification_stops_the_first_before_it_starts(pool, events):
    pool.engine(SIMULATED)
    pool.engine(OTHER)
    assert events == ["start opt-tiny", "close opt-tiny", "start opt-125m"]
    assert pool.starts == [SIMULATED, OTHER]


def test_closing_stops_once_and_may_be_repeated(pool, events):
    with pytest.raises(KeyboardInterrupt), closing(pool):
        pool.engine(SIMULATED)
        raise KeyboardInterrupt
    pool.close()
    assert events == ["start opt-tiny", "close opt-tiny"]
    assert pool.current is None


def test_an_engine_that_died_is_closed_and_the_next_is_a_new_one(pool, events):
    mortal = replace(SIMULATED, extra=(("die_at", 4),))
    first = pool.engine(mortal)
    with pytest.raises(EngineFailed):
        first.run(small_workload(), OpenLoop(requests=4))
    second = pool.engine(mortal)
    assert events == ["start opt-tiny", "close opt-tiny", "start opt-tiny"]
    assert first.launch != second.launch
    assert second.run(small_workload(), OpenLoop(requests=3)).failures == 0


def test_a_load_that_is_refused_costs_no_start(pool, events):
    with pytest.raises(BadUsage):
        pool.engine(SIMULATED).run(small_workload(output_tokens=500), OpenLoop(requests=1))
    assert pool.engine(SIMULATED).ready
    assert events == ["start opt-tiny"]


def test_what_did_not_start_is_not_tried_again_and_says_why():
    def refuse(spec, **_):
        raise EngineFailed(
            "the engine did not start: no memory; /tmp/x/engine.log ends with\n  | bang", "a smaller model"
        )

    pool = Pool(refuse)
    with pytest.raises(EngineFailed, match="bang"):
        pool.engine(SIMULATED)
    with pytest.raises(EngineFailed) as again:
        pool.engine(SIMULATED)
    assert again.value.problem == "not tried again: the engine did not start: no memory; /tmp/x/engine.log"
    assert again.value.hint == "a smaller model"
    with pytest.raises(EngineFailed, match="^the engine did not start"):
        pool.engine(OTHER)
    assert pool.starts == [SIMULATED, OTHER]


def test_a_start_is_heard_of_while_it_goes_on_and_when_it_is_ready(tmp_path):
    heard = []

    class Slow(SimulatedEngine):
        def start(self, on_wait):
            on_wait(tmp_path)
            return self

    with closing(Pool(lambda spec, **_: Slow(spec))) as pool:
        pool.on_wait = lambda spec, log: heard.append((spec, log))
        pool.on_started = lambda spec, seconds: heard.append((spec, seconds >= 0))
        pool.engine(SIMULATED)
        pool.engine(SIMULATED)
    assert heard == [(SIMULATED, tmp_path), (SIMULATED, True)]


def test_the_platform_and_the_interface_choose_the_engine(monkeypatch):
    for name in ("EndpointEngine", "ServerEngine", "OfflineEngine", "BatchedEngine", "SimulatedBatches"):
        monkeypatch.setattr(pools, name, lambda spec, name=name, **_: name)
    cpu = replace(SIMULATED, platform="cpu")
    kinds = {
        replace(SIMULATED, interface="transformers"): "SimulatedBatches",
        replace(SIMULATED, platform="remote", interface="endpoint", url="http://h/v1"): "EndpointEngine",
        cpu: "OfflineEngine",
        replace(cpu, interface="server"): "ServerEngine",
        replace(cpu, interface="transformers"): "BatchedEngine",
    }
    assert {spec: launch_engine(spec) for spec in kinds} == kinds
    assert type(launch_engine(SIMULATED)) is SimulatedEngine
