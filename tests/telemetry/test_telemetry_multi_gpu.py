"""Several GPUs as one source: what each says stands apart, in the record and after it."""

from dataclasses import replace

import pytest
from strategies import measurement
from test_sampler import Planted, recorded

from pytest_slmserve.archive.store import Archive, read
from pytest_slmserve.schema.errors import SensorFailed
from pytest_slmserve.schema.sensors import HOST_CORES, POWER, SM_ACTIVE
from pytest_slmserve.telemetry import source
from pytest_slmserve.telemetry.base import Reading
from pytest_slmserve.telemetry.source import SeveralGpus, open_sampler


def gpu(watts, name="nvml", **reading):
    return Planted([Reading({POWER: watts}, **reading)], name=name)


def test_each_gpu_has_columns_of_its_own_and_the_host_beside_them():
    both = SeveralGpus([[gpu(300.0)], [gpu(200.0)]])
    host = Planted([Reading({HOST_CORES: 1.5})], name="host")
    found = recorded([both, host], [100.0, 100.25]).telemetry(began_s=100.0)
    assert found.gpus == ({POWER: (300.0, 300.0)}, {POWER: (200.0, 200.0)})
    assert found.columns == {HOST_CORES: (1.5, 1.5)}
    assert found.sources == ("2 x nvml", "host")


def test_an_archive_keeps_them_apart(tmp_path):
    both = SeveralGpus([[gpu(300.0)], [gpu(200.0)]])
    telemetry = recorded([both], [100.0, 100.25]).telemetry(began_s=100.0)
    made = measurement()
    with Archive.open(tmp_path / "a.jsonl") as archive:
        archive.add(replace(made, run=replace(made.run, telemetry=telemetry)))
    (again,) = read(tmp_path / "a.jsonl").measurements
    assert again.run.telemetry == telemetry


def test_several_sources_of_a_gpu_are_merged_and_gaps_name_it():
    counters = Planted([Reading({SM_ACTIVE: None}, 0.25, ("1002: too early",))], name="dcgm")
    reading = SeveralGpus([[gpu(300.0)], [counters, gpu(200.0)]]).read(0.0)
    assert reading.gpus == ({POWER: 300.0}, {SM_ACTIVE: None, POWER: 200.0})
    assert reading.missing == ("GPU 1: 1002: too early",)


def test_one_that_fails_ends_them_all():
    lost = Planted([SensorFailed("the GPU does not answer any more")])
    found = recorded([SeveralGpus([[gpu(300.0)], [lost]])], [100.0, 100.25]).telemetry(began_s=100.0)
    assert found.gpus == () and len(found.notes) == 1 and "does not answer" in found.notes[0]


def test_all_are_closed():
    first, second = gpu(300.0), gpu(200.0)
    SeveralGpus([[first], [second]]).close()
    assert first.closed == second.closed == 1


@pytest.fixture
def sources(monkeypatch):
    """By GPU: what its source says, None for one without."""
    there, opened = {"GPU-a": 300.0, "GPU-b": 200.0, "GPU-c": None}, []

    def open_one(device, profile):
        if there[device] is None:
            raise SensorFailed("it is not there")
        opened.append(gpu(there[device], name="nvml-gpm"))
        return opened[-1]

    monkeypatch.setattr(source, "open_nvml", open_one)
    monkeypatch.setattr(source, "open_dcgm", lambda *_, **__: (_ for _ in ()).throw(SensorFailed("no DCGM")))
    monkeypatch.setattr(source, "HostSource", lambda: Planted(name="host"))
    monkeypatch.setattr(source, "open_speed_probe", lambda device: Planted(name="host-speed probe"))
    return opened


def test_the_gpus_of_an_engine_are_opened_together(sources):
    sampler, notes = open_sampler("auto", "GPU-a", 0.25, ["GPU-b"])
    assert (sampler.name, notes) == ("2 x nvml-gpm + host + host-speed probe", [])
    sampler.close()
    assert [source.closed for source in sources] == [1, 1]


def test_a_part_of_the_gpus_is_not_taken_for_the_whole(sources):
    sampler, notes = open_sampler("auto", "GPU-a", 0.25, ["GPU-c"])
    assert sampler.name == "host + host-speed probe" and sources[0].closed == 1
    assert any("not every GPU of the engine" in note for note in notes)
