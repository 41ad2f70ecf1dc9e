"""Each check of a planted host."""

from __future__ import annotations

import os

import pytest
from planted import put

from pytest_slmserve.commands import doctor as host_checks
from pytest_slmserve.commands.doctor import Finding, Places, lines
from pytest_slmserve.schema.sensors import CPU_PRESSURE, HOST_CORES, OWN_CORES, STOLEN_CORES
from pytest_slmserve.schema.specs import GIB
from pytest_slmserve.telemetry.base import Reading


@pytest.mark.parametrize(
    ("usable", "total", "state", "words"),
    [(8, 8, "ok", "8 of 8, 2 per core"), (2, 8, "warning", "the affinity"), (2, 2, "warning", "share them")],
)
def test_cores(places, usable, total, state, words):
    put(places.sys / "devices/system/cpu/cpu0/topology/thread_siblings_list", "0,4\n")
    found = host_checks.of_cores(places, usable, total)
    assert found.state == state and words in lines([found])[0]


def test_a_quota_below_the_cores_is_a_warning(places):
    put(places.proc / "self/cgroup", "0::/a\n")
    put(places.sys / "fs/cgroup/a/cpu.max", "600000 100000\n")
    assert host_checks.of_cores(places, 4, 4).state == "ok"
    found = host_checks.of_cores(places, 16, 16)
    assert found.state == "warning" and "a quota of 6" in found.found


@pytest.mark.parametrize(("text", "threads"), [("0\n", 1), ("0-1\n", 2), ("0,64\n", 2), ("0-1,64-65\n", 4), ("", None)])
def test_threads_per_core(places, text, threads):
    put(places.sys / "devices/system/cpu/cpu0/topology/thread_siblings_list", text)
    assert host_checks._threads_per_core(places.sys) == threads


@pytest.mark.parametrize(
    ("values", "steal", "work"),
    [
        ({HOST_CORES: 0.3, OWN_CORES: 0.1, STOLEN_CORES: 0.0, CPU_PRESSURE: 0.25}, "ok", "ok"),
        ({HOST_CORES: 1.5, OWN_CORES: 0.1, STOLEN_CORES: 0.0}, "ok", "warning"),
        ({HOST_CORES: 1.5, OWN_CORES: 1.5, STOLEN_CORES: 0.5}, "warning", "ok"),
        ({OWN_CORES: 0.1}, "ok", "ok"),
        ({HOST_CORES: None, STOLEN_CORES: None}, "ok", "ok"),
    ],
)
def test_a_second_tells_of_others(values, steal, work):
    class Source:
        name, times, closed = "planted", [], False

        def read(self, now_s):
            self.times.append(now_s)
            return Reading(values if len(self.times) > 1 else dict.fromkeys(values))

        def close(self):
            self.closed = True

    source, clock, slept = Source(), iter([5.0, 6.0]), []
    found = host_checks.of_a_second(source, 4, lambda: next(clock), slept.append)
    assert [finding.state for finding in found] == [steal, work]
    assert (source.times, slept, source.closed) == ([5.0, 6.0], [1.0], True)
    if CPU_PRESSURE in values:
        assert "0.20 cores over a second, a task waited for a CPU 25% of the time" in found[1].found


@pytest.mark.parametrize(
    ("times", "state", "words"),
    [
        ([3.6e-3] * 8 + [3.9e-3] * 2, "ok", "3.6 to 3.9 ms"),
        ([3.6e-3] * 6 + [7.3e-3] * 4, "warning", "3.6 to 7.3 ms"),
        ([], "ok", "cannot choose"),
    ],
)
def test_cores_of_two_speeds_are_a_warning(times, state, words):
    found = host_checks.of_core_speeds(lambda: times)
    assert found.state == state and words in found.found


def test_the_speed_of_each_core_is_asked_for_and_the_cores_allowed_stay():
    before = os.sched_getaffinity(0)
    times = host_checks.pieces_on_each_core()
    assert len(times) == host_checks.PIECES * min(len(before), host_checks.MOST_CORES) and min(times) > 0
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("told", "cores", "state", "words"),
    [
        ("1\n", 2, "warning", "the kernel shares"),
        ("1\n", 16, "ok", "the kernel shares"),
        ("0\n", 2, "ok", "does not share"),
    ],
)
def test_cores_that_are_shared_by_session(places, told, cores, state, words):
    assert host_checks.of_sessions(places, cores).state == "ok", "a kernel without such groups"
    put(places.proc / "sys/kernel/sched_autogroup_enabled", told)
    found = host_checks.of_sessions(places, cores)
    assert found.state == state and words in found.found
    assert ("kernel.sched_autogroup_enabled=0" in lines([found])[0]) is (state == "warning")


def test_governors(places):
    assert host_checks.of_governor(places).found == "not readable, as in most virtual machines"
    cpufreq = places.sys / "devices/system/cpu/cpufreq"
    put(cpufreq / "policy0/scaling_governor", "performance\n")
    assert host_checks.of_governor(places) == Finding("governor", "ok", "performance")
    put(cpufreq / "policy1/scaling_governor", "powersave\n")
    assert host_checks.of_governor(places).state == "warning"
    assert host_checks.of_governor(places).found == "performance, powersave"


@pytest.mark.parametrize(("free_gib", "state"), [(20, "ok"), (4, "warning"), (1, "problem")])
def test_memory(places, free_gib, state):
    put(places.proc / "meminfo", f"MemTotal: {32 << 20} kB\nMemFree: 1 kB\nMemAvailable: {free_gib << 20} kB\n")
    found = host_checks.of_memory(places)
    assert (found.state, found.found) == (state, f"{free_gib}.0 GiB of 32.0 GiB free")
    assert bool(found.advice) == (state != "ok")


@pytest.mark.parametrize("text", ["", "MemTotal: 5 kB\n", "MemAvailable:\nMemTotal: 1 kB\n", "nonsense\n"])
def test_memory_that_is_not_told(places, text):
    put(places.proc / "meminfo", text)
    assert host_checks.of_memory(places) == Finding("memory", "ok", "the host does not say")


def test_shared_memory(places):
    assert host_checks.of_shared_memory(places).state == "warning"
    places.shm.mkdir()
    assert host_checks.of_shared_memory(places, lambda path: 64 << 20).state == "warning"
    assert host_checks.of_shared_memory(places, lambda path: 8 * GIB).found == "8.0 GiB free"


@pytest.mark.parametrize(
    ("env", "where"),
    [({}, "home/.cache/vllm"), ({"XDG_CACHE_HOME": "xdg"}, "xdg/vllm"), ({"VLLM_CACHE_ROOT": "root"}, "root")],
)
def test_the_compile_cache(places, tmp_path, env, where):
    given = Places(home=places.home, env={name: str(tmp_path / value) for name, value in env.items()})
    found = host_checks.of_cache(given, lambda path: 100 * GIB)
    assert (found.state, found.found) == ("ok", f"nothing compiled yet in {tmp_path / where}, 100.0 GiB free")
    (tmp_path / where / "torch_compile_cache").mkdir(parents=True)
    assert host_checks.of_cache(given, lambda path: GIB).state == "warning"
    assert host_checks.of_cache(given, lambda path: 0).state == "problem"
    assert host_checks.of_cache(given).found.startswith(f"there is one in {tmp_path / where}, ")


def test_free_space_is_that_of_the_nearest_folder_that_exists(tmp_path):
    assert host_checks.free_bytes(tmp_path / "not/there") > 0
