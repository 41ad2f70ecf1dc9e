"""Which sensors the options of telemetry choose, and how often they are read."""

from __future__ import annotations

import pytest

from pytest_slmserve.schema.errors import BadUsage, SensorFailed
from pytest_slmserve.telemetry import sampler
from pytest_slmserve.telemetry.host import Reading
from pytest_slmserve.telemetry.sampler import open_sampler

UUID = "GPU-0000"


class Named:
    def __init__(self, name):
        self.name, self.closed = name, False

    def read(self, now_s):
        return Reading()

    def close(self):
        self.closed = True


@pytest.fixture
def there(monkeypatch):
    """Sets which sources there are: `there(nvml="nvml-gpm", dcgm=True)`."""

    def found(name):
        if name is None:
            raise SensorFailed("it is not there")
        return Named(name)

    def plant(nvml=None, dcgm=None):
        monkeypatch.setattr(sampler, "HostSource", lambda: Named("host"))
        monkeypatch.setattr(sampler, "open_speed_probe", lambda device: Named("host-speed probe"))
        monkeypatch.setattr(
            sampler, "open_nvml", lambda device, profile: found(nvml if profile or not nvml else "nvml")
        )
        monkeypatch.setattr(sampler, "open_dcgm", lambda device, interval_s, address="": found(dcgm))

    return plant


@pytest.mark.parametrize(
    ("choice", "nvml", "dcgm", "names", "note"),
    [
        ("auto", "nvml-gpm", "dcgm", "nvml-gpm + host", None),
        ("auto", "nvml", "dcgm", "dcgm + nvml + host", None),
        ("auto", "nvml", None, "nvml + host", "no profiling counters"),
        ("auto", None, None, "host", "it is not there"),
        ("gpm", "nvml-gpm", None, "nvml-gpm + host", None),
        ("nvml", "nvml-gpm", None, "nvml + host", None),
        ("dcgm", None, "dcgm", "dcgm + host", None),
        ("dcgm=node7:5555", None, "dcgm", "dcgm + host", None),
        ("host", "nvml-gpm", None, "host", None),
    ],
)
def test_what_is_read_beside_a_gpu(there, choice, nvml, dcgm, names, note):
    there(nvml, dcgm)
    sampler, notes = open_sampler(choice, UUID, 0.25)
    assert sampler.name == f"{names} + host-speed probe"
    assert (note in " ".join(notes)) if note else notes == []


@pytest.mark.parametrize("choice", ["gpm", "nvml", "dcgm"])
def test_what_was_asked_for_and_is_not_there_is_an_error(there, choice):
    there()
    with pytest.raises(SensorFailed, match="it is not there"):
        open_sampler(choice, UUID, 0.25)


def test_a_gpu_without_the_counters_is_no_gpm(there):
    there(nvml="nvml")
    with pytest.raises(SensorFailed, match="GPM"):
        open_sampler("gpm", UUID, 0.25)


@pytest.mark.parametrize("choice", ["gpm", "nvml", "dcgm", "http://localhost:9400/metrics"])
def test_a_cpu_has_no_sensors_of_a_gpu(there, choice):
    there("nvml-gpm", "dcgm")
    with pytest.raises(BadUsage, match=choice.partition(":")[0]):
        open_sampler(choice, "cpu", 0.25)


@pytest.mark.parametrize("choice", ["auto", "host"])
def test_beside_a_cpu_the_host_and_its_probe_are_read(there, choice):
    there("nvml-gpm", "dcgm")
    assert open_sampler(choice, "cpu", 0.25)[0].name == "host + host-speed probe"


def test_off_reads_nothing(there):
    there("nvml-gpm")
    assert open_sampler("off", UUID, 0.25) == (None, [])


@pytest.mark.parametrize("interval", [0.1, 0.25, 2.0])
def test_the_sampler_keeps_it(interval):
    sampler, _ = open_sampler("host", "cpu", interval)
    assert sampler.interval_s == interval
    sampler.close()


def test_one_too_short_for_the_counters_is_refused_before_anything_is_opened():
    with pytest.raises(BadUsage, match="0.05 s.* 0.1 s"):
        open_sampler("gpm", "GPU-not-there", 0.05)
