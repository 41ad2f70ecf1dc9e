"""Several launched at once, which then have the device one after the other; waiting is no part of a start."""

import os
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from interfaces import SIMULATED, stand_in
from processes import gone

from pytest_slmserve.engines import server
from pytest_slmserve.engines.child import Child
from pytest_slmserve.engines.pool import Pool, abreast, launch_engine
from pytest_slmserve.engines.server import ProcessEngine, ServerEngine
from pytest_slmserve.schema.errors import EngineFailed

OTHER = stand_in(step_s=0.003)


@pytest.fixture
def launched():
    """What was launched, in that order."""
    return []


@pytest.fixture
def pool(launched):
    def launch(spec, **how):
        launched.append(launch_engine(spec, **how))
        return launched[-1]

    with closing(Pool(launch)) as pool:
        yield pool


def pids(engines):
    return [engine.child.process.pid for engine in engines]


def log(engine):
    return engine.child.log.read_text()


@pytest.mark.parametrize("interface", ["engine", "server"])
def test_all_import_first_and_each_starts_when_the_one_before_it_has_ended(pool, launched, interface):
    specs = [replace(stand_in(), interface=interface), replace(OTHER, interface=interface)]
    with abreast(pool, [(spec, {}) for spec in specs]) as (first, second):
        assert len(launched) == 2 and all("all is imported" in log(engine) for engine in launched)
        assert not any("starts" in log(engine) for engine in launched), "nobody has touched the device"
        assert first() is launched[0] and launched[0].ready and "starts" not in log(launched[1])
        assert second() is launched[1] and launched[1].ready and pool.current == specs[1]
        assert gone(pids(launched)[0])
    assert all(map(gone, pids(launched))) and pool.current is None and pool.starts == specs
    assert isinstance(launched[0], ServerEngine) == (interface == "server")


def test_two_of_one_specification_are_two_launches_each_with_variables_of_its_own(pool, launched):
    with abreast(pool, [(stand_in(), {"MINE": "1"}), (stand_in(), {"MINE": "2"})]) as starts:
        found = [Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in pids(launched)]
        assert len({start().launch for start in starts}) == 2
    assert "MINE=1" in found[0] and "MINE=2" in found[1]


def test_those_whose_turn_does_not_come_end_too(pool, launched):
    with pytest.raises(KeyboardInterrupt), abreast(pool, [(stand_in(), {}), (OTHER, {})]) as (first, _):
        first()
        raise KeyboardInterrupt
    assert len(launched) == 2 and all(map(gone, pids(launched)))


def test_one_that_cannot_be_launched_stops_those_before_it(pool, launched):
    nowhere = replace(OTHER, python="/no/python")
    with pytest.raises(FileNotFoundError), abreast(pool, [(stand_in(), {}), (nowhere, {})]):
        pytest.fail("both were launched")
    assert len(launched) == 1 and gone(pids(launched)[0])


def test_one_that_ends_before_its_turn_says_why_when_it_comes(pool, launched):
    with abreast(pool, [(stand_in(), {}), (stand_in(unheard_of=1), {})]) as (first, second):
        assert first().ready
        with pytest.raises(EngineFailed, match="TypeError: .*unheard_of"):
            second()
    assert all(map(gone, pids(launched)))


def test_one_without_a_process_is_launched_when_its_turn_comes(pool, launched):
    with abreast(pool, [(SIMULATED, {}), (SIMULATED, {})]) as (first, second):
        assert pool.starts == [] and not launched
        assert first() is not second()
    assert len(pool.starts) == len(launched) == 2


# Turns


class Sleeping(ProcessEngine):
    """An engine whose process sleeps for a long time: the sum of the two numbers that follow."""

    def _launch(self, model, folder, environment):
        self.child = Child(["sleep"], environment, folder)

    def _await_ready(self, on_wait):
        return {}


@pytest.fixture
def sleeping():
    engine = Sleeping(replace(stand_in(), tensor_parallel_size=2))
    yield engine
    engine.child.kill()


def test_a_start_is_not_over_until_all_processes_wait_and_waiting_does_not_count(sleeping, monkeypatch):
    monkeypatch.setattr(server, "START_S", 0.1)
    first, second = (sleeping.child.folder / f"turn.{n}" for n in (1, 2))
    first.touch()
    heard = []
    with pytest.raises(EngineFailed, match=" 0 s"):
        sleeping.await_turn(heard.append)
    assert sleeping.child.log in heard
    sleeping.child.keep_log = False
    second.touch()
    sleeping.await_turn()
    for file, ago in ((first, 600), (second, 400)):
        os.utime(file, (time.time() - ago,) * 2)
    assert not (sleeping.child.folder / "turn").exists() and not sleeping.ready
    sleeping._began = time.monotonic() - 1000
    sleeping.start()
    assert (sleeping.child.folder / "turn").exists() and sleeping.resolved.ready_s == pytest.approx(600, abs=20)


def test_a_turn_that_comes_before_it_is_awaited_costs_nothing(sleeping):
    sleeping._began = time.monotonic() - 1000
    assert sleeping.start().resolved.ready_s == pytest.approx(1000, abs=20)


def test_nobody_waits_for_the_import_of_one_that_has_ended(sleeping):
    sleeping.child.process.kill()
    sleeping.await_turn()
    assert sleeping.child.process.poll() is not None
