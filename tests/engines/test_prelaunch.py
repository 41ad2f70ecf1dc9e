"""Several launched at once, which then have the device one after the other."""

import os
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from interfaces import SIMULATED, stand_in
from processes import gone

from pytest_slmserve.engines.launch.child_process import Child
from pytest_slmserve.engines.launch.vllm_arguments import StartTurn
from pytest_slmserve.engines.pool import Pool, abreast, hold
from pytest_slmserve.engines.server import ServerEngine
from pytest_slmserve.schema.errors import EngineFailed

OTHER = stand_in(step_s=0.003)


@pytest.fixture
def held():
    """What was launched to wait, in that order."""
    return []


@pytest.fixture
def pool(held):
    def launch(spec, extra_env):
        if engine := hold(spec, extra_env):
            held.append(engine)
        return engine

    with closing(Pool(hold_engine=launch)) as pool:
        yield pool


def pids(engines):
    return [engine.child.process.pid for engine in engines]


def log(engine):
    return engine.child.log.read_text()


@pytest.mark.alone
@pytest.mark.parametrize("interface", ["engine", "server"])
def test_all_import_first_and_each_starts_when_the_one_before_it_has_ended(pool, held, interface):
    specs = [replace(stand_in(), interface=interface), replace(OTHER, interface=interface)]
    with abreast(pool, [(spec, {}) for spec in specs]) as (first, second):
        assert len(held) == 2 and all("all is imported" in log(engine) for engine in held)
        assert not any("starts" in log(engine) for engine in held), "nobody has touched the device"
        assert first() is held[0] and held[0].ready and "starts" not in log(held[1])
        time.sleep(0.5)
        assert second() is held[1] and held[1].ready and pool.current == specs[1]
        assert gone(pids(held)[0])
        assert held[1].resolved.ready_s < held[0].resolved.ready_s + 0.4, "waiting is no part of a start"
    assert all(map(gone, pids(held))) and pool.current is None and pool.starts == specs
    assert isinstance(held[0], ServerEngine) == (interface == "server")


def test_two_of_one_specification_are_two_launches(pool, held):
    with abreast(pool, [(stand_in(), {}), (stand_in(), {})]) as starts:
        assert len({start().launch for start in starts}) == 2


def test_variables_are_of_one_launch_alone(pool, held):
    with abreast(pool, [(stand_in(), {"MINE": "1"}), (stand_in(), {"MINE": "2"})]):
        found = [Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in pids(held)]
    assert "MINE=1" in found[0] and "MINE=2" in found[1]


def test_those_whose_turn_does_not_come_end_too(pool, held):
    with pytest.raises(KeyboardInterrupt), abreast(pool, [(stand_in(), {}), (OTHER, {})]) as (first, _):
        first()
        raise KeyboardInterrupt
    assert len(held) == 2 and all(map(gone, pids(held)))


def test_one_that_cannot_be_launched_stops_those_before_it(pool, held):
    nowhere = replace(OTHER, python="/no/python")
    with pytest.raises(FileNotFoundError), abreast(pool, [(stand_in(), {}), (nowhere, {})]):
        pytest.fail("both were launched")
    assert len(held) == 1 and gone(pids(held)[0])


def test_one_that_ends_before_its_turn_says_why_when_it_comes(pool, held):
    with abreast(pool, [(stand_in(), {}), (stand_in(unheard_of=1), {})]) as (first, second):
        assert first().ready
        with pytest.raises(EngineFailed, match="did not start: TypeError: .*unheard_of"):
            second()
    assert all(map(gone, pids(held)))


def test_one_that_cannot_wait_is_launched_when_its_turn_comes(pool, held):
    other = replace(SIMULATED, model="opt-125m", model_facts=None)
    with abreast(pool, [(SIMULATED, {}), (other, {})]) as (
        first,
        second,
    ):
        assert pool.starts == [] and not held
        assert first().spec == SIMULATED and second().spec.model == "opt-125m"
    assert len(pool.starts) == 2


# Turns


@pytest.fixture
def child(tmp_path):
    (tmp_path / "engine").mkdir()
    child = Child(["sleep"], dict(os.environ), tmp_path / "engine")  # two numbers follow: it sleeps for their sum
    yield child
    child.kill()


def test_a_start_is_not_over_until_all_processes_wait_and_waiting_does_not_count(tmp_path, child):
    turn = StartTurn(tmp_path, processes=2, held=True)
    (tmp_path / "turn.1").touch()
    with pytest.raises(EngineFailed, match=r"had not imported vLLM after 0 s"):
        turn.await_import(child, within_s=0.1)
    (tmp_path / "turn.2").touch()
    turn.await_import(child, within_s=0.1)
    os.utime(tmp_path / "turn.1", (0, 0))
    os.utime(tmp_path / "turn.2", (time.time() - 0.05, time.time() - 0.05))
    assert not (tmp_path / "turn").exists()
    before = turn.start_s
    turn.give()
    assert (tmp_path / "turn").exists() and before - 0.2 < turn.start_s < before - 0.04


def test_a_turn_that_comes_before_it_is_awaited_costs_nothing(tmp_path):
    turn = StartTurn(tmp_path, processes=1, held=True)
    turn.give()
    time.sleep(0.05)
    assert 0.05 <= turn.start_s < 5


def test_who_is_not_held_waits_for_nothing(tmp_path):
    assert StartTurn(tmp_path, processes=1, held=False).extra_env == {}


def test_nobody_waits_for_the_import_of_one_that_has_ended(tmp_path, child):
    child.process.kill()
    StartTurn(tmp_path, processes=1, held=True).await_import(child, within_s=60)
    assert child.process.poll() is not None
